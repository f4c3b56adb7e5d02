"""Growing a draft tree with a model that can be extended node by node: a head, or a small language model.

A chain is the static tree with one path. `point_mass` takes the most likely tokens; `iid` and `without_replacement` draw them from
the drafter's law after every transform and keep that law as q.

Legend: B rows, N nodes of the draft (root included), X laws, W children, T = top_k, C candidates, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.sampling import draw_children
from spectrain.decoding.shapes import Chain, DynamicTree, StaticTree, keep_best
from spectrain.decoding.tree import DraftTree, ancestors, drop_nodes

Extend = Callable[[Tensor, Tensor], Tensor]


def grow(round: Round, root_B1: Tensor, logits_BV: Tensor, extend: Extend, target_ids: Tensor | None) -> DraftTree:
    """A draft below the root.

    logits_BV: after the root. extend(tokens_BN, parents_BN) -> logits [B, N, V] adds nodes below earlier nodes (0 is the root, the
    others in the order in which they were added). target_ids: the token of each draft id, None when they are the same.
    """
    ids = torch.arange(logits_BV.shape[-1], device=logits_BV.device) if target_ids is None else target_ids
    vocabulary = _Vocabulary(round, ids, known=target_ids is None)
    if isinstance(round.shape, DynamicTree):
        return _dynamic(round, round.shape, root_B1, logits_BV, extend, vocabulary)
    return _static(round, round.shape, root_B1, logits_BV, extend, vocabulary)


class _Vocabulary:
    """Draft logits in the form that tokens are chosen in: over the target's vocabulary where laws or processors need it."""

    def __init__(self, round: Round, target_ids: Tensor, *, known: bool) -> None:
        self._spread = round.needs_full_vocabulary and not known
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

    def __init__(self, round: Round, parents: list[int], root_B1: Tensor, vocabulary: _Vocabulary) -> None:
        B, N, device = len(root_B1), len(parents), root_B1.device
        self.round, self.vocabulary = round, vocabulary
        self.parents_BN = torch.tensor(parents, device=device).expand(B, N)
        self.ancestors_BNN = ancestors(self.parents_BN)
        self.tokens_BN = root_B1.repeat(1, N)
        depth_BN = self.ancestors_BNN.sum(-1) - 1
        self.keep_BN = depth_BN <= torch.tensor(round.limits(), device=device)[:, None]
        self.chance_BN = torch.ones(B, N, device=device)  # of the path to each node, by the drafter
        self.q_BNV: Tensor | None = None

    def choose(self, logits_BXV: Tensor, parents: list[int], width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [B, X, W] of the children of some nodes, whether each exists, and its chance where somebody asks for it."""
        at_X = torch.tensor(parents, device=logits_BXV.device)
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

    def place(self, nodes: list[int], column: list[int], rank: list[int], found: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """Write chosen tokens to their nodes: node i is the child of rank `rank[i]` below the parent in column `column[i]`."""
        tokens_BXW, alive_BXW, chance_BXW = found
        W = tokens_BXW.shape[-1]
        within_N = torch.tensor([r < W for r in rank], device=tokens_BXW.device)  # a small vocabulary has no further children
        rank = [min(r, W - 1) for r in rank]
        parents_BN = self.parents_BN[:, nodes]
        self.tokens_BN[:, nodes] = tokens_BXW[:, column, rank]
        self.keep_BN[:, nodes] &= alive_BXW[:, column, rank] & within_N & self.keep_BN.gather(1, parents_BN)
        if chance_BXW is not None:
            own_BN = chance_BXW[:, column, rank]
            self.chance_BN[:, nodes] = own_BN * self.chance_BN.gather(1, parents_BN)
            if self.round.stop_below > 0:  # below a token in doubt nothing is drafted; the token itself is kept
                below_BN = self.ancestors_BNN[:, :, nodes].float() @ (own_BN < self.round.stop_below).float()[..., None]
                own_N = torch.zeros_like(self.keep_BN[0]).index_fill(0, torch.tensor(nodes, device=own_BN.device), True)
                self.keep_BN &= (below_BN[..., 0] == 0) | own_N

    def tree(self, *, is_chain: bool) -> DraftTree:
        expected_B = (self.chance_BN * self.keep_BN).sum(-1) - 1 if self.round.estimate else None
        law, q_BNV = self.round.law, self.q_BNV
        if is_chain:
            return DraftTree(self.tokens_BN, self.parents_BN, self.keep_BN.sum(-1), law, q_BNV, is_chain=True, expected_B=expected_B)
        tokens_BN, parents_BN, num_B, kept_BN = drop_nodes(self.tokens_BN, self.parents_BN, self.keep_BN)
        if q_BNV is not None:
            q_BNV = q_BNV.gather(1, kept_BN[..., None].expand(-1, -1, q_BNV.shape[-1]))
        return DraftTree(tokens_BN, parents_BN, num_B, law, q_BNV, expected_B=expected_B)


def _layout(shape: Chain | StaticTree) -> tuple[list[int], list[int], list[list[int]]]:
    """Parents and ranks by node, and the nodes of each depth from 1 on."""
    if isinstance(shape, Chain):
        return list(range(-1, shape.depth)), [0] * (1 + shape.depth), [[n] for n in range(1, 1 + shape.depth)]
    return list(shape.parents), list(shape.ranks), [list(level) for level in shape.levels[1:]]


def _static(
    round: Round, shape: Chain | StaticTree, root_B1: Tensor, logits_BV: Tensor, extend: Extend, vocabulary: _Vocabulary
) -> DraftTree:
    """A tree whose form is known before: children are the ranks, or the draws, of their parent's law."""
    parents, ranks, levels = _layout(shape)
    draft = _Draft(round, parents, root_B1, vocabulary)
    added = {0: 0}  # node -> its number among the nodes that `extend` was given
    inner, logits_BXV = [0], logits_BV[:, None]
    for d, nodes in enumerate(levels):
        column = [inner.index(parents[n]) for n in nodes]
        rank = [ranks[n] for n in nodes]
        draft.place(nodes, column, rank, draft.choose(logits_BXV, inner, max(rank) + 1))
        if d + 1 == len(levels) or (round.stop_below > 0 and not bool(draft.keep_BN[:, levels[d + 1]].any())):
            break
        inner = sorted({parents[n] for n in levels[d + 1]})
        above_BN = torch.tensor([added[parents[n]] for n in inner], device=root_B1.device).expand(len(root_B1), -1)
        logits_BXV = extend(draft.tokens_BN[:, inner], above_BN)
        for n in inner:
            added[n] = len(added)
    return draft.tree(is_chain=shape.is_chain)


def _dynamic(
    round: Round, shape: DynamicTree, root_B1: Tensor, logits_BV: Tensor, extend: Extend, vocabulary: _Vocabulary
) -> DraftTree:
    """EAGLE-2's tree (arXiv 2406.16858): the best `top_k` children by joint log-probability are expanded at each level."""
    B, device = len(root_B1), root_B1.device
    added_BM, line_BMM = root_B1, torch.ones(B, 1, 1, dtype=torch.bool, device=device)  # nodes given to `extend`, and their ancestors

    def top(logits_BXV: Tensor, path_BXM: Tensor, T: int) -> tuple[Tensor, Tensor]:
        scores_BXV = round.scores(vocabulary.logits(logits_BXV), added_BM, path_BXM)
        chances_BXV = scores_BXV - scores_BXV.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(scores_BXV.dtype).min)
        best = chances_BXV.topk(T, dim=-1)  # -inf where nothing is allowed
        return best.values, vocabulary.tokens(best.indices)

    T = min(shape.top_k, logits_BV.shape[-1])
    values_BXT, tokens_BXT = top(logits_BV[:, None], line_BMM, T)
    scores, tokens = [values_BXT[:, 0]], [tokens_BXT[:, 0]]
    parents, depth_of = [torch.full_like(tokens[0], -1)], [torch.ones_like(tokens[0])]  # parent: candidate number, -1 root
    beam_BT = torch.arange(T, device=device).expand(B, T)  # candidate numbers to expand
    node_BT = torch.zeros_like(beam_BT)  # their parents among the added nodes
    count = T
    for depth in range(2, shape.depth + 1):
        first = added_BM.shape[1]
        beam_tokens_BT = torch.cat(tokens, dim=1).gather(1, beam_BT)
        beam_scores_BT = torch.cat(scores, dim=1).gather(1, beam_BT)
        logits_BTV = extend(beam_tokens_BT, node_BT)
        above_BTM = line_BMM.gather(1, node_BT[..., None].expand(B, T, first))
        path_BTM = torch.cat([above_BTM, torch.eye(T, dtype=torch.bool, device=device).expand(B, T, T)], dim=2)
        later_BMT = torch.zeros(B, first, T, dtype=torch.bool, device=device)
        added_BM = torch.cat([added_BM, beam_tokens_BT], dim=1)
        line_BMM = torch.cat([torch.cat([line_BMM, later_BMT], dim=2), path_BTM], dim=1)
        values_BTT, tokens_BTT = top(logits_BTV, path_BTM, T)
        joint_BC = (beam_scores_BT[..., None] + values_BTT).flatten(1)
        tokens.append(tokens_BTT.flatten(1))
        scores.append(joint_BC)
        parents.append(beam_BT[..., None].expand(B, T, T).flatten(1))
        depth_of.append(torch.full_like(parents[-1], depth))
        chosen_BT = joint_BC.topk(T, dim=-1).indices
        node_BT = first + chosen_BT // T
        beam_BT = count + chosen_BT
        count += T * T
    return _pruned(round, root_B1, *(torch.cat(part, dim=1) for part in (tokens, parents, scores, depth_of)), budget=shape.budget)


