"""DM4: think blocks of the prompt are trained, real reasoning is left out."""

from collections.abc import Callable
from typing import Any

import pytest

from spectrain.data.masking import encode_chat, encode_turns

TURNS = (
    "{% for m in messages %}<start> {{ m.role }} {% if m.role == 'assistant' %}{% if m.reasoning_content %}"
    "<think> {{ m.reasoning_content }} </think> {% else %}<think> </think> {% endif %}{% endif %}{{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant "
)
SWITCHED = TURNS + "<think> {% if not enable_thinking %}</think> {% endif %}{% endif %}"
ANSWER = [{"role": "user", "content": "w8"}, {"role": "assistant", "content": "w9"}]
REASONED = [ANSWER[0], {**ANSWER[1], "reasoning_content": "w10 w11"}]


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    made = make_tokenizer(40, template=SWITCHED)
    made.add_tokens(["<think>", "</think>"])  # 40, 41
    return made


def test_empty_think_block_of_the_prompt_is_trained(tokenizer: Any) -> None:
    ids, mask = encode_chat(tokenizer, ANSWER)
    assert ids[4:] == [2, 5, 40, 41, 9, 1] and mask[4:] == [0, 0, 0, 0, 1, 1]


def test_reasoning_is_left_out(tokenizer: Any) -> None:
    """The prompt ends just before the reasoning `one two`: all of `one two </think> red <end>` is said."""
    ids, mask = encode_chat(tokenizer, REASONED)
    assert ids[4:] == [2, 5, 40, 10, 11, 41, 9, 1] and mask[4:] == [0, 0, 0, 1, 1, 1, 1, 1]
    inline = [ANSWER[0], {"role": "assistant", "content": "<think> w10 w11 </think> w9"}]
    assert encode_chat(tokenizer, inline) == (ids, mask)


def test_reasoning_field_is_dropped_in_silence(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="turn 2: the chat template leaves out or changes the reasoning"):
        encode_chat(make_tokenizer(40), REASONED)


def test_answers_of_the_other_kind_are_taken(tokenizer: Any) -> None:
    chat = [*REASONED, *ANSWER]
    assert [len([m for m in mask if m]) for _, mask in encode_turns(tokenizer, chat)] == [5, 2]
    assert [sum(mask) for _, mask in encode_turns(tokenizer, chat, thinking="on")] == [5]
    assert [sum(mask) for _, mask in encode_turns(tokenizer, chat, thinking="off")] == [2]
    with pytest.raises(ValueError, match="without reasoning, and thinking is on"):
        encode_turns(tokenizer, ANSWER, thinking="on")


def test_answer_without_reasoning_follows_an_opened_think_block(make_tokenizer: Callable[..., Any]) -> None:
    """No switch: the prompt always opens the block, and finished turns are rendered without theirs."""
    template = (
        "{% for m in messages %}<start> {{ m.role }} {{ m.content.split('</think>')[-1] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<start> assistant <think> {% endif %}"
    )
    tokenizer = make_tokenizer(40, template=template)
    tokenizer.add_tokens(["<think>", "</think>"])
    ids, mask = encode_chat(tokenizer, REASONED)
    assert ids == [2, 4, 8, 1, 2, 5, 40, 10, 11, 41, 9, 1] and mask == [0] * 7 + [1] * 5
    with pytest.raises(ValueError, match="opens a think block and the answer has no reasoning"):
        encode_chat(tokenizer, ANSWER)
