"""The speculative generator: propose -> verify -> accept -> commit, until every row has stopped.

Plain decoding is the same loop with a draft of nothing, so that every comparison is between equal code. The first token of an
answer comes from the prompt's own pass and belongs to no round.

Legend: B rows still in the batch, N nodes of the draft tree (root included), K path length, L prompt length, V vocabulary,
F width of the states that the drafter reads.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.decoding.accept import Accepted, accept, law_of_rule, resolve_rule
from spectrain.decoding.drafter import Drafter, DraftSession, Round
from spectrain.decoding.policies import Adaptive, PolicySession
from spectrain.decoding.processors import Histories, Processing
from spectrain.decoding.rows import Row, StepRecord, Stream, coins_of, end_ids, root_tokens, rows_of, stop_strings
from spectrain.decoding.rules import used_nodes
from spectrain.decoding.sampling import Sampling, probabilities
from spectrain.decoding.shapes import Chain, Shape, resolve_law, trimmed
from spectrain.decoding.stops import FinishReason
from spectrain.decoding.tree import DraftTree, Law, ancestors
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target
from spectrain.target.passes import Mode, Passes, choose, passes_of


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


@dataclass(frozen=True)
class _Run:
    """What stays the same for a whole call. passes: who makes them; the prompt's is made by `rest`."""

    target: Target
    passes: Passes
    layer_ids: tuple[int, ...]
    shape: Shape
    law: Law
    rule: str
    sampling: Sampling
    stream: Stream | None


@dataclass
class _Batch:
    """The rows still held in the cache, finished ones included until the next compaction."""

    rows: list[Row]
    cache: SlabCache
    session: DraftSession | None
    policy: PolicySession | None
    histories: Histories | None

    def active(self, device: torch.device) -> Tensor:
        return torch.tensor([row.reason is None for row in self.rows], device=device)


@torch.inference_mode()
def generate(
    target: Target, prompts: Sequence[Any], *, drafter: Drafter | None = None, shape: Shape | None = None, policy: Adaptive | None = None,
    rule: str = "auto", temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0,
    repetition_penalty: float = 1.0, frequency_penalty: float = 0.0, presence_penalty: float = 0.0, min_new_tokens: int = 0,
    banned_tokens: Sequence[int] = (), forced_tokens: Mapping[int, int] | None = None, logits_processors: Sequence[Any] = (),
    max_new_tokens: int = 256, stop: Sequence[str] = (), eos: str | int | Iterable[int] | None = "auto", ignore_eos: bool = False,
    seed: int | Sequence[int] = 0, stream: Stream | None = None, compile: bool | Literal["auto"] = "auto",
) -> Result:  # fmt: skip
    """Answer prompts (token ids, strings, or chats) with the target, sped up by a drafter; returns `Result`.

    The output is the target's own: at temperature 0 the tokens of plain decoding, otherwise draws from its law (but for
    rule="typical", which is lossy). Penalties, bans and `logits_processors` (any of transformers') act at every node on that node's
    own history, for target and draft; then come temperature, top-k, top-p and min-p. forced_tokens: index in the answer -> id.
    shape: `Chain(5)` when a drafter is given without one. policy: `Adaptive(...)` picks depth and budget anew each round. seed: an int
    (row b gets a seed derived from it and b; row 0 the int itself) or one per prompt. stream(row, tokens, text) is called with
    committed tokens only. compile: how the passes after the prompt's are made (target/passes.py). An answer that would pass the
    model's length limit ends there with reason "length". Raises ValueError for settings or prompts that cannot work.

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
    law, rule = law_and_rule(rule, shape, temperature=temperature, drafter=drafter)
    ends = frozenset() if ignore_eos else end_ids(eos, target)
    rows = rows_of(target, prompts, ends=ends, stop=stop_strings(stop), max_new_tokens=max_new_tokens, seed=seed)
    if not rows:
        return Result(rows=[], seconds=0.0, rule=rule, law=law)
    drafter = drafter if shape.depth else None
    nodes = 1 + shape.budget if drafter else 1
    mode = choose(target, compile, passes=max(row.stop.max_new_tokens for row in rows))
    passes = passes_of(target, mode, rows=len(rows), nodes=nodes, strict=compile is True)
    run = _Run(target, passes, drafter.layer_ids if drafter else (), shape, law, rule, sampling, stream)
    batch = _open(run, rows, drafter, policy, processing, ends)
    _prefill(run, batch)
    while _drop_finished(batch):
        _round(run, batch)
    finish = getattr(batch.session, "finish", None)
    if finish is not None:
        finish([(row.ids, row.prompt_length) for row in rows])
    results = [
        RowResult(r.tokens, r.stop.text(r.tokens), r.reason or "length", r.rounds, r.seed, r.prompt_length, r.prefill_seconds) for r in rows
    ]
    return Result(rows=results, seconds=time.perf_counter() - started, rule=rule, law=law, mode=passes.mode)


def _open(
    run: _Run, rows: Sequence[Row], drafter: Drafter | None, policy: Adaptive | None, processing: Processing, ends: frozenset[int]
) -> _Batch:
    """Cache, sessions and histories for these rows."""
    target, shape = run.target, run.shape
    # Twice the nodes: a row may end with a whole block accepted and then wait in the batch through further rounds.
    max_length = max(row.prompt_length + row.stop.max_new_tokens for row in rows) + 2 * (1 + shape.budget)
    histories = None
    if processing.active:
        histories = Histories(processing, [row.ids for row in rows], vocab_size=target.vocab_size, eos_ids=ends, device=target.device)
    return _Batch(
        rows=list(rows), cache=target.new_cache(len(rows), max_length),
        session=drafter.start(run.passes.rest, len(rows), max_length + shape.width * shape.depth) if drafter else None,
        policy=policy.start(shape, len(rows)) if policy and drafter else None, histories=histories,
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


def _prefill(run: _Run, batch: _Batch) -> None:
    """One pass over all prompts, aligned right so that the last column is each row's last token; commits the first token."""
    target, device = run.target, run.target.device
    clock = _Clock(device)
    length_B = torch.tensor([row.prompt_length for row in batch.rows], device=device)
    L = int(length_B.max())
    pad_B = L - length_B
    ids_BL = torch.tensor([[0] * (L - row.prompt_length) + row.ids for row in batch.rows], device=device)
    with clock("verify"):
        positions_BL = batch.cache.stage(L, None if len(batch.rows) == 1 else pad_B)
        mask = target.prompt_masks(batch.cache, positions_BL)
        out = run.passes.rest.forward(
            ids_BL, positions_BN=positions_BL, mask=mask, cache=batch.cache, layer_ids=run.layer_ids, logits_to_keep=1
        )
        batch.cache.commit(length_B)
    root = _root_only(run, batch)
    first_B = _verdict(run, batch, out.logits_BKV, root, ancestors(root.parents_BN)).next_B
    if batch.session is not None:
        left_BL = (torch.arange(L, device=device) + pad_B[:, None]).clamp(max=L - 1)  # to columns that start at 0
        next_BL = torch.cat([ids_BL, first_B[:, None]], dim=1)[:, 1:].gather(1, left_BL)
        with clock("commit"):
            batch.session.observe(_picked(out.states_BNF, left_BL), next_BL, length_B)
    share = sum(clock.seconds.values()) / len(batch.rows)
    _keep(run, batch, [[token] for token in first_B.tolist()])
    for row in batch.rows:
        row.prefill_seconds = share


