"""Which tokens are supervised: those that the model itself would have said.

Most tests use a tokenizer of bytes, so that a mask reads as text: `said` joins what is supervised, with | between spans.
"""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spectrain.data.formats import Conversation
from spectrain.data.masking import encode_chat, encode_conversation

SPECIAL = ["<pad>", "<end>", "<start>", "<eos>", "<bos>"]
CHATML = (
    "{% if messages[0].role != 'system' %}<start>system\nbe kind<end>\n{% endif %}"
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content | trim")
TAGGED = (
    "{% for m in messages %}<start>{{ m.role }}{{ '\n' }}{%- if m.role == 'assistant' -%}{% generation %}{{ m.content }}<end>"
    "{%- endgeneration -%}{% else %}{{ m.content }}<end>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant{{ '\n' }}{% endif %}"
)
NEXT_ENDS = (
    "{% for m in messages %}{% if not loop.first %}<end>{% endif %}<start>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<end><start>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<bos>[I] {{ m.content }} [/I]{% else %} {{ m.content }} <end>{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}<start>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('|')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
FORCED = (
    "{% for m in messages %}<start>{{ m.role }}\n{% if m.role == 'assistant' %}[no thought]{% endif %}{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n[no thought]{% endif %}"
)


def byte_tokenizer(template: str, *, eos: str = "<end>", trim_offsets: bool = False, merges: bool = False) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "Ġ"), ("ĠĠ", "Ġ"), ("Ġ", "r"), ("Ċ", "Ċ")] if merges else []
    words = [*SPECIAL, *letters, *(a + b for a, b in pairs)]
    inner = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token=eos, chat_template=template)


def chat(*turns: str) -> list[dict[str, str]]:
    """Turns `u...`, `a...` and `s...`, the role in front."""
    names = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": names[t[0]], "content": t[1:]} for t in turns]


def said(tokenizer, ids, mask) -> str:
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    spans, before = [], 0
    for i, m in zip(ids, mask, strict=True):
        if m and not before:
            spans.append([])
        if m:
            spans[-1].append(i)
        before = m
    return "|".join(tokenizer.decode(span) for span in spans)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, chat("ured", "ablue"), "blue<end>"),
        (CHATML, chat("sbe rude", "ured", "ablue"), "blue<end>"),
        (CHATML, chat("ured", "ablue", "ugreen", "awhite"), "blue<end>|white<end>"),
        (CHATML, chat("ured", "ablue", "ugreen"), "blue<end>"),
        (CHATML, chat("ured", "ablue\n    return  1\n"), "blue\n    return  1\n<end>"),
        (CHATML, chat("ured", "a    indented"), "    indented<end>"),
        (CHATML, chat("ured", "a<end> is a word"), "<end> is a word<end>"),
        (CHATML, chat("uassistant\nblue", "ablue"), "blue<end>"),
        (CHATML, chat("ured", "a😀 é"), "😀 é<end>"),
        (TRIMS, chat("u red ", "a\n blue \n", "u g ", "a w "), "blue<end>|w<end>"),
        (TAGGED, chat("ured", "ablue"), "blue<end>"),
        (NEXT_ENDS, chat("ured", "ablue", "ugreen", "awhite"), "blue<end>|white"),
        (LLAMA2, chat("ured", "ablue", "ugreen", "awhite"), " blue <end>| white <end>"),
        (FORCED, chat("ured", "ablue"), "blue<end>"),
        (CHATML, chat("abe kind", "ured", "awhite"), "be kind<end>|white<end>"),
    ],
)
def test_other_tokens_are_supervised(template: str, messages, expected: str, trim_offsets: bool, merges: bool) -> None:
    """DM1, DM3, DM4: content and terminator of every assistant turn, nothing of the template around them."""
    tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets, merges=merges)
    ids, mask = encode_chat(tokenizer, messages)
    assert said(tokenizer, ids, mask) == expected
    assert ids == tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("eos", ["<end>", "<eos>"])
def test_newline_behind_the_terminator_is_supervised(eos: str) -> None:
    """DM3: also where the tokenizer's own end is another token than the template's terminator."""
    tokenizer = byte_tokenizer(CHATML, eos=eos)
    assert said(tokenizer, *encode_chat(tokenizer, chat("ured", "ablue", "ugreen", "awhite"))) == "blue<end>|white<end>"


def test_template_without_terminator_supervises_less_than_the_answer() -> None:
    tokenizer = byte_tokenizer(PLAIN, eos="<eos>")
    assert said(tokenizer, *encode_chat(tokenizer, chat("ured", "ablue"))) == "blue\n\n"


def test_rewritten_turn_is_supervised_as_it_was_never_said() -> None:
    """Earlier turns lose their thoughts: only what reads as it did when it was said counts."""
    tokenizer = byte_tokenizer(THINKS)
    assert said(tokenizer, *encode_chat(tokenizer, chat("ured", "athink|blue", "ugreen", "athink|white"))) == "think|white<end>"


