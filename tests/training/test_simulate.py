"""From ranks to rounds: written out by hand, and against a generator that drafts by the same ranks."""

import random
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.data.batches import pack
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Tree
from spectrain.target.model import Target
from spectrain.training import simulate
from spectrain.training.simulate import accepted_chain, accepted_tree, rank_table, ranks_of, walk

BY_HAND = run_path(str(Path(__file__).with_name("by_hand.py")))
Samples, row_of = BY_HAND["Samples"], BY_HAND["row_of"]
CHAIN = [[0], [0, 0], [0, 0, 0]]


def test_chain_goes_on_after_a_wrong_draft_or_beyond_the_answer() -> None:
    rank_KR = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    counts_KR = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]).bool()
    assert accepted_chain(rank_KR, counts_KR).tolist() == [3, 1, 0, 2, 1]
    assert accepted_chain(rank_KR[:2], counts_KR[:2]).tolist() == [2, 1, 0, 2, 1]


def test_tree_takes_paths_that_it_has_not() -> None:
    """Siblings without a first choice, and a first choice below a second one."""
    paths = Tree.static([[0], [1], [3], [1, 0], [1, 2], [1, 0, 0]]).paths
    cases = [(0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 2, 0), (1, 1, 0), (2, 0, 0), (3, 0, 0), (9, 9, 9), (1, 9, 0)]
    rank_KR = torch.tensor(cases).T
    counts_KR = torch.ones_like(rank_KR).bool()
    assert accepted_tree(rank_KR, counts_KR, paths).tolist() == [1, 3, 2, 2, 1, 0, 1, 0, 1]
    counts_KR[1:] = False
    assert accepted_tree(rank_KR, counts_KR, paths).tolist() == [1, 1, 1, 1, 1, 0, 1, 0, 1]
    assert accepted_tree(rank_KR, counts_KR, ()).tolist() == [0] * 9
    assert accepted_tree(rank_KR[:0], counts_KR[:0], ()).tolist() == [0] * 9  # the best tree of a head that never hits
    chain = Tree.static(CHAIN).paths
    rank_KR = torch.randint(0, 2, (3, 50), generator=torch.Generator().manual_seed(0))
    counts_KR = torch.arange(3)[:, None] < torch.randint(1, 4, (50,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(accepted_tree(rank_KR, counts_KR, chain), accepted_chain(rank_KR, counts_KR))


def test_rounds_start_at_other_rows_or_run_into_the_next_answer() -> None:
    """Rows 4-8 and 10: an answer of six tokens and one of two. Rounds of the first: 2 accepted, then 1, then none is left."""
    row_R, accepted_R = torch.tensor([4, 5, 6, 7, 8, 10]), torch.tensor([2, 9, 9, 1, 0, 0])
    found = walk(accepted_R, row_R)
    assert found.tokens_A.tolist() == [5, 1] and found.rounds_A.tolist() == [2, 1] and found.first_A.tolist() == [0, 5]
    found = walk(torch.tensor([0, 0, 0, 0, 0, 0]), row_R)
    assert found.rounds_A.tolist() == found.tokens_A.tolist() == [5, 1], "without a hit a round commits one token"
    empty = walk(accepted_R[:0], row_R[:0])
    assert [len(x) for x in (empty.tokens_A, empty.rounds_A, empty.first_A)] == [0, 0, 0]


def test_shares_are_of_all_rows_or_of_ranks_out_of_reach() -> None:
    rank_KR = torch.tensor([[0, 0, 1, 5], [0, 2, 2, 0], [0, 0, 0, 0]])
    counts_KR = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    assert rank_table(rank_KR, counts_KR, width=3) == [[0.5, 0.25, 0.0], [0.5, 0.0, 0.5]]


@pytest.mark.parametrize("shape", [Tree.static(CHAIN), Tree.static([[0], [1], [0, 0], [0, 2], [1, 0], [1, 0, 1], [0, 0, 0]])], ids=str)
@pytest.mark.parametrize("limit", [1, 2, 9])
def test_rounds_are_not_those_of_the_generator(target: Target, scripted: Any, shape: Any, limit: int) -> None:
    """The drafter's choices are written: the true token at a chosen rank, other tokens at the others."""
    prompts = [[7, 12, 9], [33, 50], [8, 77, 20, 64, 9], [91, 5, 17, 40]]
    answers = [row.tokens for row in generate(target, prompts, max_new_tokens=limit).rows]
    rng = random.Random(limit)
    rank = {(b, i, k): rng.choice([0, 0, 1, 2]) for b in range(4) for i in range(limit) for k in range(3)}

    def script(ids: list[int]) -> list[tuple[int, int]]:
        (b,) = [b for b, p in enumerate(prompts) if ids[: len(p)] == p]
        at = len(ids) - len(prompts[b]) - 1  # index of the token in hand in the answer
        numbers = {(): 0, **{path: n for n, path in enumerate(shape.paths, 1)}}
        drafts = []
        for path in shape.paths:
            k = len(path) - 1
            on_path = all(rank.get((b, at, d)) == r for d, r in enumerate(path))
            truth = answers[b][at + 1 + k] if at + 1 + k < len(answers[b]) else 99
            drafts.append((truth if on_path else (truth + 1 + path[-1]) % 90 + 6, numbers[path[:-1]]))
        return drafts

    found = generate(target, prompts, drafter=scripted(script), max_new_tokens=limit).rows
    assert [row.tokens for row in found] == answers
    rows, line = [], 0
    for b, answer in enumerate(answers):
        rows += [(b, i, line + i) for i in range(len(answer) - 1)]
        line += len(answer) + 1
    row_R = torch.tensor([place for _, _, place in rows], dtype=torch.long)
    rank_KR = torch.tensor([[rank[b, i, k] for b, i, _ in rows] for k in range(3)], dtype=torch.long).reshape(3, -1)
    counts_KR = torch.tensor([[i + 1 + k < len(answers[b]) for b, i, _ in rows] for k in range(3)]).reshape(3, -1).bool()
    made = walk(accepted_tree(rank_KR, counts_KR, shape.paths), row_R)
    going = [row for row in found if len(row.tokens) > 1]
    assert made.rounds_A.tolist() == [len(row.rounds) for row in going]
    assert made.tokens_A.tolist() == [sum(r.committed for r in row.rounds) for row in going]


def test_ranks_are_of_other_tokens(target: Target, make_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against logits of every row written out, in batches of unlike length, packed lines and pieces; ids off the draft vocabulary have
    no rank."""
    monkeypatch.setattr(simulate, "PIECE", 100)
    head = make_head(target, draft_vocab=50)
    rows = [row_of([7, 12, 9], [8, 40, 20, 64, 18, 2, 50]), row_of([30], [4, 5, 6, 7]), row_of([12, 12], [13, 14, 44, 46, 48])]
    samples = Samples.of(target, rows)
    batches = [samples.batch([0, 1]), samples.batch([2]), pack([[samples[0], samples[2]], [samples[1]]])]
    found = ranks_of(head, batches, embed_VW=target.embedding_VW, steps=4, width=5)
    expected: list[list[int]] = [[] for _ in range(4)]
    counts: list[list[bool]] = [[] for _ in range(4)]
    for n in (0, 1, 2, 0, 2, 1):
        first, length = int(rows[n].mask_L.argmax()), len(rows[n])
        at_R = torch.arange(first - 1, length - 2)
        for k, (ahead, logits_RV) in enumerate(head.rows(samples.batch([n]), at_R, target.embedding_VW, 4)):
            order = logits_RV.argsort(-1, descending=True)
            for r, i in enumerate(at_R.tolist()):
                counts[k].append(i + ahead < length)
                truth = int(rows[n].ids_L[min(i + ahead, length - 1)])
                place = [int(head.target_ids[j]) for j in order[r, :5]]
                expected[k].append(place.index(truth) if truth in place else 5)
    wanted_KR, counts_KR = torch.tensor(expected), torch.tensor(counts)
    assert torch.equal(found.counts_KR, counts_KR)
    assert torch.equal(found.rank_KR[counts_KR], wanted_KR[counts_KR]) and 5 > int(wanted_KR[counts_KR].min())
    assert walk(torch.zeros_like(found.row_R), found.row_R).tokens_A.tolist() == [6, 3, 4, 6, 4, 3]
    assert bool((found.row_R.diff() > 0).all()), "answers of two batches may run into each other"
    assert found.line_R.tolist() == [0] * 6 + [1] * 3 + [2] * 4 + [3] * 10 + [4] * 3


def tie_head(rows: int) -> Any:
    """All logits alike."""

    class Head:
        target_ids = torch.arange(8)

        def outputs(self, batch: Any, row_R: Tensor, embed_VW: Tensor, steps: int) -> Any:
            from spectrain.heads.base import StepOutput

            yield StepOutput(2, torch.zeros(len(row_R), 4), torch.zeros(8, 4))

    return Head()


def test_equal_logits_are_all_the_best(target: Target) -> None:
    """A token is the first choice only where drafting would take it, not wherever no other is better."""
    samples = Samples.of(target, [row_of([1], [t, t]) for t in range(8)])
    found = ranks_of(tie_head(8), [samples.batch(range(8))], embed_VW=target.embedding_VW, steps=1, width=8)
    assert sorted(found.rank_KR[0].tolist()) == list(range(8))
