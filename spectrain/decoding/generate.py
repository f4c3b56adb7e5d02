"""The speculative generator: propose -> verify -> accept -> commit, until every row has stopped.

Plain decoding is the same loop with a draft of nothing, so that every comparison is between equal code. The first token of an
answer comes from the prompt's own pass and belongs to no round.

Legend: B rows still in the batch, N nodes of the draft tree (root included), K path length, L prompt length, V vocabulary,
F width of the states that the drafter reads.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from spectrain.decoding.accept import accept, resolve_rule
from spectrain.decoding.sampling import Coins, Sampling, probabilities, row_seed
from spectrain.decoding.shapes import Chain, Shape
from spectrain.decoding.stops import FinishReason, StopRule, TextStream
from spectrain.decoding.tree import DraftTree, ancestors
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target

Stream = Callable[[int, list[int], str], None]


class DraftSession(Protocol):
    """A drafter's state for one batch."""

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        """`count_B` more tokens a row are settled: the target's state of each, and the token that follows it."""

    def propose(self, committed: Sequence[Sequence[int]], shape: Shape) -> DraftTree | None:
        """A tree whose root is each row's last committed token; None for no draft in any row."""

    def select(self, rows_R: Tensor) -> None:
        """Keep only these rows."""


class Drafter(Protocol):
    """What `generate` asks of a drafter."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The target's states that it reads (hs numbers)."""

    def start(self, target: Target, rows: int, max_length: int) -> DraftSession:
        """A session for `rows` rows of at most `max_length` tokens; every candidate of a draft counts, kept or not."""


@dataclass(frozen=True)
class StepRecord:
    """One round of one row. accepted: by the rule; committed: kept after stops, the target's own token included.

    `seconds` by phase; in a batch, the row's equal share of the round.
    """

    drafted: int
    accepted: int
    committed: int
    seconds: dict[str, float]


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
    """Answers in the order of the prompts; `seconds` of the whole call."""

    rows: list[RowResult]
    seconds: float


@dataclass
class _Row:
    """A row at work: `ids` are the prompt and the committed tokens."""

    index: int
    ids: list[int]
    prompt_length: int
    seed: int
    stop: StopRule
    stream: TextStream
    rounds: list[StepRecord] = field(default_factory=list)
    reason: FinishReason | None = None
    prefill_seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.prompt_length :]


@dataclass
class _Batch:
    """The rows still held in the cache, finished ones included until the next compaction."""

    rows: list[_Row]
    cache: SlabCache
    session: DraftSession | None

    def active(self, device: torch.device) -> Tensor:
        return torch.tensor([row.reason is None for row in self.rows], device=device)


@torch.inference_mode()
def generate(
    target: Target, prompts: Sequence[Any], *, drafter: Drafter | None = None, shape: Shape | None = None, rule: str = "auto",
    temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, max_new_tokens: int = 256,
    stop: Sequence[str] = (), eos: str | int | Iterable[int] | None = "auto", ignore_eos: bool = False,
    seed: int | Sequence[int] = 0, stream: Stream | None = None,
) -> Result:  # fmt: skip
    """Answer prompts (token ids, strings, or chats) with the target, sped up by a drafter; returns `Result`.

    The output is the target's own: at temperature 0 the tokens of plain decoding, otherwise draws from its law.
    shape: `Chain(5)` when a drafter is given without one. seed: an int (row b gets a seed derived from it and b; row 0 the int
    itself) or one per prompt. stream(row, tokens, text) is called with committed tokens only. An answer that would pass the
    model's length limit ends there with reason "length". Raises ValueError for settings or prompts that cannot work.
    """
    started = time.perf_counter()
    rule = resolve_rule(rule, temperature)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    shape = shape or Chain(5)
    ends = frozenset() if ignore_eos else _eos_ids(eos, target)
    rows = _rows(target, prompts, ends, _stop_strings(stop), max_new_tokens, seed)
    if not rows:
        return Result(rows=[], seconds=0.0)
    nodes = 1 + shape.budget if drafter else 1
    # Twice the nodes: a row may end with a whole block accepted and then wait in the batch through further rounds.
    max_length = max(row.prompt_length + row.stop.max_new_tokens for row in rows) + 2 * nodes
    session = drafter.start(target, len(rows), max_length + shape.width * shape.depth) if drafter else None
    layer_ids = drafter.layer_ids if drafter else ()
    batch = _Batch(rows=list(rows), cache=target.new_cache(len(rows), max_length), session=session)
    _prefill(target, batch, layer_ids, sampling, rule, stream)
    while _drop_finished(batch):
        _round(target, batch, layer_ids, shape, sampling, rule, stream)
    results = [
        RowResult(r.tokens, r.stop.text(r.tokens), r.reason or "length", r.rounds, r.seed, r.prompt_length, r.prefill_seconds) for r in rows
    ]
    return Result(rows=results, seconds=time.perf_counter() - started)


