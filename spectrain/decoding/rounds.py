"""One round: propose -> verify -> accept -> commit, for all rows of a batch at once.

The device is never waited for between these: `advance` leaves on it what came of the round, and the host reads that in one piece
(`play_round`). What the host must know before (how long the longest row may be, how deep a path) it bounds without looking; what it
tells the device it tells at the start, when there is nothing to wait for. Exceptions wait where they must: drafts of drafters that are
not known to be sound, settings that depend on the history, and a policy that ends a draft in doubt.

Legend: B rows still in the batch, N nodes of the draft tree (root included), K path length, V vocabulary, F width of the states that the
drafter reads, X columns of the report.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.accept import Accepted, accept, check_draft, verify
from spectrain.decoding.drafter import DraftSession, Round
from spectrain.decoding.graphs import Graphs
from spectrain.decoding.policies import PolicySession
from spectrain.decoding.processors import Histories
from spectrain.decoding.rows import Row, StepRecord, Stream, coins_of, root_tokens
from spectrain.decoding.rules import used_nodes
from spectrain.decoding.sampling import Coins, Sampling, probabilities
from spectrain.decoding.shapes import Shape, trimmed
from spectrain.decoding.tree import DraftTree, Law, ancestors
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target
from spectrain.target.passes import Passes

FACTS = 4  # columns of a report before its tokens


@dataclass(frozen=True)
class Run:
    """What stays the same for a whole call. passes: who makes them; the prompt's is made by `rest`. ended: called with rows that end."""

    target: Target
    passes: Passes
    layer_ids: tuple[int, ...]
    shape: Shape
    law: Law
    rule: str
    sampling: Sampling
    stream: Stream | None
    ended: Callable[[Row], None] | None = None


@dataclass
class Batch:
    """The rows still held in the cache, finished ones included until the next compaction. graphs: what records passes, if anything."""

    rows: list[Row]
    cache: SlabCache
    session: DraftSession | None
    policy: PolicySession | None
    histories: Histories | None
    graphs: Graphs | None = None

    @property
    def sound(self) -> bool:
        """Whether drafts are known to be what they say, and the host has no other cause to look at each round."""
        return self.histories is None and (self.session is None or getattr(self.session, "sound", False))


def play_round(run: Run, batch: Batch) -> None:
    """One round, and what it leaves in the rows. ValueError when the target's logits are no numbers; nothing of the round is kept then."""
    clock = Clock(run.target.device)
    report_BX, nodes = advance(run, batch, clock)
    report = report_BX.tolist()  # the one time that the host waits for the device
    _refuse(run.target, any(row[0] for row in report))
    num, deep, length = ([row[i] for row in report] for i in range(1, FACTS))
    going = [row.reason is None for row in batch.rows]
    with clock("commit"):
        kept = keep(run, batch, [row[FACTS : FACTS + 1 + accepted] for row, accepted in zip(report, length, strict=True)])
    share = {phase: s / sum(going) for phase, s in clock.seconds.items()}
    for b, row in enumerate(batch.rows):
        if going[b]:
            row.settled += length[b] + 1
            row.rounds.append(StepRecord(num[b] - 1, length[b], len(kept[b]), share, depth=deep[b], nodes=nodes))
    batch.cache.bound(_longest(batch))
    if batch.policy is not None:
        batch.policy.observe([n - 1 for n in num], length, deep)


