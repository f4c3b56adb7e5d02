"""Saving and resuming a run: weights, optimizers, averages, random states, place in the data; and stopping at a step's border.

`<out>/checkpoints/step-<n>.pt` holds the state after n steps, and the text file `latest` beside it names the one to go on from. Each is
written under another name, brought to the disk and renamed, `latest` last: whenever the process dies, what `latest` names is whole.
"""

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType, TracebackType
from typing import IO, Any, Protocol
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not told apart
    fcntl = None  # type: ignore[assignment]

FOLDER, LATEST, LOCK = "checkpoints", "latest", ".lock"
EARLIER = "checkpoint.pt"  # the one file of earlier versions
PLACE = ("step", "seconds", "best", "history", "order", "pace", "skipped", "idle", "measured")  # the place in the run
HARM = (RuntimeError, EOFError, UnpicklingError, KeyError, ValueError, TypeError, AttributeError, FileNotFoundError, BadZipFile)
LONGEST = 60  # characters of a setting in a message


class Stateful(Protocol):
    """Anything that gives its state and takes it back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class Checkpoints:
    """The saved states of one run. parts: what is saved and restored, by name. identity: plain values, nested, that the run depends on."""

    def __init__(
        self, out: Path, parts: Mapping[str, Stateful], *, identity: Mapping[str, Any], keep_last: int, accelerator: Accelerator
    ) -> None:
        self._out, self._folder, self._parts, self._keep = out, out / FOLDER, parts, keep_last
        self._identity = json.loads(json.dumps(identity))  # as it will be read back
        self._accelerator = accelerator

    def load(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Restore all parts and the random states; returns the place in the run (None where there is no checkpoint) and what there is
        to say. A damaged checkpoint is left out as long as there is an earlier one.

        Raises ValueError when all are damaged, or when the checkpoint is of an earlier version, of a run with other settings or data
        (each is named), or of a head of other sizes.
        """
        if (self._out / EARLIER).exists():
            found = f"{self._out / EARLIER} was written by an earlier version of spectrain, and this one cannot go on from it"
            raise ValueError(f"{found}; use another output folder, or delete it to start anew (finished heads stay as they are)")
        harmed = []
        for path in self._candidates():
            try:
                saved = _read(path)
                place = {key: saved[key] for key in PLACE}
                states, identity, rng = saved["states"], saved["identity"], saved["random"]
            except HARM as error:
                harmed.append(f"{path} is damaged or of another version ({_first_line(error)})")
                continue
            self._restore(path, states, identity)
            if self._accelerator.process_index < len(rng):  # a process that is new keeps its own
                set_random_states(rng[self._accelerator.process_index])
            return place, [f"{text}; going on from {path.name}" for text in harmed]
        if harmed:
            raise ValueError(f"{'; '.join(harmed)}; delete {self._folder} to start anew")
        return None, []

    def save(self, place: Mapping[str, Any]) -> None:
        """Write the state after place["step"] steps, then let go of the oldest. To be called on every process; the main one writes, and
        the others wait: a launcher ends it when one of them has stopped."""
        rng = gather_object([random_states()])
        states = {name: part.state_dict() for name, part in self._parts.items()}  # spread over processes, they are gathered by all of them
        if self._accelerator.is_main_process:
            self._write(place, states, rng)
        self._accelerator.wait_for_everyone()

    def _write(self, place: Mapping[str, Any], states: Mapping[str, Any], rng: list[Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{place['step']}.pt"
        content = {"identity": self._identity, "states": states, "random": rng, **{key: place[key] for key in PLACE}}
        write_whole(path, lambda file: torch.save(content, file))
        write_whole(self._folder / LATEST, lambda file: file.write(f"{path.name}\n".encode()))
        kept = [p for p in self._saved() if _step(p) <= place["step"]][-self._keep :]
        for old in self._folder.iterdir():
            if old.suffix == ".part" or (_step(old) >= 0 and old not in kept):  # later ones are of a course that was left
                old.unlink()

    def _saved(self) -> list[Path]:
        """Checkpoints by rising step."""
        return sorted((p for p in self._folder.glob("step-*.pt") if _step(p) >= 0), key=_step)

    def _candidates(self) -> list[Path]:
        """What to go on from, best first: the one that `latest` names, then earlier ones; without it all, the newest first."""
        saved, named = self._saved(), self._folder / LATEST
        if not named.is_file():
            return saved[::-1]
        newest = self._folder / named.read_text(encoding="utf-8", errors="replace").strip()
        return [newest, *(p for p in saved[::-1] if _step(p) < _step(newest))] if _step(newest) >= 0 else saved[::-1]

    def _restore(self, path: Path, states: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        way_out = f"use the settings of that run, another output folder, or delete {self._folder} to start anew"
        if differing := differences(identity, self._identity):
            raise ValueError(f"{path} belongs to a run with other settings or data: {'; '.join(differing)}. To go on, {way_out}")
        if states.keys() != self._parts.keys():
            raise ValueError(f"{path} holds {', '.join(states)}; this run needs {', '.join(self._parts)}: {way_out}")
        for name, part in self._parts.items():
            try:
                part.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise ValueError(f"{path} holds another {name} ({' '.join(str(error).split())}); {way_out}") from error


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings of two identities that differ, each by its full name with both values."""
    then, here = _flat(saved), _flat(now)
    nothing = object()

    def shown(value: Any) -> str:
        text = "not set" if value is nothing else json.dumps(value)
        return text if len(text) <= LONGEST else text[:LONGEST] + "…"

    pairs = [(key, then.get(key, nothing), here.get(key, nothing)) for key in sorted(then.keys() | here.keys())]
    return [f"{key} was {shown(a)}, is {shown(b)}" for key, a, b in pairs if a != b]


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) and value else {above + key: value}
    return found


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint's content; ValueError when a bit has changed, which torch does not look for."""
    with ZipFile(path) as archive:
        if changed := archive.testzip():
            raise ValueError(f"{changed} is not what was written")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def _step(path: Path) -> int:
    """Steps of a checkpoint by its name; -1 for any other file."""
    found = re.fullmatch(r"step-(\d+)\.pt", path.name)
    return int(found[1]) if found else -1


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that under its name there is the old one or the whole new one, also after a loss of power."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:  # given a path, torch hides the system's error (such as a full disk)
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    if hasattr(os, "O_DIRECTORY"):  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def random_states() -> dict[str, Any]:
    """States of this process's random generators, in types that are read back without running code."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    numpy = [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "numpy": numpy, "python": random.getstate(), "cuda": cuda}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Take back what `random_states` gave."""
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def only_run(out: Path, accelerator: Accelerator) -> Iterator[None]:
    """Keeps other runs out of `out`, whose checkpoints this one would take for its own; ValueError when one is at work. The system
    lets go of the lock when the process ends, however it ends."""
    if fcntl is None or not accelerator.is_main_process:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another run is at work in {out}; wait for it, stop it, or use another output folder") from error
        yield


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
