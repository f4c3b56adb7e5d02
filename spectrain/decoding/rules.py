"""Verification rules that go from the root down: greedy, point mass, typical, rejection, block, multidraft.

p is the target's law of the token after each node, q the law that the node's children were drawn from. Everything is computed in
float64 on laws that are normalised again, row by row, because float32 laws sum to 1 only roughly. Coins are asked for through
`below` and `pick` alone. A row that is done keeps its values and asks for coins that decide nothing. q is read only at nodes
that have children, and nothing at padding.

The host reads nothing that lies on a device: loops there run to bounds that it knows, and end early on a CPU alone (`finished`).

Legend: B rows, N nodes, M = N - 1 drafted nodes, K path, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.sampling import Coins, RandomSource, readable
from spectrain.decoding.tree import DraftTree, ancestors, depths
from spectrain.kernels.divergence import chosen

TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3  # Medusa's: delta = sqrt(epsilon) (arXiv 2401.10774, section 2.3.1)


@dataclass(frozen=True)
class Accepted:
    """path_BK: accepted nodes from depth 1 on (-1 beyond the end); length_B: how many; next_B: the target's own token after them."""

    path_BK: Tensor
    length_B: Tensor
    next_B: Tensor


def greedy(p_BNV: Tensor, tree: DraftTree) -> Accepted:
    """The path of the likeliest tokens, by laws or by logits; no coins. Where the host may look, only nodes that are passed are."""
    if not readable(p_BNV):
        return follow(p_BNV.max(-1).indices, tree)
    return _match(lambda node_B: rows_at(p_BNV, node_B).max(-1).indices, tree)


def point_mass(p_BNV: Tensor, tree: DraftTree, coins: RandomSource) -> Accepted:
    """Draw the target's own token at each node passed and go to the child that carries it ("sample and match").

    Lossless for every tree that was fixed before the target's coins, whatever law made it.
    """
    if not readable(p_BNV):  # the draws of all nodes at once, and not each after the one before
        node_BN = torch.arange(tree.width, device=p_BNV.device).expand_as(tree.tokens_BN)
        return follow(coins.pick(p_BNV, node_BN, "choice"), tree)
    return _match(lambda node_B: coins.pick(rows_at(p_BNV, node_B)[:, None], node_B[:, None], "choice")[:, 0], tree)


def follow(choice_BN: Tensor, tree: DraftTree) -> Accepted:
    """Walk from the root: at each node go to the child that equals the choice, stop where there is none."""
    if chosen("auto", choice_BN.device) == "triton":
        from spectrain.kernels.walk_triton import walk

        return Accepted(*walk(choice_BN, tree.tokens_BN, tree.parents_BN, tree.num_B))
    return _match(lambda node_B: choice_BN.gather(1, node_B[:, None])[:, 0], tree)


def _match(choose: Callable[[Tensor], Tensor], tree: DraftTree) -> Accepted:
    """Walk from the root along the children that equal the choice at their parent; of equal siblings the first."""
    used_BN = used_nodes(tree)
    node_B = torch.zeros_like(tree.num_B)
    wanted_B = choose(node_B)
    for _ in range(tree.width - 1):  # once a level of the accepted path
        match_BN = used_BN & (tree.parents_BN == node_B[:, None]) & (tree.tokens_BN == wanted_B[:, None])
        found_B = match_BN.any(-1)
        if finished(found_B):
            break
        node_B = torch.where(found_B, match_BN.int().argmax(-1), node_B)
        wanted_B = choose(node_B)
    return path_to(tree, node_B, wanted_B)


