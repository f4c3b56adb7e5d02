"""What a draft is worth: survival -> tau, speed-up, break-even. Pure arithmetic; formulas from arXiv 2211.17192, section 3.

Units: costs are in passes of the target over one position. c: one draft step; v: one verification pass.
"""

from collections.abc import Sequence


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
