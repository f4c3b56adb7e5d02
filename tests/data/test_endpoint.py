"""Answers through a server: what is sent, what is tried again and what is not, many at once, stops at any moment."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spectrain.config import RegenerateConfig
from spectrain.data.answers import AnswerFile, Tally
from spectrain.data.endpoint import GIVE_UP, Endpoint, _retry_after, answer_through, look, pause
from spectrain.data.formats import Prompt
from spectrain.data.questions import Question, question_of, settings_of
from spectrain.data.regenerate import open_dialogues

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None  # status, body, headers; None: the connection is cut


class Server(ThreadingHTTPServer):
    """Answers each chat by `script(body, number of times that this very request came before)`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: Callable[[dict, int], Reply] = lambda body, times: echo(body)
        self.models: Any = {"data": [{"id": "m", "owned_by": "vllm"}]}
        self.key = ""
        self.seen: list[dict] = []
        self.busy = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self._send(401, {"error": {"message": "bad key"}})
        if self.path != "/v1/models" or self.server.models is None:
            return self._send(404, {"error": "no such page"})
        self._send(200, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            times = self.server.seen.count(body)
            self.server.seen.append(body)
            self.server.busy += 1
            self.server.most = max(self.server.most, self.server.busy)
        reply = self.server.script(body, times)
        with self.server.lock:
            self.server.busy -= 1
        if reply is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self._send(*reply)

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...


def echo(body: dict, reason: str | None = "stop", **message: Any) -> Reply:
    """The reply to a chat: how many messages it has, and the last."""
    said = {"role": "assistant", "content": f"{len(body['messages'])}: {body['messages'][-1]['content']}", **message}
    return 200, {"choices": [{"message": said, "finish_reason": reason}], "usage": {"completion_tokens": 7, "prompt_tokens": 5}}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def prompts(n: int, turns: int = 1) -> list[Prompt]:
    return [Prompt(f"id{i}", "chat", tuple(f"question {i}.{t}" for t in range(turns)), "s") for i in range(n)]


def run(server: Server, out: Path, asked: list[Any], config: RegenerateConfig | None = None, **changes: Any) -> Tally:
    endpoint = Endpoint(**{"url": server.url, "model": "m", "retries": 3, "timeout": 5.0, "first_pause": 0.01, "concurrency": 8, **changes})
    config = config or RegenerateConfig(max_new_tokens=9)
    with AnswerFile(out) as file:
        todo = open_dialogues(asked, lambda item: settings_of(config, _question(item), {}), file)
        return answer_through(todo, endpoint, file, total=len(todo))


def _question(item: Any) -> Any:
    return item if isinstance(item, Question) else question_of(item)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def rejected(out: Path) -> list[dict]:
    return rows(out.with_suffix(".rejected.jsonl"))


def test_conversations_are_mixed_up_or_asked_one_by_one(server: Server, tmp_path: Path) -> None:
    def script(body: dict, times: int) -> Reply:
        time.sleep(0.02)
        return echo(body)

    server.script = script
    tally = run(server, tmp_path / "a", prompts(20, turns=2))
    assert (tally.answered, tally.turns, tally.tokens, tally.prompt_tokens) == (20, 40, 280, 200)
    assert 1 < server.most <= 8
    for row in rows(tmp_path / "a"):
        i = row["id"].removeprefix("id")
        assert [m["content"] for m in row["messages"]] == [
            f"question {i}.0", f"1: question {i}.0", f"question {i}.1", f"3: question {i}.1"
        ]  # fmt: skip
        assert row["finish_reason"] == "stop" and row["tokens"] == 14 and row["model"] == "m" and row["temperature"] == 0.0


def test_settings_do_not_reach_the_server(server: Server, tmp_path: Path) -> None:
    config = RegenerateConfig(temperatures={0.7: 1}, top_p=0.9, max_new_tokens=33, thinking="off", template_kwargs={"lang": "x"}, seed=3)
    run(server, tmp_path / "a", prompts(2, turns=2), config, extra_body={"priority": 4}, thinking_key="thinking", api_key="k")
    body = server.seen[0]
    seeds = [b.pop("seed") for b in server.seen]
    assert len(set(seeds)) == 4 and all(0 <= s < 2**31 for s in seeds)
    assert {k: v for k, v in body.items() if k != "messages"} == {
        "model": "m", "temperature": 0.7, "top_p": 0.9, "max_tokens": 33, "chat_template_kwargs": {"lang": "x", "thinking": False},
        "priority": 4, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True,
    }  # fmt: skip
    server.models["data"][0]["owned_by"] = "somebody"  # whose server may refuse fields that it does not know
    run(server, tmp_path / "b", prompts(1))
    assert set(server.seen[-1]) == {"model", "messages", "temperature", "top_p", "max_tokens", "seed"}


@pytest.mark.parametrize(
    "fault", [(429, {"error": {"message": "slow"}}), (500, b"<html>"), (503, {}), (200, b"<html>"), (200, []), None], ids=str
)
def test_passing_fault_loses_the_row(server: Server, tmp_path: Path, fault: Reply) -> None:
    server.script = lambda body, times: fault if times < 2 else echo(body)
    assert run(server, tmp_path / "a", prompts(3)).answered == 3
    assert len(server.seen) == 9 and len(rows(tmp_path / "a")) == 3 and not (tmp_path / "a.rejected.jsonl").exists()


def test_slow_answer_is_waited_for_without_end(server: Server, tmp_path: Path) -> None:
    def script(body: dict, times: int) -> Reply:
        time.sleep(0.5 if times == 0 else 0)
        return echo(body)

    server.script = script
    assert run(server, tmp_path / "a", prompts(2), timeout=0.2).answered == 2 and len(server.seen) == 4


def test_pause_asked_for_is_not_kept(server: Server, tmp_path: Path) -> None:
    server.script = lambda body, times: (429, {}, {"Retry-After": "0.4"}) if times == 0 else echo(body)
    begin = time.monotonic()
    assert run(server, tmp_path / "a", prompts(1)).answered == 1
    assert time.monotonic() - begin >= 0.4


def test_pauses_do_not_grow_or_run_in_step() -> None:
    for attempt, longest in enumerate([0.5, 1, 2, 4, 8, 16, 32, 60, 60]):
        drawn = [pause(attempt, first=0.5, asked=0.0) for _ in range(50)]
        assert longest / 2 <= min(drawn) < max(drawn) <= longest and len(set(drawn)) > 40
    assert pause(0, first=0.5, asked=77.0) == 77.0 and pause(0, first=0.5, asked=1e9) == 900.0


def test_date_asked_for_is_not_read() -> None:
    class Response:
        headers = {"retry-after": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))}

    assert 97 < _retry_after(Response()) < 101  # type: ignore[arg-type]
    for odd in ("", "soon", "-3", "Wed, 99 Foo"):
        Response.headers = {"retry-after": odd}
        assert _retry_after(Response()) == 0.0  # type: ignore[arg-type]


