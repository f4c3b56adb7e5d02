"""The exact law of what a round emits: every outcome of every coin is followed, with its chance.

A world is one row of a batch: the outcomes prescribed for its first coins (its script). Whatever coins come after, it takes the first
possible outcome and leaves a new world for each other one; worlds are run until none is left. A coin is an interval of a number in
[0, 1): each use cuts the interval, so that a coin that is used twice stays one coin.

Legend: R worlds, C cases (pairs of p and q), S states (the last two tokens), O outcomes, T = 3 tokens, N nodes, V vocabulary.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.config import HeadConfig
from spectrain.decoding.accept import accept
from spectrain.decoding.sampling import draw_children
from spectrain.decoding.tree import DraftTree, drop_nodes
from spectrain.heads.base import LAST, head_class
from spectrain.target.model import Target
from spectrain.training.setup import new_head

LONGEST_SCRIPT, SMALLEST, CHUNK, TOKENS = 64, 1e-15, 60_000, 3


class Worlds:
    """A source of coins for R worlds. key(role, number, node_R, length_R) -> (name, slot_R) names the number that a use refers to."""

    def __init__(self, case_R: Tensor, script_RL: Tensor, scripted_R: Tensor, key: Callable | None = None) -> None:
        self.case_R, self.script_RL, self.scripted_R = case_R, script_RL.clone(), scripted_R
        self.row_R = torch.arange(len(case_R))
        self.at_R, self.length_R = torch.zeros_like(case_R), torch.zeros_like(case_R)
        self.weight_R = torch.ones(len(case_R), dtype=torch.float64)
        self.left: list[tuple[Tensor, Tensor, Tensor]] = []
        self.key = key or (lambda role, number, node_R, length_R: ((role, number), length_R * 16 + node_R))
        self.intervals: dict = {}

    def interval(self, role: str, number: int, node_R: Tensor) -> tuple[tuple, Tensor, Tensor, Tensor]:
        name, slot_R = self.key(role, number, node_R, self.length_R)
        low_RK, high_RK = self.intervals.setdefault(name, (torch.zeros(len(node_R), 64).double(), torch.ones(len(node_R), 64).double()))
        return name, slot_R, low_RK[self.row_R, slot_R], high_RK[self.row_R, slot_R]

    def choose(self, name: tuple, slot_R: Tensor, low_RO: Tensor, high_RO: Tensor) -> Tensor:
        """Take an outcome whose part of the interval is not empty, and cut the interval to it."""
        width_RO = (high_RO - low_RO).clamp(min=0)
        open_RO = width_RO > SMALLEST
        assert bool(open_RO.any(-1).all()), "a coin without an outcome: the rule asked about NaN"
        forks_R = open_RO.sum(-1) > 1
        follows_R = forks_R & (self.at_R < self.scripted_R)
        out_R = torch.where(follows_R, self.script_RL[self.row_R, self.at_R].long(), open_RO.int().argmax(-1))
        fresh_R = forks_R & ~follows_R
        row, other = (open_RO & fresh_R[:, None]).nonzero(as_tuple=True)
        row, other = row[other != out_R[row]], other[other != out_R[row]]
        scripts = self.script_RL[row].clone()
        scripts[torch.arange(len(row)), self.at_R[row]] = other.to(torch.int8)
        self.left.append((self.case_R[row], scripts, self.at_R[row] + 1))
        self.script_RL[self.row_R[fresh_R], self.at_R[fresh_R]] = out_R[fresh_R].to(torch.int8)
        self.weight_R = self.weight_R * width_RO[self.row_R, out_R] / width_RO.sum(-1)
        self.at_R = self.at_R + forks_R
        low_RK, high_RK = self.intervals[name]
        low_RK[self.row_R, slot_R], high_RK[self.row_R, slot_R] = low_RO[self.row_R, out_R], high_RO[self.row_R, out_R]
        return out_R

    def below(self, part_BX: Tensor, whole_BX: Tensor, node_BX: Tensor, role: str, number: int = 0) -> Tensor:
        results = []
        for x in range(node_BX.shape[1]):
            name, slot_R, low_R, high_R = self.interval(role, number, node_BX[:, x])
            part_R, whole_R = part_BX[:, x].double(), whole_BX[:, x].double()
            at_R = torch.where(whole_R > 0, (part_R / whole_R).clamp(0, 1), (part_R > 0).double())
            low_RO, high_RO = torch.stack([low_R, torch.maximum(low_R, at_R)], 1), torch.stack([torch.minimum(high_R, at_R), high_R], 1)
            results.append(self.choose(name, slot_R, low_RO, high_RO) == 0)
        return torch.stack(results, dim=1)

    def pick(self, p_BXV: Tensor, node_BX: Tensor, role: str, number: int = 0) -> Tensor:
        results = []
        for x in range(node_BX.shape[1]):
            name, slot_R, low_R, high_R = self.interval(role, number, node_BX[:, x])
            p_RV = p_BXV[:, x].double().clone()
            p_RV[p_RV.sum(-1) == 0, -1] = 1  # a law without mass: what comes out must not matter
            sums_RV = p_RV.cumsum(-1)
            upper_RV = sums_RV / sums_RV[:, -1:]
            lower_RV = torch.cat([torch.zeros_like(upper_RV[:, :1]), upper_RV[:, :-1]], dim=1)
            low_RV, high_RV = torch.maximum(low_R[:, None], lower_RV), torch.minimum(high_R[:, None], upper_RV)
            results.append(self.choose(name, slot_R, low_RV, high_RV))
        return torch.stack(results, dim=1)


@dataclass
class Pair:
    """Laws of C targets and drafts in every state. State 0: no token yet; the last state: beyond what is looked at (token 0 surely)."""

    p_CSV: Tensor
    q_CSV: Tensor
    drawn_CSV: Tensor | None = None  # what children are really drawn from, where it is not q

    def __post_init__(self) -> None:
        self.V = self.p_CSV.shape[-1]
        self.end = 1 + self.V + self.V**2
        last = torch.zeros(len(self.p_CSV), 1, self.V)
        last[..., 0] = 1
        self.p_CSV, self.q_CSV = torch.cat([self.p_CSV, last.to(self.p_CSV)], 1), torch.cat([self.q_CSV, last.to(self.q_CSV)], 1)
        if self.drawn_CSV is not None:
            self.drawn_CSV = torch.cat([self.drawn_CSV, last.to(self.drawn_CSV)], 1)
        state, token = torch.arange(self.end)[:, None], torch.arange(self.V)
        self.next_SV = torch.where(state == 0, 1 + token, 1 + self.V + (state - 1) % self.V * self.V + token)
        self.next_SV = torch.cat([self.next_SV, torch.full((1, self.V), self.end)])
        assert int(self.next_SV.max()) == self.end

    def exact(self) -> tuple[Tensor, Tensor]:
        """sequences [V^T, T], and chances [C, V^T, T] of each of their tokens after the ones before."""
        sequences = torch.tensor(list(itertools.product(range(self.V), repeat=TOKENS)))
        p_CSV = self.p_CSV.double() / self.p_CSV.double().sum(-1, keepdim=True)
        state, steps = torch.zeros(len(sequences), dtype=torch.long), []
        for t in range(TOKENS):
            steps.append(p_CSV[:, state, sequences[:, t]])
            state = self.next_SV[state, sequences[:, t]]
        return sequences, torch.stack(steps, dim=-1)


@dataclass
class Setting:
    """A way to draft and to verify. parents: the tree's. law: how children are drawn (`best`: the likeliest of q). label: the law written
    on the tree. stop_below: nothing is drafted after a token with a smaller q. prune_below: nodes with a smaller q are taken out."""

    parents: tuple[int, ...]
    law: str
    rule: str
    label: str | None = None
    stop_below: float = 0.0
    prune_below: float = 0.0
    rounds: int = 1
    verify: Callable = accept
    key: Callable | None = None

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))


def draft(pair: Pair, way: Setting, worlds: Worlds, state_R: Tensor) -> tuple[DraftTree, Tensor]:
    """A tree below each world's state, and the states of its nodes."""
    N, R = len(way.parents), len(state_R)
    drawn_CSV = pair.q_CSV if pair.drawn_CSV is None else pair.drawn_CSV
    tokens_RN, states_RN = torch.zeros(R, N, dtype=torch.long), torch.zeros(R, N, dtype=torch.long)
    keep_RN, chance_RN, states_RN[:, 0] = torch.ones(R, N, dtype=torch.bool), torch.ones(R, N).double(), state_R
    for n in range(N):
        children = [c for c in range(N) if way.parents[c] == n]
        if not children:
            continue
        q_RV = drawn_CSV[worlds.case_R, states_RN[:, n]]
        if way.law == "best":
            tokens_RW = q_RV.argsort(dim=-1, descending=True, stable=True)[:, : len(children)]
            alive_RW = torch.ones_like(tokens_RW, dtype=torch.bool)
        else:
            tokens, alive = draw_children(q_RV[:, None], torch.full((R, 1), n), len(children), way.law, worlds)
            tokens_RW, alive_RW = tokens[:, 0], alive[:, 0]
        tokens_RN[:, children], states_RN[:, children] = tokens_RW, pair.next_SV[states_RN[:, n, None], tokens_RW]
        chance_RN[:, children] = q_RV.gather(1, tokens_RW).double()
        keep_RN[:, children] = alive_RW & (chance_RN[:, children] >= way.prune_below) & (chance_RN[:, n, None] >= way.stop_below)
    parents_RN = torch.tensor(way.parents).expand(R, N)
    tokens_RN, parents_RN, num_R, kept_RN = drop_nodes(tokens_RN, parents_RN, keep_RN)
    states_RN = states_RN.gather(1, kept_RN)
    label = way.label or ("point_mass" if way.law == "best" else way.law)
    q_RNV = pair.q_CSV[worlds.case_R[:, None], states_RN]
    has_child_RN = torch.stack([((parents_RN == n) & (torch.arange(N) < num_R[:, None])).any(-1) for n in range(N)], dim=1)
    q_RNV = torch.where(has_child_RN[..., None], q_RNV, torch.nan)  # a law that drew nothing says nothing
    chain = way.is_chain and not way.prune_below
    return DraftTree(tokens_RN, parents_RN, num_R, label, None if label == "point_mass" else q_RNV, is_chain=chain), states_RN


