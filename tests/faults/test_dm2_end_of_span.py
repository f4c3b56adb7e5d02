"""DM2: the end of an answer is looked up by a character that is not there."""

from collections.abc import Callable
from typing import Any

import pytest

from spectrain.data.formats import Conversation
from spectrain.data.masking import ChatEncoder, encode_chat

SIX_TO_THIRTEEN = (
    "{% for m in messages %}{% if m.role == 'user' %}<start> user {{ m.content }} <end>{% else %} <start> assistant {{ m.content }} <end>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %} <start> assistant{% endif %}"
)


@pytest.mark.parametrize(("max_length", "supervised"), [(10, 4), (14, 8), (99, 8), (7, 1)])
def test_turn_cut_at_the_length_limit_loses_its_mask(make_tokenizer: Callable[..., Any], max_length: int, supervised: int) -> None:
    """An answer of tokens 6 ... 13 and max_length 10: ones at 6 ... 9, and as many mask entries as ids."""
    tokenizer = make_tokenizer(40, template=SIX_TO_THIRTEEN)
    messages = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8 w9 w10 w11 w12 w13 w14"}]
    ids, mask = encode_chat(tokenizer, messages, max_length=max_length)
    assert len(ids) == len(mask) == min(14, max_length)
    assert mask == [0] * 6 + [1] * supervised
    (found,) = ChatEncoder(tokenizer, max_length=max_length).encode([Conversation("x", "d", tuple(messages))])
    assert isinstance(found, ValueError) is False and found.rows[0].mask_L.tolist() == mask and found.rows[0].ids_L.tolist() == ids


def test_one_token_turn_swallows_the_rest(make_tokenizer: Callable[..., Any]) -> None:
    """A first answer of one token, then seven tokens of the user: exactly one 1, at index 0."""
    tokenizer = make_tokenizer(40, template="{% for m in messages %}{{ m.content }} {% endfor %}")
    messages = [{"role": "assistant", "content": "w8"}, {"role": "user", "content": "w9 w10 w11 w12 w13 w14 w15"}]
    assert encode_chat(tokenizer, messages)[1] == [1] + [0] * 7


def test_spaces_behind_an_answer_are_taken_for_its_next_token(make_tokenizer: Callable[..., Any]) -> None:
    """The tokenizer drops spaces: no 1 behind the last real token."""
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    messages = [{"role": "user", "content": "w7 "}, {"role": "assistant", "content": "w8   "}, {"role": "user", "content": "w9"}]
    ids, mask = encode_chat(make_tokenizer(40, template=template), messages)
    assert ids == [4, 7, 5, 8, 4, 9] and mask == [0, 0, 0, 1, 0, 0]
