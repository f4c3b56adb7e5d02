"""Samples -> batches: padded side by side, or packed several to a line with document numbers; and what a source of samples offers.

Legend: B rows or lines, L tokens, P supervised tokens of a batch in reading order, M those of a row, S states read,
W target width, F = S * W.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spectrain.data import codes
from spectrain.data.codes import Codes
from spectrain.data.rows import Row


@dataclass(frozen=True)
class Sample:
    """One row with its states, as stored: ids_L and mask_L (int64), states [L, F]; at its M supervised tokens last [M, W], the
    target's best id best_M (int64) and the log-sum-exp lse_M of its logits (float32)."""

    ids_L: Tensor
    mask_L: Tensor
    states: Codes
    last: Codes
    best_M: Tensor
    lse_M: Tensor


@dataclass(frozen=True)
class Batch:
    """Samples side by side; padding stands at the end and carries mask 0. last, best_P and lse_P belong to the supervised tokens in
    reading order. In a packed batch doc_BL numbers the documents of a line from 0 (padding -1) and position_BL counts from 0 in each."""

    ids_BL: Tensor
    mask_BL: Tensor
    states: Codes
    last: Codes
    best_P: Tensor
    lse_P: Tensor
    doc_BL: Tensor | None = None
    position_BL: Tensor | None = None

    @property
    def states_BLF(self) -> Tensor:
        """float32; decoded at each call."""
        return self.states.float()

    @property
    def last_PW(self) -> Tensor:
        """float32; decoded at each call."""
        return self.last.float()

    def to(self, device: torch.device | str) -> "Batch":
        """Moved as stored, so that 8-bit states cross the bus as such."""
        fields = {name: value for name in self.__dataclass_fields__ if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.to(device) for name, value in fields.items()})


class Samples(Protocol):
    """Rows with their states, wherever these come from: a store on disk, or the target at work."""

    @property
    def rows(self) -> Sequence[Row]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Sample: ...
    def batch(self, numbers: Sequence[int]) -> Batch:
        """The given rows in this order, padded."""


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad to the longest sample and stack."""
    return Batch(
        ids_BL=pad_sequence([s.ids_L for s in samples], batch_first=True),
        mask_BL=pad_sequence([s.mask_L for s in samples], batch_first=True),
        states=codes.pad([s.states for s in samples]), last=codes.concatenate([s.last for s in samples]),
        best_P=torch.cat([s.best_M for s in samples]), lse_P=torch.cat([s.lse_M for s in samples]),
    )  # fmt: skip


def pack(lines: Sequence[Sequence[Sample]]) -> Batch:
    """Samples of a line one after the other, lines padded to the longest; every sample keeps to itself by doc_BL and position_BL."""
    joined = [
        Sample(
            ids_L=torch.cat([s.ids_L for s in line]), mask_L=torch.cat([s.mask_L for s in line]),
            states=codes.concatenate([s.states for s in line]), last=codes.concatenate([s.last for s in line]),
            best_M=torch.cat([s.best_M for s in line]), lse_M=torch.cat([s.lse_M for s in line]),
        )
        for line in lines
    ]  # fmt: skip
    docs = [torch.cat([torch.full_like(s.ids_L, number) for number, s in enumerate(line)]) for line in lines]
    positions = [torch.cat([torch.arange(len(s.ids_L)) for s in line]) for line in lines]
    return replace(
        collate(joined), doc_BL=pad_sequence(docs, batch_first=True, padding_value=-1),
        position_BL=pad_sequence(positions, batch_first=True),
    )  # fmt: skip


def split(batch: Batch, lengths: Sequence[int]) -> list[Sample]:
    """The samples of a padded batch, whose rows have these lengths."""
    ends = [0, *batch.mask_BL.sum(1).cumsum(0).tolist()]
    places = [(slice(n), slice(first, end)) for n, first, end in zip(lengths, ends[:-1], ends[1:], strict=True)]
    return [
        Sample(
            ids_L=batch.ids_BL[b, L], mask_L=batch.mask_BL[b, L], states=batch.states[torch.tensor(b)][L], last=batch.last[M],
            best_M=batch.best_P[M], lse_M=batch.lse_P[M],
        )
        for b, (L, M) in enumerate(places)
    ]  # fmt: skip


def leave_out_broken(batch: Batch) -> tuple[Batch, list[tuple[int, int]]]:
    """Take the mask, and with it the loss, from samples that hold a NaN or an infinity in states, last states or log-sum-exps.

    Returns the batch and the places (line, document) of these samples; their states become zeros, which reach no other sample.
    """
    bad_BL = ~torch.isfinite(batch.states_BLF.abs().amax(-1))
    bad_P = ~torch.isfinite(batch.last_PW.abs().amax(-1) + batch.lse_P)
    if not bool(bad_BL.any() | bad_P.any()):
        return batch, []
    at_P = batch.mask_BL.flatten().nonzero()[:, 0]
    bad_BL = bad_BL.flatten().index_fill(0, at_P[bad_P], True).view_as(bad_BL)
    B, L = bad_BL.shape
    doc_BL = torch.zeros_like(batch.ids_BL) if batch.doc_BL is None else batch.doc_BL
    sample_BL = doc_BL + torch.arange(B, device=doc_BL.device)[:, None] * L  # a line has at most L documents
    broken = sample_BL[bad_BL].unique()
    out_BL = torch.isin(sample_BL, broken) & (doc_BL >= 0)
    keep_P = ~out_BL.flatten()[at_P]
    clean = replace(
        batch, mask_BL=batch.mask_BL.masked_fill(out_BL, 0), states=Codes(batch.states_BLF.masked_fill(out_BL[..., None], 0.0)),
        last=batch.last[keep_P], best_P=batch.best_P[keep_P], lse_P=batch.lse_P[keep_P],
    )  # fmt: skip
    return clean, [divmod(sample, L) for sample in broken.tolist()]
