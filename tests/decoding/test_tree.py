"""Trees and shapes."""

import pytest
import torch

from spectrain.decoding.shapes import Chain, DynamicTree, Tree, keep_best
from spectrain.decoding.tree import DraftTree, ancestors, check_tree, depths, drop_nodes

PARENTS = torch.tensor([[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 2, 3, 4]])


def test_a_node_misses_an_ancestor_or_sees_a_cousin() -> None:
    seen = ancestors(PARENTS)
    lines = [[row.nonzero()[:, 0].tolist() for row in tree] for tree in seen]
    assert lines[0] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5]]
    assert torch.equal(seen[1], torch.ones(6, 6, dtype=torch.bool).tril())
    assert depths(PARENTS).tolist() == [[0, 1, 1, 2, 3, 2], [0, 1, 2, 3, 4, 5]]


def test_deep_or_wide_trees_are_cut_short() -> None:
    """Random trees of up to 70 nodes, chains among them, against a walk from node to node."""
    g = torch.Generator().manual_seed(0)
    for N in (1, 2, 3, 5, 9, 17, 33, 64, 65, 70):
        parents = torch.tensor([[-1] + [int(torch.randint(0, n, (), generator=g)) for n in range(1, N)], list(range(-1, N - 1))])
        keep = torch.rand(2, N, generator=g) < 0.9
        tokens, parents_left, num, kept = drop_nodes(torch.arange(N).expand(2, N), parents, keep)
        for b in range(2):
            lines: list[list[int]] = []
            for n, parent in enumerate(parents[b].tolist()):
                lines.append([*(lines[parent] if n else []), n])
            assert [row.nonzero()[:, 0].tolist() for row in ancestors(parents)[b]] == lines
            assert depths(parents)[b].tolist() == [len(line) - 1 for line in lines]
            left = [n for n, line in enumerate(lines) if all(keep[b, m] for m in line[1:])]
            assert int(num[b]) == len(left) and kept[b, : len(left)].tolist() == tokens[b, : len(left)].tolist() == left
            above = [int(parents[b, n]) for n in left]
            assert parents_left[b, : len(left)].tolist() == [-1 if p < 0 else left.index(p) for p in above]


def test_chain_has_other_parents() -> None:
    chain = DraftTree.chain(torch.tensor([[4, 5, 6]]), torch.tensor([3]))
    assert chain.parents_BN.tolist() == [[-1, 0, 1]] and chain.width == 3 and chain.is_chain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"law": "greedy"}, "law 'greedy' is unknown"),
        ({"law": "iid"}, "needs q"),
        ({"q_BNV": torch.ones(1, 2, 3)}, "takes no q"),
        ({"parents_BN": torch.zeros(1, 3)}, "rows, nodes"),
        ({"tokens_BN": torch.zeros(2), "parents_BN": torch.zeros(2)}, "rows, nodes"),
    ],
)
def test_fields_that_do_not_fit_are_taken(fields: dict, message: str) -> None:
    right = {"tokens_BN": torch.zeros(1, 2), "parents_BN": torch.tensor([[-1, 0]]), "num_B": torch.tensor([2]), "law": "point_mass"}
    with pytest.raises(ValueError, match=message):
        DraftTree(**{**right, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, None), ({"num_B": torch.tensor([3])}, "num_B must lie between 1 and 2, found"),
        ({"num_B": torch.tensor([0])}, "between 1 and 2"),
        ({"num_B": torch.tensor([2, 2])}, "each of 1 rows"), ({"num_B": torch.tensor(2)}, "each of 1 rows"),
        ({"num_B": torch.tensor([2.0])}, "num_B must hold int64"), ({"tokens_BN": torch.ones(1, 2).int()}, "tokens_BN must hold int64"),
        ({"parents_BN": torch.tensor([[-1, 0]]).int()}, "parents_BN must hold int64"), ({"parents_BN": torch.tensor([[-1, 1]])}, "precede"),
        ({"parents_BN": torch.tensor([[0, 0]])}, "node 0 must"), ({"parents_BN": torch.tensor([[-1, -1]])}, "one root"),
        ({"tokens_BN": torch.ones(1, 0).long(), "parents_BN": torch.ones(1, 0).long()}, "at least a row and its root"),
    ],
)  # fmt: skip
def test_tree_that_is_none_passes(fields: dict, message: str | None) -> None:
    right = {"tokens_BN": torch.ones(1, 2).long(), "parents_BN": torch.tensor([[-1, 0]]), "num_B": torch.tensor([2]), "law": "point_mass"}
    tree = DraftTree(**{**right, **fields})
    if message is None:
        check_tree(tree)
        return
    with pytest.raises(ValueError, match=message):
        check_tree(tree)


@pytest.mark.parametrize(
    "make", [lambda: Chain(0), lambda: Tree.dynamic(top_k=0), lambda: DynamicTree(budget=0), lambda: DynamicTree(depth=0)]
)
def test_empty_shape_is_made(make) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make()


def test_law_that_drafts_cannot_follow_is_taken() -> None:
    with pytest.raises(ValueError, match="without_replacement"):
        Chain(3, law="without_replacement")
    assert str(Chain(3, law="point_mass")) == "chain 3" and str(Tree.dynamic(2, 3, 4)) == "tree k=2 d=3 n=4"


def connected(kept: list[int], parents: list[int]) -> bool:
    return all(parents[c] == -1 or parents[c] in kept for c in kept)


def test_ties_leave_a_node_without_its_parent() -> None:
    """Sure drafts (log q = 0) tie with their parents: the shallower node must win."""
    parents = [-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]
    depth = torch.tensor([[1, 1, 2, 2, 2, 2, 3, 3, 3, 3]])
    scores = torch.tensor([[-0.0, -9.0, 0.0, -7.0, -9.0, -9.5, 0.0, -7.0, -9.0, -9.0]])
    for budget in range(1, 11):
        kept = keep_best(scores, depth, budget)[0].tolist()
        assert len(kept) == budget and kept == sorted(kept) and connected(kept, parents)
    assert keep_best(scores, depth, 3)[0].tolist() == [0, 2, 6]
    assert keep_best(torch.zeros(1, 10), depth, 2)[0].tolist() == [0, 1]


def test_random_scores_leave_a_node_without_its_parent() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        parents, depth, scores = [], [], []
        for c in range(30):
            parent = int(torch.randint(-1, c, (1,), generator=g)) if c else -1
            step = -torch.randint(0, 2, (1,), generator=g).item()  # many ties
            parents.append(parent)
            depth.append(1 if parent < 0 else depth[parent] + 1)
            scores.append(step if parent < 0 else scores[parent] + step)
        kept = keep_best(torch.tensor([scores]).float(), torch.tensor([depth]), 12)[0].tolist()
        assert connected(kept, parents)
        assert min(scores[c] for c in kept) >= max(scores[c] for c in range(30) if c not in kept)


def test_budget_above_the_candidates_repeats_some() -> None:
    assert keep_best(torch.tensor([[-1.0, -2.0]]), torch.tensor([[1, 1]]), 9)[0].tolist() == [0, 1]
