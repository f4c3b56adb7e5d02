"""The generator: the target's own tokens, whatever drafts them."""

import copy

import pytest
import torch

from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram
from spectrain.target.model import Target

PROMPTS = [[7], [9, 55, 31], [8, 77, 20, 20, 64, 8, 77], [50, 51, 52, 7, 50, 51, 52, 7, 50, 51, 52, 7]]
NEW = 24


@pytest.fixture(scope="module")
def answers(target: Target, fresh_greedy) -> list[list[int]]:
    """Greedy answers without cache, batch or spectrain's attention."""
    return [fresh_greedy(target, prompt, NEW) for prompt in PROMPTS]


def tokens(result) -> list[list[int]]:
    return [row.tokens for row in result.rows]


def greedy(target: Target, prompts, **settings):
    return generate(target, prompts, **{"eos": None, "max_new_tokens": NEW, **settings})


SHAPES = [
    Chain(1), Chain(4), Tree.dynamic(1, 1, 1), Tree.dynamic(4, 1, 4), Tree.dynamic(1, 4, 4), Tree.dynamic(3, 3, 1), Tree.dynamic(3, 4, 9),
    Tree.dynamic(60, 2, 30), Tree.dynamic(2, 3, 200),
]  # fmt: skip


def test_plain_decoding_is_not_the_targets(target: Target, answers) -> None:
    assert tokens(greedy(target, PROMPTS)) == answers
    assert [tokens(greedy(target, [p]))[0] for p in PROMPTS] == answers
    assert all(len(set(a)) > 5 for a in answers)  # or nothing is tested


def test_transformers_generate_says_something_else(target: Target, eager) -> None:
    model = eager(target)
    for prompt in PROMPTS[:3]:
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert tokens(greedy(target, [prompt], max_new_tokens=12))[0] == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("together", [True, False])
def test_head_changes_the_answer(target: Target, make_head, answers, shape, together: bool) -> None:
    drafter = HeadDrafter(make_head(target))
    for batch in [PROMPTS] if together else [PROMPTS[1:2]]:
        result = greedy(target, batch, drafter=drafter, shape=shape)
        expected = [answers[PROMPTS.index(p)] for p in batch]
        assert tokens(result) == expected
        for row in result.rows:
            assert sum(r.committed for r in row.rounds) == NEW - 1
            assert all(r.committed == r.accepted + 1 for r in row.rounds[:-1])
            assert all(1 <= r.drafted <= shape.budget for r in row.rounds)


@pytest.mark.parametrize("shape", [Chain(1), Chain(5), Tree.dynamic(2, 7, 1)], ids=str)
def test_ngram_changes_the_answer(target: Target, answers, shape) -> None:
    result = greedy(target, PROMPTS, drafter=NGram(shortest=1), shape=shape)
    assert tokens(result) == answers
    assert max(r.drafted for row in result.rows for r in row.rounds) == min(shape.depth, shape.budget)
    alone = [greedy(target, [p], drafter=NGram(shortest=1), shape=shape).rows[0] for p in PROMPTS]
    assert [[(r.drafted, r.accepted) for r in row.rounds] for row in result.rows] == [
        [(r.drafted, r.accepted) for r in row.rounds] for row in alone
    ]


@pytest.fixture(scope="module")
def following(answers):
    """The answer's next tokens after the committed ids of a row."""

    def after(ids: list[int], n: int) -> list[int]:
        at = max((i for i, p in enumerate(PROMPTS) if ids[: len(p)] == p), key=lambda i: len(PROMPTS[i]))
        done = len(ids) - len(PROMPTS[at])
        return answers[at][done : done + n]

    return after


def chain_of(drafts: list[int]) -> list[tuple[int, int]]:
    return [(token, n) for n, token in enumerate(drafts)]


def off(token: int) -> int:
    return (token + 1) % 100


def perfect_then_wrong(right: list[int], wrong_from: int) -> list[tuple[int, int]]:
    return chain_of([t if n < wrong_from else off(t) for n, t in enumerate(right)])


