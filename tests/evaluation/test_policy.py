"""Policies by batch: ranges, the words of engines, what is checked, and the advice."""

import json
from pathlib import Path
from typing import Any

import pytest

from spectrain.decoding.policies import Adaptive
from spectrain.decoding.shapes import Chain
from spectrain.evaluation.policy import advice_by_service, depths_by_batch, flips_at, for_engines, load_policy, own_policy, ranges, verified
from spectrain.yields import Costs

# One more position costs nothing alone, a third of a plain pass in a batch of 8, all of it in one of 32.
COSTS = Costs(
    seconds=0.04, v=(1.0, 1.0, 1.0, 1.0, 1.0), c=0.05,
    by_batch={8: tuple(1.5 + 0.5 * n for n in range(5)), 32: tuple(4.0 + 4.0 * n for n in range(5))}, other=0.05,
    beside={1: (0.05, 0.0, 0.05, 0.0), 32: (0.4, 0.0, 0.4, 0.0)},
)  # fmt: skip
CONDITIONAL = [0.9, 0.7, 0.7, 1.0]


def test_depths_do_not_fall_with_the_batch() -> None:
    conditional = [0.7, 5 / 7, 0.7, 4 / 7]
    found = depths_by_batch(conditional, 1.0, COSTS, (1, 8, 32))
    assert found[1] == (4, pytest.approx(2.75 / 1.25)) and found[32] == (0, 1.0)
    assert 0 < found[8][0] < 4 and found[8][1] > 1
    rare = depths_by_batch(conditional, 0.25, COSTS, (1, 8))  # seven others wait for the one that drafts
    assert rare[1] == (4, pytest.approx((1 + 0.25 * 1.75) / (0.75 + 0.25 * 1.25))) and rare[8] == (0, 1.0)


def test_ranges_overlap_or_leave_gaps() -> None:
    """vLLM's demand: from 1 on, rising, without overlap."""
    assert ranges({1: 4, 2: 4, 4: 3, 16: 3, 32: 0}) == [[1, 2, 4], [3, 16, 3], [17, 32, 0]]
    assert ranges({4: 2}) == [[1, 4, 2]] and ranges({}) == []
    found = ranges({1: 1, 8: 0, 3: 2})
    assert [a[1] + 1 for a in found[:-1]] == [b[0] for b in found[1:]] and found[0][0] == 1


def test_engines_cannot_read_the_policy() -> None:
    found = for_engines({1: 4, 8: 1, 32: 0}, CONDITIONAL, 0.8, COSTS)
    assert found["vllm"] == {
        "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 1], [9, 32, 0]],
    }  # fmt: skip
    assert found["sglang"] == {"1": {"candidate_steps": [2, 4]}, "2": {"candidate_steps": [1]}, "9": {"candidate_steps": [0]}}
    nothing = for_engines({1: 0}, [0.0], 0.0, COSTS)
    assert nothing["vllm"] is None and nothing["sglang"] is None and own_policy(nothing["spectrain"]).prior == (0.01,)


def test_policy_of_a_file_is_another_one(tmp_path: Path) -> None:
    policy = json.loads(json.dumps(for_engines({1: 4}, CONDITIONAL, 0.8, COSTS)))
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"drafters": {"head": {"policy": policy}}}))
    loaded = load_policy(tmp_path)
    assert loaded == load_policy(file, "head") and (loaded.kind, loaded.costs) == ("marginal", COSTS)
    assert (loaded.prior, loaded.prior_share) == ((0.9, 0.7, 0.7, 0.99), 0.8)
    file.write_text("{")
    with pytest.raises(ValueError, match="make it anew with spectrain bench"):
        load_policy(file)


def test_table_of_a_file_is_another_one(tmp_path: Path) -> None:
    """A plain one, and vLLM's own as `for_engines` writes it, which says the same at every batch."""
    file = tmp_path / "drafts.json"
    file.write_text('{"1": 5, "8": 3, "32": 0}')
    assert load_policy(file) == Adaptive("table", drafts={1: 5, 8: 3, 32: 0})
    file.write_text(json.dumps(for_engines({1: 4, 8: 1, 32: 0}, CONDITIONAL, 0.8, COSTS)["vllm"]))
    policy = load_policy(file)
    assert policy == Adaptive("table", drafts={1: 4, 8: 1, 32: 0})
    for first, last, drafts in ranges({1: 4, 8: 1, 32: 0}):
        assert all(policy.start(Chain(9), batch).plan().depth_B == [drafts] * batch for batch in range(first, last + 1))
    for text in ("[1]", '{"1": 5, "x": 3}', '{"num_speculative_tokens_per_batch_size": [[1, 2]]}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="no whole bench.json and no table by batch"):
            load_policy(file)


def rows(*gains: float, table: float | None = None) -> list[dict[str, Any]]:
    return [
        {
            "batch": 2**i, "plain": 100.0, "speculative": 100.0 * gain, "table": 100.0 * (table or max(1.0, gain)),
            "adaptive": 100.0 * max(1.0, gain), "speedup": gain, "k": 3 if gain > 1 else 0, "break_even": 1.8, "tau": 1.8 * gain,
        }
        for i, gain in enumerate(gains)
    ]  # fmt: skip


def test_slow_policy_passes() -> None:
    assert verified(rows(1.5, 0.8))["met"]
    found = verified(rows(1.5, 0.8, table=1.42))
    assert not found["met"] and [(r["batch"], r["policy"]) for r in found["rows"] if not r["met"]] == [(1, "table")]
    assert verified(rows(1.5, table=1.43))["met"]  # within five percent


def test_sign_flips_where_drafting_still_pays() -> None:
    assert flips_at(rows(1.5, 1.1, 0.9, 0.8)) == 4 and flips_at(rows(1.5, 1.2)) is None and flips_at(rows(0.9, 1.1)) is None
    assert flips_at(rows(0.9, 0.8)) == 1 and flips_at(rows(1.2, 0.9, 1.1, 0.9)) == 8


def test_loss_is_not_told() -> None:
    gains = {"plain": 1.0, "head": 1.5, "ngram": 1.2}
    speed = {arm: {"tokens_per_s": 25.0 * gain, "speedup": gain} for arm, gain in gains.items()}

    def content(found: list[dict[str, Any]]) -> dict[str, Any]:
        return {"drafters": {"head": {"rows": found, "flips_at": flips_at(found), "depth": 4}}}

    told = advice_by_service(speed, content(rows(1.5, 1.1, 0.83)))
    assert told[0] == "Latency (batch 1): head gives a token in 26.7 ms instead of 40.0 ms (1.50×)."
    assert "speculation loses here: 0.83×, because a round costs 1.80 rounds of plain decoding and commits 1.49 tokens" in told[1]
    assert told[2] == "Between: with head draft 3 up to batch 2, then nothing. Drafting 4 always loses from batch 4 on."
    assert "at no batch" in advice_by_service(speed, content(rows(0.9, 0.8)))[-1]
    assert advice_by_service({}, content(rows(1.5, 1.2)))[1] == "Between: with head draft 3 up to batch 2."
    shallow = rows(0.95)  # all four drafts lose, three of them pay
    shallow[0]["k"] = 3
    assert "draft 3 up to batch 1. Drafting 4 always loses from batch 1" in advice_by_service({}, content(shallow))[1]
    assert "spectrain bench" in advice_by_service(speed)[-1]
    assert "speculation loses here" in advice_by_service({"plain": speed["plain"], "head": {"tokens_per_s": 20.0, "speedup": 0.8}})[0]
