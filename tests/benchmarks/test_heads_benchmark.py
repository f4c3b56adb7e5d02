"""benchmarks/heads.py, what in it needs no training: states shared by heads, steps that fit, what is kept, who is ahead, the tables."""

import argparse
import importlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain.data.batches import collate
from spectrain.data.codes import encode
from spectrain.data.rows import Row
from spectrain.heads.base import LAST
from spectrain.target.features import OnlineFeatures
from spectrain.target.model import Target


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    """The scripts as modules; they stand beside the package, not in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        names = {"work": "heads_bench", "report": "heads_report", "main": "heads"}
        yield SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})


@pytest.fixture
def work(modules: SimpleNamespace) -> ModuleType:
    found: ModuleType = modules.work
    return found


@pytest.fixture
def report(modules: SimpleNamespace) -> ModuleType:
    found: ModuleType = modules.report
    return found


def answer(*rounds: tuple[int, int]) -> Any:
    """A record of (committed, times) rounds."""
    return SimpleNamespace(rounds=[SimpleNamespace(committed=c) for c, times in rounds for _ in range(times)])


def test_head_reads_states_of_another(work: ModuleType, target: Target) -> None:
    """A store of three states serves a head that reads two of them and one that reads the last."""
    rows = [Row(str(n), "any", list(range(9, 9 + n)), [0] * 2 + [1] * (n - 2)) for n in (5, 8)]
    every = OnlineFeatures(target, rows, (1, 2, LAST))
    for ids, places in (((1, 2), (0, 1)), ((2,), (1,)), ((LAST,), (2,))):
        part, alone = work.Part(every, places, of=3), OnlineFeatures(target, rows, ids)
        wanted = alone.batch([1, 0])
        for found in (part.batch([1, 0]), collate([part[1], part[0]])):
            assert torch.allclose(found.states_BLF, wanted.states_BLF, atol=1e-5) and torch.equal(found.ids_BL, wanted.ids_BL)
            assert torch.allclose(found.last_PW, wanted.last_PW, atol=1e-5)
        assert len(part) == 2 and part.rows is rows
    x = 10 * torch.randn(3, 4, 3 * 16)
    for kind in ("exact", "bf16", "int8"):
        some = work.Part(every, (0, 2), of=3)._some(encode(x, states=3, kind=kind))
        alone = encode(x.unflatten(-1, (3, 16))[..., [0, 2], :].flatten(-2), states=2, kind=kind)
        assert torch.equal(some.float(), alone.float()) and some.tensors.keys() == alone.tensors.keys()


def test_steps_do_not_fit_the_minutes(work: ModuleType) -> None:
    assert work.steps_for([1.0, 3.0], 1.0, None) == 30 and work.steps_for([1.0, 3.0], 1.0, 8) == 8
    assert work.steps_for([100.0], 1.0, None) == 1 and work.short_name(Path("recipes/hass_smollm2.yaml")) == "hass"


def test_work_is_done_twice_or_of_other_settings_kept(work: ModuleType, tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    path = tmp_path / "below/file.json"
    assert [work.kept(path, ("a", 1), make), work.kept(path, ("a", 1), make), work.kept(path, ("a", 2), make)] == [0, 0, 1]
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_share_of_others_counts_our_own_work(work: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy seconds of the machine, our own, and the clock: 10 seconds of two processors, 12 busy, 9 ours."""
    now = iter([(100.0, 5.0, 50.0), (112.0, 14.0, 60.0)])
    monkeypatch.setattr(work.Others, "_now", staticmethod(lambda: next(now)))
    monkeypatch.setattr(work.os, "cpu_count", lambda: 2)
    assert work.Others().share() == pytest.approx(3 / 20)


