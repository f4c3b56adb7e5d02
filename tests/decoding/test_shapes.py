"""Shapes: legal trees, laws, cuts, and the best tree for measured acceptance."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from spectrain.decoding.shapes import Chain, DynamicTree, Shape, StaticTree, Tree, expected_tau, resolve_law, trimmed
from spectrain.yields import Costs, tree_tau

FORKED = Tree.static([[0, 1], [1], [0], [0, 0], [1, 0], [0, 0, 0]])
LINE = Tree.static([[0], [0, 0]])
GAPS = Tree.static([[0], [2], [2, 1]])


def test_nodes_are_numbered_otherwise() -> None:
    assert FORKED.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert FORKED.parents == (-1, 0, 0, 1, 1, 2, 3) and FORKED.ranks == (-1, 0, 1, 0, 1, 0, 0)
    assert FORKED.levels == ((0,), (1, 2), (3, 4, 5), (6,))
    assert (FORKED.depth, FORKED.budget, FORKED.width, FORKED.is_chain, FORKED.has_gaps) == (3, 6, 2, False, False)
    assert (GAPS.parents, GAPS.width, GAPS.has_gaps) == ((-1, 0, 0, 2), 3, True)
    assert str(FORKED) == "static k=2 d=3 n=6" and FORKED == Tree.static(FORKED.paths) and hash(FORKED) == hash(Tree.static(FORKED.paths))


def test_plain_decoding_is_no_shape() -> None:
    empty = Tree.static([])
    assert (empty.depth, empty.budget, empty.width, empty.parents, empty.levels, empty.is_chain) == (0, 0, 0, (-1,), ((0,),), True)
    assert trimmed(empty) is None and expected_tau(empty, [[0.5]]) == 1.0


@pytest.mark.parametrize(
    ("paths", "law", "message"),
    [
        ([[0], []], "auto", r"path 1 is \[\]"),
        ([0, 1], "auto", "path 0 is 0"),
        ([[0], [-1]], "auto", r"path 1 is \[-1\]; ranks"),
        ([[0], [0, 1.0]], "auto", r"path 1 is \[0, 1.0\]; ranks"),
        ([[True]], "auto", "ranks are whole"),
        ([[0], [1], [0]], "auto", r"path 2, \[0\], stands twice"),
        ([[0], [1, 0]], "auto", r"path 1, \[1, 0\], has no parent; add \[1\]"),
        ([[0], [0, 1]], "iid", r"path \(0, 1\) has no sibling of rank 0"),
        ([[0], [2]], "without_replacement", r"path \(2,\) has no sibling of rank 1"),
        ([[0]], "greedy", "law 'greedy' is unknown"),
    ],
)
def test_path_that_cannot_stand_is_taken(paths: Any, law: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree.static(paths, law)


@pytest.mark.parametrize(
    "make", [lambda: Chain(3, law="without_replacement"), lambda: DynamicTree(law="iid"), lambda: Chain(3, law="block")]
)
def test_law_that_the_shape_cannot_follow_is_taken(make: Any) -> None:
    with pytest.raises(ValueError, match="not available"):
        make()


@pytest.mark.parametrize(
    ("shape", "sampled"),
    [
        (Chain(3), "iid"), (LINE, "iid"), (FORKED, "without_replacement"), (GAPS, "point_mass"), (Tree.dynamic(), "point_mass"),
        (Chain(3, "iid"), "iid"), (Tree.static(FORKED.paths, "iid"), "iid"), (Chain(2, "point_mass"), "point_mass"),
        (Tree.static(LINE.paths, "without_replacement"), "without_replacement"),
    ],
)  # fmt: skip
def test_auto_picks_another_law(shape: Shape, sampled: str) -> None:
    assert resolve_law(shape, temperature=0.7, has_q=True) == sampled
    if shape.law in ("auto", "point_mass"):
        assert resolve_law(shape, temperature=0.0, has_q=True) == resolve_law(shape, temperature=0.7, has_q=False) == "point_mass"
    else:
        assert resolve_law(shape, temperature=0.0, has_q=True) == shape.law
        with pytest.raises(ValueError, match="use law='auto' or 'point_mass'"):
            resolve_law(shape, temperature=0.7, has_q=False)


@pytest.mark.parametrize(
    ("shape", "depth", "budget", "left"),
    [
        (Chain(5, "iid"), 3, None, Chain(3, "iid")), (Chain(5), 4, 2, Chain(2)), (Chain(5), 9, 9, Chain(5)), (Chain(5), 0, None, None),
        (Tree.dynamic(3, 4, 20), 2, 7, DynamicTree(3, 2, 7)), (Tree.dynamic(), None, 0, None),
        (FORKED, 1, None, Tree.static([[0], [1]])), (FORKED, None, 4, Tree.static([[0], [0, 0], [1], [0, 0, 0]])),
        (FORKED, 2, 4, Tree.static([[0], [0, 0], [1], [0, 1]])), (FORKED, None, None, FORKED),
    ],
)  # fmt: skip
def test_cut_keeps_other_nodes(shape: Shape, depth: int | None, budget: int | None, left: Shape | None) -> None:
    assert trimmed(shape, depth, budget) == left


def test_cut_orphans_a_node() -> None:
    """Every cut of a wide tree of a sampled law is a legal tree of that law, within depth and budget."""
    wide = Tree.static([(*head, rank) for head in [(), (0,), (1,), (0, 0), (1, 0)] for rank in range(3)], "without_replacement")
    for depth in range(1, 4):
        for budget in range(1, wide.budget + 1):
            cut = trimmed(wide, depth, budget)
            assert isinstance(cut, StaticTree) and cut.law == wide.law and set(cut.paths) <= set(wide.paths)
            assert cut.budget == min(budget, sum(len(path) <= depth for path in wide.paths)) and cut.depth <= depth
    with pytest.raises(ValueError, match="at least 0"):
        trimmed(wide, -1)


def closed_trees(ranks: int, depth: int, nodes: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every set of at most `nodes` paths that holds the parent of each path and the sibling before it."""
    layer = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        grown = set()
        for tree in layer:
            for parent in ((), *tree):
                path = (*parent, sum(other[:-1] == parent for other in tree if len(other) == len(parent) + 1))
                if len(path) <= depth and path[-1] < ranks:
                    grown.add(tree | {path})
        layer = grown
        yield from (tuple(tree) for tree in layer)


