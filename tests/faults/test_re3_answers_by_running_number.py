"""RE3: answers are resumed by the number of their row, so that a reordered input redoes everything or skips the wrong rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from spectrain.data.formats import Prompt
from spectrain.data.regenerate import Answer, Take, regenerate

TEXTS = ["same", "same", *(f"question {i}" for i in range(8))]


def prompts(order: Sequence[int]) -> list[Prompt]:
    return [Prompt(f"row {n}", "chat", (TEXTS[i],), "") for n, i in enumerate(order)]  # ids are running numbers, as of files without


def answered(out: Path, order: Sequence[int], calls: int = 99) -> list[str]:
    """What is asked until the server is gone, after so many calls."""
    asked: list[str] = []

    def answer(chats: Sequence, settings: Mapping, seeds: Sequence[int], take: Take) -> None:
        if len(asked) >= calls:
            raise ConnectionError
        asked.append(chats[0][0]["content"])
        take(0, Answer(f"re {asked[-1]}", 1, "stop"))

    regenerate(prompts(order), answer=answer, settings=lambda p: {}, out=out, batch_size=1)
    return asked


@pytest.mark.parametrize("order", [list(range(10)), list(range(10))[::-1], [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]], ids=str)
def test_six_of_ten_done_and_reordered(tmp_path: Path, order: list[int]) -> None:
    """10 rows of which 6 are done, one of two equal ones among them; exactly the 4 missing ones are asked, once each."""
    out = tmp_path / "answers.jsonl"
    with pytest.raises(ConnectionError):
        answered(out, range(10), calls=6)
    done = [json.loads(line)["messages"][0]["content"] for line in out.read_text().splitlines()]
    assert len(done) == 6
    asked = answered(out, order)
    assert len(asked) == 4 and sorted([*done, *asked]) == sorted(TEXTS)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["messages"][0]["content"] for row in rows) == sorted(TEXTS) and len({row["key"] for row in rows}) == 10
    assert answered(out, order[::-1]) == []
