"""Rows of files, in the dialects people write them in -> prompts, conversations, texts and token rows.

A row that cannot be used is a ValueError with the reason; what a turn must be stands in `spectrain.data.dialects`. Dialects:

- messages: `messages` with role and content (OpenAI). sharegpt: `conversations` with from and value. Either also takes the other's keys,
  `system` (text put first), `tools` (a list, or its JSON text) and `finish_reason` of the last answer.
- alpaca: `instruction`, optionally `input` (a blank line in between), `output`, `history` (pairs), `system`.
- pair: a question (prompt, question, query, input, problem) and an answer (response, completion, answer, output, solution), each text or a
  list of messages. A null or empty answer is refused: `format: prompt` takes the questions alone.
- prompt: the question alone, or `turns`, asked in order. text: `text` (content, document). tokens: `input_ids` with `loss_mask`,
  `assistant_masks`, `completion_mask` or `labels` (-100: not supervised; not shifted).

Every dialect takes `id` (text or a whole number), `domain` and `source`. A row with pictures or sound is refused by the key that holds
them. Conversations without an assistant's turn become a Prompt where that can hold them (user turns only).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from spectrain.data.dialects import (
    Message,
    check_media,
    check_order,
    checked,
    json_value,
    kind,
    numbered,
    to_messages,
    to_tools,
    usable_text,
)
from spectrain.data.token_rows import MASKS, ids_and_mask

CHATS = ("messages", "conversations", "conversation")
ASKS = ("prompt", "question", "query", "input", "problem")
ANSWERS = ("response", "completion", "answer", "output", "solution")
TEXTS = ("text", "content", "document")
SYSTEMS = ("system", "system_prompt")
OTHERS = ("id", "domain", "source", "tools", "functions", "finish_reason", "instruction", "context", "history", "turns")
COLUMNS = ("role", *CHATS, *ASKS, *ANSWERS, *TEXTS, "input_ids", *MASKS, "labels", *SYSTEMS, *OTHERS)  # what `columns` may rename to
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
CUT = ("length", "max_tokens", "MAX_TOKENS", "model_length")  # what servers call an answer that reached its length limit


@dataclass(frozen=True)
class Prompt:
    """User turns of one prompt. `turns` are asked in order; training prompts have one."""

    id: str
    domain: str
    turns: tuple[str, ...]
    source: str

    @property
    def chat(self) -> list[Message]:
        """The first turn as a chat."""
        return [{"role": "user", "content": self.turns[0]}]


@dataclass(frozen=True)
class Conversation:
    """Messages in spoken order. finish_reason: why the last answer ended; `length` means that it was cut off.

    A message has role (system, developer, user, assistant, tool) and content, and where it has them reasoning_content, tool_calls
    (`{"type": "function", "function": {"name", "arguments": object}}`, perhaps `id`), tool_call_id and name.
    """

    id: str
    domain: str
    messages: tuple[Message, ...]
    finish_reason: str = "stop"
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Text:
    """Plain text, no chat."""

    id: str
    domain: str
    text: str


@dataclass(frozen=True)
class Tokens:
    """A row that is tokenised already. mask: 1 = supervised; as long as ids."""

    id: str
    domain: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]


Item = Conversation | Prompt | Text | Tokens
Row = Mapping[str, Any]


def detect(values: Sequence[Row], columns: Mapping[str, str] | None = None) -> str:
    """The dialect that most of a file's first rows are in; the earlier one of `DIALECTS` where two are as frequent.

    Raises ValueError with the keys that were found and those that the dialects have.
    """
    found = Counter(filter(None, (_dialect(renamed(value, columns or {})) for value in values)))
    if not found:
        keys = ", ".join(sorted({str(key) for value in values for key in value})[:20]) or "none"
        known = "; ".join(f"{name}: {needs}" for name, needs in DIALECTS.items())
        raise ValueError(f"no known dialect: found keys {keys}; needed {known}. Name them in `columns` (ours: theirs), or set `format`")
    return max(DIALECTS, key=lambda name: found[name])


DIALECTS = {
    "messages": "messages",
    "sharegpt": "conversations",
    "tokens": "input_ids and a mask",
    "alpaca": "instruction and output",
    "pair": "prompt and response",
    "prompt": "prompt or turns",
    "text": "text",
}


def _dialect(row: Row) -> str | None:
    chat = _present(row, CHATS)
    if chat:
        turns = row[chat]
        first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) else {}
        return "messages" if "role" in first or (chat == "messages" and "from" not in first) else "sharegpt"
    if "input_ids" in row:
        return "tokens"
    if "instruction" in row:
        return "alpaca"
    if _ask(row):
        return "pair" if _answer(row, besides=_ask(row)) else "prompt"
    return "prompt" if "turns" in row else "text" if any(key in row for key in TEXTS) else None


def _ask(row: Row) -> str | None:
    return _present(row, ASKS)


def _answer(row: Row, besides: str | None = None) -> str | None:
    return _present(row, ANSWERS, besides)


def _present(row: Row, keys: Sequence[str], besides: str | None = None) -> str | None:
    """The first key with something under it, or else the first that is there: tables have every column in every row."""
    found = [key for key in keys if key in row and key != besides]
    return next((key for key in found if row[key] not in (None, "", [])), found[0] if found else None)


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row under our names; columns: our name -> the row's. ValueError for a name that we do not have."""
    if not columns:
        return row
    if unknown := columns.keys() - set(COLUMNS):
        raise ValueError(f"`columns` names {', '.join(sorted(unknown))}, which is nothing of ours; known are {', '.join(COLUMNS)}")
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}


