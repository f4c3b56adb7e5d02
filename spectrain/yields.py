"""What a draft is worth: survival -> tau, speed-up, break-even; what a device makes of it. Pure arithmetic; formulas of a draft from
arXiv 2211.17192, section 3.

Units: costs are in passes of the target over one position. c: one draft step; v: one verification pass.
An acceptance table says for trees what a list of conditional acceptances says for chains: table[d][k] is the chance that the child of
rank k at depth d + 1 is the accepted one, given that its parent was; beyond the table it is 0.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isfinite, prod
from operator import mul


@dataclass(frozen=True)
class Costs:
    """What passes cost on one machine, in passes over one position of one row (`seconds` each).

    v[n-1]: a pass over n positions of one row. c: one draft step (a level of a tree costs one); start: what drafting costs beside its
    steps, below 0 where the first draft comes with the settled tokens. other: accepting, committing and settling the tokens of a round
    with drafts; plain: what a round of plain decoding costs beside v(1). by_batch[B][n-1]: a pass over n positions of each of B rows;
    beside[B]: (c, start, other, plain) of a batch of B rows; without it they are taken to be the same in every batch. Raises ValueError
    unless there is a finite positive cost for every pass.
    """

    seconds: float
    v: tuple[float, ...]
    c: float
    by_batch: Mapping[int, tuple[float, ...]] | None = field(default=None, hash=False)
    start: float = 0.0
    other: float = 0.0
    plain: float = 0.0
    beside: Mapping[int, tuple[float, ...]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "v", tuple(self.v))
        for name in ("by_batch", "beside"):
            if (table := getattr(self, name)) is not None:  # keys of a JSON object are strings
                object.__setattr__(self, name, {int(rows): tuple(costs) for rows, costs in table.items()})
        every = {"v": self.v, **{f"by_batch[{rows}]": costs for rows, costs in (self.by_batch or {}).items()}}
        for name, costs in every.items():
            if not costs or not all(0 < cost < inf for cost in costs):
                raise ValueError(f"Costs: {name} needs finite positive costs of 1, 2 ... positions, found {costs}; measure the costs again")
        rest = [(self.c, self.start, self.other, self.plain), *(self.beside or {}).values()]
        if not all(len(four) == 4 and four[0] >= 0 and all(map(isfinite, four)) for four in rest):
            raise ValueError(f"Costs needs finite c >= 0, start, other and plain, found {rest}; measure the costs again")
        if not 0 < self.seconds < inf or min([*(self.by_batch or [1]), *(self.beside or [1])]) < 1:
            raise ValueError(f"Costs needs seconds > 0 and batches of at least 1 row, found {self}; measure the costs again")

    def verify(self, n: float, batch: int = 1) -> float:
        """Cost of a pass over n positions of each of `batch` rows (n of rounds that differ: their mean).

        Linear between measured batches and beyond the last size or batch (by the last slope, never falling). Without `by_batch` a
        pass costs what its n * batch positions cost in one row: v(n, B) of the roofline depends on n * B.
        """
        if n < 1 or batch < 1:
            raise ValueError(f"a pass has at least one position and one row, found n={n}, batch={batch}")
        table = {**(self.by_batch or {}), 1: self.v}
        return _at(self.v, n * batch) if len(table) == 1 else _in_batch({rows: _at(costs, n) for rows, costs in table.items()}, batch)

    def phases(self, depth: float, nodes: float, batch: int = 1) -> dict[str, float]:
        """What drafting, verifying and all the rest of a round cost, in rounds of plain decoding of the same batch.

        depth: draft steps; nodes: drafted positions a row. Both may be means over rounds.
        """
        c, start, other, plain = self._beside(batch)
        unit = self.verify(1, batch) + plain
        draft = max(0.0, start + depth * c) if depth else 0.0
        return {"draft": draft / unit, "verify": self.verify(1 + nodes, batch) / unit, "other": other / unit}

    def step(self, batch: int = 1) -> float:
        """One more draft step, in rounds of plain decoding of the same batch."""
        c, _, _, plain = self._beside(batch)
        return c / (self.verify(1, batch) + plain)

    def _beside(self, batch: int) -> tuple[float, ...]:
        known = {**(self.beside or {}), 1: (self.c, self.start, self.other, self.plain)}
        return tuple(_in_batch({rows: four[i] for rows, four in known.items()}, batch) for i in range(4))

    def break_even(self, depth: float, nodes: float, batch: int = 1) -> float:
        """The tau at which rounds of `depth` draft steps and `nodes` drafted positions a row cost what plain decoding costs."""
        return sum(self.phases(depth, nodes, batch).values())


def _at(v: Sequence[float], n: float) -> float:
    """v(n), linear between sizes; beyond the last measured one by the last slope."""
    if n <= len(v):
        low = int(n)
        return v[low - 1] + (n - low) * (v[low] - v[low - 1]) if n > low else v[low - 1]
    if len(v) < 2:
        raise ValueError(f"the cost of a pass over {n} positions is unknown: only one size was measured; measure at least two")
    return v[-1] + (n - len(v)) * max(v[-1] - v[-2], 0.0)


def _in_batch(known: Mapping[int, float], batch: int) -> float:
    """A cost by batch, linear between the known ones; beyond the last by the last slope, never falling."""
    sizes = sorted(known)
    high = min(max(bisect_left(sizes, batch), 1), len(sizes) - 1)
    if high == 0:
        return known[sizes[0]]
    slope = (known[sizes[high]] - known[sizes[high - 1]]) / (sizes[high] - sizes[high - 1])
    return known[sizes[high]] + (batch - sizes[high]) * (max(slope, 0.0) if batch > sizes[high] else slope)


def experts_touched(experts: float, active: float, tokens: float) -> float:
    """How many of a layer's experts some of `tokens` tokens pass, when each takes `active` of them alike: E (1 - (1 - k/E)^n)."""
    if not 0 < active <= experts or tokens < 0:
        raise ValueError(f"needed 0 < active <= experts and tokens >= 0, found active={active}, experts={experts}, tokens={tokens}")
    return experts * (1 - (1 - active / experts) ** tokens)


