"""Batches: padding that nobody learns, packed lines whose samples keep to themselves, broken samples left out."""

from dataclasses import replace

import pytest
import torch

from spectrain.data.batches import Batch, Sample, collate, leave_out_broken, pack, split
from spectrain.data.codes import Codes


def sample(ids: list[int], mask: list[int] | None = None) -> Sample:
    """Every field tells which token it belongs to."""
    mask_L = torch.tensor(mask if mask else [0] + [1] * (len(ids) - 1))
    ids_L = torch.tensor(ids)
    of_M = ids_L[mask_L == 1]
    return Sample(
        ids_L=ids_L, mask_L=mask_L, states=Codes(ids_L[:, None].float() * torch.ones(3)), last=Codes(of_M[:, None].float() * torch.ones(2)),
        best_M=of_M, lse_M=of_M.float(),
    )  # fmt: skip


def test_padding_is_supervised() -> None:
    """DM3: the end id is the padding id; a row's own end stays supervised, padding does not."""
    batch = collate([sample([5, 6, 2]), sample([5, 6, 7, 8, 2])])
    assert batch.ids_BL.tolist()[0][:3] == [5, 6, 2] and batch.mask_BL.tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.states_BLF.shape == (2, 5, 3) and batch.states_BLF[0, :, 0].tolist() == [5, 6, 2, 0, 0]
    assert batch.best_P.tolist() == batch.last_PW[:, 0].tolist() == batch.lse_P.tolist() == [6, 2, 6, 7, 8, 2]
    assert batch.doc_BL is None and batch.position_BL is None and isinstance(batch.to("cpu"), Batch)


def test_packed_samples_are_mixed_up() -> None:
    batch = pack([[sample([5, 6, 2]), sample([7, 8])], [sample([9, 10, 11], [1, 0, 1])]])
    assert batch.ids_BL.tolist() == [[5, 6, 2, 7, 8], [9, 10, 11, 0, 0]] and batch.mask_BL.tolist() == [[0, 1, 1, 0, 1], [1, 0, 1, 0, 0]]
    assert batch.doc_BL.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, -1, -1]]
    assert batch.position_BL.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]]
    assert batch.states_BLF[..., 0].tolist() == batch.ids_BL.tolist()
    assert batch.best_P.tolist() == batch.last_PW[:, 0].tolist() == batch.ids_BL[batch.mask_BL == 1].tolist()
    moved = batch.to("cpu")
    assert torch.equal(moved.doc_BL, batch.doc_BL) and torch.equal(moved.position_BL, batch.position_BL)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["states", "last", "lse_M"])
@pytest.mark.parametrize("packed", [True, False])
def test_broken_sample_stays_or_takes_others_along(value: float, field: str, packed: bool) -> None:
    """MK2: the one sample loses mask, states and what belongs to its tokens; the others keep all of theirs."""
    samples = [sample([5, 6, 2]), sample([7, 8, 9]), sample([10, 11])]
    tensor = getattr(samples[1], field)
    tensor = tensor.codes.clone() if isinstance(tensor, Codes) else tensor.clone()
    tensor[0] = value
    samples[1] = replace(samples[1], **{field: tensor if field == "lse_M" else Codes(tensor)})
    batch = pack([samples[:2], samples[2:]]) if packed else collate(samples)
    clean, places = leave_out_broken(batch)
    assert places == [(0, 1) if packed else (1, 0)]
    assert clean.best_P.tolist() == clean.lse_P.tolist() == clean.last_PW[:, 1].tolist() == [6, 2, 11]
    assert clean.ids_BL[clean.mask_BL == 1].tolist() == [6, 2, 11] and torch.equal(clean.ids_BL, batch.ids_BL)
    of_broken = (clean.ids_BL >= 7) & (clean.ids_BL <= 9)
    assert not clean.states_BLF[of_broken].any()
    assert torch.equal(clean.states_BLF[~of_broken], batch.states_BLF[~of_broken])


def test_samples_of_a_batch_are_others() -> None:
    samples = [sample([5, 6, 2]), sample([7, 8, 9, 10, 11], [0, 0, 1, 1, 0]), sample([12, 13], [0, 0]), sample([14])]
    for mine, expected in zip(split(collate(samples), [3, 5, 2, 1]), samples, strict=True):
        for name in ("ids_L", "mask_L", "best_M", "lse_M"):
            assert torch.equal(getattr(mine, name), getattr(expected, name))
        assert torch.equal(mine.states.codes, expected.states.codes) and torch.equal(mine.last.codes, expected.last.codes)


def test_whole_batch_is_changed_for_nothing() -> None:
    batch = collate([sample([5, 6, 2])])
    same, places = leave_out_broken(batch)
    assert same is batch and places == []
