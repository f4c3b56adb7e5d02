"""`too_long` and `format` of prepare: what is asked for is done, counted and told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.prepare import formats
from spectrain.config import PrepareConfig, RegenerateConfig
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore
from spectrain.data.sources import Source, check_formats, dialect_of, find_sources


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(200)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(name: str, *texts: str) -> dict[str, Any]:
    return {"id": name, "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def many(count: int) -> str:
    return " ".join(f"w{30 + i % 100}" for i in range(count))


def test_long_rows_are_cut_where_none_may_be(tmp_path: Path, tokenizer: Any) -> None:
    """As `cut` the beginnings are kept; as `reject` rows of up to max_length and nothing else, each other one with its length."""
    source = write(tmp_path / "in.jsonl", [chat(f"{n}", f"w{100 + n}", many(n)) for n in (3, 20, 21, 50)])
    longest = len(next(r for r in RowStore(prepare([source], tokenizer, tmp_path / "all", PrepareConfig()).folder) if r.id == "20"))
    cut = prepare([source], tokenizer, tmp_path / "cut", PrepareConfig(max_length=longest))
    assert [len(row) for row in RowStore(cut.folder)] == [longest - 17, longest, longest, longest]
    report = prepare([source], tokenizer, tmp_path / "out", PrepareConfig(max_length=longest, too_long="reject"))
    assert [row.id for row in RowStore(report.folder)] == ["3", "20"]
    assert report.coverage["rejected"] == {"too long": 2} and report.coverage["read"] == 4 and not report.coverage["empty"]
    found = [json.loads(line) for line in (report.folder / "rejected.jsonl").read_text().splitlines()]
    assert [(line["id"], line["reason"]) for line in found] == [("21", "too long"), ("50", "too long")]
    told = [f"a row of {longest + more} tokens, max_length is {longest}" for more in (1, 30)]
    assert all(line["why"].startswith(one) for line, one in zip(found, told, strict=True))


def test_a_turn_that_is_too_long_leaves_the_others(tmp_path: Path, tokenizer: Any) -> None:
    """The conversation is left out whole, so that no row is missing without a line."""
    source = write(tmp_path / "in.jsonl", [chat("a", "w10", "w11", "w12", many(30)), chat("b", "w10", "w11", "w12", "w13 w14")])
    report = prepare([source], tokenizer, tmp_path / "out", PrepareConfig(max_length=24, too_long="reject", rows="turn"))
    assert [row.id for row in RowStore(report.folder)] == ["b#0", "b#1"] and report.coverage["rejected"] == {"too long": 1}


def test_tokens_are_cut_where_none_may_be(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"id": str(n), "input_ids": [9] * n, "loss_mask": [1] * n} for n in (8, 9)]
    report = prepare(
        [write(tmp_path / "in.jsonl", rows)], tokenizer, tmp_path / "out", PrepareConfig(max_length=8, too_long="reject", deduplicate=False)
    )  # fmt: skip
    assert [row.id for row in RowStore(report.folder)] == ["8"] and report.coverage["rejected"] == {"too long": 1}


def test_a_pattern_sets_the_dialect_of_its_files_alone(tmp_path: Path, tokenizer: Any) -> None:
    """Rows that fit two dialects are read as asked, the other file as its rows say, and the record says both."""
    both = {"id": "both", "instruction": "w20", "output": "w21 w22", "prompt": "w30", "response": "w31 w32"}
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/two-ways.jsonl", [both])
    write(tmp_path / "in/chats.jsonl", [chat("c", "w10", "w11 w12")])
    detected = prepare([str(tmp_path / "in")], tokenizer, tmp_path / "a", PrepareConfig())
    asked = prepare([str(tmp_path / "in")], tokenizer, tmp_path / "b", PrepareConfig(format={"two*": "pair"}))
    told = [{Path(source["name"]).name: source["format"] for source in report.record["inputs"]} for report in (detected, asked)]
    assert told == [{"chats.jsonl": "messages", "two-ways.jsonl": name} for name in ("alpaca", "pair")]
    texts = [tokenizer.decode(row.ids_L[row.mask_L.astype(bool)]) for row in RowStore(asked.folder) if row.id == "both"]
    assert "w31 w32" in texts[0]


def test_a_pattern_that_fits_nothing_is_overlooked(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "in.jsonl", [chat("c", "w10", "w11 w12")])
    with pytest.raises(ValueError, match=r"format: no input is called 'out\*'; there are .*in\.jsonl"):
        prepare([source], tokenizer, tmp_path / "out", PrepareConfig(format={"out*": "pair"}))


def test_the_first_pattern_that_fits_counts(tmp_path: Path) -> None:
    (found,) = find_sources([write(tmp_path / "in.jsonl", [chat("c", "w10", "w11 w12")])])
    assert isinstance(found, Source)
    assert dialect_of(found, {"in.*": "auto", "*": "pair"}, {}) == "messages"
    assert dialect_of(found, {"other": "pair", "*": "prompt"}, {}) == "prompt"
    assert dialect_of(found, {f"{tmp_path}/*": "pair"}, {}) == "pair"
    assert dialect_of(found, "alpaca", {}) == "alpaca"
    check_formats([found], {"in*": "pair", "*": "auto"})
    assert RegenerateConfig(format={"in*": "prompt"}).format == {"in*": "prompt"}


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ([], "auto"), (["pair"], "pair"), (["a*=pair"], {"a*": "pair"}), (["text", "a=b.jsonl=pair"], {"a=b.jsonl": "pair", "*": "text"}),
    ],
)  # fmt: skip
def test_format_on_the_command_line(given: list[str], setting: object) -> None:
    assert formats(given) == setting
