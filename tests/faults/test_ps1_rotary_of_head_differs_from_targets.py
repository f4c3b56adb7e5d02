"""PS1: base and scaling of the head's rotary positions are the target's, from either field layout, through saving and a cast.

Legend: D head size.
"""

from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.config import HeadConfig
from spectrain.heads.base import load_head, save_head
from spectrain.heads.layers import rotary_frequencies, rotary_settings
from spectrain.target.model import Target
from spectrain.training.setup import new_head

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def head_of(target: Target):
    return new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=9), target, (), seed=0)


def test_base_is_not_the_targets(make_target) -> None:
    head = head_of(make_target(head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    assert head._frequencies[63].item() == pytest.approx(1.241e-6, rel=1e-3)
    assert head._frequencies[1].item() == pytest.approx(0.805842, abs=1e-6)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=lambda s: s["rope_type"])
def test_scaling_is_dropped(make_target, scaling: dict, tmp_path: Path) -> None:
    """The same frequencies and attention factor as transformers' own module has, in the new head, saved and loaded again."""
    target = make_target(head_dim=16, max_position_embeddings=512, rope_parameters={**scaling, "rope_theta": 1e5})
    theirs = LlamaRotaryEmbedding(target.config)
    head = head_of(target)
    save_head(head, tmp_path / "head", run_yaml="", made_with={})
    for one in (head, load_head(tmp_path / "head")):
        torch.testing.assert_close(one._frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
        assert one._scaling == pytest.approx(theirs.attention_scaling) and one.config.rope_parameters["factor"] == 8.0
    x = torch.zeros(1, 300, 16)
    cos, sin = theirs(x, torch.arange(300)[None])
    torch.testing.assert_close(head._rotary(torch.arange(300)), (cos[0], sin[0]), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, None], ids=["llama3", "yarn", "none"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_old_field_layout_reads_otherwise(scaling: dict | None, kind: str) -> None:
    """`rope_theta` and `rope_scaling` of earlier versions, its type under either name, say what `rope_parameters` says."""
    old_scaling = scaling and {kind: scaling["rope_type"], **{n: v for n, v in scaling.items() if n != "rope_type"}}
    old = {"rope_theta": 1e5, "rope_scaling": old_scaling, "max_position_embeddings": 512}
    new = {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": 1e5}}
    assert rotary_settings(old) == rotary_settings(new) == rotary_settings(LlamaConfig(**old)) == new["rope_parameters"]
    both = [rotary_frequencies(rotary_settings(fields), head_dim=16, max_positions=512) for fields in (old, new)]
    assert torch.equal(both[0][0], both[1][0]) and both[0][1] == both[1][1]


def test_layers_with_settings_of_their_own_are_a_traceback() -> None:
    found = rotary_settings(Gemma3TextConfig(num_hidden_layers=6))
    assert found == {"rope_type": "default", "rope_theta": 1e6}  # of full attention; those with a window have 10,000
    with pytest.raises(ValueError, match="names no base of the rotary positions"):
        rotary_settings({"max_position_embeddings": 512})


def test_cast_ruins_the_positions(make_target) -> None:
    head = head_of(make_target(head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    before = head._rotary(torch.tensor([4096]))
    head = head.bfloat16()
    assert head._frequencies.dtype == torch.float32 and head._frequencies[1].item() == pytest.approx(0.805842, abs=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, head._rotary(torch.tensor([4096])), strict=True))
