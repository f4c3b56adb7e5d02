"""Answers through any OpenAI-compatible server: many conversations at once, each turn by turn, with patience for a server's faults.

A request that fails for the server's sake (429, 5xx, time-out, lost connection) is made again after a growing pause, one that the
server refuses is a rejected row, and what will refuse every row (a wrong key, model or address) stops the run.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from tqdm import tqdm

from spectrain.data.answers import Answer, AnswerFile, Dialogue, Tally
from spectrain.data.dialects import kind
from spectrain.data.formats import CUT, Message
from spectrain.data.questions import seed_of
from spectrain.data.regenerate import split_reasoning

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
LONGEST_PAUSE = 60.0  # seconds; a server that names a longer one gets it, up to LONGEST_ASKED
LONGEST_ASKED = 900.0
GIVE_UP = 32  # rows in succession without an answer: the fault is no row's
CONNECT_SECONDS = 20.0
# Servers of open models take these beside OpenAI's own fields. Theirs would otherwise be the model's generation_config.json.
PLAIN_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
EXTRAS: dict[str, dict[str, Any]] = {"vllm": {**PLAIN_SAMPLING, "return_token_ids": True}, "sglang": PLAIN_SAMPLING}


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server: url up to and with its version (`http://host:8000/v1`), or the host alone.

    thinking_key: the chat template's switch. extra_body: fields for every request. first_pause: seconds before the second try.
    """

    url: str
    model: str = ""
    api_key: str = ""
    concurrency: int = 64
    retries: int = 6
    timeout: float = 600.0
    thinking_key: str = "enable_thinking"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    first_pause: float = 0.5

    @property
    def base(self) -> str:
        """The address that `/chat/completions` follows. ValueError for what is no address."""
        base = self.url.rstrip("/").removesuffix("/chat/completions").rstrip("/")
        parsed = httpx2.URL(base)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"an endpoint is an address such as http://localhost:8000/v1, found {self.url!r}")
        return base if parsed.path.strip("/") else f"{base}/v1"


class Stop(ValueError):
    """A fault that every row would meet."""


class Refused(ValueError):
    """A fault of one row: the server is there, and has no answer to it."""


@dataclass
class Server:
    """What the server says of itself. own: its kind (`vllm`, `sglang`, or anything)."""

    model: str
    own: str = ""
    models: tuple[str, ...] = ()


def answer_through(dialogues: Iterable[Dialogue], endpoint: Endpoint, file: AnswerFile, *, total: int) -> Tally:
    """Answer every dialogue to its last turn through the server; raises ValueError when no row can be answered.

    Ctrl-C drops the requests under way; what is answered is in the file.
    """
    return asyncio.run(_answer_all(dialogues, endpoint, file, total))


def look(endpoint: Endpoint) -> Server:
    """Ask the server which models it has. ValueError for a wrong key, model or address."""
    return asyncio.run(_look(endpoint))


async def _look(endpoint: Endpoint) -> Server:
    async with _client(endpoint) as client:
        return await _Asker(endpoint, client).look()


def _client(endpoint: Endpoint) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return httpx2.AsyncClient(
        headers=headers, timeout=httpx2.Timeout(endpoint.timeout, connect=min(CONNECT_SECONDS, endpoint.timeout)),
        limits=httpx2.Limits(max_connections=endpoint.concurrency + 1),
    )  # fmt: skip


async def _answer_all(dialogues: Iterable[Dialogue], endpoint: Endpoint, file: AnswerFile, total: int) -> Tally:
    begin = time.monotonic()
    with tqdm(total=total, desc="answers", unit="row", disable=None) as bar:
        async with _client(endpoint) as client:
            asker = _Asker(endpoint, client)
            await asker.look()
            work = _Work(iter(dialogues), asker, file, bar, begin)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(endpoint.concurrency):
                        tasks.create_task(work.run())
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            finally:
                file.tally.seconds += time.monotonic() - begin
    return file.tally


