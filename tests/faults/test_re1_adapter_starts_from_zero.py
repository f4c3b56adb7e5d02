"""RE1: adapter training starts from zero although a checkpoint was loaded."""

import runpy
import shutil
from pathlib import Path

import pytest
import torch

from spectrain.target.model import Target

JOINT = runpy.run_path(str(Path(__file__).parents[1] / "training/test_joint.py"))
BY_HAND, run = JOINT["BY_HAND"], JOINT["run"]


def test_adapter_is_fresh_after_a_resume(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target moves from step 4 of 6 on. Stopped after step 5, the next loss is that of the run in one go; with weights of zero in the
    adapter it is another."""
    seen = BY_HAND["watch_steps"](monkeypatch)
    run(target, tmp_path / "whole")
    in_one_go = [step["loss"] for step in seen]
    with monkeypatch.context() as patch:
        BY_HAND["stop_after"](patch, 5)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 5 of 6"):
            run(target, tmp_path / "loaded")
    shutil.copytree(tmp_path / "loaded", tmp_path / "zero")
    path = tmp_path / "zero/checkpoints/step-5.pt"
    saved = torch.load(path, weights_only=True)
    assert any(weight.any() for weight in saved["states"]["adapter"].values())
    saved["states"]["adapter"] = {name: torch.zeros_like(weight) for name, weight in saved["states"]["adapter"].items()}
    torch.save(saved, path)
    last = {}
    for name in ("loaded", "zero"):
        seen.clear()
        run(target, tmp_path / name)
        (last[name],) = (step["loss"] for step in seen)
    assert last["loaded"] == pytest.approx(in_one_go[5], abs=1e-6)
    assert abs(last["zero"] - in_one_go[5]) > 1e-4
