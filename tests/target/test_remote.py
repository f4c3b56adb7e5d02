"""Stores behind a URL: written whole, read through a local copy, a lost connection waited for."""

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from spectrain.config import CaptureConfig
from spectrain.data.rows import Row
from spectrain.target import folders
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore
from spectrain.target.folders import LocalFolder, RemoteFolder, open_folder
from spectrain.target.model import Target

CONFIG = CaptureConfig(rows_per_shard=2)
ROWS = [Row(f"r{i}", "d", np.arange(6 + i, 18 + i), [0] * 4 + [1] * 8) for i in range(6)]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folders, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def equal(a: FeatureStore, b: FeatureStore) -> bool:
    x, y = a.batch(range(6)), b.batch(range(6))
    return torch.equal(x.states_BLF, y.states_BLF) and torch.equal(x.last_PW, y.last_PW) and torch.equal(x.ids_BL, y.ids_BL)


@pytest.fixture
def local(target: Target, tmp_path: Path) -> FeatureStore:
    capture(ROWS, target, (1, 2), tmp_path / "local", CONFIG)
    return FeatureStore(tmp_path / "local", ROWS)


def test_remote_store_is_another(local: FeatureStore, target: Target, memory: Any, tmp_path: Path) -> None:
    url, cache = "memory://bucket/store", tmp_path / "cache"
    assert capture(ROWS, target, (1, 2), url, CONFIG).shards == 3
    assert sorted(memory.ls("/bucket/store", detail=False)) == [
        f"/bucket/store/{name}" for name in ("manifest.json", *(f"rows-000000{i}.safetensors" for i in (0, 2, 4)))
    ]
    assert capture(ROWS, target, (1, 2), url, CONFIG).shards == 0
    memory.rm("/bucket/store/rows-0000002.safetensors")
    with pytest.raises(ValueError, match="memory://bucket/store is incomplete .1 of 3 shards missing"):
        FeatureStore(url, ROWS, cache=cache)
    assert capture(ROWS, target, (1, 2), url, CONFIG, rank=1, world=2).shards == 1
    store = FeatureStore(url, ROWS, cache=cache)
    assert not list(cache.rglob("rows-*")), "shards are fetched before they are asked for"
    assert equal(store, local) and len(list(cache.rglob("rows-*"))) == 3
    memory.store.clear()
    assert equal(store, local), "what was fetched is read again from the local copy"
    assert not [p for p in tmp_path.rglob("*.part-*")]


def test_local_copy_of_a_store_that_was_made_anew_is_read(target: Target, make_target, memory: Any, tmp_path: Path) -> None:
    url, cache = "memory://bucket/store", tmp_path / "cache"
    capture(ROWS, target, (1, 2), url, CONFIG)
    first = FeatureStore(url, ROWS, cache=cache).batch(range(6))
    memory.store.clear()
    capture(ROWS, make_target(seed=5), (1, 2), url, CONFIG)
    second = FeatureStore(url, ROWS, cache=cache).batch(range(6))
    assert not torch.equal(first.states_BLF, second.states_BLF)


@pytest.mark.parametrize("mend", ["stop", "recapture", "skip"])
def test_damaged_remote_shard_stays(mend: str, local: FeatureStore, target: Target, memory: Any, tmp_path: Path) -> None:
    url, path = "memory://bucket/store", "/bucket/store/rows-0000002.safetensors"
    capture(ROWS, target, (1, 2), url, CONFIG)
    whole = memory.cat(path)
    memory.pipe(path, whole[:-3] + b"xyz")
    config = CONFIG.model_copy(update={"on_damage": mend})
    done = capture(ROWS, target, (1, 2), url, config)
    assert done.shards == (mend == "recapture") and list(done.skipped) == (["rows-0000002.safetensors"] if mend == "skip" else [])
    if mend == "stop":
        with pytest.raises(ValueError, match="rows-0000002.safetensors is damaged .checksum"):
            FeatureStore(url, ROWS, cache=tmp_path / "c").batch([2])
        memory.pipe(path, whole)
        assert len(FeatureStore(url, ROWS, cache=tmp_path / "c").batch([2]).best_P) == 8, "the damaged copy was kept"
    elif mend == "recapture":
        assert memory.cat(path) == whole and equal(FeatureStore(url, ROWS), local)
        assert capture(ROWS, target, (1, 2), url, config).shards == 0
        memory.pipe(path, whole[:-3] + b"xyz")
        assert capture(ROWS, target, (1, 2), url, config).shards == 1, "an old copy on this machine was looked at instead"
    else:
        assert FeatureStore(url, ROWS, on_damage="skip").skipped_rows == 2


