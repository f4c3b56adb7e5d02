"""Two processes train as one does: the same steps, the same weights, and nobody waits for ever."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("two_processes.py")


def launch(folder: Path, *args: str) -> list[dict[str, Any]]:
    """Records of two processes; fails when they do not end."""
    folder.mkdir()
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    run = subprocess.run([*start, str(folder), *args], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads((folder / f"record-{rank}.json").read_text()) for rank in range(2)]


def alone(folder: Path, accumulation: int) -> dict[str, Any]:
    """The record of the same training in this process."""
    folder.mkdir(exist_ok=True)
    runpy.run_path(str(SCRIPT))["main"](folder, accumulation, 0)
    return json.loads((folder / "record-0.json").read_text())


def weights(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"weights-{rank}.pt", weights_only=True)


def test_two_processes_train_otherwise_than_one(tmp_path: Path) -> None:
    """DI1, LS2: five batches in windows of four, so one process has empty batches at every other step."""
    one, two = alone(tmp_path / "one", 4), launch(tmp_path / "two", "2")
    assert [record["world"] for record in two] == [2, 2]
    assert [record["steps"] for record in two] == [8, 8] == [one["steps"]] * 2
    assert two[0]["saved"] == one["saved"] == ["best", "last"] and two[1]["saved"] == []
    for record in two:
        torch.testing.assert_close(record["losses"], one["losses"], atol=1e-5, rtol=1e-5)
    expected, first, second = weights(tmp_path / "one", 0), weights(tmp_path / "two", 0), weights(tmp_path / "two", 1)
    for name, tensor in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, atol=1e-5, rtol=1e-4)


def test_signal_to_one_process_leaves_the_other_waiting(tmp_path: Path) -> None:
    stopped = launch(tmp_path / "two", "1", "2")  # two batches a step: sample 2 of a process is its step 2
    assert [record["stopped"] for record in stopped] == ["stopped after step 2 of 12"] * 2
    saved = torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 2 and saved["order"] == {"epoch": 0, "batches": 4} and saved["pace"]["window"] == 2
    # One process goes on, a batch a step: the last of the first epoch, and the other three epochs of five.
    assert alone(tmp_path / "two", 1)["steps"] == 2 + 1 + 15
