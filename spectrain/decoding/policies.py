"""How much to draft, decided anew each round from what earlier rounds accepted. Pure Python; the generator asks, drafters obey.

Every policy is lossless: a plan is made from the outcomes of earlier rounds, the number of rows and measured costs, hence before any
token of its own round is drawn, and under any rule a draft whose size is fixed beforehand leaves the law exact. The one decision
inside a round, `stop_below`, ends a chain *after* the token in doubt; dropping that token would change the law of what is kept
(inference with sampled drafts: arXiv 2302.01318). Greedy answers never change. Sampled ones keep their law; their tokens also stay
those of the row alone where plans look at the row only: kinds `heuristic`, `confidence` and `ema` on chains. `marginal`, `table`, and
every kind on a tree (one depth for the batch), follow the batch, so a row's draws may differ from those of its run alone.

Legend: B rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

from spectrain.decoding.counts import Counts, tau_by_depth
from spectrain.decoding.shapes import DynamicTree, Shape, trimmed
from spectrain.yields import Costs

LENGTH_ROUNDS = 2.0  # at first, of drafts as long as they were asked for
KINDS = ("heuristic", "confidence", "ema", "marginal", "table")


@dataclass(frozen=True)
class Plan:
    """One round. depth_B: most drafts on a path of each row, all 0 for no draft.

    budget: most drafted nodes of a tree, None for the shape's. stop_below: end a row's chain after a token whose draft probability is
    smaller (0: never); that token is kept.
    """

    depth_B: list[int]
    budget: int | None = None
    stop_below: float = 0.0


@dataclass(frozen=True)
class Adaptive:
    """Settings of a policy; `start` gives the state for one batch. The shape is the upper limit of every plan.

    heuristic: two levels more after a round whose drafts were all accepted, else one less, at least 1 (Hugging Face's dynamic
    speculation lookahead). confidence: full depth, a chain ends after a token below `threshold` (0.4, the same source).
    ema: one level more than the moving average of a row's accepted drafts (`weight` of the newest: SGLang's 0.2); off for a row whose
    average falls below `off_below`.
    marginal: the depth, for trees the budget too, with the most expected tokens per second for the rows at work, by `costs` and each
    row's conditional acceptance at each depth: counts that lose 1 - `memory` a round, on top of `prior_rounds` rounds that accept
    `prior` (a depth never tried takes after the one above it; or one by depth, as measured); off where nothing gains. A drafter may have
    nothing to say (a text not seen before): of the rounds that ask it, a row drafts in the share seen so far, at first `prior_share`, and a
    round in which none does costs what plain decoding does. On a tree, a level's drafts all miss with a chance that falls as
    budget^-`spread` (Sequoia's power law, arXiv 2402.12374). Needs costs, for batches `Costs.by_batch` best of all.
    While off, ema and marginal probe after `probe_after` rounds, then after twice as many each time, `probe_most` at most.
    table: as many drafted tokens a row (the depth of a chain, the nodes of a tree) as `drafts` says for the rows at work, such as
    {1: 5, 8: 3, 32: 0}; between two of its batches those of the larger one, where drafting pays less, and beyond the last one its own.
    """

    kind: str
    costs: Costs | None = None
    threshold: float = 0.4
    weight: float = 0.2
    off_below: float = 0.1
    memory: float = 0.97
    prior: float | Sequence[float] = 0.6
    prior_rounds: float = 2.0
    prior_share: float = 1.0
    spread: float = 0.5
    probe_after: int = 4
    probe_most: int = 64
    drafts: Mapping[int, int] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"policy {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        if self.kind == "marginal" and self.costs is None:
            raise ValueError("policy 'marginal' weighs tokens against costs; measure them: Adaptive('marginal', costs=st.measure_costs(…))")
        self._check_drafts()
        if not isinstance(self.prior, float | int):
            object.__setattr__(self, "prior", tuple(self.prior))
        for name in ("threshold", "weight", "memory", "prior"):
            value = getattr(self, name)
            if not all(0 < one < 1 for one in (value if isinstance(value, tuple) else (value,))) or value == ():
                raise ValueError(f"Adaptive: {name} must lie between 0 and 1, both excluded, found {value}")
        sizes = self.off_below >= 0 and self.prior_rounds > 0 and self.spread >= 0 and 0 < self.prior_share <= 1
        if not (sizes and 1 <= self.probe_after <= self.probe_most):
            found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("kind", "costs", "drafts")}
            raise ValueError(
                "Adaptive: needed off_below >= 0, prior_rounds > 0, spread >= 0, 0 < prior_share <= 1 and 1 <= probe_after <= probe_most, "
                f"found {found}"
            )

    def _check_drafts(self) -> None:
        if (self.drafts is not None) != (self.kind == "table"):
            found = f"found policy {self.kind!r}, drafts {self.drafts}"
            raise ValueError(f"drafts by batch and policy 'table' go together, {found}: Adaptive('table', drafts={{1: 5, 8: 3, 32: 0}})")
        if self.drafts is not None:
            object.__setattr__(self, "drafts", {int(rows): drafts for rows, drafts in self.drafts.items()})  # a JSON object has strings
            if not self.drafts or min(self.drafts) < 1 or not all(isinstance(k, int) and k >= 0 for k in self.drafts.values()):
                raise ValueError(f"drafts needs numbers of drafted tokens, 0 or more, by batches of 1 row or more, found {self.drafts}")

    def start(self, shape: Shape, rows: int) -> "PolicySession":
        """The state of `rows` rows about to decode with a shape."""
        if rows < 1:
            raise ValueError(f"a policy needs at least one row, found {rows}")
        if self.kind == "confidence" and not shape.is_chain:
            raise ValueError(f"policy 'confidence' ends chains, found {shape}; use a Chain, or policy 'marginal' for a tree")
        if self.kind == "marginal":
            return _Marginal(self, shape, rows)
        if self.kind == "table":
            return _Table(self, shape, rows)
        makes: dict[str, type[_Row]] = {"heuristic": _Stepping, "confidence": _Constant, "ema": _Average}
        make = makes[self.kind]
        return _ByRow(shape, [make(self, shape.depth) for _ in range(rows)], self.threshold if self.kind == "confidence" else 0.0)


class PolicySession(ABC):
    """A policy's state for one batch: `plan`, the round, `observe`; `select` when rows leave."""

    @abstractmethod
    def plan(self, live: Sequence[bool] | None = None) -> Plan:
        """The next round's draft; live: rows that still want tokens (None: all). Finished rows get depth 0 and are not considered."""

    @abstractmethod
    def observe(self, drafted_B: Sequence[int], accepted_B: Sequence[int], depth_B: Sequence[int]) -> None:
        """The round's outcome by row: drafted nodes, drafts accepted by the rule, levels of the draft (0 where there was none)."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""


class _Row(ABC):
    """One row that decides for itself."""

    def __init__(self, settings: Adaptive, most: int) -> None:
        self.settings, self.most = settings, most
        self.wanted = most

    @property
    def depth(self) -> int:
        """Of the next round."""
        return self.wanted

    @abstractmethod
    def learn(self, accepted: int, depth: int) -> None:
        """A round's outcome; depth 0 where nothing was drafted."""


class _Stepping(_Row):
    """Up by two when all was accepted, else down by one."""

    def learn(self, accepted: int, depth: int) -> None:
        if depth:
            self.wanted = min(self.most, max(1, self.wanted + (2 if accepted == depth else -1)))


class _Constant(_Row):
    """Full depth; doubts are the drafter's to see."""

    def learn(self, accepted: int, depth: int) -> None:
        """Nothing to learn."""


class _Average(_Row):
    """One more than the average of accepted drafts; 0 where that says that nothing is accepted, but for probes of depth 1."""

    def __init__(self, settings: Adaptive, most: int) -> None:
        super().__init__(settings, most)
        self._average, self._probe = float(most), _Probe(settings)

    @property
    def _on(self) -> bool:
        return self._average >= self.settings.off_below

    @property
    def depth(self) -> int:
        return min(self.most, 1 + int(self._average + 0.5) if self._on else int(self._probe.due))

    def learn(self, accepted: int, depth: int) -> None:
        was_on = self._on
        if depth:
            self._average += self.settings.weight * (accepted - self._average)
        self._probe.after(was_on=was_on, drafted=depth > 0, paid=accepted > 0)


class _Probe:
    """When to try again while off: at `probe_after` rounds, at once after a probe that paid, else after twice as many rounds."""

    def __init__(self, settings: Adaptive) -> None:
        self._first, self._most = settings.probe_after, settings.probe_most
        self._wait, self._waited = settings.probe_after, 0

    @property
    def due(self) -> bool:
        return self._waited >= self._wait

    def after(self, *, was_on: bool, drafted: bool, paid: bool) -> None:
        """Count one round. A due probe for which the drafter had nothing stays due."""
        if was_on:
            self._wait, self._waited = self._first, 0
        elif not drafted:
            self._waited += 1
        else:
            self._wait = 0 if paid else min(self._most, max(self._first, 2 * self._wait))
            self._waited = 0


class _ByRow(PolicySession):
    """Rows that decide for themselves; on a tree the batch drafts as deep as its deepest row."""

    def __init__(self, shape: Shape, rows: Sequence[_Row], stop_below: float) -> None:
        self._rows, self._stop_below, self._common = list(rows), stop_below, not shape.is_chain

    def plan(self, live: Sequence[bool] | None = None) -> Plan:
        going = _live(live, len(self._rows))
        depth_B = [row.depth if on else 0 for row, on in zip(self._rows, going, strict=True)]
        if self._common:
            depth_B = [max(depth_B) if on else 0 for on in going]
        return Plan(depth_B, stop_below=self._stop_below)

    def observe(self, drafted_B: Sequence[int], accepted_B: Sequence[int], depth_B: Sequence[int]) -> None:
        _check_outcome(len(self._rows), drafted_B, accepted_B, depth_B)
        for row, accepted, depth in zip(self._rows, accepted_B, depth_B, strict=True):
            row.learn(accepted, depth)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[b] for b in rows]


