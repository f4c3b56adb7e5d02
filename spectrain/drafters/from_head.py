"""Any draft head as a drafter: chains, static and dynamic trees, through `begin` and `extend` alone.

The head's cache holds the rows of settled tokens made from the target's own states; drafts are staged behind them and dropped
when the next settled tokens arrive.

Legend: B rows, N nodes, V vocabulary of the head.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.shapes import trimmed
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.grow import grow
from spectrain.heads.base import DraftState, check_head
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target


@dataclass(frozen=True)
class HeadDrafter:
    """A head with the target's embeddings; refuses a target that the head was not trained for."""

    head: Any
    has_q: bool = True

    @property
    def max_depth(self) -> int | None:
        return self.head.max_depth  # type: ignore[no-any-return]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.head.layer_ids

    def start(self, target: Target, rows: int, max_length: int) -> "_HeadSession":
        """A session; ValueError for a head of another target or on another device."""
        check_head(self.head, target.fingerprints, target.name, target.tokenizer)
        (layers, kv_heads, head_dim), weight = self.head.cache_layers, next(self.head.parameters())
        device = weight.device
        if device.type != target.device.type:
            raise ValueError(f"the head is on {device}, {target.name} on {target.device}; load the head with device={str(target.device)!r}")
        # max_length counts every candidate of a draft, so settled tokens and the drafts staged behind them fit.
        cache = SlabCache(
            layers=layers, rows=rows, kv_heads=kv_heads, head_dim=head_dim, max_length=max_length,
            dtype=weight.dtype, device=target.device,
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

    def propose(self, round: Round) -> DraftTree | None:
        state, shape = self._state, trimmed(round.shape, depth=self._head.max_depth)  # a hybrid asks for what another part can draft
        if shape is None:
            return None

        def extend(tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
            nonlocal state
            assert state is not None
            logits_BNV, state = self._head.extend(state, tokens_BN, parents_BN, self._embed_VW, self._cache)
            return logits_BNV  # type: ignore[no-any-return]

        return grow(replace(round, shape=shape), round.root(self._logits_BV.device), self._logits_BV, extend, self._head.target_ids)
