"""DM5 (the run): masks for another template stop the run before a step is made of them; shares are printed."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spectrain.cli.prepare import print_report
from spectrain.config import PrepareConfig
from spectrain.data.prepare import Report, prepare


def chat(i: int) -> dict[str, Any]:
    return {"id": f"c{i}", "messages": [{"role": "user", "content": f"w{6 + i}"}, {"role": "assistant", "content": "w7 w8"}]}


def run(folder: Path, tokenizer: Any, lines: list[dict[str, Any]], **settings: Any) -> Report:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return prepare([str(folder / "in.jsonl")], tokenizer, folder / "out", PrepareConfig(**settings))


@pytest.mark.parametrize("empty", [{"input_ids": [7, 8, 9], "loss_mask": [0, 0, 0]}, {"input_ids": [7, 8, 9], "labels": [-100] * 3}])
def test_a_hundred_rows_with_every_label_ignored_stop_the_run(
    tmp_path: Path, make_tokenizer: Callable[..., Any], empty: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"none of 100 rows[\s\S]*read +100") as error:
        run(tmp_path, make_tokenizer(200), [{**empty, "id": str(i)} for i in range(100)], deduplicate=False)
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    assert len(reasons) == 100 and all(f"{reason} " in str(error.value) for reason in reasons)


def test_a_template_that_does_not_go_on_with_the_answer_stops_the_run(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    other = (
        "{% for m in messages %}<start> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<start> w99 {% endif %}"
    )
    with pytest.raises(ValueError, match="template"):
        run(tmp_path, make_tokenizer(200, other), [chat(i) for i in range(100)])
    assert not (tmp_path / "out" / "prepared.json").exists()


@pytest.mark.parametrize(("bad", "warned"), [(5, False), (6, True), (50, True)])
def test_the_share_of_empty_rows_is_printed_and_above_5_percent_a_warning(
    tmp_path: Path, make_tokenizer: Callable[..., Any], bad: int, warned: bool
) -> None:
    lines = [chat(i) for i in range(100)]
    for line in lines[:bad]:
        line["messages"][1]["content"] = "w7 <end>"
    report = run(tmp_path, make_tokenizer(200), lines)
    out = io.StringIO()
    print_report(report, Console(file=out, width=160))
    text = " ".join(out.getvalue().split())
    supervised, tokens = report.coverage["supervised"], report.coverage["tokens"]
    assert f"supervised {supervised / tokens:.1%} ({supervised} of {tokens}) of the tokens".replace(",", "") in text.replace(",", "")
    assert f"{bad} of 100 conversations with nothing to learn from" in text
    assert (f"warning: {bad} of 100 conversations ({bad}.0%) have nothing to learn from" in text) == warned
