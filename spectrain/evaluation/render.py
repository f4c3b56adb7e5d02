"""Report JSON → Markdown, one self-contained HTML page, pictures.

The reader sees first what to do (advice) and one table by domain; charts, evidence and definitions follow. The words are in `words.py`,
`tables.py` and `evidence.py`, the charts as data in `charts.py`; the template `report.html.j2` lays them out and escapes every string.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from spectrain.evaluation import charts, tables, words
from spectrain.evaluation.answer_view import view_of, visible
from spectrain.evaluation.evidence import evidence
from spectrain.evaluation.schema import Report, parse_report
from spectrain.evaluation.tables import Table
from spectrain.evaluation.terminal import terminal_table

__all__ = ["parse_report", "render_html", "render_markdown", "terminal_table", "write_report"]


def _escape(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("<", "&lt;").replace("](", "]\\(")
    return " ".join(text.replace("|", "\\|").replace("`", "\\`").replace("*", "\\*").split())


def _markdown_table(table: Table) -> list[str]:
    rule = ["---"] * table.labels + ["--:"] * (table.head.count(" | ") + 1 - table.labels)
    lines = [f"| {' | '.join(row)} |" for row in ([table.head], rule, *([_escape(cell) for cell in row] for row in table.rows))]
    return [f"## {table.title}", "", *([_escape(table.note), ""] if table.note else []), *lines, ""]


def _bullets(sentences: Sequence[str], mark: str = "") -> list[str]:
    return [*(f"- {mark}{_escape(sentence)}{mark}" for sentence in sentences), ""] if sentences else []


def render_markdown(report: dict[str, Any], pictures: Sequence[tuple[str, str]] = ()) -> str:
    """Report → Markdown (GitHub, model cards): advice, table by domain, evidence; ValueError for a bad report.

    pictures: (title, file) of charts that stand beside it.
    """
    r = parse_report(report)
    made = f"{r.target} on suite {r.suite.name}, {r.made}."
    lines = [f"# {_escape(r.title)}", "", _escape(made), "", *_bullets(r.advice, "**"), *_bullets(r.service or [])]
    lines += [words.exact_text(r)[1], "", *_bullets([text for _, text in words.gates_text(r)])]
    for table in [*tables.headlines(r), *tables.by_temperature(r), *tables.against(r)]:
        lines += _markdown_table(table)
    lines += [_escape(words.lead(r)), ""]
    for title, file in pictures:
        lines += [f"![{_escape(title)}]({file})", ""]
    for table in [*tables.heat_maps(r), *evidence(r), *tables.conditions(r)]:
        lines += _markdown_table(table)
    lines += ["## Terms", "", *(f"- **{term}**: {meaning}" for term, meaning in words.definitions(r).items()), ""]
    lines += ["## Notes", "", *_bullets(r.notes)] if r.notes else []
    return "\n".join(lines)


def render_html(report: dict[str, Any]) -> str:
    """Report → one HTML page that loads nothing from outside; ValueError for a bad report."""
    r = parse_report(report)
    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {
        "num": words.num, "tau": words.tau_text, "speed": words.speed_text, "verdict": words.verdict, "letter": charts.letter,
        "link_of": charts.link_of, "visible": visible,
    }  # fmt: skip
    return page.get_template("report.html.j2").render(
        r=r, exact=words.exact_text(r), gates=words.gates_text(r), lead=words.lead(r), definitions=words.definitions(r),
        tones={sign: verdict for verdict, sign in words.SIGNS.items()}, **_parts(r),
    )  # fmt: skip


def _parts(r: Report) -> dict[str, Any]:
    return {
        "headlines": tables.headlines(r), "temperatures": tables.by_temperature(r), "against": tables.against(r),
        "groups": charts.groups(r), "heat_maps": tables.heat_maps(r), "evidence": evidence(r), "conditions": tables.conditions(r),
        "example": view_of(r.example) if r.example else None,
    }  # fmt: skip


def write_report(report: dict[str, Any], out: Path, *, pictures: bool = False) -> None:
    """Write report.json, report.md and report.html into `out`: all rendered first, each file whole or not at all.

    pictures: also the charts as PNG files, where matplotlib is installed; report.md says so where it is not.
    """
    drawn, files, missing = {}, [], ""
    if pictures:
        from spectrain.evaluation.pictures import MISSING, draw

        found = draw(parse_report(report))
        missing = MISSING if found is None else ""
        drawn = {picture.file: picture.png for picture in found or []}
        files = [(picture.title, picture.file) for picture in found or []]
    markdown = render_markdown(report, files) + (f"\n{missing}\n" if missing else "")
    contents = {"report.md": markdown.encode(), "report.html": render_html(report).encode(), **drawn}
    contents["report.json"] = (json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        part = out / f".{name}.{os.getpid()}.part"
        try:
            part.write_bytes(content)
            os.replace(part, out / name)
        finally:
            part.unlink(missing_ok=True)
