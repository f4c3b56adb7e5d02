"""What became of the input: counts by reason, supervised share, by domain and by turn.

Counts are kept as numbers of things and divided where they are shown. They add up: what was read is kept or rejected, what was made into
rows is kept or dropped.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

EMPTY_SHARE = 0.05  # of the conversations that reached the tokenizer: more without anything to learn from is a warning
TABLES = ("total", "rejected", "dropped", "domain", "read", "tokens", "supervised", "turns", "taught", "sources")
# What a reject is counted under -> what it means.
REASONS = {
    "unreadable": "the line cannot be read",
    "unusable": "no conversation can be made of it",
    "duplicate": "the same content as an earlier one",
    "question": "repeats an evaluation prompt",
    "near question": "close to an evaluation prompt",
    "unanswered": "a question without an answer (`spectrain regenerate` makes them)",
    "too long": "a row of it has more than max_length tokens, and too_long is reject",
    "refused": "no row can be made of it: max_length ends before an answer, control tokens in a text, or not as the template has it",
    "unsupervised": "nothing in it to learn from",
    "rendered duplicate": "the same tokens as an earlier row",
}


class Tally:
    """Named counters that can be joined and written down."""

    def __init__(self, tables: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self._tables = {name: Counter((tables or {}).get(name, {})) for name in TABLES}

    def __getitem__(self, table: str) -> Counter[str]:
        return self._tables[table]

    def update(self, other: "Tally") -> None:
        for name, counter in self._tables.items():
            counter.update(other[name])

    def values(self) -> dict[str, dict[str, int]]:
        """For JSON, in a fixed order."""
        return {name: {key: counter[key] for key in sorted(counter)} for name, counter in self._tables.items()}


def coverage(tally: Tally, parts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """The report. parts: rows, conversations, tokens and supervised tokens of train, validation and unused.

    Asserts that nothing is lost: read = kept + rejected, rows made = kept + dropped, rows kept = rows of the parts.
    """
    total = tally["total"]
    rejected, dropped = sum(tally["rejected"].values()), sum(tally["dropped"].values())
    assert total["read"] == total["kept"] + rejected, (total, tally["rejected"])
    assert total["rows made"] == total["rows"] + dropped, (total, tally["dropped"])
    assert total["rows"] == sum(part["rows"] for part in parts.values())
    numbers = sorted(int(turn) for turn in tally["turns"])
    return {
        "read": total["read"], "kept": total["kept"], "rejected": dict(sorted(tally["rejected"].items())),
        "rows": {"made": total["rows made"], "kept": total["rows"], "dropped": dict(sorted(tally["dropped"].items()))},
        "encoded": total["encoded"], "empty": tally["rejected"]["unsupervised"] + tally["rejected"]["refused"],
        "tokens": sum(tally["tokens"].values()), "supervised": sum(tally["supervised"].values()),
        "at_max_length": total["at max length"], "without_end": total["without end"], "renamed": total["renamed"],
        "not_compared": total["not compared"],
        "domains": {
            name: {"read": tally["read"][name], "kept": tally["domain"][name], "tokens": tally["tokens"][name],
                   "supervised": tally["supervised"][name]}
            for name in sorted(tally["read"])
        },
        "turns": [{"turn": n + 1, "conversations": tally["turns"][str(n)], "supervised": tally["taught"][str(n)]} for n in numbers],
        "parts": {name: dict(part) for name, part in parts.items()},
    }  # fmt: skip


def taken_by(report: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Lines of the table of what each filter took: name, count, meaning; from what was read to what is left."""
    lines = [("read", report["read"], "rows of the input")]
    lines += [(name, -report["rejected"][name], meaning) for name, meaning in REASONS.items() if report["rejected"].get(name)]
    lines += [("kept", report["kept"], "conversations")]
    for name, count in report["rows"]["dropped"].items():
        lines.append((f"rows: {name}", -count, f"{REASONS[name]}, of {report['rows']['made']} rows"))
    return [*lines, *((f"rows: {name}", part["rows"], "rows of this part") for name, part in report["parts"].items() if part["rows"])]


def as_text(report: Mapping[str, Any]) -> str:
    """The table in plain text."""
    return "\n".join(f"  {name:<26} {count:>9}  {meaning}" for name, count, meaning in taken_by(report))


def warnings(report: Mapping[str, Any]) -> list[str]:
    """What a person should know before training on these rows."""
    found = []
    if report["empty"] > EMPTY_SHARE * report["encoded"]:
        share = f"{report['empty']} of {report['encoded']} conversations ({report['empty'] / report['encoded']:.1%})"
        why = "max_length too short, control tokens in texts, another chat template?"
        found.append(f"{share} have nothing to learn from; the reasons are in rejected.jsonl ({why})")
    if report["not_compared"]:
        found.append(f"{report['not_compared']} rows came as token ids and were not compared with the evaluation prompts")
    if report["at_max_length"] > EMPTY_SHARE * max(1, report["rows"]["kept"]):
        rows = f"{report['at_max_length']} of {report['rows']['kept']} rows"
        found.append(f"{rows} reach max_length and may be cut there; raise it to keep all of them")
    return found
