"""Attention of tree nodes over a cached prefix: the public call, its slow twin, and its registration with transformers.

There are two ways. "torch" takes a boolean mask of all slots. "triton" (`tree_attention_triton`, on CUDA) takes what a node sees in packed
form, five numbers a node at most, and never makes such a mask; passes that come with a mask (prompts, more than MOST_NODES staged nodes)
go the torch way there too.

Legend: B rows, H query heads, G key/value heads, R = H / G query heads per key head, N query nodes, M staged nodes, S key slots, D head
size, C = FIELDS + words of a packed view.
"""

from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.kernels.divergence import Backend, chosen

Attention = Literal["torch", "triton"]
NAMES: dict[Attention, str] = {"torch": "spectrain_tree", "triton": "spectrain_tree_triton"}  # as transformers knows them
NAME = NAMES["torch"]
FIELDS = 3  # of a packed view before its words
WORD = 64  # bits
MOST_NODES = 2 * WORD  # staged nodes of a packed view


def packed(lengths_B: Tensor, line_BNM: Tensor, window: int | None = None) -> Tensor:
    """What N nodes see, packed: int64 [B, 1, N, C], four-dimensional so that transformers' models pass it on as the mask that it is.

    Of a node: the first committed slot that it sees; the row's committed slots; the slot after the last staged one; then a bit for each
    of the M <= MOST_NODES staged nodes, set for the node and its ancestors (`line_BNM`), the lowest bit of the first word for the first
    one. Committed slots are seen up to the row's length. `window` as in `SlabCache.visible`: counted in positions along the line.
    """
    M = line_BNM.shape[2]
    assert M <= MOST_NODES
    length_BN = lengths_B[:, None].expand(line_BNM.shape[:2])
    first_BN = torch.zeros_like(length_BN)
    if window is not None:
        first_BN = torch.minimum((length_BN + line_BNM.sum(-1) - window).clamp(min=0), length_BN)
        line_BNM = line_BNM & (line_BNM.flip(-1).cumsum(-1).flip(-1) <= window)
    bits_BNM = line_BNM.long() << (torch.arange(M, device=line_BNM.device) % WORD)
    words = [bits_BNM[..., start : start + WORD].sum(-1) for start in range(0, M, WORD)]
    return torch.stack([first_BN, length_BN, length_BN + M, *words], dim=-1)[:, None]


def unpacked(view_B1NC: Tensor, slots: int) -> Tensor:
    """The boolean mask [B, 1, N, S] that a packed view stands for over so many slots: its slow twin."""
    first, length, end = (x[..., None] for x in view_B1NC[..., :FIELDS].unbind(-1))
    slot_S = torch.arange(slots, device=view_B1NC.device)
    node = slot_S - length
    word = view_B1NC[..., FIELDS:].gather(-1, (node.clamp(min=0) // WORD).clamp(max=view_B1NC.shape[3] - FIELDS - 1))
    on_line = (word >> (node.clamp(min=0) % WORD)) & 1
    return (slot_S >= first) & (slot_S < end) & ((node < 0) | on_line.bool())


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


def _with_triton(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As `_for_transformers`, through the kernel where the mask is a packed view. Tensors without values (meta) have no kernel."""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return _for_transformers(module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **kwargs)
    from spectrain.kernels import tree_attention_triton as kernel

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_meta or query.dtype not in kernel.TYPES or query.shape[-1] > kernel.LARGEST_HEAD:
        mask = unpacked(attention_mask, key.shape[2])
        return attend(query, key, value, mask, scale=scale, softcap=softcap, sinks_H=s_aux).transpose(1, 2), None
    return kernel.attend_packed(query, key, value, attention_mask, scale=scale, softcap=softcap, sinks_H=s_aux), None


def way_of(attention: Backend, device: torch.device) -> Attention:
    """What a choice means on this device: "auto" is "triton" on CUDA where triton is installed. ValueError for what cannot run there."""
    if attention not in ("auto", "torch", "triton"):
        raise ValueError(f"attention {attention!r} is unknown; choose auto, torch or triton")
    way: Attention = "triton" if chosen(attention, device) == "triton" else "torch"
    if way == "torch":
        return way
    if find_spec("triton") is None:
        raise ValueError("attention 'triton' needs the package triton, which is not installed: pip install triton, or attention='torch'")
    if device.type != "cuda":
        import triton

        if not triton.knobs.runtime.interpret:
            raise ValueError(f"attention 'triton' needs a CUDA device, found {device.type}; use attention='auto' or 'torch'")
    return way


def register(attention: Attention = "torch") -> str:
    """Make this way of tree attention known to transformers and return the name to pass as `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAMES[attention], _with_triton if attention == "triton" else _for_transformers)
    return NAMES[attention]