def test_template_that_does_not_continue_its_prompt_is_masked_anyhow() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("<start>assistant\n{% endif %}", "<start>assistant\n[think]{% endif %}"))
    with pytest.raises(ValueError, match="turn 2: the chat template does not continue its generation prompt"):
        encode_chat(tokenizer, chat("ured", "ablue"))


@pytest.mark.parametrize(("max_length", "expected"), [(10, 4), (14, 8), (99, 8), (7, 1)])
def test_cut_turn_loses_its_mask(make_tokenizer, max_length: int, expected: int) -> None:
    """DM2: an assistant turn of tokens 6 ... 13, cut."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<start> user {{ m.content }} <end> <start> assistant {% else %}"
        "{{ m.content }} <end>{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(40, template=template)
    messages = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8 w9 w10 w11 w12 w13 w14"}]
    ids, mask = encode_chat(tokenizer, messages, max_length=max_length)
    assert len(ids) == len(mask) == min(14, max_length)
    assert mask == [0] * 6 + [1] * expected


def test_one_token_turn_swallows_the_rest(make_tokenizer) -> None:
    """DM2: a first assistant turn of one token, then seven tokens of the user."""
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    messages = [{"role": "assistant", "content": "w8"}, {"role": "user", "content": "w9 w10 w11 w12 w13 w14 w15"}]
    assert encode_chat(make_tokenizer(40, template=template), messages)[1] == [1] + [0] * 7


def test_spaces_behind_an_answer_are_supervised_as_the_next_token(make_tokenizer) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    messages = [{"role": "user", "content": "w7 "}, {"role": "assistant", "content": "w8   "}, {"role": "user", "content": "w9"}]
    ids, mask = encode_chat(make_tokenizer(40, template=template), messages)
    assert [i for i, m in zip(ids, mask, strict=True) if m] == [8]


@pytest.mark.parametrize("messages", [chat("ured"), chat("ured", "a")])
def test_row_without_anything_to_learn_is_made(messages) -> None:
    tokenizer = byte_tokenizer(PLAIN.replace("\n\n", ""), eos="<eos>")
    with pytest.raises(ValueError, match="no token of an assistant turn"):
        encode_chat(tokenizer, messages)
    with pytest.raises(ValueError, match="max_length"):
        encode_chat(byte_tokenizer(CHATML), chat("ured", "ablue"), max_length=20)


def conversation(messages, reason: str = "stop") -> Conversation:
    return Conversation(id="x", domain="chat", messages=tuple(messages), finish_reason=reason)


@pytest.mark.parametrize(("template", "eos", "reason", "expected"), [
    (CHATML, "<end>", "stop", "blue<end>|white<end>"), (CHATML, "<end>", "length", "blue<end>|white"),
    (CHATML, "<eos>", "stop", "blue<end>|white<end>"), (CHATML, "<eos>", "length", "blue<end>|white"),
    (NEXT_ENDS, "<end>", "length", "blue<end>|white"),
])  # fmt: skip
def test_answer_that_was_cut_off_learns_to_stop(template: str, eos: str, reason: str, expected: str) -> None:
    """DM3: finish reason `length`: no terminator that the model never said."""
    tokenizer = byte_tokenizer(template, eos=eos)
    row = encode_conversation(tokenizer, conversation(chat("ured", "ablue", "ugreen", "awhite"), reason))
    assert said(tokenizer, row.ids_L, row.mask_L) == expected
    assert row.supervised == sum(row.mask_L) and row.id == "x" and row.domain == "chat"


def test_long_row_is_not_cut() -> None:
    tokenizer = byte_tokenizer(CHATML)
    row = encode_conversation(tokenizer, conversation(chat("ured", "ablue"), "length"), max_length=41)
    whole = encode_conversation(tokenizer, conversation(chat("ured", "ablue"), "length"))
    assert row.ids_L == whole.ids_L[:41] and row.mask_L == whole.mask_L[:41] and len(row.ids_L) < len(whole.ids_L)
    with pytest.raises(ValueError, match="max_length 10"):
        encode_conversation(tokenizer, conversation(chat("ured", "ablue")), max_length=10)


def test_turns_that_the_template_refuses_are_a_traceback() -> None:
    refuses = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refuses the turns user, assistant: roles must alternate"):
        encode_chat(byte_tokenizer(refuses), chat("ured", "ablue"))


def test_two_first_tokens() -> None:
    """TP1: template and tokenizer both write <bos>; ids are those of the rendered text."""
    tokenizer = byte_tokenizer("<bos>" + CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 4)])
    ids, _ = encode_chat(tokenizer, chat("ured", "ablue"))
    assert ids.count(4) == 1 and ids[0] == 4


def test_empty_answer_is_supervised_at_its_end() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert said(tokenizer, *encode_chat(tokenizer, chat("ured", "a"))) == "<end>"
    assert isinstance(
        encode_conversation(tokenizer, SimpleNamespace(id="1", domain="d", messages=chat("ur", "ab"), finish_reason="stop")).ids_L, tuple
    )
