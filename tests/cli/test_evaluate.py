"""The evaluation stage: everything measured once, told in words, and checked against plain decoding."""

import copy
import importlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spectrain.cli.evaluate import Inexact, advice, check_exact, check_out, evaluate, told_of
from spectrain.cli.trees import GivenTree
from spectrain.config import EvaluationConfig, Suite
from spectrain.data.formats import Prompt, read_jsonl
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Tree
from spectrain.evaluation import measure
from spectrain.evaluation.measure import Records
from spectrain.evaluation.metrics import speed_cell, tau_table
from spectrain.evaluation.render import parse_report, terminal_table, write_report
from spectrain.target.model import Target

Run = Callable[..., dict[str, Any]]
First = tuple[Path, dict[str, Any]]
stage = importlib.import_module("spectrain.cli.evaluate")  # the package has a command of this name
SHAPES = {"chain": 2, "ngram": 3, "tree_top_k": 2, "tree_depth": 2, "tree_budget": 4}
CONFIG = {"suite": "eval/suites/tiny.yaml", "shapes": SHAPES, "batch_size": 3, "speed_prompts": 1, "speed_max_new_tokens": 5}
PLACE = ("head chain", "tau")
EXTRA = {"versions": {"spectrain": "0"}}


@pytest.fixture(scope="module")
def head(target: Target, make_head: Callable[..., Any]) -> Any:
    return make_head(target)


@pytest.fixture(scope="module")
def run(target: Target, project: Path) -> Run:
    """run(out, head, **settings): the report of an evaluation on the suite of the tiny project."""

    def evaluated(out: Path, head: Any, root: Path = project, **settings: Any) -> dict[str, Any]:
        config = EvaluationConfig(**{**CONFIG, **settings})
        return evaluate(target, head, config, out, root, extra=EXTRA, say=lambda text: None)

    return evaluated


