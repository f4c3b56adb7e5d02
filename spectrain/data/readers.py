"""Bytes of one file -> its rows, one at a time. One bad row is a row with a fault; memory does not grow with the file.

Every reader takes an open file and yields (value or None, fault, line) a row, `line` from 1 where the file has lines, else 0. The first
`skip` rows come as SKIPPED, unparsed where the layout allows it. What a row is:
- jsonl: a line that is not blank. Only a line feed ends a line: other separators inside a text are text, even unescaped.
- json: an element of a list, or of the one list inside an object (`{"data": [...]}`), or a single object; JSON lines are recognised.
- csv, tsv: a record below the header; quoted fields may hold line ends. All values are texts.
- parquet, arrow: a row. A null inside a struct is a key that is not there: the format cannot tell them apart.
- text: a piece of at least PIECE bytes that ends at a blank line, or with the file; the pieces joined are the file.
Files are UTF-8, with or without a byte-order mark at their start.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from spectrain.data.documents import LIMIT, Read, bad_byte, parsed, read_document
from spectrain.data.unpacking import CHUNK, DamagedFile

SKIPPED: Read = (None, "", 0)
PIECE = 8000  # bytes: about a row of 2,000 tokens
BATCH = 64  # rows of a columnar file turned into Python values at a time
BOM = b"\xef\xbb\xbf"
UNREADABLE = (ValueError, OverflowError)  # of a cell: bytes that are not UTF-8, a date that Python has not


def read_lines(file: BinaryIO, skip: int) -> Iterator[Read]:
    """Rows of JSON lines."""
    seen = 0
    for number, line in enumerate(iter(partial(file.readline, LIMIT + 1), b""), 1):
        if number == 1:
            line = line.removeprefix(BOM)
        if line.isspace() or not line:
            continue
        seen += 1
        long = len(line) > LIMIT
        while long and not line.endswith(b"\n"):
            line = file.readline(LIMIT + 1) or b"\n"
        if seen <= skip:
            yield SKIPPED
            continue
        value, fault = (None, f"a line of more than {LIMIT >> 20} MB") if long else parsed(line)
        if fault and not line.endswith(b"\n"):
            fault += "; the file ends in this line, which looks cut off"
        yield value, fault, number


def read_json(file: BinaryIO, skip: int) -> Iterator[Read]:
    """Rows of a JSON document, or of JSON lines under that name."""
    begun: bytes = b""
    first: list[bytes] = []
    while not begun.removeprefix(BOM).strip() and (some := file.read(1 << 12)):
        begun += some
    if begun.removeprefix(BOM).lstrip().startswith(b"{"):
        begun += file.readline(LIMIT)
        first = [line for line in begun.removeprefix(BOM).split(b"\n") if line.strip()]
        while len(first) < 2 and (line := file.readline(LIMIT)):
            begun += line
            first += [line] if line.strip() else []
    # Of a document over several lines none of the first two is an object by itself.
    lines = len(first) > 1 and any(parsed(line)[0] is not None for line in first[:2])
    again = io.BufferedReader(_Rejoined(begun, file), CHUNK)
    yield from read_lines(again, skip) if lines else read_document(again)


class _Rejoined(io.RawIOBase):
    """A file after its beginning was read: the beginning, then the rest."""

    def __init__(self, beginning: bytes, file: BinaryIO) -> None:
        self._beginning, self._file = io.BytesIO(beginning), file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._beginning.read(len(buffer)) or self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def read_table(file: BinaryIO, skip: int, *, delimiter: str) -> Iterator[Read]:
    """Records of a CSV or TSV file. A quote that is never closed is a fault of its record."""
    csv.field_size_limit(LIMIT)
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield from _records(csv.reader(lines, delimiter=delimiter, strict=True))
    finally:
        lines.detach()  # the file is its opener's to close


def _records(records: Any) -> Iterator[Read]:
    header: list[str] | None = None
    while True:
        line = records.line_num + 1
        try:
            record, fault = next(records), ""
        except StopIteration:
            return
        except csv.Error as error:
            record, fault = [""], f"not a record ({error})"
        if not record:
            continue
        if header is None:
            if fault or len(set(record)) < len(record):
                raise DamagedFile(fault or f"the header names a column twice: {', '.join(record)[:200]}")
            header = record
            continue
        fault = fault or _record_fault(record, header)
        yield None if fault else dict(zip(header, record, strict=True)), fault, line


def _record_fault(record: list[str], header: list[str]) -> str:
    if len(record) != len(header):
        return f"{len(record)} fields where the header has {len(header)}"
    return next(filter(None, map(bad_byte, record)), "")


def read_parquet(file: BinaryIO, skip: int) -> Iterator[Read]:
    """Rows of a Parquet file, a few at a time; whole row groups are skipped unread."""
    table = pq.ParquetFile(file)
    for group in range(table.num_row_groups):  # one at a time: what stands before a damaged one is read
        size = table.metadata.row_group(group).num_rows
        if skip >= size:
            skip -= size
            yield from repeat(SKIPPED, size)
        else:
            yield from _batches(table.iter_batches(batch_size=BATCH, row_groups=[group]), skip)
            skip = 0


def read_arrow(file: BinaryIO, skip: int) -> Iterator[Read]:
    """Rows of an Arrow file, in either of its two layouts."""
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        table = pa.ipc.open_file(file)
        batches: Iterable[pa.RecordBatch] = map(table.get_batch, range(table.num_record_batches))
    else:
        batches = pa.ipc.open_stream(file)
    yield from _batches(batches, skip)


def _batches(batches: Iterable[pa.RecordBatch], skip: int) -> Iterator[Read]:
    for batch in batches:
        if skip >= len(batch):
            skip -= len(batch)
            yield from repeat(SKIPPED, len(batch))
            continue
        skip = 0  # rows of a batch that is needed in part are read
        for start in range(0, len(batch), BATCH):
            part = batch.slice(start, BATCH)
            try:
                rows = part.to_pylist()
            except UNREADABLE:
                yield from (_one(part.slice(i, 1)) for i in range(len(part)))
            else:
                yield from ((without_nulls(row), "", 0) for row in rows)


def _one(row: pa.RecordBatch) -> Read:
    value = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            value[name] = column.to_pylist()[0]
        except UnicodeDecodeError as error:
            return None, f"not UTF-8 (byte {error.object[error.start]:#04x} at byte {error.start + 1} of a text)", 0
        except UNREADABLE as error:
            return None, f"column `{name}` cannot be read ({error})", 0
    return without_nulls(value), "", 0


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose inner objects have no null members (a column keeps every key that any of its rows has)."""
    return {key: _pruned(value) for key, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list | None):
        return [_pruned(inner) for inner in value]
    return value


def read_text(file: BinaryIO, skip: int) -> Iterator[Read]:
    """Pieces of plain text."""
    piece: list[bytes] = []
    size, start = 0, 1
    for number, line in enumerate(iter(partial(file.readline, LIMIT), b""), 1):
        piece.append(line.removeprefix(BOM) if number == 1 else line)
        size += len(line)
        if size >= PIECE and (line.isspace() or size >= LIMIT):
            yield *_piece(piece), start
            piece, size, start = [], 0, number + 1
    if not all(line.isspace() for line in piece):
        yield *_piece(piece), start


def _piece(lines: list[bytes]) -> tuple[dict[str, Any] | None, str]:
    data = b"".join(lines)
    try:
        return {"text": data.decode()}, ""
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 (byte {data[error.start]:#04x} at byte {error.start + 1} of this piece)"


READERS: dict[str, Callable[[BinaryIO, int], Iterator[Read]]] = {
    "jsonl": read_lines,
    "json": read_json,
    "csv": partial(read_table, delimiter=","),
    "tsv": partial(read_table, delimiter="\t"),
    "parquet": read_parquet,
    "arrow": read_arrow,
    "text": read_text,
}
