"""Which tokens are supervised: those that the model itself would have said.

Most tests use a tokenizer of bytes, so that a mask reads as text: `said` joins what is supervised, with | between spans.
"""

import re
from datetime import date
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spectrain.data.formats import Conversation, Prompt, Text, Tokens
from spectrain.data.masking import ChatEncoder, encode_chat, encode_conversation
from spectrain.data.templates import Template

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
        (CHATML, chat("uassistant\nblue", "ablue"), "blue<end>"),
        (CHATML, chat("ured", "a😀 é"), "😀 é<end>"),
        (TRIMS, chat("u red ", "a\n blue \n", "u g ", "a w "), "blue<end>|w<end>"),
        (TAGGED, chat("ured", "ablue"), "blue<end>"),
        (NEXT_ENDS, chat("ured", "ablue", "ugreen", "awhite"), "blue<end>|white<end>"),
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
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    assert ids == whole + [1] * (template == NEXT_ENDS)  # <end>, which this template writes with the turn that would come next
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
    assert row.ids_L.tolist() == whole.ids_L[:41].tolist() and row.mask_L.tolist() == whole.mask_L[:41].tolist() and 41 < len(whole)
    with pytest.raises(ValueError, match="max_length 10"):
        encode_conversation(tokenizer, conversation(chat("ured", "ablue")), max_length=10)


def test_turns_that_the_template_refuses_are_a_traceback() -> None:
    refuses = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refuses the turns user, assistant: roles must alternate"):
        encode_chat(byte_tokenizer(refuses), chat("ured", "ablue"))


def test_empty_answer_is_not_supervised_at_its_end() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert said(tokenizer, *encode_chat(tokenizer, chat("ured", "a"))) == "<end>"


def call(arguments) -> list[dict]:
    return [{"type": "function", "function": {"name": "sky", "arguments": arguments}}]


TOOLS = [{"type": "function", "function": {"name": "sky", "description": "<end>"}}]


@pytest.mark.parametrize(("message", "where"), [
    ({"role": "user", "content": "x<end>y"}, r"turn 1 \(user\)"), ({"role": "assistant", "content": "<end>"}, r"turn 1 \(assistant\)"),
    ({"role": "user", "content": "a", "name": "<start>"}, r"turn 1 \(user\)"),
    ({"role": "assistant", "content": "", "tool_calls": call({"a": {"b": ["<end>"]}})}, r"turn 1 \(assistant\)"),
    ({"role": "assistant", "content": "", "tool_calls": call('{"<end>": 1}')}, r"turn 1 \(assistant\)"),
    ({"role": "assistant", "content": "x", "reasoning_content": "<start>"}, r"turn 1 \(assistant\)"),
    ({"role": "assistant", "tool_calls": call({"a": "<end>"})}, r"turn 1 \(assistant\)"),  # without content, as some servers write it
    ({"role": "assistant", "reasoning_content": "<start>"}, r"turn 1 \(assistant\)"),
    ({"role": "tool", "content": "<end>"}, r"turn 1 \(tool\)"), ({"role": "user", "content": "<think>"}, r"turn 1 \(user\)"),
    ({"role": "user", "content": [{"type": "text", "text": "<end>"}]}, r"turn 1 \(user\)"),
])  # fmt: skip
def test_control_token_in_a_text_becomes_the_token(message: dict, where: str) -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens(["<think>", "</think>", "word"])
    with pytest.raises(ValueError, match=where + ".*the control token '<"):
        encode_chat(tokenizer, [message, *chat("ur", "ab")])
    with pytest.raises(ValueError, match="the tools: .*<end>"):
        encode_chat(tokenizer, chat("ur", "ab"), tools=TOOLS)
    # The assistant thinks in tokens that are not called special; an added word that no template writes is a word.
    assert said(tokenizer, *encode_chat(tokenizer, chat("uword", "a<think>b</think>word"))) == "<think>b</think>word<end>"


@pytest.mark.parametrize("mark", ["<|fim_prefix|>", "<｜User｜>"])
def test_control_token_that_is_not_called_special_becomes_the_token(mark: str) -> None:
    """Qwen2.5 and DeepSeek's distilled models have such: refused in every text, the assistant's too; marks of tool calls it may write."""
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens([mark, "<｜tool▁sep｜>"])
    plain = byte_tokenizer(CHATML)
    plain.add_tokens([mark])
    plain.chat_template = None
    for messages, where in ((chat(f"u{mark}", "ab"), r"turn 1 \(user\)"), (chat("ur", f"aso: {mark}"), r"turn 2 \(assistant\)")):
        with pytest.raises(ValueError, match=f"{where}.*the control token"):
            encode_chat(tokenizer, messages)
    for one in (tokenizer, plain):
        (found,) = ChatEncoder(one, max_length=None).encode([Text("t", "d", f"a{mark}b")])
        assert isinstance(found, ValueError) and "control token" in str(found)
    assert said(tokenizer, *encode_chat(tokenizer, chat("ur", "af<｜tool▁sep｜>x"))) == "f<｜tool▁sep｜>x<end>"


