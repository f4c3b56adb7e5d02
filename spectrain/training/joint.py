"""Head and target trained together (Medusa-2, arXiv 2401.10774 §2.2): the target's side of it.

First the head learns alone, on the states as they were captured. Then the target's adapter (LoRA) joins: states are computed from the ids
of a batch, with gradients, and the head's loss reaches the adapter through them. Labels stay those of the original law, and beside the
head's loss stands the divergence of the adapted law from the original one (self-distillation), on the tokens that the head's first step
counts.

Legend: B rows or lines, L tokens, R counted rows, W target width, V target vocabulary, F width of the states read.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from spectrain.config import LoraConfig, LossConfig
from spectrain.data.batches import Batch
from spectrain.data.codes import Codes
from spectrain.heads.base import LAST, StepOutput
from spectrain.heads.losses import Labels, LossResult, unrolled_loss
from spectrain.target.adapter import save_adapter, with_adapter
from spectrain.target.cache import causal_mask
from spectrain.target.model import Target

KL = LossConfig(mix={"kl": 1.0})


class Backbone(nn.Module):
    """A target with an adapter that is trained. `target` generates with it as it stands; `original` is the same without it.

    joined: whether it takes part by now. weights: those that are trained, a part of checkpoints.
    """

    def __init__(self, original: Target, config: LoraConfig, *, seed: int, checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.original, self.joined = config, original, False
        self.target, self.adapter = with_adapter(original, config, seed=seed)
        self.weights = nn.ParameterList(p for p in self.adapter.parameters() if p.requires_grad)
        self._recomputed = list(self.target.layers) if checkpointing else []
        if checkpointing:
            model = self.target.model  # transformers 5.24 renamed it
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.rows_VW = original.output_VW.detach()[: original.num_ids].float()
        self.train()

    def train(self, mode: bool = True) -> "Backbone":
        """Only the adapter's dropout changes: the target itself is frozen and stays as it answers."""
        super().train(False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Dropout) and ".lora_dropout." in name:
                module.train(mode)
        for layer in self._recomputed:
            layer.training = mode  # transformers recomputes in training mode only; the layer's parts stay in the other
        self.training = mode
        return self

    def join(self, share: float) -> bool:
        """Take part from `config.start` of the run on; true when that begins now."""
        before, self.joined = self.joined, share >= self.config.start
        return self.joined and not before

    def gain(self, place: float, total: int, warmup: float) -> float:
        """Factor of the adapter's rate at `place` of `total` steps: a linear warm-up from where it joins, as long as the run's.

        Adam's first steps are of full size however small a gradient is, and the divergence has none where the law has not moved yet.
        """
        return min(1.0, max(0.0, place - self.config.start * total + 1) / max(1, round(warmup * total)))

    def state(self) -> tuple[int, ...]:
        """What is another value once the adapter has changed."""
        return tuple(p._version for p in self.weights)

    def save(self, folder: Path) -> str:
        """Write the adapter in peft's format; returns its hash."""
        return save_adapter(self.adapter, self.original, folder)

    def forward(self, batch: Batch, layer_ids: Sequence[int]) -> tuple[Batch, Tensor]:
        """The batch with the adapted target's states, and its last states [B, L, W]; both with gradients."""
        L = batch.ids_BL.shape[1]
        place_L = torch.arange(L, device=batch.ids_BL.device)
        positions_BL = place_L.expand_as(batch.ids_BL) if batch.position_BL is None else batch.position_BL
        mask = None if batch.doc_BL is None else self.target.by_kind(partial(_within, batch.doc_BL, place_L))
        ids = (*layer_ids, LAST)
        out = self.target.run(batch.ids_BL, positions_BN=positions_BL, mask=mask, cache=None, layer_ids=ids, logits_to_keep=place_L[:1])
        assert out.states_BNF is not None
        states_BLF, last_BLW = out.states_BNF.float().tensor_split([-self.rows_VW.shape[1]], dim=-1)
        return replace(batch, states=Codes(states_BLF)), last_BLW

    def kept_close(self, found: LossResult, last_RW: Tensor, labels: Labels) -> LossResult:
        """The head's loss with the divergence of the adapted law from the original one, on the rows of the head's first step.

        last_RW: the adapted target's last states at the tokens in hand, whose laws answer what the head's first step answers.
        """
        original = replace(
            labels, rows_VdW=self.rows_VW, target_ids=torch.arange(len(self.rows_VW), device=last_RW.device),
            counts_KR=labels.counts_KR[:1],
        )  # fmt: skip
        with torch.autocast(last_RW.device.type, enabled=False):
            apart = unrolled_loss([StepOutput(ahead=1, hidden_RH=last_RW.float(), output_VdH=self.rows_VW)], original, KL)
        return found._replace(total=found.total + self.config.weight * apart.total)


def _within(doc_BL: Tensor, place_L: Tensor, window: int | None) -> Tensor:
    """Mask [B, 1, L, L] of lines that several documents share: each sees itself alone. Positions of a document follow one another."""
    return causal_mask(place_L[None], place_L, window) & (doc_BL[:, None, :, None] == doc_BL[:, None, None, :])
