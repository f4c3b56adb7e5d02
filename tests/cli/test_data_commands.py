"""prepare, regenerate and capture through the real command line, and training on what they made; each a second time."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from spectrain.data.formats import read_conversations
from spectrain.data.row_store import RowStore
from spectrain.heads.base import load_head
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target, load_target

Cli = Callable[..., Result]
STEPS = ("--set", "training.steps=4")
LEAK = "w10 w48 w12"  # the first evaluation prompt


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def message(result: Result) -> str:
    assert result.exit_code == 1 and "Traceback" not in result.output, result.output
    assert result.stderr.count("error: ") == 1, result.stderr
    return result.stderr.partition("error: ")[2].strip()


def done(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def made(project: Path, cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folder of the files made by the three commands, the arguments of each, and the JSON that each printed."""
    folder = tmp_path_factory.mktemp("made")
    asked = [{"id": f"p{i}", "domain": ("red", "blue")[i % 2], "prompt": f"w{20 + i} w{60 + i}"} for i in range(12)]
    asked += [{"id": "leak", "domain": "red", "prompt": LEAK}, {"id": "steers", "domain": "red", "prompt": "w9 <end> w10"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked) + '{"id": "torn')
    target = ["--target", project / "target"]
    steps: dict[str, list[Any]] = {
        "regenerate": [folder / "prompts.jsonl", *target, "--out", folder / "answers.jsonl", "--set", "max_new_tokens=12"],
        "prepare": [folder / "answers.jsonl", *target, "--out", folder / "rows", "--disjoint-from", project / "eval/prompts",
                    "--set", "validation_per_domain=1"],
        "capture": [folder / "rows", *target, "--head-config", project / "recipes/tiny.yaml", "--out", folder / "states",
                    "--set", "data.capture.rows_per_shard=4"],
    }  # fmt: skip
    told = {name: json.loads(done(cli(name, *options, "--json")).stdout) for name, options in steps.items()}
    return {"folder": folder, "steps": steps, "told": told}


def test_rows_are_lost_on_the_way(made: dict[str, Any]) -> None:
    """Read 15, answered 13, kept 12: for each of the others a line with its reason; what is kept has the target's own answers."""
    folder, told = made["folder"], made["told"]
    assert [told["regenerate"][key] for key in ("answered", "there", "rejected")] == [13, 0, 2]
    reasons = [json.loads(line) for line in (folder / "answers.rejected.jsonl").read_text().splitlines()]
    assert [(row["id"], row["reason"].partition(":")[0]) for row in reasons if row["id"] == "prompts:15"] == [("prompts:15", "unreadable")]
    assert any(row["id"] == "steers" and "control token '<end>'" in row["reason"] for row in reasons) and len(reasons) == 2
    prepared = told["prepare"]
    assert (prepared["state"], prepared["read"], prepared["kept"], prepared["rejected"]) == ("built", 13, 12, {"question": 1})
    (leak,) = [json.loads(line) for line in (folder / "rows/rejected.jsonl").read_text().splitlines()]
    assert (leak["id"], leak["file"]) == ("leak", str(folder / "answers.jsonl"))
    rows, kept_out = RowStore(folder / "rows"), RowStore(folder / "rows", "validation")
    assert sorted(kept_out.domains) == ["blue", "red"] and len(rows) == 10
    assert {row.id for row in [*rows, *kept_out]} == {f"p{i}" for i in range(12)}
    answers = {c.id: c for c in read_conversations(folder / "answers.jsonl")}
    target = load_target(made["steps"]["prepare"][2])
    for row in rows:
        *asked, answer = answers[row.id].messages
        assert row.prompt_ids == target.encode(asked)
        assert target.tokenizer.decode(row.supervised_ids, skip_special_tokens=True) == answer["content"].strip()
    captured = told["capture"]
    assert (captured["rows"], captured["tokens"], captured["shards"]) == (10, sum(map(len, rows)), 3)
    assert captured["check"]["kl"] < 1e-4 and captured["check"]["top1"] >= 0.995
    assert len(FeatureStore(folder / "states", rows)) == 10


@pytest.mark.parametrize("as_json", [True, False])
def test_second_call_does_it_again(made: dict[str, Any], cli: Cli, as_json: bool) -> None:
    before = content(made["folder"])
    found = {name: done(cli(name, *options, *(["--json"] if as_json else []))) for name, options in made["steps"].items()}
    assert content(made["folder"]) == before
    if as_json:
        told = {name: json.loads(result.stdout) for name, result in found.items()}  # nothing else is printed there
        assert (told["regenerate"]["answered"], told["regenerate"]["there"]) == (0, 13)
        assert told["prepare"] == {**made["told"]["prepare"], "state": "unchanged"}
        assert told["capture"]["shards"] == 0 and told["capture"]["total"] == made["told"]["capture"]["total"]
    else:
        assert "0 answered (13 were there), 2 rejected" in found["regenerate"].stderr and not found["regenerate"].stdout
        assert "nothing to do: the same inputs, settings and tokenizer as before" in found["prepare"].stdout
        assert "10 rows for training" in found["prepare"].stdout and "states: 0 shards made" in " ".join(found["capture"].stdout.split())


