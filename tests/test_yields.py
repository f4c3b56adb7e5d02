"""Formulas of what a draft is worth."""

import json
from dataclasses import asdict, replace

import pytest

from spectrain.yields import (
    Costs,
    Roofline,
    best_depth,
    best_depth_for,
    break_even,
    expected_tokens,
    experts_touched,
    marginal_depth,
    speedup,
    tau_from_survival,
    tree_tau,
)

COSTS = Costs(seconds=0.1, v=(1.0, 1.1, 1.3), c=0.2, by_batch={4: (2.0, 3.0, 4.5), 8: (3.0, 5.0, 8.5)})


def test_formula_is_not_the_closed_form() -> None:
    for alpha in (0.0, 0.3, 0.8):
        for gamma in range(6):
            assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
    assert expected_tokens(1.0, 4) == 5.0 and expected_tokens(0.0, 0) == 1.0


# arXiv 2211.17192, equation 1: rows alpha, columns gamma 1 to 10.
TABLE = {
    0.5: [1.50, 1.75, 1.88, 1.94, 1.97, 1.98, 1.99, 2.00, 2.00, 2.00],
    0.6: [1.60, 1.96, 2.18, 2.31, 2.38, 2.43, 2.46, 2.47, 2.48, 2.49],
    0.7: [1.70, 2.19, 2.53, 2.77, 2.94, 3.06, 3.14, 3.20, 3.24, 3.27],
    0.8: [1.80, 2.44, 2.95, 3.36, 3.69, 3.95, 4.16, 4.33, 4.46, 4.57],
    0.9: [1.90, 2.71, 3.44, 4.10, 4.69, 5.22, 5.70, 6.13, 6.51, 6.86],
}


def test_published_table_is_missed() -> None:
    for alpha, row in TABLE.items():
        assert [expected_tokens(alpha, gamma) for gamma in range(1, 11)] == pytest.approx(row, abs=0.0051), alpha
    assert expected_tokens(0.5, 60) == pytest.approx(1 / (1 - 0.5))  # the limit
    for alpha, row in TABLE.items():  # the measured-survival form is the closed one where acceptance is independent
        assert tau_from_survival([alpha**i for i in range(1, 11)], 4) == pytest.approx(row[3], abs=0.0051)


@pytest.mark.parametrize(("alpha", "c", "gain"), [(0.8, 0.05, 2.80), (0.8, 0.15, 2.10), (0.5, 0.15, 1.21), (0.4, 0.30, 0.75)])
def test_published_cases_are_missed(alpha: float, c: float, gain: float) -> None:
    """Four drafts that are verified at the price of one position; a loss is a loss."""
    assert speedup(alpha, 4, c) == pytest.approx(gain, abs=0.005)


@pytest.mark.parametrize(("alpha", "gamma"), [(-0.1, 2), (1.1, 2), (0.5, -1), (float("nan"), 1)])
def test_arguments_without_meaning_are_taken(alpha: float, gamma: int) -> None:
    with pytest.raises(ValueError, match="needed 0 <= alpha <= 1"):
        expected_tokens(alpha, gamma)


def test_costs_are_left_out() -> None:
    assert break_even(4, 0.1, 1.5) == pytest.approx(1.9) and break_even(0, 0.1) == 1.0
    assert speedup(0.8, 4, 0.1, 1.5) == pytest.approx(3.3616 / 1.9) and speedup(0.5, 0, 0.3) == 1.0


def test_survival_is_read_as_conditional() -> None:
    """EV1: P(1) = 0.7, P(2 | 1 right) = 0.5: accepted drafts for length 2 are 1.05."""
    assert tau_from_survival([0.7, 0.35], 2) == pytest.approx(2.05) and tau_from_survival([0.7, 0.35], 1) == pytest.approx(1.7)
    assert tau_from_survival([0.7], 5) == pytest.approx(1.7)


def test_depth_that_loses_is_advised() -> None:
    assert best_depth([0.9, 0.8, 0.7], c=0.1, v=[1.0, 1.0, 1.0, 1.0]) == (3, pytest.approx(3.4 / 1.3))
    assert best_depth([0.9, 0.8, 0.7], c=0.1, v=[1.0, 1.0, 3.0, 3.0]) == (1, pytest.approx(1.9 / 1.1))
    assert best_depth([0.9, 0.8, 0.7], c=0.1, v=[1.0, 1.0]) == (1, pytest.approx(1.9 / 1.1))
    assert best_depth([0.1], c=0.5, v=[1.0, 1.5]) == (0, 1.0)
    assert best_depth([], c=0.5, v=[1.0, 1.5]) == (0, 1.0)


@pytest.mark.parametrize(
    ("n", "batch", "cost"),
    [
        (1, 1, 1.0), (3, 1, 1.3), (5, 1, 1.7), (2, 4, 3.0), (4, 4, 6.0),  # measured; beyond v by its last slope
        (2, 2, 1.1 + 1.9 / 3), (2, 6, 4.0), (2, 10, 6.0), (5, 10, 15.5 + 2 * (15.5 - 7.5) / 4),  # between batches, beyond them, both
    ],
)  # fmt: skip
def test_cost_between_sizes_is_guessed(n: int, batch: int, cost: float) -> None:
    assert COSTS.verify(n, batch) == pytest.approx(cost)


