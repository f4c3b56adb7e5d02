"""Served acceptance: what is counted of an engine, what of ourselves, and when the two are not of the same prompts."""

import itertools
import json
import runpy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spectrain.cli import app
from spectrain.cli.served import evaluate_engine
from spectrain.config import EvaluationConfig
from spectrain.data.endpoint import Endpoint
from spectrain.data.formats import Prompt
from spectrain.decoding.generate import generate
from spectrain.drafters.from_head import HeadDrafter
from spectrain.evaluation import served
from spectrain.evaluation.measure import Draws
from spectrain.evaluation.served import ENGINES, Answers, Counts, counts_of
from spectrain.heads.base import save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with

HERE = Path(__file__).parent
running = runpy.run_path(str(HERE / "small_engine.py"))["running"]
train_a_moment = runpy.run_path(str(HERE.parent / "engine/served_heads.py"))["train_a_moment"]
DEPTH, NEW = 3, 11
SETTINGS = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def head(target: Target, make_head: Callable[..., Any]) -> Any:
    """It has learnt some of the target's answers to the prompts."""
    ids = [target.encode(p.chat) for p in prompts()]
    plain = [row.tokens for row in generate(target, ids, max_new_tokens=30, ignore_eos=True, compile=False).rows]
    return train_a_moment(target, make_head(target, draft_vocab=100), ids, plain, passes=50)


def prompts(number: int = 5, turns: int = 2, domain: str = "red") -> list[Prompt]:
    return [Prompt(f"{domain}{i}", domain, tuple(f"w{10 + 7 * i} w{20 + i + t}" for t in range(turns)), "s") for i in range(number)]


def measured(engine: Any, target: Target, head: Any, folder: Path, kind: str = "vllm") -> tuple[Counts, Answers, Any]:
    endpoint, known = Endpoint(engine.url, "m", concurrency=4), ENGINES[kind]
    before = counts_of(served.read_metrics(endpoint), known)
    answers = served.ask(prompts(), endpoint, folder, SETTINGS)
    counts = served.counts_after(endpoint, known, before, answers)
    own = served.measure_own(
        target, answers, HeadDrafter(head), known, depth=DEPTH, max_new_tokens=NEW, batch_size=4, draws=Draws(), template={}
    )
    return counts, answers, own


@pytest.mark.parametrize("kind", ENGINES)
def test_same_head_is_counted_otherwise_in_the_engine_than_here(target: Target, head: Any, tmp_path: Path, kind: str) -> None:
    """By each engine's rule, over two turns, and where stops cut rounds short."""
    with running(target, head, kind=kind, depth=DEPTH) as engine:
        counts, answers, own = measured(engine, target, head, tmp_path, kind)
        assert engine.cut and engine.asked == 10 == len(answers.turns) == own.answers
    second = answers.turns[5]
    assert [m["role"] for m in second.chat] == ["user", "assistant", "user"]
    assert own.equal == 10 and own.longer == 0
    drafted = {"drafted": 0} if kind == "sglang" else {}  # it does not tell
    assert counts == Counts(**{**asdict(own.counts), **drafted}) and 1 < counts.tau < DEPTH + 1
    assert len(counts.positions) == (DEPTH if kind == "vllm" else 0)
    by_rule = 1 + engine.counts["accepted"] / engine.counts["rounds"]
    kept = (engine.counts["tokens"] - 10) / engine.counts["rounds"]
    assert kept < by_rule and counts.tau == pytest.approx(by_rule if kind == "vllm" else kept)


def test_another_head_or_template_in_the_engine_goes_unseen(target: Target, head: Any, make_head: Any, tmp_path: Path) -> None:
    with running(target, make_head(target, draft_vocab=100, seed=1), depth=DEPTH) as engine:
        counts, _, own = measured(engine, target, head, tmp_path)
        assert own.equal == own.answers and counts.positions != own.counts.positions
        engine.system = "w30 w31"
        _, _, own = measured(engine, target, head, tmp_path)
        assert own.longer == own.answers > own.equal


def test_counters_of_several_workers_are_not_added() -> None:
    per, name = "vllm:spec_decode_num_accepted_tokens_per_pos_total", "vllm:spec_decode_num_drafts_total"
    text = "\n".join(
        [f"# TYPE {name} counter"]
        + [f'{name}{{engine="{e}",model_name="a\\"}} 9"}} {10.0 * (e + 1)}' for e in (0, 1)]
        + [f'{per}{{engine="{e}",model_name="m",position="{p}"}} {e + 5.0 - p}' for e in (0, 1) for p in (0, 1)]
        + ['vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9', 'vllm:e2e_bucket{le="+Inf"} NaN']
    )
    assert counts_of(text, ENGINES["vllm"]) == Counts(rounds=30, positions=(11, 9))


def test_engine_without_counters_or_drafts_is_not_named(target: Target, head: Any) -> None:
    with running(target, head, depth=0) as engine:
        endpoint = Endpoint(engine.url, "m")
        with pytest.raises(ValueError, match="drafts nothing .* start it with --speculative-config"):
            counts_of(served.read_metrics(endpoint), ENGINES["vllm"])
        with pytest.raises(ValueError, match="those of vllm: give --engine vllm"):
            counts_of(served.read_metrics(endpoint), ENGINES["sglang"])
        engine.has_counters = False
        with pytest.raises(ValueError, match="answers 404, .* --enable-metrics"):
            served.read_metrics(endpoint)
    with pytest.raises(ValueError, match="is the engine up"):
        served.read_metrics(Endpoint("http://127.0.0.1:9/v1", "m"))
    with pytest.raises(ValueError, match="started anew"):
        Counts(rounds=1).since(Counts(rounds=2))


