"""A server with the API and the counters of an engine, whose answers and rounds are our own generator's."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.target.model import Target


class SmallEngine(ThreadingHTTPServer):
    """kind: `vllm` or `sglang`, whose names and counting rule it has. depth: of its chain, 0 where it does not speculate."""

    daemon_threads = True

    def __init__(self, target: Target, head: Any, *, kind: str = "vllm", depth: int = 3) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.drafter, self.kind, self.depth = target, HeadDrafter(head), kind, depth
        self.started, self.asked, self.cut = 1.7e9, 0, 0
        self.counts: Counter[Any] = Counter()
        self.has_counters = True
        self.system = ""  # what it says before every chat
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.target.encode([*([{"role": "user", "content": self.system}] if self.system else []), *body["messages"]])
        drafting: dict[str, Any] = {"drafter": self.drafter, "shape": Chain(self.depth)} if self.depth else {}
        with self.lock:
            row = generate(self.target, [ids], max_new_tokens=body["max_tokens"], compile=False, **drafting).rows[0]
            self.asked += 1
            self.counts.update(tokens=len(row.tokens), requests=1, rounds=len(row.rounds))
            for r in row.rounds:
                self.cut += r.committed < r.accepted + 1
                self.counts.update(drafted=r.drafted, accepted=r.accepted, **{str(i): 1 for i in range(r.accepted)})
        vllm = {"token_ids": row.tokens} if self.kind == "vllm" else {}
        choice = {"message": {"role": "assistant", "content": row.text}, "finish_reason": row.finish_reason, **vllm}
        return {"choices": [choice], "usage": {"completion_tokens": len(row.tokens), "prompt_tokens": len(ids)}}

    def metrics(self) -> str:
        c, start = self.counts, f"process_start_time_seconds {self.started}"
        if self.kind == "sglang":
            drafts = [f'sglang:spec_verify_calls_total{{model_name="m"}} {c["rounds"]}'] if self.depth and c["rounds"] else []
            lines = [f'sglang:{name}{{is_streaming="false"}} {n}' for name, n in self.pairs(("num_requests", "generation_tokens"))]
            return "\n".join(["# TYPE sglang:num_requests_total counter", *lines, *drafts])
        lines = [f'vllm:{name}{{engine="0"}} {n}' for name, n in self.pairs(("request_success", "generation_tokens"))]
        if self.depth:
            told = {"drafts": c["rounds"], "draft_tokens": c["drafted"], "accepted_tokens": c["accepted"]}
            lines += [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {float(n)}' for name, n in told.items()]
            per = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{per}{{engine="0",position="{i}"}} {float(c[str(i)])}' for i in range(self.depth)]
        return "\n".join([start, "# HELP vllm:generation_tokens_total Number of tokens.", *lines])

    def pairs(self, names: tuple[str, str]) -> list[tuple[str, int]]:
        return [(f"{names[0]}_total", self.counts["requests"]), (f"{names[1]}_total", self.counts["tokens"])]


class Handler(BaseHTTPRequestHandler):
    server: SmallEngine

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.server.has_counters:
            return self.reply(200, self.server.metrics().encode())
        if self.path == "/v1/models":
            return self.reply(200, json.dumps({"data": [{"id": "m", "owned_by": self.server.kind}]}).encode())
        self.reply(404, b"no such page")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(200, json.dumps(self.server.answer(body)).encode())

    def reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def running(*args: Any, **settings: Any) -> Iterator[SmallEngine]:
    server = SmallEngine(*args, **settings)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
