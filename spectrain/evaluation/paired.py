"""Two arms, or two evaluations, on the same prompts: is the difference of tau more than chance?

Legend: N prompts, R swaps.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import erfc, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from spectrain.evaluation.metrics import (
    Z95,
    Floats,
    Numbers,
    bootstrap,
    bounds,
    by_prompt,
    committed_and_rounds,
    ratio,
    resamples,
    t_quantile,
)
from spectrain.evaluation.schema import MACRO, MICRO

SWAPS = 9999
Z80 = NormalDist().inv_cdf(0.8)  # 80 % power
Records = Mapping[str, Sequence[Any]]  # by arm


@dataclass(frozen=True)
class Difference:
    """tau of one minus tau of the other with its 95 % interval, p-value and smallest detectable difference (None: a single prompt)."""

    value: float
    lo: float | None
    hi: float | None
    p: float | None
    smallest: float | None
    prompts: int

    @property
    def bounds(self) -> dict[str, float | None]:
        """lo, hi and p for a table."""
        return {"lo": self.lo, "hi": self.hi, "p": self.p}


def pairs(records: Records, arms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every two drafting arms of one temperature: tau(a) - tau(b) over all prompts (micro), largest tau first.

    records: of each arm, the same prompts. arms: as in a report (`name`, `depth`, `temperature`). p_adjusted: by Holm's method over all
    pairs of that temperature, for with many pairs some p fall below 0.05 by chance. ValueError where two arms have other prompts.
    """
    by_temperature: dict[float, list[str]] = defaultdict(list)
    for arm in arms:
        if arm["depth"]:
            by_temperature[arm.get("temperature") or 0.0].append(arm["name"])
    found = []
    for temperature, names in by_temperature.items():
        ordered = sorted(names, key=lambda name: -_tau(records[name]))
        rows = [{"a": a, "b": b, "temperature": temperature, **_row(compare(records[a], records[b]))} for a, b in combinations(ordered, 2)]
        for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
            row["p_adjusted"] = p
        found += rows
    return found


def _row(d: Difference) -> dict[str, Any]:
    return {"difference": d.value, **d.bounds, "smallest": d.smallest, "prompts": d.prompts}


def _tau(records: Sequence[Any]) -> float:
    return float(ratio(np.sum([committed_and_rounds(r) for r in records], axis=0)))


def compare(a: Sequence[Any], b: Sequence[Any]) -> Difference:
    """tau of a minus tau of b. ValueError unless both have the same prompts and turns.

    lo, hi: percentile bootstrap, a prompt drawn with both its answers. p: two-sided permutation test: were the arms alike, their figures
    could be swapped at any prompt, so p is the share of random swaps with as large a difference. smallest: the difference that such a
    comparison finds in 80 % of cases at 5 %, 2.80 standard errors, and more of them for few prompts.
    """
    theirs = {(r.id, r.turn): r for r in b}
    if len(theirs) != len(a) or any((r.id, r.turn) not in theirs for r in a):
        raise ValueError("the two arms did not answer the same prompts; measure both in one evaluation")
    samples = by_prompt(a, [(*committed_and_rounds(r), *committed_and_rounds(theirs[r.id, r.turn])) for r in a])
    found = bootstrap(samples, _difference)
    if len(samples) == 1:
        return Difference(found.value, None, None, None, None, 1)
    n = len(samples)
    error = float(resamples(samples, _difference).std()) * sqrt(n / (n - 1))  # the spread of n samples is less than that of the law
    smallest = (t_quantile(Z95, n - 1) + t_quantile(Z80, n - 1)) * error
    return Difference(found.value, **bounds(found, samples), p=_swapped(samples), smallest=smallest, prompts=n)


def _difference(sums: Floats) -> Floats:
    return ratio(sums[..., :2]) - ratio(sums[..., 2:])


def _swapped(samples: Sequence[Numbers]) -> float:
    """p of the permutation test; the observed order is one of those counted, so that p is never 0."""
    samples_N4 = np.asarray(samples, dtype=np.float64)
    swap_RN = np.random.default_rng(0).integers(2, size=(SWAPS, len(samples_N4))).astype(np.float64)
    total = samples_N4.sum(axis=0)
    moved_N4 = np.roll(samples_N4, 2, axis=1) - samples_N4
    found_R = np.abs(_difference(total + swap_RN @ moved_N4))
    return float((1 + np.sum(found_R >= abs(_difference(total)) - 1e-12)) / (1 + SWAPS))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's adjustment (1979): p that may be compared with one level whatever the number of comparisons; None stays."""
    known = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    found, least = list(ps), 0.0
    for rank, (p, i) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        found[i] = least
    return found


