"""The evaluation stage: everything measured once, told in words, and checked against plain decoding."""

import copy
import importlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from spectrain.cli.assemble import _coverage, told_of
from spectrain.cli.drafters import free_drafters, named_head
from spectrain.cli.evaluate import Inexact, check_exact, check_out, evaluate
from spectrain.config import EvaluationConfig, Suite
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Tree
from spectrain.evaluation import asides, measure
from spectrain.evaluation.arms import Written, arms_of, keys_of
from spectrain.evaluation.metrics import speed_cell, tau_table
from spectrain.evaluation.records import Records, records_of
from spectrain.evaluation.render import parse_report, terminal_table, write_report
from spectrain.evaluation.told import advice, losses, remarks
from spectrain.target.model import Target

Run = Callable[..., dict[str, Any]]
First = tuple[Path, dict[str, Any]]
stage = importlib.import_module("spectrain.cli.evaluate")  # the package has a command of this name
SHAPES = {"chain": 2, "ngram": 3, "tree_top_k": 2, "tree_depth": 2, "tree_budget": 4}
CONFIG = {"suite": "eval/suites/tiny.yaml", "shapes": SHAPES, "batch_size": 3, "speed_prompts": 1, "speed_max_new_tokens": 5}
NAMES = ["plain", "ngram chain:3", "head chain:2", "head tree:2x2x4"]
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

    for where, name in (
        (measure, "generate"), (measure, "_with_transformers"), (asides, "measure_passes"), (asides, "examine"), (asides, "example"),
    ):  # fmt: skip
        counted(where, name)
    return found


def without_time(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in ("made", "time")}


def test_report_lacks_what_the_page_needs(first: First, tmp_path: Path) -> None:
    _, report = first
    assert report["settings"]["passes"] == "eager", "five tokens do not repay packed products"
    parse_report(json.loads(json.dumps(report, allow_nan=False)))
    write_report(report, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    text = io.StringIO()
    for table in terminal_table(report):
        Console(file=text, width=100).print(table)
    for page in (text.getvalue(), (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()):
        assert all(word in page for word in ("ngram chain:3", "head chain:2", "head tree:2x2x4", "red", "blue", "all"))
    assert all(sentence.split(";")[0] in (tmp_path / "report.md").read_text() for sentence in report["advice"])


def test_some_answer_is_not_plain_decodings(first: First) -> None:
    _, report = first
    arms = [arm["name"] for arm in report["arms"]]
    assert arms[:4] == NAMES
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


def test_coverage_is_that_of_the_corpus_the_map_was_cut_from(first: First, head: Any, target: Target, make_head: Any) -> None:
    """Of the answers that plain decoding gave, domain by domain; a head that can draft every token has none to tell."""
    out, report = first
    answers = records_of(out, report)["plain"]
    for domain in report["domains"]:
        said = [token for record in answers if record.domain == domain for token in record.tokens]
        assert report["coverage"][domain] == sum(token in head.target_ids for token in said) / len(said)
    assert set(report["coverage"]) == set(report["domains"]) and 0 < min(report["coverage"].values()) < 1
    told: list[str] = []
    run = SimpleNamespace(target=target, records=SimpleNamespace(of=lambda *of: answers), every=[], say=told.append)
    assert _coverage(run, SimpleNamespace(name="plain"), head) == {"coverage": report["coverage"]}
    assert len(told) == 1 and told[0].startswith("draft vocabulary of 40: coverage of plain decoding's answers ") and "red " in told[0]
    assert _coverage(run, SimpleNamespace(name="plain"), make_head(target, draft_vocab=target.num_ids)) == {} and len(told) == 1


def test_second_call_measures_again(first: First, run: Run, head: Any, idle: list[str]) -> None:
    out, report = first
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()}
    again = run(out, head)
    assert idle == [] and without_time(again) == without_time(report)
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()} == before


