"""How good a head is while it trains: tau measured by the generator, and tau simulated from the head's ranks on the same answers.

The target answers the prompts once, greedily, and its states are kept; from then on a simulation costs one pass of the head, and any tree
can be tried on the same ranks. Of several processes each answers, measures and ranks its share of the prompts; what they hand in are counts
and ranks, so that the figures are those of one process, on each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from spectrain.config import ShapeConfig
from spectrain.data.batches import Batch
from spectrain.data.rows import Row
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Shape, StaticTree, Tree
from spectrain.evaluation.measure import Acceptance, measured_acceptance
from spectrain.evaluation.metrics import acceptance
from spectrain.evaluation.processes import ALONE, Processes
from spectrain.target.features import OnlineFeatures
from spectrain.target.model import Target
from spectrain.training.simulate import Ranks, accepted_chain, accepted_tree, rank_table, ranks_of, walk
from spectrain.yields import Costs

PROBE_TOKENS = 48  # new tokens an answer
BATCH_TOKENS = 2048  # tokens a pass of the head, padding included
T = TypeVar("T")
R = TypeVar("R")


class Probe:
    """probe(head) -> figures for choosing the best checkpoint, on the prompts of some rows (their answers play no part).

    shapes: the chain that is measured and simulated; width, depth and budget of the tree that is simulated. processes: which of the rows
    are this process's; all of them make and call the probe together. Raises ValueError when the target says nothing to any of the prompts.
    """

    def __init__(
        self, target: Target, rows: Sequence[Row], shapes: ShapeConfig, as_drafter: Callable[[Any], Drafter], *,
        max_new_tokens: int = PROBE_TOKENS, processes: Processes = ALONE,
    ) -> None:  # fmt: skip
        self._target, self._shapes, self._as_drafter, self._max_new_tokens = target, shapes, as_drafter, max_new_tokens
        self._processes = processes
        answers = for_all(processes, rows, self._answers)
        answered = [_answered(row, tokens) for row, tokens in zip(rows, answers, strict=True) if len(tokens) > 1]
        if not answered:
            said = f"{target.name} ends its answer to each of the {len(rows)} prompts that were kept out at the first token"
            raise ValueError(f"{said}: there is no draft to accept; keep out others, or none: --set data.prepare.validation_per_domain=0")
        self.rows = sorted(answered, key=len)
        self._own = processes.share(self.rows)
        self._batches: dict[tuple[int, ...], list[Batch]] = {}  # by the states that a head reads

    def __call__(self, head: Any) -> dict[str, Any]:
        """Measured: `measured_tau` (macro over domains), tokens and rounds, `tau_by_domain`, `acceptance` by depth. Simulated on the same
        prompts: `sim_tau_chain`, tokens and rounds, and `sim_tau_tree` of the tree `sim_tree`."""
        line = Chain(self._shapes.within(head.max_depth).chain)
        measured, ranks = self.measured(head, line), self.ranks(head)
        tree = self.best_tree(ranks)
        chain, in_tree = self.simulated(ranks, line), self.simulated(ranks, tree)
        return {
            "measured_tau": measured.tau, "measured_tokens": measured.tokens, "measured_rounds": measured.rounds,
            "tau_by_domain": measured.taus, "acceptance": acceptance(measured.steps, line.depth)[0],
            "sim_tau_chain": chain.tau, "sim_tokens": chain.tokens, "sim_rounds": chain.rounds,
            "sim_tau_tree": in_tree.tau, "sim_tree_rounds": in_tree.rounds, "sim_tree": str(tree),
        }  # fmt: skip

    def _answers(self, rows: Sequence[Row]) -> list[list[int]]:
        prompts = [row.prompt_ids for row in rows]
        return [row.tokens for row in generate(self._target, prompts, max_new_tokens=self._max_new_tokens).rows] if prompts else []

    def measured(self, head: Any, shape: Shape) -> Acceptance:
        """By the generator."""
        drafter, most = self._as_drafter(head), self._max_new_tokens
        own = measured_acceptance(self._target, self._own, drafter, shape, max_new_tokens=most) if self._own else Acceptance({})
        sums = {row.domain: (0, 0) for row in self.rows}
        for domain, (tokens, rounds) in self._processes.gathered(list(own.by_domain.items())):
            sums[domain] = sums[domain][0] + tokens, sums[domain][1] + rounds
        return Acceptance(sums, self._processes.gathered(own.steps))

    def ranks(self, head: Any) -> Ranks:
        """The head's ranks along the answers, as deep as chain and tree need them; a line is a row of `rows`."""
        s, ids = self._shapes.within(head.max_depth), tuple(head.layer_ids)
        if ids not in self._batches:
            self._batches[ids] = _batches(OnlineFeatures(self._target, self._own, ids, last_state="none"))
        steps, width = max(s.chain, s.tree_depth), s.tree_top_k
        own = None
        if self._own:
            own = ranks_of(head, self._batches[ids], embed_VW=self._target.embedding_VW, steps=steps, width=width)
        return _together([part for part in self._processes.gathered([own]) if part is not None], self._processes)

    def simulated(self, ranks: Ranks, shape: Chain | StaticTree) -> Acceptance:
        """By a walk over the answers; ValueError for a shape deeper or wider than the ranks."""
        depth = shape.depth
        if depth > len(ranks.rank_KR) or shape.width > ranks.width:
            known = f"ranks are known to depth {len(ranks.rank_KR)} and width {ranks.width}"
            raise ValueError(f"{shape} has depth {depth} and width {shape.width}, {known}; give the probe shapes of that size")
        rank_KR, counts_KR = ranks.rank_KR[:depth], ranks.counts_KR[:depth]
        accepted_R = accepted_chain(rank_KR, counts_KR) if isinstance(shape, Chain) else accepted_tree(rank_KR, counts_KR, shape.paths)
        found = walk(accepted_R, ranks.row_R)
        sums = {row.domain: (0, 0) for row in self.rows}
        lines = ranks.line_R[found.first_A].tolist()
        for line, tokens, rounds in zip(lines, found.tokens_A.tolist(), found.rounds_A.tolist(), strict=True):
            domain = self.rows[line].domain
            sums[domain] = sums[domain][0] + tokens, sums[domain][1] + rounds
        return Acceptance(sums)

    def best_tree(self, ranks: Ranks) -> StaticTree:
        """The static tree of the settings' depth, width and budget with the most expected tokens by these ranks, nodes being free."""
        s = self._shapes
        table = rank_table(ranks.rank_KR[: s.tree_depth], ranks.counts_KR[: s.tree_depth], width=s.tree_top_k)
        return Tree.optimised(table, Costs(seconds=1.0, v=(1.0, 1.0), c=0.0), max_budget=s.tree_budget)


