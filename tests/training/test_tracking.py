"""What a training run tells: sums and what they come to, no step twice after a resume, and trackers that get the same numbers."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from spectrain.config import TrainingConfig
from spectrain.heads.losses import Counts
from spectrain.training import tracking
from spectrain.training.tracking import Progress, check_tracker

CONFIG = TrainingConfig(ttt_steps=2, log_steps=2)


def counts_of(**sums: list[float]) -> Counts:
    """Counts of two steps; what is not named is 0."""
    nothing = Counts.zeros(2, torch.device("cpu"))
    named = {f"{name}_K": torch.tensor(values) for name, values in sums.items()}
    return replace(nothing, **named)


def one(step: int) -> Counts:
    return counts_of(loss=[4.0 * step, 2.0], alpha=[2.0, 1.0], hits=[3.0, 1.0], rows=[4.0, 2.0], inside=[4.0, 1.0], survived=[3.0, 1.0],
                     reached=[4.0, 2.0])  # fmt: skip


def progress(out: Path, *, done: int = 0, accelerator: Accelerator | None = None, **changes: Any) -> Progress:
    return Progress(9, done, accelerator or Accelerator(cpu=True), CONFIG.model_copy(update=changes), out)


def go(bar: Progress, first: int, last: int) -> None:
    for step in range(first, last + 1):
        bar.step(step=step, counts=one(step), lr=0.1 * step, total_tokens=10, wait_seconds=0.5, step_seconds=2.0)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


POINT = {"step": 3, "minutes": 0.5, "loss": 1.5, "alpha": [0.5, 0.25], "hit": [0.5, 0.5], "measured_tau": 1.75, "sim_tau_chain": 1.5,
         "tau_by_domain": {"code": 2.0}, "sim_tree": "static"}  # fmt: skip


def test_figures_are_not_their_numerators_over_their_denominators(tmp_path: Path) -> None:
    bar = progress(tmp_path)
    go(bar, 1, 3)
    bar.close()
    first, last = lines(tmp_path)
    assert (first["kind"], first["step"], first["steps"], first["lr"]) == ("step", 2, 2, 0.2)
    assert first["sums"]["loss"] == [12.0, 4.0] and first["sums"]["rows"] == [8.0, 4.0]
    assert first["loss"] == [1.5, 1.0] and first["alpha"] == [0.5, 0.5] and first["hit"] == [0.75, 0.5] and first["coverage"] == [1.0, 0.5]
    assert first["survival"] == [0.75, 0.5] and first["row_tau"] == 2.25
    assert first["supervised_per_second"] == 2.0 and first["tokens_per_second"] == 5.0 and first["wait_share"] == 0.25
    assert first["supervised_share"] == 0.4 and first["tokens"] == 20 and 0.05 < first["resident_gb"] < 100
    assert (last["step"], last["steps"]) == (3, 1) and last["loss"] == [3.0, 1.0], "the steps after the last full window are lost"


def test_simulated_length_takes_hits_for_survival(tmp_path: Path) -> None:
    """EV1: P(first right) = 0.7 and P(second | first right) = 0.5 make 1 + 0.7 + 0.35, whatever the hits of each step alone."""
    bar = progress(tmp_path)
    chances = counts_of(hits=[700.0, 900.0], rows=[1000.0, 1000.0], survived=[700.0, 350.0], reached=[1000.0, 1000.0])
    bar.step(1, chances, lr=0.1, total_tokens=1, wait_seconds=0.0, step_seconds=1.0)
    bar.close()
    assert lines(tmp_path)[0]["row_tau"] == pytest.approx(2.05)


def test_steps_stand_twice_after_a_resume(tmp_path: Path) -> None:
    """RE1: killed after step 7, resumed at 5: the line of 5 was written for the checkpoint, those of 6 and 7 are made again."""
    bar = progress(tmp_path)
    go(bar, 1, 3)
    bar.measured(POINT)
    go(bar, 4, 5)
    bar.flush()
    go(bar, 6, 7)
    bar.measured({**POINT, "step": 7})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()[:-1]
    assert [json.loads(line)["step"] for line in before] == [2, 3, 3, 4, 5, 6, 7, 7]
    again = progress(tmp_path, done=5)
    assert [line["step"] for line in lines(tmp_path)] == [2, 3, 3, 4, 5]
    go(again, 6, 9)
    again.close()
    steps = [line for line in lines(tmp_path) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [2, 3, 4, 5, 6, 8, 9] and sum(line["steps"] for line in steps) == 9
    assert sum(line["sums"]["rows"][0] for line in steps) == 9 * 4
    progress(tmp_path).close()
    assert lines(tmp_path) == [], "a run that starts anew goes on with the lines of an older one"


def test_broken_number_breaks_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress(tmp_path, log_steps=1)
    bar.step(1, counts_of(loss=[math.nan, math.inf], rows=[1.0, 1.0]), lr=0.1, total_tokens=1, wait_seconds=0.0, step_seconds=1.0)
    bar.measured({**POINT, "measured_tau": None, "sim_tau_chain": None})
    bar.close()
    step, measured = lines(tmp_path)
    assert step["loss"] == [None, None] and "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert measured["kind"] == "measured" and measured["measured_tau"] is None
    told = capsys.readouterr().out
    assert "step 3 (0.5 min): loss 1.500, alpha 0.500 0.250\n" in told


def test_missing_package_is_found_after_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    for name in ("wandb", "tensorboard", "trackio"):
        with pytest.raises(ValueError, match=f"{name}, and its package is not installed: pip install {name}; or go without"):
            check_tracker(name)
    with pytest.raises(ValueError, match="pip install wandb"):
        progress(tmp_path, tracker="wandb")
    check_tracker("none")
    monkeypatch.setattr(tracking, "find_spec", lambda name: name == "tensorboardX" or None)
    check_tracker("tensorboard")


class Tracker:
    """Stands for the trackers of an accelerator."""

    is_main_process, device = True, torch.device("cpu")

    def __init__(self, fails: str = "") -> None:
        self.fails, self.logged, self.ended = fails, [], 0

    def init_trackers(self, project: str, config: dict[str, Any], init_kwargs: dict[str, Any]) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        self.project, self.config, self.settings = project, config, init_kwargs

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    @property
    def trackers(self) -> list["Tracker"]:
        return [self]

    def finish(self) -> None:
        self.ended += 1


def test_trackers_get_other_numbers_or_other_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: name)
    seen = Tracker()
    bar = progress(tmp_path / "mine" / "training", done=0, accelerator=seen, tracker="wandb")
    go(bar, 1, 3)
    bar.measured(POINT)
    bar.close()
    bar.close()
    assert [step for step, _ in seen.logged] == [2, 3, 3] and seen.ended == 1
    assert seen.logged[0][1]["loss/0"] == 1.5 and seen.logged[0][1]["survival/1"] == 0.5 and seen.logged[0][1]["lr"] == 0.2
    point = seen.logged[2][1]
    assert point["eval/measured_tau"] == 1.75 and point["eval/tau_by_domain/code"] == 2.0 and point["eval/alpha/1"] == 0.25
    assert all(type(v) is float for _, values in seen.logged for v in values.values())
    assert seen.settings["wandb"]["name"] == "mine" and seen.settings["tensorboard"]["purge_step"] == 1
    assert seen.config["loss.decay"] == CONFIG.loss.decay and seen.config["ttt_steps"] == 2 and seen.config["betas"] == "[0.9, 0.99]"
    with pytest.raises(ValueError, match="wandb does not start: no key; without its service: WANDB_MODE=offline"):
        progress(tmp_path, accelerator=Tracker("no key"), tracker="wandb")


def test_other_processes_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = Tracker()
    other.is_main_process = False
    bar = progress(tmp_path / "run", accelerator=other)
    go(bar, 1, 4)
    bar.measured(POINT)
    bar.close()
    assert not (tmp_path / "run").exists()


def real(out: Path, tracker: str, *, done: int, last: int) -> None:
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=out)
    bar = Progress(9, done, accelerator, CONFIG.model_copy(update={"tracker": tracker, "log_steps": 1}), out)
    go(bar, done + 1, last)
    bar.measured({**POINT, "step": last})
    bar.close()


@pytest.mark.filterwarnings("default")  # third-party code
def test_tensorboard_has_other_numbers(tmp_path: Path) -> None:
    """Two steps that a resume makes again stand there once."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    real(tmp_path, "tensorboard", done=0, last=4)
    real(tmp_path, "tensorboard", done=2, last=5)
    found = EventAccumulator(str(tmp_path / "spectrain"), size_guidance={"scalars": 0}).Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss/0")] == [(s, float(s)) for s in (1, 2, 3, 4, 5)]
    assert found.Scalars("eval/measured_tau")[-1].value == 1.75


@pytest.mark.filterwarnings("default")  # third-party code
def test_wandb_needs_its_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    real(tmp_path, "wandb", done=0, last=3)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    late = time.monotonic() + 30  # a process of its own writes it
    while file.stat().st_size < 1000 and time.monotonic() < late:
        time.sleep(0.1)
    assert file.stat().st_size > 1000  # its format is its own: records in blocks, so that a name may be cut in two


@pytest.mark.filterwarnings("default")  # third-party code
def test_trackio_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio", reason="trackio is not installed")
    real(tmp_path, "trackio", done=0, last=3)
    assert any(path.stat().st_size > 0 for path in (tmp_path / "trackio").rglob("*") if path.is_file())
