"""Formulas of what a draft is worth."""

import pytest

from spectrain.yields import best_depth, break_even, expected_tokens, speedup, tau_from_survival


def test_formula_is_not_the_closed_form() -> None:
    for alpha in (0.0, 0.3, 0.8):
        for gamma in range(6):
            assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
    assert expected_tokens(1.0, 4) == 5.0 and expected_tokens(0.0, 0) == 1.0


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
