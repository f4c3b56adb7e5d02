"""The key/value cache of target and heads: a preallocated slab per layer with a length per row.

New entries are *staged* behind the committed ones, seen by attention through a mask, and then *committed*: a path of nodes is
gathered to the end of the committed part; for a chain only the length moves. Nothing has to be rolled back: what is not
committed is overwritten.

The host knows how long the longest row is: on a CPU it looks, on a device it would have to wait, and adds up what rows can have grown
by until it is told better (`bound`).

Legend: B rows, G key/value heads, N staged nodes of one pass, M all staged nodes, S slots, D head size, K path length,
X = 2 * layers slabs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from spectrain.kernels.path import move_path_


class PassCache(Protocol):
    """What transformers' models ask of a cache in a pass."""

    def update(self, k_BGND: Tensor, v_BGND: Tensor, layer: int, /, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take one layer's keys and values; returns those that the pass sees."""

    def get_seq_length(self, layer: int = 0) -> int:
        """Number of entries that it sees at most."""


class SlabCache:
    """Keys and values of `layers` layers for B rows of up to `max_length` entries.

    It answers the calls that transformers' models make on a cache (`update`, `get_seq_length`).
    Raises ValueError when an entry would not fit.
    """

    is_compileable = False

    def __init__(
        self, *, layers: int, rows: int, kv_heads: int, head_dim: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # One slot more than asked for: entries of padding go there and no mask ever shows it.
        self._split(torch.zeros(2 * layers, rows, kv_heads, max_length + 1, head_dim, dtype=dtype, device=device))
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.max_length = max_length
        self.staged = 0  # nodes written behind the committed part
        self.fixed = False  # passes see all slots, so that their shapes do not change from one to the next (decoding/graphs.py)
        self._longest = 0  # upper bound of lengths_B, kept on the host
        self._slots_BN = torch.zeros(rows, 0, dtype=torch.long, device=device)
        self._uniform_start: int | None = 0  # first slot when all rows write to the same slots

    def _split(self, slab_XBGSD: Tensor) -> None:
        # One block of memory, so that a path is copied by one call for all layers; 0.17 ms instead of 0.7 ms on a CPU with 30 layers.
        self._slab_XBGSD = slab_XBGSD
        self._apart: tuple[list[Tensor], list[Tensor]] | None = None
        self.keys, self.values = ([slab_XBGSD[x] for x in range(first, len(slab_XBGSD), 2)] for first in (0, 1))

    def separate(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each layer as tensors of their own over the same memory (CPU only).

        A compiler takes views of one slab for overlapping and copies the whole slab at each write.
        """
        if self._apart is None:
            self._apart = [_own_storage(t) for t in self.keys], [_own_storage(t) for t in self.values]
        return self._apart

    @property
    def slots_BN(self) -> Tensor:
        """Where the staged pass is written."""
        return self._slots_BN

    def stage(self, num: int, pad_B: Tensor | None = None) -> Tensor:
        """Open `num` more slots a row for the coming pass and return their positions [B, num] by slot.

        `pad_B`: how many of the first columns of the pass are padding in each row (prompts of unequal length, aligned right);
        they are written to the spare slot and their position reads 0.
        """
        if self._longest + self.staged + num > self.max_length:
            self._longest = int(self.lengths_B.max())  # an upper bound that is too high is no error
        end = self._longest + self.staged + num
        if end > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} entries a row, {end} are needed; pass a larger max_length")
        column_N = torch.arange(num, device=self.lengths_B.device)
        slots_BN = self.lengths_B[:, None] + self.staged + column_N
        self._uniform_start = self._common_start() if pad_B is None else None
        if pad_B is not None:
            slots_BN = slots_BN - pad_B[:, None]
            real_BN = column_N >= pad_B[:, None]
            self._slots_BN = torch.where(real_BN, slots_BN, self.max_length)
            slots_BN = torch.where(real_BN, slots_BN, 0)
        else:
            self._slots_BN = slots_BN
        self.staged += num
        return slots_BN

    @property
    def watched(self) -> bool:
        """Whether the host looks at the lengths."""
        return self.lengths_B.device.type == "cpu" and not self.fixed

    def _common_start(self) -> int | None:
        """The slot at which every row writes next, where there is one and the host knows it."""
        if self._longest == 0:
            return self.staged
        if not self.watched or not bool((self.lengths_B == self.lengths_B[0]).all()):
            return None
        return int(self.lengths_B[0]) + self.staged

    def update(self, k_BGND: Tensor, v_BGND: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one layer's keys and values of the staged pass; returns views [B, G, S, D] of all slots up to the last one."""
        keys, values = self.keys[layer], self.values[layer]
        end = self.get_seq_length()
        if self._uniform_start is not None:
            start, stop = self._uniform_start, self._uniform_start + k_BGND.shape[2]
            keys[:, :, start:stop] = k_BGND
            values[:, :, start:stop] = v_BGND
        else:
            row_B1 = torch.arange(len(keys), device=keys.device)[:, None]
            keys[row_B1, :, self._slots_BN] = k_BGND.transpose(1, 2)
            values[row_B1, :, self._slots_BN] = v_BGND.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def visible(self, line_BNM: Tensor, window: int | None = None) -> Tensor:
        """Mask [B, 1, N, S] of a staged pass: the committed entries, and of the M staged nodes those that `line_BNM` marks True.

        `line_BNM`: the node itself and its ancestors (parents before children). `window`: only this many last positions are visible.
        Positions are counted along the line, not by slot: the siblings of an ancestor take no room in the window.
        """
        slot_S = torch.arange(self.get_seq_length(), device=self.lengths_B.device)
        N, M = line_BNM.shape[1:]
        past_BNS = (slot_S < self.lengths_B[:, None])[:, None].expand(-1, N, -1)
        if window is not None:
            position_BN = self.lengths_B[:, None] + line_BNM.sum(-1) - 1
            past_BNS = past_BNS & (slot_S > position_BN[..., None] - window)
            later_BNM = line_BNM.flip(-1).cumsum(-1).flip(-1)  # nodes on the line from here to its end
            line_BNM = line_BNM & (later_BNM <= window)
        where_BM = self.lengths_B[:, None] + torch.arange(M, device=slot_S.device)
        return past_BNS.scatter(2, where_BM[:, None].expand_as(line_BNM), line_BNM)[:, None]

    def causal(self, positions_BN: Tensor, window: int | None = None) -> Tensor:
        """Mask [B, 1, N, S] of a staged pass whose columns stand in the slots of their positions (prompts): all up to the position."""
        slot_S = torch.arange(self.get_seq_length(), device=positions_BN.device)
        return causal_mask(positions_BN, slot_S, window)

    @property
    def fresh(self) -> bool:
        """Whether the staged pass is all that the rows hold, without padding."""
        return self._uniform_start == 0

    def commit(self, count_B: Tensor, path_BK: Tensor | None = None) -> None:
        """Keep `count_B` staged nodes a row: those named by `path_BK` in order, or the first ones (a chain); drop the others.

        The copy is as long as the path, whatever the context.
        """
        if path_BK is not None:
            move_path_(self._slab_XBGSD, self.lengths_B, path_BK)
        self.lengths_B = self.lengths_B + count_B
        most = self.staged if path_BK is None else path_BK.shape[1]
        self._longest = int(self.lengths_B.max()) if self.watched else self._longest + most
        self.staged = 0

    def bound(self, longest: int) -> None:
        """The longest row holds `longest` committed entries, as somebody knows who has seen what was committed."""
        if not self.watched:
            self._longest = longest

    @contextmanager
    def at(self, lengths_B: Tensor, slots_BN: Tensor | None = None) -> Iterator[None]:
        """A section that reads lengths, and where the staged pass is written, from these tensors: those of a recorded pass."""
        before = self.lengths_B, self._slots_BN
        self.lengths_B, self._slots_BN = lengths_B, self._slots_BN if slots_BN is None else slots_BN
        try:
            yield
        finally:
            self.lengths_B, self._slots_BN = before

    def settle(self, rows_R: Tensor, length_R: Tensor, longest: int) -> None:
        """These rows hold `length_R` entries, at most `longest`, that were written from slot 0 on; what they held is forgotten."""
        self.lengths_B = self.lengths_B.index_copy(0, rows_R, length_R)
        self._longest = int(self.lengths_B.max()) if self.watched else max(self._longest, longest)

    def discard(self) -> None:
        """Drop every staged node."""
        self.staged = 0

    def select(self, rows_R: Tensor) -> None:
        """Keep only the given rows, in the given order."""
        self._split(self._slab_XBGSD[:, rows_R])
        self.lengths_B = self.lengths_B[rows_R]
        if self.watched:
            self._longest = int(self.lengths_B.max())

    def get_seq_length(self, layer: int = 0) -> int:
        """Number of entries in the longest row, staged ones included (what transformers asks for); `fixed`: all slots."""
        return self.max_length + 1 if self.fixed else self._longest + self.staged


def causal_mask(positions_BN: Tensor, position_S: Tensor, window: int | None) -> Tensor:
    """Mask [B, 1, N, S]: what stands at or before a node's position and, with a `window`, among its last `window` positions."""
    mask_BNS = position_S <= positions_BN[..., None]
    if window is not None:
        mask_BNS = mask_BNS & (position_S > positions_BN[..., None] - window)
    return mask_BNS[:, None]


def _own_storage(t: Tensor) -> Tensor:
    """The same memory behind another storage object."""
    wide = t.view(torch.int16) if t.element_size() == 2 else t
    return torch.from_numpy(wide.numpy()).view(t.dtype)
