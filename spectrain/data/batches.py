"""Rows -> batches: which rows go together, in which order, the same after a resume.

Legend: B rows, L tokens, R counted rows, F width of the states read, W target width.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Sample:
    """One row with its states: ids_L, mask_L, states_LF, last_LW (zero where it was not stored), best_L and lse_L of the target."""

    ids_L: Tensor
    mask_L: Tensor
    states_LF: Tensor
    last_LW: Tensor
    best_L: Tensor
    lse_L: Tensor


@dataclass(frozen=True)
class Batch:
    """Samples padded at the end; padding carries mask 0."""

    ids_BL: Tensor
    mask_BL: Tensor
    states_BLF: Tensor
    last_BLW: Tensor
    best_BL: Tensor
    lse_BL: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad to the longest sample and stack."""
    fields = ("ids_L", "mask_L", "states_LF", "last_LW", "best_L", "lse_L")
    return Batch(*(pad_sequence([getattr(s, name) for s in samples], batch_first=True) for name in fields))


def plan_batches(lengths: Sequence[int], weights: Sequence[int], *, per_batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers of every batch of an epoch.

    lengths: tokens a row; weights: supervised tokens a row. Rows are shuffled by (seed, epoch), sorted by length within pools of
    a few batches so that little is padding, filled until the next row would pass `per_batch` supervised tokens, and the batches
    shuffled again. Every row with weight is in exactly one batch.
    """
    rng = random.Random(f"{seed}:{epoch}")
    order = [i for i in range(len(lengths)) if weights[i] > 0]
    rng.shuffle(order)
    mean = max(1, sum(weights[i] for i in order) // max(1, len(order)))
    pool = 8 * max(1, per_batch // mean)
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        batches += _fill(sorted(order[start : start + pool], key=lambda i: lengths[i]), weights, per_batch)
    rng.shuffle(batches)
    return batches


def _fill(order: Sequence[int], weights: Sequence[int], per_batch: int) -> Iterator[list[int]]:
    batch: list[int] = []
    weight = 0
    for i in order:
        if batch and weight + weights[i] > per_batch:
            yield batch
            batch, weight = [], 0
        batch.append(i)
        weight += weights[i]
    if batch:
        yield batch
