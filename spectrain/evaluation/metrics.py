"""From step records to figures: sums first, one division, an interval over prompts. Definitions: docs/definitions.md.

A record is one answer of one arm (`measure.Record`). Rounds of one prompt are not independent, and neither are its turns: they are summed
before anything is drawn again, so that intervals resample prompts.

Legend: N prompts, C sums of a prompt, R resamples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
Z95 = NormalDist().inv_cdf(0.975)
Numbers = tuple[float, ...]
Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]  # of totals [..., C]


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval over prompts."""

    value: float
    lo: float
    hi: float


def resamples(samples: Sequence[Numbers], statistic: Statistic, *, seed: int = 0) -> Floats:
    """`statistic` [R] of the totals of prompts drawn again with replacement; ValueError without samples."""
    return statistic(_drawn(_array(samples), np.random.default_rng(seed)))


def bootstrap(samples: Sequence[Numbers], statistic: Statistic, *, seed: int = 0) -> Interval:
    """Percentile bootstrap of `statistic` of the totals of `samples` (one a prompt): the middle of 1000 resamples, `tail` left out on
    either side.

    statistic: of an array of totals [..., C], such as `ratio`. ValueError without samples.
    """
    return _interval(statistic(_array(samples).sum(axis=0)), resamples(samples, statistic, seed=seed), len(samples))


def _array(samples: Sequence[Numbers]) -> Floats:
    if not len(samples):
        raise ValueError("no prompts to take a figure from")
    return np.asarray(samples, dtype=np.float64)


def _drawn(samples_NC: Floats, rng: np.random.Generator) -> Floats:
    """Totals [R, C] of N samples drawn with replacement."""
    at_RN = rng.integers(len(samples_NC), size=(RESAMPLES, len(samples_NC)))
    return np.stack([column_N[at_RN].sum(axis=1) for column_N in samples_NC.T], axis=-1)  # a column at a time saves memory


def _interval(value: Any, found_R: Floats, prompts: int, groups: int = 1) -> Interval:
    found_R, out = np.sort(found_R), int(tail(prompts, groups) * RESAMPLES)
    return Interval(float(value), float(found_R[out]), float(found_R[RESAMPLES - 1 - out]))


def tail(prompts: int, groups: int = 1) -> float:
    """Share of the resamples beyond each end of an interval: 2.5 %, and less for few prompts, whose resamples spread too little.

    Hesterberg's expanded percentiles (arXiv 1411.5279): Phi(- t sqrt(n / (n - 1))). Of 8 prompts an interval that leaves out 2.5 % holds
    the truth in 87 % of cases, this one in 94 %. groups: within each of which the prompts are drawn again.
    """
    freedom = prompts - groups
    return NormalDist().cdf(-t_quantile(Z95, freedom) * sqrt(prompts / freedom)) if freedom else 0.025


def t_quantile(z: float, freedom: int) -> float:
    """The quantile of Student's t that the normal law has at z (Abramowitz and Stegun 26.7.5; within 1 % from 3 degrees on)."""
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def bounds(interval: Interval, samples: Sequence[Any]) -> dict[str, float | None]:
    """lo and hi for a table; None where there is a single prompt, whose resamples are all alike and would look like certainty."""
    return {"lo": interval.lo, "hi": interval.hi} if len(samples) > 1 else {"lo": None, "hi": None}


def ratio(sums: Floats) -> Floats:
    """The first total over the second; 0 where that is 0."""
    return _over(sums[..., 0], sums[..., 1])


def ratio_of_ratios(sums: Floats) -> Floats:
    """(a / b) / (c / d) of four totals: two rates, compared."""
    return _over(ratio(sums), ratio(sums[..., 2:]))


def _over(a: Floats, b: Floats) -> Floats:
    return np.divide(a, b, out=np.zeros(np.shape(a)), where=b != 0)


def by_prompt(records: Sequence[Any], values: Sequence[Numbers]) -> list[Numbers]:
    """Sums of the values of each prompt's records (its turns), in the order in which prompts come: the samples of an interval."""
    sums: dict[str, Numbers] = {}
    for record, value in zip(records, values, strict=True):
        known = sums.get(record.id)
        sums[record.id] = value if known is None else tuple(a + b for a, b in zip(known, value, strict=True))
    return list(sums.values())


def committed_and_rounds(record: Any) -> Numbers:
    """What tau is the ratio of: tokens that the rounds kept, and rounds."""
    return float(sum(r.committed for r in record.rounds)), float(len(record.rounds))


def acceptance(rounds: Sequence[tuple[int, int]], depth: int) -> tuple[list[float], list[float]]:
    """Unconditional and conditional acceptance by position from (drafted, accepted) of each round, of any tree's depth.

    Unconditional at i: share of all rounds in which the first i drafts were accepted. Conditional: among the rounds that accepted
    the first i - 1. A position that was never reached is left out.
    """
    survived = [len(rounds)] + [sum(accepted >= i for _, accepted in rounds) for i in range(1, depth + 1)]
    unconditional = [s / len(rounds) if rounds else 0.0 for s in survived[1:]]
    conditional = [now / before for before, now in zip(survived, survived[1:], strict=False) if before]
    return unconditional, conditional


