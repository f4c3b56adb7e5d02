"""Comparisons on the same prompts: chance is called chance, a planted difference is found, and nothing unlike is compared."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spectrain.decoding.rows import StepRecord
from spectrain.evaluation.measure import Record
from spectrain.evaluation.metrics import tau_table
from spectrain.evaluation.paired import against, compare, holm, pairs


def record(accepted: Sequence[int], id: str, *, arm: str = "a", domain: str = "d", turn: int = 0) -> Record:
    steps = [StepRecord(4, int(a), int(a) + 1, {}) for a in accepted]
    return Record(arm, "tau", id, domain, list(range(1 + sum(a + 1 for a in accepted))), 0.0, 0.0, steps, turn=turn)


def drawn(rng: np.random.Generator, ease: np.ndarray, *, gain: float = 0.0, tokens: int = 60) -> list[Record]:
    """Answers of `tokens` tokens, by prompts of this ease: drafts are accepted with that chance, independently."""
    records = []
    for i, e in enumerate(ease):
        accepted: list[int] = []
        while sum(accepted) + len(accepted) < tokens:
            accepted.append(min(4, int(rng.geometric(1 - e - gain)) - 1))
        records.append(record(accepted, str(i)))
    return records


def counted(rounds: Sequence[float], *, tokens: int = 60) -> list[Record]:
    """Answers of as many tokens, in so many rounds each."""
    return [record([tokens - int(n), *[0] * (int(n) - 1)], str(i)) for i, n in enumerate(rounds)]


@pytest.mark.parametrize("uneven", [False, True])
def test_chance_is_called_a_difference(uneven: bool) -> None:
    """Two arms of equal tau, alike or (uneven) one of them far less steady over prompts: about 5 % of p lie below 0.05."""
    rng, below, covered = np.random.default_rng(0), 0, 0
    for _ in range(200):
        ease = rng.uniform(0.2, 0.8, size=16)
        a = drawn(rng, ease)
        b = counted([len(r.rounds) for r in drawn(rng, ease)] * (1 + rng.uniform(-0.3, 0.3, size=16)) + 0.5) if uneven else drawn(rng, ease)
        found = compare(a, b)
        below += found.p is not None and found.p < 0.05
        covered += found.lo is not None and found.hi is not None and found.lo <= 0 <= found.hi
    assert 3 <= below <= 19 and covered >= 172  # of 200: 10 and 190 expected; the bootstrap of 16 prompts covers somewhat less


def test_planted_difference_is_missed() -> None:
    """A difference of the size that is called detectable is found in about 80 % of cases; what is twice as large nearly always."""
    rng, found = np.random.default_rng(1), []
    for gain in (0.04, 0.12):
        tests = [compare(drawn(rng, ease, gain=gain), drawn(rng, ease)) for ease in rng.uniform(0.2, 0.7, size=(60, 24))]
        found.append((np.mean([t.p is not None and t.p < 0.05 for t in tests]), np.mean([t.value / (t.smallest or 1) for t in tests])))
    (few, small), (most, large) = found
    assert large > 1.3 and most > 0.9 and small < 0.9 and few < 0.8
    assert all(t.lo is not None and t.lo > 0 for t in tests if t.p is not None and t.p < 0.001)


def test_power_is_not_what_it_is_called() -> None:
    """Differences of known spread: prompts differ by 1 and by a normal error, so the smallest detectable one is 2.84 sigma / sqrt(n)
    (2.80 of very many; 1.998 + 0.847 by Student's t of 63)."""
    rng = np.random.default_rng(2)
    rounds = 100
    a = [record([1] * rounds, str(i)) for i in range(64)]
    less = np.clip(rng.normal(20, 5, size=64).round(), 0, rounds).astype(int)
    b = [record([1] * (rounds - k) + [0] * k, str(i)) for i, k in enumerate(less)]
    found = compare(a, b)
    taus = [sum(s.committed for s in r.rounds) / rounds for r in b]
    assert found.value == pytest.approx(2 - np.mean(taus)) and found.smallest == pytest.approx(2.845 * np.std(taus, ddof=1) / 8, rel=0.06)


def test_prompts_are_compared_with_other_prompts() -> None:
    """Hard and easy prompts: each prompt gains a little, which an unpaired comparison would not see."""
    ease = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    a = [record([e] * 9 + [min(4, e + 1)] * 3, str(i)) for i, e in enumerate(ease)]
    b = [record([e] * 12, str(i)) for i, e in enumerate(ease)]
    found, backwards = compare(a, b), compare(a, b[::-1])
    assert found == backwards and found.value == pytest.approx(0.2) and found.p is not None and found.p < 0.02
    assert found.lo is not None and 0 < found.lo <= found.value
    with pytest.raises(ValueError, match="did not answer the same prompts"):
        compare(a, b[1:])
    with pytest.raises(ValueError, match="did not answer the same prompts"):
        compare(a, [*b[1:], replace(b[0], turn=1)])


def test_ratio_is_a_mean_of_ratios() -> None:
    """6 tokens in 2 rounds and 10 in 10 against 4 in 2 and 10 in 10: 16 / 12 - 14 / 12."""
    a, b = ([record([n - 1] * 2, "x"), record([0] * 10, "y")] for n in (3, 2))
    assert compare(a, b).value == pytest.approx(2 / 12)


def test_turns_pass_for_prompts() -> None:
    """Turns of one prompt are one sample: two prompts of five turns have p >= 1/2, whatever they say."""
    a, b = ([record([n] * 5, str(i), turn=t) for i in range(2) for t in range(5)] for n in (3, 1))
    found = compare(a, b)
    assert found.prompts == 2 and found.p is not None and found.p > 0.4
    alone = compare(a[:5], b[:5])
    assert (alone.prompts, alone.lo, alone.hi, alone.p, alone.smallest) == (1, None, None, None, None) and alone.value == 2.0


def test_equal_arms_differ() -> None:
    a = [record([i % 3] * 5, str(i)) for i in range(6)]
    found = compare(a, a)
    assert (found.value, found.lo, found.hi, found.p, found.smallest) == (0.0, 0.0, 0.0, 1.0, 0.0)


def test_figures_change_from_call_to_call() -> None:
    rng = np.random.default_rng(3)
    a, b = drawn(rng, np.full(9, 0.5)), drawn(rng, np.full(9, 0.5))
    assert compare(a, b) == compare(a, b)
    there, back = compare(a, b), compare(b, a)
    assert there.value == -back.value and there.p == back.p and there.smallest == pytest.approx(back.smallest)


def arm(name: str, depth: int = 4, **more: Any) -> dict[str, Any]:
    return {"name": name, "drafter": name, "depth": depth, **more}


def test_arms_of_unlike_temperatures_are_a_pair() -> None:
    records = {n: [record([k] * 5, str(i)) for i in range(6)] for k, n in enumerate(("plain", "x", "y", "z T=1", "w T=1"))}
    arms = [arm("plain", 0, temperature=0.0), arm("x", temperature=0.0), arm("y", temperature=0.0),
            arm("z T=1", temperature=1.0), arm("w T=1", temperature=1.0)]  # fmt: skip
    found = pairs(records, arms)
    told = [(row["a"], row["b"], row["temperature"], row["difference"]) for row in found]
    assert told == [("y", "x", 0.0, 1.0), ("w T=1", "z T=1", 1.0, 1.0)]
    assert all(set(row) == {"a", "b", "temperature", "difference", "lo", "hi", "p", "p_adjusted", "smallest", "prompts"} for row in found)
    assert pairs(records, arms[:2]) == []


def test_many_pairs_find_something_by_chance() -> None:
    assert holm([0.01, 0.04, 0.03, None]) == pytest.approx([0.03, 0.06, 0.06, None])
    assert holm([0.9, 0.6]) == [1.0, 1.0] and holm([0.02]) == [0.02] and holm([None]) == [None]


def report(records: Sequence[Record], **changes: Any) -> dict[str, Any]:
    domains: dict[str, list[Record]] = {}
    for r in records:
        domains.setdefault(r.domain, []).append(r)
    told = {
        "arms": [arm("plain", 0), arm("head chain 4")], "suite": {"name": "s v1", "sha256": "1"},
        "settings": {"temperature": 0.0, "max_new_tokens": 64}, "tau": {"head chain 4": tau_table(domains, 4)},
    }  # fmt: skip
    return {**told, **changes}


def two_runs() -> tuple[list[Record], list[Record]]:
    rng, ease = np.random.default_rng(4), np.linspace(0.2, 0.8, 20)
    return tuple([replace(r, domain="xy"[i % 2]) for i, r in enumerate(drawn(rng, ease, gain=gain))] for gain in (0.1, 0.0))  # type: ignore[return-value]


def test_earlier_run_is_compared_prompt_by_prompt() -> None:
    now, then = two_runs()
    found = against(report(now), report(then), file="r.json", now={"head chain 4": now}, then={"head chain 4": then})
    assert found["paired"] and [row["domain"] for row in found["rows"]] == ["x", "y", "all (micro)"] and found["file"] == "r.json"
    row = found["rows"][2]
    exact = compare(now, then)
    assert row["difference"] == pytest.approx(row["now"] - row["then"])
    assert (row["lo"], row["hi"], row["p"]) == (exact.lo, exact.hi, exact.p)


def test_unlike_runs_are_compared_prompt_by_prompt() -> None:
    """Another suite, other lengths, or no records: independent samples, which is said, with a wider interval."""
    now, then = two_runs()
    both = {"now": {"head chain 4": now}, "then": {"head chain 4": then}}
    paired = against(report(now), report(then), file="r", **both)["rows"][2]
    for other, more, said in (
        (report(then, suite={"name": "other v1", "sha256": "2"}), both, "another suite (other v1)"),
        (report(then, settings={"temperature": 0.0, "max_new_tokens": 16}), both, "up to 16 new tokens, these up to 64"),
        (report(then, suite={"name": "s v1", "sha256": "1", "prompts_sha256": "b"}), both, "prompts of the suite were others"),
        (report(then), {**both, "then": {"head chain 4": then[1:]}}, "Other turns of the prompts"),
        (report(then), {}, "records of the earlier evaluation are not there"),
        (report(then), {"now": both["now"], "then": {}}, "records of the earlier evaluation are not there"),
    ):
        suite = {"name": "s v1", "sha256": "1", "prompts_sha256": "a"}
        found = against(report(now, suite=suite), other, file="r", **more)
        row = found["rows"][2]
        assert not found["paired"] and row["difference"] == pytest.approx(paired["difference"])
        assert row["hi"] - row["lo"] > 1.5 * (paired["hi"] - paired["lo"]) and row["p"] > paired["p"]
        assert said in found["note"] and "independent samples" in found["note"]


def test_arm_of_another_temperature_is_the_same_arm() -> None:
    now, then = two_runs()
    other = report(then, settings={"temperature": 1.0, "max_new_tokens": 64})
    with pytest.raises(ValueError, match="r.json has no drafting arm of this evaluation, it has head chain 4"):
        against(report(now), other, file="r.json")
    lone = report(now[:1])
    row = against(lone, report(then[:1]), file="r")["rows"][0]
    assert row["lo"] is None and row["p"] is None and row["difference"] == row["now"] - row["then"]


def test_same_arm_goes_by_two_names() -> None:
    """Where several temperatures are measured names end in theirs: the arm is the same. Another target is told."""
    now, then = two_runs()
    arms = [arm("plain", 0), {**arm("head chain 4 T=0.7"), "temperature": 0.7}]
    told = {"arms": arms, "tau": {"head chain 4 T=0.7": report(now)["tau"]["head chain 4"]}, "made_of": {"target": "a"}}
    other = report(then, settings={"temperature": 0.7, "max_new_tokens": 64}, made_of={"target": "b"}, target="large")
    found = against(report(now, **told), other, file="r", now={"head chain 4 T=0.7": now}, then={"head chain 4": then})
    assert found["paired"] and found["rows"][2]["arm"] == "head chain 4 T=0.7"
    assert found["note"].endswith("The earlier evaluation is of a target of other weights (large).")