def _pruned(
    round: Round, root_B1: Tensor, tokens_BC: Tensor, parents_BC: Tensor, scores_BC: Tensor, depth_BC: Tensor, *, budget: int
) -> DraftTree:
    """The `budget` best candidates as a tree below the root."""
    kept_BN = keep_best(scores_BC, depth_BC, budget)
    node_BN = torch.arange(1, kept_BN.shape[1] + 1, device=kept_BN.device).expand_as(kept_BN)
    number_BC = torch.zeros_like(parents_BC).scatter(1, kept_BN, node_BN)
    parent_BN = parents_BC.gather(1, kept_BN)
    parent_BN = torch.where(parent_BN < 0, 0, number_BC.gather(1, parent_BN.clamp(min=0)))
    minus_B1 = torch.full_like(root_B1, -1)
    tokens_BN = torch.cat([root_B1, tokens_BC.gather(1, kept_BN)], dim=1)
    parents_BN = torch.cat([minus_B1, parent_BN], dim=1)
    score_BN = scores_BC.gather(1, kept_BN)
    keep_BN = torch.cat([torch.ones_like(root_B1, dtype=torch.bool), score_BN > float("-inf")], dim=1)
    if round.depth_B is not None:
        limit_B1 = torch.tensor(round.limits(), device=root_B1.device)[:, None]
        keep_BN[:, 1:] &= depth_BC.gather(1, kept_BN) <= limit_B1
    expected_B = (score_BN.exp() * keep_BN[:, 1:]).sum(-1) if round.estimate else None
    tokens_BN, parents_BN, num_B, _ = drop_nodes(tokens_BN, parents_BN, keep_BN)
    return DraftTree(tokens_BN, parents_BN, num_B, "point_mass", expected_B=expected_B)
