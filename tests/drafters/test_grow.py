"""Growing drafts: nodes added level by level."""

import torch

from spectrain.decoding.drafter import Round
from spectrain.decoding.shapes import Tree
from spectrain.decoding.tree import ancestors, check_tree, extended
from spectrain.drafters.grow import grow


def test_added_nodes_have_other_ancestors() -> None:
    """Three random trees, given in pieces: the relation is that of the whole tree."""
    g = torch.Generator().manual_seed(0)
    parents_BN = torch.stack([torch.tensor([-1] + [int(torch.randint(0, n, (), generator=g)) for n in (1, 1, 1, 4, 4, 4, 4, 8)])] * 3)
    parents_BN[1, 1:], parents_BN[2, 4:] = 0, torch.tensor([3, 2, 1, 0, 7])
    line_BMM = ancestors(parents_BN[:, :1])
    for first, last in ((1, 4), (4, 8), (8, 9)):
        line_BMM = extended(line_BMM, parents_BN[:, first:last])
    assert torch.equal(line_BMM, ancestors(parents_BN))


def test_dynamic_tree_is_deeper_than_its_row_may_be() -> None:
    """Limits by row; sure drafts (log q = 0) tie with their parents, so that only their depth keeps a tree whole."""
    table_VV = torch.full((6, 6), float("-inf"))
    table_VV[torch.arange(6), (torch.arange(6) + 1) % 6] = 0.0
    ask = Round([[0], [1], [2]], Tree.dynamic(2, 4, 4), depth_B=[4, 1, 2], estimate=True)
    root_B1 = ask.root(torch.device("cpu"))
    tree = grow(ask, root_B1, table_VV[root_B1[:, 0]], lambda tokens_BN, parents_BN: table_VV[tokens_BN], None)
    check_tree(tree)
    lines = [row[: int(n)].tolist() for row, n in zip(tree.tokens_BN, tree.num_B, strict=True)]
    assert lines == [[0, 1, 2, 3, 4], [1, 2], [2, 3, 4]] and tree.expected_B.tolist() == [4.0, 1.0, 2.0]
