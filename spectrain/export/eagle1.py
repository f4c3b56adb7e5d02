"""EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858) as vLLM, SGLang and the original code have them, and read back.

All of them give the head the target's embedding and output rows. vLLM's fc has no bias, SGLang's and the original's always has one. Engines
draft from the whole vocabulary; SGLang from a part of it where its command names a file of ids.

Legend: W width of head and target, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.export.flat import layer_sizes, window_of
from spectrain.export.folder import FORMAT, TOKEN_MAP, build, cast, check_destination, open_head, write_folder
from spectrain.export.foreign import plain, same_rows, unpickled
from spectrain.export.layout import EMBEDDING, check_dims, rope_spellings
from spectrain.export.told import Layers, check_rope, read_told, rope_of
from spectrain.heads.base import LAST
from spectrain.target.model import Target

WHOLE_VOCABULARY = "the head drafts some of the target's ids; this engine drafts all of them from the head's guess of the state"
FIRST = "layers.0"


def export_vllm(
    head_dir: Path, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None, output_VW: Tensor | None = None
) -> Path:  # fmt: skip
    """Writes the folder that vLLM loads with the method eagle; returns `out`. Arguments: `export_head`.

    ValueError for a head that it would compute otherwise: a bias of fc, a window, output rows that are not the target's.
    """
    head, tensors, made_with = _opened(head_dir, output_VW)
    destination = check_destination(out)
    if bool((bias := tensors.pop("fc.bias", torch.zeros(1))).any()):
        raise ValueError(
            f"{head_dir} has a bias in fc up to {float(bias.abs().max()):.2g}, and vLLM's has none; export it to sglang, or train one with "
            "--set head.bias=false"
        )
    tensors, dtype = cast(tensors, dtype, head_dir)
    config = _config(head, made_with, dtype, architecture="LlamaForCausalLM", bias=False, whole=True)
    write_folder(destination, config, tensors, pickled=_token_map(head))
    return out


def export_sglang(
    head_dir: Path, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None, output_VW: Tensor | None = None
) -> Path:  # fmt: skip
    """Writes the folder that SGLang loads with the algorithm EAGLE; returns `out`. Arguments: `export_head`.

    ValueError for a window and for output rows that are not the target's.
    """
    head, tensors, made_with = _opened(head_dir, output_VW)
    return _write_biased(head, tensors, made_with, out, dtype, head_dir, embed_VW, whole=False)


def export_original(
    head_dir: Path, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None, output_VW: Tensor | None = None
) -> Path:  # fmt: skip
    """Writes the folder of the original code, which SGLang reads too; returns `out`. Arguments: `export_head`.

    ValueError beside that of `export_sglang` for a size of attention heads other than the width over their number.
    """
    head, tensors, made_with = _opened(head_dir, output_VW)
    c = head.config
    if c.num_attention_heads * c.head_dim != c.hidden_size:
        raise ValueError(
            f"{head_dir} has {c.num_attention_heads} attention heads of {c.head_dim} for a width of {c.hidden_size}; the original code "
            "takes the width over their number: export it to vllm or sglang"
        )
    return _write_biased(head, tensors, made_with, out, dtype, head_dir, embed_VW, whole=True)


def _opened(head_dir: Path, output_VW: Tensor | None) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """A head that these formats can express, its weights without the output layer, and made_with.json."""
    head, tensors, made_with = open_head(head_dir)
    c, rows_DW = head.config, tensors.pop("lm_head.weight")
    if c.sliding_window is not None:
        raise ValueError(f"{head_dir} has sliding_window {c.sliding_window}, and engines give EAGLE-1 layers none; train one without")
    if c.hidden_size % c.num_attention_heads:
        raise ValueError(
            f"{head_dir} has hidden_size {c.hidden_size} and num_attention_heads {c.num_attention_heads}; engines need a width that the "
            "heads divide, so they do not load a head for this target"
        )
    if output_VW is None or output_VW.shape != (c.vocab_size, c.hidden_size):
        found = "none were given" if output_VW is None else f"{list(output_VW.shape)} were given"
        raise ValueError(
            f"{head_dir} goes through the target's output rows [{c.vocab_size}, {c.hidden_size}] in an engine ({found}): name its target "
            "when exporting"
        )
    if not same_rows(rows_DW, output_VW.detach().cpu()[head.target_ids]):
        raise ValueError(
            f"{head_dir} has output rows of its own, and engines give an EAGLE-1 head the target's; train one with --set head.output=frozen"
        )
    return head, tensors, made_with


def _write_biased(
    head: Any, tensors: dict[str, Tensor], made_with: Mapping[str, Any], out: Path, dtype: str | None, head_dir: Path,
    embed_VW: Tensor | None, *, whole: bool,
) -> Path:  # fmt: skip
    """The layout with a bias in fc, zeros where the head has none, and the target's embedding, which the original code takes from it."""
    destination, fc_WX = check_destination(out), tensors["fc.weight"]
    if embed_VW is None:
        raise ValueError(f"{head_dir} is written with the target's embedding; name its target when exporting")
    embed_VW = embed_VW.detach().cpu().to(fc_WX.dtype).clone()
    tensors, dtype = cast({"fc.bias": fc_WX.new_zeros(len(fc_WX)), EMBEDDING: embed_VW} | tensors, dtype, head_dir)
    config = _config(head, made_with, dtype, architecture="LlamaForCausalLMEagle", bias=True, whole=whole)
    write_folder(destination, config, tensors, pickled=_token_map(head))
    return out


