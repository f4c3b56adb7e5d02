"""Files of prompts and conversations."""

import json
from pathlib import Path

import pytest

from spectrain.data.formats import Prompt, mix_prompts, read_conversations, read_jsonl, read_prompts


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(line if isinstance(line, bytes) else (line + "\n").encode() for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"a": 1}', "", '{"a": '], "line 3: not JSON .*character"),
        (['{"a": 1}', "[1]"], "line 2: needed a JSON object, found list"),
        (['{"a": 1}', b'{"a": "\xff"}\n'], "line 2: not UTF-8"),
        (["\ufeff{}"], "line 1: not JSON"),
    ],
)
def test_fault_is_not_located(tmp_path: Path, lines, message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl, {message}"):
        list(read_jsonl(write(tmp_path, *lines)))


def test_missing_file_is_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file .*none"):
        list(read_jsonl(tmp_path / "none"))


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_line_separator_inside_a_text_splits_it(tmp_path: Path, mark: str) -> None:
    text = f"one{mark}two"
    path = write(tmp_path, json.dumps({"x": text}, ensure_ascii=ord(mark) < 32), '{"x": "three"}\r', b'{"x": "four"}')
    assert list(read_jsonl(path)) == [(1, {"x": text}), (2, {"x": "three"}), (3, {"x": "four"})]


def row(**changes) -> str:
    return json.dumps({"id": "a", "domain": "chat", "source": "s", "prompt": "red?", **changes})


def test_prompt_forms_are_mixed_up(tmp_path: Path) -> None:
    two = json.dumps({"id": "b", "domain": "math", "turns": ["one", "two"]})
    assert read_prompts(write(tmp_path, row(), two)) == [Prompt("a", "chat", ("red?",), "s"), Prompt("b", "math", ("one", "two"), "")]
    assert read_prompts(write(tmp_path, two))[0].chat == [{"role": "user", "content": "one"}]


@pytest.mark.parametrize("bad", [row(prompt=""), row(prompt=5), row(turns=[]), row(turns=["x", " "]), row(turns="red"), '{"id": "a"}'])
def test_prompt_without_text_is_read(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="line 2: needed `prompt`"):
        read_prompts(write(tmp_path, row(), bad))


def test_empty_file_or_missing_key_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path, ""))
    with pytest.raises(ValueError, match="holds no conversations"):
        read_conversations(write(tmp_path, ""))
    with pytest.raises(ValueError, match="line 1: missing domain; found keys"):
        read_prompts(write(tmp_path, '{"id": "a", "prompt": "x"}'))
    with pytest.raises(ValueError, match="line 1: missing messages"):
        read_conversations(write(tmp_path, row()))


def test_turns_come_in_another_order(tmp_path: Path) -> None:
    """TP2."""
    spoken = [
        {"role": r, "content": c, "extra": 1}
        for r, c in (("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2"))
    ]
    got = read_conversations(write(tmp_path, row(messages=spoken, finish_reason="length"), row(messages=spoken)))
    assert [(m["role"], m["content"]) for m in got[0].messages] == [(m["role"], m["content"]) for m in spoken]
    assert [c.finish_reason for c in got] == ["length", "stop"] and set(got[0].messages[0]) == {"role", "content"}


@pytest.mark.parametrize("messages", [[], "x", [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}], ["x"]])
def test_messages_without_text_are_read(tmp_path: Path, messages) -> None:
    with pytest.raises(ValueError, match="line 1: `messages` must be"):
        read_conversations(write(tmp_path, row(messages=messages)))


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"{d}{i}", d, ("x" * (i % 7 + 1),), "s") for i in range(n) for d in ("chat", "math")]


def test_mix_depends_on_the_order_of_the_file() -> None:
    first = mix_prompts(prompts(40), {"chat": 10, "math": 5}, seed=0, fits=lambda p: True)
    assert [p.domain for p in first] == ["chat"] * 10 + ["math"] * 5 and len({p.id for p in first}) == 15
    assert mix_prompts(prompts(40)[::-1], {"chat": 10, "math": 5}, seed=0, fits=lambda p: True) == first
    assert mix_prompts(prompts(40), {"chat": 10, "math": 5}, seed=1, fits=lambda p: True) != first
    assert mix_prompts(prompts(40), {"chat": 12}, seed=0, fits=lambda p: True)[:10] == first[:10]


def test_prompts_that_do_not_fit_are_taken() -> None:
    short = mix_prompts(prompts(40), {"chat": 10}, seed=0, fits=lambda p: len(p.turns[0]) < 4)
    assert len(short) == 10 and all(len(p.turns[0]) < 4 for p in short)
    with pytest.raises(ValueError, match="30 chat prompts asked for, only 18 there that fit"):
        mix_prompts(prompts(40), {"chat": 30}, seed=0, fits=lambda p: len(p.turns[0]) < 4)
