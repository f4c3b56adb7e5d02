"""Rows with the states of the frozen target, for training: read from a store, or computed when they are asked for.

Both are `Samples` (spectrain.data.batches). States come as they are stored, and are decoded where they are used. Beyond the last token
whose state can be read (spectrain.target.states) they are zeros.

Legend: B rows, L tokens, M supervised tokens of a row, P those of a batch, S states, W target width, F = S * W.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spectrain.config import CaptureConfig
from spectrain.data.batches import Batch, Sample
from spectrain.data.codes import Codes
from spectrain.data.rows import Row
from spectrain.target.capture import shard_name, shard_tensors
from spectrain.target.folders import Folder, open_folder
from spectrain.target.manifest import check_rows, read_manifest
from spectrain.target.model import Target
from spectrain.target.passes import quick
from spectrain.target.shards import Damaged, File, Shard, open_shard
from spectrain.target.states import LastState, capture_row

__all__ = ["FeatureStore", "OnlineFeatures", "capture_row"]

TABLES = ("kept_runs", "asked_runs", "digests")  # of a shard, beside its states

OPEN_FILES = 64

Runs = Sequence[tuple[int, int]]
Reader = Any  # an open file, or nothing


class Block(Protocol):
    """Tensors of some rows, read in parts: a shard, or what was just computed."""

    @property
    def kinds(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]: ...

    def read(self, file: Reader, name: str, first: int, out: Tensor) -> None: ...


@dataclass(frozen=True)
class _Memory:
    """A block of tensors in memory."""

    tensors: Mapping[str, Tensor]

    @property
    def kinds(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (t.dtype, tuple(t.shape[1:])) for name, t in self.tensors.items()}

    def read(self, file: Reader, name: str, first: int, out: Tensor) -> None:
        out.copy_(self.tensors[name][first : first + len(out)])


@dataclass(frozen=True)
class _Place:
    """Where a row's states are: a block (with its open file), and the runs of its kept and of its supervised tokens in there."""

    block: Block
    file: Reader
    kept: Runs
    asked: Runs


class _Features(ABC):
    """What store and online features have in common."""

    rows: Sequence[Row]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Sample:
        """Row i."""
        batch = self.batch([i])
        states = Codes(**{name: t[0] for name, t in batch.states.tensors.items()})
        return Sample(batch.ids_BL[0], batch.mask_BL[0], states, batch.last, batch.best_P, batch.lse_P)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The given rows in this order, padded at the end. Raises ValueError naming a shard that is damaged."""
        rows = [self.rows[i] for i in numbers]
        ids_BL, mask_BL = (
            pad_sequence([torch.from_numpy(x.astype(np.int64)) for x in parts], batch_first=True)
            for parts in ([row.ids_L for row in rows], [row.mask_L for row in rows])
        )
        found = _assemble(self._places(numbers, rows), ids_BL.shape[1])

        def codes(part: str) -> Codes:
            return Codes(**{name.partition(".")[2]: t for name, t in found.items() if name.startswith(f"{part}.")})

        return Batch(ids_BL, mask_BL, codes("states"), codes("last"), found["best"].long(), found["lse"])

    @abstractmethod
    def _places(self, numbers: Sequence[int], rows: Sequence[Row]) -> list[_Place]: ...


def _assemble(places: Sequence[_Place], length: int) -> dict[str, Tensor]:
    """The tensors of a batch: of states [B, length, ...], zeros behind what is kept; of supervised tokens [P, ...]."""
    kinds = {name: kind for name, kind in places[0].block.kinds.items() if name not in TABLES}
    totals = sum(stop - first for place in places for first, stop in place.asked)
    out = {
        name: torch.empty(*((len(places), length) if name.startswith("states.") else (totals,)), *tail, dtype=dtype)
        for name, (dtype, tail) in kinds.items()
    }
    done = 0
    for b, place in enumerate(places):
        asked = sum(stop - first for first, stop in place.asked)
        for name, t in out.items():
            if name.startswith("states."):
                _fill(place, name, place.kept, t[b])
            else:
                _fill(place, name, place.asked, t[done : done + asked])
        done += asked
    return out


def _fill(place: _Place, name: str, runs: Runs, out: Tensor) -> None:
    at = 0
    for first, stop in runs:
        place.block.read(place.file, name, first, out[at : at + stop - first])
        at += stop - first
    if at < len(out):
        out[at:] = 0


def _runs_by_row(table: Tensor, rows: int) -> list[list[tuple[int, int]]]:
    runs: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    for n, first, stop in table.tolist():
        runs[n].append((first, stop))
    return runs


class FeatureStore(_Features):
    """Reads the samples of a captured store, row by row, from its shards.

    on_damage: `stop` at the first shard that is missing or damaged, naming it; or `skip` the rows of such shards: every shard is read
    once at the start, `rows` are those left, `skipped` says which shards were left out and why, `skipped_rows` how many rows that is.
    A shard is checked, every byte of it, before its first row is given out. Raises ValueError when there is no store, when it was made
    from other rows, when shards are missing.
    """

    def __init__(
        self, where: str | Path, rows: Sequence[Row], *, on_damage: Literal["stop", "recapture", "skip"] = "stop",
        cache: Path | None = None, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.folder: Folder = open_folder(where, cache=cache, options=options)
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise ValueError(f"{self.folder.name} is no feature store; run `spectrain capture` first")
        check_rows(self.folder, manifest, rows)
        self.manifest, self.all_rows = manifest, rows
        self.folder.pin(str(sorted(manifest.items())))
        self._step = int(manifest["rows_per_shard"])
        self._shards: dict[int, _Opened] = {}
        self._files: dict[int, File] = {}  # the last ones used, newest at the end
        self.skipped: dict[str, str] = {}
        names = {first: shard_name(first) for first in range(0, len(rows), self._step)}
        there = self.folder.sizes()
        missing = [name for name in names.values() if name not in there]
        if missing and on_damage != "skip":
            raise ValueError(
                f"{self.folder.name} is incomplete ({len(missing)} of {len(names)} shards missing, first {missing[0]}); "
                "run the capture again, it goes on where it stopped"
            )
        self._numbers: Sequence[int] = range(len(rows))
        self.rows = rows
        if on_damage == "skip":
            self._leave_out(names, there)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The states side by side in a sample, as hs numbers."""
        return tuple(self.manifest["layer_ids"])

    @property
    def skipped_rows(self) -> int:
        return len(self.all_rows) - len(self.rows)

    def _leave_out(self, names: Mapping[int, str], there: Mapping[str, int]) -> None:
        numbers: list[int] = []
        for first, name in names.items():
            try:
                if name not in there:
                    raise Damaged(Path(name), "it is missing")
                self._opened(first)
            except Damaged as damage:
                self.skipped[name] = damage.reason
                continue
            numbers += range(first, min(first + self._step, len(self.all_rows)))
        if not numbers:
            found = f"no shard of {self.folder.name} can be read"
            raise ValueError(f"{found}; run the capture again with --set data.capture.on_damage=recapture")
        if self.skipped:
            self._numbers, self.rows = numbers, _Chosen(self.all_rows, numbers)

    def _places(self, numbers: Sequence[int], rows: Sequence[Row]) -> list[_Place]:
        places = []
        for i, row in zip((self._numbers[i] for i in numbers), rows, strict=True):
            opened, n = self._opened(i - i % self._step), i % self._step
            if opened.digests[n] != row.digest:
                raise Damaged(opened.shard.path, f"row {row.id} is not the one that was captured")
            places.append(_Place(opened.shard, self._file(i - n, opened.shard), opened.kept[n], opened.asked[n]))
        return places

    def _file(self, first: int, shard: Shard) -> File:
        file = self._files.pop(first, None) or shard.open()
        self._files[first] = file
        if len(self._files) > OPEN_FILES:
            self._files.pop(next(iter(self._files)))
        return file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def _opened(self, first: int) -> "_Opened":
        """The shard that begins with row `first`, checked at its first use."""
        if first not in self._shards:
            name = shard_name(first)
            rows = min(self._step, len(self.all_rows) - first)
            try:
                path = self.folder.fetch(name)
            except FileNotFoundError as error:
                raise Damaged(Path(name), "it is missing") from error
            try:
                self._shards[first] = _Opened.read(path, rows)
            except Damaged:
                self.folder.forget(name)
                raise
        return self._shards[first]


