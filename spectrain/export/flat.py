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

from spectrain.config import validate
from spectrain.export.folder import OURS
from spectrain.export.foreign import head_names, put_embedding, put_vocabulary, read_folder
from spectrain.export.layout import FLAGS, head_shapes
from spectrain.heads.base import check_vocabulary, head_class, vocabulary_hash

Notation = Literal["hs", "output"]
MEASURED = (
    "fc.weight", "norm.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.mlp.gate_proj.weight",
)  # fmt: skip
ROPE_BASE, NORM_EPS, POSITIONS = 10_000.0, 1e-6, 2048  # of transformers' LlamaConfig, which engines read a flat config with
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
    cls = head_class("eagle3")
    head = cls(validate(cls.Config, flat.config, where=f"{folder}/config.json"))
    head.load_state_dict(flat.tensors)
    check_vocabulary(head)
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
    tensors = head_names(tensors, folder, notes)
    if missing := [name for name in MEASURED if name not in tensors]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which an EAGLE-3 head has of its own; download the whole folder")
    values = {**config, **config.get("transformer_layer_config", {})}
    ours = config.get("spectrain", {})
    if ours.get("target_layers", target_layers) != target_layers:
        raise ValueError(f"{folder} was trained for a target of {ours['target_layers']} layers, not {target_layers}; load that target")
    wide = values.get("target_hidden_size") or (embed_VW.shape[1] if embed_VW is not None else tensors["norm.weight"].shape[0])
    if embed_VW is not None and embed_VW.shape[1] != wide:
        raise ValueError(f"{folder} is for a target of width {wide}, this one is {embed_VW.shape[1]} wide; load that target")
    vocab_size = vocab_size or (len(tensors["t2d"]) if "t2d" in tensors else values.get("vocab_size"))
    if not vocab_size:
        raise ValueError(f"{folder}/config.json does not say vocab_size, the ids of the target; give it (vocab_size)")
    fields = {
        **layer_sizes(values, tensors, "midlayer", folder), "target_hidden_size": wide, "vocab_size": vocab_size,
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
    }  # fmt: skip
    fields["num_hidden_layers"] = _layers(values, tensors, notes)
    fields |= _flags(values, tensors, config, notes) | _known(flags or {})
    fields["sliding_window"] = window_of(values, fields["num_hidden_layers"], folder, notes)
    fields["rope_parameters"] = rope_of(values, folder, notes)
    fused = tensors["fc.weight"].shape[1] / fields["target_hidden_size"]
    fields["layer_ids"] = _layer_ids(config, fused, target_layers, layer_ids, notation, folder, notes)
    fields["target_layers"] = target_layers
    put_vocabulary(tensors, fields["vocab_size"], folder, notes)
    put_embedding(tensors, embed_VW, fields["target_hidden_size"], folder, notes)
    _check(tensors, fields, folder)
    made_with = {key: value for key, value in ours.items() if key not in OURS}
    ids_D = tensors["d2t"] + torch.arange(fields["draft_vocab_size"])
    if made_with.get("vocabulary_sha256", found := vocabulary_hash(ids_D)) != found:
        raise ValueError(f"{folder}: the draft vocabulary is not the one the head was trained with; export or download the head again")
    return FlatHead(fields, tensors, tuple(notes), made_with)


def layer_sizes(values: Mapping[str, Any], tensors: Mapping[str, Tensor], first: str, where: Path) -> dict[str, Any]:
    """Sizes of decoder layers from the tensors of the one called `first`; from the config (`values`) only what they leave open."""
    queries, keys = (tensors[f"{first}.self_attn.{name}_proj.weight"].shape[0] for name in "qk")
    inner, width = tensors[f"{first}.mlp.gate_proj.weight"].shape
    heads, head_dim = values.get("num_attention_heads"), values.get("head_dim")
    if not heads and not head_dim:
        raise ValueError(f"{where}/config.json says neither num_attention_heads nor head_dim; add the one of the head")
    head_dim = head_dim or queries // int(heads or 1)
    if queries % head_dim or keys % head_dim or (heads and heads * head_dim != queries):
        found = f"num_attention_heads {heads} and head_dim {head_dim} for {queries} rows of q_proj and {keys} of k_proj"
        raise ValueError(f"{where}/config.json has {found}; correct the config")
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "hidden_act": values.get("hidden_act", "silu"),
        "rms_norm_eps": values.get("rms_norm_eps", NORM_EPS),
        "max_position_embeddings": values.get("max_position_embeddings", POSITIONS),
    }


def _layers(values: Mapping[str, Any], tensors: Mapping[str, Tensor], notes: list[str]) -> int:
    """Decoder layers that have weights; some configs name those of the target."""
    layers = 1 + len({name.split(".")[1] for name in tensors if name.startswith("above.")})
    if values.get("num_hidden_layers", 1) != layers:
        notes.append(f"num_hidden_layers is {values['num_hidden_layers']} in the config; the folder has weights of {layers}")
    return layers


