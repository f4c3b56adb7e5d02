"""Growing a draft tree with a model that can be extended node by node: a head, or a small language model.

A chain is the static tree with one path. `point_mass` takes the most likely tokens; `iid` and `without_replacement` draw them from
the drafter's law after every transform and keep that law as q.

Everything stays on the device. What a form of drafts is made of is brought there once (`Layout`): a copy from the host in the middle of a
draft would wait for all that the device was given before.

Legend: B rows, N nodes of the draft (root included), X laws, W children, Y nodes of one level, T = top_k, C candidates, V vocabulary,
Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.sampling import draw_children
from spectrain.decoding.shapes import Chain, DynamicTree, Shape, StaticTree, keep_best
from spectrain.decoding.tree import DraftTree, ancestors, drop_nodes, extended

Extend = Callable[[Tensor, Tensor], Tensor]


def grow(
    round: Round, root_B1: Tensor, logits_BV: Tensor, extend: Extend, target_ids: Tensor | None, layouts: "Layouts | None" = None
) -> DraftTree:
    """A draft below the root.

    logits_BV: after the root. extend(tokens_BN, parents_BN) -> logits [B, N, V] adds nodes below earlier nodes (0 is the root, the
    others in the order in which they were added), at each call those of one depth, from 1 on. target_ids: the token of each draft id,
    None when they are the same. layouts: what earlier rounds on this device left behind.
    """
    ids = torch.arange(logits_BV.shape[-1], device=logits_BV.device) if target_ids is None else target_ids
    vocabulary = _Vocabulary(round, ids, same_ids=target_ids is None)
    if isinstance(round.shape, DynamicTree):
        return _dynamic(round, round.shape, root_B1, logits_BV, extend, vocabulary)
    layouts = {} if layouts is None else layouts
    if round.shape not in layouts:
        layouts[round.shape] = _layout(round.shape, root_B1.device)
    return _static(round, layouts[round.shape], root_B1, logits_BV, extend, vocabulary)


def _limits(round: Round, device: torch.device) -> Tensor:
    """Most drafts on a path [B, 1], by row; a device that already drafts is not waited for."""
    return torch.tensor(round.limits()).to(device, non_blocking=True)[:, None]


class _Vocabulary:
    """Draft logits in the form that tokens are chosen in: over the target's vocabulary where laws or processors need it.

    same_ids: the logits are over the target's ids already.
    """

    def __init__(self, round: Round, target_ids: Tensor, *, same_ids: bool) -> None:
        self._spread = round.needs_full_vocabulary and not same_ids
        self._target_ids, self._size = target_ids, round.vocab_size or len(target_ids)

    def logits(self, logits_BXV: Tensor) -> Tensor:
        logits_BXV = logits_BXV.float()
        if not self._spread:
            return logits_BXV
        full_BXV = logits_BXV.new_full((*logits_BXV.shape[:-1], self._size), float("-inf"))
        return full_BXV.index_copy(-1, self._target_ids, logits_BXV)

    def tokens(self, index: Tensor) -> Tensor:
        return index if self._spread else self._target_ids[index]


class _Draft:
    """The draft under construction; node numbers are those of the shape."""

    def __init__(self, round: Round, layout: "Layout", root_B1: Tensor, vocabulary: _Vocabulary) -> None:
        B, N, device = len(root_B1), len(layout.parents_N), root_B1.device
        self.round, self.vocabulary = round, vocabulary
        self.parents_BN = layout.parents_N.expand(B, N)
        self.ancestors_BNN = layout.ancestors_NN.expand(B, N, N)
        self.tokens_BN = root_B1.repeat(1, N)
        self.keep_BN = torch.ones(B, N, dtype=torch.bool, device=device)
        if round.depth_B is not None:
            depth_N = layout.ancestors_NN.sum(-1) - 1
            self.keep_BN = depth_N <= _limits(round, device)
        self.chance_BN = torch.ones(B, N, device=device)  # of the path to each node, by the drafter
        self.q_BNV: Tensor | None = None

    def choose(self, logits_BXV: Tensor, at_X: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [B, X, W] of the children of some nodes, whether each exists, and its chance where somebody asks for it."""
        logits_BXV = self.vocabulary.logits(logits_BXV)
        path_BXN = self.ancestors_BNN[:, at_X]
        wants_chance = self.round.estimate or self.round.stop_below > 0
        if self.round.law == "point_mass":
            scores_BXV = self.round.scores(logits_BXV, self.tokens_BN, path_BXN)
            best = scores_BXV.topk(min(width, scores_BXV.shape[-1]), dim=-1)
            chance_BXW = (best.values - scores_BXV.logsumexp(-1, keepdim=True)).exp() if wants_chance else None
            return self.vocabulary.tokens(best.indices), best.values > float("-inf"), chance_BXW
        assert self.round.coins is not None
        q_BXV = self.round.laws(logits_BXV, self.tokens_BN, path_BXN)
        if self.q_BNV is None:
            self.q_BNV = q_BXV.new_zeros(*self.tokens_BN.shape, q_BXV.shape[-1])
        self.q_BNV[:, at_X] = q_BXV
        tokens_BXW, alive_BXW = draw_children(q_BXV, at_X.expand(len(q_BXV), -1), width, self.round.law, self.round.coins)
        return tokens_BXW, alive_BXW, q_BXV.gather(-1, tokens_BXW) if wants_chance else None

    def place(self, level: "Level", tokens_BXW: Tensor, alive_BXW: Tensor, chance_BXW: Tensor | None) -> None:
        """Write what `choose` found to the nodes of a level."""
        W = tokens_BXW.shape[-1]
        nodes_Y, column_Y, rank_Y = level.nodes_Y, level.column_Y, level.rank_Y.clamp(max=W - 1)
        parents_BY = self.parents_BN[:, nodes_Y]
        self.tokens_BN[:, nodes_Y] = tokens_BXW[:, column_Y, rank_Y]
        within_Y = level.rank_Y < W  # a small vocabulary has no further children
        self.keep_BN[:, nodes_Y] &= alive_BXW[:, column_Y, rank_Y] & within_Y & self.keep_BN.gather(1, parents_BY)
        if chance_BXW is not None:
            own_BY = chance_BXW[:, column_Y, rank_Y]
            self.chance_BN[:, nodes_Y] = own_BY * self.chance_BN.gather(1, parents_BY)
            if self.round.stop_below > 0:  # below a token in doubt nothing is drafted; the token itself is kept
                below_BN = self.ancestors_BNN[:, :, nodes_Y].float() @ (own_BY < self.round.stop_below).float()[..., None]
                own_N = torch.zeros_like(self.keep_BN[0]).index_fill(0, nodes_Y, True)
                self.keep_BN &= (below_BN[..., 0] == 0) | own_N

    def tree(self, *, is_chain: bool) -> DraftTree:
        expected_B = (self.chance_BN * self.keep_BN).sum(-1) - 1 if self.round.estimate else None
        law, q_BNV = self.round.law, self.q_BNV
        if is_chain:  # `keep` falls along each path (`place`), so that a chain's kept nodes are its first ones
            return DraftTree(self.tokens_BN, self.parents_BN, self.keep_BN.sum(-1), law, q_BNV, is_chain=True, expected_B=expected_B)
        tokens_BN, parents_BN, num_B, kept_BN = drop_nodes(self.tokens_BN, self.parents_BN, self.keep_BN)
        if q_BNV is not None:
            q_BNV = q_BNV.gather(1, kept_BN[..., None].expand(-1, -1, q_BNV.shape[-1]))
        return DraftTree(tokens_BN, parents_BN, num_B, law, q_BNV, expected_B=expected_B)


