"""The charts of a report as data: rows with intervals, and panels of lines. The page and the pictures draw the same ones.

In a chart of the page x is a percentage and y is in pixels, so that text keeps its size on a narrow screen. Arms differ by letter and
marker as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spectrain.evaluation.evidence import SLICES
from spectrain.evaluation.schema import ALL, NUMBER, Arm, Report
from spectrain.evaluation.tables import anchor
from spectrain.evaluation.words import num, signed, verdict

COLOURS = 6
Point = tuple[float, NUMBER, NUMBER, NUMBER]  # x, value and its interval


@dataclass(frozen=True)
class Axis:
    """A range of values over the width (`x`, in percent) or the height (`y`, in px) of a chart; names: of the ticks, if not numbers."""

    low: float
    high: float
    ticks: Sequence[float]
    names: Sequence[str] = ()

    def share(self, value: float) -> float:
        """Place of a value in the range, 0 to 1."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def x(self, value: float) -> str:
        """Distance from the left, a percentage."""
        return f"{100 * self.share(value):.2f}%"

    def y(self, value: float, height: float) -> float:
        """Distance from the top of a plot `height` px high."""
        return round(height * (1 - self.share(value)), 1)

    @property
    def labelled(self) -> list[tuple[float, str]]:
        """Ticks and what stands at them."""
        return list(zip(self.ticks, self.names or [f"{tick:g}" for tick in self.ticks], strict=True))