@pytest.fixture(scope="module")
def first(run: Run, head: Any, tmp_path_factory: pytest.TempPathFactory) -> First:
    """Folder and report of a first evaluation."""
    out = tmp_path_factory.mktemp("evaluation")
    return out, run(out, head)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was measured."""
    found: list[str] = []

    def counted(where: Any, name: str) -> None:
        original = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, **kw: (found.append(name), original(*args, **kw))[1])

    for where, name in ((measure, "generate"), (measure, "_with_transformers"), (stage, "measure_costs")):
        counted(where, name)
    return found


def without_time(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "made"}


def test_report_lacks_what_the_page_needs(first: First, tmp_path: Path) -> None:
    _, report = first
    parse_report(json.loads(json.dumps(report, allow_nan=False)))
    write_report(report, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    text = io.StringIO()
    for table in terminal_table(report):
        Console(file=text, width=100).print(table)
    for page in (text.getvalue(), (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()):
        assert all(word in page for word in ("n-gram", "head chain", "head tree", "red", "blue", "all"))
    assert all(sentence.split(";")[0] in (tmp_path / "report.md").read_text() for sentence in report["advice"])


def test_some_answer_is_not_plain_decodings(first: First) -> None:
    _, report = first
    arms = [arm["name"] for arm in report["arms"]]
    assert arms[:4] == ["plain", "n-gram", "head chain", "head tree"]
    assert list(report["exactness"]) == arms[1:]
    assert all(c == {"prompts": 7, "equal": 7, "ties": 0, "failed": 0, "failed_ids": []} for c in report["exactness"].values())
    assert report["baseline"]["equal"] == report["baseline"]["prompts"] == 2
    check_exact(report)


def test_one_arm_has_other_prompts_or_another_baseline(first: First) -> None:
    _, report = first
    for arm in report["arms"]:
        tau, speed = report["tau"][arm["name"]], report["speed"][arm["name"]]
        assert [tau[d]["prompts"] for d in ("red", "blue", "all (micro)")] == [2, 3, 5] and len(tau["red"]["acceptance"]) == arm["depth"]
        assert [speed[d]["prompts"] for d in ("red", "blue", "all")] == [1, 1, 2]
        for cell in speed.values():
            assert cell["speedup"] == pytest.approx(cell["tau"] / cell["break_even"])
    assert all(cell["speedup"] == 1.0 and cell["tau"] == 1.0 for cell in report["speed"]["plain"].values())


def test_second_call_measures_again(first: First, run: Run, head: Any, idle: list[str]) -> None:
    out, report = first
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()}
    again = run(out, head)
    assert idle == [] and without_time(again) == without_time(report)
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()} == before


def test_tables_cannot_be_made_from_the_records(first: First) -> None:
    out, report = first
    (key,) = {row["key"] for _, row in read_jsonl(out / "records.jsonl")}
    found = Records(out / "records.jsonl", key).found
    for arm in report["arms"]:
        by_domain = {d: [r for (a, mode, _), r in found.items() if (a, mode, r.domain) == (arm["name"], "tau", d)] for d in ("red", "blue")}
        table = tau_table(by_domain, arm["depth"])
        for d, cell in report["tau"][arm["name"]].items():
            assert {k: v for k, v in table[d].items() if k not in ("lo", "hi")} == {k: v for k, v in cell.items() if k not in ("lo", "hi")}
        for d in ("red", "blue"):
            names = (arm["name"], "plain")
            timed, plain = ([r for (a, mode, _), r in found.items() if (a, mode, r.domain) == (name, "speed", d)] for name in names)
            assert speed_cell(timed, plain) == report["speed"][arm["name"]][d]


def test_figures_of_other_settings_are_kept(target: Target, head: Any, make_head: Callable[..., Any]) -> None:
    """RE3: another head, shape, suite, or text under the same id is another measurement; the same is the same."""
    suite = Suite(name="s", version=1, folder="f", prompts={"a": 1}, max_prompt_tokens=9, max_new_tokens=9)
    prompt = Prompt("1", "a", ("w9",), "")
    base = {"target": target, "head": head, "config": EvaluationConfig(**CONFIG), "suite": suite, "prompts": [prompt]}
    bfloat16 = copy.deepcopy(target)
    bfloat16.model.bfloat16()
    others = [
        {"head": make_head(target, seed=1)}, {"head": None}, {"config": EvaluationConfig(**{**CONFIG, "speed_max_new_tokens": 6})},
        {"config": EvaluationConfig(**{**CONFIG, "temperature": 0.5})}, {"config": EvaluationConfig(**{**CONFIG, "seed": 1})},
        {"tree": GivenTree("f", Tree.static([[0]]), {})},
        {"tree": GivenTree("f", Tree.static([[0], [1]]), {})},
        {"config": EvaluationConfig(**{**CONFIG, "shapes": {**SHAPES, "chain": 3}})}, {"suite": suite.model_copy(update={"version": 2})},
        {"prompts": [replace(prompt, turns=("w10",))]}, {"prompts": [prompt, prompt]}, {"target": bfloat16},
    ]  # fmt: skip
    keys = [stage._key(**{**base, **changes}) for changes in ({}, *others)]
    assert len(set(keys)) == len(keys) and stage._key(**base) == keys[0] == stage._key(**{**base, "head": make_head(target)})
    named = {"config": EvaluationConfig(**{**CONFIG, "tree": "elsewhere.json"}), "tree": GivenTree("g", Tree.static([[0]]), {})}
    assert stage._key(**{**base, **named}) == stage._key(**{**base, "tree": GivenTree("f", Tree.static([[0]]), {})})


def test_costs_of_another_head_are_kept(first: First, run: Run, head: Any, idle: list[str], tmp_path: Path) -> None:
    """RE3: a deeper chain in the same folder: costs of its depth; a file without a key, of an earlier version, does not count."""
    shutil.copytree(first[0], tmp_path / "out")
    report = run(tmp_path / "out", head, shapes={**SHAPES, "chain": 3})
    assert set(idle) == {"generate", "_with_transformers", "measure_costs"} and len(report["costs"]["v"]) == 4
    assert {len(costs["v"]) for costs in json.loads((tmp_path / "out/costs.json").read_text()).values()} == {3, 4}
    idle.clear()
    assert without_time(run(tmp_path / "out", head)) == without_time(first[1]) and idle == []  # the first settings' are there still
    (tmp_path / "out/costs.json").write_text('{"seconds": 1.0, "v": [1.0], "c": 1.0}')
    run(tmp_path / "out", head)  # the records of the first settings are still there
    assert "measure_costs" in idle


@pytest.mark.parametrize(("advised", "added"), [((2, 1.5), []), ((1, 1.2), ["head chain 1"]), ((0, 1.0), ["head chain 1"])])
def test_one_chain_is_measured_under_two_names(
    advised: tuple[int, float],
    added: list[str],
    run: Run,
    head: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(stage, "advise_depth", lambda survival, costs: advised)
    report = run(tmp_path, head)
    assert [arm["name"] for arm in report["arms"]][4:] == added
    assert len({(arm["drafter"], arm["shape"]) for arm in report["arms"]}) == len(report["arms"])
    assert ("No chain depth" in report["notes"][0]) == (advised[0] == 0)


def test_wrong_answer_passes(first: First, run: Run, head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of one recorded answer of the tree changed: the evaluation says so, by arm and prompt."""
    lines = (first[0] / "records.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    row = next(r for r in rows if r["arm"] == "head tree" and r["mode"] == "tau")
    row["tokens"][1] = 99 if row["tokens"][1] != 99 else 98
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "costs.json").write_text((first[0] / "costs.json").read_text())
    report = run(tmp_path, head)
    assert {name: cell["failed_ids"] for name, cell in report["exactness"].items() if cell["failed"]} == {"head tree": [row["id"]]}
    with pytest.raises(Inexact, match=f"more than rounding: .*head tree.*{row['id']}"):
        check_exact(report)


