"""Costs measured here and now, the depth that they advise, and predicted against measured speed-up."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spectrain.decoding.generate import Result, RowResult, generate
from spectrain.decoding.rows import StepRecord
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram
from spectrain.evaluation import speed
from spectrain.evaluation.speed import Costs, advise_depth, gap, mean_draft, measure_costs, measure_passes, round_time, with_rounds
from spectrain.target.model import Target

PASS = 2.0  # seconds of a pass over one position in the rounds below


def round_of(rows: int, depth: int, **seconds: float) -> StepRecord:
    return StepRecord(depth, 0, 1, {phase: s / rows for phase, s in seconds.items()}, depth=depth, nodes=1 + depth)


def answers(rows: int, rounds: int, round: StepRecord, *, rest: float = 0.0) -> Result:
    seconds = rows * rounds * sum(round.seconds.values()) + rest + rows * 5.0  # 5: the prompt's pass, a row
    return Result([RowResult([1] * (rounds + 1), "", "length", [round] * rounds, 0, 4, 5.0) for _ in range(rows)], seconds)


def test_units_of_the_costs_are_mixed_up(target: Target, make_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over n positions takes 1 + n seconds; a chain of 5 drafts 0.5 + 4 x 1.5 seconds, one of 1 draft 0.5; accepting takes 1
    second with drafts and 0.4 without. The machine is half as fast while rounds are timed."""
    passes: list[int] = []
    forward = Target.forward
    monkeypatch.setattr(Target, "forward", lambda self, ids, **kw: (passes.append(ids.shape[1]), forward(self, ids, **kw))[1])

    def timed(run: Callable[[], None], device: Any) -> float:
        passes.clear()
        run()
        return 1.0 + passes[0]

    def generated(target: Target, prompts: Any, *, shape: Any, **how: Any) -> Result:
        depth = shape.depth if shape else 0
        phases = {"verify": 2.0 + depth, "accept": 0.7 if depth else 0.4, "commit": 0.3 if depth else 0.0}
        if depth:
            phases["draft"] = 0.5 + 1.5 * (depth - 1)
        return answers(len(prompts), 12, round_of(len(prompts), depth, **{phase: 2 * s for phase, s in phases.items()}))

    monkeypatch.setattr(speed, "_timed", timed)
    monkeypatch.setattr(speed, "generate", generated)
    costs = measure_costs(target, HeadDrafter(make_head(target)), context=9, sizes=6, repeats=1)
    assert costs.seconds == PASS and costs.v == (1.0, 1.5, 2.0, 2.5, 3.0, 3.5) and costs.beside is None
    assert (costs.c, costs.start, costs.other, costs.plain) == pytest.approx((0.75, -0.5, 0.5, 0.2))
    assert costs.phases(5, 5) == pytest.approx({"draft": 3.25 / 1.2, "verify": 3.5 / 1.2, "other": 0.5 / 1.2})
    batched = measure_costs(target, NGram(), shape=Chain(3), context=9, sizes=4, repeats=1, batches=(2,))
    assert batched.by_batch is not None and batched.beside is not None and set(batched.beside) == {1, 2}
    assert batched.beside[2] == pytest.approx((0.75, -0.5, 0.5, 0.2))  # here a batch costs what a row does


