"""`spectrain prepare`: conversations -> rows one can look at, with a table of what became of the input."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.config import PrepareConfig, override, validate
from spectrain.data.coverage import taken_by
from spectrain.data.prepare import Report, prepare
from spectrain.data.row_store import RowStore
from spectrain.data.rows import Row

OPEN, CLOSE = "⟦", "⟧"  # around supervised tokens where there is no colour


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer of a folder, a .gguf file or a Hub name, without its model; ValueError says what was there instead."""
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    looks_local = name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    if looks_local and not path.exists():
        raise ValueError(f"no target at {name}; give a folder, a .gguf file or a Hub name such as HuggingFaceTB/SmolLM2-135M-Instruct")
    where: dict[str, Any] = {"revision": revision} if revision else {}
    text = str(path) if looks_local else name
    if name.endswith(".gguf"):
        text, where = str(path.parent), {"gguf_file": path.name}
    try:
        return AutoTokenizer.from_pretrained(text, **where)
    except (OSError, ValueError, KeyError) as error:
        found = sorted(p.name for p in path.iterdir())[:8] if looks_local and path.is_dir() else []
        there = f"; the folder holds {', '.join(found) or 'nothing'}" if looks_local and path.is_dir() else ""
        raise ValueError(f"no tokenizer can be loaded from {name}{there} ({str(error).splitlines()[0]})") from error


def stop_ids(name: str, revision: str | None = None) -> list[int]:
    """The ids at which the target's own generation settings stop; none where it has no such settings."""
    from transformers import GenerationConfig

    where: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        found = GenerationConfig.from_pretrained(name, **where).eos_token_id
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else [] if found is None else [found]


def formats(given: Sequence[str]) -> str | dict[str, str]:
    """`--format` as a setting: one dialect for all inputs, or dialects by pattern; one without a pattern is for what no pattern fits."""
    rules = dict(part.rpartition("=")[::2] for part in given)
    rest = rules.pop("", None)
    return rest or "auto" if not rules else rules | ({"*": rest} if rest else {})


def prepare_rows(
    inputs: Sequence[str], *, target: str, out: Path, overrides: Sequence[str] = (), show: int = 0, as_json: bool = False
) -> None:  # fmt: skip
    """Run `spectrain.data.prepare.prepare` and print its report; see `spectrain prepare --help`."""
    values: dict[str, Any] = {}
    override(values, overrides)
    config = validate(PrepareConfig, values, where="prepare")
    tokenizer = load_tokenizer(target)
    report = prepare(inputs, tokenizer, out, config, stop_ids=stop_ids(target), extra={"target": target})
    if as_json:
        figures = {"out": str(out), "state": report.state, "why": report.why, "warnings": report.warnings, **report.coverage}
        print(json.dumps({**figures, "inputs": report.record["inputs"], "rows_sha256": report.record["rows_sha256"]}))
        return
    console = Console(highlight=False)
    print_report(report, console)
    if show:
        show_rows(RowStore(out), tokenizer, show, console)


def print_report(report: Report, console: Console) -> None:
    """What was read, taken and kept, by filter, domain, turn and part."""
    found = report.coverage
    notes = {"unchanged": "nothing to do: the same inputs, settings and tokenizer as before", "resumed": "went on where it was stopped"}
    if note := "made anew: " + "; ".join(report.why) if report.why else notes.get(report.state, ""):
        console.print(note, markup=False)
    for source in report.record["inputs"]:
        console.print(f"{source['name']}: {source['rows']} rows, format {source['format'] or 'unknown'}", markup=False)
    if left_out := report.record["left_out"]:
        console.print(f"not read (endings, descriptions, links): {', '.join(left_out[:8])}{' …' * (len(left_out) > 8)}", markup=False)
    console.print(_table(("", "rows", ""), ((name, f"{count:,}", meaning) for name, count, meaning in taken_by(found))))
    domains = (
        (name, f"{d['read']:,}", f"{d['kept']:,}", f"{d['tokens']:,}", _share(d["supervised"], d["tokens"]))
        for name, d in found["domains"].items()
    )
    console.print(_table(("domain", "read", "kept", "tokens", "supervised"), domains))
    turns = ((str(t["turn"]), f"{t['conversations']:,}", _share(t["supervised"], t["conversations"])) for t in found["turns"])
    console.print(_table(("answer", "conversations", "supervised"), turns))
    console.print(
        f"supervised {_share(found['supervised'], found['tokens'])} of the tokens; {found['empty']} of {found['encoded']} conversations "
        f"with nothing to learn from; {found['at_max_length']} rows at max_length; {found['without_end']} answers cut off, without a "
        f"supervised end; {found['renamed']} ids made unique",
        markup=False,
    )
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    parts = found["parts"]
    kept = f"{parts['train']['rows']:,} rows for training, {parts['validation']['rows']:,} kept out for validation"
    console.print(f"{report.folder}: {kept}", markup=False)


def _share(part: int, whole: int) -> str:
    """A ratio with its numerator and denominator."""
    return f"{part / whole:.1%} ({part:,} of {whole:,})" if whole else "0 of 0"


def _table(head: Sequence[str], lines: Iterator[tuple[str, ...]]) -> Table:
    table = Table(*head[:1], box=None, pad_edge=False)
    for name in head[1:]:
        table.add_column(name, justify="right" if name else "left")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def show_rows(rows: Sequence[Row], tokenizer: Any, count: int, console: Console) -> None:
    """Print `count` rows spread over the store, supervised tokens in colour, or in brackets where there is no colour."""
    colour = console.is_terminal and not console.no_color
    count = min(count, len(rows))
    for i in range(count):
        row = rows[i * len(rows) // count]
        console.rule(Text(f"{row.id}, {row.domain}: {row.supervised} of {len(row)} tokens supervised"), align="left")
        text = Text()
        for said, supervised in runs(row, tokenizer):
            plain = f"{OPEN}{said}{CLOSE}" if supervised and not colour else said
            text.append(plain, style="green" if supervised else "dim")
        console.print(text, soft_wrap=True)


def runs(row: Row, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """The row's text in runs of one mask value. Special tokens are spelt out; characters that steer a terminal are escaped."""
    start = 0
    for end in range(1, len(row) + 1):
        if end == len(row) or row.mask_L[end] != row.mask_L[start]:
            text = tokenizer.decode(row.ids_L[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text), bool(row.mask_L[start])
            start = end
