"""Capturing: what is written, resumed, refused, announced; several processes; a full disk."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectrain.config import CaptureConfig
from spectrain.data.rows import Row
from spectrain.target import capture as module
from spectrain.target.capture import capture, estimate, exact_bytes, row_sizes, shard_order
from spectrain.target.features import FeatureStore
from spectrain.target.folders import LocalFolder
from spectrain.target.model import Target

CONFIG = CaptureConfig(rows_per_shard=2, batch_tokens=32)


def make_rows(n: int = 9, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 20, n)
    return [Row(f"r{i}", "d", rng.integers(6, 100, L), [0] * (L // 2) + [1] * (L - L // 2)) for i, L in enumerate(lengths)]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the rows that are computed from here on."""
    seen: list[str] = []
    original = module.shard_tensors

    def spy(rows: list[Row], *args: Any) -> Any:
        seen.extend(row.id for row in rows)
        return original(rows, *args)

    monkeypatch.setattr(module, "shard_tensors", spy)
    return seen


def test_stopped_capture_starts_over(target: Target, tmp_path: Path, monkeypatch) -> None:
    rows, out = make_rows(), tmp_path / "s"
    done = capture(rows, target, (1,), out, CONFIG)
    before = files(out)
    assert len(before) == 6 and done.shards == 5 and done.tokens == sum(map(len, rows))
    seen = watch(monkeypatch)
    assert capture(rows, target, (1,), out, CONFIG).shards == 0 and seen == []
    (out / "rows-0000002.safetensors").unlink()
    (out / "rows-0000004.safetensors.part-elsewhere-1").write_bytes(b"torn")
    os.utime(out / "rows-0000004.safetensors.part-elsewhere-1", (0, 0))
    with pytest.raises(ValueError, match=r"incomplete .1 of 5 shards missing, first rows-0000002.*run the capture again"):
        FeatureStore(out, rows)
    capture(rows, target, (1,), out, CONFIG)
    assert seen == ["r2", "r3"] and files(out) == before


def test_interrupted_shard_is_readable(target: Target, tmp_path: Path, monkeypatch) -> None:
    """ME1: a killed run leaves no row that loads."""
    written: list[Path] = []

    def dies(path: Path, tensors: object) -> None:
        path.write_bytes(b"half of a shard")
        written.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        capture(make_rows(), target, (1,), tmp_path / "s", CONFIG)
    assert written and not list((tmp_path / "s").glob("rows-*"))


def test_file_that_another_process_finishes_stops_this_one(tmp_path: Path, monkeypatch) -> None:
    """Between the look at the folder and that at the file, an unfinished file gets its name."""
    part = tmp_path / "rows-0000000.safetensors.part-elsewhere-1"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([part]))
    LocalFolder(tmp_path).sweep()


def test_full_disk_leaves_half_a_file_or_stops_late(target: Target, tmp_path: Path, monkeypatch) -> None:
    """The system says that there is no room in the middle of the third file; the same call goes on with that one."""
    rows, out, original = make_rows(), tmp_path / "s", module.write_shard
    count = iter(range(100))

    def full(path: Path, tensors: Any) -> None:
        if next(count) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, tensors)

    monkeypatch.setattr(module, "write_shard", full)
    seen = watch(monkeypatch)
    with pytest.raises(OSError, match="No space left on device.*rows-0000004.safetensors") as error:
        capture(rows, target, (1,), out, CONFIG)
    assert error.value.errno == errno.ENOSPC and len(seen) <= 8, "it went on computing"
    assert sorted(files(out)) == ["manifest.json", "rows-0000000.safetensors", "rows-0000002.safetensors"]
    capture(rows, target, (1,), out, CONFIG)
    assert len(FeatureStore(out, rows)) == 9


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs a device that is always full")
def test_full_device_is_another_error(tmp_path: Path) -> None:
    import torch

    from spectrain.target.shards import write_shard

    with pytest.raises(OSError) as error:
        write_shard(Path("/dev/full"), {"x": torch.zeros(4000)})
    assert error.value.errno == errno.ENOSPC


def test_row_longer_than_the_target_takes_is_captured(make_target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a row has 17 tokens, tiny takes 10"):
        capture(make_rows(), make_target(max_position_embeddings=10), (1,), tmp_path / "s")


def test_folder_of_something_else_is_overwritten(target: Target, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="holds files but no manifest"):
        capture(make_rows(), target, (1,), tmp_path)


def test_exact_size_is_not_what_is_written(target: Target, tmp_path: Path) -> None:
    """The tensors of all shards, shared beginnings once; the quick estimate is never below."""
    turns = [Row(f"c#{j}", "d", [7] * 12 + [8 + j] * 6, [0] * 12 + [1] * 6, group="c") for j in range(4)]
    rows = [*turns, *make_rows()]
    for config in (CONFIG, CaptureConfig(states="bf16", last="int8", rows_per_shard=5, batch_tokens=64)):
        out = tmp_path / config.states
        capture(rows, target, (1, 2), out, config)
        kind: dict[str, Any] = {"width": 32, "num_states": 2, "config": config, "last_state": "post_norm"}
        tables = 0
        data = 0
        for path in out.glob("rows-*"):
            header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
            for name, entry in header.items():
                size = entry["data_offsets"][1] - entry["data_offsets"][0] if name != "__metadata__" else 0
                data, tables = (data, tables + size) if name in ("kept_runs", "asked_runs", "digests") else (data + size, tables)
        assert data == exact_bytes(rows, **kind) < estimate(*row_sizes(rows), **kind).total
        assert tables < 60 * len(rows)


def test_room_is_asked_for_what_rows_share(target: Target, tmp_path: Path, monkeypatch) -> None:
    turns = [Row(f"c#{j}", "d", [7] * 60 + [8 + j] * 6, [0] * 60 + [1] * 6, group="c") for j in range(9)]
    config = CaptureConfig(rows_per_shard=16)
    needed = exact_bytes(turns, width=32, num_states=1, config=config, last_state="post_norm")
    room = namedtuple("room", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room(0, 0, needed - 1))
    with pytest.raises(ValueError, match="the store needs .* has .* left; .*--ignore-space"):
        capture(turns, target, (1,), tmp_path / "s", config)
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room(0, 0, needed))
    capture(turns, target, (1,), tmp_path / "s", config)