def convert(value: Row, *, format: str, name: str, domain: str, columns: Mapping[str, str]) -> Item:
    """A row of a file as what it is. name, domain: of rows that have none. Raises ValueError with the reason it cannot be used."""
    row = renamed(value, columns)
    check_media(row)
    if format not in CONVERTERS:
        raise ValueError(f"no dialect {format!r}; known are {', '.join(CONVERTERS)}")
    try:
        return CONVERTERS[format](row, _id(row, name), _label(row, "domain") or domain, columns)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _id(row: Row, name: str) -> str:
    value = row.get("id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _label(row, "id") or name


def _label(row: Row, key: str) -> str:
    """Text under a key that may be missing or null."""
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is {kind(value)}; needed text")
    return checked(value)


def _chat(row: Row, id: str, domain: str, columns: Mapping[str, str]) -> Item:
    key = _present(row, CHATS)
    if key is None:
        raise ValueError(f"no {' or '.join(CHATS)}; found keys {', '.join(sorted(map(str, row)))}")
    return _spoken(row, id, domain, to_messages(row[key], what=key, columns=columns))


def _spoken(row: Row, id: str, domain: str, messages: list[Message]) -> Item:
    """A conversation; a prompt where nobody answers and a prompt can hold it."""
    check_order(messages)
    system = next((text for text in (_label(row, key) for key in SYSTEMS) if text), "")
    if system and messages[0] != {"role": "system", "content": system}:
        if messages[0]["role"] == "system":
            raise ValueError("a system text of the row, and turn 1 is another; needed one")
        messages = [{"role": "system", "content": usable_text(system, "the system text")}, *messages]
    tools = to_tools(row["tools"] if row.get("tools") else row.get("functions"))
    if not tools and len(messages) == 1 and messages[0]["role"] == "user":
        return Prompt(id, domain, (messages[0]["content"],), _source(row))
    finish = _label(row, "finish_reason") or "stop"
    return Conversation(id, domain, tuple(messages), "length" if finish in CUT else finish, tools)


def _source(row: Row) -> str:
    value = row.get("source")
    return value if isinstance(value, str) else ""


def _turn(role: str, value: Any, what: str) -> Message:
    return {"role": role, "content": usable_text(value, f"`{what}`")}


def _alpaca(row: Row, id: str, domain: str, columns: Mapping[str, str]) -> Item:
    asked = usable_text(row.get("instruction"), "`instruction`")
    key = next((key for key in ("input", "context") if row.get(key) not in (None, "")), None)
    if key:
        asked = f"{asked}\n\n{usable_text(row[key], f'`{key}`')}"
    turns: list[Any] = []
    history = json_value(row.get("history") or [], "history")
    if not isinstance(history, list):
        raise ValueError(f"`history` is {kind(history)}; needed a list of pairs")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"`history` holds {kind(pair)}; needed pairs of question and answer")
        turns += [("user", pair[0], "history"), ("assistant", pair[1], "history")]
    turns.append(("user", asked, "instruction"))
    if answer := _answer(row):
        turns.append(("assistant", row[answer], answer))
    return _spoken(row, id, domain, numbered(turns, lambda turn: _turn(*turn)))


def _pair(row: Row, id: str, domain: str, columns: Mapping[str, str]) -> Item:
    ask = _ask(row)
    answer = _answer(row, besides=ask)
    if ask is None or answer is None:
        found = ", ".join(sorted(map(str, row)))
        raise ValueError(f"needed one of {', '.join(ASKS)} and one of {', '.join(ANSWERS)}, found keys {found}")
    return _spoken(row, id, domain, [*_said("user", row[ask], ask, columns), *_said("assistant", row[answer], answer, columns)])


def _said(role: str, value: Any, what: str, columns: Mapping[str, str]) -> list[Message]:
    return to_messages(value, what=what, columns=columns) if isinstance(value, list) else [_turn(role, value, what)]