def random_table(generator: random.Random, *, ranks: int, depth: int) -> list[list[float]]:
    rows = []
    for _ in range(depth):
        weights = sorted((generator.random() ** 3 for _ in range(generator.randint(1, ranks))), reverse=True)
        total = generator.random() / sum(weights)
        rows.append([weight * total for weight in weights])
    return rows


def random_costs(generator: random.Random) -> Costs:
    v = [1.0]
    for _ in range(8):
        v.append(v[-1] + generator.choice([0.0, 0.02, 0.1, 0.3]))
    return Costs(seconds=1.0, v=tuple(v), c=generator.choice([0.0, 0.05, 0.2]))


def gain(paths: Sequence[Sequence[int]], table: Sequence[Sequence[float]], costs: Costs) -> float:
    return tree_tau(paths, table) / (costs.c * max(map(len, paths), default=0) + costs.verify(1 + len(paths)))


def test_best_first_misses_the_best_tree() -> None:
    """Brute force over every tree of at most 6 nodes, 3 ranks and 3 levels."""
    generator, trees = random.Random(0), list(closed_trees(3, 3, 6))
    assert len(trees) == len(set(map(frozenset, trees))) > 100
    sizes = set()
    for _ in range(40):
        table, costs = random_table(generator, ranks=3, depth=3), random_costs(generator)
        found = Tree.optimised(table, costs, max_budget=6)
        best = max(1.0, *(gain(tree, table, costs) for tree in trees))
        assert gain(found.paths, table, costs) == pytest.approx(best, rel=1e-12) and found.budget <= 6
        assert expected_tau(found, table) == tree_tau(found.paths, table)
        sizes.add((found.budget, found.depth))
    assert {(0, 0)} < sizes and len(sizes) > 6  # the cases are not all of one kind


