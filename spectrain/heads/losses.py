"""Losses of draft heads, each with its formula, and the counts that every metric is divided from.

Legend: R rows, K test-time steps, Vd draft vocabulary. p: the target's law, q: the draft's, both over the draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """Sums over counted rows by test-time step, [K] each; divided once, after summing over batches and ranks.

    loss: sum of losses. alpha: sum of sum_v min(p, q), the chance that a sampled draft is accepted. hits: rows where the
    draft's best token is the target's best of the full vocabulary. rows: number of counted rows.
    """

    loss_K: Tensor
    alpha_K: Tensor
    hits_K: Tensor
    rows_K: Tensor

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(self.fields, other.fields, strict=True)))

    @classmethod
    def zeros(cls, steps: int, device: torch.device) -> "Counts":
        return cls(*(torch.zeros(steps, device=device) for _ in range(4)))

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.loss_K, self.alpha_K, self.hits_K, self.rows_K

    def detach(self) -> "Counts":
        return Counts(*(f.detach() for f in self.fields))

    def means(self) -> dict[str, list[float]]:
        """loss, alpha and hit rate by step; 0 where no row counted."""
        rows_K = self.rows_K.clamp(min=1)
        named = {"loss": self.loss_K, "alpha": self.alpha_K, "hit": self.hits_K}
        return {name: (sum_K / rows_K).tolist() for name, sum_K in named.items()}


def soft_cross_entropy(logits_RV: Tensor, p_RV: Tensor) -> Tensor:
    """- sum_v p_v log q_v per row, float32.

    p keeps its true mass (it sums to p(draft vocabulary) <= 1), so a row weighs as much as the draft vocabulary can win there.
    """
    return -(p_RV * logits_RV.float().log_softmax(-1)).sum(-1)


def draft_counts(
    logits_KRV: Sequence[Tensor], p_KRV: Sequence[Tensor], best_KR: Sequence[Tensor], counts_KR: Sequence[Tensor], target_ids: Tensor
) -> Counts:
    """Loss, acceptance chance and hits of each step's logits against the target's law at the same rows.

    best: the target's best id of the full vocabulary. counts: which rows count. A step without counted rows adds exact zeros.
    """
    steps = []
    for logits_RV, p_RV, best_R, counts_R in zip(logits_KRV, p_KRV, best_KR, counts_KR, strict=True):
        loss_R = soft_cross_entropy(logits_RV, p_RV)
        with torch.no_grad():
            alpha_R = torch.minimum(p_RV, logits_RV.float().softmax(-1)).sum(-1)
            hit_R = target_ids[logits_RV.argmax(-1)] == best_R
        zero = torch.zeros_like(loss_R)
        steps.append(
            (
                torch.where(counts_R, loss_R, zero).sum(),
                torch.where(counts_R, alpha_R, zero).sum(),
                (hit_R & counts_R).sum().float(),
                counts_R.sum().float(),
            )
        )
    return Counts(*(torch.stack(column) for column in zip(*steps, strict=True)))
