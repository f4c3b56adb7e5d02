"""Several processes train as one does: the same steps, rates and weights, and nobody waits for ever."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_processes.py")


def launch(folder: Path, world: int, *args: str) -> list[dict[str, Any]]:
    """Records of `world` processes; fails when they do not end."""
    folder.mkdir()
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", str(SCRIPT)]
    run = subprocess.run([*start, str(folder), *args], capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads((folder / f"record-{rank}.json").read_text()) for rank in range(world)]


def alone(folder: Path, accumulation: int) -> dict[str, Any]:
    """The record of the same training in this process."""
    folder.mkdir(exist_ok=True)
    runpy.run_path(str(SCRIPT))["main"](folder, accumulation, 0)
    return json.loads((folder / "record-0.json").read_text())


def weights(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"weights-{rank}.pt", weights_only=True)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_otherwise_than_one(tmp_path: Path, world: int) -> None:
    """DI1, LS2: five batches in windows of four, so some processes have empty batches at every other step."""
    one, all_of_them = alone(tmp_path / "one", 4), launch(tmp_path / "all", world, str(4 // world))
    assert [record["world"] for record in all_of_them] == [world] * world
    assert [record["steps"] for record in all_of_them] == [8] * world == [one["steps"]] * world
    assert [record["saved"] for record in all_of_them] == [["best", "last"], *[[]] * (world - 1)] and one["saved"] == ["best", "last"]
    for record in all_of_them:
        assert record["rates"] == one["rates"] and record["tokens"] == one["tokens"]
        torch.testing.assert_close(record["losses"], one["losses"], atol=1e-5, rtol=1e-5)
    expected, first = weights(tmp_path / "one", 0), weights(tmp_path / "all", 0)
    for name, tensor in expected.items():
        assert all(torch.equal(first[name], weights(tmp_path / "all", rank)[name]) for rank in range(1, world))
        torch.testing.assert_close(first[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.slow  # half a minute
def test_signal_to_one_process_leaves_the_other_waiting(tmp_path: Path) -> None:
    stopped = launch(tmp_path / "two", 2, "1", "2")  # two batches a step: sample 2 of a process is its step 2
    assert [record["stopped"] for record in stopped] == ["stopped after step 2 of 12"] * 2
    assert [record["kept"] for record in stopped] == [True] * 2  # a launcher ends the one that writes when another one has stopped
    saved = torch.load(tmp_path / "two/checkpoints/step-2.pt", weights_only=True)
    assert saved["step"] == 2 and saved["order"] == {"epoch": 0, "batches": 4} and saved["pace"]["window"] == 2
    states = [own["torch"] for own in saved["random"]]
    assert len(states) == 2 and not torch.equal(*states)  # each process has its own
    # One process goes on, a batch a step: the last of the first epoch, and the other three epochs of five.
    assert alone(tmp_path / "two", 1)["steps"] == 2 + 1 + 15
