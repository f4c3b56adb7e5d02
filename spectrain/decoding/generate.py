"""The speculative generator: prompts, then rounds (decoding/rounds.py) until every row has stopped.

Plain decoding is the same loop with a draft of nothing, so that every comparison is between equal code. The first token of an
answer comes from the prompt's own pass and belongs to no round.

Legend: B rows still in the batch, R those that go on, L prompt length, V vocabulary, F width of the states that the drafter reads.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from spectrain.decoding.accept import law_of_rule, resolve_rule
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.graphs import graphs_for
from spectrain.decoding.policies import Adaptive
from spectrain.decoding.prefill import read_prompts
from spectrain.decoding.processors import Histories, Processing
from spectrain.decoding.rounds import Batch, Clock, Run, keep, play_round, root_only, verdict
from spectrain.decoding.rows import Row, StepRecord, Stream, end_ids, rows_of, stop_strings
from spectrain.decoding.sampling import Sampling
from spectrain.decoding.shapes import Chain, Shape, resolve_law
from spectrain.decoding.stops import FinishReason
from spectrain.decoding.tree import Law, ancestors
from spectrain.planning.batches import FREE, KEEPS
from spectrain.target.model import Target
from spectrain.target.passes import Mode, choose, passes_of


@dataclass
class RowResult:
    """One answer. `tokens` include the end id; `text` does not."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    rounds: list[StepRecord]
    seed: int
    prompt_tokens: int
    prefill_seconds: float


@dataclass
class Result:
    """Answers in the order of the prompts; `seconds` of the whole call. rule, law, mode: what `auto` stood for."""

    rows: list[RowResult]
    seconds: float
    rule: str = "greedy"
    law: Law = "point_mass"
    mode: Mode = "eager"


@torch.inference_mode()
def generate(
    target: Target, prompts: Sequence[Any], *, drafter: Drafter | None = None, shape: Shape | None = None, policy: Adaptive | None = None,
    rule: str = "auto", temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0,
    repetition_penalty: float = 1.0, frequency_penalty: float = 0.0, presence_penalty: float = 0.0, min_new_tokens: int = 0,
    banned_tokens: Sequence[int] = (), forced_tokens: Mapping[int, int] | None = None, logits_processors: Sequence[Any] = (),
    max_new_tokens: int = 256, stop: Sequence[str] = (), eos: str | int | Iterable[int] | None = "auto", ignore_eos: bool = False,
    seed: int | Sequence[int] = 0, batch_size: int | None = None, max_rounds: int | None = None, stream: Stream | None = None,
    on_row: Callable[[int, RowResult], None] | None = None, compile: bool | Literal["auto"] = "auto",
) -> Result:  # fmt: skip
    """Answer prompts (token ids, strings, or chats) with the target, sped up by a drafter; returns `Result`.

    The output is the target's own: at temperature 0 the tokens of plain decoding, otherwise draws from its law (but for
    rule="typical", which is lossy). Penalties, bans and `logits_processors` (any of transformers') act at every node on that node's
    own history, for target and draft; then come temperature, top-k, top-p and min-p. forced_tokens: index in the answer -> id.
    shape: `Chain(5)` when a drafter is given without one. policy: `Adaptive(...)` picks depth and budget anew each round. seed: an int
    (row b gets a seed derived from it and b; row 0 the int itself) or one per prompt. stream(row, tokens, text) is called with
    committed tokens only, on_row(row, result) when a row has ended. batch_size: rows at a time, in plain decoding: the next prompts take
    the places of rows that have ended (None: all together). max_rounds: after them the call ends. compile: how passes after the prompt's
    are made (target/passes.py). An answer that would pass the model's length limit ends there with reason "length". Raises ValueError for
    settings or prompts that cannot work.

    A row's answer is the one it gets alone with its seed, up to rounding (float32 passes of other sizes round otherwise) and but for
    policies that look at the batch (decoding/policies.py). A target serves one call at a time: its hooks are not shared by threads.
    """
    started = time.perf_counter()
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    processing = Processing(
        repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
        min_new_tokens=min_new_tokens, banned_tokens=banned_tokens, forced_tokens=forced_tokens or {}, logits_processors=logits_processors,
    )  # fmt: skip
    shape = Chain(5) if shape is None else shape
    _check_parts(target, drafter, shape, policy, processing)
    _check_batch(batch_size, max_rounds, drafter, processing)
    law, rule = law_and_rule(rule, shape, temperature=temperature, drafter=drafter)
    ends = frozenset() if ignore_eos else end_ids(eos, target)
    rows = rows_of(target, prompts, ends=ends, stop=stop_strings(stop), max_new_tokens=max_new_tokens, seed=seed)
    if not rows:
        return Result(rows=[], seconds=0.0, rule=rule, law=law)
    drafter = drafter if shape.depth else None
    nodes = 1 + shape.budget if drafter else 1
    mode = choose(target, compile, passes=max(row.stop.max_new_tokens for row in rows))
    size = min(len(rows), batch_size or len(rows))
    passes = passes_of(target, mode, rows=size, nodes=nodes, strict=compile is True)
    ended = None if on_row is None else lambda row: on_row(row.index, _result(row))
    run = Run(target, passes, drafter.layer_ids if drafter else (), shape, law, rule, sampling, stream, ended)
    batch = _open(run, rows, size, drafter, policy, processing, ends)
    batch.graphs = graphs_for(target, compile, processors=processing.active)
    waiting = deque(rows[size:])
    _prefill(run, batch, range(size))
    played = 0
    while (going := _going(run, batch, waiting)) and played != max_rounds:
        played += 1
        play_round(run, batch)
        _tell(run, going)
    finish = getattr(batch.session, "finish", None)
    if finish is not None:
        finish([(row.ids, row.prompt_length) for row in rows])
    made: Mode = "eager" if passes.mode == "graphs" and (batch.graphs is None or batch.graphs.failed) else passes.mode
    return Result(rows=[_result(row) for row in rows], seconds=time.perf_counter() - started, rule=rule, law=law, mode=made)


