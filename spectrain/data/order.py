"""Rows -> the order of a run: which rows an epoch draws, which share a line and a batch, and where a stopped run goes on.

The plan of an epoch is a pure function of the rows' sizes, the settings, the seed and the epoch, so a place in it is two numbers,
(epoch, batches done), whatever number of processes takes the batches.

Legend: N rows, R rows drawn for an epoch, J lines of an epoch, K batches of an epoch.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from spectrain.data.mixing import Ints, draw, shares, shuffled
from spectrain.data.rows import Row

Lines = list[list[int]]  # row numbers of a batch, line by line; unpacked: one row a line


@dataclass(frozen=True)
class Sizes:
    """What planning reads of N rows: tokens, supervised tokens (0: nothing to learn from), and each one's place in `domains`."""

    length_N: Ints
    supervised_N: Ints
    domain_N: Ints
    domains: tuple[str, ...]


def sizes(rows: Sequence[Row]) -> Sizes:
    """Sizes of rows; a row store holds them as arrays (`lengths_N`, `supervised_N`, `domain_N` into `domain_names`): no row is read."""
    arrays: Any = rows
    if hasattr(rows, "lengths_N"):
        length_N, supervised_N = np.asarray(arrays.lengths_N, np.int64), np.asarray(arrays.supervised_N, np.int64)
        names, place_D = np.unique(np.array(arrays.domain_names, dtype=np.str_), return_inverse=True)  # in order of name
        domain_N = place_D[arrays.domain_N]
    else:
        length_N = np.array([len(row) for row in rows], np.int64)
        # A supervised token counts from the second in a line on: the first one is in hand when drafting starts.
        supervised_N = np.array([row.supervised if (row.mask_L[1:-1] & row.mask_L[2:]).any() else 0 for row in rows], np.int64)
        names, domain_N = np.unique(np.array([row.domain for row in rows], dtype=np.str_), return_inverse=True)
    return Sizes(length_N, np.where(supervised_N > 1, supervised_N, 0), domain_N.astype(np.int64), tuple(str(n) for n in names))


@dataclass(frozen=True)
class Plan:
    """Batches of an epoch. line_J: where each line starts in rows_R; batch_K: where each batch starts among the lines."""

    rows_R: Ints
    line_J: Ints
    batch_K: Ints

    def __len__(self) -> int:
        return len(self.batch_K) - 1

    def __getitem__(self, k: int) -> Lines:
        border = self.line_J[self.batch_K[k] : self.batch_K[k + 1] + 1]
        return [self.rows_R[a:b].tolist() for a, b in zip(border[:-1], border[1:], strict=True)]


