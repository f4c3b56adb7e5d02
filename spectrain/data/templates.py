"""What a chat template does with messages: rendering, the names it reads, where its answers end, the strings that are its control tokens.

Legend: L tokens.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes

from spectrain.data.control import SPEECH, ControlTokens, steers

Messages = Sequence[Mapping[str, Any]]
OPEN, CLOSE = "<think>", "</think>"
PROBE = "w9"  # a word that tokenizers of every kind can write

# Message keys and template switches in use for reasoning; the first that a template reads is the one it gets.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
SWITCHES = ("enable_thinking", "thinking")
_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # of transformers; they render nothing
_SEARCHES = frozenset(
    ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "replace", "find", "rfind", "index", "count")
    + ("removeprefix", "removesuffix")
)
_STRIPS = frozenset(("strip", "lstrip", "rstrip"))
_RENDERING = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Facts:
    """Of a template's text: variables it takes from outside, keys it reads, texts it looks for in its inputs (`markers`), all literals,
    and whether it strips space anywhere."""

    variables: frozenset[str]
    keys: frozenset[str]
    markers: tuple[str, ...]
    literals: str
    strips: bool


@lru_cache(maxsize=16)
def read_template(source: str) -> Facts:
    """Facts of a jinja template. ValueError where it is none."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TAGS.sub("", source))
    except TemplateError as error:
        raise ValueError(f"the chat template is no jinja template ({error}); set tokenizer.chat_template to the model's own") from error
    keys = {n.attr for n in tree.find_all(nodes.Getattr)}
    gets = [n.args[0] for n in tree.find_all(nodes.Call) if getattr(n.node, "attr", "") == "get" and n.args]
    keys |= _texts([*gets, *(n.arg for n in tree.find_all(nodes.Getitem))])
    markers = {t for n in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)) for t in _looked_for(n, keys) if t}
    literals = [n.data for n in tree.find_all(nodes.TemplateData)]
    literals += sorted(_texts(tree.find_all(nodes.Const)))
    strips = {getattr(n.node, "attr", "") for n in tree.find_all(nodes.Call)} | {n.name for n in tree.find_all(nodes.Filter)}
    return Facts(
        frozenset(meta.find_undeclared_variables(tree)), frozenset(keys), tuple(sorted(markers)), "\0".join(literals),
        bool(strips & (_STRIPS | {"trim"})),
    )  # fmt: skip


def _texts(found: Iterable[Any]) -> set[str]:
    """The constant texts among jinja nodes."""
    return {n.value for n in found if isinstance(n, nodes.Const) and isinstance(n.value, str)}


def _looked_for(node: Any, keys: Collection[str]) -> Iterator[str]:
    """Constant texts that a comparison, a method such as split, or the filter replace looks for in its input.

    Roles, names of keys and the like (single words compared as a whole) are not among them, and neither is space that is stripped.
    """
    if isinstance(node, nodes.Compare):
        found = [node.expr] if any(o.op in ("in", "notin") for o in node.ops) else [node.expr, *(o.expr for o in node.ops)]
        whole = all(o.op not in ("in", "notin") for o in node.ops)
        yield from (w for w in _texts(found) if not (w.isidentifier() and (whole or w in keys)))
        return
    name = node.name if isinstance(node, nodes.Filter) else getattr(node.node, "attr", "")
    if getattr(getattr(node.node, "node", None), "attr", "") == "name":  # of a tool: no words of a conversation
        return
    if name in _SEARCHES or name in _STRIPS:
        yield from (w for w in _texts(node.args or []) if name in _SEARCHES or w.strip())


@dataclass(frozen=True)
class Speech:
    """What an assistant message says: reasoning (None: none) and answer. inline: the reasoning stands in the content."""

    reasoning: str | None
    answer: str
    inline: bool = False

    @property
    def reasoned(self) -> bool:
        """Whether there is reasoning; an empty think block is none."""
        return bool(self.reasoning and self.reasoning.strip())


def speech_of(message: Mapping[str, Any], *, cut: bool = False) -> Speech:
    """Reasoning and answer. Inline reasoning opens the content (or was opened by the prompt) and is closed, unless it was cut off."""
    content = message.get("content") or ""
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    if reasoning is not None:
        return Speech(reasoning, content)
    before, close, after = content.partition(CLOSE)
    opened = before.lstrip().startswith(OPEN)
    if close and (opened or OPEN not in before):
        return Speech(before.partition(OPEN)[2] if opened else before, after, inline=True)
    if cut and opened:
        return Speech(before.partition(OPEN)[2], "", inline=True)
    return Speech(None, content)


