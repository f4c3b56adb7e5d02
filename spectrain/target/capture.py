"""Capture: the hidden states of the frozen target, computed once and written to a store.

A store is a folder of shards of `rows_per_shard` rows each and `manifest.json`, which says what they were made from. A capture that was
stopped goes on where it was, on any number of processes: process r of w makes the shards r, r + w, ..., then those that the others have
not made, from the back; nobody waits for anybody. Processes that hold one copy of the target together make the same shards, and the
first of them writes. A store made from other rows, another target or other layers is refused.

Legend: K kept tokens of a shard, P its supervised tokens, S states, W target width, F = S * W, N rows.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from spectrain.config import CaptureConfig
from spectrain.data.codes import bytes_a_token
from spectrain.data.rows import Row
from spectrain.target.folders import LocalFolder, RemoteFolder, open_folder
from spectrain.target.manifest import check_manifest, new_manifest, read_manifest, write_manifest
from spectrain.target.model import Target
from spectrain.target.passes import quick
from spectrain.target.shards import Damaged, open_shard, write_shard
from spectrain.target.states import LastState, Numbers, no_states, passes, plan_rows, run_lines

ANSWER_BYTES = 8  # best id and log-sum-exp of a supervised token


@dataclass(frozen=True)
class Estimate:
    """Bytes of a store: of a token with all that is kept of it, of the longest row if all of it is, and in all at most."""

    token: int
    longest: int
    total: int
    rows: int
    tokens: int
    supervised: int

    def text(self) -> str:
        size = f"{self.token:,} bytes a token, {readable_bytes(self.longest)} for the longest row, {readable_bytes(self.total)} in all"
        return f"{self.rows:,} rows, {self.tokens:,} tokens, {self.supervised:,} supervised: at most {size}"


def readable_bytes(count: float) -> str:
    """In the largest binary unit that leaves a figure above 1."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit in ("bytes", "MiB", "KiB") else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def estimate(
    lengths_N: Numbers, supervised_N: Numbers, *, width: int, num_states: int, config: CaptureConfig, last_state: LastState
) -> Estimate:
    """Size of a store before it is made, from tokens and supervised tokens a row. Beginnings that rows share are not yet taken off."""
    fused = bytes_a_token(width=width, states=num_states, kind=config.states)
    last = 0 if last_state == "none" else bytes_a_token(width=width, states=1, kind=config.last)
    answers = (last + ANSWER_BYTES if last else 0) * int(supervised_N.sum())
    tokens, longest = int(lengths_N.sum()), int(lengths_N.max(initial=0))
    return Estimate(
        token=fused + last, longest=longest * (fused + last), total=fused * tokens + answers, rows=len(lengths_N), tokens=tokens,
        supervised=int(supervised_N.sum()),
    )  # fmt: skip


def exact_bytes(rows: Sequence[Row], *, width: int, num_states: int, config: CaptureConfig, last_state: LastState) -> int:
    """Bytes of the tensors of a store, shared beginnings once; reads every row."""
    fused = bytes_a_token(width=width, states=num_states, kind=config.states)
    last = bytes_a_token(width=width, states=1, kind=config.last) + ANSWER_BYTES
    total = 0
    for first in range(0, len(rows), config.rows_per_shard):
        part = _part(rows, first, config.rows_per_shard)
        plan = plan_rows(part, longest=config.batch_tokens, last_state=last_state)
        total += fused * int(plan.kept_T.sum()) + last * int(plan.asked_T.sum())
    return total


@dataclass
class Captured:
    """What one process did: shards and tokens written, seconds, and shards left out because they are damaged, with the reason."""

    shards: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: dict[str, str] = field(default_factory=dict)


