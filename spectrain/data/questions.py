"""What is asked of the target: the turns of a conversation without its answers, and the settings and the key of each.

Everything here follows from the question's text and the settings alone, never from its place in a file: a run may be stopped, its
input reordered or lengthened, and goes on with what is missing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spectrain.config import RegenerateConfig
from spectrain.data.formats import Conversation, Message, Prompt

INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True)
class Question:
    """Answer t is asked for when the messages `turns[t]` have been said after answer t - 1. place: file and row that it came from."""

    id: str
    domain: str
    turns: tuple[tuple[Message, ...], ...]
    place: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def asked(self) -> list[Any]:
        """What the key is made of: the messages of a single turn, or a list of them a turn."""
        return list(self.turns[0]) if len(self.turns) == 1 else [list(turn) for turn in self.turns]


def question_of(item: Any) -> Question:
    """A prompt's turns, or those of a conversation, whose own answers are left out; ValueError says why nothing can be asked.

    Of a conversation with tools only what comes before their first use can be asked: their results answer the calls of another model.
    """
    if isinstance(item, Prompt):
        turns = [({"role": "user", "content": text},) for text in item.turns]
        return Question(item.id, item.domain, tuple(turns))
    if not isinstance(item, Conversation):
        raise ValueError(f"{type(item).__name__.lower()} without user turns: there is nothing to ask")
    found: list[tuple[Message, ...]] = []
    turn: list[Message] = []
    cut = False
    for message in item.messages:
        if message["role"] == "tool" or message.get("tool_calls"):
            turn, cut = [], True
            break
        if message["role"] != "assistant":
            turn.append(_checked(message))
        elif any(m["role"] == "user" for m in turn):
            found.append(tuple(turn))
            turn = []
    if any(m["role"] == "user" for m in turn):
        found.append(tuple(turn))
    if not found:
        raise ValueError("the first answer is a tool call: nothing is left to ask" if cut else "no user turn: there is nothing to ask")
    return Question(item.id, item.domain, tuple(found))


def _checked(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"a {message['role']} turn is empty")
    if message["role"] not in ("user", *INSTRUCTIONS):
        raise ValueError(f"a turn of the role {message['role']!r}, which nobody answers")
    return {key: value for key, value in message.items() if value is not None}


def settings_of(config: RegenerateConfig, question: Question, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer to this question depends on; identity: of target and template.

    Temperature and thinking are drawn from their mixtures by a hash of the question.
    """
    asked = json.dumps(question.asked, sort_keys=True)
    shares = sorted(config.temperatures.items())
    dice, total = _dice(config.seed, "temperature", asked) * sum(share for _, share in shares), 0.0
    temperature = shares[-1][0]
    for value, share in shares:
        total += share
        if dice < total:
            temperature = value
            break
    thinking = config.thinking
    if thinking == "mixed":
        thinking = "on" if _dice(config.seed, "thinking", asked) < 0.5 else "off"
    return {
        "temperature": temperature, "top_p": config.top_p, "max_new_tokens": config.max_new_tokens, "thinking": thinking,
        "template_kwargs": config.template_kwargs, "seed": config.seed, **identity,
    }  # fmt: skip


def _dice(seed: int, what: str, asked: str) -> float:
    return int(hashlib.sha256(f"{seed}:{what}:{asked}".encode()).hexdigest()[:12], 16) / 2**48


def answer_key(asked: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Hash of all that an answer depends on. Equal questions count on: key, key-1, key-2 …"""
    return hashlib.sha256(json.dumps([list(asked), dict(settings)], sort_keys=True).encode()).hexdigest()[:16]


def seed_of(key: str) -> int:
    """The random seed of an answer, 63 bits."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) >> 1


def missing(questions: Sequence[tuple[Question, str]], done: Mapping[str, str]) -> list[tuple[Question, str]]:
    """Of (question, key without count): those without an answer, with their full key.

    done: full key -> id of each answer there is. Of equal questions, an answer belongs to the one of its id, otherwise to any: as many
    are left to ask as there are answers too few, in whatever order they come.
    """
    there: dict[str, dict[str, str]] = {}
    for full, name in done.items():
        there.setdefault(full.partition("-")[0], {})[full] = name
    groups: dict[str, list[Question]] = {}
    for question, key in questions:
        groups.setdefault(key, []).append(question)
    todo = []
    for key, group in groups.items():
        free = dict(there.get(key, {}))
        without = []
        for question in group:
            own = next((full for full, name in free.items() if name == question.id), None)
            if own is None:
                without.append(question)
            else:
                del free[own]
        taken, number = there.get(key, {}), 0
        for question in without[len(free) :]:
            while (full := f"{key}-{number}" if number else key) in taken:
                number += 1
            todo.append((question, full))
            number += 1
    return todo
