"""A new head for a target: sizes from the target's config, draft vocabulary from the rows, weights from the target's own."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs, PartialState
from torch import Tensor
from transformers.integrations import unset_hf_deepspeed_config

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.rows import Ids, Row
from spectrain.heads.base import LAST, check_vocabulary, head_class
from spectrain.heads.layers import rotary_settings
from spectrain.heads.targets import DraftVocabulary, coverage, draft_vocabulary
from spectrain.heads.tokens import pack_tokens
from spectrain.target.check import output_logits
from spectrain.target.model import Target
from spectrain.training.sharding import deepspeed_plugin, fsdp_plugin
from spectrain.training.start import final_norm, last_layer, state_sizes
from spectrain.training.tracking import check_tracker

TOKENS_AT_ONCE = 2**20  # counted together, since a count costs a pass over the vocabulary
PROBE_TOKENS = 128  # of a row, to see how large the target's states are
LARGE_LOGIT = 50.0  # where caps such as Gemma 2's 30 show
OF_ALL_HEADS = {"kind", "layer_ids", "draft_vocab_size", "start", "output"}  # settings
DEVIATION = 0.02  # of random weights, as in most models
LONGEST_WAIT = timedelta(days=2)  # of the other processes, while the first one answers and captures


def open_accelerator(config: TrainingConfig, out: Path) -> Accelerator:
    """Processes, device and trackers of a run; how the weights are kept on them is what accelerate was launched with. The loop weighs
    accumulated batches itself, so accelerate is told of none.

    ValueError when the tracker's package is missing, or when the launch and these settings do not go together.
    """
    check_tracker(config.tracker)
    zero, fsdp = deepspeed_plugin(config), fsdp_plugin(config)
    on_cpu = not torch.cuda.is_available()  # where the target is
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision if zero is fsdp is None else "no",  # spread weights are float32; `Trainee` casts itself
        log_with=None if config.tracker == "none" else config.tracker, project_dir=out, deepspeed_plugin=zero, fsdp_plugin=fsdp,
        # Several processes without CUDA find each other only if told so, and with DeepSpeed by the name of their backend.
        cpu=on_cpu and zero is None,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=LONGEST_WAIT, **({"backend": "gloo"} if on_cpu and zero else {})),
            # An adapter has no gradients until it joins.
            *([DistributedDataParallelKwargs(find_unused_parameters=True)] if config.lora else []),
        ],
    )  # fmt: skip
    if zero:
        unset_hf_deepspeed_config()  # else transformers spreads every model that it loads from here on
    if fsdp and accelerator.distributed_type == DistributedType.MULTI_CPU:  # accelerate spreads over GPUs alone, torch over any processes
        accelerator.state.fsdp_plugin = fsdp
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return accelerator


def check_config(config: HeadConfig, target: Target) -> None:
    """ValueError for a head that this target cannot have, or cannot be trained with, before any long work."""
    check_settings(config)
    sizes = head_sizes(config, target)
    H, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if H != sizes["target_hidden_size"] and H % heads:  # transformers' Llama config, which engines read, refuses it
        near = max(1, H // heads) * heads
        raise ValueError(f"head.hidden_size {H} is no multiple of its {heads} query heads; choose one: --set head.hidden_size={near}")
    final_norm(target)
    _check_logits(target)
    there = min(target.num_ids, target.vocab_size)
    if config.draft_vocab_size is not None and config.draft_vocab_size > there:
        found = f"head.draft_vocab_size {config.draft_vocab_size} is above the {there} tokens of {target.name}"
        raise ValueError(f"{found}; lower it: --set head.draft_vocab_size={there} (null: all of them)")


def check_training(head: HeadConfig, training: TrainingConfig) -> None:
    """ValueError for a loss that a head of this kind has no output for, or for more steps than it can draft."""
    most = head.num_heads if "num_heads" in head_class(head.kind).settings else None
    if most is not None and training.ttt_steps != most:
        found = f"training.ttt_steps {training.ttt_steps}, and a {head.kind} head of head.num_heads {most}"
        raise ValueError(f"{found}: each of them is trained at the step that it drafts; set --set training.ttt_steps={most}")
    if "smooth_l1" in training.loss.mix and not head_class(head.kind).gives_feature:
        found = f"training.loss.mix holds smooth_l1, which compares states, and a head of kind {head.kind} guesses none"
        raise ValueError(f"{found}; leave it out: --set training.loss.mix=soft_ce")


def check_settings(config: HeadConfig) -> None:
    """ValueError for an unknown kind, or for settings that a head of this kind has not."""
    known = OF_ALL_HEADS | head_class(config.kind).settings
    default = HeadConfig(kind=config.kind)
    if odd := sorted(n for n in HeadConfig.model_fields if n not in known and getattr(config, n) != getattr(default, n)):
        found = f"a head of kind {config.kind} has no {', '.join(f'head.{name}' for name in odd)}"
        raise ValueError(f"{found}; leave it out of the recipe (it has {', '.join(sorted(known))})")


@torch.no_grad()
def _check_logits(target: Target) -> None:
    """ValueError unless the target's logits are its last state times its output rows: from these alone training computes its law."""
    last_MW = torch.randn(2, target.output_VW.shape[1], generator=torch.Generator().manual_seed(0)).to(target.device)
    last_MW *= LARGE_LOGIT / (last_MW @ target.output_VW.float().T).abs().max().clamp(min=1e-6)
    last_MW = last_MW.to(target.model.dtype)
    plain_MV, own_MV = last_MW.float() @ target.output_VW.float().T, output_logits(target, last_MW).float()
    error = float((plain_MV - own_MV).abs().max()) / LARGE_LOGIT
    if not error <= (2e-3 if target.model.dtype == torch.float32 else 2e-2):
        found = f"{target.name} changes its logits behind the output rows (a cap, a scale or a bias), by {error:.1%} of a large one"
        raise ValueError(f"{found}; heads are trained on last state times output rows: choose a target whose logits are these")


