"""One file of a feature store: a safetensors file whose header carries a checksum of its tensors, read in parts.

The layout (https://github.com/huggingface/safetensors#format): 8 bytes with the length of the header, the header (JSON), the
tensors one after the other. It is written here piece by piece, so that a shard is never in memory twice,
and read here in parts straight into the tensors of a batch, so that reading is one copy and leaves no mapped pages behind.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16,
          "I32": torch.int32, "I64": torch.int64}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
STRIDE = 2**24  # bytes checked at a time
METADATA = "__metadata__"


class Damaged(ValueError):
    """A shard that cannot be read; says which and why."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"{path} is damaged ({reason}); run the capture again with --set data.capture.on_damage=recapture (or =skip)")
        self.path, self.reason = path, str(reason)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors (on the CPU); not atomic. OSError when there is no room."""
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    header: dict[str, Any] = {}
    at = 0
    for name, t in tensors.items():
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at := at + t.numel() * t.element_size()]}
    crc = _start(header)
    for t in tensors.values():
        crc = zlib.crc32(_view(t), crc)
    text = json.dumps({METADATA: {"crc32": f"{crc:08x}"}, **header}).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    with open(path, "wb", buffering=0) as file:
        for part in (memoryview(len(text).to_bytes(8, "little") + text), *map(_view, tensors.values())):
            rest = part
            while rest:
                rest = rest[file.write(rest) :]


def _start(header: Mapping[str, Any]) -> int:
    """Checksum of names, dtypes and shapes, from which that of the data goes on."""
    return zlib.crc32(json.dumps([[name, entry["dtype"], entry["shape"]] for name, entry in header.items()]).encode())


def _view(t: Tensor) -> memoryview:
    return t.reshape(-1).view(torch.uint8).numpy().data


class File:
    """A file open for reading at any place, from several threads; closed when nobody holds it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def read_at(self, at: int, view: memoryview) -> int:
        """Fill the view or part of it; the number of bytes read."""
        if hasattr(os, "preadv"):
            return os.preadv(self.number, [view], at)
        found = os.pread(self.number, len(view), at)  # macOS has no preadv
        view[: len(found)] = found
        return len(found)


@dataclass(frozen=True)
class Shard:
    """The header of one file, read and found to fit its size. `open_shard` makes it."""

    path: Path
    header: Mapping[str, Any]
    crc: int
    start: int

    @property
    def kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """By tensor: dtype, and shape without the first dimension."""
        return {name: (DTYPES[entry["dtype"]], tuple(entry["shape"][1:])) for name, entry in self.header.items()}

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """By tensor: where it begins in the file, and the bytes of one of its rows."""
        return {
            name: (self.start + entry["data_offsets"][0], math.prod(entry["shape"][1:]) * DTYPES[entry["dtype"]].itemsize)
            for name, entry in self.header.items()
        }

    def open(self) -> File:
        """To be handed to `read`. Raises Damaged when the file is gone."""
        try:
            return File(self.path)
        except OSError as error:
            raise Damaged(self.path, error.strerror) from error

    def whole(self, name: str) -> Tensor:
        """A tensor of its own."""
        entry = self.header[name]
        out = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        self.read(self.open(), name, 0, out)
        return out

    def read(self, file: File, name: str, first: int, out: Tensor) -> None:
        """Fill `out` (contiguous, of the tensor's dtype and width) from row `first` of a tensor on."""
        start, width = self.places[name]
        at, rest = start + first * width, _view(out)
        assert len(rest) == len(out) * width and out.is_contiguous()
        while rest:
            count = file.read_at(at, rest)
            if not count:
                raise Damaged(self.path, "it ends too early")
            at, rest = at + count, rest[count:]

    def verify(self) -> None:
        """Raises Damaged unless every byte is as it was written."""
        crc = _start(self.header)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            block = bytearray(STRIDE)
            while count := file.readinto(block):
                crc = zlib.crc32(memoryview(block)[:count], crc)
        if crc != self.crc:
            raise Damaged(self.path, f"checksum {crc:08x}, written as {self.crc:08x}")


def open_shard(path: Path) -> Shard:
    """Read the header; Damaged when the file is missing, is no shard, or has another size than the header says."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise Damaged(path, f"{size} bytes, its header alone says {length}")
            header = json.loads(file.read(length))
        crc = int(header.pop(METADATA)["crc32"], 16)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        parts = list(_sizes(header))
    except OSError as error:
        raise Damaged(path, error.strerror or error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(path, f"its header cannot be read: {error}") from error
    if size != 8 + length + end or any(found != needed for found, needed in parts):
        raise Damaged(path, f"{size} bytes, {8 + length + end} by its header")
    return Shard(path, header, crc, 8 + length)


def _sizes(header: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    for entry in header.values():
        first, stop = entry["data_offsets"]
        yield stop - first, math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
