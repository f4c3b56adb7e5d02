"""The flat EAGLE-3 folder: what it holds, what it is refused for, and what a reader who has nothing else makes of it.

Legend: h number of a hidden state, L positions of the target, N positions, H width, D draft vocabulary, V target vocabulary.
"""

import json
import runpy
import shlex
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.export import folder
from spectrain.export.eagle3 import export_eagle3
from spectrain.export.engines import FORMATS, export_head, needs_target, serve_command
from spectrain.heads.base import load_head, save_head

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


HEADS = runpy.run_path(str(Path(__file__).with_name("small_heads.py")))
VARIANTS, head_config, head_tensors, made_with, read_config, target_ids, target_states, write_head = (
    HEADS[name]
    for name in ("VARIANTS", "head_config", "head_tensors", "made_with", "read_config", "target_ids", "target_states", "write_head")
)


@pytest.fixture
def head_dir(tmp_path: Path) -> Path:
    return write_head(tmp_path / "head", head_config())


# A reader of the flat folder that shares nothing with the package: EAGLE-3 as published (arXiv 2503.01840).


def layer_ids_of(config: dict[str, Any], notation: str) -> list[int]:
    """hs numbers as vLLM reads them (top level) or as SGLang does (nested, outputs of layers)."""
    if notation == "vllm":
        ids: list[int] = config["eagle_aux_hidden_state_layer_ids"]
        return ids
    return [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]


def read_and_draft(folder: Path, states_hLW: list[Tensor], ids_N: Tensor, embed_VW: Tensor, notation: str = "vllm") -> Tensor:
    """Logits [N, V], −inf off the draft vocabulary. states_hLW: the target's hs[0], hs[1], … at L positions; ids_N: the token after each
    position. Where N > L, rows from L on are drafted: their feature is what the head handed on one row before.
    """
    c, w = read_config(folder), load_file(folder / "model.safetensors")
    w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in w.items()}
    embeds_NH = w.get("embed_tokens.weight", embed_VW)[ids_N]
    states = [states_hLW[i] for i in layer_ids_of(c, notation)]
    if c["fc_norm"]:
        states = [rms(c, x, w[f"fc_norm.{j}.weight"]) for j, x in enumerate(states)]
    x = torch.cat(states, -1)
    g_NH = (rms(c, x, w["input_norm.weight"]) if c["norm_before_fc"] else x) @ w["fc.weight"].T
    while True:
        x_NH = g_NH
        for i in range(c["num_hidden_layers"]):
            x_NH = one_layer(c, w, i, x_NH, embeds_NH[: len(g_NH)], notation)
        normed_NH = rms(c, x_NH, w["norm.weight"])
        if len(g_NH) == len(ids_N):
            break
        g_NH = torch.cat([g_NH, (normed_NH if c["norm_output"] else x_NH)[-1:]])
    logits_NV = torch.full((len(g_NH), c["vocab_size"]), float("-inf"))
    logits_NV[:, torch.arange(c["draft_vocab_size"]) + w["d2t"]] = normed_NH @ w["lm_head.weight"].T
    return logits_NV


