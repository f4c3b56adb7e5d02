"""Alignment and the draft vocabulary, on sequences worked out by hand."""

import pytest
import torch

from spectrain.heads.targets import align, counted, draft_vocabulary

#          token   0  1  2  3  4  5  6  7  8  9 10 11
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]])


def rows(counts: torch.Tensor) -> list[int]:
    return counts[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (2, [1, 2, 3, 7, 8]),  # i + 1 and i + 2 supervised: spans 2-5 and 8-10
        (3, [1, 2, 7]),
        (4, [1]),
        (5, []),
        (20, []),
    ],
)
def test_other_rows_count(ahead: int, expected: list[int]) -> None:
    assert rows(counted(MASK, ahead=ahead)) == expected


def test_answer_of_the_next_document_counts() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    doc = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    assert rows(counted(mask, ahead=2)) == [0, 1, 2, 3, 4]
    assert rows(counted(mask, ahead=2, doc_BL=doc)) == [0, 1, 4]
    assert rows(counted(mask, ahead=3, doc_BL=doc)) == [0]


def test_two_spans_that_touch_over_a_gap_are_one() -> None:
    assert rows(counted(torch.tensor([[0, 1, 1, 0, 1, 1, 1]]), ahead=2)) == [0, 3, 4]


@pytest.mark.parametrize("ahead", [2, 3, 5])
def test_pairs_are_shifted(ahead: int) -> None:
    L = 12
    hidden = torch.arange(L).float()[None, :, None].expand(2, L, 3)
    ids = torch.arange(100, 100 + L).expand(2, L)
    got = align(hidden, ids, MASK.expand(2, L), ahead=ahead)
    R = L - ahead
    assert got.hidden_BRD.shape == (2, R, 3) and got.answer_BR.shape == got.in_hand_BR.shape == got.counts_BR.shape == (2, R)
    for i in range(R):
        assert got.hidden_BRD[0, i, 0] == i and got.in_hand_BR[0, i] == 100 + i + ahead - 1 and got.answer_BR[0, i] == 100 + i + ahead
    assert rows(got.counts_BR) == rows(counted(MASK, ahead=ahead))


def test_last_end_token_is_never_answered() -> None:
    """The end of the answer stands at the row's end: its row counts."""
    assert rows(counted(torch.tensor([[0, 0, 1, 1]]), ahead=2)) == [1]


def test_short_sequence_breaks() -> None:
    for L in range(1, 4):
        got = align(torch.zeros(1, L, 2), torch.zeros(1, L, dtype=torch.long), torch.ones(1, L), ahead=3)
        assert got.answer_BR.shape == (1, 0) and got.hidden_BRD.shape == (1, 0, 2) and got.in_hand_BR.shape == (1, 0)


def test_misuse_goes_through() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        counted(MASK, ahead=1)
    with pytest.raises(ValueError, match="must agree"):
        align(torch.zeros(1, 11, 2), torch.zeros(1, 12), MASK)


def test_rare_ids_are_drafted() -> None:
    counts = torch.tensor([0, 5, 9, 0, 5, 5, 0])
    got = draft_vocabulary(counts, 3)
    assert got.target_ids.tolist() == [1, 2, 4] and got.d2t.tolist() == [1, 1, 2]
    assert got.t2d.tolist() == [False, True, True, False, True, False, False]
    assert draft_vocabulary(counts, 5).target_ids.tolist() == [0, 1, 2, 4, 5]
    whole = draft_vocabulary(counts, 7)
    assert whole.d2t.tolist() == [0] * 7 and whole.t2d.all()


@pytest.mark.parametrize("size", [0, -1, 8])
def test_size_out_of_range_is_taken(size: int) -> None:
    with pytest.raises(ValueError, match=f"of {size} asked for; needed 1 to 7"):
        draft_vocabulary(torch.ones(7), size)
