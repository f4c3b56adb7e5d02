"""Tokens a second by batch, with drafts and without: where the sign flips, and whether a policy made from it holds.

A batch stays full, as in a server with work waiting: of all rows the answer's first tokens are counted, and a row that has them goes on as
a stand-in for the next one until the slowest has them, too. So a batch's rate is rows × tokens of an answer ÷ mean rounds of an answer ÷
seconds of a round. (The rounds up to the first row's end would be a wrong sample: they show mostly the row whose drafts fit best.)
Arms take turns on the same rows (A B A B). Each set of rows is answered several times; of an arm's times with it the median counts, and a
speed-up is one of totals over all sets. Every turn is kept when it is done, so that a second call makes only what is missing.

Legend: B rows.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generate import generate
from spectrain.decoding.policies import Adaptive
from spectrain.decoding.shapes import Chain
from spectrain.evaluation.estimate import pace_of
from spectrain.evaluation.measure import Arm
from spectrain.evaluation.policy import SLACK, costs_as_dict, depths_by_batch, flips_at, for_engines, own_policy, verified
from spectrain.evaluation.records import whole_lines
from spectrain.evaluation.speed import BATCH_REPEATS, ROUND_TOKENS, Compile, measure_costs
from spectrain.target.model import Target
from spectrain.yields import Costs, tau_from_survival

CALIBRATION = 8  # rows of a batch of the answers from which acceptance is taken
WARM_UP = 3  # tokens of prompt and answer outside the clock, before the turns of a batch
PHASES = ("draft", "verify", "other")
PLAIN, ALWAYS, TABLE, ADAPTIVE = "plain", "speculative", "table", "adaptive"


@dataclass(frozen=True)
class Bench:
    """What is run. prompts: ids of each; at each batch as many sets of rows as it takes to answer `least` prompts, each `repeats` times."""

    target: Target
    prompts: Sequence[Sequence[int]]
    batches: Sequence[int]
    max_new_tokens: int
    repeats: int
    least: int
    context: int
    compile: Compile

    def sets(self, batch: int) -> int:
        return math.ceil(self.least / batch)

    def pairs(self, batch: int) -> int:
        return self.sets(batch) * self.repeats

    def rows(self, batch: int, pair: int, prompts: Sequence[int]) -> list[list[int]]:
        """The prompts of a pair, those of all sets in turn; where there are fewer than rows, some stand there again."""
        first = pair % self.sets(batch) * batch
        return [list(self.prompts[prompts[(first + b) % len(prompts)]]) for b in range(batch)]


class Kept:
    """`bench-runs.jsonl`: results by what they are of, under one key (hash of all that they depend on)."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        rows = whole_lines(path) if path.exists() else ()
        self._found = {json.dumps(row["of"]): row["result"] for row in rows if row["key"] == key}

    def has(self, *of: Any) -> bool:
        """Whether it is there."""
        return json.dumps(of) in self._found

    def once(self, make: Callable[[], Any], *of: Any) -> Any:
        """The result, made and written down where it is not there yet."""
        name = json.dumps(of)
        if name not in self._found:
            result = json.loads(json.dumps(make()))  # as it is read back
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": self._key, "of": of, "result": result}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._found[name] = result
        return self._found[name]


def calibrate(bench: Bench, drafter: Drafter, shape: Chain) -> dict[str, Any]:
    """Answers to all prompts with drafts: which run to the full length (others would leave the batch), and what was accepted.

    ValueError where no answer is that long.
    """
    long_enough, judged = [], []
    for first in range(0, len(bench.prompts), CALIBRATION):
        rows = [list(ids) for ids in bench.prompts[first : first + CALIBRATION]]
        result = generate(bench.target, rows, drafter=drafter, shape=shape, max_new_tokens=bench.max_new_tokens, compile=bench.compile)
        for i, row in enumerate(result.rows, first):
            if row.finish_reason == "length":
                long_enough.append(i)
                judged += row.rounds[:-1] or row.rounds
    if not long_enough:
        raise ValueError(f"no answer to these prompts has {bench.max_new_tokens} tokens; lower --max-new-tokens, or take another suite")
    survival = [sum(r.accepted >= i for r in judged) / len(judged) for i in range(1, shape.depth + 1)]
    conditional: list[float] = []
    for i in range(1, shape.depth + 1):
        stood = [r.accepted >= i for r in judged if (r.depth or 0) >= i and r.accepted >= i - 1]
        conditional.append(sum(stood) / len(stood) if stood else conditional[-1] if conditional else 0.0)
    share = sum(bool(r.depth) for r in judged) / len(judged)
    return {"prompts": long_enough, "survival": survival, "conditional": conditional, "share": share, "rounds": len(judged)}


