"""LS1: the loss is a mean over supervised tokens, whatever else stands in the batch."""

import math

import pytest
import torch

from spectrain.config import LossConfig
from spectrain.heads.base import StepOutput
from spectrain.heads.losses import Counts, Labels, LossResult, unrolled_loss


def result(rows: int, lengths: int) -> LossResult:
    """`rows` rows that count among `lengths` rows; the draft gives the one token that the target says e**-2: a loss of 2 each."""
    last = torch.zeros(lengths + 1, 2)
    last[:, 0] = 1.0
    counts = torch.zeros(1, lengths, dtype=torch.bool)
    counts[0, lengths - rows :] = True
    labels = Labels(
        last_PW=last, lse_P=torch.full((lengths + 1,), 50.0), best_P=torch.zeros(lengths + 1, dtype=torch.int32),
        rows_VdW=torch.tensor([[50.0, 0.0], [-50.0, 0.0]]), number_R=torch.arange(lengths), counts_KR=counts, weight_R=None,
        target_ids=torch.tensor([0, 1]),
    )  # fmt: skip
    hidden = torch.full((lengths, 1), 1.0)
    hidden[: lengths - rows] = 77.0  # of rows that do not count
    output = torch.tensor([[-2.0], [math.log(1 - math.exp(-2))]])
    return unrolled_loss([StepOutput(2, hidden.requires_grad_(), output)], labels, LossConfig())


@pytest.mark.parametrize("length", [10, 20])
def test_prompt_or_padding_dilutes_the_loss(length: int) -> None:
    """Two supervised positions of 10, or of 20, with a loss of 2.0 each: 2.0, not 0.4 or 0.2."""
    found = result(2, length)
    assert float(found.weight) == 2 and (found.total / found.weight).item() == pytest.approx(2.0, rel=1e-6)
    assert found.counts.means()["loss"] == pytest.approx([2.0], rel=1e-6)


def test_batches_of_other_sizes_count_alike() -> None:
    """1 and 3 rows: the sums add up and are divided once."""
    parts = [result(1, 7).counts, result(3, 4).counts]
    assert (parts[0] + parts[1]).means()["loss"] == pytest.approx([2.0], rel=1e-6)
    assert Counts.zeros(2, torch.device("cpu")).means()["loss"] == [0.0, 0.0]