def test_figures_are_of_the_whole_run(work: ModuleType, tmp_path: Path) -> None:
    """Tokens and seconds of all steps, means of the last tenth, weighed by rows."""

    def line(step: int, rows: int, loss: float) -> dict[str, Any]:
        sums = {"rows": [rows, rows // 2]}
        return {"kind": "step", "step": step, "steps": 10, "seconds": 6.0, "sums": sums, "loss": [loss], "hit": [0.5, loss], "alpha": [0.1]}

    lines = [line(10, 100, 9.0), *(line(10 * n, 100, 5.0) for n in range(2, 20)), line(195, 300, 2.0), line(200, 100, 1.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*lines, {"kind": "measured"}]))
    found = work.figures(tmp_path)
    assert (found["steps"], found["supervised"], found["minutes"], found["seconds_a_step"]) == (210, 2300, 2.1, 0.6)
    assert found["loss"] == pytest.approx((100 * 5.0 + 300 * 2.0 + 100 * 1.0) / 500) and found["hit"] == [0.5, found["loss"]]


def test_heads_are_put_in_a_wrong_order(report: ModuleType) -> None:
    """Pairs of answers to the same prompts: figures from totals, and no order where the interval holds 1."""
    worse, better = [answer((1, n)) for n in range(4, 24)], [answer((2, n // 2), (1, n % 2)) for n in range(4, 24)]
    ahead, behind, same = report.compared(worse, better), report.compared(better, worse), report.compared(worse, worse)
    tokens, rounds = sum(range(4, 24)), sum(n // 2 + n % 2 for n in range(4, 24))
    assert ahead["ratio"] == pytest.approx(tokens / rounds) and [report.verdict(r) for r in (ahead, behind, same)] == ["<", ">", "="]
    line = report.order_line(["a", "b", "c"], [ahead, same])
    assert line.startswith(f"a < b = c (b/a {ahead['ratio']:.3f} [") and "c/b 1.000 [1.000, 1.000]" in line


def args(**changes: Any) -> argparse.Namespace:
    values = {"rows": 480, "minutes": 3.0, "prompts": 36, "sampled_prompts": 18, "timed": 6, "tokens": 48, "steps": None, **changes}
    return argparse.Namespace(**values)


def total(lines: Sequence[str]) -> float:
    return float(lines[-1].split()[-2])


def test_plan_adds_up(modules: SimpleNamespace) -> None:
    names = ["medusa", "hydra", "eagle", "hass", "eagle3"]
    lines = modules.main.plan(names, args())
    assert total(lines) == pytest.approx(sum(float(line.split()[-2]) for line in lines[1:-1]), abs=0.5)
    assert any("equal minutes" in line and "15.0 min" in line for line in lines)
    assert total(modules.main.plan(names, args(steps=8, rows=24, prompts=6, sampled_prompts=6, timed=2, tokens=12))) < total(lines) / 8


def figures_of(tau: float) -> dict[str, Any]:
    speed = {"speedup": tau / 2, "break_even": 2.0, "v": 1.5, "draft": 0.3, "tokens_per_s": 30.0}
    return {"tau": tau, "lo": tau - 0.1, "hi": tau + 0.1, **speed}


def prediction(pays: bool) -> dict[str, Any]:
    tree = {"nodes": 3, "depth": 2, "tau_table": 1.9, "break_even": 1.25, "tau": 1.8 if pays else None, "lo": 1.7, "hi": 2.0}
    best = {"best chain": 2, "its gain": 1.1} if pays else {"best chain": 0, "its gain": 1.0}
    return {"c": 0.1, "v": [1.0, 1.5], **best, "tree": tree, "pays": pays, "warning": "" if pays else "the machine was busy"}


def test_best_of_the_trees_tried_is_not_taken(work: ModuleType) -> None:
    """tau of left-out answers counts, where it is known, not that of the tree's own table."""
    entries = [
        {"nodes": 4, "tau": 1.6, "tau_table": 2.5, "break_even": 1.5}, {"nodes": 8, "tau": None, "tau_table": 2.0, "break_even": 1.8},
        {"nodes": 16, "tau": 2.0, "tau_table": 2.1, "break_even": 2.0},
    ]  # fmt: skip
    assert work.best_tried(entries)["nodes"] == 8 and work.best_tried([entries[0], entries[2]])["nodes"] == 4


def test_tables_leave_out_what_was_measured(report: ModuleType) -> None:
    """Every head, arm and domain; a run that did not take its minutes and a machine that was not quiet are named."""
    names, shapes, domains = ["medusa", "eagle3"], {"chain": "chain 4", "static": "static k=2 d=2 n=3"}, ["code", "chat"]
    run = {"trained": 2_000_000, "seconds_a_step": 0.25, "steps": 8, "supervised": 999, "loss": 3.0, "hit": [0.5, 0.25], "others": 0.0}
    ratio = {"ratio": 1.2, "lo": 1.1, "hi": 1.3}
    every = ("all (macro)", "all (micro)", *domains)
    taus = {n: {arm: {d: figures_of(1.5 + i) for d in every} for arm in shapes} for i, n in enumerate(names)}
    speeds = {key: {d: figures_of(1.25) for d in ("code", "all")} for key in ("plain", "medusa / chain", "eagle3 / static")}
    found = {
        "made": "today", "machine": "two cores", "load": 0.5, "git": "abc", "versions": {"torch": "2"}, "domains": domains,
        "data": {"rows": 9, "supervised": 999},
        "settings": {
            "threads": 2, "dtype": "float32", "vocabulary": 6144, "prompts": 12, "sampled_prompts": 6, "tokens": 48, "suite": "quick v1",
            "minutes": 2.0,
        },
        "runs": {"medusa-8": {**run, "minutes": 2.05}, "eagle3-8": {**run, "minutes": 2.5, "others": 0.3}},
        "runs_of": {mode: {n: f"{n}-8" for n in names} for mode in report.MODES}, "shapes": {f"{n}-8": shapes for n in names},
        "tau": {"minutes": {"0": taus, "1": taus}, "tokens": {"0": taus}},
        "order": {"minutes": {t: {"chain": [ratio]} for t in "01"}, "tokens": {"0": {"chain": [ratio]}}},
        "predictions": {n: prediction(pays) for n, pays in zip(names, (False, True), strict=True)},
        "speed": {"minutes": {"0": speeds}, "tokens": {"1": speeds}},
        "timed": {"prompts": 1, "domains": ["code"], "others": {"minutes, 0": 0.01}},
    }  # fmt: skip
    text = report.markdown(found)
    lines = text.splitlines()
    assert "THE MACHINE WAS NOT QUIET" in text and "0% to 30%" in text and text.count("(not as fitted)") == 1
    assert "| eagle3 | 2.0 | 250 | equal minutes | 8 | 999 | 2.50 (not as fitted) | 3.000 | 0.50 0.25 |" in lines
    assert "| medusa | 0.10 | 1.50 (2) | none gains | 3, depth 2 | 1.90 | 1.25 | no |" in lines and text.count("was busy.  ") == 1
    assert "| eagle3 | 0.10 | 1.50 (2) | 2: 1.10 | 3, depth 2 | 1.80 [1.70, 2.00] | 1.25 | yes |" in lines
    assert [line for line in lines if line.startswith("###")] == [
        "### Costs and trees, measured before", "### tau at T = 0, equal minutes", "### tau at T = 1, equal minutes",
        "### tau at T = 0, equal supervised tokens", "### Speed at T = 0, equal minutes", "### Speed at T = 1, equal supervised tokens",
    ]  # fmt: skip
    assert lines.count("| medusa | chain 4 |" + " 1.50 [1.40, 1.60] |" * 4) == 3
    assert lines.count("chain: medusa < eagle3 (eagle3/medusa 1.200 [1.100, 1.300]).  ") == 3
    speed = "1.25 | 2.00 | 1.50 | 0.30 | 0.62 [1.15, 1.35] | 30.0 | 1.25 ÷ 2.00, 0.62 [1.15, 1.35] |"
    assert lines.count(f"| eagle3 | static k=2 d=2 n=3 | {speed}") == lines.count(f"| plain | – | {speed}") == 2
    for above, line in itertools.pairwise(lines):
        assert not above.startswith("|") or not line.startswith("|") or above.count("|") == line.count("|"), line
    calm = report.markdown({**found, "runs": {key: {**r, "others": 0.01, "minutes": 2.0} for key, r in found["runs"].items()}})
    assert "The machine was quiet" in calm and "not as fitted" not in calm
