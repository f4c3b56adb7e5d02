"""The command regenerate: messy inputs, the target's own template and thinking switch, what is printed, what is refused."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.config import RegenerateConfig
from spectrain.data.answers import Answer, Dialogue
from spectrain.data.formats import Prompt
from spectrain.data.masking import encode_turns
from spectrain.data.questions import question_of
from spectrain.data.regenerate import odd_answers
from spectrain.decoding.generate import RowResult
from spectrain.target.model import Target

command = importlib.import_module("spectrain.cli.regenerate")  # the package has a function of this name
THINKING = (
    "{% for m in messages %}<start> {{ m['role'] }} "
    "{% if m['role'] == 'assistant' %}{% if loop.last and m.reasoning_content %}<think> {{ m.reasoning_content }} </think> "
    "{% elif loop.last and not enable_thinking %}<think> </think> {% endif %}{% endif %}{{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% if enable_thinking is defined and not enable_thinking %}<think> </think> "
    "{% endif %}{% endif %}"
)


def words(template: str) -> PreTrainedTokenizerFast:
    known = ["<pad>", "<end>", "<start>", "system", "user", "assistant", "<think>", "</think>", *(f"w{i}" for i in range(8, 100))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", chat_template=template)
    made.add_special_tokens({"additional_special_tokens": ["<start>"]})
    return made


@pytest.fixture
def folder(make_target: Callable[..., Target], save_target: Callable[..., Path], tmp_path: Path) -> str:
    return str(save_target(make_target(), tmp_path / "target"))


def run(inputs: Path | list[Path], out: Path, target: str, *overrides: str, **more: Any) -> None:
    settings: dict[str, Any] = {
        "endpoint": "", "model": "", "api_key_env": "", "api_key_file": None, "dtype": "float32", "revision": None, "as_json": False, **more
    }  # fmt: skip
    names = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    command.regenerate(names, out=out, target=target, overrides=["max_new_tokens=6", *overrides], **settings)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_counts_do_not_add_up(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts and conversations, good and bad, in two dialects; a second call does nothing, a third what was added."""
    talk = [{"role": r, "content": c} for r, c in (("system", "w50"), ("user", "w9"), ("assistant", "w10"), ("user", "w11"))]
    calls = [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    chats = write(
        tmp_path / "chats.jsonl", {"id": "talk", "messages": talk}, {"id": "tool", "messages": calls}, '{"id": "torn", "messages": [',
        {"id": "control", "messages": [{"role": "user", "content": "w9 <end> w8"}]},
        {"id": "long", "messages": [{"role": "user", "content": "w9 " * 40}]},
    )  # fmt: skip
    prompts = write(tmp_path / "prompts.jsonl", *({"id": f"p{i}", "domain": "math", "prompt": f"w{20 + i} w30"} for i in range(5)))
    out = tmp_path / "answers.jsonl"
    run([chats, prompts], out, folder, "max_prompt_tokens=40", "batch_size=4", as_json=True)
    told = capsys.readouterr()
    found = {row["id"]: row for row in rows(out)}
    assert set(found) == {"talk", *(f"p{i}" for i in range(5))}
    assert [m["role"] for m in found["talk"]["messages"]] in (
        ["system", "user", "assistant", "user", "assistant"], ["system", "user", "assistant"]
    )  # fmt: skip
    assert found["talk"]["domain"] == "chats" and found["p0"]["domain"] == "math"
    rejected = rows(out.with_suffix(".rejected.jsonl"))
    places = {row["id"]: row["row"] for row in rejected if row["file"] == str(chats)}
    assert places == {"tool": 2, "chats:3": 3, "control": 4, "long": 5}, "a row without an answer cannot be found in its file"
    reasons = {row["id"]: row["reason"] for row in rejected}
    for name, reason in {
        "tool": "the first answer is a tool call", "chats:3": "unreadable: ", "control": "control token '<end>'",
        "long": "too long: 50 tokens",
    }.items():  # fmt: skip
        assert reason in reasons.pop(name)
    assert not reasons
    result = json.loads(told.out)
    assert (result["answered"], result["there"], result["rejected"]) == (6, 0, 4)
    assert "chats.jsonl: messages" in told.err and "6 answered, 4 rejected" in told.err and "tokens/s" in told.err
    assert all(len(row["answer_ids"]) == sum(m["role"] == "assistant" for m in row["messages"]) for row in found.values())

    before = out.read_bytes()
    run([prompts, chats], out, folder, "max_prompt_tokens=40", "batch_size=2")
    assert out.read_bytes() == before and "0 answered (6 were there)" in capsys.readouterr().err
    write(prompts, {"id": "new", "prompt": "w66"}, *rows(prompts))
    run([prompts, chats], out, folder, "max_prompt_tokens=40")
    assert [row["id"] for row in rows(out)][6:] == ["new"]


def test_order_or_batch_changes_an_answer(folder: str, tmp_path: Path) -> None:
    """Sampled answers too are those of the row's own seed, whatever the batch it is in."""
    asked = [{"id": f"p{i % 7}", "prompt": f"w{20 + i % 7}"} for i in range(9)]
    settings = ("temperatures={0.0: 1, 0.9: 2}", "seed=3")
    run(write(tmp_path / "a.jsonl", *asked), tmp_path / "one.jsonl", folder, *settings, "batch_size=1")
    run(write(tmp_path / "b.jsonl", *asked[::-1]), tmp_path / "many.jsonl", folder, *settings, "batch_size=16")
    one, many = ({row["key"]: row["answer_ids"] for row in rows(tmp_path / name)} for name in ("one.jsonl", "many.jsonl"))
    assert one == many and len(one) == 9
    assert {row["temperature"] for row in rows(tmp_path / "one.jsonl")} == {0.0, 0.9}


@pytest.mark.parametrize(("thinking", "prompts"), [("on", {False}), ("off", {True}), ("mixed", {True, False}), ("default", {False})])
def test_thinking_switch_does_not_reach_the_template(
    make_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, thinking: str, prompts: set[bool]
) -> None:  # fmt: skip
    """The prompt has an empty think block where thinking is off; reasoning comes back under its own name, and as the same tokens."""
    target = Target(model=make_target().model, tokenizer=words(THINKING), name="thinker")
    config = RegenerateConfig(thinking=thinking)
    answerer = command.TargetAnswerer(target, config)
    asked: list[list[int]] = []

    def generate(target: Target, ids: list[list[int]], **settings: Any) -> None:
        asked.extend(ids)
        say = "w20 w21 <end>" if ids[0][-1] == 7 else "<think> w10 w11 </think> w20 w21 <end>"
        tokens = target.tokenizer(say, add_special_tokens=False)["input_ids"]
        for n in range(len(ids)):
            settings["on_row"](n, RowResult(tokens, "", "stop", [], 0, len(ids[0]), 0.0))

    monkeypatch.setattr(command, "generate", generate)
    for i in range(12):
        question = question_of(Prompt(f"p{i}", "d", (f"w{30 + i}",), ""))
        dialogue = Dialogue(question, "k", command.settings_of(config, question, {}))
        taken: dict[int, Answer] = {}
        answerer([dialogue.chat], dialogue.settings, [0], taken.__setitem__)
        said = taken[0]
        off = asked[-1][-2:] == [6, 7]
        assert (said.text.strip(), said.reasoning.strip()) == ("w20 w21", "" if off else "w10 w11") and said.tokens == (3 if off else 7)
        dialogue.take(said)
        assert odd_answers(answerer.template, dialogue) == 0
        (ids, mask), = encode_turns(target.tokenizer, dialogue.messages)
        assert [t for t, m in zip(ids, mask, strict=True) if m] == list(said.ids) and ids[: len(asked[-1])] == asked[-1]
        dialogue.answers[0] = Answer(said.text, said.tokens, "stop", said.reasoning, (*said.ids[:-2], 30, 1), said.prompt_tokens)
        assert odd_answers(answerer.template, dialogue) == 1, "another token than the text has"
    assert {ids[-2:] == [6, 7] for ids in asked} == prompts


def test_switch_that_the_template_lacks_is_ignored(target: Target) -> None:
    with pytest.raises(ValueError, match="tiny reads none of enable_thinking, thinking.*thinking_key=NAME"):
        command.TargetAnswerer(target, RegenerateConfig(thinking="off"))
    assert command.TargetAnswerer(target, RegenerateConfig(thinking="off", thinking_key="think")).switch == "think"


def test_half_a_character_is_kept(target: Target) -> None:
    class Half:
        eos_token_id = 1

        def __getattr__(self, name: str) -> Any:
            return getattr(target.tokenizer, name)

        def decode(self, ids: list[int], **settings: Any) -> str:
            return "" if len(ids) > 4 else "caf\ufffd"

    answerer = command.TargetAnswerer(Target(target.model, Half(), "half"), RegenerateConfig())
    assert answerer._answer([9] * 9, [8, 7], "length").text == "caf" and answerer._answer([9] * 9, [8, 7], "stop").text == "caf\ufffd"


def test_run_that_answers_nothing_ends_well(folder: str, tmp_path: Path) -> None:
    inputs = write(tmp_path / "a.jsonl", {"id": "a", "prompt": "w9 <end>"}, {"id": "b", "prompt": "w9 <end> w10"})
    with pytest.raises(ValueError, match=r"nothing was answered \(.*control token.*a.out.rejected.jsonl"):
        run(inputs, tmp_path / "a.out.jsonl", folder)


def test_answers_in_a_folder_that_is_read_stop_the_second_run(folder: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", {"id": "a", "prompt": "w9"}, {"prompt": ""})
    out = tmp_path / "in/out.jsonl"
    for _ in range(2):
        run(tmp_path / "in", out, folder)
        assert [row["id"] for row in rows(out)] == ["a"] and len(rows(out.with_suffix(".rejected.jsonl"))) == 1
    with pytest.raises(ValueError, match="one of the inputs"):
        run(out.with_suffix(".rejected.jsonl"), out, folder)
    with pytest.raises(ValueError, match="columns.domain names 'topic', which no row has; found keys id, prompt"):
        run(tmp_path / "in", out, folder, "columns.domain=topic")


def test_wrong_call_is_found_after_the_target_is_loaded(tmp_path: Path) -> None:
    inputs = write(tmp_path / "a.jsonl", {"id": "a", "prompt": "w9"})
    for more, message in (
        ({"target": ""}, "one of --target .* and --endpoint"),
        ({"target": "t", "endpoint": "http://h"}, "one of --target .* and --endpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            run(inputs, tmp_path / "o", **more)
    with pytest.raises(ValueError, match="one of the inputs"):
        run(inputs, inputs, "t")
    with pytest.raises(ValueError, match="temperatures"):
        run(inputs, tmp_path / "o", "t", "temperatures={}")
    with pytest.raises(ValueError, match="nowhere.jsonl"):
        run(tmp_path / "nowhere.jsonl", tmp_path / "o", "/no/such/target")


def test_key_is_read_from_the_wrong_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "abc")
    monkeypatch.delenv("NO_KEY", raising=False)
    (tmp_path / "key").write_text("xyz\n")
    (tmp_path / "none").write_text("\n")
    assert command.api_key("SOME_KEY", None) == "abc" and command.api_key("SOME_KEY", tmp_path / "key") == "xyz"
    assert command.api_key("", None) == ""
    with pytest.raises(ValueError, match="NO_KEY is not set"):
        command.api_key("NO_KEY", None)
    with pytest.raises(ValueError, match="holds no key"):
        command.api_key("", tmp_path / "none")
