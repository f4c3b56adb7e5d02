"""Which drafted tokens the target keeps, and its own token after them: which rule fits which tree.

| rule | laws of the draft | |
|---|---|---|
| greedy | any | temperature 0: the target's only choices |
| point_mass | any | the target's own draws; lossless for every tree fixed before its coins |
| rejection, block | iid chain | lossless; block keeps more |
| multidraft, traversal | iid, without replacement | lossless; traversal keeps more on average |
| typical | any | lossy: the tokens do not follow the target's law |

Legend: B rows, N nodes, V vocabulary, K longest path.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spectrain.decoding import rules
from spectrain.decoding.rules import Accepted, follow
from spectrain.decoding.sampling import Coins, RandomSource
from spectrain.decoding.traversal import traversal
from spectrain.decoding.tree import LAWS, DraftTree, Law, check_tree

__all__ = ["LOSSY", "RULES", "Accepted", "accept", "check_draft", "follow", "law_of_rule", "resolve_rule", "verify"]

DRAWING: dict[str, Callable[[Tensor, DraftTree, RandomSource], Accepted]] = {
    "point_mass": rules.point_mass, "rejection": rules.rejection, "block": rules.block,
    "multidraft": rules.multidraft, "traversal": traversal, "typical": rules.typical,
}  # fmt: skip
RULES = ("greedy", *DRAWING)
LOSSY = frozenset({"typical"})
CHAINS_ONLY = frozenset({"rejection", "block"})
RATIO_TESTS = CHAINS_ONLY | {"multidraft", "traversal"}  # these compare p with q


def accept(p_BNV: Tensor, tree: DraftTree, rule: str, coins: RandomSource | None) -> Accepted:
    """Verify a draft tree against the target's laws p (law of the token after each node), without a Python loop over rows.

    p, q: float32 or float64, worked on in float64. rule: one of RULES; coins: needed by every rule but `greedy` (whose p must be
    one-hot). A tree of roots alone fits every rule. Raises ValueError for a rule that does not exist or does not fit the tree's law,
    for a tree, laws and coins that do not fit each other, for a law without mass, and for a draft that its own q cannot have drawn.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
    check_draft(p_BNV, tree)
    if rule == "greedy":
        _check_sure(p_BNV, tree)
    else:
        _check_coins(rule, coins, len(p_BNV))
        _check_mass(p_BNV, tree)
    if rule in RATIO_TESTS and tree.width > 1:
        _check_fit(rule, tree.law, _has_chains_only(tree))
        _check_drawn(tree)
    return verify(p_BNV, tree, rule, coins)


def check_draft(p_BNV: Tensor, tree: DraftTree) -> None:
    """ValueError for a tree that is none, or does not fit the laws (or logits) of its nodes."""
    check_tree(tree)
    _check_laws(p_BNV, tree)


def verify(p_BNV: Tensor, tree: DraftTree, rule: str, coins: RandomSource | None) -> Accepted:
    """`accept` of what is known to be sound: without its checks, each of which would make the host wait for the device. For `greedy`,
    logits do as well as laws."""
    if rule == "greedy":
        return rules.greedy(p_BNV, tree)
    assert coins is not None
    if rule in RATIO_TESTS and tree.width == 1:
        root_B = torch.zeros_like(tree.num_B)
        return Accepted(tree.parents_BN[:, 1:], root_B, rules.last_token(rules.rows_at(p_BNV, root_B), root_B, coins))
    return DRAWING[rule](p_BNV, tree, coins)


def resolve_rule(rule: str, *, temperature: float, law: Law, is_chain: bool) -> str:
    """The rule that `auto` stands for, or the rule itself if it fits the draft's law, its shape and the temperature.

    auto: temperature 0 -> greedy; point masses -> point_mass; an iid chain -> block; else traversal. Raises ValueError otherwise.
    """
    if law not in LAWS:
        raise ValueError(f"law {law!r} is unknown; choose one of {', '.join(LAWS)}")
    if rule == "auto":
        if temperature == 0:
            return "greedy"
        if law == "point_mass":
            return "point_mass"
        return "block" if law == "iid" and is_chain else "traversal"
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; choose one of auto, {', '.join(RULES)}")
    if rule == "greedy" and temperature > 0:
        raise ValueError(f"rule 'greedy' needs temperature 0, found {temperature}; use rule='auto'")
    _check_fit(rule, law, is_chain)
    return rule


def law_of_rule(rule: str, *, is_chain: bool) -> Law | None:
    """The law that a named rule wants of a draft whose law is open; None for `greedy`, `auto` and names that do not exist."""
    if rule in CHAINS_ONLY:
        return "iid"
    if rule in RATIO_TESTS:
        return "iid" if is_chain else "without_replacement"
    return "point_mass" if rule in ("point_mass", "typical") else None