@dataclass(frozen=True, eq=False)
class Template:
    """The chat template of a tokenizer. kwargs: passed to it. stop_ids: ids besides the tokenizer's own end that stop the serving loop.

    ValueError where there is no template, or no fast tokenizer.
    """

    tokenizer: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; take the instruct model's tokenizer, set tokenizer.chat_template, or give plain text"
            )
        if not self.tokenizer.is_fast:
            raise ValueError(f"{type(self.tokenizer).__name__} is no fast tokenizer; load it with AutoTokenizer and tokenizer.json")
        unread = sorted(set(self.kwargs) - self.facts.variables)
        if unread:
            raise ValueError(f"template_kwargs {', '.join(unread)}: the chat template reads only {', '.join(sorted(self.facts.variables))}")

    @cached_property
    def facts(self) -> Facts:
        source = self.tokenizer.chat_template  # a dict where there is another template for tools
        return read_template("".join(source.values()) if isinstance(source, dict) else source)

    @cached_property
    def switch(self) -> str | None:
        """Name of the variable that turns thinking on and off."""
        return next((name for name in SWITCHES if name in self.facts.variables), None)

    @cached_property
    def thinks(self) -> bool:
        """Whether the template has a place for reasoning that does not stand in the content."""
        return self.reasoning_key is not None or OPEN in self.facts.literals or CLOSE in self.facts.literals

    @cached_property
    def reasoning_key(self) -> str | None:
        """Key of a message that the template reads reasoning from."""
        return next((key for key in REASONING_KEYS if key in self.facts.keys), None)

    def today(self) -> date | None:
        """The date, if the template writes it: what is rendered before midnight does not fit what is rendered after."""
        return date.today() if self._dated else None

    @cached_property
    def _dated(self) -> bool:
        """Whether the date of today is written; a template may ask for it only where kwargs give none."""
        if "strftime_now" not in self.facts.variables or "strftime_now" in self.kwargs:
            return False
        user = [{"role": "user", "content": "w7"}]
        try:
            days = {self.render(user, None, dated=dated) for dated in (lambda form: "w8", lambda form: PROBE)}
        except ValueError:
            return True
        return len(days) > 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Special tokens, and those added tokens of reasoning and tools or of this template, or in the brackets of control tokens, that
        are not called special."""
        added = {i: token for i, token in self.tokenizer.added_tokens_decoder.items() if token.content.strip()}
        return self.special_ids | {
            i for i, one in added.items() if steers(one) or SPEECH.search(one.content) or one.content in self.facts.literals
        }

    @cached_property
    def written(self) -> str:
        """All words of the template's own, control tokens included: a text found among them proves nothing."""
        return "\0".join([self.facts.literals, *(token.content for token in self.tokenizer.added_tokens_decoder.values())])

    @cached_property
    def _control(self) -> tuple[ControlTokens, ControlTokens]:
        """Control tokens that an assistant's text may not hold, and that other texts may not hold."""
        steering = {i for i, token in self.tokenizer.added_tokens_decoder.items() if steers(token)}
        return ControlTokens(self.tokenizer, steering), ControlTokens(self.tokenizer, self.control_ids)

    def control_token(self, role: str, text: str) -> str | None:
        """The control token that stands in somebody's text, or None. The assistant may write <think> and the like: so it speaks."""
        return self._control[role != "assistant"].find(text)

    def render(
        self, messages: Messages, tools: Sequence[Any] | None, *, thinking: bool = False, generate: bool = False,
        dated: Callable[[str], str] | None = None,
    ) -> str:  # fmt: skip
        """The text of prepared messages. `thinking` sets the template's switch unless kwargs do; dated: gives the date in its place.

        ValueError with the roles.
        """
        options = {**({self.switch: thinking} if self.switch else {}), **self.kwargs, **({"strftime_now": dated} if dated else {})}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=tools or None, tokenize=False, add_generation_prompt=generate, **options
                )
            )
        except _RENDERING as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"the chat template refuses the turns {roles}: {error}") from error

    def render_each(self, conversations: Sequence[Messages], *, thinking: bool) -> list[str]:
        """`render` of several without tools, in one call, which takes a fifth less time; "" for one that the template refuses."""
        options = {**({self.switch: thinking} if self.switch else {}), **self.kwargs}
        try:
            return [str(text) for text in self.tokenizer.apply_chat_template(list(conversations), tokenize=False, **options)]
        except _RENDERING:
            if len(conversations) == 1:
                return [""]
            return [text for one in conversations for text in self.render_each([one], thinking=thinking)]

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered texts; the template has written the special tokens, so none is added."""
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def ids(self, text: str) -> list[int]:
        return self.batch([text])[0]

    @cached_property
    def _probed(self) -> tuple[str, str]:
        """What the template writes behind an answer: of a last turn, and before another user turn."""
        user, reply = {"role": "user", "content": "w7"}, {"role": "assistant", "content": PROBE}
        last = self._behind([user, reply])
        return last, self._behind([user, reply, user])

    def _behind(self, messages: Messages) -> str:
        try:
            return self.render(messages, None).rpartition(PROBE)[2]
        except ValueError:
            return ""

    @cached_property
    def stops(self) -> frozenset[int]:
        """Ids at which the serving loop stops: the tokenizer's own end, and the first special token behind a plain answer
        unless that runs on into the own end (cohere2: END_RESPONSE, END_OF_TURN)."""
        behind, own = self._probed[0], self.tokenizer.eos_token_id
        closing = [i for i in self.ids(behind) if i in self.special_ids][:1]
        directly = re.match(f"\\s*(?:{self._control[0].pattern.pattern})*", behind)
        if directly and self.tokenizer.eos_token and self.tokenizer.eos_token in directly.group():
            closing = []  # the model says other special tokens on its way to its own end
        return self.stop_ids | {i for i in (own, *closing) if i is not None}

    @cached_property
    def late_end(self) -> int | None:
        """The id that ends an answer, where it is written with the next user turn only."""
        last, followed = map(self.ids, self._probed)
        return followed[0] if followed and followed[0] in self.stops and not set(last) & self.stops else None

    def generation(self, tools: Sequence[Any] | None, *, thinking: bool) -> str:
        """What the generation prompt adds to a user turn."""
        user = [{"role": "user", "content": PROBE}]
        prompt = self.render(user, tools, thinking=thinking, generate=True)
        return prompt.removeprefix(os.path.commonprefix([prompt, self.render(user, tools, thinking=thinking)]))

    @cached_property
    def arguments_as_text(self) -> bool:
        """Whether tool calls must carry their arguments as JSON text; most templates need an object."""
        call = {"type": "function", "function": {"name": "f", "arguments": {"k": PROBE}}}
        user, reply = {"role": "user", "content": "w7"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        return PROBE not in self._whole([user, reply])

    def _whole(self, messages: Messages) -> str:
        try:
            return self.render(messages, None)
        except ValueError:
            return ""

    def prepare(self, messages: Messages, *, spoken: int, cut: bool = False) -> list[Mapping[str, Any]]:
        """Messages as this template can render them; `spoken` is the assistant turn that is being said (its reasoning must show).

        Reasoning goes under the key that the template reads. One that knows only <think> in the content gets it there.
        """
        ready: list[Mapping[str, Any]] = []
        for turn, message in enumerate(messages):
            if is_plain(message):
                ready.append(message)
                continue
            one = {k: v for k, v in message.items() if k not in REASONING_KEYS and v is not None}
            one["content"] = text_of(message, turn)
            if message.get("tool_calls"):
                one["tool_calls"] = [self._call(call, turn) for call in message["tool_calls"]]
            else:
                one.pop("tool_calls", None)
            if message["role"] == "assistant":
                one |= self._speak(speech_of(one | {k: message.get(k) for k in REASONING_KEYS}, cut=cut and turn == spoken), turn == spoken)
            ready.append(one)
        return ready

    def _speak(self, speech: Speech, spoken: bool) -> dict[str, Any]:
        if speech.reasoning is None or (speech.inline and not self.reasoning_key):
            return {}
        if self.reasoning_key:
            answer = speech.answer.lstrip("\n") if speech.inline else speech.answer
            return {self.reasoning_key: speech.reasoning.strip("\n") if speech.inline else speech.reasoning, "content": answer}
        if spoken and self.thinks:
            return {"content": f"{OPEN}\n{speech.reasoning.strip(chr(10))}\n{CLOSE}\n\n{speech.answer.lstrip(chr(10))}"}
        return {}

    def _call(self, call: Mapping[str, Any], turn: int) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError:
                arguments = None
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"turn {turn + 1}: a tool call needs a name and a JSON object of arguments, found {dict(call)}")
        function["arguments"] = json.dumps(arguments, ensure_ascii=False) if self.arguments_as_text else arguments
        return {"type": "function", **call, "function": function}


def is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message is a role and a text without reasoning: most are, and need no preparation."""
    content = message.get("content")
    return len(message) == 2 and type(content) is str and OPEN not in content and CLOSE not in content


def text_of(message: Mapping[str, Any], turn: int) -> str:
    """Content as text: a string, nothing, or a list of text parts. ValueError for anything else."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise ValueError(f"turn {turn + 1}: the content must be text or a list of text parts, found {type(content).__name__}")


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Every text in a message, keys of objects included."""
    yield from _strings([v for k, v in message.items() if k != "content"])
    yield from _strings(message.get("content"))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
            if key == "arguments" and isinstance(inner, str):  # JSON, in which any character can be written as an escape
                with suppress(ValueError, RecursionError):
                    yield from _strings(json.loads(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
