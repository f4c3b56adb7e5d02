"""LS2: batches of unequal size in a window weigh as one batch; the last, incomplete window counts; the rate goes by optimizer steps."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spectrain.config import TrainingConfig
from spectrain.data.rows import Row
from spectrain.heads.losses import Counts, LossResult
from spectrain.target.model import Target
from spectrain.training import loop
from spectrain.training.schedule import learning_rate

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
SGD = TrainingConfig(epochs=1, ttt_steps=1, tokens_per_step=1, lr=0.1, warmup=0.0, schedule="constant", max_grad_norm=1e9)
SUMMED = {1: 3.0, 3: 3.0, 4: 4.0}  # loss of a batch by its number of counted rows


class OneWeight(nn.Module):
    """A head of one weight; the loss of a batch is given by a table."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("target_ids", torch.arange(100))
        self.register_buffer("t2d", torch.ones(100, dtype=torch.bool))

    def outputs(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [self.w]


def train_one_weight(
    samples: Any, target: Target, out: Path, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch, summed: dict[int, float] | None
) -> tuple[float, list[dict[str, Any]]]:
    """The weight after a run with SGD, and what was reported of each step. summed None: every counted row has gradient 1."""

    def loss(outputs: list[Tensor], labels: Any, *rest: Any) -> LossResult:
        rows = labels.counts_KR[0].sum().float()
        value = rows if summed is None else rows.new_tensor(sum(summed[n] for n in batch_sizes(labels)))
        total = value * (1 + outputs[0]) if len(labels.number_R) else outputs[0] * 0
        counts = replace(Counts.zeros(1, rows.device), loss_K=total.detach()[None], rows_K=rows[None])
        return LossResult(total=total, counts=counts, weight=rows, rank_KR=torch.zeros(1, len(labels.number_R), dtype=torch.long))

    def batch_sizes(labels: Any) -> list[int]:
        """Counted rows of each sample: runs of consecutive supervised tokens."""
        number_R = labels.number_R[labels.counts_KR[0]]
        breaks = [0, *((number_R.diff() > 1).nonzero()[:, 0] + 1).tolist(), len(number_R)]
        return [b - a for a, b in zip(breaks[:-1], breaks[1:], strict=True) if b > a]

    monkeypatch.setattr(loop, "unrolled_loss", loss)
    monkeypatch.setattr(loop, "make_optimizer", lambda head, c, *_: torch.optim.SGD([{"params": [head.w], "rate": "lr"}], lr=c.lr))
    seen = BY_HAND["watch_steps"](monkeypatch)
    head = OneWeight()
    BY_HAND["run"](head, samples, target, out, config)
    return head.w.item(), seen


def rows_of(*counted: int) -> list[Row]:
    """Rows with so many counted tokens: the first supervised token of a line is in hand when drafting starts."""
    return [BY_HAND["row_of"]([5, 6, 7], list(range(10, 11 + n)), name=str(i)) for i, n in enumerate(counted)]


@pytest.mark.parametrize(("per_batch", "accumulation"), [(1, 3), (1, 4), (10**6, 1), (5, 3)])
def test_mean_of_means(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_batch: int, accumulation: int) -> None:
    """1, 3 and 4 tokens with summed losses 3, 3 and 4: one step with loss 10/8 (the mean of the means is 1.667)."""
    samples = BY_HAND["Samples"].of(target, rows_of(1, 3, 4))
    config = BY_HAND["changed"](SGD, tokens_per_step=per_batch, accumulation=accumulation)
    w, seen = train_one_weight(samples, target, tmp_path, config, monkeypatch, SUMMED)
    assert len(seen) == 1 and seen[0]["loss"] == pytest.approx(1.25, abs=1e-6)
    assert w == pytest.approx(-0.1 * 1.25, abs=1e-6)


def test_last_window_is_lost(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten batches in windows of four: three steps, three rates, and a constant gradient of 1 moves the weight to -0.3."""
    samples = BY_HAND["Samples"].of(target, rows_of(*[3] * 10))
    w, seen = train_one_weight(samples, target, tmp_path, BY_HAND["changed"](SGD, accumulation=4), monkeypatch, None)
    assert [s["step"] for s in seen] == [1, 2, 3] and w == pytest.approx(-0.3, abs=1e-6)
    assert [int(s["counts"].rows_K[0]) for s in seen] == [12, 12, 6]
    assert [s["total_tokens"] for s in seen] == [28, 28, 14]


def test_rate_goes_by_batches(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, seen = BY_HAND["Samples"].of(target, rows_of(*[3] * 10)), BY_HAND["watch_steps"](monkeypatch)
    config = TrainingConfig(epochs=4, ttt_steps=1, tokens_per_step=1, accumulation=4, warmup=0.3)
    BY_HAND["run"](BY_HAND["fresh"](target, samples), samples, target, tmp_path, config)
    expected = [config.lr * learning_rate(step, 12, config) for step in range(12)]
    assert [s["lr"] for s in seen] == pytest.approx(expected, rel=1e-12)
    assert expected[3] == config.lr and config.lr * config.final_lr < expected[-1] < 0.1 * config.lr
    groups = BY_HAND["checkpoint"](tmp_path)["states"]["optimizer"]["param_groups"]
    assert {group["lr"] for group in groups} == {expected[-1]}


@pytest.mark.parametrize("changes", [{}, {"loss": {"weighting": "rows", "decay": 0.8}}, {"optimizer": "muon", "muon_lr": 1e-3, "ema": 0.5}])
def test_accumulated_batches_learn_otherwise_than_one(target: Target, tmp_path: Path, changes: dict[str, Any]) -> None:
    """A real head: batches of single rows of unequal length equal one batch of all, also in a window that stays half empty."""
    rows = BY_HAND["random_rows"](4)
    cut = [replace(row, ids_L=row.ids_L[:n], mask_L=row.mask_L[:n]) for row, n in zip(rows, (20, 5, 8, 7), strict=True)]
    samples = BY_HAND["Samples"].of(target, cut)
    config = BY_HAND["changed"](TrainingConfig(epochs=2, lr=1e-3, warmup=0.0), **changes)
    found = []
    for name, some in (("one", {"tokens_per_step": 10**6}), ("many", {"accumulation": 4}), ("half empty", {"accumulation": 7})):
        head = BY_HAND["fresh"](target, samples)
        result = BY_HAND["run"](head, samples, target, tmp_path / name, BY_HAND["changed"](config, **{"tokens_per_step": 1, **some}))
        found.append((result, BY_HAND["weights"](head)))
    for result, weights in found[1:]:
        assert result.steps == found[0][0].steps == 2
        torch.testing.assert_close([p["loss"] for p in result.history], [p["loss"] for p in found[0][0].history], atol=1e-6, rtol=1e-6)
        for name, tensor in found[0][1].items():
            torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=1e-4)


def test_gradient_of_uneven_windows_is_another(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step's update by SGD, of windows of 1 to 7 batches, is that of one big batch, within 1e-6 of the largest entry."""
    monkeypatch.setattr(
        loop, "make_optimizer", lambda head, config, *_: torch.optim.SGD([{"params": [*head.parameters()], "rate": "lr"}], lr=config.lr)
    )
    samples, found = BY_HAND["Samples"].of(target, rows_of(17, 2, 5, 1)), []
    for tokens, accumulation in ((10**6, 1), (1, 4), (9, 3), (1, 7)):
        head = BY_HAND["fresh"](target, samples)
        before = BY_HAND["weights"](head)
        config = BY_HAND["changed"](SGD, ttt_steps=3, tokens_per_step=tokens, accumulation=accumulation, lr=1.0)
        assert BY_HAND["run"](head, samples, target, tmp_path / f"{tokens} {accumulation}", config).steps == 1
        found.append({name: p.detach() - before[name] for name, p in head.named_parameters()})
    for update in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(update[name], tensor, atol=1e-6 * max(1.0, float(tensor.abs().max())), rtol=0)