@dataclass
class _Work:
    """What the workers share."""

    dialogues: Iterator[Dialogue]
    asker: "_Asker"
    file: AnswerFile
    bar: Any
    begin: float
    failed: int = 0  # rows in succession
    last: str = ""  # what the last of them met

    async def run(self) -> None:
        """One conversation after the other."""
        for dialogue in self.dialogues:
            while await self._turn(dialogue):
                pass
            self.bar.update(1)
            self.bar.set_postfix_str(f"{self.file.tally.tokens / (time.monotonic() - self.begin):.0f} tokens/s")

    async def _turn(self, dialogue: Dialogue) -> bool:
        try:
            more = dialogue.take(await self.asker.answer(dialogue))
        except Stop:
            raise
        except ValueError as error:
            self._count(error)
            if dialogue.answers:  # the turns before this one stand
                self.file.write([dialogue], self.asker.server.model)
            else:
                self.file.reject(dialogue.question.id, str(error), **dialogue.question.place)
            return False
        self.failed = 0
        if not more:
            self.file.write([dialogue], self.asker.server.model)
        return more


    def _count(self, error: ValueError) -> None:
        """Stop when the fault is no row's: the server's own row after row, or one refusal of all rows where none was ever answered."""
        tally = self.file.tally
        own = isinstance(error, Refused) and (tally.answered + tally.there > 0 or str(error) != self.last)
        self.failed, self.last = 1 if own else self.failed + 1, str(error)
        if self.failed >= GIVE_UP:
            raise Stop(f"{self.failed} rows in succession without an answer; the last: {error}") from error


class _Asker:
    """Requests to one server."""

    def __init__(self, endpoint: Endpoint, client: httpx2.AsyncClient) -> None:
        self._endpoint, self._client, self._base = endpoint, client, endpoint.base
        self.server = Server(endpoint.model)

    async def look(self) -> Server:
        """Ask which models there are; ValueError when ours is not among them."""
        wanted = self._endpoint.model
        try:
            listed = (await self._request("GET", "/models")).get("data") or []
        except Stop:
            raise
        except _NoPage:  # not every server lists its models
            listed = []
        models = tuple(str(entry["id"]) for entry in listed if isinstance(entry, dict) and "id" in entry)
        if models and wanted and wanted not in models:
            raise Stop(f"{self._base} has no model {wanted!r}; it has {', '.join(models)}")
        if not wanted and len(models) != 1:
            found = f"it has {', '.join(models)}" if models else "it does not list them"
            raise Stop(f"name the model of {self._base} with --model; {found}")
        name = wanted or models[0]
        own = next((str(entry.get("owned_by", "")) for entry in listed if isinstance(entry, dict) and entry.get("id") == name), "")
        self.server = Server(name, own.lower(), models)
        return self.server

    async def answer(self, dialogue: Dialogue) -> Answer:
        """The answer to a dialogue's next turn; ValueError when the server has none for it."""
        try:
            reply = await self._request("POST", "/chat/completions", self._body(dialogue))
        except _NoPage as error:
            raise Stop(self._not_found(error)) from error
        return _read(reply)

    def _not_found(self, error: Exception) -> str:
        there = f"it has {', '.join(self.server.models)}" if self.server.models else "is the address right?"
        return f"{self._base} answers 404 for {self.server.model!r}: {error}; {there}"

    def _body(self, dialogue: Dialogue) -> dict[str, Any]:
        s, own = dialogue.settings, EXTRAS.get(self.server.own, {})
        kwargs = dict(s.get("template_kwargs") or {})
        if s.get("thinking", "default") != "default":
            kwargs[self._endpoint.thinking_key] = s["thinking"] == "on"
        seed = seed_of(f"{dialogue.key}:{len(dialogue.answers)}") & 0x7FFFFFFF  # some servers keep 32 bits with sign
        return {
            "model": self.server.model, "messages": [_sent(m, reasoning=bool(own)) for m in dialogue.chat], "temperature": s["temperature"],
            "top_p": s["top_p"], "max_tokens": s["max_new_tokens"], "seed": seed,
            **own, **({"chat_template_kwargs": kwargs} if kwargs else {}), **self._endpoint.extra_body,
        }  # fmt: skip

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request with its retries. Raises Stop for a wrong key, _NoPage for 404, ValueError when refused or out of tries."""
        endpoint, fault = self._endpoint, ""
        for attempt in range(endpoint.retries + 1):
            asked = 0.0
            try:
                response = await self._client.request(method, self._base + path, json=body)
                if response.status_code < 300:
                    return _object(response)
                fault, asked = self._judge(response), _retry_after(response)
            except (httpx2.RequestError, _Garbled) as error:  # time-outs, lost connections, damaged bodies
                fault = f"{type(error).__name__} {error}".strip()
            if attempt < endpoint.retries:
                await asyncio.sleep(pause(attempt, first=endpoint.first_pause, asked=asked))
        message = f"no answer from {self._base} in {endpoint.retries + 1} tries: {fault}"
        raise Stop(f"{message}; is the server up?") if method == "GET" else ValueError(message)

    def _judge(self, response: httpx2.Response) -> str:
        """What is wrong, for a request to be made again; raises for one that must not be."""
        status, words = response.status_code, _words(response)
        if status in (401, 403):
            raise Stop(f"{self._base} refuses the key ({status}: {words}); give the right one with --api-key-env or --api-key-file")
        if status == 404:
            raise _NoPage(words)
        if status < 400:
            raise Stop(f"{self._base} sends us on to {response.headers.get('location', 'nowhere')} ({status}); give that address instead")
        if status not in AGAIN:
            raise Refused(f"refused by the server: {status} {words}")
        return f"{status} {words}"


class _NoPage(Exception):
    """404."""


class _Garbled(Exception):
    """An answer that is no JSON object, as from a proxy in between."""


def pause(attempt: int, *, first: float, asked: float) -> float:
    """Seconds before the next try: twice as long each time, at least half of it at random, and not before the server wants it."""
    longest = min(LONGEST_PAUSE, first * 2.0**attempt)
    return max(random.uniform(longest / 2, longest), min(asked, LONGEST_ASKED))


def _retry_after(response: httpx2.Response) -> float:
    """Seconds that the server asks for: a number or a date (RFC 9110, 10.2.3); 0 when it does not."""
    value = response.headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, IndexError):
        return 0.0


def _words(response: httpx2.Response) -> str:
    """The server's own words, in one line."""
    try:
        value = response.json()
        value = value.get("error", value) if isinstance(value, dict) else value
        text = str(value.get("message", value) if isinstance(value, dict) else value)
    except ValueError:
        text = response.text
    return " ".join(text.split())[:300]


