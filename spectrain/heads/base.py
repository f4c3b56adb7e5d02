"""What a draft head is, which heads there are, and how one is kept on disk.

A head directory holds `model.safetensors`, `config.json`, `run.yaml` (settings of the run) and `made_with.json` (versions, target,
hashes). It is written whole or not at all.

Legend: B rows, N nodes or tokens, F width of the states read, W target width, H head width, Vd draft vocabulary.
"""

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.config import validate

HEADS = {"eagle3": "spectrain.heads.eagle3:Eagle3"}
FORMAT = 1


class KeyValueCache(Protocol):
    """The cache calls that a head makes; the generator passes one in."""

    lengths_B: Tensor
    staged: int

    def stage(self, num: int, pad_B: Tensor | None = None) -> Tensor: ...
    def update(self, k_BGND: Tensor, v_BGND: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...
    def visible(self, ancestors_BNM: Tensor) -> Tensor: ...
    def commit(self, count_B: Tensor, path_BK: Tensor | None = None) -> None: ...
    def discard(self) -> None: ...


@dataclass(frozen=True)
class DraftState:
    """Nodes of the current draft, the root first: their features and the ancestor relation among them.

    hidden_BMH: feature that a child of each node reads. ancestors_BMM: entry (n, m) = m is n or an ancestor of n.
    """

    hidden_BMH: Tensor
    ancestors_BMM: Tensor


class TrainingBatch(Protocol):
    """What a head reads of a batch: ids, mask and states of the target, padded at the end."""

    ids_BL: Tensor
    mask_BL: Tensor
    states_BLF: Tensor


class DraftHead(Protocol):
    """A trainable drafter on the target's hidden states. It never sees the target: embeddings come as arguments."""

    config: Any
    layer_ids: tuple[int, ...]
    target_ids: Tensor

    def rows(self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int) -> Iterator[tuple[int, Tensor]]:
        """(ahead, logits [R, Vd]) of the given flat rows (b * L + i), one pair a test-time step."""

    def begin(
        self, states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, embed_VW: Tensor, cache: KeyValueCache, state: DraftState | None
    ) -> tuple[Tensor, DraftState]:
        """Take in settled tokens; returns the logits [B, Vd] after the newest one and a state that holds the root alone."""

    def extend(
        self, state: DraftState, tokens_BN: Tensor, parents_BN: Tensor, embed_VW: Tensor, cache: KeyValueCache
    ) -> tuple[Tensor, DraftState]:
        """Add drafted nodes below nodes of `state`; returns their logits [B, N, Vd] and the grown state."""


def head_class(kind: str) -> Any:
    """The class behind a name in `HEADS`; ValueError names those that exist."""
    if kind not in HEADS:
        raise ValueError(f"head {kind!r} is unknown; there are {', '.join(HEADS)}")
    module, name = HEADS[kind].split(":")
    return getattr(importlib.import_module(module), name)


def vocabulary_hash(target_ids: Tensor) -> str:
    """Hash of a draft vocabulary."""
    return hashlib.sha256(target_ids.cpu().numpy().tobytes()).hexdigest()


def save_head(head: Any, out: Path, *, run_yaml: str, made_with: Mapping[str, Any]) -> None:
    """Write a head directory, replacing an earlier one only once the new one is whole."""
    part, old = out.with_name(out.name + ".part"), out.with_name(out.name + ".old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    kind = next(name for name, where in HEADS.items() if where.endswith(":" + type(head).__name__))
    config = {"head": kind, "format": FORMAT, **head.config.model_dump(mode="json")}
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copymode(part / "config.json", part / "model.safetensors")  # safetensors writes files that only their owner can read
    (part / "run.yaml").write_text(run_yaml)
    record = {**made_with, "vocabulary_sha256": vocabulary_hash(head.target_ids)}
    (part / "made_with.json").write_text(json.dumps(record, indent=2) + "\n")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(part, out)
    shutil.rmtree(old, ignore_errors=True)


def load_head(folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Load a head directory in evaluation mode.

    Raises ValueError when the folder is none, is damaged, of a newer format, or when its tensors do not fit its config.
    """
    folder = Path(folder)
    config, made_with = (_read_json(folder, name) for name in ("config.json", "made_with.json"))
    if config.pop("format", None) != FORMAT:
        raise ValueError(f"{folder} is of another format than {FORMAT}; update spectrain or train the head anew")
    cls = head_class(config.pop("head", ""))
    head = cls(validate(cls.Config, config, where=f"{folder}/config.json"))
    try:
        head.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    except (SafetensorError, FileNotFoundError, RuntimeError) as error:
        raise ValueError(f"{folder}/model.safetensors does not hold this head ({error}); train or export it anew") from error
    if vocabulary_hash(head.target_ids) != made_with.get("vocabulary_sha256"):
        raise ValueError(f"{folder}: the draft vocabulary is not the one the head was trained with; train it anew")
    head.made_with = made_with
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)


def check_head(head: Any, fingerprints: Mapping[str, str], target: str) -> None:
    """ValueError when a head was trained for another target than the one with these hashes."""
    made_with = getattr(head, "made_with", {})
    for key in ("tokenizer_sha256", "embedding_sha256"):
        if key in made_with and made_with[key] != fingerprints[key]:
            what = key.removesuffix("_sha256")
            raise ValueError(
                f"this head was trained for {made_with.get('target')} (its {what} differs from that of {target}); "
                f"load that target, or train a head: spectrain train RECIPE --set target.name={target}"
            )


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} is no head directory: {name} is missing; train one with `spectrain train RECIPE`")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); train or copy the head anew") from error
