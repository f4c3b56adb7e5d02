"""Figures from records: what is summed, what is divided, and over what an interval is taken."""

import itertools
import random
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from spectrain.decoding.generate import StepRecord
from spectrain.evaluation.measure import Record
from spectrain.evaluation.metrics import (
    RESAMPLES,
    Z95,
    acceptance,
    bootstrap,
    by_prompt,
    ratio,
    ratio_of_ratios,
    resamples,
    speed_cell,
    t_quantile,
    tail,
    tau_table,
)

NUMBERS = itertools.count()


def record(*rounds: tuple[int, int, int], phases: dict[str, float] | None = None, decode: float = 0.0, **changes: Any) -> Record:
    """An answer of a prompt of its own, with rounds (drafted, accepted, committed); its first token comes from the prompt's pass."""
    tokens = 1 + sum(committed for *_, committed in rounds)
    steps = [StepRecord(*r, phases or {}) for r in rounds]
    fields = {"arm": "a", "mode": "tau", "id": str(next(NUMBERS)), "domain": "d", "seconds": decode, **changes}
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
    micro, macro = table["all (micro)"], table["all (macro)"]
    assert len(micro["acceptance"]) == 3 and macro["acceptance"] == macro["conditional"] == [] and "lengths" not in macro


def test_token_of_the_prompts_pass_is_counted() -> None:
    """An answer of one token has no round: it neither adds to tau nor divides by it."""
    alone = record()
    assert len(alone.tokens) == 1
    assert tau_table({"x": [SHORT, alone]}, 2)["x"]["tau"] == 2.0
    assert tau_table({"x": [alone]}, 2)["x"] == {
        "tau": 0.0, "lo": None, "hi": None, "tokens": 0, "rounds": 0, "prompts": 1, "acceptance": [0.0, 0.0], "conditional": [],
        "draft_acceptance": None, "lengths": [0.0, 0.0, 0.0],
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
        assert found.value == ratio(np.sum(samples, axis=0)) and found.lo <= found.value <= found.hi and (found.lo < found.hi) == (size > 1)
    table = tau_table({"x": [SHORT, LONG], "y": [FULL, SHORT]}, 2)
    assert all(cell["lo"] <= cell["tau"] <= cell["hi"] for cell in table.values())


def test_rounds_of_one_prompt_pass_for_independent() -> None:
    """With one prompt there is nothing to resample, however many rounds it has: no interval, and none over domains either."""
    found = tau_table({"x": [LONG], "y": [FULL, SHORT]}, 2)
    assert found["x"]["tau"] == 1.0 and [found[key][end] for key in ("x", "all (macro)") for end in ("lo", "hi")] == [None] * 4
    assert found["y"]["lo"] < found["y"]["hi"] and found["all (micro)"]["lo"] < found["all (micro)"]["hi"]
    assert speed_cell([LONG], [LONG])["lo"] is None and speed_cell([LONG, SHORT], [LONG, SHORT])["lo"] is not None


def test_turns_of_one_prompt_pass_for_independent() -> None:
    """Two prompts of three turns each are two samples, in tau as in speed; the turns of one prompt have no interval."""
    easy = [record(*[(1, 1, 2)] * 4, id="easy", turn=t, decode=1.0) for t in range(3)]
    hard = [record(*[(1, 0, 1)] * 4, id="hard", turn=t, decode=1.0) for t in range(3)]
    cell = tau_table({"x": easy + hard}, 1)["x"]
    assert (cell["prompts"], cell["rounds"], cell["tokens"]) == (2, 24, 36) and (cell["lo"], cell["hi"]) == (1.0, 2.0)
    assert tau_table({"x": easy}, 1)["x"]["lo"] is None and tau_table({"x": easy, "y": easy + hard}, 1)["all (macro)"]["lo"] is None
    base = [plain(8, decode=2.0, id=r.id, turn=r.turn) for r in easy + hard]
    speed = speed_cell(easy + hard, base)
    assert speed["prompts"] == 2 and (speed["lo"], speed["speedup"], speed["hi"]) == (1.0, 1.5, 2.0)
    assert by_prompt([*easy, *hard], [(1.0, 2.0)] * 6) == [(3.0, 6.0)] * 2
    assert by_prompt([easy[0], hard[0], easy[1]], [(1.0,), (5.0,), (2.0,)]) == [(3.0,), (5.0,)]


def test_draft_tokens_are_counted_as_rounds() -> None:
    """EV1: of a chain of 3 two rounds accept 3 and 0: half the drafts. Of a tree of 6 nodes at most its depth can be accepted."""
    cell = tau_table({"x": [record((3, 3, 4), (3, 0, 1))]}, 3)["x"]
    assert cell["draft_acceptance"] == 0.5 and cell["lengths"] == [0.5, 0.0, 0.0, 0.5]
    tree = tau_table({"x": [record((6, 2, 3), (6, 1, 2), (6, 2, 2))]}, 2)["x"]
    assert tree["draft_acceptance"] == 5 / 18 and tree["lengths"] == [0.0, 1 / 3, 2 / 3] and tree["tau"] == 7 / 3
    undrafted = tau_table({"x": [plain(3, decode=1.0)]}, 0)["x"]
    assert undrafted["draft_acceptance"] is None and undrafted["lengths"] == [1.0]


def test_interval_is_not_95_percent() -> None:
    """Few prompts leave out less: their resamples spread less than their law does."""
    for prompts, out in ((2000, 24), (16, 13), (8, 5), (2, 0), (1, 25)):
        found = bootstrap([(7.0,)] * prompts, lambda sums: np.arange(len(sums))[::-1] if sums.ndim == 2 else sums[0])
        assert (found.lo, found.hi, found.value) == (out, 999 - out, 7.0 * prompts)
    student = {3: 3.182446, 7: 2.364624, 15: 2.131450, 87: 1.987608}  # of a table
    assert [t_quantile(Z95, freedom) for freedom in student] == pytest.approx(list(student.values()), rel=0.01)


def test_interval_of_few_prompts_is_too_sure() -> None:
    """8 prompts whose tau differs: the interval holds the truth in 94 % of cases (87 % with 2.5 % left out on either side)."""
    rng, held, plainly = np.random.default_rng(0), 0, 0
    for _ in range(400):
        samples = [(20 * tau, 20.0) for tau in rng.normal(2, 0.4, size=8)]
        found, every = bootstrap(samples, ratio), np.sort(resamples(samples, ratio))
        held += found.lo <= 2 <= found.hi
        plainly += every[25] <= 2 <= every[974]
    assert 0.92 <= held / 400 <= 0.97 and plainly / 400 < 0.91
    assert tail(24, 3) == pytest.approx(NormalDist().cdf(-t_quantile(Z95, 21) * sqrt(24 / 21)))


def test_resamples_are_of_another_size_or_spread() -> None:
    """The mean of n draws has the spread sigma / sqrt(n)."""
    numbers = np.random.default_rng(1).normal(5, 2, size=400)
    found = resamples([(x, 1.0) for x in numbers], ratio)
    assert len(found) == RESAMPLES and found.mean() == pytest.approx(numbers.mean(), abs=0.02)
    assert found.std() == pytest.approx(numbers.std() / 20, rel=0.08)


def test_macro_interval_mixes_domains() -> None:
    """Prompts are drawn again within their own domain: two domains of equal prompts have no spread."""
    table = {"x": [LONG, record(*[(2, 0, 1)] * 3)], "y": [FULL, record((3, 3, 4))]}
    cell = tau_table(table, 2)["all (macro)"]
    assert cell["lo"] == cell["tau"] == cell["hi"] == 2.5


def test_no_prompts_is_a_figure() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        bootstrap([], ratio)
    assert ratio(np.zeros(2)) == 0.0 and ratio_of_ratios(np.array([1.0, 1.0, 0.0, 0.0])) == 0.0


def test_speed_up_is_a_mean_of_rates() -> None:
    """EV2: 100 tokens in 2 s and 100 in 10 s against 1 s and 10 s: 12 / 11, not (2 + 1) / 2 or 55 / 30."""
    base = [plain(100, decode=2.0), plain(100, decode=10.0)]
    drafted = [record(*[(1, 1, 2)] * 50, decode=s) for s in (1.0, 10.0)]
    cell = speed_cell(drafted, base)
    assert cell["speedup"] == pytest.approx(12 / 11) and cell["tokens_per_s"] == pytest.approx(200 / 11)
    assert (cell["tokens"], cell["plain_tokens"], cell["prompts"], cell["seconds"], cell["tau"]) == (200, 200, 2, 11.0, 2.0)
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
