"""Drafts from a function."""

import pytest
import torch

from spectrain.decoding.drafter import Round
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.scripted import Scripted
from spectrain.target.model import Target


def tree_of(tokens: list[int], parents: list[int], **more) -> DraftTree:
    return DraftTree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(tokens)]), "point_mass", **more)


BUSH = ([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 2])  # 1 -> 3 -> 4 and 2 -> 6


def propose(target: Target, answers: list, shape, committed=None, **more) -> DraftTree | None:
    committed = committed or [[9, 5]] * len(answers)
    queue = list(answers)
    return Scripted(lambda ids: queue.pop(0)).start(target, len(answers), 50).propose(Round(committed, shape, **more))


@pytest.mark.parametrize(
    ("answer", "shape", "depth", "tokens", "parents"),
    [
        ([1, 2, 3], Chain(5), None, [1, 2, 3], [0, 1, 2]),
        ((1, 2, 3), Chain(2), None, [1, 2], [0, 1]),
        ([1, 2, 3], Tree.dynamic(2, 5, 2), None, [1, 2], [0, 1]),
        ([1, 2, 3], Chain(5), 1, [1], [0]),
        (tree_of(*BUSH), Tree.dynamic(3, 3, 9), None, [1, 2, 3, 4, 6], [0, 0, 1, 3, 2]),
        (tree_of(*BUSH), Tree.dynamic(3, 2, 9), None, [1, 2, 3, 6], [0, 0, 1, 2]),
        (tree_of([5, 1, 2, 3, 4, 6], [-1, 0, 1, 2, 0, 4]), Tree.dynamic(3, 2, 9), None, [1, 2, 4, 6], [0, 1, 0, 3]),
        (tree_of(*BUSH), Tree.dynamic(3, 3, 2), None, [1, 2], [0, 0]),
        (tree_of(*BUSH), Tree.dynamic(3, 3, 9), 1, [1, 2], [0, 0]),
    ],
)
def test_too_much_or_too_little_is_cut(target: Target, answer, shape, depth, tokens: list[int], parents: list[int]) -> None:
    tree = propose(target, [answer], shape, depth_B=None if depth is None else [depth])
    assert tree.tokens_BN.tolist() == [[5, *tokens]] and tree.parents_BN.tolist() == [[-1, *parents]]
    assert tree.num_B.tolist() == [1 + len(tokens)] and tree.is_chain == (parents == list(range(len(parents))))


def test_mixed_rows_break_the_batch(target: Target) -> None:
    tree = propose(target, [[1, 2], tree_of(*BUSH), None], Tree.dynamic(3, 3, 9))
    assert tree.num_B.tolist() == [3, 6, 1] and not tree.is_chain and tree.law == "point_mass"
    assert tree.parents_BN.tolist() == [[-1, 0, 1, 0, 0, 0], [-1, 0, 0, 1, 3, 2], [-1, 0, 0, 0, 0, 0]]
    assert propose(target, [[], None], Chain(3)) is None
    assert propose(target, [[4]], Chain(3), depth_B=[0]) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([3, 100], "drafted the id 100; tiny has ids 0..99"),
        ([-1], "drafted the id -1"),
        (tree_of([6, 1], [-1, 0]), "node 0 of the script's tree is the id 6; it must be the last committed id, 5"),
        (DraftTree(torch.zeros(2, 2).long(), torch.zeros(2, 2).long(), torch.ones(2).long(), "point_mass"), "a tree of 2 rows"),
        (DraftTree.chain(torch.tensor([[5, 1]]), torch.tensor([2]), "iid", torch.ones(1, 2, 100)), "the law 'iid'"),
        (tree_of([5, 1, 2], [-1, 2, 0]), "parents must precede"),
    ],
)
def test_drafts_that_cannot_be_verified_are_taken(target: Target, answer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        propose(target, [answer], Chain(3))


def test_script_changes_the_answer(target: Target, fresh_greedy) -> None:
    """A script that knows the answer but for every third token, as chains and as trees."""
    prompts = [[7], [9, 55, 31], [50, 51, 52, 7, 50]]
    answers = [fresh_greedy(target, prompt, 20) for prompt in prompts]

    def tell(ids: list[int]) -> list[int]:
        whole = next(p + a for p, a in zip(prompts, answers, strict=True) if ids[: len(p)] == p and (p + a)[: len(ids)] == ids)
        return [token if n % 3 else (token + 1) % 100 for n, token in enumerate(whole[len(ids) : len(ids) + 4], len(ids))]

    def fork(ids: list[int]) -> DraftTree | list[int]:
        line = tell(ids)
        if len(line) < 2 or len(ids) % 2:
            return line
        return tree_of([ids[-1], 99, *line], [-1, 0, 0, *range(2, len(line) + 1)])

    for script, shape in ((tell, Chain(4)), (fork, Tree.dynamic(2, 4, 5))):
        result = generate(target, prompts, drafter=Scripted(script), shape=shape, eos=None, max_new_tokens=20)
        assert [row.tokens for row in result.rows] == answers
        assert sum(r.accepted for row in result.rows for r in row.rounds) > 20


def test_estimate_does_not_follow_acceptance(target: Target) -> None:
    text = list(range(3, 90))
    session = Scripted(lambda ids: [ids[-1] + 1, ids[-1] + 2]).start(target, 1, 99)
    seen = [session.propose(Round([text[:n]], Chain(2), estimate=True)).expected_B.item() for n in range(2, 60, 3)]
    assert seen[0] == 0.75 and seen[-1] > 1.6 and seen == sorted(seen)
    session = Scripted(lambda ids: [3, 4, 5]).start(target, 1, 99)
    session.propose(Round([[1, 2]], Chain(3), estimate=True))
    chance = (0.9 * 1 + 1) / (0.9 * 2 + 2)  # of 3 and 4 one was right; 5 was never tried
    after = session.propose(Round([[1, 2, 3, 7, 8]], Chain(3), estimate=True)).expected_B.item()
    assert after == pytest.approx(chance + chance**2 + chance**3)
