"""Divergences and their gradients against autograd of the plain formulas, in float64; formulas by hand; ranks."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spectrain.kernels import divergence as module
from spectrain.kernels.divergence import Mix, divergence, divergence_reference, law_of

LOSSES = ["soft_ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "top_k"]
MIXES = {name: Mix(**{name: 1.0}, k=3) for name in LOSSES}
MIXES["all"] = Mix(**{name: 0.3 + 0.1 * i for i, name in enumerate(LOSSES)}, k=4, lk_scale=0.8, lk_decay=2.0)
MIXES["sharp"] = Mix(soft_ce=0.5, lk_lambda=2.0, top_k=0.7, k=999, lk_scale=0.9, lk_decay=0.5)


def inputs(N: int = 7, V: int = 37, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits, log p over V of V + 20 tokens, best token of them all (-1 beyond V); float64."""
    g = torch.Generator().manual_seed(seed)
    full = 2 * torch.randn(N, V + 20, generator=g, dtype=torch.float64)
    best = full.argmax(-1)
    z = full[:, :V] + torch.randn(N, V, generator=g, dtype=torch.float64)
    return z, full.log_softmax(-1)[:, :V].contiguous(), torch.where(best < V, best, -1)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("name", MIXES)
def test_gradient_is_not_that_of_the_formula(name: str, renormalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED", 3 * 37)  # several passes of a few rows
    mix, (z, log_p, best) = MIXES[name], inputs(N=19)
    leaf = z.clone().requires_grad_()
    loss, alpha = divergence_reference(leaf, log_p, mix, renormalise=renormalise)
    loss.sum().backward()
    room, law = z.clone(), law_of(log_p.clone(), mix, renormalise=renormalise)
    found = divergence(room, law, mix, best_N=best)
    assert leaf.grad is not None and leaf.grad.abs().amax() > 1e-3
    torch.testing.assert_close(found.loss_N, loss.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found.alpha_N, alpha.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(room, leaf.grad, atol=1e-13, rtol=1e-11)
    assert torch.equal(found.rank_N, torch.where(best < 0, 37, (z > z.gather(1, best.clamp(min=0)[:, None])).sum(-1)))
    again = divergence(z.clone(), law, mix, best_N=best, gradient=False)
    assert torch.equal(again.loss_N, found.loss_N)


HAND_P, HAND_Q = [0.4, 0.1, 0.3], [0.5, 0.3, 0.2]  # p has 0.2 of its mass elsewhere
LAMBDA = math.exp(-3 * 0.7)
KL = sum(p * math.log(p / q) for p, q in zip(HAND_P, HAND_Q, strict=True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("soft_ce", -sum(p * math.log(q) for p, q in zip(HAND_P, HAND_Q, strict=True))),
        ("kl", KL),
        ("reverse_kl", sum(q * math.log(q / p) for p, q in zip(HAND_P, HAND_Q, strict=True))),
        ("tv", 0.5 * (0.1 + 0.2 + 0.1 + 0.2)),  # half the L1 distance over all tokens
        ("lk_alpha", -math.log(0.7)),
        ("lk_lambda", LAMBDA * KL + (1 - LAMBDA) * 0.3),
        ("top_k", -0.4 * math.log(0.5) - 0.3 * math.log(0.2)),
        (
            "jsd",
            0.5 * sum(p * math.log(2 * p / (p + q)) for p, q in zip([*HAND_P, 0.2], [*HAND_Q, 0.0], strict=True))
            + 0.5 * sum(q * math.log(2 * q / (p + q)) for p, q in zip(HAND_P, HAND_Q, strict=True)),
        ),
    ],
)
@pytest.mark.parametrize("way", ["fast", "reference"])
def test_formula_means_something_else(name: str, expected: float, way: str) -> None:
    mix = Mix(**{name: 1.0}, k=2)
    z, log_p = torch.tensor([HAND_Q]).double().log() + 5, torch.tensor([HAND_P]).double().log()
    if way == "reference":
        loss, alpha = divergence_reference(z, log_p, mix, renormalise=False)
    else:
        found = divergence(z, law_of(log_p, mix, renormalise=False), mix, best_N=torch.tensor([0]))
        loss, alpha = found.loss_N, found.alpha_N
    assert float(loss) == pytest.approx(expected, rel=1e-6) and float(alpha) == pytest.approx(0.7, rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_far_logits_overflow(name: str) -> None:
    """float32, laws that share no token and tokens whose p and q are both 0: finite values and gradients."""
    z = torch.tensor([[200.0, 0.0, -200.0, -150.0], [-300.0, 50.0, 50.0, 0.0]])
    log_p = torch.tensor([[-180.0, -0.01, -5.0, -140.0], [-0.1, -120.0, -110.0, -2.5]])
    mix = MIXES[name]
    found = divergence(z, law_of(log_p, mix, renormalise=False), mix, best_N=torch.tensor([1, 0]))
    assert found.loss_N.isfinite().all() and z.isfinite().all()
    assert z.any() or name == "lk_alpha" or name == "tv"  # nothing in common: no token's slope leads there


def test_ties_or_broken_rows_are_hits() -> None:
    """Of equal logits the lower token stands first, as argmax has it; rows that are NaN hit nothing."""
    nan = float("nan")
    z = torch.tensor([[1.0, 1, 1, 1], [0, 2, 2, 0], [0, 2, 2, 0], [nan] * 4, [1, 2, 3, 4], [1, 2, 3, 4]])
    best = torch.tensor([3, 1, 2, 0, 3, -1])
    mix = Mix(soft_ce=1.0)
    law = law_of(torch.full((6, 4), -1.4), mix, renormalise=False)
    assert divergence(z, law, mix, best_N=best).rank_N.tolist() == [3, 0, 1, 4, 0, 4]


def test_no_rows_are_an_error() -> None:
    mix = replace(MIXES["all"], top_k=0.0)
    found = divergence(torch.zeros(0, 5), law_of(torch.zeros(0, 5), mix, renormalise=False), mix, best_N=torch.zeros(0, dtype=torch.long))
    assert found.loss_N.shape == found.alpha_N.shape == found.rank_N.shape == (0,)