@pytest.mark.parametrize("mend", ["stop", "recapture", "skip"])
@pytest.mark.parametrize("damage", ["bit", "cut"])
def test_damaged_shard_stays(mend: str, damage: str, target: Target, tmp_path: Path, monkeypatch) -> None:
    """Named; made again or left out as told."""
    rows, out = make_rows(), tmp_path / "s"
    capture(rows, target, (1,), out, CONFIG)
    path = out / "rows-0000004.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 4]) + whole[-39:] if damage == "bit" else whole[:-5])
    seen = watch(monkeypatch)
    config = CONFIG.model_copy(update={"on_damage": mend})
    if mend == "stop":
        with pytest.raises(ValueError, match="rows-0000004.safetensors is damaged .*data.capture.on_damage=recapture"):
            capture(rows, target, (1,), out, config)
            FeatureStore(out, rows).batch(range(9))
        return
    done = capture(rows, target, (1,), out, config)
    if mend == "recapture":
        assert seen == ["r4", "r5"] and path.read_bytes() == whole and not done.skipped
    else:
        assert seen == [] and list(done.skipped) == [path.name]
        store = FeatureStore(out, rows, on_damage="skip")
        assert len(store) == 7 and store.skipped_rows == 2 and list(store.skipped) == [path.name]
        assert [row.id for row in store.rows] == [f"r{i}" for i in (0, 1, 2, 3, 6, 7, 8)]
        assert store.batch([4, 5]).ids_BL[0, : len(rows[6])].tolist() == rows[6].ids_L.tolist()


def test_shards_are_done_twice_or_never() -> None:
    for count in range(8):
        for world in range(1, 5):
            for rank in range(world):
                order = list(shard_order(count, rank, world))
                assert sorted(order) == list(range(count)), "each process finds every shard"
                own = [n for n in order if n % world == rank]
                assert order[: len(own)] == sorted(own)
    assert list(shard_order(9, 1, 3)) == [1, 4, 7, 8, 5, 2, 6, 3, 0]


def start(work: Callable[[], object]) -> Any:
    """A process of its own, which shares nothing that is written later."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the children do nothing with the parent's threads
def test_dead_process_takes_its_shards_with_it(target: Target, tmp_path: Path, monkeypatch) -> None:
    """Three processes; one is killed in its second shard: the others end with a whole store, equal to that of one process."""
    rows = make_rows(24)
    capture(rows, target, (1, 2), tmp_path / "one", CONFIG)
    out, original = tmp_path / "three", module.shard_tensors

    def work(rank: int) -> None:
        done: list[int] = []

        def slowly(part: list[Row], *args: Any) -> Any:
            done.append(1)
            time.sleep(30 if rank == 1 and len(done) == 2 else 0.02)
            return original(part, *args)

        module.shard_tensors = slowly  # type: ignore[assignment]
        capture(rows, target, (1, 2), out, CONFIG, rank=rank, world=3)

    workers = [start(lambda rank=rank: work(rank)) for rank in (1, 0, 2)]
    deadline = time.monotonic() + 30
    while not (out / "rows-0000002.safetensors").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(workers[0].pid, signal.SIGKILL)
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0, 0]
    assert {k: v for k, v in files(out).items() if ".part-" not in k} == files(tmp_path / "one")


def test_next_run_needs_as_many_processes(target: Target, tmp_path: Path, monkeypatch) -> None:
    rows, out = make_rows(), tmp_path / "s"

    def dies(*args: Any) -> Any:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        seen = watch(patch)
        original, count = module.shard_tensors, iter(range(9))
        patch.setattr(module, "shard_tensors", lambda *args: original(*args) if next(count) < 2 else dies())
        with pytest.raises(MemoryError):
            capture(rows, target, (1,), out, CONFIG, rank=1, world=2)
    assert seen == ["r2", "r3", "r6", "r7"]
    seen = watch(monkeypatch)
    capture(rows, target, (1,), out, CONFIG, rank=2, world=3)
    assert sorted(seen) == ["r0", "r1", "r4", "r5", "r8"]
    assert len(FeatureStore(out, rows)) == 9


def test_manifest_does_not_say_how_it_was_made(target: Target, tmp_path: Path) -> None:
    rows = make_rows()
    capture(rows, replace(target, revision="abc"), (1, 2), tmp_path / "s", CONFIG, prepared={"max_length": 20})
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert manifest.items() >= target.fingerprints.items()
    said = {
        "layer_ids": [1, 2], "last_state": "post_norm", "states": "int8", "last": "bf16", "target": "tiny", "target_revision": "abc",
        "target_dtype": "float32", "rows": 9, "rows_per_shard": 2, "prepared": {"max_length": 20}, "format": 3,
    }  # fmt: skip
    assert manifest.items() >= said.items()
