"""Any draft head as a drafter: chains and dynamic trees through `begin` and `extend` alone.

The head's cache holds the rows of settled tokens made from the target's own states; drafts are staged behind them and dropped
when the next settled tokens arrive.

Legend: B rows, N nodes, C candidates, T = top_k, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.shapes import Chain, DynamicTree, Shape, keep_best
from spectrain.decoding.tree import DraftTree
from spectrain.heads.base import DraftState, check_head
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target


@dataclass(frozen=True)
class HeadDrafter:
    """A head with the target's embeddings; refuses a target that the head was not trained for."""

    head: Any

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.head.layer_ids

    def start(self, target: Target, rows: int, max_length: int) -> "_HeadSession":
        check_head(self.head, target.fingerprints, target.name)
        c, device = self.head.config, self.head.fc.weight.device
        if device.type != target.device.type:
            raise ValueError(f"the head is on {device}, {target.name} on {target.device}; load the head with device={str(target.device)!r}")
        cache = SlabCache(
            layers=1, rows=rows, kv_heads=c.num_key_value_heads, head_dim=c.head_dim, max_length=2 * max_length,
            dtype=self.head.fc.weight.dtype, device=target.device,
        )  # fmt: skip
        return _HeadSession(self.head, target.embedding_VW, cache)


class _HeadSession:
    def __init__(self, head: Any, embed_VW: Tensor, cache: SlabCache) -> None:
        self._head, self._embed_VW, self._cache = head, embed_VW, cache
        self._state: DraftState | None = None
        self._logits_BV = torch.empty(0)

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        assert states_BNF is not None
        self._logits_BV, self._state = self._head.begin(states_BNF, next_BN, count_B, self._embed_VW, self._cache, self._state)

    def select(self, rows_R: Tensor) -> None:
        assert self._state is not None
        self._cache.select(rows_R)
        self._logits_BV = self._logits_BV[rows_R]
        self._state = DraftState(self._state.hidden_BMH[rows_R], self._state.ancestors_BMM[rows_R])

    def rewind(self) -> None:
        """Drop the drafts, so that the same proposal can be made again (for timing)."""
        self._cache.discard()

    def propose(self, committed: Sequence[Sequence[int]], shape: Shape) -> DraftTree | None:
        root_B1 = torch.tensor([[ids[-1]] for ids in committed], device=self._logits_BV.device)
        return self._chain(root_B1, shape) if isinstance(shape, Chain) else self._dynamic(root_B1, shape)

    def _chain(self, root_B1: Tensor, shape: Chain) -> DraftTree:
        """The most likely token at each step."""
        state, logits_BV = self._state, self._logits_BV
        tokens = [root_B1]
        for depth in range(shape.depth):
            token_B1 = self._head.target_ids[logits_BV.argmax(-1)][:, None]
            tokens.append(token_B1)
            if depth + 1 < shape.depth:
                parent_B1 = torch.full_like(token_B1, depth)
                logits_B1V, state = self._head.extend(state, token_B1, parent_B1, self._embed_VW, self._cache)
                logits_BV = logits_B1V[:, 0]
        tokens_BN = torch.cat(tokens, dim=1)
        return DraftTree.chain(tokens_BN, torch.full((len(tokens_BN),), tokens_BN.shape[1], device=tokens_BN.device))

    def _dynamic(self, root_B1: Tensor, shape: DynamicTree) -> DraftTree:
        """EAGLE-2's tree: the best `top_k` children by joint log-probability are expanded at each level."""
        target_ids, state = self._head.target_ids, self._state
        T = min(shape.top_k, len(target_ids))
        best = self._logits_BV.float().log_softmax(-1).topk(T, dim=-1)
        tokens, scores = [target_ids[best.indices]], [best.values]
        parents, depth_of = [torch.full_like(best.indices, -1)], [torch.ones_like(best.indices)]  # parent: candidate number, -1 root
        beam_BT = torch.arange(T, device=root_B1.device).expand_as(best.indices)  # candidate numbers to expand
        node_BT = torch.zeros_like(beam_BT)  # their parents among the nodes of the state
        count = T
        for depth in range(2, shape.depth + 1):
            assert state is not None
            first = state.hidden_BMH.shape[1]
            beam_tokens_BT = torch.cat(tokens, dim=1).gather(1, beam_BT)
            beam_scores_BT = torch.cat(scores, dim=1).gather(1, beam_BT)
            logits_BTV, state = self._head.extend(state, beam_tokens_BT, node_BT, self._embed_VW, self._cache)
            best = logits_BTV.float().log_softmax(-1).topk(T, dim=-1)
            joint_BC = (beam_scores_BT[..., None] + best.values).flatten(1)
            tokens.append(target_ids[best.indices].flatten(1))
            scores.append(joint_BC)
            parents.append(beam_BT[..., None].expand_as(best.indices).flatten(1))
            depth_of.append(torch.full_like(parents[-1], depth))
            chosen_BT = joint_BC.topk(T, dim=-1).indices
            node_BT = first + chosen_BT // T
            beam_BT = count + chosen_BT
            count += T * T
        return _pruned(root_B1, *(torch.cat(part, dim=1) for part in (tokens, parents, scores, depth_of)), budget=shape.budget)


def _pruned(root_B1: Tensor, tokens_BC: Tensor, parents_BC: Tensor, scores_BC: Tensor, depth_BC: Tensor, *, budget: int) -> DraftTree:
    """The `budget` best candidates as a tree below the root."""
    kept_BN = keep_best(scores_BC, depth_BC, budget)
    node_BN = torch.arange(1, kept_BN.shape[1] + 1, device=kept_BN.device).expand_as(kept_BN)
    number_BC = torch.zeros_like(parents_BC).scatter(1, kept_BN, node_BN)
    parent_BN = parents_BC.gather(1, kept_BN)
    parent_BN = torch.where(parent_BN < 0, 0, number_BC.gather(1, parent_BN.clamp(min=0)))
    minus_B1 = torch.full_like(root_B1, -1)
    tokens_BN = torch.cat([root_B1, tokens_BC.gather(1, kept_BN)], dim=1)
    num_B = torch.full((len(root_B1),), tokens_BN.shape[1], device=root_B1.device)
    return DraftTree(tokens_BN, torch.cat([minus_B1, parent_BN], dim=1), num_B, "point_mass")
