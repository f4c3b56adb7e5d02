"""Attention of the unrolled steps by torch's flex_attention: base keys under a block mask, own keys joined after by log-sum-exp.

The keys of all lines stand in one row of B * L; a counted row sees there an interval low ... high, which says document, causality and
window at once. The kernel is compiled on CUDA; on the CPU torch runs it eagerly and without gradients (for tests of the mask).

Legend: R counted rows, A query heads, G key heads, X = A / G, D head size, K own keys, S = B * L keys, n blocks of rows, m blocks of keys.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

if TYPE_CHECKING:
    from spectrain.kernels.unrolled_attention import Unrolled

BLOCK = 128  # rows and keys of a block of the mask, flex_attention's own default


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _indices(blocks_nm: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of rows reads, and which: those read stand first."""
    order_nm = blocks_nm.to(torch.int32).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return blocks_nm.sum(1, dtype=torch.int32)[None, None], order_nm[None, None].contiguous()


def interval_mask(low_R: Tensor, high_R: Tensor, num_keys: int) -> BlockMask:
    """The block mask in which row r sees keys low_R[r] ... high_R[r]; made from block bounds, never from a mask [R, S]."""
    R = len(low_R)
    padding = -R % BLOCK
    # The last row stands in for those that fill the last block.
    low_nR, high_nR = (torch.cat([x, x[-1:].expand(padding)]).view(-1, BLOCK) for x in (low_R, high_R))
    begin_m = torch.arange(0, num_keys, BLOCK, device=low_R.device)
    end_m = begin_m + BLOCK - 1
    touched_nm = (end_m >= low_nR.amin(1)[:, None]) & (begin_m <= high_nR.amax(1)[:, None])
    full_nm = (begin_m >= low_nR.amax(1)[:, None]) & (end_m <= high_nR.amin(1)[:, None])

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = q.clamp(max=R - 1)
        return (kv >= low_R[at]) & (kv <= high_R[at])

    return BlockMask.from_kv_blocks(
        *_indices(touched_nm & ~full_nm), *_indices(full_nm), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(R, num_keys)
    )


def attend_flex(
    q_RAD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, own_k: Sequence[Tensor], own_v: Sequence[Tensor], layout: "Unrolled", *,
    scale: float, back: int | None,
) -> Tensor:  # fmt: skip
    """As `attend_unrolled`; `back`: the farthest base column that a row sees, counted back from its own (None: all; below 0: none)."""
    G = k_BLGD.shape[2]
    kind = torch.promote_types(q_RAD.dtype, torch.float32)
    results: list[tuple[Tensor, Tensor]] = []  # [R, G, X, D] and [R, G, X]
    if back is None or back >= 0:
        key = ("flex", back)
        if key not in layout.scratch:
            first_R = layout.row_R - layout.column_R + layout.start_R
            low_R = first_R if back is None else torch.maximum(first_R, layout.row_R - back)
            layout.scratch[key] = interval_mask(low_R, layout.row_R, k_BLGD.shape[0] * k_BLGD.shape[1])
        q_1ARD = q_RAD.transpose(0, 1)[None]
        k_1GSD, v_1GSD = (x.flatten(0, 1).transpose(0, 1)[None] for x in (k_BLGD, v_BLGD))
        call = _compiled() if q_RAD.is_cuda else flex_attention
        o_1ARD, aux = call(
            q_1ARD, k_1GSD, v_1GSD, block_mask=layout.scratch[key], scale=scale, enable_gqa=q_RAD.shape[1] != G,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        results.append((o_1ARD[0].transpose(0, 1).unflatten(1, (G, -1)).to(kind), aux.lse[0].T.unflatten(1, (G, -1)).to(kind)))
    if own_k:
        q_RGXD = q_RAD.unflatten(1, (G, -1)).to(kind)
        k_RGKD, v_RGKD = (torch.stack(list(x), dim=2).to(kind) for x in (own_k, own_v))
        s_RGXK = q_RGXD @ k_RGKD.transpose(-1, -2) * scale
        results.append((s_RGXK.softmax(-1) @ v_RGKD, s_RGXK.logsumexp(-1)))
    share_sRGX = torch.stack([lse for _, lse in results]).softmax(0)
    o_RGXD = sum(share[..., None] * o for share, (o, _) in zip(share_sRGX, results, strict=True))
    assert isinstance(o_RGXD, Tensor)
    return o_RGXD.flatten(1, 2).to(q_RAD.dtype)