class Level(NamedTuple):
    """The nodes of one depth. column_Y: place of each node's parent among those that the level above expands; rank_Y: of the node below
    its parent; width: the largest rank + 1. inner_X: nodes that are expanded next; above_X: their parents' numbers among added nodes."""

    nodes_Y: Tensor
    column_Y: Tensor
    rank_Y: Tensor
    width: int
    inner_X: Tensor
    above_X: Tensor


class Layout(NamedTuple):
    """A form known before drafting, on the device: parents and ancestors by node, and the levels from depth 1 on."""

    parents_N: Tensor
    ancestors_NN: Tensor
    levels: list[Level]
    is_chain: bool


Layouts = dict[Shape, Layout]


def _layout(shape: Chain | StaticTree, device: torch.device) -> Layout:
    """The layout of a shape."""
    if isinstance(shape, StaticTree):
        parents, ranks, depths = list(shape.parents), list(shape.ranks), [list(level) for level in shape.levels[1:]]
    else:
        parents, ranks = list(range(-1, shape.depth)), [-1] + [0] * shape.depth
        depths = [[n] for n in range(1, 1 + shape.depth)]
    added = {0: 0}  # node -> its number among the nodes that `extend` was given
    inner, levels = [0], []
    for d, nodes in enumerate(depths):
        column, rank = [inner.index(parents[n]) for n in nodes], [ranks[n] for n in nodes]
        inner = sorted({parents[n] for n in depths[d + 1]}) if d + 1 < len(depths) else []
        above = [added[parents[n]] for n in inner]
        added |= {n: len(added) + i for i, n in enumerate(inner)}
        on_device = (torch.tensor(numbers, dtype=torch.long, device=device) for numbers in (nodes, column, rank, inner, above))
        nodes_Y, column_Y, rank_Y, inner_X, above_X = on_device
        levels.append(Level(nodes_Y, column_Y, rank_Y, max(rank) + 1, inner_X, above_X))
    parents_N = torch.tensor(parents, device=device)
    return Layout(parents_N, ancestors(parents_N[None])[0], levels, shape.is_chain)


