"""A new head for a target: sizes from the target's config, draft vocabulary from the rows, weights from the target's own."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.masking import Row
from spectrain.heads.base import head_class
from spectrain.heads.eagle3 import default_layer_ids
from spectrain.heads.targets import DraftVocabulary, draft_vocabulary
from spectrain.target.model import Target

LONGEST_WAIT = timedelta(days=2)  # of the other processes, while the first one answers and captures


def open_accelerator(config: TrainingConfig, out: Path) -> Accelerator:
    """Processes, device and trackers of a run. The loop weighs accumulated batches itself, so accelerate is told of none."""
    return Accelerator(
        mixed_precision=config.mixed_precision, log_with=None if config.tracker == "none" else config.tracker, project_dir=out,
        cpu=not torch.cuda.is_available(),  # where the target is; several processes without CUDA find each other only if told
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)],
    )  # fmt: skip


def check_config(config: HeadConfig, target: Target) -> None:
    """ValueError for a head that this target cannot have, before any long work."""
    head_class(config.kind)
    layer_ids(config, target)
    if config.draft_vocab_size > target.vocab_size:
        found = f"head.draft_vocab_size {config.draft_vocab_size} is above the {target.vocab_size} tokens of {target.name}"
        raise ValueError(f"{found}; lower it: --set head.draft_vocab_size={target.vocab_size}")


def supervised_counts(rows: Sequence[Row], vocab_size: int) -> Tensor:
    """How often each id is supervised, int64 [V]."""
    ids = [i for row in rows for i, m in zip(row.ids_L, row.mask_L, strict=True) if m]
    return torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)


def coverage_by_domain(rows: Sequence[Row], vocabulary: DraftVocabulary) -> dict[str, tuple[int, int]]:
    """By domain: supervised tokens inside the draft vocabulary, and all supervised tokens."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        ids = torch.tensor([i for i, m in zip(row.ids_L, row.mask_L, strict=True) if m], dtype=torch.long)
        inside, total = found.get(row.domain, (0, 0))
        found[row.domain] = (inside + int(vocabulary.t2d[ids].sum()), total + len(ids))
    return found


def layer_ids(config: HeadConfig, target: Target) -> tuple[int, ...]:
    """The hidden states that the head reads: those named, else the published default. ValueError unless they rise within the target."""
    ids = config.layer_ids or default_layer_ids(target.num_layers)
    if list(ids) != sorted(set(ids)) or not 1 <= ids[0] <= ids[-1] <= target.num_layers - 1:
        raise ValueError(f"head.layer_ids {list(ids)} must rise within 1 to {target.num_layers - 1} (hs numbers of {target.name})")
    return tuple(ids)


def new_head(config: HeadConfig, target: Target, rows: Sequence[Row], *, seed: int) -> Any:
    """A head that starts from the target's weights, with a draft vocabulary counted over the rows' supervised tokens.

    Raises ValueError when the draft vocabulary is larger than the target's, or the target lacks what the head copies.
    """
    c = target.config
    vocabulary = draft_vocabulary(supervised_counts(rows, target.vocab_size), config.draft_vocab_size)
    cls = head_class(config.kind)
    head = cls(
        cls.Config(
            hidden_size=c.hidden_size, target_hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads, hidden_act=c.hidden_act,
            rms_norm_eps=c.rms_norm_eps, rope_parameters=dict(c.rope_parameters), max_position_embeddings=c.max_position_embeddings,
            vocab_size=target.vocab_size, draft_vocab_size=config.draft_vocab_size, layer_ids=layer_ids(config, target),
            target_layers=target.num_layers,
        )
    )  # fmt: skip
    head.start_from(
        layer=dict(target.layers[-1].named_parameters()) if config.init_layer == "last" else None,
        norm=final_norm(target), output_VW=target.output_VW, target_ids=vocabulary.target_ids,
        train_output=config.output == "trained", seed=seed,
    )  # fmt: skip
    return head


def final_norm(target: Target) -> Tensor:
    """Scale of the target's final norm: the last one-dimensional weight of its hidden width outside the layers."""
    inside = {id(p) for p in target.layers.parameters()}
    width = target.embedding_VW.shape[1]
    found = [p for p in target.model.parameters() if p.shape == (width,) and id(p) not in inside]
    if not found:
        raise ValueError(f"{target.name} has no final norm of width {width} to start from")
    return found[-1].detach()


def made_with(target: Target, extra: Mapping[str, Any]) -> dict[str, Any]:
    """How an artifact was made: versions, target, hashes."""
    versions = {name: version(name) for name in ("spectrain", "torch", "transformers", "accelerate")}
    return {"target": target.name, "target_revision": target.revision, "versions": versions, **target.fingerprints, **extra}