def supervised_by_domain(rows: Iterable[Row], vocab_size: int) -> dict[str, Tensor]:
    """By domain, in order of name: how often each id is supervised, int64 [V]. One pass over the rows serves any draft vocabulary."""
    waiting: dict[str, list[Ids]] = {}
    held: dict[str, int] = {}
    counts: dict[str, Tensor] = {}

    def add(domain: str) -> None:
        ids = np.concatenate(waiting[domain])
        counts[domain] = counts.get(domain, 0) + torch.from_numpy(np.bincount(ids, minlength=vocab_size))
        waiting[domain], held[domain] = [], 0

    for row in rows:
        waiting.setdefault(row.domain, []).append(row.supervised_ids)
        held[row.domain] = held.get(row.domain, 0) + row.supervised
        if held[row.domain] > TOKENS_AT_ONCE:
            add(row.domain)
    for domain in waiting:
        add(domain)
    return dict(sorted(counts.items()))


def supervised_counts(rows: Iterable[Row], vocab_size: int) -> Tensor:
    """How often each id is supervised, int64 [V]."""
    return sum(supervised_by_domain(rows, vocab_size).values(), start=torch.zeros(vocab_size, dtype=torch.long))


def coverage_by_domain(rows: Iterable[Row], vocabulary: DraftVocabulary) -> dict[str, tuple[int, int]]:
    """By domain: supervised tokens inside the draft vocabulary, and all supervised tokens."""
    return coverage(supervised_by_domain(rows, len(vocabulary.t2d)), vocabulary)


def coverage_lines(vocabulary: DraftVocabulary, rows: Mapping[str, Iterable[Row]]) -> list[str]:
    """A line for each named set of rows (`training rows`, `validation rows`: answers of the target that the map was not cut from):
    share of the supervised tokens inside the draft vocabulary, of all and by domain, with both numbers."""
    lines = []
    for name, some in rows.items():
        found = coverage_by_domain(some, vocabulary)
        total = (sum(inside for inside, _ in found.values()), sum(of for _, of in found.values()))
        parts = [f"{d} {_share(*pair)}" for d, pair in found.items()]
        lines.append(f"draft vocabulary of {len(vocabulary.target_ids)}: coverage of {name} {_share(*total)}: {', '.join(parts)}")
    return lines


