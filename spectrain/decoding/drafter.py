"""What the generator asks of a drafter, and what a drafter may look at.

Legend: B rows, N nodes, M nodes of the draft so far (root first), X laws asked for, V vocabulary, F width of the states read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spectrain.decoding.graphs import Graphs
from spectrain.decoding.processors import Histories
from spectrain.decoding.sampling import Coins, Sampling, probabilities
from spectrain.decoding.shapes import Shape
from spectrain.decoding.tree import DraftTree, Law
from spectrain.target.model import Target


@dataclass(frozen=True)
class Round:
    """One proposal: everything in it was known before a token of this round is drawn.

    committed: prompt and kept answer of each row. law: how drafts are chosen; other laws than `point_mass` draw with `coins`.
    depth_B: most drafts on a path of each row (None: the shape's depth). stop_below: end a row's chain after a token whose draft
    probability is smaller; that token is kept. estimate: the drafter should fill in `DraftTree.expected_B`. vocab_size: of the target,
    where it differs from the drafter's. live_B: rows that have not ended. longest: tokens that the longest row was said to have settled
    (`DraftSession.observe`). graphs: what records passes of fixed shapes, where there is such a thing.
    """

    committed: Sequence[Sequence[int]]
    shape: Shape
    law: Law = "point_mass"
    sampling: Sampling = Sampling()
    histories: Histories | None = None
    coins: Coins | None = None
    depth_B: Sequence[int] | None = None
    stop_below: float = 0.0
    estimate: bool = False
    vocab_size: int | None = None
    live_B: Sequence[bool] | None = None
    longest: int | None = None
    graphs: Graphs | None = None

    @property
    def needs_full_vocabulary(self) -> bool:
        """Whether draft logits must be spread over the target's vocabulary before tokens are chosen."""
        return self.histories is not None or self.law != "point_mass"

    def scores(self, logits_BXV: Tensor, tokens_BM: Tensor, ancestors_BXM: Tensor) -> Tensor:
        """Logits after the processors, each law on its own path (entry m of its last dimension: node m is on the path)."""
        if self.histories is None:
            return logits_BXV
        needed_BX = None
        if self.live_B is not None:  # a finished row has no law any more that a processor would accept
            needed_BX = torch.tensor(self.live_B, device=logits_BXV.device)[:, None].expand(logits_BXV.shape[:2])
        return self.histories.apply(logits_BXV, tokens_BM, ancestors_BXM, needed_BX=needed_BX, draft=True)

    def laws(self, logits_BXV: Tensor, tokens_BM: Tensor, ancestors_BXM: Tensor) -> Tensor:
        """The drafter's law after every transform that the target's law goes through too."""
        scores_BXV = self.scores(logits_BXV, tokens_BM, ancestors_BXM)
        empty_BX1 = scores_BXV.amax(-1, keepdim=True) == float("-inf")  # a draft vocabulary of which nothing is allowed
        return probabilities(scores_BXV, self.sampling).masked_fill(empty_BX1, 0.0)

    def limits(self) -> list[int]:
        """Most drafts on a path, by row."""
        depth = self.shape.depth
        return [depth] * len(self.committed) if self.depth_B is None else [min(depth, d) for d in self.depth_B]

    def root(self, device: torch.device) -> Tensor:
        """Each row's last committed token [B, 1]."""
        return torch.tensor([[ids[-1]] for ids in self.committed], device=device)


class DraftSession(Protocol):
    """A drafter's state for one batch.

    It may also have `finish(rows)`, called once with (ids, prompt length) of every row when the call has ended well, and `rewind()`,
    which takes the last proposal back so that it can be made (and timed) again; and `sound`, True where its trees are known to be what they
    say: parents first, ids of the target, drafted by their own q, no deeper than the shape. Every other tree is looked through
    (`accept.accept`), for which the host waits for the device.
    """

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """`count_B` more tokens a row are settled: the target's state of each, and the token that follows it."""

    def propose(self, round: Round) -> DraftTree | None:
        """A tree whose root is each row's last committed token; None for no draft in any row."""

    def select(self, rows_R: Tensor) -> None:
        """Keep only these rows."""


class Drafter(Protocol):
    """What `generate` asks of a drafter. It may also have `max_depth`, the most drafts on a path that it can make (None: any)."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The target's states that it reads (hs numbers)."""

    @property
    def has_q(self) -> bool:
        """Whether it can draw drafts from a law of its own; otherwise every draft is a point mass."""

    def start(self, target: Target, rows: int, max_length: int) -> DraftSession:
        """A session for `rows` rows of at most `max_length` tokens; every candidate of a draft counts, kept or not."""
