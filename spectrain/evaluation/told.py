"""What a report says in sentences: which drafter to use where, where speculation loses and why, and what a reader must know."""

from collections.abc import Mapping, Sequence
from typing import Any

from spectrain.config import EvaluationConfig
from spectrain.evaluation.schema import ALL

PLAIN, FREE = "plain", ("none", "n-gram", "suffix")  # labels of drafters that no training made
FEW = 5  # timed prompts from which on an interval holds the truth about as often as it says


def timed_arms(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The arms with drafts whose speed was measured."""
    return [arm for arm in report["arms"] if arm["drafter"] != "none" and report["speed"].get(arm["name"])]


def advice(report: Mapping[str, Any]) -> list[str]:
    """Which drafter to use where, and where none pays: by measured speed-up whose interval lies above 1; one prompt has no interval.

    Where arms of several temperatures were timed, a sentence is of the arms of one.
    """
    arms = timed_arms(report)
    temperatures = list(dict.fromkeys(arm.get("temperature") or 0.0 for arm in arms))
    told = []
    for t in temperatures:
        own = [arm for arm in arms if (arm.get("temperature") or 0.0) == t]
        mark = f"At temperature {t:g}: " if len(temperatures) > 1 else ""
        told += [mark + sentence for sentence in _advice(report, own)]
    return told


def _advice(report: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> list[str]:
    best: dict[str, list[str]] = {}
    for domain in report["domains"]:
        cells = {arm["name"]: report["speed"][arm["name"]][domain] for arm in arms}
        gains = {name: cell for name, cell in cells.items() if (cell["lo"] or 0) > 1}
        name = max(gains, key=lambda n: gains[n]["speedup"], default=PLAIN)
        best.setdefault(name, []).append(domain + (f" ({gains[name]['speedup']:.2f}×)" if name in gains else ""))
    untold = [d for d in report["domains"] if all(report["speed"][arm["name"]][d]["lo"] is None for arm in arms)]
    nowhere = [d for d in best.pop(PLAIN, []) if d not in untold]
    parts = [f"{name} for {', '.join(domains)}" for name, domains in best.items()]
    told = []
    if parts:
        rest = f"; no drafter pays for {', '.join(nowhere)}: decode plainly there." if nowhere else "."
        told.append("Use " + "; ".join(parts) + rest)
    elif nowhere:
        told.append("Nothing here is faster than plain decoding.")
    if untold:
        told.append(f"One timed prompt tells too little to advise on {', '.join(untold)}: time more (setting speed_prompts).")
    heads = [arm["name"] for arm in arms if arm["drafter"] not in FREE]
    winning = [d for d in report["domains"] if any(report["speed"][h][d]["tau"] > report["speed"][h][d]["break_even"] for h in heads)]
    if heads:
        one = len({arm.get("by") for arm in arms if arm["name"] in heads}) == 1
        whose, where = "The head's" if one else "A trained drafter's", ", ".join(winning) or "no domain in this run"
        told.append(f"{whose} tau lies above its break-even in {where}.")
    return told


def losses(report: Mapping[str, Any]) -> list[str]:
    """A sentence for each arm that is slower than plain decoding over all domains, with the reason: what a round costs, what it commits."""
    told = []
    for arm in timed_arms(report):
        cell = report["speed"][arm["name"]][ALL]
        if cell["speedup"] >= 1:
            continue
        lo, hi = (cell.get(end) for end in ("lo", "hi"))
        found = f"speculation loses here: {cell['speedup']:.2f}×, because"
        if lo is not None and hi is not None and hi >= 1:
            found = f"speculation neither gains nor loses clearly here: {cell['speedup']:.2f}× [{lo:.2f}, {hi:.2f}];"
        costs = f"verification {cell['v']:.2f}, drafting {cell['draft']:.2f}, the rest {cell['other']:.2f}"
        told.append(
            f"With {arm['name']} {found} a round costs {cell['break_even']:.2f} rounds of plain decoding ({costs}) and commits "
            f"{cell['tau']:.2f} tokens."
        )
    return told


def remarks(config: EvaluationConfig, few: int, left_out: int, too_long: int, trained: bool) -> list[str]:
    """What figures of these settings do not tell. few: timed prompts of the domain with the fewest; left_out: turns that were not asked;
    too_long: prompts that were not; trained: whether some drafter is."""
    drawn = [t for t in config.temperatures if t]
    told = []
    if drawn:
        told.append(
            f"At temperature {', '.join(f'{t:g}' for t in drawn)} every answer is a draw, and one drafter's draws are not another's: "
            "answers are not compared with plain decoding, and lengths differ by chance. What holds instead is a law: every rule used here "
            "keeps the target's own, which the project's tests show by exact enumeration for each rule and by the generator's frequencies "
            "on small models."
        )
    if left_out:
        each = " (counted at each temperature)" if len(config.temperatures) > 1 else ""
        told.append(f"Later turns{each} that do not fit into the target behind the answers before them, and were not asked: {left_out}.")
    if too_long:
        told.append(f"Prompts of the file that are too long for the target or the settings, and were not asked: {too_long}.")
    timed = ", ".join(f"{t:g}" for t in config.timed_temperatures)
    narrow = "" if few >= FEW else (
        " With so few timed prompts an interval is little more than their range, and a single one has none: its speed-up decides nothing."
    )  # fmt: skip
    told.append(
        f"Speed is decoding speed at batch 1 and temperature {timed} on {few} or more prompts a domain, {config.speed_max_new_tokens} new "
        f"tokens, without the prompt's pass; tau is measured in batches on all prompts.{narrow}"
    )
    if trained:
        told.append("The tau of a trained drafter depends on how long it was trained and on what; another training has another.")
    return told


def drawn_rules(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """By which rule the draws of each temperature were verified, a line a temperature above 0."""
    lines = []
    for temperature in dict.fromkeys(arm.get("temperature", 0.0) for arm in arms):
        rules = [f"{arm['name']} by rule {arm['rule']}" for arm in arms if arm["depth"] and arm.get("temperature") == temperature]
        if temperature and rules:
            lines.append(f"Draws at temperature {temperature:g}: {', '.join(rules)}")
    return lines
