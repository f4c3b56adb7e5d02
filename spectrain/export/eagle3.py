"""EAGLE-3 heads (arXiv 2503.01840) as a flat folder, which most engines load, and in the format of speculators.

Legend: H width of the head, V target vocabulary, D draft vocabulary. Layer numbers here are hs[i], the residual stream after i layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.export.folder import (
    FORMAT,
    MADE_WITH,
    PROJECTION_FILE,
    cast,
    check_destination,
    check_files,
    read_made_with,
    write_folder,
)
from spectrain.export.layout import (
    CONFIG,
    COPIED,
    EMBEDDING,
    FLAGS,
    PROJECTION,
    SIZES,
    SPECULATORS,
    TABLES,
    VARIANTS,
    WEIGHTS,
    flat_names,
    head_shapes,
    read_json,
    read_tensors,
    rope_spellings,
    speculators_names,
)
from spectrain.heads.base import vocabulary_hash

WHOLE = (*SIZES, "num_hidden_layers", "target_layers")  # positive whole numbers
CONFIG_KEYS = {"head", "format", "rope_parameters", "layer_ids", "target_layers", *COPIED}
SPECULATORS_VERSION = "0.9.0"  # whose format is written
DRAFTS = 5  # a round, as the speculators format has it where it is not said
OTHER_WIDTH = "vLLM serves a head of another width than its target from this folder; the speculators package itself builds none"


@dataclass(frozen=True)
class Prepared:
    """What is written, checked. tensors: by the head's names, in one dtype. beside: the projection of the target's embedding, for a head
    of another width; its product is among the tensors."""

    out: Path
    config: dict[str, Any]
    made_with: dict[str, Any]
    dtype: str
    tensors: dict[str, Tensor]
    beside: dict[str, dict[str, Tensor]]


def prepare(head_dir: Path, out: Path, *, dtype: str | None, embed_VW: Tensor | None, with_embedding: bool = False) -> Prepared:
    """The head of a head directory, ready to be named and written. with_embedding: the target's, too. Other arguments, errors:
    `export_eagle3`."""
    head_dir = Path(head_dir)
    config, made_with = read_head(head_dir), read_made_with(head_dir)
    destination = check_destination(out)
    tensors = read_tensors(head_dir / WEIGHTS)
    _check_shapes(tensors, config, head_dir)
    _check_vocabulary(tensors, config["vocab_size"], made_with["vocabulary_sha256"], head_dir)
    own: dict[str, Tensor] = {}
    if with_embedding or PROJECTION in tensors:
        own[EMBEDDING] = _own_embedding(tensors.get(PROJECTION), embed_VW, config, head_dir)
    tensors, dtype = cast(tensors | own, dtype, head_dir)
    beside = {PROJECTION_FILE: {PROJECTION: tensors.pop(PROJECTION)}} if PROJECTION in tensors else {}
    if config["draft_vocab_size"] == config["vocab_size"]:
        # A full head needs no map, and vLLM refuses a `d2t` that it has no parameter for.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in TABLES}
    return Prepared(destination, config, made_with, dtype, tensors, beside)


def export_eagle3(head_dir: Path, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None) -> Path:
    """Writes the flat EAGLE-3 folder (config.json, model.safetensors) that vLLM, SGLang and TensorRT-LLM load; returns `out`.

    dtype: see `export_head`. embed_VW: the target's embedding; read where `needs_target` says so, to write an embedding table of the head's
    width; else the embedding is the target's and is not written. The folder appears whole or not at all, and replaces an earlier export.
    ValueError for a head that is incomplete, inconsistent or of another kind, and for an `out` that holds something else. Heads: EAGLE-3,
    arXiv 2503.01840.
    """
    found = prepare(head_dir, out, dtype=dtype, embed_VW=embed_VW)
    named = flat_names(found.tensors, found.config["num_hidden_layers"])
    write_folder(found.out, flat_config(found.config, found.made_with, found.dtype), named, beside=found.beside)
    return out


def export_sglang(head_dir: Path, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None) -> Path:
    """`export_eagle3` for a head that SGLang computes as it was trained; ValueError for one that it would compute otherwise.

    SGLang skips options and tensors that it does not know without a word. Its EAGLE-3 layer adds the feature without its norm to the
    stream, has no norm over all fused states together, and takes the target's own embedding whatever the folder holds.
    """
    config = read_head(Path(head_dir))
    unknown = [flag for flag in ("norm_before_residual", "norm_before_fc") if config[flag]]
    if config["hidden_size"] != config["target_hidden_size"]:
        unknown.append(f"hidden_size {config['hidden_size']} beside target_hidden_size {config['target_hidden_size']}")
    if unknown:
        raise ValueError(
            f"{Path(head_dir) / CONFIG} has {', '.join(unknown)}, which SGLang ignores; serve the head with vLLM (export it to vllm), or "
            "train one without (fc_norm and norm_output are known to SGLang)"
        )
    return export_eagle3(head_dir, out, dtype=dtype, embed_VW=embed_VW)


def flat_config(config: dict[str, Any], made_with: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of the flat EAGLE-3 folder, for a head's own config.json (`VARIANTS` filled in) and made_with.json.

    vLLM takes the top-level layer ids as hs[i]; SGLang and TensorRT-LLM take the nested ones as outputs of layer i, hs[i + 1].
    transformers 5 reads `rope_parameters` and `dtype`; older readers `rope_theta`, `rope_scaling` and `torch_dtype`.
    """
    ids = config["layer_ids"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "dtype": dtype,
        "num_hidden_layers": config["num_hidden_layers"],
        **{key: config[key] for key in COPIED},
        **rope_spellings(config["rope_parameters"]),
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
        **{flag: config[flag] for flag in FLAGS},
        **_window(config),
        "num_aux_hidden_states": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids],
            "use_aux_hidden_state": True,
            "norm_before_fc": config["norm_before_fc"],
            "return_hidden_post_norm": config["norm_output"],  # TensorRT-LLM's name for it
            "next_layer_regular": True,
        },
        "spectrain": _record(config, made_with),
    }