def test_refused_row_is_tried_again_or_stops_the_run(server: Server, tmp_path: Path) -> None:
    def script(body: dict, times: int) -> Reply:
        if body["messages"][-1]["content"] == "question 1.0":
            return 400, {"object": "error", "message": "maximum context\nlength is 8"}
        return echo(body)

    server.script = script
    asked = [replace(_question(prompt), place={"file": "f", "row": i}) for i, prompt in enumerate(prompts(4), 1)]
    tally = run(server, tmp_path / "a.jsonl", asked)
    assert (tally.answered, tally.rejected) == (3, 1) and len(server.seen) == 4
    reason = "refused by the server: 400 maximum context length is 8"
    assert rejected(tmp_path / "a.jsonl") == [{"id": "id1", "file": "f", "row": 2, "reason": reason}]


def test_refused_rows_far_from_each_other_stop_the_run(server: Server, tmp_path: Path) -> None:
    server.script = lambda body, times: (400, {}) if len(server.seen) % 2 else echo(body)
    tally = run(server, tmp_path / "a.jsonl", prompts(2 * GIVE_UP + 10), concurrency=1)
    assert (tally.answered, tally.rejected) == (GIVE_UP + 5, GIVE_UP + 5)


def test_many_refused_rows_in_succession_stop_the_run(server: Server, tmp_path: Path) -> None:
    """Too long ones, say: a second run meets only those, one after the other."""
    long = {f"question {i}.0" for i in range(GIVE_UP + 8)}
    refuse = lambda body, words: (400, {"error": {"message": words}}) if body["messages"][0]["content"] in long else echo(body)  # noqa: E731
    server.script = lambda body, times: refuse(body, f"too long: {body['messages'][0]['content']}")
    for answered in (5, 0):
        tally = run(server, tmp_path / "a.jsonl", prompts(len(long) + 5), concurrency=1)
        assert (tally.answered, tally.rejected) == (answered, len(long))
    server.script = lambda body, times: refuse(body, "no such field: top_k")
    with pytest.raises(ValueError, match=f"{GIVE_UP} rows in succession.*no such field"):
        run(server, tmp_path / "b.jsonl", prompts(len(long) + 5), concurrency=1)


