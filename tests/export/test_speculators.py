"""The speculators format: what the folder holds, what vLLM and the package's own rules make of it, and how it is read back.

Legend: L positions of the target, N positions, H width, D draft vocabulary, V target vocabulary.
"""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from spectrain.export.engines import export_head, serve_command
from spectrain.export.flat import head_from_flat
from spectrain.heads.base import load_head

HEADS = runpy.run_path(str(Path(__file__).with_name("small_heads.py")))
VARIANTS, head_config, head_tensors, made_with, read_config, target_states, write_head = (
    HEADS[name] for name in ("VARIANTS", "head_config", "head_tensors", "made_with", "read_config", "target_states", "write_head")
)
KEY, FLAGS = "eagle_aux_hidden_state_layer_ids", ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
VERIFIER = {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}


def exported(folder: Path, dtype: str | None = None, **changes: Any) -> tuple[Path, dict[str, Any], Tensor]:
    config = head_config(**changes)
    embed_VW = target_states(config, 1)[1]
    head = write_head(folder / "head", config)
    return export_head(head, "speculators", folder / "out", embed_VW=embed_VW, verifier=VERIFIER, dtype=dtype), config, embed_VW


# Readers that share nothing with the package.


def as_vllm(folder: Path) -> dict[str, Any]:
    """The config that vLLM makes of the folder (transformers_utils/configs/speculators): its layer's, and what is translated."""
    c = read_config(folder)
    assert c["speculators_model_type"] == "eagle3" and c["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert c["speculators_config"]["verifier"]["name_or_path"]
    made: dict[str, Any] = c["transformer_layer_config"]
    made |= {"draft_vocab_size": c.get("draft_vocab_size"), "norm_before_residual": c.get("norm_before_residual", True)}
    made |= {flag: c.get(flag, False) for flag in FLAGS[1:]} | {KEY: c[KEY]}
    if c.get("target_hidden_size") is not None:
        made["target_hidden_size"] = c["target_hidden_size"]
    assert made.get("model_type", "llama") == "llama"
    return made


class Package(nn.Module):
    """The draft model of the package (models/eagle3), from transformers' Llama layers, for one settled pass. `made`: a config in one
    piece; `wide`: width of the target, which vLLM allows for and the package takes for the head's own."""

    def __init__(self, made: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.made, own = made, {k: v for k, v in made.items() if k in LAYER}
        config = AutoConfig.for_model(**own, attn_implementation="eager")
        H, wide, count = made["hidden_size"], made["target_hidden_size"], made["num_aux_hidden_states"]
        self.embed_tokens = nn.Embedding(made["vocab_size"], H)
        self.fc = nn.Linear(count * wide, H, bias=False)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(made["num_hidden_layers"]))
        first = self.layers[0]
        first.hidden_norm = LlamaRMSNorm(H, eps=config.rms_norm_eps)
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads), ("v", config.num_key_value_heads)):
            setattr(first.self_attn, f"{name}_proj", nn.Linear(2 * H, heads * config.head_dim, bias=False))
        self.rotary = LlamaRotaryEmbedding(config)
        self.norm = LlamaRMSNorm(H, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(H, made["draft_vocab_size"], bias=False)
        if made["norm_before_fc"]:
            self.input_norm = LlamaRMSNorm(count * wide, eps=config.rms_norm_eps)
        if made["fc_norm"]:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(wide, eps=config.rms_norm_eps) for _ in range(count))
        self.tables = {name: weights.pop(name) for name in ("d2t", "t2d") if name in weights}
        self.load_state_dict(weights)  # nothing is missing, and nothing left

    def forward(self, states_1LF: Tensor, next_1L: Tensor) -> tuple[Tensor, Tensor]:
        """Draft logits, and the state that is handed on, [1, L, ...]."""
        made, L = self.made, next_1L.shape[1]
        if made["norm_before_fc"]:
            states_1LF = self.input_norm(states_1LF)
        if made["fc_norm"]:
            parts = states_1LF.chunk(len(self.fc_norm), dim=-1)
            states_1LF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.decode(self.fc(states_1LF), next_1L, L)

    def decode(self, x_1LH: Tensor, next_1L: Tensor, L: int) -> tuple[Tensor, Tensor]:
        made, first = self.made, self.layers[0]
        hidden_LL = torch.ones(L, L, dtype=torch.bool).triu(1)
        if "layer_types" in made:
            assert set(made["layer_types"]) == {"sliding_attention"}
            hidden_LL = hidden_LL | torch.ones_like(hidden_LL).tril(-made["sliding_window"])
        mask = torch.zeros(L, L).masked_fill(hidden_LL, float("-inf"))[None, None]
        turn = self.rotary(x_1LH, 1 + torch.arange(L)[None])  # its positions begin at 1
        for layer in self.layers:
            if layer is first:
                normed = layer.hidden_norm(x_1LH)
                x_1LH = normed if made["norm_before_residual"] else x_1LH
                read = torch.cat([layer.input_layernorm(self.embed_tokens(next_1L)), normed], dim=-1)
            else:
                read = layer.input_layernorm(x_1LH)
            x_1LH = x_1LH + layer.self_attn(hidden_states=read, position_embeddings=turn, attention_mask=mask)[0]
            x_1LH = x_1LH + layer.mlp(layer.post_attention_layernorm(x_1LH))
        hidden_1LH = self.norm(x_1LH)
        return self.lm_head(hidden_1LH), hidden_1LH if made["norm_output"] else x_1LH


