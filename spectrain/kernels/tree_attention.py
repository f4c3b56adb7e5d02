"""Attention of tree nodes over a cached prefix: the public call, its slow twin, and its registration with transformers.

Legend: B rows, H query heads, G key/value heads, R = H / G query heads per key head, N query nodes, S key slots, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "spectrain_tree"


def attend(
    q_BHND: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask_B1NS: Tensor | None, *, scale: float, softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention with grouped key heads and a boolean mask (True = visible); returns [B, H, N, D].

    The query heads of one key head are folded into the node axis, so keys and values are never repeated in memory.
    A node must see at least one slot. `mask_B1NS=None` means that every slot is visible. `softcap` c: scores s become c tanh(s / c)
    (Gemma 2, arXiv 2408.00118). `sinks_H`: a score a head that takes its share of the softmax and has no value (gpt-oss, 2508.10925).
    """
    B, H, N, D = q_BHND.shape
    G = k_BGSD.shape[1]
    R = H // G
    q_BGXD = q_BHND.reshape(B, G, R * N, D)
    mask_B1XS = mask_B1NS if mask_B1NS is None or N == 1 else mask_B1NS.repeat(1, 1, R, 1)
    if softcap is None and sinks_H is None:
        o_BGXD = F.scaled_dot_product_attention(q_BGXD, k_BGSD, v_BGSD, attn_mask=mask_B1XS, scale=scale)
        return o_BGXD.reshape(B, H, N, D)
    s_BGXS = (q_BGXD @ k_BGSD.transpose(-1, -2)).float() * scale
    if softcap is not None:
        s_BGXS = softcap * torch.tanh(s_BGXS / softcap)
    if mask_B1XS is not None:
        s_BGXS = s_BGXS.masked_fill(~mask_B1XS, float("-inf"))
    total_BGX1 = s_BGXS.logsumexp(-1, keepdim=True)
    if sinks_H is not None:
        total_BGX1 = torch.logaddexp(total_BGX1, sinks_H.float().repeat_interleave(N).view(G, R * N, 1))
    o_BGXD = (s_BGXS - total_BGX1).exp().to(v_BGSD.dtype) @ v_BGSD
    return o_BGXD.reshape(B, H, N, D)


def attend_reference(
    q_BHND: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask_B1NS: Tensor | None, *, scale: float, softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The slow twin of `attend`: repeated keys, an explicit softmax in float64, a sink as one slot more whose value is zero."""
    R = q_BHND.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(R, dim=1).double() for x in (k_BGSD, v_BGSD))
    s_BHNS = q_BHND.double() @ k_BHSD.transpose(-1, -2) * scale
    if softcap is not None:
        s_BHNS = (s_BHNS / softcap).tanh() * softcap
    if mask_B1NS is not None:
        s_BHNS = s_BHNS.masked_fill(~mask_B1NS, float("-inf"))
    if sinks_H is not None:
        s_BHNS = torch.cat([s_BHNS, sinks_H.double()[:, None, None].expand(*s_BHNS.shape[:3], 1)], dim=-1)
        v_BHSD = F.pad(v_BHSD, (0, 0, 0, 1))
    return (s_BHNS.softmax(-1) @ v_BHSD).to(q_BHND.dtype)


def _for_transformers(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The signature that transformers' `AttentionInterface` calls; returns [B, N, H, D] and no weights.

    Without a mask a pass of several nodes is causal and starts from nothing, as everywhere in transformers.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    N, S = query.shape[2], key.shape[2]
    if attention_mask is None and N > 1:
        assert N == S, "a pass behind cached tokens needs a mask"
        plain = softcap is None and s_aux is None and (sliding_window is None or N <= sliding_window)
        if plain:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2), None
        mask_NS = torch.ones(N, S, dtype=torch.bool, device=query.device).tril()
        attention_mask = (mask_NS if sliding_window is None else mask_NS.triu(1 - sliding_window))[None, None]
    return attend(query, key, value, attention_mask, scale=scale, softcap=softcap, sinks_H=s_aux).transpose(1, 2), None


def register() -> str:
    """Make tree attention known to transformers and return the name to pass as `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _for_transformers)
    return NAME
