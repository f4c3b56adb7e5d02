"""The exactness grid of benchmarks/exactness.py in small: no difference anywhere, and the grid itself sees faults that are there."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from spectrain.decoding import generate as generator
from spectrain.decoding.sampling import Coins
from spectrain.drafters.scripted import Scripted
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target

TOKENS = 200


@pytest.fixture(scope="module")
def grid():
    """The script as a module; it stands beside the package, not in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("exactness")


@pytest.fixture(scope="module")
def worlds(grid: ModuleType) -> dict[str, Any]:
    made: dict[str, Any] = grid.small_worlds(quick=True)
    return made


def test_answer_is_not_plain_decodings(grid: ModuleType, worlds: dict[str, Any], tmp_path: Path) -> None:
    """SA3: each kind of cell: every answer equal, no tie needed, and enough drafts accepted for that to say something."""
    cells, out = grid.quick_grid(TOKENS), tmp_path / "out.json"
    lines = grid.run(cells, worlds, grid.Store(out, {"code": "a"}))
    assert len(lines) == len(cells) and not [name for name, line in lines.items() if grid.failed(line)]
    assert all(line["equal"] + line["ties"] == line["rows"] and line["tokens"] >= TOKENS for line in lines.values())
    assert sum(line["ties"] for line in lines.values()) == 0, grid.table(lines)
    assert json.loads(out.read_text())["cells"] == lines
    again = grid.run(cells, {}, grid.Store(out, {"code": "a"}))  # nothing is left to run: no world is asked
    assert again == lines and grid.Store(out, {"code": "b"}).cells == {}


def test_some_answers_end_early(worlds: dict[str, Any]) -> None:
    """Rows of one batch end at different times, and drafts reach beyond their ends."""
    for world in worlds.values():
        assert {q.answer.finish_reason for q in world.questions(0)} == {"length"}
        reasons = [q.answer.finish_reason for q in world.questions(1)]
        assert 6 <= reasons.count("stop") <= 18 and len({len(q.answer.tokens) for q in world.questions(1)}) > 3
        for q in world.questions(1):
            assert len(q.longer) == len(q.prompt) + world.new_tokens + 8
            assert q.answer.tokens == list(q.longer[len(q.prompt) : len(q.prompt) + len(q.answer.tokens)])


@pytest.mark.parametrize(
    ("model", "drafter", "shape", "batch"),
    [("llama", "oracle tree", "bushy", 3), ("gemma2", "small model", "dynamic", 8), ("llama", "oracle chain", "chain 4", 8)],
)
def test_grid_misses_a_fault(grid: ModuleType, worlds: dict, monkeypatch, model: str, drafter: str, shape: str, batch: int) -> None:
    """CA1: a cache that keeps the first nodes instead of the accepted path; for chains one that loses the last of three."""
    commit = SlabCache.commit

    def without_path(cache: SlabCache, count_B: torch.Tensor, path_BK: torch.Tensor | None = None) -> None:
        commit(cache, count_B - (count_B == 3).long() if path_BK is None else count_B)

    cell = grid.Cell(model, drafter, shape, batch, TOKENS)
    worlds[model].questions(1)  # plain decoding comes before the fault
    monkeypatch.setattr(SlabCache, "commit", without_path)
    line = grid.run_cell(worlds[model], cell)
    assert line["faults"] > line["rows"] // 3 and grid.failed(line) and line["equal"] < line["rows"]
    assert "token" in line["examples"][0]["what"]


@pytest.mark.parametrize("shape", ["bushy", "dynamic"])
def test_grid_misses_siblings_that_see_each_other(grid: ModuleType, worlds: dict[str, Any], monkeypatch, shape: str) -> None:
    """MK1: nodes see everything before them instead of their ancestors."""
    monkeypatch.setattr(Target, "masks", causal)
    assert grid.run_cell(worlds["llama"], grid.Cell("llama", "oracle tree", shape, 3, TOKENS))["faults"] > 0


def causal(target: Target, cache: SlabCache, line_BNM: torch.Tensor) -> Any:
    all_BNM = torch.ones_like(line_BNM).tril()
    return target.by_kind(lambda window: cache.visible(all_BNM, window))


def test_grid_counts_a_cell_without_acceptance(grid: ModuleType, worlds: dict[str, Any], monkeypatch) -> None:
    """Drafts that are always wrong are exact and prove nothing."""
    world = worlds["llama"]
    cell = grid.Cell("llama", "wrong", "chain 4", 3, TOKENS)
    monkeypatch.setitem(world._drafters, "wrong", Scripted(lambda ids: [2, 2, 2]))
    line = grid.run_cell(world, cell)
    assert line["faults"] == 0 and line["tau"] < 1.5 and not line["enough"] and grid.failed(line)
    assert "does not count" in grid.table({cell.name: line})


def test_grid_misses_an_end(grid: ModuleType, worlds: dict[str, Any], monkeypatch) -> None:
    """Tokens right, reason or record wrong; and seeds that give other tokens alone."""
    cell = grid.Cell("llama", "oracle chain", "chain 4", 3, TOKENS)
    keep = generator.Row.keep

    def forgets(row: Any, new: Any, stream: Any) -> list[int]:
        kept = keep(row, new, stream)
        return kept[:-1] if len(kept) > 2 else kept

    monkeypatch.setattr(generator.Row, "keep", forgets)
    line = grid.run_cell(worlds["llama"], cell)
    assert line["faults"] > line["rows"] // 2 and line["examples"][0]["what"] == "the record of its rounds"
    monkeypatch.undo()
    monkeypatch.setattr(generator, "rows_of", seedless(generator.rows_of))
    sampled = grid.Cell("llama", "small model", "chain 4", 3, TOKENS, rule="block", counts=False)
    assert grid.run_cell(worlds["llama"], sampled)["faults"] > 3


def seedless(rows_of: Any) -> Any:
    """Rows whose coins depend on how many rows there are."""

    def made(target: Target, prompts: Any, **settings: Any) -> Any:
        rows = rows_of(target, prompts, **settings)
        for row in rows:
            row.seed += len(prompts)
        return rows

    return made


def test_coin_on_its_border_passes_for_a_fault(grid: ModuleType, worlds: dict[str, Any], monkeypatch) -> None:
    """Rows whose coins lie a little further in a batch: ties for who allows as much, faults for who allows less."""
    uniform, little = Coins.uniform, 0.004

    def further(coins: Coins, nodes: Any, role: str, number: int = 0) -> torch.Tensor:
        found = uniform(coins, nodes, role, number)
        return (found + little).clamp(max=1 - 2**-53) if len(coins.seed_B) > 1 else found

    cell = grid.Cell("llama", "small model", "bushy", 3, TOKENS, rule="multidraft", counts=False)
    monkeypatch.setattr(Coins, "uniform", further)
    for allowed, kind in ((little, "ties"), (little / 1000, "faults")):
        monkeypatch.setattr(grid, "NUDGE", allowed)
        line = grid.run_cell(worlds["llama"], cell)
        assert line[kind] == line["rows"] - line["equal"] > 0, line
