"""The walk of greedy verification in Triton: one launch, nothing read by the host. Imported only where triton is.

Its twin is `decoding.rules.follow` on the CPU.

Legend: B rows, N nodes, K = N - 1 most nodes of a path.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _walk_kernel(choice_ptr, token_ptr, parent_ptr, num_ptr, path_ptr, length_ptr, next_ptr, N, BLOCK_N: tl.constexpr):
    """A row: from the root to the first child that carries the choice made at its parent, as long as there is one."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    token = tl.load(token_ptr + row * N + n, mask=n < N, other=0)
    parent = tl.load(parent_ptr + row * N + n, mask=n < N, other=-1).to(tl.int32)
    parent = tl.where(n < tl.load(num_ptr + row), parent, -1)  # no node is the child of -1: padding and the root are none
    path = tl.full([BLOCK_N], -1, tl.int32)
    length = tl.full([], 0, tl.int32)
    wanted = tl.load(choice_ptr + row * N)
    child = tl.min(tl.where((parent == 0) & (token == wanted), n, N), 0)
    while child < N:
        path = tl.where(n == length, child, path)
        length += 1
        wanted = tl.load(choice_ptr + row * N + child)
        child = tl.min(tl.where((parent == child) & (token == wanted), n, N), 0)
    tl.store(path_ptr + row * (N - 1) + n, path.to(tl.int64), mask=n < N - 1)
    tl.store(length_ptr + row, length.to(tl.int64))
    tl.store(next_ptr + row, wanted)


def walk(choice_BN: Tensor, tokens_BN: Tensor, parents_BN: Tensor, num_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted nodes [B, K] from depth 1 on (-1 beyond the end), how many, and the choice after them. choice: the target's own token
    after each node; the rest as in a `DraftTree`."""
    B, N = tokens_BN.shape
    path_BK = tokens_BN.new_empty(B, N - 1)
    length_B, next_B = torch.empty_like(num_B), torch.empty_like(num_B)
    given = (t.contiguous() for t in (choice_BN, tokens_BN, parents_BN, num_B))
    with torch.cuda.device_of(tokens_BN):
        _walk_kernel[(B,)](*given, path_BK, length_B, next_B, N, BLOCK_N=triton.next_power_of_2(N), num_warps=1, enable_fp_fusion=True)
    return path_BK, length_B, next_B
