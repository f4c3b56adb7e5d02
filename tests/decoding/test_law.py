"""The law of sampled tokens is the target's: on a target with a known table, counts of the first three tokens against exact chances.

Seeds are fixed, so each test always says the same; the negative controls show that a rule that is a little wrong is found.
"""

from collections.abc import Callable

import pytest
import torch

from spectrain.decoding.accept import DRAWING, Accepted, follow
from spectrain.decoding.generate import generate
from spectrain.decoding.policies import Adaptive
from spectrain.decoding.sampling import Coins, Sampling, draw, probabilities
from spectrain.decoding.shapes import Chain, Tree
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram
from spectrain.drafters.small_model import SmallModel
from spectrain.target.model import Target

V, ROWS, PROMPT = 4, 3000, [1, 2, 1]
CELLS = V**3
LIMIT = 110.0  # chi-square of 63 degrees of freedom: above it once in 5000 right runs


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    return torch.tensor([[1.0, 0.2, -0.5, 0.4], [0.3, 0.9, 0.0, -0.4], [-0.2, 0.5, 0.8, 0.1], [0.0, -0.3, 0.6, 1.1]])


@pytest.fixture(scope="module")
def target(make_table_target, table: torch.Tensor) -> Target:
    return make_table_target(table)


def exact(table: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Chance of each of the V^3 first triples."""
    p = probabilities(table[None], sampling)[0].double()
    return (p[PROMPT[-1]][:, None, None] * p[:, :, None] * p[None, :, :]).flatten()


def chi_square(target: Target, table: torch.Tensor, drafter, shape, **settings) -> float:
    settings = {"temperature": 1.0, **settings}
    rows = generate(target, [PROMPT] * ROWS, drafter=drafter, shape=shape, max_new_tokens=3, eos=None, seed=11, **settings).rows
    assert drafter is None or sum(r.drafted for row in rows for r in row.rounds) > ROWS
    settings = {name: value for name, value in settings.items() if name not in ("rule", "policy")}
    counts = torch.bincount(torch.tensor([a * V * V + b * V + c for a, b, c in (row.tokens for row in rows)]), minlength=CELLS).double()
    wanted = exact(table, Sampling(**settings)) * ROWS
    assert counts[wanted == 0].sum() == 0
    kept = wanted > 0
    return float(((counts - wanted)[kept] ** 2 / wanted[kept]).sum())


def likely(ids: list[int]) -> list[tuple[int, int]]:
    """A chain of drafts with the target's favourite after each token."""
    best = {0: 0, 1: 1, 2: 2, 3: 3}
    return [(best[ids[-1]], 0), (best[ids[-1]], 1), (best[ids[-1]], 2)]


def bush(ids: list[int]) -> list[tuple[int, int]]:
    """Forks, a repeated sibling, all children of one node."""
    return [(0, 0), (1, 0), (1, 0), (2, 1), (3, 1), (0, 2), (1, 2), (2, 2), (3, 2), (2, 8)]


def test_plain_sampling_has_another_law(target: Target, table: torch.Tensor) -> None:
    assert chi_square(target, table, None, None) < LIMIT


@pytest.mark.parametrize("kind", ["chain", "bush", "ngram", "head chain", "head tree"])
def test_drafts_change_the_law(target: Target, table: torch.Tensor, scripted, make_head, kind: str) -> None:
    head = HeadDrafter(make_head(target, draft_vocab=3, layer_ids=(0, 1)))
    drafter, shape = {
        "chain": (scripted(likely), Chain(3)), "bush": (scripted(bush), Chain(10)), "ngram": (NGram(shortest=1), Chain(2)),
        "head chain": (head, Chain(2)), "head tree": (head, Tree.dynamic(2, 2, 4)),
    }[kind]  # fmt: skip
    assert chi_square(target, table, drafter, shape) < LIMIT


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.4, "temperature": 1.4}])
def test_drafts_change_a_transformed_law(target: Target, table: torch.Tensor, scripted, settings: dict) -> None:
    assert chi_square(target, table, scripted(bush), Chain(10), **settings) < LIMIT


BUSH = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
SAMPLED = [
    ("rejection", Chain(2)), ("block", Chain(3)), ("auto", Chain(2)), ("multidraft", Tree.static(BUSH)), ("auto", Tree.static(BUSH)),
    ("multidraft", Tree.static(BUSH, law="iid")), ("traversal", Tree.static(BUSH)), ("traversal", Tree.static(BUSH, law="iid")),
    ("point_mass", Tree.static(BUSH)), ("point_mass", Tree.dynamic(2, 3, 5)), ("point_mass", Chain(2)), ("multidraft", Chain(2)),
    ("traversal", Chain(3)),
]  # fmt: skip


