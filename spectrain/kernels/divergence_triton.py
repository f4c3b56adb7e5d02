"""Triton twin of `divergence`: one program a row, three passes over the vocabulary in blocks, float32. Imported only where triton is.

Legend: N rows, V draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrain.kernels.divergence import Mix

BLOCK = 4096


# Lanes beyond V read a far number: minus infinity less itself would be NaN. Its exponential is 0.


@triton.jit
def _first_pass(z_row, log_p_row, best, V, BLOCK: tl.constexpr):
    """Log-sum-exp of z, sum p, sum p z, sum p log p; logits before the best token's, and logits equal to it."""
    of_best = tl.load(z_row + tl.maximum(best, 0))
    top, total, mass, pz, plogp = -1.0e30, 0.0, 0.0, 0.0, 0.0
    before, equal = 0, 0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < V
        z = tl.load(z_row + at, mask=there, other=-1.0e30)
        log_p = tl.load(log_p_row + at, mask=there, other=-1.0e30)
        p = tl.exp(log_p)
        high = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - high) + tl.sum(tl.where(there, tl.exp(z - high), 0.0), 0)
        top = high
        mass += tl.sum(p, 0)
        pz += tl.sum(tl.where(there, p * z, 0.0), 0)
        plogp += tl.sum(tl.where(p > 0, p * log_p, 0.0), 0)
        before += tl.sum((there & ((z > of_best) | ((z == of_best) & (at < best)))).to(tl.int32), 0)
        equal += tl.sum((there & (z == of_best)).to(tl.int32), 0)
    return top + tl.log(total), mass, pz, plogp, before, equal


@triton.jit
def _logs(z_row, log_p_row, lse, at, V):
    """log p, log q and log of their mean."""
    log_q = tl.load(z_row + at, mask=at < V, other=-1.0e30) - lse
    log_p = tl.load(log_p_row + at, mask=at < V, other=-1.0e30)
    log_m = tl.maximum(log_p, log_q) + tl.log(1 + tl.exp(-tl.abs(log_p - log_q))) - 0.6931471805599453
    return log_p, log_q, log_m


@triton.jit
def _divergence_kernel(
    z_ptr, log_p_ptr, best_ptr, more_ptr, loss_ptr, alpha_ptr, rank_ptr, lse_ptr, z_stride, log_p_stride, V,
    soft_ce, kl, reverse_kl, jsd, tv, lk_alpha, lk_lambda, lk_scale, lk_decay,
    MORE: tl.constexpr, LOGS: tl.constexpr, OVERLAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row numbers, and z := d loss / dz. more: what a loss outside the kernel adds to the slope in q."""
    row = tl.program_id(0).to(tl.int64)
    z_row, log_p_row = z_ptr + row * z_stride, log_p_ptr + row * log_p_stride
    best = tl.load(best_ptr + row)
    lse, mass, pz, plogp, before, equal = _first_pass(z_row, log_p_row, best, V, BLOCK)
    alpha, below, slope, pm = 0.0, 0.0, 0.0, 0.0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        log_p, log_q, log_m = _logs(z_row, log_p_row, lse, at, V)
        p, q = tl.exp(log_p), tl.exp(log_q)
        alpha += tl.sum(tl.minimum(p, q), 0)
        below += tl.sum(tl.where(q < p, q, 0.0), 0)
        if LOGS:
            slope += tl.sum(q * (reverse_kl * (log_q - log_p) + 0.5 * jsd * (log_q - log_m)), 0)
            pm += tl.sum(p * log_m, 0)
    share = lk_scale * tl.exp(-lk_decay * alpha)
    floor = tl.maximum(alpha, 1.1754944e-38)
    a, b = soft_ce + kl + lk_lambda * share, tv + lk_alpha / floor + lk_lambda * (1 - share)
    loss = a * (mass * lse - pz) + (kl + lk_lambda * share) * plogp + (tv + lk_lambda * (1 - share)) * (1 - alpha)
    loss -= lk_alpha * tl.log(floor)
    if LOGS:
        loss += slope + 0.5 * jsd * (plogp - pm + (1 - mass) * 0.6931471805599453)
    tl.store(loss_ptr + row, loss)
    tl.store(alpha_ptr + row, alpha)
    tl.store(rank_ptr + row, tl.where((best < 0) | (equal < 1), V, before).to(tl.int64))
    tl.store(lse_ptr + row, lse)
    if GRADIENT:
        c = a * mass - slope
        if OVERLAP:
            c += b * below
        if MORE:
            c += tl.load(more_ptr + row)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            log_p, log_q, log_m = _logs(z_row, log_p_row, lse, at, V)
            p, q = tl.exp(log_p), tl.exp(log_q)
            grad = c * q - a * p
            if OVERLAP:
                grad -= tl.where(q < p, b * q, 0.0)
            if LOGS:
                grad += q * (reverse_kl * (log_q - log_p) + 0.5 * jsd * (log_q - log_m))
            tl.store(z_row + at, grad, mask=at < V)


def divergence_rows(
    z_NV: Tensor, log_p_NV: Tensor, mix: Mix, *, best_N: Tensor, more_N: Tensor | None, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, alpha, rank and log-sum-exp by row; z becomes the gradient. Both matrices are float32 with rows that lie in one piece."""
    N, V = z_NV.shape
    assert z_NV.dtype == log_p_NV.dtype == torch.float32 and z_NV.stride(1) == log_p_NV.stride(1) == 1
    loss_N, alpha_N, lse_N = (torch.empty(N, device=z_NV.device) for _ in range(3))
    rank_N = torch.empty(N, dtype=torch.int64, device=z_NV.device)
    with torch.cuda.device_of(z_NV):
        _divergence_kernel[(N,)](
            z_NV, log_p_NV, best_N, loss_N if more_N is None else more_N, loss_N, alpha_N, rank_N, lse_N, z_NV.stride(0),
            log_p_NV.stride(0), V, mix.soft_ce, mix.kl, mix.reverse_kl, mix.jsd, mix.tv, mix.lk_alpha, mix.lk_lambda, mix.lk_scale,
            mix.lk_decay, MORE=more_N is not None, LOGS=mix.logs, OVERLAP=mix.overlap, GRADIENT=gradient,
            BLOCK=min(BLOCK, triton.next_power_of_2(V)), num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return loss_N, alpha_N, rank_N, lse_N
