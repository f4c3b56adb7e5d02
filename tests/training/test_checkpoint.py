"""Checkpoints: whole or not there, of this run or refused by name, the one before when the newest is damaged."""

import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.config import TrainingConfig
from spectrain.data.batches import Sample
from spectrain.target.model import Target
from spectrain.training.checkpoint import GracefulStop, differences, random_states, set_random_states, write_whole

BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
run, fresh, changed, weights, checkpoint, assert_same = (
    BY_HAND[name] for name in ("run", "fresh", "changed", "weights", "checkpoint", "assert_same")
)
CONFIG = TrainingConfig(epochs=3, steps=6, tokens_per_step=1, ttt_steps=2, lr=5e-3, checkpoint_steps=2, keep_last=9)


@pytest.fixture(scope="module")
def samples(target: Target) -> Any:
    return BY_HAND["Samples"].of(target, BY_HAND["random_rows"](4))


@pytest.fixture(scope="module")
def finished(target: Target, samples: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints 2, 4 and 6. Tests work on copies."""
    out = tmp_path_factory.mktemp("finished")
    run(fresh(target, samples), samples, target, out, CONFIG)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_kill_while_saving_loses_the_run(tmp_path: Path) -> None:
    """SIGKILL at eight moments of the second save: the run goes on from a whole checkpoint and ends as if nothing had happened."""
    script = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert script.returncode == 0, script.stdout + script.stderr
    whole = torch.load(tmp_path / "none/weights.pt", weights_only=True)
    found = [json.loads((tmp_path / f"{moment}/found.json").read_text()) for moment in range(8)]
    assert [f["latest"] for f in found] == ["step-2.pt\n"] * 6 + ["step-4.pt\n"] * 2  # from the rename of `latest` on, 4
    assert found[0]["files"] == ["latest", "step-2.pt", "step-4.pt.part"] and found[7]["files"] == ["latest", "step-2.pt", "step-4.pt"]
    for moment in range(8):
        assert_same(whole, torch.load(tmp_path / f"{moment}/weights.pt", weights_only=True))
        assert names(tmp_path / str(moment)) == ["latest", "step-6.pt"]


def test_checkpoint_of_another_run_is_taken(target: Target, samples: Any, tmp_path: Path) -> None:
    """Every setting that differs is named with both values; the head stays as it was."""
    identity = {"training": {"lr": 0.002, "loss": {"mix": {"soft_ce": 1.0}, "decay": 1.0}, "betas": (0.9, 0.99)}, "rows": "a" * 64}
    run(fresh(target, samples), samples, target, tmp_path, CONFIG, identity=identity)
    head = fresh(target, samples)
    before = weights(head)
    other = {"training": {"lr": 0.001, "loss": {"mix": {"kl": 1.0}, "decay": 1.0}, "betas": [0.9, 0.99]}, "rows": "b" * 64, "seed": 1}
    with pytest.raises(ValueError, match=r"step-6.pt belongs to a run with other settings or data: rows was") as told:
        run(head, samples, target, tmp_path, CONFIG, identity=other)
    for words in ("training.lr was 0.002, is 0.001", "training.loss.mix.soft_ce was 1.0, is not set", "seed was not set, is 1",
                  "training.loss.mix.kl was not set, is 1.0", "another output folder, or delete"):  # fmt: skip
        assert words in str(told.value)
    assert "decay" not in str(told.value) and "betas" not in str(told.value)
    assert_same(before, weights(head))
    assert run(head, samples, target, tmp_path, CONFIG, identity=identity).steps == 6


def test_equal_settings_differ() -> None:
    assert differences({"a": {"b": 1, "c": {}}}, {"a": {"b": 1, "c": {}}}) == []
    assert differences({"a": {}}, {"a": {"b": None}}) == ["a was {}, is not set", "a.b was not set, is null"]
    long = differences({"a": "x" * 999}, {"a": "y"})
    assert len(long) == 1 and long[0].endswith('…, is "y"') and len(long[0]) < 100


def test_single_file_of_earlier_versions_is_taken(target: Target, samples: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint.pt was written by an earlier version .* use another output folder, or delete it"):
        run(fresh(target, samples), samples, target, tmp_path, CONFIG)
    assert not (tmp_path / "checkpoints").exists()


def harm(path: Path, how: str) -> None:
    if how == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
    elif how == "a bit":  # in the middle of a weight
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 64
        path.write_bytes(content)
    elif how == "no archive":
        path.write_bytes(os.urandom(3000))
    else:
        saved = torch.load(path, weights_only=True)
        torch.save({key: value for key, value in saved.items() if key != "measured"}, path)


HARMS = ["cut", "empty", "gone", "a bit", "no archive", "other version"]


@pytest.mark.parametrize("how", HARMS)
def test_damaged_checkpoint_ends_the_run(how: str, target: Target, samples: Any, out: Path, finished: Path, capsys: Any) -> None:
    """The newest is damaged: the one before is taken and said so, and the end is the same; all damaged: told so."""
    harm(out / "checkpoints/step-6.pt", how)
    head = fresh(target, samples)
    assert run(head, samples, target, out, CONFIG).steps == 6
    told = capsys.readouterr().out
    assert "step-6.pt is damaged or of another version (" in told and "; going on from step-4.pt" in told
    assert_same(weights(head), checkpoint(finished)["states"]["head"])
    assert names(out) == ["latest", "step-2.pt", "step-4.pt", "step-6.pt"]
    for path in (out / "checkpoints").glob("step-*.pt"):
        if how != "gone" or path.name == "step-6.pt":
            harm(path, how)
        else:
            path.unlink()
    with pytest.raises(ValueError, match=r"step-6.pt is damaged or of another version .*; delete .*checkpoints to start anew"):
        run(fresh(target, samples), samples, target, out, CONFIG)


def test_latest_names_an_earlier_one(target: Target, samples: Any, out: Path, capsys: Any) -> None:
    """What `latest` names is gone on from; what lies beyond it is replaced. Without `latest`, the newest counts."""
    (out / "checkpoints/latest").write_text("step-2.pt\n")
    steps = BY_HAND["changed"](CONFIG, keep_last=2)
    with pytest.MonkeyPatch.context() as patch:
        BY_HAND["stop_after"](patch, 1)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 3"):
            run(fresh(target, samples), samples, target, out, steps)
    assert names(out) == ["latest", "step-2.pt", "step-3.pt"] and (out / "checkpoints/latest").read_text() == "step-3.pt\n"
    for text in (None, "", "nonsense"):
        if text is None:
            (out / "checkpoints/latest").unlink()
        else:
            (out / "checkpoints/latest").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("spectrain.training.loop._time_is_up", lambda seconds, config: True)
            assert run(fresh(target, samples), samples, target, out, BY_HAND["changed"](steps, max_minutes=1)).steps == 3


def test_optimizer_of_another_run_is_taken(target: Target, samples: Any, out: Path) -> None:
    with pytest.raises(ValueError, match=r"step-6.pt holds head, optimizer; this run needs head, optimizer, ema: use the settings"):
        run(fresh(target, samples), samples, target, out, changed(CONFIG, ema=0.5))
    with pytest.raises(ValueError, match="holds another optimizer"):
        run(fresh(target, samples), samples, target, out, changed(CONFIG, optimizer="muon"))
    with pytest.raises(ValueError, match=r"holds another head \(.*size mismatch"):
        run(fresh(target, samples, draft_vocab_size=30), samples, target, out, CONFIG)


def test_finished_run_trains_on(target: Target, samples: Any, out: Path, finished: Path, capsys: Any) -> None:
    head = fresh(target, samples)
    result = run(head, samples, target, out, CONFIG, on_eval=lambda head: pytest.fail("measured again"))
    assert result.steps == 6 and len(result.history) == 2 and "the run is finished: all 6 steps are done" in capsys.readouterr().out
    assert_same(weights(head), checkpoint(finished)["states"]["head"])
    assert [p.stat().st_mtime_ns for p in sorted(out.rglob("*.pt"))] == [p.stat().st_mtime_ns for p in sorted(finished.rglob("*.pt"))]


def stopping(samples: Any, after: int) -> Any:
    """Sends SIGTERM to this process with sample number `after`."""

    class Stops(BY_HAND["Samples"]):
        loaded = 0

        def __getitem__(self, i: int) -> Sample:
            self.loaded += 1
            if self.loaded == after:
                os.kill(os.getpid(), signal.SIGTERM)
            return self.samples[i]

    return Stops(samples.rows, samples.samples)


def test_signal_handlers_stay_behind(target: Target, samples: Any, tmp_path: Path) -> None:
    """SIGTERM in a step: the step is finished and saved, then KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3 of 6"):
        run(fresh(target, samples), stopping(samples, after=3), target, tmp_path, CONFIG)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert checkpoint(tmp_path)["step"] == 3 and names(tmp_path) == ["latest", "step-2.pt", "step-3.pt"]


def test_second_run_in_a_folder_spoils_the_first(target: Target, samples: Any, tmp_path: Path) -> None:
    """It is refused while the first is at work, and touches nothing; afterwards, also of an error, the folder is free."""
    refused = []

    def measure(head: Any) -> dict[str, float]:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match=r"another run is at work in .*; wait for it, stop it, or use another output folder"):
            run(fresh(target, samples), samples, target, tmp_path, CONFIG)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        refused.append(len(before))
        if len(refused) == 2:
            raise RuntimeError
        return {"measured_tau": 1.0}

    with pytest.raises(RuntimeError):
        run(fresh(target, samples), samples, target, tmp_path, changed(CONFIG, eval_steps=3), on_eval=measure)
    assert len(refused) == 2 and refused[0] > 2
    assert run(fresh(target, samples), samples, target, tmp_path, CONFIG).steps == 6


def test_second_signal_waits() -> None:
    with pytest.raises(KeyboardInterrupt), GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the second one stops at once")


def test_random_states_come_back_otherwise(tmp_path: Path) -> None:
    """Through a file that is read without running code."""

    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), float(torch.rand(())), float(torch.randn(()))]

    np.random.normal()  # leaves the second of a pair waiting
    write_whole(tmp_path / "r.pt", lambda file: torch.save(random_states(), file))
    expected = drawn()
    set_random_states(torch.load(tmp_path / "r.pt", weights_only=True))
    assert drawn() == expected != drawn()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_loses_the_checkpoint_before(target: Target, samples: Any, out: Path) -> None:
    (out / "checkpoints/latest").write_text("step-4.pt\n")
    (out / "checkpoints/step-6.pt").unlink()
    (out / "checkpoints/step-6.pt.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        run(fresh(target, samples), samples, target, out, CONFIG)
    assert (out / "checkpoints/latest").read_text() == "step-4.pt\n" and checkpoint(out)["step"] == 4
    (out / "checkpoints/step-6.pt.part").unlink()
    assert run(fresh(target, samples), samples, target, out, CONFIG).steps == 6 and checkpoint(out)["step"] == 6
