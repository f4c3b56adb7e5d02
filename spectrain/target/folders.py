"""Where a store's files are: a local folder, or any place that fsspec knows (s3://, gs://, memory://...), read through a local copy.

A file is there whole or not at all: written under another name and renamed, or made here and uploaded in one go.
"""

import errno
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "sftp": "paramiko"}
TRIES = 7  # with waits of 0.5, 1, 2 ... seconds between them: about half a minute
FIRST_WAIT = 0.5  # seconds
FORGOTTEN = 24 * 3600  # seconds after which an unfinished file belongs to nobody any more
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, ImportError)  # not worth a retry
# Nor these: no room on this machine, where copies of remote files are; a name that the place cannot have (s3fs).
NO_USE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINVAL)

T = TypeVar("T")


class Folder(Protocol):
    """Files by name."""

    @property
    def name(self) -> str: ...

    @property
    def free(self) -> int | None:
        """Bytes left; None: unknown."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of every finished file."""
        ...

    def exists(self, name: str) -> bool: ...

    def put(self, name: str, write: Callable[[Path], None]) -> None:
        """Let `write` make a file and store it whole under `name`."""
        ...

    def fetch(self, name: str) -> Path:
        """A local path of the file; FileNotFoundError when there is none."""
        ...

    def text(self, name: str) -> str | None:
        """Content of a small file as it is now; None when there is none."""
        ...

    def pin(self, identity: str) -> None:
        """Keep the local copies of remote files by what the store is made from: another store at the same place has its own."""
        ...

    def forget(self, name: str) -> None:
        """Drop the local copy of a remote file, so that the next `fetch` asks again."""
        ...


class LocalFolder:
    """A folder of this machine, made at the first `put`."""

    def __init__(self, root: Path) -> None:
        self.root, self.name = root, str(root)

    @property
    def free(self) -> int | None:
        above = next(p for p in (self.root, *self.root.resolve().parents) if p.exists())
        return shutil.disk_usage(above).free

    def sizes(self) -> dict[str, int]:
        files = self.root.iterdir() if self.root.is_dir() else ()
        return {p.name: p.stat().st_size for p in files if ".part-" not in p.name}

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def put(self, name: str, write: Callable[[Path], None]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        part = self.root / f"{name}.part-{socket.gethostname()}-{os.getpid()}"
        try:
            write(part)
            os.replace(part, self.root / name)
        except OSError as error:
            error.filename = error.filename or str(self.root / name)
            raise
        finally:
            part.unlink(missing_ok=True)

    def fetch(self, name: str) -> Path:
        if not (self.root / name).exists():
            raise FileNotFoundError(f"no {name} in {self.name}")
        return self.root / name

    def text(self, name: str) -> str | None:
        return (self.root / name).read_text(encoding="utf-8") if (self.root / name).is_file() else None

    def pin(self, identity: str) -> None: ...

    def forget(self, name: str) -> None: ...

    def sweep(self) -> None:
        """Remove what killed runs left unfinished long ago."""
        for part in self.root.glob("*.part-*"):
            with suppress(FileNotFoundError):  # another process has just finished it
                if time.time() - part.stat().st_mtime > FORGOTTEN:
                    part.unlink()


class RemoteFolder:
    """A folder behind fsspec; files that are read are kept in `cache`."""

    free = None

    def __init__(self, url: str, cache: Path | None, options: Mapping[str, Any]) -> None:
        import fsspec

        self.name = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.name, **options)
        except ImportError as error:
            package = PACKAGES.get(url.partition("://")[0])
            raise ValueError(f"{url} needs another package: " + (f"pip install {package}" if package else str(error))) from error
        except ValueError as error:
            raise ValueError(f"{url} is no place to keep a store: {error}") from error
        self.above = cache or Path(tempfile.gettempdir()) / f"spectrain-{os.getuid()}"
        self.pin("")

    def sizes(self) -> dict[str, int]:
        def listed() -> dict[str, int]:
            self.fs.invalidate_cache()
            found = self.fs.find(self.root, maxdepth=1, detail=True)
            return {path.rpartition("/")[2]: entry["size"] for path, entry in found.items()}

        return _retried(listed, self.name)

    def exists(self, name: str) -> bool:
        def asked() -> bool:
            self.fs.invalidate_cache()
            return bool(self.fs.exists(f"{self.root}/{name}"))

        return _retried(asked, f"{self.name}/{name}")

    def put(self, name: str, write: Callable[[Path], None]) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        part = self._part(name)
        try:
            write(part)
            _retried(lambda: self.fs.makedirs(self.root, exist_ok=True), self.name)
            _retried(lambda: self.fs.put_file(str(part), f"{self.root}/{name}"), f"{self.name}/{name}")
        finally:
            part.unlink(missing_ok=True)
        self.forget(name)

    def fetch(self, name: str) -> Path:
        path = self.cache / name
        if not path.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            part = self._part(name)
            try:
                _retried(lambda: self.fs.get_file(f"{self.root}/{name}", str(part)), f"{self.name}/{name}")
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        return path

    def text(self, name: str) -> str | None:
        try:
            return _retried(lambda: self.fs.cat_file(f"{self.root}/{name}"), f"{self.name}/{name}").decode()
        except FileNotFoundError:
            return None

    def pin(self, identity: str) -> None:
        key = hashlib.sha256(f"{self.name}\0{identity}".encode()).hexdigest()[:16]
        self.cache = self.above / key

    def forget(self, name: str) -> None:
        (self.cache / name).unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return self.cache / f"{name}.part-{os.getpid()}"


def open_folder(where: str | Path, *, cache: Path | None = None, options: Mapping[str, Any] | None = None) -> LocalFolder | RemoteFolder:
    """A path, or a URL such as `s3://bucket/store`. options: of the fsspec file system. ValueError names the package a URL needs."""
    text = str(where)
    if isinstance(where, Path) or "://" not in text or text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")).expanduser())
    return RemoteFolder(text, cache, options or {})


def _retried(action: Callable[[], T], what: str) -> T:
    """Again after growing waits while the connection fails. Raises ConnectionError when it stays lost."""
    for attempt in range(TRIES):
        try:
            return action()
        except FINAL:
            raise
        except Exception as error:  # every file system has its own errors for a lost connection
            if isinstance(error, OSError) and error.errno in NO_USE:
                raise
            if attempt == TRIES - 1:
                lost = f"{what}: no answer after {TRIES} tries ({type(error).__name__}: {error})"
                raise ConnectionError(f"{lost}; what is stored is kept, the same command goes on from there") from error
            time.sleep(FIRST_WAIT * 2**attempt)
    raise AssertionError
