"""How good a head is while it trains: tau measured by the generator, and tau simulated from the head's ranks on the same answers.

The target answers the prompts once, greedily, and its states are kept; from then on a simulation costs one pass of the head, and any tree
can be tried on the same ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

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
from spectrain.target.features import OnlineFeatures
from spectrain.target.model import Target
from spectrain.training.simulate import Ranks, accepted_chain, accepted_tree, rank_table, ranks_of, walk
from spectrain.yields import Costs

PROBE_TOKENS = 48  # new tokens an answer
BATCH_TOKENS = 2048  # tokens a pass of the head, padding included


class Probe:
    """probe(head) -> figures for choosing the best checkpoint, on the prompts of some rows (their answers play no part).

    shapes: the chain that is measured and simulated; width, depth and budget of the tree that is simulated. Raises ValueError when the
    target says nothing to any of the prompts.
    """

    def __init__(
        self, target: Target, rows: Sequence[Row], shapes: ShapeConfig, as_drafter: Callable[[Any], Drafter], *,
        max_new_tokens: int = PROBE_TOKENS,
    ) -> None:  # fmt: skip
        self._target, self._shapes, self._as_drafter, self._max_new_tokens = target, shapes, as_drafter, max_new_tokens
        found = generate(target, [row.prompt_ids for row in rows], max_new_tokens=max_new_tokens).rows
        answered = [_answered(row, answer.tokens) for row, answer in zip(rows, found, strict=True) if len(answer.tokens) > 1]
        if not answered:
            said = f"{target.name} ends its answer to each of the {len(rows)} prompts that were kept out at the first token"
            raise ValueError(f"{said}: there is no draft to accept; keep out others, or none: --set data.prepare.validation_per_domain=0")
        self.rows = sorted(answered, key=len)
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

    def measured(self, head: Any, shape: Shape) -> Acceptance:
        """By the generator."""
        return measured_acceptance(self._target, self.rows, self._as_drafter(head), shape, max_new_tokens=self._max_new_tokens)

    def ranks(self, head: Any) -> Ranks:
        """The head's ranks along the answers, as deep as chain and tree need them."""
        s, ids = self._shapes.within(head.max_depth), tuple(head.layer_ids)
        if ids not in self._batches:
            self._batches[ids] = _batches(OnlineFeatures(self._target, self.rows, ids, last_state="none"))
        steps = max(s.chain, s.tree_depth)
        return ranks_of(head, self._batches[ids], embed_VW=self._target.embedding_VW, steps=steps, width=s.tree_top_k)

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
