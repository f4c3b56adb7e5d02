"""Shapes of a draft: how deep, how wide, how many nodes. Plain values; drafters read them.

Legend: B rows, C candidates, N nodes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chain:
    """A chain of `depth` drafts. `law="auto"` is point mass (the most likely token at each step)."""

    depth: int
    law: str = "auto"

    def __post_init__(self) -> None:
        _check(self, self.depth, self.law)

    @property
    def budget(self) -> int:
        return self.depth

    @property
    def width(self) -> int:
        return 1

    def __str__(self) -> str:
        return f"chain {self.depth}"


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858): beams of `top_k`, `depth` levels, the `budget` best nodes by joint probability kept."""

    top_k: int = 10
    depth: int = 7
    budget: int = 60
    law: str = "auto"

    def __post_init__(self) -> None:
        _check(self, self.depth, self.law)
        if self.top_k < 1 or self.budget < 1:
            raise ValueError(f"{self}: top_k and budget must be at least 1")

    @property
    def width(self) -> int:
        return self.top_k

    def __str__(self) -> str:
        return f"tree k={self.top_k} d={self.depth} n={self.budget}"


class Tree:
    """Names of the tree shapes."""

    @staticmethod
    def dynamic(top_k: int = 10, depth: int = 7, budget: int = 60) -> DynamicTree:
        return DynamicTree(top_k=top_k, depth=depth, budget=budget)


Shape = Chain | DynamicTree


def _check(shape: object, depth: int, law: str) -> None:
    if depth < 1:
        raise ValueError(f"{type(shape).__name__}: depth must be at least 1, found {depth}; use drafter=None for plain decoding")
    if law not in ("auto", "point_mass"):
        raise ValueError(f"{type(shape).__name__}: law {law!r} is not available; drafts are point masses (law='auto' or 'point_mass')")


def keep_best(scores_BC: Tensor, depth_BC: Tensor, budget: int) -> Tensor:
    """Candidates [B, N] (rising) with the highest joint log-probability; ties go to the shallower, so the tree stays connected.

    A child's score never exceeds its parent's, hence every ancestor of a kept node is kept. Where rounding makes them equal,
    the order (score, then depth) decides; candidates must be listed parents first.
    """
    order_BC = torch.argsort(depth_BC, dim=-1, stable=True)
    by_score_BC = torch.argsort(scores_BC.gather(1, order_BC), dim=-1, descending=True, stable=True)
    kept_BN = order_BC.gather(1, by_score_BC[:, :budget])
    return kept_BN.sort(dim=-1).values
