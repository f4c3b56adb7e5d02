"""From answers to rows: what is trained on, what is kept out, what is thrown away and why; and how a run opens its processes."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from spectrain.cli import stages
from spectrain.config import Recipe, TrainingConfig, load_config
from spectrain.data.formats import Message, read_conversations
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import HEADS, LAST, head_class
from spectrain.target.model import Target
from spectrain.training import setup

Said = tuple[str, str, list[Message]]


def said(number: int, domain: str, question: str = "", answer: str = "w10 w11", system: str = "") -> Said:
    asked = question or f"w{20 + number % 70} w{21 + number // 70} {'w30' if domain == 'red' else 'w31'}"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    first = [{"role": "system", "content": system}] if system else []
    return f"{domain}-{number}", domain, [*first, *messages]


def write(path: Path, conversations: Sequence[Said]) -> Path:
    lines = [{"id": name, "domain": domain, "messages": messages} for name, domain, messages in conversations]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe_with(project: Path, *overrides: str) -> Recipe:
    return load_config(Recipe, project / "recipes/tiny.yaml", [f"data.prepare.{text}" for text in overrides])


def test_checkpoint_is_chosen_on_rows_that_were_trained_on(project: Path, target: Target, tmp_path: Path) -> None:
    """EV3: two a domain are kept out, none of them with a long prompt, and no conversation is on both sides or on none."""
    long = " ".join(["w9"] * stages.PROBE_PROMPT_TOKENS)
    conversations = [said(0, "red", long), *(said(i, d) for d in ("red", "blue") for i in range(1, 6))]
    file = write(tmp_path / "answers.jsonl", conversations)
    for seed in range(4):
        recipe = recipe_with(project, "validation_per_domain=2", f"validation_prompt_tokens={stages.PROBE_PROMPT_TOKENS}", f"seed={seed}")
        data = stages.make_rows(recipe, target, file, tmp_path / str(seed))
        kept_out, trained = {row.id for row in data.validation}, {row.id for row in data.rows}
        assert Counter(row.domain for row in data.validation) == {"red": 2, "blue": 2} and "red-0" not in kept_out
        assert kept_out | trained == {name for name, _, _ in conversations} and not kept_out & trained


def test_rejected_rows_are_not_told(project: Path, target: Target, tmp_path: Path) -> None:
    """RB1: a line with the reason for each, and how many; what only reads the rows writes nothing."""
    unanswered = ("red-9", "red", [{"role": "user", "content": "w9"}])
    late = said(8, "red", " ".join(["w9"] * 700))
    file = write(tmp_path / "answers.jsonl", [*(said(i, "red") for i in range(4)), unanswered, late])
    recipe, out = recipe_with(project, "max_length=640", "validation_per_domain=2"), tmp_path / "new"
    data = stages.make_rows(recipe, target, file, out)
    told = [json.loads(line) for line in (out / "rows/rejected.jsonl").read_text().splitlines()]
    assert [(row["id"], row["row"], Path(row["file"]).name) for row in told] == [("red-9", 5, file.name), ("red-8", 6, file.name)]
    assert "no answer to learn from" in told[0]["why"] and told[0]["reason"] and told[1]["why"]
    assert len(data.rows) == len(data.validation) == 2
    lines = stages.rows_line(data).splitlines()
    assert lines[0] == f"2 rows to train on, 2 kept out, 2 rejected ({out}/rows/rejected.jsonl)"
    assert lines[1].startswith("warning: ") and len(lines) == 2
    before = {p: p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("*"))}
    again = stages.read_rows(recipe, target, out)
    assert ([*again.rows], [*again.validation]) == ([*data.rows], [*data.validation]) and again.report is None
    assert {p: p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("*"))} == before
    assert stages.rows_line(again) == "2 rows to train on, 2 kept out"


def test_head_of_the_list_is_taken_for_the_mixture(project: Path, target: Target, tmp_path: Path) -> None:
    """EV3: 60 of 120 rows are half of each domain, the same whatever their order, each once."""
    rows = [said(i, d) for d, n in (("red", 100), ("blue", 20)) for i in range(n)]
    found = []
    for name, given in (("a", rows), ("b", rows[::-1])):
        file = write(tmp_path / f"{name}.jsonl", given)
        taken = stages.make_rows(recipe_with(project, "max_rows=60", "validation_per_domain=0"), target, file, tmp_path / name).rows
        assert Counter(taken.domains.tolist()) == {"red": 50, "blue": 10} and len({row.id for row in taken}) == 60
        found.append({row.id for row in taken})
    assert found[0] == found[1]
    every = stages.make_rows(recipe_with(project, "max_rows=120", "validation_per_domain=0"), target, file, tmp_path / "c").rows
    assert len(every) == 120


def test_prompt_that_cannot_be_asked_is_lost(project: Path, target: Target, tmp_path: Path) -> None:
    """A control token in a prompt: told, with the reason in a file; the others are answered."""
    prompts = [{"id": str(i), "domain": "red", "prompt": f"w9 w{20 + i}"} for i in range(3)]
    prompts[1]["prompt"] += " <end>"
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    settings = ["data.answers.prompts=prompts.jsonl", "data.answers.mix={red: 3}", "data.answers.max_new_tokens=4"]
    recipe, told = load_config(Recipe, project / "recipes/tiny.yaml", settings), []
    file = stages.answers_file(recipe, target, tmp_path, tmp_path / "run", fresh=True, say=told.append)
    assert file is not None and {c.id for c in read_conversations(file)} == {"0", "2"}
    assert told == [f"1 prompts could not be asked; the reasons are in {tmp_path}/run/answers.rejected.jsonl"]
    (reason,) = [json.loads(line) for line in (tmp_path / "run/answers.rejected.jsonl").read_text().splitlines()]
    assert reason["id"] == "1" and "control token '<end>'" in reason["reason"]


def test_rows_of_another_target_are_learnt(project: Path, target: Target, tmp_path: Path) -> None:
    """`data.rows`: another template or tokenizer is refused, by what differs; the answers of the recipe play no part."""
    file = write(tmp_path / "answers.jsonl", [said(i, "red") for i in range(4)])
    rows = stages.make_rows(recipe_with(project), target, file, tmp_path).rows
    named = load_config(Recipe, project / "recipes/tiny.yaml", [f"data.rows={rows.folder}", "data.answers=null"])
    assert [*stages.make_rows(named, target, None, tmp_path / "none").rows] == [*rows] and not (tmp_path / "none").exists()
    shutil.copytree(rows.folder, tmp_path / "other")
    record = json.loads((tmp_path / "other/prepared.json").read_text())
    for key in ("template_sha256", "tokenizer_sha256"):
        changed = {**record, "fingerprints": {**record["fingerprints"], key: "0"}}
        (tmp_path / "other/prepared.json").write_text(json.dumps(changed))
        wrong = load_config(Recipe, project / "recipes/tiny.yaml", [f"data.rows={tmp_path}/other"])
        with pytest.raises(ValueError, match=f"other was prepared for another target .{key} differs.; run `spectrain prepare`"):
            stages.make_rows(wrong, target, None, tmp_path / "none")


def test_acceptance_is_measured_on_other_prompts(project: Path, target: Target, tmp_path: Path) -> None:
    """The probe asks what the rows asked, with their system message; domains in turns, and rows without a prompt are left out."""
    conversations = [said(i, "red", system="w50 w51") for i in range(40)] + [said(i, "blue") for i in range(3)]
    recipe = recipe_with(project, "validation=0.8", "validation_per_domain=0")
    data = stages.make_rows(recipe, target, write(tmp_path / "answers.jsonl", conversations), tmp_path)
    asked = {name: target.encode(messages[:-1]) for name, _, messages in conversations}
    taken = stages.probe_rows(data.validation)
    assert len({row.id for row in taken}) == len(taken) == stages.PROBE_ROWS < len(data.validation)
    assert all(row.prompt_ids == asked[row.id] for row in taken)
    blue = sum(row.domain == "blue" for row in data.validation)
    assert Counter(row.domain for row in taken[: 2 * blue]) == {"red": blue, "blue": blue} and blue >= 2
    long, text = Row("l", "red", [9] * 300, [0] * 299 + [1]), Row("t", "red", [9] * 3, [1] * 3)
    short = [Row(str(i), "red", [9] * 4, [0, 0, 1, 1]) for i in range(stages.PROBE_ROWS)]
    assert stages.probe_rows([long, text, *short]) == short and stages.probe_rows([text, long]) == [long]
    assert stages.probe_rows([text]) == []


def test_accumulated_gradients_are_divided_twice(tmp_path: Path) -> None:
    """LS2: the loop divides by all rows of a window; accelerate must not divide again by the number of batches."""
    accelerator = setup.open_accelerator(TrainingConfig(accumulation=4), tmp_path)
    assert accelerator.gradient_accumulation_steps == 1
    x = torch.ones(1, requires_grad=True)
    accelerator.backward(3 * x)
    assert x.grad == 3


def test_processes_give_up_while_one_prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DI1: answers and capture take hours, the default patience of a process group is 10 or 30 minutes. Without CUDA all are on the CPU."""
    given: dict[str, object] = {}
    monkeypatch.setattr(setup, "Accelerator", lambda **settings: given.update(settings))
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        setup.open_accelerator(TrainingConfig(tracker="tensorboard", mixed_precision="bf16"), tmp_path)
        assert given["cpu"] is not there and (given["log_with"], given["mixed_precision"]) == ("tensorboard", "bf16")
    (group,) = given["kwargs_handlers"]  # type: ignore[misc]
    assert group.timeout.total_seconds() >= 24 * 3600


