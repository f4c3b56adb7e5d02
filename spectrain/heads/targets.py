"""Which row answers which token, whose mask counts, and the draft vocabulary. The one home of alignment.

Row i holds the target's state of token i and the token i + 1 in hand; it answers token i + ahead (2 for the first draft, one more
for each later one). It counts when every token i + 1 ... i + ahead carries the mask, in the document of token i: exactly what the
generator can ask, since drafting starts with a token of the answer in hand.

Legend: B rows, L tokens, D width, V target vocabulary, Vd draft vocabulary.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Aligned:
    """Column i of each field belongs to row i, 0 <= i < L - ahead. in_hand is the newest token the row may read."""

    hidden_BRD: Tensor
    in_hand_BR: Tensor
    answer_BR: Tensor
    counts_BR: Tensor


def align(hidden_BLD: Tensor, ids_BL: Tensor, mask_BL: Tensor, *, ahead: int = 2, doc_BL: Tensor | None = None) -> Aligned:
    """Pair every state with its newest readable token (i + ahead - 1), its answer (i + ahead), and whether it counts.

    Raises ValueError for shapes that differ or `ahead` below 2.
    """
    if hidden_BLD.shape[:2] != ids_BL.shape or mask_BL.shape != ids_BL.shape:
        found = f"hidden {tuple(hidden_BLD.shape)}, ids {tuple(ids_BL.shape)} and mask {tuple(mask_BL.shape)}"
        raise ValueError(f"{found} must agree in rows and length")
    R = max(ids_BL.shape[1] - ahead, 0)
    counts_BL = counted(mask_BL, ahead=ahead, doc_BL=doc_BL)
    return Aligned(
        hidden_BRD=hidden_BLD[:, :R], in_hand_BR=ids_BL[:, ahead - 1 : ahead - 1 + R],
        answer_BR=ids_BL[:, ahead : ahead + R], counts_BR=counts_BL[:, :R],
    )  # fmt: skip


def counted(mask_BL: Tensor, *, ahead: int, doc_BL: Tensor | None = None) -> Tensor:
    """Boolean [B, L]: does row i count for the answer i + ahead? Rows whose answer lies beyond the end do not."""
    if ahead < 2:
        raise ValueError(f"ahead must be at least 2 (the token in hand is i + 1), found {ahead}")
    L = mask_BL.shape[1]
    counts_BL = torch.zeros_like(mask_BL, dtype=torch.bool)
    if L <= ahead:
        return counts_BL
    R = L - ahead
    ok_BR = torch.ones_like(counts_BL[:, :R])
    for offset in range(1, ahead + 1):
        ok_BR = ok_BR & mask_BL[:, offset : offset + R].bool()
        if doc_BL is not None:
            ok_BR = ok_BR & (doc_BL[:, offset : offset + R] == doc_BL[:, :R])
    counts_BL[:, :R] = ok_BR
    return counts_BL


@dataclass(frozen=True)
class DraftVocabulary:
    """target_ids: the draft vocabulary, rising; d2t = target id - draft id (int64 [Vd]); t2d: membership (bool [V])."""

    target_ids: Tensor
    d2t: Tensor
    t2d: Tensor


def draft_vocabulary(counts_V: Tensor, size: int | None, *, num_ids: int | None = None) -> DraftVocabulary:
    """The `size` most frequent ids (ties and unseen ids: lowest first), in rising order; None: all of them.

    num_ids: ids that the tokenizer has; rows of the target beyond them are padding and never drafted. ValueError unless
    1 <= size <= num_ids.
    """
    V = len(counts_V)
    there = V if num_ids is None else min(num_ids, V)
    size = there if size is None else size
    if not 1 <= size <= there:
        padded = f" of {V} rows, the rest is padding" if there < V else ""
        raise ValueError(f"draft vocabulary of {size} asked for; needed 1 to {there} (the target's vocabulary{padded})")
    target_ids = torch.argsort(counts_V[:there], descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[target_ids] = True
    return DraftVocabulary(target_ids=target_ids, d2t=target_ids - torch.arange(size), t2d=t2d)


def coverage(counts: Mapping[str, Tensor], vocabulary: DraftVocabulary) -> dict[str, tuple[int, int]]:
    """By domain: supervised tokens inside the draft vocabulary, and all supervised tokens. counts: [V] each."""
    return {domain: (int(counts_V[vocabulary.t2d].sum()), int(counts_V.sum())) for domain, counts_V in counts.items()}


def vocabulary_key(*, rows_sha256: str, tokenizer_sha256: str, size: int) -> str:
    """What a draft vocabulary was cut from: corpus, tokenizer and size. Maps with other keys are not to be exchanged."""
    return hashlib.sha256(json.dumps([rows_sha256, tokenizer_sha256, size]).encode()).hexdigest()