def nice(values: Iterable[NUMBER], count: int = 5) -> Axis:
    """An axis around the values with ticks at round numbers."""
    known = [value for value in values if value is not None] or [0.0, 1.0]
    rough = max(max(known) - min(known), 1e-6) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor > 0.999 * rough)
    first, last = math.floor(min(known) / step + 1e-6), math.ceil(max(known) / step - 1e-6)
    ticks = [round(i * step, 9) for i in range(first, max(last, first + 1) + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def named(names: Sequence[str]) -> Axis:
    """An axis of names, evenly spaced."""
    return Axis(-0.5, len(names) - 0.5, range(len(names)), names)


SHARE = Axis(0, 1, (0, 0.5, 1))


@dataclass(frozen=True)
class Bar:
    """A row: `key` numbers the arm, `mark` is a second figure of it, `sure`: its interval leaves the reference out."""

    name: str
    value: NUMBER
    lo: NUMBER = None
    hi: NUMBER = None
    mark: NUMBER = None
    key: int | None = None
    sure: bool = True

    @property
    def far(self) -> float:
        """Where the row ends on the right."""
        return max(v for v in (self.value, self.hi, self.mark) if v is not None)


@dataclass(frozen=True)
class Bars:
    """Rows by group. reference: the figure of no change; dots: points with intervals instead of bars; numbers: the table that has them."""

    title: str
    note: str
    axis: Axis
    groups: Sequence[tuple[str, Sequence[Bar]]]
    numbers: str
    reference: float = 1.0
    unit: str = ""
    dots: bool = False
    mark: str = ""
    kind: str = "bars"

    def text(self, value: NUMBER) -> str:
        """A figure as it stands in the chart."""
        return (signed(value) if self.reference == 0 else num(value)) + self.unit

    @property
    def single(self) -> bool:
        """Whether each group has one row, whose name is the group's."""
        return all(len(rows) == 1 for _, rows in self.groups)

    @property
    def alt(self) -> str:
        """What the chart shows, in words."""
        bars = [(bar.value, f"{bar.name}, {group}") for group, rows in self.groups for bar in rows if bar.value is not None]
        if not bars:
            return f"{self.title}: nothing measured"
        (low, worst), (high, best) = min(bars), max(bars)
        return f"{self.title}. Highest {self.text(high)} ({best}), lowest {self.text(low)} ({worst}). All figures: table “{self.numbers}”."


@dataclass(frozen=True)
class Line:
    """Points of one arm."""

    name: str
    key: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes; apart: arms side by side at each x, so that their intervals do not cover each other."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    apart: bool = False
    reference: NUMBER = None

    @property
    def alt(self) -> str:
        """What the panel shows, in words."""
        ends = []
        for line in self.lines:
            known = [(x, y) for x, y, *_ in line.points if y is not None]
            if known:
                ends.append(f"{line.name} from {known[0][1]:.3g} to {known[-1][1]:.3g}")
        return f"{self.title}: {'; '.join(ends) or 'nothing measured'}"


@dataclass(frozen=True)
class Panels:
    """Panels under one title; wide: they need room for the names of their ticks; legend: names of lines that are no arms."""

    title: str
    note: str
    panels: Sequence[Panel]
    numbers: str = ""
    wide: bool = False
    legend: Sequence[str] = ()
    kind: str = "panels"


@dataclass(frozen=True)
class Group:
    """The charts of one temperature, or those of all arms; arms: (key, arm) of its legend."""

    title: str
    charts: Sequence[Bars | Panels]
    arms: Sequence[tuple[int, Arm]] = ()


@dataclass(frozen=True)
class Keys:
    """A number for each drafter and shape, the same at every temperature."""

    report: Report
    of_name: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        names = dict.fromkeys(map(self.report.short, self.report.drafted))
        object.__setattr__(self, "of_name", {name: key for key, name in enumerate(names)})

    def of(self, arm: Arm) -> int:
        """The number of an arm."""
        return self.of_name[self.report.short(arm)]


def letter(key: int) -> str:
    """A, B, …, Z, A1, …"""
    return chr(ord("A") + key % 26) + (str(key // 26) if key >= 26 else "")


def groups(report: Report) -> list[Group]:
    """The charts, one group a temperature, then those that compare temperatures, batches, steps."""
    keys = Keys(report)
    found = []
    for temperature in report.temperatures:
        arms = [(keys.of(arm), arm) for arm in report.at(temperature)]
        title = "" if len(report.temperatures) == 1 else f"Temperature {temperature:g}"
        parts: list[Bars | Panels | None] = [_tau(report, arms), _speedup(report, arms), _gap(report, arms), _pairs(report, arms)]
        parts += [_survival(report, arms), *_slices(report, arms)]
        if arms:
            found.append(Group(title, [chart for chart in parts if chart is not None], arms))
    overall = [chart for chart in (*_batch(report), _training(report)) if chart is not None]
    return [*found, Group("", overall)] if overall else found


Arms = Sequence[tuple[int, Any]]


def _tau(report: Report, arms: Arms) -> Bars:
    rows, values = [], [0.0, 1.0]
    for domain in report.rows:
        bars = []
        for key, arm in arms:
            t, s = report.tau_of(arm.name, domain), report.speed_of(arm.name, domain)
            even = s.break_even if s else None
            bars.append(Bar(report.short(arm), t and t.tau, t and t.lo, t and t.hi, even, key))
            values += [v for v in (t and t.tau, t and t.hi, even) if v is not None]
        rows.append((domain, bars))
    marked = any(bar.mark is not None for _, bars in rows for bar in bars)
    note = "A bar that ends right of its break-even mark is faster than plain decoding." if marked else "Plain decoding has 1."
    return Bars("Tokens per pass, τ", note, nice(values), rows, "Tokens per pass", mark="break-even" if marked else "")


def _speedup(report: Report, arms: Arms) -> Bars | None:
    rows, values = [], [0.95, 1.05]
    for domain in report.rows:
        bars = []
        for key, arm in arms:
            s = report.speed_of(arm.name, domain)
            bars.append(
                Bar(report.short(arm), s and s.speedup, s and s.lo, s and s.hi, key=key, sure=verdict(s) in ("win", "loss"))
            )
            values += [v for v in (s and s.speedup, s and s.lo, s and s.hi) if v is not None]
        rows.append((domain, bars))
    if len(values) == 2:
        return None
    note = "Left of 1, in the tinted zone, an arm is slower. An open dot: the interval contains 1, or there is none."
    return Bars("Speed-up over plain decoding", note, nice(values), rows, "Speed and cost of a round", unit="×", dots=True)


def _gap(report: Report, arms: Arms) -> Bars | None:
    rows, values = [], [0.95, 1.05]
    for key, arm in arms:
        cell, speed = (report.gap or {}).get(arm.name, {}).get(ALL), report.speed_of(arm.name, ALL)
        if cell is not None and cell.measured is not None:
            lo, hi = (speed.lo, speed.hi) if speed else (None, None)
            rows.append((report.short(arm), [Bar(report.short(arm), cell.measured, lo, hi, cell.predicted, key)]))
            values += [v for v in (cell.measured, cell.predicted, lo, hi) if v is not None]
    note = "Over all domains: the dot is measured, the mark is predicted from τ and costs that were measured apart."
    title, numbers = "Speed-up, predicted and measured", "Speed-up predicted and measured"
    return Bars(title, note, nice(values), rows, numbers, unit="×", dots=True, mark="predicted") if rows else None


def _survival(report: Report, arms: Arms) -> Panels | None:
    depth = max((len(c.acceptance) for _, arm in arms for c in report.tau.get(arm.name, {}).values()), default=0)
    if not depth:
        return None
    x, panels = Axis(0.6, depth + 0.4, range(1, depth + 1, 1 + depth // 9)), []
    for domain in [ALL, *report.domains]:
        lines = []
        for key, arm in arms:
            if cell := report.tau_of(arm.name, domain):
                points = [(float(i + 1), value, None, None) for i, value in enumerate(cell.acceptance)]
                lines.append(Line(report.short(arm), key, points))
        panels.append(Panel(domain, x, SHARE, lines))
    note = (
        "Share of rounds in which the first i drafted tokens were all accepted. The sum of a line, plus one, is its τ, but for rounds "
        "cut by the end of an answer."
    )
    return Panels("Acceptance by position", note, panels, "Acceptance by position, unconditional")


SLICE_TITLES = {"context": "By tokens of context", "position": "By position in the answer", "part": "Thinking and answer",
                "entropy": "First draft accepted, by the target's entropy there, nats"}  # fmt: skip


def _slices(report: Report, arms: Arms) -> list[Panels]:
    panels = []
    for part in SLICES:
        cells = {arm.name: (report.slices or {}).get(arm.name, {}).get(part, []) for _, arm in arms}
        labels = list(dict.fromkeys(cell.label for row in cells.values() for cell in row))
        if len(labels) < 2:
            continue
        lines = []
        for key, arm in arms:
            first = part == "entropy"
            found = [(c.first, c.first_lo, c.first_hi) if first else (c.tau, c.lo, c.hi) for c in cells[arm.name]]
            points = [(float(labels.index(c.label)), *three) for c, three in zip(cells[arm.name], found, strict=True)]
            lines.append(Line(report.short(arm), key, sorted(points)))
        values = [v for line in lines for _, *row in line.points for v in row]
        y, reference = (SHARE, None) if part == "entropy" else (nice([1.0, *values], 4), 1.0)
        panels.append(Panel(SLICE_TITLES[part], named(labels), y, lines, apart=True, reference=reference))
    note = "τ with its interval over prompts, all domains together."
    title = "Context, position, thinking, entropy"
    return [Panels(title, note, panels, "Context, position, part, entropy", wide=True)] if panels else []


def _pairs(report: Report, arms: Arms) -> Bars | None:
    rows: list[tuple[str, list[Bar]]] = []
    values, names = [0.0], {arm.name: report.short(arm) for _, arm in arms}
    for pair in report.pairs or []:
        if pair.a not in names or pair.b not in names:
            continue
        sure = pair.lo is not None and pair.hi is not None and (pair.lo > 0 or pair.hi < 0)
        rows.append((f"{names[pair.a]} − {names[pair.b]}", [Bar("difference", pair.difference, pair.lo, pair.hi, sure=sure)]))
        values += [v for v in (pair.difference, pair.lo, pair.hi) if v is not None]
    note = "τ of the first less τ of the second, prompt by prompt. Right of 0 the first is ahead; an open dot: the interval contains 0."
    title = "Arms compared on the same prompts"
    return Bars(title, note, nice(values), rows, title, reference=0.0, dots=True) if rows else None


BATCH_LINES = {"plain": "plain", "speculative": "always drafting", "table": "a depth by batch", "adaptive": "adaptive policy"}
PREDICTED = "always drafting, predicted"


def _batch(report: Report) -> list[Panels]:
    """By drafter: tokens a second of the whole batch, and what drafting makes of plain decoding's; the curve crosses 1 at break-even."""
    panels = []
    drafters = (report.batch or {}).get("drafters", {})
    for name, found in drafters.items():
        rows = found["rows"]
        x, places = named([str(row["batch"]) for row in rows]), list(enumerate(rows))
        lines, gains = [], []
        for key, (arm, words) in enumerate(BATCH_LINES.items()):
            lines.append(Line(words, key, [(float(i), row[arm], None, None) for i, row in places]))
            if arm != "plain":
                lo, hi = ("lo", "hi") if arm == "speculative" else ("", "")
                gains.append(Line(words, key, [(float(i), row[arm] / row["plain"], row.get(lo), row.get(hi)) for i, row in places]))
        gains.append(Line(PREDICTED, len(BATCH_LINES), [(float(i), row.get("predicted"), None, None) for i, row in places]))
        top = "" if len(drafters) == 1 else f"{name}: "
        panels.append(Panel(f"{top}tokens/s of the whole batch", x, nice([0.0, *_values(lines)], 4), lines))
        times = nice([0.95, 1.05, *_values(gains)], 4)
        panels.append(Panel(f"{top}times plain decoding", x, times, gains, apart=True, reference=1.0))
    note = "Over the rows of a batch. Where a curve falls below the dashed line, drafting loses: its break-even lies there."
    legend = [*BATCH_LINES.values(), PREDICTED]
    return [Panels("Batches", note, panels, "By batch", wide=True, legend=legend)] if panels else []


def _values(lines: Sequence[Line]) -> list[NUMBER]:
    return [value for line in lines for _, *three in line.points for value in three]


def _training(report: Report) -> Panels | None:
    steps = report.training.steps if report.training else []
    if not steps:
        return None
    at = [float(step.step) for step in steps]
    x = nice(at, 4)

    def line(name: str, key: int, values: Sequence[NUMBER]) -> Line:
        return Line(name, key, [(a, value, None, None) for a, value in zip(at, values, strict=True)])

    loss, measured = [step.loss for step in steps], [step.measured_tau for step in steps]
    panels = [Panel("loss", x, nice(loss, 3), [line("loss", 0, loss)])]
    width = max(len(step.alpha) for step in steps)
    if width:
        drafts = [line(f"draft {i + 1}", i, [step.alpha[i] if i < len(step.alpha) else None for step in steps]) for i in range(width)]
        panels.append(Panel("α by draft step", x, SHARE, drafts))
    if any(value is not None for value in measured):
        panels.append(Panel("measured τ", x, nice(measured, 3), [line("measured τ", 0, measured)]))
    note = f"Over steps; {steps[-1].minutes or 0:.0f} min to step {steps[-1].step:,}."
    return Panels("Training", note, panels, legend=[f"draft {i + 1}" for i in range(width)])


def link_of(chart: Bars | Panels) -> str:
    """Where the figures of a chart stand on the page; "" for nowhere."""
    return f"#{anchor(chart.numbers)}" if chart.numbers else ""
