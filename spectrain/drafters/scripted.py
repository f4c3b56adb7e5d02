"""Drafts from a function: for tests, notebooks, and ideas that are not a drafter yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.shapes import Shape
from spectrain.decoding.tree import DraftTree
from spectrain.target.model import Target


@dataclass(frozen=True)
class Scripted:
    """`fn(ids) -> list of drafted ids` for the committed ids of one row, [] for none. A point mass.

    Drafts beyond the shape's depth or budget are cut off.
    """

    fn: Callable[[list[int]], list[int]]
    layer_ids: tuple[int, ...] = ()

    def start(self, target: Target, rows: int, max_length: int) -> "_Script":
        return _Script(self.fn, target.device)


@dataclass(frozen=True)
class _Script:
    fn: Callable[[list[int]], list[int]]
    device: torch.device

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """Nothing to learn."""

    def select(self, rows_R: Tensor) -> None:
        """Nothing is kept by row."""

    def propose(self, committed: Sequence[Sequence[int]], shape: Shape) -> DraftTree | None:
        limit = min(shape.depth, shape.budget)
        return ragged_chain(committed, [self.fn(list(ids))[:limit] for ids in committed], self.device)


def ragged_chain(committed: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]], device: torch.device) -> DraftTree | None:
    """Chains of unequal length as one tree, padded behind `num_B`; None when there is no draft in any row."""
    longest = max(map(len, drafts))
    if longest == 0:
        return None
    rows = [[ids[-1], *draft] + [0] * (longest - len(draft)) for ids, draft in zip(committed, drafts, strict=True)]
    num_B = torch.tensor([1 + len(draft) for draft in drafts], device=device)
    return DraftTree.chain(torch.tensor(rows, device=device), num_B)