@dataclass(frozen=True)
class Planner:
    """Plans of a run over rows of given sizes.

    per_batch: supervised tokens of a batch at most, unless one line has more. packing: tokens of a line at most; None: a row a line.
    quota: rows an epoch draws by domain (`row_shares`).
    """

    sizes: Sizes
    per_batch: int
    seed: int
    quota: Mapping[str, int]
    packing: int | None = None

    def plan(self, epoch: int) -> Plan:
        """Rows are drawn and shuffled, sorted by length (or packed) within pools of a few batches so that little is padding, filled
        into batches until the next line would pass `per_batch`, and the batches shuffled again."""
        s = self.sizes
        domain_N = np.where(s.supervised_N > 0, s.domain_N, -1)
        rows_R = draw(domain_N, s.domains, self.quota, seed=self.seed, epoch=epoch)
        rows_R = rows_R[shuffled(len(rows_R), self.seed, epoch, "rows")]
        if not len(rows_R):
            return Plan(rows_R, np.zeros(1, np.int64), np.zeros(1, np.int64))
        pool = 8 * max(1, self.per_batch * len(rows_R) // int(s.supervised_N[rows_R].sum()))
        if self.packing:
            pool = max(pool, 64 * self.packing * len(rows_R) // int(s.length_N[rows_R].sum()))
            rows_R, line_J = _packed(rows_R, s.length_N[rows_R], pool, self.packing)
        else:
            rows_R = rows_R[np.lexsort((s.length_N[rows_R], np.arange(len(rows_R)) // pool))]
            line_J = np.arange(len(rows_R) + 1)
        weight_J = np.add.reduceat(s.supervised_N[rows_R], line_J[:-1])
        batch_K = _filled(weight_J.tolist(), self.per_batch, border=0 if self.packing else pool)
        line_J, batch_K, rows_R = _reordered(rows_R, line_J, batch_K, shuffled(len(batch_K) - 1, self.seed, epoch, "batches"))
        return Plan(rows_R, line_J, batch_K)


def row_shares(found: Sizes, weights: Mapping[str, float] | None, total: int | None = None) -> dict[str, int]:
    """Rows an epoch draws of each domain (`mixing.shares`); rows with nothing to learn from do not count."""
    number_D = np.bincount(found.domain_N[found.supervised_N > 0], minlength=len(found.domains))
    return shares({d: int(n) for d, n in zip(found.domains, number_D, strict=True) if n}, weights, total)


def check_lines(rows: Sequence[Row], found: Sizes, packing: int | None) -> None:
    """ValueError with the id of the first row that is longer than a line; no row is cut."""
    if packing is None or not len(found.length_N) or found.length_N.max() <= packing:
        return
    long_N = np.flatnonzero(found.length_N > packing)
    what = f"row {rows[int(long_N[0])].id!r} has {found.length_N[long_N[0]]} tokens, {len(long_N)} rows are longer than a line of {packing}"
    raise ValueError(f"training.packing: {what}; needed lines of at least {found.length_N.max()} tokens (or prepare with that max_length)")


def _packed(rows_R: Ints, length_R: Ints, pool: int, line: int) -> tuple[Ints, Ints]:
    """Best fit decreasing within each pool: a row goes to the line whose room it fills best. Rows in order of lines, starts of lines."""
    order: list[int] = []
    counts: list[int] = []
    for first in range(0, len(rows_R), pool):
        length_Q = length_R[first : first + pool]
        order_Q = np.argsort(-length_Q, kind="stable")
        room: list[tuple[int, int]] = []  # (tokens left, line), rising
        lines: Lines = []
        for q, length in zip(order_Q.tolist(), length_Q[order_Q].tolist(), strict=True):
            at = bisect_left(room, (length, -1))
            left, j = room.pop(at) if at < len(room) else (line, len(lines))
            if j == len(lines):
                lines.append([])
            lines[j].append(first + q)
            if left > length:
                insort(room, (left - length, j))
        for members in lines:
            order += members
            counts.append(len(members))
    return rows_R[order], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _filled(weight_J: Iterable[int], per_batch: int, *, border: int) -> Ints:
    """Starts of batches among lines, the end included; with `border`, a batch also ends after every `border` lines."""
    starts, total, j = [0], 0, -1
    for j, weight in enumerate(weight_J):
        if j > starts[-1] and (total + weight > per_batch or (border and j % border == 0)):
            starts.append(j)
            total = 0
        total += weight
    return np.array([*starts, j + 1], np.int64)


def _reordered(rows_R: Ints, line_J: Ints, batch_K: Ints, order_K: Ints) -> tuple[Ints, Ints, Ints]:
    """The same lines and batches with the batches in another order."""
    lines, batch_K = _ranges(batch_K, order_K)
    rows, line_J = _ranges(line_J, lines)
    return line_J, batch_K, rows_R[rows]


def _ranges(starts: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Members of the ranges starts[i] ... starts[i + 1] - 1 for i in `order`, and the starts of the ranges in that order."""
    size = np.diff(starts)[order]
    new = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    return np.repeat(starts[order] - new[:-1], size) + np.arange(new[-1]), new


def dealt(batches: Sequence[Lines], found: Sizes, world: int) -> list[Lines]:
    """The lines of a step's batches in as many parts, of which process r takes r, r + world, ...: of nearly equal work, which goes by
    supervised tokens, so that no process waits long for the others. What a step learns from is the same.

    No part takes more tokens with its padding than the largest batch; where that cannot be, and for one process, the batches stay.
    """
    if world == 1:
        return list(batches)
    sized = [[(int(found.supervised_N[line].sum()), int(found.length_N[line].sum()), line) for line in lines] for lines in batches]
    most = max(len(lines) * max(length for _, length, _ in lines) for lines in sized if lines)
    parts: list[Lines] = [[] for _ in batches]
    work, longest = [0] * len(parts), [0] * len(parts)
    for supervised, length, line in sorted(chain(*sized), reverse=True):
        fitting = [k for k, part in enumerate(parts) if (len(part) + 1) * max(longest[k], length) <= most]
        if not fitting:
            return list(batches)
        k = min(fitting, key=lambda k: work[k])
        parts[k].append(line)
        work[k], longest[k] = work[k] + supervised, max(longest[k], length)
    return parts


class Order:
    """A walk through the batches of all epochs. `state` is all that a checkpoint needs; a window takes any number of batches."""

    def __init__(self, plan: Callable[[int], Plan], epochs: int) -> None:
        self._plan, self._epochs = plan, epochs
        self._epoch, self._done = 0, 0
        self._current: tuple[int, Plan] | None = None
        self._lengths: dict[int, int] = {}

    @property
    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "batches": self._done}

    def go_to(self, state: Mapping[str, int]) -> None:
        self._epoch, self._done = state["epoch"], state["batches"]

    def take(self, window: int, marks: int = 1) -> tuple[list[Lines], bool]:
        """The next `window` batches, fewer at an epoch's end, none after the last; and whether one of the epoch's `marks` evenly
        spaced marks was passed (the end is one)."""
        if self._epoch >= self._epochs:
            return [], False
        plan = self._of(self._epoch)
        before, after = self._done, min(self._done + window, len(plan))
        taken = [plan[k] for k in range(before, after)]
        passed = after * marks // len(plan) > before * marks // len(plan)
        self._done = after
        if after == len(plan):
            self._epoch, self._done = self._epoch + 1, 0
        return taken, passed

    def steps_left(self, window: int, at_most: int | None = None) -> int:
        """Windows of this many batches that are still to come; counted up to `at_most`, since each epoch counted must be planned."""
        steps, done = 0, self._done
        for epoch in range(self._epoch, self._epochs):
            if at_most is not None and steps >= at_most:
                break
            steps += -(-(self._length(epoch) - done) // window)
            done = 0
        return steps if at_most is None else min(steps, at_most)

    def _length(self, epoch: int) -> int:
        if epoch not in self._lengths:
            self._lengths[epoch] = len(self._of(epoch) if epoch == self._epoch else self._plan(epoch))
        return self._lengths[epoch]

    def _of(self, epoch: int) -> Plan:
        if self._current is None or self._current[0] != epoch:
            self._current = epoch, self._plan(epoch)
        return self._current[1]
