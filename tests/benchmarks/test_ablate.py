"""scripts/ablate.py, what in it needs no training: the table's settings, and the changes that no setting makes."""

import importlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import yaml

from spectrain.config import Recipe, load_config
from spectrain.data.rows import Row
from spectrain.target.features import OnlineFeatures
from spectrain.target.model import Target

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ablate() -> Iterator[ModuleType]:
    """The script as a module; it stands beside the package, not in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("ablate")


def test_setting_of_an_arm_is_none(ablate: ModuleType) -> None:
    """Every arm of the table loads, and differs from the default."""
    table = yaml.safe_load((ROOT / "eval/ablations.yaml").read_text())
    runs = list(ablate.runs_of(table, ""))
    default = load_config(Recipe, ROOT / table["recipe"])
    for run in runs:
        recipe = load_config(Recipe, ROOT / table["recipe"], [*run.set])
        assert (recipe == default) == (not run.set), run
        assert run.set or run.change or run.fresh or run.conversations or run.arm == "default", run
    assert len({run.folder for run in runs}) == len(runs)
    table["groups"]["mask"]["arms"] = {"a": {"change": "nothing"}}
    with pytest.raises(ValueError, match="mask: a asks for the change 'nothing'; there are"):
        list(ablate.runs_of(table, ""))


def test_a_group_on_other_rows_is_compared_with_the_default(ablate: ModuleType) -> None:
    """Its base is run in front of its arms, alone where nothing else was chosen, and is what they are compared with."""
    table = yaml.safe_load((ROOT / "eval/ablations.yaml").read_text())
    runs = list(ablate.runs_of(table, "^whose answers"))
    assert [(run.arm, run.conversations) for run in runs] == [("base", "regenerated"), ("the answers that they had", "own")]
    answers = {"base": ["12", "3"], "the answers that they had": ["11", "2"]}
    done = {
        ("whose answers", name): {0: {"answers": [{"id": f"{i}", "committed": c} for i, c in enumerate(found)], "points": []}}
        for name, found in answers.items()
    }  # fmt: skip
    base, arm = ablate.rows_of({"groups": {"whose answers": table["groups"]["whose answers"]}}, done)
    assert base["default"] and (base["value"], arm["value"]) == (2.0, 4 / 3) and arm["difference"] == pytest.approx(-2 / 3)


def test_mean_is_taken_over_rows_that_count(ablate: ModuleType, target: Target) -> None:
    """All positions: the divisor is the batch with its prompts and padding, and 0 where nothing counts."""
    from spectrain.training.loop import Work

    rows = [Row("a", "any", list(range(9, 17)), [0, 0, 1, 1, 1, 1, 1, 1]), Row("b", "any", list(range(9, 14)), [0, 1, 1, 1, 1])]
    batch = OnlineFeatures(target, rows, (1, 2)).batch([0, 1])
    for counts, divisor in ((torch.ones(1, 3), 16.0), (torch.zeros(1, 3), 0.0)):
        work = Work(batch, torch.arange(3), counts.bool(), None, [], 0.0)
        with mock.patch.object(Work, "weight", property(ablate.all_positions)):
            assert float(work.weight) == divisor
        assert float(work.weight) == counts.sum()


def test_a_result_cannot_be_read_again(ablate: ModuleType) -> None:
    result = {"key": "k", "minutes": {"training": 1.5}, "answers": [{"id": "a", "committed": "121"}, {"id": "b", "committed": ""}]}
    text = ablate.one_answer_a_line(result)
    assert json.loads(text) == result and text.count("\n  {") == 2


def test_another_row_than_the_first_is_lost(ablate: ModuleType, target: Target) -> None:
    rows = [Row("a", "any", list(range(9, 17)), [0, 0, 1, 1, 1, 0, 1, 1]), Row("b", "any", list(range(9, 14)), [0, 1, 1, 1, 1])]
    every = OnlineFeatures(target, rows, (1, 2))
    found, whole = ablate.Changed(every, ablate.first_draft_lost).batch([0, 1]), every.batch([0, 1])
    assert found.mask_BL.tolist() == [[0, 0, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 0, 0, 0]]
    kept = [1, 2, 4, 6, 7, 8]  # of the nine supervised tokens
    assert torch.equal(found.best_P, whole.best_P[kept]) and torch.equal(found.last_PW, whole.last_PW[kept])
    assert torch.equal(found.lse_P, whole.lse_P[kept])


def test_states_of_another_place(ablate: ModuleType, target: Target) -> None:
    rows = [Row("a", "any", list(range(9, 17)), [0, 0, 1, 1, 1, 1, 1, 1])]
    some = ablate.Changed(OnlineFeatures(target, rows, (0, 1, 2)), partial(ablate.some_states, places=[0, 2], of=3))
    alone = OnlineFeatures(target, rows, (0, 2))
    assert torch.allclose(some[0].states.float(), alone[0].states.float(), atol=1e-5)
