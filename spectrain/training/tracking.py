"""What a person sees of a running training: a progress bar, lines of `metrics.jsonl`, notes, and trackers of accelerate.

`metrics.jsonl` has two kinds of lines. "step": the sums over the steps since the last such line, by test-time step, and what they come
to; "measured": acceptance measured by the generator. Every figure is defined in docs/definitions.md.

Legend: K test-time steps.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from tqdm import tqdm

from spectrain.config import TrainingConfig
from spectrain.heads.losses import Counts

PROJECT = "spectrain"
FILE = "metrics.jsonl"
PACKAGES = {"wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardX"), "trackio": ("trackio",)}  # any of them will do
TOLD = {"measured_tau": "measured tau", "sim_tau_chain": "simulated tau", "sim_tau_tree": "of a tree", "target_kl": "KL of the target"}


def check_tracker(name: str) -> None:
    """ValueError when the tracker's package is not installed; to be called before any long work."""
    wanted = PACKAGES.get(name, ())
    if wanted and not any(find_spec(package) for package in wanted):
        found = f"training.tracker is {name}, and its package is not installed"
        raise ValueError(f"{found}: pip install {wanted[0]}; or go without: --set training.tracker=none")


@dataclass
class _Window:
    """The steps since the last line. tokens: all tokens of their rows, over all processes; wait: seconds for states, of this process."""

    counts: Counts
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wait: float = 0.0

    def add(self, counts: Counts, *, tokens: int, seconds: float, wait: float) -> None:
        self.counts = self.counts + counts
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.seconds, self.wait = self.seconds + seconds, self.wait + wait

    def line(self, step: int, lr: float, device: torch.device) -> dict[str, Any]:
        """Sums and what they come to."""
        sums = {f.name.rpartition("_")[0]: getattr(self.counts, f.name).tolist() for f in fields(self.counts)}
        means = self.counts.means()
        supervised, seconds = sums["rows"][0], max(self.seconds, 1e-9)
        return {
            "kind": "step", "step": step, "steps": self.steps, "lr": lr, **means, "row_tau": 1 + sum(means["survival"]),
            "supervised_per_second": supervised / seconds, "tokens_per_second": self.tokens / seconds, "wait_share": self.wait / seconds,
            "supervised_share": supervised / max(1, self.tokens), **_memory(device), "sums": sums, "tokens": self.tokens,
            "seconds": self.seconds, "wait_seconds": self.wait, "time": time.time(),
        }  # fmt: skip


