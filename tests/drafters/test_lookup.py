"""N-gram drafts."""

import pytest
import torch

from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.lookup import NGram, lookup


def slow(ids: list[int], depth: int, settings: NGram) -> list[int]:
    for n in range(settings.longest, settings.shortest - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n : start + n + depth]
    return []


@pytest.mark.parametrize(
    ("ids", "depth", "longest", "shortest", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, 4, 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, 4, 2, [9, 1, 2, 3]),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, 4, 2, [6]),  # the most recent place
        ([0, 1, 2, 5, 7, 1, 2, 6, 0, 1, 2], 1, 4, 2, [5]),  # the longest match
        ([1, 2, 3, 4, 9, 3, 4], 1, 4, 3, []),
        ([7, 7], 3, 4, 2, []),
        ([7, 7], 3, 4, 1, [7]),
        ([7, 7, 7], 3, 4, 2, [7]),
        ([7], 3, 4, 1, []),
        ([1, 2, 3], 3, 4, 1, []),
    ],
)
def test_wrong_place_is_continued(ids: list[int], depth: int, longest: int, shortest: int, drafts: list[int]) -> None:
    assert lookup(ids, depth, NGram(longest, shortest)) == drafts == slow(ids, depth, NGram(longest, shortest))


def test_fast_lookup_differs_from_the_slow_one() -> None:
    g = torch.Generator().manual_seed(0)
    for n in range(1, 60):
        ids = torch.randint(0, 4, (n,), generator=g).tolist()
        for settings in (NGram(), NGram(3, 1), NGram(8, 5)):
            assert lookup(ids, 5, settings) == slow(ids, 5, settings)


@pytest.mark.parametrize("sizes", [(2, 3), (0, 0), (4, 0)])
def test_sizes_without_meaning_are_taken(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="shortest <= longest"):
        NGram(*sizes)


def test_rows_without_a_match_draft_their_padding(target) -> None:
    session = NGram().start(target, 2, 50)
    tree = session.propose([[1, 2, 3, 9, 1, 2, 3], [5]], Chain(3))
    assert tree is not None and tree.num_B.tolist() == [4, 1] and tree.is_chain
    assert tree.tokens_BN.tolist() == [[3, 9, 1, 2], [5, 0, 0, 0]] and tree.parents_BN.tolist() == [[-1, 0, 1, 2]] * 2
    assert session.propose([[1, 2], [5]], Chain(3)) is None
    small = session.propose([[1, 2, 3, 9, 1, 2, 3]], Tree.dynamic(2, 5, 1))
    assert small is not None and small.num_B.tolist() == [2]
