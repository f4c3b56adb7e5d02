"""Small EAGLE-3 heads of random weights, of every variant, as training leaves them; read by the tests of this folder.

Legend: h number of a hidden state, L positions of the target, W its width, V its vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.heads.base import vocabulary_hash


def head_config(**changes: Any) -> dict[str, Any]:
    config = {
        "head": "eagle3",
        "format": 1,
        "hidden_size": 16,
        "target_hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,  # stated, and not hidden_size / num_attention_heads
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "max_position_embeddings": 128,
        "vocab_size": 40,
        "draft_vocab_size": 12,
        "layer_ids": [2, 4, 5],
        "target_layers": 8,
    }
    return {**config, **changes}


def target_ids(config: dict[str, Any]) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all flags": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "layer_ids": [1, 3, 4, 6]},
    "two layers": {"num_hidden_layers": 2},
    "three layers": {"num_hidden_layers": 3, "norm_before_residual": True},
    "window": {"sliding_window": 4, "num_hidden_layers": 2},
    "narrower": {"hidden_size": 8, "intermediate_size": 12},
    "wider": {"hidden_size": 24, "norm_before_fc": True, "layer_ids": [2, 5]},
    "two states": {"layer_ids": [2, 5], "fc_norm": True},
    "five states": {"layer_ids": [1, 2, 4, 5, 7]},
}


def head_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    H, W, inner, D, V = (config[f"{key}_size"] for key in ("hidden", "target_hidden", "intermediate", "draft_vocab", "vocab"))
    q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    fused = len(config["layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, fused * W), "midlayer.hidden_norm.weight": (H,)}
    for i in range(config.get("num_hidden_layers", 1)):
        layer, read = (f"above.{i - 1}", H) if i else ("midlayer", 2 * H)
        shapes |= {
            **{f"{layer}.{name}.weight": (H,) for name in ("input_layernorm", "post_attention_layernorm")},
            f"{layer}.self_attn.q_proj.weight": (q, read),
            **{f"{layer}.self_attn.{name}_proj.weight": (kv, read) for name in "kv"},
            f"{layer}.self_attn.o_proj.weight": (H, q),
            **{f"{layer}.mlp.{name}_proj.weight": (inner, H) for name in ("gate", "up")},
            f"{layer}.mlp.down_proj.weight": (H, inner),
        }
    shapes |= {"norm.weight": (H,), "lm_head.weight": (D, H)}
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (W,) for j in range(fused)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (fused * W,)
    if H != W:
        shapes["embed_proj.weight"] = (H, W)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) + (len(shape) == 1) for name, shape in shapes.items()}
    ids_D = target_ids(config)
    t2d_V = torch.zeros(V, dtype=torch.bool)
    t2d_V[ids_D] = True
    return {**tensors, "d2t": ids_D - torch.arange(D), "t2d": t2d_V}


def made_with(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "target": "org/model",
        "target_revision": "abc",
        "tokenizer_sha256": "1" * 64,
        "template_sha256": "2" * 64,
        "vocabulary_sha256": vocabulary_hash(target_ids(config)),
        "versions": {"torch": "2"},
    }


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None, made: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "made_with.json").write_text(json.dumps(made_with(config) if made is None else made))
    save_file(head_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def target_states(config: dict[str, Any], length: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """hs[0] … hs[n] of a made-up target, its embedding [V, H], and the token ids."""
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(length, config["target_hidden_size"], generator=generator) for _ in range(config["target_layers"] + 1)]
    embed_VH = torch.randn(config["vocab_size"], config["target_hidden_size"], generator=generator)
    return states, embed_VH, torch.randint(config["vocab_size"], (length,), generator=generator)