def test_tables_cannot_be_made_from_the_records(first: First) -> None:
    out, report = first
    counted = records_of(out, report)
    assert list(counted) == [arm["name"] for arm in report["arms"]]
    rows = [record for runs in Records(out / "records.jsonl", "").found.values() for record in runs.values()]
    for arm in report["arms"]:
        by_domain = {d: [r for r in counted[arm["name"]] if r.domain == d] for d in ("red", "blue")}
        table = tau_table(by_domain, arm["depth"])
        for d, cell in report["tau"][arm["name"]].items():
            assert {k: v for k, v in table[d].items() if k not in ("lo", "hi")} == {k: v for k, v in cell.items() if k not in ("lo", "hi")}
        for d in ("red", "blue"):
            names = (arm["name"], "plain")
            timed, plain = ([r for r in rows if (r.arm, r.mode, r.domain) == (name, "speed", d)] for name in names)
            assert speed_cell(timed, plain) == report["speed"][arm["name"]][d]


def test_figures_of_other_settings_are_kept(target: Target, head: Any, make_head: Callable[..., Any]) -> None:
    """RE3: another head, shape or temperature is another measurement of that arm alone; what all depend on, of every arm."""
    base, speed = ["suite", "prompts", "target", 0], {"new_tokens": 5}

    def keys(head: Any = head, base: Any = base, speed: Any = speed, paths: Any = ([0],), **changes: Any) -> dict[Any, str]:
        drafters = [*free_drafters(), named_head(head)]
        arms = arms_of(drafters, EvaluationConfig(**{**CONFIG, **changes}), Written("t.json", Tree.static(paths)))
        return keys_of(arms, drafters, base, speed)

    def changed(**changes: Any) -> set[tuple[str, str]]:
        other = keys(**changes)
        return {place for place in first.keys() & other.keys() if first[place] != other[place]}

    first = keys()
    every, timed = set(first), {place for place in first if place[1] == "speed"}
    counted = {name: (name, "tau") for name, _ in first}
    assert keys(head=make_head(target)) == first and len(set(first.values())) == len(first) == 2 * 5
    heads = {place for name, place in counted.items() if name.startswith("head")}
    assert changed(head=make_head(target, seed=1)) == heads | timed
    assert changed(paths=([0], [1])) == {counted["head tree:t.json"]} | timed
    assert changed(base=[*base[:3], 1]) == every == changed(temperature=0.5)
    assert changed(speed={"new_tokens": 6}) == timed
    assert changed(temperature=(0.0, 0.5)) == set(), "another temperature costs what was there"
    assert changed(shapes={**SHAPES, "chain": 3}) == timed - {("head chain:2", "speed")}, "another arm costs what was counted"


def test_second_temperature_loses_the_first(run: Run, first: First, head: Any, tmp_path: Path, idle: list[str]) -> None:
    """Two drafters more and a temperature more in the same folder: what was counted stays, and names say which is which."""
    shutil.copytree(first[0], tmp_path / "out")
    report = run(tmp_path / "out", head, temperature=(0.0, 0.7))
    names = [arm["name"] for arm in report["arms"]]
    at_zero = [name for name in names if "T=" not in name]
    assert at_zero == [arm["name"] for arm in first[1]["arms"]] and f"{NAMES[2]} T=0.7" in names
    assert {name: report["tau"][name] for name in at_zero} == first[1]["tau"]
    assert [arm["plain"] for arm in report["arms"] if arm["temperature"]] == ["plain T=0.7"] * 4
    assert [name for name in names if report["speed"][name]] == at_zero, "timed at temperature 0 alone"
    assert {pair["temperature"] for pair in report["pairs"]} == {0.0, 0.7} and set(report["exactness"]) == set(at_zero[1:])
    assert {"head", "head T=0.7", "ngram", "ngram T=0.7"} == set(report["alpha"]) and set(report["ranks"]) == {"head"}
    parse_report(json.loads(json.dumps(report, allow_nan=False)))
    write_report(report, tmp_path)


