"""Turns in the dialects people write them in -> messages. A turn that cannot be used is refused by its number and with its reason.

What is kept is kept to the last code point: nothing is stripped, normalised or turned into text. The rules:
- Text that is null, empty or nothing but white space is refused; an assistant turn with a tool call or reasoning may lack text, and a
  tool may return nothing. NUL characters and lone surrogates are refused: no tokenizer gives them back.
- An unknown role is refused by its name. Two turns of one role in a line are refused, except the results of several tools: nobody
  can tell whether one is missing in between. A tool result needs an assistant's turn before it. A developer turn may follow a system turn.
- An assistant's turn before the first user turn is refused: the model was asked nothing, so it would not have said that when served.
- A last turn that is not the assistant's is kept as context.
- Parts of content are joined without a separator; a part that is not text (an image) is refused by its type.
- Arguments of a tool call become an object, as chat templates expect; those that are no JSON object are refused.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

CALL = "call"  # a turn that is a tool call and nothing else
ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "tool_result", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), CALL),
}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
ROLE_KEYS = ("role", "from", "user", "speaker")
TEXT_KEYS = ("content", "value", "text")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
PAIRS = tuple((ask, answer) for ask in ("human", "user", "prompt") for answer in ("assistant", "gpt", "bot", "response"))
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_PARTS = ("thinking", "reasoning")
MAX_DEPTH = 64  # of arguments and tool descriptions; templates walk them with a recursive encoder


def kind(value: Any) -> str:
    """What a JSON value is called."""
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text", "bool": "a boolean"}
    return names.get(type(value).__name__, f"a number ({value!r:.20})" if isinstance(value, int | float) else type(value).__name__)


def checked(text: str) -> str:
    """The text itself; ValueError names the first character that no tokenizer gives back."""
    if "\0" in text or not (text.isascii() or _encodes(text)):
        at = next(i for i, char in enumerate(text) if char == "\0" or "\ud800" <= char <= "\udfff")
        what = "a NUL" if text[at] == "\0" else f"a lone surrogate (U+{ord(text[at]):04X})"
        raise ValueError(f"{what} at character {at + 1}; mend the text")
    return text


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_tree(value: Any, depth: int = 0) -> Any:
    """A JSON value whose texts are all usable; ValueError otherwise, or when it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        checked(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            checked(str(key))
            checked_tree(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            checked_tree(inner, depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise ValueError(f"holds {kind(value)}, which JSON has not")
    return value


def json_value(value: Any, what: str) -> Any:
    """A value that some files hold as JSON text, as CSV must."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{what}` is text, and not that of a JSON value ({error})") from None


def check_media(value: Mapping[str, Any]) -> None:
    """ValueError where a row or a turn holds pictures or sound."""
    for key in MEDIA:
        if value.get(key):
            raise ValueError(f"`{key}`: only text can be used")


def usable_text(value: Any, what: str) -> str:
    """Text that says something; ValueError for null, empty, and everything that is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {kind(value)}; needed text")
    if not value or value.isspace():
        raise ValueError(f"{what} is {'nothing but white space' if value else 'empty'}")
    return checked(value)


def to_messages(turns: Any, *, what: str, columns: Mapping[str, str]) -> list[Message]:
    """The messages of a list of turns (or its JSON text). columns: `role` and `content` -> the turns' own keys.

    Raises ValueError naming the turn, from 1.
    """
    turns = json_value(turns, what)
    if not isinstance(turns, list | tuple) or not turns:
        raise ValueError(f"`{what}` is {'an empty list' if isinstance(turns, list) else kind(turns)}; needed a list of turns")
    role_keys = (columns["role"],) if "role" in columns else ROLE_KEYS
    text_keys = (columns["content"],) if "content" in columns else TEXT_KEYS
    return numbered(_spread(turns), lambda turn: _message(turn, role_keys, text_keys))


def numbered(turns: Any, convert: Callable[[Any], Message]) -> list[Message]:
    """convert over turns; its ValueError gets the number of the turn."""
    messages = []
    for turn in turns:
        try:
            messages.append(convert(turn))
        except ValueError as error:
            raise ValueError(f"turn {len(messages) + 1}: {error}") from None
    return messages


def _spread(turns: Sequence[Any]) -> Iterator[Any]:
    """Turns; an object that holds a question and its answer is two."""
    for turn in turns:
        pair = _pair(turn) if isinstance(turn, dict) and _first(TEXT_KEYS, turn) is None else None
        if pair is None:
            yield turn
        else:
            if turn.get("system"):
                yield {"role": "system", "content": turn["system"]}
            yield {"role": "user", "content": turn[pair[0]], **{key: turn[key] for key in MEDIA if key in turn}}
            yield {"role": "assistant", "content": turn[pair[1]]}


def _pair(turn: dict[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if pair[0] in turn and pair[1] in turn), None)


def _first(keys: tuple[str, ...], turn: dict[str, Any]) -> str | None:
    for key in keys:
        if key in turn:
            return key
    return None


def _message(turn: Any, role_keys: tuple[str, ...], text_keys: tuple[str, ...]) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"it is {kind(turn)}; needed an object with a role and its text")
    role = _role(turn, role_keys)
    key = _first(text_keys, turn)
    if role == CALL:
        return {"role": "assistant", "content": "", "tool_calls": _calls(json_value(turn[key] if key else None, "function call"))}
    content = turn[key] if key else None
    message: Message = {"role": role}
    thought = ""
    if isinstance(content, list):
        content, thought = _joined(content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"content of the {role} is {kind(content)}; needed text")
    message["content"] = checked(content or "")
    if len(turn) > 2 or key is None or thought:
        _add_extras(message, turn, thought)
    if not content or content.isspace():
        may_be_empty = content is not None and role == "tool" or "tool_calls" in message or "reasoning_content" in message
        if not may_be_empty:
            found = "null" if content is None else "nothing but white space" if content else "empty"
            raise ValueError(f"content of the {role} is {found if key else 'missing'}; needed text")
    return message


def _role(turn: dict[str, Any], keys: tuple[str, ...]) -> str:
    key = _first(keys, turn)
    if key is None:
        raise ValueError(f"no role; found keys {', '.join(map(str, turn)) or 'none'}, needed one of {', '.join(keys)}")
    name = turn[key]
    if not isinstance(name, str):
        raise ValueError(f"the role is {kind(name)}; needed text")
    role = ROLES.get(name) or ROLES.get(name.lower())
    if role is None:
        raise ValueError(f"unknown role {name[:40]!r}; known are {', '.join(ROLES)}")
    return role


def _joined(parts: Sequence[Any]) -> tuple[str, str]:
    """Text and reasoning of a list of content parts."""
    texts, thoughts = [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise ValueError(f"a part of the content is {kind(part)}; needed text or an object")
        name = part.get("type", "text")
        if name in REASONING_PARTS:
            thoughts.append(_part_text(part, name))
        elif name in TEXT_PARTS:
            texts.append(_part_text(part, "text"))
        else:
            raise ValueError(f"a part of type {str(name)[:40]!r}; only text can be used")
    return "".join(texts), "".join(thoughts)


def _part_text(part: Mapping[str, Any], key: str) -> str:
    text = part.get(key)
    if isinstance(text, list):  # reasoning may itself be a list of text parts
        text, _ = _joined(text)
    if not isinstance(text, str):
        raise ValueError(f"`{key}` of a part is {kind(text)}; needed text")
    return text


def _add_extras(message: Message, turn: dict[str, Any], thought: str) -> None:
    """Reasoning, tool calls, and names, where the turn has them."""
    check_media(turn)
    role, found = message["role"], {thought}
    for key in REASONING_KEYS:
        value = turn.get(key)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"`{key}` is {kind(value)}; needed text")
        found.add(value or "")
    found.discard("")
    if len(found) > 1:
        raise ValueError(f"reasoning under several names ({', '.join(k for k in REASONING_KEYS if turn.get(k))}) that differs; needed one")
    if found:
        message["reasoning_content"] = checked(found.pop())
    calls = turn.get("tool_calls") or turn.get("function_call")
    if calls:
        message["tool_calls"] = _calls(json_value(calls, "tool_calls"))
    if role != "assistant" and (calls or "reasoning_content" in message):
        raise ValueError(f"{'tool calls' if calls else 'reasoning'} of the {role}; only the assistant has them")
    for key in ("name", "tool_call_id"):
        if turn.get(key) is not None:
            message[key] = usable_text(turn[key], f"`{key}`")


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls in the shape of OpenAI's, from a list of them or one, with or without the wrapper `function`."""
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not calls:
        raise ValueError(f"tool calls are {kind(calls)}; needed a list of objects")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ValueError(f"a tool call is {kind(call)}; needed an object")
    if call.get("type", "function") not in ("function", None):
        raise ValueError(f"a tool call of type {str(call['type'])[:40]!r}; only functions can be used")
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        raise ValueError(f"`function` of a tool call is {kind(function)}; needed an object with name and arguments")
    name = usable_text(function.get("name"), "the name of a tool call")
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # some servers write nothing for a call without arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of the call of {name[:40]} are not JSON ({error})") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of the call of {name[:40]} are {kind(arguments)}; needed an object")
    made = {"type": "function", "function": {"name": name, "arguments": checked_tree(arguments)}}
    return made if call.get("id") is None else {**made, "id": usable_text(call["id"], "the id of a tool call")}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"a key twice among {', '.join(key for key, _ in pairs)[:80]}")
    return made


def to_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Descriptions of tools in the shape chat templates expect, from a list, one object, or the JSON text of either."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    value = json_value(value, "tools")
    if value is None:
        return ()
    tools = []
    for number, tool in enumerate([value] if isinstance(value, Mapping) else value if isinstance(value, list) else [None], 1):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ValueError(f"`tools`, number {number}: needed an object with a name, found {kind(tool)}")
        tools.append(checked_tree(dict(tool) if inner is not tool else {"type": "function", "function": dict(tool)}))
    return tuple(tools)


def check_order(messages: Sequence[Message]) -> None:
    """ValueError where turns cannot have been spoken in this order (see the module's rules)."""
    before, asked, open_calls = "", False, None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role == "tool":
            if before not in ("assistant", "tool"):
                raise ValueError(f"turn {number}: a tool result, but no assistant's turn before it that could have called")
            if open_calls == 0:
                raise ValueError(f"turn {number}: more tool results than calls before them")
            open_calls = open_calls and open_calls - 1
        elif role == before:
            raise ValueError(f"turn {number}: a second {role} turn in a line; needed another role in between")
        elif role == "assistant" and not asked:
            raise ValueError(f"turn {number}: the assistant speaks before anything was asked; drop the turn, or make it system text")
        if role == "assistant":  # calls written into the text cannot be counted: None
            open_calls = len(message.get("tool_calls", ())) or None
        asked = asked or role == "user"
        before = role
    if not asked:
        raise ValueError("no user turn: nothing was asked")
