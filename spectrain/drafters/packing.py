"""Drafts made row by row in plain Python: packing them into one tree, and what became of them.

Legend: B rows, N nodes of the widest row, root included.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spectrain.decoding.tree import DraftTree
from spectrain.yields import expected_tokens

DECAY = 0.9  # of the record at each further proposal: the last ten or so count
PRIOR = (1.0, 2.0)  # hits and tries before the first proposal: one token in two


class RowDraft(NamedTuple):
    """The drafted tokens of one row, and the node number (0: root) of each one's parent; parents come first."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "RowDraft":
        return cls(list(tokens), list(range(len(tokens))))


def pack(
    committed: Sequence[Sequence[int]], drafts: Sequence[RowDraft], device: torch.device, expected: Sequence[float] | None = None
) -> DraftTree | None:
    """Drafts of unequal size as one tree, padded behind `num_B`; a chain when all are; None when there is no draft in any row."""
    widest = max(len(draft.tokens) for draft in drafts)
    if widest == 0:
        return None
    is_chain = all(parent == n for draft in drafts for n, parent in enumerate(draft.parents))
    tokens = [[ids[-1], *draft.tokens] + [0] * (widest - len(draft.tokens)) for ids, draft in zip(committed, drafts, strict=True)]
    tokens_BN = torch.tensor(tokens, device=device)
    num_B = torch.tensor([1 + len(draft.tokens) for draft in drafts], device=device)
    if is_chain:
        parents_BN = torch.arange(-1, widest, device=device).expand_as(tokens_BN)
    else:
        parents_BN = torch.tensor([[-1, *draft.parents] + [0] * (widest - len(draft.tokens)) for draft in drafts], device=device)
    expected_B: Tensor | None = None if expected is None else torch.tensor(expected, dtype=torch.float32, device=device)
    return DraftTree(tokens_BN, parents_BN, num_B, "point_mass", is_chain=is_chain, expected_B=expected_B)


def walk(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """The drafts that spell the beginning of `text`, from the root down; place n holds node n + 1."""
    places = {step: place for place, step in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    for token in text:
        place = places.get((path[-1] + 1 if path else 0, token))
        if place is None:
            break
        path.append(place)
    return path


class Record:
    """How a drafter's chains for one row have fared, by the kind of evidence behind them (the length of a match, say).

    A proposal is judged by the tokens committed after it, whether or not it was the one that the target verified.
    """

    def __init__(self) -> None:
        self._rates: dict[int, tuple[float, float]] = {}  # kind -> hits, tries
        self._open: tuple[int, int, list[int]] | None = None  # kind, committed length, drafts

    def note(self, kind: int, length: int, drafts: list[int]) -> None:
        """A chain was proposed behind `length` committed tokens."""
        self._open = (kind, length, drafts) if drafts else None

    def settle(self, ids: Sequence[int]) -> None:
        """Judge the last proposal by what was committed since."""
        if self._open is None or len(ids) == self._open[1]:
            return
        kind, length, drafts = self._open
        self._open = None
        pairs = list(zip(drafts, ids[length : length + len(drafts)], strict=False))
        right = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
        hits, tries = self._rates.get(kind, PRIOR)
        self._rates[kind] = (DECAY * hits + right, DECAY * tries + min(right + 1, len(pairs)))

    def expected(self, kind: int, drafts: int) -> float:
        """Expected number of accepted drafts of a chain, each token having the recent chance of its kind."""
        hits, tries = self._rates.get(kind, PRIOR)
        return expected_tokens(hits / tries, drafts) - 1.0
