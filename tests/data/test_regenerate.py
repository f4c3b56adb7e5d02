"""Answers by the target: what is asked, in which batches, written as they come, resumed by what each row is."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from spectrain.config import RegenerateConfig
from spectrain.data.answers import AnswerFile, check_settings
from spectrain.data.formats import Conversation, Prompt, read_conversations
from spectrain.data.questions import Question, missing, question_of, settings_of
from spectrain.data.regenerate import Answer, Take, answer_in_batches, answer_key, open_dialogues, regenerate, split_reasoning


class Answerer:
    """Counts what it is asked; fails at call `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[str] = []
        self.seeds: dict[str, int] = {}
        self.calls, self.fails_at = 0, fails_at

    def __call__(self, chats: Sequence, settings: Mapping, seeds: Sequence[int], take: Take) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("the server is gone")
        texts = [chat[-1]["content"] for chat in chats]
        self.asked += texts
        self.seeds |= dict(zip(texts, seeds, strict=True))
        for n, t in reversed(list(enumerate(texts))):
            take(n, Answer(text=f"re: {t}\u2028!", tokens=len(t), finish_reason="length" if t.endswith("3") else "stop"))


PROMPTS = [Prompt(f"id{i}", "chat" if i % 2 else "math", (f"{'long ' * (i % 3)}question {i}",), "s") for i in range(10)]


def run(out: Path, answer: Answerer, prompts=PROMPTS, batch_size: int = 3, **settings) -> int:
    return regenerate(prompts, answer=answer, settings=lambda p: {"temperature": 0.0, **settings}, out=out, batch_size=batch_size)


def test_answers_do_not_belong_to_their_prompts(tmp_path: Path) -> None:
    out, answer = tmp_path / "deep" / "answers.jsonl", Answerer()
    assert run(out, answer) == 10 and answer.calls == 4
    rows = {c.id: c for c in read_conversations(out)}
    assert len(rows) == 10
    for prompt in PROMPTS:
        got = rows[prompt.id]
        assert [m["role"] for m in got.messages] == ["user", "assistant"] and got.domain == prompt.domain
        assert got.messages[0]["content"] == prompt.turns[0] and got.messages[1]["content"] == f"re: {prompt.turns[0]}\u2028!"
        assert got.finish_reason == ("length" if prompt.turns[0].endswith("3") else "stop")
    assert len(out.read_text().splitlines()) == 10


def test_finished_run_is_done_again(tmp_path: Path) -> None:
    run(tmp_path / "a", Answerer())
    before, answer = (tmp_path / "a").read_bytes(), Answerer()
    assert run(tmp_path / "a", answer, prompts=PROMPTS[::-1]) == 0 and not answer.asked
    assert (tmp_path / "a").read_bytes() == before


def test_resume_skips_by_number(tmp_path: Path) -> None:
    """RE3: 6 of 10 rows are done and the input is reordered: exactly the 4 missing ones are asked, with the seeds of a whole run."""
    whole = Answerer()
    run(tmp_path / "whole", whole)
    with pytest.raises(RuntimeError, match="gone"):
        run(tmp_path / "a", Answerer(fails_at=3))
    done = {c.messages[0]["content"] for c in read_conversations(tmp_path / "a")}
    assert len(done) == 6
    answer = Answerer()
    assert run(tmp_path / "a", answer, prompts=PROMPTS[::-1]) == 4
    assert set(answer.asked) == {p.turns[0] for p in PROMPTS} - done and len(answer.asked) == 4
    assert answer.seeds.items() <= whole.seeds.items()
    assert sorted((tmp_path / "a").read_text().splitlines()) == sorted((tmp_path / "whole").read_text().splitlines())


@pytest.mark.parametrize("left", [1, 30, 0])
def test_torn_last_line_is_kept(tmp_path: Path, left: int) -> None:
    out = tmp_path / "a"
    run(out, Answerer())
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:-1]) + lines[-1][:left])
    answer = Answerer()
    assert run(out, answer) == 1
    assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_torn_only_line_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"id": "x')
    assert run(tmp_path / "a", Answerer()) == 10 and len(read_conversations(tmp_path / "a")) == 10


def test_damaged_line_in_the_middle_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"id": "x\n{"key": "y"}\n')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        run(tmp_path / "a", Answerer())


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"max_new_tokens": 9}, {"template": "b"}])
def test_answers_of_other_settings_are_kept_as_done(tmp_path: Path, changed: dict) -> None:
    run(tmp_path / "a", Answerer())
    assert run(tmp_path / "a", Answerer(), **changed) == 10


def test_prompts_of_unequal_settings_share_a_batch(tmp_path: Path) -> None:
    seen = []

    def answer(chats, settings, seeds, take):
        seen.append((dict(settings), len(chats)))
        for n in range(len(chats)):
            take(n, Answer("x", 1, "stop"))

    regenerate(PROMPTS, answer=answer, settings=lambda p: {"hot": p.domain == "math"}, out=tmp_path / "a", batch_size=4)
    assert sorted((s["hot"], n) for s, n in seen) == [(False, 1), (False, 4), (True, 1), (True, 4)]


def test_key_depends_on_the_order_of_settings_only() -> None:
    chat = PROMPTS[0].chat
    assert answer_key(chat, {"a": 1, "b": 2}) == answer_key(chat, {"b": 2, "a": 1})
    assert len({answer_key(c, s) for c in (chat, PROMPTS[1].chat) for s in ({"a": 1}, {"a": 2}, {"a": 1, "b": None})}) == 6


def test_too_few_answers_are_written(tmp_path: Path) -> None:
    def answer(chats, settings, seeds, take):
        take(2, Answer("x", 1, "stop"))

    with pytest.raises(ValueError, match="4 prompts were left without an answer"):
        regenerate(PROMPTS, answer=answer, settings=lambda p: {}, out=tmp_path / "a", batch_size=5)
    (line,) = (tmp_path / "a").read_text().splitlines()
    assert json.loads(line)["messages"][1]["content"] == "x"


def conversation(*messages: tuple[str, str] | dict, **more: Any) -> Conversation:
    made = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    return Conversation(id="c", domain="chat", messages=tuple(made), **more)


S, A, B, OLD = ("system", "be kind"), ("user", "a"), ("user", "b"), ("assistant", "another model's words")
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "42"}


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([A, OLD], [[A]]),
        ([S, A, OLD, B, OLD], [[S, A], [B]]),
        ([S, A, OLD, B], [[S, A], [B]]),
        ([OLD, A, OLD], [[A]]),  # a greeting that nobody asked for
        ([S, OLD, A, OLD], [[S, A]]),
        ([A, B, OLD], [[A, B]]),
        ([A, OLD, S, B, OLD, S], [[A], [S, B]]),
        ([A, OLD, B, CALL, RESULT, OLD, A, OLD], [[A]]),
        ([A, OLD, RESULT, OLD, A], [[A]]),
    ],
)
def test_questions_are_not_those_of_the_conversation(messages: list, turns: list) -> None:
    got = question_of(conversation(*messages))
    assert [[(m["role"], m["content"]) for m in turn] for turn in got.turns] == turns and (got.id, got.domain) == ("c", "chat")
    assert question_of(Prompt("p", "math", ("a", "b"), "")).turns == tuple(({"role": "user", "content": t},) for t in "ab")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([A, CALL, RESULT, OLD], "first answer is a tool call"), ([S, OLD], "no user turn"), ([OLD], "no user turn"),
        ([("user", " "), OLD], "a user turn is empty"), ([("critic", "hm"), A], "role 'critic'"),
        ([{"role": "user", "content": None}], "a user turn is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_slips_through(tmp_path: Path, messages: list, reason: str) -> None:
    bad, out = conversation(*messages), tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match=reason):
        question_of(bad)
    with AnswerFile(out) as file:
        todo = open_dialogues([*PROMPTS, bad], lambda p: {}, file, limit=10)
        assert len(todo) == 10 and (file.tally.rejected, file.tally.there) == (1, 0)
    assert reason in json.loads(out.with_suffix(".rejected.jsonl").read_text())["reason"]


@pytest.mark.parametrize(("batches", "calls", "under_way"), [(1, 12, 24), (3, 6, 40)])
def test_history_holds_the_old_answers_or_later_turns_wait_for_the_end(tmp_path: Path, batches: int, calls: int, under_way: int) -> None:
    """Turn t is answered behind the target's own answers; calls hold prompts of like length; few conversations are under way."""
    asked: list[list[int]] = []
    begun, waiting, out = 0, [], tmp_path / "a"
    talks = [Prompt(f"c{i}", "chat", tuple(f"{'x' * (i % 5)} {i}.{t}" for t in range(1 + i % 3)), "") for i in range(40)]

    def answer(chats: Sequence, settings: Mapping, seeds: Sequence[int], take: Take) -> None:
        nonlocal begun
        asked.append([len(chat[-1]["content"]) for chat in chats])
        begun += sum(len(chat) == 1 for chat in chats)
        waiting.append(begun - out.read_bytes().count(b"\n"))
        for chat in chats:
            assert [m["content"] for m in chat[1::2]] == [f"re {m['content']}" for m in chat[:-1:2]]
        assert len(set(seeds)) == len(seeds)
        for n, chat in enumerate(chats):
            take(n, Answer(f"re {chat[-1]['content']}", 3, "length" if chat[-1]["content"].endswith("11.1") else "stop"))

    with AnswerFile(out) as file:
        todo = open_dialogues(talks, lambda p: {}, file)
        tally = answer_in_batches(todo, answer=answer, file=file, batch_size=8, batches=batches)
        assert (tally.answered, tally.turns, tally.tokens) == (40, 78, 234) and tally.shortened == 1
    found = {c.id: c for c in read_conversations(out)}
    assert {name: len(c.messages) for name, c in found.items()} == {p.id: 4 if p.id == "c11" else 2 * len(p.turns) for p in talks}
    assert found["c11"].finish_reason == "length"
    assert max(map(len, asked)) == 8 * batches and len(asked) <= calls and max(waiting) <= under_way
    assert sum(max(sizes) - min(sizes) for sizes in asked) <= 2 * len(asked) * batches, "prompts of unlike lengths share a call"


def test_answers_wait_for_the_end_of_the_call(tmp_path: Path) -> None:
    out, there = tmp_path / "a", 0

    def answer(chats: Sequence, settings: Mapping, seeds: Sequence[int], take: Take) -> None:
        nonlocal there
        for n in (3, 0, 5):
            take(n, Answer("x", 1, "stop"))
        there = out.read_bytes().count(b"\n")
        raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        run(out, answer, prompts=PROMPTS[:6], batch_size=6)
    assert there == 3
    again = Answerer()
    assert run(out, again, prompts=PROMPTS[:6], batch_size=6) == 3 and len(again.asked) == 3


def test_prompt_that_is_too_long_stops_the_run_or_loses_its_first_turns(tmp_path: Path) -> None:
    def length(chat: Sequence, settings: Mapping) -> int:
        size = sum(len(m["content"]) for m in chat)
        if size > 20:
            raise ValueError(f"the prompt is too long: {size}")
        return size

    talks = [Prompt("short", "d", ("q",), ""), Prompt("grows", "d", ("q", "r" * 15), ""), Prompt("long", "d", ("q" * 21, "r"), "")]
    with AnswerFile(tmp_path / "a.jsonl") as file:
        answer = Answerer()
        tally = answer_in_batches(open_dialogues(talks, lambda p: {}, file), answer=answer, file=file, batch_size=2, length=length)
        assert (tally.answered, tally.rejected, tally.shortened) == (2, 1, 1)
    assert {c.id: len(c.messages) for c in read_conversations(tmp_path / "a.jsonl")} == {"short": 2, "grows": 2}
    assert tally.reasons == {"the prompt is too long: N": 1}


def test_shares_of_temperature_and_thinking_are_not_kept() -> None:
    config = RegenerateConfig(temperatures={0.0: 3, 0.7: 1}, thinking="mixed")
    questions = [question_of(Prompt(str(i), "d", (f"question {i}",), "")) for i in range(2000)]
    drawn = Counter((s["temperature"], s["thinking"]) for s in (settings_of(config, q, {}) for q in questions))
    assert set(drawn) == {(t, k) for t in (0.0, 0.7) for k in ("on", "off")}
    assert abs(drawn[0.7, "on"] + drawn[0.7, "off"] - 500) < 80 and abs(drawn[0.0, "on"] + drawn[0.7, "on"] - 1000) < 100
    other = RegenerateConfig(temperatures={0.0: 3, 0.7: 1}, thinking="mixed", seed=1)
    assert any(settings_of(config, q, {})["temperature"] != settings_of(other, q, {})["temperature"] for q in questions)


def test_equal_questions_share_an_answer_or_are_asked_again() -> None:
    def asked(*names: str) -> list[tuple[Question, str]]:
        return [(question_of(Prompt(name, "d", (name[0],), "")), name[0]) for name in names]

    def left(done: dict[str, str], *names: str) -> list[tuple[str, str]]:
        return [(question.id, key) for question, key in missing(asked(*names), done)]

    assert left({}, "a1", "b1", "a2", "a3") == [("a1", "a"), ("a2", "a-1"), ("a3", "a-2"), ("b1", "b")]
    assert left({"a-1": "a2"}, "a1", "a2", "a3") == [("a1", "a"), ("a3", "a-2")]
    assert left({"a": "a1"}, "a3", "a2", "a1") == [("a3", "a-1"), ("a2", "a-2")], "an answer belongs to its own id"
    assert left({"a": "line 7"}, "a1", "a2") == [("a2", "a-1")], "ids made of line numbers change with the order"
    assert left({"a-5": "a9", "a": "a1"}, "a9") == [] and left({"b": "b"}, "b", "b") == [("b", "b-1")]


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, ("why", "so")),
        ("why\n</think>\n\nso </think> on", True, ("why", "so </think> on")),
        ("<think>\n\n</think>\n\nso", False, ("", "so")),
        ("  so\n", False, ("", "  so\n")),
        ("I <think> so</think>", False, ("", "I <think> so</think>")),
        ("<think>\nwhy", False, ("why", "")),
        ("why", True, ("why", "")),
        ("<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so", False, ("why", "so")),
        ("<|channel|>analysis<|message|>why", False, ("why", "")),
    ],
)
def test_reasoning_is_left_in_the_answer(text: str, opened: bool, parts: tuple[str, str]) -> None:
    assert split_reasoning(text, opened=opened) == parts


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "a"), pytest.raises(ValueError, match="another process is writing"):
        AnswerFile(tmp_path / "a")
    with AnswerFile(tmp_path / "a") as file:
        assert file.done == {}
    out = tmp_path / "b.jsonl"
    with AnswerFile(out, {"seed": 1}, {}):  # nothing is answered yet
        before = (tmp_path / "b.made_with.json").read_text()
        with pytest.raises(ValueError, match="another process is writing"):
            AnswerFile(out, {"seed": 2}, {})
    assert (tmp_path / "b.made_with.json").read_text() == before


def test_file_of_somebody_else_is_mended(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="notes.made_with.json is not there"):
        AnswerFile(tmp_path / "notes.jsonl", {"seed": 1}, {})
    assert (tmp_path / "notes.jsonl").read_text() == '{"a": 1}'


def test_settings_of_a_file_are_unknown(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    check_settings(out, {"temperatures": {0.0: 1.0}}, {"versions": 1})
    check_settings(out, {"temperatures": {0.5: 1.0}}, {})  # nothing is answered yet
    run(out, Answerer())
    check_settings(out, {"temperatures": {0.5: 1.0}}, {})
    with pytest.raises(ValueError, match=r'seed was null and is now 1; .*--out'):
        check_settings(out, {"temperatures": {0.5: 1.0}, "seed": 1}, {})
    (tmp_path / "a.made_with.json").unlink()
    with pytest.raises(ValueError, match="a.made_with.json is not there"):
        check_settings(out, {}, {})


KILLED = """
import sys, time
from pathlib import Path
from spectrain.data.formats import Prompt
from spectrain.data.regenerate import Answer, regenerate

def answer(chats, settings, seeds, take):
    for n, chat in enumerate(chats):
        time.sleep(0.003)
        take(n, Answer("x" * 3000, len(chat), "stop"))

prompts = [Prompt(f"id{i}", "chat", (f"question {i % 90}", "more")[: 1 + i % 2], "s") for i in range(100)]
regenerate(prompts, answer=answer, settings=lambda p: {"hot": p.id[-1] == "3"}, out=Path(sys.argv[1]), batch_size=4)
"""


def test_kill_loses_or_doubles_a_row(tmp_path: Path) -> None:
    """kill -9 at moments of chance, and a torn line besides: in the end every row is there once."""
    out, dice, kills = tmp_path / "a", random.Random(0), 0
    for aim in (10, 40, 70, 10**9):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(out)])
        while child.poll() is None and (out.read_bytes().count(b"\n") if out.exists() else 0) < aim:
            time.sleep(0.002 * dice.random())
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
            child.wait()
            with out.open("ab") as file:
                file.write(b'{"id": "id7", "messages": [')
    assert kills == 3 and child.returncode == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["id"] for r in rows) == sorted(f"id{i}" for i in range(100)) and len({r["key"] for r in rows}) == 100
