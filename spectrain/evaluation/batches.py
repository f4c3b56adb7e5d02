"""Tokens a second by batch, with drafts and without: where the sign flips, and whether a policy made from it holds.

Rows of one batch are answered together for a fixed number of tokens; counted are the rounds in which all of them were still at work, as
in a server whose batch stays full. Arms take turns on the same rows (A B A B), each turn is a pair, and a speed-up is the median of the
pairs' ratios. Every turn is kept when it is done, so that a second call makes only what is missing.

Legend: B rows.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from spectrain.evaluation.speed import BATCH_REPEATS, ROUND_TOKENS, Compile, measure_costs, round_time
from spectrain.target.model import Target
from spectrain.yields import Costs, tau_from_survival

CALIBRATION = 8  # rows of a batch of the answers from which acceptance is taken
WARM_UP = 3  # tokens of prompt and answer outside the clock, before the turns of a batch
PHASES = ("draft", "verify", "other")
PLAIN, ALWAYS, TABLE, ADAPTIVE = "plain", "speculative", "table", "adaptive"


@dataclass(frozen=True)
class Bench:
    """What is run. prompts: ids of each; pairs of a batch: `repeats`, or as many as it takes to answer `least` prompts."""

    target: Target
    prompts: Sequence[Sequence[int]]
    batches: Sequence[int]
    max_new_tokens: int
    repeats: int
    least: int
    context: int
    compile: Compile

    def pairs(self, batch: int) -> int:
        return max(self.repeats, math.ceil(self.least / batch))

    def rows(self, batch: int, pair: int, prompts: Sequence[int]) -> list[list[int]]:
        """The prompts of a pair, taken in turn; where there are fewer than rows, some stand there again."""
        return [list(self.prompts[prompts[(pair * batch + b) % len(prompts)]]) for b in range(batch)]


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


def turn(bench: Bench, rows: Sequence[Sequence[int]], arm: Way, max_new_tokens: int | None = None) -> dict[str, Any]:
    """One call of the generator: tokens a second of the whole batch, and the means of its rounds."""
    drafter, shape, policy = arm
    result = generate(
        bench.target, rows, drafter=drafter, shape=shape, policy=policy, max_new_tokens=max_new_tokens or bench.max_new_tokens,
        compile=bench.compile,
    )  # fmt: skip
    time, depths = round_time(result), [r.depth for row in result.rows for r in row.rounds]
    return {
        **{phase: getattr(time, phase) for phase in PHASES}, "tokens": time.tokens, "nodes": sum(time.sizes) / len(time.sizes) - 1,
        "tokens_per_s": len(rows) * time.tokens / time.seconds, "mode": result.mode, "depth": sum(depths) / len(depths),
    }  # fmt: skip


def turns(
    bench: Bench, kept: Kept, name: str, batch: int, prompts: Sequence[int], arms: Mapping[str, Way], bar: Any
) -> dict[str, list[dict[str, Any]]]:
    """All pairs of a batch by arm; the arm that begins changes from pair to pair."""
    what = [_pair(name, batch, pair) for pair in range(bench.pairs(batch))]
    if not all(kept.has(*of) for of in what):
        for way in arms.values():
            turn(bench, [list(bench.prompts[prompts[0]])[-WARM_UP:]] * batch, way, WARM_UP)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for pair, of in enumerate(what):
        order = list(arms)[pair % len(arms) :] + list(arms)[: pair % len(arms)]
        rows = bench.rows(batch, pair, prompts)
        result = kept.once(partial(_pair_of, bench, rows, order, arms), *of)
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


def _pair_of(bench: Bench, rows: Sequence[Sequence[int]], order: Sequence[str], arms: Mapping[str, Way]) -> dict[str, Any]:
    return {arm: turn(bench, rows, arms[arm]) for arm in order}


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
            row = _row(found, costs, survival, batch=batch, depth=depths[batch], most=shape.depth)
            if row[TABLE] < (1 - SLACK) * max(row[PLAIN], row[ALWAYS]):  # what was measured decides
                corrected[batch] = depths[batch]
                depths[batch] = shape.depth if row[ALWAYS] > row[PLAIN] else 0
                row = _row(found, costs, survival, batch=batch, depth=depths[batch], most=shape.depth)
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
    found: Mapping[str, Sequence[Mapping[str, Any]]], costs: Costs, survival: Sequence[float], *, batch: int, depth: int, most: int
) -> dict[str, Any]:
    """Figures of a batch: tokens a second by arm, speed-ups of totals (all pairs' answers have one length) with the pairs' lowest and
    highest, and what costs and calibrated acceptance predict.

    depth: of the table; most: of the shape. break_even and its parts: of a round, in rounds of plain decoding.
    """

    def median(arm: str, what: str) -> float:
        return statistics.median(turn[what] for turn in found[arm])

    def rate(arm: str) -> float:
        return statistics.harmonic_mean([turn["tokens_per_s"] for turn in found[arm]])

    always = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(found[ALWAYS], found[PLAIN], strict=True)]
    named = PLAIN if depth == 0 else ALWAYS if depth == most else TABLE
    unit = sum(median(PLAIN, phase) for phase in PHASES)
    parts = {phase: median(ALWAYS, phase) / unit for phase in PHASES}
    steps, nodes = (median(ALWAYS, what) for what in ("depth", "nodes"))
    return {
        "batch": batch, PLAIN: rate(PLAIN), ALWAYS: rate(ALWAYS), TABLE: rate(named), ADAPTIVE: rate(ADAPTIVE),
        "speedup": rate(ALWAYS) / rate(PLAIN), "lo": min(always), "hi": max(always),
        "pairs": len(found[PLAIN]), "tau": median(ALWAYS, "tokens"), "break_even": sum(parts.values()), **parts,
        "predicted": tau_from_survival(survival, most) / costs.break_even(steps, nodes, batch),
        "v": costs.verify(1 + most, batch) / costs.verify(1, batch), "c": costs.step(batch), "k": depth,
        "mode": found[ALWAYS][0]["mode"], "adaptive_depth": median(ADAPTIVE, "depth"),
    }  # fmt: skip
