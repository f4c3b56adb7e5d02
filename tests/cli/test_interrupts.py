"""Ctrl-C at any stage: a note, exit code 130, and the same command goes on from there to the same end."""

import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file

from spectrain.data.row_store import RowStore
from spectrain.target import capture
from spectrain.target.features import FeatureStore

regenerate = importlib.import_module("spectrain.cli.regenerate")  # the package has a command of this name
Cli = Callable[..., Result]
STOPPING = """
import os, signal
from spectrain.training import loop

original, calls = loop._work, []

def work(*args):
    calls.append(1)
    if len(calls) == {step}:
        os.kill(os.getpid(), signal.SIGINT)
    return original(*args)

loop._work = work
from spectrain.cli import main
main()
"""


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own handler, also where the tests run in the background of a shell that ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(number: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, with a Ctrl-C to this process when it is called for the `number`th time."""
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    return call


def stopped(result: Result) -> str:
    assert result.exit_code == 130, result.output
    assert "Traceback" not in result.output
    return result.stderr.strip().splitlines()[-1]


NOTE = "what is finished is kept, the same command goes on from there"


def test_stop_in_training_changes_the_head(project: Path, trained: Path, start: Callable[..., tuple[int, str, str]], cli: Cli) -> None:
    """RE1: stopped in step 11 of 18 as a real process; the second call ends with the weights of the run that was not stopped."""
    out = project / "runs/stopped"
    shutil.copytree(trained / "states", out / "states")
    shutil.copy(trained / "answers.jsonl", out)
    train = ["train", project / "recipes/tiny.yaml", "--fresh-answers", "--out", out]
    code, _, err = start("-c", STOPPING.format(step=11), *train)
    assert code == 130, err
    assert err.strip().splitlines()[-1] == f"stopped after step 11 of 18; {NOTE}" and "Traceback" not in err
    assert torch.load(out / "training/checkpoints/step-11.pt", weights_only=True)["step"] == 11 and not (out / "last").exists()
    result = cli(*train)
    assert result.exit_code == 0, result.output
    for name in ("head", "last"):
        whole, resumed = (load_file(folder / name / "model.safetensors") for folder in (trained, out))
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)
    lines = [[json.loads(line) for line in (f / "training/metrics.jsonl").read_text().splitlines()] for f in (trained, out)]
    points = [[(p["step"], p["measured_tau"]) for p in found if p["kind"] == "measured"] for found in lines]
    assert points[0] == points[1]


def test_stop_in_the_answers_leaves_half_a_row(project: Path, trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the second batch: the first one is whole, the rest is missing; then exactly the missing ones are made."""
    out = project / "runs/answers"
    train = ["train", project / "recipes/tiny.yaml", "--fresh-answers", "--out", out, "--set", "training.steps=1"]
    original = regenerate.generate
    monkeypatch.setattr(regenerate, "generate", interrupt_at(2, original))
    assert stopped(cli(*train)) == f"stopped; {NOTE}"
    lines = (out / "answers.jsonl").read_text().splitlines(keepends=True)
    assert 1 <= len(lines) < 11 and all(json.loads(line)["finish_reason"] for line in lines) and lines[-1].endswith("\n")
    assert not any((out / name).exists() for name in ("rows", "states", "head"))
    asked: list[int] = []
    monkeypatch.setattr(regenerate, "generate", lambda target, chats, **kw: (asked.append(len(chats)), original(target, chats, **kw))[1])
    assert cli(*train).exit_code == 0
    assert sum(asked) == 11 - len(lines)
    assert sorted((out / "answers.jsonl").read_text().splitlines()) == sorted((trained / "answers.jsonl").read_text().splitlines())
    resumed, whole = (json.loads((folder / "states/manifest.json").read_text()) for folder in (out, trained))
    assert resumed == whole  # rows in the same order


def signalled_while_writing(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Ctrl-C when half of a shard is on the disk."""
    whole = path.with_name("whole.part-test")
    write_shard(whole, tensors)
    data = whole.read_bytes()
    whole.unlink()
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGINT)
        file.write(data[len(data) // 2 :])


write_shard = capture.write_shard


@pytest.mark.parametrize("what", ["shard_tensors", "write_shard"])
def test_stop_in_the_capture_leaves_half_a_shard(what: str, project: Path, trained: Path, cli: Cli, tmp_path: Path) -> None:
    """Stopped between two shards or inside one: whole shards are kept, no half counts, and the end is that of an unstopped run."""
    rows, states = RowStore(trained / "rows"), tmp_path / "states"
    shutil.copy(trained / "answers.jsonl", tmp_path)
    train = ["train", project / "recipes/tiny.yaml", "--fresh-answers", "--out", tmp_path, "--set", "training.steps=1"]
    train += ["--set", "data.capture.rows_per_shard=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, what, interrupt_at(2, capture.shard_tensors) if what == "shard_tensors" else signalled_while_writing)
        assert stopped(cli(*train)) == f"stopped; {NOTE}"
    first = {p.name: p.stat().st_mtime_ns for p in states.glob("*.safetensors")}
    assert 1 <= len(first) < 3 and not list(states.glob("*.part*"))
    with pytest.raises(ValueError, match=f"incomplete .{3 - len(first)} of 3 shards missing"):
        FeatureStore(states, rows)
    assert cli(*train).exit_code == 0
    assert {name: (states / name).stat().st_mtime_ns for name in first} == first and not list(states.glob("*.part*"))
    whole, resumed = FeatureStore(trained / "states", rows), FeatureStore(states, rows)
    for i in range(len(rows)):
        for name in whole[i].__dataclass_fields__:
            one, other = getattr(whole[i], name), getattr(resumed[i], name)
            if hasattr(one, "tensors"):
                one, other = one.float(), other.float()
            assert torch.equal(one, other), name
