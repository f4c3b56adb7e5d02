"""Parts that heads share: norm, rotary positions, gated MLP, residual block. Names of the parameters are those of published checkpoints.

Legend: B rows, N positions, M nodes of a draft, X any of these, H heads (of a block: its width), D head size.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Of the target's logits, where a new head begins at them: they answer an earlier token, and a sure error is slow to be unlearnt. After 40
# steps a Medusa head kept .195 drafts of held-out rows that began at .25, .188 at .1, .154 at 1 (SmolLM2-135M).
SHARE = 0.25


def narrow(x: Tensor) -> Tensor:
    """Under autocast, x in the type of its products: cast once for all that read it, where each product would cast it again."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if autocast(x) and x.dtype == torch.float32 else x


def autocast(x: Tensor) -> bool:
    """Whether products of x are made in another type; on the device `meta` never."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale (arXiv 1910.07467), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        if x.is_cuda:  # one kernel, which sums in float32; a draft step has time for few
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = narrow(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ResidualBlock(nn.Module):
    """x + silu(W x + b), W and b zero at first (Medusa, arXiv 2401.10774). inputs: how many widths it reads; where these are several, the
    residual is a projection of them (Hydra, arXiv 2402.05109)."""

    def __init__(self, width: int, *, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(width * inputs, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if inputs > 1:
            self.res_connection = nn.Linear(width * inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.res_connection(x).to(x.dtype) if hasattr(self, "res_connection") else x
        return residual + F.silu(self.linear(x))


def caller(*, checkpointing: bool) -> Callable[..., Any]:
    """call(function, *args): the function's result, whose activations are kept or, with checkpointing, made again in the backward pass."""
    if checkpointing:
        return partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return lambda function, *args: function(*args)


def newest(x_BNH: Tensor, count_B: Tensor, before_B1H: Tensor | None) -> Tensor:
    """The last counted one of each row [B, 1, H]; of a row that counts none, what it had before."""
    at_B1H = (count_B - 1).clamp(min=0)[:, None, None].expand(-1, 1, x_BNH.shape[2])
    found_B1H = x_BNH.gather(1, at_B1H)
    return found_B1H if before_B1H is None else torch.where((count_B > 0)[:, None, None], found_B1H, before_B1H)


def depths(level: int | None, line_BNM: Tensor) -> tuple[int, int]:
    """The lowest and the highest depth of nodes, by their `line` (heads/base.py); the host reads them only without a known `level`."""
    if level is not None:
        return level, level
    low, high = (line_BNM.sum(-1) - 1).aminmax()
    return int(low), int(high)


def rotary_settings(config: Any) -> dict[str, Any]:
    """Rotary settings of a model's or a head's config (an object or a mapping), whatever the field layout: `rope_parameters` of
    transformers 5, or `rope_theta` and `rope_scaling` (whose type was called `type`) of earlier ones.

    Where layers have settings of their own, those of full attention. A partial rotary (a share of each head) is left out: a head turns
    the whole of its own. ValueError where there is no base.
    """
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    fields = config if isinstance(config, Mapping) else {name: getattr(config, name, None) for name in names}
    found: dict[str, Any] = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    if by_kind := {kind: value for kind, value in found.items() if isinstance(value, Mapping)}:
        found = dict(by_kind.get("full_attention") or next(iter(by_kind.values())))
    kind = found.pop("type", "default")
    found.setdefault("rope_type", kind)
    found.setdefault("rope_theta", fields.get("rope_theta"))
    found.pop("partial_rotary_factor", None)
    if not isinstance(found["rope_theta"], int | float):
        raise ValueError("the config names no base of the rotary positions (rope_parameters.rope_theta, or rope_theta); add it")
    return found


def rotary_frequencies(parameters: Mapping[str, Any], *, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] in float32 and the attention scaling, from a target's `rope_parameters`.

    Every type that transformers knows (default, linear, llama3, yarn, ...) goes through its own function.
    """
    parameters = rotary_settings({"rope_parameters": parameters})
    kind = parameters["rope_type"]
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / parameters["rope_theta"] ** exponent, 1.0
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields: dict[str, Any] = {
        "head_dim": head_dim, "hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": max_positions,
        "rope_parameters": dict(parameters),
    }  # fmt: skip
    config: Any = PreTrainedConfig(**fields)
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    return frequencies.float(), float(scaling)


def rotary_table(positions_BN: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """cos and sin, [B, N, D] float32, at the given positions."""
    angle_BNX = positions_BN[..., None].float() * frequencies
    angle_BND = torch.cat([angle_BNX, angle_BNX], dim=-1)
    return angle_BND.cos() * scaling, angle_BND.sin() * scaling


def rotate(x_XHD: Tensor, cos_XD: Tensor, sin_XD: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) with the two halves of a head as the pairs; cos and sin are the same for both halves.

    In the precision of x; under autocast in that of the table, since attention casts what it reads.
    """
    first, second = x_XHD.chunk(2, dim=-1)
    cos, sin = (table_XD.chunk(2, dim=-1)[0].unsqueeze(-2) for table_XD in (cos_XD, sin_XD))
    turned_XHD = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned_XHD if autocast(x_XHD) else turned_XHD.to(x_XHD.dtype)
