"""What passes cost here and now: v(n) of the target and c of a drafter, measured side by side; and which depth they make best.

Legend: B rows, N nodes, L context.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from spectrain.decoding.drafter import Drafter, Round
from spectrain.decoding.shapes import Chain
from spectrain.target.model import Target
from spectrain.target.passes import Passes, choose, passes_of
from spectrain.yields import Costs, best_depth

DRAFTS = 5  # depth of the chain whose drafting is timed


@torch.inference_mode()
def measure_costs(
    target: Target, drafter: Drafter, *, context: int = 256, sizes: int | Sequence[int] = 16, batches: Sequence[int] = (), repeats: int = 7,
    compile: bool | Literal["auto"] = "auto",
) -> Costs:  # fmt: skip
    """Interleaved medians of target passes over 1 ... `sizes` positions and of one draft step, behind `context` cached tokens.

    sizes: a number, or the sizes that are timed (1 among them); the costs of those in between lie on lines between their neighbours.
    batches: numbers of rows for which passes over 1, half of `sizes` and `sizes` positions are timed too. compile: as in `generate`.
    """
    every = list(range(1, sizes + 1)) if isinstance(sizes, int) else sorted({1, *sizes})
    sizes = every[-1]
    B = max(1, *batches) if batches else 1
    mode = choose(target, compile, rows=B, nodes=sizes, passes=10**6 if compile == "auto" and "compiled" in target.copies else 100)
    one = _Bench(target, passes_of(target, mode, rows=1, nodes=sizes, strict=compile is True), 1, context, sizes, drafter.layer_ids)
    drafts = min(DRAFTS, getattr(drafter, "max_depth", None) or DRAFTS)
    session = drafter.start(target, 1, context + 2 * sizes + DRAFTS)
    session.observe(one.states_BNF, one.ids_BL[:, 1 : context + 1], torch.tensor([context], device=target.device))
    ask = Round(committed=[one.ids_BL[0, : context + 1].tolist()], shape=Chain(drafts), vocab_size=target.vocab_size)

    def draft() -> None:
        session.propose(ask)
        getattr(session, "rewind", lambda: None)()

    runs: dict[Any, Callable[[], None]] = {n: one.verify(n) for n in every}
    runs["draft"] = draft
    known = sorted({1, max(1, sizes // 2), sizes})
    for rows in batches:
        passes = passes_of(target, mode, rows=rows, nodes=sizes, strict=compile is True)
        bench = _Bench(target, passes, rows, context, sizes, ())
        runs |= {(rows, n): bench.verify(n) for n in known}
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for _ in range(repeats + 1):
        for key, run in runs.items():
            times[key].append(_timed(run, target.device))
    median = {key: statistics.median(found[1:]) for key, found in times.items()}  # the first round warms up
    seconds = median[1]
    # A model's first token comes from the pass over settled tokens, so that a chain of 5 takes 4 steps.
    steps = max(1, drafts - 1) if drafter.has_q else drafts
    by_batch = {rows: _between(known, [median[rows, n] / seconds for n in known]) for rows in batches}
    return Costs(
        seconds=seconds, v=_between(every, [median[n] / seconds for n in every]), c=median["draft"] / steps / seconds,
        by_batch=by_batch or None,
    )  # fmt: skip


class _Bench:
    """Passes behind a filled cache that leave it as it was."""

    def __init__(self, target: Target, passes: Passes, rows: int, context: int, sizes: int, layer_ids: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids_BL = torch.randint(0, target.num_ids, (1, context + sizes), generator=generator).to(target.device).expand(rows, -1)
        self._cache = target.new_cache(rows, context + 2 * sizes)
        self._passes, self._context, self._layer_ids = passes, context, layer_ids
        positions_BL = self._cache.stage(context)
        mask = target.prompt_masks(self._cache, positions_BL)
        out = target.forward(
            self.ids_BL[:, :context], positions_BN=positions_BL, mask=mask, cache=self._cache, layer_ids=layer_ids, logits_to_keep=1
        )
        self.states_BNF = out.states_BNF
        self._cache.commit(torch.full((rows,), context, device=target.device))

    def verify(self, n: int) -> Callable[[], None]:
        ids_BN = self.ids_BL[:, self._context : self._context + n]
        target = self._passes.of(*ids_BN.shape)
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
    """The chain depth with the highest predicted speed-up at batch 1, and that speed-up; (0, 1.0) if none gains."""
    return best_depth(survival, costs.c, costs.v)
