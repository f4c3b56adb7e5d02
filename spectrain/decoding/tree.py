"""A tree of drafted tokens. A chain is a tree without forks.

Legend: B rows, N nodes, V vocabulary, P paths' length.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Law = Literal["point_mass", "iid", "without_replacement"]
LAWS: tuple[Law, ...] = ("point_mass", "iid", "without_replacement")


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens with their parents and the law they were drawn from.

    Node 0 is the last committed token (parent -1); parents come before their children; siblings stand in draw order.
    tokens_BN, parents_BN: ids and parent numbers (int64). num_B: nodes in use a row, the root included; later ones are padding
    (any token, parent 0). law: how children were drawn; `point_mass` covers every tree that was fixed before the target's coins.
    q_BNV: law of the token *after* node n over the full vocabulary, None for `point_mass`.
    is_chain: promise that node n is the child of node n - 1 in every row (lets cache and mask take their short ways).
    expected_B: how many drafts the drafter itself expects to be accepted, where it was asked.
    Raises ValueError for shapes or parents that make no tree.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    num_B: Tensor
    law: Law
    q_BNV: Tensor | None = None
    is_chain: bool = False
    expected_B: Tensor | None = None

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ValueError(f"law {self.law!r} is unknown; choose one of {', '.join(LAWS)}")
        if self.tokens_BN.shape != self.parents_BN.shape or self.tokens_BN.dim() != 2:
            raise ValueError(f"tokens {tuple(self.tokens_BN.shape)} and parents {tuple(self.parents_BN.shape)} must both be [rows, nodes]")
        if (self.q_BNV is None) != (self.law == "point_mass"):
            raise ValueError(f"law {self.law!r} {'takes no q' if self.law == 'point_mass' else 'needs q of every node'}")

    @classmethod
    def chain(cls, tokens_BN: Tensor, num_B: Tensor, law: Law = "point_mass", q_BNV: Tensor | None = None) -> "DraftTree":
        """A chain from the root on: [B, 1 + drafts] tokens."""
        B, N = tokens_BN.shape
        parents_BN = torch.arange(-1, N - 1, device=tokens_BN.device).expand(B, N)
        return cls(tokens_BN, parents_BN, num_B, law, q_BNV, is_chain=True)

    @property
    def width(self) -> int:
        """Nodes a row, padding and root included."""
        return self.tokens_BN.shape[1]


def depths(parents_BN: Tensor) -> Tensor:
    """Depth [B, N] of each node, 0 at the root."""
    depth_BN, above_BN = (parents_BN >= 0).long(), parents_BN.clamp(min=0)
    for _ in range(doublings(parents_BN)):
        depth_BN = depth_BN + depth_BN.gather(1, above_BN)
        above_BN = above_BN.gather(1, above_BN)
    return depth_BN


def ancestors(parents_BN: Tensor) -> Tensor:
    """Boolean [B, N, N]: entry (n, m) says that m is n itself or one of its ancestors."""
    B, N = parents_BN.shape
    node_N = torch.arange(N, device=parents_BN.device)
    above_BN = torch.minimum(parents_BN, node_N - 1).clamp(min=0)  # trees of users are checked later
    line_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)
    for _ in range(doublings(parents_BN)):
        line_BNN = line_BNN | line_BNN.gather(1, above_BN[..., None].expand(B, N, N))
        above_BN = above_BN.gather(1, above_BN)
    return line_BNN


def doublings(parents_BN: Tensor) -> int:
    """How often to double the levels above a node that were looked at until all were, known without a look at the tree."""
    return (parents_BN.shape[1] - 1).bit_length()


def extended(line_BMM: Tensor, parents_BN: Tensor) -> Tensor:
    """The relation of `ancestors` [B, M + N, M + N] with N more nodes below nodes of `line_BMM`; parents_BN: the numbers of these."""
    (B, M, _), N = line_BMM.shape, parents_BN.shape[1]
    own_BNN = torch.eye(N, dtype=torch.bool, device=line_BMM.device).expand(B, N, N)
    above_BNM = line_BMM.gather(1, parents_BN[..., None].expand(B, N, M))
    earlier = torch.cat([line_BMM, line_BMM.new_zeros(B, M, N)], dim=2)
    return torch.cat([earlier, torch.cat([above_BNM, own_BNN], dim=2)], dim=1)


def drop_nodes(tokens_BN: Tensor, parents_BN: Tensor, keep_BN: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take nodes and all their descendants out of trees; what stays moves to the front in its old order. The root always stays.

    Returns tokens_BN, parents_BN, num_B (nodes left) and kept_BN: the old number of each new node, beyond num_B those of the
    dropped nodes, so that it serves to gather other values by node. Padding gets the parent 0.
    """
    B, N = tokens_BN.shape
    node_N = torch.arange(N, device=tokens_BN.device)
    above_BN = parents_BN.clamp(min=0)
    keep_BN = keep_BN | (node_N == 0)
    higher_BN = above_BN
    for _ in range(doublings(parents_BN)):
        keep_BN = keep_BN & keep_BN.gather(1, higher_BN)
        higher_BN = higher_BN.gather(1, higher_BN)
    num_B = keep_BN.sum(-1)
    kept_BN = torch.argsort(~keep_BN, dim=-1, stable=True)
    number_BN = keep_BN.long().cumsum(-1) - 1  # new number of each kept node
    new_parents_BN = number_BN.gather(1, above_BN.gather(1, kept_BN))
    new_parents_BN = torch.where(node_N < num_B[:, None], new_parents_BN, 0)
    new_parents_BN = torch.where(node_N == 0, -1, new_parents_BN)
    return tokens_BN.gather(1, kept_BN), new_parents_BN, num_B, kept_BN


def check_tree(tree: DraftTree) -> None:
    """Raise ValueError for numbers that are not int64, a num_B of another length, parents that do not precede their children, and rows
    without a root or with more than N nodes (costs a host read)."""
    for name, ids in (("tokens_BN", tree.tokens_BN), ("parents_BN", tree.parents_BN), ("num_B", tree.num_B)):
        if ids.dtype != torch.int64:
            raise ValueError(f"{name} must hold int64 numbers, found {str(ids.dtype).removeprefix('torch.')}; convert with .long()")
    if tree.num_B.shape != tree.tokens_BN.shape[:1]:
        raise ValueError(f"num_B must hold a number of nodes for each of {len(tree.tokens_BN)} rows, found shape {tuple(tree.num_B.shape)}")
    if not tree.tokens_BN.numel():
        raise ValueError(f"a tree has at least a row and its root, the last committed token; found {tuple(tree.tokens_BN.shape)}")
    node_N = torch.arange(tree.width, device=tree.parents_BN.device)
    precede = (tree.parents_BN < node_N).all() & (tree.parents_BN[:, 0] == -1).all()
    one_root = (tree.parents_BN[:, 1:] >= 0).all()
    counted = ((tree.num_B >= 1) & (tree.num_B <= tree.width)).all()
    if bool(precede & one_root & counted):
        return
    if not bool(precede):
        raise ValueError("parents must precede their children and node 0 must have the parent -1")
    if not bool(one_root):
        raise ValueError("a tree has one root: only node 0 may have the parent -1")
    raise ValueError(f"num_B must lie between 1 and {tree.width}, found {tree.num_B.tolist()}")