def typical(p_BNV: Tensor, tree: DraftTree, coins: RandomSource) -> Accepted:
    """Typical acceptance of Medusa (arXiv 2401.10774, section 2.3.1). LOSSY: the tokens do not follow the target's law.

    Token x passes where p(x) > min(epsilon, delta * exp(-entropy of p)). The longest path whose nodes all pass is kept, among equals
    the likeliest under the target; the token after it is drawn from p. The paper takes the first token greedily, so that each of its
    steps moves on; here a step moves on by that last token, which is the root of the next tree: no draft needs to pass unseen.
    """
    limit_BN = typical_limit(p_BNV).gather(1, tree.parents_BN.clamp(min=0))
    chance_BN = token_chances(p_BNV, tree)
    passes_BN = (chance_BN > limit_BN) & used_nodes(tree)
    is_root_BN = tree.parents_BN < 0
    step_BN = torch.where(is_root_BN, 0.0, torch.where(passes_BN, chance_BN, 0.0).log())
    level_BN = depths(tree.parents_BN)
    joint_BN = step_BN
    for _ in range(deepest(level_BN) - 1):  # the first level is right already
        joint_BN = torch.where(is_root_BN, 0.0, step_BN + joint_BN.gather(1, tree.parents_BN.clamp(min=0)))
    depth_BN = torch.where(joint_BN > -torch.inf, level_BN, -1)
    longest_BN = depth_BN == depth_BN.amax(-1, keepdim=True)
    last_B = torch.where(longest_BN, joint_BN, -torch.inf).argmax(-1)
    return path_to(tree, last_B, last_token(law_at(p_BNV, last_B), last_B, coins))


def typical_limit(p_BNV: Tensor) -> Tensor:
    """min(epsilon, delta * exp(-entropy)) [B, N]."""
    entropy_BN = torch.special.entr(p_BNV).sum(-1, dtype=torch.float64)
    limit_BN: Tensor = (TYPICAL_DELTA * (-entropy_BN).exp()).clamp(max=TYPICAL_EPSILON)
    return limit_BN


def rejection(p_BNV: Tensor, tree: DraftTree, coins: RandomSource) -> Accepted:
    """Token by token along an iid chain (arXiv 2211.17192, algorithm 1): keep x with chance min(1, p(x)/q(x)), stop at the first loss."""
    if has_kernel(p_BNV, coins):
        return _by_kernel(p_BNV, tree, coins, whole=False)
    p_BN, q_BN = token_chances(p_BNV, tree), token_chances(drawn_from(tree), tree)
    keep_BM = _tests(p_BN, q_BN, tree, coins)
    last_B = keep_BM.long().cumprod(-1).sum(-1)
    return _stop(p_BNV, tree, last_B, torch.ones_like(p_BN[:, 0]), coins)


def block(p_BNV: Tensor, tree: DraftTree, coins: RandomSource) -> Accepted:
    """Block verification of an iid chain (arXiv 2403.10444, algorithm 2): the longest prefix that passes as a whole.

    With w_i = min(1, w_{i-1} p/q) and Z_i = sum (w_i p - q)+, prefix i passes with chance Z_i / (Z_i + 1 - w_i), the whole chain with
    w. The token after a prefix cut at i follows (w_i p - q)+: with p in place of w_i p the law is slightly wrong.
    """
    if has_kernel(p_BNV, coins):
        return _by_kernel(p_BNV, tree, coins, whole=True)
    q_BNV = drawn_from(tree)
    p_BN, q_BN = token_chances(p_BNV, tree), token_chances(q_BNV, tree)
    last_of_B = tree.num_B - 1
    weights, parts, wholes = [torch.ones_like(p_BN[:, 0])], [torch.ones_like(p_BN[:, 0])], [torch.ones_like(p_BN[:, 0])]
    for n in range(1, tree.width):
        w_B = torch.where(last_of_B >= n, (weights[-1] * p_BN[:, n] / q_BN[:, n]).clamp(max=1), weights[-1])
        z_B = torch.zeros_like(w_B)
        if n + 1 < tree.width:
            node_B = torch.full_like(last_of_B, n)
            z_B = surplus(law_at(p_BNV, node_B), law_at(q_BNV, node_B), w_B).sum(-1)
        parts.append(torch.where(last_of_B == n, w_B, z_B))
        wholes.append(torch.where(last_of_B == n, 1.0, z_B + (1 - w_B)))  # 0 of 0 where p = q: the next prefix then passes surely
        weights.append(w_B)
    keep_BM = _tests(torch.stack(parts, dim=1), torch.stack(wholes, dim=1), tree, coins)
    last_B = (keep_BM * torch.arange(1, tree.width, device=keep_BM.device)).amax(-1)
    return _stop(p_BNV, tree, last_B, torch.stack(weights, dim=1).gather(1, last_B[:, None])[:, 0], coins)