class Lossy:
    """A file system whose connection is lost for the first `losses` calls of each kind."""

    def __init__(self, fs: Any, losses: int) -> None:
        self._fs, self._losses, self.calls = fs, losses, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.calls[name] <= self._losses:
                raise ConnectionResetError(f"lost in {name}")
            return getattr(self._fs, name)(*args, **kwargs)

        return call if callable(getattr(self._fs, name)) else getattr(self._fs, name)


@pytest.mark.parametrize("losses", [2, 100])
def test_lost_connection_ends_the_run_at_once_or_never(losses: int, memory: Any, tmp_path: Path) -> None:
    folder = open_folder("memory://bucket/store", cache=tmp_path / "cache")
    assert isinstance(folder, RemoteFolder)
    folder.fs = Lossy(memory, losses)
    if losses < folders.TRIES:
        folder.put("a", lambda path: path.write_bytes(b"content") and None)
        assert folder.exists("a") and folder.sizes() == {"a": 7} and folder.text("a") == "content"
        assert folder.fetch("a").read_bytes() == b"content" and min(folder.fs.calls[name] for name in ("put_file", "get_file", "find")) == 3
        with pytest.raises(FileNotFoundError):
            folder.fetch("b")
        assert folder.fs.calls["get_file"] == 4, "a file that is not there is asked for again"
        return
    lost = f"memory://bucket/store.*: no answer after {folders.TRIES} tries .*ConnectionReset.*goes on"
    for action in (lambda: folder.put("a", lambda path: path.write_bytes(b"x") and None), lambda: folder.fetch("a"), folder.sizes):
        with pytest.raises(ConnectionError, match=lost):
            action()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EINVAL])
def test_full_disk_is_taken_for_a_lost_connection(number: int, memory: Any, tmp_path: Path) -> None:
    """The local copy of a remote file needs room on this machine, and a bucket a valid name: no use in waiting for the server."""
    folder = open_folder("memory://bucket/store", cache=tmp_path / "cache")
    calls = []

    def full(*paths: str) -> None:
        calls.append(paths)
        raise OSError(number, os.strerror(number))

    memory.get_file, original = full, memory.get_file
    try:
        with pytest.raises(OSError) as error:
            folder.fetch("a")
    finally:
        memory.get_file = original
    assert error.value.errno == number and len(calls) == 1


def test_missing_package_is_a_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match="gs://bucket/x needs another package: pip install gcsfs"):
        open_folder("gs://bucket/x")
    with pytest.raises(ValueError, match="nosuch://x is no place to keep a store"):
        open_folder("nosuch://x")


def test_paths_are_taken_for_urls(tmp_path: Path) -> None:
    for where in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        folder = open_folder(where)
        assert isinstance(folder, LocalFolder) and folder.root == tmp_path


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, str]]:
    """A server that speaks S3 on this machine, and a bucket in it."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{key}", "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # ours are tested
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield server, port
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_server_that_is_away_ends_the_run(bucket: Any, local: FeatureStore, target: Target, tmp_path: Path, monkeypatch: Any) -> None:
    """The real client against a real server, which is stopped before the second shard and comes back at its port."""
    server, port = bucket
    monkeypatch.setattr(folders, "FIRST_WAIT", 0.2)
    options = {"config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 5}}
    original, sleep, waits = folders.RemoteFolder.put, time.sleep, list[float]()
    monkeypatch.setattr(folders.time, "sleep", lambda seconds: (waits.append(seconds), sleep(seconds))[1])

    def restart() -> None:
        server._port = port
        server.start()

    def put(self: RemoteFolder, name: str, write: Any) -> None:
        if name.startswith("rows-0000002"):
            server.stop()
            threading.Timer(0.8, restart).start()
        original(self, name, write)

    monkeypatch.setattr(folders.RemoteFolder, "put", put)
    assert capture(ROWS, target, (1, 2), "s3://bucket/some/store", CONFIG, options=options).shards == 3
    assert 0.2 in waits and 0.4 in waits, "the connection was never lost"
    store = FeatureStore("s3://bucket/some/store", ROWS, cache=tmp_path / "cache", options=options)
    assert equal(store, local)