def _object(response: httpx2.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError as error:
        raise _Garbled(f"not JSON: {response.text[:80]!r}") from error
    if not isinstance(value, dict):
        raise _Garbled(f"no JSON object: {json.dumps(value)[:80]}")
    return value


def _sent(message: Message, *, reasoning: bool) -> Message:
    """A message as a server takes it: OpenAI's own has no field for earlier reasoning."""
    return message if reasoning else {key: value for key, value in message.items() if key != "reasoning_content"}


def _read(reply: Mapping[str, Any]) -> Answer:
    """The answer in a reply; Refused for one that ended in another way than an answer ends."""
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise Refused(f"the server's reply holds no answer: {json.dumps(reply)[:200]}")
    reason = choice.get("finish_reason")
    reason = "length" if reason in CUT else reason
    if reason not in ("stop", "length"):
        raise Refused(f"finish reason {reason!r}: needed stop or length")
    text, reasoning = _said(message, "content"), _said(message, "reasoning_content") or _said(message, "reasoning")
    if not reasoning:
        reasoning, text = split_reasoning(text)
    else:
        reasoning, text = reasoning.strip("\n"), text.lstrip("\n")
    listed = choice.get("token_ids")
    ids = tuple(listed) if isinstance(listed, list) and all(type(i) is int for i in listed) else ()
    usage = reply.get("usage")
    counts = {name: n for name, n in usage.items() if type(n) is int} if isinstance(usage, dict) else {}
    return Answer(
        text=text, reasoning=reasoning, finish_reason=reason, ids=ids, tokens=counts.get("completion_tokens", len(ids)),
        prompt_tokens=counts.get("prompt_tokens", 0),
    )  # fmt: skip


def _said(message: Mapping[str, Any], key: str) -> str:
    """Text of a reply that may be missing or null."""
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise Refused(f"`{key}` of the reply is {kind(value)}; needed text")
    return value or ""