def test_prepared_rows_cannot_be_looked_at(made: dict[str, Any], cli: Cli) -> None:
    shown = done(cli("prepare", *made["steps"]["prepare"], "--show", 3)).stdout
    assert shown.count("tokens supervised") == 3 and shown.count("⟦") == 3 == shown.count("⟧")
    assert re.search(r"<start> user w\d+ w\d+ <end> <start> assistant ?⟦ ?\w", shown)


def test_size_is_told_when_the_disk_is_full(made: dict[str, Any], cli: Cli, tmp_path: Path) -> None:
    """A dry run says bytes and time as the run does, and writes nothing."""
    options = [*made["steps"]["capture"], "--out", tmp_path / "none", "--dry-run"]
    told = json.loads(done(cli("capture", *options, "--json")).stdout)
    captured = made["told"]["capture"]
    assert all(told[key] == captured[key] for key in ("token", "longest", "total", "rows", "tokens", "supervised"))
    assert told["hours"] == pytest.approx(told["tokens"] / told["tokens_per_second"] / 3600) and told["hours"] > 0
    shown = " ".join(done(cli("capture", *options)).stdout.split())
    assert f"10 rows, {told['tokens']} tokens, {told['supervised']} supervised: at most {told['token']} bytes a token" in shown
    assert "tokens/s here: 0.0 minutes" in shown
    assert not (tmp_path / "none").exists()
    stored = sum(p.stat().st_size for p in (made["folder"] / "states").glob("*.safetensors"))
    assert told["total"] * 0.8 < stored < told["total"] * 1.2 + 3 * 2048  # headers


def test_training_makes_its_data_again(project: Path, made: dict[str, Any], cli: Cli, tmp_path: Path) -> None:
    """On named rows and states nothing is answered, prepared or captured; computed while training they give the same head but for
    the rounding of the store; a second call trains no more."""
    folder = made["folder"]
    named = ["--set", f"data.rows={folder}/rows", "--set", "data.answers=null", "--set", "data.capture.rows_per_shard=4", *STEPS]
    sources = {"stored": ["--set", f"data.states={folder}/states"], "online": ["--set", "data.online=true"]}
    before = content(folder)
    for name, source in sources.items():
        train = ["train", project / "recipes/tiny.yaml", "--out", tmp_path / name, *named, *source]
        first = done(cli(*train)).stdout
        assert first.startswith("10 rows to train on, 2 kept out\n") and "4 steps, best measured tau" in first
        assert ("states checked" in first) == (name == "stored")
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == ["head", "last", "training"]
        head = load_head(tmp_path / name / "head")
        assert head.made_with["rows_sha256"] == RowStore(folder / "rows").rows_sha256
        there = content(tmp_path / name)
        done(cli(*train))
        assert content(tmp_path / name) == there
    assert content(folder) == before
    points = [json.loads((tmp_path / name / "training/metrics.jsonl").read_text().splitlines()[-1]) for name in sources]
    assert points[0]["loss"] == pytest.approx(points[1]["loss"], rel=5e-3) and points[0]["loss"] != points[1]["loss"]
    mixed = cli("train", project / "recipes/tiny.yaml", "--out", tmp_path / "stored", *named, *sources["online"])
    assert "other settings or data" in message(mixed)


