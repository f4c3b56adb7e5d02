"""Simulated tau: from the head's ranks of an answer's own tokens to the rounds that the generator would make of it at temperature 0.

At temperature 0 a draft is accepted exactly where it names the target's next token, whatever the other drafts of a tree are. So over a
greedy answer of the target one pass of the head along that answer says what every round would accept. A round that starts at row i (token
i + 1 in hand) commits 1 + accepted(i) tokens, and the next one starts at row i + 1 + accepted(i). The first round starts at the row
whose token in hand is the answer's first token, which comes from the prompt's pass and belongs to no round; the last one is cut by
the answer's end (an end id or the length limit), as the generator cuts it. Up to numeric ties this is the measured tau.

Legend: B lines, L tokens, R counted rows (rising numbers, a gap between answers), K test-time steps, A answers, M ranks, N nodes of a tree,
H head width, Vd draft vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.data.batches import Batch
from spectrain.heads.targets import counted

PIECE = 2**24  # draft logits made at once


@dataclass(frozen=True)
class Ranks:
    """Ranks of the tokens that follow: rank_KR[k, r] is the place of token i + 2 + k among the head's choices at step k, given the true
    tokens before it (`width` where it is beyond the first `width` of them); counts_KR: whether that token is of the same answer.

    row_R: i, rising through all batches, with a gap between answers. line_R: the batch line of each row, counted through all batches.
    """

    width: int
    rank_KR: Tensor
    counts_KR: Tensor
    row_R: Tensor
    line_R: Tensor


@torch.no_grad()
def ranks_of(head: Any, batches: Iterable[Batch], *, embed_VW: Tensor, steps: int, width: int) -> Ranks:
    """Ranks along the answers of the batches, up to `width`. Of a batch only ids, mask and states are read.

    Choices are taken by `topk`, as drafting takes them, so that equal logits (common in 16 bits) are in the same order.
    """
    device = embed_VW.device
    ranks, counts, rows, lines, row, line = [], [], [], [], 0, 0
    for batch in batches:
        batch = batch.to(device)
        B, L = batch.ids_BL.shape
        counts_KX = torch.stack([counted(batch.mask_BL, ahead=2 + k, doc_BL=batch.doc_BL).flatten() for k in range(steps)])
        row_R = counts_KX[0].nonzero()[:, 0]
        ids_X = batch.ids_BL.flatten()
        found = [
            _ranks(step.hidden_RH, step.output_VdH, head.target_ids, ids_X[(row_R + step.ahead).clamp(max=len(ids_X) - 1)], width=width)
            for step in head.outputs(batch, row_R, embed_VW, steps)
        ]
        ranks.append(torch.stack(found).cpu())
        counts.append(counts_KX[:, row_R].cpu())
        rows.append(row_R.cpu() + row)
        lines.append(row_R.cpu() // L + line)
        row, line = row + B * L, line + B
    return Ranks(width, torch.cat(ranks, dim=1), torch.cat(counts, dim=1), torch.cat(rows), torch.cat(lines))


def _ranks(hidden_RH: Tensor, output_VdH: Tensor, target_ids: Tensor, token_R: Tensor, *, width: int) -> Tensor:
    """Place [R] of each token among the head's best `width` choices, `width` where it is none of them."""
    parts = []
    at_once = max(1, PIECE // len(output_VdH))
    for hidden_PH, token_P in zip(hidden_RH.split(at_once), token_R.split(at_once), strict=True):
        logits_PV = (hidden_PH @ output_VdH.T).float()
        hit_PM = target_ids[logits_PV.topk(min(width, logits_PV.shape[1])).indices] == token_P[:, None]
        parts.append(torch.where(hit_PM.any(1), hit_PM.int().argmax(1), width))
    return torch.cat(parts)


def accepted_chain(rank_KR: Tensor, counts_KR: Tensor) -> Tensor:
    """Drafts [R] that a round from each row accepts of a chain of K drafts: first choices in a row, up to the answer's end."""
    return ((rank_KR == 0) & counts_KR).int().cumprod(0).sum(0)


def accepted_tree(rank_KR: Tensor, counts_KR: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
    """Drafts [R] that a round from each row accepts of a static tree, given by the ranks from the root to each of its nodes: as long as
    the ranks of the true tokens lead to a node."""
    number = {(): 0, **{path: n for n, path in enumerate(paths, start=1)}}
    width = 1 + max((path[-1] for path in paths), default=0)
    child_NM = torch.full((len(number), width + 1), -1, dtype=torch.long, device=rank_KR.device)  # the last column: of no child
    for path, n in number.items():
        if path:
            child_NM[number[path[:-1]], path[-1]] = n
    node_R, accepted_R = rank_KR.new_zeros(rank_KR.shape[1:]), rank_KR.new_zeros(rank_KR.shape[1:])  # a tree of no node has no steps
    for rank_R, counts_R in zip(rank_KR, counts_KR, strict=True):
        next_R = child_NM[node_R.clamp(min=0), rank_R.clamp(max=width)]
        node_R = torch.where((node_R >= 0) & counts_R, next_R, -1)
        accepted_R = accepted_R + (node_R >= 0)
    return accepted_R


@dataclass(frozen=True)
class Walk:
    """By answer: tokens that its rounds commit, rounds, and the number (of R) of its first row."""

    tokens_A: Tensor
    rounds_A: Tensor
    first_A: Tensor


def walk(accepted_R: Tensor, row_R: Tensor) -> Walk:
    """Round after round over each answer: a run of rows without a gap, the last of which has the answer's last token to come.

    An answer of n tokens has n - 1 rows, and its rounds commit just these n - 1 tokens.
    """
    R = len(row_R)
    if not R:
        return Walk(*(torch.zeros(0, dtype=torch.long) for _ in range(3)))
    breaks = (row_R.diff() != 1).nonzero()[:, 0] + 1
    first_A = torch.cat([breaks.new_zeros(1), breaks])
    stop_A = torch.cat([breaks, breaks.new_full((1,), R)])
    at_A, rounds_A = first_A, torch.zeros_like(first_A)
    while bool((going_A := at_A < stop_A).any()):  # once a round of the longest answer
        rounds_A = rounds_A + going_A
        at_A = torch.where(going_A, at_A + 1 + accepted_R[at_A.clamp(max=R - 1)], at_A)
    return Walk(stop_A - first_A, rounds_A, first_A)


def rank_table(rank_KR: Tensor, counts_KR: Tensor, *, width: int) -> list[list[float]]:
    """table[k][m]: share of the rows that count at step k whose token is the head's choice m (an acceptance table of `yields`); it ends
    before the first step at which no row counts."""
    table = []
    for rank_R, counts_R in zip(rank_KR, counts_KR, strict=True):
        rows = int(counts_R.sum())
        if not rows:
            break
        table.append((torch.bincount(rank_R[counts_R], minlength=width)[:width] / rows).tolist())
    return table