def _config(head: Any, made_with: Mapping[str, Any], dtype: str, *, architecture: str, bias: bool, whole: bool) -> dict[str, Any]:
    """config.json. bias: of fc, in the folder. whole: the engine drafts from the whole vocabulary."""
    c = head.config
    note = {"note": WHOLE_VOCABULARY} if whole and c.draft_vocab_size < c.vocab_size else {}
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "vocab_size", "hidden_act", "rms_norm_eps",
    )  # fmt: skip
    return {
        "architectures": [architecture], "model_type": "llama", "torch_dtype": dtype, "dtype": dtype,
        **{name: getattr(c, name) for name in names}, **rope_spellings(c.rope_parameters),
        "attention_bias": False, "mlp_bias": False, "bias": bias, "tie_word_embeddings": False,
        "spectrain": {**made_with, "format": FORMAT, "head": "eagle", "target_layers": c.target_layers, "fc_bias": c.bias, **note},
    }  # fmt: skip


def _token_map(head: Any) -> dict[str, list[int]]:
    c = head.config
    return {TOKEN_MAP: head.target_ids.tolist()} if c.draft_vocab_size < c.vocab_size else {}


def read_eagle1(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> tuple[Any, tuple[str, ...]]:
    """The head in a folder of any of these layouts, in float32, and what was concluded. ValueError for an embedding that is not the
    target's, and for parts that such heads do not have here."""
    notes, state, told = list[str](), dict(tensors), read_told(Layers, config, folder)
    if f"{FIRST}.self_attn.k_proj.weight" not in state:
        raise ValueError(f"{folder} holds fc.weight and no whole {FIRST}; download the whole folder")
    own_VW = state.pop(EMBEDDING, None)
    if own_VW is not None and not _same_embedding(own_VW, target.embedding_VW.detach().cpu()):
        raise ValueError(f"{folder}: {EMBEDDING} is not that of {target.name}; name the target that the head was made for")
    bias_W, said = state.pop("fc.bias", None), told.spectrain.fc_bias
    has_bias = bool(said) or (bias_W is not None and bool(bias_W.any()))  # zeros stand for a bias only where the folder says so
    if bias_W is not None and has_bias:
        state["fc.bias"] = bias_W
    elif bias_W is not None and said is None:
        notes.append("fc.bias is all zeros: left out")
    ids_D = _drafted(folder, target, notes)
    own_rows = state.pop("lm_head.weight", target.output_VW.detach().cpu())
    check_dims({"lm_head.weight": own_rows}, {"lm_head.weight": 2}, folder)
    if len(own_rows) != target.vocab_size:
        raise ValueError(f"{folder}: lm_head.weight has {len(own_rows)} rows, {target.name} has {target.vocab_size} ids; load its target")
    state["lm_head.weight"] = own_rows[ids_D]
    layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    fields = {
        **layer_sizes(told, state, FIRST, folder), "num_hidden_layers": layers, "bias": has_bias,
        "sliding_window": window_of(told, layers, folder, notes), "rope_parameters": rope_of(told, folder, notes),
        "target_hidden_size": target.embedding_VW.shape[1], "vocab_size": target.vocab_size, "draft_vocab_size": len(ids_D),
        "layer_ids": (LAST,), "target_layers": target.num_layers,
    }  # fmt: skip
    check_rope(fields["rope_parameters"], fields["head_dim"], fields["max_position_embeddings"], folder)
    return build("eagle", fields, state, ids_D, config, folder), tuple(notes)


def _same_embedding(own_VW: Tensor, its_VW: Tensor) -> bool:
    rows = min(len(own_VW), len(its_VW))  # either may be padded
    return own_VW.dim() == 2 and own_VW.shape[1] == its_VW.shape[1] and same_rows(own_VW[:rows], its_VW[:rows])


def _drafted(folder: Path, target: Target, notes: list[str]) -> Tensor:
    """Target ids that are drafted, rising: those of the file for SGLang, else all that the tokenizer knows."""
    if not (folder / TOKEN_MAP).is_file():
        if target.num_ids < target.vocab_size:
            notes.append(f"ids from {target.num_ids} on are no tokens of the tokenizer: left out")
        return torch.arange(target.num_ids)
    found = unpickled(folder, TOKEN_MAP)
    listed = found.tolist() if plain(found) else found
    if not isinstance(listed, list) or not listed or not all(type(i) is int and abs(i) < 2**62 for i in listed):
        raise ValueError(f"{folder / TOKEN_MAP} is no list of ids, or is damaged; remove it to draft from the whole vocabulary")
    ids_D = torch.tensor(listed).sort().values
    if not (0 <= int(ids_D.min()) and int(ids_D.max()) < target.vocab_size and len(ids_D.unique()) == len(ids_D)):
        raise ValueError(f"{folder / TOKEN_MAP} holds ids that repeat or are none of {target.name}; name the target it was made for")
    return ids_D
