"""The learning rate by place in the run, and that place when a run goes on with windows of another size."""

import math
from dataclasses import asdict, dataclass

from spectrain.config import TrainingConfig


def learning_rate(step: float, total: int, config: TrainingConfig) -> float:
    """Factor of lr at optimizer step `step` of `total`: linear warm-up, then by `config.schedule`.

    cosine (arXiv 1608.03983, without restarts): down to `final_lr` at the end. wsd, warm-up, stable, decay (arXiv 2404.06395): 1 until
    the last `cooldown` of the run, then linearly down to `final_lr`. constant: 1.
    """
    warm = max(1, round(config.warmup * total))
    if step < warm:
        return (step + 1) / warm
    if config.schedule == "constant":
        return 1.0
    first = max(warm, total - round(config.cooldown * total)) if config.schedule == "wsd" else warm
    share = min(1.0, max(0.0, step - first) / max(1, total - first))
    kept = 1 - share if config.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * share))
    return config.final_lr + (1 - config.final_lr) * kept


@dataclass(frozen=True)
class Pace:
    """Steps counted in those of the run's first window size, so that the learning rate goes on without a jump.

    window: batches a step. total: steps of the run at its first window. Since `step` there have been windows of this size, with `left`
    steps to go from there, where the schedule stood at `at` of `total`.
    """

    window: int
    total: int
    left: int
    step: int = 0
    at: float = 0.0

    @property
    def last(self) -> int:
        """Steps of the whole run."""
        return self.step + self.left

    def place(self, step: int) -> float:
        """Where the schedule stands at `step`, 0 ... total; the step itself as long as the window never changed."""
        return self.at + (step - self.step) * (self.total - self.at) / max(1, self.left)

    def changed(self, window: int, *, step: int, left: int) -> "Pace":
        """The pace from `step` on, with `left` windows of the new size to come."""
        return Pace(window, self.total, left, step, self.place(step))

    def state(self) -> dict[str, float]:
        return asdict(self)
