"""Rows with their states in memory, taken from a target's own forward pass in float32, as a feature store gives them; and a run on them.

Tests load it with runpy, since tests are no package.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.batches import Batch, Sample, collate
from spectrain.data.codes import Codes
from spectrain.data.rows import Row
from spectrain.target.model import Target
from spectrain.training import loop
from spectrain.training.setup import new_head

LAYERS = (1, 2)


def sample_of(row: Row, target: Target, layers: Sequence[int] = LAYERS) -> Sample:
    ids_1L, at_M = torch.tensor(row.ids_L.tolist())[None], torch.tensor(row.mask_L.tolist()).nonzero()[:, 0]
    out = target.forward(ids_1L, positions_BN=torch.arange(len(row))[None], mask=None, cache=None, layer_ids=layers)
    logits_MV = out.logits_BKV[0, at_M]
    return Sample(
        ids_L=ids_1L[0], mask_L=torch.tensor(row.mask_L.tolist()), states=Codes(out.states_BNF[0]), last=Codes(out.last_BKW[0, at_M]),
        best_M=logits_MV.argmax(-1), lse_M=logits_MV.logsumexp(-1),
    )  # fmt: skip


class Samples:
    def __init__(self, rows: Sequence[Row], samples: Sequence[Sample]) -> None:
        self.rows, self.samples = list(rows), list(samples)

    @classmethod
    def of(cls, target: Target, rows: Sequence[Row], layers: Sequence[int] = LAYERS) -> "Samples":
        return cls(rows, [sample_of(row, target, layers) for row in rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Sample:
        return self.samples[i]

    def batch(self, numbers: Sequence[int]) -> Batch:
        return collate([self[i] for i in numbers])


def row_of(prompt: Sequence[int], answer: Sequence[int], name: str = "", domain: str = "d") -> Row:
    return Row(name, domain, [*prompt, *answer], [0] * len(prompt) + [1] * len(answer))


def random_rows(count: int, seed: int = 0, vocab: int = 100) -> list[Row]:
    """Rows of 8 to 20 random ids, the first three of them the prompt."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 21, (count,), generator=g).tolist()
    ids = [torch.randint(0, vocab, (n,), generator=g).tolist() for n in lengths]
    return [row_of(x[:3], x[3:], name=str(i)) for i, x in enumerate(ids)]


def fresh(target: Target, samples: Samples, **changes: Any) -> Any:
    """A new head with random weights, the same at every call."""
    config = HeadConfig(**{"layer_ids": LAYERS, "draft_vocab_size": 60, "init_layer": "random", **changes})
    return new_head(config, target, samples.rows, seed=0)


def changed(config: TrainingConfig, **changes: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({**config.model_dump(), **changes})


def run(head: Any, samples: Samples, target: Target, out: Path, config: TrainingConfig, **changes: Any) -> loop.TrainResult:
    settings = {"save": lambda head, name: None, "accelerator": Accelerator(cpu=True), "identity": {"run": "x"}, **changes}
    return loop.train(head, samples, config, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=out, **settings)


def weights(head: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}


def assert_same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def checkpoint(out: Path, step: int | None = None) -> dict[str, Any]:
    """The checkpoint of a run that `latest` names, or the one of a step."""
    folder = out / "checkpoints"
    name = (folder / "latest").read_text().strip() if step is None else f"step-{step}.pt"
    return torch.load(folder / name, weights_only=True)


def watch_steps(monkeypatch: Any, seen: Callable[..., None] | None = None) -> list[dict[str, Any]]:
    """What the loop reports of each step, as it comes."""
    found: list[dict[str, Any]] = []
    report = loop.Progress.step

    def step(self: Any, **told: Any) -> None:
        found.append({**told, "loss": told["counts"].means()["loss"][0]})
        if seen is not None:
            seen(**told)
        report(self, **told)

    monkeypatch.setattr(loop.Progress, "step", step)
    return found


def stop_after(monkeypatch: Any, steps: int) -> None:
    """The loop is asked to stop after this many steps of its own."""
    left = iter(range(steps - 1, -(10**6), -1))

    def on_any(accelerator: Any, *flags: bool) -> list[bool]:
        return [next(left) == 0, *flags[1:]]

    monkeypatch.setattr(loop, "_on_any", on_any)


def values(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings and lists, with their paths."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from values(value, f"{above}/{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from values(value, f"{above}/{i}")
    else:
        yield above, tree


def assert_same_state(a: Any, b: Any) -> None:
    """Two nested states are the same bit by bit."""
    mine, theirs = dict(values(a)), dict(values(b))
    assert mine.keys() == theirs.keys()
    for path, value in mine.items():
        same = torch.equal(value, theirs[path]) if isinstance(value, torch.Tensor) else value == theirs[path]
        assert same, f"{path}: {value} and {theirs[path]}"