def lengths(rounds: Sequence[tuple[int, int]], depth: int) -> list[float]:
    """Share of the rounds that accepted exactly 0 ... depth drafts."""
    return [sum(accepted == i for _, accepted in rounds) / len(rounds) if rounds else 0.0 for i in range(depth + 1)]


def tau_table(records: Mapping[str, Sequence[Any]], depth: int) -> dict[str, dict[str, Any]]:
    """tau by domain, micro and macro, from records by domain; numerators, denominators and acceptance beside it.

    Macro is tau alone: its tokens, rounds and prompts are the sums that there are, and shares of rounds are micro's.
    """
    table = {domain: _tau_cell(rows, depth) for domain, rows in records.items()}
    table["all (micro)"] = _tau_cell([row for rows in records.values() for row in rows], depth)
    domains = [by_prompt(rows, [committed_and_rounds(row) for row in rows]) for rows in records.values()]
    macro = _macro(domains)
    sums = {key: table["all (micro)"][key] for key in ("tokens", "rounds", "prompts")}
    table["all (macro)"] = {"tau": macro.value, **bounds(macro, min(domains, key=len)), **sums, "acceptance": [], "conditional": []}
    return table


def _tau_cell(records: Sequence[Any], depth: int) -> dict[str, Any]:
    samples = by_prompt(records, [committed_and_rounds(record) for record in records])
    interval = bootstrap(samples, ratio)
    rounds = [(r.drafted, r.accepted) for record in records for r in record.rounds]
    unconditional, conditional = acceptance(rounds, depth)
    drafted, accepted = (sum(column) for column in zip(*rounds, strict=True)) if rounds else (0, 0)
    return {
        "tau": interval.value, **bounds(interval, samples), "tokens": int(sum(s[0] for s in samples)),
        "rounds": len(rounds), "prompts": len(samples), "acceptance": unconditional, "conditional": conditional,
        "draft_acceptance": accepted / drafted if drafted else None, "lengths": lengths(rounds, depth),
    }  # fmt: skip


def _macro(domains: Sequence[Sequence[Numbers]]) -> Interval:
    """Mean of the domains' taus; prompts are resampled within their domain."""
    rng, arrays = np.random.default_rng(0), [_array(samples) for samples in domains]
    value = np.mean([ratio(samples_NC.sum(axis=0)) for samples_NC in arrays])
    return _interval(value, np.mean([ratio(_drawn(samples_NC, rng)) for samples_NC in arrays], axis=0), sum(map(len, arrays)), len(arrays))


def speed_cell(records: Sequence[Any], plain: Sequence[Any]) -> dict[str, Any]:
    """Decoding speed of an arm against plain decoding on the same prompts (paired, in the same order).

    tokens_per_s counts the tokens of the rounds over their wall time; the prompt's pass and its token are left out of both, and
    `end_to_end` has them in. v, draft, other: cost of a round in plain decoding's round, by phase. plain_tokens: of plain decoding's
    rounds; at temperature 0 it is another number than `tokens` only where a numeric tie made answers shorter or longer.
    """
    quads = by_prompt(records, [(*_work(a), *_work(b)) for a, b in zip(records, plain, strict=True)])
    whole = np.array([(len(a.tokens), a.seconds, len(b.tokens), b.seconds) for a, b in zip(records, plain, strict=True)], dtype=np.float64)
    speed = bootstrap(quads, ratio_of_ratios)
    tokens, seconds, plain_tokens, plain_seconds = (sum(quad[i] for quad in quads) for i in range(4))
    rounds = sum(len(r.rounds) for r in records)
    plain_round = plain_seconds / max(1, sum(len(r.rounds) for r in plain))
    phases = {phase: sum(r.seconds.get(phase, 0.0) for rec in records for r in rec.rounds) for phase in ("draft", "verify")}
    per = max(1, rounds) * max(plain_round, 1e-9)
    v, draft = phases["verify"] / per, phases["draft"] / per
    return {
        "tokens": int(tokens), "plain_tokens": int(plain_tokens), "seconds": seconds, "tokens_per_s": tokens / max(seconds, 1e-9),
        "speedup": speed.value, **bounds(speed, quads), "tau": tokens / max(1, rounds), "v": v, "draft": draft,
        "other": seconds / per - v - draft, "break_even": seconds / per, "prompts": len(quads),
        "end_to_end": float(ratio_of_ratios(whole.sum(axis=0))),
    }  # fmt: skip


def _work(record: Any) -> Numbers:
    """Tokens of the rounds, and their wall time."""
    return committed_and_rounds(record)[0], record.decode_seconds
