"""Duplicates, evaluation prompts, the draw and the split."""

from itertools import pairwise

import numpy as np
import pytest

from spectrain.data.filters import (
    TRAIN,
    UNUSED,
    VALIDATION,
    Questions,
    Seen,
    asked_texts,
    choose,
    clusters,
    content_key,
    key64,
    quotas,
    shingles,
    split_size,
)
from spectrain.data.formats import Conversation, Prompt, Text, Tokens


def keys_of(count: int) -> np.ndarray:
    return np.array([key64(str(i).encode()) for i in range(count)], dtype=np.uint64)


def test_seen_is_a_set_that_stays_small() -> None:
    seen = Seen()
    keys = [key64(str(i % 3000).encode()) for i in range(9000)]
    assert [seen.add(key) for key in keys] == [i < 3000 for i in range(9000)]
    assert len(seen) == 3000
    assert len(seen._table) * 8 <= 28 * 3000


def test_seen_tells_keys_apart_that_share_a_place() -> None:
    seen = Seen()
    keys = [i << 52 | 1 for i in range(200)]
    assert all(seen.add(key) for key in keys)
    assert not any(seen.add(key) for key in keys)


def test_content_is_what_was_said_and_not_how_it_was_filed() -> None:
    said = ({"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"})
    turned = tuple(dict(reversed(m.items())) for m in said)
    first = content_key(Conversation(id="a", domain="x", messages=said))
    assert first == content_key(Conversation(id="b", domain="y", messages=turned))
    others = [
        Conversation(id="a", domain="x", messages=({"role": "user", "content": "red "}, said[1])),
        Conversation(id="a", domain="x", messages=said, tools=({"name": "f"},)),
        Prompt(id="a", domain="x", turns=("red",), source=""), Text(id="a", domain="x", text="red"),
        Tokens(id="a", domain="x", ids=[1, 2], mask=[0, 1]), Tokens(id="a", domain="x", ids=[1, 2], mask=[1, 1]),
    ]  # fmt: skip
    assert len({first, *map(content_key, others)}) == len(others) + 1


QUESTION = ["unrelated first turn", "A train leaves at noon and runs at forty miles an hour; when does it come to the sea?"]
PASSAGE = " ".join(f"word{i}" for i in range(180))


@pytest.mark.parametrize(
    ("turn", "fault"),
    [
        ("a train leaves at noon, and runs at forty miles an hour. When does it come to the sea", "exact"),
        ("A train leaves at noon and runs at forty miles an hour; when does it come to the lake?", "near"),
        ("When does a train that leaves at noon at forty miles an hour come to the lake or to the sea?", ""),
        ("Unrelated, first turn!", "exact"),
        ("…", ""),
        (f"{PASSAGE} {QUESTION[1]} Say it in one line.", "near"),  # a small part of the turn, and all of the question
        (f"{PASSAGE} {QUESTION[1].removesuffix(' sea?')} lake?", ""),
    ],
)
def test_evaluation_prompts_are_found_again(turn: str, fault: str) -> None:
    questions = Questions([QUESTION, ["?!"]], near=0.35)
    assert questions.fault(["something else", turn]) == fault


def test_shingles_are_runs_of_eight_words() -> None:
    assert shingles("One, two THREE four-five six_7 eight. Nine") == {
        "one two three four five six 7 eight", "two three four five six 7 eight nine",
    }  # fmt: skip
    assert shingles("one two three four five six seven") == set()


def test_shingles_of_two_questions_do_not_add_up() -> None:
    words = [f"w{i}" for i in range(40)]
    questions = Questions([[" ".join(words[:12])], [" ".join(words[20:32])]], near=0.4)
    turn = " ".join([*words[:11], *words[20:31]])  # four shingles of fifteen in each
    assert questions.fault([turn]) == ""
    assert Questions([[" ".join(words[:12]), " ".join(words[20:32])]], near=0.4).fault([turn]) == "near"


def test_only_what_a_user_asks_is_compared() -> None:
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"})
    assert asked_texts(Conversation(id="", domain="", messages=messages)) == ["u"]
    assert asked_texts(Text(id="", domain="", text="t")) == ["t"]
    assert asked_texts(Tokens(id="", domain="", ids=[1], mask=[1])) == []


