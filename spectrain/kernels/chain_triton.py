"""Rejection and block verification of iid chains in Triton. Imported only where triton is. Their twins are `decoding.rules.rejection` and
`block` on a CPU, from which they differ by the order in which float64 sums are added: by V 2^-52 in every chance, and by that over its
mass in the chances of what is left of p.

Every law is summed in chunks, then what the target has beyond the draft at every node, each time all chunks of all nodes at once; one
program a row then decides, and reads one chunk of one law to draw the last token.

Legend: B rows, N nodes, K = N - 1 most nodes of a path, C chunks of a vocabulary, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrain.kernels import draw_triton
from spectrain.kernels.draw_triton import _first_beyond, chunk_sums


@triton.jit
def _totals(sum_ptr, C, N, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums over the chunks [BLOCK_N] of one row's numbers [N, C]."""
    n, c = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_C)[None, :]
    return tl.sum(tl.load(sum_ptr + n * C + c, mask=(n < N) & (c < C), other=0.0), 1)


@triton.jit
def _at(values, node, BLOCK_N: tl.constexpr):
    """The value of one node; nothing of the others, NaN may be among them."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_N) == node, values, 0.0), 0)


@triton.jit
def _chances(law_ptr, sum_ptr, token_ptr, num, V, C, N, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of one row: the chance of each drafted token under the law of the node before it, 1 at the root and at padding."""
    n = tl.arange(0, BLOCK_N)
    drafted = (n > 0) & (n < num)
    token = tl.load(token_ptr + n, mask=drafted, other=0)
    before = tl.maximum(n - 1, 0)
    mass = tl.load(law_ptr + before.to(tl.int64) * V + token, mask=drafted, other=1.0).to(tl.float64)
    c = tl.arange(0, BLOCK_C)[None, :]
    sums = tl.load(sum_ptr + before[:, None] * C + c, mask=drafted[:, None] & (c < C), other=0.0)
    return tl.where(drafted, mass / tl.where(drafted, tl.sum(sums, 1), 1.0), 1.0)


@triton.jit
def _weights(p, q, num, BLOCK_N: tl.constexpr):
    """w_n = min(1, w_{n-1} p / q) of each node; at padding the last one's."""
    n = tl.arange(0, BLOCK_N)
    weights = tl.full([BLOCK_N], 1.0, tl.float64)
    weight = tl.sum(tl.where(n == 0, weights, 0.0), 0)
    for node in range(1, num):
        weight = tl.minimum(weight * _at(p, node, BLOCK_N) / _at(q, node, BLOCK_N), 1.0)
        weights = tl.where(n >= node, weight, weights)
    return weights


@triton.jit
def _surplus(p_row, q_row, p_total, q_total, weight, v, V):
    """(weight p - q)+ of normalised laws. Divided, not scaled by an inverse: equal laws must leave exactly nothing."""
    p = tl.load(p_row + v, mask=v < V, other=0.0).to(tl.float64) / p_total
    q = tl.load(q_row + v, mask=v < V, other=0.0).to(tl.float64) / q_total
    return tl.maximum(weight * p - q, 0.0)


