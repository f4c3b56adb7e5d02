"""RB1: nothing to do is reported as success; a missing folder is reported as a warning."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from spectrain.cli import guarded
from spectrain.cli.prepare import prepare_rows
from spectrain.config import PrepareConfig
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore


def source(folder: Path, count: int) -> str:
    lines = [
        {"messages": [{"role": "user", "content": f"w{6 + i % 90}"}, {"role": "assistant", "content": f"w{6 + i // 90} w8"}]}
        for i in range(count)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) * 2)
    return str(folder / "in.jsonl")


def test_no_row_left_is_an_error_with_what_each_filter_took(
    tmp_path: Path, make_tokenizer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(100).save_pretrained(tmp_path / "target")
    for _ in range(2):  # asking again is no success either
        with pytest.raises(typer.Exit) as end:
            guarded(prepare_rows)(
                [source(tmp_path, 100)], target=str(tmp_path / "target"), out=tmp_path / "out", overrides=["min_supervised=9"]
            )
        assert end.value.exit_code == 1
        message = capsys.readouterr().err
        assert "none of 200 rows of the input is left to train on" in message
        table = {name: int(count) for name, count in re.findall(r"^  (\w+) +(-?\d+)  ", message, flags=re.MULTILINE)}
        assert table == {"read": 200, "duplicate": -100, "unsupervised": -100, "kept": 0}
        with pytest.raises(ValueError, match="not finished"):
            RowStore(tmp_path / "out")
    assert len((tmp_path / "out" / "rejected.jsonl").read_text().splitlines()) == 200


def test_a_missing_folder_is_made_and_every_row_is_there(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    out = tmp_path / "not" / "there" / "yet"
    report = prepare([source(tmp_path, 128)], make_tokenizer(100), out, PrepareConfig(deduplicate=False))
    assert len(RowStore(out)) == report.coverage["rows"]["kept"] == 256
    assert len(RowStore(prepare([source(tmp_path, 128)], make_tokenizer(100), tmp_path / "b", PrepareConfig()).folder)) == 128


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        prepare([source(tmp_path, 8)], make_tokenizer(100), tmp_path / "file" / "out", PrepareConfig())


def test_one_row_is_enough(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    assert len(RowStore(prepare([source(tmp_path, 1)], make_tokenizer(100), tmp_path / "out", PrepareConfig()).folder)) == 1
