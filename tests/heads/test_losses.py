"""Losses and counts against a slow twin in float64."""

import math

import pytest
import torch

from spectrain.heads.losses import Counts, draft_counts, soft_cross_entropy

IDS = torch.tensor([1, 3, 4, 7, 8])


def inputs(R: int = 6, K: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Logits over 5 draft ids, the target's law there (of a vocabulary of 9), its best id, and which rows count."""
    g = torch.Generator().manual_seed(seed)
    logits = [3 * torch.randn(R, 5, generator=g).to(dtype) for _ in range(K)]
    full = [(2 * torch.randn(R, 9, generator=g)).softmax(-1) for _ in range(K)]
    counts = [torch.rand(R, generator=g) > 0.4 for _ in range(K)]
    return logits, [p[:, IDS] for p in full], [p.argmax(-1) for p in full], counts


def slow(logits, p, best, counts) -> list[list[float]]:
    """Sums of loss, alpha, hits and rows by step, with Python floats."""
    sums = [[0.0] * len(logits) for _ in range(4)]
    for k in range(len(logits)):
        for r in range(len(logits[k])):
            if not counts[k][r]:
                continue
            row = [float(x) for x in logits[k][r]]
            total = sum(math.exp(x) for x in row)
            q = [math.exp(x) / total for x in row]
            sums[0][k] -= sum(float(a) * math.log(b) for a, b in zip(p[k][r], q, strict=True))
            sums[1][k] += sum(min(float(a), b) for a, b in zip(p[k][r], q, strict=True))
            sums[2][k] += int(IDS[row.index(max(row))]) == int(best[k][r])
            sums[3][k] += 1
    return sums


def test_counts_are_not_the_sums_of_the_formulas() -> None:
    got = draft_counts(*inputs(), IDS)
    for mine, expected in zip(got.fields, slow(*inputs()), strict=True):
        assert mine.tolist() == pytest.approx(expected, rel=1e-5)


def test_sums_of_batches_are_not_the_sum_of_one() -> None:
    """LS1, LS2: counts are added first and divided once."""
    parts = [inputs(R, seed=R) for R in (1, 3, 9)]
    added = draft_counts(*parts[0], IDS) + draft_counts(*parts[1], IDS) + draft_counts(*parts[2], IDS)
    whole = draft_counts(*([torch.cat([part[i][k] for part in parts]) for k in range(3)] for i in range(4)), IDS)  # type: ignore[arg-type]
    for a, b in zip(added.fields, whole.fields, strict=True):
        torch.testing.assert_close(a, b)
    assert added.means()["loss"] == pytest.approx((whole.loss_K / whole.rows_K).tolist())


def test_mean_is_taken_over_rows_that_do_not_count() -> None:
    """LS1: two of ten rows with a loss of 2 each give 2."""
    counts = Counts(torch.tensor([4.0]), torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([2.0]))
    assert counts.means() == {"loss": [2.0], "alpha": [0.5], "hit": [0.5]}
    empty = Counts(*(torch.zeros(1) for _ in range(4)))
    assert empty.means() == {"loss": [0.0], "alpha": [0.0], "hit": [0.0]}


def test_hit_is_counted_among_the_draft_vocabulary_only() -> None:
    """EV1: 10 rows, 4 with the target's best outside; right at the other 6: agreement 0.6."""
    inside = torch.tensor([1, 3, 4, 7, 8, 1])
    best = torch.cat([inside, torch.tensor([0, 2, 5, 6])])
    logits = torch.zeros(10, 5)
    logits[torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 0])] = 9.0
    got = draft_counts([logits], [torch.full((10, 5), 0.1)], [best], [torch.ones(10, dtype=torch.bool)], IDS)
    assert got.means()["hit"] == pytest.approx([0.6])


def test_mass_off_the_draft_vocabulary_is_given_to_it() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    p = torch.tensor([[0.1, 0.2, 0.3]])
    half = soft_cross_entropy(logits, p / 2)
    torch.testing.assert_close(half * 2, soft_cross_entropy(logits, p))


def test_step_without_rows_has_a_loss_or_a_gradient() -> None:
    logits, p, best, counts = inputs()
    counts[1] = torch.zeros_like(counts[1])
    leaves = [x.clone().requires_grad_() for x in logits]
    got = draft_counts(leaves, p, best, counts, IDS)
    got.loss_K.sum().backward()
    assert [f[1].item() for f in got.fields] == [0.0] * 4
    assert not leaves[1].grad.any() and leaves[0].grad[counts[0]].any() and not leaves[0].grad[~counts[0]].any()


def test_no_rows_at_all_give_nan() -> None:
    logits, p, best, counts = inputs(R=0)
    got = draft_counts([x.requires_grad_() for x in logits], p, best, counts, IDS)
    got.loss_K.sum().backward()
    assert all(f.tolist() == [0.0] * 3 for f in got.fields)


def test_gradient_in_half_precision_is_coarse() -> None:
    """LS3: bfloat16 logits near the target's: the gradient within 1 % of float64."""
    g = torch.Generator().manual_seed(0)
    draft = (torch.randn(16, 8000, generator=g) * 2).to(torch.bfloat16)
    p = (draft.double() + 0.05 * torch.randn(16, 8000, generator=g)).softmax(-1)
    assert torch.minimum(p, draft.double().softmax(-1)).sum(-1).min() > 0.97
    leaf = draft.clone().requires_grad_()
    soft_cross_entropy(leaf.float(), p.float()).sum().backward()
    exact = draft.double().softmax(-1) - p
    mine = draft.float().clone().requires_grad_()
    soft_cross_entropy(mine, p.float()).sum().backward()
    assert (mine.grad.double() - exact).norm() / exact.norm() < 0.01
    assert (leaf.grad.double() - exact).norm() / exact.norm() < 0.01
