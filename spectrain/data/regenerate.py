"""Answers by the target itself, in process: batches of prompts of like length, conversations turn by turn, reasoning set apart.

What is asked is in data/questions.py, the file of answers in data/answers.py, and the way through a server in data/endpoint.py.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spectrain.data.answers import Answer, AnswerFile, Dialogue, Tally
from spectrain.data.formats import Message
from spectrain.data.masking import check_messages
from spectrain.data.questions import Question, answer_key, missing, question_of, seed_of
from spectrain.data.templates import Template
from spectrain.data.turns import Settings, say

Take = Callable[[int, Answer | ValueError], None]  # the number of a chat among those asked, its answer or why there is none
Answerer = Callable[[Sequence[list[Message]], Mapping[str, Any], Sequence[int], Take], None]  # chats, settings, seeds, take
Length = Callable[[list[Message], Mapping[str, Any]], int]

THINK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
# gpt-oss: channels (https://cookbook.openai.com/articles/openai-harmony); the last message is the answer
HARMONY = re.compile(
    r"\s*<\|channel\|>analysis<\|message\|>(.*?)<\|end\|><\|start\|>assistant<\|channel\|>final<\|message\|>(.*)", re.DOTALL
)
OPENED = {"<think>": "</think>", "<|channel|>analysis<|message|>": "<|end|>"}


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """(reasoning, answer) of what the target said. opened: its prompt ended within the reasoning (`…<think>`).

    Line feeds beside the marks belong to the template, which writes them itself. Reasoning that was cut off leaves an empty answer.
    """
    if opened:
        text = "<think>" + text
    for pattern in (THINK, HARMONY):
        found = pattern.fullmatch(text)
        if found:
            return found[1].strip("\n"), found[2].lstrip("\n")
    for begin, end in OPENED.items():
        if text.lstrip().startswith(begin) and end not in text:
            return text.lstrip().removeprefix(begin).strip("\n"), ""
    return "", text


def open_dialogues(
    items: Iterable[Any], settings: Callable[[Any], Mapping[str, Any]], file: AnswerFile, *, limit: int | None = None
) -> list[Dialogue]:
    """What is still to be asked for these items (prompts, conversations); what cannot be asked is rejected.

    settings(item): what its answer depends on, apart from the messages. limit: items taken, the rejected ones not counted.
    """
    questions: list[tuple[Question, str]] = []
    kept: dict[str, Mapping[str, Any]] = {}
    for item in items:
        try:
            question = item if isinstance(item, Question) else question_of(item)
        except ValueError as error:
            file.reject(item.id, str(error))
            continue
        if limit is not None and len(questions) >= limit:
            break
        own = settings(item)
        key = answer_key(question.asked, own)
        kept[key] = own
        questions.append((question, key))
    todo = missing(questions, file.done)
    file.tally.there = len(questions) - len(todo)
    return [Dialogue(question, key, kept[key.partition("-")[0]]) for question, key in todo]


def odd_answers(template: Template, dialogue: Dialogue) -> int:
    """How many answers of a conversation, brought back through the template, are other tokens than the target read and said."""
    try:
        messages = check_messages(template, dialogue.messages, None)
        rows = say(template, messages, None, Settings(rows="turn"), cut=dialogue.answers[-1].finish_reason == "length").rows
    except ValueError:
        return len(dialogue.answers)
    taught = {turn.number: (turn.begin, tuple(turn.ids_L[turn.begin : turn.end])) for row in rows for turn in row.turns}
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return sum(taught.get(i) != (said.prompt_tokens, said.ids) for i, said in zip(numbers, dialogue.answers, strict=True))


def regenerate(
    prompts: Sequence[Any], *, answer: Answerer, settings: Callable[[Any], Mapping[str, Any]], out: Path, batch_size: int,
    length: Length | None = None, model: str = "",
) -> int:  # fmt: skip
    """Answer prompts or conversations into a JSONL file of conversations; returns the number answered now.

    answer(chats, settings, seeds, take) calls take(n, answer) as chat n is answered, in any order. settings(prompt): what the answer
    depends on, apart from the messages; prompts are asked with those of equal settings, shortest first. What was taken is safe on disk; a
    torn last line is dropped and redone.
    """
    with AnswerFile(out) as file:
        dialogues = open_dialogues(prompts, settings, file)
        return answer_in_batches(dialogues, answer=answer, file=file, batch_size=batch_size, length=length, model=model).answered


def answer_in_batches(
    dialogues: Sequence[Dialogue], *, answer: Answerer, file: AnswerFile, batch_size: int, batches: int = 1, length: Length | None = None,
    model: str = "",
) -> Tally:  # fmt: skip
    """Answer every dialogue to its last turn. batches: so many batches of prompts are given to a call of `answer`, which fills the places
    of rows that end from them. length(chat, settings): tokens of a prompt (without it, its characters are counted).
    """
    begin = time.monotonic()
    groups: dict[str, list[Dialogue]] = {}
    for dialogue in dialogues:
        groups.setdefault(json.dumps(dict(dialogue.settings), sort_keys=True), []).append(dialogue)
    with tqdm(total=len(dialogues), desc="answers", unit="row", disable=None) as bar:

        def ended() -> None:
            bar.update()
            bar.set_postfix_str(f"{file.tally.tokens / (time.monotonic() - begin):.0f} tokens/s")

        for group in groups.values():
            todo = _Turns(group, length or _characters, file, model, ended)
            while asked := todo.next(batch_size, batches):
                chats = [dialogue.chat for dialogue in asked]
                answer(chats, asked[0].settings, [_turn_seed(dialogue) for dialogue in asked], todo.take)
    file.tally.seconds += time.monotonic() - begin
    return file.tally


def _turn_seed(dialogue: Dialogue) -> int:
    return seed_of(f"{dialogue.key}:{len(dialogue.answers)}" if dialogue.answers else dialogue.key)


def _characters(chat: list[Message], settings: Mapping[str, Any]) -> int:
    return sum(len(str(message.get("content", ""))) for message in chat)


class _Turns:
    """The turns that can be asked now: first ones, shortest first, and later ones, which go first as soon as they fill a batch.

    So conversations end soon after they began, and a stop loses few of them.
    """

    def __init__(self, group: Sequence[Dialogue], length: Length, file: AnswerFile, model: str, ended: Callable[[], None]) -> None:
        self._length, self._file, self._model, self._ended = length, file, model, ended
        self._later: list[tuple[int, Dialogue]] = []
        self._asked: dict[int, Dialogue] = {}  # by number, those without an answer so far
        first = [(size, dialogue) for dialogue in group if (size := self._measure(dialogue)) is not None]
        first.sort(key=lambda pair: pair[0])
        self._first: Iterator[tuple[int, Dialogue]] = iter(first)

    def _measure(self, dialogue: Dialogue) -> int | None:
        """Length of the next prompt; None when it cannot be asked: the conversation then ends before it, or is rejected."""
        try:
            return self._length(dialogue.chat, dialogue.settings)
        except ValueError as error:
            self._end(dialogue, error)
            return None

    def _end(self, dialogue: Dialogue, error: ValueError | None = None) -> None:
        if dialogue.answers:
            self._file.write([dialogue], self._model)
        else:
            self._file.reject(dialogue.question.id, str(error), **dialogue.question.place)
        self._ended()

    def next(self, size: int, batches: int) -> list[Dialogue]:
        """What is asked next, at most so many batches of `size`; empty at the end."""
        if self._asked:
            raise ValueError(f"{len(self._asked)} prompts were left without an answer; the answering function must give one each")
        self._later.sort(key=lambda pair: pair[0])
        most = size * batches
        fresh = [] if len(self._later) >= size else [dialogue for _, dialogue in islice(self._first, most)]
        asked = fresh or [dialogue for _, dialogue in self._later[:most]]
        if not fresh:
            self._later = self._later[most:]
        self._asked = dict(enumerate(asked))
        return asked

    def take(self, number: int, said: Answer | ValueError) -> None:
        """Hand an answer to the dialogue of this number among those asked last; a conversation that ends with it is written."""
        dialogue = self._asked.pop(number)
        if isinstance(said, ValueError):
            self._end(dialogue, said)
        elif not dialogue.take(said):
            self._end(dialogue)
        elif (size := self._measure(dialogue)) is not None:
            self._later.append((size, dialogue))
