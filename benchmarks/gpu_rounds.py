"""Rounds of the generator on random weights of real shapes (parts b, c and d of gpu.py): passes, draft steps, and whole answers.

All figures are of the generator's own rounds, with its caches, masks and graphs, and of drafts that are right as often as is said
(gpu_model.py). Phases are the device's time between events; a round's own is the host's from one draft to the next. The first rounds, in
which graphs are recorded, and the last one are left out, and so are rounds after the first row has ended.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from gpu_model import Acting, pass_bytes, prompts, shape_of, step_bytes
from transformers.generation.streamers import BaseStreamer

from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Shape
from spectrain.drafters.from_head import HeadDrafter
from spectrain.target.model import Target
from spectrain.yields import expected_tokens

WARM_UP = 8  # rounds: graphs are recorded in the fifth
WAYS: dict[str, Literal["auto", False]] = {"graphs": "auto", "eager": False}  # by name: how they are asked for


@dataclass(frozen=True)
class Sizes:
    """What is swept. rounds: of a measurement; gamma: drafts of a chain."""

    batches: Sequence[int] = (1, 8, 32)
    nodes: Sequence[int] = (1, 8, 16, 32, 64)
    alphas: Sequence[float] = (0.6, 0.7, 0.8, 0.9)
    context: int = 1024
    rounds: int = 40
    gamma: int = 5


@dataclass(frozen=True)
class Times:
    """Medians of steady rounds, seconds of all rows together: of the phases, of the round by the host's clock. tau: their mean."""

    draft: float
    verify: float
    other: float
    wall: float
    tau: float
    rounds: int
    mode: str


def play(target: Target, acting: Acting, shape: Shape | None, batch: int, sizes: Sizes, compile: Literal["auto", False]) -> Times:
    """Rounds of one call of the generator."""
    depth = shape.depth if shape else 0
    tokens = int(sizes.rounds * expected_tokens(acting.alpha, depth))
    ids = prompts(target, batch, sizes.context)
    how: dict[str, Any] = {"shape": shape or Chain(1), "max_new_tokens": tokens, "ignore_eos": True, "compile": compile}
    result = generate(target, ids, drafter=acting, **how)
    rounds_B = [row.rounds for row in result.rows]
    last = min(map(len, rounds_B)) - 1
    steady = range(min(WARM_UP, last - 1), last)
    walls = [acting.times[i + 1] - acting.times[i] for i in steady]
    phases = {name: statistics.median(batch * rounds_B[0][i].seconds.get(name, 0.0) for i in steady) for name in ("draft", "verify")}
    other = statistics.median(batch * sum(s for n, s in rounds_B[0][i].seconds.items() if n not in phases) for i in steady)
    tau = sum(rounds[i].committed for rounds in rounds_B for i in steady) / (len(steady) * batch)
    return Times(**phases, other=other, wall=statistics.median(walls), tau=tau, rounds=len(steady), mode=result.mode)


def steps(target: Target, sizes: Sizes, copy: float) -> Iterator[dict[str, Any]]:
    """Part b: the pass over n nodes of B rows, and the round around it; v: in passes over one node of as many rows; share: of the speed
    of a copy that is reached in reading weights and cache."""
    for batch in sizes.batches:
        for way, compile in WAYS.items():
            single: Times | None = None
            for nodes in sizes.nodes:
                row: dict[str, Any] = {"model": target.name, "batch": batch, "nodes": nodes, "context": sizes.context, "way": way}
                try:
                    found = play(target, Acting(nodes, 0.7), shape_of(nodes), batch, sizes, compile)
                except torch.OutOfMemoryError as error:
                    yield {**row, "failed": str(error).split(". ")[0]}
                    continue
                single = found if nodes == 1 else single
                least = pass_bytes(target, batch, sizes.context) / copy
                found_of = {"share": least / found.verify, "share_round": least / found.wall}
                v = {"v": found.verify / single.verify, "v_round": found.wall / single.wall} if single else {"v": None, "v_round": None}
                yield {**row, **dataclasses.asdict(found), **found_of, **v}


def draft_steps(target: Target, head: HeadDrafter, sizes: Sizes, copy: float) -> Iterator[dict[str, Any]]:
    """Part c: a step of a head's draft, from drafts of one token and of `gamma`; floor: its bytes at the speed of a copy."""
    for batch in sizes.batches:
        floor = step_bytes(head, batch, sizes.context) / copy
        for way, compile in WAYS.items():
            one, many = (play(target, Acting(1 + d, 0.7, head), Chain(d), batch, sizes, compile) for d in (1, sizes.gamma))
            step = (many.draft - one.draft) / (sizes.gamma - 1)
            yield {
                "model": target.name, "batch": batch, "way": way, "mode": many.mode, "step": step, "start": one.draft - step,
                "floor": floor, "ratio": step / floor, "c": step / many.verify,
            }  # fmt: skip


def answers(target: Target, head: HeadDrafter, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Part d: tokens a second with drafts of a head and with a written acceptance, plainly, and by transformers' own generate().

    predicted: tau / (v + gamma c), costs of bare passes and steps; realised: how many tokens a second by those of plain decoding.
    """
    for batch in sizes.batches:
        theirs = by_transformers(target, batch, sizes)
        for way, compile in WAYS.items():
            plain = play(target, Acting(1, 0.0), None, batch, sizes, compile)
            one = play(target, Acting(2, 0.7, head), Chain(1), batch, sizes, compile)
            for alpha in sizes.alphas:
                found = play(target, Acting(1 + sizes.gamma, alpha, head), Chain(sizes.gamma), batch, sizes, compile)
                c = (found.draft - one.draft) / (sizes.gamma - 1) / plain.verify
                v = found.verify / plain.verify
                predicted, realised = found.tau / (v + sizes.gamma * c), found.tau * plain.wall / found.wall
                yield {
                    "model": target.name, "batch": batch, "way": way, "mode": found.mode, "alpha": alpha, "gamma": sizes.gamma,
                    "tau": found.tau, "expected_tau": expected_tokens(alpha, sizes.gamma), "v": v, "c": c,
                    "tokens_per_s": batch * found.tau / found.wall, "plain": batch / plain.wall, **theirs, "predicted": predicted,
                    "realised": realised, "ratio": realised / predicted,
                }  # fmt: skip


class _Stamps(BaseStreamer):
    """When each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def by_transformers(target: Target, batch: int, sizes: Sizes) -> dict[str, Any]:
    """Tokens a second of generate() with a static cache, which transformers compiles on a GPU, and SDPA; the second of two calls."""
    ids_BL = torch.randint(2, target.vocab_size, (batch, sizes.context), device=target.device)
    ours, stamps = target.config._attn_implementation, _Stamps()
    target.model.set_attn_implementation("sdpa")
    try:
        for _ in range(2):
            stamps = _Stamps()
            target.model.generate(
                ids_BL, attention_mask=torch.ones_like(ids_BL), max_new_tokens=2 * sizes.rounds, do_sample=False,
                cache_implementation="static", streamer=stamps,
            )  # fmt: skip
    except Exception as error:  # compilers raise anything, and the others can be measured without
        return {"generate": None, "generate_failed": str(error).split("\n")[0][:200]}
    finally:
        target.model.set_attn_implementation(ours)
    between = [b - a for a, b in zip(stamps.times[WARM_UP:], stamps.times[WARM_UP + 1 :], strict=False)]
    return {"generate": batch / statistics.median(between)}
