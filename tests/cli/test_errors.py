"""Mistakes as a person meets them: one message that says what was found and what to do, exit code 1, no traceback."""

import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from safetensors import SafetensorError

import spectrain
from spectrain.cli import guarded
from spectrain.heads.base import save_head
from spectrain.target import capture, folders
from spectrain.target.model import Target
from spectrain.training.setup import made_with

Cli = Callable[..., Result]
Usage = namedtuple("Usage", "total used free")


def message(result: Result) -> str:
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("error: ") == 1, result.stderr
    assert "Traceback" not in result.output
    return result.stderr.removeprefix("error: ").strip()


@pytest.fixture
def train(project: Path, cli: Cli, tmp_path: Path) -> Callable[..., str]:
    """train(*options): the message with which `spectrain train` ends; its run is in tmp_path/run."""

    def run(*options: str, recipe: Path = project / "recipes/tiny.yaml") -> str:
        return message(cli("train", recipe, "--out", tmp_path / "run", *options))

    return run


@pytest.fixture
def mine(project: Path, tmp_path: Path) -> Path:
    """A recipe of one's own beside one's own prompts; the target is the project's."""
    for name in ("recipes", "eval"):
        shutil.copytree(project / name, tmp_path / "mine" / name)
    return tmp_path / "mine/recipes/tiny.yaml"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "training.epoch=3"], ["training.epoch: unknown key", "known here", "epochs"]),
        (["--set", "training.ttt_steps=0"], ["training.ttt_steps", "found 0"]),
        (["--set", "training.lr"], ["--set needs key=value, found 'training.lr'"]),
        (["--set", "target.name=./nowhere"], ["no model at ./nowhere", "give a folder, a .gguf file or a Hub name"]),
        (["--set", "head.layer_ids=[3,2]"], ["head.layer_ids [3, 2]", "one to five that rise within 1 to 6"]),
        (["--set", "head.kind=medusa9"], ["head 'medusa9' is unknown; there are eagle3"]),
        (
            ["--set", "head.draft_vocab_size=101"],
            ["head.draft_vocab_size 101 is above the 100 tokens", "--set head.draft_vocab_size=100 (null: all of them)"],
        ),
        ([], ["no answers at", "recipes/data/answers.jsonl", "--fresh-answers"]),
    ],
)
def test_setting_is_found_wrong_after_hours(options: list[str], words: list[str], train: Callable[..., str], tmp_path: Path) -> None:
    """UX1: by its name, before anything is made."""
    told = train(*options, *(["--fresh-answers"] if options else []))
    assert all(word in told for word in words), told
    assert not list((tmp_path / "run").rglob("*"))


def test_missing_recipe_is_a_traceback(project: Path, train: Callable[..., str]) -> None:
    assert train(recipe=project / "recipes/tinny.yaml") == f"no file {project}/recipes/tinny.yaml; there are {project}/recipes/tiny.yaml"


def test_recipe_at_the_top_of_the_disk_is_a_traceback() -> None:
    from spectrain.cli.train import _above

    assert _above(Path("/r.yaml"), 1) == _above(Path("/data/s.yaml"), 2) == Path("/")
    assert _above(Path("/a/recipes/r.yaml"), 1) == _above(Path("/a/eval/suites/s.yaml"), 2) == Path("/a")


def test_wrong_line_is_not_found(mine: Path, train: Callable[..., str], cli: Cli, project: Path, tmp_path: Path) -> None:
    """Prompts, answers and suites: file, line and what is wrong with it."""

    def spoil(path: Path, number: int, line: str) -> None:
        lines = path.read_text().splitlines()
        lines[number - 1] = line
        path.write_text("\n".join(lines) + "\n")

    prompts = mine.parent / "data/prompts.jsonl"
    spoil(prompts, 3, '{"id": "red-2", "domain": "red", "prompt": "w1"')
    assert f"{prompts}, line 3: not JSON" in train("--fresh-answers", recipe=mine)
    spoil(prompts, 3, '{"id": "red-2", "domain": "red"}')
    assert f"{prompts}, line 3: needed `prompt`" in train("--fresh-answers", recipe=mine)
    answers = mine.parent / "data/answers.jsonl"
    answers.write_text('{"id": "1", "domain": "red", "messages": [{"role": "user", "content": "w9"}]}\n[1]\n')
    assert train(recipe=mine).startswith("none of 2 rows of the input is left to train on; reasons in ")
    told = [json.loads(line) for line in (tmp_path / "run/rows/rejected.jsonl").read_text().splitlines()]
    found = {row["row"]: row for row in told if row["file"] == str(answers)}
    assert {number: row["reason"] for number, row in found.items()} == {1: "unanswered", 2: "unreadable"} and len(told) == 2
    assert "no answer to learn from" in found[1]["why"] and "list" in found[2]["why"]
    suite = mine.parents[1] / "eval/suites/tiny.yaml"
    spoil(mine.parents[1] / "eval/prompts/blue.jsonl", 2, "{")
    told = message(cli("evaluate", "--target", project / "target", "--suite", suite, "--out", tmp_path / "e"))
    assert "eval/prompts/blue.jsonl, line 2: not JSON" in told