def _check_laws(p_BNV: Tensor, tree: DraftTree) -> None:
    """Refuse laws of another shape than the tree's, and tokens without a place in them."""
    if p_BNV.dim() != 3 or p_BNV.shape[:2] != tree.tokens_BN.shape:
        found, needed = tuple(p_BNV.shape), tuple(tree.tokens_BN.shape)
        raise ValueError(f"p must be [rows, nodes, vocabulary] with the tree's {needed} rows and nodes, found shape {found}")
    if tree.q_BNV is not None and tree.q_BNV.shape != p_BNV.shape:
        found, needed = tuple(tree.q_BNV.shape), tuple(p_BNV.shape)
        raise ValueError(f"q must have the shape of p, {needed}, with 0 off the draft's vocabulary; found {found}")
    V = p_BNV.shape[-1]
    outside_BN = ((tree.tokens_BN < 0) | (tree.tokens_BN >= V)) & rules.used_nodes(tree)
    if bool(outside_BN.any()):
        row, node = outside_BN.nonzero()[0].tolist()
        raise ValueError(f"row {row} holds token {int(tree.tokens_BN[row, node])} at node {node}; p is a law over ids 0..{V - 1}")


def _check_sure(p_BNV: Tensor, tree: DraftTree) -> None:
    """Refuse laws of used nodes that are not one-hot."""
    best_BN = p_BNV.amax(-1)
    sure_BN = ((best_BN - 1).abs() < 1e-6) | ~rules.used_nodes(tree)
    if not bool(sure_BN.all()):
        row, node = (~sure_BN).nonzero()[0].tolist()
        raise ValueError(
            "rule 'greedy' needs temperature 0 (one-hot laws); use rule='point_mass' or 'auto' when sampling; "
            f"found a largest chance of {float(best_BN[row, node]):.6g} at row {row}, node {node}"
        )


def _check_coins(rule: str, coins: RandomSource | None, rows: int) -> None:
    if coins is None:
        raise ValueError(f"rule {rule!r} draws and needs coins; only 'greedy' does without")
    if isinstance(coins, Coins) and not coins.seed_B.shape == coins.length_B.shape == (rows,):
        found = f"seed_B {tuple(coins.seed_B.shape)} and length_B {tuple(coins.length_B.shape)}"
        raise ValueError(f"coins must hold a seed and a length for each of {rows} rows, found shapes {found}")


def _check_mass(p_BNV: Tensor, tree: DraftTree) -> None:
    """Refuse a law of a used node that cannot be drawn from."""
    mass_BN = p_BNV.sum(-1)  # NaN and infinity anywhere in a law show in its sum
    sound_BN = ((mass_BN > 0) & (mass_BN < torch.inf)) | ~rules.used_nodes(tree)
    if not bool(sound_BN.all()):
        row, node = (~sound_BN).nonzero()[0].tolist()
        raise ValueError(
            f"p of row {row}, node {node} has the sum {float(mass_BN[row, node])}; a law needs chances that sum to 1: look for NaN in the "
            "logits, or for settings that forbid every token"
        )


def _check_fit(rule: str, law: str, is_chain: bool) -> None:
    """Refuse a ratio test of drafts that it does not hold for."""
    if rule in RATIO_TESTS and law == "point_mass":
        raise ValueError(
            f"rule {rule!r} compares p with the q that children were drawn from, and law 'point_mass' has none; use rule='point_mass' or "
            "'auto', or draw the draft with law='iid' or 'without_replacement'"
        )
    if rule in CHAINS_ONLY and not (law == "iid" and is_chain):
        shape = "a chain" if is_chain else "a tree with forks"
        raise ValueError(f"rule {rule!r} verifies iid chains, found {shape} of law {law!r}; use rule='traversal', 'multidraft' or 'auto'")


def _has_chains_only(tree: DraftTree) -> bool:
    """Whether the nodes in use are chains, whatever the tree promises."""
    straight_N = torch.arange(-1, tree.width - 1, device=tree.parents_BN.device)
    return bool(((tree.parents_BN == straight_N) | ~rules.used_nodes(tree)).all())


def _check_drawn(tree: DraftTree) -> None:
    """Refuse drafts that their own q cannot have drawn: no chance, or a token twice without replacement."""
    assert tree.q_BNV is not None
    possible_BN = (rules.token_chances(tree.q_BNV, tree) > 0) | ~rules.used_nodes(tree)
    if not bool(possible_BN[:, 1:].all()):
        row, node = (~possible_BN[:, 1:]).nonzero()[0].tolist()
        raise ValueError(
            f"row {row} drafts token {int(tree.tokens_BN[row, node + 1])} at node {node + 1}, to which q at its parent gives no chance; q "
            "must be the law that children were drawn from, after all its transforms, and a child without mass left must be dropped"
        )
    if tree.law == "without_replacement":
        _check_siblings(tree)


def _check_siblings(tree: DraftTree) -> None:
    """Refuse equal children of one node."""
    used_BN, earlier_NN = rules.used_nodes(tree), torch.ones(tree.width, tree.width, dtype=torch.bool, device=tree.num_B.device).tril(-1)
    twins_BNN = (tree.tokens_BN[:, :, None] == tree.tokens_BN[:, None]) & (tree.parents_BN[:, :, None] == tree.parents_BN[:, None])
    twins_BNN = twins_BNN & earlier_NN & used_BN[:, :, None]
    if bool(twins_BNN.any()):
        row, later, first = twins_BNN.nonzero()[0].tolist()
        raise ValueError(
            f"row {row} drafts token {int(tree.tokens_BN[row, later])} twice below one parent, at nodes {first} and {later}, which law "
            "'without_replacement' cannot draw; keep the first alone, or name the law 'iid' if the children were drawn so"
        )
