"""The file of answers: written as they come, resumed by key, safe against a kill at any byte; beside it what was rejected, and why.

`answers.jsonl` holds a conversation a line, `answers.rejected.jsonl` the questions of the last run that have no answer, and
`answers.made_with.json` the settings: a file holds the answers of one setting only.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectrain.data.formats import Message, read_jsonl
from spectrain.data.questions import Question

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None  # type: ignore[assignment]

_VARIABLE = re.compile(r"""'[^']*'|"[^"]*"|\d+""")
SYNC_SECONDS = 1.0  # most that a power cut can take; a killed process takes nothing that was written


@dataclass(frozen=True)
class Answer:
    """What the target said: text, number of tokens, finish reason (`stop` or `length`); reasoning apart, and ids where they are known."""

    text: str
    tokens: int
    finish_reason: str
    reasoning: str = ""
    ids: tuple[int, ...] = ()
    prompt_tokens: int = 0

    @property
    def message(self) -> Message:
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **reasoning}


@dataclass
class Dialogue:
    """A question at work: what has been said so far, new answers included. `settings` as of `settings_of`."""

    question: Question
    key: str
    settings: Mapping[str, Any]
    messages: list[Message] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def chat(self) -> list[Message]:
        """What the next answer answers."""
        return [*self.messages, *self.question.turns[len(self.answers)]]

    def take(self, answer: Answer) -> bool:
        """Add an answer; whether another turn is to be asked. An answer that was cut off ends the conversation."""
        self.messages = [*self.chat, answer.message]
        self.answers.append(answer)
        return answer.finish_reason != "length" and len(self.answers) < len(self.question.turns)

    def row(self, model: str) -> dict[str, Any]:
        """The line of the file."""
        ids = [list(answer.ids) for answer in self.answers]
        return {
            "id": self.question.id, "domain": self.question.domain, "messages": self.messages,
            "finish_reason": self.answers[-1].finish_reason, "tokens": sum(answer.tokens for answer in self.answers), "key": self.key,
            **{name: self.settings[name] for name in ("temperature", "thinking") if name in self.settings},
            **({"model": model} if model else {}), **({"answer_ids": ids} if all(ids) else {}),
        }  # fmt: skip


@dataclass
class Tally:
    """Counts of a run. answered, tokens, turns, finish, cut_reasoning: of this run; there: rows that were done before.

    shortened: conversations whose later turns were not asked. odd: answers whose text does not give their tokens back.
    """

    answered: int = 0
    there: int = 0
    rejected: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    turns: int = 0
    shortened: int = 0
    empty: int = 0
    cut_reasoning: int = 0
    odd: int = 0
    seconds: float = 0.0
    finish: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)


class AnswerFile:
    """The file, open for appending by this process alone; `done` are the ids of the answers it holds, by key.

    settings, made: as of `check_settings`, which looks before anything is changed. Raises ValueError when another process writes
    the file, when it holds answers of other settings, or when a line in the middle is damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None, made: Mapping[str, Any] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.tally = path, Tally()
        self.check: Callable[[Dialogue], int] | None = None  # counts answers whose text does not give their tokens back
        self._rejected, _ = beside(path)
        self._file = path.open("ab")
        try:
            self._lock()
            if settings is not None:
                check_settings(path, settings, made or {})
            mend(path)
            self.done = {str(row["key"]): str(row.get("id", "")) for _, row in read_jsonl(path) if "key" in row}
            self._rejects = self._rejected.open("wb")
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is writing {self.path}; wait for it, or choose another file") from error

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._sync()
        self._file.close()
        self._rejects.close()
        if not self._rejected.stat().st_size:
            self._rejected.unlink()

    def write(self, dialogues: Iterable[Dialogue], model: str) -> None:
        """Append finished conversations."""
        tally = self.tally
        for dialogue in dialogues:
            row, last = dialogue.row(model), dialogue.answers[-1]
            self._file.write(json.dumps(row, ensure_ascii=True).encode() + b"\n")
            tally.answered += 1
            tally.tokens += row["tokens"]
            tally.turns += len(dialogue.answers)
            tally.prompt_tokens += sum(answer.prompt_tokens for answer in dialogue.answers)
            tally.finish[last.finish_reason] = tally.finish.get(last.finish_reason, 0) + 1
            tally.shortened += len(dialogue.answers) < len(dialogue.question.turns)
            tally.odd += self.check(dialogue) if self.check else 0
            tally.empty += not last.text.strip() and not last.reasoning
            tally.cut_reasoning += last.finish_reason == "length" and bool(last.reasoning) and not last.text
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def reject(self, name: str, reason: str, **more: Any) -> None:
        """Note a question without an answer. more: where it stands (file and row)."""
        self.tally.rejected += 1
        kind = _VARIABLE.sub(lambda found: "…" if found[0][0] in "'\"" else "N", reason)[:100]  # counted by kind
        self.tally.reasons[kind] = self.tally.reasons.get(kind, 0) + 1
        self._rejects.write(json.dumps({"id": name, **more, "reason": reason}, ensure_ascii=True).encode() + b"\n")
        self._rejects.flush()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def beside(path: Path) -> tuple[Path, Path]:
    """Where the rejects and the settings of a file of answers stand."""
    return path.with_suffix(".rejected.jsonl"), path.with_suffix(".made_with.json")


def mend(path: Path) -> None:
    """Cut off a last line without its line feed, which a kill in the middle of a write leaves behind."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        whole = end
        while whole:
            start = max(0, whole - 65536)
            file.seek(start)
            at = file.read(whole - start).rfind(b"\n")
            if at >= 0:
                whole = start + at + 1
                break
            whole = start
        if whole < end:
            file.truncate(whole)


def check_settings(path: Path, settings: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Write down the settings of a new file; ValueError naming the first field in which they differ from those of the answers there.

    made: versions and the like, kept beside the settings for people.
    """
    _, record = beside(path)
    settings = json.loads(json.dumps(settings))
    if path.exists() and path.stat().st_size:
        if not record.exists():
            raise ValueError(f"{path} holds answers and {record.name} is not there to tell their settings; choose another file")
        before = json.loads(record.read_text(encoding="utf-8")).get("settings", {})
        field_ = next((key for key in (*settings, *before) if settings.get(key) != before.get(key)), None)
        if field_ is not None:
            found = f"{field_} was {json.dumps(before.get(field_))} and is now {json.dumps(settings.get(field_))}"
            raise ValueError(f"{path} holds answers of other settings: {found}; take the old value, or another file with --out")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = record.with_suffix(".part")
    part.write_text(json.dumps({"settings": settings, **made}, indent=2) + "\n", encoding="utf-8")
    os.replace(part, record)
