"""Any draft head as a drafter: chains, static and dynamic trees, through `begin` and `extend` alone.

The head's cache holds the rows of settled tokens made from the target's own states; drafts are staged behind them and dropped
when the next settled tokens are read. These wait until a draft is asked for: rounds without one do not pay for the head.

Where passes are recorded (decoding/graphs.py), `begin` and each `extend` are one: the cache's numbers on the host are set outside of them.

Legend: B rows, N nodes, M settled tokens of several rounds, F width of the states read, V vocabulary of the head.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.graphs import Graphs, Pass
from spectrain.decoding.shapes import trimmed
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.grow import Layouts, grow
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
    sound = True

    def __init__(self, head: Any, embed_VW: Tensor, cache: SlabCache) -> None:
        self._head, self._embed_VW, self._cache = head, embed_VW, cache
        self._state: DraftState | None = None
        self._logits_BV = torch.empty(0)
        self._waiting: list[Settled] = []
        self._layouts: Layouts = {}
        self._staged: dict[Hashable, int] = {}  # nodes in the cache after a level

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        assert states_BNF is not None
        if sum(later_BN.shape[1] for _, later_BN, _ in self._waiting) + next_BN.shape[1] > LATER:
            self._settle()
        self._waiting.append((states_BNF, next_BN, count_B))
        if next_BN.shape[1] > LATER:
            self._settle()

    def _settle(self, graphs: Graphs | None = None) -> None:
        """Let the head read what waits."""
        if not self._waiting:
            return
        settled, self._waiting = joined(self._waiting), []
        cache, before = self._cache, () if self._state is None else (self._state.hidden_BMH[:, :1], self._state.ancestors_BMM[:, :1, :1])

        def begin(states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, lengths_B: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            with cache.at(lengths_B):
                earlier = DraftState(state[0], state[1]) if state else None
                logits_BV, new = self._head.begin(states_BNF, next_BN, count_B, self._embed_VW, cache, earlier)
                return logits_BV, new.hidden_BMH, new.ancestors_BMM, cache.lengths_B

        found = _called(graphs, "begin", id(self), begin, *settled, cache.lengths_B, *before)
        self._logits_BV, hidden_B1H, root_B11, cache.lengths_B = (t.clone() for t in found) if graphs else found
        self._state = DraftState(hidden_B1H, root_B11)
        cache.discard()

    def _extended(self, graphs: Graphs | None, state: DraftState, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[Tensor, DraftState]:
        """Nodes of one more level, `state.level`."""
        cache, level, staged = self._cache, state.level, self._cache.staged
        key = id(self), level, staged, tokens_BN.shape[1]
        assert level is not None

        def extend(hidden_BMH: Tensor, line_BMM: Tensor, tokens_BN: Tensor, parents_BN: Tensor, lengths_B: Tensor) -> tuple[Tensor, ...]:
            cache.staged = staged
            with cache.at(lengths_B):
                given = DraftState(hidden_BMH, line_BMM, level)
                logits_BNV, new = self._head.extend(given, tokens_BN, parents_BN, self._embed_VW, cache)
            self._staged[key] = cache.staged
            return logits_BNV, new.hidden_BMH, new.ancestors_BMM

        given = state.hidden_BMH, state.ancestors_BMM, tokens_BN, parents_BN, cache.lengths_B
        logits_BNV, hidden_BMH, line_BMM = _called(graphs, "extend", key, extend, *given)
        cache.staged = self._staged[key]
        return logits_BNV, DraftState(hidden_BMH, line_BMM, level + 1)

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
        shape = trimmed(round.shape, depth=self._head.max_depth)  # a hybrid asks for what another part can draft
        if shape is None:
            return None
        root_B1 = round.root(self._cache.lengths_B.device)
        self._cache.fixed = round.graphs is not None
        self._settle(round.graphs)
        if round.longest is not None:
            self._cache.bound(round.longest)
        assert self._state is not None
        state = replace(self._state, level=1)

        def extend(tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
            nonlocal state
            logits_BNV, state = self._extended(round.graphs, state, tokens_BN, parents_BN)
            return logits_BNV

        return grow(replace(round, shape=shape), root_B1, self._logits_BV, extend, self._head.target_ids, self._layouts)


def _called(graphs: Graphs | None, name: str, key: Hashable, function: Pass, *inputs: Tensor) -> tuple[Tensor, ...]:
    return function(*inputs) if graphs is None else graphs.call(name, key, function, *inputs)


def joined(rounds: Sequence[Settled]) -> Settled:
    """Settled tokens of several rounds as those of one: each row's in their order, packed to the left."""
    if len(rounds) == 1:
        return rounds[0]
    states_BMF, next_BM = (torch.cat([settled[i] for settled in rounds], dim=1) for i in (0, 1))
    counts_BM = torch.cat([torch.arange(n.shape[1], device=n.device) < count_B[:, None] for _, n, count_B in rounds], dim=1)
    count_B = counts_BM.sum(1)
    order_BM = (~counts_BM).long().argsort(dim=1, stable=True)
    if order_BM.device.type == "cpu":  # a device is not asked for the longest row, and reads some columns of nothing
        order_BM = order_BM[:, : max(1, int(count_B.max()))]
    return states_BMF.gather(1, order_BM[..., None].expand(-1, -1, states_BMF.shape[2])), next_BM.gather(1, order_BM), count_B
