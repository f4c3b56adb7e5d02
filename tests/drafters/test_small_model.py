"""A small language model as drafter: its cache, its laws, and tokenizers that differ."""

import copy
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.decoding.drafter import Round
from spectrain.decoding.generate import generate
from spectrain.decoding.sampling import Coins, Sampling
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters import small_model
from spectrain.drafters.small_model import SmallModel
from spectrain.target.model import Target

PROMPTS = [[9, 55, 31], [7], [50, 51, 52, 7, 50, 51, 52, 7, 3]]
BUSH = Tree.static([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@pytest.fixture(scope="module")
def other(make_target) -> Target:
    return make_target(seed=3, num_hidden_layers=1, hidden_size=16)


@pytest.fixture(scope="module")
def near(target: Target) -> Target:
    """The target with a little noise: often right, often not."""
    model = copy.deepcopy(target.model)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.add_(0.12 * torch.randn(model.lm_head.weight.shape, generator=g))
    return replace(target, model=model)


@pytest.fixture(scope="module")
def answers(target: Target, fresh_greedy) -> list[list[int]]:
    return [fresh_greedy(target, prompt, 24) for prompt in PROMPTS]


def rounds(result) -> list[int]:
    return [r.accepted for row in result.rows for r in row.rounds[:-1]]


@pytest.mark.parametrize(
    ("shape", "settings"),
    [(Chain(1), {}), (Chain(4), {}), (BUSH, {}), (Chain(3), {"temperature": 1.0}), (BUSH, {"temperature": 0.8, "rule": "traversal"})],
    ids=str,
)
def test_target_rejects_its_own_drafts(target: Target, answers, shape, settings: dict) -> None:
    """tau = depth + 1 where the small model is the target itself, at any temperature."""
    result = generate(target, PROMPTS, drafter=SmallModel(target), shape=shape, eos=None, max_new_tokens=24, **settings)
    assert set(rounds(result)) == {shape.depth}
    assert settings or [row.tokens for row in result.rows] == answers


@pytest.mark.parametrize("shape", [Chain(3), Tree.dynamic(3, 3, 7), BUSH], ids=str)
@pytest.mark.parametrize("which", ["near", "other"])
def test_small_model_changes_the_answer(request, target: Target, answers, which: str, shape) -> None:
    """Ragged rows, some of which end early and leave the batch."""
    drafter = SmallModel(request.getfixturevalue(which))
    result = generate(target, PROMPTS, drafter=drafter, shape=shape, eos=None, max_new_tokens=24)
    assert [row.tokens for row in result.rows] == answers
    assert which == "other" or 0.2 < sum(rounds(result)) / len(rounds(result)) < shape.depth - 0.2
    end = answers[1][4]
    stopped = generate(target, PROMPTS, drafter=drafter, shape=shape, eos=end, max_new_tokens=24)
    for row, answer in zip(stopped.rows, answers, strict=True):
        assert row.tokens == (answer[: answer.index(end) + 1] if end in answer else answer)


@pytest.fixture
def talk(monkeypatch, eager):
    """Checks every logits row that a session hands to `grow`, and its cache, against transformers' own model on the whole text."""
    seen = []
    grow = small_model.grow

    def spy(round, root_B1, logits_BV, extend, target_ids, layouts):
        session = extend.__self__
        model = eager(session._small)
        lines = [[[]] for _ in session._texts]  # the path to each node, by row

        def check(b: int, text: list[int], logits_V: torch.Tensor) -> None:
            expected_V = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits_V, session._words.logits(expected_V), atol=1e-4, rtol=1e-4)

        def listening(tokens_BN, parents_BN):
            logits_BNV = extend(tokens_BN, parents_BN)
            for b, text in enumerate(session._texts):
                for n, (token, parent) in enumerate(zip(tokens_BN[b].tolist(), parents_BN[b].tolist(), strict=True)):
                    lines[b].append([*lines[b][parent], *session._words.spell([token])])
                    check(b, text + lines[b][-1], logits_BNV[b, n])
            return logits_BNV

        for b, text in enumerate(session._texts):
            check(b, text, logits_BV[b])
            cached = model(input_ids=torch.tensor([text]), use_cache=True).past_key_values.layers
            assert session._cache.lengths_B[b] == len(text) == session._held[b]
            for layer, mine in enumerate(session._cache.keys):
                torch.testing.assert_close(mine[b, :, : len(text)], cached[layer].keys[0], atol=1e-4, rtol=1e-4)
        seen.append(len(session._texts))
        return grow(round, root_B1, logits_BV, listening, target_ids, layouts)

    monkeypatch.setattr(small_model, "grow", spy)
    return seen


@pytest.mark.parametrize("shape", [Chain(4), Tree.dynamic(3, 3, 7), BUSH], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cache_keeps_rejected_drafts_or_loses_accepted_ones(target: Target, near: Target, talk, shape, temperature: float) -> None:
    result = generate(target, PROMPTS, drafter=SmallModel(near), shape=shape, eos=7, max_new_tokens=14, temperature=temperature, seed=2)
    accepted = rounds(result)
    assert len(talk) > 3 and min(accepted) < shape.depth and max(accepted) > 0


def test_accepted_drafts_are_run_again(target: Target, monkeypatch) -> None:
    """After a chain of 4 was accepted, 3 of them stand in the cache: the last one and the target's own token are run, nothing else."""
    widths = []
    forward = Target.forward

    def spy(self, ids_BN, **more):
        widths.append(ids_BN.shape[1])
        return forward(self, ids_BN, **more)

    session = SmallModel(target).start(target, 1, 60)
    answer = generate(target, [[7]], eos=None, max_new_tokens=20).rows[0].tokens
    monkeypatch.setattr(Target, "forward", spy)
    for n in (1, 6, 11, 13):  # 13: the first draft and the target's token
        session.propose(Round([[7, *answer[:n]]], Chain(4)))
        widths.append(0)
    assert widths == [2, 1, 1, 1, 0, 2, 1, 1, 1, 0, 2, 1, 1, 1, 0, 1, 1, 1, 1, 0]


def test_accepted_side_branch_is_lost(near: Target, talk, monkeypatch) -> None:
    """The second child and its child are accepted, in a row that stays while the row before it leaves: both are used where they stand."""
    session = SmallModel(near).start(near, 2, 60)
    ids = [[9, 55, 31], [7, 8]]
    bush = Tree.static([[0], [1], [0, 0], [1, 0], [1, 0, 0]])
    tree = session.propose(Round(ids, bush))
    assert tree.parents_BN.tolist() == [[-1, 0, 0, 1, 2, 4]] * 2
    session.select(torch.tensor([1]))
    widths = []
    forward = Target.forward
    monkeypatch.setattr(Target, "forward", lambda self, ids_BN, **more: widths.append(ids_BN.shape[1]) or forward(self, ids_BN, **more))
    grown = [*ids[1], *tree.tokens_BN[1, [2, 4]].tolist(), 60]
    again = session.propose(Round([grown], bush))
    assert widths[0] == 1  # the two accepted drafts were not run again
    fresh = SmallModel(near).start(near, 1, 60).propose(Round([grown], bush))
    assert torch.equal(again.tokens_BN, fresh.tokens_BN) and len(talk) == 3


def test_rewound_or_idle_session_drafts_something_else(target: Target, near: Target) -> None:
    """The same proposal twice; rounds in which nobody asked; a row with more to catch up with than there is room behind the longest."""
    text = [[3 + (5 * i * i) % 90 for i in range(150)], [9, 8, 7]]

    def fresh(ids: list[list[int]]):
        return SmallModel(near).start(target, len(ids), 160).propose(Round(ids, Chain(3), estimate=True))

    session = SmallModel(near).start(target, 2, 160)
    for a, b in ((2, 2), (3, 2), (150, 3)):
        ids = [text[0][:a], text[1][:b]]
        first = session.propose(Round(ids, Chain(3), estimate=True))
        session.rewind()
        again = session.propose(Round(ids, Chain(3), estimate=True))
        for tree in (first, again):
            assert torch.equal(tree.tokens_BN, fresh(ids).tokens_BN)
            torch.testing.assert_close(tree.expected_B, fresh(ids).expected_B, atol=1e-4, rtol=1e-4)
    long = [text[0], (text[1] * 50)[:150]]  # 150 entries are held, 147 are missing, 74 fit behind the longest row
    assert torch.equal(session.propose(Round(long, Chain(3))).tokens_BN, fresh(long).tokens_BN)


def test_rows_beyond_the_positions_are_drafted(target: Target, make_target, fresh_greedy) -> None:
    small = replace(target, model=copy.deepcopy(target.model))
    small.model.config.max_position_embeddings = 20
    prompts = [[9, 55, 31], list(range(40, 55)), list(range(10, 40))]
    result = generate(target, prompts, drafter=SmallModel(small), shape=Chain(4), eos=None, max_new_tokens=16)
    assert [row.tokens for row in result.rows] == [fresh_greedy(target, p, 16) for p in prompts]
    assert [[r.drafted for r in row.rounds] for row in result.rows] == [[4, 4, 4], [4] + [0] * 10, [0] * 15]
    assert set(rounds(replace(result, rows=result.rows[:1]))) == {4}


def words(target: Target, order: list[str]) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(order)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


@pytest.fixture(scope="module")
def shuffled(target: Target) -> Target:
    """The target's own model with its words in another order."""
    vocab = target.tokenizer.get_vocab()
    order = sorted(vocab, key=lambda word: (vocab[word] * 37) % 100)
    model = copy.deepcopy(target.model)
    at = torch.tensor([vocab[word] for word in order])
    with torch.no_grad():
        model.lm_head.weight.copy_(target.output_VW[at])
        model.model.embed_tokens.weight.copy_(target.embedding_VW[at])
    return Target(model=model, tokenizer=words(target, order), name="shuffled")


def test_other_tokenizer_is_taken(target: Target, shuffled: Target, make_target) -> None:
    with pytest.raises(ValueError, match="id 1 is '<end>' in tiny and .* in shuffled: another tokenizer; .*intersection"):
        generate(target, [[9]], drafter=SmallModel(shuffled))
    with pytest.raises(ValueError, match="id 90 is 'w90' in tiny and None in tiny"):
        generate(target, [[9]], drafter=SmallModel(make_target(vocab=90)))
    strange = replace(shuffled, tokenizer=words(target, [f"x{i}" for i in range(98)] + ["<pad> ", "<end> "]))
    strange.tokenizer.add_special_tokens({"pad_token": "<none>", "eos_token": "<none>"})
    with pytest.raises(ValueError, match="no token in common"):
        generate(target, [[9]], drafter=SmallModel(strange, "intersection"))
    with pytest.raises(ValueError, match="'same' or 'intersection', found 'any'"):
        SmallModel(target, "any")
    with pytest.raises(ValueError, match="is on meta, tiny on cpu; load both on 'cpu'"):
        SmallModel(replace(target, model=copy.deepcopy(target.model).to("meta"), name="far")).start(target, 1, 9)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}], ids=str)