Way = tuple[Drafter | None, Chain | None, Adaptive | None]


def turn(bench: Bench, rows: Sequence[Sequence[int]], arm: Way, deepest: int, max_new_tokens: int | None = None) -> dict[str, Any]:
    """One call of the generator: tokens a second of a full batch, and the means of its rounds (tokens: a round of an answer's).

    deepest: of all arms that are compared, so that the cache of each has the same size."""
    drafter, shape, policy = arm
    most = (max_new_tokens or bench.max_new_tokens) - 1  # the first one comes with the prompt; so many rounds do for every row
    longest = min(1 + most * (1 + deepest), bench.target.max_length - max(map(len, rows)))
    result = generate(
        bench.target, rows, drafter=drafter, shape=shape, policy=policy, max_new_tokens=longest, ignore_eos=True, max_rounds=most,
        compile=bench.compile,
    )  # fmt: skip
    rounds_B = [row.rounds for row in result.rows]
    every, whole = [r for rounds in rounds_B for r in rounds], max(rounds_B, key=len)
    seconds = (result.seconds - sum(row.prefill_seconds for row in result.rows)) / len(whole)
    draft, verify = (sum(r.seconds.get(phase, 0.0) for r in every) / len(whole) for phase in ("draft", "verify"))
    needed_B = [1 + sum(tokens < most for tokens in accumulate(r.committed for r in rounds)) for rounds in rounds_B]
    tau = most * len(rows) / sum(needed_B)
    return {
        "draft": draft, "verify": verify, "other": seconds - draft - verify, "rounds": len(whole), "tokens": tau,
        "nodes": sum(r.nodes for r in whole) / len(whole) - 1, "depth": sum(r.depth for r in every) / len(every),
        "tokens_per_s": len(rows) * tau / seconds, "mode": result.mode,
    }  # fmt: skip


def turns(
    bench: Bench, kept: Kept, name: str, batch: int, prompts: Sequence[int], arms: Mapping[str, Way], bar: Any
) -> dict[str, list[dict[str, Any]]]:
    """All pairs of a batch by arm; the arm that begins changes from pair to pair."""
    what = [_pair(name, batch, pair) for pair in range(bench.pairs(batch))]
    deepest = max(shape.depth for _, shape, _ in arms.values() if shape is not None)

    def run(rows: Sequence[Sequence[int]], order: Sequence[str]) -> dict[str, Any]:
        return {arm: turn(bench, rows, arms[arm], deepest) for arm in order}

    if not all(kept.has(*of) for of in what):
        for way in arms.values():
            turn(bench, [list(bench.prompts[prompts[0]])[-WARM_UP:]] * batch, way, deepest, WARM_UP)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for pair, of in enumerate(what):
        order = list(arms)[pair % len(arms) :] + list(arms)[: pair % len(arms)]
        rows = bench.rows(batch, pair, prompts)
        result = kept.once(partial(run, rows, order), *of)
        for arm in order:
            found[arm].append(result[arm])
        bar.update()
    return found


def minutes(bench: Bench, kept: Mapping[str, Kept], drafts: Mapping[str, tuple[Drafter, Chain]]) -> float:
    """How long what is missing takes, about: from a few rounds at each batch. 0 where nothing is missing."""
    seconds = 0.0
    mean = sum(map(len, bench.prompts)) / len(bench.prompts)
    for batch in bench.batches:
        todo = {name: [p for p in range(bench.pairs(batch)) if not kept[name].has(*_pair(name, batch, p))] for name in drafts}
        if not any(todo.values()):
            continue
        plain = pace_of(bench.target, Arm(PLAIN), bench.prompts[0], rows=batch, compile=bench.compile)
        for name, (drafter, shape) in drafts.items():
            drafting = pace_of(bench.target, Arm(name, drafter, shape), bench.prompts[0], rows=batch, compile=bench.compile)
            answer = plain.answer(mean, bench.max_new_tokens) + 2 * drafting.answer(mean, bench.max_new_tokens)
            beside = 0.0 if kept[name].has("costs", name) else 3 * BATCH_REPEATS * plain.answer(bench.context, ROUND_TOKENS)
            seconds += batch * (len(todo[name]) * answer + beside)
            if batch == bench.batches[-1] and not kept[name].has("calibration", name):
                seconds += len(bench.prompts) * drafting.answer(mean, bench.max_new_tokens)
    return seconds / 60


def _pair(name: str, batch: int, pair: int) -> tuple[str, str, int, int]:
    return "pair", name, batch, pair