LAYER = {  # of a Llama config
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size", "attention_bias", "mlp_bias",
}  # fmt: skip


@pytest.mark.parametrize("draft_vocab", [12, 40])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_engine_reads_another_head(tmp_path: Path, variant: str, draft_vocab: int) -> None:
    """First and second drafts of every row by the rules of the package, from the config that vLLM makes of the folder."""
    out, config, embed_VW = exported(tmp_path, draft_vocab_size=draft_vocab, **VARIANTS[variant])
    L, steps = 9, 2
    states, _, ids_L = target_states(config, L)
    batch = SimpleNamespace(
        ids_BL=ids_L[None], mask_BL=None, states_BLF=torch.cat([states[i] for i in config["layer_ids"]], -1)[None], doc_BL=None,
        position_BL=None,
    )  # fmt: skip
    own = [logits for _, logits in load_head(tmp_path / "head").rows(batch, torch.arange(L - steps), embed_VW, steps)]
    made = as_vllm(out)
    states_1LF = torch.cat([states[i] for i in made[KEY]], -1)[None]
    model = Package(made, load_file(out / "model.safetensors")).eval()
    logits, handed = model(states_1LF[:, :-1], ids_L[None, 1:])
    torch.testing.assert_close(own[0], logits[0, : L - steps], rtol=0, atol=1e-5)
    fused = model.fc  # a second draft: the state handed on in place of the fused one
    for i in range(L - steps):
        x = states_1LF[:, : i + 1]
        if made["norm_before_fc"]:
            x = model.input_norm(x)
        if made["fc_norm"]:
            x = torch.cat([n(p) for n, p in zip(model.fc_norm, x.chunk(len(model.fc_norm), -1), strict=True)], -1)
        g = torch.cat([fused(x), handed[:, i : i + 1]], dim=1)
        second, _ = model.decode(g, ids_L[None, 1 : i + 3], i + 2)
        torch.testing.assert_close(own[1][i], second[0, -1], rtol=0, atol=1e-5)
    assert ("d2t" in model.tables) == (draft_vocab < 40)
    if draft_vocab < 40:
        assert torch.equal(model.tables["d2t"] + torch.arange(12), model.tables["t2d"].nonzero()[:, 0])


