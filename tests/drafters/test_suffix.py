"""Suffix decoding against counts made by a scan."""

import itertools

import pytest
import torch

from spectrain.decoding.drafter import Round
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters import suffix
from spectrain.drafters.suffix import Limits, Suffix, SuffixTrie, chain_from, child_of, tree_from
from spectrain.target.model import Target


def random_ids(n: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def count(texts: list[list[int]], piece: list[int]) -> tuple[int, tuple[int, int]]:
    """Occurrences of a piece, and where the last one ends."""
    n = len(piece)
    ends = [(t, i + n) for t, text in enumerate(texts) for i in range(len(text) - n + 1) if text[i : i + n] == piece]
    return len(ends), max(ends, default=(-1, -1))


def slow_chain(texts: list[list[int]], match: list[int], limits: Limits) -> tuple[list[int], float]:
    """Always the most frequent continuation; of equals the one that was seen last."""
    draft, chance, score = [], 1.0, 0.0
    vocab = sorted({token for text in texts for token in text})
    while len(draft) < min(limits.depth, limits.budget):
        above = count(texts, match + draft)[0]
        (best, _), token = max((count(texts, match + draft + [t]), t) for t in vocab)
        if best == 0 or chance * best / above < limits.min_probability:
            break
        chance *= best / above
        score += chance
        draft.append(token)
        if best / above < limits.stop_below:
            break
    return draft, score


def slow_tree(texts: list[list[int]], match: list[int], limits: Limits) -> list[float]:
    """Chances of the best nodes, falling: every path by itself."""
    vocab = sorted({token for text in texts for token in text})
    chances, level = [], {(): 1.0}
    for _ in range(limits.depth):
        below = {}
        for path, chance in level.items():
            above = count(texts, match + list(path))[0]
            for t in vocab:
                joint = chance * count(texts, match + [*path, t])[0] / above
                if joint > 0 and joint >= limits.min_probability:
                    below[*path, t] = joint
        chances += below.values()
        level = below
    return sorted(chances, reverse=True)[: limits.budget]


def slow_best(corpus: list[list[int]], ids: list[int], s: Suffix, shape, limit: int, stop_below: float = 0.0):
    """The best score over match lengths, own text first, longest match first; the draft too for a chain."""
    best, best_score = [], 0.0
    for m in range(s.max_depth - 1, 0, -1):
        for texts, needed in (([ids], 2), (corpus, 1)):
            if m > len(ids) or count(texts, ids[-m:])[0] < needed:
                continue
            limits = Limits(min(limit, int(s.factor * m + s.offset), s.max_depth - m), shape.budget, s.min_probability, stop_below, 9)
            if shape.is_chain:
                draft, score = slow_chain(texts, ids[-m:], limits)
            else:
                draft, score = [], sum(slow_tree(texts, ids[-m:], limits))
            if score > best_score + 1e-12:
                best, best_score = draft, score
    return best, best_score


CASES = [
    ({}, Chain(4), 4, 0.0),
    ({"max_depth": 5, "factor": 0.5, "offset": 1}, Chain(6), 6, 0.0),
    ({"min_probability": 0.6}, Chain(5), 5, 0.0),
    ({"max_depth": 4, "offset": 3}, Chain(5), 2, 0.7),
    ({"min_probability": 0.0, "max_depth": 6}, Tree.dynamic(2, 3, 6), 3, 0.0),
    ({"offset": 2}, Tree.static([[0], [1], [0, 0], [0, 0, 0], [1, 0]]), 2, 0.0),
]


@pytest.mark.parametrize(("settings", "shape", "limit", "stop_below"), CASES, ids=str)
def test_draft_is_not_the_most_frequent_continuation(target: Target, settings: dict, shape, limit: int, stop_below: float) -> None:
    """Rows that grow by bursts, over one corpus; scores and chains equal those of a scan over all texts."""
    corpus = [random_ids(12, 3, seed) for seed in range(4)] + [[1], []]
    drafter = Suffix(corpus, **settings)
    texts = [random_ids(40, 3, 9), [0, 1, 0, 1, 2] * 8]
    session, drafted = drafter.start(target, 2, 50), 0
    for step in range(1, 7):
        ids = [texts[0][: 6 * step], texts[1][: 5 * step + 3]]
        ask = Round(ids, shape, depth_B=[limit] * 2, stop_below=stop_below, estimate=True)
        tree = session.propose(ask)
        for b, row in enumerate(ids):
            draft, score = slow_best(corpus, row, drafter, shape, limit, stop_below)
            assert (0.0 if tree is None else tree.expected_B[b].item()) == pytest.approx(score, abs=1e-6)
            if shape.is_chain and tree is not None:
                assert tree.tokens_BN[b, 1 : int(tree.num_B[b])].tolist() == draft
            drafted += tree is not None and int(tree.num_B[b]) > 1
    assert drafted > 6


def paths(draft) -> list[tuple[int, ...]]:
    lines: list[tuple[int, ...]] = [()]
    for token, parent in zip(*draft, strict=True):
        lines.append((*lines[parent], token))
    return lines[1:]


@pytest.mark.parametrize("bounds", [(4, 9, 0.05), (2, 50, 0.0), (3, 4, 0.2), (1, 2, 0.0)])
def test_tree_leaves_better_nodes_out(bounds: tuple[int, int, float]) -> None:
    limits = Limits(*bounds, stop_below=0.0, vocab_size=9)
    texts = [random_ids(60, 4, seed) for seed in range(3)]
    trie = trie_of(texts, 8)
    for match in ([0], [1, 2], [3, 1], [0, 2, 1], texts[0][40:48]):
        cursor = trie.find(match)
        if cursor is None:
            continue
        draft, score = tree_from(cursor, limits)
        found = [chance_of(texts, match, list(path)) for path in paths(draft)]
        assert found == sorted(found, reverse=True) and len(set(paths(draft))) == len(found)
        assert found == pytest.approx(slow_tree(texts, match, limits)) and score == pytest.approx(sum(found))
    assert tree_from(trie.find([0]), Limits(3, 9, 0.0, 1.1, 9))[0].parents == [0] * 4  # below tokens in doubt nothing is drafted


def chance_of(texts: list[list[int]], match: list[int], path: list[int]) -> float:
    return count(texts, match + path)[0] / count(texts, match)[0]


def trie_of(texts: list[list[int]], max_depth: int) -> SuffixTrie:
    trie = SuffixTrie(max_depth)
    for text in texts:
        ends: list = []
        for at in range(len(text)):
            ends = trie.append(text, at, ends)
    return trie


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 4, 0, 5, 1, 3)])
def test_counts_are_wrong_or_outlive_their_text(order: tuple[int, ...]) -> None:
    """Texts leave one by one: every count is that of a scan over the rest, siblings stay in order, and at the end nothing is left."""
    texts = {i: random_ids(n, 3, i) for i, n in enumerate((30, 1, 17, 9))} | {4: [0] * 6, 5: [1] * 3}
    trie = trie_of(list(texts.values()), 4)
    pieces = [list(p) for n in range(1, 5) for p in itertools.product(range(3), repeat=n)]
    for gone in order:
        trie.forget(texts.pop(gone))
        for piece in pieces:
            expected, cursor = count(list(texts.values()), piece)[0], trie.find(piece)
            assert (0 if cursor is None else cursor[0].count) == expected
            siblings = [] if cursor is None else cursor[0].order
            assert [n.count for n in siblings] == sorted((n.count for n in siblings), reverse=True)
            assert [n.rank for n in siblings] == list(range(len(siblings)))
    assert trie.root.children == {} and trie.root.order == []