def _result(row: Row) -> RowResult:
    text = row.stop.text(row.tokens)
    return RowResult(row.tokens, text, row.reason or "length", row.rounds, row.seed, row.prompt_length, row.prefill_seconds)


def _open(
    run: Run, rows: Sequence[Row], size: int, drafter: Drafter | None, policy: Adaptive | None, processing: Processing, ends: frozenset[int]
) -> Batch:
    """Cache, sessions and histories for the first `size` rows; the cache has room for each of them all."""
    target, shape = run.target, run.shape
    # Twice the nodes: a row may end with a whole block accepted and then wait in the batch through further rounds.
    max_length = max(row.prompt_length + row.stop.max_new_tokens for row in rows) + 2 * (1 + shape.budget)
    histories = None
    if processing.active:
        histories = Histories(processing, [row.ids for row in rows], vocab_size=target.vocab_size, eos_ids=ends, device=target.device)
    return Batch(
        rows=list(rows[:size]), cache=target.new_cache(size, max_length),
        session=drafter.start(run.passes.rest, size, max_length + shape.width * shape.depth) if drafter else None,
        policy=policy.start(shape, size) if policy and drafter else None, histories=histories,
    )  # fmt: skip


def _check_parts(target: Target, drafter: Any, shape: Any, policy: Any, processing: Processing) -> None:
    """ValueError for arguments of the wrong kind, before anything runs."""
    if drafter is not None and (not hasattr(drafter, "start") or isinstance(drafter, type)):
        raise ValueError(f"drafter must be None, a head, or a drafter such as st.NGram(), found {drafter!r}")
    if not isinstance(shape, Shape):
        raise ValueError(f"shape must be st.Chain(...) or st.Tree....(...), found {shape!r}")
    most = getattr(drafter, "max_depth", None)
    if most is not None and shape.depth > most:
        raise ValueError(f"{shape} drafts {shape.depth} tokens in a row, this head at most {most}; use a shape of depth {most}")
    if policy is not None and not isinstance(policy, Adaptive):
        raise ValueError(f"policy must be None or st.Adaptive(...), found {policy!r}")
    if policy is not None and policy.kind == "confidence" and drafter is not None and not drafter.has_q:
        raise ValueError(f"policy 'confidence' reads draft probabilities, {type(drafter).__name__} has none; use 'heuristic' or 'ema'")
    unknown = [i for i in processing.forced_tokens.values() if i >= target.num_ids]
    if unknown:
        raise ValueError(f"forced_tokens holds id {unknown[0]}, the tokenizer of {target.name} ends at {target.num_ids - 1}")