def test_answers_of_another_target_are_learnt(mine: Path, train: Callable[..., str], make_target: Callable[..., Target]) -> None:
    answers = mine.parent / "data/answers.jsonl"
    answers.write_text('{"id": "1", "domain": "red", "messages": [{"role": "user", "content": "w9"}]}\n')
    record = made_with(make_target(num_hidden_layers=7, seed=4), {})
    answers.with_suffix(".made_with.json").write_text(json.dumps(record))
    told = train(recipe=mine)
    assert told == f"{answers} was answered by another target (embedding_sha256 differs); let yours answer: add --fresh-answers"


def test_nothing_to_train_on_is_success(mine: Path, train: Callable[..., str], tmp_path: Path) -> None:
    """RB1: how many each filter took."""
    asked = [{"role": "user", "content": "w9"}]
    rows = [{"id": str(i), "domain": "red", "messages": [{"role": "user", "content": f"w{20 + i}"}]} for i in range(5)]
    answers = mine.parent / "data/answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = train(recipe=mine).splitlines()
    assert told[0] == f"none of 5 rows of the input is left to train on; reasons in {tmp_path}/run/rows/rejected.jsonl"
    assert [line.split()[:2] for line in told[1:]] == [["read", "5"], ["unanswered", "-5"], ["kept", "0"]]
    for row in rows:
        row["messages"] += [{"role": "assistant", "content": "w10 w11"}]
    rows[4]["messages"] = [*asked, {"role": "assistant", "content": ""}]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = train("--set", "data.prepare.validation_per_domain=9", recipe=mine)
    assert "rows: validation                   4  rows of this part" in told and "kept                               4" in told
    assert "9 red prompts asked for, only 8 there that fit" in train("--fresh-answers", "--set", "data.answers.mix.red=9", recipe=mine)


@pytest.mark.parametrize("command", ["generate", "evaluate", "export"])
def test_missing_head_is_a_traceback(command: str, project: Path, cli: Cli, tmp_path: Path) -> None:
    target, head = ["--target", project / "target"], tmp_path / "none"
    suite = ["--suite", project / "eval/suites/tiny.yaml"]
    found = {
        "generate": ["w9", *target, "--head", head],
        "evaluate": [*target, *suite, "--head", head, "--out", tmp_path / "e"],
        "export": [head, "--to", "vllm", "--out", tmp_path / "x"],
    }[command]
    told = message(cli(command, *found))
    assert str(head) in told and ("train one with `spectrain train RECIPE`" in told or "give the folder of a finished training" in told)
    assert not list(tmp_path.iterdir())


def test_head_of_another_target_is_measured(
    project: Path, cli: Cli, tmp_path: Path, make_target: Callable[..., Target], make_head: Callable[..., Any]
) -> None:
    """Refused before the first prompt, by what differs."""
    other = make_target(num_hidden_layers=7, seed=4)
    save_head(make_head(other), tmp_path / "head", run_yaml="", made_with=made_with(other, {}))
    both = ["--target", project / "target", "--head", tmp_path / "head"]
    for command in (["generate", "w9"], ["evaluate", "--suite", project / "eval/suites/tiny.yaml", "--out", tmp_path / "e"]):
        told = message(cli(*command, *both))
        assert "this head was trained for tiny (its embedding differs" in told and "spectrain train RECIPE" in told
    assert not (tmp_path / "e/records.jsonl").exists()


