"""The folder of `spectrain prepare` while it is made: what is finished, what it was made from, and where to go on.

Input is worked off in stretches. A stretch leaves rows/NNNNN.arrow, its rejects, its keys and, last of all, work/NNNNN.json: only
then does it count. work/identity.json says what all of it was made from.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from spectrain.data.coverage import Tally
from spectrain.data.row_store import INDEX, RECORD, ROWS, RowStore, part_name

WORK, REJECTED = "work", "rejected.jsonl"
LOCK, HALF = ".lock", ".half"
PATIENCE = 5.0  # seconds in which the workers of a killed run are gone, who hold its lock too
OURS = {WORK, REJECTED, LOCK, ROWS, INDEX, RECORD}

Keys = npt.NDArray[np.uint64]


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """`write` fills a file next to `path` that then takes its place; nothing is left of it when that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + HALF)
    try:
        write(half)
        with half.open("rb+") as file:
            os.fsync(file.fileno())
        half.replace(path)
    finally:
        with suppress(FileNotFoundError):
            half.unlink()


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, sort_keys=True) + "\n"
    write_atomic(path, lambda half: half.write_text(text, encoding="utf-8"))


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it; ValueError when one is at work, or when the folder holds other things."""
    folder.mkdir(parents=True, exist_ok=True)
    strange = sorted(path.name for path in folder.iterdir() if path.name.removesuffix(HALF) not in OURS)
    if strange:
        raise ValueError(f"{folder} holds other files ({', '.join(strange[:3])}); give --out a folder of its own")
    with (folder / LOCK).open("w") as lock:
        end = time.monotonic() + PATIENCE
        while not _locked(lock):
            if time.monotonic() > end:
                raise ValueError(f"another `spectrain prepare` is writing to {folder}; wait for it or give another --out")
            time.sleep(0.05)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Stretch:
    """What a finished stretch leaves behind besides its rows. position: source, and rows of it that are done. contents, ids, rows: keys
    seen. conversation: rows of each kept conversation."""

    tally: Tally
    position: tuple[int, int]
    contents: Keys
    ids: Keys
    rows: Keys
    conversation: npt.NDArray[np.int32]
    rejected: list[dict[str, Any]] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)


class Journal:
    """The finished stretches of a folder, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._work = folder, folder / WORK
        self.count = 0
        while self._record(self.count).is_file():
            self.count += 1

    def start(self, identity: Mapping[str, Any]) -> None:
        """Throw away what is there and begin anew."""
        for name in (RECORD, INDEX, REJECTED, WORK, ROWS):  # the record first: without it nothing counts as a store
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (self.folder / ROWS).mkdir()
        write_json(self._work / "identity.json", identity)
        self.count = 0

    def identity(self) -> dict[str, Any] | None:
        """What an unfinished run was made from; None when there is none."""
        path = self._work / "identity.json"
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found

    def commit(self, stretch: Stretch, write_rows: Callable[[Path], None]) -> None:
        """Write a stretch; it counts once its record is there."""
        number = self.count
        write_atomic(self.folder / part_name(number), write_rows)
        lines = "".join(json.dumps(line) + "\n" for line in stretch.rejected)
        write_atomic(self._rejected(number), lambda half: half.write_text(lines, encoding="ascii"))
        arrays = {name: getattr(stretch, name) for name in ("contents", "ids", "rows", "conversation")}
        write_atomic(self._keys(number), lambda half: _save(half, arrays))
        record = {"tally": stretch.tally.values(), "position": list(stretch.position), "formats": stretch.formats}
        write_json(self._record(number), record)
        self.count += 1

    def stretches(self) -> Iterator[Stretch]:
        """Every finished stretch, without its rejects."""
        for number in range(self.count):
            record = json.loads(self._record(number).read_text(encoding="utf-8"))
            with np.load(self._keys(number)) as arrays:
                kept = {name: arrays[name] for name in arrays.files}
            first, rows = record["position"]
            yield Stretch(tally=Tally(record["tally"]), position=(first, rows), formats=record["formats"], **kept)

    def gather_rejected(self) -> None:
        """rejected.jsonl of all stretches."""

        def write(half: Path) -> None:
            with half.open("wb") as sink:
                for number in range(self.count):
                    with self._rejected(number).open("rb") as lines:
                        shutil.copyfileobj(lines, sink)

        write_atomic(self.folder / REJECTED, write)

    def close(self) -> None:
        """The store is finished: what was needed to go on is not needed any more."""
        shutil.rmtree(self._work, ignore_errors=True)

    def _record(self, number: int) -> Path:
        return self._work / f"{number:05d}.json"

    def _keys(self, number: int) -> Path:
        return self._work / f"{number:05d}.npz"

    def _rejected(self, number: int) -> Path:
        return self._work / f"{number:05d}.rejected.jsonl"


def _save(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)


def finished(folder: Path) -> dict[str, Any] | None:
    """The record of a whole store; None when there is none or a file of it is missing."""
    try:
        return RowStore(folder).record
    except ValueError:
        return None


def changes(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, a phrase each."""
    lines = []
    for key in sorted({*found, *wanted}):
        old, new = found.get(key), wanted.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changes(old, new)
        elif old != new:
            short = max(len(str(old)), len(str(new))) <= 40
            lines.append(f"{key} {old} -> {new}" if short else f"{key} changed")
    return lines