def test_report_of_another_evaluation_is_lost(first: First, target: Target, head: Any, make_head: Any, tmp_path: Path) -> None:
    """A folder whose report is of another head, suite, target or temperature is refused by name; the same again is not."""
    write_report(first[1], tmp_path)
    suite = Suite(**{"name": "tiny", "version": 1, "folder": "eval/prompts", "prompts": {"red": 2, "blue": 3}},
                  max_prompt_tokens=20, max_new_tokens=16)  # fmt: skip
    of = {"target": target, "head": head, "config": EvaluationConfig(**CONFIG), "suite": suite}
    check_out(tmp_path, told_of(**of))
    tuned = copy.deepcopy(target)
    tuned.model.model.layers[-1].mlp.down_proj.weight.mul_(2)
    tuned = Target(model=tuned.model, tokenizer=target.tokenizer, name="tiny")  # without the fingerprints of before
    for name, value, said in (
        ("target", tuned, "target "), ("head", make_head(target, seed=1), "head "), ("head", None, "now none"),
        ("suite", suite.model_copy(update={"version": 2}), "suite tiny v1 .*, now tiny v2"),
        ("config", EvaluationConfig(**{**CONFIG, "temperature": 0.7}), "temperature 0, now 0.7"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"report.json is of another evaluation .*{said}.*another folder for --out"):
            check_out(tmp_path, told_of(**{**of, name: value}))
    for text in ("{", "{}"):  # damaged, and of an earlier version that does not say
        (tmp_path / "report.json").write_text(text)
        check_out(tmp_path, told_of(**of))


def test_without_a_head_nothing_can_be_measured(run: Run, tmp_path: Path, idle: list[str]) -> None:
    report = run(tmp_path, None)
    assert [arm["name"] for arm in report["arms"]] == ["plain", "n-gram"] and "measure_costs" not in idle
    parse_report(report)
    assert len(report["advice"]) == 1 and "costs" not in report


def test_stopped_evaluation_starts_over(run: Run, head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at the seventh call of generate: the second run makes the rest only, and ends like an unstopped one."""
    calls: list[int] = []

    def counting(target: Target, prompts: Any, **settings: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) == 7:
            raise KeyboardInterrupt
        return generate(target, prompts, **settings)

    monkeypatch.setattr(measure, "generate", counting)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, head)
    found = len((tmp_path / "records.jsonl").read_text().splitlines())
    assert found == sum(calls[:6])
    monkeypatch.setattr(stage, "advise_depth", lambda survival, costs: (2, 1.5))
    report = run(tmp_path, head)
    assert sum(calls[7:]) == 4 * 5 - found + 4 + 4 * 2  # what tau lacked, four warm-ups, two timed prompts of four arms
    assert all(cell["equal"] == 7 for cell in report["exactness"].values())


def test_draws_are_measured_as_greedy_answers(first: First, run: Run, head: Any, tmp_path: Path, idle: list[str]) -> None:
    """At temperature 1: the best rule for each draft, no comparison with plain decoding but a word why, and no draw twice."""
    report = run(tmp_path, head, temperature=1.0, batch_size=2)
    rules = {arm["name"]: (arm["rule"], arm["law"]) for arm in report["arms"]}
    point = ("point_mass", "point_mass")
    assert [rules[name] for name in ("plain", "n-gram", "head chain", "head tree")] == [("none", "none"), point, ("block", "iid"), point]
    assert report["settings"]["temperature"] == 1.0 and report["exactness"] == {}
    check_exact(report)
    assert "answers are not compared" in " ".join(report["notes"]) and parse_report(report).sampled
    measured = list(idle)
    assert measured.count("_with_transformers") == 2 + 1
    again = run(tmp_path, head, temperature=1.0, batch_size=2)
    assert idle == measured and without_time(again) == without_time(report)
    (key,) = {row["key"] for _, row in read_jsonl(tmp_path / "records.jsonl")}
    chain = {i: r.tokens for (arm, mode, i), r in Records(tmp_path / "records.jsonl", key).found.items() if (arm, mode) == PLACE}
    greedy = Records(first[0] / "records.jsonl", next(row["key"] for _, row in read_jsonl(first[0] / "records.jsonl"))).found
    assert len(chain) == 5 and all(greedy[(*PLACE, i)].tokens != tokens for i, tokens in chain.items())


ARMS = [{"name": "plain", "drafter": "none"}, {"name": "n-gram", "drafter": "n-gram"}, {"name": "tree", "drafter": "Eagle3"}]


def told(cells: dict[str, dict[str, tuple[float, float, float, float]]], arms: list[dict[str, str]] = ARMS) -> list[str]:
    """advice for cells[arm][domain] = (lo, speed-up, tau, break-even)."""
    keys = ("lo", "speedup", "tau", "break_even")
    speed = {arm: {d: dict(zip(keys, values, strict=True)) for d, values in row.items()} for arm, row in cells.items()}
    domains = list(next(iter(cells.values())))
    return advice({"domains": domains, "arms": arms, "speed": speed})


def test_slower_arm_is_advised() -> None:
    """The fastest of those whose interval lies above 1; where none does, plain decoding."""
    cells = {
        "n-gram": {"code": (1.2, 1.5, 1.8, 1.2), "chat": (0.8, 0.9, 1.0, 1.1), "math": (0.9, 1.4, 1.3, 0.9)},
        "tree": {"code": (1.1, 1.9, 3.0, 1.6), "chat": (1.05, 1.1, 2.0, 1.8), "math": (0.7, 0.8, 1.0, 1.2)},
    }
    assert told(cells) == [
        "Use tree for code (1.90×), chat (1.10×); no drafter pays for math: decode plainly there.",
        "The head's tau lies above its break-even in code, chat.",
    ]
    cells["n-gram"]["code"] = (1.2, 2.0, 2.4, 1.2)
    assert told(cells)[0] == "Use n-gram for code (2.00×); tree for chat (1.10×); no drafter pays for math: decode plainly there."
    cells["n-gram"]["math"] = (1.01, 1.4, 1.3, 0.9)
    assert told(cells)[0] == "Use n-gram for code (2.00×), math (1.40×); tree for chat (1.10×)."


def test_single_prompt_decides(first: First, tmp_path: Path) -> None:
    """Resamples of one prompt are all alike: no interval, no verdict, no advice from it, and a report that can be shown."""
    _, report = first
    for name in ("n-gram", "head chain"):
        cells = report["speed"][name]
        assert all(cells[d]["lo"] is cells[d]["hi"] is None and cells[d]["speedup"] > 0 for d in ("red", "blue"))
        assert cells["all"]["prompts"] == 2 and cells["all"]["lo"] <= cells["all"]["speedup"] <= cells["all"]["hi"]
    assert report["advice"][0] == "One timed prompt tells too little to advise on red, blue: time more (setting speed_prompts)."
    write_report(report, tmp_path)
    assert "▲" not in next(line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| red | n-gram"))


def test_loss_is_sold_as_a_gain() -> None:
    """A speed-up whose interval holds 1 is none."""
    cells = {"n-gram": {"code": (0.99, 1.5, 1.0, 1.1)}, "tree": {"code": (0.2, 0.4, 1.4, 3.5)}}
    assert told(cells) == [
        "Nothing here is faster than plain decoding.",
        "The head's tau lies above its break-even in no domain in this run.",
    ]


def test_advice_speaks_of_a_head_that_is_not_there() -> None:
    cells = {"n-gram": {"code": (1.2, 1.5, 1.8, 1.2)}}
    assert told(cells, ARMS[:2]) == ["Use n-gram for code (1.50×)."]


def test_failed_answers_are_not_named() -> None:
    cell = {"failed": 0, "failed_ids": []}
    check_exact({"exactness": {"tree": cell}})
    with pytest.raises(Inexact, match=r'\{"tree": \["code-3"\]\}'):
        check_exact({"exactness": {"n-gram": cell, "tree": {"failed": 1, "failed_ids": ["code-3"]}}})
