"""Rows: token ids with their loss mask, what training is made of.

Legend: L tokens.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Row:
    """Token ids and mask (1 = supervised) of one conversation, or of one assistant turn of it; equal lengths.

    id: unique in its store. group: the conversation it came from; rows of a group stand side by side and may share a beginning.
    """

    id: str
    domain: str
    ids_L: Ids
    mask_L: Mask
    group: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids_L", np.asarray(self.ids_L, dtype=np.int32))
        object.__setattr__(self, "mask_L", np.asarray(self.mask_L, dtype=np.uint8))
        object.__setattr__(self, "group", self.group or self.id)
        assert self.ids_L.shape == self.mask_L.shape and self.ids_L.ndim == 1

    def __len__(self) -> int:
        return len(self.ids_L)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and self.digest == other.digest and self.domain == other.domain

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return int(self.mask_L.sum())

    @property
    def supervised_ids(self) -> Ids:
        """Ids of the supervised tokens."""
        return self.ids_L[self.mask_L == 1]

    @property
    def prompt_ids(self) -> list[int]:
        """Ids before the first supervised token: what the target was asked."""
        return [int(i) for i in self.ids_L[: int(self.mask_L.argmax())]]

    @property
    def digest(self) -> bytes:
        """16 bytes that differ where id, ids or mask differ."""
        return hashlib.blake2b(
            b"\0".join((self.id.encode(errors="surrogatepass"), self.ids_L.tobytes(), self.mask_L.tobytes())), digest_size=16
        ).digest()


def rows_sha256(rows: Iterable[Row]) -> str:
    """One hash of rows in their order: SHA-256 over their digests. A row store has it at hand."""
    known = getattr(rows, "rows_sha256", None)
    if isinstance(known, str):
        return known
    whole = hashlib.sha256()
    for row in rows:
        whole.update(row.digest)
    return whole.hexdigest()
