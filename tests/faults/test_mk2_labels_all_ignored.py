"""MK2: a batch, or a step, in which no row counts has loss 0, zero gradients, and no NaN, even where its hidden states are NaN."""

import pytest
import torch

from spectrain.config import LossConfig
from spectrain.heads.base import StepOutput
from spectrain.heads.losses import Labels, unrolled_loss

MIX = {"soft_ce": 1.0, "lk_alpha": 1.0, "jsd": 1.0, "top_k": 1.0, "smooth_l1": 1.0}


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("weighting", ["tokens", "reach"])
@pytest.mark.parametrize("counted", [0, 1])
def test_nothing_to_learn_gives_nan(rows: int, weighting: str, counted: int) -> None:
    """counted: rows that count at step 0; none does at step 1, and those that do not count hold NaN."""
    g = torch.Generator().manual_seed(0)
    counts = torch.zeros(2, rows, dtype=torch.bool)
    counts[0, :counted] = True
    hidden = [torch.randn(rows, 4, generator=g) for _ in range(2)]
    feature = [torch.randn(rows, 3, generator=g) for _ in range(2)]
    for k in range(2):
        hidden[k][~counts[k]], feature[k][~counts[k]] = float("nan"), float("inf")
    output = torch.randn(6, 4, generator=g).requires_grad_()
    labels = Labels(
        last_PW=torch.randn(rows, 3, generator=g), lse_P=torch.full((rows,), 9.0), best_P=torch.zeros(rows, dtype=torch.int32),
        rows_VdW=torch.randn(6, 3, generator=g), number_R=torch.arange(rows), counts_KR=counts, weight_R=None, target_ids=torch.arange(6),
    )  # fmt: skip
    outputs = [StepOutput(2 + k, hidden[k].requires_grad_(), output, feature[k].requires_grad_()) for k in range(2)]
    found = unrolled_loss(outputs, labels, LossConfig(mix=MIX, weighting=weighting))  # type: ignore[arg-type]
    found.total.backward()
    some = bool(rows and counted)
    assert found.total.isfinite() and (found.total.item() != 0) == some and float(found.weight) == some
    for leaf in (*hidden, *feature, output):
        assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert output.grad.any() == some and hidden[0].grad[:1].any() == some and feature[0].grad[:1].any() == some
    assert not hidden[0].grad[1:].any() and not hidden[1].grad.any() and not feature[1].grad.any()
    assert found.counts.flat().isfinite().all() and found.counts.rows_K.tolist() == [float(some), 0.0]