def shared(report: Mapping[str, Any], other: Mapping[str, Any], *, file: str) -> dict[str, str]:
    """The drafting arms of a report (its `arms` will do) that an earlier one has too, to their names there: the same drafter, shape and
    temperature, whether or not the name tells the temperature. ValueError where there is none."""
    known = {_arm(other, arm): arm["name"] for arm in other["arms"] if arm["depth"]}
    found = {arm["name"]: known[of] for arm in report["arms"] if (of := _arm(report, arm)) in known}
    if not found:
        has = ", ".join(sorted(known.values())) or "none"
        raise ValueError(f"{file} has no drafting arm of this evaluation, it has {has}; measure the same drafters, shapes and temperatures")
    return found


def against(
    report: Mapping[str, Any], other: Mapping[str, Any], *, file: str, now: Records | None = None, then: Records | None = None
) -> dict[str, Any]:
    """tau of each arm of a report that an earlier one has too, by domain: then, now, and the difference (now - then).

    now, then: the records of both, by arm; where they are of the same prompts and lengths, prompts are compared one by one. Otherwise the
    two are independent samples, whose intervals are put together. ValueError where no arm is in both.
    """
    names = shared(report, other, file=file)
    both = {name: ((now or {}).get(name, ()), (then or {}).get(names[name], ())) for name in names}
    why = _why_unpaired(report, other, both)
    rows = []
    for name, earlier in names.items():
        for domain, cell in report["tau"][name].items():
            before = other["tau"][earlier].get(domain)
            if before is not None and domain != MACRO:
                change = _change(cell, before) if why else _paired(domain, *both[name])
                rows.append({"arm": name, "domain": domain, "then": before["tau"], "now": cell["tau"], **change})
    told = [why or "The same prompts are compared one by one.", _other_target(report, other)]
    return {"file": file, "rows": rows, "paired": not why, "note": " ".join(filter(None, told))}


def _arm(report: Mapping[str, Any], arm: Mapping[str, Any]) -> tuple[str, float]:
    """An arm's name without its temperature, and its temperature: of the whole run where arms have none of their own."""
    found = arm.get("temperature")
    temperature = float(report["settings"]["temperature"] if found is None else found)
    return str(arm["name"]).removesuffix(f" T={temperature:g}"), temperature


def _other_target(report: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    targets = [(part.get("made_of") or {}).get("target") for part in (report, other)]
    if None in targets or targets[0] == targets[1]:  # reports of earlier versions do not say
        return ""
    return f"The earlier evaluation is of a target of other weights ({other['target']})."


def _why_unpaired(report: Mapping[str, Any], other: Mapping[str, Any], both: Mapping[str, tuple[Sequence[Any], Sequence[Any]]]) -> str:
    """A sentence on why prompts cannot be compared one by one; empty where they can."""
    tail = "so the two are compared as independent samples, which finds large differences only."
    if report["suite"]["sha256"] != other["suite"]["sha256"]:
        return f"The earlier evaluation answered another suite ({other['suite']['name']}), {tail}"
    texts = [part["suite"].get("prompts_sha256") for part in (report, other)]
    if None not in texts and texts[0] != texts[1]:
        return f"The prompts of the suite were others in the earlier evaluation, {tail}"
    lengths = [part["settings"]["max_new_tokens"] for part in (report, other)]
    if lengths[0] != lengths[1]:
        return f"The earlier answers have up to {lengths[1]} new tokens, these up to {lengths[0]}, {tail}"
    if not all(now and then for now, then in both.values()):
        return f"The records of the earlier evaluation are not there, {tail}"
    alike = all({(r.id, r.turn) for r in now} == {(r.id, r.turn) for r in then} for now, then in both.values())
    return "" if alike else f"Other turns of the prompts were asked in the earlier evaluation, {tail}"


def _paired(domain: str, now: Sequence[Any], then: Sequence[Any]) -> dict[str, Any]:
    both = [[r for r in records if domain in (MICRO, r.domain)] for records in (now, then)]
    found = compare(*both)
    return {"difference": found.value, **found.bounds}


def _change(cell: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The difference of two independent cells, its interval and p by the normal law; None where one has no interval."""
    difference = cell["tau"] - before["tau"]
    if None in (cell["lo"], before["lo"]):
        return {"difference": difference, "lo": None, "hi": None, "p": None}
    error = sqrt(sum(((c["hi"] - c["lo"]) / (2 * Z95)) ** 2 for c in (cell, before)))
    p = erfc(abs(difference) / error / sqrt(2)) if error else float(difference == 0)
    return {"difference": difference, "lo": difference - Z95 * error, "hi": difference + Z95 * error, "p": p}
