"""Medusa heads as vLLM has them, and as the original code, TGI and TensorRT-LLM do (arXiv 2401.10774); and both read back.

Legend: K heads, W target width, V target vocabulary, D draft vocabulary.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.export.folder import FORMAT, MEDUSA_PICKLED, MEDUSA_WEIGHTS, build, cast, check_destination, open_head, write_folder
from spectrain.export.layout import check_dims, whole_numbers
from spectrain.export.told import Record, read_told
from spectrain.heads.base import LAST
from spectrain.target.model import Target

MAP = "token_map"  # target ids of the draft vocabulary
BLOCK = re.compile(r"(?:blocks\.(\d+)\.layers|(\d+))\.(\d+)\.(?:linear\.)?(weight|bias)")  # head, block, parameter: vLLM's, original
OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.\d+\.weight")


def export_vllm(head_dir: Path, out: Path, *, dtype: str | None = None) -> Path:
    """Writes the folder that vLLM loads with the method medusa; returns `out`. dtype, errors: `export_head`.

    Rows are written for the whole vocabulary (`whole_rows`): vLLM's own cut of it (`truncated_vocab_size` below vocab_size) takes no output
    layers of the heads' own, and 0.32 does not load it at all ("token_map not initialized"). The token_map here is for an import; vLLM
    passes it over.
    """
    head, tensors, made_with = open_head(head_dir)
    destination = check_destination(out)
    tensors, dtype = cast(tensors, dtype, head_dir)
    c, named = head.config, dict[str, Tensor]()
    for name, tensor in tensors.items():
        layer, number, *rest = name.split(".")
        if layer == "heads":
            named[f"blocks.{number}.layers.{rest[0]}.{rest[-1]}"] = tensor
        else:
            output = "lm_head.weight" if c.shared_output else f"lm_heads.{number}.weight"
            named[output] = whole_rows(tensor, head.target_ids, c.vocab_size)
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": c.num_heads, "num_hidden_layers": c.num_layers,
        "original_lm_head": c.shared_output, "truncated_vocab_size": c.vocab_size, **_described(head, made_with, dtype),
    }  # fmt: skip
    write_folder(destination, config, named | map_of(head))
    return out


def export_original(head_dir: Path, out: Path, *, dtype: str | None = None, verifier: Mapping[str, Any] | None = None) -> Path:
    """Writes the folder of the original code: its pickle, and the same tensors for TGI and TensorRT-LLM; returns `out`.

    verifier: see `export_head`; TGI loads the target that the folder names.

    Every head has rows for the whole vocabulary there (`whole_rows`). ValueError for several blocks a head: the original builds one block
    and runs it several times.
    """
    head, tensors, made_with = open_head(head_dir)
    c, named = head.config, dict[str, Tensor]()
    if c.num_layers > 1:
        raise ValueError(
            f"{head_dir} has {c.num_layers} blocks a head (num_layers), the original code one that it runs {c.num_layers} times; export it "
            "to vllm, or train one with --set head.num_layers=1"
        )
    destination = check_destination(out)
    tensors, dtype = cast(tensors, dtype, head_dir)
    for k in range(c.num_heads):
        for parameter in ("weight", "bias"):
            named[f"{k}.0.linear.{parameter}"] = tensors[f"heads.{k}.0.linear.{parameter}"]
        rows_VW = whole_rows(tensors[f"lm_head.{0 if c.shared_output else k}.weight"], head.target_ids, c.vocab_size)
        named[f"{k}.1.weight"] = rows_VW.clone() if c.shared_output and k else rows_VW  # one file does not hold one storage twice
    config = {
        "medusa_num_heads": c.num_heads, "medusa_num_layers": c.num_layers, "version": "2",
        "base_model_name_or_path": verifier["name_or_path"] if verifier else made_with["target"],
        **_described(head, made_with, dtype),
    }  # fmt: skip
    named |= map_of(head)
    write_folder(destination, config, named, weights=MEDUSA_WEIGHTS, pickled={MEDUSA_PICKLED: named})
    return out


def whole_rows(rows_DW: Tensor, target_ids: Tensor, vocab_size: int) -> Tensor:
    """Output rows [V, W] for a format without draft vocabularies. Ids that the head does not draft have the mean of its rows: their logit
    is the mean of its logits, which the largest one is never below."""
    if len(rows_DW) == vocab_size:
        return rows_DW
    rows_VW = rows_DW.float().mean(0).to(rows_DW.dtype).repeat(vocab_size, 1)
    rows_VW[target_ids] = rows_DW
    return rows_VW


def _described(head: Any, made_with: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """What both layouts say alike. vLLM takes any top-level key with `num` and `heads` or `layers` in it for a size."""
    c = head.config
    return {
        "hidden_size": c.target_hidden_size, "vocab_size": c.vocab_size, "medusa_fc_bias": True, "torch_dtype": dtype, "dtype": dtype,
        "spectrain": {
            **made_with, "format": FORMAT, "head": "medusa", "shared_output": c.shared_output, "target_layers": c.target_layers,
        },
    }  # fmt: skip


def map_of(head: Any) -> dict[str, Tensor]:
    """The draft vocabulary, where it is not the whole one."""
    return {} if head.config.draft_vocab_size == head.config.vocab_size else {MAP: head.target_ids}


def read_medusa(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> tuple[Any, tuple[str, ...]]:
    """The head in a folder of either layout, in float32, and what was concluded. The numbers of heads and blocks are those of the tensors.

    Output layers that are missing are the target's, one for all. ValueError for tensors that are no part of a Medusa head, or too few.
    """
    blocks, outputs, notes, told = dict[str, Tensor](), dict[str, Tensor](), list[str](), read_told(Record, config, folder)
    for name, tensor in tensors.items():
        bare = re.sub(r"^medusa_heads?\.", "", name)
        if found := OUTPUT.fullmatch(bare):
            outputs[found[1] or found[2]] = tensor
        elif bare == "lm_head.weight":
            outputs["shared"] = tensor
        elif found := BLOCK.fullmatch(bare):
            blocks[f"heads.{found[1] or found[2]}.{found[3]}.linear.{found[4]}"] = tensor
        elif bare != MAP:
            raise ValueError(f"{folder} holds {name}, which is no part of a Medusa head; a head of residual blocks was needed")
    heads = len({name.split(".")[1] for name in blocks})
    layers = len({name.split(".")[2] for name in blocks})
    if not outputs and not told.model_fields_set:  # a folder of ours always has them
        outputs["shared"] = target.output_VW.detach().cpu().clone()  # the head is trained, the target is not
        notes.append("no output layers: the target's rows, one layer for all heads")
    rows_K = list(outputs.values())
    check_dims(dict(enumerate(rows_K)), dict.fromkeys(range(len(rows_K)), 2), folder)
    shared = "shared" in outputs or (bool(told.spectrain.shared_output) and all(torch.equal(rows_K[0], rows) for rows in rows_K[1:]))
    named = {"shared"} if "shared" in outputs else {str(k) for k in range(heads)}
    if not blocks or outputs.keys() != named:
        raise ValueError(f"{folder} has blocks of {heads} heads and {len(outputs)} output layers; download the whole folder")
    rows_K = rows_K[:1] if shared else [outputs[str(k)] for k in range(heads)]
    width = rows_K[0].shape[1]
    if width != target.output_VW.shape[1]:
        raise ValueError(f"{folder} is for a target of width {width}, {target.name} is {target.output_VW.shape[1]} wide; load its target")
    ids_D, order_D = drafted(tensors.get(MAP), len(rows_K[0]), target, folder, notes)
    state = dict(blocks)
    if not any(name.endswith("bias") for name in blocks):
        state |= {f"heads.{k}.{j}.linear.bias": torch.zeros(width) for k in range(heads) for j in range(layers)}
    whole = torch.equal(order_D, torch.arange(len(rows_K[0])))  # then nothing is copied
    state |= {f"lm_head.{k}.weight": rows if whole else rows[order_D] for k, rows in enumerate(rows_K)}
    fields = {
        "target_hidden_size": width, "num_heads": heads, "num_layers": layers, "shared_output": shared, "vocab_size": target.vocab_size,
        "draft_vocab_size": len(ids_D), "layer_ids": (LAST,), "target_layers": target.num_layers,
    }  # fmt: skip
    return build("medusa", fields, state, ids_D, config, folder), tuple(notes)


def drafted(map_D: Tensor | None, rows: int, target: Target, where: Path, notes: list[str]) -> tuple[Tensor, Tensor]:
    """Target ids that are drafted, rising, and the row of each in the output layers."""
    if rows not in (target.vocab_size, None if map_D is None else map_D.numel()):
        found = f"output layers of {rows} rows, {target.name} has {target.vocab_size} ids"
        raise ValueError(f"{where}: {found}; name the target that the head was made for")
    if map_D is None:
        ids_D = torch.arange(min(rows, target.num_ids))
        if len(ids_D) < rows:
            notes.append(f"rows from {len(ids_D)} on are no tokens of the tokenizer: left out")
        return ids_D, ids_D
    if not whole_numbers(map_D):
        raise ValueError(f"{where}: {MAP} is no list of ids; download the folder again")
    ids_D, order_D = map_D.long().sort()
    if not 0 <= int(ids_D[0]) <= int(ids_D[-1]) < target.vocab_size:
        found = f"{MAP} names ids from {int(ids_D[0])} to {int(ids_D[-1])}, {target.name} has {target.vocab_size}"
        raise ValueError(f"{where}: {found}; name the target that the head was made for")
    return ids_D, ids_D if rows == target.vocab_size else order_D
