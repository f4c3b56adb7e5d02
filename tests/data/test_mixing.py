"""Domains by weight: how many rows of each, and that all of them come up."""

from collections import Counter

import numpy as np
import pytest

from spectrain.data.mixing import draw, shares, shuffled


def test_permutation_depends_on_more_than_its_key() -> None:
    """The order is pinned: another one would make checkpoints of a stopped run go on elsewhere."""
    assert shuffled(8, 0, 0, "rows").tolist() == shuffled(8, 0, 0, "rows").tolist() == PINNED
    assert sorted(shuffled(1000, 1)) == list(range(1000)) and len(shuffled(0, 1)) == 0
    assert len({tuple(shuffled(50, *key)) for key in ((0, 0), (0, 1), (1, 0), ("0", 0))}) == 4


PINNED = [5, 1, 0, 3, 6, 2, 7, 4]


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        (None, None, {"a": 100, "b": 20, "c": 1}),
        ({"a": 1, "b": 1, "c": 0}, None, {"a": 61, "b": 60, "c": 0}),
        ({"a": 1, "b": 3, "c": 0}, 100, {"a": 25, "b": 75, "c": 0}),
        ({"a": 1, "b": 1, "c": 1}, 100, {"a": 34, "b": 33, "c": 33}),
        (None, 60, {"a": 50, "b": 10, "c": 1}),  # a domain with a weight is never lost
        ({"a": 0.1, "b": 0.2, "c": 0.7}, 10, {"a": 1, "b": 2, "c": 7}),
    ],
)
def test_rows_of_a_domain_are_not_by_its_weight(weights, total, expected: dict[str, int]) -> None:
    assert shares({"a": 100, "b": 20, "c": 1}, weights, total) == expected


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "no weight for b; the rows' domains are a, b"),
        ({"a": 1, "b": 1, "cod": 2}, "no rows of cod; the rows' domains are a, b"),
        ({"A": 1}, "no weight for a, b; no rows of A"),
        ({"a": 0, "b": 0}, r"every domain 0 \(a, b\)"),
        ({"a": float("inf"), "b": 1}, r"adds up to inf \(a, b\); needed finite shares"),
        ({"a": 1e308, "b": 1e308}, r"adds up to inf"),
    ],
)
def test_unknown_or_forgotten_domain_is_taken(weights, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shares({"a": 3, "b": 4}, weights, None)


@pytest.mark.parametrize("number", [1, 7, 12, 13, 30, 40])
def test_rows_come_twice_while_others_wait(number: int) -> None:
    """12 rows: within an epoch no row is drawn two times more than another, nor over any number of epochs."""
    domain_N = np.array([0, 1, 1, -1] * 12)
    drawn = [draw(domain_N, ("b", "a"), {"b": number, "a": 0}, seed=5, epoch=e).tolist() for e in range(14)]
    rows = [i for i in range(48) if domain_N[i] == 0]
    for some in (*drawn, *([i for epoch in drawn[:n] for i in epoch] for n in range(2, 15))):
        times = [Counter(some)[i] for i in rows]
        assert sum(times) == len(some) and max(times) - min(times) <= 1
    assert all(len(epoch) == number for epoch in drawn) and set(drawn[0] + drawn[-1]) <= set(rows)
    assert drawn[0] == draw(domain_N, ("b", "a"), {"b": number, "a": 0}, seed=5, epoch=0).tolist()


def test_mixture_is_all_one_source() -> None:
    """EV3: sources of 1,000 rows each, mixed and cut to 1,000."""
    domain_N = np.repeat([0, 1], 1000)
    for weights in (None, {"A": 1, "B": 1}):
        quota = shares({"A": 1000, "B": 1000}, weights, 1000)
        rows = draw(domain_N, ("A", "B"), quota, seed=0, epoch=0)
        assert 400 <= (rows < 1000).sum() <= 600 and len(set(rows.tolist())) == len(rows) == 1000
        assert (rows < 200).sum() not in (0, 200)  # not the head of the list