class _Table(PolicySession):
    """What a table says for the rows at work, whatever they accept."""

    def __init__(self, settings: Adaptive, shape: Shape, rows: int) -> None:
        assert settings.drafts is not None
        self._shape, self._rows, self._drafts = shape, rows, sorted(settings.drafts.items())

    def plan(self, live: Sequence[bool] | None = None) -> Plan:
        going = _live(live, self._rows)
        drafts = next((k for rows, k in self._drafts if rows >= sum(going)), self._drafts[-1][1])
        cut = trimmed(self._shape, depth=min(drafts, self._shape.depth), budget=min(drafts, self._shape.budget))
        depth = 0 if cut is None else cut.depth
        return Plan([depth if on else 0 for on in going], None if cut is None or cut.is_chain else cut.budget)

    def observe(self, drafted_B: Sequence[int], accepted_B: Sequence[int], depth_B: Sequence[int]) -> None:
        _check_outcome(self._rows, drafted_B, accepted_B, depth_B)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = len(rows)


@dataclass(frozen=True)
class _Choice:
    """A plan that could be made; scale: how much likelier a level's miss is than with the full budget."""

    depth: int
    nodes: int
    budget: int | None
    scale: float


class _Marginal(PolicySession):
    """One depth (and budget) for the batch: a pass is padded to its longest draft, so a shorter draft of one row saves nothing."""

    def __init__(self, settings: Adaptive, shape: Shape, rows: int) -> None:
        assert settings.costs is not None
        self._costs = settings.costs
        chances: dict[str, Any] = {name: getattr(settings, name) for name in ("memory", "prior", "prior_rounds", "prior_share")}
        self._rows = [Counts(shape.depth, **chances) for _ in range(rows)]
        self._choices = _choices(shape, settings.spread)
        # (rows at work, share of the longest draft asked for that comes) -> the tau that each choice must reach where something is drafted
        self._break_even: dict[tuple[int, float], list[float]] = {}
        self._memory, self._lengths, self._rounds = settings.memory, LENGTH_ROUNDS, LENGTH_ROUNDS
        self._probe = _Probe(settings)
        self._planned, self._on, self._needed = _Choice(0, 0, None, 1.0), True, 1.0
        self._asked: list[bool] = []
        self._known: tuple[list[bool], tuple[float, _Choice, float]] | None = None  # `_best` of these rows, while nothing was learnt

    def plan(self, live: Sequence[bool] | None = None) -> Plan:
        going = _live(live, len(self._rows))
        if self._known is None or self._known[0] != going:
            self._known = going, self._best([row for row, on in zip(self._rows, going, strict=True) if on])
        gain, choice, self._needed = self._known[1]
        self._on = gain > 1
        if not self._on and not self._probe.due:
            choice = _Choice(0, 0, None, 1.0)
        self._planned, self._asked = choice, [on and choice.depth > 0 for on in going]
        return Plan([choice.depth if on else 0 for on in going], choice.budget)

    def _best(self, rows: Sequence[Counts]) -> tuple[float, _Choice, float]:
        """The choice with the highest expected speed-up over plain decoding, that speed-up, and the choice's break-even."""
        if not rows or not self._choices:
            return 1.0, _Choice(0, 0, None, 1.0), 1.0
        key = len(rows), round(self._lengths / self._rounds, 1)
        if key not in self._break_even:
            self._break_even[key] = [self._costs.break_even(c.depth, max(1.0, c.nodes * key[1]), len(rows)) for c in self._choices]
        needed = self._break_even[key]
        misses, shares = [row.misses() for row in rows], [row.share() for row in rows]
        some = 1 - prod(1 - share for share in shares)  # chance that the round has drafts at all
        tau = {scale: tau_by_depth(misses, scale, shares) for scale in {c.scale for c in self._choices}}
        gains = [tau[c.scale][c.depth] / (1 - some + some * cost) for c, cost in zip(self._choices, needed, strict=True)]
        best = max(range(len(gains)), key=gains.__getitem__)
        return gains[best], self._choices[best], needed[best]

    def observe(self, drafted_B: Sequence[int], accepted_B: Sequence[int], depth_B: Sequence[int]) -> None:
        _check_outcome(len(self._rows), drafted_B, accepted_B, depth_B)
        drafting = [b for b, depth in enumerate(depth_B) if depth]
        for b, row in enumerate(self._rows):
            if depth_B[b] or (self._asked and self._asked[b]):
                row.learn(accepted_B[b], depth_B[b], self._planned.scale)
                self._known = None
        tau = 1 + sum(accepted_B) / max(sum(self._asked), len(drafting), 1)  # rows without a draft wait for those that have one
        if drafting and self._planned.nodes:
            self._lengths = self._memory * self._lengths + min(1.0, max(drafted_B) / self._planned.nodes)
            self._rounds = self._memory * self._rounds + 1
        self._probe.after(was_on=self._on, drafted=bool(drafting), paid=tau > self._needed)

    def select(self, rows: Sequence[int]) -> None:
        self._rows, self._known = [self._rows[b] for b in rows], None
        self._asked = [self._asked[b] for b in rows] if self._asked else []


