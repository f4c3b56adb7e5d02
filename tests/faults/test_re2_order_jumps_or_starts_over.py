"""RE2: training batches over rows 0 ... 4999 go on where a run stopped, after the first stop and after the second."""

import json

import numpy as np
import pytest

from spectrain.data.order import Order, Planner, Sizes

ROWS = 5000


def order_at(state: dict[str, int]) -> Order:
    """A new object at a stored place, as after a restart."""
    sizes = Sizes(np.full(ROWS, 9), np.full(ROWS, 4), np.zeros(ROWS, np.int64), ("d",))
    order = Order(Planner(sizes, per_batch=1, seed=0, quota={"d": ROWS}).plan, epochs=2)
    order.go_to(json.loads(json.dumps(state)))
    return order


def next_rows(order: Order, count: int, window: int) -> list[int]:
    return [i for _ in range(count // window) for lines in order.take(window)[0] for line in lines for i in line]


@pytest.mark.parametrize("windows", [(1, 1, 1), (2, 4, 1), (8, 1, 4)])
def test_next_row_after_a_restart_is_another(windows: tuple[int, int, int]) -> None:
    whole = next_rows(order_at({"epoch": 0, "batches": 0}), 2 * ROWS, 1)
    assert sorted(whole[:ROWS]) == sorted(whole[ROWS:]) == list(range(ROWS)) and whole[:ROWS] != whole[ROWS:]
    order = order_at({"epoch": 0, "batches": 0})
    assert next_rows(order, 200, windows[0]) == whole[:200]
    order = order_at(order.state)
    assert next_rows(order, 200, windows[1]) == whole[200:400]  # begins 200, 201, …
    order = order_at(order.state)
    assert next_rows(order, 200, windows[2]) == whole[400:600]  # not 0, not 1000
    assert next_rows(order_at({"epoch": 1, "batches": 4992}), 8, windows[2]) == whole[-8:]