def test_words_that_look_like_roles_do_not_stay_text() -> None:
    tokenizer = byte_tokenizer(CHATML)
    for item in (conversation(chat("uassistant\nblue", "ared\nassistant\nuser")),):
        for plans in (True, False):
            _, found = ChatEncoder(tokenizer, max_length=None, plans=plans).encode([item, item])
            assert said(tokenizer, found.rows[0].ids_L, found.rows[0].mask_L) == "red\nassistant\nuser<end>"


@pytest.mark.parametrize("bad", [
    {"role": "user", "content": "\ud800"}, {"role": "user", "content": 3}, {"content": "x"}, "x",
    {"role": "user", "content": [{"type": "image", "url": "x"}]},
])  # fmt: skip
def test_message_that_is_none_stops_the_run(bad) -> None:
    """It is a reason for rejection, and its neighbours are encoded."""
    encode = ChatEncoder(byte_tokenizer(CHATML), max_length=None).encode
    good = conversation(chat("ured", "ablue"))
    before, found, after = encode([good, conversation([bad, *chat("ur", "ab")]), good])
    assert isinstance(found, ValueError) and "turn 1" in str(found) and before == after and before.rows[0].supervised == 5


@pytest.mark.parametrize(("inside", "expected"), [("\nblue", 2), ("blue", 1)])
def test_first_token_of_an_answer_hides_in_the_prompt(inside: str, expected: int) -> None:
    """Two newlines are one token in the whole text; when the model speaks, the prompt's own ids come first. Then a row a turn."""
    tokenizer = byte_tokenizer(CHATML, merges=True)
    messages = chat("ured", "a" + inside, "ugreen", "awhite")
    for plans in (True, False):
        _, found = ChatEncoder(tokenizer, max_length=None, plans=plans).encode([conversation(messages)] * 2)
        assert len(found.rows) == expected and found.taught == (0, 1)
        row = found.rows[0]
        assert said(tokenizer, row.ids_L, row.mask_L).startswith(inside + "<end>")
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        assert row.prompt_ids == tokenizer(prompt, add_special_tokens=False)["input_ids"]


CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}",
)
CALLS_AS_TEXT = CALLS.replace("{{ c.function.arguments | tojson }}", "{{ '~' + c.function.arguments }}")


@pytest.mark.parametrize(
    ("template", "expected"),
    [(CALLS, '[sky{"k": "é"}]<end>|clear<end>'), (CALLS_AS_TEXT, '[sky~{"k": "é"}]<end>|clear<end>')],
)
@pytest.mark.parametrize("arguments", [{"k": "é"}, '{"k": "é"}'])
def test_tool_call_is_rendered_twice_quoted(template: str, expected: str, arguments) -> None:
    tokenizer = byte_tokenizer(template)
    messages = [*chat("usky?"), {"role": "assistant", "content": None, "tool_calls": call(arguments)}, {"role": "tool", "content": "blue"}]
    assert said(tokenizer, *encode_chat(tokenizer, [*messages, *chat("aclear")])) == expected
    with pytest.raises(ValueError, match="JSON object of arguments"):
        encode_chat(tokenizer, [*chat("usky?"), {"role": "assistant", "content": "", "tool_calls": call("{not json")}])


def test_message_that_the_template_leaves_out_is_lost_in_silence() -> None:
    only = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}")
    messages = [{"role": "developer", "content": "be brief"}, *chat("ured", "ablue")]
    for plans in (True, False):
        _, found = ChatEncoder(byte_tokenizer(only), max_length=None, plans=plans).encode([conversation(messages)] * 2)
        assert isinstance(found, ValueError) and re.search(r"turn 1 \(developer\): the chat template leaves", str(found))


