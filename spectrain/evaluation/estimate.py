"""How long a measurement will take at most, before it begins: from what is recorded already, else from a few rounds of each arm.

An answer is taken to reach its limit, and a round to commit one token, so that the figure is an upper one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.data.formats import Prompt
from spectrain.decoding.generate import Result, generate
from spectrain.evaluation.measure import Arm, context_of
from spectrain.evaluation.records import Records
from spectrain.target.model import Target

TOKENS = 4  # of the answers that are timed
CONTEXT = 32  # of their prompts


@dataclass(frozen=True)
class Pace:
    """Seconds for a token of a prompt and for a round of a row, in batches of `rows`."""

    prompt: float
    round: float

    def answer(self, context: float, tokens: float) -> float:
        """An answer of so many tokens behind a context."""
        return context * self.prompt + tokens * self.round


def pace_of(target: Target, arm: Arm, ids: Sequence[int], *, rows: int, **how: Any) -> Pace:
    """From a few rounds of one batch, the first of which only warms up."""
    asked = [list(ids[:CONTEXT])] * rows
    found: list[Result] = [
        generate(target, asked, drafter=arm.drafter, shape=arm.shape, max_new_tokens=tokens, ignore_eos=True, **how)
        for tokens in (2, TOKENS)
    ]
    prefill = sum(row.prefill_seconds for row in found[1].rows)
    rounds = max(len(row.rounds) for row in found[1].rows)
    return Pace(prefill / (rows * len(asked[0])), (found[1].seconds - prefill) / (rows * max(1, rounds)))


def seconds_of_tau(
    target: Target, arms: Sequence[Arm], prompts: Sequence[Prompt], records: Records, *, max_new_tokens: int, batch_size: int,
    template: Mapping[str, Any],
) -> float:  # fmt: skip
    """Of what is missing to the records of all arms, by one process. An arm of another temperature is taken to be as fast."""
    lengths = {p.id: len(context_of(target, p, template=template)) for p in prompts}
    paces: dict[str, float] = {}
    total = 0.0
    for arm in arms:
        asked = [(p, turn) for p in prompts for turn in range(len(p.turns))]
        missing = [(p, turn) for p, turn in asked if not records.has(arm.name, "tau", p.id, turn)]
        done = [r for p, turn in asked if not turn and records.has(arm.name, "tau", p.id) for r in records.of(arm.name, "tau", [p])]
        if not missing:
            continue
        if done:
            total += len(missing) * sum(r.seconds for r in done) / len(done)
            continue
        how = f"{arm.by} {arm.shape}"
        if how not in paces:
            ids = max((context_of(target, p, template=template) for p in prompts), key=len)
            pace = pace_of(target, arm, ids, rows=min(batch_size, len(missing)))
            contexts = sum(lengths[p.id] * (turn + 1) + turn * max_new_tokens for p, turn in asked) / len(asked)
            paces[how] = pace.answer(contexts, max_new_tokens)
        total += len(missing) * paces[how]
    return total


def seconds_of_speed(target: Target, runs: int, prompts: Sequence[Prompt], *, max_new_tokens: int, template: Mapping[str, Any]) -> float:
    """Of `runs` timed answers, by the pace of plain decoding of one row."""
    if not runs:
        return 0.0
    every = [context_of(target, p, template=template) for p in prompts]
    pace = pace_of(target, Arm("plain"), every[0], rows=1, compile=False)
    return runs * pace.answer(sum(map(len, every)) / len(every), max_new_tokens)