def advance(run: Run, batch: Batch, clock: "Clock") -> tuple[Tensor, int]:
    """All of a round that happens on the device. Returns the report and the positions of the pass.

    The report, int64 [B, X], holds of each row: whether a logit was no number, the nodes in use, the depth of the deepest, the accepted
    drafts (FACTS in all); then the accepted tokens and the target's own behind them.
    """
    cache, device = batch.cache, run.target.device
    coins = coins_of(batch.rows, device)
    active_B = torch.tensor([row.reason is None for row in batch.rows], device=device)
    with clock("draft"):
        tree = _propose(run, batch, coins) or root_only(run, batch)
    with clock("verify"):
        line_BNN = ancestors(tree.parents_BN) if not tree.is_chain else _causal(tree)
        depth_BN = line_BNN.sum(-1) - 1
        logits_BNV, states_BNF = _verified(run, batch, tree.tokens_BN, line_BNN, depth_BN)
    with clock("accept"):
        accepted, bad_B = _judged(run, batch, logits_BNV, tree, line_BNN, coins)
    with clock("commit"):
        longest = _most_accepted(run, batch, tree, accepted)  # the columns beyond it are empty in every row
        path_BK = torch.cat([torch.zeros_like(accepted.next_B)[:, None], accepted.path_BK[:, :longest]], dim=1)
        count_B = (accepted.length_B + 1) * active_B
        cache.commit(count_B, None if tree.is_chain else path_BK)
        node_BK = path_BK.clamp(min=0)
        after_BK = tree.tokens_BN.gather(1, node_BK.roll(-1, dims=1)).scatter(1, accepted.length_B[:, None], accepted.next_B[:, None])
        if batch.session is not None:
            batch.session.observe(_picked(states_BNF, node_BK), after_BK, count_B)
        deep_B = (depth_BN * used_nodes(tree)).amax(-1)
        report_BX = torch.cat([torch.stack([bad_B.long(), tree.num_B, deep_B, accepted.length_B], dim=1), after_BK], dim=1)
    return report_BX, tree.width


def _propose(run: Run, batch: Batch, coins: Coins) -> DraftTree | None:
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
        coins=coins, depth_B=depths if batch.policy else None, stop_below=stop_below, vocab_size=run.target.vocab_size, live_B=live,
        longest=_longest(batch), graphs=batch.graphs,
    )  # fmt: skip
    return batch.session.propose(ask)


def _longest(batch: Batch) -> int:
    """Entries of the longest row of the cache, and of a head's, once it has read them."""
    return max(row.settled for row in batch.rows)


def _verified(run: Run, batch: Batch, tokens_BN: Tensor, line_BNN: Tensor, depth_BN: Tensor) -> tuple[Tensor, Tensor | None]:
    """The target's pass over the nodes of a draft, staged in the cache: logits [B, N, V], and the states [B, N, F] that are read."""
    cache, maker = batch.cache, run.passes.of(*tokens_BN.shape)
    # Nodes past the model's last position are never kept; some models have no row for them.
    positions_BN = (cache.lengths_B[:, None] + depth_BN).clamp(max=run.target.max_length - 1)
    cache.fixed = batch.graphs is not None
    cache.stage(tokens_BN.shape[1])

    def verified(tokens_BN: Tensor, positions_BN: Tensor, line_BNN: Tensor, lengths_B: Tensor, slots_BN: Tensor) -> tuple[Tensor, ...]:
        with cache.at(lengths_B, slots_BN):
            mask = maker.masks(cache, line_BNN)
            out = maker.forward(tokens_BN, positions_BN=positions_BN, mask=mask, cache=cache, layer_ids=run.layer_ids)
        return (out.logits_BKV,) if out.states_BNF is None else (out.logits_BKV, out.states_BNF)

    given = tokens_BN, positions_BN, line_BNN, cache.lengths_B, cache.slots_BN
    found = verified(*given) if batch.graphs is None else batch.graphs.call("verification", None, verified, *given)
    return found[0], found[1] if len(found) > 1 else None


def verdict(run: Run, batch: Batch, logits_BNV: Tensor, tree: DraftTree, line_BNN: Tensor) -> Accepted:
    """What the rule keeps of a tree outside of a round; ValueError when a logit is no number."""
    accepted, bad_B = _judged(run, batch, logits_BNV, tree, line_BNN, coins_of(batch.rows, logits_BNV.device))
    _refuse(run.target, bool(bad_B.any()))
    return accepted


