"""Plans and order: every row once, little padding, lines that fit, the same batches whoever takes them."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from spectrain.data.order import Order, Plan, Planner, Sizes, check_lines, dealt, row_shares, sizes
from spectrain.data.rows import Row

LENGTHS = np.array([(7 * i) % 50 + 5 for i in range(101)])
WEIGHTS = np.maximum(0, LENGTHS - 8)
DOMAINS = np.arange(101) % 3
SIZES = Sizes(LENGTHS, WEIGHTS, DOMAINS, ("a", "b", "c"))


def planner(**changes) -> Planner:
    return replace(Planner(SIZES, per_batch=120, seed=3, quota=row_shares(SIZES, None)), **changes)


def listed(plan: Plan) -> list[list[list[int]]]:
    return [plan[k] for k in range(len(plan))]


@pytest.mark.parametrize("packing", [None, 54, 60, 200, 10**6])
@pytest.mark.parametrize("per_batch", [1, 40, 120, 10**9])
def test_row_is_left_out_or_comes_twice(per_batch: int, packing: int | None) -> None:
    batches = listed(planner(per_batch=per_batch, packing=packing).plan(0))
    assert sorted(i for batch in batches for line in batch for i in line) == [i for i, w in enumerate(WEIGHTS) if w]
    for batch in batches:
        assert sum(WEIGHTS[i] for line in batch for i in line) <= per_batch or len(batch) == 1
        assert all(LENGTHS[line].sum() <= packing if packing else len(line) == 1 for line in batch)


def test_lines_are_half_empty() -> None:
    batches = listed(planner(packing=100).plan(0))
    used = [LENGTHS[line].sum() for batch in batches for line in batch]
    assert np.mean(used) > 93


def test_order_differs_after_a_resume() -> None:
    for packing in (None, 100):
        made = planner(packing=packing)
        assert listed(made.plan(0)) == listed(made.plan(0)) == listed(planner(packing=packing).plan(0))
        assert listed(made.plan(1)) != listed(made.plan(0)) != listed(replace(made, seed=4).plan(0))


def test_batches_are_mostly_padding_or_always_sorted() -> None:
    batches = [[line[0] for line in batch] for batch in listed(planner().plan(0))]
    padded = sum(len(b) * max(LENGTHS[i] for i in b) for b in batches)
    assert padded < 1.25 * sum(LENGTHS[i] for b in batches for i in b)
    first = [max(LENGTHS[i] for i in b) for b in batches]
    assert first != sorted(first) and first != sorted(first, reverse=True)


def test_no_rows_break_the_plan() -> None:
    for lengths, weights, expected in (([], [], []), ([4, 5], [0, 0], []), ([4], [9], [[[0]]])):
        some = Sizes(np.array(lengths, int), np.array(weights, int), np.zeros(len(lengths), int), ("a",))
        made = Planner(some, per_batch=5, seed=0, quota={"a": sum(w > 0 for w in weights)})
        assert listed(made.plan(0)) == expected


def test_weights_change_more_than_the_shares() -> None:
    quota = row_shares(SIZES, {"a": 1, "b": 2, "c": 0})
    rows = [i for batch in listed(planner(quota=quota).plan(2)) for line in batch for i in line]
    assert {d: sum(DOMAINS[i] == n for i in rows) for n, d in enumerate("abc")} == quota and len(rows) == (WEIGHTS > 0).sum()


def test_row_without_two_tokens_in_a_line_is_planned() -> None:
    masks = [(0, 1, 1), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 0, 0), (1, 1, 1), (1,)]
    rows = [Row(str(i), "xy"[i % 2], [1] * len(m), m) for i, m in enumerate(masks)]
    found = sizes(rows)
    assert found.length_N.tolist() == [3, 3, 3, 3, 3, 3, 1] and found.supervised_N.tolist() == [2, 0, 0, 0, 0, 3, 0]
    assert found.domains == ("x", "y") and found.domain_N.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert row_shares(found, None) == {"x": 1, "y": 1}


class Stored:
    """A row store that refuses to give a row."""

    lengths_N, supervised_N = np.array([9, 8, 7], np.int32), np.array([3, 1, 2], np.int32)
    domain_N, domain_names = np.array([1, 0, 1], np.int32), ("y", "x")


def test_planning_reads_rows() -> None:
    found = sizes(Stored())
    assert found.domains == ("x", "y") and found.domain_N.tolist() == [0, 1, 0] and found.supervised_N.tolist() == [3, 0, 2]
    assert found.length_N.tolist() == [9, 8, 7] and found.length_N.dtype == np.int64


def test_row_longer_than_a_line_is_cut() -> None:
    rows = [Row(name, "d", [1] * n, [1] * n) for name, n in (("short", 5), ("long one", 9), ("longer", 12))]
    check_lines(rows, sizes(rows), None)
    check_lines(rows, sizes(rows), 12)
    with pytest.raises(ValueError, match="row 'long one' has 9 tokens, 2 rows are longer than a line of 8; needed lines of at least 12"):
        check_lines(rows, sizes(rows), 8)


def test_batch_is_lost_or_doubled_when_the_processes_change() -> None:
    """Two processes, then four, then one, each with another accumulation, stopped in mid-epoch: the batches of one run, in its order."""
    made, epochs = planner(packing=60), 3
    whole = [batch for e in range(epochs) for batch in listed(made.plan(e))]
    state, taken = {"epoch": 0, "batches": 0}, []
    for window, steps in ((2 * 1, 9), (4 * 2, 4), (1, 3), (3, 10**6)):
        order = Order(made.plan, epochs)
        order.go_to(json.loads(json.dumps(state)))
        left = order.steps_left(window)
        for n in range(min(steps, left)):
            assert order.steps_left(window) == left - n
            batches, _ = order.take(window)
            assert 1 <= len(batches) <= window
            taken += batches
        state = order.state
    assert taken == whole and order.take(5) == ([], False) and order.steps_left(4) == 0


@pytest.mark.parametrize("packing", [None, 100])
@pytest.mark.parametrize(("world", "accumulation"), [(2, 1), (2, 3), (8, 1)])
def test_processes_wait_for_the_one_with_most_work(world: int, accumulation: int, packing: int | None) -> None:
    """A step keeps its lines; its longest share of work shrinks, no batch grows beyond the largest, and one process has its batches."""
    order = Order(planner(packing=packing, per_batch=240).plan, 2)
    waits, before = 0, 0
    for _ in range(order.steps_left(world * accumulation)):
        batches, _ = order.take(world * accumulation)
        batches += [[]] * (world * accumulation - len(batches))
        parts = dealt(batches, SIZES, world)
        assert dealt(batches, SIZES, 1) == batches and len(parts) == len(batches)
        assert sorted(line for part in parts for line in part) == sorted(line for lines in batches for line in lines)
        padded, was = (max(len(b) * max(LENGTHS[line].sum() for line in b) for b in some if b) for some in (parts, batches))
        assert padded <= was
        shares = ([[i for b in some[r::world] for line in b for i in line] for r in range(world)] for some in (parts, batches))
        found, earlier = (max(WEIGHTS[share].sum() for share in of_all) for of_all in shares)
        waits, before = waits + found, before + earlier
    assert waits < before, (waits, before)


def test_line_that_fits_nowhere_is_dealt() -> None:
    """Many short lines, and a long one whose batch they would widen: all stays as it was."""
    some = Sizes(np.array([10, 10, 9, 9]), np.array([1, 1, 9, 9]), np.zeros(4, int), ("a",))
    batches = [[[0], [1]], [[2], [3]]]
    assert sorted(map(sorted, dealt(batches, some, 2))) == [[[0], [2]], [[1], [3]]]
    wide = replace(some, length_N=np.array([30, 9, 9, 9]))
    assert dealt([[[0]], [[1], [2], [3]]], wide, 2) == [[[0]], [[1], [2], [3]]]


@pytest.mark.parametrize(
    ("window", "marks", "expected"), [(1, 2, [3, 5, 8, 10]), (2, 1, [3, 6]), (4, 2, [1, 2, 3, 4]), (5, 4, [1, 2]), (1, 1, [5, 10])]
)
def test_marks_move_with_the_window(window: int, marks: int, expected: list[int]) -> None:
    """Five batches an epoch, two epochs: steps after which a mark was passed; the same when each step is a run of its own."""
    plan = Plan(np.arange(5), np.arange(6), np.arange(6))
    state, found = {"epoch": 0, "batches": 0}, []
    for step in range(1, Order(lambda epoch: plan, 2).steps_left(window) + 1):
        order = Order(lambda epoch: plan, 2)
        order.go_to(state)
        if order.take(window, marks)[1]:
            found.append(step)
        state = order.state
    assert found == expected and Order(lambda epoch: plan, 2).steps_left(1, at_most=3) == 3


@pytest.mark.parametrize("packing", [None, 2048])
def test_planning_a_large_store_takes_long(packing: int | None) -> None:
    """100,000 rows in a second of this process's time; it takes a quarter, and time goes with the number of rows."""
    rng = np.random.default_rng(0)
    length = rng.integers(30, 2000, 100_000)
    many = Sizes(length, length // 3, rng.integers(0, 4, 100_000), tuple("abcd"))
    started = time.process_time()
    plan = Planner(many, per_batch=2048, seed=1, quota=row_shares(many, dict(a=1, b=2, c=3, d=1)), packing=packing).plan(1)
    assert time.process_time() - started < 1.0 and len(plan.rows_R) == 100_000
