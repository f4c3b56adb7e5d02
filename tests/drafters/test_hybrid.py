"""Two drafters in one."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from spectrain.decoding.drafter import Round
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.hybrid import Hybrid, Trust
from spectrain.drafters.lookup import NGram
from spectrain.drafters.small_model import SmallModel
from spectrain.drafters.suffix import Suffix
from spectrain.target.model import Target

PROMPTS = [[9, 55, 31], [7], [50, 51, 52, 7, 50, 51, 52, 7, 50, 51]]


@dataclass
class Fixed:
    """Proposes the same tree always, and notes what it is told and asked."""

    tree: DraftTree | None
    layer_ids: tuple[int, ...] = ()
    has_q: bool = True
    asked: list[Round] = field(default_factory=list)
    told: list = field(default_factory=list)

    def start(self, target: Target, rows: int, max_length: int) -> "Fixed":
        return self

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        self.told.append(states_BNF)

    def select(self, rows_R: Tensor) -> None:
        self.told.append(rows_R.tolist())

    def finish(self, answers) -> None:
        self.told.append(answers)

    def propose(self, round: Round) -> DraftTree | None:
        self.asked.append(round)
        return self.tree


def tree(tokens, parents, num, expected, **more) -> DraftTree:
    expected_B = None if expected is None else torch.tensor(expected)
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(num), "point_mass", expected_B=expected_B, **more)


COMMITTED = [[3, 5], [3, 6], [3, 7]]
LINE = ([[5, 1, 2], [6, 1, 0], [7, 0, 0]], [[-1, 0, 1]] * 3, [3, 2, 1])
BUSH = ([[5, 8, 9, 4], [6, 8, 9, 4], [7, 8, 0, 0]], [[-1, 0, 0, 1], [-1, 0, 0, 2], [-1, 0, 0, 0]], [4, 4, 2])


def propose(target: Target, a: Fixed, b: Fixed, shape=Chain(3), **settings) -> DraftTree | None:  # noqa: B008
    session = Hybrid(a, b, **settings).start(target, 3, 50)
    return session.propose(Round(COMMITTED, shape, law="iid", stop_below=0.3))


def test_row_takes_the_lesser_proposal(target: Target) -> None:
    """A chain and a tree in one batch, padded; of equals the first part's."""
    a, b = Fixed(tree(*LINE, [1.5, 1.0, 0.0], is_chain=True)), Fixed(tree(*BUSH, [1.0, 1.5, 0.0]))
    mixed = propose(target, a, b)
    assert mixed.tokens_BN.tolist() == [[5, 1, 2, 0], [6, 8, 9, 4], [7, 0, 0, 0]] and mixed.num_B.tolist() == [3, 4, 1]
    assert mixed.parents_BN.tolist() == [[-1, 0, 1, 0], [-1, 0, 0, 2], [-1, 0, 1, 0]]
    assert mixed.expected_B.tolist() == [1.5, 1.5, 0.0] and not mixed.is_chain and (mixed.law, mixed.q_BNV) == ("point_mass", None)
    for part in (a, b):
        assert [(r.law, r.estimate, r.stop_below, r.depth_B) for r in part.asked] == [("point_mass", True, 0.3, None)]


def test_two_chains_are_no_chain(target: Target) -> None:
    longer = tree([[5, 3, 3, 3], [6, 3, 0, 0], [7, 0, 0, 0]], [[-1, 0, 1, 2]] * 3, [4, 2, 1], [9.0, 0.0, 0.0], is_chain=True)
    mixed = propose(target, Fixed(tree(*LINE, [1.5, 1.0, 0.0], is_chain=True)), Fixed(longer))
    assert mixed.is_chain and mixed.parents_BN.tolist() == [[-1, 0, 1, 2]] * 3
    assert mixed.tokens_BN.tolist() == [[5, 3, 3, 3], [6, 1, 0, 0], [7, 0, 0, 0]] and mixed.num_B.tolist() == [4, 2, 1]


def test_silent_parts_break_the_draft(target: Target) -> None:
    only = tree(*LINE, [1.5, 1.0, 0.0], is_chain=True)
    for parts in ((Fixed(only), Fixed(None)), (Fixed(None), Fixed(only))):
        mixed = propose(target, *parts)
        assert mixed.tokens_BN.tolist() == LINE[0] and mixed.is_chain
    assert propose(target, Fixed(None), Fixed(None)) is None
    with pytest.raises(ValueError, match="Fixed gives no estimate"):
        propose(target, Fixed(only), Fixed(tree(*BUSH, None)))
    with pytest.raises(ValueError, match="ask_below must be above 0, found 0"):
        Hybrid(NGram(), NGram(), ask_below=0)


@pytest.mark.parametrize(("below", "asked"), [(1.2, [0, 3, 3]), (2.0, [3, 3, 3]), (0.5, [0, 0, 3])])
def test_second_part_is_asked_in_vain(target: Target, below: float, asked: list[int]) -> None:
    a, b = Fixed(tree(*LINE, [1.5, 1.0, 0.0], is_chain=True)), Fixed(tree(*BUSH, [0.0, 0.0, 0.5]))
    propose(target, a, b, ask_below=below)
    assert [list(r.depth_B) for r in b.asked] == [asked]
    sure = Fixed(tree(*LINE, [1.5, 1.3, 4.0], is_chain=True))
    assert propose(target, sure, Fixed(None), ask_below=1.2).num_B.tolist() == [3, 2, 1]
    quiet = Fixed(tree(*BUSH, [9.0] * 3))
    propose(target, sure, quiet, ask_below=1.2)
    assert quiet.asked == []


