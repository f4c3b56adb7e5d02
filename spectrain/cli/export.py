"""The commands export and import: heads for engines, and heads of other programs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.cli.capture import check_rows_of
from spectrain.cli.joint import MERGED, check_merged, write_merged
from spectrain.cli.start import check_no_run
from spectrain.data.row_store import RowStore
from spectrain.export.engines import FORMATS, NAMING, drafts, export_head, needs_target, serve_command
from spectrain.export.families import head_from_folder
from spectrain.export.flat import Notation
from spectrain.export.layout import SPECULATORS
from spectrain.export.notation import ENOUGH
from spectrain.heads.base import check_head, load_head, save_head
from spectrain.heads.tokens import pack_tokens
from spectrain.target.model import Target, load_target
from spectrain.training.setup import made_with

DRAFTS = 4  # a round, in the command that serves a head without a number of its own


def export(head: Path, to: str, out: Path, target: str | None, dtype: str | None = None) -> None:
    """Write a head for an engine and print how to serve it, or (`merged`) the target with the adapter that was trained with the head.
    target: where the target is, for heads whose folder needs rows of it, and for those with an adapter. dtype: of the weights."""
    check_no_run(head)
    if to == MERGED:
        print(f"wrote {write_merged(head, target, out)}")
        return
    if to in FORMATS and (head / "made_with.json").is_file():  # a missing head and an unknown format are told by the export itself
        check_merged(head, target)
    folder = export_head(head, to, out, dtype=dtype, **of_target(head, to, target))
    print(f"wrote {folder}")
    config = json.loads((folder / "config.json").read_text())
    if config["spectrain"]["head"] == "hydra":
        return  # no engine reads it
    number = drafts(config) if SPECULATORS in config else load_head(head).max_depth or DRAFTS
    engine = "sglang" if to in ("sglang", "eagle") else "vllm"
    print(serve_command(folder, served_name(head, target), engine=engine, num_speculative_tokens=number))
    if note := config["spectrain"].get("note"):
        print(note)


def of_target(head: Path, to: str, name: str | None) -> dict[str, Any]:
    """What `export_head` takes of the target, by name of the argument; ValueError where it takes rows and no target is named, or another
    than the head's."""
    if to not in FORMATS or not needs_target(head, to):
        return {"verifier": {"name_or_path": served_name(head, name), "architectures": []}} if to in NAMING else {}
    if name is None:
        raise ValueError(f"{head} takes rows of its target in an engine, which are checked or go into the folder: add --target NAME")
    target = load_target(name)
    check_head(load_head(head), target.fingerprints, target.name, target.tokenizer, to_train=True)  # rows are the same in any precision
    verifier = {"name_or_path": served_name(head, name), "architectures": getattr(target.config, "architectures", None) or []}
    return {"embed_VW": target.embedding_VW, "output_VW": target.output_VW} | ({"verifier": verifier} if to == "speculators" else {})


def served_name(head: Path, target: str | None) -> str:
    """The target that an engine is to load: by its name in the training, but for one with an adapter merged into it."""
    made = json.loads((head / "made_with.json").read_text())
    return str(made.get("target") if target is None or "adapter_sha256" not in made else target)


def import_head(
    folder: Path, target_name: str, out: Path, *, dtype: str, say: Any, layer_ids: Sequence[int] | None = None,
    notation: Notation | None = None, rows: Path | None = None,
) -> None:  # fmt: skip
    """Write the head in an engine's or a trainer's folder as a head directory for a target. layer_ids: states that an EAGLE-3 head fuses,
    where its folder does not say; notation, rows (prepared, of the target's answers): what its ids count, where it does not say that.
    ValueError for a folder that holds none, a head of another target, and an `out` that is not empty."""
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}; give the folder that an engine would be given")
    check_no_run(folder)
    if (folder / "made_with.json").is_file():
        raise ValueError(f"{folder} is a head directory; train, evaluate and export take it as it is")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; choose another --out, or remove it")
    target = load_target(target_name, dtype=dtype)
    head, notes = head_from_folder(folder, target, layer_ids=layer_ids, notation=notation, rows=_ids_of(rows, target))
    check_head(head, target.fingerprints, target.name, target.tokenizer, to_train=True)
    for note in notes:
        say(f"{folder}: {note}")
    head.tokens = pack_tokens(target.tokenizer.get_vocab())
    save_head(head, out, run_yaml="", made_with={**made_with(target, {}), **head.made_with, "imported_from": folder.name})
    say(f"wrote {out}")


def _ids_of(folder: Path | None, target: Target) -> list[list[int]]:
    """The first rows of a store, as many as notations are told apart with."""
    if folder is None:
        return []
    store, found = RowStore(folder), list[list[int]]()
    check_rows_of(store, target)
    for row in store:
        found.append(row.ids_L.tolist())
        if sum(map(len, found)) >= ENOUGH:
            break
    return found
