"""Rows of a template that writes the date belong to one day."""

import json
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.config import PrepareConfig
from spectrain.data.prepare import prepare

CHATML = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("template", "state"), [("{{ strftime_now('%d %b') }}" + CHATML, "rebuilt"), (CHATML, "unchanged")])
def test_rows_of_yesterday_are_taken_for_those_of_today(template: str, state: str, tmp_path: Path, monkeypatch) -> None:
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    inner.add_special_tokens(["<start>", "<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=template)
    rows = [{"messages": [{"role": "user", "content": f"red {i}"}, {"role": "assistant", "content": "blue"}]} for i in range(3)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PrepareConfig(validation=0.0)
    assert prepare([str(source)], tokenizer, tmp_path / "out", config).state == "built"
    assert prepare([str(source)], tokenizer, tmp_path / "out", config).state == "unchanged"
    monkeypatch.setattr("spectrain.data.templates.date", SimpleNamespace(today=lambda: date(2099, 1, 1)))
    again = prepare([str(source)], tokenizer, tmp_path / "out", config)
    assert again.state == state and any("date" in why for why in again.why) == (state == "rebuilt")
