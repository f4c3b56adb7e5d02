"""RE2 (preparing from a stream): stopped after 200 rows, and again after 400, the next rows are 200 and 400."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import IterableDataset

from spectrain.config import PrepareConfig
from spectrain.data import prepare as module
from spectrain.data.encoding import Encoding
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore
from spectrain.data.sources import RawRow, Source, stream_rows

COUNT = 5000


def numbers() -> Iterator[dict[str, Any]]:
    yield from ({"n": i} for i in range(COUNT))


def as_row(value: dict[str, Any]) -> dict[str, Any]:
    i = value["n"]
    return {"id": str(i), "input_ids": [6 + i % 90, 6 + i // 90, 7, 8], "loss_mask": [0, 0, 1, 1]}


@dataclass(frozen=True)
class Stream(Source):
    """A mapped stream under a name."""

    def rows(self, skip: int = 0) -> Iterator[RawRow]:
        mapped = IterableDataset.from_generator(numbers).map(as_row, remove_columns=["n"])
        return stream_rows(mapped, self.name, skip)

    def fingerprint(self) -> str:
        return "stream of 5000"


def test_the_next_row_is_the_next_row(tmp_path: Path, make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_sources", lambda names, **more: [Stream("stream", "hub")])
    monkeypatch.setattr(module, "CHUNK_ROWS", 50)
    monkeypatch.setattr(module, "STRETCH_ROWS", 100)
    call, tokenizer = Encoding.__call__, make_tokenizer(100)
    encoded: list[int] = []

    def until(last: int) -> Callable[..., Any]:
        def run(self: Encoding, items: Any) -> Any:
            if items and int(items[0].id) >= last:
                raise KeyboardInterrupt
            encoded.extend(int(item.id) for item in items)
            return call(self, items)

        return run

    for stop in (200, 400):
        monkeypatch.setattr(Encoding, "__call__", until(stop))
        with pytest.raises(KeyboardInterrupt):
            prepare(["any"], tokenizer, tmp_path / "out", PrepareConfig())
        assert encoded == list(range(stop))  # the second time: 200, 201, 202, … and nothing twice
    monkeypatch.setattr(Encoding, "__call__", until(COUNT))
    report = prepare(["any"], tokenizer, tmp_path / "out", PrepareConfig())
    assert encoded[400:405] == [400, 401, 402, 403, 404]
    assert report.state == "resumed"
    assert [row.id for row in RowStore(tmp_path / "out")] == [str(i) for i in range(COUNT)]
