"""Tables of gpu.py's parts b, c and d as Markdown, with the goals that the project set itself beside what was found."""

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
GOALS = (
    ("b", "64-node pass ÷ one-token pass, batch 1", "<=", 1.10), ("b", "plain decoding, share of the copy bandwidth, batch 1", ">=", 0.80),
    ("c", "draft step ÷ its memory floor, batch 1", "<=", 1.25), ("d", "realised ÷ tau / (v + γc), the lowest at batch 1", ">=", 0.90),
)  # fmt: skip


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:,.0f}"


def _x(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _step(row: Row) -> list[str]:
    start = [row["model"], str(row["batch"]), str(row["nodes"]), row["way"]]
    if "failed" in row:
        return [*start, row["failed"], *[""] * 7]
    times = [_us(row[name]) for name in ("verify", "other", "wall")]
    return [*start, row["mode"], *times, _x(row["v"]), _x(row["v_round"]), f"{row['share']:.0%}", f"{row['share_round']:.0%}"]


def _draft(row: Row) -> list[str]:
    times = [_us(row[name]) for name in ("step", "start", "floor")]
    return [row["model"], str(row["batch"]), row["way"], row["mode"], *times, _x(row["ratio"]), f"{row['c']:.3f}"]


def _answer(row: Row) -> list[str]:
    rates = [f"{row[name]:,.0f}" if row[name] else "failed" for name in ("tokens_per_s", "plain", "generate")]
    costs = [_x(row["tau"]), _x(row["v"]), f"{row['c']:.3f}"]
    gains = [_x(row[name]) for name in ("realised", "predicted", "ratio")]
    return [row["model"], str(row["batch"]), row["way"], row["mode"], f"{row['alpha']:g}", *costs, *rates, *gains]


TABLES: dict[str, tuple[str, str, Callable[[Row], list[str]]]] = {
    "b": (
        "Passes over n nodes (microseconds)",
        "model | batch | nodes | asked for | made | pass | accept, commit | round | v | v of rounds | bandwidth reached | in rounds", _step,
    ),
    "c": (
        "A step of an EAGLE-3 head's draft (microseconds)",
        "model | batch | asked for | made | step | start | floor | step ÷ floor | c", _draft,
    ),
    "d": (
        "Tokens a second with written acceptance",
        "model | batch | asked for | made | α | τ | v | c | drafting | plain | generate() | realised | τ ÷ (v + γc) | ratio", _answer,
    ),
}  # fmt: skip


def _found(part: str, what: str, rows: Sequence[Row]) -> float | None:
    """The figure of a goal: of the largest model at batch 1, as graphs; None where it was not measured."""
    own = [row for row in rows if row["batch"] == 1 and row["way"] == "graphs" and "failed" not in row and row["model"] == rows[0]["model"]]
    if part == "b":
        wide, key = (64, "v") if "64" in what else (1, "share_round")
        return next((row[key] for row in own if row["nodes"] == wide), None)
    return min((row["ratio"] for row in own), default=None)


def reached(part: str, rows: Sequence[Row]) -> list[tuple[str, float | None, str]]:
    """(goal, found, verdict) of a part."""
    lines = []
    for of, what, sign, goal in GOALS:
        if of == part:
            value = _found(part, what, rows)
            known = value is not None and value > 0  # a step of less than no time is noise
            met = known and (value <= goal if sign == "<=" else value >= goal)
            verdict = "not measured" if not known else "reached" if met else "NOT reached"
            lines.append((f"{what} {sign} {goal:g}", value, verdict))
    return lines


def page(part: str, rows: Sequence[Row], about: Row) -> str:
    """A part's goals and table."""
    title, head, line = TABLES[part]
    made = f"{about['device']}, torch {about['torch']}, copy {about['copy'] / 1e12:.3f} TB/s, context {about['context']}."
    told = [f"- {what}: {'' if value is None else f'{value:.2f}, '}{verdict}" for what, value, verdict in reached(part, rows)]
    body = ["| " + " | ".join(line(row)) + " |" for row in rows]
    return "\n".join([f"# {title}", "", made, "", *told, "", f"| {head} |", "| --- " * (head.count("|") + 1) + "|", *body]) + "\n"
