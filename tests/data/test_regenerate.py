"""Answers by the target: written as they come, resumed by what each row is."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from spectrain.data.formats import Prompt, read_conversations
from spectrain.data.regenerate import Answer, answer_key, regenerate


class Answerer:
    """Counts what it is asked; fails at call `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[str] = []
        self.seeds: dict[str, int] = {}
        self.calls, self.fails_at = 0, fails_at

    def __call__(self, chats: Sequence, settings: Mapping, seeds: Sequence[int]) -> list[Answer]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("the server is gone")
        texts = [chat[-1]["content"] for chat in chats]
        self.asked += texts
        self.seeds |= dict(zip(texts, seeds, strict=True))
        return [Answer(text=f"re: {t}\u2028!", tokens=len(t), finish_reason="length" if t.endswith("3") else "stop") for t in texts]


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

    def answer(chats, settings, seeds):
        seen.append((dict(settings), len(chats)))
        return [Answer("x", 1, "stop") for _ in chats]

    regenerate(PROMPTS, answer=answer, settings=lambda p: {"hot": p.domain == "math"}, out=tmp_path / "a", batch_size=4)
    assert sorted((s["hot"], n) for s, n in seen) == [(False, 1), (False, 4), (True, 1), (True, 4)]


def test_key_depends_on_the_order_of_settings_only() -> None:
    chat = PROMPTS[0].chat
    assert answer_key(chat, {"a": 1, "b": 2}) == answer_key(chat, {"b": 2, "a": 1})
    assert len({answer_key(c, s) for c in (chat, PROMPTS[1].chat) for s in ({"a": 1}, {"a": 2}, {"a": 1, "b": None})}) == 6


def test_too_few_answers_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        regenerate(PROMPTS, answer=lambda c, s, seeds: [Answer("x", 1, "stop")], settings=lambda p: {}, out=tmp_path / "a", batch_size=5)
    lines = (tmp_path / "a").read_text().splitlines()
    assert all(json.loads(line)["messages"][0]["content"] == PROMPTS[0].turns[0] for line in lines)
