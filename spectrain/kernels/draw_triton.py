"""Keyed random numbers and draws in Triton. Imported only where triton is. Their twins are `Coins.uniform` and `draw` of
`decoding.sampling` on a CPU.

A law is summed in chunks, all of them at once; a draw then reads the chunk alone that holds its token. All sums are float64. They are
added in another order than the twin's, so that both choose the same token but where u falls within V 2^-52 of the border of two.

Legend: R laws, C chunks of a vocabulary, V vocabulary, B rows, X nodes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64, as `sampling.mix`; x: uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform_kernel(seed_ptr, length_ptr, node_ptr, u_ptr, node_stride, X, number, ROLE: tl.constexpr, BLOCK_X: tl.constexpr):
    """The numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, BLOCK_X)
    node = tl.load(node_ptr + row * node_stride + x, mask=x < X, other=0).to(tl.uint64, bitcast=True)
    seed = tl.load(seed_ptr + row + tl.zeros_like(x)).to(tl.uint64, bitcast=True)
    length = tl.load(length_ptr + row + tl.zeros_like(x)).to(tl.uint64, bitcast=True)
    key = _mix(_mix(_mix(seed) + length) + node)
    bits = _mix(_mix(key + ROLE) + number)
    tl.store(u_ptr + row * X + x, (bits >> 11).to(tl.float64) * 1.1102230246251565e-16, mask=x < X)


@triton.jit
def _sum_kernel(p_ptr, sum_ptr, p_stride, V, BLOCK_V: tl.constexpr):
    """The sum of one chunk of one law."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    p = tl.load(p_ptr + row * p_stride + v, mask=v < V, other=0.0).to(tl.float64)
    tl.store(sum_ptr + row * tl.num_programs(1) + chunk, tl.sum(p, 0))


@triton.jit
def _first_beyond(mass, goal, BLOCK: tl.constexpr):
    """The first entry with mass at which the running sum exceeds the goal, else the last one with mass (rounding), else the last of all;
    and the mass before it. Sums that are made in pieces may fall from one entry to the next: an entry without mass is never chosen."""
    at = tl.arange(0, BLOCK)
    first = tl.min(tl.where((mass > 0) & (tl.cumsum(mass, 0) > goal), at, BLOCK), 0)
    last = tl.max(tl.where(mass > 0, at, -1), 0)
    found = tl.where(first < BLOCK, first, tl.where(last >= 0, last, BLOCK - 1))
    return found, tl.sum(tl.where(at < found, mass, 0.0), 0)


@triton.jit
def _draw_kernel(p_ptr, sum_ptr, u_ptr, token_ptr, p_stride, V, C, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr):
    """A token of one law: first its chunk, then the place in it."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    sums = tl.load(sum_ptr + row * C + c, mask=c < C, other=0.0)
    goal = tl.load(u_ptr + row) * tl.sum(sums, 0)
    chunk, before = _first_beyond(sums, goal, BLOCK_C)
    v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    p = tl.load(p_ptr + row * p_stride + v, mask=v < V, other=0.0).to(tl.float64)
    place, _ = _first_beyond(p, goal - before, BLOCK_V)
    tl.store(token_ptr + row, tl.minimum(chunk * BLOCK_V + place, V - 1).to(tl.int64))


def uniform(seed_B: Tensor, length_B: Tensor, node_BX: Tensor, role: int, number: int) -> Tensor:
    """Numbers in [0, 1), float64 [B, X], bit by bit those of `Coins.uniform`; node_BX: [B, X], or [X] for the same nodes of all rows."""
    B, X = len(seed_B), node_BX.shape[-1]
    u_BX = torch.empty(B, X, dtype=torch.float64, device=seed_B.device)
    node_BX = node_BX.contiguous()
    stride = X if node_BX.dim() == 2 else 0
    given = (seed_B.contiguous(), length_B.contiguous(), node_BX, u_BX, stride, X, number)
    with torch.cuda.device_of(u_BX):
        _uniform_kernel[(B,)](*given, ROLE=role, BLOCK_X=triton.next_power_of_2(X), num_warps=1)
    return u_BX


def chunk_sums(p_RV: Tensor) -> Tensor:
    """The mass of each chunk of each law, float64 [R, C]."""
    R, V = p_RV.shape
    sum_RC = torch.empty(R, triton.cdiv(V, CHUNK), dtype=torch.float64, device=p_RV.device)
    with torch.cuda.device_of(p_RV):
        _sum_kernel[tuple(sum_RC.shape)](p_RV, sum_RC, p_RV.stride(0), V, BLOCK_V=CHUNK, num_warps=4)
    return sum_RC


def draw(p_BXV: Tensor, u_BX: Tensor) -> Tensor:
    """As `sampling.draw`: a token of each law by its inverse CDF, int64 [B, X]."""
    V = p_BXV.shape[-1]
    p_RV = p_BXV.reshape(-1, V).contiguous()
    sum_RC = chunk_sums(p_RV)
    R, C = sum_RC.shape
    token_R = torch.empty(R, dtype=torch.int64, device=p_RV.device)
    blocks = {"BLOCK_C": triton.next_power_of_2(C), "BLOCK_V": CHUNK}
    with torch.cuda.device_of(p_RV):
        _draw_kernel[(R,)](p_RV, sum_RC, u_BX.double().contiguous(), token_R, V, V, C, **blocks, num_warps=8)
    return token_R.view(u_BX.shape)