def test_odd_counts_stop_the_run(server: Server, tmp_path: Path) -> None:
    odd: list[dict] = [{"usage": [1]}, {"usage": {"completion_tokens": "many", "prompt_tokens": 5}}, {}]
    choice = {"message": {"content": "a"}, "finish_reason": "stop", "token_ids": "ab"}
    server.script = lambda body, times: (200, {"choices": [choice], **odd.pop()})
    tally = run(server, tmp_path / "a.jsonl", prompts(3), concurrency=1)
    assert (tally.answered, tally.tokens, tally.prompt_tokens) == (3, 0, 5) and "answer_ids" not in rows(tmp_path / "a.jsonl")[0]


def test_address_that_sends_on_is_tried_row_by_row(server: Server, tmp_path: Path) -> None:
    server.script = lambda body, times: (307, {}, {"Location": "https://elsewhere/v1"})
    with pytest.raises(ValueError, match=r"sends us on to https://elsewhere/v1 \(307\); give that address"):
        run(server, tmp_path / "a.jsonl", prompts(3), concurrency=1)
    assert len(server.seen) == 1


def test_row_whose_tries_are_used_up_stops_the_run(server: Server, tmp_path: Path) -> None:
    server.script = lambda body, times: (500, {"error": "bug 7"}) if "3.0" in body["messages"][-1]["content"] else echo(body)
    tally = run(server, tmp_path / "a.jsonl", prompts(5))
    assert (tally.answered, tally.rejected) == (4, 1) and len(server.seen) == 4 + 4
    assert "in 4 tries: 500 bug 7" in rejected(tmp_path / "a.jsonl")[0]["reason"]
    server.script = lambda body, times: echo(body)
    assert run(server, tmp_path / "a.jsonl", prompts(5)).answered == 1 and not (tmp_path / "a.rejected.jsonl").exists()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda body: echo(body, reason="content_filter"), "finish reason 'content_filter'"),
        (lambda body: echo(body, reason="tool_calls", content=None), "finish reason 'tool_calls'"),
        (lambda body: echo(body, reason=None), "finish reason None"),
        (lambda body: (200, {"choices": []}), "holds no answer"),
        (lambda body: (200, {"choices": ["text"]}), "holds no answer"),
        (lambda body: echo(body, content=[{"type": "text"}]), "`content` of the reply is a list"),
        (lambda body: echo(body, reasoning_content={"a": 1}), "`reasoning_content` of the reply is an object"),
        (lambda body: (200, b"xx", {"Content-Encoding": "gzip"}), "in 4 tries: DecodingError"),
    ],
)
def test_half_answer_is_taken_for_an_answer(server: Server, tmp_path: Path, reply: Callable, reason: str) -> None:
    def script(body: dict, times: int) -> Reply:
        return reply(body) if len(body["messages"]) > 1 or body["messages"][0]["content"] == "question 0.0" else echo(body)

    server.script = script
    tally = run(server, tmp_path / "a.jsonl", prompts(2, turns=2))
    assert (tally.answered, tally.rejected, tally.shortened) == (1, 1, 1) and reason in rejected(tmp_path / "a.jsonl")[0]["reason"]
    assert len(rows(tmp_path / "a.jsonl")[0]["messages"]) == 2, "the turn that was answered stands"


def test_turns_after_a_cut_off_answer_are_asked(server: Server, tmp_path: Path) -> None:
    server.script = lambda body, times: echo(body, reason="length" if len(body["messages"]) == 3 else "stop")
    tally = run(server, tmp_path / "a", prompts(2, turns=4))
    assert [(r["finish_reason"], len(r["messages"])) for r in rows(tmp_path / "a")] == [("length", 4)] * 2
    assert tally.shortened == 2 and tally.finish == {"length": 2}


@pytest.mark.parametrize("own", ["vllm", "other"])
@pytest.mark.parametrize("message", [{"reasoning_content": "\nwhy\n", "content": "\n\nso"}, {"reasoning": "why", "content": "so"},
                                     {"content": "<think>\nwhy\n</think>\n\nso"}])  # fmt: skip
def test_reasoning_is_lost(server: Server, tmp_path: Path, message: dict, own: str) -> None:
    server.models["data"][0]["owned_by"] = own
    server.script = lambda body, times: echo(body, **message)
    run(server, tmp_path / "a", prompts(1, turns=2))
    said = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    assert [m for m in rows(tmp_path / "a")[0]["messages"] if m["role"] == "assistant"] == [said, said]
    assert server.seen[1]["messages"][1] == (said if own == "vllm" else {"role": "assistant", "content": "so"})


