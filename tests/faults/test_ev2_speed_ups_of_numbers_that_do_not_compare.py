"""EV2: a speed-up is a ratio of totals; tokens are ids in both runs, and accepted length is over all rounds of all turns."""

import pytest

from spectrain.decoding.rows import StepRecord
from spectrain.evaluation.measure import Record
from spectrain.evaluation.metrics import speed_cell, tau_table


def answer(number: int, *, turn: int = 0, rounds: int, tokens_a_round: int, decode: float, prefill: float = 0.0) -> Record:
    steps = [StepRecord(tokens_a_round - 1, tokens_a_round - 1, tokens_a_round, {}) for _ in range(rounds)]
    ids = list(range(1 + rounds * tokens_a_round))
    return Record("a", "speed", str(number), "d", ids, decode + prefill, decode, steps, turn=turn)


def test_rates_of_questions_are_averaged() -> None:
    """100 tokens in 2 s and 100 in 10 s against 1 s and 10 s: 12 / 11 from totals; the means of rates give 55 / 30 = 1.83."""
    base = [answer(i, rounds=100, tokens_a_round=1, decode=s) for i, s in enumerate((2.0, 10.0))]
    drafted = [answer(i, rounds=50, tokens_a_round=2, decode=s) for i, s in enumerate((1.0, 10.0))]
    assert speed_cell(drafted, base)["speedup"] == pytest.approx(12 / 11)


def test_runs_of_unlike_length_compare_unseen() -> None:
    """Answers of other lengths are rates all the same, and the cell says both numbers of tokens."""
    base, drafted = [answer(0, rounds=100, tokens_a_round=1, decode=10.0)], [answer(0, rounds=25, tokens_a_round=2, decode=2.5)]
    cell = speed_cell(drafted, base)
    assert (cell["tokens"], cell["plain_tokens"], cell["speedup"]) == (50, 100, 2.0)


def test_warm_up_or_prompt_is_inside_the_clock() -> None:
    base = [answer(0, rounds=10, tokens_a_round=1, decode=10.0, prefill=90.0)]
    assert speed_cell([answer(0, rounds=5, tokens_a_round=2, decode=5.0, prefill=90.0)], base)["speedup"] == 2.0


def test_accepted_length_is_of_the_last_turn_alone() -> None:
    """Two turns: 4 rounds of 4 tokens, then 16 of 1: 32 / 20 = 1.6, neither 1 nor the mean of both, 2.5."""
    turns = [answer(0, turn=t, rounds=r, tokens_a_round=n, decode=1.0) for t, (r, n) in enumerate(((4, 4), (16, 1)))]
    assert tau_table({"d": turns}, 3)["d"]["tau"] == 1.6
