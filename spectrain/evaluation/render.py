"""Report JSON → Markdown, one self-contained HTML page, and tables for the terminal.

The reader sees first what to do (advice) and one table by domain; charts, evidence and definitions follow.
Here are the words, numbers and axes; the template `report.html.j2` lays them out, draws the charts and escapes every string.
In a chart x is a percentage and y is in pixels, so that text keeps its size on a narrow screen.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from spectrain.evaluation.schema import ALL, MACRO, MICRO, NUMBER, Report, Speed, Tau, parse_report

SIGNS = {"win": "▲", "even": "≈", "loss": "▼", "none": "–"}  # a colour never stands alone
DISCS = {"win": "🟢 ", "even": "⚪ ", "loss": "🔴 ", "none": ""}
STYLES = {"win": "green", "even": "default", "loss": "red", "none": "dim"}
TERMINAL_CELL = 16  # columns: "12.34 | ▲ 12.34×"
DEFINITIONS = {
    "τ (tau)": "tokens committed per verification pass, the target's own token included; prefill and its token are left out. "
    "Plain decoding has τ = 1. Two τ compare only at equal depth, width, budget, rule and temperature.",
    "micro, macro": "micro: all committed tokens over all verification passes, so that long answers weigh more. "
    "Macro: the mean over the domains, each counting the same.",
    "break-even": "the τ at which speculation costs exactly what it saves, v + draft + other; above it an arm beats plain decoding.",
    "v, draft, other": "the cost of one round in plain decoding passes: its verification pass, its drafter, and everything else "
    "(acceptance, cache, bookkeeping).",
    "speed-up": "tokens per second over plain decoding by the same code, in the same run, on the same prompts; τ ÷ break-even predicts it.",
    "interval": "[low, high] from a bootstrap over prompts, since the rounds of one prompt are not independent. "
    "▲ the speed-up's interval lies above 1, ≈ it contains 1, ▼ it lies below 1.",
    "acceptance by position": "unconditional: how often the first i drafted tokens were all accepted; conditional: how often token i was, "
    "given that those before it were.",
    "exactness": "equal: the same tokens as plain decoding; tie: the first difference lies where the target's best tokens are level "
    "within rounding, so that either is right; failed: any other difference. Above temperature 0 answers are draws and are not compared.",
    "rule": "how drafts are verified. Greedy at temperature 0; above it point_mass for drafts that were not drawn (n-grams, dynamic "
    "trees), block for a sampled chain, traversal for a sampled tree. All of these keep the target's law.",
    "coverage": "share of the tokens in the target's own answers that a head's draft vocabulary holds; the others it can never draft.",
}


LEGEND = "▲ faster  ≈ no clear difference  ▼ slower  – one prompt, no interval"


def _num(value: NUMBER, digits: int = 2) -> str:
    return SIGNS["none"] if value is None else f"{value:,.{digits}f}"


def _pct(value: NUMBER) -> str:
    return SIGNS["none"] if value is None else f"{100 * value:.1f} %"


def _span(lo: NUMBER, hi: NUMBER) -> str:
    return "" if lo is None or hi is None else f"[{lo:.2f}, {hi:.2f}]"


def _tau_text(cell: Tau | None) -> str:
    return SIGNS["none"] if cell is None else f"{_num(cell.tau)} {_span(cell.lo, cell.hi)}".strip()


def _verdict(cell: Speed | None) -> str:
    if cell is None or cell.speedup is None or cell.lo is None or cell.hi is None:
        return "none"
    return "win" if cell.lo > 1 else "loss" if cell.hi < 1 else "even"


def _speed_text(cell: Speed | None) -> str:
    if cell is None or cell.speedup is None:
        return SIGNS["none"]
    return f"{SIGNS[_verdict(cell)]} {cell.speedup:.2f}× {_span(cell.lo, cell.hi)}".strip()


@dataclass(frozen=True)
class Table:
    """Rows of text under a head "a | b"; the first `labels` columns are words, the rest numbers; `heat` shades percentages."""

    title: str
    note: str
    head: str
    rows: Sequence[Sequence[str]]
    labels: int = 1
    heat: bool = False


def _headline(report: Report) -> Table:
    rows = []
    for domain in report.rows:
        for index, arm in enumerate(report.drafted):
            tau, speed = report.tau_of(arm.name, domain), report.speed_of(arm.name, domain)
            even, verdict = _num(speed.break_even if speed else None), DISCS[_verdict(speed)] + _speed_text(speed)
            rows.append(["" if index else domain, report.label(arm), _tau_text(tau), even, verdict])
    return Table("By domain", "", "domain | arm | τ | break-even | speed-up", rows, labels=2)


def _tau_rows(report: Report) -> Iterable[tuple[str, str, Tau]]:
    for arm in report.arms:
        cells = report.tau.get(arm.name, {})
        yield from ((report.label(arm), key, cells[key]) for key in [*report.domains, MACRO, MICRO] if key in cells)


def _acceptance(report: Report, field: str, title: str, note: str) -> list[Table]:
    found = [(arm, key, getattr(cell, field)) for arm, key, cell in _tau_rows(report)]
    depth = max((len(values) for *_, values in found), default=0)
    rows = [[arm, key, *map(_pct, values), *[SIGNS["none"]] * (depth - len(values))] for arm, key, values in found if values]
    head = " | ".join(["arm", "domain", *(str(i + 1) for i in range(depth))])
    return [Table(title, note, head, rows, labels=2, heat=True)] if rows else []


def _speed_table(report: Report) -> Table:
    rows = []
    for arm in report.arms:
        for domain in report.rows:
            if c := report.speed_of(arm.name, domain):
                predicted = c.tau / c.break_even if c.tau is not None and c.break_even else None
                costs = map(_num, (predicted, c.tau, c.v, c.draft, c.other, c.break_even))
                size = [_num(c.tokens_per_s, 1), f"{c.tokens:,}", _num(c.seconds, 1), f"{c.prompts:,}"]
                rows.append([report.label(arm), domain, _speed_text(c), *costs, *size])
    head = "arm | domain | speed-up | predicted | τ | v | draft | other | break-even | tokens/s | tokens | seconds | prompts"
    note = (
        "break-even = v + draft + other, the cost of a round in plain passes; predicted = τ ÷ break-even. "
        "τ here is that of the speed run, whose answers may be shorter."
    )
    return Table("Speed and cost of a round", note, head, rows, labels=2)


def _evidence(report: Report) -> list[Table]:
    tau = [[arm, key, _tau_text(c), f"{c.tokens:,}", f"{c.rounds:,}", f"{c.prompts:,}"] for arm, key, c in _tau_rows(report)]
    exact = [
        [arm.name, f"{e.prompts:,}", f"{e.equal:,}", f"{e.ties:,}", f"▼ {e.failed:,}" if e.failed else "0"]
        for arm in report.arms
        if (e := report.exactness.get(arm.name))
    ]
    tables = [
        Table("Tokens per pass", "τ = tokens ÷ passes.", "arm | domain | τ | tokens | passes | prompts", tau, labels=2),
        *_acceptance(report, "acceptance", "Acceptance by position, unconditional", "The first i tokens all accepted."),
        *_acceptance(report, "conditional", "Acceptance by position, conditional", "Token i, given those before it."),
        _speed_table(report),
    ]
    if exact:
        note = "Against plain decoding of the same prompts."
        tables.append(Table("Exactness", note, "arm | prompts | equal | ties | failed", exact))
    if b := report.baseline:
        ratio = f"{_num(b.ratio)}× {_span(b.lo, b.hi)}".strip()
        rows = [["spectrain, plain", _num(b.plain_tokens_per_s, 1), ratio], [b.name, _num(b.tokens_per_s, 1), "1.00×"]]
        note = (
            "Plain decoding by both on the same prompts. At a ratio below 1 the speed-ups above flatter: their baseline is the slower one."
        )
        tables.append(Table("Against an independent decoder", note, "decoder | tokens/s | ratio", rows))
    if report.coverage:
        rows = [[domain, _pct(value)] for domain, value in report.coverage.items()]
        tables.append(Table("Draft-vocabulary coverage", "", "domain | coverage", rows))
    return tables


def _conditions(report: Report) -> list[Table]:
    arms = [[a.name, a.drafter, a.shape, a.rule, str(a.depth), str(a.width), str(a.budget)] for a in report.arms]
    facts = [
        ["target", report.target],
        ["suite", f"{report.suite.name} (sha256 {report.suite.sha256})"],
        *([key.replace("_", " "), str(value)] for key, value in report.settings.model_dump().items()),
        *([f"{name} version", version or SIGNS["none"]] for name, version in report.versions.items()),
    ]
    return [
        Table("Arms", "", "arm | drafter | shape | rule | depth | width | budget", arms, labels=4),
        Table("Settings and versions", "", "setting | value", facts, labels=2),
    ]


@dataclass(frozen=True)
class Axis:
    """A range of values over the width (`x`, in percent) or the height (`y`, in px) of a chart."""

    low: float
    high: float
    ticks: Sequence[float]

    def share(self, value: float) -> float:
        """Place of a value in the range, 0 to 1."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def x(self, value: float) -> str:
        """Distance from the left, a percentage."""
        return f"{100 * self.share(value):.2f}%"

    def y(self, value: float, height: float) -> float:
        """Distance from the top of a plot `height` px high."""
        return round(height * (1 - self.share(value)), 1)


