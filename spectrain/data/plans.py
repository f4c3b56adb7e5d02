"""The fast path of masks: one rendering a row and one call of the tokenizer for many rows.

Conversations of one signature (roles, and which fields are filled) are rendered alike: the control tokens stand in the same order, and
between the last control token of a generation prompt and the answer stand the same ids. A plan holds these; it is learnt from two made-up
conversations through the definition (spectrain/data/turns.py) and holds for a row only if the row's control tokens are the plan's. What
no plan fits goes through the definition itself.

Legend: L tokens, V vocabulary, C control tokens of a row.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spectrain.data.rows import Ids, Mask
from spectrain.data.templates import CLOSE, OPEN, REASONING_KEYS, Messages, Template, is_plain, speech_of
from spectrain.data.turns import Said, SaidRow, Settings, Tools, say, spoken

Signature = tuple[Any, ...]
WORDS = (("kind", "red", "seven", "tea"), ("w7 w8", "blue sky", "a b c d", "w9"))  # of two probes; neither begins as the other does

MOST = 20_000  # signatures remembered


@dataclass(frozen=True, eq=False)
class Span:
    """Turn `number` stands behind control token `after` and the ids `tail`, up to control token `until`."""

    number: int
    after: int
    tail: list[int]
    until: int


@dataclass(frozen=True, eq=False)
class RowPlan:
    """control_C: ids of the control tokens. upto, thinking: what is rendered. built: by the definition, which puts the text of a turn
    together. late: ids behind the text. cut: the row ends before the last span's control token."""

    upto: int
    thinking: bool
    built: bool
    control_C: list[int]
    spans: tuple[Span, ...]
    late: list[int]
    cut: bool

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(span.number for span in self.spans)


@dataclass(frozen=True)
class Plan:
    """Rows of a conversation, and what is left out of it by its form."""

    rows: tuple[RowPlan, ...]
    left_out: tuple[str, ...]


def signature_of(template: Template, messages: Messages, tools: Tools, *, cut: bool) -> Signature | None:
    """What a template can tell conversations apart by, their words aside; None where it looks for words that these hold."""
    parts: list[Any] = [cut, bool(tools)]
    markers = template.facts.markers
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        said = speech_of(message, cut=cut) if role == "assistant" and not is_plain(message) else None
        if said and said.inline and CLOSE not in content:  # cut off while it thought: no two are sure to be rendered alike
            return None
        words = said.answer if said else content
        if markers and any(marker in words or (said and marker in (said.reasoning or "")) for marker in markers):
            return None
        filled = _form(words, exact=template.facts.strips)
        thought = said and said.reasoning is not None and _form(said.reasoning, exact=template.facts.strips)
        if len(message) == 2 and said is None:
            parts.append((role, filled))
            continue
        parts.append((
            role, filled, said and (said.inline, thought), len(message.get("tool_calls") or ()),
            *(key for key in message if key != "content" and key not in REASONING_KEYS and message[key]),
        ))  # fmt: skip
    return tuple(parts)


def _form(text: str, *, exact: bool) -> Any:
    """What a template may ask of a text: whether there is any; `exact`: the space around it too, which it may strip."""
    inner = text.strip()
    return (bool(text), bool(inner), *(text.split(inner, 1) if inner else [text]) * exact)


def _like(text: str, word: str, *, exact: bool) -> str:
    """Another text of the same form."""
    inner = text.strip()
    return (text.replace(inner, word, 1) if exact else word) if inner else text


def probe_of(template: Template, messages: Messages, words: Sequence[str], *, cut: bool) -> list[dict[str, Any]]:
    """A conversation of the same signature that says other things."""
    made, exact = [], template.facts.strips
    for turn, message in enumerate(messages):
        word = f"{words[turn % len(words)]} {turn}"
        said = speech_of(message, cut=cut) if message["role"] == "assistant" else None
        one = {key: value for key, value in message.items() if key not in REASONING_KEYS}
        one["content"] = _like(said.answer if said else message.get("content") or "", word, exact=exact)
        if said and said.reasoning is not None:
            thought = _like(said.reasoning, f"since {word}", exact=exact)
            if not said.inline:
                one["reasoning_content"] = thought
            elif exact:
                one["content"] = f"{OPEN}{thought}{CLOSE}{one['content']}"
            else:
                one["content"] = f"{OPEN}\n{thought.strip()}\n{CLOSE}\n\n{one['content']}"
        if message.get("tool_calls"):
            one["tool_calls"] = [_other(call, word) for call in message["tool_calls"]]
        made.append(one)
    return made


def _other(call: Mapping[str, Any], word: str) -> dict[str, Any]:
    return {**call, "function": {**(call.get("function") or {}), "arguments": {"word": word}}}


