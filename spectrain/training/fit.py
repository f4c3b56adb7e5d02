"""The start of a head whose first guess is a product with a matrix: that matrix by least squares over the target's states.

A head that guesses the target's next last state f_{i+1} from the embedding of token i + 1 and from f_i says at once what a linear map can
say, instead of learning it for hundreds of steps.

Legend: B lines, L tokens, N = B * L, R counted rows, P supervised tokens, W target width, X = 2 W, F = W, V target vocabulary, S samples,
D domains.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrain.data.batches import Samples, leave_out_broken
from spectrain.data.order import Sizes
from spectrain.heads.targets import counted

Ints = npt.NDArray[np.int64]
ROWS_A_WIDTH = 32  # counted rows a width W: with 16 the guess (smooth L1) was 13 % worse, with 100 it was 8 % better (SmolLM2-135M)
SAMPLES_AT_ONCE = 8


@torch.no_grad()
def fit_start(head: Any, samples: Samples, found: Sizes, embed_VW: Tensor, *, shares: Mapping[str, int]) -> list[str]:
    """Fit the matrix of a head that has one (`head.fitted` is False); returns what there is to say.

    Reads samples of the domains that the run draws (`shares`: rows of each) in a fixed order, the same on every process, until there are
    enough counted rows.
    """
    if getattr(head, "fitted", True):
        return []
    began, W = time.monotonic(), embed_VW.shape[1]
    read_XX, both_XW, rows = torch.zeros(2 * W, 2 * W, dtype=torch.float64), torch.zeros(2 * W, W, dtype=torch.float64), 0
    drawn_D = np.array([shares.get(domain, 0) > 0 for domain in found.domains])
    supervised_S = found.supervised_N * drawn_D[found.domain_N]
    for read_RX, next_RW in _pairs(samples, _some(supervised_S, ROWS_A_WIDTH * W), embed_VW):
        read_XX += (read_RX.T @ read_RX).cpu()
        both_XW += (read_RX.T @ next_RW).cpu()
        rows += len(read_RX)
    if not rows:  # all of them are broken
        return []
    head.fit(ridge(read_XX, both_XW, rows=rows))
    return [f"the head's first guess is fitted to {rows} states of the target, in {time.monotonic() - began:.0f} s"]


def ridge(read_XX: Tensor, both_XW: Tensor, *, rows: int) -> Tensor:
    """The matrix [W, X] of least squares from sums over rows of read * read and read * next, kept small where rows are few: W rows are
    added that read the usual size of each half's channels (the median: single ones are ten times as large) and lead to nothing."""
    W = both_XW.shape[1]
    usual_2 = read_XX.diagonal().view(2, W).median(dim=1).values / rows
    return torch.linalg.solve(read_XX + torch.diag(W * usual_2.clamp(min=1e-12).repeat_interleave(W)), both_XW).T.float()


def _some(supervised_S: Ints, wanted: int) -> list[int]:
    """Samples in a fixed random order up to so many supervised tokens."""
    order_S = np.random.default_rng(0).permutation(len(supervised_S))
    order_S = order_S[supervised_S[order_S] > 0]
    return order_S[: int((np.cumsum(supervised_S[order_S]) < wanted).sum()) + 1].tolist()  # type: ignore[no-any-return]


def _pairs(samples: Samples, numbers: list[int], embed_VW: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of the counted rows of some samples: embedding of token i + 1 and last state of token i [R, X], and the next last state [R, W]."""
    for first in range(0, len(numbers), SAMPLES_AT_ONCE):
        batch, _ = leave_out_broken(samples.batch(numbers[first : first + SAMPLES_AT_ONCE]).to(embed_VW.device))
        mask_N = batch.mask_BL.flatten()
        row_R = counted(batch.mask_BL, ahead=2).flatten().nonzero()[:, 0]
        read_RX = torch.cat([embed_VW[batch.ids_BL.flatten()[row_R + 1]].float(), batch.states_BLF.flatten(0, 1)[row_R]], dim=1)
        yield read_RX, batch.last_PW[(mask_N.cumsum(0) - 1)[row_R + 1]]
