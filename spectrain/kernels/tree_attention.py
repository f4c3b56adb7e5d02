"""Attention of tree nodes over a cached prefix: the public call, its slow twin, and its registration with transformers.

Legend: B rows, H query heads, G key/value heads, R = H / G query heads per key head, N query nodes, S key slots, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "spectrain_tree"


def attend(q_BHND: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask_B1NS: Tensor | None, *, scale: float) -> Tensor:
    """Attention with grouped key heads and a boolean mask (True = visible); returns [B, H, N, D].

    The query heads of one key head are folded into the node axis, so keys and values are never repeated in memory.
    A node must see at least one slot. `mask_B1NS=None` means that every slot is visible.
    """
    B, H, N, D = q_BHND.shape
    G = k_BGSD.shape[1]
    R = H // G
    q_BGXD = q_BHND.reshape(B, G, R * N, D)
    mask_B1XS = mask_B1NS if mask_B1NS is None or N == 1 else mask_B1NS.repeat(1, 1, R, 1)
    o_BGXD = F.scaled_dot_product_attention(q_BGXD, k_BGSD, v_BGSD, attn_mask=mask_B1XS, scale=scale)
    return o_BGXD.reshape(B, H, N, D)


def attend_reference(q_BHND: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask_B1NS: Tensor | None, *, scale: float) -> Tensor:
    """The slow twin of `attend`: repeated keys, an explicit softmax in float64."""
    R = q_BHND.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(R, dim=1).double() for x in (k_BGSD, v_BGSD))
    s_BHNS = q_BHND.double() @ k_BHSD.transpose(-1, -2) * scale
    if mask_B1NS is not None:
        s_BHNS = s_BHNS.masked_fill(~mask_B1NS, float("-inf"))
    return (s_BHNS.softmax(-1) @ v_BHSD).to(q_BHND.dtype)


def _for_transformers(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The signature that transformers' `AttentionInterface` calls; returns [B, N, H, D] and no weights."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} uses a logit soft-cap or attention sinks, which tree attention does not support yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None and query.shape[2] > 1:  # as everywhere in transformers: no mask is a causal pass from an empty cache
        assert query.shape[2] == key.shape[2], "a pass behind cached tokens needs a mask"
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2), None
    return attend(query, key, value, attention_mask, scale=scale).transpose(1, 2), None


def register() -> str:
    """Make tree attention known to transformers and return the name to pass as `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _for_transformers)
    return NAME