def capture(
    rows: Sequence[Row], target: Target, layer_ids: Sequence[int], where: str | Path, config: CaptureConfig | None = None, *,
    last_state: LastState = "post_norm", rank: int = 0, world: int = 1, prepared: Mapping[str, Any] | None = None,
    check_space: bool = True, options: Mapping[str, Any] | None = None,
) -> Captured:  # fmt: skip
    """Write the store of `rows` to a folder or URL, or what is missing of it.

    last_state: of supervised tokens, what the output layer reads, or none where no loss needs it. rank, world: this process and how many
    there are; a target that is spread over them knows that itself, and all of them must call. prepared: settings that made the rows, to
    name what changed. options: of the fsspec file system.
    Raises ValueError when the place holds another store (naming the field that differs), when the disk has too little room, when a row
    is longer than the target takes, or for a damaged shard unless config.on_damage says otherwise; OSError when the disk fills up
    on the way: what is there is whole, and the same call goes on from it.
    """
    config, place = config or CaptureConfig(), target.placement
    if place.sharded:
        rank, world = place.replica, place.replicas
    work = _Work(rows, quick(target), tuple(layer_ids), config, last_state)
    lengths_N, supervised_N = row_sizes(rows)
    longest = int(lengths_N.max(initial=0))
    if longest > target.max_length:
        raise ValueError(f"a row has {longest} tokens, {target.name} takes {target.max_length}; prepare the rows with that max_length")
    folder = open_folder(where, options=options)
    wanted = new_manifest(rows, target, layer_ids, config, last_state, prepared or {})
    sizes = folder.sizes()  # before the manifest is looked for, which another process may be writing
    found = read_manifest(folder)
    if found is not None:
        check_manifest(folder, found, wanted)
    elif sizes:
        raise ValueError(f"{folder.name} holds files but no manifest.json; give an empty folder")
    if check_space and folder.free is not None:
        work.check_space(folder.name, folder.free + sum(sizes.values()), lengths_N, supervised_N)
    if found is None and place.leads:
        write_manifest(folder, wanted)
    if isinstance(folder, LocalFolder):
        folder.sweep()
    with target.in_step():
        return work.write(folder, sizes, lengths_N, rank, world)


def row_sizes(rows: Sequence[Row]) -> tuple[Numbers, Numbers]:
    """Tokens and supervised tokens of every row, from the index of a row store where there is one."""
    if hasattr(rows, "lengths_N") and hasattr(rows, "supervised_N"):
        return np.asarray(rows.lengths_N, np.int64), np.asarray(rows.supervised_N, np.int64)
    return np.array([len(row) for row in rows], np.int64), np.array([row.supervised for row in rows], np.int64)


def shard_name(first: int) -> str:
    """Of the shard that begins with row `first`."""
    return f"rows-{first:07d}.safetensors"


def _part(rows: Sequence[Row], first: int, count: int) -> list[Row]:
    return [rows[i] for i in range(first, min(first + count, len(rows)))]


def shard_order(count: int, rank: int, world: int) -> Iterator[int]:
    """Every shard once: this process's own in order, then those of the next processes, each from its back."""
    yield from range(rank, count, world)
    for other in range(rank + 1, rank + world):
        yield from reversed(range(other % world, count, world))


