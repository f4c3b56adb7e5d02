"""What one more pass over the target's own answers tells: entropy, alpha of each drafter, and the ranks that a head gives the true tokens.

Every token of an answer is looked at, also those that no round would begin at (the easy ones, which a round goes over): alpha here is the
chance of a draft at a random place, and lies above the acceptance of rounds. Definitions: docs/definitions.md.

Legend: L tokens of context and answer, R rows (token j of the answer in hand, its next one to be drafted), N rows of a piece, V vocabulary,
Vd draft vocabulary, H head width, F width of the states read, W target width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.data.batches import Batch
from spectrain.data.codes import Codes
from spectrain.decoding.drafter import Drafter, Round
from spectrain.decoding.sampling import Coins, Sampling, probabilities
from spectrain.decoding.shapes import Chain
from spectrain.evaluation.metrics import Numbers, bootstrap, bounds, by_prompt, ratio
from spectrain.evaluation.slices import Entropies
from spectrain.evaluation.trees import counted, joined, rounds_of
from spectrain.target.model import Target
from spectrain.target.passes import quick
from spectrain.training.simulate import Ranks, ranks_of

AT_ONCE = 1024  # rows whose logits are there at once, in the target's precision
PIECE = 2**22  # logits of them in float32


@dataclass(frozen=True)
class Answer:
    """An answer of the target and what it followed, as token ids."""

    id: str
    turn: int
    domain: str
    context: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Anatomy:
    """What the passes over one answer found; plain values, which JSON keeps.

    entropy: nats, of the target's law after each token but the last, at temperature 1. alpha[drafter][k]: sum of sum_v min(p, q) of the
    drafts at depth k + 1, and their number. ranks[head][k][j]: place of the token k + 1 behind token j among the head's choices, given the
    true tokens before it; `width` where it is none of them.
    """

    id: str
    turn: int
    domain: str
    tokens: list[int]
    entropy: list[float]
    alpha: dict[str, list[tuple[float, int]]]
    ranks: dict[str, list[list[int]]]
    width: int


@dataclass(frozen=True)
class _Laws:
    """A drafter's laws along an answer: q(k, rows) [N, Vd] at depth k + 1, given the true tokens before, over the ids target_ids."""

    depth: int
    target_ids: Tensor
    q: Callable[[int, slice], Tensor]


def examine(
    target: Target, answers: Sequence[Answer], *, heads: Mapping[str, Any], drafters: Mapping[str, Drafter], temperature: float, depth: int,
    width: int = 0,
) -> Iterator[Anatomy]:  # fmt: skip
    """One pass over each answer of two tokens or more (over 1024: one for each 1024).

    heads, drafters: by the name that `alpha` has them under; drafters read tokens alone. temperature: the one that the answers were drawn
    at, of p and q. depth: how deep alpha and ranks go. width: of the ranks; 0 for none. ValueError for a drafter that reads states.
    """
    reading = [name for name, drafter in drafters.items() if drafter.layer_ids]
    if reading:
        raise ValueError(f"alpha is taken of heads and of drafters that read tokens alone; {', '.join(reading)} reads states: leave it out")
    for answer in answers:
        if len(answer.tokens) > 1:
            yield _examined(quick(target), answer, heads, drafters, Sampling(temperature=temperature), depth, width)


