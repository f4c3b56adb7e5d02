"""Tensors of flat EAGLE-3 folders, from whichever trainer, under the names and in the form that the head has them.

Legend: H width of the head, W of the target, V target vocabulary, D draft vocabulary, F all fused states.
"""

import re
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from spectrain.export.folder import HYDRA_PICKLED, MEDUSA_PICKLED, MEDUSA_WEIGHTS, PROJECTION_FILE
from spectrain.export.layout import (
    CONFIG,
    EMBEDDING,
    PROJECTION,
    SPECULATORS,
    TABLES,
    WEIGHTS,
    check_dims,
    read_json,
    read_tensors,
    whole_numbers,
    within,
)

INDEX, PICKLED = "model.safetensors.index.json", "pytorch_model.bin"
AUTOMODEL = "eagle_meta.pt"
RENAMED = {
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",  # SGLang's older names
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
COPIES = re.compile(r"^verifier_(lm_head|norm)\.|rotary_emb\.|\.inv_freq$")  # the target's own tensors, and tables
FAMILIES = (  # what a folder holds instead, told by a key of its config or a name of its tensors
    ("a DFlash or DSpark head", r"^dflash_config$|^markov_|prefix_gru"),
    ("a P-EAGLE head", r"^mask_hidden$"),
    ("a Medusa head", r"^medusa_|^\d+\.\d+\.linear\."),
    ("a Hydra head", r"^hydra_"),
    ("a head of Qwen3 layers (its queries and keys have norms)", r"self_attn\.[qk]_norm\."),
    ("a head of DeepSeek layers", r"\.kv_a_proj_with_mqa\."),
)
ROUNDED = 2**-7  # twice what rounding to bfloat16 changes
AT_ONCE = 8192  # rows of an embedding compared or multiplied together


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and every tensor, as they are. ValueError for a folder that holds no head, or one of another family."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no flat EAGLE-3 folder: {CONFIG} is missing; give the folder that an engine would be given")
    config, tensors = open_folder(folder)
    kind = config.get(SPECULATORS, "eagle3")
    found = next((family for family, sign in FAMILIES if any(re.search(sign, name) for name in (*config, *tensors))), None)
    if kind != "eagle3" or found:
        raise ValueError(f"{folder} holds {found or f'a head of {SPECULATORS} {kind!r}'}; an EAGLE-3 head of Llama layers was needed")
    if not any(name.endswith("hidden_norm.weight") for name in tensors):
        raise ValueError(f"{folder} holds no hidden_norm.weight, so an EAGLE-1 or EAGLE-2 head, or none; an EAGLE-3 head was needed")
    return config, tensors


def open_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json (empty where there is none) and the tensors of any head, without copies of the target's own."""
    config = read_json(within(folder, CONFIG)) if (folder / CONFIG).is_file() else {}
    found = {name.removeprefix("model."): tensor for name, tensor in _weights(folder).items() if not COPIES.search(name)}
    if empty := [name for name, tensor in found.items() if not (tensor.dim() and tensor.numel())]:
        raise ValueError(f"{folder} holds no rows in {', '.join(empty)}; download the folder again")
    return config, found


def _weights(folder: Path) -> dict[str, Tensor]:
    for name in (WEIGHTS, MEDUSA_WEIGHTS):
        if (folder / name).is_file():
            return read_tensors(within(folder, name))
    if (folder / INDEX).is_file():
        return _parts(folder)
    for name in (PICKLED, MEDUSA_PICKLED, HYDRA_PICKLED):
        if (folder / name).is_file():
            found = unpickled(folder, name)
            if not isinstance(found, dict) or not all(isinstance(k, str) and plain(v) for k, v in found.items()):
                raise ValueError(f"{folder / name} holds more than named tensors; convert it to {WEIGHTS} first")
            return found
    raise ValueError(f"{folder} holds neither {WEIGHTS}, {INDEX} nor {PICKLED}; download the whole folder")


