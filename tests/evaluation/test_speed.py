"""Costs measured here and now, and the depth that they advise."""

from collections.abc import Callable
from typing import Any

import pytest

from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.evaluation import speed
from spectrain.evaluation.speed import Costs, advise_depth, measure_costs
from spectrain.target.model import Target


def test_units_of_the_costs_are_mixed_up(target: Target, make_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over n positions takes 1 + n seconds and four steps of the head together 6: v(n) = (1 + n) / 2, c = 1.5 / 2."""
    head, steps, passes = make_head(target), [], []
    extend, forward = head.extend, Target.forward
    monkeypatch.setattr(head, "extend", lambda *args: (steps.append(1), extend(*args))[1])
    monkeypatch.setattr(Target, "forward", lambda self, ids, **kw: (passes.append(ids.shape[1]), forward(self, ids, **kw))[1])

    def timed(run: Callable[[], None], device: Any) -> float:
        steps.clear(), passes.clear()
        run()
        return 6.0 if steps else 1.0 + passes[0]

    monkeypatch.setattr(speed, "_timed", timed)
    costs = measure_costs(target, HeadDrafter(head), context=9, sizes=4, repeats=1)
    assert len(steps) == 4 and not passes
    assert costs == Costs(seconds=2.0, v=(1.0, 1.5, 2.0, 2.5), c=0.75)


def test_sizes_between_are_guessed_wrongly(target: Target, make_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the named sizes are timed, 1 always; between them costs lie on a line."""
    passes: list[int] = []
    forward = Target.forward
    monkeypatch.setattr(Target, "forward", lambda self, ids, **kw: (passes.append(ids.shape[1]), forward(self, ids, **kw))[1])

    def timed(run: Callable[[], None], device: Any) -> float:
        passes.clear()
        run()
        return {1: 1.0, 3: 2.0, 7: 4.0}[passes[0]] if passes else 1.0

    monkeypatch.setattr(speed, "_timed", timed)
    costs = measure_costs(target, HeadDrafter(make_head(target)), context=9, sizes=(7, 3), repeats=1)
    assert costs.v == (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)


def test_measuring_changes_the_answers(target: Target, make_head: Callable[..., Any]) -> None:
    """CA2: the same answer and the same accepted lengths before and after; costs are positive numbers."""
    head = HeadDrafter(make_head(target))

    def run() -> tuple[list[int], list[int]]:
        row = generate(target, [[7, 8, 9]], drafter=head, shape=Chain(3), max_new_tokens=12).rows[0]
        return row.tokens, [r.accepted for r in row.rounds]

    before = run()
    costs = measure_costs(target, head, context=12, sizes=3, repeats=2)
    assert run() == before
    assert costs.v[0] == 1.0 and len(costs.v) == 3 and min(*costs.v, costs.c, costs.seconds) > 0


def test_depth_is_advised_without_its_cost() -> None:
    costs = Costs(seconds=0.1, v=(1.0, 1.1, 1.2), c=0.1)
    assert advise_depth([0.9, 0.8, 0.7], costs) == (2, pytest.approx(2.7 / 1.4))
    assert advise_depth([0.05, 0.0], costs) == (0, 1.0)
