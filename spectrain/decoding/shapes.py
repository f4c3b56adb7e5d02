"""Shapes of a draft: how deep, how wide, how many nodes, drawn by which law. Plain values; drafters read them.

A path is the ranks from the root to a node: (0, 2) is the third child of the first child. Node 0 is the root, the last committed
token; `depth`, `budget` and `width` count drafted nodes only.

Legend: B rows, C candidates, N nodes.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.tree import Law
from spectrain.yields import Costs, check_table, tree_tau

Path = tuple[int, ...]
MOST_NODES = 1024  # of a tree in a file: a pass over more costs more than any draft saves, and masks grow with the square


@dataclass(frozen=True)
class Chain:
    """A chain of `depth` drafts. law: `auto` (see `resolve_law`), `point_mass` or `iid`."""

    depth: int
    law: str = "auto"

    def __post_init__(self) -> None:
        _check(self, self.depth, self.law, ("point_mass", "iid"))

    @property
    def budget(self) -> int:
        return self.depth

    @property
    def width(self) -> int:
        return 1

    @property
    def is_chain(self) -> bool:
        return True

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple((0,) * depth for depth in range(1, self.depth + 1))

    def __str__(self) -> str:
        return f"chain {self.depth}"


@dataclass(frozen=True)
class StaticTree:
    """A tree fixed before drafting: one path for every drafted node, in any order; kept level by level, siblings by rank.

    At depth d the child of rank k is the drafter's k-th choice (`point_mass`) or its k-th draw (`iid`, `without_replacement`).
    Without paths it is plain decoding. Raises ValueError for a path that cannot stand, by its number: empty, a rank that is no
    number from 0 on, twice there, without its parent, or (sampled laws) without the sibling drawn before it.
    """

    paths: tuple[Path, ...]
    law: str = "auto"

    def __post_init__(self) -> None:
        if self.law not in ("auto", "point_mass", "iid", "without_replacement"):
            raise ValueError(f"StaticTree: law {self.law!r} is unknown; choose one of auto, point_mass, iid, without_replacement")
        object.__setattr__(self, "paths", _sorted_paths(self.paths))
        if self.law in ("iid", "without_replacement") and (gap := self._gap):
            raise ValueError(
                f"StaticTree: path {gap} has no sibling of rank {gap[-1] - 1}, but with law {self.law!r} draw {gap[-1]} comes after all "
                "draws before it; add that path, or use law='point_mass'"
            )

    @cached_property
    def _gap(self) -> Path | None:
        """The first path whose sibling of the rank before it is missing."""
        known = set(self.paths)
        return next((path for path in self.paths if path[-1] and (*path[:-1], path[-1] - 1) not in known), None)

    @property
    def has_gaps(self) -> bool:
        """Whether ranks are left out among siblings, which only point masses allow."""
        return self._gap is not None

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Node number of each node's parent, -1 for the root; parents precede their children."""
        number = {(): 0, **{path: n for n, path in enumerate(self.paths, start=1)}}
        return (-1, *(number[path[:-1]] for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among its parent's children, -1 for the root."""
        return (-1, *(path[-1] for path in self.paths))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """levels[d]: the node numbers at depth d; levels[0] is the root alone."""
        depths = (0, *map(len, self.paths))
        return tuple(tuple(n for n, depth in enumerate(depths) if depth == d) for d in range(self.depth + 1))

    @property
    def depth(self) -> int:
        return len(self.paths[-1]) if self.paths else 0

    @property
    def budget(self) -> int:
        return len(self.paths)

    @property
    def width(self) -> int:
        """The largest rank + 1: how many choices of a drafter's law are looked at."""
        return max(self.ranks) + 1

    @property
    def is_chain(self) -> bool:
        return self.budget == self.depth

    def __str__(self) -> str:
        return f"static k={self.width} d={self.depth} n={self.budget}"


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858): beams of `top_k`, `depth` levels, the `budget` best nodes by joint probability kept."""

    top_k: int = 10
    depth: int = 7
    budget: int = 60
    law: str = "auto"

    def __post_init__(self) -> None:
        # Nodes are kept by their own probability: under a sampled law that would change the law of what is kept.
        _check(self, self.depth, self.law, ("point_mass",))
        if self.top_k < 1 or self.budget < 1:
            raise ValueError(f"{self}: top_k and budget must be at least 1")

    @property
    def width(self) -> int:
        return self.top_k

    @property
    def is_chain(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"tree k={self.top_k} d={self.depth} n={self.budget}"


Shape = Chain | StaticTree | DynamicTree


class Tree:
    """Names of the tree shapes."""

    @staticmethod
    def static(paths: Sequence[Sequence[int]], law: str = "auto") -> StaticTree:
        """A fixed tree, for example [[0], [1], [0, 0]] (the choices of Medusa, arXiv 2401.10774, and EAGLE-1)."""
        return StaticTree(tuple(paths), law)  # type: ignore[arg-type]  # normalised there

    @staticmethod
    def load(path: str | os.PathLike[str], nodes: int | None = None, law: str = "auto") -> StaticTree:
        """The tree of a file of `spectrain evaluate --write-tree` (or of a JSON list of paths); nodes: that of its `budgets` with so many.

        Without `nodes` it is the one for batch 1, which has no paths (plain decoding) where none was predicted to pay there. Raises
        ValueError for a file that is none, damaged, or holds no tree of that size, and for a tree of more than `MOST_NODES` nodes.
        """
        paths = _paths_in(os.fspath(path), nodes)
        try:
            return StaticTree(paths, law)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    @staticmethod
    def dynamic(top_k: int = 10, depth: int = 7, budget: int = 60) -> DynamicTree:
        return DynamicTree(top_k=top_k, depth=depth, budget=budget)

    @staticmethod
    def optimised(
        table: Sequence[Sequence[float]], costs: Costs, *, max_budget: int = 64, batch: int = 1, law: str = "auto"
    ) -> StaticTree:
        """The tree of at most `max_budget` nodes with the most expected tokens per unit of cost; without paths where none gains.

        table[d][k]: chance that the child of rank k at depth d + 1 is the accepted one given that its parent was (`yields`). The
        objective is Sequoia's (arXiv 2402.12374), with a chance for each depth: (1 + sum of the path products) / (c * depth + v(1 + n)).

        Sequoia finds the best tree of n nodes and at most D levels for every n and D by dynamic programming. Here the same optimum
        comes best first: no tree exceeds the sum of the n largest path products of at most D levels, and those n nodes are a tree,
        because a product never exceeds its parent's nor, where chances fall with rank, its elder sibling's. All n and D are tried, since
        the cost of drafting depends on D. Chances that rise with rank are noise of the measurement (or of ranks without order) and
        are averaged with their neighbours first.
        """
        check_table(table)
        if max_budget < 1:
            raise ValueError(f"max_budget must be at least 1, found {max_budget}; use drafter=None for plain decoding")
        falling = [_falling(row) for row in table]
        best: tuple[Path, ...] = ()
        best_gain = 1.0
        for limit in range(1, len(falling) + 1):
            paths: list[Path] = []
            tau, depth = 1.0, 0
            for path, product in _best_first(falling, limit, max_budget):
                paths.append(path)
                tau, depth = tau + product, max(depth, len(path))
                gain = tau / costs.break_even(depth, len(paths), batch)
                if gain > best_gain * (1 + 1e-12):  # a tie goes to the smaller tree, which comes first
                    best, best_gain = tuple(paths), gain
        return StaticTree(best, law)


def _best_first(table: Sequence[Sequence[float]], depth: int, budget: int) -> Iterator[tuple[Path, float]]:
    """Up to `budget` nodes of at most `depth` levels with their path products, largest first; rows of the table must fall."""
    heap: list[tuple[float, int, Path, float]] = []  # -product, depth, path, product of the parent

    def push(path: Path, above: float) -> None:
        row = table[len(path) - 1]
        if path[-1] < len(row) and row[path[-1]] * above > 0:
            heappush(heap, (-above * row[path[-1]], len(path), path, above))

    push((0,), 1.0)
    for _ in range(budget):
        if not heap:
            return
        negative, level, path, above = heappop(heap)
        yield path, -negative
        push((*path[:-1], path[-1] + 1), above)
        if level < depth:
            push((*path, 0), -negative)


def _falling(row: Sequence[float]) -> list[float]:
    """The closest row (least squares) that nowhere rises: neighbours that rise are averaged (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for chance in row:
        total, count = float(chance), 1
        while blocks and blocks[-1][0] * count < total * blocks[-1][1]:
            before, more = blocks.pop()
            total, count = total + before, count + more
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


def expected_tau(shape: Chain | StaticTree, table: Sequence[Sequence[float]]) -> float:
    """Expected tokens a round of a chain or static tree under an acceptance table (`yields.tree_tau`)."""
    return tree_tau(shape.paths, table)


def resolve_law(shape: Shape, *, temperature: float, has_q: bool) -> Law:
    """The law that drafts of a shape are drawn by; has_q: whether the drafter reports the law it draws from.

    `auto` is point mass at temperature 0, for a drafter without q, for a dynamic tree and for a static tree that leaves out ranks; else
    iid where nothing forks and without_replacement for a tree. Raises ValueError for a sampled law without q.
    """
    fixed = temperature == 0 or not has_q or isinstance(shape, DynamicTree) or (isinstance(shape, StaticTree) and shape.has_gaps)
    if shape.law == "point_mass" or (shape.law == "auto" and fixed):
        return "point_mass"
    if not has_q:
        raise ValueError(
            f"{shape}: law {shape.law!r} needs the law that drafts were drawn from, and this drafter has none (it looks tokens up or "
            "copies them); use law='auto' or 'point_mass', or a draft head"
        )
    if shape.law == "iid" or (shape.law == "auto" and shape.is_chain):
        return "iid"
    return "without_replacement"


def trimmed(shape: Shape, depth: int | None = None, budget: int | None = None) -> Shape | None:
    """The shape cut to a depth and a number of drafted nodes; None where nothing is left to draft.

    A static tree keeps the paths of the smallest sums of 1 + 2 * rank, parents and elder siblings included: a second choice counts as
    three first choices in a row (0.6^3 = 0.22), whose chances are alike for usual heads.
    """
    depth = shape.depth if depth is None else min(depth, shape.depth)
    budget = shape.budget if budget is None else min(budget, shape.budget)
    if depth < 0 or budget < 0:
        raise ValueError(f"{shape}: depth and budget must be at least 0, found {depth} and {budget}")
    if depth == 0 or budget == 0:
        return None
    if isinstance(shape, Chain):
        return replace(shape, depth=min(depth, budget))
    if isinstance(shape, DynamicTree):
        return replace(shape, depth=depth, budget=budget)
    shallow = (path for path in shape.paths if len(path) <= depth)
    likely = sorted(shallow, key=lambda path: (sum(1 + 2 * rank for rank in path), len(path), path))
    return replace(shape, paths=tuple(likely[:budget]))


def _paths_in(path: str, nodes: int | None) -> tuple[Path, ...]:
    """The paths that `Tree.load` reads."""
    if not os.path.isfile(path):
        raise ValueError(f"no file {path}; `spectrain evaluate --write-tree {path}` makes one")
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = json.load(file)
        trees: dict[int | None, Any] = {None: content if isinstance(content, list) else content["tree"]["paths"]}
        if isinstance(content, dict):
            trees |= {len(entry["paths"]): entry["paths"] for entry in content["budgets"]}
        paths = {size: tuple(map(tuple, found)) for size, found in trees.items() if size == nodes}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no file of a tree ({type(error).__name__}: {error}); make it anew with --write-tree") from error
    if nodes not in paths:
        sizes = ", ".join(str(size) for size in trees if size is not None) or "only one, without sizes"
        raise ValueError(f"{path} has no tree of {nodes} nodes; there are {sizes}")
    largest = max(len(paths[nodes]), *(1 + rank for found in paths[nodes] for rank in found if isinstance(rank, int)), 0)
    if largest > MOST_NODES:
        raise ValueError(f"{path} holds a tree of {largest:,} nodes or ranks, at most {MOST_NODES:,} are drafted; take a smaller one")
    return paths[nodes]


def _check(shape: object, depth: int, law: str, laws: tuple[str, ...]) -> None:
    name = type(shape).__name__
    if depth < 1:
        raise ValueError(f"{name}: depth must be at least 1, found {depth}; use drafter=None for plain decoding")
    if law not in ("auto", *laws):
        raise ValueError(f"{name}: law {law!r} is not available; choose auto or {' or '.join(laws)}, or draw trees with Tree.static")


def _sorted_paths(paths: Sequence[Sequence[int]]) -> tuple[Path, ...]:
    """Paths level by level, siblings by rank; ValueError for the first that cannot stand."""
    known: set[Path] = set()
    for number, path in enumerate(paths):
        if not isinstance(path, (tuple, list)) or not path:
            raise ValueError(f"StaticTree: path {number} is {path!r}; a path holds at least one rank, as in [[0], [1], [0, 0]]")
        if not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path):
            raise ValueError(f"StaticTree: path {number} is {path!r}; ranks are whole numbers from 0 on")
        if tuple(path) in known:
            raise ValueError(f"StaticTree: path {number}, {path!r}, stands twice; leave one out")
        known.add(tuple(path))
    for number, path in enumerate(paths):
        if len(path) > 1 and tuple(path[:-1]) not in known:
            raise ValueError(f"StaticTree: path {number}, {path!r}, has no parent; add {list(path[:-1])}")
    return tuple(sorted(known, key=lambda path: (len(path), path)))


def keep_best(scores_BC: Tensor, depth_BC: Tensor, budget: int) -> Tensor:
    """Candidates [B, N] (rising) with the highest joint log-probability; ties go to the shallower, so the tree stays connected.

    A child's score never exceeds its parent's, hence every ancestor of a kept node is kept. Where rounding makes them equal,
    the order (score, then depth) decides; candidates must be listed parents first.
    """
    order_BC = torch.argsort(depth_BC, dim=-1, stable=True)
    by_score_BC = torch.argsort(scores_BC.gather(1, order_BC), dim=-1, descending=True, stable=True)
    kept_BN = order_BC.gather(1, by_score_BC[:, :budget])
    return kept_BN.sort(dim=-1).values
