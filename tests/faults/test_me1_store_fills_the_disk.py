"""ME1: stored features fill the disk or the memory of the machine."""

import multiprocessing
import os
import re
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectrain.config import CaptureConfig
from spectrain.data.rows import Row
from spectrain.target import capture as module
from spectrain.target.capture import capture, estimate
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the children do nothing with the parent's threads

WIDE = {"width": 4096, "config": CaptureConfig(states="bf16", last="bf16")}


@pytest.mark.parametrize(("num_states", "last_state"), [(4, "none"), (3, "post_norm")])
def test_size_is_not_announced(num_states: int, last_state: Any) -> None:
    """4 states of width 4096 in bfloat16: 32,768 bytes a token, 64 MiB for a row of 2048 tokens, 6.1 TiB for 100,000 of them."""
    lengths_N = np.full(100_000, 2048)
    told = estimate(lengths_N, lengths_N, num_states=num_states, last_state=last_state, **WIDE)
    assert told.token == 32_768 and told.longest == 64 * 2**20 and told.total == pytest.approx(6.71e12, rel=1e-3)
    assert re.search("32,768 bytes a token, 64 MiB for the longest row, 6.1 TiB in all", told.text())
    eight = estimate(lengths_N, lengths_N, num_states=num_states, last_state=last_state, width=4096, config=CaptureConfig())
    assert eight.total < 0.64 * told.total


class Same(Sequence[Row]):
    """The same 50 rows again and again, with the hashes that a row store has at hand."""

    rows_sha256 = "of these rows"

    def __init__(self, count: int) -> None:
        self.count, self.rows = count, [Row(f"r{n}", "d", np.arange(6, 30), [0] * 18 + [1] * 6) for n in range(50)]
        self.lengths_N, self.supervised_N = np.full(count, 24), np.full(count, 6)

    def digest(self, i: int) -> bytes:
        return bytes(16)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Any:
        if i >= self.count:
            raise IndexError(i)
        return self.rows[i % 50]


def test_run_starts_without_the_room_for_its_end(target: Target, tmp_path: Path, monkeypatch) -> None:
    """Stops before anything is computed when less is free than the store takes, unless told otherwise."""
    rows = Same(40)
    room = namedtuple("room", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room(0, 0, 1000))
    computed: list[int] = []
    original = module.shard_tensors
    monkeypatch.setattr(module, "shard_tensors", lambda part, *args: (computed.append(len(part)), original(part, *args))[1])
    with pytest.raises(ValueError, match="the store needs .* KiB, .* has 1000 bytes left; free some, .*--ignore-space"):
        capture(rows, target, (1, 2), tmp_path / "s")
    assert not computed and not (tmp_path / "s").exists()
    assert capture(rows, target, (1, 2), tmp_path / "s", CaptureConfig(rows_per_shard=20), check_space=False).shards == 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room(0, 0, 0))
    assert capture(rows, target, (1, 2), tmp_path / "s", CaptureConfig(rows_per_shard=20)).shards == 0, "what is there needs no room"


def resident(folder: Path, rows: Sequence[Row], send: Any) -> None:
    store = FeatureStore(folder, rows)
    for i in range(0, len(rows), 8):
        store.batch(range(i, min(i + 8, len(rows))))
    with open("/proc/self/statm") as file:
        send.send(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_grows_with_the_rows(make_target, tmp_path: Path) -> None:
    """Resident memory of a reader that has been through 10,000 rows stays within 10 % of that for 1,000. A new interpreter reads: a fork
    would have all that the tests before it left in memory."""
    target = make_target(hidden_size=64)
    used = {}
    for count in (1_000, 10_000):
        rows, out = Same(count), tmp_path / f"{count}"
        capture(Same(50), target, (1, 2, 3), tmp_path / "few", CaptureConfig(states="bf16", rows_per_shard=50))
        _repeated(tmp_path / "few", out, rows, target)
        receive, send = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(target=resident, args=(out, rows, send))
        process.start()
        used[count] = receive.recv()
        process.join()
    size = sum(p.stat().st_size for p in (tmp_path / "10000").iterdir())
    assert size > 0.1 * used[1_000], "too small a store to tell"
    assert used[10_000] < 1.1 * used[1_000]


def _repeated(few: Path, out: Path, rows: Sequence[Row], target: Target) -> None:
    """A store of many rows whose shards are all like the one of `few`: the capture itself is not what is measured."""
    out.mkdir()
    for first in range(0, len(rows), 50):
        os.link(few / module.shard_name(0), out / module.shard_name(first))
    from spectrain.target.folders import LocalFolder
    from spectrain.target.manifest import new_manifest, write_manifest

    config = CaptureConfig(states="bf16", rows_per_shard=50)
    write_manifest(LocalFolder(out), new_manifest(rows, target, (1, 2, 3), config, "post_norm", {}))


def test_killed_run_leaves_a_row_that_loads(target: Target, tmp_path: Path, monkeypatch) -> None:
    """kill -9 in the middle of a file: nothing of it is a shard, and the next run makes exactly what is missing."""
    rows, out, config = Same(8), tmp_path / "s", CaptureConfig(rows_per_shard=2)
    original = module.write_shard

    def dies(path: Path, tensors: Any) -> None:
        if "0000004" in path.name:
            path.write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, tensors)

    def work() -> None:
        module.write_shard = dies
        capture(rows, target, (1,), out, config)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    parts = [p for p in out.iterdir() if ".part-" in p.name]
    assert len(parts) == 1 and sorted(p.name for p in out.glob("rows-*.safetensors")) == [f"rows-000000{i}.safetensors" for i in (0, 2)]
    with pytest.raises(ValueError, match="2 of 4 shards missing"):
        FeatureStore(out, rows)
    os.utime(parts[0], (time.time() - 2 * 24 * 3600,) * 2)
    assert capture(rows, target, (1,), out, config).shards == 2
    assert not parts[0].exists() and len(FeatureStore(out, rows).batch(range(8)).best_P) == 48
