"""`spectrain evaluate`: what its options ask for, what a second call keeps, and how it ends where a condition does not hold."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from spectrain.cli.drafters import heads_of, open_drafters, parse_drafters
from spectrain.cli.measured import overrides_of, with_head
from spectrain.config import EvaluationConfig, Suite
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.lookup import NGram
from spectrain.drafters.suffix import Suffix
from spectrain.evaluation.arms import Named, Written, arms_of, parse_form
from spectrain.evaluation.suites import find_suite, licences, suite_hash, suite_of, suite_prompts, told_of_suite, too_long
from spectrain.heads.base import ADAPTER, save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with

Cli = Callable[..., Result]
SMALL = [f"--set={key}" for key in ("speed_max_new_tokens=4", "speed_prompts=1", "batch_size=4", "compile=false")]
NGRAM = Named("ngram", NGram(), "n-gram", "", lookup=True)
SUFFIX = Named("suffix", Suffix(), "suffix", "")


@pytest.fixture(scope="module")
def place(make_target: Callable[..., Target], make_head: Callable[..., Any], save_target: Any, tmp_path_factory: Any) -> Path:
    """A folder with target/, two heads, and own prompts of two domains, one of two turns."""
    root = tmp_path_factory.mktemp("measured")
    target = make_target(vocab=12, seed=3)
    save_target(target, root / "target")
    for seed, name in enumerate(("one", "two")):
        save_head(make_head(target, draft_vocab=10, seed=seed), root / name / "head", run_yaml="", made_with=made_with(target, {}))
    rows = [{"id": f"{d}{i}", "domain": d, "turns": [f"w{6 + i} w7 w8"] + ["w9"] * (d == "red")} for d in ("red", "blue") for i in range(3)]
    (root / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_drafters_are_mixed_up(place: Path, make_target: Callable[..., Target]) -> None:
    """Several heads have names of their own; one is `head`; nothing is opened that was not asked for."""
    with pytest.raises(ValueError, match="drafter 'medusa' is unknown; needed none, ngram, suffix, head:FOLDER"):
        parse_drafters(["ngram", "medusa"])
    for odd in ("head", "head:", "ngram:4"):
        with pytest.raises(ValueError, match="is unknown"):
            parse_drafters([odd])
    for twice in (["ngram", "none", "ngram"], ["head:a/head", "head:./a/head/"]):
        with pytest.raises(ValueError, match="is there twice"):
            parse_drafters(twice)
    assert with_head(None, None) == ("ngram",) and with_head("none, suffix", Path("a")) == ("none", "suffix", "head:a")
    assert with_head("head:a", Path("a")) == ("head:a",)
    target = make_target(vocab=12, seed=3)
    both = parse_drafters(["none", "suffix", f"head:{place / 'one/head'}", f"head:{place / 'two/head'}"])
    named = open_drafters(both, target)
    assert [d.name for d in named] == ["suffix", "one/head", "two/head"] and len({d.identity for d in named}) == 3
    assert [d.name for d in open_drafters(both[:2], target)] == ["suffix", "head"]
    shutil.copytree(place / "target", place / "small/head")
    with pytest.raises(ValueError, match="two drafters would both be called head"):
        open_drafters([both[1], ("model", str(place / "target")), ("model", str(place / "small/head"))], target)
    (place / "two/head" / ADAPTER).mkdir()
    try:
        with pytest.raises(ValueError, match="two/head was trained together with its target"):
            heads_of(both)
    finally:
        (place / "two/head" / ADAPTER).rmdir()


def test_shape_is_read_as_another() -> None:
    assert parse_form("chain:4") == Chain(4) and parse_form("tree:10x6x48") == Tree.dynamic(10, 6, 48)
    for odd in ("chain:0", "chain", "tree:4x5", "typical:4", "tree:4x5x0"):
        with pytest.raises(ValueError, match="is unknown; needed auto, chain:DEPTH"):
            parse_form(odd)
    assert overrides_of("chain:4, tree:2x2x3", None, "0, 0.7") == ['forms=["chain:4", "tree:2x2x3"]', "temperature=[0.0, 0.7]"]
    assert overrides_of("chain:4,tree:/a/t.json", None, None) == ['tree="/a/t.json"', 'forms=["chain:4"]']
    assert overrides_of(None, None, None) == []
    with pytest.raises(ValueError, match="one written tree is measured at a time"):
        overrides_of("tree:a.json", Path("b.json"), None)
    with pytest.raises(ValueError, match="--temperature needs numbers"):
        overrides_of(None, None, "hot")


def test_arms_are_not_told_apart() -> None:
    """Every drafter in each shape that it can have, beside plain decoding of its own temperature; names are unique."""
    config = EvaluationConfig(forms=("chain:4", "tree:4x5x15", "chain:4"), temperature=(0.0, 0.7))
    arms = arms_of([NGRAM, SUFFIX], config)
    names = ["plain", "ngram chain:4", "suffix chain:4", "suffix tree:4x5x15"]
    assert [arm.name for arm in arms] == [*names, *(f"{name} T=0.7" for name in names)]
    assert [arm.plain for arm in arms] == ["plain"] * 4 + ["plain T=0.7"] * 4
    assert {arm.name: arm.describe()["rule"] for arm in arms}["ngram chain:4 T=0.7"] == "point_mass"
    assert [arm.name for arm in arms_of([NGRAM], EvaluationConfig(temperature=0.7))] == ["plain", "ngram chain:8"]
    deep = arms_of([NGRAM], EvaluationConfig(forms=("tree:4x5x3",)))  # of a tree it would read depth and budget alone
    assert deep[1].shape == Chain(3)
    written = Written("t.json", Tree.static([[0], [1]]))
    assert "ngram tree:t.json" not in {arm.name for arm in arms_of([NGRAM], config, written)}


def test_settings_contradict_each_other() -> None:
    assert [EvaluationConfig(temperature=t).timed_temperatures for t in ((0.7, 0.0), 0.7)] == [(0.0,), (0.7,)]
    with pytest.raises(ValueError, match="speed_temperatures names 1, which is not among"):
        EvaluationConfig(temperature=(0.0, 0.7), speed_temperatures=(1.0,))
    with pytest.raises(ValueError, match="each once"):
        EvaluationConfig(temperature=(0.7, 0.7))
    with pytest.raises(ValueError, match="each once"):
        EvaluationConfig(temperature=(0.7, 0.70000001))  # one name for two
    with pytest.raises(ValueError, match="no domain can be called 'all'"):
        Suite(name="s", prompts={"all": 1})
    with pytest.raises(ValueError, match="name b, and `prompts` takes none"):
        Suite(name="s", prompts={"a": 1}, domains={"b": "b.jsonl"})


def test_suite_is_not_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "eval/suites").mkdir(parents=True)
    (tmp_path / "eval/suites/mine.yaml").write_text("")
    assert find_suite("mine", [Path("/nowhere"), tmp_path]) == tmp_path / "eval/suites/mine.yaml"
    assert find_suite("a/b.yaml", [tmp_path]) == Path("a/b.yaml")
    with pytest.raises(ValueError, match="no suite 'other'; there are mine"):
        find_suite("other", [tmp_path])


def test_domain_takes_the_prompts_of_another(tmp_path: Path, make_target: Callable[..., Target]) -> None:
    """Files of a suite that lie elsewhere, domains of one file, sources, turns, lengths; and the licences of what was taken."""
    target = make_target(vocab=40)
    (tmp_path / "p").mkdir()
    for name in ("a", "b"):
        rows = [
            {"id": f"{name}{i}", "domain": name, "source": f"s{i % 2}", "turns": ["w9 " * (1 + i), "w9", "w9"]} for i in range(4)
        ]
        (tmp_path / f"p/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "SOURCES.md").write_text("| source | licence |\n| --- | --- |\n| `s0`, `x` | MIT |\n| `s1` | CC BY 4.0 |\n")
    base = {"name": "s", "folder": "p", "turns": 2}
    odd = Suite(**base, prompts={"both": "all"}, domains={"both": ("p/a.jsonl", "p/b.jsonl")}, sources={"both": ("s1",)})
    found = suite_prompts(odd, target, tmp_path)
    assert {p.id for p in found["both"]} == {"a1", "a3", "b1", "b3"} and {p.domain for p in found["both"]} == {"both"}
    assert {len(p.turns) for p in found["both"]} == {2}
    own = Suite(**base, prompts={"a": 3})
    chosen = suite_prompts(own, target, tmp_path)
    assert len(chosen["a"]) == 3
    told = told_of_suite(own, chosen, target, tmp_path)
    assert told["licences"].items() <= {"s0": "MIT", "s1": "CC BY 4.0"}.items() and told["turns"] == 6 and told["sha256"] == suite_hash(own)
    assert licences(tmp_path / "elsewhere/p") == {}
    short = len(target.encode(chosen["a"][0].chat)) - len(chosen["a"][0].turns[0].split())
    long = suite_prompts(Suite(**base, prompts={"a": "all"}, min_prompt_tokens=short + 3), target, tmp_path)
    assert {p.id for p in long["a"]} == {"a2", "a3"}
    with pytest.raises(ValueError, match="at most 6 tokens, 0 fit"):  # with its answer a prompt has to fit into the target
        suite_prompts(Suite(**base, prompts={"a": 1}, max_new_tokens=target.max_length - 6), target, tmp_path)
    config = EvaluationConfig(prompts=str(tmp_path / "p/a.jsonl"))
    assert too_long(config, {"a": chosen["a"]}, tmp_path) == 1 and too_long(EvaluationConfig(), {"a": chosen["a"]}, tmp_path) == 0
    assert suite_of(config, tmp_path).prompts == {"a": "all"} and suite_of(config, tmp_path).turns == 3


def test_every_suite_that_is_shipped_can_be_asked() -> None:
    """Their files are there, and so are the licences of all that they ask."""
    root = Path(__file__).parents[2]
    known = licences(root / "eval/prompts")
    for path in sorted((root / "eval/suites").glob("*.yaml")):
        suite = suite_of(EvaluationConfig(suite=str(path)), root)
        named = [suite.domains.get(d, f"{suite.folder}/{d}.jsonl") for d in suite.prompts]
        files = [root / file for given in named for file in ([given] if isinstance(given, str) else given)]
        assert all(file.is_file() for file in files), path
        sources = {json.loads(line)["source"] for file in files for line in file.read_text().splitlines()}
        assert sources <= known.keys() and suite.name == path.stem, path


def test_command_ends_well_where_a_condition_fails(place: Path, cli: Cli, tmp_path: Path) -> None:
    """Own prompts of two turns, two drafters, two temperatures: the report is written, then the exit code tells; a second call compares."""
    ask = ["evaluate", "--target", place / "target", "--prompts", place / "own.jsonl", "--drafters", "ngram,suffix", "--shapes", "chain:2",
           "--set=anatomy=false", *SMALL]  # fmt: skip
    few = ["--temperature", "0", "--out", tmp_path / "a"]
    result = cli(*ask, *few, "--require", "tau>=1", "--require", "tau.red>=99")
    assert result.exit_code == 1 and "not met: tau.red>=99 (found " in result.stderr and "hours" in " ".join(result.output.split())
    assert "Latency (batch 1)" in result.output and "spectrain bench says from which batch on drafting loses" in result.output
    report = json.loads((tmp_path / "a/report.json").read_text())
    assert [gate["met"] for gate in report["gates"]] == [True, False] and report["suite"]["turns"] == 9
    assert report["tau"]["plain"]["all (micro)"]["prompts"] == 6 and report["suite"]["name"] == "own v1"
    counted = (tmp_path / "a/records.jsonl").read_text().splitlines()
    assert sum('"mode": "tau"' in line for line in counted) == 3 * 9
    result = cli(*ask, "--temperature", "0,1", "--out", tmp_path / "a", "--against", tmp_path / "a", "--json")
    assert result.exit_code == 0, result.output
    again = json.loads(result.stdout)
    assert again == json.loads((tmp_path / "a/report.json").read_text())
    assert again["against"]["paired"] and {row["difference"] for row in again["against"]["rows"]} == {0.0}
    other = cli(*ask[:-len(SMALL) - 3], "--shapes", "chain:3", *SMALL, "--out", tmp_path / "b", "--against", tmp_path / "a")
    assert other.exit_code == 1 and "has no drafting arm of this evaluation" in " ".join(other.stderr.split())
    assert not (tmp_path / "b/records.jsonl").exists(), "told before the work"
    lines = (tmp_path / "a/records.jsonl").read_text().splitlines()
    assert lines[: len(counted)] == counted and sum('"mode": "tau"' in line for line in lines) == 2 * 3 * 9
    assert again["tau"]["ngram chain:2"] == report["tau"]["ngram chain:2"] and again["speed"]["plain T=1"] == {}


def test_fault_is_told_after_the_work(place: Path, cli: Cli, tmp_path: Path) -> None:
    """What cannot be asked is refused before the target is loaded."""
    ask = ["evaluate", "--target", "./nowhere", "--prompts", place / "own.jsonl", "--out", tmp_path / "out"]
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{}")
    for more, said in (
        (["--drafters", "medusa"], "drafter 'medusa' is unknown"), (["--shapes", "chain"], "shape 'chain' is unknown"),
        (["--temperature", "warm"], "--temperature needs numbers"), (["--require", "tau"], "--require 'tau' is no condition"),
        (["--against", tmp_path / "none"], "--against needs the report.json"), (["--engine", "vllm"], "add --endpoint"),
        (["--against", damaged], "bad report: 'title' is missing"),
        (["--prompts", tmp_path / "none.jsonl"], "no file"),
    ):  # fmt: skip
        result = cli(*ask, *more)
        assert result.exit_code == 1 and said in " ".join(result.stderr.split()), result.output
    assert not (tmp_path / "out").exists()