def _flags(values: Mapping[str, Any], tensors: Mapping[str, Tensor], config: Mapping[str, Any], notes: list[str]) -> dict[str, bool]:
    """EAGLE-3.1 flags: norms before fc where their tensors are, the others as engines read the config."""
    nested = values.get("eagle_config") or {}
    said = {
        "norm_before_fc": nested.get("norm_before_fc", values.get("norm_before_fc")),
        "fc_norm": values.get("fc_norm", values.get("use_aux_norm")),
    }
    there = {"norm_before_fc": "input_norm.weight" in tensors, "fc_norm": any(name.startswith("fc_norm.") for name in tensors)}
    for flag, found in there.items():
        if said[flag] is not None and found and not said[flag]:
            notes.append(f"{flag} is off in the config, but its weights are there: on")
    after = (values.get("norm_output"), nested.get("return_hidden_post_norm"), nested.get("norm_output"))
    if any(after) and "spectrain" not in config:
        notes.append("norm_output is on, as engines read it: the next draft reads the state after the final norm")
    before, speculators = values.get("norm_before_residual"), "speculators_model_type" in config
    if before is None and speculators:
        notes.append("norm_before_residual is missing: on, as vLLM reads the speculators format")
    return {
        **{flag: bool(said[flag]) or found for flag, found in there.items()},
        "norm_output": any(after),
        "norm_before_residual": speculators if before is None else bool(before),
    }


def _known(flags: Mapping[str, bool]) -> dict[str, bool]:
    if unknown := sorted(flags.keys() - set(FLAGS)):
        raise ValueError(f"flags {', '.join(unknown)} are unknown; there are {', '.join(FLAGS)}")
    return dict(flags)


def window_of(values: Mapping[str, Any], layers: int, where: Path, notes: list[str]) -> int | None:
    """Keys that a query sees, its own among them; engines look at the kind of each layer first."""
    window, kinds = values.get("sliding_window"), set((values.get("layer_types") or ["full_attention"])[:layers])
    if kinds == {"sliding_attention"} and isinstance(window, int):
        return window
    if kinds != {"full_attention"}:
        raise ValueError(f"{where}/config.json has layer_types {sorted(kinds)}; all full_attention, or all of one window, were needed")
    if window:
        notes.append(f"sliding_window {window} is not used: no layer is of that kind")
    return None


def rope_of(values: Mapping[str, Any], where: Path, notes: list[str]) -> dict[str, Any]:
    """Rotary settings in today's spelling. A missing base is what training used: 10,000, whatever the target has."""
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    older = rope.pop("type", "default")
    rope.setdefault("rope_type", older)
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = values.get("rope_theta")
    if rope["rope_theta"] is None:
        rope["rope_theta"] = ROPE_BASE
        notes.append("no rope_theta: 10,000, which such heads were trained with, not the target's")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{where}/config.json has rope settings {rope}; one set that turns the whole of each attention head was needed")
    return rope


def _layer_ids(
    config: Mapping[str, Any], fused: float, layers: int, given: Sequence[int] | None, notation: Notation | None, where: Path,
    notes: list[str],
) -> list[int]:  # fmt: skip
    """The states that fc reads, as hs[i]: given, else named by the folder, else the default of all engines."""
    ids = list(given) if given else _named_ids(config, layers, notation, where)
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


def _named_ids(config: Mapping[str, Any], layers: int, notation: Notation | None, where: Path) -> list[int] | None:
    if ours := config.get("spectrain", {}).get("hs_layer_ids"):
        return list(ours)
    key, nested = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config") or {}
    top, below = config.get(key), nested.get(key)
    if not (ids := top or below):
        return None
    default = [2, layers // 2, layers - 3]
    known_output = "LlamaEagle3DraftModel" in config.get("architectures", []) or any(name in nested for name in OUTPUT_NOTATION)
    if notation is None and ("speculators_model_type" in config or ids == default or (top and below == [i - 1 for i in top])):
        notation = "hs"
    elif notation is None and not top and (known_output or ids == [i - 1 for i in default]):
        notation = "output"
    elif notation is None and not below and ids != [i - 1 for i in default]:
        notation = "hs"  # vLLM alone reads the top-level key
    if notation is None:
        raise ValueError(
            f"{where}/config.json names layers {ids} without saying whether it counts states (hs[i], after i layers) or outputs of layer i "
            "(hs[i + 1]); give notation='hs' or 'output' (try both: the right one has several times the accuracy), or layer_ids"
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
    odd = {str(tensor.dtype) for tensor in tensors.values() if tensor.dtype not in (torch.int64, torch.bool) and tensor.itemsize < 2}
    if odd or not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"{where} holds {', '.join(odd) or 'NaN or infinite values'}; finite weights in 16 or 32 bits were needed")
