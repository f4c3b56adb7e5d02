"""`spectrain bench` on a tiny target: figures, the policy and its check, and what a second call does again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spectrain as st
from spectrain.cli.bench import _latency as latency_cells
from spectrain.evaluation import batches
from spectrain.yields import Costs

SMALL = (
    "--batch", "1,3", "--max-new-tokens", "6", "--context", "24",
    *(f"--set={setting}" for setting in ("repeats=2", "prompts=3", "shapes.ngram=3")),
)  # fmt: skip


@pytest.fixture(scope="module")
def benched(project: Path, cli: Callable[..., Any]) -> tuple[Path, dict[str, Any]]:
    """The folder and the content of a bench of two free drafters."""
    out = project / "runs/bench"
    suite = project / "eval/suites/tiny.yaml"
    result = cli("bench", "--target", project / "target", "--drafters", "ngram,suffix", "--suite", suite, "--out", out, *SMALL)
    assert result.exit_code == 0, result.output
    assert "2 drafter(s) at batches 1, 3: about" in result.output and "written:" in result.output
    assert "tokens/s by batch, eager passes" in result.output
    return out, json.loads((out / "bench.json").read_text())


def test_figures_are_left_out(benched: tuple[Path, dict[str, Any]]) -> None:
    _, content = benched
    assert content["batches"] == [1, 3] and set(content["drafters"]) == {"ngram", "suffix"}
    assert content["roofline"]["ridge"] == content["roofline"]["flops"] / content["roofline"]["bandwidth"]
    assert [cell["positions"] for cell in content["roofline"]["intensity"]] == [4, 12]
    for found in content["drafters"].values():
        assert [(row["batch"], row["pairs"]) for row in found["rows"]] == [(1, 6), (3, 2)]
        for row in found["rows"]:
            assert row["lo"] <= row["speedup"] <= row["hi"] and 1 <= row["tau"] <= 4 and row["plain"] > 0
            assert row["draft"] + row["verify"] + row["other"] == pytest.approx(row["break_even"])
        assert len(found["verified"]["rows"]) == 4 and len(found["survival"]) == 3
    assert any("Latency (batch 1)" in text for text in content["service"]) and len(content["service"]) >= 3


def test_policy_cannot_be_loaded(benched: tuple[Path, dict[str, Any]], project: Path, cli: Callable[..., Any]) -> None:
    out, content = benched
    policy = st.load_policy(out, "ngram")
    assert policy.kind == "marginal" and isinstance(policy.costs, Costs) and policy.costs.beside is not None
    assert set(policy.costs.by_batch or ()) == {1, 3}
    target = st.load_target(str(project / "target"))
    row = st.generate(target, ["w10 w40 w12"], drafter=st.NGram(), shape=st.Chain(3), policy=policy, max_new_tokens=6).rows[0]
    assert row.tokens == st.generate(target, ["w10 w40 w12"], max_new_tokens=6).rows[0].tokens
    with pytest.raises(ValueError, match="name one of them"):
        st.load_policy(out)
    result = cli("generate", "w10 w40 w12", "--target", project / "target", "--drafter", "ngram", "--policy", out, "--raw")
    assert result.exit_code == 1 and "has policies of ngram, suffix" in result.output
    with pytest.raises(ValueError, match="spectrain bench --out"):
        st.load_policy(out / "nothing.json")


def test_second_call_measures_again(
    benched: tuple[Path, dict[str, Any]], project: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is kept but for a pair that was cut off while it was written."""
    out, content = benched
    lines = (out / "bench-runs.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"pair"' in line)
    (out / "bench-runs.jsonl").write_text("".join(lines[:last]) + lines[last][:40])
    made: list[int] = []
    turn = batches.turn
    monkeypatch.setattr(batches, "turn", lambda bench, rows, *rest: (made.append(len(rows)), turn(bench, rows, *rest))[1])
    monkeypatch.setattr(batches, "measure_costs", None)
    monkeypatch.setattr(batches, "calibrate", None)
    suite = project / "eval/suites/tiny.yaml"
    run = ("bench", "--target", project / "target", "--drafters", "ngram,suffix", "--suite", suite, "--out", out, *SMALL)
    result = cli(*run, "--json")
    assert result.exit_code == 0, result.output
    arms = len(json.loads(lines[last])["result"])
    assert made == [3] * 2 * arms  # the warm-up of that batch, then its pair
    again = json.loads(result.stdout)
    assert again["drafters"]["ngram"] == content["drafters"]["ngram"] and again["roofline"] == content["roofline"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "none"], "name a drafter"), (["--drafters", "ngram", "--context", "2"], "raise --context"),
        (["--drafters", "ngram", "--batch", "0"], "greater than or equal to 1"),
        (["--drafters", "ngram", "--suite", "no"], "no suite 'no'"),
    ],
)  # fmt: skip
def test_refusals_come_late(project: Path, cli: Callable[..., Any], options: list[str], message: str) -> None:
    suite = [] if "--suite" in options else ["--suite", project / "eval/suites/tiny.yaml"]
    result = cli("bench", "--target", project / "target", "--out", project / "runs/none", *suite, *options)
    assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output


def test_gain_is_over_another_drafters_plain_decoding() -> None:
    """Drafters are timed one after the other; a machine that was slower at first would flatter the second."""
    slow = {"batch": 1, "plain": 10.0, "speculative": 12.0, "table": 12.0, "k": 4}
    fast = {"batch": 1, "plain": 20.0, "speculative": 22.0, "table": 22.0, "k": 4}
    found = latency_cells({"drafters": {"ngram": {"rows": [slow]}, "suffix": {"rows": [fast]}}})
    assert [found[name]["speedup"] for name in ("ngram", "suffix")] == pytest.approx([1.2, 1.1])