def test_parts_get_each_others_states(target: Target) -> None:
    a, b, none = Fixed(None, layer_ids=(1, 3)), Fixed(None, layer_ids=(0, 3)), Fixed(None)
    states_BNF = torch.arange(12.0).view(1, 1, 12)  # hs 0, 1 and 3, of width 4
    count = torch.ones(1, dtype=torch.long)
    hybrid = Hybrid(a, b)
    assert hybrid.layer_ids == (0, 1, 3)
    session = hybrid.start(target, 1, 50)
    session.observe(states_BNF, count[None], count)
    assert a.told[0].flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11] and b.told[0].flatten().tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    Hybrid(none, a).start(target, 1, 50).observe(states_BNF[..., 4:], count[None], count)
    assert none.told == [None] and torch.equal(a.told[1], states_BNF[..., 4:])
    falling, mixed = Fixed(None, layer_ids=(3, 1)), Fixed(None, layer_ids=(1, 3, 0))
    Hybrid(none, falling).start(target, 1, 50).observe(states_BNF[..., 4:], count[None], count)
    Hybrid(falling, mixed).start(target, 1, 50).observe(states_BNF, count[None], count)
    assert [told.flatten().tolist() for told in falling.told] == [[8, 9, 10, 11, 4, 5, 6, 7]] * 2
    assert mixed.told[0].flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3]
    session.select(torch.tensor([0]))
    session.finish([([1, 2], 1)])
    assert a.told[-2:] == b.told[-2:] == [[0], [([1, 2], 1)]]


def test_broken_promises_are_believed(target: Target) -> None:
    """A part that promises much and keeps nothing loses its rows to one that promises little and keeps it; per row."""
    text = [[5, 1, 2, 3, 4] + [1, 2, 3, 4] * 9, [6, 9, 9, 9] + [8, 9] * 18]

    @dataclass
    class Part(Fixed):
        draft: tuple[int, ...] = ()
        expected: float = 0.0

        def propose(self, round: Round) -> DraftTree:
            tokens = [[ids[-1], *self.draft] for ids in round.committed]
            return tree(tokens, [[-1, 0]] * len(tokens), [2] * len(tokens), [self.expected] * len(tokens), is_chain=True)

    def chosen(calibrate: bool) -> list[list[int]]:
        parts = Part(None, draft=(8,), expected=0.9), Part(None, draft=(1,), expected=0.25)
        session = Hybrid(*parts, calibrate=calibrate).start(target, 2, 90)
        return [session.propose(Round([t[:n] for t in text], Chain(1))).tokens_BN[:, 1].tolist() for n in range(5, 37, 4)]

    assert set(map(tuple, chosen(False))) == {(8, 8)}
    first, *_, last = chosen(True)
    assert first == [8, 8] and last == [1, 8]


def test_trust_counts_what_nobody_committed() -> None:
    trust = Trust()
    trust.note(2, 3.0, [1, 2, 9, 3], [0, 1, 1, 3])  # 1 -> 2, 1 -> 9 -> 3
    trust.settle([5, 5])  # nothing new
    assert trust.factor == 1.0
    trust.settle([5, 5, 1, 9, 4])
    assert trust.factor == pytest.approx((0.9 * 2 + 2) / (0.9 * 2 + 3))
    trust.settle([5, 5, 1, 9, 4, 1])  # judged once
    assert trust.factor == pytest.approx((0.9 * 2 + 2) / (0.9 * 2 + 3))


@pytest.mark.parametrize("shape", [Chain(4), Tree.dynamic(3, 3, 7)], ids=str)
@pytest.mark.parametrize("kind", ["ngram + head", "head + suffix", "suffix + small model", "two heads"])
def test_hybrid_changes_the_answer(target: Target, make_head, fresh_greedy, kind: str, shape) -> None:
    """Ragged rows that end and leave; heads that read different states."""
    head, small = HeadDrafter(make_head(target)), SmallModel(target)
    parts = {
        "ngram + head": (NGram(shortest=1), head), "head + suffix": (head, Suffix(learn=True)), "suffix + small model": (Suffix(), small),
        "two heads": (head, HeadDrafter(make_head(target, layer_ids=(0, 3), seed=4))),
    }[kind]  # fmt: skip
    answers = [fresh_greedy(target, prompt, 14) for prompt in PROMPTS]
    end = answers[1][3]
    result = generate(target, PROMPTS, drafter=Hybrid(*parts), shape=shape, eos=end, max_new_tokens=14)
    assert [row.tokens for row in result.rows] == [a[: a.index(end) + 1] if end in a else a for a in answers]
    drawn = generate(target, PROMPTS, drafter=Hybrid(*parts), shape=shape, eos=None, max_new_tokens=4, temperature=1.0)
    assert drawn.law == "point_mass" and (parts[0] is head or max(r.accepted for row in result.rows for r in row.rounds) > 0)


def test_head_in_a_hybrid_drafts_something_else(target: Target, make_head) -> None:
    """With a part that never drafts, and another that reads other states, the rounds are those of the head alone."""
    head = HeadDrafter(make_head(target))
    alone = generate(target, PROMPTS, drafter=head, shape=Chain(3), eos=None, max_new_tokens=12)
    mixed = generate(target, PROMPTS, drafter=Hybrid(Fixed(None, layer_ids=(0, 2)), head), shape=Chain(3), eos=None, max_new_tokens=12)
    counts = [[[(r.drafted, r.accepted) for r in row.rounds] for row in result.rows] for result in (alone, mixed)]
    assert counts[0] == counts[1] and {drafted for row in counts[0] for drafted, _ in row} == {3}
