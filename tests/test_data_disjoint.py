"""Training prompts and evaluation questions: disjoint, well formed, and each source accounted for."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EVALUATION = ROOT / "eval"
TRAINING = ROOT / "recipes" / "data"
SHINGLE = 8  # words
SHARE = 0.35  # of a prompt's shingles in one question: from here on it is a near copy

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


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits."""
    return re.findall(r"[^\W_]+", text.lower())


def shingles(text: str) -> set[int]:
    """Hashes of the runs of eight words; empty for a shorter text."""
    found = words(text)
    return {hash(tuple(found[i : i + SHINGLE])) for i in range(len(found) - SHINGLE + 1)}


def equal(prompts: Iterable[str], questions: Iterable[list[str]]) -> list[str]:
    """Prompts whose words are those of one turn of a question."""
    asked = {tuple(words(turn)) for turns in questions for turn in turns}
    return [prompt for prompt in prompts if tuple(words(prompt)) in asked]


def near(prompts: Iterable[str], questions: Iterable[list[str]]) -> list[str]:
    """Prompts with too large a share of their shingles in one question, all its turns together."""
    where: dict[int, list[int]] = {}
    for number, turns in enumerate(questions):
        for shingle in set().union(*map(shingles, turns)):
            where.setdefault(shingle, []).append(number)
    found = []
    for prompt in prompts:
        own = shingles(prompt)
        shared = Counter(number for shingle in own for number in where.get(shingle, ()))
        if own and max(shared.values(), default=0) / len(own) >= SHARE:
            found.append(prompt)
    return found


def documented(folder: Path) -> dict[str, int]:
    """Records by source, as the table of SOURCES.md has them."""
    counts: dict[str, int] = {}
    for line in (folder / "SOURCES.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            cells = line.strip("|").split("|")
            names = re.findall(r"`(\w+)`", cells[0])
            counts |= dict(zip(names, map(int, cells[5].split("+")), strict=True))
    return counts


def test_no_prompt_equals_a_question(prompts: list[Row], questions: list[Row]) -> None:
    assert equal((row["prompt"] for row in prompts), [row["turns"] for row in questions]) == []


def test_no_prompt_is_near_a_question(prompts: list[Row], questions: list[Row]) -> None:
    ids = {row["prompt"]: row["id"] for row in prompts}
    assert [ids[prompt] for prompt in near(ids, [row["turns"] for row in questions])] == []


def test_copies_are_found() -> None:
    text = "a train leaves at noon and runs at forty miles an hour; when does it come to the sea?"
    question = ["unrelated first turn", text]
    assert equal(["A train leaves at noon, and runs at forty miles an hour. When does it come to the sea?"], [question])
    assert near([text.replace("sea", "lake")], [question])
    assert not near(["When does a train that leaves at noon at forty miles an hour come to the lake or to the sea?"], [question])


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