def _eos_ids(eos: str | int | Iterable[int] | None, target: Target) -> frozenset[int]:
    if eos is None:
        return frozenset()
    if isinstance(eos, str):
        if eos != "auto":
            raise ValueError(f"eos must be 'auto', None, an id or a list of ids, found {eos!r}")
        return frozenset(target.eos_ids)
    return frozenset([eos] if isinstance(eos, int) else eos)


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(strings):
        raise ValueError("a stop string is empty: it would end every answer at once; leave it out")
    return strings


def _seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    seeds = [seed] if isinstance(seed, int) else [int(s) for s in seed]
    if not all(-(2**63) <= s < 2**63 for s in seeds):
        raise ValueError(f"seeds must fit into 64 bits with sign, found {seed}")
    if isinstance(seed, int):
        return [row_seed(seed, b) for b in range(rows)]
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds for {rows} prompts; pass one seed, or one a prompt")
    return seeds


def _rows(
    target: Target, prompts: Sequence[Any], ends: frozenset[int], stop: tuple[str, ...], max_new_tokens: int, seed: int | Sequence[int]
) -> list[_Row]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, dict))):
        raise ValueError("prompts must be a list of prompts (texts, chats or lists of ids); for one prompt pass [prompt]")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
    seeds = _seeds(seed, len(prompts))
    rows = []
    for b, prompt in enumerate(prompts):
        ids = target.encode(prompt)
        if not ids:
            raise ValueError(f"prompt {b} has no tokens; a prompt needs at least one")
        if len(ids) >= target.max_length:
            raise ValueError(
                f"prompt {b} has {len(ids)} tokens, {target.name} takes {target.max_length} with its answer; shorten or split it"
            )
        if not 0 <= min(ids) <= max(ids) < target.vocab_size:
            raise ValueError(f"prompt {b} holds ids outside 0..{target.vocab_size - 1}; was it made by another tokenizer?")
        limit = min(max_new_tokens, target.max_length - len(ids))
        rule = StopRule(eos_ids=ends, stop=stop, max_new_tokens=limit, decode=target.tokenizer.decode)
        rows.append(_Row(index=b, ids=ids, prompt_length=len(ids), seed=seeds[b], stop=rule, stream=TextStream(rule)))
    return rows


def _prefill(target: Target, batch: _Batch, layer_ids: tuple[int, ...], sampling: Sampling, rule: str, stream: Stream | None) -> None:
    """One pass over all prompts, aligned right so that the last column is each row's last token; commits the first token."""
    clock, device = _Clock(target.device), target.device
    length_B = torch.tensor([row.prompt_length for row in batch.rows], device=device)
    L = int(length_B.max())
    pad_B = L - length_B
    ids_BL = torch.tensor([[0] * (L - row.prompt_length) + row.ids for row in batch.rows], device=device)
    with clock("verify"):
        alone = len(batch.rows) == 1
        positions_BL = batch.cache.stage(L, None if alone else pad_B)
        mask_B1LS = None if alone else (torch.arange(L, device=device) <= positions_BL[..., None])[:, None]
        out = target.forward(
            ids_BL, positions_BN=positions_BL, mask_B1NS=mask_B1LS, cache=batch.cache, layer_ids=layer_ids, logits_to_keep=1
        )
        batch.cache.commit(length_B)
    root = DraftTree.chain(ids_BL[:, -1:], torch.ones_like(length_B))
    first_B = accept(_laws(target, out.logits_BKV, sampling), root, rule, _coins(batch, device)).next_B
    if batch.session is not None:
        left_BL = (torch.arange(L, device=device) + pad_B[:, None]).clamp(max=L - 1)  # to columns that start at 0
        states_BLF = _picked(out.states_BNF, left_BL)
        next_BL = torch.cat([ids_BL, first_B[:, None]], dim=1)[:, 1:].gather(1, left_BL)
        with clock("commit"):
            batch.session.observe(states_BLF, next_BL, length_B)
    for row, token in zip(batch.rows, first_B.tolist(), strict=True):
        row.prefill_seconds = sum(clock.seconds.values()) / len(batch.rows)
        _keep(row, [token], stream)


