"""Hours of answers made in process (`regenerate --target`, `train --fresh-answers`), pass by pass: prompts in parts of like length, and a
batch whose places are filled again as rows end (planning/batches.py).

Legend: N rows, sorted by their prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from spectrain.planning.batches import BATCHES, FREE, KEEPS, parts
from spectrain.planning.hours import USABLE, Hours, bytes_read, pass_seconds
from spectrain.planning.sizes import Case
from spectrain.planning.terms import Term, short

MOST_CALLS = 50  # looked at, spread over all
Pair = tuple[int, int]  # tokens of a prompt and of its answer


@dataclass(frozen=True)
class Held:
    """Passes that are made with so many rows in the batch; context: tokens in the cache of the longest of these, in the mean."""

    passes: int
    rows: int
    context: float


def passes_of(pairs: Sequence[Pair], size: int) -> tuple[list[list[int]], list[Held]]:
    """Of a call that answers these with at most `size` rows at a time: the prompts that are read together, each time, and the passes.

    Every first token comes from the prompts' own pass, so that an answer of n tokens is in n - 1 passes.
    """
    waiting = list(pairs[::-1])
    held = [(0, *waiting.pop()) for _ in range(min(size, len(pairs)))]  # by row: passes before it, prompt, answer
    read, found, now = [[prompt for _, prompt, _ in held]], list[Held](), 0
    while held:
        free = [i for i, (begin, _, answer) in enumerate(held) if begin + answer - 1 <= now]
        if waiting and len(free) >= FREE * len(held):
            places = free[: len(waiting)]
            for i in places:
                held[i] = (now, *waiting.pop())
            read.append([held[i][1] for i in places])
        elif not waiting and len(held) - len(free) <= KEEPS * len(held):
            held = [row for row in held if row[0] + row[2] - 1 > now]
        else:
            ends = sorted(begin + answer - 1 for begin, _, answer in held)
            until = ends[ceil((FREE if waiting else 1 - KEEPS) * len(held)) - 1]
            first, last = (max(prompt + min(answer - 1, t - begin) for begin, prompt, answer in held) for t in (now + 1, until))
            found.append(Held(until - now, len(held), (first + last) / 2))
            now = until
    return read, found


def in_process(case: Case) -> Hours:
    """One process answers all rows with one copy of the target."""
    calls, scale = _calls(case)
    prompts = answers = padded = tokens = passes = held = 0.0
    for pairs in calls:
        read, made = passes_of(pairs, case.decode_batch)
        for lengths in read:
            for part in parts(lengths):
                longest = lengths[part[-1]]
                prompts += _reading(case, len(part), longest)
                padded, tokens = padded + len(part) * longest, tokens + sum(lengths[i] for i in part)
        for some in made:
            answers += some.passes * pass_seconds(case, some.rows, some.context, 1)
            passes, held = passes + some.passes, held + some.passes * some.rows
    prompts, answers, padded, tokens, passes, held = (x * scale for x in (prompts, answers, padded, tokens, passes, held))
    rate = short(case.machine.rate(case.target.bytes_a_weight) * case.machine.efficiency.capture)
    positions = f"{short(round(padded))} positions, {short(round(tokens))} of them tokens"
    each = f"{held / max(1.0, passes):.1f} rows in the mean of the {case.decode_batch} at most"
    terms = [
        Term("all prompts", prompts, f"{positions}, at {rate} products a second"),
        Term("all answers", answers, f"{short(round(passes))} passes of {each}"),
    ]  # fmt: skip
    note = "one process, one copy of the target" + ("" if case.lengths_N2 is not None else "; every row is taken to be of the mean length")
    if case.target.weight_bytes > USABLE * case.machine.memory:
        note += "; it does not fit on a device"
    return Hours("regeneration in process", (prompts + answers) / 3600, terms, note)


def _reading(case: Case, rows: int, length: int) -> float:
    """Seconds of a pass over prompts of this length: a GPU reads the weights while it multiplies, a CPU before."""
    t, m = case.target, case.machine
    by_bytes = bytes_read(case, rows * length) / (m.bandwidth * m.efficiency.decode)
    by_products = t.pass_flops(rows * length, rows, length / 2) / (m.rate(t.bytes_a_weight) * m.efficiency.capture)
    return max(by_bytes, by_products) if m.kind == "cuda" else by_bytes + by_products


def _calls(case: Case) -> tuple[Iterator[list[Pair]], float]:
    """What the calls are given, of all or of some, and by how many times the work is that of them."""
    d, size = case.data, case.decode_batch * BATCHES
    if case.lengths_N2 is None:
        answer = max(1, round(d.supervised / d.rows))
        rows = max(1, min(size, round(d.rows)))
        return iter([[(max(1, round(d.length) - answer), answer)] * rows]), d.rows / rows
    ordered_N2 = case.lengths_N2[np.argsort(case.lengths_N2[:, 0], kind="stable")]
    starts = np.arange(0, len(ordered_N2), size)
    chosen = starts[np.unique(np.linspace(0, len(starts) - 1, min(len(starts), MOST_CALLS)).round().astype(int))]
    calls = [_pairs(ordered_N2[start : start + size]) for start in chosen]
    return iter(calls), d.rows / sum(map(len, calls))


def _pairs(lengths_N2: Any) -> list[Pair]:
    return [(prompt, answer) for prompt, answer in lengths_N2.tolist()]
