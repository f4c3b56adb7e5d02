"""The bench by batch: pairs in turns, prompts that run to the end, and a table that measured speeds overrule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.lookup import NGram
from spectrain.evaluation import batches
from spectrain.evaluation.batches import Bench, Kept, calibrate, measure
from spectrain.target.model import Target
from spectrain.yields import Costs

COSTS = Costs(seconds=1.0, v=(1.0, 1.0, 1.0, 1.0), c=0.1)  # by these, three drafts pay


def bench_of(target: Any, prompts: list[list[int]], **changes: Any) -> Bench:
    settings = {"batches": (1, 4), "max_new_tokens": 6, "repeats": 2, "least": 3, "context": 16, "compile": False}
    return Bench(target, prompts, **{**settings, **changes})


def test_short_answers_leave_the_batch(target: Target, fresh_greedy: Callable[..., list[int]]) -> None:
    prompts = [[7 + i, 40 + 3 * i, 12 + 5 * i] for i in range(12)]
    ends = [i for i, ids in enumerate(prompts) if 1 in fresh_greedy(target, ids, 6)]
    found = calibrate(bench_of(target, prompts), NGram(), Chain(3))
    assert found["prompts"] == [i for i in range(12) if i not in ends]
    assert len(found["survival"]) == 3 and found["survival"] == sorted(found["survival"], reverse=True)
    assert 0 < found["share"] <= 1 and all(0 <= chance <= 1 for chance in found["conditional"])
    assert found["survival"][0] == pytest.approx(found["share"] * found["conditional"][0])  # every draft has a first level


def test_no_answer_is_long_enough(table_of_ends: Target) -> None:
    with pytest.raises(ValueError, match="lower --max-new-tokens"):
        calibrate(bench_of(table_of_ends, [[2], [3]]), NGram(), Chain(2))


@pytest.fixture
def table_of_ends(make_table_target: Callable[..., Target]) -> Target:
    """A target whose every answer is the end."""
    import torch

    table_VV = torch.zeros(8, 8)
    table_VV[:, 1] = 9.0
    return make_table_target(table_VV)


def test_pairs_take_other_prompts_than_they_say() -> None:
    bench = bench_of(None, [[i] for i in range(5)])
    assert [bench.sets(b) for b in (1, 2, 4)] == [3, 2, 1] and [bench.pairs(b) for b in (1, 2, 4)] == [6, 4, 2]
    assert [bench.rows(2, pair, [0, 1, 3]) for pair in range(4)] == [[[0], [1]], [[3], [0]]] * 2
    assert bench.rows(4, 0, [0, 1, 3]) == bench.rows(4, 1, [0, 1, 3]) == [[0], [1], [3], [0]]


def fake(monkeypatch: pytest.MonkeyPatch, rates: Callable[[int, int, bool], float], costs: Costs = COSTS) -> list[tuple[int, int, bool]]:
    """Turns whose tokens a second are `rates(rows, depth, adaptive)`; returns the turns that are made."""
    made: list[tuple[int, int, bool]] = []

    def turn(bench: Bench, rows: Any, way: Any, deepest: int, max_new_tokens: int | None = None) -> dict[str, Any]:
        drafter, shape, policy = way
        depth = shape.depth if shape else 0
        if max_new_tokens is None:
            made.append((len(rows), depth, policy is not None))
        rate = rates(len(rows), depth, policy is not None)
        return {"draft": 0.1 * depth, "verify": 1.0, "other": 0.0, "tokens": 1.0 + 0.5 * depth, "nodes": depth, "depth": depth, "rounds": 4,
                "tokens_per_s": rate, "mode": "eager"}  # fmt: skip

    monkeypatch.setattr(batches, "turn", turn)
    known = {"prompts": [0, 1, 2], "survival": [0.6, 0.3, 0.02], "conditional": [0.75, 0.5, 0.1], "share": 0.8, "rounds": 9}
    monkeypatch.setattr(batches, "calibrate", lambda *a: known)
    monkeypatch.setattr(batches, "measure_costs", lambda *a, **k: costs)
    return made


def test_arms_do_not_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake(monkeypatch, lambda rows, depth, adaptive: 10.0 * rows * (1.5 if depth else 1.0))
    bench = bench_of(None, [[5]] * 3, batches=(4,), repeats=4)
    found = measure(bench, Kept(tmp_path / "runs.jsonl", "k"), "ngram", NGram(), Chain(3), print)
    # plain, always, adaptive, and the table's depth, which is another one; each pair begins with the next of them.
    order = [(4, 0, False), (4, 3, False), (4, 3, True), (4, 2, False)]
    assert made == [arm for pair in range(4) for arm in order[pair:] + order[:pair]]
    (row,) = found["rows"]
    assert (row["k"], row["speedup"], row["lo"], row["hi"], row["pairs"]) == (2, 1.5, 1.5, 1.5, 4)
    assert (row["plain"], row["speculative"], row["table"]) == (40.0, 60.0, 60.0) and found["verified"]["met"]
    assert row["predicted"] == pytest.approx(1.92 / 1.3) and row["break_even"] == pytest.approx(1.3) and row["tau"] == 2.5


def test_prediction_outweighs_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs predict a gain where drafting loses: the table drafts nothing there, and the adaptive policy is found too slow."""
    fake(monkeypatch, lambda rows, depth, adaptive: 10.0 * rows * ((0.7 if rows > 1 else 1.4) if depth else 1.0))
    told: list[str] = []
    found = measure(bench_of(None, [[5]] * 3), Kept(tmp_path / "runs.jsonl", "k"), "ngram", NGram(), Chain(3), told.append)
    assert [row["k"] for row in found["rows"]] == [2, 0] and found["corrected"] == {4: 2} and "depth 0 instead of 2 at batch 4" in told[0]
    assert found["policy"]["vllm"]["num_speculative_tokens_per_batch_size"] == [[1, 1, 2], [2, 4, 0]] and found["flips_at"] == 4
    missed = [(row["batch"], row["policy"]) for row in found["verified"]["rows"] if not row["met"]]
    assert missed == [(4, "adaptive")] and not found["verified"]["met"]


