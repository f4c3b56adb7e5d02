"""Several reports of one target and one suite as one report: their heads side by side, the free drafters once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.evaluation.paired import pairs
from spectrain.evaluation.records import Record
from spectrain.evaluation.schema import parse_report
from spectrain.evaluation.told import FREE, advice, losses

BY_ARM = ("tau", "speed", "exactness", "slices", "gap", "price")
BY_DRAFTER = ("alpha", "ranks")
OF_ONE = ("baseline", "settings", "versions", "suite", "licences", "domains", "target")
Found = Mapping[str, Sequence[Record]]


def labels_of(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: its own, or its parent's where all are called alike (runs/a/evaluation, runs/b/evaluation)."""
    names = [folder.resolve() for folder in folders]
    for name in (lambda p: p.name, lambda p: p.parent.name, str):
        found = [name(path) for path in names]
        if len(set(found)) == len(found):
            return found
    raise ValueError(f"the folder {folders[0]} is named twice; name each report once")


def compared(reports: Mapping[str, dict[str, Any]], records: Mapping[str, Found]) -> dict[str, Any]:
    """One report from several by label; speed-ups are over each report's own plain decoding.

    records: of the counts, by label and arm, where they are there (`records.records_of`): with them arms are compared prompt by prompt.
    ValueError for reports of other targets, suites, lengths or precisions, whose figures do not compare.
    """
    first, *others = reports.values()
    for label, report in reports.items():
        parse_report(report)
        _check(first, report, label)
    arms: list[dict[str, Any]] = []
    merged: dict[str, Any] = {key: first[key] for key in OF_ONE if key in first}
    merged |= {part: {} for part in (*BY_ARM, *BY_DRAFTER)}
    counted: dict[str, Sequence[Record]] = {}
    for label, report in reports.items():
        names = {arm["name"]: _named(arm, label) for arm in report["arms"]}
        fresh = [arm for arm in report["arms"] if names[arm["name"]] not in {known["name"] for known in arms}]
        arms += [{**arm, "name": names[arm["name"]], "by": _by(arm, label)} for arm in fresh]
        for part in BY_ARM:
            cells = report.get(part) or {}
            merged[part] |= {names[arm["name"]]: cells[arm["name"]] for arm in fresh if arm["name"] in cells}
        for part in BY_DRAFTER:
            owners = {arm.get("by", "head"): _by(arm, label) for arm in report["arms"]}
            merged[part] |= {_drafter(name, owners): cell for name, cell in (report.get(part) or {}).items()}
        counted |= {names[arm["name"]]: rows for arm in fresh if (rows := records.get(label, {}).get(arm["name"]))}
    merged |= {"arms": arms, "title": f"Drafters for {first['target']} side by side", "made": max(r["made"] for r in reports.values())}
    merged |= {"notes": _notes(reports), "format": 2}
    known = [arm for arm in arms if arm["name"] in counted]
    merged["pairs"] = _pairs(counted, known)
    merged["advice"] = [*advice(merged), *losses(merged)]
    return {key: value for key, value in merged.items() if value or key in ("baseline", "exactness", "advice", "speed")}


def _own(arm: Mapping[str, Any]) -> bool:
    return arm["drafter"] not in FREE


def _named(arm: Mapping[str, Any], label: str) -> str:
    """A free arm is the same in every report; a head's is named by its report."""
    return f"{label} {arm['name'].removeprefix('head ')}" if _own(arm) else arm["name"]


def _by(arm: Mapping[str, Any], label: str) -> str:
    """The name of an arm's drafter: a free one's own, else that of its report, with its own where a report may have several."""
    if not _own(arm):
        return str(arm.get("by", arm["drafter"]))
    return label if arm.get("by", "head") == "head" else f"{label} {arm['by']}"


def _drafter(name: str, owners: Mapping[str, str]) -> str:
    """The key of a drafter's own table, which may end in a temperature."""
    own, mark, temperature = name.partition(" T=")
    return owners.get(own, own) + mark + temperature


def _check(first: Mapping[str, Any], report: Mapping[str, Any], label: str) -> None:
    def told(r: Mapping[str, Any]) -> dict[str, Any]:
        settings = {key: r["settings"][key] for key in ("max_new_tokens", "temperature", "dtype")}
        texts = [part["suite"].get("prompts_sha256") for part in (r, first, report)]  # reports of earlier versions have none
        prompts = {} if None in texts else {"prompts": texts[0][:12]}
        return {"target": (r.get("made_of") or {}).get("target", r["target"]), "suite": r["suite"]["sha256"][:12], **prompts, **settings}

    here, there = told(first), told(report)
    if differs := [f"{key} {there[key]} instead of {here[key]}" for key in here if here[key] != there[key]]:
        raise ValueError(f"the report of {label} does not compare with the first one ({'; '.join(differs)}); measure both alike")


def _notes(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    machines = {report["settings"]["machine"] for report in reports.values()}
    told = [f"Put together from the reports of {', '.join(reports)}; free drafters and settings are those of the first that has them."]
    told.append("Each speed-up is over plain decoding of its own run, so that runs at different times compare; tokens per second do not.")
    if len(machines) > 1:
        told.append(f"The reports are of different machines ({'; '.join(sorted(machines))}): speed does not compare.")
    return told


def _pairs(counted: Found, arms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Arms of one temperature compared on the prompts that all of them answered; none where an arm has others."""
    found = []
    for temperature in dict.fromkeys(arm.get("temperature") for arm in arms):
        own = [arm for arm in arms if arm.get("temperature") == temperature]
        if len({frozenset((r.id, r.turn) for r in counted[arm["name"]]) for arm in own}) == 1:
            found += pairs(counted, own)
    return found