def _axis(values: Iterable[NUMBER], count: int = 5) -> Axis:
    known = [value for value in values if value is not None] or [0.0, 1.0]
    rough = max(max(known) - min(known), 1e-6) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor > 0.999 * rough)
    first, last = math.floor(min(known) / step + 1e-6), math.ceil(max(known) / step - 1e-6)
    ticks = [round(i * step, 9) for i in range(first, max(last, first + 1) + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def _domain_axes(report: Report) -> tuple[Axis, Axis]:
    pairs = [(report.tau_of(a.name, d), report.speed_of(a.name, d)) for a in report.drafted for d in report.rows]
    tau = [v for t, s in pairs for v in (t.tau if t else None, t.hi if t else None, s.break_even if s else None)]
    speed = [v for _, s in pairs if s for v in (s.speedup, s.lo, s.hi)]
    return _axis([0.0, 1.0, *tau]), _axis([0.95, 1.05, *speed])


def _escape(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("<", "&lt;").replace("](", "]\\(")
    return " ".join(text.replace("|", "\\|").replace("`", "\\`").replace("*", "\\*").split())


def _markdown_table(table: Table) -> list[str]:
    rule = ["---"] * table.labels + ["--:"] * (table.head.count(" | ") + 1 - table.labels)
    lines = [f"| {' | '.join(row)} |" for row in ([table.head], rule, *([_escape(cell) for cell in row] for row in table.rows))]
    return [f"## {table.title}", "", *([table.note, ""] if table.note else []), *lines, ""]


def _exact_text(report: Report) -> tuple[str, str]:
    found = [report.exactness[arm.name] for arm in report.drafted if arm.name in report.exactness]
    prompts, equal, ties = (sum(getattr(e, key) for e in found) for key in ("prompts", "equal", "ties"))
    if report.sampled:
        return "none", f"– Draws at temperature {report.settings.temperature:g} are not compared with plain decoding: see the notes."
    if not prompts:
        return "none", "– Exactness was not checked."
    if other := prompts - equal - ties:
        return "loss", f"▼ Not exact: {other:,} of {prompts:,} answers differ from plain decoding."
    return "win", f"▲ Exact: all {prompts:,} answers are those of plain decoding, {ties:,} of them up to a tie."


def _lead(report: Report) -> str:
    s = report.settings
    lengths = f"τ with up to {s.max_new_tokens:,} new tokens a prompt, speed with up to {s.speed_max_new_tokens:,}"
    return f"{lengths}; temperature {s.temperature:g}; {s.dtype}; {s.threads} threads; {s.machine}."


def render_markdown(report: dict[str, Any]) -> str:
    """Report → Markdown (GitHub, model cards): advice, table by domain, evidence; ValueError for a bad report."""
    r = parse_report(report)
    made = f"{r.target} on suite {r.suite.name}, {r.made}."
    lines = [f"# {_escape(r.title)}", "", _escape(made), ""]
    lines += [*(f"- **{_escape(sentence)}**" for sentence in r.advice), ""] if r.advice else []
    lines += [_exact_text(r)[1], "", *_markdown_table(_headline(r)), _escape(_lead(r)), ""]
    for table in [*_evidence(r), *_conditions(r)]:
        lines += _markdown_table(table)
    lines += ["## Terms", "", *(f"- **{term}**: {meaning}" for term, meaning in DEFINITIONS.items()), ""]
    lines += ["## Notes", "", *(f"- {_escape(note)}" for note in r.notes), ""] if r.notes else []
    return "\n".join(lines)


def render_html(report: dict[str, Any]) -> str:
    """Report → one HTML page that loads nothing from outside; ValueError for a bad report."""
    r = parse_report(report)
    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"num": _num, "tau": _tau_text, "speed": _speed_text, "verdict": _verdict, "axis": _axis}
    tau_axis, speed_axis = _domain_axes(r)
    depth = max((len(cell.acceptance) for *_, cell in _tau_rows(r)), default=0)
    return page.get_template("report.html.j2").render(
        r=r,
        tau_axis=tau_axis,
        speed_axis=speed_axis,
        share_axis=Axis(0, 1, (0, 0.5, 1)),
        depth_axis=Axis(0.6, depth + 0.4, range(1, depth + 1, 1 + depth // 9)),
        depth=depth,
        evidence=_evidence(r),
        conditions=_conditions(r),
        exact=_exact_text(r),
        lead=_lead(r),
        definitions=DEFINITIONS,
        tones={sign: verdict for verdict, sign in SIGNS.items()},
    )


def terminal_table(report: dict[str, Any]) -> list[RichTable]:
    """Report → tables at most 100 columns wide, a row per domain, as many arms in each as fit."""
    r = parse_report(report)
    first = min(max(map(len, [*r.rows, "domain"])), 20)
    fit = (100 - first - 4) // (TERMINAL_CELL + 3)
    tables = []
    for start in range(0, len(r.drafted), fit):
        arms = r.drafted[start : start + fit]
        table = RichTable(box=box.SIMPLE_HEAD, caption=f"τ | × plain speed;  {LEGEND}")
        table.add_column("domain", width=first, no_wrap=True)
        for arm in arms:
            how = [arm.rule, f"T={r.settings.temperature:g}"] if r.sampled else []
            table.add_column(Text("\n".join([arm.name, *how, "τ | × speed"])), width=TERMINAL_CELL, justify="right", overflow="fold")
        for domain in r.rows:
            cells = [_terminal_cell(r.tau_of(a.name, domain), r.speed_of(a.name, domain)) for a in arms]
            table.add_row(Text(domain, style="bold" if domain == ALL else ""), *cells)
        tables.append(table)
    return tables


def _terminal_cell(tau: Tau | None, speed: Speed | None) -> Text:
    verdict = _verdict(speed)
    times = f"{SIGNS[verdict]} {_num(speed.speedup)}×" if speed and speed.speedup is not None else SIGNS["none"]
    return Text.assemble(f"{_num(tau.tau if tau else None):>5} | ", (f"{times:>8}", STYLES[verdict]))


def write_report(report: dict[str, Any], out: Path) -> None:
    """Write report.json, report.md and report.html into `out`: all rendered first, each file whole or not at all."""
    texts = {"report.md": render_markdown(report), "report.html": render_html(report)}
    texts["report.json"] = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        part = out / f".{name}.{os.getpid()}.part"
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, out / name)
        finally:
            part.unlink(missing_ok=True)
