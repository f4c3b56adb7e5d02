"""Files of prompts and conversations -> plain values; every fault names file and line."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

Message = dict[str, str]


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
    """Messages in spoken order. finish_reason: why the last answer ended; `length` means that it was cut off."""

    id: str
    domain: str
    messages: tuple[Message, ...]
    finish_reason: str = "stop"


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
    """Conversations of a JSONL file with `id`, `domain`, `messages` and optionally `finish_reason`."""
    conversations = []
    for number, row in read_jsonl(path):
        _need(row, ("id", "domain", "messages"), path, number)
        messages = row["messages"]
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ValueError(f"{path}, line {number}: `messages` must be a list of objects with text under role and content")
        conversations.append(
            Conversation(
                id=row["id"], domain=row["domain"], finish_reason=row.get("finish_reason", "stop"),
                messages=tuple({"role": m["role"], "content": m["content"]} for m in messages),
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
