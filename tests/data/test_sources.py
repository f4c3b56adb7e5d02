"""Files, folders, patterns and data sets -> rows that add up, and can be read again from any row on."""

import csv
import gzip
import io
import json
import os
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, IterableDataset

from spectrain.data import documents
from spectrain.data.formats import convert, detect
from spectrain.data.sources import RawRow, Source, find_sources, stream_rows

# Line separators, control characters, a byte-order mark, several planes: all of it text.
TEXTS = ["one", "a\u2028b\u2029c\x85d\x0b\x0c\x1ce", "\r\n\r", ' "q", \\ \t', "\ufeffmark\ufeff", "\U0001f469\u200d\U0001f680"]
ROWS = [{"id": str(i), "text": text} for i, text in enumerate([*TEXTS, "x" * 70_000])]


def jsonl(rows: list[Any], ascii: bool = False) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=ascii).encode() + b"\n" for row in rows)


def table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=3)
    return sink.getvalue()


def arrow(rows: list[dict[str, Any]], make: Callable[..., Any]) -> bytes:
    sink = io.BytesIO()
    made = pa.Table.from_pylist(rows)
    with make(sink, made.schema) as writer:
        writer.write_table(made, max_chunksize=3)
    return sink.getvalue()


def zst(data: bytes) -> bytes:
    half = len(data) // 2
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])  # two frames, as tools that append write


LAYOUTS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": jsonl,
    "escaped.ndjson": lambda rows: jsonl(rows, ascii=True),
    "bom.jsonl": lambda rows: b"\xef\xbb\xbf" + jsonl(rows),
    "open_end.jsonl": lambda rows: jsonl(rows)[:-1],
    "crlf.jsonl": lambda rows: jsonl(rows).replace(b"\n", b"\r\n"),
    "blanks.jsonl": lambda rows: b"\n \n" + jsonl(rows).replace(b"\n", b"\n\n\t\n"),
    "a.jsonl.gz": lambda rows: gzip.compress(jsonl(rows)[:50]) + gzip.compress(jsonl(rows)[50:]) + b"\0" * 512,
    "a.jsonl.zst": lambda rows: zst(jsonl(rows)),
    "list.json": lambda rows: json.dumps(rows, ensure_ascii=False).encode(),
    "pretty.json": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows, indent=4).encode(),
    "inside.json": lambda rows: json.dumps({"version": [1], "data": rows, "n": {"a": []}}, indent=1).encode(),
    "inside_other.json": lambda rows: json.dumps({"version": "1", "chats": rows}).encode(),
    "lines.json": jsonl,
    "list.json.gz": lambda rows: gzip.compress(json.dumps(rows).encode()),
    "a.csv": lambda rows: b"\xef\xbb\xbf" + table(rows, ","),
    "a.tsv.zst": lambda rows: zst(table(rows, "\t")),
    "a.parquet": parquet,
    "file.arrow": lambda rows: arrow(rows, pa.ipc.new_file),
    "stream.arrow": lambda rows: arrow(rows, pa.ipc.new_stream),
}


def source(folder: Path, name: str, data: bytes) -> Source:
    (folder / name).write_bytes(data)
    [found] = find_sources([str(folder / name)])
    return found


def faults(rows: list[RawRow]) -> list[tuple[int, str]]:
    assert all((row.value is None) == bool(row.fault) for row in rows)
    return [(row.number, row.fault) for row in rows if row.fault]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_differ_by_layout_or_after_a_stop(tmp_path: Path, name: str) -> None:
    found = source(tmp_path, name, LAYOUTS[name](ROWS))
    rows = list(found.rows())
    assert [row.value for row in rows] == ROWS and not faults(rows)
    assert [row.number for row in rows] == list(range(1, len(ROWS) + 1)) and {row.source for row in rows} == {found.name}
    positions = [row.position for row in rows]
    assert positions == sorted(positions) and positions[-1] <= found.size == os.path.getsize(found.name)
    for skip in range(len(ROWS) + 2):
        assert list(found.rows(skip)) == rows[skip:]
    again = iter(found.rows(2))
    assert [row.value for row in islice(again, 2)] == ROWS[2:4]  # stopped, and stopped again
    assert [row.value for row in islice(found.rows(4), 1)] == ROWS[4:5]


