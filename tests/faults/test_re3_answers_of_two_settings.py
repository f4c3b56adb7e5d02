"""RE3: a changed setting has no effect, or one file mixes the answers of two settings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spectrain.cli.regenerate import regenerate
from spectrain.target.model import Target


@pytest.fixture(scope="module")
def folders(make_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The target, and targets that differ in one thing each."""
    root, found = tmp_path_factory.mktemp("targets"), {}
    for name, seed in (("first", 0), ("weights", 1), ("template", 0)):
        target = make_target(seed=seed)
        if name == "template":
            target.tokenizer.chat_template = target.tokenizer.chat_template.replace("w1 w2", "w3")
        target.model.save_pretrained(root / name)
        target.tokenizer.save_pretrained(root / name)
        found[name] = str(root / name)
    return found


def answer(out: Path, target: str, *overrides: str) -> bytes:
    inputs = out.with_name("asked.jsonl")
    inputs.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"w{20 + i}"}) + "\n" for i in range(3)))
    regenerate(
        [str(inputs)], out=out, target=target, endpoint="", model="", api_key_env="", api_key_file=None, dtype="float32", revision=None,
        overrides=["max_new_tokens=5", *overrides], as_json=False,
    )  # fmt: skip
    return out.read_bytes()


def test_answers_of_two_settings(folders: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    before = answer(out, folders["first"])
    for override, field in {
        "max_new_tokens=6": "max_new_tokens was 5 and is now 6", "temperatures={0.5: 1}": "temperatures was", "top_p=0.9": "top_p was 1.0",
        "seed=1": "seed was 0", "thinking=on": "thinking was",
    }.items():  # fmt: skip
        more = ("thinking_key=think",) if "thinking" in override else ()
        with pytest.raises(ValueError, match=field):
            answer(out, folders["first"], override, *more)
    for name, field in {"weights": "embedding_sha256 was", "template": "template_sha256 was"}.items():
        with pytest.raises(ValueError, match=field):
            answer(out, folders[name])
    assert out.read_bytes() == before
    assert answer(out, folders["first"], "batch_size=1", "retries=2", "max_rows=3") == before, "what changes no answer is no reason"
    other = tmp_path / "other.jsonl"
    assert len(answer(other, folders["first"], "max_new_tokens=6").splitlines()) == 3
