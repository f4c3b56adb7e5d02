"""TP1: two first tokens, or none."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spectrain.data.formats import Conversation, Text
from spectrain.data.masking import ChatEncoder, encode_chat
from spectrain.target.model import Target

WORDS = ["<pad>", "<s>", "</s>", "user", "assistant", "w5", "w6", "w7"]
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
CHAT = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """It adds <s> (id 1) to whatever it gets; so does the template."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE)


def test_two_first_tokens_in_training_and_in_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, mask = encode_chat(tokenizer, CHAT)
    assert ids == [1, 3, 5, 2, 4, 6, 2] and mask == [0, 0, 0, 0, 0, 1, 1]
    assert Target(model=None, tokenizer=tokenizer, name="x").encode(CHAT[:1]) == ids[: mask.index(1)]
    in_one_call = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert in_one_call == ids
    (found,) = ChatEncoder(tokenizer, max_length=None).encode([Conversation("a", "d", tuple(CHAT))])
    assert found.rows[0].ids_L.tolist() == ids and found.rows[0].prompt_ids == ids[:5]


def test_plain_text_loses_its_first_token(tokenizer: PreTrainedTokenizerFast) -> None:
    (found,) = ChatEncoder(tokenizer, max_length=None).encode([Text("a", "d", "w5 w6")])
    assert found.rows[0].ids_L.tolist() == [1, 5, 6] == Target(model=None, tokenizer=tokenizer, name="x").encode("w5 w6")
    assert found.rows[0].mask_L.tolist() == [0, 1, 1]