@pytest.mark.parametrize("settings", [{"temperature": t, "top_p": 0.85} for t in (0.7, 1.0)], ids=["t0.7", "t1"])
@pytest.mark.parametrize("rule, shape", SAMPLED, ids=[f"{r}-{s}-{s.law}" for r, s in SAMPLED])
def test_rule_changes_the_law(target: Target, table: torch.Tensor, make_head, rule: str, shape, settings: dict) -> None:
    """Every lossless rule, with drafts that a head drew from its own law, behind the whole generator."""
    drafter = HeadDrafter(make_head(target, draft_vocab=3, layer_ids=(0, 1)))
    assert chi_square(target, table, drafter, shape, rule=rule, **settings) < LIMIT


@pytest.mark.parametrize("rule, shape, policy", [
    ("block", Chain(3), "heuristic"), ("block", Chain(3), "confidence"), ("rejection", Chain(3), "confidence"), ("block", Chain(3), "ema"),
    ("traversal", Tree.static(BUSH), "heuristic"), ("traversal", Tree.static(BUSH), "ema"),
])  # fmt: skip
def test_policy_changes_the_law(target: Target, table: torch.Tensor, make_head, rule: str, shape, policy: str) -> None:
    drafter = HeadDrafter(make_head(target, draft_vocab=3, layer_ids=(0, 1)))
    assert chi_square(target, table, drafter, shape, rule=rule, policy=Adaptive(policy)) < LIMIT


def test_small_model_changes_the_law(target: Target, table: torch.Tensor, make_table_target) -> None:
    other = SmallModel(make_table_target(table.flip(0)))
    assert chi_square(target, table, other, Chain(2)) < LIMIT
    assert chi_square(target, table, other, Tree.static(BUSH)) < LIMIT


def test_typical_acceptance_keeps_the_law(target: Target, table: torch.Tensor, make_head) -> None:
    """It is lossy, and this is how it is told from the others."""
    drafter = HeadDrafter(make_head(target, draft_vocab=3, layer_ids=(0, 1)))
    assert chi_square(target, table, drafter, Chain(2), rule="typical") > 3 * LIMIT


def same_coin(self: Coins, nodes: int, role: str, draw: int = 0) -> torch.Tensor:
    """Keyed by the row alone: every node and every round gets the same number."""
    return Coins.__wrapped_uniform__(Coins(self.seed_B, torch.zeros_like(self.length_B)), 1, role, draw).expand(
        -1, nodes if isinstance(nodes, int) else nodes.shape[1]
    )


def coin_of_the_depth_only(self: Coins, nodes: int, role: str, draw: int = 0) -> torch.Tensor:
    """Not keyed by the round: what fell at a position before falls there again."""
    return Coins.__wrapped_uniform__(Coins(self.seed_B, torch.zeros_like(self.length_B)), nodes, role, draw)  # type: ignore[attr-defined]


@pytest.mark.parametrize("broken", [same_coin, coin_of_the_depth_only])
def test_coins_used_twice_go_unnoticed(target: Target, table: torch.Tensor, scripted, monkeypatch, broken: Callable) -> None:
    monkeypatch.setattr(Coins, "__wrapped_uniform__", Coins.uniform, raising=False)
    monkeypatch.setattr(Coins, "uniform", broken)
    assert chi_square(target, table, scripted(bush), Chain(10)) > 3 * LIMIT


def test_residual_from_the_whole_law_goes_unnoticed(target: Target, table: torch.Tensor, scripted, monkeypatch) -> None:
    """A greedy draft taken with chance p(draft), and otherwise a token of p instead of p without the draft."""

    def wrong(p_BNV: torch.Tensor, tree: DraftTree, coins: Coins) -> Accepted:
        drawn = draw(p_BNV, coins.uniform(tree.width, "residual"))
        child = torch.cat([tree.tokens_BN[:, 1:], tree.tokens_BN[:, :1]], dim=1)
        takes = coins.uniform(tree.width, "accept") < p_BNV.gather(-1, child[..., None])[..., 0]
        takes[:, -1] = False
        return follow(torch.where(takes, child, drawn), tree)

    monkeypatch.setitem(DRAWING, "point_mass", wrong)
    assert chi_square(target, table, scripted(likely), Chain(3)) > 3 * LIMIT