def _check_batch(batch_size: int | None, max_rounds: int | None, drafter: Drafter | None, processing: Processing) -> None:
    """ValueError for numbers of rows or rounds that are none, or for what cannot begin anew in the middle of a batch."""
    for name, number in (("batch_size", batch_size), ("max_rounds", max_rounds)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} must be None or an integer of at least 1, found {number!r}")
    if batch_size is not None and (drafter is not None or processing.active):
        found = "penalties, bans or processors" if drafter is None else f"the drafter {type(drafter).__name__}"
        raise ValueError(f"batch_size={batch_size} is for plain decoding, found {found}; leave it out and give that many prompts a call")


def law_and_rule(rule: str, shape: Shape, *, temperature: float, drafter: Drafter | None) -> tuple[Law, str]:
    """The draft law and the verification rule that `auto` stands for; ValueError when they do not fit each other."""
    if drafter is None:  # a root alone fits every rule
        resolve_rule(rule, temperature=temperature, law=law_of_rule(rule, is_chain=True) or "point_mass", is_chain=True)
        return "point_mass", resolve_rule("auto", temperature=temperature, law="point_mass", is_chain=True)
    wanted = law_of_rule(rule, is_chain=shape.is_chain)
    if shape.law == "auto" and wanted is not None:
        shape = replace(shape, law=wanted)  # the shape itself refuses laws that it cannot have
    law = resolve_law(shape, temperature=temperature, has_q=drafter.has_q)
    return law, resolve_rule(rule, temperature=temperature, law=law, is_chain=shape.is_chain)


def _prefill(run: Run, batch: Batch, places: Sequence[int]) -> None:
    """Read the prompts of the batch into these rows of its cache and commit the first token of each answer."""
    clock = Clock(run.target.device)
    prompts = [row.ids for row in batch.rows]
    with clock("verify"):
        logits_BV, states_BLF = read_prompts(run.passes.rest, batch.cache, prompts, places, run.layer_ids)
    root = root_only(run, batch)
    first_B = verdict(run, batch, logits_BV[:, None], root, ancestors(root.parents_BN)).next_B
    first = first_B.tolist()
    if batch.session is not None:
        L = max(map(len, prompts))
        next_BL = first_B.new_tensor([[*ids[1:], token, *[0] * (L - len(ids))] for ids, token in zip(prompts, first, strict=True)])
        with clock("commit"):
            batch.session.observe(states_BLF, next_BL, first_B.new_tensor([len(ids) for ids in prompts]))
    share = sum(clock.seconds.values()) / len(batch.rows)
    keep(run, batch, [[token] for token in first])
    for row in batch.rows:
        row.prefill_seconds = share
    _tell(run, batch.rows)


def _tell(run: Run, rows: Sequence[Row]) -> None:
    """Hand out those of these rows that have ended; they were going before."""
    for row in rows:
        if row.reason is not None and run.ended is not None:
            run.ended(row)


def _going(run: Run, batch: Batch, waiting: deque[Row]) -> list[Row]:
    """The rows of the next round: waiting ones take the places of those that have ended, and what then is no more needed is dropped."""
    while waiting:
        free = [b for b, row in enumerate(batch.rows) if row.reason is not None]
        if len(free) < FREE * len(batch.rows):
            break
        places = free[: len(waiting)]
        for b in places:
            batch.rows[b] = waiting.popleft()
        _prefill(run, replace(batch, rows=[batch.rows[b] for b in places]), places)
    return _drop_finished(batch)


def _drop_finished(batch: Batch) -> list[Row]:
    """Take finished rows out of the batch once only so many go on; returns the others."""
    going = [b for b, row in enumerate(batch.rows) if row.reason is None]
    if going and len(going) <= KEEPS * len(batch.rows):
        rows_R = torch.tensor(going, device=batch.cache.lengths_B.device)
        batch.cache.select(rows_R)
        if batch.session is not None:
            batch.session.select(rows_R)
        for part in (batch.policy, batch.histories):
            if part is not None:
                part.select(going)
        if batch.graphs is not None:
            batch.graphs.forget()
        batch.rows = [batch.rows[b] for b in going]
    return [row for row in batch.rows if row.reason is None]