@dataclass(frozen=True)
class Roofline:
    """The time of a pass when a device does nothing but compute at its peak or read at its peak, whichever takes longer.

    flops, bandwidth: of the device, products (a multiplication and an addition are two) and bytes a second. weight_bytes: read by every
    pass; token_flops: of a position; kv_bytes, attention_flops: of each token of its context. expert_bytes: of a mixture's experts in
    all, of which a token passes the share `active` (1: no mixture).
    """

    flops: float
    bandwidth: float
    weight_bytes: float
    token_flops: float
    kv_bytes: float = 0.0
    attention_flops: float = 0.0
    expert_bytes: float = 0.0
    active: float = 1.0

    @property
    def ridge(self) -> float:
        """Products a byte at which computing takes as long as reading."""
        return self.flops / self.bandwidth

    def work(self, n: float, batch: int = 1, context: float = 0.0) -> tuple[float, float]:
        """Products and bytes of a pass over n positions of each of `batch` rows behind `context` cached tokens a row."""
        positions = n * batch
        read = self.weight_bytes + self.expert_bytes * experts_touched(1.0, self.active, positions)
        return positions * (self.token_flops + self.attention_flops * context), read + batch * context * self.kv_bytes

    def intensity(self, n: float, batch: int = 1, context: float = 0.0) -> float:
        """Products a byte of a pass; without a cache and with weights of two bytes these are its positions, n * batch."""
        products, read = self.work(n, batch, context)
        return products / read

    def seconds(self, n: float, batch: int = 1, context: float = 0.0) -> float:
        """Of a pass."""
        products, read = self.work(n, batch, context)
        return max(products / self.flops, read / self.bandwidth)

    def verify(self, n: float, batch: int = 1, context: float = 0.0) -> float:
        """The cost of a pass in passes over one position of one row, as `Costs.verify` gives the measured one."""
        return self.seconds(n, batch, context) / self.seconds(1, 1, context)

    def costs(self, sizes: int, batches: Sequence[int] = (), *, c: float = 0.0, context: float = 0.0) -> Costs:
        """Predicted costs of passes over 1 ... `sizes` positions, for everything that measured ones are for."""
        by_batch = {rows: tuple(self.verify(n, rows, context) for n in range(1, sizes + 1)) for rows in {1, *batches}}
        return Costs(seconds=self.seconds(1, 1, context), v=by_batch[1], c=c, by_batch=by_batch)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens committed per round by a chain of `gamma` drafts, each accepted with chance `alpha` independently.

    (1 - alpha^(gamma+1)) / (1 - alpha), the target's own token included. Raises ValueError out of range.
    """
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"needed 0 <= alpha <= 1 and gamma >= 0, found alpha={alpha}, gamma={gamma}")
    return sum(alpha**i for i in range(gamma + 1))


def tau_from_survival(survival: Sequence[float], gamma: int) -> float:
    """Tokens per round when P(the first i drafts are all accepted) = survival[i-1]; the chain is cut at `gamma`."""
    return 1.0 + sum(survival[:gamma])


def break_even(gamma: int, c: float, v: float = 1.0) -> float:
    """Cost of a round, which is the tau at which speculation stops losing: gamma * c + v."""
    return gamma * c + v


def speedup(alpha: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Expected speed-up over plain decoding: expected_tokens(alpha, gamma) / (gamma * c + v)."""
    return expected_tokens(alpha, gamma) / break_even(gamma, c, v)


