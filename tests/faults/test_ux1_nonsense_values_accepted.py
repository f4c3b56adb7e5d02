"""UX1: nonsense is refused by the option's name before any model is loaded; without a limit every row is used, and their number told."""

import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectrain.cli import app, stages
from spectrain.config import TrainingConfig
from spectrain.target.model import Target

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
RECIPE = """
name: tiny
target: {name: nowhere}
data: {rows: nowhere}
training: {lr: 1e-4}
"""


@pytest.mark.parametrize(
    "setting",
    [
        "training.ttt_steps=0", "training.ttt_steps=-1", "head.draft_vocab_size=0", "head.num_layers=0", "head.layer_ids=[]",
        "training.lr=0", "training.lr=-1e-4", "training.loss.mix={soft_ce: 0}", "training.loss.mix=cosine", "training.loss.decay=0",
        "training.steps=0", "training.accumulation=0", "training.ema=1", "training.max_minutes=0", "training.keep_last=0",
        "training.checkpoint_steps=0", "training.eval_steps=0", "training.warmup=1.5", "training.schedule=linear",
        "training.optimizer=lion", "training.learning_rate=1e-4", "evaluation.shapes.tree_top_k=0",
    ],
)  # fmt: skip
def test_nonsense_reaches_the_model(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(stages, "load_target", load)
    (tmp_path / "r.yaml").write_text(RECIPE)
    result = CliRunner().invoke(app, ["train", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "run"), "--set", setting])
    assert result.exit_code not in (0, None) and not isinstance(result.exception, AssertionError), result.output
    assert setting.partition("=")[0] in result.output.replace("\n", ""), result.output
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").rglob("*.pt"))


def test_rows_are_left_out_without_a_limit(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = BY_HAND["Samples"].of(target, BY_HAND["random_rows"](150))
    config = TrainingConfig(epochs=1, tokens_per_step=400, ttt_steps=1)
    result = BY_HAND["run"](BY_HAND["fresh"](target, samples), samples, target, tmp_path, config)
    assert result.rows == {"d": 150} and "150 rows an epoch: d 150 (100.0%)" in capsys.readouterr().out
