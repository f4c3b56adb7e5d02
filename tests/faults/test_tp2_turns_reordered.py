"""TP2: turns are gathered role by role."""

from collections.abc import Callable
from typing import Any

import pytest

from spectrain.data.formats import Conversation
from spectrain.data.masking import ChatEncoder

NAMES = {"s": "system", "u": "user", "a": "assistant"}
TEMPLATE = (
    "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)


def spoken(*turns: str) -> Conversation:
    """`u7`: the user says w7."""
    return Conversation("x", "d", tuple({"role": NAMES[turn[0]], "content": f"w{turn[1:]}"} for turn in turns))


@pytest.mark.parametrize("plans", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("rows", ["auto", "turn"])
@pytest.mark.parametrize(("turns", "supervised"), [
    (("u7", "a8", "u9", "a10"), [8, 10]), (("s6", "u7", "a8", "u9", "a10"), [8, 10]),
    (("u7", "a8", "u9"), [8]),  # unequal counts: the last question is nobody's answer
    (("u7", "u9", "a8", "a10"), [8, 10]),
])  # fmt: skip
def test_turns_are_not_in_spoken_order(
    make_tokenizer: Callable[..., Any], turns: tuple[str, ...], supervised: list[int], rows: str, plans: bool
) -> None:
    encoder = ChatEncoder(make_tokenizer(40, template=TEMPLATE), max_length=None, rows=rows, plans=plans)
    _, found = encoder.encode([spoken(*turns)] * 2)
    said = [int(turn[1:]) for turn in turns]
    for row in found.rows:
        words = [i for i in row.ids_L.tolist() if i >= 6]
        assert words == said[: len(words)]
    assert [i for row in found.rows for i in row.supervised_ids.tolist() if i >= 6] == supervised
    if rows == "auto":
        assert len(found.rows) == 1 and [i for i in found.rows[0].ids_L.tolist() if i >= 6] == said
