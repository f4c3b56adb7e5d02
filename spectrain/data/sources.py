"""What a user names (files, folders, patterns, names on the Hub) -> sources of rows that can be read again from any row on.

A folder, also one that a pattern without ** meets, stands for every file below it with a known ending; hidden files are left out, and,
named to the user, dataset descriptions (README, LICENSE, dataset_info.json) and links to folders or to nothing. Paths are sorted.
`hub:org/name[@revision][:config][:split]` names a data set on the Hub; without `hub:`, `org/name` does where no such file is near. No
split: `train`, or the only one.
"""

import difflib
import fnmatch
import glob
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from spectrain.data.formats import detect
from spectrain.data.readers import READERS, without_nulls
from spectrain.data.unpacking import DamagedFile, unpacked

ENDINGS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow",
    ".txt": "text", ".md": "text",
}  # fmt: skip
TELLS = 16  # rows between two looks at the place in the file: each costs as much as reading a row
PACKED = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
COLUMNAR = ("parquet", "arrow")
DESCRIPTIONS = re.compile(r"((readme|licen[sc]e)[^/]*\.(md|txt)|dataset_infos?\.json|dataset_dict\.json|state\.json)", re.IGNORECASE)
HUB = re.compile(r"hub:(?P<path>[^@:]+)(@(?P<revision>[^:]+))?(:(?P<config>[^:]+)(?=:))?(:(?P<split>[^:]+))?")
BARE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class RawRow:
    """A row of a source as it stands there. Either `value` is an object, or `fault` says why it could not be read.

    number: from 1, blank lines not counted. line: where it begins in its file, from 1; 0 where the file has no lines.
    position: about how many bytes of the source were read so far.
    """

    source: str
    number: int
    value: dict[str, Any] | None
    fault: str = ""
    line: int = 0
    position: int = 0

    @property
    def place(self) -> str:
        """The row for a message: its line where it has one."""
        return f"line {self.line}" if self.line else f"row {self.number}"


