"""EV1: agreement is over all supervised positions; accuracy inside the draft vocabulary and accuracy at a depth have names of their own."""

import pytest
import torch

from spectrain.config import LossConfig
from spectrain.heads.base import StepOutput
from spectrain.heads.losses import Counts, Labels, unrolled_loss


def counts(best: list[list[int]], drafted: list[list[int]]) -> Counts:
    """Of rows with these best tokens (of ten; the head can draft the even ones) and drafted tokens, by step."""
    ids = torch.arange(0, 10, 2)
    K, R = len(best), len(best[0])
    found = Counts.zeros(K, torch.device("cpu"))
    for r in range(R):  # an answer each: K tokens, one row
        labels = Labels(
            last_PW=torch.zeros(K, 1), lse_P=torch.full((K,), 2.3), best_P=torch.tensor([best[k][r] for k in range(K)]).int(),
            rows_VdW=torch.zeros(5, 1), number_R=torch.zeros(1, dtype=torch.long), counts_KR=torch.ones(K, 1, dtype=torch.bool),
            weight_R=None, target_ids=ids,
        )  # fmt: skip
        outputs = [StepOutput(2 + k, 9 * torch.eye(5)[drafted[k][r] // 2][None], torch.eye(5)) for k in range(K)]
        found = found + unrolled_loss(outputs, labels, LossConfig()).counts
    return found


def test_positions_that_the_head_cannot_win_are_left_out() -> None:
    """10 positions, 4 with the best token outside; right at the other 6."""
    means = counts([[0, 2, 4, 6, 8, 0, 1, 3, 5, 7]], [[0, 2, 4, 6, 8, 0, 0, 2, 4, 6]]).means()
    assert means["hit"] == pytest.approx([0.6]) and means["coverage"] == pytest.approx([0.6]) and means["hit_inside"] == [1.0]


def test_accuracy_at_a_depth_is_read_as_acceptance() -> None:
    """P(1) = 0.7, P(2 | 1 right) = 0.5: 0.7 + 0.35 accepted drafts, though step 2 is right at 0.65 of all rows."""
    first = [0] * 14 + [2] * 6
    second = [0] * 7 + [2] * 7 + [0] * 6
    means = counts([[0] * 20, [0] * 20], [first, second]).means()
    assert means["hit"] == pytest.approx([0.7, 0.65]) and means["survival"] == pytest.approx([0.7, 0.35])
    assert sum(means["survival"]) == pytest.approx(1.05)
