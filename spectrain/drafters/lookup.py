"""Drafts copied from earlier text: the continuation of a place where the last tokens stood before.

Prompt lookup decoding (Saxena 2023), here with the longest match first, and the most recent or the first place among equals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.packing import Record, RowDraft, pack
from spectrain.target.model import Target


@dataclass(frozen=True)
class NGram:
    """Looks for the last `longest` ... `shortest` tokens in prompt and answer. A point mass; needs no training.

    Of a tree shape it reads depth and budget: the draft is one chain of at most as many tokens as either allows.
    match: which of several places of equal length is continued, the most "recent" or the "first" (as transformers and vLLM do).
    """

    longest: int = 4
    shortest: int = 2
    match: Literal["recent", "first"] = "recent"
    layer_ids: tuple[int, ...] = field(default=(), init=False)
    has_q: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"NGram needs 1 <= shortest <= longest, found shortest={self.shortest}, longest={self.longest}")
        if self.match not in ("recent", "first"):
            raise ValueError(f"NGram: match must be 'recent' or 'first', found {self.match!r}")

    def start(self, target: Target, rows: int, max_length: int) -> "_Lookup":
        """A session; any target will do."""
        return _Lookup(self, target.device, [_Places(self) for _ in range(rows)])


class _Places:
    """Where each n-gram of one row's text was followed by something; `lookup` is its slow twin."""

    def __init__(self, settings: NGram) -> None:
        self._settings = settings
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after it
        self._read = 1  # n-grams that end before this position are in
        self.record = Record()

    def find(self, ids: Sequence[int], depth: int) -> tuple[int, list[int]]:
        """Length of the match and up to `depth` drafts; reads only what was committed since the last call."""
        s = self._settings
        for end in range(self._read, len(ids)):
            for n in range(s.shortest, min(s.longest, end) + 1):
                gram = tuple(ids[end - n : end])
                if s.match == "recent" or gram not in self._after:
                    self._after[gram] = end
        self._read = max(self._read, len(ids))
        for n in range(min(s.longest, len(ids) - 1), s.shortest - 1, -1):
            start = self._after.get(tuple(ids[len(ids) - n :]))
            if start is not None:
                return n, list(ids[start : start + depth])
        return 0, []


@dataclass
class _Lookup:
    settings: NGram
    device: torch.device
    rows: list[_Places]

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """Nothing to learn: `propose` reads the committed tokens."""

    def select(self, rows_R: Tensor) -> None:
        self.rows = [self.rows[b] for b in rows_R.tolist()]

    def rewind(self) -> None:
        """Nothing to drop."""

    def propose(self, round: Round) -> DraftTree | None:
        """One chain a row. Estimate: the recent chance of a token after a match of that length in that row (half before the first)."""
        drafts, expected = [], []
        for ids, limit, row in zip(round.committed, round.limits(), self.rows, strict=True):
            n, tokens = row.find(ids, min(limit, round.shape.budget))
            row.record.settle(ids)
            row.record.note(n, len(ids), tokens)
            drafts.append(RowDraft.chain(tokens))
            expected.append(row.record.expected(n, len(tokens)))
        return pack(round.committed, drafts, self.device, expected if round.estimate else None)


def lookup(ids: Sequence[int], depth: int, settings: NGram) -> list[int]:
    """Up to `depth` tokens that followed the chosen earlier occurrence of the longest matching suffix, by a scan; [] for none."""
    text = np.asarray(ids)
    for n in range(min(settings.longest, len(text) - 1), settings.shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
        found = np.flatnonzero((windows == text[-n:]).all(axis=1))
        if len(found):
            start = int(found[-1 if settings.match == "recent" else 0]) + n
            return text[start : start + depth].tolist()
    return []