def best_depth(survival: Sequence[float], c: float, v: Sequence[float]) -> tuple[int, float]:
    """Depth with the highest expected speed-up, and that speed-up; (0, 1.0) where no depth gains.

    v[n-1]: cost of a pass over n positions; only depths whose cost is known (depth + 1 <= len(v)) are considered.
    """
    depths = range(1, min(len(survival), len(v) - 1) + 1)
    gains = {g: tau_from_survival(survival, g) / break_even(g, c, v[g]) for g in depths}
    return _best(gains)


def _best(gains: Mapping[int, float]) -> tuple[int, float]:
    best = max(gains, key=lambda g: gains[g], default=0)
    return (best, gains[best]) if best and gains[best] > 1 else (0, 1.0)


def best_depth_for(survival: Sequence[float], costs: Costs, *, batch: int = 1) -> tuple[int, float]:
    """`best_depth` in a batch, beyond the measured sizes too; for rows that differ, survival is the mean over them.

    Rows of one pass are padded to the longest draft, so a batch has one best depth: tokens of a round are the sum over its rows.
    The speed-up is over plain decoding of the same batch.
    """
    gains = {g: tau_from_survival(survival, g) / costs.break_even(g, g, batch) for g in range(1, len(survival) + 1)}
    return _best(gains)


def marginal_depth(conditional: Sequence[float], costs: Costs, *, batch: int = 1) -> tuple[int, float]:
    """The depth with the highest expected tokens per second, and its speed-up over plain decoding; (0, 1.0) where none gains.

    conditional[i-1]: chance that draft i is accepted given that those before it were. Where v grows by ever larger steps this is the
    marginal rule (go deeper while survival of the next draft exceeds speed-up * (c + dv)); all depths are tried, so that steps of v
    (a kernel's tile sizes) do not end the search.
    """
    if not all(0 <= a <= 1 for a in conditional):
        raise ValueError(f"conditional acceptance lies between 0 and 1, found {list(conditional)}")
    return best_depth_for(list(accumulate(conditional, mul)), costs, batch=batch)


def check_table(table: Sequence[Sequence[float]]) -> None:
    """Raise ValueError unless the rows hold chances of events that exclude each other: at most one child is accepted."""
    for depth, row in enumerate(table, start=1):
        if not all(0 <= chance <= 1 for chance in row) or sum(row) > 1 + 1e-6:
            raise ValueError(
                f"acceptance table, depth {depth}: needed chances between 0 and 1 that sum to at most 1 (one child is accepted), "
                f"found {[round(chance, 4) for chance in row]}; divide the counts by the rounds that accepted the parent"
            )


def tree_tau(paths: Sequence[Sequence[int]], table: Sequence[Sequence[float]]) -> float:
    """Expected tokens a round of a tree: 1 + the sum over its nodes of the chances along the path (arXiv 2402.12374).

    paths: for each drafted node the ranks from the root to it; each is counted, so a tree lists every prefix of its paths.
    """
    check_table(table)
    return 1.0 + sum(prod(_chance(table, depth, rank) for depth, rank in enumerate(path)) for path in paths)


def _chance(table: Sequence[Sequence[float]], depth: int, rank: int) -> float:
    return table[depth][rank] if depth < len(table) and rank < len(table[depth]) else 0.0