class Planner:
    """Plans of a template by signature; None for a signature whose conversations go through the definition."""

    def __init__(self, template: Template, settings: Settings, num_ids: int) -> None:
        self.template, self.settings = template, settings
        self.plans: dict[Signature, Plan | None] = {}
        self._seen: set[Signature] = set()
        ids = sorted(template.control_ids)
        self.control_V: npt.NDArray[np.bool_] = np.zeros(num_ids, dtype=bool)
        self.control_V[ids] = True

    def plan(self, messages: Messages, tools: Tools, *, cut: bool) -> Plan | None:
        """The plan of a conversation whose signature has been seen before: to learn one costs more than to do without it once."""
        signature = signature_of(self.template, messages, tools, cut=cut)
        if signature is None or signature in self.plans:
            return self.plans[signature] if signature else None
        if signature not in self._seen:
            self._seen.add(signature)
            return None
        if len(self._seen) > MOST:  # conversations that are all unlike: nothing to gain, and memory must stay flat
            self._seen.clear()
            self.plans.clear()
        self.plans[signature] = self._learn(messages, tools, cut=cut)
        return self.plans[signature]

    def text(self, row: RowPlan, messages: Messages, tools: Tools) -> str:
        return row_text(self.template, messages, tools, row.upto, thinking=row.thinking, built=row.built)

    def texts(self, wanted: Sequence[tuple[RowPlan, Messages, Tools]]) -> list[str]:
        """Rendered rows, those without tools in one call of the template; "" where it refuses one: the definition says why."""
        texts = [""] * len(wanted)
        together: dict[bool, dict[int, Messages]] = {}
        for i, (row, messages, tools) in enumerate(wanted):
            with suppress(ValueError):
                if row.built or tools:
                    texts[i] = self.text(row, messages, tools)
                else:
                    together.setdefault(row.thinking, {})[i] = _ready(self.template, messages, row.upto)
        for thinking, some in together.items():
            for i, text in zip(some, self.template.render_each(list(some.values()), thinking=thinking), strict=True):
                texts[i] = text
        return texts

    def apply(self, rows: Sequence[RowPlan], ids: Sequence[list[int]]) -> list[tuple[Ids, Mask] | None]:
        """Ids and mask of rendered rows; None for one that is not as planned. One search for the control tokens of them all."""
        flat = array("i")
        ends = []
        for row, row_ids in zip(rows, ids, strict=True):
            flat.fromlist(row_ids + row.late if row.late else row_ids)
            ends.append(len(flat))
        ids_T = np.frombuffer(flat, dtype=np.int32)
        mask_T = np.zeros(len(ids_T), dtype=np.uint8)
        at_C = np.flatnonzero(self.control_V[ids_T])
        at, found = at_C.tolist(), ids_T[at_C].tolist()
        made: list[tuple[Ids, Mask] | None] = []
        start = first = 0
        for row, end in zip(rows, ends, strict=True):
            stop = bisect_left(at, end, first)
            till = _marked(row, flat, end, at[first:stop], mask_T) if found[first:stop] == row.control_C else 0
            made.append((ids_T[start:till], mask_T[start:till]) if till else None)
            start, first = end, stop
        return made

    def _learn(self, messages: Messages, tools: Tools, *, cut: bool) -> Plan | None:
        """A plan that gives the rows of the definition for two probes, if there is one."""
        try:
            probes = [probe_of(self.template, messages, words, cut=cut) for words in WORDS]
            said = [say(self.template, probe, tools, self.settings, cut=cut) for probe in probes]
            if said[0].left_out != said[1].left_out:
                return None
            for built in (False, True):
                rows = [self._row(row, probes[0], tools, built=built, cut=cut) for row in said[0].rows]
                plan = Plan(tuple(row for row in rows if row), said[0].left_out)
                if all(rows) and all(self._holds(plan, probe, one, tools) for probe, one in zip(probes, said, strict=True)):
                    return plan
        except ValueError:  # no plan: the definition says of each conversation what is wrong with it
            pass
        return None

    def _holds(self, plan: Plan, probe: Messages, said: Said, tools: Tools) -> bool:
        """Whether the plan gives the rows of the definition."""
        if len(plan.rows) != len(said.rows):
            return False
        found = self.apply(plan.rows, self.template.batch([self.text(row, probe, tools) for row in plan.rows]))
        wanted = [(list(row.ids_L), row.mask) for row in said.rows]
        return [made and (made[0].tolist(), made[1].tolist()) for made in found] == wanted

    def _row(self, row: SaidRow, probe: Messages, tools: Tools, *, built: bool, cut: bool) -> RowPlan | None:
        if built and (cut or probe[row.upto - 1]["role"] != "assistant"):
            return None
        ids = self.template.ids(row_text(self.template, probe, tools, row.upto, thinking=row.thinking, built=built))
        late = row.ids_L[len(ids) :]
        full = [*ids, *late]
        at = np.flatnonzero(self.control_V[full]).tolist()
        spans, short = [], False
        for turn in row.turns:
            short = cut and turn.end == len(row.ids_L)
            end = turn.end + 1 if short else turn.end
            after = max((j for j, i in enumerate(at) if i < turn.begin), default=None)
            if after is None or end - 1 not in at:
                return None
            spans.append(Span(turn.number, after, full[at[after] + 1 : turn.begin], at.index(end - 1)))
        return RowPlan(row.upto, row.thinking, built, [full[i] for i in at], tuple(spans), late, short)


def _marked(row: RowPlan, ids: "array[int]", end: int, at: Sequence[int], mask_T: Mask) -> int:
    """Mark what a row supervises, whose control tokens stand at these places of ids; where it ends, or 0 if it is not as planned."""
    stop = end
    for span in row.spans:
        first = at[span.after] + 1
        begin, stop = first + len(span.tail), at[span.until] + 1
        if begin >= stop or ids[first:begin].tolist() != span.tail:
            return 0
        mask_T[begin:stop] = 1
    return stop - 1 if row.cut else end


def row_text(template: Template, messages: Messages, tools: Tools, upto: int, *, thinking: bool, built: bool) -> str:
    """The text of messages[:upto]: rendered once, or put together by the definition, whose last message is an assistant's."""
    if built:
        return "".join(spoken(template, messages, upto - 1, tools, cut=False))
    return template.render(_ready(template, messages, upto), tools, thinking=thinking)


def _ready(template: Template, messages: Messages, upto: int) -> Messages:
    last = max(i for i in range(upto) if messages[i]["role"] == "assistant")
    return template.prepare(messages[:upto], spoken=last)