def measure(bench: Bench, kept: Kept, name: str, drafter: Drafter, shape: Chain, say: Callable[[str], None]) -> dict[str, Any]:
    """One drafter at every batch: figures, policies, and whether they hold. The entry `drafters[name]` of bench.json."""
    known = kept.once(lambda: calibrate(bench, drafter, shape), "calibration", name)
    survival, prompts = known["survival"], known["prompts"]
    costs = Costs(**kept.once(lambda: _costs_of(bench, drafter, shape), "costs", name))
    chances = known["conditional"], known["share"]
    depths = {batch: depth for batch, (depth, _) in depths_by_batch(*chances, costs, bench.batches).items()}
    policy = own_policy(for_engines(depths, *chances, costs)["spectrain"])
    rows, corrected = [], {}
    total = sum(map(bench.pairs, bench.batches))
    with tqdm(total=total, desc=f"bench: {name}", unit="pair", disable=None) as bar:
        for batch in bench.batches:
            own: dict[str, Way] = {PLAIN: (None, None, None), ALWAYS: (drafter, shape, None), ADAPTIVE: (drafter, shape, policy)}
            if depths[batch] not in (0, shape.depth):
                own = {**own, TABLE: (drafter, Chain(depths[batch]), None)}
            found = turns(bench, kept, name, batch, prompts, own, bar)
            kind: dict[str, Any] = {"batch": batch, "most": shape.depth, "sets": bench.sets(batch)}
            row = _row(found, costs, survival, depth=depths[batch], **kind)
            if row[TABLE] < (1 - SLACK) * max(row[PLAIN], row[ALWAYS]):  # what was measured decides
                corrected[batch] = depths[batch]
                depths[batch] = shape.depth if row[ALWAYS] > row[PLAIN] else 0
                row = _row(found, costs, survival, depth=depths[batch], **kind)
            rows.append(row)
    if corrected:
        told = ", ".join(f"{depths[batch]} instead of {depth} at batch {batch}" for batch, depth in corrected.items())
        say(f"{name}: measured speeds decide where they differ from the predicted ones: depth {told}")
    return {
        "shape": str(shape), "depth": shape.depth, "survival": survival, "tau": tau_from_survival(survival, shape.depth), "rows": rows,
        "flips_at": flips_at(rows), "policy": for_engines(depths, *chances, costs), "corrected": corrected, "verified": verified(rows),
    }  # fmt: skip


def _costs_of(bench: Bench, drafter: Drafter, shape: Chain) -> dict[str, Any]:
    costs = measure_costs(
        bench.target, drafter, shape=shape, context=bench.context, sizes=1 + shape.depth, batches=bench.batches, compile=bench.compile
    )
    return costs_as_dict(costs)


def _row(
    found: Mapping[str, Sequence[Mapping[str, Any]]], costs: Costs, survival: Sequence[float], *, batch: int, depth: int, most: int,
    sets: int,
) -> dict[str, Any]:
    """Figures of a batch: tokens a second by arm, of totals (all answers have one length), speed-ups with the lowest and highest of a set,
    and what costs and calibrated acceptance predict.

    depth: of the table; most: of the shape. break_even and its parts: of a round, in rounds of plain decoding.
    """
    by_set = {arm: [statistics.median(t["tokens_per_s"] for t in turns[n::sets]) for n in range(sets)] for arm, turns in found.items()}
    rate = {arm: statistics.harmonic_mean(rates) for arm, rates in by_set.items()}

    def mean(arm: str, what: str) -> float:
        """Of a round; of all turns with an arm together."""
        return sum(turn[what] * turn["rounds"] for turn in found[arm]) / sum(turn["rounds"] for turn in found[arm])

    always = [a / b for a, b in zip(by_set[ALWAYS], by_set[PLAIN], strict=True)]
    named = PLAIN if depth == 0 else ALWAYS if depth == most else TABLE
    unit = sum(mean(PLAIN, phase) for phase in PHASES)
    parts = {phase: mean(ALWAYS, phase) / unit for phase in PHASES}
    return {
        "batch": batch, PLAIN: rate[PLAIN], ALWAYS: rate[ALWAYS], TABLE: rate[named], ADAPTIVE: rate[ADAPTIVE],
        "speedup": rate[ALWAYS] / rate[PLAIN], "lo": min(always), "hi": max(always), "sets": sets,
        "pairs": len(found[PLAIN]), "tau": statistics.harmonic_mean([turn["tokens"] for turn in found[ALWAYS]]),
        "break_even": sum(parts.values()), **parts,
        "predicted": tau_from_survival(survival, most) / costs.break_even(mean(ALWAYS, "depth"), mean(ALWAYS, "nodes"), batch),
        "v": costs.verify(1 + most, batch) / costs.verify(1, batch), "c": costs.step(batch), "k": depth,
        "mode": found[ALWAYS][0]["mode"], "adaptive_depth": mean(ADAPTIVE, "depth"),
    }  # fmt: skip