SCRIPTS = {
    "perfect": lambda right: chain_of(right),
    "wrong": lambda right: perfect_then_wrong(right, 0),
    "right, then wrong": lambda right: perfect_then_wrong(right, 2),
    "nothing": lambda right: [],
    # the right token twice, and what follows it under the second and under a wrong cousin only
    "duplicates": lambda r: [(off(r[0]), 0), (r[0], 0), (r[0], 0), (r[1], 1), (r[1], 3), (off(r[1]), 2)] if len(r) > 1 else [],
    "siblings": lambda r: [(off(r[0]), 0), (off(off(r[0])), 0), (r[0], 0), (98 if r[0] < 50 else 2, 0)] if r else [],
    # the right path last of all: 0 -> 2 -> 5 -> 6
    "late path": lambda r: [(off(r[0]), 0), (r[0], 0), (r[1], 1), (off(r[1]), 2), (r[1], 2), (r[2], 5)] if len(r) > 2 else [],
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("together", [True, False])
def test_scripted_draft_changes_the_answer(target: Target, answers, scripted, following, name: str, together: bool) -> None:
    drafter = scripted(lambda ids: SCRIPTS[name](following(ids, 6)))
    for batch in [PROMPTS] if together else [PROMPTS[:1], PROMPTS[2:3]]:
        result = greedy(target, batch, drafter=drafter, shape=Chain(6))
        assert tokens(result) == [answers[PROMPTS.index(p)] for p in batch]
        accepted = {r.accepted for row in result.rows for r in row.rounds[:-1]}
        best = {
            "perfect": {6},
            "wrong": {0},
            "right, then wrong": {2},
            "nothing": {0},
            "duplicates": {1},
            "late path": {3},
            "siblings": {1},
        }[name]
        assert accepted - {0} == best - {0}


def test_reaching_the_limit_in_a_large_block_overflows_the_cache(target: Target, answers, scripted, following) -> None:
    """The longest row ends with a whole block accepted and stays in the batch for another round."""
    longest = PROMPTS[3]
    drafter = scripted(lambda ids: chain_of(following(ids, 20)) if ids[:4] == longest[:4] else [])
    result = greedy(target, [*PROMPTS, *PROMPTS[:3]], drafter=drafter, shape=Chain(20), max_new_tokens=12)
    assert tokens(result) == [a[:12] for a in [*answers, *answers[:3]]]
    assert [r.committed for r in result.rows[3].rounds] == [11] and result.rows[3].rounds[0].accepted == 20


def test_wide_tree_overflows_the_heads_cache(target: Target, make_head, answers) -> None:
    result = greedy(target, PROMPTS[:1], drafter=HeadDrafter(make_head(target)), shape=Tree.dynamic(10, 7, 2), max_new_tokens=4)
    assert tokens(result) == [answers[0][:4]]


def test_rows_that_end_early_disturb_the_others(target: Target, make_head, answers) -> None:
    """End ids that stop the rows one after another: the batch shrinks, and rows wait in it."""
    ends = [a[n] for a, n in zip(answers, (0, 5, 11, 20), strict=True)]
    rows = PROMPTS * 2
    expected = [a[: min(i for i, t in enumerate(a) if t in ends) + 1] for a in answers * 2]
    assert len({len(e) for e in expected}) >= 3
    for drafter, shape in ((None, None), (NGram(), Chain(4)), (HeadDrafter(make_head(target)), Tree.dynamic(3, 3, 8))):
        result = greedy(target, rows, drafter=drafter, shape=shape, eos=ends)
        assert tokens(result) == expected
        assert [row.finish_reason for row in result.rows] == ["stop"] * 8


@pytest.mark.parametrize("pick", [None, [0], [0, 1], [2, 0]])
def test_end_ids_are_read_as_one_or_none(target: Target, answers, scripted, following, pick: list[int] | None) -> None:
    """SA2: no end id, one, several; in blocks of 6 as in plain decoding."""
    answer = answers[2]
    eos = None if pick is None else [answer[3 + 4 * i] for i in pick]
    end = NEW if eos is None else min(answer.index(e) for e in eos) + 1
    for drafter in (None, scripted(lambda ids: chain_of(following(ids, 6)))):
        row = greedy(target, [PROMPTS[2]], drafter=drafter, shape=Chain(6), eos=eos).rows[0]
        assert row.tokens == answer[:end] and row.finish_reason == ("length" if eos is None else "stop")
        assert row.text == target.tokenizer.decode(answer[: end - (eos is not None)])
        one = greedy(target, [PROMPTS[2]], drafter=drafter, shape=Chain(6), eos=eos[0] if eos else None).rows[0]
        assert one.tokens == answer[: (answer.index(eos[0]) + 1) if eos else NEW]


def test_default_end_is_not_the_models(make_target, scripted) -> None:
    target = make_target(seed=3)
    answer = greedy(target, [PROMPTS[1]]).rows[0].tokens
    target.model.generation_config.eos_token_id = [answer[6], answer[4]]
    assert (
        generate(target, [PROMPTS[1]], max_new_tokens=20).rows[0].tokens
        == answer[: min(answer.index(answer[6]), answer.index(answer[4])) + 1]
    )
    assert len(generate(target, [PROMPTS[1]], max_new_tokens=20, ignore_eos=True).rows[0].tokens) == 20
    with pytest.raises(ValueError, match="eos must be"):
        generate(target, [PROMPTS[1]], eos="none")


@pytest.mark.parametrize("limit", [1, 2, 5, 7, 8, 13])
def test_block_runs_past_the_limit(target: Target, answers, scripted, following, limit: int) -> None:
    drafter = scripted(lambda ids: chain_of(following(ids, 6)))
    result = greedy(target, PROMPTS, drafter=drafter, shape=Chain(6), max_new_tokens=limit)
    assert tokens(result) == [a[:limit] for a in answers]
    for row in result.rows:
        assert row.finish_reason == "length" and sum(r.committed for r in row.rounds) == limit - 1


def test_stop_string_inside_a_block_is_passed(target: Target, answers, scripted, following) -> None:
    answer = answers[3]
    words = target.tokenizer.decode(answer).split()
    stop = f"{words[8]} {words[9]}"
    before = " ".join(words)[: " ".join(words).index(stop)]
    end = len(before.split()) + 2
    pieces: list[tuple[list[int], str]] = []
    for drafter in (None, scripted(lambda ids: chain_of(following(ids, 6)))):
        pieces.clear()
        row = greedy(
            target,
            [PROMPTS[3]],
            drafter=drafter,
            shape=Chain(6),
            stop=["never", stop],
            stream=lambda b, new, text: pieces.append((new, text)),
        ).rows[0]
        assert row.finish_reason == "stop" and row.text == before and row.tokens == answer[:end]
        assert "".join(text for _, text in pieces) == before
        assert [t for new, _ in pieces for t in new] == answer[:end]


def test_stop_given_as_text_stops_at_its_letters(target: Target, answers) -> None:
    stop = target.tokenizer.decode(answers[3][5:7])
    assert greedy(target, [PROMPTS[3]], stop=stop).rows[0].tokens == greedy(target, [PROMPTS[3]], stop=[stop]).rows[0].tokens
    with pytest.raises(ValueError, match="empty"):
        greedy(target, [PROMPTS[3]], stop=["x", ""])


def test_stream_mixes_up_rows(target: Target, make_head, answers) -> None:
    seen: dict[int, list[int]] = {}
    text: dict[int, str] = {}

    def stream(row: int, new: list[int], piece: str) -> None:
        seen.setdefault(row, []).extend(new)
        text[row] = text.get(row, "") + piece

    ends = [answers[1][5], answers[2][11]]
    result = greedy(target, PROMPTS, drafter=HeadDrafter(make_head(target)), shape=Chain(3), stream=stream, eos=ends)
    assert [seen[b] for b in range(4)] == tokens(result) and [text[b] for b in range(4)] == [row.text for row in result.rows]


def test_answer_passes_the_models_length(make_target, make_head, scripted) -> None:
    target = make_target(max_position_embeddings=16)
    long = list(range(10, 22))
    plain = generate(target, [long, [5]], eos=None, max_new_tokens=40)
    assert [len(t) for t in tokens(plain)] == [4, 15] and plain.rows[0].finish_reason == "length"
    result = generate(target, [long, [5]], eos=None, max_new_tokens=40, drafter=HeadDrafter(make_head(target)), shape=Tree.dynamic(3, 6, 9))
    assert tokens(result) == tokens(plain)
    right = scripted(lambda ids: chain_of((tokens(plain)[1] + [3] * 30)[len(ids) - 1 :][:8] if ids[0] == 5 else [4] * 8))
    assert tokens(generate(target, [long, [5]], eos=None, max_new_tokens=40, drafter=right, shape=Chain(8))) == tokens(plain)
    with pytest.raises(ValueError, match="prompt 1 has 16 tokens, tiny takes 16"):
        generate(target, [[5], list(range(16))])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], []], "prompt 1 has no tokens"),
        ([""], "prompt 0 has no tokens"),
        ([[5, 100]], "outside 0..99"),
        ([[5, -1]], "outside 0..99"),
        ("w7 w8", "must be a list"),
        ([5, 6, 7], "must be a list"),
        ([{"role": "user", "content": "w7"}], "must be a list"),
    ],
)
def test_useless_prompt_is_taken(target: Target, prompts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(target, prompts)


def test_settings_that_cannot_work_are_taken(target: Target) -> None:
    for settings, message in (
        ({"max_new_tokens": 0}, "max_new_tokens"), ({"seed": [1, 2]}, "2 seeds for 1 prompts"), ({"temperature": -1.0}, "out of range"),
        ({"rule": "lottery"}, "unknown"), ({"rule": "greedy", "temperature": 1.0}, "temperature 0"), ({"top_p": 0.0}, "out of range"),
        ({"seed": 2**64}, "seed"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            generate(target, [[5]], **settings)
    assert generate(target, []).rows == []


def test_prompt_forms_are_read_differently(target: Target) -> None:
    chat = [{"role": "user", "content": "w9 w55"}]
    ids = target.encode(chat)
    first, second = greedy(target, [chat, "w9 w55"], max_new_tokens=6), greedy(target, [ids, [9, 55]], max_new_tokens=6)
    assert tokens(first) == tokens(second) and [row.prompt_tokens for row in first.rows] == [len(ids), 2]


def sampled(target: Target, prompts, **settings):
    return generate(target, prompts, **{"temperature": 1.0, "eos": None, "max_new_tokens": 16, **settings})


@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "ngram"])
def test_same_seed_gives_other_tokens(target: Target, make_head, kind: str) -> None:
    """CA2: twice, alone or beside other rows; another seed, other tokens."""
    head = HeadDrafter(make_head(target))
    drafter, shape = {
        "plain": (None, None),
        "chain": (head, Chain(3)),
        "tree": (head, Tree.dynamic(3, 3, 7)),
        "ngram": (NGram(), Chain(3)),
    }[kind]
    settings = {"drafter": drafter, "shape": shape}
    batch = sampled(target, PROMPTS, seed=7, **settings)
    assert tokens(sampled(target, PROMPTS, seed=7, **settings)) == tokens(batch)
    for row, prompt in zip(batch.rows, PROMPTS, strict=True):
        alone = sampled(target, [prompt], seed=row.seed, **settings).rows[0]
        assert alone.tokens == row.tokens and [r.accepted for r in alone.rounds] == [r.accepted for r in row.rounds]
    seeds = [row.seed for row in batch.rows]
    assert seeds[0] == 7 and tokens(sampled(target, PROMPTS[::-1], seed=seeds[::-1], **settings)) == tokens(batch)[::-1]
    assert tokens(sampled(target, PROMPTS, seed=8, **settings)) != tokens(batch)


def test_second_call_remembers_the_first(target: Target, make_head, scripted, answers) -> None:
    """CA2: A, B, A; then A after a call that failed in its middle; nothing of model or config has changed."""
    drafter, shape = HeadDrafter(make_head(target)), Tree.dynamic(3, 3, 7)
    config, weights = copy.deepcopy(target.model.config.to_dict()), {k: v.clone() for k, v in target.model.state_dict().items()}
    runs = [greedy(target, [p], drafter=drafter, shape=shape).rows[0] for p in (PROMPTS[2], PROMPTS[3], PROMPTS[2])]
    assert runs[0].tokens == runs[2].tokens and [r.accepted for r in runs[0].rounds] == [r.accepted for r in runs[2].rounds]
    with pytest.raises(RuntimeError, match="fell over"):
        greedy(target, PROMPTS, drafter=scripted(lambda ids: [(3, 0)], fails_at=3))
    assert tokens(greedy(target, PROMPTS)) == answers
    assert target.model.config.to_dict() == config
    assert all(torch.equal(v, weights[k]) for k, v in target.model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.model.modules())


@pytest.mark.parametrize("settings", [{"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.7}])
def test_sampling_setting_holds_for_the_first_token_of_a_block_only(make_table_target, scripted, settings) -> None:
    """SA1: p = (0.6, 0.3, 0.1) after every token; only token 0 may come, in every place of a block and of a tree."""
    target = make_table_target(torch.tensor([0.6, 0.3, 0.1, 1e-9]).log().expand(4, 4))
    for script in (lambda ids: [], lambda ids: chain_of([0, 1, 2, 0]), lambda ids: [(0, 0), (1, 0), (0, 1), (2, 1), (0, 3), (1, 5)]):
        result = sampled(target, [[1]] * 4, drafter=scripted(script), shape=Chain(6), max_new_tokens=50, **settings)
        assert {t for row in result.rows for t in row.tokens} == {0}


def test_ids_beyond_the_tokenizers_are_emitted(target: Target, make_tokenizer, answers) -> None:
    """VM2: the output has more rows than the tokenizer has ids."""
    small = Target(model=target.model, tokenizer=make_tokenizer(60), name="small")
    assert max(t for a in answers for t in a) >= 60
    for settings in ({}, {"drafter": NGram(shortest=1)}, {"temperature": 1.0}):
        assert max(t for row in greedy(small, PROMPTS, **settings).rows for t in row.tokens) < 60


def test_head_in_float32_stops_at_a_bfloat16_target(make_target, make_head) -> None:
    target = make_target()
    head = make_head(target)
    target.model.to(torch.bfloat16)
    plain = greedy(target, PROMPTS[1:2], max_new_tokens=8)
    result = greedy(target, PROMPTS[1:2], max_new_tokens=8, drafter=HeadDrafter(head), shape=Tree.dynamic(2, 3, 4))
    assert len(result.rows[0].tokens) == len(plain.rows[0].tokens) == 8
