"""Any draft head as a drafter: chains, static and dynamic trees, through `begin` and `extend` alone.

The head's cache holds the rows of settled tokens made from the target's own states; drafts are staged behind them and dropped
when the next settled tokens are read. These wait until a draft is asked for: rounds without one do not pay for the head.

Legend: B rows, N nodes, M settled tokens of several rounds, F width of the states read, V vocabulary of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.shapes import trimmed
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.grow import grow
from spectrain.heads.base import DraftState, check_head
from spectrain.target.cache import SlabCache
from spectrain.target.lean import is_packed, kept
from spectrain.target.model import Target

LATER = 16  # settled tokens that may wait
Settled = tuple[Tensor, Tensor, Tensor]  # states [B, N, F], the tokens after them [B, N], how many of them count [B]


@dataclass(frozen=True)
class HeadDrafter:
    """A head with the target's embeddings; refuses a target that the head was not trained for. Its products are made as the target's."""

    head: Any
    has_q: bool = True

    @cached_property
    def copies(self) -> dict[str, Any]:
        """The packed copy of the head, and of which state of it (target/lean.py)."""
        return {}

    def __getstate__(self) -> dict[str, Any]:  # packed weights can be neither copied nor stored
        return {name: value for name, value in self.__dict__.items() if name != "copies"}

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
        # max_length counts every candidate of a draft, so settled tokens and the drafts staged behind them fit; rows wait unevenly.
        cache = SlabCache(
            layers=layers, rows=rows, kv_heads=kv_heads, head_dim=head_dim, max_length=max_length + LATER,
            dtype=weight.dtype, device=target.device,
        )  # fmt: skip
        packed = is_packed(target.model) and weight.dtype == torch.float32
        return _HeadSession(kept(self.head, self.copies) if packed else self.head, target.embedding_VW, cache)


class _HeadSession:
    def __init__(self, head: Any, embed_VW: Tensor, cache: SlabCache) -> None:
        self._head, self._embed_VW, self._cache = head, embed_VW, cache
        self._state: DraftState | None = None
        self._logits_BV = torch.empty(0)
        self._waiting: list[Settled] = []

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        assert states_BNF is not None
        if sum(later_BN.shape[1] for _, later_BN, _ in self._waiting) + next_BN.shape[1] > LATER:
            self._settle()
        self._waiting.append((states_BNF, next_BN, count_B))
        if next_BN.shape[1] > LATER:
            self._settle()

    def _settle(self) -> None:
        """Let the head read what waits."""
        if self._waiting:
            settled, self._waiting = joined(self._waiting), []
            self._logits_BV, self._state = self._head.begin(*settled, self._embed_VW, self._cache, self._state)

    def select(self, rows_R: Tensor) -> None:
        self._cache.select(rows_R)
        self._waiting = [(states_BNF[rows_R], next_BN[rows_R], count_B[rows_R]) for states_BNF, next_BN, count_B in self._waiting]
        if self._state is not None:
            self._logits_BV = self._logits_BV[rows_R]
            self._state = DraftState(self._state.hidden_BMH[rows_R], self._state.ancestors_BMM[rows_R])

    def rewind(self) -> None:
        """Drop the drafts, so that the same proposal can be made again (for timing)."""
        self._cache.discard()

    def propose(self, round: Round) -> DraftTree | None:
        self._settle()
        state, shape = self._state, trimmed(round.shape, depth=self._head.max_depth)  # a hybrid asks for what another part can draft
        if shape is None:
            return None

        def extend(tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
            nonlocal state
            assert state is not None
            logits_BNV, state = self._head.extend(state, tokens_BN, parents_BN, self._embed_VW, self._cache)
            return logits_BNV  # type: ignore[no-any-return]

        return grow(replace(round, shape=shape), round.root(self._logits_BV.device), self._logits_BV, extend, self._head.target_ids)


def joined(rounds: Sequence[Settled]) -> Settled:
    """Settled tokens of several rounds as those of one: each row's in their order, packed to the left."""
    if len(rounds) == 1:
        return rounds[0]
    states_BMF, next_BM = (torch.cat([settled[i] for settled in rounds], dim=1) for i in (0, 1))
    counts_BM = torch.cat([torch.arange(n.shape[1], device=n.device) < count_B[:, None] for _, n, count_B in rounds], dim=1)
    count_B = counts_BM.sum(1)
    order_BM = (~counts_BM).long().argsort(dim=1, stable=True)[:, : max(1, int(count_B.max()))]
    return states_BMF.gather(1, order_BM[..., None].expand(-1, -1, states_BMF.shape[2])), next_BM.gather(1, order_BM), count_B