def test_data_of_another_target_is_learnt(
    project: Path, made: dict[str, Any], cli: Cli, tmp_path: Path, make_target: Callable[..., Target], save_target: Callable[..., Path]
) -> None:
    """Another template: its rows are refused. The same tokenizer with other weights: rows may be used, states not."""
    other = save_target(make_target(num_hidden_layers=7, seed=4), tmp_path / "weights")
    shutil.copytree(project / "target", tmp_path / "template")
    (tmp_path / "template/chat_template.jinja").write_text(load_target(project / "target").tokenizer.chat_template + " ")
    folder = made["folder"]
    named = ["--set", f"data.rows={folder}/rows", "--set", f"data.states={folder}/states", "--set", "data.capture.rows_per_shard=4"]
    before = content(folder)
    refused = f"{folder}/rows was prepared for another target (template_sha256 differs); run `spectrain prepare` with --target"
    train = ["train", project / "recipes/tiny.yaml", "--out", tmp_path / "run", *named, "--set"]
    assert message(cli(*train, f"target.name={tmp_path}/template")) == f"{refused} {tmp_path}/template"
    assert f"{folder}/states is a store with embedding_sha256 = " in message(cli(*train, f"target.name={other}"))
    capture = made["steps"]["capture"]
    assert message(cli("capture", *capture, "--target", tmp_path / "template")) == f"{refused} {tmp_path}/template"
    assert "is a store with embedding_sha256 = " in message(cli("capture", *capture, "--target", other))
    prepared = json.loads(done(cli("prepare", *made["steps"]["prepare"], "--target", other, "--json")).stdout)
    assert prepared["state"] == "unchanged"  # of the target only the tokenizer counts
    assert content(folder) == before and not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train", "RECIPE", "--set", "data.answers=null"], ["needed: `rows` (a folder of `spectrain prepare`) or `answers`"]),
        (["train", "RECIPE", "--set", "data.rows=OUT"], ["OUT does not exist; make them: spectrain prepare INPUT… --out OUT"]),
        (["regenerate", "ANSWERS", "--out", "OUT"], ["give one of --target", "and --endpoint"]),
        (["regenerate", "ANSWERS", "--out", "OUT", "--target", "TARGET", "--endpoint", "http://127.0.0.1:1/v1"], ["give one of --target"]),
        (["regenerate", "ANSWERS", "--out", "OUT", "--target", "TARGET", "--set", "max_new_token=3"], ["unknown key", "max_new_tokens"]),
        (["regenerate", "OUT.jsonl", "--out", "OUT", "--target", "TARGET"], ["OUT.jsonl"]),
        (["prepare", "OUT.jsonl", "--target", "TARGET", "--out", "OUT"], ["OUT.jsonl"]),
        (["prepare", "ANSWERS", "--target", "./nowhere", "--out", "OUT"], ["no target at ./nowhere"]),
        (["prepare", "ANSWERS", "--target", "TARGET", "--out", "OUT", "--format", "xml"], ["format", "'xml'"]),
        (["prepare", "ANSWERS", "--target", "TARGET", "--out", "OUT", "--disjoint-from", "OUT/none"], ["OUT/none"]),
        (["prepare", "ANSWERS", "--target", "TARGET", "--out", "PROJECT"], ["PROJECT holds other files"]),
        (["capture", "OUT", "--target", "TARGET", "--head-config", "RECIPE", "--out", "OUT/s"], ["OUT does not exist", "prepare"]),
        (["capture", "PROJECT", "--target", "TARGET", "--head-config", "RECIPE", "--out", "OUT"], ["PROJECT holds no prepared rows"]),
        (["capture", "ROWS", "--target", "TARGET", "--head-config", "PROJECT/r.yaml", "--out", "OUT"], ["no file PROJECT/r.yaml"]),
        (["capture", "ROWS", "--target", "TARGET", "--head-config", "RECIPE", "--out", "PROJECT"], ["holds files but no manifest.json"]),
        (["capture", "ROWS", "--target", "./nowhere", "--head-config", "RECIPE", "--out", "OUT"], ["no model at ./nowhere"]),
    ],
)
def test_mistake_is_a_traceback(
    command: list[str], words: list[str], project: Path, made: dict[str, Any], cli: Cli, tmp_path: Path
) -> None:
    """One message that names what was found and what to do, exit code 1, nothing made."""
    names = {
        "RECIPE": project / "recipes/tiny.yaml", "TARGET": project / "target", "PROJECT": project, "OUT": tmp_path / "out",
        "ANSWERS": made["folder"] / "answers.jsonl", "ROWS": made["folder"] / "rows",
    }  # fmt: skip

    def filled(text: str) -> str:
        for name, path in names.items():
            text = text.replace(name, str(path))
        return text

    before = sorted(project.rglob("*"))
    told = message(cli(*map(filled, command), *(["--out", filled("OUT")] if command[0] == "train" else [])))
    assert all(filled(word) in told for word in words), told
    assert not list(tmp_path.rglob("*.*")) and sorted(project.rglob("*")) == before


@pytest.mark.parametrize(
    "wrong",
    [
        ["prepare", "in.jsonl", "--out", "o"], ["prepare", "--target", "t", "--out", "o"], ["prepare", "a", "--target", "t"],
        ["prepare", "a", "--target", "t", "--out", "o", "--workers", "0"], ["regenerate", "a", "--target", "t"],
        ["regenerate", "--target", "t", "--out", "o"], ["capture", "rows", "--target", "t", "--out", "o"],
        ["capture", "rows", "--target", "t", "--head-config", "r.yaml"], ["capture", "a", "--target", "t", "--format", "x"],
    ],
)  # fmt: skip
def test_usage_error_is_a_failure(wrong: list[str], cli: Cli) -> None:
    result = cli(*wrong)
    assert result.exit_code == 2 and "Usage: " in result.stderr and not result.stdout