def _round(run: _Run, batch: _Batch) -> None:
    target, cache, device = run.target, batch.cache, run.target.device
    clock = _Clock(device)
    with clock("draft"):
        tree = _propose(run, batch) or _root_only(run, batch)
    with clock("verify"):
        line_BNN = ancestors(tree.parents_BN) if not tree.is_chain else _causal(tree)
        depth_BN = line_BNN.sum(-1) - 1
        # Nodes past the model's last position are never kept; some models have no row for them.
        positions_BN = (cache.lengths_B[:, None] + depth_BN).clamp(max=target.max_length - 1)
        cache.stage(tree.width)
        maker = run.passes.of(*tree.tokens_BN.shape)
        mask = maker.masks(cache, line_BNN)
        out = maker.forward(tree.tokens_BN, positions_BN=positions_BN, mask=mask, cache=cache, layer_ids=run.layer_ids)
    with clock("accept"):
        accepted = _verdict(run, batch, out.logits_BKV, tree, line_BNN)
    with clock("commit"):
        longest = int(accepted.length_B.max())  # the columns beyond it are empty in every row
        path_BK = torch.cat([torch.zeros_like(accepted.next_B)[:, None], accepted.path_BK[:, :longest]], dim=1)
        count_B = (accepted.length_B + 1) * batch.active(device)
        cache.commit(count_B, None if tree.is_chain else path_BK)
        node_BK = path_BK.clamp(min=0)
        after_BK = tree.tokens_BN.gather(1, node_BK.roll(-1, dims=1)).scatter(1, accepted.length_B[:, None], accepted.next_B[:, None])
        if batch.session is not None:
            batch.session.observe(_picked(out.states_BNF, node_BK), after_BK, count_B)
    deep_B = (depth_BN * used_nodes(tree)).amax(-1)
    num, deep, length, new = (t.tolist() for t in (tree.num_B, deep_B, accepted.length_B, after_BK))
    going = [row.reason is None for row in batch.rows]
    with clock("commit"):
        kept = _keep(run, batch, [new[b][: length[b] + 1] for b in range(len(new))])
    share = {phase: s / sum(going) for phase, s in clock.seconds.items()}
    for b, row in enumerate(batch.rows):
        if going[b]:
            row.rounds.append(StepRecord(num[b] - 1, length[b], len(kept[b]), share, depth=deep[b], nodes=tree.width))
    if batch.policy is not None:
        batch.policy.observe([n - 1 for n in num], length, deep)