@dataclass(frozen=True)
class Source:
    """A file, or a split of a data set on the Hub. kind: a name in READERS, or hub. size: bytes, 0 where unknown."""

    name: str
    kind: str
    size: int = 0
    compression: str = ""

    def rows(self, skip: int = 0) -> Iterator[RawRow]:
        """Rows from number skip + 1 on. A bad row is a RawRow with a fault, and so is the damaged rest of a file, once.

        Raises ValueError where the file or the Hub itself fails, so that a run can stop and go on later.
        """
        if self.kind == "hub":
            yield from stream_rows(_hub_stream(self.name), self.name, skip)
            return
        try:
            with open(self.name, "rb") as file:
                yield from self._numbered(file, skip)
        except OSError as error:
            raise ValueError(f"{self.name} cannot be read: {error.strerror or error}") from error

    def _numbered(self, file: BinaryIO, skip: int) -> Iterator[RawRow]:
        number = place = 0
        try:
            for number, (value, fault, line) in enumerate(READERS[self.kind](unpacked(file, self.compression), skip), 1):
                if number > skip:
                    if number % TELLS == 0:
                        place = min(file.tell(), self.size)
                    yield RawRow(self.name, number, value, fault, line, place)
        except (DamagedFile, pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # of the disk, not of the file's contents
                raise
            if number + 1 > skip:
                fault = f"the rest of the file cannot be read: {error}"
                yield RawRow(self.name, number + 1, None, fault, position=self.size)

    def peek(self, count: int = 20) -> list[dict[str, Any]]:
        """The first `count` rows that can be read, for finding out the dialect."""
        values = (row.value for row in islice(self.rows(), 10 * count) if row.value is not None)
        return list(islice(values, count))

    def fingerprint(self) -> str:
        """Of the content: hash of a file's bytes, or of what the Hub says the data set is made of."""
        if self.kind == "hub":
            return str(_hub_builder(self.name).hash)
        with open(self.name, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def dialect_of(source: Source, formats: str | Mapping[str, str], columns: Mapping[str, str]) -> str:
    """The dialect that is asked for, of all sources or by pattern of their names, or else that of the source's first rows ("" when none of
    them can be read). A pattern is compared with the whole name and with its last part; of those that fit the first one counts.

    Raises ValueError where no dialect is asked for and none is found.
    """
    rules = {"*": formats} if isinstance(formats, str) else formats
    asked = next((dialect for pattern, dialect in rules.items() if _fits(source, pattern)), "auto")
    if asked != "auto":
        return asked
    try:
        return detect(first, columns) if (first := source.peek()) else ""
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error


def check_formats(sources: Sequence[Source], formats: str | Mapping[str, str]) -> None:
    """ValueError for a pattern of `format` that no source's name fits."""
    for pattern in () if isinstance(formats, str) else formats:
        if pattern != "*" and not any(_fits(source, pattern) for source in sources):
            names = ", ".join(source.name for source in sources[:5]) + (" …" if len(sources) > 5 else "")
            raise ValueError(f"format: no input is called {pattern!r}; there are {names}")


def _fits(source: Source, pattern: str) -> bool:
    return fnmatch.fnmatchcase(source.name, pattern) or fnmatch.fnmatchcase(Path(source.name).name, pattern)


class Sources(list[Source]):
    """Sources in the order they are read. left_out: what else stands in folders and patterns and is not read."""

    def __init__(self, sources: Sequence[Source], left_out: Sequence[str]) -> None:
        super().__init__(sources)
        self.left_out = tuple(left_out)


def find_sources(inputs: Sequence[str], *, ours: Sequence[Path] = ()) -> Sources:
    """Files, folders, patterns and Hub names as sources; a file that is named twice is read once.

    ours: files and folders that the caller writes; what of them stands in a folder that is read is left out.
    Raises ValueError for what is missing (naming what is near), has an ending nobody reads, is not what its ending says, or is ours.
    """
    if not inputs:
        raise ValueError("no input; name files, folders, patterns such as 'data/*.jsonl', or hub:org/name")
    found: dict[str, Source] = {}
    left_out: list[str] = []
    for name in [inputs] if isinstance(inputs, str) else map(os.fspath, inputs):
        for source in _find(name, left_out, {os.path.realpath(path) for path in ours}):
            key = source.name if source.kind == "hub" else os.path.realpath(source.name)
            found.setdefault(key, source)
    return Sources(list(found.values()), sorted(set(left_out)))


def _find(name: str, left_out: list[str], ours: set[str]) -> list[Source]:
    path = Path(name)
    if name.startswith("hub:"):
        return [_hub_source(name)]
    if (path.is_file() or path.is_dir()) and _is_below(name, ours):
        raise ValueError(f"{name} is one of the inputs, and would be written to; choose another --out")
    if path.is_file():
        return [_file_source(name)]
    if path.is_dir():
        files = _below(path)
    elif glob.has_magic(name):
        matches = map(Path, sorted(glob.glob(name, recursive=True)))
        files = [str(f) for m in matches for f in ([m] if not m.is_dir() else _below(m) if "**" not in name else [])]
    elif BARE_HUB.fullmatch(name) and not _kind(name.partition(":")[0])[0] and not path.parent.is_dir():
        return [_hub_source(f"hub:{name}")]
    else:
        raise ValueError(_missing(path))
    known = [file for file in files if _kind(file)[0] and os.path.isfile(file) and not DESCRIPTIONS.fullmatch(Path(file).name)]
    known = [file for file in known if not _is_below(file, ours)]
    left_out += [file for file in files if file not in set(known)]
    if not known:
        others = ", ".join(sorted({Path(file).suffix or Path(file).name for file in files})[:8]) or "nothing"
        raise ValueError(f"{name} holds no data files; found {others}, needed {_endings()}")
    return [_file_source(file) for file in known]


def _is_below(name: str, ours: set[str]) -> bool:
    path = Path(os.path.realpath(name))
    return any(str(above) in ours for above in (path, *path.parents))


def check_columns(sources: Sequence[Source], columns: Mapping[str, str]) -> None:
    """ValueError for a column that none of the sources has among its first rows; role and content are keys of turns, not of rows."""
    wanted = {ours: theirs for ours, theirs in columns.items() if ours not in ("role", "content")}
    found = {key for source in (sources if wanted else ()) for value in source.peek() for key in value}
    for ours, theirs in wanted.items():
        if found and theirs not in found:
            there = ", ".join(sorted(found)[:20])
            raise ValueError(f"columns.{ours} names {theirs!r}, which no row has; found keys {there}")


def _below(folder: Path) -> list[str]:
    """Files and links below a folder."""
    found = sorted(path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return [str(path) for path in found if path.is_file() or path.is_symlink()]


def _kind(name: str) -> tuple[str, str]:
    """(kind, compression) by the ending; kind "" where nobody reads it."""
    stem, ending = os.path.splitext(name.lower())
    if packed := PACKED.get(ending, ""):
        kind = ENDINGS.get(os.path.splitext(stem)[1], "")
        return ("", "") if kind in COLUMNAR else (kind, packed)  # those are compressed inside
    return ENDINGS.get(ending, ""), ""


def _endings() -> str:
    return f"{', '.join(ENDINGS)} (all but {' and '.join(f'.{kind}' for kind in COLUMNAR)} also with {', '.join(PACKED)})"


def _missing(path: Path) -> str:
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    wanted = path.absolute().relative_to(parent).parts[0]
    names = sorted(os.listdir(parent))
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or names[:5]
    there = f"in {parent} there is {', '.join(near)}" if near else f"{parent} is empty"
    return f"no file {path}; {there}. A data set on the Hub is hub:org/name"


def _file_source(name: str) -> Source:
    kind, compression = _kind(name)
    if not kind:
        raise ValueError(f"{name}: nobody here reads that ending; needed {_endings()}")
    if compression == "zst" and find_spec("zstandard") is None:
        raise ValueError(f"{name} needs the package zstandard; run: pip install 'spectrain[zst]'")
    try:
        with open(name, "rb") as file:
            fault = _not_what_it_says(file.read(32), kind, compression)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    if size and fault:
        raise ValueError(f"{name} {fault}")
    return Source(name, kind, size, compression)


def _not_what_it_says(start: bytes, kind: str, compression: str) -> str:
    """What is wrong with a file that begins so, "" for nothing."""
    if start.startswith(b"version https://git-lfs"):
        return "is only a pointer of Git LFS; run: git lfs pull"
    found = "gz" if start.startswith(b"\x1f\x8b") else "zst" if start.startswith(b"\x28\xb5\x2f\xfd") else ""
    if found != compression and (found or compression == "gz"):
        return f"is {f'compressed ({found})' if found else 'not compressed'}, against its ending; rename it"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; needed UTF-8. Run: iconv -f UTF-16 -t UTF-8 OLD > NEW"
    if kind == "parquet" and not start.startswith(b"PAR1"):
        return "is not Parquet, against its ending"
    return ""


def stream_rows(dataset: Any, name: str, skip: int = 0) -> Iterator[RawRow]:
    """Rows of a streaming `datasets.IterableDataset` (mapped or not) from number skip + 1 on.

    The place is the number of the row alone, so it survives any number of stops (huggingface/datasets#8145).
    """
    number = skip
    try:
        for number, value in enumerate(dataset.skip(skip) if skip else dataset, skip + 1):
            yield RawRow(name, number, without_nulls(value))
    except Exception as error:  # whatever the network, a loader or a user's map raises
        raise ValueError(f"{name}: reading stopped behind row {number} ({type(error).__name__}: {error}); run it again") from error


def _hub_source(name: str) -> Source:
    builder = _hub_builder(name)
    fields = _hub_fields(name)
    if fields["split"] is None:
        splits = list(builder.info.splits or {}) or list(getattr(builder.config, "data_files", None) or {})
        split = "train" if "train" in splits or not splits else str(splits[0])
        if len(splits) > 1 and split != "train":
            raise ValueError(f"{name} has the splits {', '.join(map(str, splits))}; name one: {name}:{split}")
        name = f"{name}:{split}" if fields["config"] is None else name
    return Source(name, "hub", int(builder.info.download_size or 0))


def _hub_fields(name: str) -> dict[str, str | None]:
    match = HUB.fullmatch(name)
    if match is None:
        raise ValueError(f"{name}: needed hub:org/name[@revision][:config][:split]")
    return match.groupdict()


def _hub_builder(name: str) -> Any:
    """The loader of a data set; ValueError with the reason where there is none."""
    from datasets import load_dataset_builder

    fields = _hub_fields(name)
    try:
        return load_dataset_builder(fields["path"], fields["config"], revision=fields["revision"])
    except Exception as error:  # the Hub's own errors, offline ones, and those of a loader
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise ValueError(f"{name} cannot be opened ({reason}); is the name right, and the Hub within reach?") from error


def _hub_stream(name: str) -> Any:
    split = _hub_fields(name)["split"]
    return _hub_builder(name).as_streaming_dataset(split=split)
