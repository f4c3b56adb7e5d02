"""How often a rule accepts one of the children of a node, and how often any lossless rule could: the gap is what the rule leaves.

Exact, for laws written out; meant for studies and tests, not for the decoding loop.

Legend: V vocabulary, I ids with q > 0, H = 2^I sets of them (bit x of a set's number: id x is in it).
"""

import torch
from torch import Tensor

from spectrain.decoding.rules import normalised, residual, typical_limit, without
from spectrain.decoding.tree import LAWS, Law

MOST_IDS = 16  # all subsets of the ids with q > 0 are visited
MOST_ORDERS = 100_000  # so are all orders of refused children


def optimal_acceptance(p_V: Tensor, q_V: Tensor, k: int, law: Law) -> float:
    """Highest chance with which a lossless rule can accept one of k children of law q (alpha*, Hu et al., arXiv 2502.18779).

    alpha* = min over sets of ids: p(set) + 1 - P(all k children lie in the set). `iid`: P = q(set)^k, and a minimum lies on a set of
    the smallest p/q, so any vocabulary will do. `without_replacement`: all subsets of the ids with q > 0. `point_mass`: the children
    are the k likeliest ids of q, alpha* = p(them). Raises ValueError out of range, and without replacement above 16 ids with q > 0.
    """
    p_V, q_V = _checked(p_V, q_V, k, law)
    if law == "point_mass":
        return float((p_V * _chance_drawn(q_V, k, law)).sum())
    if law == "iid":
        order_V = torch.argsort(torch.where(q_V > 0, p_V / q_V, torch.inf))
        alpha_V = p_V[order_V].cumsum(0) + 1 - q_V[order_V].cumsum(0).clamp(max=1) ** k
        return min(1.0, float(alpha_V.min()))
    drawn_H = _drawn_sets(q_V, k)
    return min(1.0, float((_set_sums(p_V[q_V > 0]) + 1 - _over_subsets(drawn_H)).min()))


def acceptance(p_V: Tensor, q_V: Tensor, k: int, rule: str, law: Law) -> float:
    """Chance that `rule` accepts one of k children of one node, drawn by `law` from q (`point_mass`: the k likeliest ids of q).

    point_mass and typical take any law, rejection and block one iid child, multidraft and traversal (equal at one node) sampled children.
    Raises ValueError for what does not fit and for sets or orders of children too many to visit.
    """
    p_V, q_V = _checked(p_V, q_V, k, law)
    if rule == "point_mass":
        return float((p_V * _chance_drawn(q_V, k, law)).sum())
    if rule == "typical":
        return 1 - _chance_inside(q_V, p_V <= typical_limit(p_V), k, law)
    if (rule in ("multidraft", "traversal") and law != "point_mass") or (rule in ("rejection", "block") and law == "iid" and k == 1):
        return 1 - _chance_refused(p_V, q_V, k, law)
    raise ValueError(
        f"rule {rule!r} does not verify {k} children of law {law!r} at one node; point_mass and typical take any, rejection and block one "
        "iid child, multidraft and traversal children drawn iid or without_replacement"
    )


def _checked(p_V: Tensor, q_V: Tensor, k: int, law: str) -> tuple[Tensor, Tensor]:
    """p and q in float64, normalised."""
    if p_V.dim() != 1 or p_V.shape != q_V.shape:
        raise ValueError(f"p and q must be laws over one vocabulary, found shapes {tuple(p_V.shape)} and {tuple(q_V.shape)}")
    if not all(bool((x_V >= 0).all()) and 0 < float(x_V.sum()) < torch.inf for x_V in (p_V, q_V)):
        raise ValueError("p and q must hold chances: none below 0, and not all 0")
    if k < 1:
        raise ValueError(f"k must be at least 1, found {k}")
    if law not in LAWS:
        raise ValueError(f"law {law!r} is unknown; choose one of {', '.join(LAWS)}")
    return normalised(p_V), normalised(q_V)


