"""Answers by the target itself, written as they come and resumed by what each row really is.

A row's key is the hash of its messages and of every setting that changes the answer; a second call makes exactly the rows that
are missing, in whatever order the prompts come.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spectrain.data.formats import Message, Prompt, read_jsonl


@dataclass(frozen=True)
class Answer:
    """An answer's text, number of tokens, and finish reason (`stop` or `length`)."""

    text: str
    tokens: int
    finish_reason: str


Answerer = Callable[[Sequence[list[Message]], Mapping[str, Any], Sequence[int]], list[Answer]]


def answer_key(messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
    """Hash of all that an answer depends on."""
    return hashlib.sha256(json.dumps([list(messages), dict(settings)], sort_keys=True).encode()).hexdigest()[:16]


def regenerate(
    prompts: Sequence[Prompt], *, answer: Answerer, settings: Callable[[Prompt], Mapping[str, Any]], out: Path, batch_size: int
) -> int:
    """Answer prompts into a JSONL file of conversations; returns the number answered now.

    answer(chats, settings, seeds) -> answers. settings(prompt): what the answer depends on, apart from the messages; prompts are
    batched with those of equal settings, shortest first. Finished batches are safe on disk; a torn last line is dropped and redone.
    """
    done = _mend(out)
    todo: dict[str, list[tuple[str, Prompt]]] = {}
    for prompt in prompts:
        key = answer_key(prompt.chat, settings(prompt))
        if key not in done:
            todo.setdefault(json.dumps(dict(settings(prompt)), sort_keys=True), []).append((key, prompt))
    out.parent.mkdir(parents=True, exist_ok=True)
    count = sum(map(len, todo.values()))
    with out.open("a", encoding="utf-8", newline="\n") as file, tqdm(total=count, desc="answers", unit="row", disable=None) as bar:
        for group in todo.values():
            group.sort(key=lambda pair: len(pair[1].turns[0]))
            for start in range(0, len(group), batch_size):
                batch = group[start : start + batch_size]
                chats = [prompt.chat for _, prompt in batch]
                answers = answer(chats, settings(batch[0][1]), [int(key, 16) >> 1 for key, _ in batch])
                for (key, prompt), chat, reply in zip(batch, chats, answers, strict=True):
                    messages = [*chat, {"role": "assistant", "content": reply.text}]
                    row = {"id": prompt.id, "domain": prompt.domain, "messages": messages, "finish_reason": reply.finish_reason,
                           "tokens": reply.tokens, "key": key}  # fmt: skip
                    file.write(json.dumps(row, ensure_ascii=True) + "\n")
                file.flush()
                os.fsync(file.fileno())
                bar.update(len(batch))
    return count


def _mend(out: Path) -> set[str]:
    """Keys of the rows already there; a last line without its line feed is cut off."""
    if not out.exists():
        return set()
    content = out.read_bytes()
    if content and not content.endswith(b"\n"):
        with out.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
    return {row["key"] for _, row in read_jsonl(out) if "key" in row}
