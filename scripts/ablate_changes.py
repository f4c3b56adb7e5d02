"""What no setting of a recipe makes, for the arms of eval/ablations.yaml: other masks, other starts, other divisors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from spectrain.config import Recipe
from spectrain.data.batches import Batch, Sample, Samples, split
from spectrain.data.codes import Codes
from spectrain.target.model import Target
from spectrain.training.loop import Work
from spectrain.training.start import final_norm, last_layer

DEVIATION = 0.02  # of random weights


class Changed:
    """Samples of which every batch is changed."""

    def __init__(self, samples: Samples, change: Callable[[Batch], Batch]) -> None:
        self._samples, self._change, self.rows = samples, change, samples.rows

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> Sample:
        return split(self.batch([i]), [len(self.rows[i])])[0]

    def batch(self, numbers: Sequence[int]) -> Batch:
        return self._change(self._samples.batch(numbers))


def first_draft_lost(batch: Batch) -> Batch:
    """Answers that begin a token later, which is what a mask read at token i leaves of answers that end their row: the row before an
    answer's first token no longer counts."""
    before_BL = torch.nn.functional.pad(batch.mask_BL, (1, 0))[:, :-1]
    mask_BL = batch.mask_BL * before_BL
    kept_P = mask_BL.flatten()[batch.mask_BL.flatten().bool()].bool()
    return replace(batch, mask_BL=mask_BL, last=batch.last[kept_P], best_P=batch.best_P[kept_P], lse_P=batch.lse_P[kept_P])


def some_states(batch: Batch, places: Sequence[int], *, of: int) -> Batch:
    """Some of the `of` states of a batch, by their place."""
    all_of = batch.states
    codes = all_of.codes.unflatten(-1, (of, -1))[..., places, :].flatten(-2)
    parts = (None if t is None else t[..., places, :] for t in (all_of.place, all_of.kept))
    return replace(batch, states=Codes(codes, None if all_of.scale is None else all_of.scale[..., places], *parts))


@torch.no_grad()
def random_output(head: Any, target: Target, recipe: Recipe) -> None:
    """An output layer that starts at random and is trained."""
    generator = torch.Generator().manual_seed(recipe.training.seed)
    head.lm_head.weight.copy_(torch.randn(head.lm_head.weight.shape, generator=generator) * DEVIATION)


def mean_of_last_two(head: Any, target: Target, recipe: Recipe) -> None:
    """A draft layer that starts at the mean of the target's last two."""
    n = target.num_layers - 1
    below = SimpleNamespace(
        layers=target.layers[:-1], num_layers=n, config=target.config, embedding_VW=target.embedding_VW, placement=target.placement,
        name=target.name, layer_weights=target.layer_weights,
    )  # fmt: skip
    upper, lower = last_layer(target)[0], last_layer(below)[0]  # type: ignore[arg-type]
    mean = {name: (upper[name].float() + lower[name].float()) / 2 for name in upper}
    head.start_from(
        layer=mean, norm=final_norm(target), output_VW=target.output_VW, target_ids=head.target_ids,
        train_output=recipe.head.output == "trained", seed=recipe.training.seed,
    )  # fmt: skip


def all_positions(work: Work) -> torch.Tensor:
    """What the loss of a batch is divided by when its mean is taken over all positions, padding among them."""
    return work.counts_KR[0].any() * work.counts_KR.new_tensor(work.batch.ids_BL.numel(), dtype=torch.float32)


HEADS = {"random_output": random_output, "mean_of_last_two": mean_of_last_two}
KEPT = {"lowest_loss": lambda point: -point["loss"], "highest_tau": lambda point: point["tau"]}  # which point's weights count
CHANGES = {*HEADS, *KEPT, "first_draft_lost", "all_positions"}
