"""Which tokens of a batch an unrolled pass of a head has to compute, and where each step finds them.

Legend: B lines, L tokens, R counted rows, T tokens whose base keys a counted row sees, U tokens that stand in somebody's hand, Q those of
them that are asked for a query, X any, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.heads.base import TrainingBatch


@dataclass(frozen=True)
class Places:
    """Flat numbers are b * L + i. token_T: flat numbers of the tokens of step 0 and position_T their positions; row_R: the counted rows
    among them. in_hand_U: ids of tokens in hand; ask_Q, base_T and later[k]: numbers in U of those that ask, of the tokens of step 0 and
    of the rows at step k; first_X and asks[k]: numbers in Q at step 0 (of rows, or of all T where layers stand above the first) and k.
    """

    shape: tuple[int, int]
    position_BL: Tensor
    token_T: Tensor
    position_T: Tensor
    row_R: Tensor
    in_hand_U: Tensor
    ask_Q: Tensor
    base_T: Tensor
    first_X: Tensor
    later: Sequence[Tensor]
    asks: Sequence[Tensor]

    @classmethod
    def of(cls, batch: TrainingBatch, row_R: Tensor, steps: int, *, all_ask: bool) -> "Places":
        """row_R: flat counted rows, rising. all_ask: every token of step 0 is asked for a query, not the counted rows alone."""
        ids_BL = batch.ids_BL
        B, L = ids_BL.shape
        number_L = torch.arange(L, device=ids_BL.device)
        position_BL = number_L.expand(B, L) if batch.position_BL is None else batch.position_BL
        column_R = row_R % L
        later = [row_R - column_R + (column_R + k).clamp(max=L - 1) for k in range(steps)]
        needed_N = _needed(row_R, batch.doc_BL, B, L)
        asked_N = needed_N.clone() if all_ask else torch.zeros_like(needed_N)
        asked_N[torch.cat(later)] = True
        used_N = needed_N | asked_N
        token_T, used_U = (mask_N.nonzero()[:, 0] for mask_N in (needed_N, used_N))
        rank_T, rank_U, rank_Q = (mask_N.cumsum(0) - 1 for mask_N in (needed_N, used_N, asked_N))
        in_hand_BL = torch.cat([ids_BL[:, 1:], ids_BL[:, -1:]], dim=1)
        return cls(
            shape=(B, L), position_BL=position_BL, token_T=token_T, position_T=position_BL.flatten()[token_T], row_R=rank_T[row_R],
            in_hand_U=in_hand_BL.flatten()[used_U], ask_Q=rank_U[asked_N], base_T=rank_U[token_T],
            first_X=rank_Q[token_T if all_ask else row_R], later=[rank_U[n] for n in later], asks=[rank_Q[n] for n in later],
        )  # fmt: skip

    def spread(self, x_TGD: Tensor) -> Tensor:
        """Back to [B, L, ...]: zeros where nothing was computed."""
        if len(x_TGD) != self.shape[0] * self.shape[1]:
            x_TGD = x_TGD.new_zeros(self.shape[0] * self.shape[1], *x_TGD.shape[1:]).index_copy(0, self.token_T, x_TGD)
        return x_TGD.unflatten(0, self.shape)


def _needed(row_R: Tensor, doc_BL: Tensor | None, B: int, L: int) -> Tensor:
    """Which tokens [B * L] have a counted row of their document at or behind them."""
    number_N = torch.arange(B * L, device=row_R.device)
    document_N = number_N // L
    if doc_BL is not None:  # a line has at most L documents; its padding is one more
        document_N = document_N * (L + 1) + doc_BL.flatten() + 1
    last_S = number_N.new_full((B * (L + 1),), -1).scatter_reduce(0, document_N[row_R], row_R, "amax")
    return number_N <= last_S[document_N]


def pick(x_XC: Tensor, number_X: Tensor) -> Tensor:
    """Rows of a matrix. As an embedding: its gradient costs a CPU half to two thirds of that of an index."""
    return F.embedding(number_X, x_XC)
