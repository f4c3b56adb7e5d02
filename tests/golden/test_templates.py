"""What is supervised under real templates, written down by hand: what the model says from its generation prompt to the token it ends with.

One line a row; | between the spans of a row.
"""

import random
from importlib import resources

import pytest

from spectrain.data.formats import Conversation
from spectrain.data.masking import ChatEncoder, encode_chat, encode_turns
from spectrain.target.model import Target

TOOL = {
    "name": "sky",
    "description": "Sky.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "x"}}},
}
TOOLS = ({"type": "function", "function": TOOL},)
CALL = {"type": "function", "function": {"name": "sky", "arguments": {"city": "Rome"}}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


CHATS = {
    "single": [user("Why?"), says("Because.")],
    "multi": [user("red?"), says("blue"), user("more?"), says("green sky")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi"), says("Hello."), user("So?"), says("So.")],
    "reason": [user("2+3?"), says("5", reasoning_content="two and three"), user("+1?"), says("6", reasoning_content="one more")],
    "inline": [user("2+3?"), says("<think>\ntwo and three\n</think>\n\n5")],
    "tools": [user("Sky in Rome?"), says("", tool_calls=[CALL]), {"role": "tool", "name": "sky", "content": "clear"}, says("Clear.")],
}
QWEN_CALL = '<tool_call>\n{"name": "sky", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
CHATML = {
    "single": ["Because.<|im_end|>"], "multi": ["blue<|im_end|>|green sky<|im_end|>"], "system": ["Hello.<|im_end|>|So.<|im_end|>"],
}  # fmt: skip
LLAMA = {
    "single": ["Because.<|eot_id|>"], "multi": ["blue<|eot_id|>|green sky<|eot_id|>"], "system": ["Hello.<|eot_id|>|So.<|eot_id|>"],
}  # fmt: skip
LLAMA_TOOLS = {**LLAMA, "tools": ['{"name": "sky", "parameters": {"city": "Rome"}}<|eot_id|>|Clear.<|eot_id|>']}
NO_REASONING = "leaves out or changes the reasoning"
OPENED = "opens a think block and the answer has no reasoning"
GOLDEN = {
    "smollm2": {**CHATML, "inline": ["<think>\ntwo and three\n</think>\n\n5<|im_end|>"], "reason": NO_REASONING, "tools": "leaves out"},
    "phi4_ours": {**CHATML, "reason": NO_REASONING},
    "qwen2_5": {**CHATML, "tools": [QWEN_CALL + "|Clear.<|im_end|>"], "reason": NO_REASONING},
    "qwen3_instruct_2507": {**CHATML, "tools": [QWEN_CALL + "|Clear.<|im_end|>"], "reason": NO_REASONING},
    # Answers without reasoning are said behind an empty think block of the prompt; it is gone from earlier turns, so a row a turn.
    "qwen3": {
        "single": ["Because.<|im_end|>"], "multi": ["blue<|im_end|>", "green sky<|im_end|>"],
        "system": ["Hello.<|im_end|>", "So.<|im_end|>"],
        "reason": ["<think>\ntwo and three\n</think>\n\n5<|im_end|>", "<think>\none more\n</think>\n\n6<|im_end|>"],
        "inline": ["<think>\ntwo and three\n</think>\n\n5<|im_end|>"], "tools": [QWEN_CALL, "Clear.<|im_end|>"],
    },
    "llama3": LLAMA, "llama3_1": LLAMA_TOOLS, "llama3_2": LLAMA_TOOLS,
    "gemma3": {
        "single": ["Because.<end_of_turn>"], "multi": ["blue<end_of_turn>|green sky<end_of_turn>"],
        "system": ["Hello.<end_of_turn>|So.<end_of_turn>"], "reason": NO_REASONING, "tools": "leaves out",
    },
    # The rendering ends with <|endoftext|>, which is not what the model ends an answer with.
    "phi3": {"single": ["Because.<|end|>"], "multi": ["blue<|end|>|green sky<|end|>"], "system": ["Hello.<|end|>|So.<|end|>"]},
    # A special token closes the answer on the way to the end of the turn, at which serving stops.
    "cohere2": {"single": ["Because.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"], "reason": NO_REASONING},
    # The prompt opens the think block, and the rendering of a finished turn leaves all of it out.
    "deepseek_r1_distill": {
        "single": OPENED, "multi": OPENED, "inline": ["two and three\n</think>\n\n5<｜end▁of▁sentence｜>"],
        "reason": ["two and three\n</think>\n\n5<｜end▁of▁sentence｜>", "one more\n</think>\n\n6<｜end▁of▁sentence｜>"],
    },
    # Earlier turns lose their analysis and end with <|end|>; the model ends with <|return|>, and a call with <|call|>.
    "gptoss": {
        "single": ["<|channel|>final<|message|>Because.<|return|>"],
        "multi": ["<|channel|>final<|message|>blue<|return|>", "<|channel|>final<|message|>green sky<|return|>"],
        "reason": [
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
            for thought, answer in (("two and three", 5), ("one more", 6))
        ],
        "tools": [
            ' to=functions.sky<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>|<|channel|>final<|message|>Clear.<|return|>'
        ],
    },
    # The system text stands in the last user turn, so an earlier answer reads otherwise in the whole.
    "mistral_ours": {
        "single": [" Because.</s>"], "multi": [" blue</s>| green sky</s>"], "system": [" Hello.</s>", " So.</s>"], "reason": NO_REASONING,
        "tools": ['[TOOL_CALLS] [{"name": "sky", "arguments": {"city": "Rome"}}]</s>| Clear.</s>'],
    },
    # The end of an answer is the header of the next turn: unknown to the tokenizer, told by the model's generation config.
    "glm4moe": {"single": ["\nBecause.<|user|>"], "multi": ["\nblue<|user|>|\ngreen sky<|user|>"], "reason": [
        "\n<think>two and three</think>\n5<|user|>", "\n<think>one more</think>\n6<|user|>",
    ]},
}  # fmt: skip


def said(tokenizer, ids, mask) -> str:
    text = "".join(f"{tokenizer.decode([i])}" if m else "\0" for i, m in zip(ids, mask, strict=True))
    return "|".join(span for span in text.split("\0") if span)


def encoder(tokenizer, **options) -> ChatEncoder:
    glm = "[gMASK]" in tokenizer.chat_template
    stops = [i for token, i in tokenizer.get_vocab().items() if glm and token in ("<|user|>", "<|observation|>")]
    return ChatEncoder(tokenizer, max_length=None, stop_ids=stops, **options)


def conversation(chat: str, **more) -> Conversation:
    return Conversation(chat, "d", tuple(CHATS[chat]), tools=TOOLS if chat == "tools" else (), **more)


@pytest.mark.parametrize("plans", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("name", GOLDEN)
def test_supervised_text_is_not_what_the_model_says(family, name: str, plans: bool) -> None:
    """DM1, DM3, DM4."""
    tokenizer = family(name)
    encode = encoder(tokenizer, plans=plans).encode
    for chat, expected in GOLDEN[name].items():
        found = encode([conversation(chat)] * 2)[1]  # a form is learnt when it comes again
        if isinstance(expected, str):
            note = str(found) if isinstance(found, ValueError) else found.note
            assert expected in note, (chat, found)
        else:
            assert not isinstance(found, ValueError), (chat, found)
            assert [said(tokenizer, row.ids_L, row.mask_L) for row in found.rows] == expected
            assert found.taught == tuple(range(found.turns)) and not found.note
            ids = [row.id for row in found.rows]
            assert ids == ([chat] if len(expected) == 1 else [f"{chat}#{i}" for i in range(len(expected))])


@pytest.mark.parametrize(("thinking", "kwargs", "expected"), [
    ("on", {}, ["<think>\ntwo\n</think>\n\n5<|im_end|>"]), ("off", {}, ["4<|im_end|>"]),
    ("mixed", {}, ["<think>\ntwo\n</think>\n\n5<|im_end|>", "4<|im_end|>"]),
    # Asked to think, the model says the empty block itself.
    ("mixed", {"enable_thinking": True}, ["<think>\ntwo\n</think>\n\n5<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"]),
])  # fmt: skip
def test_thinking_switch_is_not_the_one_the_answer_was_given_under(family, thinking: str, kwargs: dict, expected: list[str]) -> None:
    """DM4: an empty think block comes from the prompt, a filled one from the model."""
    tokenizer = family("qwen3")
    messages = [user("3+2?"), says("5", reasoning_content="two"), user("2+2?"), says("4")]
    rows = encode_turns(tokenizer, messages, thinking=thinking, template_kwargs=kwargs)
    assert [said(tokenizer, *row) for row in rows] == expected
    found = ChatEncoder(tokenizer, max_length=None, thinking=thinking, template_kwargs=kwargs).encode(
        [Conversation("x", "d", tuple(messages))]
    )
    assert [said(tokenizer, row.ids_L, row.mask_L) for row in found[0].rows] == expected
    assert ("thinking is" in found[0].note) == (thinking != "mixed") and len(found[0].taught) == len(expected)


def test_end_that_the_generation_settings_name_is_not_supervised(family) -> None:
    """DM3: GLM ends an answer with the header of the next turn, which neither its template nor its tokenizer calls an end."""
    tokenizer = family("glm4moe")
    stops = [tokenizer.convert_tokens_to_ids("<|user|>")]
    assert [said(tokenizer, *encode_chat(tokenizer, CHATS["multi"], stop_ids=stops))] == GOLDEN["glm4moe"]["multi"]
    rows = encode_turns(tokenizer, CHATS["reason"], stop_ids=stops)
    assert [said(tokenizer, *row) for row in rows] == GOLDEN["glm4moe"]["reason"]


@pytest.mark.parametrize("name", [n for n in GOLDEN if n not in ("qwen3", "glm4moe")] + ["qwen3"])
def test_prompt_of_a_row_is_not_the_prompt_of_the_generator(family, name: str) -> None:
    """TP1, rule 2: one source of ids for training and serving; the first token once."""
    tokenizer = family(name)
    chat = "reason" if name in ("deepseek_r1_distill", "qwen3") else "multi"
    messages = CHATS[chat][:2]
    ids, mask = encode_chat(tokenizer, messages)
    prompt = Target(model=None, tokenizer=tokenizer, name="x").encode(messages[:1])
    assert ids[: mask.index(1)] == prompt
    if tokenizer.bos_token in tokenizer.decode(prompt):
        assert prompt.count(tokenizer.bos_token_id) == 1 and prompt[0] == tokenizer.bos_token_id


ALL = sorted(f.name.removesuffix(".jinja") for f in (resources.files("trl") / "chat_templates").iterdir() if f.name.endswith(".jinja"))
PICTURES = ("idefics3", "llava_next", "smolvlm")  # content must be a list of parts, so they are refused
# Elsewhere the tags of these files take in what the model does not say: headers (gpt-oss, DeepSeek), a line break of the prompt
# (Qwen2.5), a second end (Phi-3, Cohere 2).
TAGGED = ("cohere", "gemma", "gemma3", "llama3", "qwen3_instruct_2507", "lfm2", "lfm2_v2")


@pytest.mark.parametrize("name", TAGGED)
def test_mask_is_not_that_of_the_generation_tags(family, name: str) -> None:
    """DM1: tags written as `{%- generation %}` change nothing: where they cover an answer and its end, the mask is theirs."""
    tokenizer = family(f"{name}_training")
    ids, mask = encode_chat(tokenizer, CHATS["multi"])
    theirs = tokenizer.apply_chat_template(CHATS["multi"], return_dict=True, return_assistant_tokens_mask=True)
    assert ids == theirs["input_ids"]
    tagged = said(tokenizer, ids, theirs["assistant_masks"]).split("|green")  # the end of a line behind the end token is in the tags
    assert said(tokenizer, ids, mask) == "|green".join(part.removesuffix("\n") for part in tagged)


SKY = {"role": "tool", "name": "sky", "content": "clear"}
ODD = [  # a plan that cannot be learnt because its probes are refused; a thought that is cut off, and one that was closed
    ("diffusion_gemma", [user("Sky?"), says("", tool_calls=[CALL], reasoning_content="a"), SKY, says("b", reasoning_content="c")], "stop"),
    ("gemma4_v4", [user("red?"), says("\n\nblue"), user("more?"), says("<think>[/|")], "length"),
]


@pytest.mark.parametrize(("name", "messages", "reason"), ODD)
def test_fast_path_refuses_or_leaves_out_what_the_definition_takes(family, name: str, messages: list, reason: str) -> None:
    chat = Conversation("c", "d", tuple(messages), reason)
    for rows in ("auto", "conversation", "turn"):
        fast, slow = (encoder(family(name), rows=rows, plans=plans).encode([chat] * 3) for plans in (True, False))
        assert [one.rows for one in fast] == [one.rows for one in slow]


WORDS = [
    "red",
    "the blue",
    "user",
    "assistant\n",
    "\n\nthe",
    "  spaced  ",
    "a\n\nb",
    "é 😀",
    "</div>",
    "content",
    "system",
    "x" * 40,
    "",
    ". \n",
]


def random_chat(rng: random.Random) -> Conversation:
    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))

    messages = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        messages.append(user(text()))
        kind = rng.random()
        if kind < 0.15:
            messages += [says("", tool_calls=[CALL]), {"role": "tool", "name": "sky", "content": text()}]
        if kind < 0.4:
            messages.append(says(text(), reasoning_content=text()))
        elif kind < 0.5:
            messages.append(says(f"<think>\n{text()}\n</think>\n\n{text()}"))
        else:
            messages.append(says(text()))
    if rng.random() < 0.15:
        messages.append(user("open"))
    return Conversation("c", "d", tuple(messages), "length" if rng.random() < 0.2 else "stop", TOOLS if rng.random() < 0.3 else ())


def others(names) -> list:
    return [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in names)]