def export_speculators(
    head_dir: Path, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None, verifier: Mapping[str, Any] | None = None
) -> Path:  # fmt: skip
    """Writes the folder of the speculators format, which vLLM serves with the target that it names; returns `out`.

    It holds the target's embedding (`embed_VW`, needed): the package takes what lies in memory where it is missing.
    verifier: `name_or_path` and `architectures` of the target; None: by the name that it was loaded under in training. The other arguments,
    errors: `export_eagle3`.
    """
    found = prepare(head_dir, out, dtype=dtype, embed_VW=embed_VW, with_embedding=True)
    named = speculators_names(found.tensors)
    verifier = verifier or {"name_or_path": found.made_with["target"], "architectures": []}
    write_folder(found.out, speculators_config(found.config, found.made_with, found.dtype, verifier), named, beside=found.beside)
    return out


def speculators_config(config: dict[str, Any], made_with: dict[str, Any], dtype: str, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the speculators format. Every flag is there: what vLLM and the package fill in for a missing one differs.

    vLLM builds the head of `transformer_layer_config` alone and counts the fused states there; layer ids are hs[i].
    """
    flat = flat_config(config, made_with, dtype)
    beside = {*FLAGS, "draft_vocab_size", "target_hidden_size", "architectures", "eagle_aux_hidden_state_layer_ids", "eagle_config", "bias"}
    draft = {"proposal_type": "greedy", "speculative_tokens": DRAFTS, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    note = {"note": OTHER_WIDTH} if config["hidden_size"] != config["target_hidden_size"] else {}
    return {
        "architectures": ["Eagle3Speculator"],
        SPECULATORS: "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [draft],
            "verifier": dict(verifier),
        },
        "transformer_layer_config": {
            "architectures": ["LlamaForCausalLM"],
            **{key: value for key, value in flat.items() if key not in {*beside, "spectrain"}},
        },
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        **{flag: config[flag] for flag in FLAGS},
        "eagle_aux_hidden_state_layer_ids": list(config["layer_ids"]),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "spectrain": _record(config, made_with) | note,
    }


def _record(config: dict[str, Any], made_with: dict[str, Any]) -> dict[str, Any]:
    """What a folder says of the head beside what engines read."""
    return {
        **made_with,
        "format": FORMAT,
        "head": config["head"],
        "hs_layer_ids": list(config["layer_ids"]),
        "target_layers": config["target_layers"],
        "embedding": "shared" if config["hidden_size"] == config["target_hidden_size"] else "own",
    }


def _window(config: dict[str, Any]) -> dict[str, Any]:
    """A window of w keys, the own one among them, on every layer. vLLM looks at the kind of each layer and only then at the width."""
    if config["sliding_window"] is None:
        return {}
    return {"sliding_window": config["sliding_window"], "layer_types": ["sliding_attention"] * config["num_hidden_layers"]}


def read_head(head_dir: Path) -> dict[str, Any]:
    """config.json with every variant filled in, of a head that the flat format can express."""
    check_files(head_dir)
    config = VARIANTS | read_json(head_dir / CONFIG)
    _check_config(config, head_dir)
    return config


def _check_config(config: dict[str, Any], head_dir: Path) -> None:
    """Refuses a config that the flat format cannot express: every key that changes the forward pass must be known here."""
    where = head_dir / CONFIG
    if config.get("head") != "eagle3":
        raise ValueError(f"{where} says head {config.get('head')!r}, the flat format needs eagle3; train a head with an eagle3 recipe")
    if config.get("format") != FORMAT:
        raise ValueError(f"{where} says format {config.get('format')!r}, needed {FORMAT}; use the spectrain version that saved this head")
    missing, unknown = sorted(CONFIG_KEYS - config.keys()), sorted(config.keys() - CONFIG_KEYS - VARIANTS.keys())
    if missing or unknown:
        raise ValueError(
            f"{where} lacks {', '.join(missing) or 'nothing'} and has unknown keys {', '.join(unknown) or 'none'}; "
            "use the spectrain version that saved this head"
        )
    if bad := [f"{key} {config[key]!r}" for key in WHOLE if type(config[key]) is not int or config[key] < 1]:
        raise ValueError(f"{where} has {', '.join(bad)}; positive whole numbers were needed: train the head again")
    if config["hidden_act"] != "silu":
        raise ValueError(f"{where} has hidden_act {config['hidden_act']!r}; engines build EAGLE-3 layers with silu only: train with silu")
    _check_variants(config, where)
    rope = config["rope_parameters"]
    if not isinstance(rope, dict) or not {"rope_type", "rope_theta"} <= rope.keys():
        raise ValueError(
            f"{where} has rope_parameters {rope!r}; one set with rope_type and rope_theta was needed: copy the settings of the "
            "target's full-attention layers"
        )
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(
            f"{where} has partial_rotary_factor {part}, needed none; the head turns the whole of each attention head, and an engine would "
            "turn a part: remove the factor from rope_parameters"
        )
    _check_layers(config["layer_ids"], config["target_layers"], where)


def _check_variants(config: dict[str, Any], where: Path) -> None:
    window = config["sliding_window"]
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"{where} has sliding_window {window!r}; a positive whole number or null was needed: train the head again")
    if bad := [f"{flag} {config[flag]!r}" for flag in FLAGS if type(config[flag]) is not bool]:
        raise ValueError(f"{where} has {', '.join(bad)}; true or false was needed: train the head again")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"{where} has hidden_size {width} and num_attention_heads {heads}; engines need a width that the heads divide: train a head "
            f"of a hidden_size that is a multiple of {heads}"
        )


def _check_layers(ids: Any, num_layers: int, where: Path) -> None:
    """Engines sort and de-duplicate the ids, and SGLang captures neither the embeddings hs[0] nor the last state."""
    sound = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
    if not sound or sorted(set(ids)) != ids or ids[0] < 1 or ids[-1] >= num_layers:
        raise ValueError(
            f"{where} has layer_ids {ids!r}; rising numbers from 1 to {num_layers - 1} were needed (states after that many of the "
            f"target's {num_layers} layers): train the head with such states"
        )


def _own_embedding(projection_HW: Tensor | None, embed_VW: Tensor | None, config: dict[str, Any], head_dir: Path) -> Tensor:
    """The table [V, H] that a head reads: the target's embedding, through the projection of a head of another width."""
    shape = (config["vocab_size"], config["target_hidden_size"])
    if embed_VW is None or tuple(embed_VW.shape) != shape:
        found = "none was given" if embed_VW is None else f"{list(embed_VW.shape)} was given"
        raise ValueError(
            f"{head_dir} is {config['hidden_size']} wide and its target {config['target_hidden_size']}; this folder holds an embedding "
            f"table made from the target's {list(shape)} ({found}): name the target when exporting"
        )
    embed_VW = embed_VW.detach().cpu()
    return embed_VW if projection_HW is None else (embed_VW.float() @ projection_HW.float().T).to(projection_HW.dtype)


def _check_shapes(tensors: dict[str, Tensor], config: dict[str, Any], head_dir: Path) -> None:
    """Refuses missing, unexpected and misshapen tensors. The flat format would drop or misread them silently."""
    where, needed = head_dir / WEIGHTS, head_shapes(config)
    if missing := sorted(needed.keys() - tensors.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}; save the head again with save_head, which writes all of its tensors")
    if unexpected := sorted(tensors.keys() - needed.keys()):
        raise ValueError(
            f"{where} holds {', '.join(unexpected)}, for which the flat EAGLE-3 format has no place; save the head again with "
            "save_head (embedding and rotary tables are the target's and are not saved)"
        )
    fc = tuple(tensors["fc.weight"].shape)
    if fc != needed["fc.weight"]:
        raise ValueError(
            f"{where}: fc.weight is {list(fc)}, needed {list(needed['fc.weight'])} ({len(config['layer_ids'])} layer_ids times "
            f"target_hidden_size {config['target_hidden_size']}); put the layers the head was trained on into {CONFIG}, or train again"
        )
    wrong = [f"{name} {list(tensors[name].shape)}, needed {list(shape)}" for name, shape in needed.items() if tensors[name].shape != shape]
    if wrong:
        raise ValueError(f"{where} does not fit {CONFIG}: {'; '.join(wrong)}; export the folder as training saved it")


def _check_vocabulary(tensors: dict[str, Tensor], vocab_size: int, trained: str, head_dir: Path) -> None:
    """Holds d2t (target id − draft id) and t2d (drafted or not) to one rising list of target ids, that of training by its hash."""
    where, d2t_D, t2d_V = head_dir / WEIGHTS, tensors["d2t"], tensors["t2d"]
    if d2t_D.dtype != torch.int64 or t2d_V.dtype != torch.bool:
        raise ValueError(f"{where}: d2t is {d2t_D.dtype} and t2d {t2d_V.dtype}, needed int64 and bool; build them with draft_vocabulary")
    ids_D = torch.arange(len(d2t_D)) + d2t_D
    if not (0 <= int(ids_D.min()) and int(ids_D.max()) < vocab_size):
        raise ValueError(
            f"{where}: d2t leads to target ids {int(ids_D.min())} to {int(ids_D.max())}, needed 0 to {vocab_size - 1}; d2t holds "
            "offsets (target id − draft id), not ids: build it with draft_vocabulary"
        )
    if (falls := int((ids_D.diff() <= 0).sum())) > 0:
        raise ValueError(
            f"{where}: the target ids of d2t fall or repeat at {falls} places, needed rising ids; d2t holds offsets (target id − draft "
            "id), not ids: build it with draft_vocabulary"
        )
    if not torch.equal(t2d_V.nonzero().flatten(), ids_D):
        raise ValueError(
            f"{where}: the {int(t2d_V.sum())} tokens marked in t2d are not the {len(ids_D)} target ids of d2t, needed the same; d2t holds "
            "offsets (target id − draft id), not ids: build both with draft_vocabulary"
        )
    if (found := vocabulary_hash(ids_D)) != trained:
        raise ValueError(
            f"{where}: the draft vocabulary has hash {found[:12]}…, needed {trained[:12]}… of {MADE_WITH}; export the folder as training "
            "saved it"
        )
