"""DM1: a template without generation tags masks all or nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from spectrain.data.masking import encode_chat

TURN = "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <end> {% endfor %}"
PROMPT = "{% if add_generation_prompt %}<start> assistant {% endif %}"
TAGGED = (
    "{% for m in messages %}<start> {{ m.role }} {% if m.role == 'assistant' %}{%- generation -%} {{ m.content }} <end>"
    "{%- endgeneration -%}{% else %}{{ m.content }} <end>{% endif %}{{ ' ' }}{% endfor %}" + PROMPT
)
RED_BLUE = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]


@pytest.mark.parametrize("template", [TURN + PROMPT, TAGGED], ids=["none", "tags with whitespace control"])
def test_mask_is_all_ones_or_all_zeros(make_tokenizer: Callable[..., Any], template: str) -> None:
    """<start> user red <end> <start> assistant blue <end>: the answer and its closing token."""
    ids, mask = encode_chat(make_tokenizer(40, template=template), RED_BLUE)
    assert ids == [2, 4, 7, 1, 2, 5, 8, 1]
    assert mask == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("template", [TURN + "{# generation #}{% if add_generation_prompt %}<start> w9 {% endif %}", "<start> w9"])
def test_template_that_tells_no_answer_apart_is_taken(make_tokenizer: Callable[..., Any], template: str) -> None:
    with pytest.raises(ValueError, match="chat template.*(chat_template|leave the row out)"):
        encode_chat(make_tokenizer(40, template=template), RED_BLUE)