@dataclass(frozen=True)
class _Work:
    """A capture's inputs."""

    rows: Sequence[Row]
    target: Target
    layer_ids: tuple[int, ...]
    config: CaptureConfig
    last_state: LastState

    def check_space(self, name: str, room: int, lengths_N: Numbers, supervised_N: Numbers) -> None:
        """ValueError when the store is larger than `room`; rows are read for the exact size only where the quick one is too large."""
        kind: dict[str, Any] = {
            "width": self.target.embedding_VW.shape[1], "num_states": len(self.layer_ids), "config": self.config,
            "last_state": self.last_state,
        }  # fmt: skip
        if estimate(lengths_N, supervised_N, **kind).total <= room:
            return
        needed = exact_bytes(self.rows, **kind)
        if needed > room:
            told = "free some, take fewer rows, or begin all the same: spectrain capture --ignore-space"
            raise ValueError(f"the store needs {readable_bytes(needed)}, {name} has {readable_bytes(room)} left; {told}")

    def write(self, folder: LocalFolder | RemoteFolder, sizes: Mapping[str, int], lengths_N: Numbers, rank: int, world: int) -> Captured:
        """Make the missing shards; files are written by a second thread while the target computes the next states."""
        started, done, place = time.monotonic(), Captured(), self.target.placement
        step = self.config.rows_per_shard
        tokens = [int(lengths_N[first : first + step].sum()) for first in range(0, len(lengths_N), step)]
        pending: Future[None] | None = None
        seen: set[int] = set()
        told = None if rank == 0 and place.leads else True  # disabled: None, where there is no terminal
        with (
            tqdm(total=sum(tokens), desc="capture", unit="tok", unit_scale=True, disable=told) as bar,
            ThreadPoolExecutor(1) as writer,
        ):
            for n in shard_order(len(tokens), rank, world):
                name = shard_name(n * step)
                mine = n % world == rank
                if not place.agreed(self._missing(folder, name, sizes if mine else None, done, thorough=mine)):
                    bar.update(0 if n in seen else tokens[n])
                    continue
                tensors = self.make_shard(n * step)
                if pending:
                    pending.result()
                seen.add(n)
                bar.update(tokens[n])
                if place.leads:
                    pending = writer.submit(folder.put, name, partial(write_shard, tensors=tensors))
                    done.shards, done.tokens = done.shards + 1, done.tokens + tokens[n]
            if pending:
                pending.result()
        done.seconds = time.monotonic() - started
        return done

    def _missing(
        self, folder: LocalFolder | RemoteFolder, name: str, sizes: Mapping[str, int] | None, done: Captured, *, thorough: bool
    ) -> bool:
        """Whether a shard is to be made. `thorough`: every byte of it is read, where damage would be mended or left out."""
        if not (name in sizes if sizes is not None else folder.exists(name)):
            return True
        mend = self.config.on_damage
        if isinstance(folder, RemoteFolder) and not (thorough and mend != "stop"):
            return False  # the reader looks closely; here it would have to be downloaded
        folder.forget(name)  # a copy on this machine may be whole where the file itself is not
        try:
            shard = open_shard(folder.fetch(name))
            if thorough and mend != "stop":
                shard.verify()
        except Damaged as damage:
            if mend == "stop":
                raise
            if mend == "skip":
                done.skipped[name] = damage.reason
            return mend == "recapture"
        finally:
            folder.forget(name)
        return False

    def make_shard(self, first: int) -> dict[str, Tensor]:
        """The tensors of the shard that begins with row `first`."""
        rows = _part(self.rows, first, self.config.rows_per_shard)
        kinds = (self.config.states, self.config.last)
        return shard_tensors(rows, self.target, self.layer_ids, kinds, self.config.batch_tokens, self.last_state)


def shard_tensors(
    rows: Sequence[Row], target: Target, layer_ids: Sequence[int], kinds: tuple[str, str], batch_tokens: int, last_state: LastState
) -> dict[str, Tensor]:
    """States of some rows as a shard holds them: `states.*` [K, ...], `last.*`, `best` and `lse` [P, ...]; of which runs of them each
    row is made, `kept_runs` and `asked_runs` (row, first, stop); and the rows' digests. kinds: of states and last state, for `encode`."""
    plan = plan_rows(rows, longest=batch_tokens, last_state=last_state)
    number_T = {"kept": np.cumsum(plan.kept_T) - 1, "asked": np.cumsum(plan.asked_T) - 1}
    totals = {"kept": int(plan.kept_T.sum()), "asked": int(plan.asked_T.sum())}
    nothing = no_states(target, num_states=len(layer_ids), kinds=kinds).tensors
    part_of = {name: "kept" if name.startswith("states.") else "asked" for name in nothing}
    whole = {name: torch.empty(totals[part_of[name]], *t.shape[1:], dtype=t.dtype) for name, t in nothing.items()}
    for lines in passes(plan, batch_tokens):
        found = run_lines(plan, lines, target, layer_ids, kinds=kinds).tensors
        tokens = np.concatenate([np.arange(line.first, line.stop) for line in lines])
        at = {"kept": number_T["kept"][tokens[plan.kept_T[tokens]]], "asked": number_T["asked"][tokens[plan.asked_T[tokens]]]}
        for name, t in found.items():
            whole[name][torch.from_numpy(at[part_of[name]])] = t
    return {
        **whole, "kept_runs": _table(plan.kept_runs), "asked_runs": _table(plan.asked_runs),
        "digests": torch.tensor([list(row.digest) for row in rows], dtype=torch.uint8).reshape(-1, 16),
    }  # fmt: skip


def _table(runs: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    rows = [(n, first, stop) for n, row in enumerate(runs) for first, stop in row]
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 3)