@pytest.mark.parametrize(("limit", "expected"), [(10, [6, 3, 1]), (1, [1, 0, 0]), (99, [60, 30, 9]), (200, [60, 30, 9])])
def test_quotas_follow_the_counts(limit: int, expected: list[int]) -> None:
    assert list(quotas({"a": 60, "b": 30, "c": 9}, limit).values()) == expected


def test_conversations_with_an_equal_row_are_one_cluster() -> None:
    conversation = np.array([0, 0, 1, 2, 2, 3])
    keys = np.array([5, 6, 7, 6, 8, 8], dtype=np.uint64)
    assert clusters(conversation, keys, 4).tolist() == [0, 1, 0, 0]


def chosen(rows_a: int = 1, count: int = 200, **settings: object) -> np.ndarray:
    """part_R of conversations of `rows_a` rows each, the first half of domain 0."""
    conversation = np.repeat(np.arange(count), rows_a)
    keys = keys_of(count * rows_a)
    defaults = {"max_rows": None, "validation": 0.0, "per_domain": 0, "prompt_tokens": None, "seed": 0}
    domain, prompt = (np.arange(count) >= count // 2).astype(int), np.arange(count) % 10
    return choose(conversation, keys, keys[::rows_a], domain, prompt, **{**defaults, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("limit", [1, 50, 151, 10_000])
def test_max_rows_is_exact_and_every_domain_has_its_share(rows: int, limit: int) -> None:
    part = chosen(rows, max_rows=limit)
    assert (part == TRAIN).sum() == min(limit, 200 * rows)
    halves = (part[: 100 * rows] == TRAIN).sum(), (part[100 * rows :] == TRAIN).sum()
    assert abs(int(halves[0]) - int(halves[1])) <= 1


def test_a_smaller_draw_is_part_of_a_larger_one() -> None:
    draws = [np.flatnonzero(chosen(max_rows=n) == TRAIN) for n in (20, 60, 120)]
    for small, large in pairwise(draws):
        assert set(small) < set(large)
    assert len(set(draws[0]) & set(range(20))) < 20  # not the head of the input


def test_the_split_is_of_whole_conversations_and_hangs_on_the_seed() -> None:
    parts = [chosen(3, validation=0.25, seed=seed).reshape(-1, 3) for seed in (0, 1)]
    for part in parts:
        assert (part == part[:, :1]).all()
        assert (part[:, 0] == VALIDATION).sum() == 50
    assert (parts[0] != parts[1]).any()


def test_validation_by_domain_comes_on_top_of_max_rows() -> None:
    part = chosen(3, max_rows=40, per_domain=4, prompt_tokens=2).reshape(-1, 3)
    out = np.flatnonzero(part[:, 0] == VALIDATION)
    assert (out < 100).sum() == 4 and (out >= 100).sum() == 4
    assert (out % 10 <= 2).all() and (part[out] == VALIDATION).all()
    assert (part == TRAIN).sum() == 40
    assert (part == UNUSED).sum() == 600 - 40 - 24


@pytest.mark.parametrize("settings", [{"validation": 0.43}, {"per_domain": 7}, {"validation": 0.3, "max_rows": 333}])
def test_conversations_that_share_a_row_never_stand_on_both_sides(settings: dict[str, float]) -> None:
    count = 300
    keys = keys_of(2 * count)
    keys[1::2] = keys_of(3 * count)[2 * count :][np.arange(count) % 60]  # the second row of every conversation is that of four others
    domain, prompt = np.arange(count) % 7, np.zeros(count, dtype=int)
    full = {"max_rows": None, "validation": 0.0, "per_domain": 0, "prompt_tokens": None, "seed": 3, **settings}
    part = choose(np.arange(2 * count) // 2, keys, keys[::2], domain, prompt, **full)  # type: ignore[arg-type]
    sides = [set(keys[part == side]) for side in (TRAIN, VALIDATION)]
    assert sides[0] and sides[1] and not sides[0] & sides[1]
    assert (part != UNUSED).sum() == settings.get("max_rows", 2 * count)


def test_the_size_of_a_split_is_exact() -> None:
    assert split_size(10, 0.1) == 1
    assert split_size(1000, 0.29) == 290  # 1000 * (1 - 0.29) is 710.0000000000001 or less in floats
    assert split_size(0, 0.5) == 0