def plain(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor with a value in every place: a pickle may hold sparse ones, and ones without values."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_quantized)


def _parts(folder: Path) -> dict[str, Tensor]:
    """The tensors of the files that the index names, each from its own."""
    files = read_json(within(folder, INDEX)).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files; download the whole folder")
    paths = {file: within(folder, file) for file in sorted(set(files.values()))}
    if missing := [file for file, path in paths.items() if not path.is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names; download the whole folder")
    parts = {file: read_tensors(path) for file, path in paths.items()}
    if lost := [name for name, file in files.items() if name not in parts[file]]:
        raise ValueError(f"{folder}: {', '.join(lost)} are not in the files that {INDEX} names; download the whole folder")
    return {name: parts[file][name] for name, file in files.items()}


def unpickled(folder: Path, name: str) -> Any:
    """What a pickle holds, of plain values and tensors alone: nothing in it is run. ValueError for any other."""
    path = within(folder, name)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile one fails in any way; torch's own message advises to run whatever it holds
        raise ValueError(f"{folder / name} holds more than plain tensors, or is damaged; convert it to {WEIGHTS} first") from error


def head_names(tensors: dict[str, Tensor], where: Path, notes: list[str]) -> dict[str, Tensor]:
    """The same tensors by the head's names; biases of zeros are dropped. ValueError for biases, and for norms that contradict."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".bias"):
            if bool(tensor.any()):
                raise ValueError(f"{where}: {name} is not zero; EAGLE-3 heads here have no biases: train one instead of starting from this")
            continue
        name = re.sub(r"^(?:midlayer|layers)\.(\d+)\.", _layer_name, RENAMED.get(name, name))
        renamed[name] = tensor
    for name in [n for n in renamed if re.match(r"^above\.\d+\.hidden_norm\.weight$", n)]:
        other = name.replace("hidden_norm", "input_layernorm")
        renamed[other] = _one_norm(renamed.pop(name), renamed.get(other), name, where, notes)
    return renamed


def _layer_name(found: re.Match[str]) -> str:
    number = int(found[1])
    return f"above.{number - 1}." if number else "midlayer."


def _one_norm(hidden_H: Tensor, input_H: Tensor | None, name: str, where: Path, notes: list[str]) -> Tensor:
    """Above the first layer one norm is read and a second one may lie idle: SGLang reads `hidden_norm`, vLLM `input_layernorm`."""
    if input_H is None or torch.equal(hidden_H, input_H):
        return hidden_H
    idle = [bool((norm_H == 1).all()) for norm_H in (hidden_H, input_H)]
    if idle[0] == idle[1]:
        raise ValueError(f"{where}: {name} and input_layernorm of its layer differ, and engines read either; delete the one not trained")
    notes.append(f"{name}: the norm that was trained is taken, not the one of ones beside it")
    return input_H if idle[0] else hidden_H


def put_selected(tensors: dict[str, Tensor], where: Path, notes: list[str]) -> None:
    """Puts d2t from the file in which Automodel keeps the draft vocabulary beside its model folder, where neither table is there."""
    home = next((home for home in (where, where.resolve().parent) if (home / AUTOMODEL).is_file()), None)
    if home is None or any(name in tensors for name in TABLES):
        return
    found = unpickled(home, AUTOMODEL)
    ids_D = found.get("selected_token_ids") if isinstance(found, dict) else None
    if plain(ids_D) and whole_numbers(ids_D):
        tensors["d2t"] = ids_D.long() - torch.arange(len(ids_D))
        notes.append(f"the draft vocabulary is that of {AUTOMODEL}")


def put_vocabulary(tensors: dict[str, Tensor], vocab_size: int, where: Path, notes: list[str]) -> None:
    """Puts both tables of the draft vocabulary, with rising ids, and the output rows in their order. ValueError where they do not fit."""
    if odd := [name for name in TABLES if name in tensors and not whole_numbers(tensors[name])]:
        raise ValueError(f"{where}: {', '.join(odd)} are no tables of whole numbers; download the folder again")
    rows_DH = tensors["lm_head.weight"]
    found_V = tensors["t2d"].bool().nonzero()[:, 0] if "t2d" in tensors else None
    ids_D = _target_ids(tensors.get("d2t"), found_V, len(rows_DH), vocab_size, where, notes)
    if len(ids_D) != len(rows_DH):
        raise ValueError(f"{where}: {len(ids_D)} drafted ids for the {len(rows_DH)} rows of lm_head.weight; download the folder again")
    order_D = ids_D.argsort()
    if not torch.equal(order_D, torch.arange(len(ids_D))):
        notes.append("output rows are sorted by target id")
        ids_D, tensors["lm_head.weight"] = ids_D[order_D], rows_DH[order_D]
    tensors["d2t"] = ids_D - torch.arange(len(ids_D))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids_D, True)


def _target_ids(d2t_D: Tensor | None, marked_D: Tensor | None, rows: int, vocab_size: int, where: Path, notes: list[str]) -> Tensor:
    """Target id of every draft id. d2t holds offsets by its definition; a table of ids is told by t2d, or by leading out of range."""

    def fits(ids_D: Tensor) -> bool:
        in_range = 0 <= int(ids_D.min()) and int(ids_D.max()) < vocab_size and len(ids_D.unique()) == len(ids_D)
        return in_range and (marked_D is None or torch.equal(ids_D.sort().values, marked_D))

    if d2t_D is None and marked_D is None and rows == vocab_size:
        return torch.arange(vocab_size)
    if d2t_D is None and marked_D is None:
        raise ValueError(f"{where} drafts {rows} of {vocab_size} ids and lacks d2t, which says which; a head of another target, perhaps")
    ids_D = marked_D if d2t_D is None else torch.arange(len(d2t_D)) + d2t_D.long()
    assert ids_D is not None
    if fits(ids_D):
        return ids_D
    if d2t_D is not None and fits(d2t_D.long()):
        notes.append("d2t holds target ids instead of offsets")
        return d2t_D.long()
    marks = "" if marked_D is None else f", t2d marks {len(marked_D)} others"
    raise ValueError(
        f"{where}: d2t leads to target ids {int(ids_D.min())} to {int(ids_D.max())}{marks}; {rows} different ones below {vocab_size} were "
        "needed: this head is of another target, or its tables are damaged"
    )


def put_embedding(tensors: dict[str, Tensor], embed_VW: Tensor | None, wide: int, where: Path, notes: list[str]) -> None:
    """Takes the folder's embedding out of `tensors`: a head shares its target's, seen through `embed_proj` where its width is another.

    ValueError unless the folder's table is the target's, or a linear map of it (which is then put as the projection).
    """
    own, width = tensors.pop(EMBEDDING, None), tensors["norm.weight"].shape[0]
    if own is None and width != wide:
        raise ValueError(f"{where} is {width} wide, its target {wide}, and {EMBEDDING} is missing; export or download the head again")
    if own is None:
        return
    if embed_VW is None:
        raise ValueError(f"{where} holds {EMBEDDING}, which must be compared with the target's; give the target's (embed_VW)")
    check_dims({EMBEDDING: own}, {EMBEDDING: 2}, where)
    count = min(len(own), len(embed_VW))  # either may be padded
    own, embed_VW = own[:count].cpu(), embed_VW[:count].detach().cpu()
    if own.shape[1] != width or embed_VW.shape[1] != wide:
        raise ValueError(f"{where}: {EMBEDDING} is {list(own.shape)} for a head of width {width}; download the head again")
    if width != wide and (where / PROJECTION_FILE).is_file():
        tensors[PROJECTION] = read_tensors(within(where, PROJECTION_FILE)).get(PROJECTION, own[:0])
        check_dims(tensors, {PROJECTION: 2}, where)
        _check_projection(tensors[PROJECTION], own, embed_VW, where)
    elif width != wide:
        tensors[PROJECTION] = _projection(own, embed_VW, where)
        notes.append(f"{PROJECTION} is computed back from {EMBEDDING}")
    elif not same_rows(own, embed_VW):
        raise ValueError(
            f"{where}: {EMBEDDING} is not the target's, so it was trained or is of another target; heads here share the target's "
            "embedding: start from a head that does, or train one"
        )


def same_rows(own_XW: Tensor, its_XW: Tensor) -> bool:
    """Whether two tables differ by no more than rounding to 16 bits does."""
    return all(torch.allclose(a.float(), b.float(), rtol=ROUNDED, atol=1e-6) for a, b in _pieces(own_XW, its_XW))


def _pieces(*tables: Tensor) -> Any:
    return zip(*(table.split(AT_ONCE) for table in tables), strict=True)


def _projection(own_VH: Tensor, embed_VW: Tensor, where: Path) -> Tensor:
    """The [H, W] matrix that makes `own` of the target's embedding, by least squares; ValueError when none does."""
    wide, width = embed_VW.shape[1], own_VH.shape[1]
    gram_WW, cross_WH = torch.zeros(wide, wide, dtype=torch.float64), torch.zeros(wide, width, dtype=torch.float64)
    for own, embed in _pieces(own_VH, embed_VW):
        gram_WW += embed.double().T @ embed.double()
        cross_WH += embed.double().T @ own.double()
    found_HW = torch.linalg.lstsq(gram_WW, cross_WH, driver="gelsd").solution.T.float().contiguous()
    _check_projection(found_HW, own_VH, embed_VW, where)
    return found_HW.to(own_VH.dtype)


def _check_projection(found_HW: Tensor, own_VH: Tensor, embed_VW: Tensor, where: Path) -> None:
    """ValueError unless the matrix makes the folder's table of the target's embedding, but for rounding."""
    if found_HW.shape != (own_VH.shape[1], embed_VW.shape[1]):
        raise ValueError(f"{where}: {PROJECTION} is {list(found_HW.shape)}, needed {[own_VH.shape[1], embed_VW.shape[1]]}; export it again")
    found_WH = found_HW.double().T
    off = sum(float((embed.double() @ found_WH - own.double()).square().sum()) for own, embed in _pieces(own_VH, embed_VW)) ** 0.5
    share = off / max(float(own_VH.double().norm()), 1e-30)
    if not share <= (1e-3 if own_VH.dtype == torch.float32 else 2e-2):
        raise ValueError(
            f"{where}: {EMBEDDING} is no projection of the target's embedding ({share:.0%} of it is left over); heads here read that "
            "through a projection: train one instead of starting from this"
        )
