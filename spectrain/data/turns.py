"""One assistant turn in its own rendering: the definition of what is supervised.

The row of turn k is the template's rendering of the messages up to k; its prompt is the generation prompt for the messages before k.
Supervised is what stands behind the ids of the prompt, up to and with the first token at which the serving loop stops. It is the slow
twin of spectrain/data/plans.py.

Legend: L tokens.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.data.templates import CLOSE, OPEN, PROBE, REASONING_KEYS, Messages, Speech, Template, speech_of, texts_of

Tools = Sequence[Any] | None


@dataclass(frozen=True)
class Settings:
    """rows: one a `conversation`, one a `turn`, or `auto`: a turn a row where some turn reads otherwise in the whole. thinking: `on` takes
    answers with reasoning, `off` those without, `mixed` all."""

    rows: str = "auto"
    thinking: str = "mixed"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("rows", self.rows, ("auto", "conversation", "turn")), ("thinking", self.thinking, ("mixed", "on", "off")),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} {value!r}; there are {', '.join(known)}")


@dataclass(frozen=True)
class Turn:
    """ids_L[begin:end] of message `number` in its own row are supervised."""

    number: int
    ids_L: list[int]
    begin: int
    end: int


@dataclass(frozen=True)
class SaidRow:
    """A row and the turns supervised in it. upto: how many messages it renders; thinking: with the template's switch on."""

    ids_L: list[int]
    turns: tuple[Turn, ...]
    upto: int
    thinking: bool

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(turn.number for turn in self.turns)

    @property
    def mask(self) -> list[int]:
        mask = [0] * len(self.ids_L)
        for turn in self.turns:
            mask[turn.begin : turn.end] = [1] * (turn.end - turn.begin)
        return mask


@dataclass(frozen=True)
class Said:
    """Rows of a conversation, and why some of its answers are supervised nowhere: the template cannot say them (faults), they have or
    lack reasoning (unfit), or they read otherwise in the whole than when they were said (rewritten)."""

    rows: tuple[SaidRow, ...]
    faults: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        return self.faults + self.unfit + self.rewritten


def say(template: Template, messages: Messages, tools: Tools, settings: Settings, *, cut: bool = False) -> Said:
    """Rows of checked messages. cut: the last answer ended at the length limit. ValueError when no answer can be supervised."""
    for _ in range(2):  # again if midnight passed between two renderings that write the date
        day = template.today()
        try:
            return _say(template, messages, tools, settings, cut=cut)
        except ValueError:
            if day == template.today():
                raise
    raise AssertionError("two midnights in one conversation")


def _say(template: Template, messages: Messages, tools: Tools, settings: Settings, *, cut: bool) -> Said:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no token of an assistant turn to learn from: there is no assistant turn")
    turns, faults, unfit, rewritten = [], [], [], []
    for i in answers:
        last = i == answers[-1]
        reasoned = speech_of(messages[i], cut=cut and last).reasoned
        if settings.thinking != "mixed" and reasoned != (settings.thinking == "on"):
            unfit.append(f"turn {i + 1}: an answer with{'' if reasoned else 'out'} reasoning, and thinking is {settings.thinking}")
            continue
        try:
            turns.append(turn_of(template, messages, i, tools, cut=cut and last))
        except ValueError as error:
            faults.append(str(error))
    if not turns:
        raise ValueError([*faults, *unfit][0])
    rows = [SaidRow(turn.ids_L, (turn,), turn.number + 1, speech_of(messages[turn.number]).reasoned) for turn in turns]
    if settings.rows != "turn":
        whole = whole_of(template, messages, tools, turns)
        if settings.rows == "conversation" or len(whole.turns) == len(turns):
            rows = [whole]
            others = sorted({turn.number for turn in turns} - set(whole.numbers))
            rewritten = [f"turn {number + 1}: reads otherwise in the whole than when it was said" for number in others]
    if not any(row.turns for row in rows):
        raise ValueError("no token of an assistant turn to learn from: none reads in the whole as when it was said; make a row a turn")
    return Said(tuple(rows), tuple(faults), tuple(unfit), tuple(rewritten))


