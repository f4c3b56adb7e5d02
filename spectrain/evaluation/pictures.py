"""The charts of a report as PNG pictures, by matplotlib (extra `plots`)."""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import dataclass
from typing import Any

from spectrain.evaluation.charts import Bars, Group, Line, Panel, Panels, groups, letter
from spectrain.evaluation.schema import Ranks, Report

MISSING = "No pictures were drawn: matplotlib is not installed (pip install 'spectrain[plots]')."
COLOURS = ("#2f6fdb", "#d9760f", "#8350cf", "#0d8f97", "#c43d86", "#7f7a13")
MARKERS = ("o", "s", "^", "D", "P", "v")
DPI = 130


@dataclass(frozen=True)
class Picture:
    """A chart as a file's name and content."""

    title: str
    file: str
    png: bytes


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Report) -> list[Picture] | None:
    """The charts of the report, of later temperatures τ alone (the page has them all); None where matplotlib is not installed."""
    if not can_draw():
        return None
    found: list[Picture] = []
    for group in groups(report):
        for chart in group.charts if not (group.arms and found) else group.charts[:1]:
            title = ", ".join(filter(None, [chart.title, group.title.lower()]))
            figure = _bars(chart, group) if isinstance(chart, Bars) else _panels(chart, group)
            found.append(Picture(title, _file(title), _png(figure, title)))
    for drafter, ranks in (report.ranks or {}).items():
        title = f"Depth × rank: {drafter}"
        found.append(Picture(title, _file(title), _png(_heat(ranks), title)))
    return found


def _file(title: str) -> str:
    plain = title.lower().replace("τ", "tau").replace("×", "by").replace("α", "alpha")
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-") + ".png"


def _png(figure: Any, title: str) -> bytes:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
    return buffer.getvalue()


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot, so that nothing global is changed

    return Figure(figsize=(width, height), layout="constrained")


def _bars(chart: Bars, group: Group) -> Any:
    rows = [(label, bar, first) for label, bars in chart.groups for first, bar in ((i == 0, bar) for i, bar in enumerate(bars))]
    figure = _figure(8, 1.2 + 0.19 * len(rows) + 0.12 * len(chart.groups))
    axes, y, ticks = figure.add_subplot(), 0.0, []
    axes.axvline(chart.reference, color="#555", linewidth=1, linestyle="--", zorder=1)
    if chart.dots:
        axes.axvspan(chart.axis.low, chart.reference, color="#fbe6e3", alpha=0.5, zorder=0)
    for label, bars in chart.groups:
        ticks.append((y + (len(bars) - 1) / 2, label))
        for bar in bars:
            _row(axes, chart, bar, y)
            y += 1
        y += 0.8
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=9)
    axes.set_ylim(y - 0.4, -0.9)
    axes.set_xlim(chart.axis.low, chart.axis.high + 0.09 * (chart.axis.high - chart.axis.low))
    axes.set_xticks(chart.axis.ticks)
    axes.set_xlabel(chart.note, fontsize=8, wrap=True)
    _finish(axes, "x")
    if group.arms and not chart.single:
        _legend(figure, group, [bool(chart.mark), chart.mark])
    return figure


def _row(axes: Any, chart: Bars, bar: Any, y: float) -> None:
    colour = COLOURS[(bar.key or 0) % len(COLOURS)]
    if bar.value is None:
        axes.text(chart.reference if chart.dots else chart.axis.low, y, " –", va="center", fontsize=7, color="#555")
        return
    if not chart.dots:
        axes.barh(y, bar.value - chart.axis.low, left=chart.axis.low, height=0.72, color=colour, zorder=2)
    if bar.lo is not None and bar.hi is not None:
        axes.plot([bar.lo, bar.hi], [y, y], color=colour if chart.dots else "#222", linewidth=1.2, marker="|", markersize=4, zorder=3)
    if bar.mark is not None:
        axes.plot([bar.mark, bar.mark], [y - 0.4, y + 0.4], color="black", linewidth=2.2, zorder=4)
    if chart.dots:
        axes.plot(bar.value, y, marker="o", markersize=5, color=colour, markerfacecolor=colour if bar.sure else "white", zorder=5)
    name = "" if bar.key is None or chart.single else f"{letter(bar.key)} "
    axes.annotate(f"{name}{chart.text(bar.value)}", (bar.far, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7)


def _panels(chart: Panels, group: Group) -> Any:
    across = min(len(chart.panels), 2 if chart.wide else 4)
    down = -(-len(chart.panels) // across)
    figure = _figure((4.6 if chart.wide else 2.4) * across + 0.4, 2.2 * down + 0.9)
    for i, panel in enumerate(chart.panels):
        axes = figure.add_subplot(down, across, i + 1)
        for n, line in enumerate(panel.lines):
            _line(axes, panel, line, (n - (len(panel.lines) - 1) / 2) * 0.09 if panel.apart else 0.0)
        if panel.reference is not None:
            axes.axhline(panel.reference, color="#555", linewidth=1, linestyle="--", zorder=1)
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.set_xlim(panel.x.low, panel.x.high)
        axes.set_ylim(panel.y.low, panel.y.high)
        axes.set_xticks([at for at, _ in panel.x.labelled], [name for _, name in panel.x.labelled], fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
        _finish(axes, "y")
    if chart.legend:
        _names(figure, [(i, name) for i, name in enumerate(chart.legend)])
    elif group.arms:
        _legend(figure, group, [False, ""])
    return figure


def _line(axes: Any, panel: Panel, line: Line, offset: float) -> None:
    points = [(x + offset, y, lo, hi) for x, y, lo, hi in line.points if y is not None]
    colour, marker = COLOURS[line.key % len(COLOURS)], MARKERS[line.key % len(MARKERS)]
    few = len(line.points) < 40
    axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker=marker if few else None, markersize=4, linewidth=1.4)
    for x, _, lo, hi in points:
        if lo is not None and hi is not None:
            axes.plot([x, x], [lo, hi], color=colour, linewidth=1, alpha=0.7)


def _heat(ranks: Ranks) -> Any:
    width = max(map(len, ranks.table), default=1)
    rows = [[*row, *[0.0] * (width - len(row))] for row in ranks.table]
    figure = _figure(1.6 + 0.62 * width, 1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    axes.imshow(rows, cmap="Blues", vmin=0, vmax=max(max(map(max, rows)), 1e-9) * 1.7, aspect="auto")
    for depth, row in enumerate(ranks.table):
        for rank, share in enumerate(row):
            axes.text(rank, depth, f"{100 * share:.1f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(width), [str(k + 1) for k in range(width)])
    axes.set_yticks(range(len(rows)), [str(d + 1) for d in range(len(rows))])
    axes.set_xlabel("rank of the drafter's choice; percent of the rounds that came so far", fontsize=8)
    axes.set_ylabel("depth", fontsize=8)
    return figure


def _finish(axes: Any, grid: str) -> None:
    axes.grid(axis=grid, color="#e6e6e2", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, group: Group, mark: list[Any]) -> None:
    _names(figure, [(key, f"{letter(key)}  {arm.name}") for key, arm in group.arms], mark[1] if mark[0] else "")


def _names(figure: Any, names: list[tuple[int, str]], mark: str = "") -> None:
    from matplotlib.lines import Line2D

    n = len(COLOURS)
    handles = [Line2D([], [], color=COLOURS[key % n], marker=MARKERS[key % n], markersize=5, label=name) for key, name in names]
    if mark:
        handles.append(Line2D([], [], color="black", marker="|", markersize=9, markeredgewidth=2.2, linestyle="", label=mark))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=7, frameon=False)