def test_drafter_without_its_head_is_a_traceback(project: Path, cli: Cli) -> None:
    target = ["--target", project / "target"]
    assert "drafter head needs --head FOLDER" in message(cli("generate", "w9", *target, "--drafter", "head"))
    assert "drafter 'oracle' is unknown; choose head, ngram, suffix, none" in message(cli("generate", "w9", *target, "--drafter", "oracle"))
    assert "dtype 'float8' is unknown" in message(cli("generate", "w9", *target, "--dtype", "float8"))


def test_long_prompt_is_cut_or_a_traceback(project: Path, cli: Cli) -> None:
    told = message(cli("generate", "w9 " * 300, "--target", project / "target", "--raw"))
    assert told.startswith("prompt 0 has 300 tokens") and "takes 256 with its answer; shorten or split it" in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "shapes"], "--set needs key=value, found 'shapes'"),
        (["--set", "suite.x=1"], "suite holds a value, not further keys"),
        (["--set", "shapes.chain=[1"], "the value is not valid YAML"),
        (["--set", "shapes.chain=0"], "shapes.chain"),
        (["--set", "shapes.chains=3"], "shapes.chains: unknown key; known here: chain, "),
        (["--suite", "eval/suites/none.yaml"], "eval/suites/none.yaml; there are "),
    ],
)
def test_wrong_option_is_found_after_loading(options: list[str], words: str, project: Path, cli: Cli, tmp_path: Path) -> None:
    """The target is missing too: what was typed wrong is told first."""
    suite = [] if "--suite" in options else ["--suite", project / "eval/suites/tiny.yaml"]
    assert words in message(cli("evaluate", "--target", "./nowhere", "--out", tmp_path / "e", *suite, *options))


def test_report_that_is_none_is_a_traceback(cli: Cli, tmp_path: Path) -> None:
    assert "no report.json in" in message(cli("report", tmp_path))
    (tmp_path / "report.json").write_text("{")
    assert f"{tmp_path}/report.json is damaged" in message(cli("report", tmp_path))
    (tmp_path / "report.json").write_text("{}")
    assert "bad report: 'title' is missing" in message(cli("report", tmp_path))


def test_unknown_format_is_a_traceback(cli: Cli, tmp_path: Path) -> None:
    assert "export format 'onnx' is unknown; choose one of eagle3, vllm, speculators, sglang" in message(
        cli("export", tmp_path, "--to", "onnx", "--out", tmp_path)
    )


@pytest.mark.parametrize("setting", ["head.kind=medusa", "training.lora={rank: 4}"])
def test_quickstart_fails_only_after_training(cli: Cli, tmp_path: Path, setting: str) -> None:
    """It exports what it has trained, and an engine takes neither."""
    assert "spectrain train recipes/medusa_smollm2.yaml" in message(cli("quickstart", "--out", tmp_path / "run", "--set", setting))
    assert not (tmp_path / "run").exists()


def test_quickstart_looks_for_a_clone_elsewhere(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrain, "__file__", str(tmp_path / "site-packages/spectrain/__init__.py"))
    assert "quickstart needs the recipes and prompts of a clone" in message(cli("quickstart", "--out", tmp_path / "run"))


@pytest.mark.parametrize("wrong", [["train"], ["train", "r.yaml", "--epochs", "3"], ["nothing"], ["generate", "w9"]])
def test_usage_error_is_a_failure(wrong: list[str], cli: Cli) -> None:
    result = cli(*wrong)
    assert result.exit_code == 2 and "Usage: " in result.stderr
    assert cli("generate", "w9", "--target", "t", "--chain", "0").exit_code == 2