def _chance_refused(p_V: Tensor, q_V: Tensor, k: int, law: Law) -> float:
    """Chance that k children in turn are refused: sum (q - p)+ at the first, then the same with norm((p - q)+) for p."""
    lost_V = (q_V - p_V).clamp(min=0)
    if k == 1 or float(lost_V.sum()) == 0:
        return float(lost_V.sum())
    left_V = residual(p_V[None], q_V[None], torch.ones_like(p_V[:1]))[0][0]
    if law == "iid":
        return float(lost_V.sum()) * _chance_refused(left_V, q_V, k - 1, law)
    ids = int((q_V > 0).sum())
    if ids ** (k - 1) > MOST_ORDERS:
        raise ValueError(f"{ids} ids with q > 0 and {k} children have over {MOST_ORDERS} orders; cut q (top-k) or take a smaller k")
    if ids == 1:  # no second child can be drawn
        return float(lost_V.sum())
    first = lost_V.nonzero()
    return sum(float(lost_V[x]) * _chance_refused(left_V, without(q_V[None], x[None])[0], k - 1, law) for x in first)


def _chance_drawn(q_V: Tensor, k: int, law: Law) -> Tensor:
    """Chance [V] of each id to be among k children."""
    if law == "point_mass":
        return torch.zeros_like(q_V).index_fill(0, q_V.argsort(descending=True, stable=True)[:k], 1.0)
    if law == "iid":
        return 1 - (1 - q_V) ** k
    drawn_H = _drawn_sets(q_V, k)
    sets_H = torch.arange(len(drawn_H), device=q_V.device)
    ids = q_V.nonzero()[:, 0]
    chances = torch.stack([drawn_H[(sets_H >> x) & 1 == 1].sum() for x in range(len(ids))])
    return torch.zeros_like(q_V).index_put((ids,), chances)


def _chance_inside(q_V: Tensor, inside_V: Tensor, k: int, law: Law) -> float:
    """Chance that all k children lie inside a set."""
    if law == "point_mass":
        return float(inside_V[q_V.argsort(descending=True, stable=True)[:k]].all())
    if law == "iid":
        return float(q_V[inside_V].sum()) ** k
    drawn_H = _drawn_sets(q_V, k)
    outside = sum(1 << x for x, is_inside in enumerate(inside_V[q_V > 0].tolist()) if not is_inside)
    return float(drawn_H[torch.arange(len(drawn_H), device=q_V.device) & outside == 0].sum())


def _drawn_sets(q_V: Tensor, k: int) -> Tensor:
    """Chance [H] that k draws without replacement give exactly this set; all ids with q > 0 where there are fewer than k."""
    q_I = q_V[q_V > 0]
    if len(q_I) > MOST_IDS:
        raise ValueError(f"without_replacement: {len(q_I)} ids have q > 0, all subsets are visited for at most {MOST_IDS}; cut q (top-k)")
    left_H = _set_sums(q_I).flip(0)  # mass outside each set
    sets_H = torch.arange(len(left_H), device=q_V.device)
    chance_H = (sets_H == 0).double()
    for _ in range(min(k, len(q_I))):
        more_H = torch.zeros_like(chance_H)
        for x, q in enumerate(q_I):
            free = sets_H[(sets_H >> x) & 1 == 0]
            more_H[free | 1 << x] += chance_H[free] * q / left_H[free]
        chance_H = more_H
    return chance_H


def _set_sums(p_I: Tensor) -> Tensor:
    """Mass [H] of every set."""
    sums_H = p_I.new_zeros(1)
    for p in p_I:
        sums_H = torch.cat([sums_H, sums_H + p])
    return sums_H


def _over_subsets(value_H: Tensor) -> Tensor:
    """Sum [H] of a value over all subsets of every set."""
    for x in range(len(value_H).bit_length() - 1):
        pairs = value_H.view(-1, 2, 1 << x)
        value_H = torch.stack([pairs[:, 0], pairs.sum(1)], dim=1).flatten()
    return value_H
