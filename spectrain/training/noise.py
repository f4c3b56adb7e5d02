"""Noise on the states that a head reads while training, so that it learns to read its own guesses (EAGLE, arXiv 2401.15077).

Legend: B lines, L tokens, N = B * L, F width of the states read.
"""

from dataclasses import replace

import torch

from spectrain.data.batches import Batch
from spectrain.data.codes import Codes


def noisy(batch: Batch, noise: float) -> Batch:
    """States plus uniform noise of width noise * 512 / tokens of the row up to its last supervised one, drawn from torch's global
    generator; the last states that are the labels stay as they are."""
    B, L = batch.ids_BL.shape
    number_L = torch.arange(L, device=batch.ids_BL.device)
    position_BL = number_L.expand(B, L) if batch.position_BL is None else batch.position_BL
    doc_BL = torch.zeros_like(batch.ids_BL) if batch.doc_BL is None else batch.doc_BL.clamp(min=0)
    sample_N = (doc_BL + torch.arange(B, device=doc_BL.device)[:, None] * L).flatten()  # a line has at most L documents
    end_N = ((position_BL + 1) * batch.mask_BL).flatten().float()
    length_N = torch.zeros_like(end_N).scatter_reduce(0, sample_N, end_N, "amax")[sample_N]
    width_BL1 = noise * 512 / length_N.clamp(min=1).view(B, L, 1)
    states_BLF = batch.states_BLF
    return replace(batch, states=Codes(states_BLF + (torch.rand_like(states_BLF) - 0.5) * width_BL1))