def emitted(pair: Pair, way: Setting, worlds: Worlds) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [R, T] that the rounds emit (cut or unfinished at T), how many, and how many drafts the first round accepted."""
    R = len(worlds.case_R)
    state_R, count_R = torch.zeros(R, dtype=torch.long), torch.zeros(R, dtype=torch.long)
    out_RT, first_R = torch.zeros(R, TOKENS + 16, dtype=torch.long), None
    for _ in range(way.rounds):
        tree, states_RN = draft(pair, way, worlds, state_R)
        padding_RN = torch.arange(tree.width) >= tree.num_B[:, None]
        p_RNV = pair.p_CSV[worlds.case_R[:, None], states_RN].masked_fill(padding_RN[..., None], torch.nan)
        got = way.verify(p_RNV, tree, way.rule, worlds)
        first_R = got.length_B if first_R is None else first_R
        for k in range(tree.width):
            node_R = got.path_BK[:, k] if k < tree.width - 1 else torch.full_like(count_R, -1)
            token_R = torch.where(node_R >= 0, tree.tokens_BN.gather(1, node_R.clamp(min=0)[:, None])[:, 0], got.next_B)
            live_R = k <= got.length_B
            at_R = (count_R + k).clamp(max=out_RT.shape[1] - 1)
            out_RT[worlds.row_R[live_R], at_R[live_R]] = token_R[live_R]
            state_R = torch.where(live_R, pair.next_SV[state_R, token_R], state_R)
        count_R = count_R + got.length_B + 1
        worlds.length_R = count_R.clamp(max=3)  # rows beyond T tokens are not looked at again
        state_R = torch.where(count_R >= TOKENS, pair.end, state_R)
    return out_RT[:, :TOKENS], count_R.clamp(max=TOKENS), first_R


def outcome(pair: Pair, way: Setting) -> tuple[Tensor, Tensor]:
    """Total variation [C] between the law of the first T emitted tokens and the target's, and the mean number [C] of accepted drafts of
    the first round. A world that emitted fewer tokens goes on by the target's law."""
    sequences, steps = pair.exact()
    C = len(steps)
    law, mean, mass = torch.zeros(C, len(sequences)).double(), torch.zeros(C).double(), torch.zeros(C).double()
    tails = torch.stack([steps[..., m:].prod(-1) for m in range(TOKENS + 1)], dim=1)  # [C, m, V^T]
    todo = [torch.arange(C), torch.zeros(C, LONGEST_SCRIPT, dtype=torch.int8), torch.zeros(C, dtype=torch.long)]
    while len(todo[0]):
        worlds, todo = Worlds(*(part[:CHUNK] for part in todo), key=way.key), [part[CHUNK:] for part in todo]
        out_RT, count_R, length_R = emitted(pair, way, worlds)
        fits = ((out_RT[:, None] == sequences) | (torch.arange(TOKENS) >= count_R[:, None, None])).all(-1)
        law.index_add_(0, worlds.case_R, worlds.weight_R[:, None] * fits * tails[worlds.case_R, count_R])
        mean.index_add_(0, worlds.case_R, worlds.weight_R * length_R)
        mass.index_add_(0, worlds.case_R, worlds.weight_R)
        todo = [torch.cat(parts) for parts in zip(*worlds.left, todo, strict=True)]
    assert torch.allclose(mass, torch.ones_like(mass), atol=1e-12, rtol=0), mass
    return (law - steps.prod(-1)).abs().sum(-1) / 2, mean


