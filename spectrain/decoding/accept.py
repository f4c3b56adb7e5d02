"""Which drafted tokens the target keeps, and its own token after them.

Both rules here draw the target's own choice at every node and follow it down the tree for as long as it was drafted ("sample and
match"). That is lossless for every tree fixed before the target's coins: the committed tokens are the target's own draws.

Legend: B rows, N nodes, V vocabulary, K longest path.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.sampling import Coins, draw
from spectrain.decoding.tree import DraftTree, check_tree


@dataclass(frozen=True)
class Accepted:
    """path_BK: accepted nodes from depth 1 on (-1 beyond the end); length_B: how many; next_B: the target's own token after them."""

    path_BK: Tensor
    length_B: Tensor
    next_B: Tensor


def accept(p_BNV: Tensor, tree: DraftTree, rule: str, coins: Coins | None) -> Accepted:
    """Verify a draft tree against the target's laws p (law of the token after each node), without a Python loop over rows.

    rule: `greedy` (p must be one-hot, any draft law) or `point_mass` (any draft law, lossless for trees fixed before the coins).
    coins: needed by `point_mass`. Raises ValueError for a rule that does not exist or does not fit.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
    if p_BNV.shape[:2] != tree.tokens_BN.shape:
        raise ValueError(f"p has {tuple(p_BNV.shape[:2])} rows and nodes, the tree has {tuple(tree.tokens_BN.shape)}")
    check_tree(tree)
    return follow(RULES[rule](p_BNV, coins), tree)


def choose_best(p_BNV: Tensor, coins: Coins | None) -> Tensor:
    """Rule `greedy`: the target's only choice; ValueError unless every law is one-hot."""
    best = p_BNV.max(-1)
    if not bool((best.values > 1 - 1e-6).all()):
        raise ValueError("rule 'greedy' needs temperature 0 (one-hot laws); use rule='point_mass' or 'auto' when sampling")
    return best.indices


def choose_drawn(p_BNV: Tensor, coins: Coins | None) -> Tensor:
    """Rule `point_mass`: a draw from p at every node with a coin of its own."""
    if coins is None:
        raise ValueError("rule 'point_mass' draws from the target's laws and needs coins")
    return draw(p_BNV, coins.uniform(p_BNV.shape[1], "choice"))


RULES: dict[str, Callable[[Tensor, Coins | None], Tensor]] = {"greedy": choose_best, "point_mass": choose_drawn}


def resolve_rule(rule: str, temperature: float) -> str:
    """The rule that `auto` stands for: greedy at temperature 0, else point mass."""
    if rule == "auto":
        return "greedy" if temperature == 0 else "point_mass"
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; choose one of auto, {', '.join(RULES)}")
    if rule == "greedy" and temperature > 0:
        raise ValueError(f"rule 'greedy' needs temperature 0, found {temperature}; use rule='auto'")
    return rule


def follow(choice_BN: Tensor, tree: DraftTree) -> Accepted:
    """Walk from the root: at each node go to the child that equals the choice, stop where there is none."""
    B, N = choice_BN.shape
    row_B = torch.arange(B, device=choice_BN.device)
    used_BN = torch.arange(N, device=choice_BN.device) < tree.num_B[:, None]
    node_B = torch.zeros(B, dtype=torch.long, device=choice_BN.device)
    length_B = torch.zeros_like(node_B)
    alive_B = torch.ones(B, dtype=torch.bool, device=choice_BN.device)
    path = []
    for _ in range(N - 1):
        wanted_B = choice_BN[row_B, node_B]
        match_BN = used_BN & (tree.parents_BN == node_B[:, None]) & (tree.tokens_BN == wanted_B[:, None])
        alive_B = alive_B & match_BN.any(-1)
        child_B = match_BN.int().argmax(-1)
        node_B = torch.where(alive_B, child_B, node_B)
        length_B = length_B + alive_B
        path.append(torch.where(alive_B, child_B, -1))
    path_BK = torch.stack(path, dim=1) if path else torch.empty(B, 0, dtype=torch.long, device=choice_BN.device)
    return Accepted(path_BK=path_BK, length_B=length_B, next_B=choice_BN[row_B, node_B])