def test_kept_results_are_made_again(tmp_path: Path) -> None:
    made: list[int] = []
    make = lambda: made.append(1) or {"x": 1.5}  # noqa: E731
    kept = Kept(tmp_path / "runs.jsonl", "a")
    assert kept.once(make, "pair", 1) == kept.once(make, "pair", 1) == {"x": 1.5} and made == [1]
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"key": "a", "of": ["pai')  # cut off
    again = Kept(tmp_path / "runs.jsonl", "a")
    assert again.has("pair", 1) and not again.has("pair", 2) and not Kept(tmp_path / "runs.jsonl", "b").has("pair", 1)
    again.once(make, "pair", 2)
    assert Kept(tmp_path / "runs.jsonl", "a").has("pair", 2)


def test_batch_drains(target: Target) -> None:
    """Rows that have their answer go on, so that no round is of fewer rows; only the answers' own rounds make tau."""
    rows = [[7, 40, 12], [9, 9, 9, 9], [3, 30, 8]]
    bench = bench_of(target, [], max_new_tokens=12)
    found = batches.turn(bench, rows, (NGram(), Chain(2), None), 2)
    apart = [generate(target, [r], drafter=NGram(), shape=Chain(2), max_new_tokens=12, ignore_eos=True, compile=False) for r in rows]
    needed = [len(one.rows[0].rounds) for one in apart]
    assert len(set(needed)) > 1 and found["rounds"] == 11 and found["tokens"] == pytest.approx(3 * 11 / sum(needed))
    seconds = found["draft"] + found["verify"] + found["other"]
    assert found["tokens_per_s"] == pytest.approx(3 * found["tokens"] / seconds) and found["mode"] == "eager"
    assert 0 < found["nodes"] <= 2 and 0 < found["depth"] <= 2
    assert batches.turn(bench, rows, (None, None, None), 2)["tokens"] == 1.0


def test_disturbed_turn_is_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three turns with each of two sets one is half as fast: the median of a set is what counts, in the total over sets."""
    turns = {"plain": 0}

    def rates(rows: int, depth: int, adaptive: bool) -> float:
        if depth:
            return 30.0
        turns["plain"] += 1
        return 5.0 if turns["plain"] in (2, 5) else 10.0 if turns["plain"] % 2 else 20.0

    fake(monkeypatch, rates)
    bench = bench_of(None, [[5]] * 3, batches=(2,), repeats=3, least=4)
    (row,) = measure(bench, Kept(tmp_path / "runs.jsonl", "k"), "ngram", NGram(), Chain(3), print)["rows"]
    assert (row["pairs"], row["sets"]) == (6, 2) and row["plain"] == pytest.approx(2 / (1 / 10 + 1 / 20))
    assert (row["lo"], row["hi"], row["speculative"]) == (1.5, 3.0, 30.0)
