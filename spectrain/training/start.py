"""What of a target's own weights a head can begin with: its final norm, its last decoder layer as far as that fits, the size of its states.

Legend: W target width, L tokens, F = J fused states of width W.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.target.model import Target
from spectrain.target.placement import Placement, full_shape

PROBE = 1024.0  # a power of two, whose square hides any epsilon in float32
ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
MLP = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


@torch.no_grad()
def norm_factors(norm: Any, width: int, placement: Placement | None = None) -> Tensor:
    """The factors [W] by which a root-mean-square norm multiplies, float32: what the module itself makes of ones, since some families
    keep the factors less one (Gemma). Of a norm that takes the mean away, its weight. placement: of the target that it belongs to."""
    with _whole(norm, placement or Placement()):
        weight = norm.weight
        one_W = torch.full((width,), PROBE, dtype=weight.dtype, device=weight.device)
        up_W, down_W = norm.forward(one_W).float(), norm.forward(-one_W).float()  # without hooks that gather weights for a pass
        return up_W if torch.equal(up_W, -down_W) and bool(up_W.any()) else weight.detach().float()


@contextmanager
def _whole(module: nn.Module, placement: Placement) -> Iterator[None]:
    """A module with its own weights in full."""
    own = dict(module.named_parameters(recurse=False))
    full = {name: placement.whole(p) for name, p in own.items()}
    module._parameters.update({name: nn.Parameter(weight, requires_grad=False) for name, weight in full.items()})
    try:
        yield
    finally:
        module._parameters.update(own)


def final_norm(target: Target) -> Tensor:
    """Factors of the target's final norm: the last norm of its hidden width outside the layers. ValueError where there is none."""
    inside = {id(module) for module in target.layers.modules()}
    width = target.embedding_VW.shape[1]
    outside = [m for m in target.model.modules() if id(m) not in inside and isinstance(getattr(m, "weight", None), Tensor)]
    found = [m for m in outside if full_shape(m.weight) == (width,)]
    if not found:
        raise ValueError(f"{target.name} has no final norm of width {width} to start from")
    return norm_factors(found[-1], width, target.placement)


def last_layer(target: Target) -> tuple[dict[str, Tensor], list[str]]:
    """Weights of the target's last decoder layer as a Llama layer has them by name, as far as they mean the same there, and a line for
    every part that starts at random because they do not. Norms are given as factors; fused projections are taken apart."""
    layer = target.layers[-1]
    norms = _norms(layer)
    width = target.embedding_VW.shape[1]
    found = {f"{ours}.weight": norm_factors(getattr(layer, theirs), width, target.placement) for ours, theirs in norms.items()}
    weights = _apart(target.layer_weights(target.num_layers - 1), target.config)
    notes = []
    for part, names, differs in (("attention", ATTENTION, _attention_differs), ("MLP", MLP, _mlp_differs)):
        reason = _norms_differ(layer) or differs(target, weights) or _missing(names, weights)
        if reason:
            notes.append(f"the head's {part} starts at random, not from the last layer of {target.name}: {reason}")
        else:
            found |= {name: weights[name] for name in names}
    return found, notes


def _norms(layer: nn.Module) -> dict[str, str]:
    """The norms before attention and before the MLP, by their names in a Llama layer. Where the layer norms what its parts give, too,
    `post_attention_layernorm` is one of those norms and `pre_feedforward_layernorm` the one before the MLP (Gemma 2)."""
    before = "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else "post_attention_layernorm"
    sought = {"input_layernorm": "input_layernorm", "post_attention_layernorm": before}
    return {ours: theirs for ours, theirs in sought.items() if hasattr(layer, theirs)}


def _norms_differ(layer: nn.Module) -> str | None:
    found = sorted(name for name, _ in layer.named_children() if "norm" in name)
    needed = ["input_layernorm", "post_attention_layernorm"]
    return None if found == needed else f"its norms are {', '.join(found)}, a head's are {' and '.join(needed)}"


def _apart(weights: dict[str, Tensor], config: object) -> dict[str, Tensor]:
    """Fused projections (Phi-3) by the names of their parts."""
    gate_up, qkv = weights.get("mlp.gate_up_proj.weight"), weights.get("self_attn.qkv_proj.weight")
    found = dict(weights)
    if gate_up is not None:
        found |= zip(MLP, gate_up.chunk(2), strict=False)
    if qkv is not None:
        heads, groups = config.num_attention_heads, config.num_key_value_heads  # type: ignore[attr-defined]
        size = len(qkv) // (heads + 2 * groups)
        found |= zip(ATTENTION, qkv.split([heads * size, groups * size, groups * size]), strict=False)
    return found


def _missing(names: Sequence[str], weights: dict[str, Tensor]) -> str | None:
    there = [name for name in names if name in weights and weights[name].is_floating_point()]
    return None if len(there) == len(names) else f"it has no plain {', '.join(sorted(set(names) - set(there)))}"


def _attention_differs(target: Target, weights: dict[str, Tensor]) -> str | None:
    attention, c = getattr(target.layers[-1], "self_attn", None), target.config
    if attention is None:
        return "it has no self_attn"
    more = sorted(n.removeprefix("self_attn.") for n in weights if n.startswith("self_attn.") and not n.endswith("_proj.weight"))
    scale = getattr(attention, "scaling", None)
    if more:
        return f"a head's attention has no {', '.join(more)}"
    if getattr(attention, "attn_logit_softcapping", None) or (scale and abs(scale * attention.head_dim**0.5 - 1) > 1e-6):
        return "its scores have a cap or a scale of their own"
    partial = getattr(c, "partial_rotary_factor", None) or (c.rope_parameters or {}).get("partial_rotary_factor")
    return "it turns a share of each head only" if partial not in (None, 1.0) else None


def _mlp_differs(target: Target, weights: dict[str, Tensor]) -> str | None:
    more = sorted(n for n in weights if n.startswith("mlp.") and not n.endswith("_proj.weight"))
    act = getattr(target.config, "hidden_act", None) or getattr(target.config, "hidden_activation", None)
    if act not in ("silu", "swish"):
        return f"its activation is {act}, a head's is silu"
    return f"a head's MLP has no {', '.join(more)}" if more else None


@torch.no_grad()
def state_sizes(target: Target, layer_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
    """The typical root mean square of each fused state: the median over tokens, since a first token's can be a thousand times as large."""
    ids_1L = torch.tensor([list(ids)], device=target.device)
    positions_1L = torch.arange(ids_1L.shape[1], device=target.device)[None]
    out = target.forward(ids_1L, positions_BN=positions_1L, mask=None, cache=None, layer_ids=tuple(layer_ids), logits_to_keep=1)
    assert out.states_BNF is not None
    size_LJ = out.states_BNF[0].float().unflatten(-1, (len(layer_ids), -1)).square().mean(-1).sqrt()
    return [float(size) for size in size_LJ.median(0).values.clamp(min=1e-6)]
