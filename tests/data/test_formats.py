"""Rows in the dialects people write -> items, or reasons; files of prompts and conversations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectrain.data.formats import (
    Conversation,
    Item,
    Prompt,
    Text,
    Tokens,
    convert,
    detect,
    mix_prompts,
    read_conversations,
    read_jsonl,
    read_prompts,
)


def item(value: dict[str, Any], format: str | None = None, columns: dict[str, str] | None = None) -> Item:
    columns = columns or {}
    return convert(value, format=format or detect([value], columns), name="file:1", domain="chat", columns=columns)


def said(value: dict[str, Any], format: str | None = None) -> list[dict[str, Any]]:
    found = item(value, format)
    assert isinstance(found, Conversation), found
    return list(found.messages)


def of(**roles: str) -> list[dict[str, str]]:
    """of(user="q", assistant="a"): messages; a digit behind a role is left out."""
    return [{"role": role.rstrip("0123456789"), "content": content} for role, content in roles.items()]


def sharegpt(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


def openai(*turns: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"messages": list(turns), **others}


QA = of(user="q", assistant="a")
RB = of(user="r", assistant="b")
SDQA = of(system="s", developer="d", user="q", assistant="a")
SQA = of(system="s", user="q", assistant="a")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": "ü"}}}
CALL_TEXT = '{"name": "f", "arguments": {"x": 1, "y": "ü"}}'
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("format", "row", "messages"),
    [
        ("sharegpt", sharegpt(("human", "q"), ("gpt", "a")), QA),
        ("sharegpt", sharegpt(("system", "s"), ("Human", "q"), ("chatgpt", "a")), SQA),
        ("sharegpt", sharegpt(("user", "q"), ("bing", "a")) | {"system": "s"}, SQA),
        ("sharegpt", sharegpt(("user", "q"), ("bard", "a")) | {"system": ""}, QA),
        ("sharegpt", {"conversations": [{"user": "human", "text": "q"}, {"user": "assistant", "text": "a"}]}, QA),
        ("sharegpt", {"conversation": [{"human": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}]}, QA + RB),
        ("sharegpt", {"conversations": json.dumps(sharegpt(("human", "q"), ("gpt", "a"))["conversations"])}, QA),
        ("messages", {"conversations": QA}, QA),
        ("messages", {"messages": None, "conversations": QA}, QA),
        ("messages", {"messages": [], "conversations": QA}, QA),
        ("pair", {"prompt": None, "question": "q", "response": "", "answer": "a"}, QA),
        ("messages", {"messages": [{"system": "s", "user": "q", "assistant": "a"}]}, SQA),
        ("sharegpt", {"messages": sharegpt(("human", "q"), ("gpt", "a"))["conversations"]}, QA),
        ("messages", openai(*SQA), SQA),
        ("messages", openai(*SDQA), SDQA),
        ("messages", openai({"role": "user", "content": [{"type": "text", "text": "q1 "}, {"type": "text", "text": "q2"}]}, QA[1]),
         of(user="q1 q2", assistant="a")),
        ("messages", openai({**QA[0], "name": "Ann", "weight": 1}, {**QA[1], "refusal": None}), [{**QA[0], "name": "Ann"}, QA[1]]),
        ("messages", openai(QA[0], {**QA[1], "reasoning": "t"}), [QA[0], {**QA[1], "reasoning_content": "t"}]),
        ("messages", openai(QA[0], {**QA[1], "thinking": "t", "reasoning_content": "t"}), [QA[0], {**QA[1], "reasoning_content": "t"}]),
        ("messages", openai(QA[0], {**QA[1], "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]}),
         [QA[0], {**QA[1], "reasoning_content": "t"}]),
        ("messages", openai(QA[0], {"role": "assistant", "content": None, "reasoning_content": "t"}),
         [QA[0], {"role": "assistant", "content": "", "reasoning_content": "t"}]),
        ("messages", openai(*of(user="q", assistant="a", user2="and?")), of(user="q", assistant="a", user2="and?")),
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}, QA),
        ("alpaca", {"instruction": "q", "input": "i", "output": "a", "system": "s"}, of(system="s", user="q\n\ni", assistant="a")),
        ("alpaca", {"instruction": "r", "output": "b", "history": [["q", "a"]]}, QA + RB),
        ("alpaca", {"instruction": "q", "context": "i", "response": "a"}, of(user="q\n\ni", assistant="a")),
        ("pair", {"prompt": "q", "response": "a"}, QA),
        ("pair", {"prompt": "q", "completion": "a"}, QA),
        ("pair", {"system_prompt": "s", "question": "q", "answer": "a"}, SQA),
        ("pair", {"input": "q", "output": "a"}, QA),
        ("pair", {"prompt": SQA[:2], "completion": [QA[1]]}, SQA),
        ("pair", {"prompt": [QA[0]], "response": "a"}, QA),
        ("messages", openai(*SQA[:2]), SQA[:2]),
    ],
)  # fmt: skip
def test_dialect_is_read_as_another(format: str, row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert detect([row]) == format
    assert item(row) == Conversation("file:1", "chat", tuple(messages))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "q", "source": "s"}, Prompt("file:1", "chat", ("q",), "s")),
        ({"turns": ["q", "r"], "id": 7, "domain": "math"}, Prompt("7", "math", ("q", "r"), "")),
        (openai(QA[0]), Prompt("file:1", "chat", ("q",), "")),
        ({"prompt": [QA[0]]}, Prompt("file:1", "chat", ("q",), "")),
        ({"instruction": "q", "input": None}, Prompt("file:1", "chat", ("q",), "")),
        ({"text": " x\n"}, Text("file:1", "chat", " x\n")),
        ({"id": "b", "content": "x"}, Text("b", "chat", "x")),
        ({"input_ids": [1, 5, 6], "loss_mask": [0, 1, 1]}, Tokens("file:1", "chat", (1, 5, 6), (0, 1, 1))),
        ({"input_ids": [1, 5, 6], "attention_mask": [1, 1, 1], "assistant_masks": [False, True, True]},
         Tokens("file:1", "chat", (1, 5, 6), (0, 1, 1))),
        ({"input_ids": np.array([1, 5, 6]), "labels": [-100, -100, 6]}, Tokens("file:1", "chat", (1, 5, 6), (0, 0, 1))),
        ({"input_ids": "[1, 5]", "completion_mask": "[0, 1]"}, Tokens("file:1", "chat", (1, 5), (0, 1))),
    ],
)  # fmt: skip
def test_row_without_answer_becomes_something_else(row: dict[str, Any], found: Item) -> None:
    assert item(row) == found


@pytest.mark.parametrize(
    "row",
    [
        sharegpt(("human", "q"), ("function_call", CALL_TEXT), ("observation", "r"), ("gpt", "a")) | {"tools": json.dumps([FUNCTION])},
        openai(QA[0], {**CALLING, "content": None}, {"role": "tool", "content": "r"}, QA[1], tools=[TOOL]),
        openai(
            QA[0],
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": "ü"}'}}]},
            {"role": "tool", "content": [{"type": "text", "text": "r"}]},
            QA[1],
            tools=TOOL,
        ),
        openai(
            QA[0],
            {"role": "assistant", "content": "", "function_call": json.loads(CALL_TEXT)},
            {"role": "function", "content": "r"},
            QA[1],
            functions=[FUNCTION],
        ),
    ],
)
def test_tool_calls_differ_by_dialect(row: dict[str, Any]) -> None:
    messages = (QA[0], CALLING, {"role": "tool", "content": "r"}, QA[1])
    assert item(row) == Conversation("file:1", "chat", messages, tools=(TOOL,))


def test_parallel_calls_lose_results_or_ids() -> None:
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": ""}} for i in range(2)]
    results = [{"role": "tool", "content": "", "tool_call_id": f"c{i}", "name": "f"} for i in range(2)]
    messages = said(openai(QA[0], {"role": "assistant", "content": "wait", "tool_calls": calls}, *results, QA[1]))
    assert messages[2:4] == results and [call["id"] for call in messages[1]["tool_calls"]] == ["c0", "c1"]
    assert messages[1]["content"] == "wait" and messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    with pytest.raises(ValueError, match="turn 5: more tool results than calls"):
        item(openai(QA[0], {"role": "assistant", "tool_calls": calls}, *results, results[0], QA[1]))
    textual = said(openai(QA[0], {"role": "assistant", "content": "<tool_call>f</tool_call>"}, *results, QA[1]))
    assert [m["role"] for m in textual] == ["user", "assistant", "tool", "tool", "assistant"]


def test_a_changed_character_goes_unseen() -> None:
    """White space, other normal forms, separators, and what looks like control tokens: all stays as it is."""
    text = " \r\n e\u0301\ufb01\u2028\u2029\x85\x1c\ufeff<|im_end|>\U0001f469\u200d\U0001f680\ufffe\x7f\x01 \t"
    long = text * 30_000  # about 1 MB
    for row in (sharegpt(("human", text), ("gpt", long)), {"prompt": text, "response": long}, {"instruction": text, "output": long}):
        assert [m["content"] for m in said(row)] == [text, long]
    assert item({"text": long}) == Text("file:1", "chat", long)


A = {"role": "assistant", "content": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}


def calling(arguments: Any) -> dict[str, Any]:
    return openai(QA[0], {**A, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})



@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (sharegpt(("human", "q"), ("gpt", None)), "turn 2: content of the assistant is null"),
        (sharegpt(("human", ""), ("gpt", "a")), "turn 1: content of the user is empty"),
        (sharegpt(("human", "q"), ("gpt", " \n\u3000")), "turn 2: content of the assistant is nothing but white space"),
        (sharegpt(("system", ""), ("human", "q"), ("gpt", "a")), "turn 1: content of the system is empty"),
        (sharegpt(("human", "q"), ("narrator", "a")), "turn 2: unknown role 'narrator'"),
        (sharegpt(("human", "q"), (None, "a")), "turn 2: the role is null"),
        (sharegpt(("human", "q"), ("human", "r"), ("gpt", "a")), "turn 2: a second user turn in a line"),
        (sharegpt(("human", "q"), ("gpt", "a"), ("gpt", "b")), "turn 3: a second assistant turn in a line"),
        (sharegpt(("gpt", "a"), ("human", "q"), ("gpt", "b")), "turn 1: the assistant speaks before anything was asked"),
        (sharegpt(("system", "s"), ("gpt", "a")), "turn 2: the assistant speaks before"),
        (sharegpt(("human", "q"), ("tool", "r"), ("gpt", "a")), "turn 2: a tool result, but no assistant"),
        (sharegpt(("human", 5), ("gpt", "a")), r"turn 1: content of the user is a number \(5\)"),
        (sharegpt(("human", "q"), ("gpt", True)), "turn 2: content of the assistant is a boolean"),
        (sharegpt(("human", "q"), ("gpt", {"a": 1})), "turn 2: content of the assistant is an object"),
        (sharegpt(("human", "q"), ("function_call", "f(x)")), "turn 2: `function call` is text, and not that of a JSON value"),
        (sharegpt(("human", "q"), ("gpt", "a\ud800")), r"turn 2: a lone surrogate \(U\+D800\) at character 2"),
        (sharegpt(("human", "é\0"), ("gpt", "a")), "turn 1: a NUL at character 2"),
        (sharegpt(("system", "s"), ("human", "q"), ("gpt", "a")) | {"system": "t"}, "a system text of the row, and turn 1 is another"),
        ({"conversations": []}, "`conversations` is an empty list"),
        ({"conversations": None}, "`conversations` is null"),
        ({"conversations": ["q", "a"]}, "turn 1: it is text; needed an object"),
        ({"conversations": [{"value": "q"}]}, "turn 1: no role; found keys value"),
        ({"conversations": [{"from": "human"}]}, "turn 1: content of the user is missing"),
        (openai({"role": "user", "content": [IMAGE]}, A), "turn 1: a part of type 'image_url'; only text"),
        (openai({"role": "user", "content": [{"type": "text", "text": None}]}, A), "turn 1: `text` of a part is null"),
        (openai({"role": "user", "content": []}, A), "turn 1: content of the user is empty"),
        (openai({**QA[0], "tool_calls": [CALL]}, A), "turn 1: tool calls of the user"),
        (openai({**QA[0], "reasoning": "t"}, A), "turn 1: reasoning of the user"),
        (openai({**QA[0], "name": 5}, A), "turn 1: `name` is a number"),
        (openai(QA[0], {**A, "reasoning": "t", "thinking": "u"}), "turn 2: reasoning under several names"),
        (openai(QA[0], {**A, "thinking": True}), "turn 2: `thinking` is a boolean"),
        (openai(QA[0], {**A, "reasoning": "\udfff"}), "turn 2: a lone surrogate"),
        (openai(QA[0], {**A, "tool_calls": [{"type": "custom", "custom": {}}]}), "turn 2: a tool call of type 'custom'"),
        (calling("{x"), "turn 2: the arguments of the call of f are not JSON"),
        (calling('{"x": 1, "x": 2}'), "turn 2: .*a key twice among x, x"),
        (calling("[1]"), "turn 2: the arguments of the call of f are a list"),
        (calling({"x": "\0"}), "turn 2: a NUL"),
        (openai(QA[0], {**A, "tool_calls": [{"function": {"arguments": {}}}]}), "turn 2: the name of a tool call is null"),
        (openai(*QA, tools="[{"), "`tools` is text, and not that of a JSON value"),
        (openai(*QA, tools=[{"type": "function"}]), "`tools`, number 1: needed an object with a name"),
        (openai(*QA, tools=5), "`tools`, number 1: needed an object"),
        (openai(*QA, images=["cat.png"]), "`images`: only text"),
        (openai({**QA[0], "images": ["cat.png"]}, A), "turn 1: `images`: only text"),
        ({"conversations": [{"user": "q", "assistant": "a", "image": "cat.png"}]}, "turn 1: `image`: only text"),
        (openai(*QA, id=[1]), "`id` is a list; needed text"),
        (openai(*QA, domain=3), "`domain` is a number"),
        (openai(*QA, finish_reason=1), "`finish_reason` is a number"),
        (openai(*of(system="s")), "no user turn"),
        ({"instruction": "", "output": "a"}, "`instruction` is empty"),
        ({"instruction": "q", "input": 4, "output": "a"}, "`input` is a number"),
        ({"instruction": "q", "output": None}, "turn 2: `output` is null"),
        ({"instruction": "q", "output": "a", "history": [["q"]]}, "`history` holds a list; needed pairs"),
        ({"prompt": "q", "response": ""}, "`response` is empty"),
        ({"prompt": "q", "response": " \n"}, "`response` is nothing but white space"),
        ({"prompt": None, "response": "a"}, "`prompt` is null"),
        ({"question": "q", "answer": 5.0}, r"`answer` is a number \(5.0\)"),
        ({"prompt": QA, "completion": [A]}, "turn 3: a second assistant turn"),
        ({"prompt": 5}, "`prompt` is a number"),
        ({"turns": ["q", ""]}, "turn 2: `turns` is empty"),
        ({"turns": []}, "`turns` is .*needed a list of texts"),
        ({"prompt": QA}, "`prompt` ends with an answer"),
        ({"text": ""}, "`text` is empty"),
        ({"text": None}, "`text` is null"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "no mask: needed one of loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "`loss_mask` has 1 entries for 2 input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "`loss_mask` holds 2; needed 0 and 1"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "`labels` is 2 at place 0, `input_ids` 1"),
        ({"input_ids": [1, 0], "loss_mask": [0, 1], "attention_mask": [1, 0]}, "`attention_mask` holds zeros"),
        ({"input_ids": [1, 0], "loss_mask": [0, 1], "attention_mask": [1]}, "`attention_mask` holds zeros, or is not as long"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "`input_ids` holds -2"),
        ({"input_ids": [1, 2**31], "loss_mask": [0, 1]}, "`input_ids` holds 2147483648"),
        ({"input_ids": [1, 2**70], "loss_mask": [0, 1]}, "`input_ids` must be one list of whole numbers"),
        ({"input_ids": [1.0, 2.0], "loss_mask": [0, 1]}, "`input_ids` must be one list of whole numbers"),
        ({"input_ids": [[1, 2]], "loss_mask": [0, 1]}, "`input_ids` must be one list of whole numbers"),
        ({"input_ids": [[1], [2, 3]], "loss_mask": [0, 1]}, "`input_ids` must be one list of whole numbers"),
        ({"input_ids": [], "loss_mask": []}, "`input_ids` is an empty list"),
    ],
)  # fmt: skip
def test_row_that_cannot_be_used_slips_through(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        item(row)


def test_deep_arguments_stop_the_run() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = {"x": deep}
    with pytest.raises(ValueError, match="turn 2: nested deeper than 64"):
        item(calling(deep))
    with pytest.raises(ValueError, match="turn 2: the arguments of the call of f are not JSON"):
        item(calling('{"x":' * 100_000))


def test_odd_values_are_another_error() -> None:
    """Every value in a row of every dialect replaced by everything else: an item or a reason, nothing else, and no number as text."""
    odd: list[Any] = [None, 5, 2.5, float("nan"), True, "", "x", "[1]", [], [None], [[]], {}, {"a": 1}, b"x", [{"type": "text"}], 10**30]
    for row in (
        sharegpt(("human", "q"), ("function_call", CALL_TEXT), ("tool", "r"), ("gpt", "a")) | {"tools": [TOOL], "system": "s", "id": "i"},
        openai({**QA[0], "content": [{"type": "text", "text": "q"}]}, {**CALLING, "reasoning": "t"}, {"role": "tool", "content": "r"}),
        {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]]},
        {"prompt": QA, "completion": QA, "domain": "d"},
        {"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 1]},
        {"turns": ["q", "r"], "source": "s"},
    ):
        format = detect([row])
        for path in paths(row):
            for value in odd:
                changed = json.loads(json.dumps(row))
                inner = changed
                for key in path[:-1]:
                    inner = inner[key]
                inner[path[-1]] = value
                try:
                    found = item(changed, format)
                except ValueError as error:
                    assert str(error)
                else:
                    assert found.id in ("i", "file:1", "x", "5", "[1]", str(10**30))


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Keys to every place inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(key, *rest) for key, inner in inside for rest in [(), *paths(inner)]]


def test_dialect_of_a_file_is_that_of_one_odd_row() -> None:
    rows = [{"prompt": "q"}, {"prompt": "q", "response": "a"}, {"prompt": "q", "response": None}]
    assert detect(rows) == "pair" and detect([{"x": 1}, *rows[:1]]) == "prompt"
    with pytest.raises(ValueError, match=r"found keys a, b; needed messages: messages; .*`columns`"):
        detect([{"a": 1}, {"b": 2}])
    with pytest.raises(ValueError, match="found keys none"):
        detect([])


def test_columns_of_other_names_are_not_found() -> None:
    row = {"key": "k", "topic": "math", "dialog": [{"who": "human", "says": "q"}, {"who": "gpt", "says": "a"}]}
    columns = {"id": "key", "domain": "topic", "messages": "dialog", "role": "who", "content": "says"}
    assert detect([row], columns) == "messages"
    assert item(row, columns=columns) == Conversation("k", "math", tuple(QA))
    assert item({"q": "q", "response": "a"}, columns={"prompt": "q"}) == Conversation("file:1", "chat", tuple(QA))
    with pytest.raises(ValueError, match="`columns` names promt, which is nothing of ours"):
        item({"q": "q"}, format="prompt", columns={"promt": "q"})


def test_dialect_that_is_asked_for_is_overruled() -> None:
    row = {"prompt": "q", "response": "", "text": "t"}
    assert item(row, format="prompt") == Prompt("file:1", "chat", ("q",), "") and item(row, format="text") == Text("file:1", "chat", "t")
    for format, reason in (("messages", "no messages"), ("alpaca", "`instruction` is null"), ("tokens", "`input_ids` is null")):
        with pytest.raises(ValueError, match=reason):
            item(row, format=format)
    with pytest.raises(ValueError, match="no dialect 'auto'"):
        item(row, format="auto")


@pytest.mark.parametrize(("given", "kept"), [("length", "length"), ("max_tokens", "length"), ("stop", "stop"), (None, "stop")])
def test_answer_that_was_cut_off_looks_complete(given: str | None, kept: str) -> None:
    found = item(openai(*QA, finish_reason=given))
    assert isinstance(found, Conversation) and found.finish_reason == kept


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(line if isinstance(line, bytes) else (line + "\n").encode() for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"a": 1}', "", '{"a": '], "line 3: not JSON .*character"),
        (['{"a": 1}', "[1]"], "line 2: needed a JSON object, found list"),
        (['{"a": 1}', b'{"a": "\xff"}\n'], "line 2: not UTF-8"),
        (["\ufeff{}"], "line 1: not JSON"),
    ],
)
def test_fault_is_not_located(tmp_path: Path, lines, message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl, {message}"):
        list(read_jsonl(write(tmp_path, *lines)))


def test_missing_file_is_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file .*none"):
        list(read_jsonl(tmp_path / "none"))


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_line_separator_inside_a_text_splits_it(tmp_path: Path, mark: str) -> None:
    text = f"one{mark}two"
    path = write(tmp_path, json.dumps({"x": text}, ensure_ascii=ord(mark) < 32), '{"x": "three"}\r', b'{"x": "four"}')
    assert list(read_jsonl(path)) == [(1, {"x": text}), (2, {"x": "three"}), (3, {"x": "four"})]


def row(**changes) -> str:
    return json.dumps({"id": "a", "domain": "chat", "source": "s", "prompt": "red?", **changes})


def test_prompt_forms_are_mixed_up(tmp_path: Path) -> None:
    two = json.dumps({"id": "b", "domain": "math", "turns": ["one", "two"]})
    assert read_prompts(write(tmp_path, row(), two)) == [Prompt("a", "chat", ("red?",), "s"), Prompt("b", "math", ("one", "two"), "")]
    assert read_prompts(write(tmp_path, two))[0].chat == [{"role": "user", "content": "one"}]


@pytest.mark.parametrize("bad", [row(prompt=""), row(prompt=5), row(turns=[]), row(turns=["x", " "]), row(turns="red"), '{"id": "a"}'])
def test_prompt_without_text_is_read(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="line 2: needed `prompt`"):
        read_prompts(write(tmp_path, row(), bad))


def test_empty_file_or_missing_key_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path, ""))
    with pytest.raises(ValueError, match="holds no conversations"):
        read_conversations(write(tmp_path, ""))
    with pytest.raises(ValueError, match="line 1: missing domain; found keys"):
        read_prompts(write(tmp_path, '{"id": "a", "prompt": "x"}'))
    with pytest.raises(ValueError, match="line 1: missing messages"):
        read_conversations(write(tmp_path, row()))


def test_reasoning_and_tools_are_lost_on_the_way(tmp_path: Path) -> None:
    messages = [QA[0], {**CALLING, "reasoning_content": "t"}, {"role": "tool", "content": "r"}]
    [got] = read_conversations(write(tmp_path, row(messages=messages, tools=[TOOL])))
    assert list(got.messages) == messages and got.tools == (TOOL,)


def test_turns_come_in_another_order(tmp_path: Path) -> None:
    """TP2."""
    spoken = [
        {"role": r, "content": c, "extra": 1}
        for r, c in (("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2"))
    ]
    got = read_conversations(write(tmp_path, row(messages=spoken, finish_reason="length"), row(messages=spoken)))
    assert [(m["role"], m["content"]) for m in got[0].messages] == [(m["role"], m["content"]) for m in spoken]
    assert [c.finish_reason for c in got] == ["length", "stop"] and set(got[0].messages[0]) == {"role", "content"}


@pytest.mark.parametrize("messages", [[], "x", [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}], ["x"]])
def test_messages_without_text_are_read(tmp_path: Path, messages) -> None:
    with pytest.raises(ValueError, match="line 1: `messages` must be"):
        read_conversations(write(tmp_path, row(messages=messages)))


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"{d}{i}", d, ("x" * (i % 7 + 1),), "s") for i in range(n) for d in ("chat", "math")]


def test_mix_depends_on_the_order_of_the_file() -> None:
    first = mix_prompts(prompts(40), {"chat": 10, "math": 5}, seed=0, fits=lambda p: True)
    assert [p.domain for p in first] == ["chat"] * 10 + ["math"] * 5 and len({p.id for p in first}) == 15
    assert mix_prompts(prompts(40)[::-1], {"chat": 10, "math": 5}, seed=0, fits=lambda p: True) == first
    assert mix_prompts(prompts(40), {"chat": 10, "math": 5}, seed=1, fits=lambda p: True) != first
    assert mix_prompts(prompts(40), {"chat": 12}, seed=0, fits=lambda p: True)[:10] == first[:10]


def test_prompts_that_do_not_fit_are_taken() -> None:
    short = mix_prompts(prompts(40), {"chat": 10}, seed=0, fits=lambda p: len(p.turns[0]) < 4)
    assert len(short) == 10 and all(len(p.turns[0]) < 4 for p in short)
    with pytest.raises(ValueError, match="30 chat prompts asked for, only 18 there that fit"):
        mix_prompts(prompts(40), {"chat": 30}, seed=0, fits=lambda p: len(p.turns[0]) < 4)