def test_same_words_in_another_order_are_not_understood(target: Target, shuffled: Target, answers, settings: dict) -> None:
    drafter = SmallModel(shuffled, "intersection")
    result = generate(target, PROMPTS, drafter=drafter, shape=Chain(4), eos=None, max_new_tokens=24, **settings)
    assert set(rounds(result)) == {4} and (settings or [row.tokens for row in result.rows] == answers)


@pytest.mark.parametrize("shape", [Chain(4), BUSH], ids=str)
def test_words_without_a_counterpart_break_the_draft(target: Target, shuffled: Target, answers, talk, shape) -> None:
    """Half of the words are unknown to the small model: q lies on the other half, and the cache holds what the words were spelled as."""
    vocab = shuffled.tokenizer.get_vocab()
    order = sorted(vocab, key=lambda word: vocab[word])
    half = replace(shuffled, tokenizer=words(target, [w if w[0] != "w" or int(w[1:]) % 2 else f"{w}'" for w in order]), name="half")
    drafter = SmallModel(half, "intersection")
    result = generate(target, PROMPTS, drafter=drafter, shape=shape, eos=None, max_new_tokens=12)
    assert [row.tokens for row in result.rows] == [answer[:12] for answer in answers]
    assert len(talk) > 3 and max(rounds(result)) > 0
    coins = Coins(torch.tensor([1]), torch.tensor([3]))
    ask = Round([[9, 55, 30]], shape, law="iid", sampling=Sampling(temperature=1.0), coins=coins, vocab_size=100)
    tree = drafter.start(target, 1, 50).propose(ask)
    q_V = tree.q_BNV[0, 0]
    shared = [i for word, i in target.tokenizer.get_vocab().items() if word in half.tokenizer.get_vocab()]
    assert len(shared) == 53 and q_V[shared].sum().item() == pytest.approx(1.0) and set(q_V.nonzero()[:, 0].tolist()) <= set(shared)
    assert set(tree.tokens_BN[0, 1:].tolist()) <= set(shared)


