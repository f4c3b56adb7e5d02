"""Acceptance on trees made by hand.

The tree of most tests (numbers are nodes, letters tokens):      0 r
                                                               /  |  \\
                                                            1 a  2 b  3 a
                                                            |   |  \\
                                                          4 c  5 a  6 d
                                                               |
                                                               7 e
"""

import pytest
import torch

from spectrain.decoding.accept import Accepted, accept, resolve_rule
from spectrain.decoding.sampling import Coins
from spectrain.decoding.tree import DraftTree

R, A, B, C, D, E = range(6)
TOKENS, PARENTS = [R, A, B, A, C, A, D, E], [-1, 0, 0, 0, 1, 2, 2, 5]


def tree(rows: int = 1, num: int = 8) -> DraftTree:
    return DraftTree(torch.tensor([TOKENS] * rows), torch.tensor([PARENTS] * rows), torch.full((rows,), num), "point_mass")


def one_hot(choices: list[list[int]]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), 6).float()


def greedy(choices: list[list[int]], drafts: DraftTree) -> Accepted:
    return accept(one_hot(choices), drafts, "greedy", None)


@pytest.mark.parametrize(
    ("choices", "path", "next_token"),
    [
        ([C, 0, 0, 0, 0, 0, 0, 0], [], C),
        ([A, D, 0, 0, 0, 0, 0, 0], [1], D),
        ([A, C, 0, 0, B, 0, 0, 0], [1, 4], B),
        ([B, 0, D, 0, 0, 0, E, 0], [2, 6], E),
        ([B, 0, A, 0, 0, E, 0, D], [2, 5, 7], D),
        ([A, B, 0, C, 0, 0, 0, 0], [1], B),  # of two equal siblings the first is followed
    ],
)
def test_wrong_path(choices: list[int], path: list[int], next_token: int) -> None:
    got = greedy([choices], tree())
    assert got.path_BK[0].tolist() == path + [-1] * (7 - len(path))
    assert got.length_B.tolist() == [len(path)] and got.next_B.tolist() == [next_token]


def test_rows_follow_each_others_path() -> None:
    got = greedy([[A, C, 0, 0, B, 0, 0, 0], [B, 0, A, 0, 0, E, 0, D], [C] * 8], tree(rows=3))
    assert got.length_B.tolist() == [2, 3, 0] and got.next_B.tolist() == [B, D, C]
    assert got.path_BK[:, :3].tolist() == [[1, 4, -1], [2, 5, 7], [-1, -1, -1]]


@pytest.mark.parametrize(("num", "length"), [(8, 3), (7, 2), (5, 1), (3, 1), (2, 0), (1, 0)])
def test_padding_is_accepted(num: int, length: int) -> None:
    got = greedy([[B, 0, A, 0, 0, E, 0, D]], tree(num=num))
    assert got.length_B.tolist() == [length]


def test_root_alone_has_no_next_token() -> None:
    root = DraftTree.chain(torch.tensor([[R], [A]]), torch.tensor([1, 1]))
    got = accept(one_hot([[D], [E]]), root, "greedy", None)
    assert got.path_BK.shape == (2, 0) and got.length_B.tolist() == [0, 0] and got.next_B.tolist() == [D, E]


def test_chain_is_not_a_tree_without_forks() -> None:
    tokens, num = torch.tensor([[R, A, B, C], [R, A, A, A]]), torch.tensor([4, 2])
    chain = DraftTree.chain(tokens, num)
    forks = DraftTree(tokens, torch.tensor([[-1, 0, 1, 2]] * 2), num, "point_mass")
    for choices in ([[A, B, C, D], [A, A, A, A]], [[A, A, A, A], [B, B, B, B]]):
        first, second = greedy(choices, chain), greedy(choices, forks)
        assert torch.equal(first.path_BK, second.path_BK) and torch.equal(first.next_B, second.next_B)
    assert greedy([[A, B, C, D], [A, A, A, A]], chain).length_B.tolist() == [3, 1]


def test_point_mass_is_not_the_targets_own_draw() -> None:
    """Whatever the tree, the committed tokens are the draws at the nodes passed; over many rows the first follows p."""
    rows = 20_000
    p = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.05, 0.05]).expand(rows, 8, 6)
    coins = Coins(seed_B=torch.arange(rows), length_B=torch.full((rows,), 3))
    got = accept(p, tree(rows), "point_mass", coins)
    first = torch.where(got.length_B > 0, torch.tensor(TOKENS)[got.path_BK[:, 0].clamp(min=0)], got.next_B)
    frequency = torch.bincount(first, minlength=6) / rows
    torch.testing.assert_close(frequency, p[0, 0], atol=0.015, rtol=0)
    assert torch.equal(got.path_BK, accept(p, tree(rows), "point_mass", coins).path_BK)


@pytest.mark.parametrize("rule", ["block", "auto", ""])
def test_unknown_rule_falls_back(rule: str) -> None:
    with pytest.raises(ValueError, match="choose one of greedy, point_mass"):
        accept(one_hot([[A] * 8]), tree(), rule, None)


def test_misuse_goes_through() -> None:
    with pytest.raises(ValueError, match="temperature 0"):
        accept(torch.full((1, 8, 6), 1 / 6), tree(), "greedy", None)
    with pytest.raises(ValueError, match="coins"):
        accept(one_hot([[A] * 8]), tree(), "point_mass", None)
    with pytest.raises(ValueError, match="rows and nodes"):
        accept(one_hot([[A] * 7]), tree(), "greedy", None)
    with pytest.raises(ValueError, match="num_B"):
        accept(one_hot([[A] * 8]), tree(num=9), "greedy", None)


@pytest.mark.parametrize(
    "parents", [[-1, 0, 2, 0, 1, 2, 2, 5], [-1, -1, 0, 0, 1, 2, 2, 5], [0, 0, 0, 0, 1, 2, 2, 5], [-1, 1, 0, 0, 1, 2, 2, 5]]
)
def test_parents_that_make_no_tree_are_followed(parents: list[int]) -> None:
    bad = DraftTree(torch.tensor([TOKENS]), torch.tensor([parents]), torch.tensor([8]), "point_mass")
    with pytest.raises(ValueError, match="parent"):
        accept(one_hot([[A] * 8]), bad, "greedy", None)


def test_rule_that_does_not_fit_is_taken() -> None:
    assert resolve_rule("auto", 0.0) == "greedy" and resolve_rule("auto", 0.7) == "point_mass"
    assert resolve_rule("point_mass", 0.0) == "point_mass"
    with pytest.raises(ValueError, match="needs temperature 0"):
        resolve_rule("greedy", 0.7)
    with pytest.raises(ValueError, match="unknown"):
        resolve_rule("typical", 0.7)
