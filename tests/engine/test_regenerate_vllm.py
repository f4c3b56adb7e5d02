"""Regeneration through a real server: the texts of the target in process, the tokens that the rows teach, stops, faults."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.cli.regenerate import regenerate
from spectrain.data.formats import read_conversations
from spectrain.data.masking import encode_conversation
from spectrain.target.model import Target

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # reading GGUF warns inside third-party code
MODEL = "small"
TOKENS = 40
TIE = 2e-3  # gap of the two best logits that rounding may close; passes of other sizes move it by up to 3e-5 in one program

ASKED = [
    "What is the capital of France?", "Write one sentence about the sea.", "Count from one to ten.", "Translate to German: good morning.",
    "What is 12 + 30?", "Name three colours.", "Write a Python function that adds two numbers.", "Who wrote Hamlet?",
    "Explain gravity to a child.", "Give me a recipe for tea.", "What does HTTP stand for?", "List the days of the week.",
    "Write a short poem about rain.", "How many legs has a spider?", "What is a prime number?", "Say hello in four languages.",
    "Was ist ein Baum? \u00e4\u00f6\u00fc \u00df", "Summarise: the cat sat on the mat and slept.", "Give a synonym of fast.",
    "What is the boiling point of water?",
]  # fmt: skip


def ask(inputs: Path, out: Path, *, overrides: tuple[str, ...] = (), **where: str) -> None:
    settings: dict[str, Any] = {"target": "", "endpoint": "", "model": "", **where}
    regenerate(
        [str(inputs)], out=out, api_key_env="", api_key_file=None, dtype="float32", revision=None, as_json=False,
        overrides=[f"max_new_tokens={TOKENS}", *overrides], **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two turns for every fourth."""
    path = tmp_path_factory.mktemp("asked") / "asked.jsonl"
    with path.open("w") as file:
        for i, text in enumerate(ASKED):
            file.write(json.dumps({"id": f"q{i}", "domain": "chat", "turns": [text, "Say it shorter."][: 2 - bool(i % 4)]}) + "\n")
    return path


@pytest.fixture(scope="module")
def served(engine: str, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "answers.jsonl"
    ask(inputs, out, endpoint=engine, model=MODEL, overrides=("concurrency=16",))
    return out


def rows(path: Path) -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


@torch.inference_mode()
def gap_at(target: Target, prompt: list[int], said: list[int], at: int) -> float:
    """Gap of the two best logits where answer token `at` was chosen."""
    ids_1L = torch.tensor([[*prompt, *said[:at]]])
    logits_V = target.forward(ids_1L, positions_BN=torch.arange(ids_1L.shape[1])[None], mask=None, cache=None, logits_to_keep=1).logits_BKV
    best, second = logits_V.flatten().topk(2).values.tolist()
    return best - second


def test_server_and_target_in_process_say_other_things(small: Target, inputs: Path, served: Path, tmp_path: Path) -> None:
    """Greedy texts are equal, turn by turn; where they part, the two best tokens are as good as equal."""
    out = tmp_path / "own.jsonl"
    ask(inputs, out, target=small.name, overrides=("batch_size=8",))
    theirs, own = rows(served), rows(out)
    assert set(theirs) == set(own) == {f"q{i}" for i in range(len(ASKED))}
    parted = []
    for name, row in own.items():
        for turn, (a, b) in enumerate(zip(row["answer_ids"], theirs[name]["answer_ids"], strict=True)):
            if a == b:
                continue
            at = next(i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1])
            prompt = small.encode(row["messages"][: 2 * turn + 1])
            parted.append((name, turn, at, gap_at(small, prompt, a, at)))
            break  # what follows has another history
        else:
            assert row["messages"] == theirs[name]["messages"] and row["finish_reason"] == theirs[name]["finish_reason"]
    print(f"{len(parted)} of {len(own)} conversations part: {parted}")
    assert all(gap < TIE for *_, gap in parted) and len(parted) <= 3, parted


