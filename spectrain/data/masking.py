"""Chat template + messages -> token ids and the loss mask.

One rule: a token is supervised if and only if the model itself would have generated it. For an assistant turn that is what stands
behind the ids of its generation prompt, up to and with the token at which the serving loop stops. spectrain/data/turns.py defines it,
spectrain/data/plans.py does it fast, spectrain/data/templates.py knows what a template does.

Legend: L tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from spectrain.data.control import ControlTokens, steers
from spectrain.data.formats import Conversation, Prompt, Text, Tokens
from spectrain.data.plans import Plan, Planner, RowPlan
from spectrain.data.rows import Ids, Mask, Row
from spectrain.data.templates import PROBE, REASONING_KEYS, Messages, Template, text_of, texts_of
from spectrain.data.turns import Settings, Tools, say

Item = Conversation | Prompt | Text | Tokens


def encode_chat(
    tokenizer: Any, messages: Messages, tools: Tools = None, max_length: int | None = None, *, stop_ids: Sequence[int] = ()
) -> tuple[list[int], list[int]]:  # fmt: skip
    """A conversation in one row: (ids_L, mask_L).

    An assistant turn is masked in only if it reads here exactly as it did when it was the last turn. ids and mask are cut at
    `max_length` together. stop_ids: as for `ChatEncoder`. Raises ValueError when no assistant turn can be supervised, or when it cannot be
    told what the model said.
    """
    template = Template(tokenizer, stop_ids=frozenset(stop_ids))
    checked = check_messages(template, messages, tools)
    said = say(template, checked, tools, Settings(rows="conversation"))
    if said.faults:
        raise ValueError(said.faults[0])
    return _shortened(said.rows[0].ids_L, said.rows[0].mask, max_length)


def encode_turns(
    tokenizer: Any, messages: Messages, tools: Tools = None, max_length: int | None = None, *,
    thinking: str = "mixed", template_kwargs: Mapping[str, Any] | None = None, stop_ids: Sequence[int] = (),
) -> list[tuple[list[int], list[int]]]:  # fmt: skip
    """A row an assistant turn, each in its own rendering: [(ids_L, mask_L), ...].

    thinking: `on` leaves out answers without reasoning, `off` those with; turns that begin behind `max_length` are left out too.
    stop_ids: as for `ChatEncoder`. Raises ValueError for an answer that the template cannot say, and when no row is left.
    """
    template = Template(tokenizer, template_kwargs or {}, frozenset(stop_ids))
    said = say(template, check_messages(template, messages, tools), tools, Settings(rows="turn", thinking=thinking))
    if said.faults:
        raise ValueError(said.faults[0])
    rows = [(row.ids_L[:max_length], row.mask[:max_length]) for row in said.rows]
    kept = [(ids, mask) for ids, mask in rows if any(mask)]
    if not kept:
        raise ValueError(f"no answer begins before max_length {max_length}")
    return kept


def _shortened(ids: list[int], mask: list[int], max_length: int | None) -> tuple[list[int], list[int]]:
    if not any(mask[:max_length]):
        raise ValueError(f"no token of an assistant turn to learn from: the answer starts after max_length {max_length}")
    return ids[:max_length], mask[:max_length]


def encode_conversation(tokenizer: Any, conversation: Conversation, max_length: int | None = None) -> Row:
    """A `Conversation` as one row. An answer cut off by its length limit has no end-of-answer token: the model never said it."""
    template, tools = Template(tokenizer), getattr(conversation, "tools", ())
    messages = check_messages(template, conversation.messages, tools)
    said = say(template, messages, tools, Settings(rows="conversation"), cut=conversation.finish_reason == "length")
    ids, mask = _shortened(said.rows[0].ids_L, said.rows[0].mask, max_length)
    return Row(id=conversation.id, domain=conversation.domain, ids_L=np.array(ids), mask_L=np.array(mask))


def check_messages(template: Template, messages: Messages, tools: Tools) -> list[Mapping[str, Any]]:
    """Messages with their content as text. ValueError names the turn that no rendering could be trusted with.

    A control token in somebody's text would become the token itself; a lone surrogate cannot be tokenised.
    """
    checked: list[Mapping[str, Any]] = []
    for turn, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise ValueError(f"turn {turn + 1}: needed a message with a role, found {message!r:.80}")
        content, plain = text_of(message, turn), len(message) == 2 and "content" in message
        if not plain:
            _check_extras(message, turn)
        for text in (role, content) if plain else texts_of({**message, "content": content}):
            _check_text(template.control_token, role, text, turn)
        checked.append(message if message.get("content") is content else {**message, "content": content})
    for text in texts_of({"tools": tools}) if tools else ():
        _check_text(template.control_token, "tools", text)
    return checked


def _check_extras(message: Mapping[str, Any], turn: int) -> None:
    for key in REASONING_KEYS:
        if not isinstance(message.get(key) or "", str):
            raise ValueError(f"turn {turn + 1}: `{key}` must be text, found {type(message[key]).__name__}")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls):
        raise ValueError(f"turn {turn + 1}: needed a list of tool calls, each with a function's name and arguments, found {calls!r:.80}")


def _check_text(find: Callable[[str, str], str | None], role: str, text: str, turn: int | None = None) -> None:
    found, broken = find(role, text), -1
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            broken = error.start
    if not found and broken < 0:
        return
    where = f"the {role}" if turn is None else f"turn {turn + 1} ({role})"
    if found:
        raise ValueError(f"{where}: the text holds the control token {found!r}, which would not stay text; leave the row out or reword it")
    raise ValueError(f"{where}: half a character (lone surrogate) at {broken + 1}; mend the text")


@dataclass(frozen=True)
class Encoded:
    """Rows of one item. turns: its assistant turns; taught: the numbers (from 0) of those supervised somewhere; note: what was left out."""

    rows: list[Row]
    turns: int
    taught: tuple[int, ...]
    note: str = ""


class TooLong(ValueError):
    """A row has more tokens than max_length, and none is to be cut."""


class ChatEncoder:
    """Items -> rows, many at a time.

    rows: `auto`, `conversation` or `turn`; thinking: `mixed`, `on`, `off` (turns.Settings). stop_ids: ids at which the serving loop stops
    besides the tokenizer's own end (generation_config.eos_token_id). cut: whether rows longer than max_length are cut there; otherwise
    their items are rejected as `TooLong`. plans=False goes through the definition alone, the slow twin.
    ValueError where the rule cannot be proved for the tokenizer's template.
    """

    def __init__(
        self, tokenizer: Any, *, max_length: int | None, rows: str = "auto", thinking: str = "mixed",
        template_kwargs: Mapping[str, Any] | None = None, stop_ids: Sequence[int] = (), plans: bool = True, cut: bool = True,
    ) -> None:  # fmt: skip
        self.tokenizer, self.max_length, self.settings, self.cut = tokenizer, max_length, Settings(rows, thinking), cut
        self.template = Template(tokenizer, template_kwargs or {}, frozenset(stop_ids)) if tokenizer.chat_template else None
        if self.template:
            prove(self.template)
        self.num_ids = max(tokenizer.get_vocab().values()) + 1
        self.planner = Planner(self.template, self.settings, self.num_ids) if self.template and plans else None

    def encode(self, items: Sequence[Item]) -> list[Encoded | ValueError]:
        """For each item its rows, or the reason for its rejection."""
        jobs = [self._begin(item) for item in items]
        wanted = [(row, job.messages, job.item.tools) for job in jobs if isinstance(job, _Job) for row in job.planned]
        made: Iterator[tuple[Ids, Mask] | None] = iter(())
        if self.template and self.planner and wanted:
            made = iter(self.planner.apply([row for row, _, _ in wanted], self.template.batch(self.planner.texts(wanted))))
        return [self._finish(job, list(islice(made, len(job.planned)))) if isinstance(job, _Job) else job for job in jobs]

    def _begin(self, item: Item) -> "_Job | Encoded | ValueError":
        try:
            if isinstance(item, Conversation):
                return self._job(item)
            if isinstance(item, Text):
                return self._text(item)
            if isinstance(item, Tokens):
                return self._tokens(item)
            raise ValueError("a prompt has no answer to learn from; run `spectrain regenerate` first")
        except ValueError as error:
            return error

    def _job(self, item: Conversation) -> "_Job":
        if not self.template:
            raise ValueError("the tokenizer has no chat template, which a conversation needs; set tokenizer.chat_template")
        cut = item.finish_reason == "length"
        messages = check_messages(self.template, item.messages, item.tools)
        return _Job(item, messages, cut, self.planner.plan(messages, item.tools, cut=cut) if self.planner else None)

    def _finish(self, job: "_Job", made: Sequence[tuple[Ids, Mask] | None]) -> Encoded | ValueError:
        """made: of the rows of its plan."""
        try:
            if job.plan and all(made):
                parts = [(*one, row.numbers) for one, row in zip(made, job.plan.rows, strict=True) if one]
                return self._encoded(job, parts, job.plan.left_out)
            assert self.template
            said = say(self.template, job.messages, job.item.tools, self.settings, cut=job.cut)
            rows = [(np.array(row.ids_L, dtype=np.int32), np.array(row.mask, dtype=np.uint8), row.numbers) for row in said.rows]
            return self._encoded(job, rows, said.left_out)
        except ValueError as error:
            return error

    def _encoded(self, job: "_Job", parts: Sequence[tuple[Ids, Mask, tuple[int, ...]]], left_out: Sequence[str]) -> Encoded:
        item, answers = job.item, [i for i, message in enumerate(job.messages) if message["role"] == "assistant"]
        rows: list[Row] = []
        taught: list[int] = []
        notes = list(left_out)
        for ids_L, mask_L, numbers in parts:
            self._check_length(len(mask_L))
            cut_L = mask_L[: self.max_length]
            notes += [f"cut at max_length {self.max_length}"] * (len(cut_L) < len(mask_L))
            if not cut_L.any():
                continue
            whole = len(answers) == 1 or len(numbers) > 1 or self.settings.rows == "conversation"
            name = item.id if whole else f"{item.id}#{answers.index(numbers[0])}"
            rows.append(Row(name, item.domain, ids_L[: self.max_length], cut_L, group=item.id))
            taught += numbers
        if not rows:
            raise ValueError(f"the first answer starts after max_length {self.max_length}")
        return Encoded(rows, len(answers), tuple(answers.index(number) for number in taught), "; ".join(dict.fromkeys(notes)))

    def _text(self, item: Text) -> Encoded:
        """Plain text under the tokenizer's own special tokens. All of it is what the model would generate, but for special tokens in
        front: the serving loop puts these there."""
        _check_text(self.template.control_token if self.template else self._special_token, "assistant", item.text)
        ids = self.tokenizer(item.text)["input_ids"]
        special = set(self.tokenizer.all_special_ids)
        lead = next((i for i, token in enumerate(ids) if token not in special), len(ids))
        return self._single(item, ids, [0] * lead + [1] * (len(ids) - lead))

    def _special_token(self, role: str, text: str) -> str | None:
        return ControlTokens(self.tokenizer, {i for i, one in self.tokenizer.added_tokens_decoder.items() if steers(one)}).find(text)

    def _tokens(self, item: Tokens) -> Encoded:
        ids, mask = [int(i) for i in item.ids], [int(m) for m in item.mask]
        odd = [i for i in ids if not 0 <= i < self.num_ids]
        if odd:
            raise ValueError(f"token id {odd[0]}: the tokenizer has ids 0 to {self.num_ids - 1}; were the rows made for another tokenizer?")
        if len(ids) != len(mask) or set(mask) - {0, 1}:
            raise ValueError(f"needed as many zeros and ones in the mask as ids, found {len(ids)} ids and a mask of {len(mask)}")
        return self._single(item, ids, mask)

    def _check_length(self, length: int) -> None:
        if not self.cut and self.max_length is not None and length > self.max_length:
            raise TooLong(f"a row of {length} tokens, max_length is {self.max_length} (too_long=cut keeps its beginning)")

    def _single(self, item: Text | Tokens, ids: list[int], mask: list[int]) -> Encoded:
        self._check_length(len(ids))
        if not any(mask[: self.max_length]):
            raise ValueError("no supervised token" + (f" before max_length {self.max_length}" if any(mask) else ""))
        note = f"cut at max_length {self.max_length}" if len(ids) > len(ids[: self.max_length]) else ""
        return Encoded([Row(item.id, item.domain, np.array(ids[: self.max_length]), np.array(mask[: self.max_length]))], 1, (0,), note)


@dataclass(frozen=True)
class _Job:
    """A conversation on its way: its checked messages, and the plan for them."""

    item: Conversation
    messages: Messages
    cut: bool
    plan: Plan | None

    @property
    def planned(self) -> tuple[RowPlan, ...]:
        return self.plan.rows if self.plan else ()


def prove(template: Template) -> None:
    """ValueError unless the template says an answer of at least one simple kind as a model could have said it."""
    user, answer = {"role": "user", "content": "w7 w8"}, f"{PROBE} w7"
    faults = []
    for more in ({"content": answer}, {"content": answer, "reasoning_content": "w8 w7"}):
        try:
            row = say(template, [user, {"role": "assistant", **more}], None, Settings()).rows[0]
        except ValueError as error:
            faults.append(str(error))
            continue
        if not all(row.mask):
            return
        faults.append("the user's turn would be the model's")
    raise ValueError(
        f"the rule of masks cannot be proved for this chat template: {'; '.join(dict.fromkeys(faults))}. Set tokenizer.chat_template to "
        "the model's own template, or give rows that are tokenised already (ids and mask)"
    )
