"""Trees from a head's measured acceptance by depth and rank: what is counted, which tree it makes, what that tree is worth elsewhere.

Counted are the rounds of a walk over the target's own greedy answers, at each depth those whose true tokens so far were all among the
head's first choices: of them, how many have choice m as the next true token. Two other ways were tried on held-out prompts. Shares by
depth alone, of all rows of the answers (Medusa's, arXiv 2401.10774), and counts of whole paths, smoothed by those of shorter ones, make
trees that accept just as much; but both take rows that no round begins at for rounds. Those are the easy rows: the tokens that a head
guesses are the ones that a round goes over. So their products predicted tau up to 0.3 too high; these ones come within the noise up to
30 nodes, and within 0.1 beyond. What a tree is expected to give is therefore measured, too: on prompts that were left out of the counts.

Legend: K depths, R counted rows (see training/simulate.py), M ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.shapes import StaticTree, Tree, expected_tau
from spectrain.evaluation.metrics import bootstrap, ratio
from spectrain.training.simulate import Ranks, accepted_tree, walk
from spectrain.yields import Costs

WIDTH = 10  # ranks of a table: as many as dynamic trees look at
BUDGETS = (4, 8, 16, 24, 32, 48, 64)
PARTS = 7  # of the prompts: each is left out once
STEADY = 0.9  # a larger pass timed below this share of a smaller one is no noise
FREE = Costs(seconds=1.0, v=(1.0, 1.0), c=0.0)  # with these the best tree is the one with the most tokens


@dataclass(frozen=True)
class Counts:
    """numerator[d][m]: rounds whose true token at depth d + 1 is choice m; denominator[d]: rounds that came so far and go on."""

    numerator: list[list[int]]
    denominator: list[int]

    @property
    def table(self) -> list[list[float]]:
        """Shares (an acceptance table of `yields`), up to the first depth that no round came to."""
        reached = [n for n in self.denominator if n]
        return [[count / n for count in row] for row, n in zip(self.numerator, reached, strict=False)]


def joined(parts: Sequence[Ranks]) -> Ranks:
    """Ranks of several groups of answers as one; ValueError without a part."""
    if not parts:
        raise ValueError("no answers to count on")
    moved, row, line = [], 0, 0
    for part in parts:
        moved.append(replace(part, row_R=part.row_R + row, line_R=part.line_R + line))
        row, line = int(moved[-1].row_R[-1]) + 2, int(moved[-1].line_R[-1]) + 1  # a gap between answers
    names = ("rank_KR", "counts_KR", "row_R", "line_R")
    return Ranks(parts[0].width, *(torch.cat([getattr(part, name) for part in moved], dim=-1) for name in names))


def of_lines(ranks: Ranks, lines: Sequence[int]) -> Ranks:
    """The ranks along some of the answers."""
    kept_R = torch.isin(ranks.line_R, torch.tensor(lines, dtype=torch.long))
    return Ranks(ranks.width, ranks.rank_KR[:, kept_R], ranks.counts_KR[:, kept_R], ranks.row_R[kept_R], ranks.line_R[kept_R])


def begins(accepted_R: Tensor, row_R: Tensor) -> Tensor:
    """Rows [R] at which a round begins, where a round from row r accepts accepted_R[r] drafts (`simulate.walk`)."""
    begins_R = torch.zeros_like(row_R, dtype=torch.bool)
    new_R = torch.cat([begins_R.new_ones(min(1, len(row_R))), row_R.diff() != 1])
    answer_R = torch.cat([new_R.long().cumsum(0), row_R.new_full((1,), -1)])  # the last entry: of no answer
    at_A = new_R.nonzero()[:, 0]
    while len(at_A):  # once a round of the longest answer
        begins_R[at_A] = True
        next_A = (at_A + 1 + accepted_R[at_A]).clamp(max=len(row_R))
        at_A = next_A[answer_R[next_A] == answer_R[at_A]]
    return begins_R


def counted(ranks: Ranks, begins_R: Tensor) -> Counts:
    """Count the rounds that begin at some rows; a round comes to depth d + 1 where its d true tokens were all among the choices."""
    numerator, denominator, came_R = [], [], begins_R
    for rank_R, counts_R in zip(ranks.rank_KR, ranks.counts_KR, strict=True):
        came_R = came_R & counts_R
        numerator.append(torch.bincount(rank_R[came_R], minlength=ranks.width)[: ranks.width].tolist())
        denominator.append(int(came_R.sum()))
        came_R = came_R & (rank_R < ranks.width)
    return Counts(numerator, denominator)


def rounds_of(ranks: Ranks, *, nodes: int) -> Tensor:
    """Rows [R] where the rounds of a tree of `nodes` nodes begin: the best one by the counts of all rows. Which tree makes little odds."""
    every_R = torch.ones_like(ranks.row_R, dtype=torch.bool)
    tree = Tree.optimised(counted(ranks, every_R).table, FREE, max_budget=nodes)
    return begins(accepted_tree(ranks.rank_KR, ranks.counts_KR, tree.paths), ranks.row_R)


def best_of(table: Sequence[Sequence[float]], costs: Costs, *, nodes: int) -> StaticTree:
    """The tree of `nodes` nodes (fewer where the table has no more) with the most tokens per cost at batch 1, whether it pays or not."""
    trees = [Tree.optimised(table[:depth], FREE, max_budget=nodes) for depth in range(1, len(table) + 1)]
    most = max(tree.budget for tree in trees)
    full = [tree for tree in trees if tree.budget == most]  # a flat tree may have too few ranks
    return max(full, key=lambda tree: expected_tau(tree, table) / costs.break_even(tree.depth, max(1, most)))


def left_out(ranks: Ranks, tree: StaticTree, *, nodes: int) -> list[tuple[float, float]]:
    """(tokens, rounds) of each answer by a tree of this size and depth, fitted without that answer; empty for a single answer.

    nodes: as in `rounds_of`.
    """
    lines = sorted(set(ranks.line_R.tolist()))
    found: list[tuple[float, float]] = []
    for out in _parts(lines):
        fitted = of_lines(ranks, [line for line in lines if line not in out])
        table = counted(fitted, rounds_of(fitted, nodes=nodes)).table
        other = Tree.optimised(table[: tree.depth], FREE, max_budget=tree.budget)
        rest = of_lines(ranks, sorted(out))
        walked = walk(accepted_tree(rest.rank_KR, rest.counts_KR, other.paths), rest.row_R)
        found += zip(walked.tokens_A.tolist(), walked.rounds_A.tolist(), strict=True)
    return found


def _parts(lines: Sequence[int]) -> Iterator[set[int]]:
    """Groups of answers, each to be left out once."""
    if len(lines) > 1:
        parts = min(PARTS, len(lines))
        yield from (set(lines[part::parts]) for part in range(parts))


def described(tree: StaticTree, table: Sequence[Sequence[float]], costs: Costs, ranks: Ranks, *, nodes: int) -> dict[str, Any]:
    """A tree with what it is expected to give at batch 1: `tau` on answers that it was not fitted to (micro, with its interval over
    prompts), `tau_table` by its own table, and the speed-up that tau and costs come to. None where nothing can be said."""
    even = costs.break_even(tree.depth, tree.budget) if tree.paths else 1.0
    entry = {
        "paths": [list(path) for path in tree.paths], "nodes": tree.budget, "depth": tree.depth, "width": tree.width,
        "break_even": even, "tau_table": expected_tau(tree, table), "tau": None, "lo": None, "hi": None, "speedup": None,
    }  # fmt: skip
    pairs = left_out(ranks, tree, nodes=nodes) if tree.paths else []
    if pairs:
        tau = bootstrap(pairs, ratio)
        entry |= {"tau": tau.value, "lo": tau.lo, "hi": tau.hi, "speedup": tau.value / even}
    return entry


def fitted(ranks: Ranks, domains: Sequence[str], costs: Costs, *, nodes: int) -> dict[str, Any]:
    """Counts and trees from ranks along answers; domains: of each answer.

    `tree`: the one with the best predicted speed-up at batch 1, without paths where none gains; `budgets`: the best one of each of some
    sizes; `counts`: all over and by domain. nodes: as in `rounds_of`. ValueError when no draft follows any token.
    """
    begins_R = rounds_of(ranks, nodes=nodes)
    counts = counted(ranks, begins_R)
    if not any(map(sum, counts.numerator)):
        raise ValueError("the head's choices never hold the target's next token, so there is no tree to make; train it further")
    domain_of = {line: domain for line, domain in enumerate(domains)}
    by_domain = {
        domain: counted(ranks, begins_R & torch.isin(ranks.line_R, torch.tensor([i for i, d in domain_of.items() if d == domain])))
        for domain in dict.fromkeys(domains)
    }
    table = counts.table
    best = Tree.optimised(table, costs, max_budget=max(BUDGETS))
    sized = {tree.budget: tree for tree in (best_of(table, costs, nodes=n) for n in BUDGETS)}
    return {
        "tree": described(best, table, costs, ranks, nodes=nodes),
        "budgets": [described(tree, table, costs, ranks, nodes=nodes) for tree in sized.values()],
        "counts": {"all": vars(counts), "by_domain": {domain: vars(found) for domain, found in by_domain.items()}},
    }


def rising(costs: Costs) -> tuple[Costs, str]:
    """The costs with passes that cost no less than smaller ones, and a warning where they were timed otherwise by more than noise."""
    low = min(costs.v)
    steady = replace(costs, v=tuple(accumulate(costs.v, max)))
    if low >= STEADY:
        return steady, ""
    n = 1 + costs.v.index(low)
    return steady, (
        f"a pass over {n} positions was timed at {low:.2f} of one over 1: the machine was busy, so the costs, and the size of the best "
        "tree, are not to be trusted; run it again on a quiet machine"
    )


def sentence(content: dict[str, Any]) -> str:
    """One line: what the tree is and is expected to give, or that none is predicted to pay."""
    tree = content["tree"]
    if tree["paths"]:
        shape = "A chain" if tree["width"] == 1 else "A tree"
        return f"{shape} of {tree['nodes']} nodes, depth {tree['depth']}, width {tree['width']}: {_worth(tree)}."
    known = [entry for entry in content["budgets"] if entry["tau"] is not None]
    if not known:
        return "No tree is predicted to pay at batch 1."
    best = max(known, key=lambda entry: entry["speedup"])
    return f"No tree is predicted to pay at batch 1: the best of those tried, of {best['nodes']} nodes, has {_worth(best)}."


def _worth(entry: dict[str, Any]) -> str:
    even = f"a round costs {entry['break_even']:.2f} plain passes"
    if entry["tau"] is None:
        return f"expected tau {entry['tau_table']:.2f} by its own table (too few prompts to leave some out), {even}"
    span = f"[{entry['lo']:.2f}, {entry['hi']:.2f}]"
    return f"expected tau {entry['tau']:.2f} {span} on prompts it is not fitted to, {even}: {entry['speedup']:.2f} times plain decoding"