def test_full_disk_is_found_in_the_middle(
    trained: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ME1: the store's size is held against the free space before the first row is captured."""
    (tmp_path / "run").mkdir()
    shutil.copy(trained / "answers.jsonl", tmp_path / "run")
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1000))
    told = train("--fresh-answers")
    assert re.match(f"the store needs [1-9][0-9] KiB, {tmp_path}/run/states has 1000 bytes left; free some, take fewer rows", told)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_disk_that_fills_up_leaves_half_a_shard(
    project: Path, trained: Path, train: Callable[..., str], cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ME1: in the second of five shards: a message, the first one whole, nothing of the second; the next call makes what is missing."""
    (tmp_path / "run").mkdir()
    shutil.copy(trained / "answers.jsonl", tmp_path / "run")
    original, made = capture.write_shard, []

    def write(path: Path, tensors: Any) -> None:
        made.append(path.name)
        if len(made) == 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(path, tensors)

    monkeypatch.setattr(capture, "write_shard", write)
    shards = ["--set", "data.capture.rows_per_shard=2"]
    full = train("--fresh-answers", *shards)
    states = tmp_path / "run/states"
    assert full == f"no space left on disk while writing {states}/rows-0000002.safetensors; free some and run the same command again"
    assert sorted(p.name for p in states.iterdir()) == ["manifest.json", "rows-0000000.safetensors"]
    done = cli("train", project / "recipes/tiny.yaml", "--out", tmp_path / "run", "--fresh-answers", *shards, "--set", "training.steps=1")
    assert done.exit_code == 0 and len(list(states.glob("*.safetensors"))) == 5 and len(made) == 2 + 4, done.output


def test_rows_that_do_not_fit_are_captured(trained: Path, train: Callable[..., str], tmp_path: Path) -> None:
    """UX1: what training would refuse for these rows is told before their states are made."""
    (tmp_path / "run").mkdir()
    shutil.copy(trained / "answers.jsonl", tmp_path / "run")
    for setting, words in (
        ("training.packing=4", ["training.packing: row 'red-", "9 rows are longer than a line of 4; needed lines of at least 2"]),
        ("training.domain_weights={green: 1}", ["green", "blue", "red"]),
    ):
        told = train("--fresh-answers", "--set", setting)
        assert all(word in told for word in words), told
        assert not (tmp_path / "run/states").exists() and (tmp_path / "run/rows/prepared.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_at_a_checkpoint_is_a_traceback(trained: Path, train: Callable[..., str], tmp_path: Path) -> None:
    """torch reports a full disk as an enforce failure with a position; a person is told about the disk."""
    shutil.copytree(trained / "states", tmp_path / "run/states")
    shutil.copy(trained / "answers.jsonl", tmp_path / "run")
    (tmp_path / "run/training/checkpoints").mkdir(parents=True)
    (tmp_path / "run/training/checkpoints/step-1.pt.part").symlink_to("/dev/full")
    told = train("--fresh-answers", "--set", "training.steps=1")
    assert told.startswith("no space left on disk while writing ") and told.endswith("free some and run the same command again")
    assert [path.name for path in (tmp_path / "run/training/checkpoints").iterdir()] == ["step-1.pt.part"]


def raising(error: BaseException) -> Callable[[], None]:
    @guarded
    def command() -> None:
        raise error

    return command


def chained(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


FULL = OSError(28, "No space left on device", "states/rows-0000000.part")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FULL, "no space left on disk while writing states/rows-0000000.part; free some and run the same command again"),
        (OSError(28, "No space left on device"), "no space left on disk while writing a file; free some and run the same command again"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "no space left on disk while writing a file; free some and run the same command again",
        ),
        (
            chained(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), FULL),
            "no space left on disk while writing states/rows-0000000.part; free some and run the same command again",
        ),
        (PermissionError(13, "Permission denied", "runs/x"), "Permission denied: runs/x"),
        (OSError("x/y is not a local folder"), "x/y is not a local folder"),
        (ValueError("two words"), "two words"),
    ],
)
def test_error_of_the_system_is_a_traceback(error: Exception, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end:
        raising(error)()
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == f"error: {told}\n"


@pytest.mark.parametrize("error", [RuntimeError("x"), AssertionError("x"), KeyError("x"), SafetensorError("x"), typer.Exit(3)])
def test_fault_of_ours_is_hidden(error: Exception) -> None:
    """A bug keeps its traceback, an exit its code."""
    with pytest.raises(type(error)) as end:
        raising(error)()
    assert end.value is error


def test_stop_is_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for given, told in (("", "stopped"), ("stopped after step 3 of 9", "stopped after step 3 of 9")):
        with pytest.raises(typer.Exit) as end:
            raising(KeyboardInterrupt(*([given] if given else [])))()
        assert end.value.exit_code == 130
        assert capsys.readouterr().err == f"\n{told}; what is finished is kept, the same command goes on from there\n"
