"""Reads flat EAGLE-3 folders (of ours, EAGLE, SpecForge, ModelOpt, Automodel, speculators) as heads that training can go on with.

Engines fill what a config leaves open with defaults, and trainers number the target's states in two ways: as hs[i], the residual
stream after i layers, or as output of layer i, which is hs[i + 1]. What the folder does not tell is asked for, never guessed.

Legend: H width of the head, W of the target, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.export.folder import OURS, check_trained, hold
from spectrain.export.foreign import head_names, put_embedding, put_selected, put_vocabulary, read_folder
from spectrain.export.layout import FLAGS, check_dims, check_weights, head_shapes
from spectrain.export.told import NORM_EPS, POSITIONS, Eagle3Told, Layers, check_rope, eagle3_values, read_told, rope_of

Notation = Literal["hs", "output"]
MEASURED = (
    "fc.weight", "norm.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.mlp.gate_proj.weight",
)  # fmt: skip
WIDE = ("fc.weight", "lm_head.weight", *(name for name in MEASURED if name.startswith("midlayer.")))  # tables, not rows
OUTPUT_NOTATION = ("next_layer_regular", "use_mtp_layernorm", "use_last_layernorm", "parallel_draft_step")  # keys of ModelOpt's config


@dataclass(frozen=True)
class FlatHead:
    """A head as a folder has it. config: fields of the head's config. tensors: by the head's names, in the folder's precision.
    notes: what was concluded or corrected, a line each. made_with: how it was made, where the folder is of ours."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]
    made_with: dict[str, Any]


def head_from_flat(
    folder: str | Path, *, target_layers: int, vocab_size: int | None = None, embed_VW: Tensor | None = None,
    layer_ids: Sequence[int] | None = None, notation: Notation | None = None, flags: Mapping[str, bool] | None = None,
) -> tuple[Any, tuple[str, ...]]:  # fmt: skip
    """The head in a flat EAGLE-3 folder, in float32 and ready to train, and what was concluded in reading it. Arguments: `read_flat`."""
    flat = read_flat(
        folder, target_layers=target_layers, vocab_size=vocab_size, embed_VW=embed_VW, layer_ids=layer_ids, notation=notation, flags=flags,
    )  # fmt: skip
    head = hold("eagle3", flat.config, flat.tensors, Path(folder))
    head.made_with = flat.made_with
    return head, flat.notes


def read_flat(
    folder: str | Path, *, target_layers: int, vocab_size: int | None = None, embed_VW: Tensor | None = None,
    layer_ids: Sequence[int] | None = None, notation: Notation | None = None, flags: Mapping[str, bool] | None = None,
) -> FlatHead:  # fmt: skip
    """Config and tensors of the EAGLE-3 head in a flat folder, or in one of the speculators format.

    target_layers, vocab_size: of the target (None: as many ids as the folder says). embed_VW: its embedding, needed where the folder has
    a table of its own. layer_ids: the states hs[i] that are fused, for a folder that does not name them. notation: what the folder's ids
    count, "hs" or "output", where that cannot be told. flags: EAGLE-3.1 flags to take instead of the folder's.
    ValueError for a folder that is no such head, for one that a head here cannot express, and where it leaves open what is needed.
    """
    folder, notes = Path(folder), list[str]()
    config, tensors = read_folder(folder)
    told = read_told(Eagle3Told, eagle3_values(config, folder), folder)
    tensors = head_names(tensors, folder, notes)
    check_dims(tensors, {name: 2 if name in WIDE else 1 for name in MEASURED}, folder)
    if (told.spectrain.target_layers or target_layers) != target_layers:
        found = f"{folder} was trained for a target of {told.spectrain.target_layers} layers, not {target_layers}"
        raise ValueError(f"{found}; load that target")
    wide = told.target_hidden_size or (embed_VW.shape[1] if embed_VW is not None else tensors["norm.weight"].shape[0])
    if embed_VW is not None and embed_VW.shape[1] != wide:
        raise ValueError(f"{folder} is for a target of width {wide}, this one is {embed_VW.shape[1]} wide; load that target")
    vocab_size = vocab_size or (len(tensors["t2d"]) if "t2d" in tensors else told.vocab_size)
    if not vocab_size:
        raise ValueError(f"{folder}/config.json does not say vocab_size, the ids of the target; give it (vocab_size)")
    fields = {
        **layer_sizes(told, tensors, "midlayer", folder), "target_hidden_size": wide, "vocab_size": vocab_size,
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
    }  # fmt: skip
    fields["num_hidden_layers"] = _layers(told, tensors, notes)
    fields |= _flags(told, tensors, notes) | _known(flags or {})
    fields["sliding_window"] = window_of(told, fields["num_hidden_layers"], folder, notes)
    fields["rope_parameters"] = rope_of(told, folder, notes)
    check_rope(fields["rope_parameters"], fields["head_dim"], fields["max_position_embeddings"], folder)
    fused = tensors["fc.weight"].shape[1] / fields["target_hidden_size"]
    fields["layer_ids"] = _layer_ids(told, fused, target_layers, layer_ids, notation, folder, notes)
    fields["target_layers"] = target_layers
    put_selected(tensors, folder, notes)
    put_vocabulary(tensors, fields["vocab_size"], folder, notes)
    put_embedding(tensors, embed_VW, fields["target_hidden_size"], folder, notes)
    _check(tensors, fields, folder)
    made_with = {key: value for key, value in (config.get("spectrain") or {}).items() if key not in OURS}
    ids_D = tensors["d2t"] + torch.arange(fields["draft_vocab_size"])
    check_trained(made_with, ids_D, folder)
    return FlatHead(fields, tensors, tuple(notes), made_with)