def rms(c: dict[str, Any], x: Tensor, factors: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * factors


def one_layer(c: dict[str, Any], w: dict[str, Tensor], i: int, g: Tensor, e: Tensor, notation: str) -> Tensor:
    """Stream after layer i, for the stream g before it and, in the first layer, embeddings e at positions 0, 1, …"""
    half = c["head_dim"] // 2
    angle = torch.arange(len(g))[:, None] / c["rope_theta"] ** (torch.arange(half) / half)

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(c, x, w[f"layers.{i}.{name}.weight"])

    def heads(x: Tensor, name: str, num: int) -> Tensor:
        return (x @ w[f"layers.{i}.self_attn.{name}_proj.weight"].T).view(len(x), num, c["head_dim"]).transpose(0, 1)

    def turn(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    if i:
        x = norm(g, "hidden_norm" if notation == "sglang" else "input_layernorm")
    else:
        normed = norm(g, "hidden_norm")
        x = torch.cat([norm(e, "input_layernorm"), normed], -1)
        g = normed if c["norm_before_residual"] else g
    group = c["num_attention_heads"] // c["num_key_value_heads"]
    q = turn(heads(x, "q", c["num_attention_heads"]))
    k = turn(heads(x, "k", c["num_key_value_heads"])).repeat_interleave(group, 0)
    v = heads(x, "v", c["num_key_value_heads"]).repeat_interleave(group, 0)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    if c.get("layer_types", ["full_attention"] * (i + 1))[i] == "sliding_attention":
        hidden |= torch.ones_like(hidden).tril(-c["sliding_window"])
    weight = (q @ k.transpose(1, 2) / c["head_dim"] ** 0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    h = g + (weight @ v).transpose(0, 1).flatten(1) @ w[f"layers.{i}.self_attn.o_proj.weight"].T
    y = norm(h, "post_attention_layernorm")
    mlp = silu(y @ w[f"layers.{i}.mlp.gate_proj.weight"].T) * (y @ w[f"layers.{i}.mlp.up_proj.weight"].T)
    return h + mlp @ w[f"layers.{i}.mlp.down_proj.weight"].T


# What the folder holds.


def test_config_names_every_option_of_the_forward_pass(head_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export_eagle3(head_dir, out) == out
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    config = read_config(out)
    spectrain = config.pop("spectrain")
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "dtype": "float32",
        "hidden_size": 16,
        "target_hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "max_position_embeddings": 128,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "vocab_size": 40,
        "draft_vocab_size": 12,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
            "return_hidden_post_norm": False,
            "next_layer_regular": True,
        },
    }
    assert spectrain.items() >= {**made_with(head_config()), "format": 1, "hs_layer_ids": [2, 4, 5], "target_layers": 8}.items()


def test_tensors_are_those_of_the_head(head_dir: Path, tmp_path: Path) -> None:
    written, head = load_file(export_eagle3(head_dir, tmp_path / "out") / "model.safetensors"), head_tensors(head_config())
    assert written.keys() == head.keys() and "embed_tokens.weight" not in written
    assert all(torch.equal(written[name], head[name]) and written[name].dtype == head[name].dtype for name in head)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_dtype_in_the_config_is_that_of_every_weight(head_dir: Path, tmp_path: Path, name: str) -> None:
    out = export_eagle3(head_dir, tmp_path / "out", dtype=name)
    assert read_config(out)["torch_dtype"] == name
    tensors = load_file(out / "model.safetensors")
    assert (tensors.pop("d2t").dtype, tensors.pop("t2d").dtype) == (torch.int64, torch.bool)
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, name)}


def test_weights_are_not_widened_on_the_way(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in head_tensors(head_config()).items()}
    out = export_eagle3(write_head(tmp_path / "head", head_config(), tensors), tmp_path / "out")
    assert read_config(out)["torch_dtype"] == "bfloat16"
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


def test_weights_are_as_readable_as_the_config(head_dir: Path, tmp_path: Path) -> None:
    out = export_eagle3(head_dir, tmp_path / "out")
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == stat.S_IMODE((out / "config.json").stat().st_mode)


def test_head_over_the_whole_vocabulary_carries_no_map(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", head_config(draft_vocab_size=40))
    out = export_eagle3(head, tmp_path / "out")
    assert not {"d2t", "t2d"} & load_file(out / "model.safetensors").keys()
    assert read_config(out)["draft_vocab_size"] == 40


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3], ids=["default", "llama3"])
def test_rotary_settings_read_the_same_in_either_spelling(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = head_config(rope_parameters=rope, head_dim=128)
    written = read_config(export_eagle3(write_head(tmp_path / "head", config), tmp_path / "out"))
    assert written["rope_theta"] == rope["rope_theta"] and written["rope_parameters"] == rope
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    frequencies = [LlamaRotaryEmbedding(LlamaConfig.from_dict(fields)).inv_freq for fields in (written, new, old)]
    assert torch.equal(frequencies[0], frequencies[1]) and torch.equal(frequencies[0], frequencies[2])
    if rope["rope_type"] == "default":
        assert frequencies[0][63].item() == pytest.approx(1.241e-6, rel=1e-3)
    else:
        assert frequencies[0][63].item() == pytest.approx(500000.0 ** (-63 / 64) / 8, rel=1e-4)


def test_wide_head_of_a_narrow_model_keeps_its_head_width(tmp_path: Path) -> None:
    out = export_eagle3(write_head(tmp_path / "head", head_config()), tmp_path / "out")
    config = read_config(out)
    rows = load_file(out / "model.safetensors")["midlayer.self_attn.q_proj.weight"].shape[0]
    assert config["head_dim"] == 8 and rows == 32 != config["hidden_size"]


def test_two_or_five_fused_states_are_counted(tmp_path: Path) -> None:
    for ids in ([3, 6], [1, 2, 4, 5, 7]):
        out = export_eagle3(write_head(tmp_path / f"head{len(ids)}", head_config(layer_ids=ids)), tmp_path / f"out{len(ids)}")
        config = read_config(out)
        assert config["num_aux_hidden_states"] * config["target_hidden_size"] == load_file(out / "model.safetensors")["fc.weight"].shape[1]
        assert len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) == len(ids)


