"""Rows on disk: Arrow files that are mapped, and one small index from which batches are planned without reading a row.

A folder holds rows/00000.arrow … (id, domain, group, ids, mask, digest), index.arrow (a line a row: length, supervised, prompt, domain,
part) and prepared.json, written last. Legend: N rows of a store, R rows of a file, T tokens of a file, L tokens of a row.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spectrain.data.filters import TRAIN, UNUSED, VALIDATION
from spectrain.data.rows import Columns, Row

FORMAT = 1
RECORD, INDEX, ROWS = "prepared.json", "index.arrow", "rows"
PARTS = {"train": TRAIN, "validation": VALIDATION, "unused": UNUSED}
OPEN_FILES = 64  # mapped at once by a store
SCHEMA = pa.schema(
    {
        "id": pa.string(), "domain": pa.string(), "group": pa.string(), "ids": pa.list_(pa.int32()), "mask": pa.list_(pa.uint8()),
        "digest": pa.binary(16),
    }
)  # fmt: skip
INDEX_SCHEMA = pa.schema(
    {"length": pa.int32(), "supervised": pa.int32(), "prompt": pa.int32(), "domain": pa.int32(), "part": pa.uint8()}
)

Array = npt.NDArray[Any]


def part_name(number: int) -> str:
    return f"{ROWS}/{number:05d}.arrow"


def record_batch(parts: Sequence[Columns]) -> pa.RecordBatch:
    """Rows as one Arrow batch, from buffers: nothing is boxed, and pyarrow has no reason to import pandas."""
    parts = parts or [Columns.of([])]
    ids, mask, digests, lengths = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("ids_T", "mask_T", "digest_R", "length_R")
    )
    offsets = _numbers(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    columns = [_strings([text.encode() for part in parts for text in getattr(part, name)]) for name in ("id_R", "domain_R", "group_R")]
    columns += [pa.ListArray.from_arrays(offsets, _numbers(values, kind)) for values, kind in ((ids, pa.int32()), (mask, pa.uint8()))]
    columns.append(pa.Array.from_buffers(pa.binary(16), len(lengths), [None, pa.py_buffer(digests)]))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _numbers(values: Array, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values.astype(kind.to_pandas_dtype()))])


def _strings(texts: Sequence[bytes]) -> pa.Array:
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    return pa.Array.from_buffers(pa.string(), len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))])


def write_arrow(path: Path, batch: pa.RecordBatch) -> None:
    """One batch as an Arrow IPC file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def read_arrow(path: Path) -> pa.RecordBatch:
    """The one batch of a mapped file; ValueError when it is missing or damaged."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return reader.get_batch(0)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} is missing or damaged ({error}); run the `spectrain prepare` that made it again") from error


class _File:
    """One mapped file of rows."""

    def __init__(self, path: Path) -> None:
        batch = read_arrow(path)
        ids, mask = batch.column("ids"), batch.column("mask")
        self.offsets = _values(ids.offsets, np.int32)
        self.ids_T, self.mask_T = _values(ids.values, np.int32), _values(mask.values, np.uint8)
        self._texts = {name: _texts(batch.column(name)) for name in ("id", "group")}
        self.digests = _values(batch.column("digest"), "V16")

    def row(self, place: int, domain: str) -> Row:
        """A copy: it stays valid when the file is closed, and may be written to."""
        cut = slice(self.offsets[place], self.offsets[place + 1])
        name, group = (data[offsets[place] : offsets[place + 1]].decode() for offsets, data in self._texts.values())
        return Row(id=name, domain=domain, ids_L=self.ids_T[cut].copy(), mask_L=self.mask_T[cut].copy(), group=group)


def _values(column: pa.Array, dtype: Any) -> Array:
    """The numbers of a column, in place (pyarrow's own `to_numpy` would import pandas)."""
    return np.frombuffer(column.buffers()[1], dtype, count=len(column)) if len(column) else np.empty(0, dtype)


def _texts(column: pa.Array) -> tuple[Array, bytes]:
    if not len(column):
        return np.zeros(1, np.int32), b""
    _, offsets, data = column.buffers()
    return np.frombuffer(offsets, np.int32, count=len(column) + 1), bytes(data.to_pybytes()) if data else b""


@dataclass(frozen=True)
class Index:
    """A line a row of every file, in order: length, supervised, prompt (tokens before the first supervised one), domain code, part."""

    length: Array
    supervised: Array
    prompt: Array
    domain: Array
    part: Array

    def write(self, path: Path) -> None:
        arrays = [_numbers(getattr(self, field.name), field.type) for field in INDEX_SCHEMA]
        write_arrow(path, pa.RecordBatch.from_arrays(arrays, schema=INDEX_SCHEMA))

    @classmethod
    def read(cls, path: Path) -> "Index":
        batch = read_arrow(path)
        return cls(**{f.name: _values(batch.column(f.name), f.type.to_pandas_dtype()) for f in INDEX_SCHEMA})


def read_record(folder: Path) -> dict[str, Any]:
    """prepared.json of a finished store; ValueError says what the folder is instead."""
    path = folder / RECORD
    if not path.is_file():
        half = (folder / ROWS).is_dir()
        what = "holds rows that are not finished; run the same `spectrain prepare` again" if half else "holds no prepared rows"
        raise ValueError(f"{folder} {what if folder.is_dir() else 'does not exist'}; make them: spectrain prepare INPUT… --out {folder}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); run `spectrain prepare` again") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{path}: needed format {FORMAT}, found {found}; run `spectrain prepare` again")
    return record


class RowStore(Sequence[Row]):
    """Rows of a folder made by `spectrain prepare`: its training part, the validation part, or what `max_rows` left unused.

    Opening checks that every file is there in its size. Lengths, supervised counts and domains come from the index.
    """

    def __init__(self, folder: str | Path, part: str = "train") -> None:
        if part not in PARTS:
            raise ValueError(f"a row store has the parts {', '.join(PARTS)}, not {part!r}")
        self.folder, self.part = Path(folder), part
        self.record = read_record(self.folder)
        sizes = {INDEX: self.record["index_bytes"], **{part_name(i): f["bytes"] for i, f in enumerate(self.record["files"])}}
        for name, size in sizes.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise ValueError(f"{path} {state}; run the `spectrain prepare` that made it again")
        index = Index.read(self.folder / INDEX)
        self._starts = np.cumsum([0, *(f["rows"] for f in self.record["files"])])
        assert len(index.part) == self._starts[-1], self.folder
        self._numbers = np.flatnonzero(index.part == PARTS[part])
        self.lengths_N, self.supervised_N = index.length[self._numbers], index.supervised[self._numbers]
        self.prompt_N, self.domain_N = index.prompt[self._numbers], index.domain[self._numbers]
        self.domain_names: tuple[str, ...] = tuple(self.record["domains"])
        self._files: OrderedDict[int, _File] = OrderedDict()

    @cached_property
    def domains(self) -> npt.NDArray[np.object_]:
        """Domain of every row."""
        return np.array(self.domain_names, dtype=object)[self.domain_N]

    @property
    def rows_sha256(self) -> str:
        """`spectrain.data.rows.rows_sha256` of this part."""
        return str(self.record["rows_sha256"][self.part])

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the tokenizer and the template that these rows were made with."""
        return dict(self.record["fingerprints"])

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> list[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | list[Row]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        file, place = self._place(i % len(self))
        return file.row(place, self.domain_names[self.domain_N[i]])

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def digest(self, i: int) -> bytes:
        """The stored digest of row i."""
        file, place = self._place(i)
        return file.digests[place].tobytes()

    def check(self) -> None:
        """Read every row; ValueError names the first that is not what was written."""
        for i, row in enumerate(self):
            if row.digest != self.digest(i):
                file = int(np.searchsorted(self._starts, self._numbers[i], side="right")) - 1
                where = f"{self.folder / part_name(file)}, row {row.id}"
                raise ValueError(f"{where}: the content is not what was written; run `spectrain prepare` again with a fresh folder")

    def _place(self, i: int) -> tuple[_File, int]:
        number = self._numbers[i]
        file = int(np.searchsorted(self._starts, number, side="right")) - 1
        if file in self._files:
            self._files.move_to_end(file)
        else:
            self._files[file] = _File(self.folder / part_name(file))
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return self._files[file], int(number - self._starts[file])

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "part": self.part}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RowStore.__init__(self, **state)


def index_of(folder: Path, files: int) -> tuple[Index, list[str]]:
    """The index of the first `files` files, everything for training, and the names of its domain codes in order of appearance."""
    names: dict[str, int] = {}
    columns: dict[str, list[Array]] = {name: [] for name in INDEX_SCHEMA.names}
    for number in range(files):
        batch = read_arrow(folder / part_name(number))
        mask = batch.column("mask")
        offsets, mask_T = _values(mask.offsets, np.int32), _values(mask.values, np.uint8)
        ones = np.flatnonzero(mask_T)
        first, behind = np.searchsorted(ones, offsets[:-1]), np.searchsorted(ones, offsets[1:])
        domains = batch.column("domain").dictionary_encode()
        codes = np.array([names.setdefault(name, len(names)) for name in domains.dictionary.to_pylist()], dtype=np.int32)
        columns["length"].append(np.diff(offsets))
        columns["supervised"].append((behind - first).astype(np.int32))
        columns["prompt"].append((ones[first] - offsets[:-1]).astype(np.int32))
        columns["domain"].append(codes[_values(domains.indices, np.int32)])
        columns["part"].append(np.full(len(batch), TRAIN, dtype=np.uint8))
    return Index(**{name: np.concatenate(parts) for name, parts in columns.items()}), list(names)


def parts_sha256(folder: Path, files: int, part_R: Array) -> dict[str, str]:
    """rows_sha256 of every part, from the stored digests."""
    hashes = {name: hashlib.sha256() for name in PARTS}
    start = 0
    for number in range(files):
        digests = _File(folder / part_name(number)).digests
        mine = part_R[start : start + len(digests)]
        for name, code in PARTS.items():
            hashes[name].update(digests[mine == code].tobytes())
        start += len(digests)
    return {name: value.hexdigest() for name, value in hashes.items()}