def whole_of(template: Template, messages: Messages, tools: Tools, turns: Sequence[Turn]) -> SaidRow:
    """A conversation in one row. A turn counts only if it, and all before it, reads here token for token as in its own row."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    thinking = speech_of(messages[last]).reasoned
    if turns[-1].number == len(messages) - 1:
        ids = turns[-1].ids_L
    else:
        ids = template.ids(template.render(template.prepare(messages, spoken=last), tools, thinking=thinking))
    kept = tuple(turn for turn in turns if ids[: turn.end] == turn.ids_L[: turn.end])
    return SaidRow(ids, kept, len(messages), thinking)


def turn_of(template: Template, messages: Messages, number: int, tools: Tools, *, cut: bool = False) -> Turn:
    """The turn `number` (of messages) as the model says it. cut: its answer ended at the length limit, so it has no end.

    ValueError says why it cannot be told what the model said.
    """
    prompt, completion = spoken(template, messages, number, tools, cut=cut)
    prompt_ids, ids = template.batch([prompt, prompt + completion])
    begin = len(prompt_ids)
    if ids[:begin] != prompt_ids:
        ids = _apart(template, prompt_ids, completion, ids, number)
    if cut:
        return Turn(number, ids, begin, len(ids))
    if template.late_end is not None and not any(i in template.stops for i in ids[begin:]):
        ids = ids + _late_end(template, messages, number, tools, ids)
    return Turn(number, ids, begin, _end(template, ids, begin))


def spoken(template: Template, messages: Messages, number: int, tools: Tools, *, cut: bool) -> tuple[str, str]:
    """Texts of the generation prompt and of what stands behind it when the turn has been said."""
    prompt, completion = _rendered(template, messages, number, tools, cut=cut)
    _check(template, messages, number, tools, completion, cut=cut)
    _check_heard(template, messages[:number], template.prepare(messages[:number], spoken=number), tools, prompt)
    return prompt, _kept(template, messages, number, tools, completion) if cut else completion


def _rendered(template: Template, messages: Messages, number: int, tools: Tools, *, cut: bool) -> tuple[str, str]:
    said = speech_of(messages[number], cut=cut)
    ready = template.prepare(messages[: number + 1], spoken=number, cut=cut)
    thinking = said.reasoned
    whole = template.render(ready, tools, thinking=thinking)
    if number:
        prompt = template.render(ready[:number], tools, thinking=thinking, generate=True)
    else:
        prompt = _opening(template, ready[0], whole, tools, thinking=thinking)
    if not whole.startswith(prompt):
        whole = _opened(prompt, whole, ready[number], said, number, cut=cut)
    return prompt, whole[len(prompt) :]


def _longer(template: Template, messages: Messages, number: int, tools: Tools, key: str, *, cut: bool) -> str:
    """The completion if the turn's text under `key` went on with a word."""
    message = messages[number]
    more = {**message, key: f"{message.get(key) or ''}{PROBE}"}
    return _rendered(template, [*messages[:number], more], number, tools, cut=cut)[1]


def _check_heard(template: Template, messages: Messages, ready: Messages, tools: Tools, prompt: str) -> None:
    """The template may change what others said, but not leave it out."""
    everything = "\0".join(text for message in messages for text in texts_of(message))
    doubtful = {}
    for turn, message in enumerate(messages):
        text = str(message["content"]).strip() if message["role"] != "assistant" else ""
        quoted = json.dumps(text, ensure_ascii=False)[1:-1]
        # Found as often as it was said, and no word of the template's own: then it stands there. Else a word behind it must appear.
        if text and (text in template.written or max(map(prompt.count, {text, quoted})) < everything.count(text)):
            doubtful[turn] = f"{PROBE}x{turn}x"
    if not doubtful:
        return
    marked = [{**one, "content": f"{one['content']}{doubtful[i]}"} if i in doubtful else one for i, one in enumerate(ready)]
    rendered = template.render(marked, tools, generate=True)
    for turn, word in doubtful.items():
        if word not in rendered:
            raise ValueError(
                f"turn {turn + 1} ({messages[turn]['role']}): the chat template leaves the message out; give it a role that the template "
                "knows, or leave the row out"
            )


def _opening(template: Template, message: Mapping[str, Any], whole: str, tools: Tools, *, thinking: bool) -> str:
    """What stands before the content of a first turn, where no template can render the prompt of nothing."""
    other = "a" if not message["content"].strip().startswith("a") else "b"
    opening = os.path.commonprefix([whole, template.render([{**message, "content": other}], tools, thinking=thinking)])
    if not opening.endswith(template.generation(tools, thinking=thinking)):
        raise ValueError("turn 1: the chat template does not open a first answer with its generation prompt; leave the turn out")
    return opening


