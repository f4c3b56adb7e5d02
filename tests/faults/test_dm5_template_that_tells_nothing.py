"""DM5: masks made for another model's separators give rows in which nothing counts."""

from collections.abc import Callable
from typing import Any

import pytest

from spectrain.data.formats import Conversation
from spectrain.data.masking import ChatEncoder

OTHERS = {
    "none": None, "ignores answers": "{% for m in messages if m.role == 'user' %}<start> user {{ m.content }} <end> {% endfor %}",
    "other prompt": (
        "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<start> w30 {% endif %}"
    ),
    "fails": "{{ messages[0].nothing.at.all }}", "no jinja": "{% for %}", "other roles": "{{ raise_exception('only human and gpt') }}",
}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "none"])
def test_encoder_is_made_for_a_template_that_tells_no_answer_apart(make_tokenizer: Callable[..., Any], kind: str) -> None:
    """It stops before the first of 100 conversations, and says what to do."""
    with pytest.raises(ValueError, match="tokenizer.chat_template"):
        ChatEncoder(make_tokenizer(40, template=OTHERS[kind]), max_length=None)


def test_hundred_conversations_without_a_template_are_hundred_rows_of_zeros(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(40)
    tokenizer.chat_template = None
    chats = [Conversation(str(i), "d", ({"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"})) for i in range(100)]
    found = ChatEncoder(tokenizer, max_length=None).encode(chats)
    assert len(found) == 100 and all(isinstance(one, ValueError) and "set tokenizer.chat_template" in str(one) for one in found)


def test_foreign_separators_in_the_text_are_separators(make_tokenizer: Callable[..., Any]) -> None:
    """Text rendered for another family stays the user's text: only our own answer counts."""
    text = "<|im_start|>user w7<|im_end|> <|im_start|>assistant w8<|im_end|>"
    messages = ({"role": "user", "content": text}, {"role": "assistant", "content": "w9"})
    (found,) = ChatEncoder(make_tokenizer(40), max_length=None).encode([Conversation("a", "d", messages)])
    assert found.rows[0].supervised_ids.tolist() == [9, 1]