@pytest.fixture(scope="session")
def law_of() -> Callable[[Pair, Setting], tuple[Tensor, Tensor]]:
    """law_of(pair, setting) -> (total variation by case, mean accepted drafts by case)."""
    return outcome


@pytest.fixture(scope="session")
def make_pair() -> type[Pair]:
    return Pair


@pytest.fixture(scope="session")
def make_setting() -> type[Setting]:
    return Setting


@pytest.fixture(scope="session")
def random_head(make_head: Callable[..., Any]) -> Callable[..., Any]:
    """random_head(kind, target, draft_vocab=3): a head of a kind in `HEADS` with laws of its own, over every id or only the first ones."""

    def make(kind: str, target: Target, *, draft_vocab: int = 3) -> Any:
        if head_class(kind).default_layer_ids(99) != (LAST,):
            return make_head(target, draft_vocab=draft_vocab, layer_ids=(0, 1))
        config = HeadConfig(kind=kind, draft_vocab_size=draft_vocab, init_layer="random", num_heads=3)
        head = new_head(config, target, (), seed=0, counts_V=torch.arange(target.vocab_size, 0, -1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in head.parameters():
                if weight.dim() == 2:  # blocks that begin at zero, and an output that says what the target says
                    weight.add_(0.5 * torch.randn(weight.shape, generator=generator))
        return head.eval()

    return make
