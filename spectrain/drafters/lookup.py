"""Drafts copied from earlier text: the continuation of the most recent place where the last tokens stood before.

Prompt lookup decoding (Saxena 2023), here with the longest match first and the most recent place among equals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.shapes import Shape
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.scripted import ragged_chain
from spectrain.target.model import Target


@dataclass(frozen=True)
class NGram:
    """Looks for the last `longest` ... `shortest` tokens in prompt and answer. A point mass; needs no training."""

    longest: int = 4
    shortest: int = 2
    layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"NGram needs 1 <= shortest <= longest, found shortest={self.shortest}, longest={self.longest}")

    def start(self, target: Target, rows: int, max_length: int) -> "_Lookup":
        return _Lookup(self, target.device)


@dataclass(frozen=True)
class _Lookup:
    settings: NGram
    device: torch.device

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """Nothing to learn: `propose` reads the committed tokens."""

    def select(self, rows_R: Tensor) -> None:
        """Nothing is kept by row."""

    def propose(self, committed: Sequence[Sequence[int]], shape: Shape) -> DraftTree | None:
        limit = min(shape.depth, shape.budget)
        return ragged_chain(committed, [lookup(ids, limit, self.settings) for ids in committed], self.device)


def lookup(ids: Sequence[int], depth: int, settings: NGram) -> list[int]:
    """Up to `depth` tokens that followed the most recent earlier occurrence of the longest matching suffix; [] for none."""
    text = np.asarray(ids)
    for n in range(min(settings.longest, len(text) - 1), settings.shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
        found = np.flatnonzero((windows == text[-n:]).all(axis=1))
        if len(found):
            start = int(found[-1]) + n
            return text[start : start + depth].tolist()
    return []