def test_sizes_between_are_guessed_wrongly(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the named sizes are timed, 1 always; between them costs lie on a line."""
    passes: list[int] = []
    forward = Target.forward
    monkeypatch.setattr(Target, "forward", lambda self, ids, **kw: (passes.append(ids.shape[1]), forward(self, ids, **kw))[1])

    def timed(run: Callable[[], None], device: Any) -> float:
        passes.clear()
        run()
        return {1: 1.0, 3: 2.0, 7: 4.0}[passes[0]]

    monkeypatch.setattr(speed, "_timed", timed)
    assert measure_passes(target, context=9, sizes=(7, 3), repeats=1).v == (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)


def test_measuring_changes_the_answers(target: Target, make_head: Callable[..., Any]) -> None:
    """CA2: the same answer and the same accepted lengths before and after; costs are positive numbers."""
    head = HeadDrafter(make_head(target))

    def run() -> tuple[list[int], list[int]]:
        row = generate(target, [[7, 8, 9]], drafter=head, shape=Chain(3), max_new_tokens=12).rows[0]
        return row.tokens, [r.accepted for r in row.rounds]

    before = run()
    drafts: Any = {"chain": (head, Chain(2)), "tree": (head, Tree.dynamic(2, 2, 3)), "ngram": (NGram(), Chain(3))}
    costs = with_rounds(target, drafts, measure_passes(target, context=24, sizes=4, repeats=2), context=24, repeats=1)
    assert run() == before and set(costs) == set(drafts)
    for found in costs.values():
        assert found.v[0] == 1.0 and len(found.v) == 4 and min(*found.v, found.seconds, found.plain) > 0 and found.c >= 0
        assert found.v == costs["chain"].v and found.phases(2, 2)["draft"] > 0


def test_rounds_after_the_first_row_ended_count() -> None:
    """Of rows of 4 and 8 rounds those count that both had, but for the last; setup outside the rounds is shared by all of them."""
    whole = answers(2, 8, round_of(2, 2, draft=1.0, verify=2.0, commit=0.5), rest=4.0)
    short = replace(whole.rows[0], rounds=[*whole.rows[0].rounds[:3], round_of(1, 2, draft=9.0, verify=9.0)])
    clocked = sum(sum(r.seconds.values()) for row in (short, whole.rows[1]) for r in row.rounds)
    found = round_time(replace(whole, rows=[short, whole.rows[1]], seconds=clocked + 10.0 + 4.0))
    assert (found.draft, found.verify, found.other, found.tokens) == pytest.approx((1.0, 2.0, 0.5 + 4.0 / 8, 1.0))
    assert found.sizes == (3, 3, 3)


def test_depth_is_advised_without_its_cost() -> None:
    costs = Costs(seconds=0.1, v=(1.0, 1.1, 1.2), c=0.1)
    assert advise_depth([0.9, 0.8, 0.7], costs) == (2, pytest.approx(2.7 / 1.4))
    assert advise_depth([0.05, 0.0], costs) == (0, 1.0)
    assert advise_depth([0.9, 0.8], replace(costs, other=2.0, plain=0.1)) == (0, 1.0)  # accepting eats the gain


def test_rounds_without_a_draft_are_left_out() -> None:
    records = [SimpleNamespace(rounds=[round_of(1, 3), round_of(1, 0)]), SimpleNamespace(rounds=[round_of(1, 1), round_of(1, 4)])]
    assert mean_draft(records) == (2.0, 2.0) and mean_draft([]) == (0.0, 0.0)
    assert mean_draft(records, Tree.dynamic(4, 5, 8)) == (15 / 4, 2.0)  # every draft grew five levels


def test_gap_does_not_add_up() -> None:
    """Half of the rounds draft nothing: their pass costs 1, that of the others 1.6, though passes over the mean of 2 cost 1.5."""
    costs = Costs(seconds=0.1, v=(1.0, 1.5, 1.6), c=0.1, start=-0.05, other=0.1, plain=0.0)
    records = [SimpleNamespace(rounds=[round_of(1, 2), round_of(1, 0)])]
    timed = {"tau": 1.5, "draft": 0.25, "v": 1.5, "other": 0.05, "speedup": 1.5 / 1.8, "break_even": 1.8}
    found = gap(costs, {"tau": 1.8}, timed, records, Chain(2))
    assert found["costs"] == pytest.approx({"draft": 0.05, "verify": 1.3, "other": 0.1})
    assert found["predicted"] == pytest.approx(1.8 / 1.45) and found["measured"] == pytest.approx(1.5 / 1.8)
    assert sum(found["by"].values()) == pytest.approx(math.log(found["predicted"] / found["measured"])) == math.log(found["ratio"])
    assert found["by"]["tau"] == pytest.approx(math.log(1.2)) and found["by"]["draft"] > 0 > found["by"]["other"]
    exact = gap(costs, {"tau": 1.5}, {**timed, "draft": 0.05, "v": 1.3, "other": 0.1, "speedup": 1.5 / 1.45}, records, Chain(2))
    assert exact["ratio"] == pytest.approx(1.0) and all(abs(part) < 1e-9 for part in exact["by"].values())
