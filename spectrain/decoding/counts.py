"""What a row's drafts have done so far, as chances: what an adaptive policy decides by. Pure Python."""

from collections.abc import Sequence


class Counts:
    """One row's drafts at each depth: how many stood to be judged, how many of them missed; and in how many of the rounds that asked for
    drafts it had any. Old rounds count less. The arguments are those of `Adaptive`."""

    def __init__(
        self, depth: int, *, memory: float, prior: float | Sequence[float], prior_rounds: float, prior_share: float
    ) -> None:  # fmt: skip
        self._memory, self._weight = memory, prior_rounds
        self._judged, self._missed = [0.0] * depth, [0.0] * depth
        self._first = 1 - prior if isinstance(prior, float | int) else 0.0
        self._prior = [1 - prior[min(d, len(prior) - 1)] for d in range(depth)] if isinstance(prior, tuple) else None
        self._asked = self._drafted = 0.0
        self._share = prior_share

    def learn(self, accepted: int, depth: int, scale: float) -> None:
        """A round that asked for drafts; depth: of what was drafted, 0 for nothing. scale: how much likelier than with the full budget a
        miss was; it counts by its chance of a miss there too."""
        self._asked, self._drafted = self._memory * self._asked + 1, self._memory * self._drafted + (depth > 0)
        if not depth:
            return
        weight = max(1 / scale, self.misses()[accepted]) if accepted < min(depth, len(self._missed)) else 0.0
        self._judged = [self._memory * n + (d <= accepted and d < depth) for d, n in enumerate(self._judged)]
        self._missed = [self._memory * n + weight * (d == accepted) for d, n in enumerate(self._missed)]

    def misses(self) -> list[float]:
        """Chance at each depth that no draft is the accepted one, given that one above was and that something was drafted."""
        chances, above = [], self._first
        for d, (judged, missed) in enumerate(zip(self._judged, self._missed, strict=True)):
            above = (missed + self._weight * (self._prior[d] if self._prior else above)) / (judged + self._weight)
            chances.append(above)
        return chances

    def share(self) -> float:
        """Chance that it drafts when asked."""
        return (self._drafted + self._weight * self._share) / (self._asked + self._weight)


def tau_by_depth(misses: Sequence[Sequence[float]], scale: float, shares: Sequence[float]) -> list[float]:
    """Mean over rows of the expected tokens a round, for each depth from 0 on. shares: of the rounds in which a row drafts."""
    total = [0.0] * len(misses[0])
    for row, survival in zip(misses, shares, strict=True):
        for d, miss in enumerate(row):
            survival *= 1 - min(1.0, miss * scale)
            total[d] += survival
    tau = [1.0]
    for survival in total:
        tau.append(tau[-1] + survival / len(misses))
    return tau