def multidraft(p_BNV: Tensor, tree: DraftTree, coins: RandomSource) -> Accepted:
    """Children one after another, each with chance min(1, P/Q); a loss turns P into norm((P - Q)+), a gain goes down to the child.

    iid children: Q stays (recursive rejection sampling, arXiv 2305.09781); without replacement: the lost child's id leaves Q, which is
    renormalised (arXiv 2402.12374).
    """
    q_BNV = drawn_from(tree)
    node_B = tried_B = torch.zeros_like(tree.num_B)
    p_BV, q_BV = law_at(p_BNV, node_B), law_at(q_BNV, node_B)
    for _ in range(tree.width - 1):  # a row tests each node at most once
        child_B, active_B = next_child(tree, node_B, tried_B)
        if finished(active_B):
            break
        token_B1 = tree.tokens_BN.gather(1, child_B[:, None])
        part_B1 = torch.where(active_B[:, None], p_BV.gather(1, token_B1), 0.0)
        gain_B = coins.below(part_B1, torch.where(active_B[:, None], q_BV.gather(1, token_B1), 1.0), child_B[:, None], "accept")[:, 0]
        # loss: the child was tested and refused, its parent's laws change; gain: it was kept, and its own laws take over
        loss_B1, gain_B1 = (active_B & ~gain_B)[:, None], gain_B[:, None]
        one_B = torch.ones_like(part_B1[:, 0])
        left_BV = residual(p_BV, q_BV, one_B)[0]
        p_BV = torch.where(loss_B1, left_BV, torch.where(gain_B1, law_at(p_BNV, child_B), p_BV))
        lost_q_BV = without(q_BV, token_B1) if tree.law == "without_replacement" else q_BV
        q_BV = torch.where(loss_B1, lost_q_BV, torch.where(gain_B1, law_at(q_BNV, child_B), q_BV))
        node_B = torch.where(gain_B, child_B, node_B)
        tried_B = torch.where(active_B, child_B, tried_B)
    return path_to(tree, node_B, last_token(p_BV, node_B, coins))


def _tests(part_BN: Tensor, whole_BN: Tensor, tree: DraftTree, coins: RandomSource) -> Tensor:
    """The coin of every drafted node, boolean [B, M]; False at padding."""
    used_BM = used_nodes(tree)[:, 1:]
    node_BM = torch.arange(1, tree.width, device=used_BM.device).expand_as(used_BM)
    part_BM, whole_BM = torch.where(used_BM, part_BN[:, 1:], 0.0), torch.where(used_BM, whole_BN[:, 1:], 1.0)
    return coins.below(part_BM, whole_BM, node_BM, "accept")


def _stop(p_BNV: Tensor, tree: DraftTree, last_B: Tensor, weight_B: Tensor, coins: RandomSource) -> Accepted:
    """End a chain after node `last`: a token of p where the whole chain was kept, else of norm((weight p - q)+)."""
    p_BV = law_at(p_BNV, last_B)
    left_BV = residual(p_BV, law_at(drawn_from(tree), last_B), weight_B)[0]
    whole_B1 = (last_B == tree.num_B - 1)[:, None]
    return path_to(tree, last_B, last_token(torch.where(whole_B1, p_BV, left_BV), last_B, coins))


def has_kernel(p_BNV: Tensor, coins: RandomSource) -> bool:
    """Whether the kernels verify: keyed coins on a CUDA device with triton."""
    return chosen("auto", p_BNV.device) == "triton" and isinstance(coins, Coins)


def _by_kernel(p_BNV: Tensor, tree: DraftTree, coins: RandomSource, *, whole: bool) -> Accepted:
    """A chain verified in six launches; whole: block verification."""
    from spectrain.kernels.chain_triton import verify_chain

    assert isinstance(coins, Coins)
    tests_BN, ends_BN = (coins.uniform(tree.width, role) for role in ("accept", "residual"))
    return Accepted(*verify_chain(p_BNV, drawn_from(tree), tree.tokens_BN, tree.num_B, tests_BN, ends_BN, whole=whole))


def last_token(p_BV: Tensor, node_B: Tensor, coins: RandomSource) -> Tensor:
    """The round's last token, drawn with the coin `residual` of the node where the path ends."""
    return coins.pick(p_BV[:, None], node_B[:, None], "residual")[:, 0]


def surplus(p_BV: Tensor, q_BV: Tensor, weight_B: Tensor) -> Tensor:
    """(weight p - q)+ [B, V]."""
    return (weight_B[:, None] * p_BV - q_BV).clamp(min=0)


