"""What passes cost here and now: v(n) of the target and c of a head, measured side by side; and which depth they make best."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spectrain.decoding.tree import DraftTree, ancestors
from spectrain.target.model import Target
from spectrain.yields import best_depth


@dataclass(frozen=True)
class Costs:
    """seconds of a pass over one position; v[n-1]: cost of a pass over n positions in that unit; c: cost of one draft step in it."""

    seconds: float
    v: tuple[float, ...]
    c: float


def measure_costs(target: Target, drafter: Any, *, context: int, sizes: int, repeats: int = 7) -> Costs:
    """Interleaved medians of target passes over 1 ... `sizes` positions and of one draft step, behind `context` cached tokens."""
    generator = torch.Generator().manual_seed(0)
    ids_1L = torch.randint(0, target.vocab_size, (1, context + sizes), generator=generator).to(target.device)
    cache = target.new_cache(1, context + 2 * sizes)
    positions = cache.stage(context)
    mask = torch.ones(1, 1, context, context, dtype=torch.bool, device=target.device).tril()
    out = target.forward(
        ids_1L[:, :context], positions_BN=positions, mask_B1NS=mask, cache=cache, layer_ids=drafter.layer_ids, logits_to_keep=1
    )
    one = torch.tensor([context], device=target.device)
    cache.commit(one)
    session = drafter.start(target, 1, context + 2 * sizes)
    session.observe(out.states_BNF, ids_1L[:, 1 : context + 1], one)

    def verify(n: int) -> Callable[[], None]:
        tree = DraftTree.chain(ids_1L[:, context : context + n], torch.tensor([n]))

        def run() -> None:
            positions = cache.stage(n)
            visible = None if n == 1 else cache.visible(ancestors(tree.parents_BN))
            target.forward(tree.tokens_BN, positions_BN=positions, mask_B1NS=visible, cache=cache, layer_ids=drafter.layer_ids)
            cache.discard()

        return run

    committed = [ids_1L[0, : context + 1].tolist()]
    runs = {n: verify(n) for n in range(1, sizes + 1)}
    times: dict[Any, list[float]] = {key: [] for key in (*runs, "draft")}
    for _ in range(repeats + 1):
        for n, run in runs.items():
            times[n].append(_timed(run, target.device))
        times["draft"].append(_timed(lambda: _draft(session, committed), target.device) / 4)
    median = {key: statistics.median(found[1:]) for key, found in times.items()}  # the first round warms up
    return Costs(seconds=median[1], v=tuple(median[n] / median[1] for n in runs), c=median["draft"] / median[1])


def _draft(session: Any, committed: Sequence[Sequence[int]]) -> None:
    from spectrain.decoding.shapes import Chain

    # A chain of 5 takes 4 steps of the head; the first token comes from the pass over settled tokens.
    session.propose(committed, Chain(5))
    session.rewind()


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