def sequoia(table: Sequence[Sequence[float]], nodes: int) -> list[list[float]]:
    """Value [D][n] of the best tree of n nodes and at most D levels below the root, by dynamic programming over children."""

    @cache
    def below(n: int, d: int, k: int, limit: int) -> float:
        """n nodes in the subtrees of the children of rank k, k + 1 … of a node at depth d, counted from that node."""
        if n == 0:
            return 0.0
        if d == limit or d >= len(table) or k >= len(table[d]):
            return float("-inf")
        return max(table[d][k] * (1 + below(y - 1, d + 1, 0, limit)) + below(n - y, d, k + 1, limit) for y in range(1, n + 1))

    return [[below(n, 0, 0, limit) for n in range(nodes + 1)] for limit in range(len(table) + 1)]


def test_best_first_is_not_the_dynamic_programme() -> None:
    generator = random.Random(1)
    for _ in range(8):
        table, costs = random_table(generator, ranks=4, depth=4), random_costs(generator)
        values = sequoia(table, 20)
        best = max((1 + value) / (costs.c * limit + costs.verify(1 + n)) for limit, row in enumerate(values) for n, value in enumerate(row))
        assert gain(Tree.optimised(table, costs, max_budget=20).paths, table, costs) == pytest.approx(best, rel=1e-12)


def test_wrong_tree_is_chosen() -> None:
    free, table = Costs(1.0, (1.0, 1.0), 0.0), [[0.6, 0.2, 0.1], [0.5, 0.1]]
    whole = Tree.optimised(table, free)
    assert whole.budget == 3 + 3 * 2 and whole.depth == 2 and expected_tau(whole, table) == pytest.approx(1 + 0.9 + 0.9 * 0.6)
    assert Tree.optimised(table, free, max_budget=3).paths == ((0,), (1,), (0, 0))
    assert Tree.optimised(table, Costs(1.0, (1.0, 1.0), 0.31), max_budget=3).depth == 1  # the second level costs more than it brings
    # With 64 rows every position costs; alone none does.
    costs = Costs(1.0, (1.0, 1.0), 0.0, by_batch={64: (1.0, 1.7)})
    assert Tree.optimised(table, costs, batch=64).paths == () and Tree.optimised(table, costs).budget == 9
    assert Tree.optimised([], free).budget == 0 and Tree.optimised(table, free, law="iid").law == "iid"
    assert Tree.optimised([[0.5, 0.25]], Costs(1.0, (1.0, 1.0, 1.75 / 1.5), 0.0)).paths == ((0,),)  # a tie: the smaller one
    with pytest.raises(ValueError, match="max_budget"):
        Tree.optimised(table, free, max_budget=0)
    with pytest.raises(ValueError, match="sum to at most 1"):
        Tree.optimised([[0.9, 0.3]], free)


def test_noise_in_the_table_makes_a_gap() -> None:
    """A rank that measured better than the one before it is pooled with it: sampled laws need every draw before it."""
    free = Costs(1.0, (1.0, 1.0), 0.0)
    tree = Tree.optimised([[0.2, 0.1, 0.3, 0.0]], free, max_budget=2, law="without_replacement")
    assert tree.paths == ((0,), (1,)) and expected_tau(tree, [[0.2, 0.1, 0.3]]) == pytest.approx(1.3)
    # 0.3, 0.15 and 0.15 come before 0.3 * 0.4; an empty rank does not hide the one behind it.
    assert Tree.optimised([[0.3, 0.0, 0.3], [0.4]], free, max_budget=3).paths == ((0,), (1,), (2,))


@pytest.mark.parametrize(("table", "tau"), [([[0.7], [0.5], [0.25]], 2.1375), ([[0.7, 0.1], [0.5]], 2.05)])
def test_chain_and_its_tree_are_worth_unlike(table: list[list[float]], tau: float) -> None:
    chain = Chain(len(table))
    assert expected_tau(chain, table) == expected_tau(Tree.static(chain.paths), table) == pytest.approx(tau)
