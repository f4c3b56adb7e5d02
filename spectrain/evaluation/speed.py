"""What passes and rounds cost here and now, measured side by side; which depth they make best; predicted against measured speed-up.

Passes over n positions are timed alone, behind a filled cache. What the rest of a round costs (drafting, accepting, committing, settling)
is taken from rounds of the generator itself, so that nothing of it is forgotten.

Legend: B rows, N nodes, L context.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generate import Result, generate
from spectrain.decoding.shapes import Chain, Shape, trimmed
from spectrain.target.model import Target
from spectrain.target.passes import Passes, choose, passes_of
from spectrain.yields import Costs, best_depth_for

DRAFTS = 5  # depth of the chain whose drafting is timed, where no shape is given
ROUND_TOKENS = 32  # of an answer whose rounds are timed: more than the fewest for which the generator packs the weights
ROUND_REPEATS, BATCH_REPEATS = 3, 2  # runs of one row, of several: prompts of many rows take long
WARM_UP = 2  # tokens of prompt and answer
PLAIN = ("", 0)
PERIOD = 48  # tokens after which the text repeats itself that rounds are timed on: drafters that look tokens up find something

Compile = bool | Literal["auto"]


@torch.inference_mode()
def measure_costs(
    target: Target, drafter: Drafter, *, shape: Shape | None = None, context: int = 256, sizes: int | Sequence[int] = 16,
    batches: Sequence[int] = (), repeats: int = 7, compile: Compile = "auto",
) -> Costs:  # fmt: skip
    """Interleaved medians of target passes over 1 ... `sizes` positions behind `context` cached tokens, and what rounds cost beside them.

    shape: of the drafts (None: a chain of 5, or of what the head drafts at most). sizes: a number, or the sizes that are timed (1 among
    them); the costs of those in between lie on lines between their neighbours. batches: numbers of rows for which passes over 1, half of
    `sizes` and `sizes` positions are timed too, and rounds. compile: as in `generate`.
    """
    if shape is None:
        shape = Chain(min(DRAFTS, getattr(drafter, "max_depth", None) or DRAFTS))
    costs = measure_passes(
        target, context=context, sizes=sizes, batches=batches, repeats=repeats, layer_ids=drafter.layer_ids, compile=compile
    )
    return with_rounds(target, {"": (drafter, shape)}, costs, context=context, batches=batches, compile=compile)[""]


@torch.inference_mode()
def measure_passes(
    target: Target, *, context: int = 256, sizes: int | Sequence[int] = 16, batches: Sequence[int] = (), repeats: int = 7,
    layer_ids: tuple[int, ...] = (), compile: Compile = "auto",
) -> Costs:  # fmt: skip
    """The part of `measure_costs` that is the same for every drafter; c is 0. layer_ids: the target's states that the passes return."""
    every = list(range(1, sizes + 1)) if isinstance(sizes, int) else sorted({1, *sizes})
    sizes = every[-1]
    most = 10**6 if compile == "auto" and "compiled" in target.copies else 100
    known = sorted({1, max(1, sizes // 2), sizes})
    runs: dict[tuple[int, int], Callable[[], None]] = {}
    for rows in sorted({1, *batches}):
        mode = choose(target, compile, passes=most)
        passes = passes_of(target, mode, rows=rows, nodes=sizes, strict=compile is True)
        bench = _Bench(target, rows, context, sizes, layer_ids)
        runs |= {(rows, n): bench.verify(n, passes) for n in (every if rows == 1 else known)}
    times: dict[tuple[int, int], list[float]] = {key: [] for key in runs}
    for _ in range(repeats + 1):
        for key, run in runs.items():
            times[key].append(_timed(run, target.device))
    median = {key: statistics.median(found[1:]) for key, found in times.items()}  # the first round warms up
    seconds = median[1, 1]
    by_batch = {rows: _between(known, [median[rows, n] / seconds for n in known]) for rows in batches}
    return Costs(seconds=seconds, v=_between(every, [median[1, n] / seconds for n in every]), c=0.0, by_batch=by_batch or None)


def with_rounds(
    target: Target, drafts: Mapping[str, tuple[Drafter, Shape]], costs: Costs, *, context: int = 256, batches: Sequence[int] = (),
    repeats: int = ROUND_REPEATS, compile: Compile = "auto",
) -> dict[str, Costs]:  # fmt: skip
    """`costs` of passes with what the rounds of some drafters cost beside them: medians of interleaved runs of the generator.

    drafts: drafter and shape by name: a drafter's costs depend on the shape. Of each, rounds of the shape and of its first level are
    timed, which tells c from `start`. Several processes that each hold a part of the target make this call together.
    """
    asked: dict[tuple[str, int], tuple[Drafter | None, Shape | None]] = {PLAIN: (None, None)}
    for name, (drafter, shape) in drafts.items():
        asked |= {(name, depth): (drafter, trimmed(shape, depth=depth)) for depth in {1, shape.depth}}
    found: dict[str, dict[int, tuple[float, ...]]] = {name: {} for name in drafts}
    prompt = _periodic(target, max(1, context - ROUND_TOKENS // 2))  # the answer's mean context is `context`
    for rows in sorted({1, *batches}):
        times: dict[tuple[str, int], list[RoundTime]] = {key: [] for key in asked}
        for repeat in range(1 + (repeats if rows == 1 else BATCH_REPEATS)):
            ids, tokens = (prompt, ROUND_TOKENS) if repeat else (prompt[:WARM_UP], WARM_UP)
            for key, (by, form) in asked.items():
                how: dict[str, Any] = {"drafter": by, "shape": form, "max_new_tokens": tokens, "ignore_eos": True, "compile": compile}
                times[key].append(round_time(generate(target, [ids] * rows, **how)))
        median = {key: _median(of[1:]) for key, of in times.items()}
        for name, (_, shape) in drafts.items():
            found[name][rows] = _beside(median, name, shape.depth, costs, rows)
    return {name: _with(costs, by_batch, bool(batches)) for name, by_batch in found.items()}


def _with(costs: Costs, by_batch: Mapping[int, tuple[float, ...]], several: bool) -> Costs:
    c, start, other, plain = by_batch[1]
    return replace(costs, c=c, start=start, other=other, plain=plain, beside=by_batch if several else None)


def _beside(median: Mapping[tuple[str, int], "RoundTime"], name: str, depth: int, costs: Costs, rows: int) -> tuple[float, ...]:
    """(c, start, other, plain). The unit is the pass of the plain rounds that ran beside these: a machine that has slowed down since passes
    were timed alone slows both. What a pass takes more in a round than alone is in `other`, so that costs add up to the round."""
    first, whole, plain = median[name, 1], median[name, depth], median[PLAIN]
    c = max(0.0, (whole.draft - first.draft) / (depth - 1)) if depth > 1 else 0.0
    unit = plain.verify / costs.verify(1, rows)
    alone = sum(costs.verify(n, rows) for n in whole.sizes) / len(whole.sizes)
    beyond = (whole.verify + whole.other) / unit - alone
    return c / unit, (whole.draft - depth * c) / unit, beyond, plain.other / unit


@dataclass(frozen=True)
class RoundTime:
    """Mean seconds of a round by phase, all its rows together; other: all that is neither draft nor verify. tokens: committed a row.
    sizes: positions of each round's pass."""

    draft: float
    verify: float
    other: float
    tokens: float
    sizes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.other


def round_time(result: Result) -> RoundTime:
    """The rounds in which every row was still at work, but the last of them, which may have been cut short.

    What the call took outside the rounds' phases (and outside the prompt's pass) is shared alike by all its rounds.
    """
    rounds_B = [row.rounds for row in result.rows]
    steady = max(1, min(map(len, rounds_B)) - 1)
    every = [r for rounds in rounds_B for r in rounds]
    clocked = sum(sum(r.seconds.values()) for r in every)
    rest = result.seconds - sum(row.prefill_seconds for row in result.rows) - clocked
    kept = [r for rounds in rounds_B for r in rounds[:steady]]
    draft, verify = (sum(r.seconds.get(phase, 0.0) for r in kept) / steady for phase in ("draft", "verify"))
    other = sum(sum(r.seconds.values()) for r in kept) / steady - draft - verify + max(0.0, rest) / max(map(len, rounds_B))
    return RoundTime(draft, verify, other, sum(r.committed for r in kept) / len(kept), tuple(r.nodes for r in rounds_B[0][:steady]))


def _median(times: Sequence[RoundTime]) -> RoundTime:
    """Of each figure; the answers are the same ones, and so are the sizes."""
    draft, verify, other, tokens = (
        statistics.median(getattr(t, name) for t in times) for name in ("draft", "verify", "other", "tokens")
    )
    return RoundTime(draft, verify, other, tokens, times[0].sizes)


def _periodic(target: Target, context: int) -> list[int]:
    """A text of random ids that repeats itself."""
    ids = torch.randint(0, target.num_ids, (PERIOD,), generator=torch.Generator().manual_seed(0)).tolist()
    return (ids * math.ceil(context / PERIOD))[:context]


class _Bench:
    """Passes behind a filled cache that leave it as it was."""

    def __init__(self, target: Target, rows: int, context: int, sizes: int, layer_ids: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids_BL = torch.randint(0, target.num_ids, (1, context + sizes), generator=generator).to(target.device).expand(rows, -1)
        self._cache = target.new_cache(rows, context + 2 * sizes)
        self._context, self._layer_ids = context, layer_ids
        positions_BL = self._cache.stage(context)
        mask = target.prompt_masks(self._cache, positions_BL)
        target.forward(self.ids_BL[:, :context], positions_BN=positions_BL, mask=mask, cache=self._cache, logits_to_keep=1)
        self._cache.commit(torch.full((rows,), context, device=target.device))

    def verify(self, n: int, passes: Passes) -> Callable[[], None]:
        ids_BN = self.ids_BL[:, self._context : self._context + n]
        target = passes.of(*ids_BN.shape)
        line_BNN = torch.ones(n, n, dtype=torch.bool, device=ids_BN.device).tril().expand(len(ids_BN), n, n)

        def run() -> None:
            positions_BN = self._cache.stage(n)
            mask = target.masks(self._cache, line_BNN)
            target.forward(ids_BN, positions_BN=positions_BN, mask=mask, cache=self._cache, layer_ids=self._layer_ids)
            self._cache.discard()

        return run


def _between(known: Sequence[int], values: Sequence[float]) -> tuple[float, ...]:
    """Values at 1 ... the last known size, linear in between."""
    found = []
    for n in range(1, known[-1] + 1):
        right = next(i for i, k in enumerate(known) if k >= n)
        left = max(0, right - 1)
        share = (n - known[left]) / (known[right] - known[left]) if right > left else 0.0
        found.append(values[left] + share * (values[right] - values[left]))
    return tuple(found)


def _timed(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def advise_depth(survival: Sequence[float], costs: Costs) -> tuple[int, float]:
    """The chain depth with the highest predicted speed-up at batch 1, and that speed-up; (0, 1.0) if none gains. Only depths whose pass
    was timed are considered."""
    return best_depth_for(survival[: len(costs.v) - 1], costs)


def mean_draft(records: Sequence[Any], shape: Shape | None = None) -> tuple[float, float]:
    """(draft steps, drafted tokens) of a round, means over all rounds of some records; rounds without a draft count.

    shape: a draft takes the steps of its shape, though a tree keeps no node of the last ones (None: those of the nodes that it kept).
    """
    rounds = [r for record in records for r in record.rounds]
    steps = sum((shape.depth if shape else r.depth) for r in rounds if r.drafted)
    return steps / max(1, len(rounds)), sum(r.drafted for r in rounds) / max(1, len(rounds))


def gap(
    costs: Costs, tau: Mapping[str, Any], speed: Mapping[str, Any], records: Sequence[Any], shape: Shape | None = None
) -> dict[str, Any]:
    """Predicted against measured speed-up at batch 1.

    costs: of the arm (`with_rounds`); tau: its cell of counts, of these records; shape: of its drafts (`mean_draft`); speed: its cell of
    timed prompts (`metrics.speed_cell`). `by` splits ln(predicted / measured), of which its parts are the sum: `tau` for the timed prompts'
    other tau, `draft`, `verify` and `other` for rounds that cost more or less than measured apart.
    """
    sizes = Counter(1 + r.drafted for record in records for r in record.rounds)
    passes = sum(count * costs.verify(n) for n, count in sizes.items()) / sizes.total()
    phases = {**costs.phases(mean_draft(records, shape)[0], 0), "verify": passes / (costs.verify(1) + costs.plain)}
    phases["other"] = max(0.0, phases["other"])  # on tiny models noise can put it below what a round is
    even = sum(phases.values())
    predicted, measured = tau["tau"] / even, speed["speedup"]
    timed = {"draft": speed["draft"], "verify": speed["v"], "other": speed["other"]}
    more = {phase: timed[phase] - phases[phase] for phase in phases}
    total = sum(more.values())
    dearer = math.log((even + total) / even) / total if total else 0.0
    by = {"tau": math.log(tau["tau"] / speed["tau"]), **{phase: cost * dearer for phase, cost in more.items()}}
    return {"predicted": predicted, "measured": measured, "ratio": predicted / measured, "costs": phases, "timed": timed, "by": by}
