"""Saving and resuming a run: weights, optimizer moments, schedule, place in the data. Written whole or not at all."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate import Accelerator

FILE = "checkpoint.pt"
STATE = ("step", "seconds", "best", "history", "order", "pace", "skipped", "measured")  # the place in the run


def save_checkpoint(
    out: Path, identity: str, head: Any, optimizer: Any, schedule: Any, state: Mapping[str, Any], accelerator: Accelerator
) -> None:
    """Write `checkpoint.pt` in `out` (main process only); `state` holds the place in the run."""
    if not accelerator.is_main_process:
        return
    out.mkdir(parents=True, exist_ok=True)
    part = out / (FILE + ".part")
    states = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    with part.open("wb") as file:  # given a path, torch hides the system's error (such as a full disk)
        torch.save({"identity": identity, **states, **state}, file)
    os.replace(part, out / FILE)


def load_checkpoint(out: Path, identity: str, head: Any, optimizer: Any, schedule: Any) -> dict[str, Any] | None:
    """Restore everything from `out` and return the place in the run; None when there is no checkpoint.

    Raises ValueError when the checkpoint is damaged, of a run with other settings or data, or of a head of other sizes.
    """
    path = out / FILE
    if not path.exists():
        return None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        state = {key: saved[key] for key in STATE}
    except (RuntimeError, EOFError, UnpicklingError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is damaged or of another version ({reason}); delete it to start anew") from error
    if saved["identity"] != identity:
        raise ValueError(f"{path} belongs to a run with other settings or data; use another output folder, or delete it to start anew")
    try:
        head.load_state_dict(saved["head"])
    except RuntimeError as error:
        raise ValueError(f"{path} holds another head ({error}); use another output folder, or delete it to start anew") from error
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    return state


class GracefulStop:
    """While active, the first SIGINT or SIGTERM only sets `asked`; the loop ends at the next step border. A second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> "GracefulStop":
        try:
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals stay with whoever has them
            self._before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
