"""What a draft is worth: survival -> tau, speed-up, break-even. Pure arithmetic; formulas from arXiv 2211.17192, section 3.

Units: costs are in passes of the target over one position. c: one draft step; v: one verification pass.
An acceptance table says for trees what a list of conditional acceptances says for chains: table[d][k] is the chance that the child of
rank k at depth d + 1 is the accepted one, given that its parent was; beyond the table it is 0.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, prod
from operator import mul


@dataclass(frozen=True)
class Costs:
    """What passes cost on one machine.

    seconds: a pass over one position of one row. v[n-1]: a pass over n positions of one row, in that unit; c: one draft step (a level
    of a tree costs one) in it, taken to be the same in every batch. by_batch[B][n-1]: a pass over n positions of each of B rows, in
    the same unit. Raises ValueError unless there is a finite positive cost for every pass.
    """

    seconds: float
    v: tuple[float, ...]
    c: float
    by_batch: Mapping[int, tuple[float, ...]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "v", tuple(self.v))
        if self.by_batch is not None:
            # Keys of a JSON object are strings.
            object.__setattr__(self, "by_batch", {int(rows): tuple(costs) for rows, costs in self.by_batch.items()})
        every = {"v": self.v, **{f"by_batch[{rows}]": costs for rows, costs in (self.by_batch or {}).items()}}
        for name, costs in every.items():
            if not costs or not all(0 < cost < inf for cost in costs):
                raise ValueError(f"Costs: {name} needs finite positive costs of 1, 2 ... positions, found {costs}; measure the costs again")
        if not (0 <= self.c < inf and 0 < self.seconds < inf) or min(self.by_batch or [1]) < 1:
            raise ValueError(f"Costs needs seconds > 0, c >= 0 and batches of at least 1 row, found {self}; measure the costs again")

    def verify(self, n: int, batch: int = 1) -> float:
        """Cost of a pass over n positions of each of `batch` rows, in passes over one position of one row.

        Linear between measured batches and beyond the last size or batch (by the last slope, never falling). Without `by_batch` a
        pass costs what its n * batch positions cost in one row: v(n, B) of the roofline depends on n * B.
        """
        if n < 1 or batch < 1:
            raise ValueError(f"a pass has at least one position and one row, found n={n}, batch={batch}")
        if not self.by_batch:
            return _at(self.v, n * batch)
        table = {**self.by_batch, 1: self.v}
        sizes = sorted(table)
        high = min(max(bisect_left(sizes, batch), 1), len(sizes) - 1)
        if high == 0:  # by_batch={1: ...}
            return _at(self.v, n * batch)
        low_cost, high_cost = _at(table[sizes[high - 1]], n), _at(table[sizes[high]], n)
        slope = (high_cost - low_cost) / (sizes[high] - sizes[high - 1])
        return high_cost + (batch - sizes[high]) * (max(slope, 0.0) if batch > sizes[high] else slope)

    def break_even(self, depth: int, nodes: int, batch: int = 1) -> float:
        """The tau at which rounds of `depth` draft steps and `nodes` drafted positions a row cost what plain decoding costs."""
        return break_even(depth, self.c, self.verify(1 + nodes, batch)) / self.verify(1, batch)


def _at(v: Sequence[float], n: int) -> float:
    """v(n); beyond the last measured size by the last slope."""
    if n <= len(v):
        return v[n - 1]
    if len(v) < 2:
        raise ValueError(f"the cost of a pass over {n} positions is unknown: only one size was measured; measure at least two")
    return v[-1] + (n - len(v)) * max(v[-1] - v[-2], 0.0)


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
    best = max(gains, key=lambda g: gains[g], default=0)
    return (best, gains[best]) if best and gains[best] > 1 else (0, 1.0)


def best_depth_for(survival: Sequence[float], costs: Costs, *, batch: int = 1) -> tuple[int, float]:
    """`best_depth` in a batch, beyond the measured sizes too; for rows that differ, survival is the mean over them.

    Rows of one pass are padded to the longest draft, so a batch has one best depth: tokens of a round are the sum over its rows.
    The speed-up is over plain decoding of the same batch.
    """
    unit = costs.verify(1, batch)
    return best_depth(survival, costs.c / unit, [costs.verify(n, batch) / unit for n in range(1, len(survival) + 2)])


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
