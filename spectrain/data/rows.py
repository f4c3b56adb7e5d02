"""Rows: token ids with their loss mask, what training is made of.

Legend: L tokens of a row; R rows, T tokens of them all.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

import numpy as np
import numpy.typing as npt

from spectrain.data.filters import key64

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


@dataclass(frozen=True, eq=False)
class Columns:
    """Rows column by column, as processes send them and files hold them: a few arrays instead of several objects a row.

    ids_T, mask_T: of one row behind the other; digest_R: 16 bytes each; key_R: hashes of the token ids.
    """

    id_R: list[str]
    domain_R: list[str]
    group_R: list[str]
    length_R: npt.NDArray[np.int32]
    supervised_R: npt.NDArray[np.int32]
    key_R: npt.NDArray[np.uint64]
    digest_R: npt.NDArray[np.void]
    ids_T: Ids
    mask_T: Mask

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Columns":
        ids_T = np.concatenate([np.empty(0, np.int32), *(row.ids_L for row in rows)])
        mask_T = np.concatenate([np.empty(0, np.uint8), *(row.mask_L for row in rows)])
        length_R = np.array([len(row.ids_L) for row in rows], np.int32)
        end_R, before_T = np.cumsum(length_R), np.cumsum(np.concatenate([np.zeros(1, np.int32), mask_T], dtype=np.int32))
        return cls(
            [row.id for row in rows], [row.domain for row in rows], [row.group for row in rows], length_R,
            (before_T[end_R] - before_T[end_R - length_R]).astype(np.int32),
            np.array([key64(row.ids_L.tobytes()) for row in rows], np.uint64),
            np.frombuffer(b"".join(row.digest for row in rows), "V16"), ids_T, mask_T,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.id_R)

    def kept(self, keep_R: npt.NDArray[np.bool_]) -> "Columns":
        """The rows marked."""
        if keep_R.all():
            return self
        keep_T = np.repeat(keep_R, self.length_R)
        ids, domains, groups = (list(compress(column, keep_R)) for column in (self.id_R, self.domain_R, self.group_R))
        return Columns(
            ids, domains, groups, self.length_R[keep_R], self.supervised_R[keep_R], self.key_R[keep_R], self.digest_R[keep_R],
            self.ids_T[keep_T], self.mask_T[keep_T],
        )  # fmt: skip


def rows_sha256(rows: Iterable[Row]) -> str:
    """One hash of rows in their order: SHA-256 over their digests. A row store has it at hand."""
    known = getattr(rows, "rows_sha256", None)
    if isinstance(known, str):
        return known
    whole = hashlib.sha256()
    for row in rows:
        whole.update(row.digest)
    return whole.hexdigest()