def layer_sizes(told: Layers, tensors: Mapping[str, Tensor], first: str, where: Path) -> dict[str, Any]:
    """Sizes of decoder layers from the tensors of the one called `first`; from the config only what they leave open."""
    projections = [f"{first}.self_attn.{name}_proj.weight" for name in "qk"]
    check_dims(tensors, dict.fromkeys((*projections, f"{first}.mlp.gate_proj.weight"), 2), where)
    queries, keys = (tensors[name].shape[0] for name in projections)
    inner, width = tensors[f"{first}.mlp.gate_proj.weight"].shape
    heads, head_dim = told.num_attention_heads, told.head_dim
    if not heads and not head_dim:
        raise ValueError(f"{where}/config.json says neither num_attention_heads nor head_dim; add the one of the head")
    head_dim = head_dim or queries // (heads or 1)
    if not head_dim or queries % head_dim or keys % head_dim or (heads and heads * head_dim != queries):
        found = f"num_attention_heads {heads} and head_dim {head_dim} for {queries} rows of q_proj and {keys} of k_proj"
        raise ValueError(f"{where}/config.json has {found}; correct the config")
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "hidden_act": told.hidden_act or "silu",
        "rms_norm_eps": told.rms_norm_eps or NORM_EPS,
        "max_position_embeddings": told.max_position_embeddings or POSITIONS,
    }


def _layers(told: Layers, tensors: Mapping[str, Tensor], notes: list[str]) -> int:
    """Decoder layers that have weights; some configs name those of the target."""
    layers = 1 + len({name.split(".")[1] for name in tensors if name.startswith("above.")})
    if (told.num_hidden_layers or 1) != layers:
        notes.append(f"num_hidden_layers is {told.num_hidden_layers} in the config; the folder has weights of {layers}")
    return layers


def _flags(told: Eagle3Told, tensors: Mapping[str, Tensor], notes: list[str]) -> dict[str, bool]:
    """EAGLE-3.1 flags: norms before fc where their tensors are, the others as engines read the config."""
    nested = told.nested
    said = {
        "norm_before_fc": told.norm_before_fc if nested.norm_before_fc is None else nested.norm_before_fc,
        "fc_norm": told.use_aux_norm if told.fc_norm is None else told.fc_norm,
    }
    there = {"norm_before_fc": "input_norm.weight" in tensors, "fc_norm": any(name.startswith("fc_norm.") for name in tensors)}
    for flag, found in there.items():
        if said[flag] is not None and found and not said[flag]:
            notes.append(f"{flag} is off in the config, but its weights are there: on")
    after = (told.norm_output, nested.return_hidden_post_norm, nested.norm_output)
    if any(after) and told.spectrain.hs_layer_ids is None:
        notes.append("norm_output is on, as engines read it: the next draft reads the state after the final norm")
    before, speculators = told.norm_before_residual, told.speculators_model_type is not None
    if before is None and speculators:
        notes.append("norm_before_residual is missing: on, as vLLM reads the speculators format")
    return {
        **{flag: bool(said[flag]) or found for flag, found in there.items()},
        "norm_output": any(after),
        "norm_before_residual": speculators if before is None else before,
    }


