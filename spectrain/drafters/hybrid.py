"""Two drafters in one: each row of each round takes the proposal that expects more accepted drafts.

The choice looks at nothing but the committed text and the proposals, so the merged draft is fixed before the target's coins: as a
point mass it is lossless, whatever laws the parts could draw from.

Legend: B rows, N nodes, F width of the states of both parts, side by side in rising layer order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.drafter import Drafter, DraftSession, Round
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.packing import DECAY, walk
from spectrain.target.model import Target

PRIOR = 2.0  # drafts that every part is taken to have promised and kept before its first proposal


@dataclass(frozen=True)
class Hybrid:
    """`first` (the cheap one, of equals the one taken) and `second`; both must estimate (`DraftTree.expected_B`).

    ask_below: rows for which `first` expects at least this many accepted drafts do not ask `second`; None: always ask both.
    calibrate: scale each part's estimates by what came of its last ones in that row. Every proposal is judged by the tokens committed
    after it, whether it was taken or not (arXiv 2510.20064).
    """

    first: Drafter
    second: Drafter
    ask_below: float | None = None
    calibrate: bool = True
    has_q: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.ask_below is not None and self.ask_below <= 0:
            raise ValueError(f"Hybrid: ask_below must be above 0, found {self.ask_below}; with None the second part is always asked")

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(sorted({*self.first.layer_ids, *self.second.layer_ids}))

    def start(self, target: Target, rows: int, max_length: int) -> "_HybridSession":
        """A session of both parts; ValueError where one of them refuses the target."""
        layers = self.layer_ids
        parts = [
            _Part(d, d.start(target, rows, max_length), [layers.index(i) for i in d.layer_ids], [Trust() for _ in range(rows)])
            for d in (self.first, self.second)
        ]
        return _HybridSession(parts, self.ask_below, self.calibrate)


class Trust:
    """How many of the drafts that one part promised for one row came true, lately."""

    def __init__(self) -> None:
        self._promised = self._kept = PRIOR
        self._open: tuple[int, float, list[int], list[int]] | None = None  # committed length, estimate, tokens and parents of the drafts

    @property
    def factor(self) -> float:
        """What to multiply the next estimate with; 1 before the first."""
        return self._kept / self._promised

    def note(self, length: int, expected: float, tokens: list[int], parents: list[int]) -> None:
        """A draft was proposed behind `length` committed tokens."""
        self._open = (length, expected, tokens, parents) if tokens else None

    def settle(self, ids: Sequence[int]) -> None:
        """Judge the last proposal by what was committed since."""
        if self._open is None or len(ids) == self._open[0]:
            return
        length, expected, tokens, parents = self._open
        self._open = None
        self._promised = DECAY * self._promised + expected
        self._kept = DECAY * self._kept + len(walk(tokens, parents, ids[length:]))


@dataclass
class _Part:
    drafter: Drafter
    session: DraftSession
    columns: list[int]  # places of its states, in its own order, among those of both
    trust: list[Trust]  # by row

    def propose(self, round: Round, *, calibrate: bool) -> tuple[DraftTree, Tensor] | None:
        """Its tree and estimate."""
        for trust, ids in zip(self.trust, round.committed, strict=True):
            trust.settle(ids)
        tree = self.session.propose(round)
        if tree is None:
            return None
        if tree.expected_B is None:
            raise ValueError(f"{type(self.drafter).__name__} gives no estimate (expected_B) with its drafts; Hybrid cannot weigh it")
        if not calibrate:
            return tree, tree.expected_B
        factor_B = tree.expected_B.new_tensor([trust.factor for trust in self.trust])
        rows = zip(tree.tokens_BN.tolist(), tree.parents_BN.tolist(), tree.num_B.tolist(), tree.expected_B.tolist(), strict=True)
        for trust, ids, (tokens, parents, num, expected) in zip(self.trust, round.committed, rows, strict=True):
            trust.note(len(ids), expected, tokens[1:num], parents[1:num])
        return tree, tree.expected_B * factor_B


@dataclass
class _HybridSession:
    parts: list[_Part]
    ask_below: float | None
    calibrate: bool

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """Both parts see everything, each the states that it asked for, in the order in which it did."""
        count = len({c for part in self.parts for c in part.columns})
        for part in self.parts:
            own_BNF = states_BNF
            if states_BNF is not None and part.columns != list(range(count)):
                pieces = states_BNF.chunk(count, dim=-1)
                own_BNF = torch.cat([pieces[c] for c in part.columns], dim=-1) if part.columns else None
            part.session.observe(own_BNF, next_BN, count_B)

    def select(self, rows_R: Tensor) -> None:
        for part in self.parts:
            part.session.select(rows_R)
            part.trust = [part.trust[b] for b in rows_R.tolist()]

    def rewind(self) -> None:
        self._tell("rewind")

    def finish(self, answers: Sequence[tuple[Sequence[int], int]]) -> None:
        """Passed on to the parts that want it."""
        self._tell("finish", answers)

    def _tell(self, name: str, *args: Any) -> None:
        for part in self.parts:
            method = getattr(part.session, name, None)
            if method is not None:
                method(*args)

    def propose(self, round: Round) -> DraftTree | None:
        ask = replace(round, law="point_mass", coins=None, estimate=True)
        first = self.parts[0].propose(ask, calibrate=self.calibrate)
        if first is not None and self.ask_below is not None:
            sure = [expected >= self.ask_below for expected in first[1].tolist()]
            ask = replace(ask, depth_B=[0 if done else limit for done, limit in zip(sure, ask.limits(), strict=True)])
        second = self.parts[1].propose(ask, calibrate=self.calibrate) if any(ask.limits()) else None
        if first is None or second is None:
            found = first or second
            return None if found is None else replace(found[0], law="point_mass", q_BNV=None)
        return merged(*first, *second)


def merged(a: DraftTree, a_expected_B: Tensor, b: DraftTree, b_expected_B: Tensor) -> DraftTree:
    """In each row the tree of `b` where it expects more, otherwise that of `a`; a point mass."""
    use_b_B = b_expected_B > a_expected_B
    width = max(a.width, b.width)
    pairs = ((_widened(x, width), _widened(y, width)) for x, y in ((a.tokens_BN, b.tokens_BN), (a.parents_BN, b.parents_BN)))
    tokens_BN, parents_BN = (torch.where(use_b_B[:, None], y, x) for x, y in pairs)
    num_B = torch.where(use_b_B, b.num_B, a.num_B)
    expected_B = torch.where(use_b_B, b_expected_B, a_expected_B)
    is_chain = a.is_chain and b.is_chain
    if is_chain:  # also behind the shorter one's end
        parents_BN = torch.arange(-1, width - 1, device=parents_BN.device).expand_as(parents_BN)
    return DraftTree(tokens_BN, parents_BN, num_B, "point_mass", is_chain=is_chain, expected_B=expected_B)


def _widened(x_BN: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x_BN, (0, width - x_BN.shape[1]))