@pytest.fixture
def project(target: Target, head: Any, tmp_path: Path) -> Path:
    """target/, head/ and eval/suites/two.yaml with a domain of two turns and one of one."""
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    made = made_with(target, {})
    save_head(head, tmp_path / "head", run_yaml="", made_with=made)
    folder = tmp_path / "eval"
    (folder / "prompts").mkdir(parents=True)
    for domain, turns in (("red", 2), ("blue", 1)):
        rows = [json.dumps({"id": p.id, "domain": p.domain, "turns": p.turns}) for p in prompts(3, turns, domain)]
        (folder / f"prompts/{domain}.jsonl").write_text("\n".join(rows))
    (folder / "suites").mkdir()
    (folder / "suites/two.yaml").write_text(
        f"{{name: two, folder: eval/prompts, prompts: {{red: 3, blue: 3}}, max_prompt_tokens: 40, max_new_tokens: {NEW}, turns: 2}}"
    )
    return tmp_path


def command(project: Path, engine: Any, *, own: bool = True, as_json: bool = False) -> dict[str, Any]:
    config = EvaluationConfig(suite="eval/suites/two.yaml", batch_size=4)
    evaluate_engine(
        str(project / "target"), project / "head" if own else None, config, project, project / "out", kind="vllm",
        endpoint=Endpoint(engine.url), dtype="float32", where={}, as_json=as_json,
    )  # fmt: skip
    found: dict[str, Any] = json.loads((project / "out/served.json").read_text())
    return found


def test_stopped_run_asks_again_or_mixes_two_engines(target: Target, head: Any, project: Path, capsys: Any) -> None:
    with running(target, head, depth=DEPTH) as engine:
        found = command(project, engine)
        assert engine.asked == 9 and [row["domain"] for row in found["rows"]] == ["red", "blue", "all"] and not found["notes"]
        assert all(row["points"] == [0.0] * DEPTH and row["difference"] == 0 and row["alone"] for row in found["rows"])
        printed = capsys.readouterr().out
        assert "9 of 9" in printed and f"{found['rows'][2]['tau']:.3f}" in printed
        lines = (project / "out/served.jsonl").read_text().splitlines()
        (project / "out/served.jsonl").write_text(lines[0] + "\n")  # stopped after the first domain
        again = command(project, engine)
        assert engine.asked == 12 and [row["tau"] for row in again["rows"]] == [row["tau"] for row in found["rows"]]
        engine.started += 60  # the same address, and perhaps another head behind it
        assert command(project, engine)["rows"] and engine.asked == 21


def test_other_traffic_is_taken_for_the_suites_own(target: Target, head: Any, project: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(served, "PATIENCE", 0.3)
    with running(target, head, depth=DEPTH) as engine:
        answer, number = engine.answer, itertools.count()

        def busy(body: dict[str, Any]) -> dict[str, Any]:
            if next(number) == 7:  # while the second domain is asked
                answer(body)
            said: dict[str, Any] = answer(body)
            return said

        engine.answer = busy
        found = command(project, engine, own=False)
        assert [row["alone"] for row in found["rows"]] == [True, False, False]
        assert len(found["notes"]) == 1 and "others asked it, too" in found["notes"][0] and "blue" in found["notes"][0]
        assert "own_tau" not in found["rows"][0]
        found = command(project, engine, own=False)  # which makes that domain again
        assert [row["alone"] for row in found["rows"]] == [True] * 3 and engine.asked == 9 + 1 + 3


def test_command_leaves_the_report_as_it_was(target: Target, head: Any, project: Path) -> None:
    """The table goes into the folder's report, is printed as JSON, and another suite's report is not given it."""

    def run(*more: str) -> Any:
        where = ["--target", str(project / "target"), "--out", str(project / "out"), "--suite", str(project / "eval/suites/two.yaml")]
        return CliRunner().invoke(app, ["evaluate", *where, *more])

    few = ("--set", "speed_max_new_tokens=4", "--set", "speed_prompts=1", "--set", "anatomy=false", "--set", "compile=false")
    assert run("--drafters", "ngram", *few).exit_code == 0
    with running(target, head, depth=DEPTH) as engine:
        asked = ("--engine", "vllm", "--endpoint", engine.url)
        result = run(*asked, "--head", str(project / "head"), "--json")
        assert result.exit_code == 0, result.output
        report = json.loads((project / "out/report.json").read_text())
        assert json.loads(result.stdout) == report["served"] == json.loads((project / "out/served.json").read_text())
        assert "Served by an engine" in (project / "out/report.md").read_text() and report["tau"]
        assert "leave the other options out" in run(*asked, "--require", "tau>=1").output
        suite = project / "eval/suites/two.yaml"
        suite.write_text(suite.read_text().replace("turns: 2", "turns: 1"))
        before = engine.asked
        assert "choose another folder" in run(*asked).output and engine.asked == before
