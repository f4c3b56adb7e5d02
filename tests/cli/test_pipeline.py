"""The whole way through the real command line: answers, states, head, figures, export; alone and on two processes."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file

from spectrain.cli import stages
from spectrain.config import AnswersConfig, Recipe, load_config
from spectrain.data import prepare
from spectrain.data.formats import Conversation, read_conversations
from spectrain.data.row_store import RowStore
from spectrain.decoding.generate import generate
from spectrain.heads.base import load_head
from spectrain.target import capture
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target, load_target
from spectrain.training import loop

regenerate = importlib.import_module("spectrain.cli.regenerate")  # the package has a command of this name
Cli = Callable[..., Result]
SPY = """
import os, sys
from spectrain.cli import app

log = os.open(f"writes-{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def hook(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if (writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")) and "runs/two" in str(args[0]):
        os.write(log, f"{event} {args[0]}\\n".encode())

sys.addaudithook(hook)
for command in sys.argv[1:]:  # the last one fails
    try:
        app(command.split())
    except SystemExit as end:
        if end.code:
            raise
"""


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """By name: when written, and what. Locks are touched at each call."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in found}


def test_run_leaves_something_out(project: Path, trained: Path) -> None:
    conversations = read_conversations(trained / "answers.jsonl")
    assert sorted(c.domain for c in conversations) == ["blue"] * 5 + ["red"] * 6
    parts = [{row.id for row in RowStore(trained / "rows", part)} for part in ("train", "validation")]
    assert [len(part) for part in parts] == [9, 2] and set.union(*parts) == {c.id for c in conversations}
    assert (trained / "rows/rejected.jsonl").read_text() == ""
    head = load_head(trained / "head")
    assert head.layer_ids == (2, 3, 4) and head.made_with["target"] == str(project / "target")
    assert load_head(trained / "last").config == head.config
    recipe = load_config(Recipe, project / "recipes/tiny.yaml")
    assert load_config(Recipe, trained / "head/run.yaml") == recipe
    lines = [json.loads(line) for line in (trained / "training/metrics.jsonl").read_text().splitlines()]
    points = [line for line in lines if line["kind"] == "measured"]
    assert [p["step"] for p in points] == [9, 18] and all(1.0 <= p["measured_tau"] <= 5.0 for p in points)
    assert points[1]["loss"] < points[0]["loss"]
    newest = (trained / "training/checkpoints/latest").read_text().strip()
    saved = torch.load(trained / "training/checkpoints" / newest, weights_only=True)
    assert newest == "step-18.pt" and saved["step"] == 18 and saved["best"] == max(p["measured_tau"] for p in points)
    assert not [p for p in trained.rglob("*") if p.suffix in (".part", ".old", ".half") or ".part-" in p.name]


def test_answers_are_not_the_targets(project: Path, trained: Path) -> None:
    """Greedy ones are those of plain decoding; some are sampled, and differ."""
    target = load_target(project / "target")
    conversations = read_conversations(trained / "answers.jsonl")
    greedy = generate(target, [list(c.messages[:1]) for c in conversations], max_new_tokens=14).rows
    same = [row.text == c.messages[1]["content"] for row, c in zip(greedy, conversations, strict=True)]
    assert len(same) / 2 < sum(same) < len(same)


def test_second_call_does_it_again(project: Path, trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*args: object, **kwargs: object) -> None:
        raise AssertionError("done a second time")

    for where, name in (
        (regenerate, "generate"), (prepare, "_encode"), (capture, "shard_tensors"), (loop, "_work"), (stages, "save_head")
    ):  # fmt: skip
        monkeypatch.setattr(where, name, again)
    before = files(trained)
    result = cli("train", project / "recipes/tiny.yaml", "--fresh-answers", "--out", trained)
    assert result.exit_code == 0, result.output
    assert "9 rows to train on, 2 kept out" in result.stdout and "18 steps, best measured tau" in result.stdout
    after = files(trained)
    selected = stages.SELECTED  # written at each call
    assert after.pop(selected)[1] == before.pop(selected)[1]
    assert after == before