def test_same_seed_counts_otherwise(run: Run, head: Any, tmp_path: Path) -> None:
    """Two runs, each in a folder of its own, greedy and drawn: all counts are equal."""
    found = [run(tmp_path / name, head, temperature=(0.0, 1.0), forms=("chain:2",)) for name in ("one", "two")]
    parts = ("arms", "tau", "slices", "pairs", "alpha", "ranks", "exactness", "price")
    assert [{part: report[part] for part in parts} for report in found][0] == {part: found[1][part] for part in parts}
    assert "head chain:2 T=1" in found[0]["tau"]


def test_own_work_is_not_told(first: First) -> None:
    time = first[1]["time"]
    assert time["wall"] > time["answers_now"] > 0 and time["answers"] == pytest.approx(time["answers_now"])
    named = sum(value for name, value in time.items() if name not in ("wall", "answers", "overhead_share"))
    assert time["wall"] == pytest.approx(named) and time["overhead"] > 0


def test_costs_of_another_head_are_kept(first: First, run: Run, head: Any, idle: list[str], tmp_path: Path) -> None:
    """RE3: a deeper chain in the same folder: costs of its depth; a file without a key, of an earlier version, does not count."""
    shutil.copytree(first[0], tmp_path / "out")
    report = run(tmp_path / "out", head, shapes={**SHAPES, "chain": 3})
    assert {"generate", "_with_transformers", "measure_passes"} <= set(idle) and "head chain:3" in report["costs"]["by_arm"]
    arms = [set(costs) for costs in json.loads((tmp_path / "out/costs.json").read_text()).values()]
    assert arms == [{"ngram chain:3", "head chain:2", "head tree:2x2x4"}, {"ngram chain:3", "head chain:3", "head tree:2x2x4"}]
    idle.clear()
    assert without_time(run(tmp_path / "out", head)) == without_time(first[1]) and idle == []  # the first settings' are there still
    (tmp_path / "out/costs.json").write_text('{"seconds": 1.0, "v": [1.0], "c": 1.0}')
    run(tmp_path / "out", head)  # the records of the first settings are still there
    assert "measure_passes" in idle


@pytest.mark.parametrize(("advised", "added"), [((2, 1.5), []), ((1, 1.2), ["head chain:1"]), ((0, 1.0), ["head chain:1"])])
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
    row = next(r for r in rows if r["arm"] == "head tree:2x2x4" and r["mode"] == "tau")
    row["tokens"][1] = 99 if row["tokens"][1] != 99 else 98
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "costs.json").write_text((first[0] / "costs.json").read_text())
    report = run(tmp_path, head)
    assert {name: cell["failed_ids"] for name, cell in report["exactness"].items() if cell["failed"]} == {"head tree:2x2x4": [row["id"]]}
    with pytest.raises(Inexact, match=f"more than rounding: .*head tree:2x2x4.*{row['id']}"):
        check_exact(report)


