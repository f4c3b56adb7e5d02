"""Figures from records: what is summed, what is divided, and over what an interval is taken."""

import itertools
import random
from typing import Any

import pytest

from spectrain.decoding.generate import StepRecord
from spectrain.evaluation.measure import Record
from spectrain.evaluation.metrics import RESAMPLES, acceptance, bootstrap, ratio, ratio_of_ratios, speed_cell, tau_table


def record(*rounds: tuple[int, int, int], phases: dict[str, float] | None = None, decode: float = 0.0, **changes: Any) -> Record:
    """An answer with rounds (drafted, accepted, committed); its first token comes from the prompt's pass."""
    tokens = 1 + sum(committed for *_, committed in rounds)
    steps = [StepRecord(*r, phases or {}) for r in rounds]
    fields = {"arm": "a", "mode": "tau", "id": "1", "domain": "d", "seconds": decode, **changes}
    return Record(tokens=list(range(tokens)), decode_seconds=decode, rounds=steps, **fields)


def plain(number: int, *, decode: float, **changes: Any) -> Record:
    return record(*[(0, 0, 1)] * number, decode=decode, **changes)


SHORT = record((2, 2, 3), (2, 0, 1))  # 4 tokens in 2 rounds
LONG = record(*[(2, 0, 1)] * 8)  # 8 tokens in 8 rounds
FULL = record((3, 3, 4), (3, 3, 4))  # 8 tokens in 2 rounds


def test_tau_is_a_mean_of_means() -> None:
    """(4 + 8) / (2 + 8) = 1.2 and not (2 + 1) / 2; all domains: 20 / 12; macro: (1.2 + 4) / 2."""
    table = tau_table({"x": [SHORT, LONG], "y": [FULL]}, 3)
    assert list(table) == ["x", "y", "all (micro)", "all (macro)"]
    assert table["x"]["tau"] == 12 / 10 and table["y"]["tau"] == 4.0
    assert table["all (micro)"]["tau"] == 20 / 12 and table["all (macro)"]["tau"] == pytest.approx((1.2 + 4) / 2)
    assert [(table[key]["tokens"], table[key]["rounds"], table[key]["prompts"]) for key in table] == [
        (12, 10, 2), (8, 2, 1), (20, 12, 3), (20, 12, 3),
    ]  # fmt: skip


def test_token_of_the_prompts_pass_is_counted() -> None:
    """An answer of one token has no round: it neither adds to tau nor divides by it."""
    alone = record()
    assert len(alone.tokens) == 1
    assert tau_table({"x": [SHORT, alone]}, 2)["x"]["tau"] == 2.0
    assert tau_table({"x": [alone]}, 2)["x"] == {
        "tau": 0.0, "lo": None, "hi": None, "tokens": 0, "rounds": 0, "prompts": 1, "acceptance": [0.0, 0.0], "conditional": [],
    }  # fmt: skip


def test_stop_inside_a_block_is_counted_as_rejected() -> None:
    """The rule accepted 3, a stop kept 2: tau has 2, acceptance 3."""
    cell = tau_table({"x": [record((3, 3, 2))]}, 3)["x"]
    assert cell["tau"] == 2.0 and cell["acceptance"] == [1.0, 1.0, 1.0]


def test_conditional_acceptance_is_shown_as_unconditional() -> None:
    """EV1: P(1) = 0.7 and P(2 | 1) = 0.5 give 0.7 + 0.35 = 1.05 accepted drafts, not 1.2."""
    rounds = [(2, 0)] * 6 + [(2, 1)] * 7 + [(2, 2)] * 7
    unconditional, conditional = acceptance(rounds, 2)
    assert unconditional == [0.7, 0.35] and conditional == [0.7, 0.5] and sum(unconditional) == pytest.approx(1.05)
    cell = tau_table({"x": [record(*[(d, a, a + 1) for d, a in rounds])]}, 2)["x"]
    assert cell["tau"] == pytest.approx(2.05) and (cell["acceptance"], cell["conditional"]) == (unconditional, conditional)


def test_rounds_without_a_draft_leave_the_denominator() -> None:
    """EV1: a round in which nothing was drafted is a round in which nothing was accepted."""
    assert acceptance([(0, 0), (0, 0), (3, 2), (3, 0)], 3) == ([0.25, 0.25, 0.0], [0.25, 1.0, 0.0])


def test_position_never_reached_is_a_division_by_zero() -> None:
    assert acceptance([(2, 0)], 3) == ([0.0, 0.0, 0.0], [0.0])
    assert acceptance([], 2) == ([0.0, 0.0], []) and acceptance([(0, 0)], 0) == ([], [])


def test_interval_changes_from_call_to_call() -> None:
    samples = [(float(a), 2.0) for a in (1, 5, 3, 9, 2, 2)]
    state = random.getstate()
    first = bootstrap(samples, ratio)
    random.random()
    assert bootstrap(samples, ratio) == first and bootstrap(samples, ratio, seed=1) != first
    random.setstate(state)
    bootstrap(samples, ratio)
    assert random.getstate() == state


def test_interval_leaves_out_the_value() -> None:
    rng = random.Random(0)
    for size in (1, 2, 3, 5, 20):
        samples = [(rng.random() * 9, 1 + rng.random()) for _ in range(size)]
        found = bootstrap(samples, ratio)
        assert found.value == ratio(samples) and found.lo <= found.value <= found.hi and (found.lo < found.hi) == (size > 1)
    table = tau_table({"x": [SHORT, LONG], "y": [FULL, SHORT]}, 2)
    assert all(cell["lo"] <= cell["tau"] <= cell["hi"] for cell in table.values())