def _known(flags: Mapping[str, bool]) -> dict[str, bool]:
    if unknown := sorted(flags.keys() - set(FLAGS)):
        raise ValueError(f"flags {', '.join(unknown)} are unknown; there are {', '.join(FLAGS)}")
    return dict(flags)


def window_of(told: Layers, layers: int, where: Path, notes: list[str]) -> int | None:
    """Keys that a query sees, its own among them; engines look at the kind of each layer first."""
    window, kinds = told.sliding_window, set((told.layer_types or ["full_attention"])[:layers])
    if kinds == {"sliding_attention"} and window is not None and window > 0:
        return window
    if kinds != {"full_attention"}:
        found = f"layer_types {sorted(kinds)} and sliding_window {window}"
        raise ValueError(f"{where}/config.json has {found}; all full_attention, or all of one window, were needed")
    if window:
        notes.append(f"sliding_window {window} is not used: no layer is of that kind")
    return None


def _layer_ids(
    told: Eagle3Told, fused: float, layers: int, given: Sequence[int] | None, notation: Notation | None, where: Path, notes: list[str]
) -> list[int]:
    """The states that fc reads, as hs[i]: given, else named by the folder, else the default of all engines."""
    ids = list(given) if given else _named_ids(told, layers, notation, where)
    if given:
        notes.append(f"layer ids hs{ids} as given, whatever the folder names")
    if ids is None:
        ids = [2, layers // 2, layers - 3]
        notes.append(f"no layer ids: hs{ids}, the default of engines and trainers")
    if len(ids) == fused + 1 and max(ids) == layers:
        ids = [i for i in ids if i != layers]
        notes.append(f"layer id {layers} is the last state, which fc does not read: left out")
    if ids != sorted(ids):
        ids = sorted(ids)
        notes.append(f"layer ids are sorted to {ids}: engines take the states in that order")
    if len(set(ids)) != fused or ids[0] < 1 or ids[-1] >= layers:
        raise ValueError(
            f"{where}: states hs{ids} are named and fc.weight reads {fused:g} of them; as many different ones from 1 to {layers - 1} were "
            "needed: give those it was trained on (layer_ids)"
        )
    return ids


class AmbiguousIds(ValueError):
    """The folder numbers the states in a way that it does not tell. `spectrain.export.notation` tries both."""


def _named_ids(told: Eagle3Told, layers: int, notation: Notation | None, where: Path) -> list[int] | None:
    if told.spectrain.hs_layer_ids:
        return list(told.spectrain.hs_layer_ids)
    nested = told.nested
    top, below = told.eagle_aux_hidden_state_layer_ids, nested.eagle_aux_hidden_state_layer_ids
    if not (ids := top or below):
        return None
    default = [2, layers // 2, layers - 3]
    automodel = "LlamaEagle3DraftModel" in (told.architectures or [])
    known_output = automodel or any(getattr(nested, name) is not None for name in OUTPUT_NOTATION)
    if notation is None and (told.speculators_model_type or ids == default or (top and below == [i - 1 for i in top])):
        notation = "hs"
    elif notation is None and not top and (known_output or ids == [i - 1 for i in default]):
        notation = "output"
    elif notation is None and not below and ids != [i - 1 for i in default]:
        notation = "hs"  # vLLM alone reads the top-level key
    if notation is None:
        raise AmbiguousIds(
            f"{where}/config.json names layers {ids}, and neither architectures nor eagle_config tell whether they count states (hs[i], "
            "after i layers) or outputs of layer i (hs[i + 1]); give rows of the target's answers, and both are tried (spectrain import "
            "--rows FOLDER), or notation='hs' or 'output', or layer_ids"
        )
    return [i + (notation == "output") for i in ids]


def _check(tensors: Mapping[str, Tensor], fields: Mapping[str, Any], where: Path) -> None:
    """ValueError for tensors that are missing, of no use to the head, of another shape, or no weights."""
    needed = head_shapes(fields)
    missing, unexpected = sorted(needed.keys() - tensors.keys()), sorted(tensors.keys() - needed.keys())
    if missing or unexpected:
        raise ValueError(
            f"{where} lacks {', '.join(missing) or 'nothing'} and has {', '.join(unexpected) or 'nothing'} beside an EAGLE-3 head; correct "
            "the flags in its config (or give flags), or download the whole folder"
        )
    wrong = [f"{name} {list(tensors[name].shape)}, needed {list(shape)}" for name, shape in needed.items() if tensors[name].shape != shape]
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}; correct its config")
    check_weights(tensors, where)