def test_report_of_another_evaluation_is_lost(first: First, target: Target, head: Any, make_head: Any, tmp_path: Path) -> None:
    """A folder whose report is of another head, suite, target or temperature is refused by name; the same again is not."""
    write_report(first[1], tmp_path)
    suite = Suite(**{"name": "tiny", "version": 1, "folder": "eval/prompts", "prompts": {"red": 2, "blue": 3}},
                  max_prompt_tokens=20, max_new_tokens=16)  # fmt: skip
    of = {"target": target, "drafters": [named_head(head)], "config": EvaluationConfig(**CONFIG), "suite": suite}
    check_out(tmp_path, told_of(**of))
    tuned = copy.deepcopy(target)
    tuned.model.model.layers[-1].mlp.down_proj.weight.mul_(2)
    tuned = Target(model=tuned.model, tokenizer=target.tokenizer, name="tiny")  # without the fingerprints of before
    for name, value, said in (
        ("target", tuned, "target "), ("drafters", [named_head(make_head(target, seed=1))], "head "),
        ("drafters", free_drafters(), "now none"),
        ("suite", suite.model_copy(update={"version": 2}), "suite tiny v1 .*, now tiny v2"),
        ("config", EvaluationConfig(**{**CONFIG, "temperature": 0.7}), "temperature 0, now 0.7"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"report.json is of another evaluation .*{said}.*another folder for --out"):
            check_out(tmp_path, told_of(**{**of, name: value}))
    more = {"drafters": [*of["drafters"], named_head(make_head(target, seed=1), "other")]}  # what was there stays
    check_out(tmp_path, told_of(**{**of, **more, "config": EvaluationConfig(**{**CONFIG, "temperature": (0.0, 0.7)})}))
    for text in ("{", "{}"):  # damaged, and of an earlier version that does not say
        (tmp_path / "report.json").write_text(text)
        check_out(tmp_path, told_of(**of))


def test_without_a_head_nothing_can_be_measured(run: Run, tmp_path: Path, idle: list[str]) -> None:
    report = run(tmp_path, None)
    assert [arm["name"] for arm in report["arms"]] == NAMES[:2] and list(report["costs"]["by_drafter"]) == ["ngram"]
    parse_report(report)
    assert not any("head" in sentence for sentence in report["advice"]) and "ranks" not in report


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
    assert [rules[name] for name in NAMES] == [("none", "none"), point, ("block", "iid"), point]
    assert report["settings"]["temperature"] == 1.0 and report["exactness"] == {}
    check_exact(report)
    assert "answers are not compared" in " ".join(report["notes"]) and parse_report(report).sampled
    measured = list(idle)
    assert measured.count("_with_transformers") == 2 + 1
    again = run(tmp_path, head, temperature=1.0, batch_size=2)
    assert idle == measured and without_time(again) == without_time(report)
    drawn, greedy = ({r.id: r.tokens for r in records_of(*pair)[NAMES[2]]} for pair in ((tmp_path, report), first))
    assert len(drawn) == 5 and drawn.keys() == greedy.keys() and all(greedy[i] != tokens for i, tokens in drawn.items())


ARMS = [{"name": "plain", "drafter": "none"}, {"name": "lookup", "drafter": "n-gram"}, {"name": "tree", "drafter": "Eagle3"}]


def told(cells: dict[str, dict[str, tuple[float, float, float, float]]], arms: list[dict[str, str]] = ARMS) -> list[str]:
    """advice for cells[arm][domain] = (lo, speed-up, tau, break-even)."""
    keys = ("lo", "speedup", "tau", "break_even")
    speed = {arm: {d: dict(zip(keys, values, strict=True)) for d, values in row.items()} for arm, row in cells.items()}
    domains = list(next(iter(cells.values())))
    return advice({"domains": domains, "arms": arms, "speed": speed})


def test_slower_arm_is_advised() -> None:
    """The fastest of those whose interval lies above 1; where none does, plain decoding."""
    cells = {
        "lookup": {"code": (1.2, 1.5, 1.8, 1.2), "chat": (0.8, 0.9, 1.0, 1.1), "math": (0.9, 1.4, 1.3, 0.9)},
        "tree": {"code": (1.1, 1.9, 3.0, 1.6), "chat": (1.05, 1.1, 2.0, 1.8), "math": (0.7, 0.8, 1.0, 1.2)},
    }
    assert told(cells) == [
        "Use tree for code (1.90×), chat (1.10×); no drafter pays for math: decode plainly there.",
        "The head's tau lies above its break-even in code, chat.",
    ]
    cells["lookup"]["code"] = (1.2, 2.0, 2.4, 1.2)
    assert told(cells)[0] == "Use lookup for code (2.00×); tree for chat (1.10×); no drafter pays for math: decode plainly there."
    cells["lookup"]["math"] = (1.01, 1.4, 1.3, 0.9)
    assert told(cells)[0] == "Use lookup for code (2.00×), math (1.40×); tree for chat (1.10×)."


def test_single_prompt_decides(first: First, tmp_path: Path) -> None:
    """Resamples of one prompt are all alike: no interval, no verdict, no advice from it, and a report that can be shown."""
    _, report = first
    for name in NAMES[1:3]:
        cells = report["speed"][name]
        assert all(cells[d]["lo"] is cells[d]["hi"] is None and cells[d]["speedup"] > 0 for d in ("red", "blue"))
        assert cells["all"]["prompts"] == 2 and cells["all"]["lo"] <= cells["all"]["speedup"] <= cells["all"]["hi"]
    assert report["advice"][0] == "One timed prompt tells too little to advise on red, blue: time more (setting speed_prompts)."
    write_report(report, tmp_path)
    assert "▲" not in next(line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| red | ngram"))


def test_loss_is_sold_as_a_gain() -> None:
    """A speed-up whose interval holds 1 is none."""
    cells = {"lookup": {"code": (0.99, 1.5, 1.0, 1.1)}, "tree": {"code": (0.2, 0.4, 1.4, 3.5)}}
    assert told(cells) == [
        "Nothing here is faster than plain decoding.",
        "The head's tau lies above its break-even in no domain in this run.",
    ]


def test_loss_is_not_told_in_plain_words() -> None:
    """Of an arm that is slower over all domains: by how much and why; of one that was not timed nothing."""
    cell = {"speedup": 0.833, "break_even": 1.92, "tau": 1.6, "v": 1.5, "draft": 0.32, "other": 0.1}
    speed = {"plain": {}, "lookup": {"all": {**cell, "speedup": 1.1}}, "tree": {"all": cell}, "late": {}}
    report = {"arms": [*ARMS, {"name": "late", "drafter": "Eagle3"}], "speed": speed}
    assert losses({**report, "speed": {**speed, "tree": {"all": {**cell, "lo": 0.7, "hi": 1.1}}}})[0].startswith(
        "With tree speculation neither gains nor loses clearly here: 0.83× [0.70, 1.10]; a round costs 1.92 rounds"
    )
    assert losses(report) == [
        "With tree speculation loses here: 0.83×, because a round costs 1.92 rounds of plain decoding (verification 1.50, drafting 0.32, "
        "the rest 0.10) and commits 1.60 tokens.",
    ]


def test_advice_speaks_of_a_head_that_is_not_there() -> None:
    cells = {"lookup": {"code": (1.2, 1.5, 1.8, 1.2)}}
    assert told(cells, ARMS[:2]) == ["Use lookup for code (1.50×)."]


def test_failed_answers_are_not_named() -> None:
    cell = {"failed": 0, "failed_ids": []}
    check_exact({"exactness": {"tree": cell}})
    with pytest.raises(Inexact, match=r'\{"tree": \["code-3"\]\}'):
        check_exact({"exactness": {"lookup": cell, "tree": {"failed": 1, "failed_ids": ["code-3"]}}})


def test_temperatures_are_weighed_against_each_other() -> None:
    """Which drafter is best at a temperature says nothing of the other; and of several heads it is not told which one."""
    arms = [*ARMS, {"name": "tree T=1", "drafter": "Eagle3", "temperature": 1.0, "by": "b"}]
    cells = {"lookup": {"code": (1.2, 1.5, 1.8, 1.2)}, "tree": {"code": (1.1, 1.4, 2.0, 1.5)}, "tree T=1": {"code": (1.6, 1.9, 3.0, 1.6)}}
    assert told(cells, arms)[::2] == ["At temperature 0: Use lookup for code (1.50×).", "At temperature 1: Use tree T=1 for code (1.90×)."]
    both = [*ARMS, {"name": "other", "drafter": "Eagle3", "by": "b"}]
    assert told({**cells, "other": cells["tree T=1"]}, both)[-1] == "A trained drafter's tau lies above its break-even in code."


def test_every_head_is_called_a_demonstration() -> None:
    few = remarks(EvaluationConfig(), 2, 0, 0, trained=False)
    assert len(few) == 1 and "so few timed prompts" in few[0]
    many = remarks(EvaluationConfig(temperature=(0.0, 0.7)), 8, 3, 1, trained=True)
    assert "so few" not in " ".join(many) and "trained" in many[-1]
    assert many[1].endswith("were not asked: 3.") and "counted at each temperature" in many[1] and many[2].endswith("not asked: 1.")
