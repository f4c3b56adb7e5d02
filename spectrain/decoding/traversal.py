"""Traversal verification (arXiv 2505.12398): a tree is tested from its leaves up, whole paths at a time.

Each node on the way from the root to the node at hand has a weight a and its laws P and Q. Going down to a child c:
a_c = min(1, a P(c)/Q(c)). A node without children left is accepted, with its path and a last token of P, with chance a; otherwise its
parent gets r = (a P - Q)+, S = sum r, a = S / (S + 1 - a), P = r / S, and Q without the child (drawn without replacement) or
unchanged (iid). On a chain this is block verification.

Legend: B rows, R rows whose node was just refused (or all rows: `rows_where`), N nodes, D levels, V vocabulary.
"""

import torch
from torch import Tensor

from spectrain.decoding.rules import (
    Accepted,
    deepest,
    drawn_from,
    finished,
    last_token,
    next_child,
    normalised,
    path_to,
    residual,
    rows_where,
    token_chances,
    without,
)
from spectrain.decoding.sampling import RandomSource
from spectrain.decoding.tree import DraftTree, depths


class _Laws:
    """The laws of all nodes, of which those that lost a child are replaced; a replaced law lives until its level is replaced again."""

    def __init__(self, law_BNV: Tensor, tree: DraftTree, level_BN: Tensor) -> None:
        self._law_BNV, self._deepest = law_BNV, deepest(level_BN)
        self._inner_BN = level_BN.clamp(max=max(self._deepest - 1, 0))
        self._chance_BN = token_chances(law_BNV, tree)
        self._changed_BN = torch.zeros_like(level_BN, dtype=torch.bool)
        self._new_BDV: Tensor | None = None

    def chance(self, node_B: Tensor, child_B: Tensor, token_B: Tensor) -> Tensor:
        """Chance [B] of the child's token under its parent's present law."""
        chance_B = self._chance_BN.gather(1, child_B[:, None])[:, 0]
        if self._new_BDV is None:
            return chance_B
        row_B = torch.arange(len(node_B), device=node_B.device)
        new_B = self._new_BDV[row_B, self._inner_BN[row_B, node_B], token_B]
        return torch.where(self._changed_BN[row_B, node_B], new_B, chance_B)

    def at(self, row_R: Tensor, node_R: Tensor) -> Tensor:
        """Present laws [R, V]."""
        law_RV = normalised(self._law_BNV[row_R, node_R])
        if self._new_BDV is None:
            return law_RV
        return torch.where(self._changed_BN[row_R, node_R, None], self._new_BDV[row_R, self._inner_BN[row_R, node_R]], law_RV)

    def replace_(self, row_R: Tensor, node_R: Tensor, law_RV: Tensor, lost_R: Tensor) -> None:
        """Give nodes a new law where lost is True."""
        if self._new_BDV is None:
            B, _, V = self._law_BNV.shape
            self._new_BDV = law_RV.new_zeros(B, self._deepest + 1, V)  # the deepest level has no children to lose: its place takes the rest
        self._changed_BN[row_R, node_R] |= lost_R
        self._new_BDV[row_R, torch.where(lost_R, self._inner_BN[row_R, node_R], self._deepest)] = law_RV


def traversal(p_BNV: Tensor, tree: DraftTree, coins: RandomSource) -> Accepted:
    """Verify a tree of iid children or of children drawn without replacement, bottom up (arXiv 2505.12398, algorithm 1)."""
    level_BN = depths(tree.parents_BN)
    p, q = (_Laws(law_BNV, tree, level_BN) for law_BNV in (p_BNV, drawn_from(tree)))
    node_B = tried_B = torch.zeros_like(tree.num_B)
    weight_BN = torch.ones_like(tree.tokens_BN, dtype=torch.float64)
    active_B = torch.ones_like(node_B, dtype=torch.bool)
    for _ in range(2 * tree.width - 1):  # a row goes down to a node once, and tests it once, at most
        child_B, has_child_B = next_child(tree, node_B, tried_B)
        down_B, test_B = active_B & has_child_B, active_B & ~has_child_B
        refused_B = torch.zeros_like(test_B)
        if not finished(test_B):
            part_B1 = torch.where(test_B[:, None], weight_BN.gather(1, node_B[:, None]), 0.0)
            refused_B = test_B & ~coins.below(part_B1, torch.ones_like(part_B1), node_B[:, None], "accept")[:, 0]
            active_B = down_B | refused_B
            if finished(active_B):
                break
        if not finished(down_B):
            weight_BN = _descend(p, q, tree, node_B, child_B, weight_BN, down_B)
        if not finished(refused_B):
            weight_BN = _refuse(p, q, tree, node_B, weight_BN, refused_B)
        parent_B = tree.parents_BN.gather(1, node_B[:, None])[:, 0]
        tried_B = torch.where(down_B, child_B, torch.where(refused_B, node_B, tried_B))
        node_B = torch.where(down_B, child_B, torch.where(refused_B, parent_B, node_B))
    row_B = torch.arange(len(node_B), device=node_B.device)
    return path_to(tree, node_B, last_token(p.at(row_B, node_B), node_B, coins))


def _descend(p: _Laws, q: _Laws, tree: DraftTree, node_B: Tensor, child_B: Tensor, weight_BN: Tensor, down_B: Tensor) -> Tensor:
    """The weights with those of the children that rows go down to."""
    token_B = tree.tokens_BN.gather(1, child_B[:, None])[:, 0]
    ratio_B = p.chance(node_B, child_B, token_B) / q.chance(node_B, child_B, token_B)
    child_weight_B = (weight_BN.gather(1, node_B[:, None])[:, 0] * ratio_B).clamp(max=1)
    old_weight_B = weight_BN.gather(1, child_B[:, None])[:, 0]
    return weight_BN.scatter(1, child_B[:, None], torch.where(down_B, child_weight_B, old_weight_B)[:, None])


def _refuse(p: _Laws, q: _Laws, tree: DraftTree, node_B: Tensor, weight_BN: Tensor, refused_B: Tensor) -> Tensor:
    """Take the refused nodes out of their parents' laws; returns the weights with the parents' new ones."""
    row_R = rows_where(refused_B)
    node_R, lost_R = node_B[row_R], refused_B[row_R]
    parent_R = tree.parents_BN[row_R, node_R].clamp(min=0)
    a_R = weight_BN[row_R, parent_R]
    q_RV = q.at(row_R, parent_R)
    p_RV, mass_R = residual(p.at(row_R, parent_R), q_RV, a_R)
    p.replace_(row_R, parent_R, p_RV, lost_R)
    if tree.law == "without_replacement":
        q.replace_(row_R, parent_R, without(q_RV, tree.tokens_BN[row_R, node_R, None]), lost_R)
    # mass 0: nothing is left to give (a < 1), or p = q up to rounding under a weight of 1, which stays
    left_R = torch.where(mass_R > 0, mass_R / (mass_R + (1 - a_R)), (a_R >= 1).double())
    return weight_BN.index_put((row_R, parent_R), torch.where(lost_R, left_R, a_R))
