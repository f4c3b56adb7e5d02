"""RB3: after a measurement the head trains on as before, frozen parts stay as they are, recomputed activations change no gradient."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import TrainingConfig
from spectrain.target.model import Target
from spectrain.training import loop

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
CONFIG = TrainingConfig(epochs=5, tokens_per_step=45, lr=5e-3)  # two steps an epoch
BOTH = {"optimizer": "muon", "ema": 0.8}


def samples_of(target: Target) -> Any:
    return BY_HAND["Samples"].of(target, BY_HAND["random_rows"](7))


@pytest.mark.parametrize("changes", [{}, BOTH], ids=["weights", "averages"])
def test_measuring_changes_the_training(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Measured at every step (and left in evaluation mode by whoever measures) or once: the same weights; modes are as they were."""
    samples, modes, found = samples_of(target), [], []
    forward = loop.Trainee.forward
    monkeypatch.setattr(loop.Trainee, "forward", lambda self, work: (modes.append(self.head.training), forward(self, work))[1])
    for name, every in (("often", 1), ("once", 10)):
        head = BY_HAND["fresh"](target, samples)
        asked: list[Any] = []

        def measure(given: Any, head: Any = head, asked: list[Any] = asked) -> dict[str, float]:
            assert not given.training and not any(part.training for part in given.modules())
            assert (given is head) == ("ema" not in changes)
            asked.append(BY_HAND["weights"](given))
            given.requires_grad_(given is head).eval()
            torch.rand(7)
            return {"measured_tau": 1.0}

        config = BY_HAND["changed"](CONFIG, eval_steps=every, **changes)
        result = BY_HAND["run"](head, samples, target, tmp_path / name, config, on_eval=measure)
        assert len(asked) == 10 // every and result.steps == 10
        assert head.training and all(part.training for part in head.modules())
        assert not target.model.training and not any(p.requires_grad or p.grad is not None for p in target.model.parameters())
        found.append((BY_HAND["weights"](head), asked[-1]))
    assert modes and all(modes)
    BY_HAND["assert_same"](found[0][0], found[1][0])
    BY_HAND["assert_same"](found[0][1], found[1][1])
    assert torch.equal(found[0][0]["fc.weight"], found[0][1]["fc.weight"]) == ("ema" not in changes)


def test_recomputed_activations_lose_gradients(target: Target) -> None:
    samples, found = samples_of(target), []
    for checkpointing in (False, True):
        config = BY_HAND["changed"](CONFIG, checkpointing=checkpointing)
        head = BY_HAND["fresh"](target, samples)
        trainee = loop.Trainee(head, config, embed_VW=target.embedding_VW.detach(), output_VW=target.output_VW.detach()).train()
        result = trainee(loop._work(samples, [[0], [3], [5]], config, torch.device("cpu")))
        (result.total / result.weight).backward()
        found.append({name: p.grad for name, p in head.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.any() and found[1][name].any(), name
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-6)


def test_dropout_of_the_target_is_on(make_target: Any, tmp_path: Path) -> None:
    target = make_target(attention_dropout=0.5)
    samples = samples_of(target)
    before = {name: t.clone() for name, t in target.model.state_dict().items()}
    BY_HAND["run"](BY_HAND["fresh"](target, samples), samples, target, tmp_path, CONFIG)
    again = samples_of(target)
    for one, two in zip(samples.samples, again.samples, strict=True):
        assert torch.equal(one.states.codes, two.states.codes) and torch.equal(one.lse_M, two.lse_M)
    BY_HAND["assert_same"](before, target.model.state_dict())


@pytest.mark.parametrize("changes", [{}, BOTH], ids=["adamw", "muon and averages"])
def test_frozen_parts_move(target: Target, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Ten steps with weight decay 0.1: the frozen output rows and the draft vocabulary stay bitwise; no optimizer holds them."""
    samples = samples_of(target)
    head = BY_HAND["fresh"](target, samples, output="frozen")
    before = BY_HAND["weights"](head)
    result = BY_HAND["run"](head, samples, target, tmp_path, BY_HAND["changed"](CONFIG, weight_decay=0.1, **changes))
    after, states = BY_HAND["weights"](head), BY_HAND["checkpoint"](tmp_path)["states"]
    assert result.steps == 10
    frozen = {"lm_head.weight", "d2t", "t2d"}
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (name in frozen), name
        if "ema" in states:
            assert torch.equal(tensor, states["ema"][f"module.{name}"]) == (name in frozen), name
    sizes = [t.numel() for path, t in BY_HAND["values"](states["optimizer"]) if path.endswith(("/exp_avg", "/momentum_buffer"))]
    assert sum(sizes) == sum(p.numel() for p in head.parameters()) - head.lm_head.weight.numel()
    moving = BY_HAND["fresh"](target, samples)
    BY_HAND["run"](moving, samples, target, tmp_path / "moving", BY_HAND["changed"](CONFIG, epochs=1))
    assert not torch.equal(moving.lm_head.weight, before["lm_head.weight"])
