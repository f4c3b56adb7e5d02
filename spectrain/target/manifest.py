"""What a feature store says of itself: what its states were made from, and what must agree before they are used.

Legend: N rows of a store.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.config import CaptureConfig
from spectrain.data.rows import Row, rows_sha256
from spectrain.target.folders import Folder
from spectrain.target.model import Target
from spectrain.target.states import LastState

FORMAT = 3
READABLE = (2, FORMAT)  # a store of format 2 names its marked channels (spectrain.data.codes); it is read, not gone on with
NAME = "manifest.json"
NOTES = ("target", "target_revision", "rows_any_order", "prepared")  # kept to be read, not compared: the others decide
CAUSES = ("quantization", "adapter_sha256")  # missing where there is none; they change layers too, and say more than a hash of these


def _any_order(rows: Sequence[Row]) -> str:
    """Equal for the same rows in another order: the sum of their digests, from the index of a row store that has them."""
    kept = getattr(rows, "digest", None)
    digests = (kept(i) for i in range(len(rows))) if kept else (row.digest for row in rows)
    return f"{sum(int.from_bytes(digest, 'little') for digest in digests) % 2**128:032x}"


def new_manifest(
    rows: Sequence[Row], target: Target, layer_ids: Sequence[int], config: CaptureConfig, last_state: LastState, prepared: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest of a store of these rows. prepared: settings that made the rows, named when the rows are found to differ."""
    return {
        "format": FORMAT, "target": target.name, "target_revision": target.revision,
        "target_dtype": str(target.model.dtype).removeprefix("torch."), **target.fingerprints,
        "layer_ids": list(layer_ids), "last_state": last_state,
        "states": config.states, "last": config.last, "rows": len(rows), "rows_per_shard": config.rows_per_shard,
        "rows_sha256": rows_sha256(rows), "rows_any_order": _any_order(rows), "prepared": dict(prepared),
    }  # fmt: skip


def read_manifest(folder: Folder) -> dict[str, Any] | None:
    """None where there is no manifest; ValueError for one that cannot be read or has another format."""
    text = folder.text(NAME)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{folder.name}/{NAME} is damaged ({error}); delete the folder and capture again") from error
    if not isinstance(found, dict) or found.get("format") not in READABLE:
        was = found.get("format") if isinstance(found, dict) else None
        raise ValueError(f"{folder.name} is a store with format = {was!r}, needed {FORMAT}; delete it or capture into a new folder")
    return found


def write_manifest(folder: Folder, manifest: Mapping[str, Any]) -> None:
    text = json.dumps(manifest, indent=2) + "\n"

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    folder.put(NAME, write)


def check_manifest(folder: Folder, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """ValueError that names the first field in which the store differs from what is wanted."""
    differing = [key for key in (*CAUSES, *wanted) if key not in NOTES and found.get(key) != wanted.get(key)]
    revisions = found.get("target_revision"), wanted.get("target_revision")
    if None not in revisions and revisions[0] != revisions[1]:
        differing.insert(0, "target_revision")
    if differing:
        difference = rows_difference(found, wanted) if differing[0] in ("rows", "rows_sha256") else _one(differing[0], found, wanted)
        raise ValueError(f"{folder.name} is a store with {difference}; delete it or capture into a new folder")


def check_rows(folder: Folder, found: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """ValueError unless a store was made from these rows in this order."""
    if found.get("rows") != len(rows) or found.get("rows_sha256") != rows_sha256(rows):
        wanted = {"rows": len(rows), "rows_sha256": rows_sha256(rows), "rows_any_order": _any_order(rows)}
        raise ValueError(f"{folder.name} was captured from other rows: {rows_difference(found, wanted)}; capture into a new folder")


def check_target(folder: Folder, found: Mapping[str, Any], target: Target) -> None:
    """ValueError unless a store was made by this target: same tokenizer, template and embedding, same revision where both are known."""
    wanted = {"target_revision": target.revision, **target.fingerprints}
    unknown = None in (found.get("target_revision"), target.revision)
    keys = [key for key in (*CAUSES, *wanted) if not (key == "target_revision" and unknown)]
    differing = [key for key in keys if found.get(key) != wanted.get(key)]
    if differing:
        told = f"{_one(differing[0], found, wanted)}; capture into a new folder"
        raise ValueError(f"{folder.name} was captured from another target ({found.get('target')}, now {target.name}): {told}")


def _one(key: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    return f"{key} = {found.get(key)!r}, needed {wanted.get(key)!r}"


def rows_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """In what the rows of a store differ from those wanted: a setting that made them, their order, or more."""
    was, now = found.get("prepared", {}), wanted.get("prepared", {})
    settings = [key for key in {**was, **now} if was and now and was.get(key) != now.get(key)]
    if settings:
        return "other rows: " + ", ".join(f"{key} = {was.get(key)!r}, needed {now.get(key)!r}" for key in settings)
    if found.get("rows") != wanted["rows"]:
        return _one("rows", found, wanted)
    why = "the same rows in another order" if found.get("rows_any_order") == wanted.get("rows_any_order") else "other rows"
    return f"{_one('rows_sha256', found, wanted)} ({why})"
