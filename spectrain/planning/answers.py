"""Hours of answers made in process (`regenerate --target`, `train --fresh-answers`): batches of prompts of like length, padded to the
longest of each, that shrink as their rows end.

Legend: N rows, sorted by their prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spectrain.planning.hours import USABLE, Hours, pass_seconds
from spectrain.planning.sizes import Case
from spectrain.planning.terms import Term, short

MOST_BATCHES = 400  # looked at, spread over all
KEEPS = 0.75  # a batch lets its finished rows go once no more than this share of those that it holds goes on (decoding/generate.py)


@dataclass(frozen=True)
class Held:
    """Passes that are made with so many rows in the batch; context: tokens in the cache of the longest of these, in the mean."""

    passes: int
    rows: int
    context: float


def passes_of(pairs: Sequence[tuple[int, int]]) -> list[Held]:
    """The passes after the prompts' own, which gives every first token, of a batch of rows of (prompt tokens, answer tokens)."""
    found, rows, begin = [], list(pairs), 1
    for end in sorted({answer for _, answer in pairs}):
        going = [pair for pair in rows if pair[1] > end]
        if going and len(going) > KEEPS * len(rows):
            continue
        if end > begin:
            found.append(Held(end - begin, len(rows), max(prompt for prompt, _ in rows) + (begin + end) / 2))
        rows, begin = going, end
    return found


def in_process(case: Case) -> Hours:
    """One process answers all rows with one copy of the target."""
    batches, scale = _batches(case)
    rate = case.machine.rate(case.target.bytes_a_weight) * case.machine.efficiency.capture
    prompts = answers = padded = tokens = passes = held = 0.0
    for pairs in batches:
        longest = max(prompt for prompt, _ in pairs)
        # A padded batch is attended to with a mask: all scores are computed, not the lower half alone.
        prompts += case.target.pass_flops(len(pairs) * longest, len(pairs), longest if len(pairs) > 1 else longest / 2) / rate
        padded, tokens = padded + len(pairs) * longest, tokens + sum(prompt for prompt, _ in pairs)
        for part in passes_of(pairs):
            answers += part.passes * pass_seconds(case, part.rows, part.context, 1)
            passes, held = passes + part.passes, held + part.passes * part.rows
    prompts, answers, padded, tokens, passes, held = (x * scale for x in (prompts, answers, padded, tokens, passes, held))
    positions = f"{short(round(padded))} positions, {short(round(tokens))} of them tokens"
    each = f"{held / max(1.0, passes):.1f} rows in the mean of the {case.decode_batch} that a batch begins with"
    terms = [
        Term("all prompts", prompts, f"{positions}, at {short(rate)} products a second"),
        Term("all answers", answers, f"{short(round(passes))} passes of {each}"),
    ]  # fmt: skip
    note = "one process, one copy of the target" + ("" if case.lengths_N2 is not None else "; every row is taken to be of the mean length")
    if case.target.weight_bytes > USABLE * case.machine.memory:
        note += "; it does not fit on a device"
    return Hours("regeneration in process", (prompts + answers) / 3600, terms, note)


def _batches(case: Case) -> tuple[Iterator[list[tuple[int, int]]], float]:
    """Batches of (prompt tokens, answer tokens), of all or of some, and by how many times the work is that of them."""
    d, size = case.data, case.decode_batch
    if case.lengths_N2 is None:
        answer = max(1, round(d.supervised / d.rows))
        rows = max(1, min(size, round(d.rows)))
        return iter([[(max(1, round(d.length) - answer), answer)] * rows]), d.rows / rows
    ordered_N2 = case.lengths_N2[np.argsort(case.lengths_N2[:, 0], kind="stable")]
    starts = np.arange(0, len(ordered_N2), size)
    chosen = starts[np.unique(np.linspace(0, len(starts) - 1, min(len(starts), MOST_BATCHES)).round().astype(int))]
    batches = [_pairs(ordered_N2[start : start + size]) for start in chosen]
    return iter(batches), d.rows / sum(map(len, batches))


def _pairs(lengths_N2: Any) -> list[tuple[int, int]]:
    return [(prompt, answer) for prompt, answer in lengths_N2.tolist()]
