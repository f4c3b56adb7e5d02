"""From step records to figures: sums first, one division, an interval over prompts. Definitions: docs/definitions.md.

A record is one answer of one arm (`measure.Record`). Rounds of one prompt are not independent, so intervals resample prompts.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLES = 1000
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Interval:
    """A ratio with its 95 % interval over prompts."""

    value: float
    lo: float
    hi: float


def bootstrap(samples: Sequence[Any], statistic: Callable[[Sequence[Any]], float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of `statistic` over prompts (2.5 % and 97.5 % of 1000 resamples); ValueError without samples."""
    if not samples:
        raise ValueError("no prompts to take a figure from")
    rng = random.Random(seed)
    found = sorted(statistic(rng.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    return Interval(statistic(samples), found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES) - 1])


def bounds(interval: Interval, samples: Sequence[Any]) -> dict[str, float | None]:
    """lo and hi for a table; None where there is a single prompt, whose resamples are all alike and would look like certainty."""
    return {"lo": interval.lo, "hi": interval.hi} if len(samples) > 1 else {"lo": None, "hi": None}


def ratio(pairs: Sequence[Numbers]) -> float:
    """Sum of the first over sum of the second."""
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below else 0.0


def ratio_of_ratios(quads: Sequence[Numbers]) -> float:
    """(sum a / sum b) / (sum c / sum d): two rates from totals, compared."""
    below = ratio([q[2:] for q in quads])
    return ratio(quads) / below if below else 0.0


def acceptance(rounds: Sequence[tuple[int, int]], depth: int) -> tuple[list[float], list[float]]:
    """Unconditional and conditional acceptance by position from (drafted, accepted) of each round, of any tree's depth.

    Unconditional at i: share of all rounds in which the first i drafts were accepted. Conditional: among the rounds that accepted
    the first i - 1. A position that was never reached is left out.
    """
    survived = [len(rounds)] + [sum(accepted >= i for _, accepted in rounds) for i in range(1, depth + 1)]
    unconditional = [s / len(rounds) if rounds else 0.0 for s in survived[1:]]
    conditional = [now / before for before, now in zip(survived, survived[1:], strict=False) if before]
    return unconditional, conditional


def tau_table(records: Mapping[str, Sequence[Any]], depth: int) -> dict[str, dict[str, Any]]:
    """tau by domain, micro and macro, from records by domain; numerators, denominators and acceptance beside it."""
    table = {domain: _tau_cell(rows, depth) for domain, rows in records.items()}
    table["all (micro)"] = _tau_cell([row for rows in records.values() for row in rows], depth)
    macro = _macro(records)
    merged = table["all (micro)"]
    table["all (macro)"] = {**merged, "tau": macro.value, **bounds(macro, min(records.values(), key=len))}
    return table


def _pair(record: Any) -> Numbers:
    return float(sum(r.committed for r in record.rounds)), float(len(record.rounds))


def _tau_cell(records: Sequence[Any], depth: int) -> dict[str, Any]:
    pairs = [_pair(record) for record in records]
    interval = bootstrap(pairs, ratio)
    unconditional, conditional = acceptance([(r.drafted, r.accepted) for record in records for r in record.rounds], depth)
    return {
        "tau": interval.value, **bounds(interval, pairs), "tokens": int(sum(p[0] for p in pairs)),
        "rounds": int(sum(p[1] for p in pairs)), "prompts": len(pairs), "acceptance": unconditional, "conditional": conditional,
    }  # fmt: skip


def _macro(records: Mapping[str, Sequence[Any]]) -> Interval:
    """Mean of the domains' taus; prompts are resampled within their domain."""
    rng = random.Random(0)
    domains = [[_pair(record) for record in rows] for rows in records.values()]

    def mean(resample: bool) -> float:
        return sum(ratio(rng.choices(d, k=len(d)) if resample else d) for d in domains) / len(domains)

    found = sorted(mean(True) for _ in range(RESAMPLES))
    return Interval(mean(False), found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES) - 1])


def speed_cell(records: Sequence[Any], plain: Sequence[Any]) -> dict[str, Any]:
    """Decoding speed of an arm against plain decoding on the same prompts (paired, in the same order).

    tokens_per_s counts the tokens of the rounds over their wall time; the prompt's pass and its token are left out of both, and
    `end_to_end` has them in. v, draft, other: cost of a round in plain decoding's round, by phase.
    """
    quads = [(*_work(a), *_work(b)) for a, b in zip(records, plain, strict=True)]
    whole = [(len(a.tokens), a.seconds, len(b.tokens), b.seconds) for a, b in zip(records, plain, strict=True)]
    speed, pairs = bootstrap(quads, ratio_of_ratios), [_pair(r) for r in records]
    tokens, rounds = (sum(p[i] for p in pairs) for i in (0, 1))
    plain_round = sum(r.decode_seconds for r in plain) / max(1, sum(len(r.rounds) for r in plain))
    phases = {phase: sum(r.seconds.get(phase, 0.0) for rec in records for r in rec.rounds) for phase in ("draft", "verify")}
    seconds = sum(r.decode_seconds for r in records)
    per = max(1.0, rounds) * max(plain_round, 1e-9)
    v, draft = phases["verify"] / per, phases["draft"] / per
    return {
        "tokens": int(tokens), "seconds": seconds, "tokens_per_s": tokens / max(seconds, 1e-9), "speedup": speed.value,
        **bounds(speed, quads), "tau": tokens / max(1.0, rounds), "v": v, "draft": draft, "other": seconds / per - v - draft,
        "break_even": seconds / per, "prompts": len(records), "end_to_end": ratio_of_ratios(whole),
    }  # fmt: skip


def _work(record: Any) -> Numbers:
    """Tokens of the rounds, and their wall time."""
    return _pair(record)[0], record.decode_seconds