def for_all(processes: Processes, items: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
    """What `work` makes of each item, in their order, on every process: each works on its share, all on all where nothing is split."""
    parts = processes.each(list(work(processes.share(items))))
    count = processes.number if processes.splits else 1
    return [parts[i % count][i // count] for i in range(len(items))]


def _together(parts: Sequence[Ranks], processes: Processes) -> Ranks:
    """Ranks that the processes made of their shares of the rows, with lines numbered as the rows are, and gaps between the parts."""
    if len(parts) == 1:
        return parts[0]
    first, numbered = 0, []
    for index, part in enumerate(parts):
        numbered.append(replace(part, row_R=part.row_R + first, line_R=part.line_R * processes.number + index))
        first += int(part.row_R.max()) + 2
    return Ranks(
        parts[0].width, torch.cat([p.rank_KR for p in numbered], dim=1), torch.cat([p.counts_KR for p in numbered], dim=1),
        torch.cat([p.row_R for p in numbered]), torch.cat([p.line_R for p in numbered]),
    )  # fmt: skip


def _answered(row: Row, tokens: Sequence[int]) -> Row:
    """The prompt of a row with this answer."""
    prompt = row.prompt_ids
    return Row(row.id, row.domain, np.array([*prompt, *tokens]), np.array([0] * len(prompt) + [1] * len(tokens)))


def _batches(samples: OnlineFeatures) -> list[Batch]:
    """All samples in their order, some at a time, with their states in memory."""
    groups: list[list[int]] = []
    for i, row in enumerate(samples.rows):
        if groups and (1 + len(groups[-1])) * max(len(row), *(len(samples.rows[j]) for j in groups[-1])) <= BATCH_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    with torch.no_grad():
        return [samples.batch(group) for group in groups]