@pytest.fixture(scope="module")
def letters(make_target) -> Target:
    """A model that knows w6 ... w59 and spells every other word letter by letter."""
    known = ["?", "<end>", *"w0123456789", *(f"w{i}" for i in range(6, 60))]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(known)}, [], unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", eos_token="<end>")
    return Target(model=make_target(vocab=len(known), seed=3, max_position_embeddings=400).model, tokenizer=tokenizer, name="letters")


@pytest.mark.parametrize("shape", [Chain(3), BUSH], ids=str)
def test_spelled_text_outgrows_the_cache(target: Target, letters: Target, talk, shape) -> None:
    """Texts three times as long as the target's, in rows that outgrow the first cache one after another."""
    prompts = [[60 + (7 * i * i) % 40 for i in range(n)] for n in (34, 3, 21)]
    session = SmallModel(letters, "intersection").start(target, 3, 40)
    for new in (0, 2, 5, 30, 80):
        ids = [p + [60 + (3 * i) % 40 for i in range(new)] for p in prompts]
        tree = session.propose(Round(ids, shape, vocab_size=100))
        assert tree.num_B.tolist() == [1 + shape.budget] * 3
        session.rewind()
    assert len(talk) == 5 and session._held == [342, 249, 303] and session._cache.max_length > 342


