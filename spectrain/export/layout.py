"""The flat EAGLE-3 folder: its files, the options that change the forward pass, and the names of tensors in it and in the head.

A head names its first decoder layer `midlayer` and those above it `above.0`, `above.1`, ... In a flat folder one layer is `midlayer` and
several are `layers.0`, `layers.1`, ...: vLLM and SGLang read both spellings of the first one.

Legend: H width of the head, W of the target, V target vocabulary, D draft vocabulary.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SIZES = (
    "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "vocab_size", "draft_vocab_size",
)  # fmt: skip
COPIED = (*SIZES, "hidden_act", "rms_norm_eps")  # the same key and meaning in the head directory and in the flat folder
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
VARIANTS: dict[str, Any] = {"num_hidden_layers": 1, **dict.fromkeys(FLAGS, False), "sliding_window": None}  # where a config is silent
EMBEDDING, PROJECTION = "embed_tokens.weight", "embed_proj.weight"
TABLES = ("d2t", "t2d")
JSON_BYTES = 2**25  # a large index of parts has a tenth of it
PIECE = 2**22  # values looked at together
SPECULATORS = "speculators_model_type"  # a key of every config in the speculators format


def within(folder: Path, name: str) -> Path:
    """A file of a folder from elsewhere. ValueError for a name, or a link, that leads out of it; the Hub's cache links to its own blobs."""
    path, home = Path(folder) / name, Path(folder).resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    real = path.resolve()
    if ".." in Path(name).parts or not any(real.is_relative_to(root) for root in (home, *blobs)):
        raise ValueError(f"{folder}: {name} leads out of the folder, to {real}; files of a head lie in its own: download it again")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError for anything else, or a file that is too large to be a config."""
    if path.stat().st_size > JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, a config has {JSON_BYTES} at most; download it again")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); give the folder of a finished training") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, an object was needed; give the folder of a finished training")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; ValueError for a damaged one."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}); save or download the head again") from error


def check_dims(tensors: Mapping[Any, Tensor], dims: Mapping[Any, int], where: Path) -> None:
    """ValueError unless the tensors of these names are there and have so many dimensions."""
    if missing := [name for name in dims if name not in tensors]:
        raise ValueError(f"{where} lacks {', '.join(missing)}, which such a head has of its own; download the whole folder")
    if wrong := [f"{name} {list(tensors[name].shape)}" for name, dim in dims.items() if tensors[name].dim() != dim]:
        raise ValueError(f"{where} has {', '.join(wrong)}, which are of no such shape in a head; download the folder again")


def whole_numbers(tensor: Tensor) -> bool:
    """Whether a tensor is a list of whole numbers, as tables of ids are."""
    return tensor.dim() == 1 and not tensor.is_floating_point() and not tensor.is_complex()


def check_weights(tensors: Mapping[str, Tensor], where: Path) -> None:
    """ValueError for weights (all but the tables of a draft vocabulary) in fewer than 16 bits, NaN or infinite."""
    weights = {name: tensor for name, tensor in tensors.items() if name not in TABLES}
    if odd := {str(tensor.dtype) for tensor in weights.values() if not tensor.is_floating_point() or tensor.itemsize < 2}:
        raise ValueError(f"{where} holds weights in {', '.join(sorted(odd))}; finite weights in 16 or 32 bits were needed")
    if bad := [name for name, tensor in weights.items() if unsound(tensor)]:
        raise ValueError(f"{where} holds NaN or infinite values in {', '.join(bad)}; download the folder again")


def unsound(tensor: Tensor) -> int:
    """How many values are NaN or infinite; counted in pieces, for a table may be as large as the memory that is left."""
    return sum(int((~piece.isfinite()).sum()) for piece in tensor.flatten().split(PIECE))


def rope_spellings(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings in the spelling of transformers 5 and in the older one."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": dict(rope),
    }


def head_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of an EAGLE-3 head of this config (`VARIANTS` included) by its name in the head, with its shape."""
    width, wide = config["hidden_size"], config["target_hidden_size"]
    fused = len(config["layer_ids"]) * wide
    shapes = {"fc.weight": (width, fused), **_layer("midlayer", config, 2 * width)}
    shapes["midlayer.hidden_norm.weight"] = (width,)
    for i in range(config["num_hidden_layers"] - 1):
        shapes.update(_layer(f"above.{i}", config, width))
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (fused,)
    if config["fc_norm"]:
        shapes.update({f"fc_norm.{j}.weight": (wide,) for j in range(len(config["layer_ids"]))})
    if width != wide:
        shapes[PROJECTION] = (width, wide)
    return {
        **shapes,
        "norm.weight": (width,),
        "lm_head.weight": (config["draft_vocab_size"], width),
        "d2t": (config["draft_vocab_size"],),
        "t2d": (config["vocab_size"],),
    }


def _layer(name: str, config: Mapping[str, Any], read: int) -> dict[str, tuple[int, ...]]:
    """A decoder layer whose queries, keys and values read `read` values."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{name}.input_layernorm.weight": (width,),
        f"{name}.post_attention_layernorm.weight": (width,),
        f"{name}.self_attn.q_proj.weight": (queries, read),
        f"{name}.self_attn.k_proj.weight": (keys, read),
        f"{name}.self_attn.v_proj.weight": (keys, read),
        f"{name}.self_attn.o_proj.weight": (width, queries),
        f"{name}.mlp.gate_proj.weight": (inner, width),
        f"{name}.mlp.up_proj.weight": (inner, width),
        f"{name}.mlp.down_proj.weight": (width, inner),
    }


def flat_names(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The head's tensors under the names of a flat folder.

    From the second layer on vLLM reads `input_layernorm` and SGLang `hidden_norm`, each beside an idle parameter of the other name: the
    norm is written under both.
    """
    if layers == 1:
        return dict(tensors)
    flat = speculators_names(tensors)
    for name in [name for name in flat if re.fullmatch(r"layers\.[1-9]\d*\.input_layernorm\.weight", name)]:
        flat[name.replace("input_layernorm", "hidden_norm")] = flat[name].clone()  # one file does not hold one storage twice
    return flat


def speculators_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors under the names of the speculators format: `layers.0`, `layers.1`, ..."""
    above = {name: re.sub(r"^above\.(\d+)\.", lambda found: f"layers.{int(found[1]) + 1}.", name) for name in tensors}
    return {re.sub(r"^midlayer\.", "layers.0.", above[name]): tensor for name, tensor in tensors.items()}
