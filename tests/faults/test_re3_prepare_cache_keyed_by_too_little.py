"""RE3 (prepared rows): a changed length limit, template, tokenizer, system prompt or mask rule makes them anew; nothing else does."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.config import PrepareConfig
from spectrain.data import prepare as module
from spectrain.data.encoding import Encoding
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore

TEMPLATE = (
    "{% for m in messages %}<start> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)


def write(folder: Path, system: str = "") -> Path:
    first = [{"role": "system", "content": system}] if system else []
    lines = [
        {"id": f"r{i}", "messages": [*first, {"role": "user", "content": f"w{10 + i}"}, {"role": "assistant", "content": "w11 w12"}]}
        for i in range(20)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "in.jsonl"


class Bench:
    """Prepares the same conversations again and again into one folder and counts what is tokenised."""

    def __init__(self, folder: Path, make_tokenizer: Callable[..., Any]) -> None:
        self.folder, self.source, self.make_tokenizer = folder, write(folder / "input"), make_tokenizer
        self.encoded: list[str] = []

    def __call__(self, *, out: str = "out", size: int = 100, template: str = "", **settings: Any) -> Any:
        self.encoded.clear()
        tokenizer = self.make_tokenizer(size, template) if template else self.make_tokenizer(size)
        return prepare([str(self.source)], tokenizer, self.folder / out, PrepareConfig(**settings))


@pytest.fixture
def bench(tmp_path: Path, make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path, make_tokenizer)
    call = Encoding.__call__
    monkeypatch.setattr(Encoding, "__call__", lambda self, items: bench.encoded.extend(i.id for i in items) or call(self, items))
    assert bench().state == "built" and len(bench.encoded) == 20
    assert bench().state == "unchanged" and not bench.encoded
    return bench


@pytest.mark.parametrize(
    ("change", "why"),
    [({"max_length": 13}, "max_length 4096 -> 13"), ({"template": TEMPLATE}, "template_sha256 changed"),
     ({"size": 101}, "tokenizer_sha256 changed"), ({"validation": 0.5}, "validation 0.0 -> 0.5"), ({"seed": 1}, "seed 0 -> 1"),
     ({"min_supervised": 1}, "min_supervised 2 -> 1")],
)  # fmt: skip
def test_what_the_rows_depend_on_makes_them_anew(bench: Bench, change: dict[str, Any], why: str) -> None:
    before = RowStore(bench.folder / "out").rows_sha256
    report = bench(**change)
    assert (report.state, len(bench.encoded)) == ("rebuilt", 20)
    assert any(why in line for line in report.why)
    assert bench(**change).state == "unchanged"
    if "max_length" in change or "template" in change or "validation" in change:
        assert RowStore(bench.folder / "out").rows_sha256 != before


def test_a_changed_system_prompt_makes_them_anew(bench: Bench) -> None:
    times = bench.source.stat()
    write(bench.source.parent, system="w50")
    os.utime(bench.source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert bench().state == "rebuilt"
    assert all(50 in row.ids_L for row in RowStore(bench.folder / "out"))


def test_a_changed_mask_rule_makes_them_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MASK_RULE", module.MASK_RULE + 1)
    report = bench()
    assert report.state == "rebuilt" and report.why[0].startswith("mask_rule")


def test_a_changed_special_token_makes_them_anew(bench: Bench) -> None:
    make = bench.make_tokenizer

    def other(size: int) -> Any:
        tokenizer = make(size)
        tokenizer.pad_token = "w9"
        return tokenizer

    bench.make_tokenizer = other
    assert any("tokenizer_rules" in line for line in bench().why)


def test_path_time_workers_and_use_do_not(bench: Bench) -> None:
    moved = bench.folder / "elsewhere"
    shutil.move(bench.source.parent, moved)
    bench.source = moved / "in.jsonl"
    os.utime(bench.source, ns=(1, 1))
    tokenizer = bench.make_tokenizer(100)
    tokenizer("w7 w8", truncation=True, max_length=1)  # a call leaves its traces in the tokenizer
    assert bench(workers=2).state == "unchanged" and not bench.encoded
    assert prepare([str(bench.source)], tokenizer, bench.folder / "out", PrepareConfig()).state == "unchanged"


def test_a_changed_output_folder_is_a_new_one(bench: Bench) -> None:
    assert bench(out="other").state == "built"
    assert RowStore(bench.folder / "other").rows_sha256 == RowStore(bench.folder / "out").rows_sha256
    assert bench().state == "unchanged"


def test_changed_evaluation_prompts_make_them_anew(bench: Bench) -> None:
    asked = bench.folder / "asked.jsonl"
    settings = {"disjoint_from": (str(asked),)}
    asked.write_text('{"id": "q", "domain": "d", "prompt": "w12"}\n')
    assert bench(**settings).state == "rebuilt" and bench(**settings).state == "unchanged"
    asked.write_text('{"id": "q", "domain": "d", "prompt": "w13"}\n')
    assert bench(**settings).state == "rebuilt"
    assert {row.id for row in RowStore(bench.folder / "out")} == {f"r{i}" for i in range(20)} - {"r3"}


def test_a_changed_rule_for_evaluation_prompts_makes_them_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where there are any."""
    asked = bench.folder / "asked.jsonl"
    asked.write_text('{"id": "q", "domain": "d", "prompt": "w12"}\n')
    monkeypatch.setattr(module, "DISJOINT_RULE", module.DISJOINT_RULE + 1)
    assert bench().state == "unchanged"
    settings = {"disjoint_from": (str(asked),)}
    bench(**settings)
    monkeypatch.setattr(module, "DISJOINT_RULE", module.DISJOINT_RULE + 1)
    report = bench(**settings)
    assert report.state == "rebuilt" and report.why[0].startswith("disjoint_rule")


def test_half_a_store_of_other_settings_is_not_gone_on_with(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "CHUNK_ROWS", 2)
        patch.setattr(module, "STRETCH_ROWS", 2)
        patch.setattr(module, "finish", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bench(max_length=13)
    report = bench(max_length=14)
    assert (report.state, len(bench.encoded)) == ("rebuilt", 20) and "max_length 13 -> 14" in report.why
    assert bench.folder.joinpath("out/rows").is_dir() and len(RowStore(bench.folder / "out").record["files"]) == 1


def test_a_store_with_a_lost_file_is_made_anew(bench: Bench) -> None:
    (bench.folder / "out/rows/00000.arrow").unlink()
    report = bench()
    assert (report.state, report.why) == ("rebuilt", ("a file of it was missing or damaged",))
    assert len(RowStore(bench.folder / "out")) == 20