def test_rounds_of_one_prompt_pass_for_independent() -> None:
    """With one prompt there is nothing to resample, however many rounds it has: no interval, and none over domains either."""
    found = tau_table({"x": [LONG], "y": [FULL, SHORT]}, 2)
    assert found["x"]["tau"] == 1.0 and [found[key][end] for key in ("x", "all (macro)") for end in ("lo", "hi")] == [None] * 4
    assert found["y"]["lo"] < found["y"]["hi"] and found["all (micro)"]["lo"] < found["all (micro)"]["hi"]
    assert speed_cell([LONG], [LONG])["lo"] is None and speed_cell([LONG] * 2, [LONG] * 2)["lo"] is not None


def test_interval_is_not_95_percent() -> None:
    numbers = itertools.count()
    found = bootstrap([1], lambda _: float(next(numbers)))
    assert (found.lo, found.hi, found.value) == (25.0, 974.0, float(RESAMPLES))


def test_macro_interval_mixes_domains() -> None:
    """Prompts are drawn again within their own domain: two domains of equal prompts have no spread."""
    cell = tau_table({"x": [LONG] * 2, "y": [FULL] * 2}, 2)["all (macro)"]
    assert cell["lo"] == cell["tau"] == cell["hi"] == 2.5


def test_no_prompts_is_a_figure() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        bootstrap([], ratio)
    assert ratio([]) == 0.0 and ratio_of_ratios([(1.0, 1.0, 0.0, 0.0)]) == 0.0


def test_speed_up_is_a_mean_of_rates() -> None:
    """EV2: 100 tokens in 2 s and 100 in 10 s against 1 s and 10 s: 12 / 11, not (2 + 1) / 2 or 55 / 30."""
    base = [plain(100, decode=2.0), plain(100, decode=10.0)]
    drafted = [record(*[(1, 1, 2)] * 50, decode=s) for s in (1.0, 10.0)]
    cell = speed_cell(drafted, base)
    assert cell["speedup"] == pytest.approx(12 / 11) and cell["tokens_per_s"] == pytest.approx(200 / 11)
    assert (cell["tokens"], cell["prompts"], cell["seconds"], cell["tau"]) == (200, 2, 11.0, 2.0)
    assert cell["lo"] == pytest.approx(1.0) and cell["hi"] == pytest.approx(2.0)  # one prompt twice, the other twice


def test_costs_do_not_add_up_to_the_break_even() -> None:
    """A plain round takes 1 s, a drafted one 1.1 s of verifying, 0.2 s of drafting and 0.2 s of the rest."""
    base = [plain(10, decode=10.0)]
    cell = speed_cell([record(*[(1, 1, 2)] * 4, decode=6.0, phases={"verify": 1.1, "draft": 0.2, "accept": 0.1})], base)
    assert [cell[key] for key in ("v", "draft", "other", "break_even", "tau")] == pytest.approx([1.1, 0.2, 0.2, 1.5, 2.0])
    assert cell["speedup"] == pytest.approx(2.0 / 1.5)


def test_speed_up_is_not_tau_over_break_even() -> None:
    rng = random.Random(3)
    for _ in range(20):
        base = [plain(rng.randint(1, 30), decode=rng.uniform(0.5, 5)) for _ in range(4)]
        phases = {"verify": rng.random() / 9, "draft": rng.random() / 9}
        arm = [record(*[(3, a, a + 1) for a in rng.choices(range(4), k=9)], decode=rng.uniform(2, 5), phases=phases) for _ in base]
        cell = speed_cell(arm, base)
        assert cell["speedup"] == pytest.approx(cell["tau"] / cell["break_even"])
        assert cell["v"] + cell["draft"] + cell["other"] == pytest.approx(cell["break_even"])
        assert cell["lo"] <= cell["speedup"] <= cell["hi"]


def test_plain_decoding_is_faster_than_itself() -> None:
    base = [plain(7, decode=2.0), plain(9, decode=3.0)]
    cell = speed_cell(base, base)
    assert [cell[key] for key in ("speedup", "lo", "hi", "tau", "break_even", "end_to_end")] == pytest.approx([1.0] * 6)


def test_prompts_pass_is_in_the_decoding_speed() -> None:
    """10 + 1 tokens: 5 s of rounds and 5 s of the prompt's pass, against 10 s and 5 s."""
    base, arm = plain(10, decode=10.0, seconds=15.0), record(*[(1, 1, 2)] * 5, decode=5.0, seconds=10.0)
    cell = speed_cell([arm], [base])
    assert cell["speedup"] == pytest.approx(2.0) and cell["end_to_end"] == pytest.approx(1.5)
    assert cell["tokens"] == 10 and cell["tokens_per_s"] == pytest.approx(2.0)


def test_arms_with_other_prompts_are_compared() -> None:
    with pytest.raises(ValueError):
        speed_cell([SHORT], [SHORT, LONG])


def test_answers_of_one_token_are_a_division_by_zero() -> None:
    cell = speed_cell([record(decode=0.0)], [record(decode=0.0)])
    assert cell["speedup"] == 0.0 and cell["tau"] == 0.0 and cell["tokens"] == 0