def _static(round: Round, layout: Layout, root_B1: Tensor, logits_BV: Tensor, extend: Extend, vocabulary: _Vocabulary) -> DraftTree:
    """A tree whose form is known before: children are the ranks, or the draws, of their parent's law."""
    draft = _Draft(round, layout, root_B1, vocabulary)
    inner_X, logits_BXV = torch.zeros_like(layout.parents_N[:1]), logits_BV[:, None]
    for level, below in zip_longest(layout.levels, layout.levels[1:]):
        draft.place(level, *draft.choose(logits_BXV, inner_X, level.width))
        # Only a policy that ends drafts in doubt makes the host wait: it saves the passes that would follow.
        if below is None or (round.stop_below > 0 and not bool(draft.keep_BN[:, below.nodes_Y].any())):
            break
        inner_X = level.inner_X
        logits_BXV = extend(draft.tokens_BN[:, inner_X], level.above_X.expand(len(root_B1), -1))
    return draft.tree(is_chain=layout.is_chain)


@dataclass(frozen=True)
class _Candidates:
    """Nodes that a dynamic tree may keep, level by level. parents: numbers of candidates, -1 for the root; scores: joint
    log-probabilities."""

    tokens_BC: Tensor
    parents_BC: Tensor
    scores_BC: Tensor
    depth_BC: Tensor

    def add(self, tokens_BX: Tensor, parents_BX: Tensor, scores_BX: Tensor) -> "_Candidates":
        """These and the next level's."""
        depth_BX = self.depth_BC[:, -1:].expand_as(parents_BX) + 1
        mine = (self.tokens_BC, self.parents_BC, self.scores_BC, self.depth_BC)
        new = (tokens_BX, parents_BX, scores_BX, depth_BX)
        return _Candidates(*(torch.cat(pair, dim=1) for pair in zip(mine, new, strict=True)))