@pytest.mark.parametrize("name", others([*GOLDEN, "qwen3_5_think", "gemma4_v5"]))
def test_fast_path_gives_other_rows_than_the_definition(family, name: str) -> None:
    rng, tokenizer = random.Random(name), family(name)
    settings = [{"rows": rows, "thinking": thinking} for rows in ("auto", "conversation", "turn") for thinking in ("mixed", "on", "off")]
    for options in rng.sample(settings, 2):
        try:
            fast, slow = encoder(tokenizer, **options), encoder(tokenizer, **options, plans=False)
        except ValueError as error:
            assert "cannot be proved" in str(error) and name.startswith(PICTURES), error
            return
        chats = [random_chat(rng) for _ in range(8)] * 2  # a form is learnt when it comes again
        for chat, ours, theirs in zip(chats, fast.encode(chats), slow.encode(chats), strict=True):
            if isinstance(theirs, ValueError):
                assert repr(ours) == repr(theirs), chat
            else:
                assert (ours.rows, ours.taught, ours.turns, bool(ours.note)) == (
                    theirs.rows,
                    theirs.taught,
                    theirs.turns,
                    bool(theirs.note),
                ), chat
                assert all(0 < row.supervised < len(row) for row in theirs.rows)
    fast = encoder(tokenizer)
    fast.encode([conversation("inline" if "deepseek" in name else "single")] * 2)
    assert fast.planner.plans and all(fast.planner.plans.values()), "a simple conversation takes the slow path"