@pytest.mark.parametrize(("content", "reasoning", "expected"), [
    ("", "let me", "<think>let me"), ("blu", "let me", "<think>let me</think>blu"), ("<think>let me", None, "<think>let me"),
    ("", None, "nothing said"),
])  # fmt: skip
def test_reply_cut_while_thinking_learns_to_stop_thinking(content: str, reasoning: str | None, expected: str) -> None:
    """DM3: what the template writes behind the place of the cut was never said."""
    template = CHATML.replace(
        "{{ m.content }}", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    )
    tokenizer = byte_tokenizer(template)
    message = {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
    for plans in (True, False):
        _, found = ChatEncoder(tokenizer, max_length=None, plans=plans).encode([conversation([*chat("ured"), message], "length")] * 2)
        if isinstance(found, ValueError):
            assert expected in str(found)
        else:
            assert said(tokenizer, found.rows[0].ids_L, found.rows[0].mask_L) == expected


def test_midnight_passes_between_two_renderings(monkeypatch) -> None:
    tokenizer = byte_tokenizer("{{ strftime_now('%d') }}" + CHATML)
    days, rendered, render = iter([date(2026, 1, 1), *[date(2026, 1, 2)] * 99]), [0], tokenizer.apply_chat_template
    monkeypatch.setattr("spectrain.data.templates.date", SimpleNamespace(today=lambda: next(days)))

    def later(messages, **options) -> str:
        rendered[0] += 1
        text = render(messages, **options)
        return "0102"[2 * (rendered[0] > 1) :][:2] + text[2:]

    monkeypatch.setattr(tokenizer, "apply_chat_template", later)
    ids, mask = encode_chat(tokenizer, chat("ured", "ablue"))
    assert said(tokenizer, ids, mask) == "blue<end>" and tokenizer.decode(ids).startswith("02")


@pytest.mark.parametrize(("settings", "fault"), [
    ({"rows": "both"}, "rows 'both'"), ({"thinking": "yes"}, "thinking 'yes'"),
    ({"template_kwargs": {"x": 1}}, "template_kwargs x: .*reads only"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_taken(settings: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ChatEncoder(byte_tokenizer(CHATML), max_length=None, **settings)


def test_settings_of_the_tokenizer_cut_or_pad_rows() -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer(["a" * 50, "b"], truncation=True, max_length=5, padding=True)
    items = [conversation(chat("u" + "r" * length, "ablue")) for length in (3, 99)]
    found = ChatEncoder(tokenizer, max_length=None).encode(items)
    assert [said(tokenizer, f.rows[0].ids_L, f.rows[0].mask_L) for f in found] == ["blue<end>"] * 2


def test_rows_behind_max_length_are_lost_in_silence() -> None:
    tokenizer = byte_tokenizer(THINKS)
    item = conversation(chat("ured", "athink|blue", "ugreen", "athink|white"))
    whole = ChatEncoder(tokenizer, max_length=None).encode([item])[0]
    assert [r.id for r in whole.rows] == ["x#0", "x#1"] and {r.group for r in whole.rows} == {"x"} and whole.taught == (0, 1)
    (found,) = ChatEncoder(tokenizer, max_length=len(whole.rows[0])).encode([item])
    assert found.taught == (0,) and found.turns == 2 and "cut at max_length" in found.note and found.rows == whole.rows[:1]
    (none,) = ChatEncoder(tokenizer, max_length=5).encode([item])
    assert isinstance(none, ValueError) and "max_length 5" in str(none)


def test_plain_text_loses_its_own_tokens_and_tokens_are_taken_from_another_vocabulary() -> None:
    """TP1: text without a template has exactly the tokenizer's own special tokens. The one in front is not the model's to say."""
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <end>", special_tokens=[("<bos>", 4), ("<end>", 1)]
    )
    tokenizer.bos_token = "<bos>"
    encode = ChatEncoder(tokenizer, max_length=None).encode
    text, hidden, good, foreign, short, empty, prompt = encode([
        Text("t", "d", "red"), Text("t", "d", "a<end>b"), Tokens("k", "d", (7, 8), (0, 1)), Tokens("k", "d", (7, 999), (0, 1)),
        Tokens("k", "d", (7, 8), (1,)), Tokens("k", "d", (7, 8), (0, 0)), Prompt("p", "d", ("red",), "s"),
    ])  # fmt: skip
    assert text.rows[0].ids_L.tolist() == tokenizer("red")["input_ids"]
    assert said(tokenizer, text.rows[0].ids_L, text.rows[0].mask_L) == "red<end>"
    assert text.rows[0].ids_L[0] == 4 and text.rows[0].mask_L[0] == 0
    assert good.rows[0].mask_L.tolist() == [0, 1] and good.rows[0].ids_L.tolist() == [7, 8]
    reasons = ("control token '<end>'", "token id 999: the tokenizer has ids 0 to", "as many zeros and ones", "no supervised", "regenerate")
    for found, reason in zip((hidden, foreign, short, empty, prompt), reasons, strict=True):
        assert isinstance(found, ValueError) and reason in str(found)


def test_fast_path_goes_the_slow_way(monkeypatch) -> None:
    """Once its form is known, a conversation is rendered once, with others in a call; the definition takes one whose control tokens are
    not the plan's."""
    tokenizer = byte_tokenizer(CHATML)
    encoder = ChatEncoder(tokenizer, max_length=None)
    items = [conversation(chat("sbe", f"ured {i}", "ablue\n", f"ugreen {i}", "awhite")) for i in range(5)]
    slow = ChatEncoder(tokenizer, max_length=None, plans=False).encode(items)
    assert encoder.encode([items[0], items[0]]) == [slow[0], slow[0]]
    calls, render = [], tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: calls.append(len(a[0])) or render(*a, **k))
    assert encoder.encode(items) == slow and calls == [len(items)]
    batch = encoder.template.batch
    # As if a text had turned into a token, or into another one:
    for change in (lambda ids: [*ids, 2], lambda ids: [3, *ids[1:]]):

        def changed(texts, change=change) -> list:
            return [change(ids) if len(texts) == len(items) else ids for ids in batch(texts)]

        object.__setattr__(encoder.template, "batch", changed)
        assert encoder.encode(items) == slow


def test_conversation_that_the_template_refuses_takes_its_neighbours_along() -> None:
    refuses = "{% for m in messages %}{% if m.content|length > 30 %}{{ raise_exception('too long') }}{% endif %}{% endfor %}"
    tokenizer = byte_tokenizer(refuses + CHATML)
    items = [conversation(chat("ured", f"a{answer}")) for answer in ("blue", "green", "white", "x" * 40, "black")]
    found, slow = (ChatEncoder(tokenizer, max_length=None, plans=plans).encode(items[:2] + items) for plans in (True, False))
    assert [str(one) for one in found] == [str(one) for one in slow]
    assert [isinstance(one, ValueError) for one in found] == [False] * 5 + [True, False] and "too long" in str(found[5])


def test_plan_of_plain_turns_is_used_where_the_template_looks_for_words() -> None:
    """The template cuts earlier turns at |, so a conversation with one needs a row a turn; its neighbours of the same form do not."""
    tokenizer = byte_tokenizer(THINKS)
    plain, cut = (conversation(chat("ured", answer, "ugreen", "awhite")) for answer in ("ablue", "athink|blue"))
    found = ChatEncoder(tokenizer, max_length=None).encode([plain, plain, plain, cut])
    assert [len(one.rows) for one in found] == [1, 1, 1, 2]
    assert [said(tokenizer, row.ids_L, row.mask_L) for row in found[3].rows] == ["think|blue<end>", "white<end>"]


@pytest.mark.parametrize("answer", ["end", "<", "e", "end>", " "])
@pytest.mark.parametrize("eos", ["<end>", "<eos>"])
def test_short_answer_that_was_cut_off_ends_in_words_of_the_template(answer: str, eos: str) -> None:
    """DM3: the answer is found where it stands, not where the end token happens to be written with the same letters."""
    for plans in (True, False):
        items = [conversation(chat("ured", "a" + answer), "length")] * 2
        _, found = ChatEncoder(byte_tokenizer(CHATML, eos=eos), max_length=None, plans=plans).encode(items)
        if answer.isspace():
            assert isinstance(found, ValueError) and "nothing said" in str(found)
        else:
            row = found.rows[0]
            assert said(byte_tokenizer(CHATML), row.ids_L, row.mask_L) == answer and row.mask_L[-1] == 1


def test_lost_text_is_found_in_words_of_the_template() -> None:
    """A message or an answer that is left out is missed, also when its letters stand somewhere else."""
    only = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}")
    silent = CHATML.replace(
        "{{ m.content }}", "{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% else %}{{ m.content }}"
        "{% endfor %}",
    )  # fmt: skip
    says = {"role": "assistant", "content": "k", "tool_calls": call({"k": 1})}
    for template, messages, fault in (
        (only, [{"role": "developer", "content": "<"}, *chat("ured", "ablue")], r"turn 1 \(developer\): the chat template leaves"),
        (only, [{"role": "developer", "content": "red"}, *chat("ured", "ablue")], r"turn 1 \(developer\): the chat template leaves"),
        (silent, [*chat("ured"), says], "turn 2: the chat template leaves out or changes the content"),
    ):
        for plans in (True, False):
            _, found = ChatEncoder(byte_tokenizer(template), max_length=None, plans=plans).encode([conversation(messages)] * 2)
            assert isinstance(found, ValueError) and re.match(fault, str(found)), found
    assert said(byte_tokenizer(CHATML), *encode_chat(byte_tokenizer(CHATML), chat("s<", "u<", "a<end", "u<", "a<"))) == "<end<end>|<<end>"


def test_space_that_is_stripped_from_earlier_turns_only_stays_unseen() -> None:
    """A plan learnt from answers without space around them does not hold for those with it."""
    tokenizer = byte_tokenizer(CHATML.replace("m.content", "(m.content if loop.last else m.content | trim)"))
    plain, spaced = (conversation(chat("ured", answer, "ugreen", "awhite")) for answer in ("ablue", "a blue "))
    found = ChatEncoder(tokenizer, max_length=None).encode([plain, plain, spaced, spaced, spaced])
    slow = ChatEncoder(tokenizer, max_length=None, plans=False).encode([plain, spaced])
    assert found == [slow[0]] * 2 + [slow[1]] * 3
    assert [said(tokenizer, row.ids_L, row.mask_L) for row in found[4].rows] == [" blue <end>", "white<end>"]


@pytest.mark.parametrize(("behind", "eos", "expected"), [
    ("<start><eos>", "<eos>", "blue<start><eos>"), ("<end><eos>\n", "<eos>", "blue<end><eos>"), ("<end>\n<eos>", "<eos>", "blue<end>"),
])  # fmt: skip
def test_answer_ends_before_the_end_that_the_model_runs_on_to(behind: str, eos: str, expected: str) -> None:
    """DM3: a special token on the way to the tokenizer's own end is not where serving stops."""
    tokenizer = byte_tokenizer(CHATML.replace("{{ m.content }}<end>\n", "{{ m.content }}" + behind), eos=eos)
    assert said(tokenizer, *encode_chat(tokenizer, chat("ured", "ablue"))) == expected


def test_control_token_is_made_out_of_other_characters() -> None:
    """By the normaliser, for tokens that are looked for behind it, or by an escape in the JSON of arguments."""
    tokenizer = byte_tokenizer(CALLS)
    with pytest.raises(ValueError, match=r"turn 2 \(assistant\).*'<end>'"):
        encode_chat(tokenizer, [*chat("ur"), {"role": "assistant", "content": "", "tool_calls": call('{"k": "\\u003cend\\u003e"}')}])
    inner = tokenizer.backend_tokenizer
    inner.normalizer = normalizers.NFKC()
    inner.add_special_tokens([AddedToken("<stop>", normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", chat_template=CALLS)
    assert inner.token_to_id("<stop>") in tokenizer("\uff1cstop\uff1e")["input_ids"]
    with pytest.raises(ValueError, match=r"turn 1 \(user\).*'<stop>'"):
        encode_chat(tokenizer, chat("u\uff1cstop\uff1e", "ab"))
    assert said(tokenizer, *encode_chat(tokenizer, chat("ur", "a\uff1cend\uff1e"))) == "<end><end>"  # letters, then the token


@pytest.mark.parametrize("more", [
    {"reasoning_content": ["t"]}, {"tool_calls": "abc"}, {"tool_calls": 5}, {"tool_calls": [3]}, {"tool_calls": [{"function": 3}]},
])  # fmt: skip
def test_answer_of_another_form_stops_the_run(more: dict) -> None:
    item = conversation([*chat("ured"), {"role": "assistant", "content": "x", **more}])
    for found in ChatEncoder(byte_tokenizer(CALLS), max_length=None).encode([item, item]):
        assert isinstance(found, ValueError) and "turn 2: " in str(found)


def test_text_without_a_template_becomes_control_tokens() -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.chat_template = None
    hidden, half, good = ChatEncoder(tokenizer, max_length=None).encode([Text("t", "d", text) for text in ("a<end>b", "\ud800", "red")])
    assert "control token '<end>'" in str(hidden) and "half a character" in str(half) and good.rows[0].supervised == 3


def test_date_of_a_template_that_is_given_one_changes_at_midnight() -> None:
    dated = "{{ date_string if date_string is defined else strftime_now('%d') }}" + CHATML
    assert Template(byte_tokenizer(dated)).today() == date.today()
    assert Template(byte_tokenizer(dated), {"date_string": "1 May"}).today() is None and Template(byte_tokenizer(CHATML)).today() is None
