"""From answers to rows: what is trained on, what is kept out, what is thrown away and why; and how a run opens its processes."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from spectrain.cli import stages
from spectrain.config import Recipe, TrainingConfig, load_config
from spectrain.data.formats import Conversation
from spectrain.data.masking import Row
from spectrain.target.model import Target
from spectrain.training import setup


def said(number: int, domain: str, question: str = "w9", answer: str = "w10 w11", system: str = "") -> Conversation:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    first = [{"role": "system", "content": system}] if system else []
    return Conversation(id=f"{domain}-{number}", domain=domain, messages=(*first, *messages))


@pytest.fixture
def recipe(project: Path) -> Recipe:
    return load_config(Recipe, project / "recipes/tiny.yaml", ["data.validation_per_domain=2"])


def test_checkpoint_is_chosen_on_rows_that_were_trained_on(recipe: Recipe, target: Target, tmp_path: Path) -> None:
    """EV3: two a domain are kept out, none of them with a long prompt, and no conversation is on both sides or on none."""
    long = " ".join(["w9"] * stages.PROBE_PROMPT_TOKENS)
    conversations = [said(0, "red", long), *(said(i, d) for d in ("red", "blue") for i in range(1, 6))]
    data = stages.make_rows(recipe, target, conversations, tmp_path)
    kept_out, trained = {c.id for c in data.validation}, {row.id for row in data.rows}
    assert Counter(c.domain for c in data.validation) == {"red": 2, "blue": 2} and "red-0" not in kept_out
    assert kept_out | trained == {c.id for c in conversations} and not kept_out & trained


def test_rejected_rows_are_not_told(recipe: Recipe, target: Target, tmp_path: Path) -> None:
    """RB1: a line with the reason for each; a second process writes none."""
    unanswered = Conversation("red-9", "red", ({"role": "user", "content": "w9"},))
    late = said(8, "red", " ".join(["w9"] * 700))
    conversations = [*(said(i, "red") for i in range(4)), unanswered, late]
    data = stages.make_rows(recipe, target, conversations, tmp_path / "new")
    told = [json.loads(line) for line in (tmp_path / "new/rejected.jsonl").read_text().splitlines()]
    assert told == data.rejected and [row["id"] for row in told] == ["red-9", "red-8"]
    assert "no token of an assistant turn" in told[0]["reason"] and len(data.rows) == 2
    assert stages.make_rows(recipe, target, conversations, None) == data
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_head_of_the_list_is_taken_for_the_mixture() -> None:
    """EV3: 60 of 120 rows are half of each domain, whatever their order, each once."""
    rows = [Row(f"{d}{i}", d, (1,), (1,)) for d, n in (("a", 100), ("b", 20)) for i in range(n)]
    for given in (rows, rows[::-1]):
        taken = stages._spread(given, 60)
        assert Counter(row.domain for row in taken) == {"a": 50, "b": 10} and len({row.id for row in taken}) == 60
    assert stages._spread(rows, None) == rows == stages._spread(rows, 120)


def test_system_message_is_asked_as_a_question() -> None:
    assert stages._prompt(said(1, "red", "w20", system="w30")).chat == [{"role": "user", "content": "w20"}]
    assert stages._prompt(said(1, "red", "w20")).chat == [{"role": "user", "content": "w20"}]


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
            stages._package_gguf(name)