def _share(inside: int, of: int) -> str:
    return f"{inside / max(of, 1):.2%} ({inside}/{of})"


def layer_ids(config: HeadConfig, target: Target) -> tuple[int, ...]:
    """The states that the head reads: those named, else its family's default. ValueError unless a family that reads hidden states has
    one to five that rise within the target, and one that reads the last state that alone."""
    own = head_class(config.kind).default_layer_ids
    if config.kind != "eagle3":
        if config.layer_ids not in (None, (LAST,)):
            found = f"head.layer_ids {list(config.layer_ids)}, but a head of kind {config.kind} reads the last state"
            raise ValueError(f"{found}; leave it out: --set head.layer_ids=null")
        return own(target.num_layers)  # type: ignore[no-any-return]
    ids = config.layer_ids or own(target.num_layers)
    if list(ids) != sorted(set(ids)) or not 1 <= ids[0] <= ids[-1] <= target.num_layers - 1:
        needed = f"needed are one to five that rise within 1 to {target.num_layers - 1} (hs numbers of {target.name})"
        raise ValueError(f"head.layer_ids {list(ids)}: {needed}")
    return tuple(ids)


def cut_vocabulary(config: HeadConfig, target: Target, counts_V: Tensor) -> DraftVocabulary:
    """The head's draft vocabulary from counts of supervised tokens; another size needs no new count and no new states."""
    return draft_vocabulary(counts_V, config.draft_vocab_size, num_ids=target.num_ids)


def new_head(
    config: HeadConfig, target: Target, rows: Iterable[Row], *, seed: int, counts_V: Tensor | None = None, start: Any = None
) -> Any:
    """A head that starts from the target's weights, with a draft vocabulary counted over the rows' supervised tokens; or a copy of
    `start`, a head with sizes, vocabulary and weights of its own, to go on from.

    counts_V: their `supervised_counts`, when they are known already. Raises ValueError when the draft vocabulary is
    larger than the target's, the target lacks what the head copies, or `start` does not fit the target.
    """
    if start is not None:
        return _continued(config, target, start)
    counts_V = supervised_counts(rows, target.vocab_size) if counts_V is None else counts_V
    vocabulary = cut_vocabulary(config, target, counts_V)
    cls = head_class(config.kind)
    sizes = {**head_sizes(config, target), "draft_vocab_size": len(vocabulary.target_ids)}
    head = cls(cls.Config(**{name: value for name, value in sizes.items() if name in cls.Config.model_fields}))
    layer, sizes_J = None, None
    if config.init_layer == "last" and "init_layer" in cls.settings:
        layer = last_layer(target)[0] if head.config.hidden_size == head.config.target_hidden_size else {}
        if config.fc_norm or config.norm_before_fc or config.norm_output or config.norm_before_residual:
            some = next(iter(rows), None)
            ids = vocabulary.target_ids.tolist() if some is None else some.ids_L.tolist()
            sizes_J = state_sizes(target, head.layer_ids, ids[:PROBE_TOKENS])
    head.start_from(
        layer=layer, norm=final_norm(target), output_VW=_output_rows(config, target, seed), target_ids=vocabulary.target_ids,
        train_output=config.output == "trained", seed=seed, sizes_J=sizes_J,
    )  # fmt: skip
    head.tokens = pack_tokens(target.tokenizer.get_vocab())
    return head


def _output_rows(config: HeadConfig, target: Target, seed: int) -> Tensor:
    """The rows [V, W] that the output layers of a new head start from."""
    if config.init_output == "target":
        return target.output_VW
    return torch.randn(target.output_VW.shape, generator=torch.Generator().manual_seed(seed)) * DEVIATION


