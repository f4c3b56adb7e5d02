"""Every rule, on every law of drafts that it fits, emits exactly the target's law; what is a little wrong is found.

Exact: no seeds, no statistics (conftest.py follows every outcome of every coin). Total variation is that of the first three tokens.
"""

import pytest
import torch
from torch import Tensor

from spectrain.decoding.accept import accept, verify
from spectrain.decoding.rules import Accepted, residual, rows_at
from spectrain.decoding.sampling import Sampling, probabilities

EXACT, BIASED = 1e-12, 1e-4
WOR = "without_replacement"
CHAIN, FORK, TREE, UNEVEN, WIDE = (-1, 0, 1, 2), (-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2, 2), (-1, 0, 0, 1, 2, 2, 5), (-1, 0, 0, 0, 1, 1, 2)

FITS = [
    *(("iid", rule, CHAIN[: n + 1]) for rule in ("rejection", "block", "multidraft", "traversal", "point_mass") for n in (1, 2, 3)),
    *((WOR, rule, CHAIN[:3]) for rule in ("multidraft", "traversal")),
    *((law, rule, shape) for law in ("iid", WOR) for rule in ("multidraft", "traversal", "point_mass") for shape in (FORK, UNEVEN)),
    *(("best", "point_mass", shape) for shape in (CHAIN, FORK, TREE, UNEVEN, WIDE)),
    *((WOR, rule, shape) for rule in ("multidraft", "traversal") for shape in (TREE, WIDE)),
    *(("iid", rule, TREE) for rule in ("multidraft", "traversal")),
]


def random_law(shape: tuple[int, ...], seed: int, spread: float = 1.5) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double() * spread).softmax(-1)


def states(V: int) -> int:
    return 1 + V + V * V


