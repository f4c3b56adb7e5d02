"""Tables of a report for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from spectrain.evaluation.schema import ALL, Arm, Report, Speed, Tau, parse_report
from spectrain.evaluation.words import LEGEND, SIGNS, STYLES, num, verdict

CELL = 16  # columns: "12.34 | ▲ 12.34×"
WIDTH = 100


def terminal_table(report: dict[str, Any]) -> list[RichTable]:
    """Report → tables at most 100 columns wide, a row per domain, as many arms of one temperature in each as fit."""
    r = parse_report(report)
    first = min(max(map(len, [*r.rows, "domain"])), 20)
    fit = (WIDTH - first - 4) // (CELL + 3)
    tables = []
    for temperature in r.temperatures:
        arms = r.at(temperature)
        tables += [_table(r, arms[start : start + fit], first) for start in range(0, len(arms), fit)]
    return tables


def _table(r: Report, arms: list[Arm], first: int) -> RichTable:
    timed = any(r.speed.get(arm.name) for arm in arms) or not r.sampled
    table = RichTable(box=box.SIMPLE_HEAD, caption=f"τ | × plain speed;  {LEGEND}" if timed else "τ")
    table.add_column("domain", width=first, no_wrap=True)
    for arm in arms:
        temperature = r.temperature_of(arm)
        how = [arm.rule, f"T={temperature:g}"] if temperature else []
        name = "\n".join([r.short(arm), *how, "τ | × speed" if timed else "τ"])
        table.add_column(Text(name), width=CELL, justify="right", overflow="fold")
    for domain in r.rows:
        cells = [_cell(r.tau_of(a.name, domain), r.speed_of(a.name, domain), timed) for a in arms]
        table.add_row(Text(domain, style="bold" if domain == ALL else ""), *cells)
    return table


def _cell(tau: Tau | None, speed: Speed | None, timed: bool) -> Text:
    known = f"{num(tau.tau if tau else None):>5}"
    if not timed:
        return Text(known)
    tone = verdict(speed)
    times = f"{SIGNS[tone]} {num(speed.speedup)}×" if speed and speed.speedup is not None else SIGNS["none"]
    return Text.assemble(f"{known} | ", (f"{times:>8}", STYLES[tone]))