def test_lines_are_counted_without_the_blank_ones(tmp_path: Path) -> None:
    rows = list(source(tmp_path, "a.jsonl", b'{"a": 1}\n\n \r\n{"a": 2}\n[\n\n').rows())
    assert [(row.number, row.line) for row in rows] == [(1, 1), (2, 4), (3, 5)] and rows[2].place == "line 5"
    records = list(source(tmp_path, "a.csv", b'a,b\n1,"x\ny"\n\n2,z\n').rows())
    assert [(row.number, row.line, row.value) for row in records] == [(1, 2, {"a": "1", "b": "x\ny"}), (2, 5, {"a": "2", "b": "z"})]


REST = "the rest of the file cannot be read: "
GOOD = b'{"text": "x"}\n'


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (b'{"text": \n', "not JSON (Expecting value at character 11)"),
        (b'{"text": "\xff"}\n', "not UTF-8 (byte 0xff at byte 11)"),
        (b'{"text": "\xed\xa0\x80"}\n', "not UTF-8 (byte 0xed at byte 11)"),
        (b"[1]\n", "needed a JSON object, found a list"),
        (b"null\n", "needed a JSON object, found null"),
        (b'"text"\n', "needed a JSON object, found text"),
        (b"17\n", "needed a JSON object, found a number (17)"),
        (b'{"a": 1} {"a": 2}\n', "not JSON (Extra data at character 10)"),
        (b'{"a":' * 100_000 + b"\n", "JSON nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", "not usable JSON (Exceeds the limit (4300 digits)"),
        (GOOD[:-3], "not JSON (Unterminated string starting at character 10); the file ends in this line, which looks cut off"),
    ],
)
def test_bad_line_stops_the_run_or_its_neighbours(tmp_path: Path, bad: bytes, fault: str) -> None:
    last = not bad.endswith(b"\n")
    rows = list(source(tmp_path, "a.jsonl", GOOD + bad + (b"" if last else GOOD)).rows())
    assert [row.value for row in rows] == [{"text": "x"}, None, {"text": "x"}][: len(rows)] and len(rows) == 3 - last
    [(number, found)] = faults(rows)
    assert number == 2 and found.startswith(fault)


def test_odd_json_is_an_error(tmp_path: Path) -> None:
    rows = list(source(tmp_path, "a.jsonl", b'{"a": NaN, "b": -Infinity, "a": 5, "c": 123456789012345678901, "d": "\ttab"}\n').rows())
    assert rows[0].value == {"a": 5, "b": float("-inf"), "c": 123456789012345678901, "d": "\ttab"}


def test_line_longer_than_memory_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectrain.data.readers.LIMIT", 1000)
    rows = list(source(tmp_path, "a.jsonl", GOOD + b'{"text": "' + b"y" * 5000 + b'"}\n' + GOOD).rows())
    assert [number for number, fault in faults(rows) if "a line of more than" in fault] == [2]
    assert [row.number for row in rows] == [1, 2, 3] and rows[2].line == 3


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 16, 64])
def test_json_document_depends_on_where_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(documents, "CHUNK", chunk)
    rows: list[Any] = [{"a": 'é"\\\U0001f680', "b": [1, -2.5e-3, None, True]}, {}, {"c": {"d": "\U0001f469"}}]
    for text in (json.dumps(rows), json.dumps(rows, ensure_ascii=False, indent=2), json.dumps({"x": 12, "data": rows, "y": "z"})):
        found = source(tmp_path, "a.json", text.encode())
        assert [row.value for row in found.rows()] == rows
    numbers = list(source(tmp_path, "a.json", b"[123456, 7, {}]").rows())
    assert [row.fault[-7:] for row in numbers] == ["123456)", "ber (7)", ""]