def hard_laws(V: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random laws of each state, and the awkward ones: p = q, ties, zeros in p, q or both, disjoint supports, one-hot, tiny chances."""
    p, q = random_law((12, states(V), V), seed), random_law((12, states(V), V), seed + 1)
    even, first = torch.full_like(p[0], 1 / V), torch.eye(V).double()[0].expand_as(p[0])
    p[2], q[2] = p[2], p[2]
    p[3], q[3] = even, even
    p[4, :, 0] = 0
    q[5, :, -1] = 0
    p[6, :, 0] = q[6, :, -1] = 0
    p[7, :, V // 2 :] = 0
    q[7, :, : V // 2] = 0
    p[8], q[9] = first, first
    q[10] = even
    p[11] = torch.where(torch.arange(V) == 0, p[11] * 1e-9, p[11])
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def name(value: object) -> str | None:
    return f"{len(value)}:{''.join(map(str, value[1:]))}" if isinstance(value, tuple) else None


@pytest.mark.parametrize(("law", "rule", "parents"), FITS, ids=name)
def test_rule_changes_the_law(law_of, make_pair, make_setting, law: str, rule: str, parents: tuple) -> None:
    tv, _ = law_of(make_pair(*hard_laws(3)), make_setting(parents, law, rule))
    assert tv.max() <= EXACT


@pytest.mark.parametrize("rule", ["rejection", "block", "multidraft", "traversal"])
def test_rule_changes_the_law_of_float32(law_of, make_pair, make_setting, rule: str) -> None:
    """Laws whose sums are off by float32 rounding stand for themselves, normalised; also with more ids."""
    p, q = (x.float() for x in hard_laws(4, seed=5))
    assert not torch.equal(p.double().sum(-1), torch.ones_like(p[..., 0]).double())
    tv, _ = law_of(make_pair(p, q), make_setting(CHAIN[:3], "iid", rule))
    assert tv.max() <= EXACT


@pytest.mark.parametrize("law", ["iid", WOR, "best"])
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=name)
def test_greedy_is_not_the_only_choice(law_of, make_pair, make_setting, law: str, parents: tuple) -> None:
    """Temperature 0 is a one-hot law: rule greedy takes drafts of any law, and the ratio tests take one-hot targets."""
    logits, q = torch.randn(6, states(2), 2, generator=torch.Generator().manual_seed(1)), random_law((6, states(2), 2), 3)
    pair = make_pair(probabilities(logits, Sampling()), q)
    for rule in ("greedy", "point_mass") if law == "best" else ("greedy", "point_mass", "multidraft", "traversal"):
        tv, _ = law_of(pair, make_setting(parents, law, rule))
        assert tv.max() <= EXACT


def penalised(logits_CSV: Tensor, *, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> Tensor:
    """Penalties by each state's own history, the one or two tokens that lead to it."""
    V = logits_CSV.shape[-1]
    histories = [(), *((a,) for a in range(V)), *((a, b) for a in range(V) for b in range(V))]
    count_SV = torch.stack([torch.bincount(torch.tensor(h, dtype=torch.long), minlength=V) for h in histories])
    scaled = torch.where(logits_CSV > 0, logits_CSV / repetition, logits_CSV * repetition)
    return torch.where(count_SV > 0, scaled, logits_CSV) - frequency * count_SV - presence * (count_SV > 0)


TRANSFORMS = {
    "temperature": (Sampling(temperature=0.6), {}), "top-k": (Sampling(temperature=1.0, top_k=2), {}),
    "top-p": (Sampling(temperature=1.2, top_p=0.7), {}), "min-p": (Sampling(temperature=1.0, min_p=0.3), {}),
    "repetition": (Sampling(temperature=1.0), {"repetition": 1.8}), "frequency": (Sampling(temperature=0.9), {"frequency": 0.9}),
    "presence": (Sampling(temperature=1.0), {"presence": 1.1}),
    "all": (Sampling(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05), {"repetition": 1.2, "frequency": 0.4, "presence": 0.3}),
}  # fmt: skip
SMALL_FITS = [
    *(("iid", rule, CHAIN[:3]) for rule in ("rejection", "block", "multidraft", "traversal")),
    *((law, rule, (-1, 0, 0, 1)) for law in ("iid", WOR) for rule in ("multidraft", "traversal", "point_mass")),
    ("best", "point_mass", (-1, 0, 0, 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("law", "rule", "parents"), SMALL_FITS, ids=name)
def test_rule_changes_a_transformed_law(law_of, make_pair, make_setting, transform: str, law: str, rule: str, parents: tuple) -> None:
    """The target's law after every transform and its own history; the draft's transformed in the same way or left alone."""
    sampling, penalties = TRANSFORMS[transform]
    logits = 1.5 * torch.randn(2, 4, states(4), 4, generator=torch.Generator().manual_seed(7))
    p = probabilities(penalised(logits[0], **penalties), sampling)
    for q in (probabilities(penalised(logits[1], **penalties), sampling), logits[1].double().softmax(-1)):
        tv, _ = law_of(make_pair(p, q), make_setting(parents, law, rule))
        assert tv.max() <= EXACT


@pytest.mark.parametrize(
    ("law", "rule", "parents"),
    [
        *(("iid", rule, CHAIN) for rule in ("rejection", "block", "multidraft", "traversal", "point_mass")),
        *((WOR, rule, UNEVEN) for rule in ("multidraft", "traversal", "point_mass")),
        *(("iid", rule, (-1, 0, 0, 1, 1, 2)) for rule in ("multidraft", "traversal")),
    ],
    ids=name,
)
def test_depth_by_confidence_changes_the_law(law_of, make_pair, make_setting, law: str, rule: str, parents: tuple) -> None:
    """Nothing is drafted after an unlikely token; the token itself stays. Rows of one batch differ in length and padding."""
    tv, _ = law_of(make_pair(*hard_laws(3)), make_setting(parents, law, rule, stop_below=0.35))
    assert tv.max() <= EXACT


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(("law", "rule", "parents"), [*SMALL_FITS[:7], *SMALL_FITS[-2:]], ids=name)
def test_later_rounds_remember_the_coins(law_of, make_pair, make_setting, law: str, rule: str, parents: tuple, rounds: int) -> None:
    """Rounds that follow each other, keyed by the committed length at their start as in the real Coins."""
    p, q = hard_laws(2)
    tv, _ = law_of(make_pair(p, q), make_setting(parents, law, rule, rounds=rounds))
    assert tv.max() <= EXACT


@pytest.mark.parametrize("law", ["iid", WOR])
def test_point_mass_minds_pruned_drafts(law_of, make_pair, make_setting, law: str) -> None:
    """Pruning sampled drafts by their own q is fatal to ratio tests (below) and harmless here."""
    tv, _ = law_of(make_pair(*hard_laws(3)), make_setting(TREE, law, "point_mass", label="point_mass", prune_below=0.3))
    assert tv.max() <= EXACT


# What must come out biased: how to draft, and how to verify (`verify` takes equal siblings without replacement, `accept` does not).
CONTROLS = {
    "best children with softmax q, RRS": {"law": "best", "label": "iid", "rule": "multidraft", "parents": (-1, 0, 0, 1, 1)},
    "best children with softmax q, RRSw": {"law": "best", "label": WOR, "rule": "multidraft", "parents": (-1, 0, 0, 1, 1)},
    "best child with softmax q, block": {"law": "best", "label": "iid", "rule": "block", "parents": CHAIN[:3]},
    "RRS of children without replacement": {"law": WOR, "label": "iid", "rule": "multidraft", "parents": TREE},
    "RRSw of iid children": {"law": "iid", "label": WOR, "rule": "multidraft", "parents": FORK[:3], "verify": verify},
    "traversal with q not masked": {"law": WOR, "label": "iid", "rule": "traversal", "parents": TREE},
    "pruned children, RRSw": {"law": WOR, "rule": "multidraft", "parents": TREE, "prune_below": 0.3},
    "pruned children, traversal": {"law": "iid", "rule": "traversal", "parents": FORK, "prune_below": 0.3},
    "pruned chain": {"law": "iid", "label": "iid", "rule": "rejection", "parents": CHAIN, "prune_below": 0.3},
}


def biased(law_of, pair, setting) -> Tensor:
    tv, _ = law_of(pair, setting)
    return tv.max()


@pytest.mark.parametrize("control", CONTROLS)
def test_wrong_law_goes_unnoticed(law_of, make_pair, make_setting, control: str) -> None:
    pair = make_pair(random_law((6, states(3), 3), 0), random_law((6, states(3), 3), 1))
    assert biased(law_of, pair, make_setting(**CONTROLS[control])) > BIASED


@pytest.mark.parametrize(("law", "rule"), [("iid", "rejection"), ("iid", "block"), (WOR, "multidraft"), (WOR, "traversal")])
def test_q_before_its_transform_goes_unnoticed(law_of, make_pair, make_setting, law: str, rule: str) -> None:
    logits = 1.5 * torch.randn(2, 6, states(3), 3, generator=torch.Generator().manual_seed(3))
    parents = CHAIN[:3] if law == "iid" else (-1, 0, 0, 1)
    p, cut = (probabilities(x, Sampling(temperature=1.0, top_k=2)) for x in logits)
    assert biased(law_of, make_pair(p, logits[1].softmax(-1), drawn_CSV=cut), make_setting(parents, law, rule)) > BIASED
    tv, _ = law_of(make_pair(p, cut, drawn_CSV=cut), make_setting(parents, law, rule))
    assert tv.max() <= EXACT


def one_coin_for_test_and_residual(role: str, number: int, node_R: Tensor, length_R: Tensor) -> tuple:
    return ("accept" if role == "residual" else role, number), length_R * 16 + node_R + (role == "residual")


def one_coin_for_draft_and_residual(role: str, number: int, node_R: Tensor, length_R: Tensor) -> tuple:
    return ("draft" if role == "residual" else role, number), length_R * 16 + node_R


def by_position(role: str, number: int, node_R: Tensor, length_R: Tensor) -> tuple:
    """The same coin for the same position of the answer, whatever round looks at it."""
    return (role, number), length_R + node_R


@pytest.mark.parametrize("rule", ["rejection", "block", "multidraft", "traversal"])
@pytest.mark.parametrize("key", [one_coin_for_test_and_residual, one_coin_for_draft_and_residual])
def test_coin_of_two_uses_goes_unnoticed(law_of, make_pair, make_setting, rule: str, key) -> None:
    pair = make_pair(random_law((6, states(3), 3), 0), random_law((6, states(3), 3), 1))
    assert biased(law_of, pair, make_setting(CHAIN[:3], "iid", rule, key=key)) > BIASED


def test_coin_of_two_rounds_goes_unnoticed(law_of, make_pair, make_setting) -> None:
    """Block verification stopped because later coins failed: those coins are no longer fresh in the next round."""
    pair = make_pair(random_law((6, states(2), 2), 0), random_law((6, states(2), 2), 1))
    assert biased(law_of, pair, make_setting(CHAIN[:3], "iid", "block", rounds=2, key=by_position)) > BIASED


def plain_residual(p_BNV: Tensor, tree, rule: str, coins) -> Accepted:
    """Block verification that ends a chain with norm((p - q)+), without the weight of the prefix."""
    got = accept(p_BNV, tree, rule, coins)
    p_BV = rows_at(p_BNV, got.length_B)  # on a chain node and length are the same number
    left_BV = residual(p_BV, rows_at(tree.q_BNV, got.length_B), torch.ones_like(p_BV[:, 0]))[0]
    whole_B1 = (got.length_B == tree.num_B - 1)[:, None]
    token_B = coins.pick(torch.where(whole_B1, p_BV, left_BV)[:, None], got.length_B[:, None], "residual", 1)[:, 0]
    return Accepted(got.path_BK, got.length_B, token_B)


def test_residual_without_the_weight_goes_unnoticed(law_of, make_pair, make_setting) -> None:
    pair = make_pair(random_law((6, states(3), 3), 0), random_law((6, states(3), 3), 1))
    assert biased(law_of, pair, make_setting(CHAIN[:3], "iid", "block", verify=plain_residual)) > BIASED
    tv, _ = law_of(pair, make_setting(CHAIN[:3], "iid", "rejection", verify=plain_residual))
    assert tv.max() <= EXACT  # right for the rule it belongs to


def test_lossy_rule_passes_for_lossless(law_of, make_pair, make_setting) -> None:
    pair = make_pair(random_law((6, states(3), 3), 0), random_law((6, states(3), 3), 1))
    assert biased(law_of, pair, make_setting(TREE, "best", "typical")) > 0.01


def test_better_rule_keeps_less(law_of, make_pair, make_setting) -> None:
    """Mean accepted drafts: block >= rejection in every case, traversal >= multidraft on average; on a chain traversal is block."""
    pair = make_pair(random_law((20, states(3), 3), 0), random_law((20, states(3), 3), 1))
    mean = {rule: law_of(pair, make_setting(CHAIN, "iid", rule))[1] for rule in ("rejection", "multidraft", "block", "traversal")}
    assert (mean["block"] >= mean["rejection"] - 1e-12).all() and mean["block"].mean() > mean["rejection"].mean() + 0.01
    torch.testing.assert_close(mean["multidraft"], mean["rejection"], atol=1e-12, rtol=0)
    torch.testing.assert_close(mean["traversal"], mean["block"], atol=1e-12, rtol=0)
    for law in ("iid", WOR):
        tree = {rule: law_of(pair, make_setting((-1, 0, 0, 1, 1), law, rule))[1].mean() for rule in ("multidraft", "traversal")}
        assert tree["traversal"] > tree["multidraft"] + 1e-3