def test_other_rows_or_settings_are_trained_over(project: Path, trained: Path, cli: Cli, tmp_path: Path) -> None:
    """RE3: the same folder with other rows, or another learning rate, is refused by what differs; what was made before is kept."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    train = ["train", project / "recipes/tiny.yaml", "--fresh-answers", "--out", out]
    kept = ("training", "states", "head", "last")
    before, rows = [files(out / name) for name in kept], RowStore(out / "rows").rows_sha256
    for setting, words in (
        ("training.lr=1e-3", "other settings or data"),
        ("data.capture.states=bf16", "run/states is a store with states = 'int8', needed 'bf16'; delete it or capture into a new folder"),
        ("data.prepare.max_rows=4", "is a store with other rows: max_rows = None, needed 4; delete it or capture into a new folder"),
        ("data.prepare.max_length=22", "is a store with other rows: max_length = 4096, needed 22; delete it or capture into a new folder"),
    ):
        result = cli(*train, "--set", setting)
        assert result.exit_code == 1 and words in result.stderr, result.output
        assert (RowStore(out / "rows").rows_sha256 == rows) == ("prepare" not in setting)
    assert max(RowStore(out / "rows").lengths_N) == 22  # rows are made anew
    result = cli(*train)
    assert result.exit_code == 0 and RowStore(out / "rows").rows_sha256 == rows, result.output
    assert [files(out / name) for name in kept] == before


def test_answers_of_earlier_settings_are_trained_on(project: Path, trained: Path, tmp_path: Path, make_target: Callable) -> None:
    """RE3: with another length, another mix or another target the file keeps its old rows, and none of them counts."""
    file = tmp_path / "answers.jsonl"
    shutil.copy(trained / "answers.jsonl", file)
    config = load_config(Recipe, project / "recipes/tiny.yaml").data.answers
    assert config is not None
    target = load_target(project / "target")

    def selected(config: AnswersConfig, target: Target) -> list[Conversation]:
        return read_conversations(stages.read_answers(config, target, project, file))

    assert stages.make_answers(config, target, project, file) == 0
    old = selected(config, target)
    assert len(old) == 11 and set(c.id for c in old) == {c.id for c in read_conversations(file)}
    shorter = config.model_copy(update={"max_new_tokens": 3})
    assert stages.make_answers(shorter, target, project, file) == 11
    new = selected(shorter, target)
    assert len(new) == 11 and len(read_conversations(file)) == 22
    assert max(len(c.messages[1]["content"].split()) for c in new) <= 3
    fewer = config.model_copy(update={"mix": {"red": 2}})
    assert stages.make_answers(fewer, target, project, file) == 0
    assert [c.domain for c in selected(fewer, target)] == ["red", "red"]
    other = make_target(num_hidden_layers=7, seed=5)
    assert stages.make_answers(config, other, project, file) == 11
    assert len(selected(config, other)) == 11
    assert selected(config, target) == old


def test_speculation_changes_the_answer(project: Path, trained: Path, cli: Cli) -> None:
    ask = ["generate", "w12 w44", "--target", project / "target", "--max-new-tokens", 12, "--json"]
    found = {}
    for name, options in {
        "none": [],
        "chain": ["--head", trained / "head", "--chain", 3],
        "tree": ["--head", trained / "head", "--tree"],
        "ngram": ["--drafter", "ngram"],
    }.items():
        result = cli(*ask, *options)
        assert result.exit_code == 0, result.output
        found[name] = json.loads(result.stdout)  # nothing else is printed there
    assert len({(f["text"], *f["tokens"]) for f in found.values()}) == 1
    plain, chain = found["none"], found["chain"]
    assert set(plain) == {"text", "tokens", "finish_reason", "rounds", "tau", "drafted", "accepted", "tokens_per_s"}
    assert plain["tau"] == 1.0 and plain["drafted"] == 0 and chain["drafted"] == 3 * chain["rounds"]


def test_json_holds_a_number_for_the_tokens(project: Path, cli: Cli) -> None:
    ask = ["generate", "w12 w44", "--target", project / "target", "--max-new-tokens", 5, "--json", "--temperature", 1, "--seed", 3]
    found, again = (json.loads(cli(*ask).stdout) for _ in range(2))
    assert isinstance(found["tokens"], list) and found["tokens"] == again["tokens"] and len(found["tokens"]) == found["rounds"] + 1


def test_stream_shows_another_answer(project: Path, trained: Path, cli: Cli) -> None:
    ask = ["generate", "w12 w44", "--target", project / "target", "--max-new-tokens", 12, "--head", trained / "head"]
    answer = json.loads(cli(*ask, "--json").stdout)
    shown = cli(*ask).stdout
    assert " ".join(shown.split()).startswith(" ".join(answer["text"].split()))
    assert f"{len(answer['tokens'])} tokens in {answer['rounds']} passes: tau {answer['tau']:.2f}" in " ".join(shown.split())


def test_exported_head_is_another(project: Path, trained: Path, cli: Cli, tmp_path: Path) -> None:
    for _ in range(2):  # a second export replaces the first
        result = cli("export", trained / "head", "--to", "vllm", "--out", tmp_path / "export")
        assert result.exit_code == 0, result.output
    assert "vllm serve" in result.stdout and str(project / "target") in result.stdout
    ours, theirs = load_file(trained / "head/model.safetensors"), load_file(tmp_path / "export/model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and "midlayer.self_attn.q_proj.weight" in theirs
    assert json.loads((tmp_path / "export/config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


def test_report_is_told_otherwise_the_second_time(evaluated: Path, cli: Cli) -> None:
    names = ("report.html", "report.md", "report.json")
    before = {name: (evaluated / name).read_text() for name in names}
    report = json.loads(before["report.json"])
    assert all(cell["equal"] == cell["prompts"] == 7 for cell in report["exactness"].values())
    (evaluated / "report.md").unlink()
    result = cli("report", evaluated)
    assert result.exit_code == 0, result.output
    assert {name: (evaluated / name).read_text() for name in names} == before
    told = " ".join(result.stdout.split())
    assert all(sentence in told for sentence in report["advice"])
    assert "".join(f"{evaluated}/report.html".split()) in "".join(result.stdout.split())  # a path that is there


@pytest.fixture(scope="session")
def two_ranks(project: Path, trained: Path, start: Callable[..., tuple[int, str, str]]) -> tuple[Path, str, str]:
    """The folder of a run on two processes, and what was printed there, by a second run with one copy of the target for both, by a
    capture with one copy, and by a command that fails on the main process alone."""
    (project / "spy.py").write_text(SPY)
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no"]
    shared = ["--set", "target.placement=fsdp2"]
    commands = [
        ["train", "recipes/tiny.yaml", "--fresh-answers", "--out", "runs/two"],
        ["train", "recipes/tiny.yaml", "--out", "runs/two-shared", f"--set=data.rows={trained}/rows", *shared],
        ["capture", f"{trained}/rows", "--target", "target", "--head-config", "recipes/tiny.yaml", "--out", "runs/two-captured", *shared],
        ["train", "recipes/tiny.yaml", "--out", "runs/two-failed"],
    ]
    lines = [" ".join(command) for command in commands]
    code, out, err = start(*launch, "--dynamo_backend", "no", "--main_process_port", 0, "spy.py", *lines)
    assert code == 1, out + err
    return project / "runs/two", out, err


def test_every_process_writes(project: Path, two_ranks: tuple[Path, str, str]) -> None:
    folder, out, err = two_ranks
    assert out.count("best measured tau") == 2 and out.count(" supervised: at most ") == 3, out + err
    written = [line.split(maxsplit=1)[1] for line in (project / "writes-1.txt").read_text().splitlines()]
    ours = ("runs/two/states", "runs/two-shared/states", "runs/two-captured")
    assert [path for path in written if not any(part in path or path in part for part in ours)] == []  # captured together
    assert "training/checkpoints/step-" in (project / "writes-0.txt").read_text()
    kinds = [json.loads(line)["kind"] for line in (folder / "training/metrics.jsonl").read_text().splitlines()]
    assert kinds.count("measured") == 2 and kinds.count("step") == 2
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 11


def test_target_that_is_shared_trains_another_head(project: Path, trained: Path, two_ranks: tuple[Path, str, str]) -> None:
    """On the same rows: weights up to rounding, the same figures, and the same store, whoever captures it."""
    folder, shared = two_ranks[0], project / "runs/two-shared"
    for name in ("head", "last"):
        both, one = (load_file(f / name / "model.safetensors") for f in (shared, folder))
        for key, tensor in one.items():
            torch.testing.assert_close(both[key], tensor, atol=2e-5, rtol=1e-3)
    lines = [(f / "training/metrics.jsonl").read_text().splitlines() for f in (folder, shared)]
    taus = [[p["measured_tau"] for p in map(json.loads, found) if p["kind"] == "measured"] for found in lines]
    assert taus[0] == taus[1] and len(taus[0]) == 2
    rows = RowStore(trained / "rows")
    stores = [FeatureStore(where, rows) for where in (trained / "states", shared / "states", project / "runs/two-captured")]
    for i in range(len(rows)):
        for other in stores[1:]:
            torch.testing.assert_close(other[i].states.float(), stores[0][i].states.float(), atol=0.05, rtol=0.02)


def test_error_of_the_main_process_is_lost(two_ranks: tuple[Path, str, str]) -> None:
    """No rows and no answers: the launcher ends both at once, and its own report, the last that is seen, closes with the reason."""
    _, out, err = two_ranks
    reason = "error: no answers at "
    assert reason in err and reason in err[err.rindex("Root Cause") :], out + err
    assert "let the target answer: add --fresh-answers" in err[err.rindex("Root Cause") :]
    assert "gloo" not in err[err.rindex("Root Cause") :] and err.count("Traceback (most recent call last):\n  File \"/") <= 2


def test_two_processes_train_another_head(project: Path, trained: Path, two_ranks: tuple[Path, str, str], cli: Cli) -> None:
    """DI1, LS2: two processes with a batch each are one process with two batches; the last step has a batch for one of them only."""
    folder = two_ranks[0]
    alone = project / "runs/accumulated"
    shutil.copytree(trained / "states", alone / "states")
    shutil.copy(trained / "answers.jsonl", alone)
    result = cli("train", project / "recipes/tiny.yaml", "--fresh-answers", "--out", alone, "--set", "training.accumulation=2")
    assert result.exit_code == 0, result.output
    assert "10 steps" in result.stdout
    both, one = (load_file(f / "last/model.safetensors") for f in (folder, alone))
    for name, tensor in one.items():
        torch.testing.assert_close(both[name], tensor, atol=2e-5, rtol=1e-3)
    start = load_file(trained / "last/model.safetensors")
    assert not torch.allclose(one["fc.weight"], start["fc.weight"], atol=2e-4)
    assert load_head(folder / "head").made_with["target"] == str(project / "target")
