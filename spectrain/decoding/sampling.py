"""From logits to the law of the next token, the same for target and draft, and keyed random numbers.

Legend: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROLES = {"choice": 1, "draft": 2, "accept": 3, "residual": 4}


@dataclass(frozen=True)
class Sampling:
    """Transforms of the logits, applied in this order: temperature, top-k, top-p, min-p. Raises ValueError out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            needed = "temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1"
            raise ValueError(f"sampling settings out of range: {self}; needed {needed}")


def probabilities(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """The law p_BNV (float32) after every transform; at temperature 0 a one-hot law on the best token."""
    if sampling.temperature == 0:
        best_BN1 = logits_BNV.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_BNV, dtype=torch.float32).scatter_(-1, best_BN1, 1.0)
    x_BNV = logits_BNV.float() / max(sampling.temperature, 1e-30)  # below that float32 overflows; the law is one-hot long before
    if 0 < sampling.top_k < x_BNV.shape[-1]:
        kth_BN1 = x_BNV.topk(sampling.top_k, dim=-1).values[..., -1:]
        x_BNV = x_BNV.masked_fill(x_BNV < kth_BN1, float("-inf"))
    p_BNV = x_BNV.softmax(-1)
    if sampling.top_p < 1:
        sorted_BNV, order_BNV = p_BNV.sort(dim=-1, descending=True)
        before_BNV = sorted_BNV.cumsum(-1) - sorted_BNV  # the token that crosses top_p stays in
        drop_BNV = torch.zeros_like(p_BNV, dtype=torch.bool).scatter_(-1, order_BNV, before_BNV >= sampling.top_p)
        p_BNV = p_BNV.masked_fill(drop_BNV, 0.0)
    if sampling.min_p > 0:
        p_BNV = p_BNV.masked_fill(p_BNV < sampling.min_p * p_BNV.amax(-1, keepdim=True), 0.0)
    return p_BNV / p_BNV.sum(-1, keepdim=True)


def draw(p_BNV: Tensor, u_BN: Tensor) -> Tensor:
    """Inverse-CDF draw of one token a node: the smallest id whose cumulative probability exceeds u; [B, N] int64.

    The cumulative sums are float64 and u is scaled by their total, so that a token of probability 0 is never drawn.
    """
    cumulative_BNV = p_BNV.double().cumsum(-1)
    goal_BN1 = (u_BN.double() * cumulative_BNV[..., -1])[..., None]
    token_BN = torch.searchsorted(cumulative_BNV, goal_BN1, right=True)[..., 0]
    last_BN = (p_BNV > 0).long().cumsum(-1).argmax(-1)  # guard of rounding at the upper end
    return torch.minimum(token_BN, last_BN)


@dataclass(frozen=True)
class Coins:
    """Random numbers keyed by (row seed, committed length at the start of the round, node, role, draw number).

    A coin is never used twice: a round that starts later has another key even at the same position.
    seed_B, length_B: int64.
    """

    seed_B: Tensor
    length_B: Tensor

    def uniform(self, nodes: int, role: str, draw: int = 0) -> Tensor:
        """Independent numbers in [0, 1), float64 [B, nodes]."""
        node_N = torch.arange(nodes, device=self.seed_B.device)
        key_BN = mix(mix(self.seed_B) + self.length_B)[:, None] + node_N
        bits_BN = mix(mix(mix(key_BN) + ROLES[role]) + draw)
        return ((bits_BN >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) after its increment, on int64 with wrap-around."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def row_seed(seed: int, row: int) -> int:
    """Seed of row `row` for an int seed: the seed itself for row 0, an independent one for every other row."""
    if row == 0:
        return seed
    return int(mix(mix(torch.tensor(seed)) + row))
