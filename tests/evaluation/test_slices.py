"""Slices of an arm's rounds: in which a round falls, and what is left out."""

from typing import Any

import pytest

from spectrain.decoding.rows import StepRecord
from spectrain.evaluation.measure import Record
from spectrain.evaluation.slices import slices


def record(*rounds: tuple[int, int], id: str = "p", context: int = 100, **changes: Any) -> Record:
    """An answer by rounds (accepted, committed)."""
    steps = [StepRecord(4, accepted, committed, {}) for accepted, committed in rounds]
    tokens = list(range(1 + sum(committed for _, committed in rounds)))
    return Record("a", "tau", id, "d", tokens, 0.0, 0.0, steps, prompt_tokens=context, **changes)


def shown(cells: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(cell["label"], cell["tokens"], cell["rounds"]) for cell in cells]


def test_round_falls_into_the_slice_of_its_end() -> None:
    """The first round has one token in hand; one that begins at token 16 and ends at 20 is of the first 16."""
    cells = slices([record(*[(4, 5)] * 3, (3, 4), (0, 1), (1, 2), *[(0, 1)] * 11, (3, 4))])["position"]
    assert shown(cells) == [("1–16", 15 + 4, 4), ("17–32", 1 + 2 + 10, 12), ("33–64", 1 + 4, 2)]


@pytest.mark.parametrize(("context", "label"), [(1, "1–128"), (127, "1–128"), (128, "129–256"), (255, "129–256"), (256, "257–512"),
                                                (1023, "513–1024"), (1024, "1025–2048")])  # fmt: skip
def test_context_is_that_of_another_power_of_two(context: int, label: str) -> None:
    """The prompt's tokens and the one in hand."""
    assert [cell["label"] for cell in slices([record((1, 2), context=context)])["context"]] == [label]


def test_context_grows_unseen_or_is_guessed() -> None:
    grown = slices([record((4, 5), (4, 5), context=126)])["context"]
    assert shown(grown) == [("1–128", 5, 1), ("129–256", 5, 1)]
    assert slices([record((4, 5), context=0)])["context"] == [], "a record of a time when it was not written"


def test_buckets_are_sorted_as_words() -> None:
    cells = slices([record(*[(0, 1)] * 300, context=3000), record((0, 1), id="q", context=90)])
    assert [cell["label"] for cell in cells["position"]] == ["1–16", "17–32", "33–64", "65–128", "129–256", "257–512"]
    assert [cell["label"] for cell in cells["context"]] == ["1–128", "2049–4096"]


def test_part_is_that_of_the_token_in_hand() -> None:
    """4 tokens of thinking: the round with 3 in hand drafts the fourth, the one with 4 in hand the answer's first."""
    cells = slices([record((1, 2), (0, 1), (2, 3), think_tokens=4)])["part"]
    assert shown(cells) == [("think", 3, 2), ("answer", 3, 1)]
    mixed = slices([record((1, 2), think_tokens=3), record((3, 4), id="q")])["part"]
    assert shown(mixed) == [("think", 2, 1), ("answer", 4, 1)], "who does not think answers"
    assert "part" not in slices([record((1, 2))])


def test_entropy_is_that_of_another_token() -> None:
    """Rounds begin with tokens 1, 3 and 4 in hand, so behind the tokens 0, 2 and 3."""
    one = record((1, 2), (0, 1), (0, 1))
    found = slices([one], entropies={("p", 0): (one.tokens, [0.05, 9.0, 0.1, 2.5])})["entropy"]
    told = [(cell["label"], cell["tau"], cell["first"]) for cell in found]
    assert told == [("0–0.1", 2.0, 1.0), ("0.1–0.5", 1.0, 0.0), ("> 2", 1.0, 0.0)]
    assert "entropy" not in slices([one]) and slices([one], entropies={})["entropy"] == []


def test_entropy_of_another_answer_is_taken() -> None:
    """The answers part at token 3 (a numeric tie): rounds behind it have no entropy. Another turn has entropies of its own."""
    one, other = record((1, 2), (0, 1), (0, 1)), [0, 1, 2, 99, 4]
    known: dict[tuple[str, int], Any] = {("p", 0): (other, [0.3, 9.0, 0.3, 0.3])}
    assert shown(slices([one], entropies=known)["entropy"]) == [("0.1–0.5", 3, 2)]
    assert slices([record((1, 2), turn=1)], entropies=known)["entropy"] == []


def test_rounds_of_one_prompt_are_an_interval() -> None:
    alone = slices([record((1, 2), (0, 1)), record((0, 1), turn=1)], entropies={})
    assert alone["position"][0]["prompts"] == 1 and alone["position"][0]["lo"] is None
    two = [record((3, 4)), record((0, 1), id="q")]
    cell = slices(two, entropies={(r.id, 0): (r.tokens, [0.7] * 9) for r in two})["entropy"][0]
    assert (cell["label"], cell["prompts"], cell["lo"], cell["tau"], cell["hi"]) == ("0.5–1", 2, 1.0, 2.5, 4.0)
    assert (cell["first_lo"], cell["first"], cell["first_hi"]) == (0.0, 0.5, 1.0)