@triton.jit
def _surplus_kernel(
    p_ptr, q_ptr, token_ptr, num_ptr, p_sum_ptr, q_sum_ptr, left_ptr, V, C, N,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The surplus of one chunk at one node, 0 at nodes without a child, where q says nothing."""
    row, node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num = tl.load(num_ptr + row).to(tl.int32)
    left_ptr += (row * N + node) * C + chunk
    if node >= num - 1:
        tl.store(left_ptr, tl.zeros([], tl.float64))
    else:
        p_row, q_row, sums = p_ptr + row * N * V, q_ptr + row * N * V, row * N * C
        weight = tl.full([], 1.0, tl.float64)
        if WHOLE:
            p = _chances(p_row, p_sum_ptr + sums, token_ptr + row * N, num, V, C, N, BLOCK_N, BLOCK_C)
            q = _chances(q_row, q_sum_ptr + sums, token_ptr + row * N, num, V, C, N, BLOCK_N, BLOCK_C)
            weight = _at(_weights(p, q, num, BLOCK_N), node, BLOCK_N)
        c = tl.arange(0, BLOCK_C)
        p_total = tl.sum(tl.load(p_sum_ptr + sums + node * C + c, mask=c < C, other=0.0), 0)
        q_total = tl.sum(tl.load(q_sum_ptr + sums + node * C + c, mask=c < C, other=0.0), 0)
        at = node.to(tl.int64) * V
        v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
        tl.store(left_ptr, tl.sum(_surplus(p_row + at, q_row + at, p_total, q_total, weight, v, V), 0))


@triton.jit
def _verdict_kernel(
    p_ptr, q_ptr, token_ptr, num_ptr, p_sum_ptr, q_sum_ptr, left_ptr, test_ptr, end_ptr, path_ptr, length_ptr, next_ptr, V, C, N,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row: which drafts stay, and the token after them."""
    row = tl.program_id(0).to(tl.int64)
    num = tl.load(num_ptr + row).to(tl.int32)
    n, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    p_row, q_row, sums = p_ptr + row * N * V, q_ptr + row * N * V, row * N * C
    p = _chances(p_row, p_sum_ptr + sums, token_ptr + row * N, num, V, C, N, BLOCK_N, BLOCK_C)
    q = _chances(q_row, q_sum_ptr + sums, token_ptr + row * N, num, V, C, N, BLOCK_N, BLOCK_C)
    u = tl.load(test_ptr + row * N + n, mask=n < N, other=0.0)
    drafted = (n > 0) & (n < num)
    weight = tl.full([], 1.0, tl.float64)
    if WHOLE:
        weights = _weights(p, q, num, BLOCK_N)
        left = _totals(left_ptr + sums, C, N, BLOCK_N, BLOCK_C)
        part, whole = tl.where(n == num - 1, weights, left), tl.where(n == num - 1, 1.0, left + (1.0 - weights))
        last = tl.max(tl.where(drafted & (u * whole < part), n, 0), 0)
        weight = _at(weights, last, BLOCK_N)
    else:
        last = tl.min(tl.where((n == 0) | (drafted & (u * q < p)), BLOCK_N, n), 0) - 1  # padding is not kept
    tl.store(path_ptr + row * (N - 1) + n, tl.where(n < last, n + 1, -1).to(tl.int64), mask=n < N - 1)
    tl.store(length_ptr + row, last.to(tl.int64))

    at = last.to(tl.int64) * V
    p_sums = tl.load(p_sum_ptr + sums + last * C + c, mask=c < C, other=0.0)
    q_sums = tl.load(q_sum_ptr + sums + last * C + c, mask=c < C, other=0.0)
    left_sums = tl.load(left_ptr + sums + last * C + c, mask=c < C, other=0.0)
    targets_own = (last == num - 1) | (tl.sum(left_sums, 0) <= 0)  # nothing left: p = q up to rounding
    masses = tl.where(targets_own, p_sums, left_sums)
    goal = tl.load(end_ptr + row * N + last) * tl.sum(masses, 0)
    chunk, before = _first_beyond(masses, goal, BLOCK_C)
    v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    own = tl.load(p_row + at + v, mask=v < V, other=0.0).to(tl.float64)
    left = _surplus(p_row + at, q_row + at, tl.sum(p_sums, 0), tl.sum(q_sums, 0), weight, v, V)
    place, _ = _first_beyond(tl.where(targets_own, own, left), goal - before, BLOCK_V)
    tl.store(next_ptr + row, tl.minimum(chunk * BLOCK_V + place, V - 1).to(tl.int64))


def verify_chain(
    p_BNV: Tensor, q_BNV: Tensor, tokens_BN: Tensor, num_B: Tensor, tests_BN: Tensor, ends_BN: Tensor, *, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted nodes [B, K] from depth 1 on (-1 beyond the end), how many, and the token after them. tests, ends: the numbers in [0, 1)
    that test each node and that draw the last token where the path ends at it; whole: block verification."""
    B, N, V = p_BNV.shape
    p_BNV, q_BNV, tokens_BN, num_B, tests_BN, ends_BN = (t.contiguous() for t in (p_BNV, q_BNV, tokens_BN, num_B, tests_BN, ends_BN))
    p_sums_RC, q_sums_RC = (chunk_sums(law_BNV.view(-1, V)) for law_BNV in (p_BNV, q_BNV))
    C = p_sums_RC.shape[1]
    left_RC = torch.empty_like(p_sums_RC)
    path_BK = tokens_BN.new_empty(B, N - 1)
    length_B, next_B = torch.empty_like(num_B), torch.empty_like(num_B)
    given = (p_BNV, q_BNV, tokens_BN, num_B, p_sums_RC, q_sums_RC, left_RC)
    blocks = {"BLOCK_N": triton.next_power_of_2(N), "BLOCK_C": triton.next_power_of_2(C), "BLOCK_V": draw_triton.CHUNK}
    with torch.cuda.device_of(p_BNV):
        _surplus_kernel[(B, N, C)](*given, V, C, N, WHOLE=whole, **blocks, num_warps=8)
        _verdict_kernel[(B,)](*given, tests_BN, ends_BN, path_BK, length_B, next_B, V, C, N, WHOLE=whole, **blocks, num_warps=8)
    return path_BK, length_B, next_B
