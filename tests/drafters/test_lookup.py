"""N-gram drafts."""

import pytest
import torch

from spectrain.decoding.drafter import Round
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.lookup import NGram, lookup
from spectrain.target.model import Target


def slow(ids: list[int], depth: int, settings: NGram) -> list[int]:
    for n in range(settings.longest, settings.shortest - 1, -1):
        places = range(len(ids) - n)
        for start in reversed(places) if settings.match == "recent" else places:
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n : start + n + depth]
    return []


def drafted(tree, rows: int) -> list[list[int]]:
    return [[]] * rows if tree is None else [tree.tokens_BN[b, 1 : int(tree.num_B[b])].tolist() for b in range(rows)]


@pytest.mark.parametrize(
    ("ids", "depth", "settings", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, NGram(), [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, NGram(), [9, 1, 2, 3]),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, NGram(), [6]),  # the most recent place
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, NGram(match="first"), [5]),
        ([0, 1, 2, 5, 7, 1, 2, 6, 0, 1, 2], 1, NGram(), [5]),  # the longest match
        ([1, 2, 3, 4, 9, 3, 4], 1, NGram(4, 3), []),
        ([7, 7], 3, NGram(), []),
        ([7, 7], 3, NGram(4, 1), [7]),
        ([7, 7, 7], 3, NGram(), [7]),
        ([7], 3, NGram(4, 1), []),
        ([1, 2, 3], 3, NGram(4, 1), []),
    ],
)
def test_wrong_place_is_continued(target: Target, ids: list[int], depth: int, settings: NGram, drafts: list[int]) -> None:
    tree = settings.start(target, 1, 50).propose(Round([ids], Chain(depth)))
    assert drafted(tree, 1)[0] == lookup(ids, depth, settings) == drafts == slow(ids, depth, settings)


@pytest.mark.parametrize("settings", [NGram(), NGram(3, 1), NGram(8, 5), NGram(match="first"), NGram(3, 1, "first")], ids=str)
def test_growing_text_is_read_otherwise_than_by_a_scan(target: Target, settings: NGram) -> None:
    """Rows grow by bursts of unequal size, one of them leaves: the incremental look-up stays equal to the scans."""
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, V, (90,), generator=g).tolist() for V in (2, 3, 5)]
    session, rows, lengths, found = settings.start(target, 3, 90), [0, 1, 2], [1, 4, 9], 0
    for step in range(22):
        ids = [texts[r][: lengths[r]] for r in rows]
        drafts = drafted(session.propose(Round(ids, Chain(5))), len(rows))
        for mine, row in zip(drafts, ids, strict=True):
            assert mine == lookup(row, 5, settings) == slow(row, 5, settings)
            found += len(mine)
        if step == 9:
            rows = [2, 0]
            session.select(torch.tensor(rows))
        lengths = [length + int(torch.randint(0, 6, (1,), generator=g)) for length in lengths]
    assert found > 20


class Counted(list):
    """A text that counts how many of its tokens are read."""

    reads = 0

    def __getitem__(self, key):
        found = list.__getitem__(self, key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found


def test_cost_grows_with_the_context(target: Target) -> None:
    costs = []
    for length in (100, 3000):
        ids = Counted(torch.randint(0, 9, (length,), generator=torch.Generator().manual_seed(1)).tolist())
        session = NGram().start(target, 1, length + 9)
        session.propose(Round([ids], Chain(5)))
        ids += [1, 2, 3]
        ids.reads = 0
        session.propose(Round([ids], Chain(5)))
        costs.append(ids.reads)
    assert 0 < min(costs) <= max(costs) < 60


@pytest.mark.parametrize("settings", [{"longest": 2, "shortest": 3}, {"longest": 0, "shortest": 0}, {"shortest": 0}])
def test_sizes_without_meaning_are_taken(settings: dict) -> None:
    with pytest.raises(ValueError, match="shortest <= longest"):
        NGram(**settings)


def test_unknown_match_is_taken() -> None:
    with pytest.raises(ValueError, match="match must be 'recent' or 'first', found 'last'"):
        NGram(match="last")


def test_rows_without_a_match_draft_their_padding(target: Target) -> None:
    def propose(committed, shape, **more):
        return NGram().start(target, len(committed), 50).propose(Round(committed, shape, **more))

    tree = propose([[1, 2, 3, 9, 1, 2, 3], [5]], Chain(3))
    assert tree is not None and tree.num_B.tolist() == [4, 1] and tree.is_chain and tree.expected_B is None
    assert tree.tokens_BN.tolist() == [[3, 9, 1, 2], [5, 0, 0, 0]] and tree.parents_BN.tolist() == [[-1, 0, 1, 2]] * 2
    assert propose([[1, 2], [5]], Chain(3)) is None
    assert propose([[1, 2, 3, 9, 1, 2, 3]], Tree.dynamic(2, 5, 1)).num_B.tolist() == [2]  # the budget
    both = [[1, 2, 3, 9, 1, 2, 3]] * 3
    assert propose(both, Chain(3), depth_B=[2, 0, 9]).num_B.tolist() == [3, 1, 4]


def test_estimate_does_not_follow_acceptance(target: Target) -> None:
    """Half a token in two before any experience; then what was committed decides, for each length of match by itself."""
    loop = [1, 2, 3, 4, 5] * 20
    session = NGram(2, 2).start(target, 2, 500)

    def estimates(*rows: list[int]) -> list[float]:
        return session.propose(Round(list(rows), Chain(3), estimate=True)).expected_B.tolist()

    assert estimates(loop[:12], loop[:12]) == [0.875, 0.875]  # 1/2 + 1/4 + 1/8
    assert estimates(loop[:12], loop[:12]) == [0.875, 0.875]  # nothing was committed
    for n in range(16, 60, 4):
        good, bad = estimates(loop[:n], loop[: n - 5] + [60 + n, 61 + n, 62 + n, 1, 2])
    assert good > 2.5 and bad < 0.3