def _propose(run: _Run, batch: _Batch) -> DraftTree | None:
    """The drafter's tree for this round, as deep as the policy wants it; None for no draft."""
    if batch.session is None:
        return None
    shape: Shape | None = run.shape
    live = [row.reason is None for row in batch.rows]
    depths, stop_below = [run.shape.depth] * len(batch.rows), 0.0
    if batch.policy is not None:
        plan = batch.policy.plan(live=live)
        depths, stop_below = plan.depth_B, plan.stop_below
        shape = trimmed(run.shape, depth=max(depths), budget=plan.budget)
    if shape is None:
        return None
    ask = Round(
        committed=[row.ids for row in batch.rows], shape=shape, law=run.law, sampling=run.sampling, histories=batch.histories,
        coins=coins_of(batch.rows, run.target.device), depth_B=depths if batch.policy else None, stop_below=stop_below,
        vocab_size=run.target.vocab_size, live_B=live,
    )  # fmt: skip
    return batch.session.propose(ask)


def _verdict(run: _Run, batch: _Batch, logits_BNV: Tensor, tree: DraftTree, line_BNN: Tensor) -> Accepted:
    """What the rule keeps of the tree; p goes through every transform, ids that the tokenizer does not know have no chance."""
    V, num_ids = logits_BNV.shape[-1], run.target.num_ids
    if num_ids < V:
        logits_BNV = logits_BNV.masked_fill(torch.arange(V, device=logits_BNV.device) >= num_ids, float("-inf"))
    if bool(logits_BNV.amax(-1).isnan().any()):
        raise ValueError(f"{run.target.name} gives NaN for a logit; try dtype='float32', or look at the weights")
    if batch.histories is not None:
        needed_BN = used_nodes(tree) & batch.active(logits_BNV.device)[:, None]
        logits_BNV = batch.histories.apply(logits_BNV, tree.tokens_BN, line_BNN, needed_BX=needed_BN)
    return accept(probabilities(logits_BNV, run.sampling), tree, run.rule, coins_of(batch.rows, logits_BNV.device))


def _picked(states_BNF: Tensor | None, at_BK: Tensor) -> Tensor | None:
    """The states [B, K, F] at the given columns of each row."""
    return None if states_BNF is None else states_BNF.gather(1, at_BK[..., None].expand(-1, -1, states_BNF.shape[-1]))


def _root_only(run: _Run, batch: _Batch) -> DraftTree:
    """The draft of nothing: each row's last committed token. It carries the call's law, so that the rule draws as in any other round."""
    tokens_B1 = root_tokens(batch.rows, run.target.device)
    q_B1V = None if run.law == "point_mass" else torch.zeros(*tokens_B1.shape, run.target.vocab_size, device=tokens_B1.device)
    return DraftTree.chain(tokens_B1, torch.ones_like(tokens_B1[:, 0]), run.law, q_B1V)


def _causal(tree: DraftTree) -> Tensor:
    N = tree.width
    return torch.ones(N, N, dtype=torch.bool, device=tree.tokens_BN.device).tril().expand(len(tree.tokens_BN), N, N)


def _keep(run: _Run, batch: _Batch, new: Sequence[Sequence[int]]) -> list[list[int]]:
    """Commit each unfinished row's new tokens up to a stop; returns what was kept."""
    kept = [row.keep(tokens, run.stream) if row.reason is None else [] for row, tokens in zip(batch.rows, new, strict=True)]
    if batch.histories is not None:
        batch.histories.commit(kept)
    return kept


def _drop_finished(batch: _Batch) -> bool:
    """Take finished rows out of the batch once they are a quarter of it; False when nothing is left to do."""
    going = [b for b, row in enumerate(batch.rows) if row.reason is None]
    if going and len(going) <= 0.75 * len(batch.rows):
        rows_R = torch.tensor(going, device=batch.cache.lengths_B.device)
        batch.cache.select(rows_R)
        if batch.session is not None:
            batch.session.select(rows_R)
        for part in (batch.policy, batch.histories):
            if part is not None:
                part.select(going)
        batch.rows = [batch.rows[b] for b in going]
    return bool(going)


class _Clock:
    """Seconds by phase; on CUDA it waits for the device at each border."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._wait()
        begin = time.perf_counter()
        yield
        self._wait()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