def start_notes(config: HeadConfig, target: Target) -> list[str]:
    """What of a new head starts at random although the target's last layer was asked for, and why; a line a part."""
    if config.start is not None or config.init_layer != "last" or "init_layer" not in head_class(config.kind).settings:
        return []
    if config.hidden_size not in (None, target.config.hidden_size):
        width = f"head.hidden_size {config.hidden_size} is not the width {target.config.hidden_size} of {target.name}"
        return [f"the head's layers start at random: {width}; its axes are the main directions of the target's output rows"]
    if "num_heads" in head_class(config.kind).settings:  # its num_layers are residual blocks; one decoder layer comes before them, or none
        return last_layer(target)[1] if config.prefix else []
    above = config.num_layers - 1
    return last_layer(target)[1] + ([f"{above} layer(s) above the first start at random"] if above else [])


def head_sizes(config: HeadConfig, target: Target) -> dict[str, Any]:
    """Fields of a head's config but its vocabulary, of any family. Another width than the target's keeps the size of an attention head
    and the number of key heads, and has query heads and inner width in proportion."""
    c = target.config
    W, groups = c.hidden_size, getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    H, D = config.hidden_size or W, getattr(c, "head_dim", None) or W // c.num_attention_heads
    heads, inner = c.num_attention_heads, getattr(c, "intermediate_size", None) or 4 * W
    if H != W:
        heads, inner = groups * max(1, round(H / (D * groups))), 8 * max(1, round(inner * H / W / 8))
    return {
        "hidden_size": H, "target_hidden_size": W, "intermediate_size": inner, "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": D, "rms_norm_eps": getattr(c, "rms_norm_eps", 1e-5),
        "rope_parameters": rotary_settings(c), "max_position_embeddings": c.max_position_embeddings,
        "sliding_window": config.sliding_window, "vocab_size": target.vocab_size, "layer_ids": layer_ids(config, target),
        "target_layers": target.num_layers, "fc_norm": config.fc_norm, "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output, "norm_before_residual": config.norm_before_residual, "num_heads": config.num_heads,
        "num_layers": config.num_layers, "shared_output": config.shared_output, "prefix": config.prefix, "original": config.original,
        "bias": config.bias,
    }  # fmt: skip


def _continued(config: HeadConfig, target: Target, start: Any) -> Any:
    """A trainable float32 copy of a head. ValueError unless it is of this kind and reads this target's states and tokens."""
    c = start.config
    if not isinstance(start, head_class(config.kind)):
        raise ValueError(f"head.start is a {type(start).__name__}, the recipe asks for head.kind {config.kind}; set head.kind to its own")
    check_vocabulary(start)
    for what, found, needed in (
        ("states of width", c.target_hidden_size, target.config.hidden_size), ("a vocabulary of", c.vocab_size, target.vocab_size),
        ("a target of layers", c.target_layers, target.num_layers),
    ):  # fmt: skip
        if found != needed:
            way_out = "start from a head of this target, or train a new one: --set head.start=null"
            raise ValueError(f"head.start reads {what} {found}, {target.name} has {needed}; {way_out}")
    layer_ids(config.model_copy(update={"layer_ids": tuple(c.layer_ids)}), target)
    if int(start.target_ids.max()) >= target.num_ids:
        found = f"head.start drafts the id {int(start.target_ids.max())}"
        raise ValueError(f"{found}, the tokenizer of {target.name} ends at {target.num_ids - 1}; train a new one: --set head.start=null")
    head = head_class(config.kind)(c)
    head.load_state_dict(start.state_dict())
    head.train_output(config.output == "trained")
    head.tokens = pack_tokens(target.tokenizer.get_vocab())
    return head


def made_with(target: Target, extra: Mapping[str, Any]) -> dict[str, Any]:
    """How an artifact was made: versions, target, hashes."""
    versions = {name: version(name) for name in ("spectrain", "torch", "transformers", "accelerate")}
    return {"target": target.name, "target_revision": target.revision, "versions": versions, **target.fingerprints, **extra}
