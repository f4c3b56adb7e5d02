"""Triton twin of `path.move_path_`: one launch for all layers, keys and values. Imported only where triton is.

Legend: X slabs, B rows, G key/value heads, S slots, D head size, K path length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 16


@triton.jit
def _path_kernel(slab_ptr, length_ptr, path_ptr, B, G, K, x_stride, b_stride, g_stride, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """The path of one row in one head of one slab. Nodes of a path rise and node k is at least k: no block reads what one before wrote."""
    row, x = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, g = row // G, row % G
    d = tl.arange(0, BLOCK_D)
    base = slab_ptr + x * x_stride + b * b_stride + g * g_stride + tl.load(length_ptr + b) * D
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        node = tl.load(path_ptr + b * K + k, mask=k < K, other=-1)
        there = ((node >= 0) & (node != k))[:, None] & (d < D)[None, :]
        entry = tl.load(base + node[:, None] * D + d[None, :], mask=there)
        tl.debug_barrier()  # every thread has read before any writes
        tl.store(base + k[:, None] * D + d[None, :], entry, mask=there)


def move_path_(slab_XBGSD: Tensor, lengths_B: Tensor, path_BK: Tensor) -> None:
    """As `path.move_path_`; a path's entries below 0 are left out."""
    X, B, G, _, D = slab_XBGSD.shape
    K = path_BK.shape[1]
    assert slab_XBGSD.stride(4) == 1 and slab_XBGSD.stride(3) == D and lengths_B.is_contiguous()
    with torch.cuda.device_of(slab_XBGSD):
        _path_kernel[(B * G, X)](
            slab_XBGSD, lengths_B, path_BK.contiguous(), B, G, K, *slab_XBGSD.stride()[:3], D, BLOCK_K=BLOCK_K,
            BLOCK_D=triton.next_power_of_2(D), num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
