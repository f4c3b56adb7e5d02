"""The bytes inside compressed files; what stands before damage is read."""

import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

CHUNK = 1 << 20  # bytes read at a time


class DamagedFile(Exception):
    """The rest of a file cannot be read."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class Unpacked(io.RawIOBase):
    """The bytes inside a compressed file. What stands before damage is read; then DamagedFile is raised.

    make: a new decompressor for each member of the file. errors: what it raises where the data are damaged.
    """

    def __init__(self, file: BinaryIO, make: Callable[[], _Decompressor], errors: type[Exception]) -> None:
        self._file, self._make, self._errors = file, make, errors
        self._unpack: _Decompressor | None = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            packed = self._packed or self._file.read(1 << 16)
            if not packed:
                if self._unpack is not None:
                    raise DamagedFile("the compressed data end in the middle")
                return 0
            try:
                self._unpack = self._unpack or self._make()
                self._ready = memoryview(self._unpack.decompress(packed))
            except self._errors as error:
                raise DamagedFile(f"the compressed data are damaged ({error})") from error
            self._packed = b""
            if self._unpack.eof:
                self._packed = self._unpack.unused_data.lstrip(b"\0")  # some tools pad archives with zeros
                self._unpack = None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def unpacked(file: BinaryIO, compression: str) -> BinaryIO:
    """The file itself, or what is inside it. compression: "", gz or zst."""
    if not compression:
        return file
    if compression == "gz":  # 31: with the header and the checksum of gzip
        return io.BufferedReader(Unpacked(file, lambda: zlib.decompressobj(wbits=31), zlib.error), CHUNK)
    import zstandard

    whole = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # the longest window that `zstd --long=31 --ultra` writes
    return io.BufferedReader(Unpacked(file, whole.decompressobj, zstandard.ZstdError), CHUNK)
