"""Batches: every row once, in an order that a resume repeats."""

import pytest
import torch

from spectrain.data.batches import Batch, Sample, collate, plan_batches

LENGTHS = [(7 * i) % 50 + 5 for i in range(101)]
WEIGHTS = [max(0, n - 8) for n in LENGTHS]


def plan(**changes) -> list[list[int]]:
    return plan_batches(LENGTHS, WEIGHTS, **{"per_batch": 120, "seed": 3, "epoch": 0, **changes})


@pytest.mark.parametrize("per_batch", [1, 40, 120, 10**9])
def test_row_is_left_out_or_comes_twice(per_batch: int) -> None:
    batches = plan(per_batch=per_batch)
    assert sorted(i for batch in batches for i in batch) == [i for i, w in enumerate(WEIGHTS) if w]
    assert all(sum(WEIGHTS[i] for i in batch) <= per_batch or len(batch) == 1 for batch in batches)


def test_order_differs_after_a_resume() -> None:
    assert plan() == plan()
    assert plan(epoch=1) != plan() and plan(seed=4) != plan()


def test_batches_are_mostly_padding_or_always_sorted() -> None:
    batches = plan()
    padded = sum(len(b) * max(LENGTHS[i] for i in b) for b in batches)
    assert padded < 1.25 * sum(LENGTHS[i] for b in batches for i in b)
    first = [max(LENGTHS[i] for i in b) for b in batches]
    assert first != sorted(first) and first != sorted(first, reverse=True)


def test_no_rows_break_the_plan() -> None:
    assert plan_batches([], [], per_batch=5, seed=0, epoch=0) == []
    assert plan_batches([4, 5], [0, 0], per_batch=5, seed=0, epoch=0) == []
    assert plan_batches([4], [9], per_batch=5, seed=0, epoch=0) == [[0]]


def test_padding_is_supervised() -> None:
    """DM3: the end id is the padding id; a row's own end stays supervised, padding does not."""
    samples = [
        Sample(
            ids_L=torch.tensor(ids), mask_L=torch.tensor([0] + [1] * (len(ids) - 1)), states_LF=torch.ones(len(ids), 3),
            last_LW=torch.ones(len(ids), 2), best_L=torch.tensor(ids), lse_L=torch.ones(len(ids)),
        )
        for ids in ([5, 6, 2], [5, 6, 7, 8, 2])
    ]  # fmt: skip
    batch = collate(samples)
    assert batch.ids_BL.tolist()[0][:3] == [5, 6, 2] and batch.mask_BL.tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.states_BLF.shape == (2, 5, 3) and batch.states_BLF[0, 3:].sum() == 0 and batch.states_BLF[0, :3].sum() == 9
    assert (
        batch.last_BLW.shape == (2, 5, 2) and batch.lse_BL[0].tolist() == [1, 1, 1, 0, 0] and batch.best_BL[1].tolist() == [5, 6, 7, 8, 2]
    )
    assert isinstance(batch.to("cpu"), Batch)
