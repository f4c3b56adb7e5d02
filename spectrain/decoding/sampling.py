"""From logits to the law of the next token, the same for target and draft, and keyed random numbers.

Legend: B rows, N nodes, X chosen nodes, W children of a node, V vocabulary.
"""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor

from spectrain.decoding.tree import Law
from spectrain.kernels.divergence import chosen

ROLES = {"choice": 1, "draft": 2, "accept": 3, "residual": 4}
LARGEST = 1e30  # float32 ends at 3e38; a setting beyond it turns a logit of -inf into NaN


@dataclass(frozen=True)
class Sampling:
    """Transforms of the logits, applied in this order: temperature, top-k, top-p, min-p.

    Raises ValueError for a field of another type or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, sound, needed in (
            ("temperature", is_real(self.temperature) and 0 <= self.temperature <= LARGEST, f"a number from 0 (greedy) to {LARGEST:g}"),
            ("top_k", is_whole(self.top_k), "a whole number from 0 (all tokens)"),
            ("top_p", is_real(self.top_p) and 0 < self.top_p <= 1, "a number above 0, up to 1 (all tokens)"),
            ("min_p", is_real(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 (all tokens) to 1"),
        ):
            if not sound:
                raise ValueError(f"{name} is out of range: found {getattr(self, name)!r}, needed {needed}")


def is_real(number: Any) -> bool:
    """Whether a setting is a number; True and False are none."""
    return isinstance(number, Real) and not isinstance(number, bool)


def is_whole(number: Any) -> bool:
    """Whether a setting is a whole number from 0 that int64 holds; True, False and 2.0 are none."""
    return isinstance(number, Integral) and not isinstance(number, bool) and 0 <= int(number) < 2**63


def probabilities(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """The law p_BNV (float32) after every transform; at temperature 0 a one-hot law on the best token."""
    if sampling.temperature == 0:
        best_BN1 = logits_BNV.max(-1, keepdim=True).indices  # three times as fast as argmax on a CPU
        return torch.zeros_like(logits_BNV, dtype=torch.float32).scatter_(-1, best_BN1, 1.0)
    x_BNV = logits_BNV.float() / max(sampling.temperature, 1e-30)  # below that float32 overflows; the law is one-hot long before
    if 0 < sampling.top_k < x_BNV.shape[-1]:
        kth_BN1 = x_BNV.topk(sampling.top_k, dim=-1).values[..., -1:]
        x_BNV = x_BNV.masked_fill(x_BNV < kth_BN1, float("-inf"))
    p_BNV = x_BNV.softmax(-1)
    if sampling.top_p < 1:
        p_BNV = p_BNV.masked_fill(p_BNV < nucleus_floor(p_BNV, sampling.top_p), 0.0)
    if sampling.min_p > 0:
        p_BNV = p_BNV.masked_fill(p_BNV < sampling.min_p * p_BNV.amax(-1, keepdim=True), 0.0)
    return p_BNV / p_BNV.sum(-1, keepdim=True)


def readable(numbers: Tensor) -> bool:
    """Whether the host may look at numbers: those on a device it would have to wait for."""
    return numbers.device.type == "cpu"


def nucleus_floor(p_BNV: Tensor, top_p: float) -> Tensor:
    """The smallest probability in the nucleus of each law [B, N, 1] (arXiv 1904.09751): the likeliest tokens up to the one that
    crosses top_p. Tokens of that very probability are all in.

    Sorting a whole vocabulary costs as much as a pass of a small model; mostly its 1024 likeliest tokens hold the nucleus.
    """
    few = p_BNV.shape[-1] > 1024 and readable(p_BNV)
    sorted_BNK = p_BNV.topk(1024, dim=-1).values if few else p_BNV
    if not few or not bool((sorted_BNK.sum(-1) >= top_p).all()):
        sorted_BNK = p_BNV.sort(dim=-1, descending=True).values
    inside_BNK = sorted_BNK.cumsum(-1) - sorted_BNK < top_p
    return sorted_BNK.masked_fill(~inside_BNK, 1.0).amin(-1, keepdim=True)


def draw(p_BNV: Tensor, u_BN: Tensor) -> Tensor:
    """Inverse-CDF draw of one token a node: the smallest id whose cumulative probability exceeds u; [B, N] int64.

    p need not sum to 1. The cumulative sums are float64 and u is scaled by their total, so that a token of probability 0 is never
    drawn.
    """
    if chosen("auto", p_BNV.device) == "triton":
        from spectrain.kernels import draw_triton

        return draw_triton.draw(p_BNV, u_BN)
    cumulative_BNV = p_BNV.double().cumsum(-1)
    goal_BN = u_BN.double() * cumulative_BNV[..., -1]  # for u <= 1 - 2^-53 below the total, rounding included
    token_BN = torch.searchsorted(cumulative_BNV, goal_BN[..., None], right=True)[..., 0]
    return token_BN.clamp(max=p_BNV.shape[-1] - 1)  # beyond the end only for a law without any mass


class RandomSource(Protocol):
    """All that drawing and verification ask of random numbers; each key (node, role, number of the draw) names one number of a row's
    round."""

    def below(self, part_BX: Tensor, whole_BX: Tensor, node_BX: Tensor, role: str, number: int = 0) -> Tensor:
        """True with chance part / whole (at most 1), boolean [B, X]."""

    def pick(self, p_BXV: Tensor, node_BX: Tensor, role: str, number: int = 0) -> Tensor:
        """A token of each law, int64 [B, X]; p need not sum to 1."""


@dataclass(frozen=True)
class Coins:
    """Random numbers keyed by (row seed, committed length at the start of the round, node, role, draw number).

    A coin is never used twice: a round that starts later has another key even at the same position.
    seed_B, length_B: int64. Roles: `choice` (the target's own draw at a node), `draft` (the children of a node), `accept` (the test
    of a child, keyed by the child), `residual` (the last token of a round, keyed by the node where it stands).
    """

    seed_B: Tensor
    length_B: Tensor

    def uniform(self, nodes: int | Tensor, role: str, number: int = 0) -> Tensor:
        """Independent numbers in [0, 1), float64: [B, nodes] for the first nodes, [B, X] for node numbers node_BX."""
        node_BX = torch.arange(nodes, device=self.seed_B.device) if isinstance(nodes, int) else nodes
        if chosen("auto", node_BX.device) == "triton":
            from spectrain.kernels import draw_triton

            return draw_triton.uniform(self.seed_B, self.length_B, node_BX, ROLES[role], number)
        key_BX = mix(mix(self.seed_B) + self.length_B)[:, None] + node_BX
        bits_BX = mix(mix(mix(key_BX) + ROLES[role]) + number)
        return ((bits_BX >> 11) & ((1 << 53) - 1)).double() * 2.0**-53

    def below(self, part_BX: Tensor, whole_BX: Tensor, node_BX: Tensor, role: str, number: int = 0) -> Tensor:
        """Whether u * whole < part, boolean [B, X]: strict, so that a part of 0 never passes, whatever the coin."""
        return self.uniform(node_BX, role, number) * whole_BX < part_BX

    def pick(self, p_BXV: Tensor, node_BX: Tensor, role: str, number: int = 0) -> Tensor:
        """A token of each law by its inverse CDF, int64 [B, X]."""
        return draw(p_BXV, self.uniform(node_BX, role, number))


def draw_children(q_BXV: Tensor, node_BX: Tensor, width: int, law: Law, coins: RandomSource) -> tuple[Tensor, Tensor]:
    """Draw `width` children of each node from the draft's laws q; child k takes draw number k of its node.

    law: `iid` (children may repeat) or `without_replacement` (drawn ids masked, the rest renormalised). Returns tokens_BXW in draw
    order and alive_BXW, False where q had nothing left to draw from: such a child must not enter the tree.
    Raises ValueError for point masses, which are chosen and not drawn.
    """
    if law == "point_mass":
        raise ValueError("law 'point_mass' draws no children: choose tokens, or draw with law 'iid' or 'without_replacement'")
    tokens, alive = [], []
    for k in range(width):
        token_BX = coins.pick(q_BXV, node_BX, "draft", number=k)
        tokens.append(token_BX)
        alive.append(q_BXV.gather(-1, token_BX[..., None])[..., 0] > 0)
        if law == "without_replacement" and k + 1 < width:
            q_BXV = q_BXV.scatter(-1, token_BX[..., None], 0.0)
    return torch.stack(tokens, dim=-1), torch.stack(alive, dim=-1)


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
