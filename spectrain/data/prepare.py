"""Conversations -> rows on disk: read, filter, tokenise, split. Streams; goes on where it was stopped; a second call finds its work done.

One process reads and decides in the order of the input; `workers` others tokenise. What comes out does not depend on their number.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from spectrain.config import PrepareConfig
from spectrain.data import coverage, journal
from spectrain.data.encoding import MASK_RULE, Encoding, Outcome, Outcomes, encoded
from spectrain.data.filters import DISJOINT_RULE, Questions, Seen, asked_texts, content_key, key64
from spectrain.data.formats import Conversation, Item, convert
from spectrain.data.identity import fingerprints
from spectrain.data.journal import Journal, Stretch
from spectrain.data.parts import finish
from spectrain.data.row_store import FORMAT, RECORD, record_batch, write_arrow
from spectrain.data.rows import Columns
from spectrain.data.sources import RawRow, Source, check_columns, check_formats, dialect_of, find_sources
from spectrain.data.templates import Template

CHUNK_ROWS, CHUNK_CHARACTERS = 64, 200_000  # handed to a worker at once
STRETCH_ROWS, STRETCH_TOKENS = 4096, 4_000_000  # done again, at most, after a stop; a stretch is held in memory


@dataclass(frozen=True)
class Report:
    """folder: a row store. state: built, resumed, rebuilt or unchanged; why: what was changed. record: prepared.json."""

    folder: Path
    state: str
    why: tuple[str, ...]
    record: dict[str, Any]

    @property
    def coverage(self) -> dict[str, Any]:
        return dict(self.record["coverage"])

    @property
    def warnings(self) -> list[str]:
        return coverage.warnings(self.coverage)


def _behaviour(tokenizer: Any) -> str:
    """Hash of all that decides how a text becomes ids: merges, normaliser, added and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # In front stand version, truncation and padding: the latter are set by calls, of no effect on ours.
    rules = backend.to_str().partition('"added_tokens":')[2] if backend is not None else ""
    assert rules or backend is None
    names = json.dumps({k: str(v) for k, v in tokenizer.special_tokens_map.items()}, sort_keys=True)
    return hashlib.sha256((rules + names).encode(errors="surrogatepass")).hexdigest()


def _identity(
    sources: Sequence[Source], against: Sequence[Source], tokenizer: Any, config: PrepareConfig, made_with: Mapping[str, str]
) -> dict[str, Any]:
    """All that the rows depend on. Inputs count by content and by the short name that rows without id or domain take."""
    return {
        "format": FORMAT, "mask_rule": MASK_RULE, "settings": config.model_dump(mode="json", exclude={"workers", "disjoint_from"}),
        "inputs": [[_short(s), s.fingerprint()] for s in sources], "disjoint_from": sorted(s.fingerprint() for s in against),
        "tokenizer_rules": _behaviour(tokenizer), "template_date": _date(tokenizer, config), **made_with,
        **({"disjoint_rule": DISJOINT_RULE} if against else {}),
    }  # fmt: skip


def _date(tokenizer: Any, config: PrepareConfig) -> str:
    """The date that the chat template writes into every row; "" where it writes none."""
    day = Template(tokenizer, config.template_kwargs).today() if tokenizer.chat_template else None
    return day.isoformat() if day else ""


def _short(source: Source) -> str:
    return Path(source.name).name.split(".")[0] or source.name