def _prompt(row: Row, id: str, domain: str, columns: Mapping[str, str]) -> Item:
    if row.get("turns") is not None:
        turns = json_value(row["turns"], "turns")
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"`turns` is {kind(turns)}; needed a list of texts")
        asked = tuple(m["content"] for m in numbered(turns, lambda turn: _turn("user", turn, "turns")))
        if any(_label(row, key) for key in SYSTEMS) or row.get("tools"):
            raise ValueError("`turns` with a system text or tools; needed `messages`")
        return Prompt(id, domain, asked, _source(row))
    key = _present(row, (*ASKS, "instruction"))
    if key is None:
        raise ValueError(f"needed `prompt` or `turns`, found keys {', '.join(sorted(map(str, row)))}")
    messages = _said("user", row[key], key, columns)
    if any(message["role"] == "assistant" for message in messages) and messages[-1]["role"] == "assistant":
        raise ValueError(f"`{key}` ends with an answer; needed a question (or `format: messages` with it as `messages`)")
    return _spoken(row, id, domain, messages)


def _text(row: Row, id: str, domain: str, columns: Mapping[str, str]) -> Item:
    key = _present(row, TEXTS) or "text"
    return Text(id, domain, usable_text(row.get(key), f"`{key}`"))


def _tokens(row: Row, id: str, domain: str, columns: Mapping[str, str]) -> Item:
    ids, mask = ids_and_mask(row)
    return Tokens(id, domain, tuple(ids.tolist()), tuple(mask.tolist()))


CONVERTERS: dict[str, Callable[[Row, str, str, Mapping[str, str]], Item]] = {
    "messages": _chat, "sharegpt": _chat, "alpaca": _alpaca, "pair": _pair, "prompt": _prompt, "text": _text, "tokens": _tokens,
}  # fmt: skip


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line; only a line feed ends a line. ValueError names file and line."""
    if not path.is_file():
        raise ValueError(f"no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 (byte {error.start + 1}); mend or remove the line") from error
            except json.JSONDecodeError as error:
                where = f"{error.msg} at character {error.pos + 1}"
                raise ValueError(f"{path}, line {number}: not JSON ({where}); mend or remove the line") from error
            if not isinstance(value, dict):
                raise ValueError(f"{path}, line {number}: needed a JSON object, found {type(value).__name__}")
            yield number, value


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file with `id`, `domain`, `source`, and `prompt` or `turns`. ValueError names file and line."""
    prompts = []
    for number, row in read_jsonl(path):
        turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            raise ValueError(f"{path}, line {number}: needed `prompt` (text) or `turns` (list of texts), found keys {sorted(row)}")
        _need(row, ("id", "domain"), path, number)
        prompts.append(Prompt(id=row["id"], domain=row["domain"], turns=tuple(turns), source=str(row.get("source", ""))))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def read_conversations(path: Path) -> list[Conversation]:
    """Conversations of a JSONL file with `id`, `domain`, `messages` and optionally `finish_reason` and `tools`, as we write them."""
    conversations = []
    for number, row in read_jsonl(path):
        _need(row, ("id", "domain", "messages"), path, number)
        messages = row["messages"]
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ValueError(f"{path}, line {number}: `messages` must be a list of objects with text under role and content")
        conversations.append(
            Conversation(
                id=row["id"], domain=row["domain"], finish_reason=row.get("finish_reason", "stop"),
                messages=tuple({key: m[key] for key in MESSAGE_KEYS if m.get(key) is not None} for m in messages),
                tools=tuple(row.get("tools", ())),
            )
        )  # fmt: skip
    if not conversations:
        raise ValueError(f"{path} holds no conversations")
    return conversations


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _need(row: Mapping[str, Any], keys: tuple[str, ...], path: Path, number: int) -> None:
    missing = [key for key in keys if key not in row]
    if missing:
        raise ValueError(f"{path}, line {number}: missing {', '.join(missing)}; found keys {sorted(row)}")


def mix_prompts(prompts: Iterable[Prompt], mix: Mapping[str, int], *, seed: int, fits: Callable[[Prompt], bool]) -> list[Prompt]:
    """`mix[domain]` prompts of each domain among those that fit, chosen by a hash of id and seed (not by their order).

    Raises ValueError when a domain has too few.
    """
    chosen = []
    ranked = sorted(prompts, key=lambda p: hashlib.sha256(f"{seed}:{p.id}".encode()).digest())
    for domain, number in mix.items():
        picked = list(islice((p for p in ranked if p.domain == domain and fits(p)), number))
        if len(picked) < number:
            found = f"{number} {domain} prompts asked for, only {len(picked)} there that fit"
            raise ValueError(f"{found}; lower the number or the length limit")
        chosen += picked
    return chosen
