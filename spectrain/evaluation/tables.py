"""Tables of a report as rows of text: one by domain, depth by rank, the comparison with another report, the conditions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.evaluation.schema import ALL, Arm, Report
from spectrain.evaluation.words import DISCS, SIGNS, num, p_value, pct, signed, speed_text, tau_text, verdict

LONG = 24  # rows: longer tables are folded


@dataclass(frozen=True)
class Table:
    """Rows of text under a head "a | b"; the first `labels` columns are words, the rest numbers; `heat` shades percentages."""

    title: str
    note: str
    head: str
    rows: Sequence[Sequence[str]]
    labels: int = 1
    heat: bool = False

    @property
    def anchor(self) -> str:
        """The table's id on the page."""
        return anchor(self.title)

    @property
    def long(self) -> bool:
        return len(self.rows) > LONG


def anchor(title: str) -> str:
    """A title as an id."""
    return "t-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def headlines(report: Report) -> list[Table]:
    """The table by domain, one for each temperature: with speed a row an arm, else a column an arm."""
    tables = []
    for temperature in report.temperatures:
        arms = report.at(temperature)
        title = "By domain" if len(report.temperatures) == 1 else f"By domain, T = {temperature:g}"
        timed = any(report.speed.get(arm.name) for arm in arms) or len(report.temperatures) == 1
        tables.append(_timed(report, title, arms) if timed else _counted(report, title, arms))
    return tables


def _timed(report: Report, title: str, arms: Sequence[Arm]) -> Table:
    rows = []
    for domain in report.rows:
        for index, arm in enumerate(arms):
            tau, speed = report.tau_of(arm.name, domain), report.speed_of(arm.name, domain)
            even = num(speed.break_even if speed else None)
            rows.append(["" if index else domain, report.label(arm), tau_text(tau), even, DISCS[verdict(speed)] + speed_text(speed)])
    return Table(title, "", "domain | arm | τ | break-even | speed-up", rows, labels=2)


def _counted(report: Report, title: str, arms: Sequence[Arm]) -> Table:
    rows = [[domain, *(tau_text(report.tau_of(arm.name, domain)) for arm in arms)] for domain in report.rows]
    return Table(title, "τ by domain; speed was not measured at this temperature.", " | ".join(["domain", *map(report.label, arms)]), rows)


def by_temperature(report: Report) -> list[Table]:
    """τ over all domains by arm and temperature, where there are several temperatures, and the speed-up at the first one."""
    if len(report.temperatures) < 2:
        return []
    first, shown = report.temperatures[0], dict[str, dict[float, Arm]]()
    for arm in report.drafted:
        shown.setdefault(report.short(arm), {})[report.temperature_of(arm)] = arm
    rows = []
    for name, arms in shown.items():
        taus = [tau_text(report.tau_of(arms[t].name, ALL)) if t in arms else SIGNS["none"] for t in report.temperatures]
        rows.append([name, *taus, speed_text(report.speed_of(arms[first].name, ALL)) if first in arms else SIGNS["none"]])
    head = " | ".join(["arm", *(f"τ, T = {t:g}" for t in report.temperatures), f"speed-up, T = {first:g}"])
    return [Table("By temperature", "Over all domains, micro.", head, rows)]


def against(report: Report) -> list[Table]:
    """The comparison with another report."""
    if report.against is None:
        return []
    rows = [
        [c.arm, c.domain, num(c.then), num(c.now), f"{signed(c.difference)} {signed_span(c.lo, c.hi)}".strip(), p_value(c.p)]
        for c in report.against.rows
    ]
    note = f"Then: {report.against.file}. {report.against.note or ''}".strip()
    return [Table("Against another report", note, "arm | domain | then | now | difference | p", rows, labels=2)]


def signed_span(lo: float | None, hi: float | None) -> str:
    """The interval of a difference, nothing where there is none."""
    return "" if lo is None or hi is None else f"[{signed(lo)}, {signed(hi)}]"


def heat_maps(report: Report) -> list[Table]:
    """Depth × rank: the share of drafts of each rank that are right, a map for each drafter."""
    tables = []
    for drafter, ranks in (report.ranks or {}).items():
        width = max(map(len, ranks.table), default=0)
        reached = ranks.denominator or [None] * len(ranks.table)
        rows = [
            [str(depth + 1), *(pct(value) for value in row), *[SIGNS["none"]] * (width - len(row)), count(n)]
            for depth, (row, n) in enumerate(zip(ranks.table, reached, strict=False))
        ]
        head = " | ".join(["depth", *(f"rank {k + 1}" for k in range(width)), "rounds that came so far"])
        note = "Share of the rounds that came to a depth, whose next token was the drafter's choice of this rank."
        tables.append(Table(f"Depth × rank: {drafter}", note, head, rows, heat=True))
    return tables


def conditions(report: Report) -> list[Table]:
    """What the figures were made with."""
    arms = [
        [a.name, a.drafter, a.shape, a.rule, f"{report.temperature_of(a):g}", str(a.depth), str(a.width), str(a.budget)]
        for a in report.arms
    ]
    extra = report.model_extra or {}
    made_of, spent = extra.get("made_of") or {}, extra.get("time")
    facts = [
        ["target", report.target],
        ["suite", f"{report.suite.name} (sha256 {report.suite.sha256})"],
        *([f"{key} (digest)", value] for key, value in made_of.items() if key in ("target", "head")),
        *([key.replace("_", " "), _told(value)] for key, value in report.settings.model_dump().items()),
        *([f"{name} version", version or SIGNS["none"]] for name, version in report.versions.items()),
        *([["the evaluation's own time", f"{pct(spent['overhead_share'])} of the answers' time"]] if spent else []),
        ["made", report.made],
    ]
    counts = (report.suite.model_extra or {}).get("prompts")
    prompts = [[domain, _told(number)] for domain, number in counts.items()] if isinstance(counts, dict) else []
    licences = report.licences or (report.suite.model_extra or {}).get("licences") or {}
    return [
        Table("Arms", "", "arm | drafter | shape | rule | temperature | depth | width | budget", arms, labels=4),
        Table("Settings and versions", "", "setting | value", facts, labels=2),
        *([Table("Prompts", "", "domain | prompts", prompts)] if prompts else []),
        *([Table("Licences of the prompts", "", "source | licence", list(licences.items()), labels=2)] if licences else []),
    ]


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_told(entry)}" for key, entry in value.items()) or SIGNS["none"]
    return ", ".join(map(_told, value)) if isinstance(value, (list, tuple)) else str(value)


def count(number: int | None) -> str:
    """A number of things, a dash where it is not known."""
    return SIGNS["none"] if number is None else f"{number:,}"