def test_rows_teach_other_tokens_than_the_server_read_and_said(small: Target, engine: str, served: Path) -> None:
    """Prompt ids of a row are those of the server's own template; its supervised ids are those that the server generated.

    Where the model cut a text into other tokens than the tokenizer does, the text is all that can be kept.
    """
    found, equal, odd = rows(served), 0, []
    for conversation in read_conversations(served):
        row = found[conversation.id]
        if len(row["messages"]) > 2:
            continue  # every answer of these is compared with the target's own above
        encoded = encode_conversation(small.tokenizer, conversation)
        body = json.dumps({"model": MODEL, "messages": row["messages"][:1], "add_generation_prompt": True}).encode()
        ask_ids = urllib.request.Request(engine.removesuffix("/v1") + "/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(ask_ids, timeout=60) as reply:
            assert json.load(reply)["tokens"] == encoded.prompt_ids
        taught, said = encoded.supervised_ids.tolist(), row["answer_ids"][0]
        assert len(said) == row["tokens"]
        ended = taught[-1] in small.eos_ids
        assert ended == (row["finish_reason"] == "stop"), "a reply that was cut off has a supervised end, or a whole one has none"
        if small.encode(small.tokenizer.decode(said)) != said:
            odd.append(conversation.id)
            assert small.tokenizer.decode(said).startswith(small.tokenizer.decode(taught)), "half a character at the end may be missing"
            continue
        assert taught == said, conversation.id
        equal += 1
    print(f"{len(odd)} of {equal + len(odd)} answers were cut into other tokens by the model than by the tokenizer: {odd}")
    reasons = {row["finish_reason"] for row in found.values()}
    assert equal >= 12 and len(odd) <= 5 and reasons == {"stop", "length"}


def test_killed_run_loses_or_doubles_a_row(engine: str, inputs: Path, served: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    code = (
        "import sys; from pathlib import Path; from spectrain.cli.regenerate import regenerate\n"
        "regenerate([sys.argv[1]], out=Path(sys.argv[2]), target='', endpoint=sys.argv[3], model='small', api_key_env='',"
        f" api_key_file=None, dtype='float32', revision=None, overrides=['max_new_tokens={TOKENS}', 'concurrency=4'], as_json=False)"
    )
    command = [sys.executable, "-c", code, str(inputs), str(out), engine]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while child.poll() is None and (out.read_bytes().count(b"\n") if out.exists() else 0) < 5:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = len(rows(out))
    assert 5 <= before < len(ASKED)
    assert subprocess.run(command, capture_output=True, text=True, check=True).returncode == 0
    lines = out.read_text().splitlines()
    assert len(lines) == len(ASKED) and set(rows(out)) == set(rows(served))
    same = sum(row["messages"] == rows(served)[name]["messages"] for name, row in rows(out).items())
    assert same >= len(ASKED) - 3, "batches of other sizes round otherwise, but not in so many rows"


def test_requests_wait_for_each_other(engine: str, tmp_path: Path) -> None:
    inputs = tmp_path / "asked.jsonl"
    texts = [json.dumps({"id": f"{i}", "domain": "d", "prompt": f"Tell me about the number {i}."}) for i in range(12)]
    inputs.write_text("\n".join(texts))
    seconds = []
    for concurrency in (1, 12):
        begin = time.monotonic()
        ask(
            inputs, tmp_path / f"{concurrency}.jsonl", endpoint=engine, model=MODEL,
            overrides=(f"concurrency={concurrency}", "max_new_tokens=24"),
        )  # fmt: skip
        seconds.append(time.monotonic() - begin)
        assert len(rows(tmp_path / f"{concurrency}.jsonl")) == 12
    assert seconds[1] < 0.7 * seconds[0], seconds


def test_wrong_model_is_not_named(engine: str, inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model 'large'; it has small"):
        ask(inputs, tmp_path / "a.jsonl", endpoint=engine, model="large")
    assert not (tmp_path / "a.jsonl").exists()


def test_prompt_that_the_server_refuses_stops_the_run(engine: str, tmp_path: Path) -> None:
    inputs, out = tmp_path / "asked.jsonl", tmp_path / "a.jsonl"
    texts = {"long": "word " * 3000, "short": "Say yes."}
    inputs.write_text("".join(json.dumps({"id": i, "domain": "d", "prompt": text}) + "\n" for i, text in texts.items()))
    ask(inputs, out, endpoint=engine, overrides=("max_new_tokens=4", "temperatures={0.8: 1}"))
    assert set(rows(out)) == {"short"} and rows(out)["short"]["temperature"] == 0.8
    rejected = json.loads(out.with_suffix(".rejected.jsonl").read_text())
    assert rejected["id"] == "long" and "refused by the server: 400" in rejected["reason"] and "1024" in rejected["reason"]
