"""Hidden states of the frozen target, captured once and kept on disk.

A store is a folder of safetensors shards, one a few rows, and `manifest.json`, which says what they were made from. A capture that was
stopped goes on where it was; a store made from other rows, another target or other layers is refused. A shard is written to
a temporary name and renamed, so one that can be read is whole.

Legend: L tokens, M supervised tokens, F width of the states read, W target width, V vocabulary.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from spectrain.data.batches import Sample
from spectrain.data.masking import Row
from spectrain.target.model import Target

ROWS_PER_SHARD = 16
DTYPE = torch.bfloat16


def rows_hash(rows: Sequence[Row]) -> str:
    """Hash of ids, masks and order of rows."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, row.ids_L, row.mask_L]).encode())
    return digest.hexdigest()


def store_bytes(rows: Sequence[Row], *, target_width: int, num_states: int) -> int:
    """Bytes a store of these rows takes: `num_states` states a token and the last state a supervised token, bfloat16."""
    tokens, supervised = sum(len(row.ids_L) for row in rows), sum(row.supervised for row in rows)
    return 2 * target_width * (num_states * tokens + supervised)


def capture(rows: Sequence[Row], target: Target, layer_ids: Sequence[int], out: Path) -> None:
    """Write the store of `rows` to `out`, or what is missing of it.

    Raises ValueError when `out` holds another store (naming the field that differs), when the disk has too little room, or when a row
    is longer than the target takes.
    """
    longest = max((len(row.ids_L) for row in rows), default=0)
    if longest > target.max_length:
        raise ValueError(f"a row has {longest} tokens, {target.name} takes {target.max_length}; prepare the rows with that max_length")
    manifest = {
        "format": 1, "rows": len(rows), "rows_sha256": rows_hash(rows), "layer_ids": list(layer_ids), "dtype": str(DTYPE),
        "last_state": "post_norm", "target": target.name, **target.fingerprints,
    }  # fmt: skip
    _check_manifest(out, manifest)
    _check_space(out, store_bytes(rows, target_width=target.embedding_VW.shape[1], num_states=len(layer_ids)))
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "manifest.json").exists():
        _write(out / "manifest.json", json.dumps(manifest, indent=2))
    tokens = sum(len(row.ids_L) for row in rows)
    with tqdm(total=tokens, desc="capture", unit="tok", unit_scale=True, disable=None) as bar:
        for first in range(0, len(rows), ROWS_PER_SHARD):
            shard = rows[first : first + ROWS_PER_SHARD]
            path = out / _shard_name(first)
            if not path.exists():
                tensors = {f"{i}.{name}": t for i, row in enumerate(shard) for name, t in capture_row(row, target, layer_ids).items()}
                part = path.with_suffix(".part")
                save_file(tensors, part)
                os.replace(part, path)
            bar.update(sum(len(row.ids_L) for row in shard))


def capture_row(row: Row, target: Target, layer_ids: Sequence[int]) -> dict[str, Tensor]:
    """States of one row in one pass: states [L, F]; at supervised tokens last [M, W], best id [M] and log-sum-exp [M] of the logits."""
    ids_1L = torch.tensor([row.ids_L], device=target.device)
    L = ids_1L.shape[1]
    at_M = torch.tensor(row.mask_L, device=target.device).nonzero()[:, 0]
    positions = torch.arange(L, device=target.device)[None]
    out = target.forward(ids_1L, positions_BN=positions, mask=None, cache=None, layer_ids=layer_ids, logits_to_keep=at_M)
    assert out.states_BNF is not None
    return {
        "states": out.states_BNF[0].to(DTYPE).cpu(),
        "last": out.last_BKW[0].to(DTYPE).cpu(),
        "best": out.logits_BKV[0].argmax(-1).cpu(),
        "lse": out.logits_BKV[0].float().logsumexp(-1).cpu(),
    }


class FeatureStore:
    """Reads the samples of a captured store, row by row, from memory-mapped shards.

    Raises ValueError when the store is missing, incomplete, or was made from other rows.
    """

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        manifest = _read_manifest(folder)
        if manifest is None:
            raise ValueError(f"{folder} is no feature store; run `spectrain capture` first")
        if manifest["rows_sha256"] != rows_hash(rows):
            raise ValueError(f"{folder} was captured from other rows (rows_sha256 differs); capture into a new folder")
        self.manifest, self.rows = manifest, rows
        self._folder = folder
        missing = [first for first in range(0, len(rows), ROWS_PER_SHARD) if not (folder / _shard_name(first)).exists()]
        if missing:
            raise ValueError(f"{folder} is incomplete ({len(missing)} shards missing); run the capture again, it goes on where it stopped")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Sample:
        """Row i with float32 states."""
        path = self._folder / _shard_name(i - i % ROWS_PER_SHARD)
        try:
            with safe_open(path, framework="pt") as shard:
                part = {name: shard.get_tensor(f"{i % ROWS_PER_SHARD}.{name}") for name in ("states", "last", "best", "lse")}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); delete it and run the capture again") from error
        ids_L, mask_L = torch.tensor(self.rows[i].ids_L), torch.tensor(self.rows[i].mask_L)
        at_M = mask_L.nonzero()[:, 0]

        def spread(t: Tensor) -> Tensor:
            return torch.zeros(len(ids_L), *t.shape[1:], dtype=t.dtype).index_copy(0, at_M, t)

        return Sample(
            ids_L=ids_L, mask_L=mask_L, states_LF=part["states"].float(), last_LW=spread(part["last"]).float(),
            best_L=spread(part["best"]), lse_L=spread(part["lse"]),
        )  # fmt: skip


def _shard_name(first: int) -> str:
    return f"rows-{first:07d}.safetensors"


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / "manifest.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _check_manifest(out: Path, wanted: Mapping[str, Any]) -> None:
    found = _read_manifest(out)
    if found is None:
        if out.is_dir() and any(out.iterdir()):
            raise ValueError(f"{out} holds files but no manifest.json; give an empty folder")
        return
    differing = [key for key in wanted if found.get(key) != wanted[key] and key != "target"]
    if differing:
        key = differing[0]
        difference = f"{key} = {found.get(key)!r}, needed {wanted[key]!r}"
        raise ValueError(f"{out} is a store with {difference}; delete it or capture into a new folder")


def _check_space(out: Path, needed: int) -> None:
    above = next(p for p in (out, *out.resolve().parents) if p.exists())
    stored = sum(f.stat().st_size for f in out.glob("*.safetensors")) if out.is_dir() else 0
    free = shutil.disk_usage(above).free
    if needed - stored > free:
        raise ValueError(f"the store needs {needed / 2**20:.0f} MiB, {out} has {free / 2**20:.0f} MiB left; free some or take fewer rows")


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