def prepare(
    inputs: Sequence[str], tokenizer: Any, out: str | Path, config: PrepareConfig, *, stop_ids: Sequence[int] = (),
    extra: Mapping[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Make the row store `out` from files, folders, globs or Hub names.

    stop_ids: where serving stops besides the tokenizer's own end (generation_config.eos_token_id). extra: added to prepared.json,
    without part in what is compared. Raises ValueError when inputs or the chat template cannot be
    used, and, with the table of what each filter took, when no row is left to train on.
    """
    out = Path(out)
    sources = find_sources(inputs, ours=(out,))
    check_columns(sources, config.columns)
    check_formats(sources, config.format)
    against = find_sources(config.disjoint_from) if config.disjoint_from else []
    made_with = fingerprints(tokenizer)
    identity = _identity(sources, against, tokenizer, config, made_with) | {"stop_ids": sorted(stop_ids)}
    with journal.only_writer(out):
        whole = journal.finished(out)
        if whole is not None and whole["identity"] == identity:
            return Report(folder=out, state="unchanged", why=(), record=whole)
        work = Journal(out)
        before = whole["identity"] if whole is not None else work.identity()
        damaged = whole is None and (out / RECORD).exists()
        questions = Questions((asked_texts(item) for item in _items(against)), near=config.near)
        encoding = Encoding(tokenizer, config, questions, stop_ids)
        resumed = whole is None and before == identity
        if not resumed:
            work.start(identity)
        _encode(sources, work, encoding, config)
        record = finish(work, identity, sources, config, made_with, dict(extra or {}))
    if resumed:
        return Report(folder=out, state="resumed", why=(), record=record)
    why = ["a file of it was missing or damaged"] if damaged else journal.changes(before, identity) if before else []
    return Report(folder=out, state="rebuilt" if why else "built", why=tuple(why), record=record)


def _items(sources: Sequence[Source]) -> Iterator[Item]:
    """Evaluation prompts; here a row that cannot be used is an error, since it would be missed in silence."""
    for source in sources:
        dialect = dialect_of(source, "auto", {})
        if not dialect:
            raise ValueError(f"{source.name}: no evaluation prompt can be read; mend or leave out --disjoint-from")
        for raw in source.rows():
            try:
                if raw.value is None:
                    raise ValueError(raw.fault)
                yield convert(raw.value, format=dialect, name=str(raw.number), domain="", columns={})
            except ValueError as error:
                raise ValueError(f"{source.name}, {raw.place}, of the evaluation prompts: {error}; mend or remove it") from error


@dataclass
class _Chunk:
    """Part of the input on its way: what is to be tokenised with its place, and what was decided before."""

    items: list[tuple[Item, RawRow]] = field(default_factory=list)
    tally: coverage.Tally = field(default_factory=coverage.Tally)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    position: tuple[int, int] = (0, 0)
    progress: int = 0
    formats: dict[str, str] = field(default_factory=dict)

    def reject(self, raw: RawRow, name: str, reason: str, why: str) -> None:
        self.tally["rejected"][reason] += 1
        self.note(raw, name, reason, why)

    def note(self, raw: RawRow, name: str, reason: str, why: str) -> None:
        """A line of rejected.jsonl."""
        where = {"file": raw.source, "row": raw.number} | ({"line": raw.line} if raw.line else {})
        self.rejected.append({**where, "id": name, "reason": reason, "why": why})


class _Reader:
    """Input -> chunks, in order. Holds what has been seen, to find duplicates and to keep ids apart."""

    def __init__(self, sources: Sequence[Source], config: PrepareConfig, finished: Iterator[Stretch]) -> None:
        self._sources, self._config = sources, config
        self._contents, self._ids, self._read = Seen(), Seen(), 0
        self.rows, self.position = Seen(), (0, 0)
        for stretch in finished:
            for seen, keys in ((self._contents, stretch.contents), (self._ids, stretch.ids), (self.rows, stretch.rows)):
                for key in keys.tolist():
                    seen.add(key)
            self._read += stretch.tally["total"]["read"]
            self.position = stretch.position

    @property
    def size(self) -> int:
        """Bytes of the input; 0 when some are unknown, and progress is then counted in rows."""
        return sum(s.size for s in self._sources) if all(s.size and s.kind != "hub" for s in self._sources) else 0

    def chunks(self) -> Iterator[_Chunk]:
        first, skip = self.position
        for i in range(first, len(self._sources)):
            yield from self._of(i, skip if i == first else 0)

    def _of(self, i: int, skip: int) -> Iterator[_Chunk]:
        source = self._sources[i]
        dialect = dialect_of(source, self._config.format, self._config.columns)
        before, sized, short = sum(s.size for s in self._sources[:i]), bool(self.size), _short(source)
        chunk, characters = _Chunk(formats={source.name: dialect}), 0
        for raw in source.rows(skip=skip):
            characters += self._take(chunk, raw, dialect, short)
            chunk.progress = before + raw.position if sized else self._read
            skip += 1
            if chunk.tally["total"]["read"] >= CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                yield replace(chunk, position=(i, skip))
                chunk, characters = _Chunk(progress=chunk.progress), 0
        yield replace(chunk, position=(i + 1, 0))

    def _take(self, chunk: _Chunk, raw: RawRow, dialect: str, short: str) -> int:
        """Decide on one row of the input; the characters that it adds to the chunk."""
        self._read += 1
        chunk.tally["total"]["read"] += 1
        chunk.tally["sources"][raw.source] += 1
        name = f"{short}:{raw.number}"
        if raw.value is None:
            chunk.reject(raw, name, "unreadable", raw.fault)
            return 0
        config = self._config
        try:
            item = convert(raw.value, format=dialect, name=name, domain=config.domain or short, columns=config.columns)
        except ValueError as error:
            found = raw.value.get(config.columns.get("id", "id"))
            chunk.reject(raw, str(found) if isinstance(found, str | int) else name, "unusable", str(error))
            return 0
        if not (item.id + item.domain).isascii():
            item = replace(item, id=_plain(item.id), domain=_plain(item.domain))
        chunk.tally["read"][item.domain] += 1
        key = content_key(item)
        if not self._contents.add(key) and config.deduplicate:
            chunk.reject(raw, item.id, "duplicate", "the same content as an earlier row")
            return 0
        chunk.contents.append(key)
        item = self._named(chunk, item)
        chunk.items.append((item, raw))
        return sum(len(m.get("content") or "") for m in item.messages) if isinstance(item, Conversation) else len(str(raw.value))

    def _named(self, chunk: _Chunk, item: Item) -> Item:
        """The item under an id that no other one has."""
        while not self._ids.add(key := key64(item.id.encode())):
            item = replace(item, id=f"{item.id}@{self._read}")
            chunk.tally["total"]["renamed"] += 1
        chunk.ids.append(key)
        return item


def _plain(text: str) -> str:
    """A text that UTF-8 can hold."""
    return text.encode(errors="backslashreplace").decode()


def _encode(sources: Sequence[Source], work: Journal, encoding: Encoding, config: PrepareConfig) -> None:
    """Work off the input from where the journal ends, a stretch at a time."""
    reader = _Reader(sources, config, work.stretches())
    if reader.position[0] >= len(sources):
        return
    stretch = _Stretch(config, reader.rows)
    size = reader.size
    with tqdm(desc="prepare", total=size or None, unit="B" if size else "row", unit_scale=True, disable=None) as bar:
        for chunk, outcomes in encoded(reader.chunks(), encoding, config.workers):
            stretch.add(chunk, outcomes)
            bar.update(chunk.progress - bar.n)
            if stretch.full or chunk.position[0] == len(sources):
                stretch.commit(work)
                stretch = _Stretch(config, reader.rows)


class _Stretch:
    """What the chunks since the last commit have come to. seen: keys of all rows so far."""

    def __init__(self, config: PrepareConfig, seen: Seen) -> None:
        self._config, self._seen = config, seen
        self._sum = _Chunk()
        self._rows: list[Columns] = []
        self._conversation: list[int] = []

    @property
    def full(self) -> bool:
        return self._sum.tally["total"]["read"] >= STRETCH_ROWS or sum(self._sum.tally["tokens"].values()) >= STRETCH_TOKENS

    def add(self, chunk: _Chunk, outcomes: Outcomes) -> None:
        keep_R: list[bool] = []
        made = outcomes.rows
        rows = zip(made.id_R, *(column.tolist() for column in (made.length_R, made.supervised_R, made.key_R)), strict=True)
        for (item, raw), outcome in zip(chunk.items, outcomes.items, strict=True):
            keep_R += self._add(chunk, item, raw, outcome, list(islice(rows, outcome.rows)))
        self._rows.append(made.kept(np.array(keep_R, bool)))
        self._sum.tally.update(chunk.tally)
        for name in ("rejected", "contents", "ids"):
            getattr(self._sum, name).extend(getattr(chunk, name))
        self._sum.formats.update(chunk.formats)
        self._sum.position = chunk.position

    def _add(self, chunk: _Chunk, item: Item, raw: RawRow, outcome: Outcome, rows: Sequence[tuple[str, int, int, int]]) -> list[bool]:
        """Which rows of an item are kept: those with too little to learn from and those that are there already are dropped.

        rows: id, tokens, supervised tokens and key of each.
        """
        total, drops, keep = chunk.tally["total"], [], []
        total["not compared"] += outcome.not_compared
        if outcome.reason not in ("question", "near question", "unanswered"):
            total["encoded"] += 1
        if outcome.reason:
            chunk.reject(raw, item.id, outcome.reason, outcome.why)
            return []
        for name, length, supervised, key in rows:
            keep.append(False)
            if supervised < self._config.min_supervised:
                drops.append((name, "unsupervised", f"{supervised} supervised tokens, needed {self._config.min_supervised}"))
            elif not self._seen.add(key) and self._config.deduplicate:
                drops.append((name, "rendered duplicate", "the same tokens as an earlier row"))
            else:
                keep[-1] = True
                chunk.tally["tokens"][item.domain] += length
                chunk.tally["supervised"][item.domain] += supervised
                total["at max length"] += length >= self._config.max_length
        if any(keep):
            self._count(chunk, item, raw, outcome, drops)
            self._conversation.append(sum(keep))
        else:
            _, reason, why = drops[0] if drops else ("", "unsupervised", "no assistant turn to learn from")
            chunk.reject(raw, item.id, reason, why)
        return keep

    def _count(self, chunk: _Chunk, item: Item, raw: RawRow, outcome: Outcome, drops: Sequence[tuple[str, str, str]]) -> None:
        """A conversation that is kept, and those of its rows that are not."""
        tally = chunk.tally
        for name, reason, why in drops:
            tally["dropped"][reason] += 1
            chunk.note(raw, name, reason, f"one row of {item.id}: {why}")
        tally["total"]["kept"] += 1
        tally["total"]["rows"] += outcome.rows - len(drops)
        tally["total"]["rows made"] += outcome.rows
        tally["total"]["without end"] += getattr(item, "finish_reason", "stop") == "length"
        tally["domain"][item.domain] += 1
        for name, turns in (("turns", range(outcome.turns)), ("taught", outcome.taught)):
            table = tally[name]
            for turn in turns:
                table[str(turn)] += 1

    def commit(self, work: Journal) -> None:
        done = self._sum
        stretch = Stretch(
            tally=done.tally, position=done.position, contents=np.array(done.contents, np.uint64), ids=np.array(done.ids, np.uint64),
            rows=np.concatenate([part.key_R for part in self._rows]), conversation=np.array(self._conversation, np.int32),
            rejected=done.rejected, formats=done.formats,
        )  # fmt: skip
        batch = record_batch(self._rows)
        work.commit(stretch, lambda path: write_arrow(path, batch))