def _round(
    target: Target, batch: _Batch, layer_ids: tuple[int, ...], shape: Shape, sampling: Sampling, rule: str, stream: Stream | None
) -> None:
    clock, cache, device = _Clock(target.device), batch.cache, target.device
    with clock("draft"):
        tree = batch.session.propose([row.ids for row in batch.rows], shape) if batch.session else None
        tree = tree or _root_only(batch, device)
    with clock("verify"):
        start_B1 = cache.lengths_B[:, None]
        ancestors_BNN = ancestors(tree.parents_BN) if not tree.is_chain else _causal(tree)
        # Nodes past the model's last position are never kept; some models have no row for them.
        positions_BN = (start_B1 + ancestors_BNN.sum(-1) - 1).clamp(max=target.max_length - 1)
        cache.stage(tree.width)
        alone = tree.width == 1 and len(batch.rows) == 1
        out = target.forward(
            tree.tokens_BN, positions_BN=positions_BN, mask_B1NS=None if alone else cache.visible(ancestors_BNN), cache=cache,
            layer_ids=layer_ids,
        )  # fmt: skip
    with clock("accept"):
        accepted = accept(_laws(target, out.logits_BKV, sampling), tree, rule, _coins(batch, device))
    with clock("commit"):
        longest = int(accepted.length_B.max())  # the columns beyond it are empty in every row
        path_BK = torch.cat([torch.zeros_like(accepted.next_B)[:, None], accepted.path_BK[:, :longest]], dim=1)
        count_B = (accepted.length_B + 1) * batch.active(device)
        cache.commit(count_B, None if tree.is_chain else path_BK)
        node_BK = path_BK.clamp(min=0)
        after_BK = tree.tokens_BN.gather(1, node_BK.roll(-1, dims=1)).scatter(1, accepted.length_B[:, None], accepted.next_B[:, None])
        if batch.session is not None:
            batch.session.observe(_picked(out.states_BNF, node_BK), after_BK, count_B)
    num, length, new = tree.num_B.tolist(), accepted.length_B.tolist(), after_BK.tolist()
    share = {phase: s / sum(row.reason is None for row in batch.rows) for phase, s in clock.seconds.items()}
    for b, row in enumerate(batch.rows):
        if row.reason is None:
            kept = _keep(row, new[b][: length[b] + 1], stream)
            row.rounds.append(StepRecord(drafted=num[b] - 1, accepted=length[b], committed=kept, seconds=share))


def _laws(target: Target, logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """Law of the token after each node; ids that the tokenizer does not know have none."""
    V = logits_BNV.shape[-1]
    if target.num_ids < V:
        logits_BNV = logits_BNV.masked_fill(torch.arange(V, device=logits_BNV.device) >= target.num_ids, float("-inf"))
    return probabilities(logits_BNV, sampling)


def _picked(states_BNF: Tensor | None, at_BK: Tensor) -> Tensor | None:
    """The states [B, K, F] at the given columns of each row."""
    return None if states_BNF is None else states_BNF.gather(1, at_BK[..., None].expand(-1, -1, states_BNF.shape[-1]))


def _root_only(batch: _Batch, device: torch.device) -> DraftTree:
    """The draft of nothing: each row's last committed token."""
    tokens_B1 = torch.tensor([[row.ids[-1]] for row in batch.rows], device=device)
    return DraftTree.chain(tokens_B1, torch.ones(len(batch.rows), dtype=torch.long, device=device))


def _causal(tree: DraftTree) -> Tensor:
    N = tree.width
    return torch.ones(N, N, dtype=torch.bool, device=tree.tokens_BN.device).tril().expand(len(tree.tokens_BN), N, N)


def _coins(batch: _Batch, device: torch.device) -> Coins:
    return Coins(
        seed_B=torch.tensor([row.seed for row in batch.rows], device=device),
        length_B=torch.tensor([len(row.ids) for row in batch.rows], device=device),
    )


def _keep(row: _Row, new: Sequence[int], stream: Stream | None) -> int:
    """Commit new tokens up to a stop; returns how many were kept."""
    kept, row.reason = row.stop.cut(row.tokens, new)
    row.ids.extend(kept)
    if stream is not None:
        stream(row.index, kept, row.stream.push(row.tokens, final=row.reason is not None))
    return len(kept)


def _drop_finished(batch: _Batch) -> bool:
    """Take finished rows out of the batch once they are a quarter of it; False when nothing is left to do."""
    going = [b for b, row in enumerate(batch.rows) if row.reason is None]
    if going and len(going) <= 0.75 * len(batch.rows):
        rows_R = torch.tensor(going, device=batch.cache.lengths_B.device)
        batch.cache.select(rows_R)
        if batch.session is not None:
            batch.session.select(rows_R)
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