def test_noise_makes_large_passes_free() -> None:
    """Measured times may fall from one size to the next; beyond the last they must not."""
    costs = Costs(seconds=1.0, v=(1.0, 1.2, 1.1), c=0.0, by_batch={2: (0.9, 1.1, 1.1)})
    assert costs.verify(50) == 1.1 and costs.verify(1, 50) == pytest.approx(0.9) and costs.verify(40, 50) == pytest.approx(1.1)


def test_batch_without_measurement_is_taken_as_free() -> None:
    """v(n, B) depends on n * B (roofline): 3 positions of 4 rows cost what 12 of one row do."""
    costs = replace(COSTS, by_batch=None)
    assert costs.verify(3, 4) == costs.verify(12) == pytest.approx(1.3 + 9 * 0.2)
    assert costs.break_even(2, 2, 4) == pytest.approx((0.4 + costs.verify(12)) / costs.verify(4))
    assert Costs(1.0, (1.0, 1.2), 0.1, by_batch={1: (1.0, 9.0)}).verify(1, 2) == 1.2
    assert Costs(1.0, (1.0, 1.2), 0.1, by_batch={1: (1.0, 9.0), 2: (1.0, 1.2)}).verify(2) == 1.2  # v it is, at batch 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"v": ()}, "v needs"), ({"v": (1.0, 0.0)}, "v needs"), ({"v": (1.0, float("nan"))}, "v needs"), ({"c": -0.1}, "c >= 0"),
        ({"seconds": 0.0}, "seconds > 0"), ({"by_batch": {2: (1.0, float("inf"))}}, r"by_batch\[2\]"), ({"by_batch": {0: (1.0,)}}, "1 row"),
    ],
)  # fmt: skip
def test_costs_without_meaning_are_taken(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(COSTS, **fields)


def test_costs_change_on_their_way_through_a_file() -> None:
    assert Costs(**json.loads(json.dumps(asdict(COSTS)))) == COSTS and hash(COSTS)


def test_slope_is_made_up() -> None:
    with pytest.raises(ValueError, match="measure at least two"):
        Costs(1.0, (1.0,), 0.1).verify(2)
    with pytest.raises(ValueError, match="at least one position"):
        COSTS.verify(0)


@pytest.mark.parametrize(
    ("alpha", "c", "slope", "depth", "gain"),
    [
        (0.5, 0.04, 0.02, 3, 1.59), (0.8, 0.04, 0.02, 7, 2.93), (0.9, 0.1, 0.05, 8, 2.78), (0.7, 0.1, 0.25, 2, 1.29),
        (0.6, 0.25, 0.02, 2, 1.27),
    ],
)  # fmt: skip
def test_marginal_rule_stops_elsewhere(alpha: float, c: float, slope: float, depth: int, gain: float) -> None:
    """A table worked out by hand from E / (g c + v), v growing by `slope` a position."""
    costs = Costs(seconds=1.0, v=(1.0, 1.0 + slope), c=c)
    assert marginal_depth([alpha] * 20, costs) == (depth, pytest.approx(gain, abs=0.005))
    # Both sides of the rule: the last draft pays more than the average, the next one less.
    assert alpha**depth / (c + slope) > gain - 0.005 > alpha ** (depth + 1) / (c + slope) - 0.01


def test_batch_and_steps_of_v_are_overlooked() -> None:
    assert marginal_depth([0.6] * 8, COSTS, batch=8)[0] == 0 < marginal_depth([0.6] * 8, COSTS)[0]
    # A tile of 4 positions: depth 1 loses, depth 3 is what the step was paid for.
    tiled = Costs(seconds=1.0, v=(1.0, 1.6, 1.6, 1.6, 2.6, 2.6), c=0.01)
    assert marginal_depth([0.6, 0.9, 0.9, 0.9], tiled)[0] == 3
    # Rows that differ: survival is their mean, depth 2 of (1, 1) and (0, 0).
    mixed = Costs(seconds=1.0, v=(1.0, 1.0, 1.0), c=0.2, by_batch={2: (2.0, 2.2, 2.4)})
    assert best_depth_for([0.5, 0.5], mixed, batch=2) == (2, pytest.approx(2.0 / ((0.4 + 2.4) / 2.0)))
    assert marginal_depth([], COSTS) == (0, 1.0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        marginal_depth([0.5, 1.2], COSTS)


def test_tree_counts_a_node_without_its_path() -> None:
    table = [[0.6, 0.2], [0.5, 0.3, 0.1]]
    assert tree_tau([(0,), (1,), (0, 0), (0, 1), (1, 2)], table) == pytest.approx(1 + 0.6 + 0.2 + 0.3 + 0.18 + 0.02)
    assert tree_tau([(0,), (2,), (0, 0), (0, 3), (0, 0, 0)], table) == pytest.approx(1 + 0.6 + 0.3)
    assert tree_tau([], []) == 1.0


@pytest.mark.parametrize("table", [[[0.7, 0.4]], [[0.5], [-0.1]], [[float("nan")]]])
def test_table_of_no_chances_is_taken(table: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="acceptance table, depth"):
        tree_tau([], table)


def test_rest_of_a_round_is_free() -> None:
    """Phases in plain decoding's rounds; n-gram drafts cost the same however deep, a head's first draft comes with the settled tokens."""
    costs = replace(COSTS, start=-0.1, other=0.3, plain=0.25)
    assert costs.phases(2, 2) == pytest.approx({"draft": 0.3 / 1.25, "verify": 1.3 / 1.25, "other": 0.3 / 1.25})
    assert costs.break_even(2, 2) == pytest.approx(1.9 / 1.25) and costs.step() == pytest.approx(0.2 / 1.25)
    assert costs.phases(0, 0)["draft"] == 0.0 and replace(costs, c=0.01).phases(1, 1)["draft"] == 0.0
    assert costs.phases(1, 1.5)["verify"] == pytest.approx(1.2 / 1.25)  # a mean of rounds
    assert best_depth_for([0.6, 0.3], costs) == (1, pytest.approx(1.6 * 1.25 / 1.5))


def test_rest_of_a_round_is_the_same_in_every_batch() -> None:
    costs = replace(COSTS, plain=0.5, beside={4: (0.6, 0.2, 0.8, 1.0), 8: (1.0, 0.2, 1.2, 3.0)})
    assert costs.phases(1, 1, 4) == pytest.approx({"draft": 0.8 / 3, "verify": 1.0, "other": 0.8 / 3})
    assert costs.phases(1, 1, 6)["other"] == pytest.approx(1.0 / (2.5 + 2.0))  # between batches
    assert costs.step(2) == pytest.approx((0.2 + 0.4 / 3) / (4 / 3 + 2 / 3))
    assert costs.phases(1, 1)["draft"] == pytest.approx(0.2 / 1.5)  # batch 1 has its own
    assert Costs(**json.loads(json.dumps(asdict(costs)))) == costs
    with pytest.raises(ValueError, match="measure the costs again"):
        replace(COSTS, beside={2: (0.1, 0.1)})
    with pytest.raises(ValueError, match="measure the costs again"):
        replace(COSTS, other=float("nan"))


# An H100's data sheet, and a dense model of 8e9 weights of two bytes.
H100 = {"flops": 989e12, "bandwidth": 3.35e12}
DENSE = Roofline(**H100, weight_bytes=16e9, token_flops=16e9)


def test_batch_is_called_memory_bound() -> None:
    """Batch 64 with 4 drafts: 320 positions against a ridge of 295."""
    assert DENSE.ridge == pytest.approx(295.2, abs=0.05)
    assert DENSE.intensity(5, 64) == pytest.approx(320) and DENSE.intensity(5, 8) == pytest.approx(40)
    assert DENSE.seconds(1) == pytest.approx(16e9 / 3.35e12) == DENSE.seconds(5, 58)  # 290 positions are free
    assert DENSE.seconds(5, 64) == pytest.approx(320 * 16e9 / 989e12) and DENSE.seconds(1, 64) == DENSE.seconds(1)
    assert DENSE.verify(5, 64) == pytest.approx(320 / 295.2, rel=1e-3) and DENSE.verify(5) == 1.0


def test_best_depth_is_the_same_at_every_batch() -> None:
    """Free positions make deep drafts pay; beyond the ridge each one is paid for."""
    costs = DENSE.costs(11, (1, 16, 64, 256, 512), c=0.05)
    depths = [best_depth_for([0.7**i for i in range(1, 11)], costs, batch=batch)[0] for batch in (1, 16, 64, 256, 512)]
    assert depths == sorted(depths, reverse=True) and depths[0] >= 5 and depths[-1] == 0


def test_cache_and_experts_are_not_read() -> None:
    assert experts_touched(8, 2, 1) == pytest.approx(2) and experts_touched(8, 2, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert experts_touched(8, 2, 100) == pytest.approx(8) and experts_touched(8, 8, 1) == 8
    with pytest.raises(ValueError, match="0 < active <= experts"):
        experts_touched(8, 9, 1)
    mixture = replace(DENSE, weight_bytes=4e9, expert_bytes=64e9, active=1 / 8, token_flops=24e9)
    assert mixture.work(1) == pytest.approx((24e9, 12e9)) and mixture.work(2)[1] == pytest.approx(4e9 + 64e9 * (1 - (7 / 8) ** 2))
    assert mixture.verify(5) > 2 * DENSE.verify(5)  # v grows early: more tokens touch more experts
    cached = replace(DENSE, kv_bytes=131072, attention_flops=524288)
    assert cached.work(2, 3, 1000) == pytest.approx((6 * (16e9 + 524288e3), 16e9 + 3 * 131072e3))
    assert cached.intensity(5, 64, 8192) < DENSE.intensity(5, 64)