def _dynamic(round: Round, shape: DynamicTree, root_B1: Tensor, logits_BV: Tensor, extend: Extend, vocabulary: _Vocabulary) -> DraftTree:
    """EAGLE-2's tree (arXiv 2406.16858): the best `top_k` children by joint log-probability are expanded at each level."""
    B, T = len(root_B1), min(shape.top_k, logits_BV.shape[-1])
    added_BM, line_BMM = root_B1, ancestors(torch.full_like(root_B1, -1))  # nodes given to `extend`, and their ancestors

    def top(logits_BXV: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and token of the best T children of each of the nodes added last."""
        scores_BXV = round.scores(vocabulary.logits(logits_BXV), added_BM, line_BMM[:, -logits_BXV.shape[1] :])
        chances_BXV = scores_BXV - scores_BXV.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(scores_BXV.dtype).min)
        best = chances_BXV.topk(T, dim=-1)  # -inf where nothing is allowed
        return best.values, vocabulary.tokens(best.indices)

    values_BXT, tokens_BXT = top(logits_BV[:, None])
    root_BT = torch.full_like(tokens_BXT[:, 0], -1)
    found = _Candidates(tokens_BXT[:, 0], root_BT, values_BXT[:, 0], torch.ones_like(root_BT))
    beam_BT = torch.arange(T, device=root_B1.device).expand(B, T)  # candidates to expand
    above_BT = torch.zeros_like(beam_BT)  # their parents among the added nodes
    for _ in range(1, shape.depth):
        known, first = found.tokens_BC.shape[1], added_BM.shape[1]
        beam_tokens_BT = found.tokens_BC.gather(1, beam_BT)
        logits_BTV = extend(beam_tokens_BT, above_BT)
        added_BM, line_BMM = torch.cat([added_BM, beam_tokens_BT], dim=1), extended(line_BMM, above_BT)
        values_BTT, tokens_BTT = top(logits_BTV)
        joint_BX = (found.scores_BC.gather(1, beam_BT)[..., None] + values_BTT).flatten(1)
        found = found.add(tokens_BTT.flatten(1), beam_BT.repeat_interleave(T, dim=1), joint_BX)
        chosen_BT = joint_BX.topk(T, dim=-1).indices
        beam_BT, above_BT = known + chosen_BT, first + chosen_BT // T
    return _pruned(round, root_B1, found, budget=shape.budget)


def _pruned(round: Round, root_B1: Tensor, found: _Candidates, *, budget: int) -> DraftTree:
    """The `budget` best candidates as a tree below the root."""
    kept_BN = keep_best(found.scores_BC, found.depth_BC, budget)
    node_BN = torch.arange(1, kept_BN.shape[1] + 1, device=kept_BN.device).expand_as(kept_BN)
    number_BC = torch.zeros_like(found.parents_BC).scatter(1, kept_BN, node_BN)
    parent_BN = found.parents_BC.gather(1, kept_BN)
    parent_BN = torch.where(parent_BN < 0, 0, number_BC.gather(1, parent_BN.clamp(min=0)))
    minus_B1 = torch.full_like(root_B1, -1)
    tokens_BN = torch.cat([root_B1, found.tokens_BC.gather(1, kept_BN)], dim=1)
    parents_BN = torch.cat([minus_B1, parent_BN], dim=1)
    score_BN = found.scores_BC.gather(1, kept_BN)
    keep_BN = torch.cat([torch.ones_like(root_B1, dtype=torch.bool), score_BN > float("-inf")], dim=1)
    if round.depth_B is not None:
        keep_BN[:, 1:] &= found.depth_BC.gather(1, kept_BN) <= _limits(round, root_B1.device)
    expected_B = (score_BN.exp() * keep_BN[:, 1:]).sum(-1) if round.estimate else None
    tokens_BN, parents_BN, num_B, _ = drop_nodes(tokens_BN, parents_BN, keep_BN)
    return DraftTree(tokens_BN, parents_BN, num_B, "point_mass", expected_B=expected_B)