@torch.no_grad()
def _examined(
    target: Target, answer: Answer, heads: Mapping[str, Any], drafters: Mapping[str, Drafter], sampling: Sampling, depth: int, width: int
) -> Anatomy:
    ids_1L = torch.tensor([[*answer.context, *answer.tokens]], device=target.device)
    layer_ids = sorted({i for head in heads.values() for i in head.layer_ids})
    C, R = len(answer.context), len(answer.tokens) - 1
    laws: dict[str, _Laws] = {}
    points = {name: _points(target, answer, d, depth) for name, d in drafters.items() if not (d.has_q and sampling.temperature)}
    sums = {name: [(0.0, count) for count in points[name].counts] for name in points}
    entropy: list[float] = []
    ranks: dict[str, list[list[int]]] = {}
    size = max(1, PIECE // target.vocab_size)
    for first in range(0, R, AT_ONCE):
        at_N = torch.arange(C + first, C + min(first + AT_ONCE, R), device=target.device)
        place_1L = torch.arange(ids_1L.shape[1], device=target.device)[None]
        out = target.forward(ids_1L, positions_BN=place_1L, mask=None, cache=None, layer_ids=layer_ids, logits_to_keep=at_N)
        if not first:
            batches = {name: _batch(head, ids_1L, C, layer_ids, out.states_BNF) for name, head in heads.items()}
            laws = {name: _of_head(head, batches[name], target, C, R, depth, sampling) for name, head in heads.items()}
            laws |= {name: _of_model(target, answer, d, sampling) for name, d in drafters.items() if name not in points}
            sums |= {name: [(0.0, R - k) for k in range(min(law.depth, R))] for name, law in laws.items()}
            if width:
                ranks = {name: _ranks(head, batches[name], target, depth, width) for name, head in heads.items()}
        for logits_NV in out.logits_BKV[0].split(size):
            logits_NV = logits_NV[:, : target.num_ids].float()
            lo = len(entropy)
            entropy += torch.special.entr(logits_NV.softmax(-1)).sum(-1).tolist()
            p_NV = probabilities(logits_NV, sampling)
            for name, law in laws.items():
                sums[name] = _added(sums[name], [_overlap(p_NV, law, k, lo, R) for k in range(len(sums[name]))])
            for name, found in points.items():
                sums[name] = _added(sums[name], found.chances(p_NV, lo))
    return Anatomy(answer.id, answer.turn, answer.domain, list(answer.tokens), entropy, sums, ranks, width)


def _added(sums: Sequence[tuple[float, int]], more: Sequence[float]) -> list[tuple[float, int]]:
    return [(total + new, count) for (total, count), new in zip(sums, more, strict=True)]


def _overlap(p_NV: Tensor, law: _Laws, k: int, lo: int, R: int) -> float:
    """Sum of sum_v min(p, q) at depth k + 1, over the rows whose draft answers to the laws lo, lo + 1, ... of p."""
    rows = slice(max(0, lo - k), max(0, min(lo + len(p_NV), R) - k))
    p_NVd = p_NV[rows.start + k - lo : rows.stop + k - lo, law.target_ids]
    return float(torch.minimum(p_NVd, law.q(k, rows)).sum(dtype=torch.float64))


def _batch(head: Any, ids_1L: Tensor, context: int, layer_ids: Sequence[int], states_1LF: Tensor | None) -> Batch:
    """What a head reads in training of one answer: ids, mask and its own states."""
    assert states_1LF is not None
    parts_1LSW = states_1LF.unflatten(-1, (len(layer_ids), -1))
    own_1LF = parts_1LSW[:, :, [layer_ids.index(i) for i in head.layer_ids]].flatten(-2)
    mask_1L = (torch.arange(ids_1L.shape[1], device=ids_1L.device) >= context).long()[None]
    nothing = torch.empty(0, device=ids_1L.device)
    return Batch(ids_1L, mask_1L, Codes(own_1LF), Codes(nothing), nothing.long(), nothing)


def _of_head(head: Any, batch: Batch, target: Target, context: int, rows: int, depth: int, sampling: Sampling) -> _Laws:
    steps = min(depth, head.max_depth or depth)
    row_R = torch.arange(context - 1, context - 1 + rows, device=target.device)
    outputs = list(head.outputs(batch, row_R, target.embedding_VW, steps))

    def q(k: int, at: slice) -> Tensor:
        return probabilities((outputs[k].hidden_RH[at] @ outputs[k].output_VdH.T).float(), sampling)

    return _Laws(steps, head.target_ids, q)


def _ranks(head: Any, batch: Batch, target: Target, depth: int, width: int) -> list[list[int]]:
    found = ranks_of(head, [batch], embed_VW=target.embedding_VW, steps=min(depth, head.max_depth or depth), width=width)
    return found.rank_KR.tolist()  # type: ignore[no-any-return]


def _of_model(target: Target, answer: Answer, drafter: Drafter, sampling: Sampling) -> _Laws:
    """Laws of the first draft at every row, by a model that drafts in a session of its own."""
    q_RV = torch.zeros(len(answer.tokens) - 1, target.vocab_size, device=target.device)
    for j, ask in enumerate(_asked(target, answer, drafter, Chain(1, "iid"), sampling)):
        if ask is not None:
            q_RV[j] = ask.q_BNV[0, 0]
    return _Laws(1, torch.arange(target.num_ids, device=target.device), lambda k, at: q_RV[at, : target.num_ids])


def _asked(target: Target, answer: Answer, drafter: Drafter, shape: Chain, sampling: Sampling) -> Iterator[Any]:
    """The chain that the drafter proposes behind each token of the answer but the last."""
    ids = [*answer.context, *answer.tokens]
    session = drafter.start(target, 1, len(ids) + 4 * (1 + shape.depth))
    law: Any = "iid" if shape.law == "iid" else "point_mass"
    for length in range(len(answer.context) + 1, len(ids)):
        coins = Coins(seed_B=torch.zeros(1, dtype=torch.long, device=target.device), length_B=torch.tensor([length], device=target.device))
        yield session.propose(Round([ids[:length]], shape, law, sampling=sampling, coins=coins, vocab_size=target.vocab_size))


@dataclass(frozen=True)
class _Points:
    """Drafts that are point masses: drafts[k] = (row of the law that each answers to, its token), counts[k]: rounds that come so deep."""

    drafts: list[list[tuple[int, int]]]
    counts: list[int]

    def chances(self, p_NV: Tensor, lo: int) -> list[float]:
        """By depth: the sum of p(draft) over the drafts that answer to the laws lo, lo + 1, ... of p."""
        found = []
        for drafts in self.drafts:
            own = [(at - lo, token) for at, token in drafts if lo <= at < lo + len(p_NV) and token < p_NV.shape[1]]
            rows, tokens = zip(*own, strict=True) if own else ((), ())
            found.append(float(p_NV[list(rows), list(tokens)].sum(dtype=torch.float64)))
        return found


def _points(target: Target, answer: Answer, drafter: Drafter, depth: int) -> _Points:
    """Of a chain, draft k + 1 counts where the k before it are the answer's own tokens; where there is none its chance is 0."""
    tokens = list(answer.tokens)
    drafts: list[list[tuple[int, int]]] = [[] for _ in range(depth)]
    counts = [0] * depth
    for j, tree in enumerate(_asked(target, answer, drafter, Chain(depth, "point_mass"), Sampling())):
        chain = [] if tree is None else tree.tokens_BN[0, 1 : int(tree.num_B[0])].tolist()
        for k in range(min(depth, len(tokens) - 1 - j)):
            counts[k] += 1
            if k < len(chain):
                drafts[k].append((j + k, chain[k]))
            if k >= len(chain) or chain[k] != tokens[j + 1 + k]:
                break
    return _Points(drafts, counts)


def entropies(found: Sequence[Anatomy]) -> Entropies:
    """For `slices`: tokens and entropies by id and turn."""
    return {(a.id, a.turn): (a.tokens, a.entropy) for a in found}


def alpha_table(found: Sequence[Anatomy], drafter: str) -> dict[str, dict[str, Any]]:
    """alpha of the first draft with its interval over prompts, and by depth, for each domain and all; ValueError without answers."""
    groups: dict[str, list[Anatomy]] = {}
    for a in found:
        groups.setdefault(a.domain, []).append(a)
    return {domain: _alpha(rows, drafter) for domain, rows in {**groups, "all": list(found)}.items()}


def _alpha(found: Sequence[Anatomy], drafter: str) -> dict[str, Any]:
    samples: list[Numbers] = by_prompt(found, [a.alpha[drafter][0] for a in found])
    first, depth = bootstrap(samples, ratio), max(len(a.alpha[drafter]) for a in found)
    by_depth = []
    for k in range(depth):
        total, count = (sum(column) for column in zip(*(a.alpha[drafter][k] for a in found if k < len(a.alpha[drafter])), strict=True))
        by_depth.append(total / count if count else 0.0)
    return {"value": first.value, **bounds(first, samples), "by_depth": by_depth}


def rank_table(found: Sequence[Anatomy], head: str, *, nodes: int) -> dict[str, Any]:
    """Acceptance by depth and rank (`evaluation.trees`) over the rounds of a tree of `nodes` nodes; of answers at temperature 0."""
    parts = []
    for a in found:
        rank_KR = torch.tensor(a.ranks[head])
        row_R = torch.arange(rank_KR.shape[1])
        counts_KR = torch.arange(len(rank_KR))[:, None] + row_R < len(row_R)
        parts.append(Ranks(a.width, rank_KR, counts_KR, row_R, torch.zeros_like(row_R)))
    ranks = joined(parts)
    counts = counted(ranks, rounds_of(ranks, nodes=nodes))
    return {"table": counts.table, "denominator": [n for n in counts.denominator if n]}