def test_engines_of_either_layer_notation_read_the_same_states(head_dir: Path, tmp_path: Path) -> None:
    out, (states, embed_VH, ids) = export_eagle3(head_dir, tmp_path / "out"), target_states(head_config(), 7)
    logits_NV = read_and_draft(out, states, ids, embed_VH)
    assert torch.equal(logits_NV, read_and_draft(out, states, ids, embed_VH, "sglang"))
    assert torch.equal(torch.isfinite(logits_NV[0]), head_tensors(head_config())["t2d"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_alone_rebuilds_the_head(tmp_path: Path, variant: str) -> None:
    """Row i has the states of tokens 0 … i and the tokens up to i + 1; at later steps it has drafted on from there. The folder is read
    under the names of vLLM and under those of SGLang."""
    L, steps, config = 10, 3, head_config(**VARIANTS[variant])
    head_dir = write_head(tmp_path / "head", config)
    states, embed_VW, ids_L = target_states(config, L)
    batch = SimpleNamespace(
        ids_BL=ids_L[None], mask_BL=torch.ones(1, L, dtype=torch.bool),
        states_BLF=torch.cat([states[i] for i in config["layer_ids"]], -1)[None], doc_BL=None, position_BL=None,
    )  # fmt: skip
    row_R = torch.arange(L - steps)
    with torch.no_grad():
        pairs = list(load_head(head_dir).rows(batch, row_R, embed_VW, steps))
    out = export_eagle3(head_dir, tmp_path / "out", embed_VW=embed_VW)
    drafted_V = head_tensors(config)["t2d"]
    assert [ahead for ahead, _ in pairs] == [2, 3, 4]
    for ahead, logits_RD in pairs:
        for i in row_R.tolist():
            for notation in ("vllm", "sglang"):
                expected_NV = read_and_draft(out, [state[: i + 1] for state in states], ids_L[1 : i + ahead], embed_VW, notation)
                torch.testing.assert_close(logits_RD[i], expected_NV[-1][drafted_V], rtol=0, atol=2e-5)


def test_tensors_of_several_layers_are_named_as_engines_read_them(tmp_path: Path) -> None:
    config = head_config(num_hidden_layers=3)
    written = load_file(export_eagle3(write_head(tmp_path / "head", config), tmp_path / "out") / "model.safetensors")
    new = {"midlayer": "layers.0", "above.0": "layers.1", "above.1": "layers.2"}
    names = {next((new[old] + n[len(old) :] for old in new if n.startswith(old)), n) for n in head_tensors(config)}
    assert written.keys() == names | {"layers.1.hidden_norm.weight", "layers.2.hidden_norm.weight"}
    for i in (1, 2):
        assert torch.equal(written[f"layers.{i}.hidden_norm.weight"], head_tensors(config)[f"above.{i - 1}.input_layernorm.weight"])


def test_window_is_told_to_each_engine_where_it_looks(tmp_path: Path) -> None:
    out = export_eagle3(write_head(tmp_path / "head", head_config(sliding_window=5, num_hidden_layers=2)), tmp_path / "out")
    config = read_config(out)
    assert (config["sliding_window"], config["layer_types"]) == (5, ["sliding_attention"] * 2)
    # SGLang counts the keys before the query's own
    assert "--speculative-draft-window-size 4" in serve_command(out, "org/model", engine="sglang", num_speculative_tokens=4)
    plain = export_eagle3(write_head(tmp_path / "plain", head_config()), tmp_path / "plain_out")
    assert not {"sliding_window", "layer_types"} & read_config(plain).keys()
    assert "window-size" not in serve_command(plain, "org/model", engine="sglang", num_speculative_tokens=4)


def test_head_of_another_width_carries_its_own_embedding(tmp_path: Path) -> None:
    config = head_config(**VARIANTS["narrower"])
    head, (_, embed_VW, _) = write_head(tmp_path / "head", config), target_states(config, 1)
    out = export_eagle3(head, tmp_path / "out", embed_VW=embed_VW, dtype="bfloat16")
    written = load_file(out / "model.safetensors")
    expected_VH = (embed_VW @ head_tensors(config)["embed_proj.weight"].T).bfloat16()
    assert torch.equal(written["embed_tokens.weight"], expected_VH) and "embed_proj.weight" not in written
    assert (read_config(out)["hidden_size"], read_config(out)["target_hidden_size"]) == (8, 16)
    same = write_head(tmp_path / "same", head_config())
    assert needs_target(head, "vllm") and not needs_target(same, "vllm") and needs_target(same, "speculators")
    for wrong, found in ((None, "none was given"), (embed_VW[:39], r"\[39, 16\] was given")):
        with pytest.raises(ValueError, match=found):
            export_eagle3(head, tmp_path / "other", embed_VW=wrong)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sglang_is_refused_what_it_would_ignore(tmp_path: Path, variant: str) -> None:
    config = head_config(**VARIANTS[variant])
    head, (_, embed_VW, _) = write_head(tmp_path / "head", config), target_states(config, 1)
    ignored = [flag for flag in ("norm_before_residual", "norm_before_fc") if config.get(flag)]
    ignored += ["hidden_size"] * (config["hidden_size"] != 16)
    if not ignored:
        assert export_head(head, "sglang", tmp_path / "out", embed_VW=embed_VW)
        return
    with pytest.raises(ValueError, match=f"{ignored[0]}.*which SGLang ignores; serve the head with vLLM"):
        export_head(head, "sglang", tmp_path / "out", embed_VW=embed_VW)
    assert not (tmp_path / "out").exists() and export_head(head, "vllm", tmp_path / "out", embed_VW=embed_VW)


def test_head_saved_by_training_is_exported_unchanged(head_dir: Path, tmp_path: Path) -> None:
    save_head(load_head(head_dir), tmp_path / "saved", run_yaml="", made_with=made_with(head_config()))
    direct, saved = (export_eagle3(head, tmp_path / f"out{i}") for i, head in enumerate((head_dir, tmp_path / "saved")))
    assert read_config(saved) == read_config(direct)
    tensors = load_file(direct / "model.safetensors")
    assert all(torch.equal(tensor, tensors.pop(name)) for name, tensor in load_file(saved / "model.safetensors").items()) and not tensors


# What is refused.


def without(name: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in {**head_tensors(head_config()), **more}.items() if key != name}


def changed(name: str, change: Any) -> dict[str, Tensor]:
    tensors = head_tensors(head_config())
    return {**tensors, name: change(tensors[name])}


def with_value(value: float) -> Any:
    return lambda tensor: tensor.index_fill(0, torch.tensor([0]), value)


def other_vocabulary() -> dict[str, Tensor]:
    ids_D, t2d_V = torch.arange(12), torch.arange(40) < 12
    return {**head_tensors(head_config()), "d2t": ids_D - ids_D, "t2d": t2d_V}


TENSOR_FAULTS = {
    "missing": (without("norm.weight"), "lacks norm.weight"),
    "flag without its tensor": (without("midlayer.hidden_norm.weight"), "lacks midlayer.hidden_norm.weight"),
    "tensor without its flag": (without("", **{"input_norm.weight": torch.ones(48)}), "holds input_norm.weight"),
    "no table": (without("d2t"), "lacks d2t"),
    "unexpected": (without("", **{"embed_tokens.weight": torch.zeros(40, 16)}), "holds embed_tokens.weight"),
    "misshapen": (changed("midlayer.self_attn.q_proj.weight", lambda t: t[:, :16].clone()), r"q_proj.weight \[32, 16\], needed \[32, 32\]"),
    "fc width": (changed("fc.weight", lambda t: t[:, :32].clone()), r"fc.weight is \[16, 32\], needed \[16, 48\] \(3 layer_ids"),
    "ids for offsets": (changed("d2t", lambda t: t + torch.arange(12)), "offsets"),
    "id too high": (changed("d2t", lambda t: t + 40), "needed 0 to 39"),
    "id negative": (changed("d2t", lambda t: t - 40), "needed 0 to 39"),
    "ids fall": (changed("d2t", lambda t: (t + torch.arange(12)).flip(0) - torch.arange(12)), "fall or repeat at 11 places"),
    "ids repeat": (changed("d2t", lambda t: -torch.arange(12)), "fall or repeat at 11 places"),
    "tables disagree": (changed("t2d", lambda t: t.roll(1)), "tokens marked in t2d are not the 12"),
    "other vocabulary": (other_vocabulary(), "draft vocabulary has hash"),
    "table dtype": (changed("d2t", lambda t: t.int()), "needed int64"),
    "NaN": (changed("lm_head.weight", with_value(float("nan"))), "lm_head.weight holds 16 NaN or infinite values"),
    "quantised": (changed("fc.weight", lambda t: t.to(torch.int8)), "torch.int8"),
    "mixed dtypes": (changed("norm.weight", lambda t: t.bfloat16()), "dtype="),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_unsound_tensors_are_refused(tmp_path: Path, fault: str) -> None:
    tensors, message = TENSOR_FAULTS[fault]
    head = write_head(tmp_path / "head", head_config(), tensors)
    with pytest.raises(ValueError, match=message):
        export_eagle3(head, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


CONFIG_FAULTS = {
    "other kind": ({"head": "medusa"}, "head 'medusa'"),
    "other format": ({"format": 2}, "format 2"),
    "unknown option": ({"parallel": True}, "unknown keys parallel"),
    "flag that is none": ({"norm_output": "yes"}, "norm_output 'yes'; true or false"),
    "window that is none": ({"sliding_window": 0}, "sliding_window 0"),
    "no decoder layer": ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
    "heads that do not divide the width": ({"hidden_size": 18, "target_hidden_size": 18}, "multiple of 4"),
    "not a number": ({"head_dim": "8"}, "head_dim '8'"),
    "no layers": ({"layer_ids": []}, "layer_ids"),
    "embeddings": ({"layer_ids": [0, 2, 4]}, "rising numbers from 1 to 7"),
    "last layer": ({"layer_ids": [2, 4, 8]}, "rising numbers from 1 to 7"),
    "twice the same": ({"layer_ids": [2, 2, 4]}, "layer_ids"),
    "out of order": ({"layer_ids": [4, 2, 5]}, "layer_ids"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "part of a head turned": ({"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    "rotary settings by kind of layer": ({"rope_parameters": {"full_attention": LLAMA3}}, "rope_theta"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_configs_the_format_cannot_express_are_refused(tmp_path: Path, fault: str) -> None:
    change, message = CONFIG_FAULTS[fault]
    head = write_head(tmp_path / "head", head_config(**change), head_tensors(head_config()))
    with pytest.raises(ValueError, match=message):
        export_eagle3(head, tmp_path / "out")


def test_config_without_a_field_is_refused(tmp_path: Path) -> None:
    config = head_config()
    del config["head_dim"]
    with pytest.raises(ValueError, match="lacks head_dim"):
        export_eagle3(write_head(tmp_path / "head", config, head_tensors(head_config())), tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "made_with.json"])
def test_missing_and_broken_files_are_named(head_dir: Path, tmp_path: Path, name: str) -> None:
    (head_dir / name).write_text("not what it says")
    with pytest.raises(ValueError, match=name):
        export_eagle3(head_dir, tmp_path / "out")
    (head_dir / name).unlink()
    with pytest.raises(ValueError, match=f"lacks {name}"):
        export_eagle3(head_dir, tmp_path / "out")


def test_head_of_unknown_origin_is_refused(tmp_path: Path) -> None:
    made = made_with(head_config())
    del made["tokenizer_sha256"]
    with pytest.raises(ValueError, match="lacks tokenizer_sha256"):
        export_eagle3(write_head(tmp_path / "head", head_config(), made=made), tmp_path / "out")


def test_weights_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", head_config(), changed("fc.weight", with_value(1e6)))
    with pytest.raises(ValueError, match="48 as float16, needed none; choose another dtype"):
        export_eagle3(head, tmp_path / "out", dtype="float16")
    export_eagle3(head, tmp_path / "out", dtype="bfloat16")


def test_unknown_dtype_is_refused(head_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'int8' is unknown; choose one of float32"):
        export_eagle3(head_dir, tmp_path / "out", dtype="int8")


# Where it goes.


def test_earlier_export_is_replaced(head_dir: Path, tmp_path: Path) -> None:
    out = export_eagle3(head_dir, tmp_path / "out")
    export_eagle3(head_dir, out, dtype="bfloat16")
    assert read_config(out)["torch_dtype"] == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "out"]


def test_empty_folder_and_missing_parents_are_filled(head_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b"):
        assert (export_eagle3(head_dir, out) / "model.safetensors").is_file()


def test_foreign_folders_are_left_alone(head_dir: Path, tmp_path: Path) -> None:
    with_card = export_eagle3(head_dir, tmp_path / "out")
    (with_card / "README.md").write_text("mine")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    for out, found in ((with_card, "README.md"), (model, "config.json"), (tmp_path / "file", "is a file"), (head_dir, "made_with.json")):
        with pytest.raises(ValueError, match=found):
            export_eagle3(head_dir, out)
    assert (with_card / "README.md").read_text() == "mine" and (head_dir / "made_with.json").is_file()


@pytest.mark.parametrize("step", ["save_file", "swap"])
def test_failed_export_leaves_the_earlier_one(head_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    out = export_eagle3(head_dir, tmp_path / "out")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(folder, step, fail)
    with pytest.raises(OSError, match="disk full"):
        export_eagle3(head_dir, out, dtype="bfloat16")
    assert read_config(out)["torch_dtype"] == "float32" and load_file(out / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "out"]


# Formats and commands.


def test_every_format_name_leads_to_a_writer(head_dir: Path, tmp_path: Path) -> None:
    flat = [name for name, kinds in FORMATS.items() if "eagle3" in kinds and name != "speculators"]
    folders = [export_head(head_dir, name, tmp_path / name) for name in flat]
    assert len(folders) == 3
    assert len({(folder / "config.json").read_bytes() for folder in folders}) == 1
    assert read_config(export_head(head_dir, "vllm", tmp_path / "half", dtype="bfloat16"))["torch_dtype"] == "bfloat16"


def test_unknown_format_names_the_known_ones(head_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gguf' is unknown; choose one of eagle3, vllm, speculators, sglang"):
        export_head(head_dir, "gguf", tmp_path / "out")


def test_vllm_command() -> None:
    command = serve_command(Path("runs/it's/out"), "org/model", num_speculative_tokens=4)
    words = shlex.split(command)
    assert words[:4] == ["vllm", "serve", "org/model", "--speculative-config"] and len(words) == 5
    assert json.loads(words[4]) == {"method": "eagle3", "model": "runs/it's/out", "num_speculative_tokens": 4}
    speculation = '{"method": "eagle3", "model": "out", "num_speculative_tokens": 2}'
    plain = serve_command(Path("out"), "org/model", num_speculative_tokens=2)
    assert plain == f"vllm serve org/model --speculative-config '{speculation}'"


def test_sglang_command_drafts_a_chain() -> None:
    assert serve_command(Path("out"), "org/model", engine="sglang", num_speculative_tokens=4) == (
        "python -m sglang.launch_server --model-path org/model --speculative-algorithm EAGLE3 --speculative-draft-model-path out "
        "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    )


def test_impossible_commands_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        serve_command(Path("out"), "org/model", num_speculative_tokens=0)
    with pytest.raises(ValueError, match="'tgi' is unknown; choose vllm or sglang"):
        serve_command(Path("out"), "org/model", engine="tgi", num_speculative_tokens=4)