def test_neighbours_text_decides_how_long_a_row_is_drafted(target: Target, letters: Target) -> None:
    """At temperature 1 other drafts are other tokens; the row's text passes twice its tokens and, at the end, the model's positions."""
    drafter = SmallModel(letters, "intersection")
    prompts = [[60 + (7 * i * i) % 40 for i in range(n)] for n in (110, 5)]

    def answers(prompts: list[list[int]], seeds: list[int]) -> list[tuple]:
        settings = {"shape": Chain(3), "temperature": 1.0, "eos": None, "max_new_tokens": 40}
        rows = generate(target, prompts, drafter=drafter, seed=seeds, **settings).rows
        return [(row.tokens, [r.drafted for r in row.rounds]) for row in rows]

    alone = [answers([p], [seed])[0] for p, seed in zip(prompts, (5, 6), strict=True)]
    assert answers(prompts, [5, 6]) == alone
    assert alone[0][1][-1] == 0 and alone[0][1].count(3) > 10 and min(alone[1][1]) == 3


@pytest.mark.parametrize(("rows", "small_rows"), [(100, 128), (112, 100), (112, 128)])
def test_padding_rows_are_drafted(make_target, target: Target, fresh_greedy, rows: int, small_rows: int) -> None:
    """The same tokenizer over embeddings of other sizes: only ids that it knows are drafted, and q fits the target's vocabulary."""
    big, small = (replace(make_target(vocab=n, seed=n), tokenizer=target.tokenizer) for n in (rows, small_rows))
    with torch.no_grad():
        for each in (big, small):
            each.model.lm_head.weight[100:] = each.model.lm_head.weight[:100].mean(0) * 9  # attractive, and unknown to the tokenizer
    for settings in ({}, {"temperature": 1.0}):
        result = generate(big, PROMPTS, drafter=SmallModel(small), shape=Chain(2), eos=None, max_new_tokens=8, **settings)
        assert all(max(row.tokens) < 100 for row in result.rows)
    drafted = SmallModel(small).start(big, 1, 60).propose(Round([[9, 55, 31]], Tree.dynamic(40, 2, 80))).tokens_BN
    assert int(drafted.max()) < 100
