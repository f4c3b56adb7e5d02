"""The best possible acceptance at one node, and what each rule reaches, against counting by hand and against the rules themselves."""

import itertools

import pytest
import torch

from spectrain.decoding.accept import accept
from spectrain.decoding.optimum import acceptance, optimal_acceptance
from spectrain.decoding.sampling import Coins, draw_children
from spectrain.decoding.tree import DraftTree

WOR = "without_replacement"


def pair(seed: int, V: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    laws = (1.5 * torch.randn(2, V, generator=torch.Generator().manual_seed(seed)).double()).softmax(-1)
    if seed % 3 == 0:
        laws[0, 0] = laws[1, V - 1] = 0
    return laws[0] / laws[0].sum(), laws[1] / laws[1].sum()


def tuples(q: torch.Tensor, k: int, law: str) -> dict[tuple[int, ...], float]:
    """Chance of each ordered choice of children."""
    if law == WOR:
        k = min(k, int((q > 0).sum()))
    chances = {}
    for ids in itertools.product(range(len(q)), repeat=k):
        chance, left = 1.0, q.clone()
        for x in ids:
            chance *= float(left[x] / left.sum())
            if law == WOR:
                left[x] = 0
            if chance == 0:
                break
        chances[ids] = chance
    return chances


@pytest.mark.parametrize("law", ["iid", WOR])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_optimum_is_not_the_minimum_over_all_sets(k: int, law: str) -> None:
    for seed in range(6):
        p, q = pair(seed, V=4 if k > 3 else 5)
        chances, V = tuples(q, k, law), len(p)
        brute = min(
            float(sum(p[list(inside)])) + 1 - sum(c for ids, c in chances.items() if set(ids) <= set(inside))
            for size in range(V + 1) for inside in itertools.combinations(range(V), size)
        )  # fmt: skip
        assert optimal_acceptance(p, q, k, law) == pytest.approx(brute, abs=1e-12)


@pytest.mark.parametrize("law", ["iid", WOR, "point_mass"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_rule_beats_the_optimum(k: int, law: str) -> None:
    for seed in range(8):
        p, q = pair(seed)
        best = optimal_acceptance(p, q, k, law)
        rules = ["point_mass"] if law == "point_mass" else ["multidraft", "point_mass"]
        reached = {rule: acceptance(p, q, k, rule, law) for rule in rules}
        assert all(0 <= value <= best + 1e-12 for value in reached.values())
        if law == "point_mass":
            assert reached["point_mass"] == pytest.approx(best)
            assert best == pytest.approx(float(p[q.argsort(descending=True, stable=True)[:k]].sum()))
        elif k == 1:
            assert reached["multidraft"] == pytest.approx(best) == pytest.approx(float(torch.minimum(p, q).sum()))
            assert acceptance(p, q, 1, "multidraft", law) == pytest.approx(acceptance(p, q, 1, "block", "iid"))


@pytest.mark.parametrize(
    ("rule", "law"),
    [(rule, law) for rule in ("multidraft", "traversal", "point_mass", "typical") for law in ("iid", WOR)]
    + [("point_mass", "point_mass"), ("typical", "point_mass")],
)
@pytest.mark.parametrize("seed", [1, 3])
def test_acceptance_is_not_the_rules_own(seed: int, rule: str, law: str) -> None:
    """Frequencies of the rule at work; five standard deviations."""
    rows, k = 20_000, 3
    p, q = pair(seed)
    coins = Coins(seed_B=torch.arange(rows), length_B=torch.full((rows,), 2))
    root = torch.zeros(rows, 1, dtype=torch.long)
    if law == "point_mass":
        children = q.argsort(descending=True, stable=True)[:k].expand(rows, k)
    else:
        children = draw_children(q.expand(rows, 1, 5), root, k, law, coins)[0][:, 0]
    parents = torch.tensor([[-1, 0, 0, 0]]).expand(rows, 4)
    q_BNV = None if law == "point_mass" else q.expand(rows, 4, 5)
    tree = DraftTree(torch.cat([root, children], 1), parents, torch.full((rows,), 4), law, q_BNV)
    found = float((accept(p.expand(rows, 4, 5), tree, rule, coins).length_B > 0).double().mean())
    wanted = acceptance(p, q, k, rule, law)
    assert found == pytest.approx(wanted, abs=5 * (max(wanted * (1 - wanted), 1e-9) / rows) ** 0.5)


def test_more_children_than_ids_break_it() -> None:
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.0, 0.4, 0.6])
    for k in (2, 3, 6):
        assert optimal_acceptance(p, q, k, WOR) == pytest.approx(0.8) == pytest.approx(acceptance(p, q, k, "multidraft", WOR))
    assert optimal_acceptance(p, q, 500, "iid") == pytest.approx(0.8)


def test_wide_vocabulary_is_refused_where_it_need_not_be() -> None:
    p, q = pair(1, V=5000)
    assert 0.2 < optimal_acceptance(p, q, 1, "iid") < optimal_acceptance(p, q, 4, "iid") < 1
    assert optimal_acceptance(p, q, 4, "iid") > acceptance(p, q, 4, "traversal", "iid")
    with pytest.raises(ValueError, match="5000 ids have q > 0.*cut q"):
        optimal_acceptance(p, q, 2, WOR)
    with pytest.raises(ValueError, match="orders; cut q"):
        acceptance(p, q, 3, "multidraft", WOR)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "block", "k": 2}, "does not verify 2 children"),
        ({"rule": "multidraft", "law": "point_mass"}, "does not verify"),
        ({"rule": "greedy"}, "does not verify"),
        ({"k": 0}, "at least 1"),
        ({"law": "wor"}, "law 'wor' is unknown"),
        ({"q_V": torch.ones(2)}, "one vocabulary"),
        ({"p_V": torch.tensor([1.0, -0.5, 0.5])}, "none below 0"),
        ({"p_V": torch.zeros(3)}, "not all 0"),
    ],
)
def test_misuse_goes_through(arguments: dict, message: str) -> None:
    right = {"p_V": torch.ones(3), "q_V": torch.ones(3), "k": 1, "rule": "multidraft", "law": "iid"}
    with pytest.raises(ValueError, match=message):
        acceptance(**{**right, **arguments})