def test_old_texts_never_leave(target: Target) -> None:
    drafter = Suffix([[1, 2, 3, 4], [1, 2, 5, 6]], max_cached=2)

    def draft() -> list[int] | None:
        tree = drafter.start(target, 1, 50).propose(Round([[9, 1, 2]], Chain(2)))
        return None if tree is None else tree.tokens_BN[0, 1:].tolist()

    assert draft() == [5, 6]  # of two equals the later one
    drafter.add([7, 8])
    assert draft() == [5, 6]
    drafter.add([7, 8])
    assert draft() is None
    none = Suffix([[1, 2, 3, 4]], max_cached=0)
    assert none.start(target, 1, 50).propose(Round([[9, 1, 2]], Chain(2))) is None


@pytest.mark.parametrize("shape", [Chain(4), Tree.dynamic(2, 4, 9)], ids=str)
def test_corpus_of_a_larger_vocabulary_breaks_the_call(target: Target, make_target, fresh_greedy, shape) -> None:
    """Ids that the target lacks are not drafted, nor anything behind them; what stands beside them is."""
    drafter = Suffix([[1, 2, 3, 500, 4], [1, 2, 3, 500, 4], [1, 2, 700, 700], [1, 2, 3, 4]], min_probability=0.0, offset=3)
    tree = drafter.start(target, 1, 50).propose(Round([[9, 1, 2]], shape, estimate=True))
    if shape.is_chain:
        assert tree.tokens_BN.tolist() == [[2, 3]] and tree.expected_B.item() == pytest.approx(3 / 4)
    else:
        assert tree.tokens_BN.tolist() == [[2, 3, 4]] and tree.parents_BN.tolist() == [[-1, 0, 1]]
        assert tree.expected_B.item() == pytest.approx(3 / 4 + 1 / 4)
    learner = Suffix(learn=True)
    large, prompt = make_target(vocab=300, seed=2), [[7, 8]]
    learnt = generate(large, prompt, drafter=learner, shape=shape, eos=None, max_new_tokens=40).rows[0].tokens
    assert max(learnt) >= 100
    before = next(i for i, (a, b) in enumerate(itertools.pairwise(learnt)) if a < 100 <= b)
    prompt = [[5, *[i for i in learnt[: before + 1] if i < 100]]]
    for settings in ({}, {"temperature": 1.0}):
        row = generate(target, prompt, drafter=learner, shape=shape, eos=None, max_new_tokens=9, **settings).rows[0]
        assert settings or row.tokens == fresh_greedy(target, prompt[0], 9)