def test_package_without_a_model_is_a_traceback() -> None:
    for name in ("json", "no_such_package"):
        with pytest.raises(ValueError, match=f"no GGUF file in the Python package {name}; install it with: pip install"):
            stages.package_gguf(name)


def _settings(kind: str) -> list[str]:
    steps = ["head.num_heads=2"] if "num_heads" in head_class(kind).settings else []
    states = [] if head_class(kind).default_layer_ids(99) == (LAST,) else ["head.layer_ids=[1,2]"]
    return [f"head.kind={kind}", "training.ttt_steps=2", "training.epochs=1", *steps, *states]


@pytest.mark.parametrize("kind", HEADS)
def test_stages_make_every_kind_of_head(project: Path, target: Target, tmp_path: Path, kind: str) -> None:
    """Rows, states, training and the saved head, whose answers are plain decoding's; a store of the last state serves all kinds that
    read it, and none that reads others."""
    recipe, told = load_config(Recipe, project / "recipes/tiny.yaml", _settings(kind)), []
    file = write(tmp_path / "answers.jsonl", [said(i, d, answer="w10 w11 w12 w13 w14 w15") for d in ("red", "blue") for i in range(6)])
    data = stages.make_rows(recipe, target, file, tmp_path)
    accelerator = setup.open_accelerator(recipe.training, tmp_path)
    samples = stages.capture_states(recipe, target, data, tmp_path, accelerator, told.append)
    result, _ = stages.run_training(recipe, target, data, samples, tmp_path, accelerator, told.append)
    head = stages.open_head(tmp_path / "head", target)
    assert json.loads((tmp_path / "head/config.json").read_text())["head"] == kind and result.steps > 2 and result.best >= 1
    assert samples.layer_ids == head.layer_ids and head.max_depth in (None, 2)
    prompts = [row.prompt_ids for row in data.validation]
    found, plain = (generate(target, prompts, drafter=d, shape=Chain(2), max_new_tokens=8) for d in (HeadDrafter(head), None))
    assert [row.tokens for row in found.rows] == [row.tokens for row in plain.rows] and any(row.rounds for row in found.rows)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "states").iterdir()}
    for other in HEADS:
        asked = load_config(Recipe, project / "recipes/tiny.yaml", _settings(other))
        if setup.layer_ids(asked.head, target) == head.layer_ids:
            stages.capture_states(asked, target, data, tmp_path, accelerator, told.append)
        else:
            with pytest.raises(ValueError, match="is a store with layer_ids = "):
                stages.capture_states(asked, target, data, tmp_path, accelerator, told.append)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "states").iterdir()} == before