def _choices(shape: Shape, spread: float) -> list[_Choice]:
    """Every depth of a chain; for a tree every depth with the full budget, half, a quarter … of it. The smallest come first."""
    found = []
    budget = shape.budget
    while budget:
        for depth in range(1, min(shape.depth, budget) + 1):
            cut = trimmed(shape, depth, budget)
            assert cut is not None
            if isinstance(cut, DynamicTree):  # all candidates of a shallow tree may be fewer than its budget
                nodes = min(budget, cut.top_k + (depth - 1) * cut.top_k**2)
            else:
                nodes = cut.budget
            if shape.is_chain:
                found.append(_Choice(depth, nodes, None, 1.0))
            elif cut.depth == depth:  # a static tree may lose its deepest level to the budget
                found.append(_Choice(depth, nodes, budget, (shape.budget / budget) ** spread))
        budget = 0 if shape.is_chain else budget // 2
    return sorted(found, key=lambda choice: (choice.nodes, choice.depth))


def _live(live: Sequence[bool] | None, rows: int) -> list[bool]:
    going = [True] * rows if live is None else list(live)
    if len(going) != rows:
        raise ValueError(f"the policy holds {rows} rows, `live` has {len(going)}; call select when rows leave")
    return going


def _check_outcome(rows: int, drafted_B: Sequence[int], accepted_B: Sequence[int], depth_B: Sequence[int]) -> None:
    if not len(drafted_B) == len(accepted_B) == len(depth_B) == rows:
        raise ValueError(
            f"the policy holds {rows} rows, the outcome has {len(drafted_B)}, {len(accepted_B)} and {len(depth_B)}; "
            "call select when rows leave"
        )
    for b, (drafted, accepted, depth) in enumerate(zip(drafted_B, accepted_B, depth_B, strict=True)):
        if not 0 <= accepted <= depth <= drafted:
            raise ValueError(f"row {b}: needed 0 <= accepted <= depth <= drafted, found {accepted}, {depth} and {drafted}")
