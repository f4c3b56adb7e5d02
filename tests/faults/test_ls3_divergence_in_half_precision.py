"""LS3: the gradient of two close laws, from bfloat16 logits, is that of float64."""

import pytest
import torch
from torch import Tensor

from spectrain.kernels.divergence import Mix, divergence, divergence_reference, law_of

LOSSES = ["soft_ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda"]


def logits() -> tuple[Tensor, Tensor]:
    """bfloat16 logits [64, 32000] of a teacher and of a draft that overlaps it by at least 0.97."""
    g = torch.Generator().manual_seed(0)
    draft = (2 * torch.randn(64, 32000, generator=g)).to(torch.bfloat16)
    return (draft.float() + 0.05 * torch.randn(64, 32000, generator=g)).to(torch.bfloat16), draft


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_in_half_precision_is_coarse(name: str) -> None:
    teacher, draft = logits()
    if name != "soft_ce":  # eight rows of the others, for time
        teacher, draft = teacher[:8], draft[:8]
    mix, leaf = Mix(**{name: 1.0}), draft.double().requires_grad_()
    loss, alpha = divergence_reference(leaf, teacher.double().log_softmax(-1), mix, renormalise=False)
    assert alpha.min() >= 0.97
    (exact,) = torch.autograd.grad(loss.sum(), leaf)
    mine = draft.float()
    law = law_of(teacher.float() - teacher.float().logsumexp(-1, keepdim=True), mix, renormalise=False)
    divergence(mine, law, mix, best_N=torch.zeros(len(mine), dtype=torch.long))
    assert (mine.double() - exact).norm() < 0.01 * exact.norm()


def test_half_precision_would_not_do() -> None:
    """What the test above is about: the same formula in bfloat16 is off by more than 1 %."""
    teacher, draft = logits()
    exact = draft.double().softmax(-1) - teacher.double().softmax(-1)
    coarse = draft.softmax(-1) - teacher.softmax(-1)
    assert (coarse.double() - exact).norm() > 0.01 * exact.norm()