@pytest.mark.parametrize(
    ("data", "values", "reasons"),
    [
        (b'{"messages": [{"role": "user"}], "x": [{"y": 1}]}', [{"messages": [{"role": "user"}], "x": [{"y": 1}]}], []),
        (b'{\n "id": "a",\n "meta": [{"y": 1}],\n "messages": [{}]\n}', [{"id": "a", "meta": [{"y": 1}], "messages": [{}]}], []),
        (b'[{"a": 1}, {"a": 2}, {"a": ', [{"a": 1}, {"a": 2}, None], [REST + "the file ends inside"]),
        (b'[{"a": 1}, {"a" 2}, {"a": 3333333333333333333}]', [{"a": 1}, None], [REST + "not JSON (Expecting ':'"]),
        (b'[{"a": 1} {"a": 2}]', [{"a": 1}, None], [REST + "not JSON (needed , or ]"]),
        (b'[{"a": 1}', [{"a": 1}, None], [REST + "the file ends where , or ]"]),
        (b'[{"a": 1}] x', [{"a": 1}, None], [REST + "not JSON ('x' behind"]),
        (b'[{"a": "\xff"}, {"a": 2}]', [None, {"a": 2}], ["not UTF-8 (byte 0xff at character 8 of the row)"]),
        (b'[[1], {"a": 2}]', [None, {"a": 2}], ["needed a JSON object, found a list"]),
        (b'{"train": [{"a": 1}], "test": [{"a": 2}]}', [{"a": 1}, None], ["the list `test` is left out"]),
        (b'\n\n{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}], []),
        (b'{"a": ' + b"x" * 4000 + b'\n{"a": "' + b"y" * 200 + b'"}\n{}\n', [None, {"a": "y" * 200}, {}], ["not JSON (Expecting value"]),
        (b'{"a": \n{"a": 1}\n{"a": 2}\n', [None, {"a": 1}, {"a": 2}], ["not JSON (Expecting value"]),
        (b"5", [None], ["needed a JSON object, found a number"]),
        (b"[]", [], []),
        (b"", [], []),
    ],
)  # fmt: skip
def test_json_document_hides_its_faults(tmp_path: Path, data: bytes, values: list[Any], reasons: list[str]) -> None:
    found = source(tmp_path, "a.json", data)
    rows = list(found.rows())
    assert [row.value for row in rows] == values
    assert [fault.startswith(reason) for (_, fault), reason in zip(faults(rows), reasons, strict=True)] == [True] * len(reasons)
    for skip in range(len(rows) + 2):  # damage is told once, whatever was read before
        assert list(found.rows(skip)) == rows[skip:]


@pytest.mark.parametrize(
    ("data", "values", "reasons"),
    [
        (b"a,b\n1\n2,3\n4,5,6\n", [None, {"a": "2", "b": "3"}, None], ["1 fields where the header has 2", "3 fields where"]),
        (b'a,b\n1,"x"y\n2,z\n', [None, {"a": "2", "b": "z"}], ["not a record ("]),
        (b'a,b\n2,z\n1,"x\n', [{"a": "2", "b": "z"}, None], ["not a record (unexpected end of data)"]),
        (b"a,b\n1,\xe9t\xe9\n2,z\n", [None, {"a": "2", "b": "z"}], ["not UTF-8 (byte 0xe9 at character 1"]),
        (b"a,a\n1,2\n", [None], [REST + "the header names a column twice"]),
        (b'a;b,"c\rd"\r\n"x""\n",""\r\n', [{"a;b": 'x"\n', "c\rd": ""}], []),
        (b"a,b\n", [], []),
    ],
)
def test_table_hides_its_faults(tmp_path: Path, data: bytes, values: list[Any], reasons: list[str]) -> None:
    rows = list(source(tmp_path, "a.csv", data).rows())
    assert [row.value for row in rows] == values
    assert [fault.startswith(reason) for (_, fault), reason in zip(faults(rows), reasons, strict=True)] == [True] * len(reasons)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz"])
def test_damaged_archive_ends_in_silence(tmp_path: Path, name: str) -> None:
    rows = [{"id": str(i), "text": os.urandom(300).hex()} for i in range(2000)]  # 1.2 MB, which does not compress away
    whole = jsonl(rows) if "jsonl" in name else table(rows, ",")
    packed = gzip.compress(whole) if name.endswith("gz") else zstandard.ZstdCompressor(write_checksum=True).compress(whole)
    flipped = bytearray(packed)
    flipped[len(packed) * 3 // 4] ^= 0xFF
    cut = [(packed[: len(packed) // 2], "end in the middle"), (packed[:-2], "end in the middle")]
    for data, reason in (*cut, (bytes(flipped), "damaged")):
        read = list(source(tmp_path, name, data).rows())
        assert f"{REST}the compressed data {'are ' * (reason == 'damaged')}{reason}" in read[-1].fault
        if reason != "damaged":  # where a flipped bit is found depends on the archive
            assert len(read) > 500 and [row.value for row in read[:-1]] == rows[: len(read) - 1]
    found = source(tmp_path, name, packed + b"\0\0")
    assert [row.value for row in found.rows()] == rows


def test_damaged_parquet_stops_the_run(tmp_path: Path) -> None:
    data = bytearray(parquet([{"text": os.urandom(200).hex()} for _ in range(9)]))
    group = pq.ParquetFile(io.BytesIO(bytes(data))).metadata.row_group(1).column(0)
    data[group.dictionary_page_offset or group.data_page_offset] ^= 0xFF
    rows = list(source(tmp_path, "a.parquet", bytes(data)).rows())
    assert [bool(row.value) for row in rows] == [True] * 3 + [False] and "the rest of the file cannot be read" in rows[3].fault
    texts = pa.array([b"ok", b"\xff\xfe", b"ok"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "b.parquet")
    read = list(Source(str(tmp_path / "b.parquet"), "parquet").rows())
    assert [row.value for row in read] == [{"text": "ok"}, None, {"text": "ok"}]
    assert read[1].fault.startswith("not UTF-8 (byte 0xff at byte 1")
    dates = pa.array([2, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["a", "b"], "at": dates}), tmp_path / "c.parquet")
    read = list(Source(str(tmp_path / "c.parquet"), "parquet").rows())
    assert read[0].value and read[0].value["text"] == "a" and read[1].fault.startswith("column `at` cannot be read (")


def test_parquet_gives_a_message_the_keys_of_another(tmp_path: Path) -> None:
    """A column keeps every key of its structs: the arguments of one call would be nulls in the next."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": "z"}}}
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [c]}], "tools": None}
        for c in (call, other)
    ]
    found = source(tmp_path, "a.parquet", parquet(rows))
    values = found.peek()
    assert [value["messages"] for value in values] == [row["messages"] for row in rows]
    item = convert(values[1], format=detect(values), name="n", domain="d", columns={})
    assert item.messages[1]["tool_calls"] == [other] and item.tools == ()  # type: ignore[union-attr]


def test_plain_text_loses_a_character(tmp_path: Path) -> None:
    text = "\r\n\n" + "\n\n".join(f"paragraph {i}\u2028 \r\n of {'words ' * 40}" for i in range(200)) + "\n \n end"
    rows = list(source(tmp_path, "a.txt.gz", gzip.compress(b"\xef\xbb\xbf" + text.encode())).rows())
    assert len(rows) > 4 and "".join(row.value["text"] for row in rows if row.value) == text
    assert all(len(row.value["text"]) >= 8000 and row.value["text"].endswith("\n\n") for row in rows[:-1] if row.value)
    assert [row.value for row in source(tmp_path, "b.md", b"# one\n\ntwo\n").rows()] == [{"text": "# one\n\ntwo\n"}]
    assert faults(list(source(tmp_path, "c.txt", b"ab\xff").rows())) == [(1, "not UTF-8 (byte 0xff at byte 3 of this piece)")]
    assert list(source(tmp_path, "d.txt", b" \n\n").rows()) == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", "{}".encode("utf-16"), "is UTF-16; needed UTF-8. Run: iconv"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), r"is compressed \(gz\), against its ending"),
        ("a.jsonl.gz", b"{}", "is not compressed, against its ending"),
        ("a.parquet", b"{}", "is not Parquet"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "is only a pointer of Git LFS; run: git lfs pull"),
        ("a.xlsx", b"PK", "nobody here reads that ending; needed .jsonl"),
        ("a.parquet.gz", b"PK", "nobody here reads that ending"),
    ],
)
def test_file_that_is_not_what_it_says_is_read(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"{name}:? {message}"):
        source(tmp_path, name, data)


def test_missing_package_is_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectrain.data.sources.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"a.jsonl.zst needs the package zstandard; run: pip install 'spectrain\[zst\]'"):
        source(tmp_path, "a.jsonl.zst", zst(GOOD))


def test_files_are_read_twice_or_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left_out = ("d/README.md", "d/away.jsonl", "d/dataset_info.json", "d/elsewhere", "d/pic.png")
    Path("other").mkdir()
    Path("d").mkdir()
    Path("d/elsewhere").symlink_to("../other")
    Path("d/away.jsonl").symlink_to("nowhere.jsonl")
    left_out_files = (left_out[0], left_out[2], left_out[4])
    for name in ("d/b.jsonl", "d/licences.jsonl", "d/a/x.csv", "d/a/c.JSON.gz", "d/.hidden/y.jsonl", "e.jsonl", *left_out_files):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(gzip.compress(b"{}", mtime=0) if name.endswith("gz") else GOOD)
    found = find_sources(["d", "*.jsonl", "d/**/*.jsonl", "./e.jsonl"])
    assert [s.name for s in found] == ["d/a/c.JSON.gz", "d/a/x.csv", "d/b.jsonl", "d/licences.jsonl", "e.jsonl"]
    assert [s.name for s in find_sources(["d/*"])] == [s.name for s in found][:4], "folders that a pattern meets"
    assert [(s.kind, s.compression) for s in found] == [("json", "gz"), ("csv", ""), *[("jsonl", "")] * 3]
    assert found.left_out == left_out
    assert [s.name for s in find_sources(["d/**/*.jsonl"])] == ["d/b.jsonl", "d/licences.jsonl"]
    assert [s.name for s in find_sources(["d/README.md"])]
    Path("empty").mkdir()
    for name, message in [
        ("d/c.jsonl", "no file d/c.jsonl; in .*/d there is b.jsonl"),
        ("dd/b.jsonl", "no file dd/b.jsonl; in .* there is d"),
        ("d/rows", "no file d/rows; .* hub:org/name"),
        ("*.csv", r"\*.csv holds no data files; found nothing, needed .jsonl"),
        ("empty", "empty holds no data files; found nothing"),
        ("d/*.png", "holds no data files; found .png"),
        ("s3://bucket/a.jsonl", "no file s3:"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_sources([name])
    with pytest.raises(ValueError, match="no input"):
        find_sources([])


def test_changed_content_has_the_old_fingerprint(tmp_path: Path) -> None:
    one = source(tmp_path, "a.jsonl", GOOD)
    first = one.fingerprint()
    assert first == source(tmp_path, "b.jsonl", GOOD).fingerprint() and len(first) == 32
    assert first != source(tmp_path, "a.jsonl", GOOD + b" ").fingerprint()
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ValueError, match="a.jsonl cannot be read: No such file"):
        list(one.rows())


def test_memory_grows_with_the_file(tmp_path: Path) -> None:
    row = json.dumps({"text": "word " * 400})
    for name, data in (("a.jsonl", f"{row}\n" * 8_000), ("a.json", f"[{', '.join([row] * 8_000)}]")):  # 16 MB each
        found = source(tmp_path, name, data.encode())
        tracemalloc.start()
        assert sum(1 for _ in found.rows()) == 8_000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6e6, name


def numbered(size: int) -> IterableDataset:
    return Dataset.from_dict({"n": list(range(size))}).to_iterable_dataset(num_shards=4)


@pytest.mark.parametrize("batched", [None, False, True])
def test_stream_jumps_or_starts_over_after_a_stop(batched: bool | None) -> None:
    """RE2, also through a map, which reads a thousand rows ahead."""
    stream = numbered(5000)
    if batched is not None:
        stream = stream.map(lambda row: {"n": row["n"]}, batched=batched)
    done = 0
    for number in (200, 200, 1):
        rows = list(islice(stream_rows(stream, "s", done), number))
        assert [row.value for row in rows] == [{"n": n} for n in range(done, done + number)]
        assert [row.number for row in rows] == list(range(done + 1, done + number + 1))
        done += number
    assert [row.value["n"] for row in islice(stream_rows(stream, "s", done), 3) if row.value] == [401, 402, 403]
    assert list(stream_rows(stream, "s", 5000)) == []


def test_failing_stream_ends_as_if_it_were_complete() -> None:
    def fail(row: dict[str, int]) -> dict[str, int]:
        if row["n"] == 3:
            raise ConnectionError("lost")
        return row

    read = []
    with pytest.raises(ValueError, match=r"s: reading stopped behind row 3 \(ConnectionError: lost\); run it again"):
        for row in stream_rows(numbered(10).map(fail), "s"):
            read.append(row.number)
    assert read == [1, 2, 3]


def test_data_set_by_name_is_read_from_the_wrong_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_bytes(jsonl([{"id": f"{split}{i}", "text": "x"} for i in range(40)]))
    [train], [test] = find_sources([f"hub:{folder}"]), find_sources([f"hub:{folder}:test"])
    assert train.kind == "hub" and train.name == f"hub:{folder}:train"
    assert [row.value["id"] for row in train.rows(37) if row.value] == ["train37", "train38", "train39"]
    assert [row.value["id"] for row in islice(test.rows(), 2) if row.value] == ["test0", "test1"]
    assert train.fingerprint() == find_sources([f"hub:{folder}:train"])[0].fingerprint()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="hub:no-such/thing cannot be opened .*is the name right"):
        find_sources(["no-such/thing"])
    with pytest.raises(ValueError, match="needed hub:org/name"):
        find_sources(["hub:"])
