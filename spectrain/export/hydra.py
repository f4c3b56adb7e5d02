"""Hydra++ heads (arXiv 2402.05109) as their original code has them, and read back. No engine reads them.

There the prefix layer is a Llama model of one layer with the target's sizes and positions, so a norm follows it; output layers have a bias;
of several residual blocks a head, those after the first are one and the same. `head.original` trains heads that fit.

Legend: H width of head and target, V target vocabulary, D draft vocabulary.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.config import HeadConfig
from spectrain.export.folder import FORMAT, HYDRA_PICKLED, build, cast, check_destination, open_head, write_folder
from spectrain.export.layout import check_dims
from spectrain.export.medusa import MAP, drafted, map_of, whole_rows
from spectrain.export.told import Record, read_told
from spectrain.heads.base import head_class
from spectrain.target.model import Target
from spectrain.training.setup import head_sizes

LAYER, NORM = "prefix_embeding_layer.layers.0.", "prefix_embeding_layer.norm.weight"  # their spelling
UNREAD = re.compile(r"^prefix_embeding_layer\.embed_tokens\.")  # the layer is given states, never tokens
BLOCK, OUTPUT = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)"), re.compile(r"hydra_lm_head\.(\d+)\.1\.(weight|bias)")


class HydraTold(Record):
    """config.json of the original code."""

    hydra_head_arch: str | None = None
    grounded_heads: bool | None = None
    hidden_state_offset: int | None = None


def export_original(head_dir: Path, out: Path, *, dtype: str | None = None, verifier: Mapping[str, Any] | None = None) -> Path:
    """Writes the folder of the original code, its pickle; returns `out`. dtype, errors: `export_head`.

    Every head has rows for the whole vocabulary there (`whole_rows`). ValueError for a head without norm and biases, with a window, or
    with further blocks that differ.
    """
    head, tensors, made_with = open_head(head_dir)
    c = head.config
    if not c.original:
        raise ValueError(
            f"{head_dir} has no norm after its prefix layer and no biases in its output layers, as the original code always has: draft "
            "with it in spectrain generate, or train one with --set head.original=true"
        )
    if c.sliding_window is not None:
        raise ValueError(f"{head_dir} has sliding_window {c.sliding_window}, and the original code gives the prefix layer none")
    _check_blocks(tensors, c.num_heads, c.num_layers, head_dir)
    destination = check_destination(out)
    tensors, dtype = cast(tensors, dtype, head_dir)
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part, number, *rest = name.split(".")
        if part == "prefix":
            named[LAYER + name.removeprefix("prefix.")] = tensor
        elif part == "prefix_norm":
            named[NORM] = tensor
        elif part == "heads":
            named[f"hydra_mlp.{number}.{2 * int(rest[0]) + 1}.{'.'.join(rest[1:])}"] = tensor
        else:
            rows_DX = tensor if tensor.dim() == 2 else tensor[:, None]
            named[f"hydra_lm_head.{number}.1.{rest[0]}"] = whole_rows(rows_DX, head.target_ids, c.vocab_size).reshape(-1, *tensor.shape[1:])
    config = {
        "hydra_num_heads": c.num_heads, "hydra_num_layers": c.num_layers, "hydra_head_arch": "prefix-mlp", "grounded_heads": True,
        "hidden_state_offset": 0, "torch_dtype": dtype,
        "base_model_name_or_path": verifier["name_or_path"] if verifier else made_with["target"],
        "spectrain": {**made_with, "format": FORMAT, "head": "hydra", "target_layers": c.target_layers},
    }  # fmt: skip
    write_folder(destination, config, {}, weights=None, pickled={HYDRA_PICKLED: named | map_of(head)})
    return out


def _check_blocks(tensors: Mapping[str, Tensor], heads: int, blocks: int, head_dir: Path) -> None:
    differ = [
        f"heads.{k}.{j}" for k in range(heads) for j in range(2, blocks) for name in ("linear.weight", "linear.bias")
        if not torch.equal(tensors[f"heads.{k}.{j}.{name}"], tensors[f"heads.{k}.1.{name}"])
    ]  # fmt: skip
    if differ:
        raise ValueError(
            f"{head_dir} has {blocks} blocks a head (num_layers), of which the original code runs the second one {blocks - 1} times, and "
            f"{differ[0]} is another; train one with --set head.num_layers=2"
        )


def read_hydra(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> tuple[Any, tuple[str, ...]]:
    """The head in a folder of the original code, in float32, and what was concluded. The numbers of heads and blocks are those of the
    tensors, the sizes of the prefix layer the target's, as the original builds it. ValueError for another of its architectures."""
    _check_told(read_told(HydraTold, config, folder), tensors, folder)
    notes, (state, outputs) = list[str](), _named(tensors, folder)
    heads = len({name.split(".")[1] for name in state if name.startswith("heads.")})
    blocks = len({name.split(".")[2] for name in state if name.startswith("heads.")})
    weights = {name: tensor for name, tensor in outputs.items() if name.endswith("weight")}
    if not heads or weights.keys() != {f"lm_head.{k}.weight" for k in range(heads)}:
        raise ValueError(f"{folder} has blocks of {heads} heads and {len(weights)} output layers; download the whole folder")
    check_dims(weights, dict.fromkeys(weights, 2), folder)
    rows = len(weights["lm_head.0.weight"])
    ids_D, order_D = drafted(tensors.get(MAP), rows, target, folder, notes)
    if odd := [name for name, tensor in outputs.items() if len(tensor) != rows]:
        raise ValueError(f"{folder}: {', '.join(odd)} are not of {rows} rows, as the first output layer is; download the folder again")
    state |= {name: tensor[order_D] for name, tensor in outputs.items()}
    cls = head_class("hydra")
    sizes = head_sizes(HeadConfig(kind="hydra", original=True), target)
    fields = {name: value for name, value in sizes.items() if name in cls.Config.model_fields} | {
        "num_heads": heads, "num_layers": blocks, "draft_vocab_size": len(ids_D),
    }  # fmt: skip
    return build("hydra", fields, state, ids_D, config, folder), tuple(notes)


def _check_told(told: HydraTold, tensors: Mapping[str, Tensor], folder: Path) -> None:
    sound = (told.hydra_head_arch or "prefix-mlp") == "prefix-mlp" and told.grounded_heads is not False and not told.hidden_state_offset
    if not sound or NORM not in tensors:
        found = ", ".join(f"{name} {value}" for name, value in told.model_dump(exclude={"spectrain"}).items())
        has = "" if NORM in tensors else f", without {NORM}"
        raise ValueError(f"{folder} holds a Hydra head of {found}{has}; a grounded prefix-mlp, offset 0, was needed: train one here")


def _named(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors by the head's names, those of the output layers apart."""
    state, outputs = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if found := BLOCK.fullmatch(name):
            state[f"heads.{found[1]}.{int(found[2]) // 2}.{found[3]}"] = tensor
        elif found := OUTPUT.fullmatch(name):
            outputs[f"lm_head.{found[1]}.{found[2]}"] = tensor
        elif name.startswith(LAYER):
            state["prefix." + name.removeprefix(LAYER)] = tensor
        elif name == NORM:
            state["prefix_norm.weight"] = tensor
        elif name != MAP and not UNREAD.match(name):
            raise ValueError(f"{folder} holds {name}, which is no part of a Hydra head; a head of residual blocks was needed")
    return state, outputs
