"""What was measured, an answer a line: `records.jsonl`, from which every table can be made again."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from spectrain.data.formats import Prompt, read_jsonl
from spectrain.decoding.rows import StepRecord
from spectrain.evaluation.processes import ALONE, Processes


@dataclass(frozen=True)
class Record:
    """One answer: `mode` is "tau" (batched) or "speed" (alone). seconds: whole call; decode_seconds: without the prompt's pass.

    turn: of the prompt, 0 the first; repeat: which run of it, where it was timed several times. prompt_tokens: context before the first
    token of the answer; think_tokens: tokens of the answer up to the end of its thinking. passes: how the target's were made
    (`target.passes`), "" where that is not known.
    """

    arm: str
    mode: str
    id: str
    domain: str
    tokens: list[int]
    seconds: float
    decode_seconds: float
    rounds: list[StepRecord] = field(default_factory=list)
    turn: int = 0
    repeat: int = 0
    prompt_tokens: int = 0
    think_tokens: int = 0
    passes: str = ""


Place = tuple[str, str, str, str]  # key, arm, mode, prompt


class Records:
    """`records.jsonl`: what has been measured, each answer under the key (hash) of all that it depends on.

    key: that of every arm, or by arm and mode; arms may be added to the mapping later. Of several processes each writes a file of its own
    (`records-1.jsonl`, …); all of them are read, whatever number there is now. `found` is the same for every process to begin with and
    after each `exchange`. mend: take a last line off that was cut short; without it the files are only read.
    """

    def __init__(
        self, path: Path, key: str | Mapping[tuple[str, str], str], processes: Processes = ALONE, *, mend: bool = True
    ) -> None:
        self._key, self.processes, self._mend = key, processes, mend
        self._path = path if processes.leads else path.with_stem(f"{path.stem}-{processes.index}")
        self._fresh: list[dict[str, Any]] = []
        self.seconds = self.warm_up = 0.0  # of the calls whose answers this process has added, and of those before them
        self.found: dict[Place, dict[tuple[int, int], Record]] = {}  # by turn and repeat
        self.found = processes.on_main(lambda: self._read(path))

    def _read(self, path: Path) -> dict[Place, dict[tuple[int, int], Record]]:
        others = path.parent.glob(f"{path.stem}-[0-9]*{path.suffix}")
        for file in [*([path] if path.exists() else []), *sorted(others)]:
            for row in whole_lines(file, mend=self._mend):
                self._keep(row)
        return self.found

    def _keep(self, row: Mapping[str, Any]) -> None:
        fields = {name: value for name, value in row.items() if name != "key"}
        record = Record(**{**fields, "rounds": [StepRecord(*r) for r in row["rounds"]]})
        place = row["key"], record.arm, record.mode, record.id
        self.found.setdefault(place, {})[record.turn, record.repeat] = record

    def key_of(self, arm: str, mode: str) -> str:
        return self._key if isinstance(self._key, str) else self._key[arm, mode]

    def add(self, records: Sequence[Record]) -> None:
        """Write them (where all make the same passes, only the main process does)."""
        self.seconds += sum(record.seconds for record in records)
        rows = [
            {"key": self.key_of(record.arm, record.mode), **asdict(record), "rounds": [_row_of(r) for r in record.rounds]}
            for record in records
        ]
        if self.processes.leads or self.processes.splits:
            self._write(rows)
        for row in rows:
            self._keep(row)  # as it was written, so that tables from the file are the same
        self._fresh += rows

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())

    def exchange(self) -> None:
        """Learn what the other processes have added; where all made the same passes, the main one's answers are everyone's."""
        for row in self.processes.gathered(self._fresh):
            self._keep(row)
        self._fresh = []

    def has(self, arm: str, mode: str, id: str, turn: int = 0, repeat: int = 0) -> bool:
        return (turn, repeat) in self.found.get((self.key_of(arm, mode), arm, mode, id), {})

    def of(self, arm: str, mode: str, prompts: Sequence[Prompt]) -> list[Record]:
        """Records of these prompts, in their order, all turns; of an answer that was timed several times the run of median time.

        Raises KeyError for a prompt without an answer.
        """
        return [record for p in prompts for record in _median_runs(self.found[self.key_of(arm, mode), arm, mode, p.id])]


def records_of(folder: Path, report: Mapping[str, Any]) -> dict[str, list[Record]]:
    """The counted answers that a report was made of, by arm; none of an arm whose records are no longer there, or were made earlier. Only
    reads: an evaluation may be writing them."""
    keys = {(arm, "tau"): key for arm, key in report.get("keys", {}).items()}
    if not keys:
        return {}
    found = Records(folder / "records.jsonl", keys, mend=False).found
    of = {arm: [runs for (key, name, *_), runs in found.items() if (key, name) == (keys[arm, "tau"], arm)] for arm, _ in keys}
    return {arm: [r for runs in prompts for r in runs.values() if r.mode == "tau"] for arm, prompts in of.items() if prompts}


def whole_lines(file: Path, *, mend: bool = True) -> Iterator[dict[str, Any]]:
    """The objects of a file that lines are added to; a last line that was cut short is left out, with `mend` also of the file."""
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if mend and whole < len(content):
        os.truncate(file, whole)
    for _, row in islice(read_jsonl(file), content.count(b"\n")):
        yield row


def _median_runs(found: Mapping[tuple[int, int], Record]) -> Iterator[Record]:
    for turn in sorted({turn for turn, _ in found}):
        runs = sorted((r for (t, _), r in found.items() if t == turn), key=lambda r: r.decode_seconds)
        yield runs[(len(runs) - 1) // 2]


def _row_of(r: StepRecord) -> list[Any]:
    return [r.drafted, r.accepted, r.committed, {phase: round(s, 6) for phase, s in r.seconds.items()}, r.depth, r.nodes]
