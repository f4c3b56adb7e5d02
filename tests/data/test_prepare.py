"""`spectrain prepare`: nothing is lost, stops cost little, and the result hangs on content alone."""

import io
import json
import multiprocessing
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from spectrain.cli.prepare import load_tokenizer, prepare_rows, print_report, show_rows
from spectrain.config import PrepareConfig
from spectrain.data import encoding, journal
from spectrain.data import prepare as module
from spectrain.data.encoding import Encoding
from spectrain.data.filters import Questions
from spectrain.data.formats import Conversation
from spectrain.data.prepare import Report, fingerprints, prepare
from spectrain.data.row_store import RowStore
from spectrain.target.model import Target

Line = Mapping[str, Any] | str


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **more}


def write(path: Path, lines: list[Line]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(200)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and stretches out of few rows."""
    monkeypatch.setattr(module, "CHUNK_ROWS", 3)
    monkeypatch.setattr(module, "STRETCH_ROWS", 10)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rejected(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]


MESSY: list[Line] = [
    chat("w10", "w11 w12", id="good"),
    "{not json",
    {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "w7"}], "id": "null"},
    chat("w10", "w11 w12", id="again"),
    chat("w10  ", "w11 w12", id="rendered again"),
    {"messages": [{"role": "user", "content": "w10"}], "id": "question"},
    chat("w20 w21", "w7 w8", id="exact"),
    chat(" ".join(f"w{i}" for i in range(30, 50)), "w7 w8", id="near"),
    chat("w10", "<end> w7", id="control"),
    chat("w13", "w14", id="good", domain="other"),
    chat(" ".join(["w9"] * 40), "w7 w8", id="long"),
    chat("w15", "w16", "w17", "w18", finish_reason="length"),
    chat("w16 w17", "w7", finish_reason="length", id="short"),
]
EVALUATION: list[Line] = [
    {"id": "q1", "domain": "q", "prompt": "W20, w21?"},
    {"id": "q2", "domain": "q", "turns": [" ".join(f"w{i}" for i in range(30, 51))]},
]


@pytest.fixture
def messy(tmp_path: Path, tokenizer: Any) -> Report:
    config = PrepareConfig(max_length=40, min_supervised=2, disjoint_from=(write(tmp_path / "eval.jsonl", EVALUATION),))
    return prepare([write(tmp_path / "in.jsonl", MESSY)], tokenizer, tmp_path / "out", config)


def test_nothing_is_lost(messy: Report) -> None:
    found = messy.coverage
    assert {line["id"]: line["reason"] for line in rejected(messy.folder)} == {
        "in:2": "unreadable", "null": "unusable", "again": "duplicate", "rendered again": "rendered duplicate", "question": "unanswered",
        "exact": "question", "near": "near question", "control": "refused", "long": "refused", "short": "unsupervised",
    }  # fmt: skip
    assert found["read"] == len(MESSY) == found["kept"] + sum(found["rejected"].values())
    assert found["rejected"] == Counter(line["reason"] for line in rejected(messy.folder))
    rows = list(RowStore(messy.folder))
    assert [row.id for row in rows] == ["good", "good@10", "in:12"]
    assert found["kept"] == found["rows"]["kept"] == len(rows)
    assert (found["renamed"], found["without_end"]) == (1, 1)
    assert (found["tokens"], found["supervised"]) == (sum(map(len, rows)), sum(row.supervised for row in rows))


def test_a_reject_says_where_and_why(messy: Report) -> None:
    lines = {line["id"]: line for line in rejected(messy.folder)}
    assert all(line["file"].endswith("in.jsonl") and line["why"] for line in lines.values())
    assert (lines["null"]["row"], lines["null"]["line"]) == (3, 3)
    assert "<end>" in lines["control"]["why"] and "40" in lines["long"]["why"] and "needed 2" in lines["short"]["why"]


def test_the_report_counts_turns_and_domains(messy: Report) -> None:
    found = messy.coverage
    assert found["turns"] == [{"turn": 1, "conversations": 3, "supervised": 3}, {"turn": 2, "conversations": 1, "supervised": 1}]
    assert {name: (d["read"], d["kept"]) for name, d in found["domains"].items()} == {"in": (10, 2), "other": (1, 1)}
    assert messy.record["inputs"][0]["format"] == "messages"
    out = io.StringIO()
    print_report(messy, Console(file=out, width=140))
    text = " ".join(out.getvalue().split())
    assert "near question -1 close to an evaluation prompt" in text and "rows: train 3" in text
    assert f"supervised {found['supervised'] / found['tokens']:.1%} ({found['supervised']} of {found['tokens']})" in text


def test_rows_of_a_turn_are_dropped_alone(tmp_path: Path, tokenizer: Any) -> None:
    lines: list[Line] = [
        chat("w10", "w11", "w12", "w13 w14", id="a"), chat("w10", "w11", "w15", "w16 w17", id="b"),
        chat("w20", "w21", "w22", "w23", id="c"),
    ]  # fmt: skip
    config = PrepareConfig(rows="turn")
    report = prepare([write(tmp_path / "in.jsonl", lines)], tokenizer, tmp_path / "out", config)
    rows = list(RowStore(tmp_path / "out"))
    assert [(row.id, row.group) for row in rows] == [("a#0", "a"), ("a#1", "a"), ("b#1", "b"), ("c#0", "c"), ("c#1", "c")]
    assert report.coverage["rows"] == {"made": 6, "kept": 5, "dropped": {"rendered duplicate": 1}}
    assert [(line["id"], line["row"]) for line in rejected(report.folder)] == [("b#0", 2)]
    assert report.coverage["kept"] == report.coverage["read"] == 3


def lines_of(count: int) -> list[Line]:
    """Good rows, some of one id, and every seventh a bad one of some kind, duplicates in content or in tokens among them."""

    def line(i: int) -> Line:
        if i % 7 == 0:
            return ["{", chat("w10", "w11"), chat("w10" + " " * i, "w11"), {"messages": []}, chat("w10", "<end>"), chat("w12")][i // 7 % 6]
        more = {"id": "same"} if i % 7 == 3 else {}
        return chat(f"w{6 + i % 190}", f"w{6 + i // 2} w8", domain=f"d{i % 3}", **more)

    return [line(i) for i in range(count)]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_nothing(tmp_path: Path, tokenizer: Any, small: None, workers: int) -> None:
    source = write(tmp_path / "in.jsonl", lines_of(100))
    folders = []
    for n in (1, workers):
        config = PrepareConfig(validation=0.2, max_rows=50, workers=n)
        folders.append(prepare([source], tokenizer, tmp_path / str(n), config).folder)
    assert content(folders[0]) == content(folders[1])
    assert len(content(folders[0])) > 10


def stopped(tmp_path: Path, source: list[str], tokenizer: Any, config: PrepareConfig, at: int) -> None:
    """In a process of its own: prepare, killed at the at-th file that takes its place."""
    left = at
    replace = Path.replace

    def kill(self: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = kill  # type: ignore[method-assign]
    prepare(source, tokenizer, tmp_path, config)


@pytest.mark.parametrize(("workers", "kills"), [(1, (2, 5, 6, 7, 26, 27, 28)), (2, (13, 14))])
def test_a_killed_run_goes_on_without_a_lost_or_doubled_row(
    tmp_path: Path, tokenizer: Any, small: None, workers: int, kills: tuple[int, ...]
) -> None:
    sources = [write(tmp_path / f"{name}.jsonl", lines) for name, lines in (("a", lines_of(35)), ("b", lines_of(30)[::-1]))]
    config = PrepareConfig(validation=0.2, workers=workers)
    wanted = content(prepare(sources, tokenizer, tmp_path / "whole", config).folder)
    context = multiprocessing.get_context("fork")
    ends = Counter[int | None]()
    for at in kills:
        out = tmp_path / f"killed{at}"
        child = context.Process(target=stopped, args=(out, sources, tokenizer, config, at))
        child.start()
        child.join()
        ends[child.exitcode] += 1
        assert not (out / "prepared.json").exists()
        report = prepare(sources, tokenizer, out, config)
        assert report.state == "resumed"
        assert content(out) == wanted, at
    assert ends == {-signal.SIGKILL: len(kills)}


def test_only_what_is_missing_is_done_again(tmp_path: Path, tokenizer: Any, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = [write(tmp_path / "in.jsonl", [chat(f"w{20 + i}", "w8 w9") for i in range(60)])]
    seen: list[int] = []
    call = Encoding.__call__

    def interrupted(self: Encoding, items: Any) -> Any:
        seen.extend(int(item.id.partition(":")[2]) for item in items)
        if seen[-1] > 40 and seen[0] < 20:
            raise KeyboardInterrupt
        return call(self, items)

    monkeypatch.setattr(Encoding, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tokenizer, tmp_path / "out", PrepareConfig())
    seen.clear()
    assert prepare(source, tokenizer, tmp_path / "out", PrepareConfig()).state == "resumed"
    assert 30 < min(seen) <= 40 and max(seen) == 60


def test_a_disk_that_is_full_leaves_nothing_half(tmp_path: Path, tokenizer: Any, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = [write(tmp_path / "in.jsonl", lines_of(60))]
    write_arrow, left = module.write_arrow, [2]

    def full(path: Path, batch: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device", str(path))
        write_arrow(path, batch)

    monkeypatch.setattr(module, "write_arrow", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(source, tokenizer, tmp_path / "out", PrepareConfig())
    assert len(list((tmp_path / "out/rows").iterdir())) == 2 and not list((tmp_path / "out").rglob("*.half"))
    monkeypatch.setattr(module, "write_arrow", write_arrow)
    prepare(source, tokenizer, tmp_path / "out", PrepareConfig())
    prepare(source, tokenizer, tmp_path / "whole", PrepareConfig())
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_worker_that_dies_is_named(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoding, "__call__", lambda self, items: os._exit(9))
    with pytest.raises(ValueError, match="worker process was killed"):
        prepare([write(tmp_path / "in.jsonl", lines_of(20))], tokenizer, tmp_path / "out", PrepareConfig(workers=2))


def test_the_encoding_can_be_sent(tokenizer: Any) -> None:
    first = Encoding(tokenizer, PrepareConfig(max_length=64), Questions([["w20 w21"]], near=0.5))
    items = [Conversation(id=str(i), domain="d", messages=tuple(chat(f"w{19 + i}", "w8 w9")["messages"])) for i in range(3)]
    items[1] = Conversation(id="1", domain="d", messages=tuple(chat("w20 w21", "w8")["messages"]))
    outcomes = [e(items) for e in (first, pickle.loads(pickle.dumps(first)))]
    assert outcomes[0].items == outcomes[1].items
    assert [o.reason for o in outcomes[0].items] == ["", "question", ""]
    for name, column in vars(outcomes[0].rows).items():
        np.testing.assert_array_equal(column, getattr(outcomes[1].rows, name), strict=True)


def test_two_runs_do_not_share_a_folder(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PATIENCE", 0.1)
    source = write(tmp_path / "in.jsonl", lines_of(10))
    with journal.only_writer(tmp_path / "out"), pytest.raises(ValueError, match="another `spectrain prepare` is writing"):
        prepare([source], tokenizer, tmp_path / "out", PrepareConfig())


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path, tokenizer: Any) -> None:
    source, out = write(tmp_path / "in.jsonl", lines_of(10)), tmp_path / "out"
    out.mkdir()
    write(out / "notes.txt", ["mine"])
    with pytest.raises(ValueError, match="holds other files.*notes.txt"):
        prepare([source], tokenizer, out, PrepareConfig())
    assert [p.name for p in out.iterdir()] == ["notes.txt"]


def test_rows_of_an_earlier_run_are_read_as_input_or_thrown_away(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", [*lines_of(10), "{"])
    out = tmp_path / "in/prepared"
    first = prepare([tmp_path / "in"], tokenizer, out, PrepareConfig())
    for inputs in (tmp_path / "in", f"{tmp_path}/in/**/*", f"{tmp_path}/in/*"):
        again = prepare([inputs], tokenizer, out, PrepareConfig())
        assert (again.state, [Path(s["name"]).name for s in again.record["inputs"]]) == ("unchanged", ["a.jsonl"])
    for ours in (out, out / "rejected.jsonl"):
        with pytest.raises(ValueError, match="is one of the inputs, and would be written to"):
            prepare([ours], tokenizer, out, PrepareConfig())
    assert len(RowStore(out)) == first.coverage["rows"]["kept"] > 0
    for name in ("disjoint_from", "columns"):
        ours = {"disjoint_from": (write(tmp_path / "none.jsonl", ["{"]),), "columns": {"domain": "categroy"}}
        with pytest.raises(ValueError, match="none.jsonl: no evaluation prompt can be read|columns.domain names 'categroy', which no row"):
            prepare([tmp_path / "in"], tokenizer, tmp_path / "other", PrepareConfig(**{name: ours[name]}))


def test_rows_that_were_cut_are_not_counted(tmp_path: Path, tokenizer: Any) -> None:
    source, out = write(tmp_path / "in.jsonl", lines_of(10)), tmp_path / "out"
    prepare([source], tokenizer, out, PrepareConfig())
    most = int(RowStore(out).lengths_N.max()) - 1
    report = prepare([source], tokenizer, out, PrepareConfig(max_length=most))
    assert report.coverage["at_max_length"] == sum(RowStore(out).lengths_N == most) > 0
    assert any("reach max_length" in warning for warning in report.warnings)


def test_hashes_are_those_of_the_target(target: Target) -> None:
    assert fingerprints(target.tokenizer).items() <= target.fingerprints.items()


def test_tokenised_rows_cannot_be_compared_and_it_says_so(tmp_path: Path, tokenizer: Any) -> None:
    lines: list[Line] = [{"input_ids": [10, 11, 12], "loss_mask": [0, 1, 1]}]
    config = PrepareConfig(disjoint_from=(write(tmp_path / "eval.jsonl", EVALUATION),))
    report = prepare([write(tmp_path / "in.jsonl", lines)], tokenizer, tmp_path / "out", config)
    assert any("1 rows came as token ids and were not compared" in warning for warning in report.warnings)


def test_a_bad_evaluation_prompt_stops_the_run(tmp_path: Path, tokenizer: Any) -> None:
    config = PrepareConfig(disjoint_from=(write(tmp_path / "eval.jsonl", [*EVALUATION, "{"]),))
    with pytest.raises(ValueError, match="eval.jsonl, line 3, of the evaluation prompts"):
        prepare([write(tmp_path / "in.jsonl", lines_of(10))], tokenizer, tmp_path / "out", config)


def test_show_marks_what_is_supervised(tmp_path: Path, tokenizer: Any) -> None:
    report = prepare([write(tmp_path / "in.jsonl", [chat("w10", "w11 w12", id="a[b]")])], tokenizer, tmp_path / "out", PrepareConfig())
    plain, colour = io.StringIO(), io.StringIO()
    show_rows(RowStore(report.folder), tokenizer, 5, Console(file=plain, width=60))
    show_rows(RowStore(report.folder), tokenizer, 5, Console(file=colour, width=60, force_terminal=True, color_system="standard"))
    assert "a[b], in: 3 of 14 tokens supervised" in plain.getvalue()
    assert "<start> user w10 <end> <start> assistant⟦w11 w12 <end>⟧" in plain.getvalue().replace("assistant ", "assistant")
    assert "\x1b[32mw11 w12 <end>" in colour.getvalue() and "⟦" not in colour.getvalue()


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> str:
    tokenizer.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def test_the_command_needs_only_the_tokenizer(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", lines_of(20))
    prepare_rows([source], target=folder, out=tmp_path / "out", overrides=["max_length=128", "validation=0.2"], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["read"]) == ("built", 20)
    assert found["parts"]["train"]["rows"] == len(RowStore(tmp_path / "out"))
    prepare_rows([source], target=folder, out=tmp_path / "out", overrides=["max_length=64", "validation=0.2"], show=1)
    text = capsys.readouterr().out
    assert "made anew: max_length 128 -> 64" in text and "⟦" in text


@pytest.mark.parametrize(("name", "message"), [("/none/there", "no target at /none/there"), (".", "no tokenizer can be loaded from .")])
def test_a_target_without_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(name)


def test_a_wrong_setting_names_the_right_ones(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ValueError, match="max_len: unknown key; known here: .*max_length"):
        prepare_rows([], target=folder, out=tmp_path / "out", overrides=["max_len=3"])


def test_messages_stay_short_in_chunks_of_long_turns(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    call = Encoding.__call__
    monkeypatch.setattr(Encoding, "__call__", lambda self, items: sizes.append(len(items)) or call(self, items))
    lines: list[Line] = [chat(f"w{10 + i} " * 20_000, "w8 w9") for i in range(8)]
    prepare([write(tmp_path / "in.jsonl", lines)], tokenizer, tmp_path / "out", PrepareConfig(max_length=100_000))
    assert max(sizes) <= 3 and sum(sizes) == 8
    assert encoding.AHEAD * 2 * module.CHUNK_CHARACTERS < 2**21  # characters on their way to two workers