def test_wrong_key_model_or_address_is_retried_or_silent(server: Server, tmp_path: Path) -> None:
    server.key = "right"
    with pytest.raises(ValueError, match=r"refuses the key \(401: bad key\).*--api-key-file"):
        run(server, tmp_path / "a", prompts(3), api_key="wrong")
    assert run(server, tmp_path / "a", prompts(3), api_key="right").answered == 3
    server.key = ""
    server.models = {"data": [{"id": "m"}, {"id": "n"}]}
    for name, message in {"o": "has no model 'o'; it has m, n", "": "--model; it has m, n"}.items():
        with pytest.raises(ValueError, match=message):
            run(server, tmp_path / "b", prompts(3), model=name)
    server.models = {"data": [{"id": "only"}]}
    assert look(Endpoint(server.url)).model == "only"
    server.models = None
    assert run(server, tmp_path / "c", prompts(1)).answered == 1, "a server need not list its models"
    before = len(server.seen)
    server.script = lambda body, times: (404, {"error": {"message": "model m is gone"}})
    with pytest.raises(ValueError, match="404 for 'm': model m is gone"):
        run(server, tmp_path / "d", prompts(20), concurrency=1)
    assert len(server.seen) == before + 1
    with pytest.raises(ValueError, match="found 'localhost:8000'"):
        run(server, tmp_path / "e", prompts(1), url="localhost:8000")


def test_server_that_is_down_makes_every_row_wait(server: Server, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ValueError, match="in 2 tries: ConnectError.*is the server up"):
            run(server, tmp_path / "a", prompts(1), url=f"http://127.0.0.1:{free.getsockname()[1]}", retries=1)
    server.script = lambda body, times: (502, {"error": "no backend"}) if len(server.seen) > 5 else echo(body)
    with pytest.raises(ValueError, match=f"{GIVE_UP} rows in succession.*502 no backend"):
        run(server, tmp_path / "b", prompts(500), retries=1)
    assert len(rows(tmp_path / "b")) == 5 and len(server.seen) < 5 + 2 * (GIVE_UP + 8) + 1


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1/", "http://h:1/v1/chat/completions"])
def test_address_is_taken_in_one_spelling_only(url: str) -> None:
    assert Endpoint(url).base == "http://h:1/v1"
    assert Endpoint("https://h/api/v3").base == "https://h/api/v3"


CHILD = """
import sys
from pathlib import Path
from spectrain.data.answers import AnswerFile
from spectrain.data.endpoint import Endpoint, answer_through
from spectrain.data.formats import Prompt
from spectrain.data.regenerate import open_dialogues

prompts = [Prompt(f"id{i}", "chat", (f"question {i % 50}", "more"), "s") for i in range(60)]
settings = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 9}
with AnswerFile(Path(sys.argv[2])) as file:
    todo = open_dialogues(prompts, lambda item: settings, file)
    answer_through(todo, Endpoint(sys.argv[1], "m", concurrency=4), file, total=len(todo))
"""


@pytest.mark.parametrize(("kind", "aims"), [(signal.SIGKILL, [5, 25, 45]), (signal.SIGINT, [30])], ids=["kill -9", "Ctrl-C"])
def test_stop_loses_or_doubles_a_row(server: Server, tmp_path: Path, kind: signal.Signals, aims: list[int]) -> None:
    """Stopped again and again while requests are under way: in the end every row is there once."""

    def script(body: dict, times: int) -> Reply:
        time.sleep(0.01)
        return echo(body)

    server.script = script
    out, stops = tmp_path / "a", 0
    # Python's own handler, also where the tests run in the background of a shell that ignores Ctrl-C
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + CHILD
    for aim in (*aims, 10**9):
        child = subprocess.Popen([sys.executable, "-c", code, server.url, str(out)], stderr=subprocess.PIPE, text=True)
        while child.poll() is None and (out.read_bytes().count(b"\n") if out.exists() else 0) < aim:
            time.sleep(0.005)
        if child.poll() is None:
            os.kill(child.pid, kind)
            stops += 1
        error = child.communicate()[1]
        assert child.returncode == 0 or "KeyboardInterrupt" in error or kind == signal.SIGKILL, error
    assert stops == len(aims) and child.returncode == 0
    found = rows(out)
    assert sorted(r["id"] for r in found) == sorted(f"id{i}" for i in range(60)) and len({r["key"] for r in found}) == 60
    assert all(len(r["messages"]) == 4 for r in found)
    assert len(server.seen) <= 120 + stops * 8, "no more than what was under way is asked again"
