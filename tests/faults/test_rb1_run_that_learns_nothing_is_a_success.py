"""RB1: a run none of whose steps updates the weights ends with an error that says why; so does one that has stopped learning."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import TrainingConfig
from spectrain.data.codes import Codes
from spectrain.target.model import Target
from spectrain.training import loop

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
CONFIG = TrainingConfig(epochs=2, tokens_per_step=1, ttt_steps=2, lr=5e-3)  # a step a row
ROWS = 3


def broken(sample: Any) -> Any:
    return replace(sample, states=Codes(sample.states.codes * float("nan")))


def infinite(sample: Any) -> Any:
    """Its law is beyond float32, and with it the loss."""
    return replace(sample, lse_M=sample.lse_M - 1e4)


def samples_of(target: Target, damage: Any, numbers: tuple[int, ...]) -> Any:
    samples = BY_HAND["Samples"].of(target, BY_HAND["random_rows"](ROWS))
    for i in numbers:
        samples.samples[i] = damage(samples.samples[i])
    return samples


@pytest.mark.parametrize(
    ("damage", "told"),
    [(broken, "no row counts; capture the states anew"), (infinite, r"gradient not finite; lower training.lr \(0.005\)")],
)
def test_all_samples_are_bad(target: Target, tmp_path: Path, damage: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head is saved; stopped half-way and called again, it ends alike; the weights are those of the start."""
    samples, saved = samples_of(target, damage, (0, 1, 2)), []
    head = BY_HAND["fresh"](target, samples)
    before = BY_HAND["weights"](head)
    kwargs = {"save": lambda head, name: saved.append(name), "on_eval": lambda head: {"measured_tau": 1.0}}
    config = BY_HAND["changed"](CONFIG, eval_steps=100)
    with pytest.raises(ValueError, match=f"nothing learnt in the last 6 steps, up to step 6: {told}"):
        BY_HAND["run"](head, samples, target, tmp_path / "whole", config, **kwargs)
    with monkeypatch.context() as patch:
        BY_HAND["stop_after"](patch, 4)
        with pytest.raises(KeyboardInterrupt):
            BY_HAND["run"](head, samples, target, tmp_path / "parts", config, **kwargs)
    with pytest.raises(ValueError, match="nothing learnt in the last 6 steps"):
        BY_HAND["run"](head, samples, target, tmp_path / "parts", config, **kwargs)
    assert saved == []
    BY_HAND["assert_same"](before, BY_HAND["weights"](head))


def test_run_that_stopped_learning_goes_on(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without an update do not end a run as long as others come between them; MOST_IDLE in a row do."""
    monkeypatch.setattr(loop, "MOST_IDLE", 4)
    samples = samples_of(target, broken, (0,))
    config = BY_HAND["changed"](CONFIG, epochs=8)
    result = BY_HAND["run"](BY_HAND["fresh"](target, samples), samples, target, tmp_path / "some", config)
    assert result.steps == 24 and result.skipped == 8
    samples = samples_of(target, broken, ())

    def break_all(head: Any) -> dict[str, float]:
        samples.samples[:] = [broken(sample) for sample in samples.samples]
        return {"measured_tau": 1.0}

    head, config = BY_HAND["fresh"](target, samples), BY_HAND["changed"](config, eval_steps=3)
    with pytest.raises(ValueError, match="nothing learnt in the last 4 steps, up to step 7: no row counts"):
        BY_HAND["run"](head, samples, target, tmp_path / "all", config, on_eval=break_all)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}], ids=["adamw", "muon"])
def test_momentum_and_decay_move_a_step_without_rows(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """The step of a broken sample moves nothing, and no average counts it."""
    samples, after = samples_of(target, broken, (1,)), []
    head = BY_HAND["fresh"](target, samples)
    seen = BY_HAND["watch_steps"](monkeypatch, lambda **told: after.append(BY_HAND["weights"](head)))
    config = BY_HAND["changed"](CONFIG, weight_decay=0.1, ema=0.9, epochs=3, **changes)
    BY_HAND["run"](head, samples, target, tmp_path, config)
    idle = [i for i, step in enumerate(seen) if not step["counts"].rows_K.any()]
    assert len(idle) == 3 and any(i > 0 for i in idle)
    for i in range(1, len(after)):
        assert torch.equal(after[i]["fc.weight"], after[i - 1]["fc.weight"]) == (i in idle)
    assert int(BY_HAND["checkpoint"](tmp_path)["states"]["ema"]["n_averaged"]) == 6
