"""How far a draft's law lies from the target's over the draft vocabulary: a mix of divergences, a value and a gradient a row.

The formulas and their sources are in `spectrain.heads.losses`. Every gradient has the form dz_v = q_v (g_v - sum_u q_u g_u) with
g = d loss / dq, written here as c q - a p - b q [q < p] + q g_log with row numbers a, b, c. Tokens off the draft vocabulary have q = 0
and the rest of the target's mass; that mass changes no gradient but through m = sum_v p_v.

`divergence` overwrites the logits with the gradient. It runs as a few passes over rows that stay in the cache ("torch") or as one
kernel a row ("triton", `divergence_triton`); `divergence_reference` is the slow twin, for autograd.

Legend: N rows, V draft vocabulary, M likeliest tokens of the top_k loss. z: draft logits, q = softmax(z), p: the target's law there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import log
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]
CACHED = 1 << 18  # numbers of one matrix that the passes work on at a time: three of them fit the second-level cache of a core


@dataclass(frozen=True)
class Mix:
    """Weights of the losses; k: tokens of top_k; lk_scale, lk_decay: of lk_lambda."""

    soft_ce: float = 0.0
    kl: float = 0.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    tv: float = 0.0
    lk_alpha: float = 0.0
    lk_lambda: float = 0.0
    top_k: float = 0.0
    k: int = 10
    lk_scale: float = 1.0
    lk_decay: float = 3.0

    @property
    def logs(self) -> bool:
        """Whether log p of every token is needed."""
        return bool(self.reverse_kl or self.jsd)

    @property
    def entropy(self) -> bool:
        return bool(self.kl or self.lk_lambda or self.jsd)

    @property
    def overlap(self) -> bool:
        """Whether sum min(p, q) has a gradient."""
        return bool(self.tv or self.lk_alpha or self.lk_lambda)


@dataclass(frozen=True)
class Law:
    """The target's law at some rows, made once and compared with several drafts. p or log p is None where the way taken needs only the
    other. mass_N = sum p, plogp_N = sum p log p (None: no loss of the mix asks), top_NM: the likeliest draft tokens, top_p_NM: p there."""

    p_NV: Tensor | None
    log_p_NV: Tensor | None
    mass_N: Tensor | None
    plogp_N: Tensor | None
    top_NM: Tensor | None
    top_p_NM: Tensor | None

    def rows(self, index: Tensor | slice) -> "Law":
        """The law at some of its rows."""
        fields = (self.p_NV, self.log_p_NV, self.mass_N, self.plogp_N, self.top_NM, self.top_p_NM)
        return Law(*(None if field is None else field[index] for field in fields))


@dataclass(frozen=True)
class Rows:
    """By row: the mixed loss, alpha = sum min(p, q), and the rank of the target's best token (how many draft logits stand before it; of
    equal ones the lower token does; V where it is no draft token)."""

    loss_N: Tensor
    alpha_N: Tensor
    rank_N: Tensor


def chosen(backend: Backend, device: torch.device) -> Backend:
    """The way that "auto" means: triton on CUDA devices where it is installed, torch elsewhere."""
    if backend != "auto":
        return backend
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"


def law_of(log_p_NV: Tensor, mix: Mix, *, renormalise: bool, backend: Backend = "auto") -> Law:
    """The law whose logarithm this is over the draft vocabulary; renormalise scales it to 1 there. log_p is overwritten."""
    if renormalise:
        log_p_NV.sub_(log_p_NV.logsumexp(-1, keepdim=True))
    top_p_NM = top_NM = None
    if mix.top_k:
        top_log_NM, top_NM = log_p_NV.topk(min(mix.k, log_p_NV.shape[-1]), dim=-1)
        top_p_NM = top_log_NM.exp()
    if chosen(backend, log_p_NV.device) == "triton":
        return Law(None, log_p_NV, None, None, top_NM, top_p_NM)
    keep = mix.logs or mix.entropy
    p_NV = log_p_NV.exp() if keep else log_p_NV.exp_()
    plogp_N = (p_NV * log_p_NV).sum(-1) if mix.entropy else None
    return Law(p_NV, log_p_NV if mix.logs else None, p_NV.sum(-1), plogp_N, top_NM, top_p_NM)


def divergence(z_NV: Tensor, law: Law, mix: Mix, *, best_N: Tensor, gradient: bool = True, backend: Backend = "auto") -> Rows:
    """Compare draft logits (float32) with the law at the same rows. z is overwritten: by d loss / dz of each row with `gradient`, by
    nothing of use without. best: the target's best token as a draft token, -1 where it is none."""
    if not z_NV.numel():
        empty_N = z_NV.new_zeros(len(z_NV))
        return Rows(empty_N, empty_N.clone(), torch.zeros_like(best_N))
    if chosen(backend, z_NV.device) == "triton":
        from spectrain.kernels.divergence_triton import divergence_rows

        return _with_top(z_NV, law, mix, best_N, gradient, divergence_rows)
    N, V = z_NV.shape
    size = max(8, CACHED // V)
    q_XV = torch.empty(min(size, N), V, dtype=z_NV.dtype, device=z_NV.device)
    parts = []
    for start in range(0, N, size):
        some = slice(start, min(start + size, N))
        parts.append(_few_rows(z_NV[some], law.rows(some), mix, best_N[some], gradient, q_XV[: some.stop - start]))
    return Rows(*parts[0]) if len(parts) == 1 else Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _few_rows(z_NV: Tensor, law: Law, mix: Mix, best_N: Tensor, gradient: bool, q_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, alpha and rank of rows that stay in the cache; z becomes the gradient. q: room for the draft's law."""
    p_NV, m_N = law.p_NV, law.mass_N
    assert p_NV is not None and m_N is not None
    rank_N = _rank(z_NV, best_N, room_NV=q_NV)
    z_NM = None if law.top_NM is None else z_NV.gather(1, law.top_NM)
    torch.softmax(z_NV, -1, out=q_NV)
    lse_N = z_NV.amax(-1) - q_NV.amax(-1).log()
    loss_N, log_NV, log_N = _log_terms(z_NV, lse_N, q_NV, law, mix)
    ce_N = m_N * lse_N - torch.mul(p_NV, z_NV, out=z_NV).sum(-1)
    alpha_N = torch.minimum(p_NV, q_NV, out=z_NV).sum(-1)
    more_N, a_N, b_N = _row_numbers(ce_N, alpha_N, law, mix)
    loss_N, c_N = loss_N + more_N, a_N * m_N - log_N
    if z_NM is not None:
        top_N, top_loss_N = _top(z_NM, lse_N, law)
        loss_N, c_N = loss_N + mix.top_k * top_loss_N, c_N + mix.top_k * top_N
    if gradient:
        _write_gradient(z_NV, q_NV, p_NV, a_N, b_N if mix.overlap else None, c_N, log_NV)
        _add_top(z_NV, law, mix)
    return loss_N, alpha_N, rank_N


def _rank(z_NV: Tensor, best_N: Tensor, *, room_NV: Tensor) -> Tensor:
    """Draft logits before that of the best token: larger ones, and equal ones of lower tokens. V without one, and for rows that are NaN."""
    V = z_NV.shape[-1]
    of_best_N1 = z_NV.gather(1, best_N.clamp(min=0)[:, None])
    before_N = torch.gt(z_NV, of_best_N1, out=room_NV).sum(-1)  # numbers, not booleans: those are ten times slower to count
    equal_N = torch.eq(z_NV, of_best_N1, out=room_NV).sum(-1)
    if bool((equal_N > 1).any()):
        lower_NV = torch.arange(V, device=z_NV.device) < best_N[:, None]
        before_N = before_N + ((z_NV == of_best_N1) & lower_NV).sum(-1)
    return torch.where((best_N < 0) | (equal_N < 1), V, before_N.long())


def _row_numbers(ce_N: Tensor, alpha_N: Tensor, law: Law, mix: Mix) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of what is made of sum p log q and sum min(p, q), and its slopes a (in the one, sign turned) and b (in the other, likewise)."""
    share_N = mix.lk_scale * (-mix.lk_decay * alpha_N).exp()
    floor_N = alpha_N.clamp(min=torch.finfo(alpha_N.dtype).tiny)
    a_N = mix.soft_ce + mix.kl + mix.lk_lambda * share_N
    b_N = mix.tv + mix.lk_alpha / floor_N + mix.lk_lambda * (1 - share_N)
    loss_N = a_N * ce_N + (mix.tv + mix.lk_lambda * (1 - share_N)) * (1 - alpha_N) - mix.lk_alpha * floor_N.log()
    if law.plogp_N is not None:
        loss_N = loss_N + (mix.kl + mix.lk_lambda * share_N) * law.plogp_N
    return loss_N, a_N, b_N


def _log_terms(z_NV: Tensor, lse_N: Tensor, q_NV: Tensor, law: Law, mix: Mix) -> tuple[Tensor, Tensor | None, Tensor]:
    """Reverse KL and JSD: value, q g_log with g_log of each token, and sum q g_log."""
    loss_N = torch.zeros_like(lse_N)
    if not mix.logs:
        return loss_N, None, loss_N
    assert law.log_p_NV is not None and law.mass_N is not None and law.p_NV is not None
    log_q_NV = z_NV - lse_N[:, None]
    slope_NV = mix.reverse_kl * (log_q_NV - law.log_p_NV)
    if mix.jsd:
        assert law.plogp_N is not None
        log_m_NV = torch.logaddexp(log_q_NV, law.log_p_NV) - log(2)  # of logarithms: p and q may both be 0 in float32
        slope_NV += mix.jsd / 2 * (log_q_NV - log_m_NV)
        loss_N = mix.jsd / 2 * (law.plogp_N - (law.p_NV * log_m_NV).sum(-1) + (1 - law.mass_N) * log(2))
    slope_NV *= q_NV
    total_N = slope_NV.sum(-1)
    return loss_N + total_N, slope_NV, total_N


def _top(z_NM: Tensor, lse_N: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """Mass of the likeliest tokens and - sum over them of p log q."""
    assert law.top_p_NM is not None
    return law.top_p_NM.sum(-1), (law.top_p_NM * (lse_N[:, None] - z_NM)).sum(-1)


def _add_top(z_NV: Tensor, law: Law, mix: Mix) -> None:
    """The part of the gradient of top_k that lies at those tokens."""
    if law.top_NM is not None and law.top_p_NM is not None:
        z_NV.scatter_add_(1, law.top_NM, -mix.top_k * law.top_p_NM)


def _write_gradient(z_NV: Tensor, q_NV: Tensor, p_NV: Tensor, a_N: Tensor, b_N: Tensor | None, c_N: Tensor, log_NV: Tensor | None) -> None:
    """z := c q - a p - b q [q < p] + log; where there is b, sum q [q < p] times b is still to come to c."""
    if b_N is None:
        torch.mul(q_NV, c_N[:, None], out=z_NV)
    else:
        torch.lt(q_NV, p_NV, out=z_NV).mul_(q_NV)
        c_N = c_N + b_N * z_NV.sum(-1)
        z_NV.mul_(-b_N[:, None]).addcmul_(q_NV, c_N[:, None])
    z_NV.addcmul_(p_NV, a_N[:, None], value=-1)
    if log_NV is not None:
        z_NV.add_(log_NV)


def _with_top(z_NV: Tensor, law: Law, mix: Mix, best_N: Tensor, gradient: bool, kernel: Callable[..., tuple[Tensor, ...]]) -> Rows:
    """The kernel's rows with the top_k loss beside it: that one touches a few tokens of each row."""
    z_NM = None if law.top_NM is None else z_NV.gather(1, law.top_NM)
    more_N = None if law.top_p_NM is None else mix.top_k * law.top_p_NM.sum(-1)
    loss_N, alpha_N, rank_N, lse_N = kernel(z_NV, law.log_p_NV, mix, best_N=best_N, more_N=more_N, gradient=gradient)
    if z_NM is not None:
        loss_N = loss_N + mix.top_k * _top(z_NM, lse_N, law)[1]
        if gradient:
            _add_top(z_NV, law, mix)
    return Rows(loss_N, alpha_N, rank_N)


def divergence_reference(z_NV: Tensor, log_p_NV: Tensor, mix: Mix, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Slow twin: loss and alpha by row from the plain formulas, differentiable in z."""
    log_p_NV = log_p_NV.log_softmax(-1) if renormalise else log_p_NV
    log_q_NV = z_NV.log_softmax(-1)
    p_NV, q_NV = log_p_NV.exp(), log_q_NV.exp()
    alpha_N = torch.minimum(p_NV, q_NV).sum(-1)
    top_NM = log_p_NV.topk(min(mix.k, z_NV.shape[-1]), dim=-1).indices
    log_m_NV = ((p_NV + q_NV) / 2).log()
    soft_ce_N = -(p_NV * log_q_NV).sum(-1)
    kl_N = (p_NV * (log_p_NV - log_q_NV)).sum(-1)
    jsd_N = ((p_NV * (log_p_NV - log_m_NV)).sum(-1) + (q_NV * (log_q_NV - log_m_NV)).sum(-1) + (1 - p_NV.sum(-1)) * log(2)) / 2
    share_N = mix.lk_scale * (-mix.lk_decay * alpha_N.detach()).exp()
    loss_N = mix.soft_ce * soft_ce_N + mix.kl * kl_N + mix.reverse_kl * (q_NV * (log_q_NV - log_p_NV)).sum(-1) + mix.jsd * jsd_N
    loss_N = loss_N + mix.tv * (1 - alpha_N) - mix.lk_alpha * alpha_N.log()
    loss_N = loss_N + mix.lk_lambda * (share_N * kl_N + (1 - share_N) * (1 - alpha_N))
    return loss_N - mix.top_k * (p_NV * log_q_NV).gather(1, top_NM).sum(-1), alpha_N
