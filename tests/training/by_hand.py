"""Rows with their states in memory, taken from a target's own forward pass in float32, as a feature store gives them.

Tests load it with runpy, since tests are no package.
"""

from collections.abc import Sequence

import torch

from spectrain.data.batches import Batch, Sample, collate
from spectrain.data.codes import Codes
from spectrain.data.rows import Row
from spectrain.target.model import Target

LAYERS = (1, 2)


def sample_of(row: Row, target: Target) -> Sample:
    ids_1L, at_M = torch.tensor(row.ids_L.tolist())[None], torch.tensor(row.mask_L.tolist()).nonzero()[:, 0]
    out = target.forward(ids_1L, positions_BN=torch.arange(len(row))[None], mask=None, cache=None, layer_ids=LAYERS)
    logits_MV = out.logits_BKV[0, at_M]
    return Sample(
        ids_L=ids_1L[0], mask_L=torch.tensor(row.mask_L.tolist()), states=Codes(out.states_BNF[0]), last=Codes(out.last_BKW[0, at_M]),
        best_M=logits_MV.argmax(-1), lse_M=logits_MV.logsumexp(-1),
    )  # fmt: skip


class Samples:
    def __init__(self, rows: Sequence[Row], samples: Sequence[Sample]) -> None:
        self.rows, self.samples = list(rows), list(samples)

    @classmethod
    def of(cls, target: Target, rows: Sequence[Row]) -> "Samples":
        return cls(rows, [sample_of(row, target) for row in rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Sample:
        return self.samples[i]

    def batch(self, numbers: Sequence[int]) -> Batch:
        return collate([self[i] for i in numbers])


def row_of(prompt: Sequence[int], answer: Sequence[int], name: str = "", domain: str = "d") -> Row:
    return Row(name, domain, [*prompt, *answer], [0] * len(prompt) + [1] * len(answer))


def random_rows(count: int, seed: int = 0, vocab: int = 100) -> list[Row]:
    """Rows of 8 to 20 random ids, the first three of them the prompt."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 21, (count,), generator=g).tolist()
    ids = [torch.randint(0, vocab, (n,), generator=g).tolist() for n in lengths]
    return [row_of(x[:3], x[3:], name=str(i)) for i, x in enumerate(ids)]
