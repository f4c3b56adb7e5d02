"""Parts that heads share: norm, rotary positions, gated MLP. Names of the parameters are those of the published checkpoints.

Legend: B rows, N positions, H width, D head size.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale (arXiv 1910.07467), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
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
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_frequencies(parameters: Mapping[str, Any], *, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] in float32 and the attention scaling, from a target's `rope_parameters`.

    Every type that transformers knows (default, linear, llama3, yarn, ...) goes through its own function.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / parameters["rope_theta"] ** exponent, 1.0
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields: dict[str, Any] = {"head_dim": head_dim, "max_position_embeddings": max_positions, "rope_parameters": dict(parameters)}
    config: Any = PreTrainedConfig(**fields)
    config.hidden_size, config.num_attention_heads = head_dim, 1
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    return frequencies.float(), float(scaling)


def rotary_table(positions_BN: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """cos and sin, [B, N, D] float32, at the given positions."""
    angle_BNX = positions_BN[..., None].float() * frequencies
    angle_BND = torch.cat([angle_BNX, angle_BNX], dim=-1)
    return angle_BND.cos() * scaling, angle_BND.sin() * scaling


def rotate(x_BNHD: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) with the two halves of a head as the pairs."""
    first, second = x_BNHD.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_BNHD * cos_BND[:, :, None] + turned * sin_BND[:, :, None]).to(x_BNHD.dtype)