def _opened(prompt: str, whole: str, message: Mapping[str, Any], said: Speech, number: int, *, cut: bool) -> str:
    """Prompt and completion where the prompt opens a think block that the rendering of the finished turn leaves out.

    The reasoning is closed as it was opened: `<think>` and a newline by a newline and `</think>`.
    """
    head, opening, space = prompt.rpartition(OPEN)
    if not opening or space.strip() or not whole.startswith(head):
        raise ValueError(
            f"turn {number + 1}: the chat template does not continue its generation prompt with the answer, so it cannot be told what the "
            "model says; set tokenizer.chat_template to one that does"
        )
    if said.reasoning is None:
        raise ValueError(
            f"turn {number + 1}: the generation prompt opens a think block and the answer has no reasoning; regenerate it with reasoning, "
            "or leave it out"
        )
    spoken = message["content"].partition(OPEN)[2] if message["content"].lstrip().startswith(OPEN) else message["content"]
    spoken = spoken.removeprefix(space)
    answer = spoken.partition(CLOSE)[2]
    if cut and not answer:
        return prompt + spoken
    tail = whole[len(head) :]
    if CLOSE not in spoken or not tail.startswith(answer):
        raise ValueError(f"turn {number + 1}: the chat template changes the answer behind {CLOSE}; set tokenizer.chat_template")
    if not said.inline and not space:
        spoken = spoken.strip("\n").replace(f"\n{CLOSE}\n\n", CLOSE, 1)
    return prompt + spoken + tail[len(answer) :]


def _check(template: Template, messages: Messages, number: int, tools: Tools, completion: str, *, cut: bool) -> None:
    """All that the message says must stand in what the model is taught to say, reasoning first and calls last."""
    message, said, place = messages[number], speech_of(messages[number], cut=cut), 0
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    for what, text in [("reasoning", said.reasoning or ""), ("content", said.answer), *(("tool call", name) for name in names)]:
        text = text.strip()
        found = completion.find(text, place)
        lost = found < 0 or (what == "reasoning" and said.reasoned and not said.inline and not template.thinks)
        if text and not lost and what != "tool call" and (names or text in template.written):  # these words may be somebody else's
            key = "content" if what == "content" or said.inline else next(key for key in REASONING_KEYS if message.get(key))
            lost = _longer(template, messages, number, tools, key, cut=cut).count(PROBE) <= completion.count(PROBE)
        if lost:
            raise ValueError(
                f"turn {number + 1}: the chat template leaves out or changes the {what} of the answer; bring it into the form that the "
                "template reads, or leave the row out"
            )
        place = found + len(text)


def _kept(template: Template, messages: Messages, number: int, tools: Tools, completion: str) -> str:
    """The completion up to where the answer was cut off: what the template writes behind it was never said."""
    message, said = messages[number], speech_of(messages[number], cut=True)
    if message.get("tool_calls") or not (said.answer.strip() or said.reasoned):
        raise ValueError(f"turn {number + 1}: an answer cut at the length limit, with nothing said or inside a tool call; leave it out")
    thought = next((key for key in REASONING_KEYS if message.get(key)), "content")
    key = "content" if said.answer.strip() else thought
    return os.path.commonprefix([completion, _longer(template, messages, number, tools, key, cut=True)])


def _apart(template: Template, prompt_ids: list[int], completion: str, whole_ids: list[int], number: int) -> list[int]:
    """Ids where prompt and answer share a token in one text (a newline before a newline): the model gets the prompt's own ids first."""
    ids = prompt_ids + template.ids(completion)
    decode = template.tokenizer.decode
    if decode(ids) != decode(whole_ids):
        raise ValueError(f"turn {number + 1}: the first token of the answer cannot be told from the last of the prompt; leave the row out")
    return ids


def _late_end(template: Template, messages: Messages, number: int, tools: Tools, ids: list[int]) -> list[int]:
    """The end that the template writes with the next turn, as a list: before a user's, or, behind a call, what a tool's begins with."""
    if not messages[number].get("tool_calls"):
        return [template.late_end] if template.late_end is not None else []
    longer = [*template.prepare(messages[: number + 1], spoken=number), {"role": "tool", "content": PROBE}]
    try:
        more = template.ids(template.render(longer, tools, thinking=speech_of(messages[number]).reasoned))
    except ValueError:
        return []
    behind = more[len(ids) : len(ids) + 1]
    return behind if more[: len(ids)] == ids and set(behind) <= template.stops else []


def _end(template: Template, ids: list[int], begin: int) -> int:
    """Behind the first stop token; else behind a last special token with nothing but space after it; else the end of the row."""
    for i in range(begin, len(ids)):
        if ids[i] in template.stops:
            return i + 1
    last = max((i for i in range(begin, len(ids)) if ids[i] in template.special_ids), default=None)
    return last + 1 if last is not None and not template.tokenizer.decode(ids[last + 1 :]).strip() else len(ids)
