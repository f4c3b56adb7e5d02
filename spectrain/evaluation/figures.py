"""From the records of all arms to the figures of a report: tau, speed, slices, pairs, exactness, and what they are compared with."""

from collections.abc import Mapping, Sequence
from typing import Any

from spectrain.data.formats import Prompt
from spectrain.evaluation.measure import BASELINE, Arm, compare
from spectrain.evaluation.metrics import bootstrap, committed_and_rounds, ratio_of_ratios, speed_cell, tau_table
from spectrain.evaluation.paired import pairs
from spectrain.evaluation.price import price
from spectrain.evaluation.records import Record, Records
from spectrain.evaluation.schema import ALL, MICRO
from spectrain.evaluation.slices import slices
from spectrain.evaluation.speed import gap
from spectrain.target.model import Target
from spectrain.yields import Costs

ByDomain = Mapping[str, Sequence[Prompt]]


def every(prompts: ByDomain) -> list[Prompt]:
    """The prompts of all domains."""
    return [p for rows in prompts.values() for p in rows]


def tau_tables(arms: Sequence[Arm], records: Records, prompts: ByDomain) -> dict[str, dict[str, Any]]:
    """`metrics.tau_table` of each arm."""
    return {
        arm.name: tau_table({d: records.of(arm.name, "tau", rows) for d, rows in prompts.items()}, arm.shape.depth if arm.shape else 0)
        for arm in arms
    }


def speed_tables(arms: Sequence[Arm], records: Records, chosen: ByDomain) -> dict[str, dict[str, Any]]:
    """`metrics.speed_cell` of each arm that was timed, by domain and all together, against plain decoding of its temperature."""
    groups = {**chosen, ALL: every(chosen)}
    return {
        arm.name: {d: speed_cell(records.of(arm.name, "speed", rows), records.of(arm.plain, "speed", rows)) for d, rows in groups.items()}
        for arm in arms
    }


def sliced(arms: Sequence[Arm], records: Records, prompts: ByDomain, entropies: Mapping[float, Any]) -> dict[str, Any]:
    """`slices.slices` of each arm with drafts. entropies: by temperature, as of `anatomy.entropies`."""
    asked = every(prompts)
    return {arm.name: slices(records.of(arm.name, "tau", asked), entropies=entropies.get(arm.temperature)) for arm in arms if arm.shape}


def paired(arms: Sequence[Arm], records: Records, prompts: ByDomain) -> list[dict[str, Any]]:
    """`paired.pairs` of all arms with drafts."""
    return pairs(by_arm(arms, records, prompts), [arm.describe() for arm in arms])


def by_arm(arms: Sequence[Arm], records: Records, prompts: ByDomain) -> dict[str, list[Record]]:
    """All counted answers of each arm."""
    return {arm.name: records.of(arm.name, "tau", every(prompts)) for arm in arms}


def gaps(
    arms: Sequence[Arm], records: Records, prompts: ByDomain, costs: Mapping[str, Costs], speed: Mapping[str, Any]
) -> dict[str, Any]:
    """`speed.gap` of each timed arm with drafts whose costs (by arm) are known, by domain and all together, where both had rounds; prompts:
    the timed ones, which counts and times are both of."""
    groups = {**prompts, ALL: every(prompts)}
    found = {}
    for arm in arms:
        if arm.name not in costs:
            continue
        counted = {d: records.of(arm.name, "tau", rows) for d, rows in groups.items()}
        sums = {d: [sum(numbers) for numbers in zip(*map(committed_and_rounds, of), strict=True)] for d, of in counted.items() if of}
        found[arm.name] = {
            d: gap(costs[arm.name], {"tau": tokens / rounds}, speed[arm.name][d], counted[d], arm.shape)
            for d, (tokens, rounds) in sums.items()
            if tokens and speed[arm.name][d]["tokens"]
        }
    return found


def exactness(
    target: Target, arms: Sequence[Arm], records: Records, prompts: ByDomain, chosen: ByDomain, template: Mapping[str, Any]
) -> dict[str, Any]:
    """`measure.compare` of each arm's greedy answers with plain decoding's, those of tau and, where they were timed, of speed."""
    asked, timed = every(prompts), every(chosen)
    found = {}
    for arm in arms:
        if arm.shape is None or arm.temperature:
            continue
        parts = [("tau", asked)] + ([("speed", timed)] if records.has(arm.name, "speed", timed[0].id) else [])
        cells = [compare(target, records.of(arm.name, m, rows), records.of(arm.plain, m, rows), rows, template) for m, rows in parts]
        failed = [i for cell in cells for i in cell.failed]
        sums = {name: sum(getattr(cell, name) for cell in cells) for name in ("prompts", "equal", "ties")}
        found[arm.name] = {**sums, "failed": len(failed), "failed_ids": failed}
    return found


def baseline(records: Records, plain: str, timed: Sequence[Prompt]) -> dict[str, Any]:
    """Plain decoding here against transformers' generate(), whole calls, prompts paired."""
    ours, theirs = (records.of(name, "speed", timed) for name in (plain, BASELINE))
    quads = [(len(a.tokens), a.seconds, len(b.tokens), b.seconds) for a, b in zip(ours, theirs, strict=True)]
    interval = bootstrap(quads, ratio_of_ratios)
    rates = [sum(len(r.tokens) for r in rows) / sum(r.seconds for r in rows) for rows in (theirs, ours)]
    same = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
    return {
        "name": "transformers generate()", "tokens_per_s": rates[0], "plain_tokens_per_s": rates[1], "ratio": interval.value,
        "lo": interval.lo, "hi": interval.hi, "prompts": len(timed), "equal": same,
    }  # fmt: skip


def left_out(records: Records, plain: str, prompts: ByDomain) -> int:
    """Turns that were not asked, because they no longer fitted."""
    return sum(len(p.turns) - len(records.of(plain, "tau", [p])) for p in every(prompts))


def prices(target: Target, arms: Sequence[Arm], records: Records, prompts: ByDomain, tau: Mapping[str, Any]) -> dict[str, Any]:
    """`price.price` of each arm with drafts, behind contexts of the length that these answers have."""
    asked, found = every(prompts), {}
    for arm in arms:
        if arm.drafter is not None and arm.shape is not None:
            rows = records.of(arm.name, "tau", asked)
            context = sum(r.prompt_tokens + len(r.tokens) / 2 for r in rows) / len(rows)
            found[arm.name] = price(target, arm.drafter, tau[arm.name][MICRO], rows, shape=arm.shape, context=round(context))
    return found