def _judged(run: Run, batch: Batch, logits_BNV: Tensor, tree: DraftTree, line_BNN: Tensor, coins: Coins) -> tuple[Accepted, Tensor]:
    """What the rule keeps of the tree, and the rows [B] whose logits are no numbers, if the host has not looked at these already.

    p goes through every transform, ids that the tokenizer does not know have no chance. A greedy choice needs no law.
    """
    V, num_ids = logits_BNV.shape[-1], run.target.num_ids
    best_BN = logits_BNV[..., :num_ids].amax(-1)
    bad_B = (best_BN.isnan() if run.sampling.temperature == 0 else ~best_BN.isfinite()).any(-1)
    if not batch.sound:
        _refuse(run.target, bool(bad_B.any()))
    if run.rule == "greedy" and batch.histories is None:
        if not batch.sound:
            check_draft(logits_BNV, tree)
        return verify(logits_BNV[..., :num_ids], tree, run.rule, None), bad_B
    if num_ids < V:
        logits_BNV = logits_BNV.masked_fill(torch.arange(V, device=logits_BNV.device) >= num_ids, float("-inf"))
    if batch.sound:
        return verify(probabilities(logits_BNV, run.sampling), tree, run.rule, coins), bad_B
    if batch.histories is not None:
        live_B1 = torch.tensor([[row.reason is None] for row in batch.rows], device=logits_BNV.device)
        logits_BNV = batch.histories.apply(logits_BNV, tree.tokens_BN, line_BNN, needed_BX=used_nodes(tree) & live_B1)
    return accept(probabilities(logits_BNV, run.sampling), tree, run.rule, coins), bad_B


def _refuse(target: Target, bad: bool) -> None:
    if bad:
        raise ValueError(f"{target.name} gives NaN for a logit, or infinity; try dtype='float32', or look at the weights")


def _most_accepted(run: Run, batch: Batch, tree: DraftTree, accepted: Accepted) -> int:
    """How many drafts any row accepted at most: on a CPU the number itself, elsewhere what is possible."""
    if batch.cache.watched:
        return int(accepted.length_B.max())
    return min(run.shape.depth, tree.width - 1) if batch.sound else tree.width - 1


def _picked(states_BNF: Tensor | None, at_BK: Tensor) -> Tensor | None:
    """The states [B, K, F] at the given columns of each row."""
    return None if states_BNF is None else states_BNF.gather(1, at_BK[..., None].expand(-1, -1, states_BNF.shape[-1]))


def root_only(run: Run, batch: Batch) -> DraftTree:
    """The draft of nothing: each row's last committed token. It carries the call's law, so that the rule draws as in any other round."""
    tokens_B1 = root_tokens(batch.rows, run.target.device)
    q_B1V = None if run.law == "point_mass" else torch.zeros(*tokens_B1.shape, run.target.vocab_size, device=tokens_B1.device)
    return DraftTree.chain(tokens_B1, torch.ones_like(tokens_B1[:, 0]), run.law, q_B1V)


def _causal(tree: DraftTree) -> Tensor:
    N = tree.width
    return torch.ones(N, N, dtype=torch.bool, device=tree.tokens_BN.device).tril().expand(len(tree.tokens_BN), N, N)


def keep(run: Run, batch: Batch, new: Sequence[Sequence[int]]) -> list[list[int]]:
    """Commit each unfinished row's new tokens up to a stop; returns what was kept."""
    kept = [row.keep(tokens, run.stream) if row.reason is None else [] for row, tokens in zip(batch.rows, new, strict=True)]
    if batch.histories is not None:
        batch.histories.commit(kept)
    return kept


class Clock:
    """Seconds by phase. On CUDA they are the device's, between events among its work: nobody waits at a border."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans.append((phase, begin, self._now()))

    @property
    def seconds(self) -> dict[str, float]:
        """The sum of each phase; on CUDA the device's work must have ended, which is waited for."""
        if on_cuda := self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found: dict[str, float] = {}
        for phase, begin, end in self._spans:
            found[phase] = found.get(phase, 0.0) + (begin.elapsed_time(end) / 1000 if on_cuda else end - begin)
        return found
