"""RE1: 20 steps in one go equal 10 steps, a stop and 10 more, or five stops: weights, moments, averages, random numbers, rates, losses."""

import os
import random
import runpy
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.config import TrainingConfig
from spectrain.heads.eagle3 import Eagle3
from spectrain.target.model import Target

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
CONFIG = TrainingConfig(epochs=12, steps=20, tokens_per_step=1, lr=5e-3)  # seven batches an epoch: step 10 is within one
CASES = {
    "adamw": {},
    "packed": {"packing": 24},
    "all at once": {"packing": 20, "accumulation": 2, "optimizer": "muon", "ema": 0.9, "schedule": "wsd", "weight_decay": 0.01},
}


class Noisy(Eagle3):
    """A head that draws from all three random generators at every step."""

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        for step in super().outputs(*args, **kwargs):
            noise = torch.rand(()) + float(np.random.rand()) + random.random()
            yield replace(step, hidden_RH=step.hidden_RH * (1 + 0.1 * noise))


def start(target: Target, samples: Any, shift: float = 0.0) -> Noisy:
    head = BY_HAND["fresh"](target, samples)
    head.__class__ = Noisy
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(shift)  # whatever a new head holds, the checkpoint counts
    return head


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_another(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    config, run = BY_HAND["changed"](CONFIG, **CASES[case]), BY_HAND["run"]
    samples, seen = BY_HAND["Samples"].of(target, BY_HAND["random_rows"](7)), BY_HAND["watch_steps"](monkeypatch)
    whole = start(target, samples)
    run(whole, samples, target, tmp_path / "whole", config)
    in_one_go = list(seen)
    seen.clear()
    with monkeypatch.context() as patch:
        BY_HAND["stop_after"](patch, 10)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 10 of 20"):
            run(start(target, samples), samples, target, tmp_path / "parts", config)
    assert BY_HAND["checkpoint"](tmp_path / "parts")["order"]["batches"] > 0  # in mid-epoch
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    resumed = start(target, samples, shift=1.0)
    run(resumed, samples, target, tmp_path / "parts", config)

    assert [s["step"] for s in seen] == [s["step"] for s in in_one_go] == list(range(1, 21))
    assert [s["lr"] for s in seen] == [s["lr"] for s in in_one_go]
    assert seen[10]["loss"] == pytest.approx(in_one_go[10]["loss"], abs=1e-6)
    assert [s["loss"] for s in seen] == [s["loss"] for s in in_one_go]
    BY_HAND["assert_same"](BY_HAND["weights"](whole), BY_HAND["weights"](resumed))
    one, parts = (BY_HAND["checkpoint"](tmp_path / name) for name in ("whole", "parts"))
    BY_HAND["assert_same_state"](*({**c, "seconds": 0, "history": [p | {"minutes": 0} for p in c["history"]]} for c in (one, parts)))
    counters = [value for path, value in BY_HAND["values"](one["states"]["optimizer"]) if path.endswith("/step")]
    assert counters and all(c.dtype == torch.float32 and c == 20 for c in counters)
    assert set(one["states"]) == {"head", "optimizer"} | ({"ema"} if config.ema else set())


def test_run_stopped_again_and_again_is_another(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM at five steps; domains drawn more than once, fewer rows than there are, packed, accumulated, all of it measured."""
    rows = [replace(row, domain="ab"[i > 2]) for i, row in enumerate(BY_HAND["random_rows"](9))]
    samples = BY_HAND["Samples"].of(target, rows)
    mixed = {"domain_weights": {"a": 3, "b": 1}, "rows_per_epoch": 8, "eval_steps": 4, "checkpoint_steps": 1, "keep_last": 3, "epochs": 6}
    config, stops = BY_HAND["changed"](CONFIG, **CASES["all at once"], **mixed), [2, 3, 7, 12, 15]

    def one_run(out: str) -> Noisy:
        head = start(target, samples)
        measure = {"on_eval": lambda head: {"measured_tau": float(head.fc.weight.sum())}}
        BY_HAND["run"](head, samples, target, tmp_path / out, config, **measure)
        return head

    whole = one_run("whole")
    assert BY_HAND["checkpoint"](tmp_path / "whole")["step"] > stops[-1]
    BY_HAND["watch_steps"](monkeypatch, lambda **told: told["step"] in stops[:1] and os.kill(os.getpid(), signal.SIGTERM))
    while stops:
        with pytest.raises(KeyboardInterrupt, match=f"stopped after step {stops[0]} of"):
            one_run("parts")
        assert len(list((tmp_path / "parts/checkpoints").glob("step-*.pt"))) == min(3, stops.pop(0))
    parts = one_run("parts")
    BY_HAND["assert_same"](BY_HAND["weights"](whole), BY_HAND["weights"](parts))
    one, two = (BY_HAND["checkpoint"](tmp_path / name) for name in ("whole", "parts"))
    BY_HAND["assert_same_state"](*({**c, "seconds": 0, "history": [p | {"minutes": 0} for p in c["history"]]} for c in (one, two)))


def test_other_generators_change_nothing(target: Target, tmp_path: Path) -> None:
    """The noise above is real: another seed gives other weights; the same seed gives the same ones whatever was drawn before."""
    samples = BY_HAND["Samples"].of(target, BY_HAND["random_rows"](7))
    found = []
    for i, seed in enumerate((0, 0, 1)):
        torch.rand(i + 1), np.random.rand(i + 1)
        head = start(target, samples)
        # The order of the rows depends on the seed as well: one step over all of them does not.
        config = BY_HAND["changed"](CONFIG, steps=1, tokens_per_step=10**6, seed=seed)
        BY_HAND["run"](head, samples, target, tmp_path / str(i), config)
        found.append(BY_HAND["weights"](head)["fc.weight"])
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2], atol=1e-5)
