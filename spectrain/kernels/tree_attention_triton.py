"""Tree attention in Triton: the nodes of a draft tree against a long cached prefix and the tree itself. Imported only where triton is.

What a node sees comes packed (`tree_attention.packed`), so no mask of nodes times context is ever made. The query heads of one key head
and the nodes are folded into one axis X, x = n R + r, so keys are read once for all of them. The slots of a row are split over SPLITS
programs (flash-decoding); each keeps a softmax of its own share in base 2, and a second kernel joins the shares by their log-sum-exps.
Slots beyond the row's last one may hold anything, NaN included.

Legend: B rows, H query heads, G key/value heads, R = H / G, N nodes, S key slots, D head size, X = N * R, P splits, C = 3 + words.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrain.kernels.tree_attention import FIELDS

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
MOST_SPLITS = 64
FEWEST_SLOTS = 256  # of one split: below that a program costs more than it reads
PROGRAMS = 2  # wanted for each multiprocessor

_LOG2E = tl.constexpr(1.4426950408889634)
_FAR = tl.constexpr(-1.0e30)  # in place of minus infinity as a running maximum: infinities subtracted would be NaN


@triton.jit
def _product(a, b, acc, WIDEN: tl.constexpr):
    """acc + a b. WIDEN, for triton's interpreter, which takes the bits of bfloat16 for integers: the same product from float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _block(
    q, k_at, v_at, slot, words_at, first, base, end, there_d, k_s, v_s, scale, softcap, acc, total, top,
    WORDS: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One block of slots joined to the running softmax (acc, total, top) of every x."""
    k_at, v_at = k_at + slot[None, :] * k_s, v_at + slot[:, None] * v_s
    if MASKED:
        inside = slot < end
        k = tl.load(k_at, mask=inside[None, :] & there_d[:, None], other=0.0)
        v = tl.load(v_at, mask=inside[:, None] & there_d[None, :], other=0.0)
    elif WHOLE:
        k, v = tl.load(k_at), tl.load(v_at)
    else:
        k = tl.load(k_at, mask=there_d[:, None], other=0.0)
        v = tl.load(v_at, mask=there_d[None, :], other=0.0)
    s = _product(q, k, tl.zeros([q.shape[0], slot.shape[0]], tl.float32), WIDEN) * scale
    if SOFTCAP:  # tanh from an exponential that cannot overflow
        small = tl.exp2(tl.abs(s / softcap) * _LOG2E * -2.0)
        s = tl.where(s < 0, -softcap, softcap) * ((1 - small) / (1 + small))
    s *= _LOG2E
    if MASKED:
        node = slot - base
        word = tl.load(words_at)[:, None]
        if WORDS == 2:
            upper = tl.load(words_at + 1)[:, None]
            word = tl.where(node[None, :] < 64, word, upper)
        on_line = (word >> (node & 63)[None, :].to(tl.int64)) & 1
        seen = (slot[None, :] >= first[:, None]) & inside[None, :] & ((node < 0)[None, :] | (on_line != 0))
        s = tl.where(seen, s, float("-inf"))
    high = tl.maximum(top, tl.max(s, 1))
    w = tl.exp2(s - high[:, None])
    keep = tl.exp2(top - high)
    acc = _product(w.to(v.dtype), v, acc * keep[:, None], WIDEN)
    return acc, total * keep + tl.sum(w, 1), high


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, view_ptr, sink_ptr, o_ptr, part_ptr, lse_ptr, q_b, q_h, q_n, k_b, k_g, k_s, v_b, v_g, v_s, G, N, D, P, scale,
    softcap, R: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr,
    WHOLE: tl.constexpr, WIDEN: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of x of one key head over one split. ALONE (P = 1): the finished output; otherwise the split's share and log-sum-exp."""
    tile, split, bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, g = bg // G, bg % G
    x = tile * BLOCK_X + tl.arange(0, BLOCK_X)
    d = tl.arange(0, BLOCK_D)
    n, h = x // R, g * R + x % R
    there_x, there_d = n < N, d < D
    view_at = view_ptr + (b * N + tl.minimum(n, N - 1)) * (FIELDS + WORDS)  # lanes beyond the nodes read the last one
    first = tl.load(view_at).to(tl.int32)
    base, end = tl.load(view_ptr + b * N * (FIELDS + WORDS) + 1).to(tl.int32), tl.load(view_ptr + b * N * (FIELDS + WORDS) + 2).to(tl.int32)
    q_at = q_ptr + b * q_b + h[:, None] * q_h + n[:, None].to(tl.int64) * q_n + d[None, :]
    q = tl.load(q_at, mask=there_x[:, None] & there_d[None, :], other=0.0)
    k_at, v_at = k_ptr + b * k_b + g * k_g + d[:, None], v_ptr + b * v_b + g * v_g + d[None, :]

    low = tl.min(first, 0) // BLOCK_S
    share = tl.cdiv(tl.cdiv(end, BLOCK_S) - low, P)
    low += split * share
    high = tl.minimum(low + share, tl.cdiv(end, BLOCK_S))
    open_low = tl.minimum(tl.maximum(low, tl.cdiv(tl.max(first, 0), BLOCK_S)), tl.maximum(high, low))
    open_high = tl.maximum(tl.minimum(high, base // BLOCK_S), open_low)
    acc = tl.zeros([BLOCK_X, BLOCK_D], tl.float32)
    total, top = tl.zeros([BLOCK_X], tl.float32), tl.full([BLOCK_X], _FAR, tl.float32)
    for block in range(open_low, open_high):  # blocks that every node sees in full
        slot = block * BLOCK_S + tl.arange(0, BLOCK_S)
        acc, total, top = _block(
            q, k_at, v_at, slot, view_at + FIELDS, first, base, end, there_d, k_s, v_s, scale, softcap, acc, total, top,
            WORDS, SOFTCAP, False, WHOLE, WIDEN,
        )  # fmt: skip
    for other in range(low, high - (open_high - open_low)):  # where the window begins, and the tree
        block = tl.where(other < open_low, other, other + open_high - open_low)
        slot = block * BLOCK_S + tl.arange(0, BLOCK_S)
        acc, total, top = _block(
            q, k_at, v_at, slot, view_at + FIELDS, first, base, end, there_d, k_s, v_s, scale, softcap, acc, total, top,
            WORDS, SOFTCAP, True, WHOLE, WIDEN,
        )  # fmt: skip
    there = there_x[:, None] & there_d[None, :]
    if ALONE:
        if SINKS:
            sink = tl.load(sink_ptr + h).to(tl.float32) * _LOG2E
            high_x = tl.maximum(top, sink)
            acc, total = acc * tl.exp2(top - high_x)[:, None], total * tl.exp2(top - high_x) + tl.exp2(sink - high_x)
        o_at = o_ptr + ((b * N + n[:, None]) * G * R + h[:, None]) * D + d[None, :]
        tl.store(o_at, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=there)
    else:
        row = (bg * P + split) * N * R + x
        tl.store(part_ptr + row[:, None] * D + d[None, :], acc / tl.where(total > 0, total, 1.0)[:, None], mask=there)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + row, lse, mask=there_x)


@triton.jit
def _join_kernel(
    part_ptr, lse_ptr, sink_ptr, o_ptr, G, N, D, P, R: tl.constexpr, SINKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The output of one x from the shares of its splits."""
    x, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    there_d = d < D
    row = (bg * P + split) * N * R + x
    lse = tl.load(lse_ptr + row, mask=split < P, other=float("-inf"))
    h = bg % G * R + x % R
    top = tl.max(lse, 0)  # a node sees itself: one of them is finite
    if SINKS:
        sink = tl.load(sink_ptr + h).to(tl.float32) * _LOG2E
        top = tl.maximum(top, sink)
    w = tl.exp2(lse - top)
    total = tl.sum(w, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    part = tl.load(part_ptr + row[:, None] * D + d[None, :], mask=(split < P)[:, None] & there_d[None, :], other=0.0)
    o = tl.sum(part * w[:, None], 0) / total
    o_at = o_ptr + ((bg // G * N + x // R) * G * R + h) * D + d
    tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=there_d)


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program: x and slots at a time, warps, and blocks in flight."""

    x: int
    slots: int
    warps: int
    stages: int


def tiles(num_x: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Sizes that fit the registers and the shared memory of sm_80 and later; benchmarks/results/compile.md has what they take."""
    wide = max(64, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:  # products without tensor cores, in registers
        return Tiles(16, 32 if wide <= 64 else 16, 4, 2)
    x = min(max(16, triton.next_power_of_2(num_x)), 128 if wide <= 128 else 64)
    return Tiles(x, 64 if wide <= 128 else 32, 8 if x * wide > 64 * 64 else 4, 3 if wide <= 128 else 2)


def attend_packed(
    q_BHND: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, view_B1NC: Tensor, *, scale: float, softcap: float | None = None,
    sinks_H: Tensor | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention [B, N, H, D] of nodes that see what `view` says (`tree_attention.packed`).

    Keys and values may be views with any strides but the last. splits: programs that share the slots of a row; None: by the device.
    """
    (B, H, N, D), G = q_BHND.shape, k_BGSD.shape[1]
    R, words = H // G, view_B1NC.shape[3] - FIELDS
    assert view_B1NC.is_contiguous() and view_B1NC.dtype == torch.int64 and words in (1, 2) and D <= LARGEST_HEAD
    assert q_BHND.stride(3) == k_BGSD.stride(3) == v_BGSD.stride(3) == 1
    size, wide = tiles(N * R, D, q_BHND.dtype), max(16, triton.next_power_of_2(D))
    num_tiles = triton.cdiv(N * R, size.x)
    P = splits_of(B * G * num_tiles, k_BGSD.shape[2], q_BHND.device) if splits is None else splits
    o_BNHD = q_BHND.new_empty(B, N, H, D)
    part_PXD = torch.empty(B * G * P * N * R if P > 1 else 0, D, dtype=torch.float32, device=q_BHND.device)
    lse_PX = torch.empty(len(part_PXD), dtype=torch.float32, device=q_BHND.device)
    sinks = view_B1NC if sinks_H is None else sinks_H.contiguous()  # some pointer where none is read
    with torch.cuda.device_of(q_BHND):  # triton launches on the current device, wherever the tensors are
        _attend_kernel[(num_tiles, P, B * G)](
            q_BHND, k_BGSD, v_BGSD, view_B1NC, sinks, o_BNHD, part_PXD, lse_PX, *q_BHND.stride()[:3], *k_BGSD.stride()[:3],
            *v_BGSD.stride()[:3], G, N, D, P, float(scale), float(softcap or 0.0), R=R, FIELDS=FIELDS, WORDS=words,
            SOFTCAP=softcap is not None, SINKS=sinks_H is not None, ALONE=P == 1, WHOLE=wide == D, WIDEN=q_BHND.device.type == "cpu",
            BLOCK_X=size.x, BLOCK_S=size.slots, BLOCK_D=wide, num_warps=size.warps, num_stages=size.stages, enable_fp_fusion=True,
        )  # fmt: skip
        if P > 1:
            _join_kernel[(N * R, B * G)](
                part_PXD, lse_PX, sinks, o_BNHD, G, N, D, P, R=R, SINKS=sinks_H is not None, BLOCK_P=triton.next_power_of_2(P),
                BLOCK_D=wide, enable_fp_fusion=True,
            )  # fmt: skip
    return o_BNHD


def splits_of(programs: int, slots: int, device: torch.device) -> int:
    """Splits that fill the device, given the programs of one split and the slots of the longest row."""
    if device.type != "cuda":
        return 1
    wanted = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count // programs
    return max(1, min(wanted, MOST_SPLITS, slots // FEWEST_SLOTS))