@dataclass(frozen=True)
class _Opened:
    """A shard that was found whole, with the runs and digests of its rows."""

    shard: Shard
    kept: list[list[tuple[int, int]]]
    asked: list[list[tuple[int, int]]]
    digests: list[bytes]

    @classmethod
    def read(cls, path: Path, rows: int) -> "_Opened":
        shard = open_shard(path)
        shard.verify()
        digests = [bytes(d) for d in shard.whole("digests").numpy()]
        if len(digests) != rows:
            raise Damaged(path, f"{len(digests)} rows instead of {rows}")
        kept, asked = (_runs_by_row(shard.whole(name), rows) for name in TABLES[:2])
        return cls(shard, kept, asked, digests)


class _Chosen(Sequence[Row]):
    """Some rows of a sequence, without reading them."""

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int]) -> None:
        self._rows, self._numbers = rows, numbers
        for name in ("lengths_N", "supervised_N", "domain_N", "domains"):
            if hasattr(rows, name):
                setattr(self, name, getattr(rows, name)[np.asarray(numbers)])
        if hasattr(rows, "domain_names"):
            self.domain_names = rows.domain_names

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: Any) -> Any:
        return [self._rows[j] for j in self._numbers[i]] if isinstance(i, slice) else self._rows[self._numbers[i]]


class OnlineFeatures(_Features):
    """Computes the samples when they are asked for, in the target's precision: a store that needs no disk and no capture.

    last_state: as for `capture`. Rows of a batch that stand side by side and share a beginning share its pass. Of a target that is spread
    over processes, all of them ask for a batch at the same time, each for its own.
    """

    def __init__(
        self, target: Target, rows: Sequence[Row], layer_ids: Sequence[int], config: CaptureConfig | None = None, *,
        last_state: LastState = "post_norm",
    ) -> None:  # fmt: skip
        self.target, self.rows, self.layer_ids = target, rows, tuple(layer_ids)
        self._config, self._last_state = config or CaptureConfig(), last_state

    def _places(self, numbers: Sequence[int], rows: Sequence[Row]) -> list[_Place]:
        place = self.target.placement
        with self.target.in_step():  # processes that make every pass together make those of all of them
            found = [self._computed([self.rows[i] for i in theirs]) for theirs in place.of_members(list(numbers))]
        tensors = found[place.member]
        runs = (_runs_by_row(tensors[name], len(rows)) for name in TABLES[:2])
        return [_Place(_Memory(tensors), None, kept, asked) for kept, asked in zip(*runs, strict=True)]

    def _computed(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        return shard_tensors(rows, quick(self.target), self.layer_ids, ("exact", "exact"), self._config.batch_tokens, self._last_state)