def test_cost_grows_with_the_context(target: Target, monkeypatch) -> None:
    steps = 0

    def counting(method):
        def spy(*args):
            nonlocal steps
            steps += 1
            return method(*args)

        return spy

    monkeypatch.setattr(suffix, "child_of", counting(child_of))
    monkeypatch.setattr(SuffixTrie, "_count", counting(SuffixTrie._count))
    costs = []
    for length in (300, 3000):
        text = [1, 2, 3, 1, 2, 4] * (length // 6)
        session = Suffix([random_ids(length, 9, 0)]).start(target, 1, length + 9)
        session.propose(Round([text], Tree.dynamic(9, 7, 60)))
        steps = 0
        session.propose(Round([[*text, 1, 2, 3]], Tree.dynamic(9, 7, 60)))
        costs.append(steps)
    assert 0 < costs[1] <= costs[0] + 5 and costs[0] < 24 * 24


@pytest.mark.parametrize("shape", [Chain(5), Tree.dynamic(3, 4, 8)], ids=str)
def test_suffixes_change_the_answer(make_table_target, shape) -> None:
    """A target that counts in a circle: drafts come true from the second turn on, in ragged batches, and no token changes."""
    target = make_table_target(10 * torch.eye(12).roll(1, dims=1))
    prompts = [[3, 4], [8], [5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]]
    plain = generate(target, prompts, eos=None, max_new_tokens=30)
    result = generate(target, prompts, drafter=Suffix(), shape=shape, eos=None, max_new_tokens=30)
    assert [row.tokens for row in result.rows] == [row.tokens for row in plain.rows]
    assert all(len(row.rounds) < 25 for row in result.rows) and len(result.rows[2].rounds) < 13
    drawn = generate(target, prompts, drafter=Suffix(), shape=shape, eos=None, max_new_tokens=3, temperature=0.7)
    assert drawn.law == "point_mass"


def test_a_call_learns_from_itself_or_not_from_the_last(make_table_target) -> None:
    """learn=True: answers join when the call ends; within it a row drafts as it does alone. Otherwise the corpus never changes."""
    target = make_table_target(10 * torch.eye(30).roll(1, dims=1))

    def rounds(drafter: Suffix) -> list[int]:
        result = generate(target, [[3], [3]], drafter=drafter, shape=Chain(4), eos=None, max_new_tokens=20)
        return [len(row.rounds) for row in result.rows]

    learner, frozen = Suffix(learn=True), Suffix([[4, 5, 6]])
    assert rounds(learner) == [19, 19] and rounds(learner)[0] < 8
    answers_only = Suffix(learn=True)
    generate(target, [[20, 3]], drafter=answers_only, eos=None, max_new_tokens=3)
    drafts = [answers_only.start(target, 1, 9).propose(Round([[i]], Chain(2))) for i in (20, 4)]
    assert drafts[0] is None and drafts[1].tokens_BN.tolist() == [[4, 5]]
    first = rounds(frozen)
    assert first[0] < 19 and rounds(frozen) == first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_depth": 1}, "max_depth >= 2"),
        ({"min_probability": 1.5}, "min_probability=1.5"),
        ({"max_cached": -1}, "max_cached=-1"),
        ({"corpus": ["a text"]}, "text 0 of the corpus is 'a text'; it must be a list of token ids"),
        ({"corpus": [1, 2]}, "text 0 of the corpus is 1"),
        ({"corpus": [[1, 2], [3, -100]]}, "holds -100; token ids start at 0: leave masked places out"),
    ],
)
def test_settings_without_meaning_are_taken(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Suffix(**settings)


def test_probabilities_below_the_first_match_are_forgotten() -> None:
    """Chances of a chain are products of count ratios: by hand."""
    trie = trie_of([[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5]], 4)
    assert chain_from(trie.find([1]), Limits(3, 9, 0.0, 0.0, 9)) == (suffix.RowDraft([2, 3], [0, 1]), pytest.approx(3 / 4 + 2 / 4))
    assert chain_from(trie.find([1]), Limits(3, 9, 0.6, 0.0, 9))[0].tokens == [2]
    assert chain_from(trie.find([1]), Limits(3, 9, 0.8, 0.0, 9)) == (suffix.RowDraft([], []), 0.0)
