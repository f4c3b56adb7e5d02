"""RE1: 20 steps in one go equal 10 steps, a stop and 10 more: weights, moments, step counters, learning rates, losses."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.heads.eagle3 import Eagle3
from spectrain.target.model import Target
from spectrain.training import loop
from spectrain.training.setup import new_head

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
CONFIG = TrainingConfig(epochs=6, steps=20, tokens_per_step=1, lr=5e-3)  # seven batches an epoch, four if packed: the stop is within one


@pytest.fixture
def seen(monkeypatch) -> list[tuple[int, float, float]]:
    """(step, loss, learning rate) of every step; the run is asked to stop after step 10 of its first ten."""
    found: list[tuple[int, float, float]] = []

    def step(self: Any, step: int, counts: Any, *, lr: float) -> None:
        found.append((step, counts.means()["loss"][0], lr))

    monkeypatch.setattr(loop.Progress, "step", step)
    return found


def run(target: Target, samples: Any, out: Path, packing: int | None, shift: float = 0.0) -> Eagle3:
    head = new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=50, init_layer="random"), target, samples.rows, seed=0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(shift)  # whatever a new head holds, the checkpoint counts
    loop.train(
        head, samples, CONFIG.model_copy(update={"packing": packing}), embed_VW=target.embedding_VW, output_VW=target.output_VW, out=out,
        accelerator=Accelerator(cpu=True), save=lambda head, name: None, identity="x",
    )  # fmt: skip
    return head


@pytest.mark.parametrize("packing", [None, 24])
def test_resumed_run_is_another(target: Target, tmp_path: Path, seen, monkeypatch, packing: int | None) -> None:
    samples = BY_HAND["Samples"].of(target, BY_HAND["random_rows"](7))
    whole = run(target, samples, tmp_path / "whole", packing)
    in_one_go = list(seen)
    seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_on_any", lambda accelerator, *flags: [len(seen) == 10, False])
        with pytest.raises(KeyboardInterrupt, match="stopped after step 10 of"):
            run(target, samples, tmp_path / "parts", packing)
    resumed = run(target, samples, tmp_path / "parts", packing, shift=1.0)

    assert [s for s, _, _ in seen] == [s for s, _, _ in in_one_go] == list(range(1, 21))
    assert [lr for _, _, lr in seen] == [lr for _, _, lr in in_one_go]
    assert seen[10][1] == pytest.approx(in_one_go[10][1], abs=1e-6)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
    one, parts = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts"))
    for mine, theirs in zip(one["optimizer"]["state"].values(), parts["optimizer"]["state"].values(), strict=True):
        assert mine["step"].dtype == theirs["step"].dtype == torch.float32 and mine["step"] == theirs["step"] == 20
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"]) and torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
    assert [p | {"minutes": 0} for p in one["history"]] == [p | {"minutes": 0} for p in parts["history"]]