def residual(p_BV: Tensor, q_BV: Tensor, weight_B: Tensor) -> tuple[Tensor, Tensor]:
    """norm((weight p - q)+) and the mass before normalising; p itself where nothing is left (p = q up to rounding)."""
    left_BV = surplus(p_BV, q_BV, weight_B)
    mass_B = left_BV.sum(-1)
    return torch.where(mass_B[:, None] > 0, left_BV / mass_B[:, None], p_BV), mass_B


def without(q_BV: Tensor, token_B1: Tensor) -> Tensor:
    """q with one id taken out and the rest renormalised."""
    return normalised(q_BV.scatter(1, token_B1, 0.0))


def rows_at(p_BNV: Tensor, node_B: Tensor) -> Tensor:
    """The laws [B, V] of one node a row, as they are stored.

    Enough for a draw from p itself (point_mass, a tree of roots alone): `pick` scales by the law's own total. A law that is subtracted
    from another, or divided by it, must be normalised first (`law_at`).
    """
    return p_BNV[torch.arange(len(node_B), device=node_B.device), node_B]


def law_at(p_BNV: Tensor, node_B: Tensor) -> Tensor:
    """The law [B, V] of one node a row, float64, normalised."""
    return normalised(rows_at(p_BNV, node_B))


def normalised(p_BV: Tensor) -> Tensor:
    """The law in float64, with a sum of 1."""
    p_BV = p_BV.double()
    return p_BV / p_BV.sum(-1, keepdim=True)


def token_chances(p_BNV: Tensor, tree: DraftTree) -> Tensor:
    """Chance [B, N] (float64) of each node's token under the normalised law of its parent; without meaning at the root and padding."""
    row_B1 = torch.arange(len(p_BNV), device=p_BNV.device)[:, None]
    parents_BN = tree.parents_BN.clamp(min=0)
    tokens_BN = torch.where(used_nodes(tree), tree.tokens_BN, 0)  # padding may hold any number
    total_BN = p_BNV.sum(-1, dtype=torch.float64)
    return p_BNV[row_B1, parents_BN, tokens_BN].double() / total_BN.gather(1, parents_BN)


def drawn_from(tree: DraftTree) -> Tensor:
    """The draft's laws, which a tree with a sampled law always has."""
    assert tree.q_BNV is not None
    return tree.q_BNV


def used_nodes(tree: DraftTree) -> Tensor:
    """Boolean [B, N]: root and drafts, not padding."""
    return torch.arange(tree.width, device=tree.num_B.device) < tree.num_B[:, None]


def next_child(tree: DraftTree, node_B: Tensor, tried_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first child of each row's node that comes after node `tried` (draw order), and whether there is one."""
    later_BN = torch.arange(tree.width, device=node_B.device) > tried_B[:, None]
    match_BN = later_BN & used_nodes(tree) & (tree.parents_BN == node_B[:, None])
    return match_BN.int().argmax(-1), match_BN.any(-1)


def path_to(tree: DraftTree, last_B: Tensor, next_B: Tensor) -> Accepted:
    """The path from the root to node `last`, and the token after it."""
    (B, N), device = tree.parents_BN.shape, last_B.device
    on_BN = ancestors(tree.parents_BN)[torch.arange(B, device=device), last_B]
    depth_BN = torch.where(on_BN, on_BN.cumsum(-1) - 1, N)  # ancestors stand before their descendants; N: beside the path
    path_BN = last_B.new_full((B, N + 1), -1).scatter(1, depth_BN, torch.arange(N, device=device).expand(B, N))
    return Accepted(path_BK=path_BN[:, 1:N], length_B=on_BN.sum(-1) - 1, next_B=next_B)


def finished(active_B: Tensor) -> bool:
    """Whether no row is active any more, so that a loop may end before its bound. It does not where that would have to be read."""
    return readable(active_B) and not bool(active_B.any())


def rows_where(active_B: Tensor) -> Tensor:
    """Numbers of the active rows; of all rows where how many there are would have to be read."""
    return active_B.nonzero()[:, 0] if readable(active_B) else torch.arange(len(active_B), device=active_B.device)


def deepest(level_BN: Tensor) -> int:
    """The depth of the deepest node; the most it can be where it would have to be read."""
    return int(level_BN.max()) if readable(level_BN) else level_BN.shape[1] - 1
