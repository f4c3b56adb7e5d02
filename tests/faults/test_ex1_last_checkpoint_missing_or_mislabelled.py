"""EX1: seven steps and a save every three: checkpoints 3, 6 and 7, `latest` names 7, the head of 7 loads, and 3 holds three updates."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from spectrain.config import TrainingConfig
from spectrain.heads.base import load_head, save_head
from spectrain.target.model import Target

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
CONFIG = TrainingConfig(epochs=3, steps=7, tokens_per_step=1, lr=5e-3, checkpoint_steps=3, keep_last=9)  # four batches an epoch
CASES = {
    "steps": ({}, [3, 6, 7], [4, 7]),
    "epochs too": ({"evals_per_epoch": 2}, [3, 6, 7], [2, 4, 6, 7]),
    "measured by steps": ({"eval_steps": 3}, [3, 6, 7], [3, 6, 7]),
    "minutes too": ({"checkpoint_minutes": 1e-9}, [1, 2, 3, 4, 5, 6, 7], [4, 7]),
    "two kept": ({"keep_last": 2}, [6, 7], [4, 7]),
    "averages": ({"ema": 0.9, "keep_last": 3}, [3, 6, 7], [4, 7]),
}


@pytest.mark.parametrize("case", CASES)
def test_last_checkpoint_is_another_step(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    changes, steps, measured = CASES[case]
    samples, config = BY_HAND["Samples"].of(target, BY_HAND["random_rows"](4)), BY_HAND["changed"](CONFIG, **changes)
    head, after = BY_HAND["fresh"](target, samples), {}

    def seen(**told: Any) -> None:
        after[told["step"]] = BY_HAND["weights"](head)

    BY_HAND["watch_steps"](monkeypatch, seen)
    result = BY_HAND["run"](
        head, samples, target, tmp_path, config, save=lambda head, name: save_head(head, tmp_path / name, run_yaml="", made_with={})
    )
    assert result.steps == 7 and [point["step"] for point in result.history] == measured
    files = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert files == ["latest", *(f"step-{step}.pt" for step in steps)]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-7.pt\n"
    for step in steps:
        saved = BY_HAND["checkpoint"](tmp_path, step)
        assert saved["step"] == step
        BY_HAND["assert_same"](saved["states"]["head"], after[step])
    of_last = BY_HAND["checkpoint"](tmp_path)["states"]
    # Where weights are averaged, the average is what is kept: its names carry the wrapper's prefix.
    kept = {n.removeprefix("module."): t for n, t in of_last["ema"].items() if n != "n_averaged"} if config.ema else of_last["head"]
    BY_HAND["assert_same"](BY_HAND["weights"](load_head(tmp_path / "last")), kept)
    assert not any(kept["fc.weight"].equal(after[step]["fc.weight"]) for step in range(1, 7))
