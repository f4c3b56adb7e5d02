"""Rows on disk: mapped, planned from an index, checked on opening."""

import json
import multiprocessing
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.config import PrepareConfig
from spectrain.data import prepare as module
from spectrain.data import row_store
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore, read_arrow, record_batch, write_arrow
from spectrain.data.rows import Row, rows_sha256


def line(i: int) -> dict[str, Any]:
    ids = [6 + i % 50, 6 + i // 50, *range(7, 8 + i % 9), 60]
    mask = [0] * (1 + i % 2) + [1] * (len(ids) - 1 - i % 2)
    return {"id": f"r{i}ä", "domain": "even" if i % 2 == 0 else "odd", "input_ids": ids, "loss_mask": mask}


@pytest.fixture(scope="module")
def folder(make_tokenizer: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 rows in several files, a quarter of them kept out."""
    where = tmp_path_factory.mktemp("store")
    (where / "in.jsonl").write_text("".join(json.dumps(line(i)) + "\n" for i in range(100)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_ROWS", 8)
        patch.setattr(module, "STRETCH_ROWS", 8)
        prepare([str(where / "in.jsonl")], make_tokenizer(100), where / "out", PrepareConfig(validation=0.25))
    assert len(list((where / "out" / "rows").iterdir())) == 13
    return where / "out"


@pytest.fixture(autouse=True)
def few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "OPEN_FILES", 3)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, tmp_path / "copy"))


def expected() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(line, range(100))}


def test_every_row_comes_back_as_it_was(folder: Path) -> None:
    rows = expected()
    parts = [RowStore(folder), RowStore(folder, "validation"), RowStore(folder, part="unused")]
    assert [len(part) for part in parts] == [75, 25, 0]
    for row in (row for part in parts for row in part):
        wanted = rows.pop(row.id)
        assert (row.ids_L.tolist(), row.mask_L.tolist()) == (wanted["input_ids"], wanted["loss_mask"])
        assert (row.domain, row.group) == (wanted["domain"], row.id)
        assert (row.ids_L.dtype, row.mask_L.dtype) == (np.int32, np.uint8)
    assert not rows


def test_planning_needs_no_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RowStore(folder)
    wanted = [(len(r), r.supervised, len(r.prompt_ids), r.domain) for r in store]
    again = RowStore(folder)
    monkeypatch.setattr(RowStore, "_place", None)
    arrays = again.lengths_N, again.supervised_N, again.prompt_N, again.domains
    assert list(zip(*(a.tolist() for a in arrays), strict=True)) == wanted


def test_it_is_a_sequence(folder: Path) -> None:
    store = RowStore(folder)
    assert store[-1].id == store[len(store) - 1].id == list(store)[-1].id
    assert [row.id for row in store[2:5]] == [store[i].id for i in (2, 3, 4)]
    assert store[np.int64(3)] == store[3]  # numbers of a plan
    for i in (len(store), -len(store) - 1):
        with pytest.raises(IndexError, match=f"row {i} of 75"):
            store[i]


def test_a_row_is_a_copy_that_torch_may_have(folder: Path) -> None:
    store = RowStore(folder)
    row = store[0]
    torch.from_numpy(row.ids_L).zero_()  # would warn, or fault, on mapped memory
    assert store[0].ids_L.any()


def test_the_hash_of_the_whole_is_that_of_its_rows(folder: Path) -> None:
    train, validation = RowStore(folder), RowStore(folder, "validation")
    assert rows_sha256(list(train)) == train.rows_sha256 == rows_sha256(train)
    assert rows_sha256(list(validation)) == validation.rows_sha256 != train.rows_sha256
    assert rows_sha256(list(train)[::-1]) != train.rows_sha256
    assert all(train.digest(i) == row.digest for i, row in enumerate(train))


def read_ids(store: RowStore, numbers: list[int], out: Any) -> None:
    out.put([store[i].id for i in numbers])


def test_it_can_be_sent_and_forked(folder: Path) -> None:
    store = RowStore(folder)
    numbers = list(range(0, 75, 5))
    wanted = [store[i].id for i in numbers]
    assert [pickle.loads(pickle.dumps(store))[i].id for i in numbers] == wanted
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    child = context.Process(target=read_ids, args=(store, numbers, out))
    child.start()
    assert out.get(timeout=20) == wanted
    child.join()


def test_a_random_row_is_fast(folder: Path) -> None:
    store = RowStore(folder)
    numbers = [i % 10 for i in range(2000)]  # of the files that are open

    def once() -> float:
        start = time.perf_counter()
        for i in numbers:
            store[i]
        return (time.perf_counter() - start) / len(numbers)

    assert min(once() for _ in range(5)) < 50e-6


def test_an_empty_file_of_rows_is_one(tmp_path: Path) -> None:
    write_arrow(tmp_path / "x", record_batch([]))
    assert len(read_arrow(tmp_path / "x")) == 0


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "rows/00003.arrow").unlink(), "00003.arrow is missing"),
        (lambda f: (f / "rows/00003.arrow").write_bytes(b"x"), "00003.arrow has 1 bytes instead of"),
        (lambda f: (f / "index.arrow").unlink(), "index.arrow is missing"),
        (lambda f: (f / "prepared.json").unlink(), "holds rows that are not finished"),
        (lambda f: (f / "prepared.json").write_text("{"), "prepared.json is damaged"),
        (lambda f: (f / "prepared.json").write_text('{"format": 0}'), "needed format 1, found 0"),
    ],
)
def test_a_store_that_is_not_whole_is_refused(copy: Path, harm: Callable[[Path], Any], message: str) -> None:
    harm(copy)
    with pytest.raises(ValueError, match=message):
        RowStore(copy)


def test_what_is_no_store_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        RowStore(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no prepared rows"):
        RowStore(tmp_path)
    with pytest.raises(ValueError, match="parts train, validation, unused, not 'test'"):
        RowStore(folder, "test")


def test_a_changed_byte_is_found(copy: Path) -> None:
    RowStore(copy).check()
    path = copy / "rows" / "00000.arrow"
    content = path.read_bytes()
    ids = np.array(line(5)["input_ids"], np.int32).tobytes()
    assert ids in content
    path.write_bytes(content.replace(ids, ids[:-4] + np.array([61], np.int32).tobytes()))
    faults = []
    for part in ("train", "validation"):
        try:
            RowStore(copy, part).check()
        except ValueError as error:
            faults.append(str(error))
    assert len(faults) == 1 and "00000.arrow, row r5ä" in faults[0]


def test_rows_of_one_content_are_equal() -> None:
    row = Row(id="a", domain="d", ids_L=np.array([1, 2]), mask_L=np.array([0, 1]))
    assert row == Row(id="a", domain="d", ids_L=[1, 2], mask_L=[0, 1])  # type: ignore[arg-type]
    assert row.digest != Row(id="b", domain="d", ids_L=row.ids_L, mask_L=row.mask_L).digest
    assert row.digest != Row(id="a", domain="d", ids_L=row.ids_L, mask_L=np.array([1, 1])).digest