def test_config_is_that_of_the_format(tmp_path: Path) -> None:
    out, _, embed_VW = exported(tmp_path, dtype="bfloat16", norm_before_fc=True)
    config = read_config(out)
    ours, layer = config.pop("spectrain"), config.pop("transformer_layer_config")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    assert config == {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal], "verifier": VERIFIER,
        },
        "draft_vocab_size": 12, "target_hidden_size": 16, "norm_before_residual": False, "norm_before_fc": True, "fc_norm": False,
        "norm_output": False, KEY: [2, 4, 5], "embed_requires_grad": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }  # fmt: skip
    assert layer == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "dtype": "bfloat16", "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 100000.0, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "vocab_size": 40, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "num_aux_hidden_states": 3,
    }  # fmt: skip
    assert ours.items() >= {**made_with(head_config()), "hs_layer_ids": [2, 4, 5], "target_layers": 8}.items()
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], embed_VW.bfloat16())
    names = {"embed_tokens.weight", *head_tensors(head_config(norm_before_fc=True))}
    assert {name.replace("layers.0.", "midlayer.") for name in written} == names


def test_layers_above_the_first_have_a_norm_that_the_package_does_not_know(tmp_path: Path) -> None:
    out, _, _ = exported(tmp_path, num_hidden_layers=3)
    names = set(load_file(out / "model.safetensors"))
    assert "layers.2.input_layernorm.weight" in names and not any("hidden_norm" in n for n in names if not n.startswith("layers.0."))


def test_flag_that_is_missing_is_the_formats_own_default(tmp_path: Path) -> None:
    """vLLM takes a missing norm_before_residual for on in this format, and for off in a flat folder."""
    out, config, embed_VW = exported(tmp_path)
    said = {k: v for k, v in read_config(out).items() if k not in (*FLAGS, "target_hidden_size", "spectrain")}
    (out / "config.json").write_text(json.dumps(said))
    head, notes = head_from_flat(out, target_layers=8, vocab_size=40, embed_VW=embed_VW)
    assert {flag: getattr(head.config, flag) for flag in FLAGS} == {"norm_before_residual": True, **dict.fromkeys(FLAGS[1:], False)}
    assert len(notes) == 1 and "norm_before_residual is missing: on" in notes[0]
    # a flag among the layer's settings is not read by vLLM
    layer = said["transformer_layer_config"] | {"norm_output": True}
    (out / "config.json").write_text(json.dumps({**said, "transformer_layer_config": layer}))
    assert not head_from_flat(out, target_layers=8, vocab_size=40, embed_VW=embed_VW)[0].config.norm_output


def test_layer_of_another_model_is_taken_for_a_llama(tmp_path: Path) -> None:
    out, _, embed_VW = exported(tmp_path)
    config = read_config(out)
    other = config["transformer_layer_config"] | {"model_type": "qwen3"}
    for value, message in ((other, "model_type 'qwen3'"), ([], "settings of a layer")):
        (out / "config.json").write_text(json.dumps({**config, "transformer_layer_config": value}))
        with pytest.raises(ValueError, match=message):
            head_from_flat(out, target_layers=8, vocab_size=40, embed_VW=embed_VW)


def test_number_of_attention_heads_that_differences_leave_out_is_missed(tmp_path: Path) -> None:
    """32 is the default of the config's class, so a config of differences does not say it."""
    changes = {"hidden_size": 32, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 2, "target_hidden_size": 32}
    out, config, embed_VW = exported(tmp_path, **changes)
    said = read_config(out)
    for key in ("num_attention_heads", "head_dim"):
        del said["transformer_layer_config"][key]
    (out / "config.json").write_text(json.dumps(said))
    head, _ = head_from_flat(out, target_layers=8, vocab_size=40, embed_VW=embed_VW)
    assert (head.config.num_attention_heads, head.config.head_dim) == (32, 2)


def test_embedding_is_missing(tmp_path: Path) -> None:
    """The package gives a table that is not in the folder the values that lie in memory."""
    head = write_head(tmp_path / "head", head_config())
    with pytest.raises(ValueError, match="none was given.: name the target"):
        export_head(head, "speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_serves_the_folder_alone(tmp_path: Path) -> None:
    out, _, _ = exported(tmp_path)
    assert serve_command(out, "org/model", num_speculative_tokens=5) == f"vllm serve {out}"
    other = serve_command(out, "org/model", num_speculative_tokens=3)
    assert other.startswith("vllm serve org/model") and '"method": "eagle3"' in other
