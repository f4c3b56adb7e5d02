"""Writes a trained head as the folder that serving engines load, and the command line that serves it.

Legend: H width of the head, V target vocabulary, D draft vocabulary. Layer numbers here are hs[i], the residual stream after i layers.
"""

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.export.folder import FORMAT, MADE_WITH, TOKEN_MAP, cast, check_destination, read_made_with, write_folder
from spectrain.export.layout import (
    CONFIG,
    COPIED,
    EMBEDDING,
    FLAGS,
    PROJECTION,
    SIZES,
    TABLES,
    VARIANTS,
    WEIGHTS,
    flat_names,
    head_shapes,
    read_json,
    read_tensors,
    rope_spellings,
)
from spectrain.heads.base import vocabulary_hash

FORMATS: dict[str, dict[str, str]] = {  # by the kind of the head
    "eagle3": {"eagle3": "spectrain.export.engines:export_eagle3"},
    "vllm": {
        "eagle3": "spectrain.export.engines:export_eagle3",
        "medusa": "spectrain.export.medusa:export_vllm",
        "eagle": "spectrain.export.eagle1:export_vllm",
    },
    "sglang": {"eagle3": "spectrain.export.engines:export_sglang", "eagle": "spectrain.export.eagle1:export_sglang"},
    "medusa": {"medusa": "spectrain.export.medusa:export_original"},
    "eagle": {"eagle": "spectrain.export.eagle1:export_original"},
}
HYDRA = (
    "no engine reads Hydra heads, and the folders of their original code norm the prefix state once more, which these heads do not: draft "
    "with it in spectrain generate, or train a head of another kind for an engine"
)
WHOLE = (*SIZES, "num_hidden_layers", "target_layers")  # positive whole numbers
CONFIG_KEYS = {"head", "format", "rope_parameters", "layer_ids", "target_layers", *COPIED}


def export_head(
    head_dir: Path, to: str, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None, output_VW: Tensor | None = None
) -> Path:
    """Writes the head in `head_dir` to `out` in the format named `to`, one of FORMATS; returns `out`.

    dtype: "float32", "bfloat16" or "float16" of every weight; None keeps what the head was saved in. embed_VW, output_VW: the target's
    embedding and output rows, where `needs_target` says so. ValueError for an unknown format, or one that has no place for such a head.
    """
    if to not in FORMATS:
        raise ValueError(f"export format {to!r} is unknown; choose one of {', '.join(FORMATS)}")
    kind = _kind(head_dir)
    if kind not in FORMATS[to]:
        others = [name for name, kinds in FORMATS.items() if kind in kinds]
        way_out = f"export it to {' or '.join(others)}" if others else HYDRA if kind == "hydra" else "train one of another kind"
        raise ValueError(f"{head_dir} holds a head of kind {kind!r}, which the format {to} has no place for; {way_out}")
    module, function = FORMATS[to][kind].split(":")
    rows = {"eagle3": {"embed_VW": embed_VW}, "eagle": {"embed_VW": embed_VW, "output_VW": output_VW}}.get(kind, {})
    path: Path = getattr(importlib.import_module(module), function)(Path(head_dir), out, dtype=dtype, **rows)
    return path


def needs_target(head_dir: Path) -> bool:
    """Whether `export_head` must be given the target's embedding and output rows: for EAGLE-1 heads, whose output layer an engine takes
    from the target, and for those of another width than the target."""
    if (kind := _kind(head_dir)) != "eagle3":
        return kind == "eagle"
    config = _read_head(Path(head_dir))
    return bool(config["hidden_size"] != config["target_hidden_size"])


def _kind(head_dir: Path) -> Any:
    _check_files(Path(head_dir))
    return read_json(Path(head_dir) / CONFIG).get("head")


def export_eagle3(head_dir: Path, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None) -> Path:
    """Writes the flat EAGLE-3 folder (config.json, model.safetensors) that vLLM, SGLang and TensorRT-LLM load; returns `out`.

    dtype: see `export_head`. embed_VW: the target's embedding; read where `needs_target` says so, to write an embedding table of the head's
    width; else the embedding is the target's and is not written. The folder appears whole or not at all, and replaces an earlier export.
    ValueError for a head that is incomplete, inconsistent or of another kind, and for an `out` that holds something else. Heads: EAGLE-3,
    arXiv 2503.01840.
    """
    head_dir = Path(head_dir)
    config, made_with = _read_head(head_dir), read_made_with(head_dir)
    destination = check_destination(out)
    tensors = read_tensors(head_dir / WEIGHTS)
    _check_shapes(tensors, config, head_dir)
    _check_vocabulary(tensors, config["vocab_size"], made_with["vocabulary_sha256"], head_dir)
    if PROJECTION in tensors:
        tensors[EMBEDDING] = _own_embedding(tensors.pop(PROJECTION), embed_VW, config, head_dir)
    tensors, dtype = cast(tensors, dtype, head_dir)
    if config["draft_vocab_size"] == config["vocab_size"]:
        # A full head needs no map, and vLLM refuses a `d2t` that it has no parameter for.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in TABLES}
    write_folder(destination, flat_config(config, made_with, dtype), flat_names(tensors, config["num_hidden_layers"]))
    return out