class Progress:
    """Reports on the main process only. `flush` before a checkpoint, so that a run that goes on from there has told all its steps.

    total, done: steps of the run, and those of an earlier call; lines of later steps, which are made again, are dropped from the file.
    out: the run's folder, whose name the trackers show. ValueError when the tracker is not installed or does not start.
    """

    def __init__(self, total: int, done: int, accelerator: Accelerator, config: TrainingConfig, out: Path) -> None:
        check_tracker(config.tracker)
        self._main, self._accelerator, self._config = accelerator.is_main_process, accelerator, config
        self._file, self._step, self._lr = out / FILE, done, 0.0
        self._window = self._new_window()
        self._bar = tqdm(total=total, initial=done, desc="train", unit="step", disable=None if self._main else True)
        if self._main:
            out.mkdir(parents=True, exist_ok=True)
            self._drop_after(done)
        self._tracks = config.tracker != "none"
        if self._tracks:
            self._start_tracker(done, out)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, step: int, counts: Counts, *, lr: float, total_tokens: int, wait_seconds: float, step_seconds: float) -> None:
        """A step is done. counts and total_tokens: over all processes."""
        if not self._main:
            return
        self._step, self._lr = step, lr
        self._window.add(counts.detach(), tokens=total_tokens, seconds=step_seconds, wait=wait_seconds)
        if not self._bar.disable:  # reading the counts waits for the device
            means = counts.means()
            alpha, speed = " ".join(f"{a:.2f}" for a in means["alpha"]), total_tokens / max(step_seconds, 1e-9)
            shown = {"loss": f"{means['loss'][0]:.2f}", "top-1": f"{means['hit'][0]:.2f}", "alpha": alpha, "tok/s": f"{speed:.0f}"}
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update()
        if step % self._config.log_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Write the line of the steps since the last one, if there are any."""
        if not self._main or not self._window.steps:
            return
        line = self._window.line(self._step, self._lr, self._accelerator.device)
        self._window = self._new_window()
        self._write(line)
        self._track({name: value for name, value in line.items() if name not in ("kind", "step", "steps", "sums", "time")})

    def measured(self, point: Mapping[str, Any]) -> None:
        """Acceptance was measured: `step`, `minutes`, `loss`, `alpha`, `measured_tau` (None: there is nothing to measure on), and more."""
        if not self._main:
            return
        self.flush()
        self._write({"kind": "measured", **point})
        told = [f"loss {point['loss']:.3f}, alpha " + " ".join(f"{a:.3f}" for a in point["alpha"])]
        told += [f"{name} {point[key]:.3f}" for key, name in TOLD.items() if point.get(key) is not None]
        self.note(f"step {point['step']} ({point['minutes']:.1f} min): {', '.join(told)}")
        self._track({"eval": {name: value for name, value in point.items() if name != "step"}}, step=point["step"])

    def note(self, text: str) -> None:
        if self._main:
            self._bar.write(text)

    def close(self) -> None:
        self.flush()
        self._bar.close()
        if self._tracks:
            self._tracks = False
            for tracker in self._accelerator.trackers:  # not end_training, which would leave the process group, too
                tracker.finish()

    def _new_window(self) -> _Window:
        return _Window(Counts.zeros(self._config.ttt_steps, self._accelerator.device))

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(line), allow_nan=False) + "\n")

    def _drop_after(self, done: int) -> None:
        """Take lines of steps after `done`, and a line that was cut short, out of the file."""
        if not self._file.is_file():
            return
        lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= done]
        if len(kept) < len(lines):
            part = self._file.with_suffix(".part")
            part.write_text("".join(kept), encoding="utf-8")
            os.replace(part, self._file)
            self.note(f"{self._file}: {len(lines) - len(kept)} lines of steps after {done} dropped; these steps are made again")

    def _start_tracker(self, done: int, out: Path) -> None:
        name, tracker = _run_name(out), self._config.tracker
        settings: dict[str, dict[str, Any]] = {
            "wandb": {"name": name, "group": name, "dir": str(out)}, "trackio": {"name": name, "resume": "allow"},
            "tensorboard": {"purge_step": done + 1},
        }  # fmt: skip
        try:
            self._accelerator.init_trackers(PROJECT, config=_flat(self._config.model_dump(mode="json"), "."), init_kwargs=settings)
        except Exception as error:  # whatever a service's own package raises
            hint = "; without its service: WANDB_MODE=offline" if tracker == "wandb" else ""
            raise ValueError(f"the tracker {tracker} does not start: {error}{hint}, or --set training.tracker=none") from error

    def _track(self, values: Mapping[str, Any], step: int | None = None) -> None:
        if self._tracks:
            numbers = {name: float(v) for name, v in _flat(_plain(values), "/").items() if isinstance(v, (int, float))}
            self._accelerator.log(numbers, step=self._step if step is None else step)


def _memory(device: torch.device) -> dict[str, float]:
    """GB held by the main process, and the most that tensors took on its GPU."""
    found = {"resident_gb": psutil.Process().memory_info().rss / 1e9}
    return {**found, "cuda_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9} if device.type == "cuda" else found


def _run_name(out: Path) -> str:
    """The run's folder; `training` is a part of it."""
    whole = out.resolve()
    return whole.parent.name if whole.name == "training" else whole.name


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _plain(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(value: Any, sign: str, name: str = "") -> dict[str, Any]:
    """Nested values by joined names; lists by number, but as text where names are joined by a dot, as in settings."""
    if isinstance(value, (list, tuple)) and sign == ".":
        return {name: json.dumps(value)}
    if not isinstance(value, (Mapping, list, tuple)):
        return {name: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {k: v for key, part in items for k, v in _flat(part, sign, f"{name}{sign}{key}" if name else str(key)).items()}
