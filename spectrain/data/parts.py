"""The last step of `spectrain prepare`: which rows are for training and which for validation; index and record of the store."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spectrain.config import PrepareConfig
from spectrain.data import coverage, journal
from spectrain.data.filters import choose
from spectrain.data.journal import Journal
from spectrain.data.row_store import FORMAT, INDEX, PARTS, RECORD, Index, index_of, part_name, parts_sha256
from spectrain.data.sources import Source


def finish(
    work: Journal, identity: Mapping[str, Any], sources: Sequence[Source], config: PrepareConfig, made: Mapping[str, str],
    extra: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Choose the parts, write index and record; ValueError when nothing is left to train on."""
    tally, formats = coverage.Tally(), {}
    keys, counts = [], []
    for stretch in work.stretches():
        tally.update(stretch.tally)
        formats.update(stretch.formats)
        keys.append(stretch.rows)
        counts.append(stretch.conversation)
    index, names = index_of(work.folder, work.count)
    index = _split(index, np.concatenate(keys), np.concatenate(counts), config)
    work.gather_rejected()
    parts = _parts(index, np.repeat(np.arange(sum(map(len, counts))), np.concatenate(counts)))
    report = coverage.coverage(tally, parts)
    if not parts["train"]["rows"]:
        raise ValueError(
            f"none of {report['read']} rows of the input is left to train on; reasons in {work.folder / journal.REJECTED}\n"
            + coverage.as_text(report)
        )
    journal.write_atomic(work.folder / INDEX, index.write)
    record = {
        "format": FORMAT, "identity": identity, "fingerprints": made, "coverage": report, "domains": names,
        "inputs": [{"name": s.name, "rows": tally["sources"][s.name], "format": formats.get(s.name, "")} for s in sources],
        "files": [_file(work.folder / part_name(i), len(keys[i])) for i in range(work.count)],
        "index_bytes": (work.folder / INDEX).stat().st_size, "rows_sha256": parts_sha256(work.folder, work.count, index.part),
        "left_out": list(getattr(sources, "left_out", ())), "extra": extra,
    }  # fmt: skip
    journal.write_json(work.folder / RECORD, record)
    work.close()
    return json.loads(json.dumps(record))


def _file(path: Path, rows: int) -> dict[str, int]:
    return {"rows": rows, "bytes": path.stat().st_size}


def _split(index: Index, keys: Any, counts: Any, config: PrepareConfig) -> Index:
    if not len(keys):
        return index
    first = np.cumsum(counts) - counts
    part = choose(
        np.repeat(np.arange(len(counts)), counts), keys, keys[first], index.domain[first], index.prompt[first],
        max_rows=config.max_rows, validation=config.validation, per_domain=config.validation_per_domain,
        prompt_tokens=config.validation_prompt_tokens, seed=config.seed,
    )  # fmt: skip
    return replace(index, part=part)


def _parts(index: Index, conversation: Any) -> dict[str, dict[str, int]]:
    found = {}
    for name, code in PARTS.items():
        mine = index.part == code
        found[name] = {
            "rows": int(mine.sum()), "conversations": len(np.unique(conversation[mine])), "tokens": int(index.length[mine].sum()),
            "supervised": int(index.supervised[mine].sum()),
        }  # fmt: skip
    return found