def export_sglang(head_dir: Path, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None) -> Path:
    """`export_eagle3` for a head that SGLang computes as it was trained; ValueError for one that it would compute otherwise.

    SGLang skips options and tensors that it does not know without a word. Its EAGLE-3 layer adds the feature without its norm to the
    stream, has no norm over all fused states together, and takes the target's own embedding whatever the folder holds.
    """
    config = _read_head(Path(head_dir))
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
        "spectrain": {
            **made_with,
            "format": FORMAT,
            "head": config["head"],
            "hs_layer_ids": list(ids),
            "target_layers": config["target_layers"],
            "embedding": "shared" if config["hidden_size"] == config["target_hidden_size"] else "own",
        },
    }


def serve_command(out: Path, target: str, *, engine: str = "vllm", num_speculative_tokens: int) -> str:
    """The shell command that serves `target` with the head exported to `out`, drafting a chain of `num_speculative_tokens` a round.

    engine: "vllm" or "sglang". ValueError for another engine, less than one token, or more than a Medusa head has heads.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}; an engine drafts at least 1 token a round")
    config = read_json(out / CONFIG) if (out / CONFIG).is_file() else {}
    kind = config.get("spectrain", {}).get("head", "eagle3")
    if kind == "medusa" and num_speculative_tokens > (heads := config.get("num_heads") or config["medusa_num_heads"]):
        raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}, {out} has {heads} heads; an engine runs as many at most")
    if engine == "vllm":
        speculation = {"method": kind, "model": str(out), "num_speculative_tokens": num_speculative_tokens}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculation)])
    if engine == "sglang":
        chain = {
            "model-path": target,
            "speculative-algorithm": kind.upper(),  # for an EAGLE-3 head plain EAGLE would skip fc
            "speculative-draft-model-path": str(out),
            "speculative-num-steps": num_speculative_tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": num_speculative_tokens + 1,  # counts the token in hand
        }
        if window := config.get("sliding_window"):
            chain["speculative-draft-window-size"] = window - 1  # keys before the own one; no key of the config is read
        if (out / TOKEN_MAP).is_file():
            chain["speculative-token-map"] = str(out / TOKEN_MAP)
        arguments = [part for key, value in chain.items() for part in (f"--{key}", str(value))]
        return shlex.join(["python", "-m", "sglang.launch_server", *arguments])
    raise ValueError(f"engine {engine!r} is unknown; choose vllm or sglang")


def _window(config: dict[str, Any]) -> dict[str, Any]:
    """A window of w keys, the own one among them, on every layer. vLLM looks at the kind of each layer and only then at the width."""
    if config["sliding_window"] is None:
        return {}
    return {"sliding_window": config["sliding_window"], "layer_types": ["sliding_attention"] * config["num_hidden_layers"]}


def _read_head(head_dir: Path) -> dict[str, Any]:
    """config.json with every variant filled in, of a head that the flat format can express."""
    _check_files(head_dir)
    config = VARIANTS | read_json(head_dir / CONFIG)
    _check_config(config, head_dir)
    return config


def _check_files(head_dir: Path) -> None:
    if missing := [name for name in (CONFIG, WEIGHTS, MADE_WITH) if not (head_dir / name).is_file()]:
        raise ValueError(
            f"{head_dir} lacks {', '.join(missing)}; a head directory with {CONFIG}, {WEIGHTS} and {MADE_WITH} was needed: give the "
            "folder of a finished training"
        )


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


def _own_embedding(projection_HW: Tensor, embed_VW: Tensor | None, config: dict[str, Any], head_dir: Path) -> Tensor:
    """The table [V, H] that a head of another width than the target reads: the target's embedding through the head's projection."""
    shape = (config["vocab_size"], config["target_hidden_size"])
    if embed_VW is None or tuple(embed_VW.shape) != shape:
        found = "none was given" if embed_VW is None else f"{list(embed_VW.shape)} was given"
        raise ValueError(
            f"{head_dir} is {config['hidden_size']} wide and its target {config['target_hidden_size']}; an engine needs the head's own "
            f"embedding table, made from the target's {list(shape)} ({found}): name the target when exporting"
        )
    return (embed_VW.float().cpu() @ projection_HW.float().T).to(projection_HW.dtype)


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
