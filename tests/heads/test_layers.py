"""Rotary positions, norm and MLP of the heads against transformers' own; residual blocks."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from spectrain.heads.eagle3 import Eagle3
from spectrain.heads.layers import GatedMLP, ResidualBlock, RMSNorm, newest, rotary_frequencies, rotary_table, rotate
from spectrain.target.model import Target

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 64}


def test_base_of_the_target_is_not_read() -> None:
    """PS1: base 1e6 and head size 128 give frequency 63 = 1.241e-6."""
    frequencies, scaling = rotary_frequencies({"rope_type": "default", "rope_theta": 1e6}, head_dim=128, max_positions=4096)
    assert frequencies[63].item() == pytest.approx(1.241e-6, rel=1e-3) and scaling == 1.0
    assert frequencies[1].item() == pytest.approx(0.805842, abs=1e-6)


@pytest.mark.parametrize(
    "parameters", [{"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, LLAMA3, YARN]
)
def test_scaling_is_dropped(parameters: dict) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=16, max_position_embeddings=512, rope_parameters=dict(parameters))
    frequencies, scaling = rotary_frequencies(config.rope_parameters, head_dim=16, max_positions=512)
    position = torch.tensor([[0, 1, 5, 63, 64, 300, 511]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), position)
    mine = rotary_table(position, frequencies, scaling)
    torch.testing.assert_close(mine[0], cos, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mine[1], sin, atol=1e-6, rtol=1e-6)
    q = torch.randn(1, 7, 2, 16, generator=torch.Generator().manual_seed(0))
    theirs, _ = apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    torch.testing.assert_close(rotate(q, *mine), theirs.transpose(1, 2), atol=1e-6, rtol=1e-6)


def test_scaling_with_factors_for_each_frequency_is_a_traceback() -> None:
    """PS1: longrope (Phi-3 of 128k); the factors of short prompts, with which its own module begins."""
    parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [9.0] * 4, "factor": 4.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=512, rope_parameters=dict(parameters))
    theirs = LlamaRotaryEmbedding(config)
    frequencies, scaling = rotary_frequencies(parameters, head_dim=8, max_positions=512)
    torch.testing.assert_close(frequencies, theirs.inv_freq)
    assert scaling == pytest.approx(theirs.attention_scaling) and scaling > 1


@pytest.mark.parametrize(
    "old", [{"rope_theta": 1e6}, {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}]
)
def test_old_names_of_the_settings_are_lost(make_target, make_head, old: dict) -> None:
    """PS1: targets whose config has the fields of older transformers."""
    config = LlamaConfig.from_dict({"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 512, **old})
    target = make_target(rope_parameters=config.rope_parameters)
    head = make_head(target)
    assert head.config.rope_parameters["rope_theta"] == old["rope_theta"]
    assert head.config.rope_parameters.get("factor") == old.get("rope_scaling", {}).get("factor")
    theirs = LlamaRotaryEmbedding(target.model.config).inv_freq
    torch.testing.assert_close(head._frequencies, theirs)


def test_cast_ruins_the_positions(target: Target, make_head) -> None:
    head: Eagle3 = make_head(target, head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6}).to(torch.bfloat16)
    assert head._frequencies.dtype == torch.float32 and head._frequencies[1].item() == pytest.approx(0.805842, abs=1e-6)
    cos, _ = head._rotary(torch.tensor([[4096]]))
    assert cos.dtype == torch.float32 and cos[0, 0, 1].item() == pytest.approx(torch.tensor(4096 * 0.8058422).cos().item(), abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_mlp_are_not_the_targets(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    theirs, mine = LlamaRMSNorm(16, eps=1e-5).to(dtype), RMSNorm(16, 1e-5).to(dtype)
    weight, x = torch.randn(16, generator=g).to(dtype), torch.randn(3, 16, generator=g).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        mine.weight.copy_(weight)
        assert torch.equal(mine(x), theirs(x))
        their_mlp, my_mlp = (
            LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2)).to(dtype),
            GatedMLP(16, 24).to(dtype),
        )
        my_mlp.load_state_dict(their_mlp.state_dict())
        assert torch.equal(my_mlp(x), their_mlp(x))


@torch.no_grad()
def test_residual_block_is_not_medusas() -> None:
    """x + silu(W x + b), at first x itself; of several widths the residual is a projection."""
    block, x = ResidualBlock(6), torch.randn(5, 6)
    assert torch.equal(block(x), x)
    block.linear.weight.normal_()
    block.linear.bias.normal_()
    z = x @ block.linear.weight.T + block.linear.bias
    torch.testing.assert_close(block(x), x + z / (1 + (-z).exp()))
    wide, y = ResidualBlock(6, inputs=3), torch.randn(5, 18)
    torch.testing.assert_close(wide(y), y @ wide.res_connection.weight.T + wide.res_connection.bias)


@torch.no_grad()
def test_newest_of_a_row_is_another() -> None:
    x_BNH, before_B1H = torch.arange(24.0).reshape(3, 4, 2), torch.full((3, 1, 2), -1.0)
    assert newest(x_BNH, torch.tensor([4, 1, 0]), before_B1H).tolist() == [[[6.0, 7.0]], [[8.0, 9.0]], [[-1.0, -1.0]]]
    assert newest(x_BNH, torch.tensor([2, 3, 1]), None)[:, 0, 0].tolist() == [2.0, 12.0, 16.0]
