"""EV3: training rows in the test split; domains lost in mixing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.config import PrepareConfig
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore

COUNT = 12_501


@pytest.fixture(scope="module")
def prepared(make_tokenizer: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RowStore]:
    folder = tmp_path_factory.mktemp("ev3")
    tokenizer = make_tokenizer(200)

    def make(lines: list[dict[str, Any]], **settings: Any) -> Path:
        name = str(len(list(folder.iterdir())))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return prepare([str(folder / f"{name}.jsonl")], tokenizer, folder / name, PrepareConfig(**settings)).folder

    return make


def tokens(i: int, domain: str = "d") -> dict[str, Any]:
    return {"id": f"{domain}{i}", "domain": domain, "input_ids": [6 + i % 190, 6 + i // 190, 7, 8], "loss_mask": [0, 0, 1, 1]}


def test_the_two_parts_are_exact_and_disjoint(prepared: Callable[..., Path]) -> None:
    from spectrain.data.filters import split_size

    folder = prepared([tokens(i) for i in range(COUNT)], validation=0.8)
    parts = [{row.id for row in RowStore(folder, part)} for part in ("train", "validation")]
    assert [len(part) for part in parts] == [2_500, 10_001]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {f"d{i}" for i in range(COUNT)}
    for tenth in range(1, 10):  # training share 0.1 to 0.9
        assert COUNT - split_size(COUNT, round(1 - tenth / 10, 1)) == COUNT * tenth // 10


def test_a_mix_cut_to_its_half_keeps_both_sources(prepared: Callable[..., Path]) -> None:
    lines = [tokens(i, domain) for domain in "AB" for i in range(1_000)]
    for i, line in enumerate(lines):
        line["input_ids"][2] = 6 + i // 1_000
    folder = prepared(lines, max_rows=1_000)
    store = RowStore(folder)
    assert len(store) == 1_000
    assert 400 <= (store.domains == "A").sum() <= 600
    places = sorted(int(row.id[1:]) for row in store if row.domain == "A")
    assert places[: len(places)] != list(range(len(places)))  # not the head of the list
    domains = json.loads((folder / "prepared.json").read_text())["coverage"]["domains"]
    assert {name: (d["read"], d["kept"]) for name, d in domains.items()} == {"A": (1_000, 1_000), "B": (1_000, 1_000)}


@pytest.mark.parametrize("deduplicate", [True, False])
def test_rows_equal_after_rendering_stay_on_one_side(prepared: Callable[..., Path], deduplicate: bool) -> None:
    def chat(i: int, spaces: int) -> dict[str, Any]:
        said = [{"role": "user", "content": f"w{10 + i}" + " " * spaces}, {"role": "assistant", "content": "w7 w8"}]
        return {"id": f"{i}-{spaces}", "messages": said}

    folder = prepared([chat(i, spaces) for spaces in range(3) for i in range(60)], validation=0.5, deduplicate=deduplicate)
    sides = [{tuple(row.ids_L) for row in RowStore(folder, part)} for part in ("train", "validation")]
    assert sides[0] and sides[1] and not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 60
    report = json.loads((folder / "prepared.json").read_text())["coverage"]
    assert report["rejected"] == ({"rendered duplicate": 120} if deduplicate else {})
    assert report["rows"]["kept"] == (60 if deduplicate else 180)
