"""Training prompts and evaluation questions: disjoint, well formed, and each source accounted for."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spectrain.config import PrepareConfig
from spectrain.data.filters import Questions

ROOT = Path(__file__).parents[1]
EVALUATION = ROOT / "eval"
TRAINING = ROOT / "recipes" / "data"

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def questions() -> list[Row]:
    return [row for path in sorted((EVALUATION / "prompts").glob("*.jsonl")) for row in read(path)]


@pytest.fixture(scope="module")
def prompts() -> list[Row]:
    return read(TRAINING / "prompts.jsonl")


def documented(folder: Path) -> dict[str, int]:
    """Records by source, as the table of SOURCES.md has them."""
    counts: dict[str, int] = {}
    for line in (folder / "SOURCES.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            cells = line.strip("|").split("|")
            names = re.findall(r"`(\w+)`", cells[0])
            counts |= dict(zip(names, map(int, cells[5].split("+")), strict=True))
    return counts


def test_no_prompt_equals_a_question_or_is_near_one(prompts: list[Row], questions: list[Row]) -> None:
    """As `spectrain prepare` finds them."""
    against = Questions((row["turns"] for row in questions), near=PrepareConfig().near)
    assert len(against) > 500
    assert [row["id"] for row in prompts if against.fault([row["prompt"]])] == []
    assert against.fault(questions[0]["turns"]) == "exact"


def test_no_conversation_asks_a_question(questions: list[Row]) -> None:
    against = Questions((row["turns"] for row in questions), near=PrepareConfig().near)
    conversations = read(TRAINING / "conversations.jsonl")
    asked = {row["id"]: [turn["value"] for turn in row["conversations"] if turn["from"] == "human"] for row in conversations}
    assert len(asked) == len(conversations) == 282 and min(map(len, asked.values())) > 0
    assert [name for name, turns in asked.items() if against.fault(turns)] == []
    assert {row["source"] for row in conversations} <= set(documented(TRAINING))


def test_ids_and_prompts_are_unique(prompts: list[Row], questions: list[Row]) -> None:
    ids = Counter(row["id"] for row in [*prompts, *questions])
    assert [name for name, count in ids.items() if count > 1] == []
    assert len({row["prompt"] for row in prompts}) == len(prompts)


def test_every_row_is_complete(prompts: list[Row], questions: list[Row]) -> None:
    domains = {path.stem for path in (EVALUATION / "prompts").glob("*.jsonl")}
    assert len(domains) == 11
    for row in [*prompts, *questions]:
        assert row["domain"] in domains, row["id"]
        assert row["id"].startswith(row["source"] + ":")
        texts = row["turns"] if "turns" in row else [row["prompt"]]
        assert texts and all(text.strip() for text in texts), row["id"]


def test_a_file_holds_its_domain() -> None:
    for path in (EVALUATION / "prompts").glob("*.jsonl"):
        assert {row["domain"] for row in read(path)} == {path.stem}


def test_sources_are_documented_with_their_counts(prompts: list[Row], questions: list[Row]) -> None:
    assert documented(TRAINING) == Counter(row["source"] for row in prompts)
    assert documented(EVALUATION) == Counter(row["source"] for row in questions)
