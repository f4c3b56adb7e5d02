"""EX2: an exported config that is not the head's. Whoever has the folder alone computes what the trained head computes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrain.export.eagle3 import export_eagle3
from spectrain.export.flat import head_from_flat
from spectrain.heads.base import save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with

STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "num_hidden_layers": {"num_hidden_layers": 3},
    "sliding_window": {"sliding_window": 4},
    "hidden_size": {"hidden_size": 24},
    "rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    "eps": {"rms_norm_eps": 0.5},
    "head_dim": {"head_dim": 16},
}


def exported(head: Any, target: Target, folder: Path, **how: Any) -> Path:
    save_head(head, folder / "head", run_yaml="", made_with=made_with(target, {}))
    return export_eagle3(folder / "head", folder / "out", embed_VW=target.embedding_VW, **how)


def logits(head: Any, target: Target) -> Tensor:
    """[K, R, Vd] over a line of random states and tokens."""
    generator, L = torch.Generator().manual_seed(1), 12
    states_BLF = 3 * torch.randn(1, L, len(head.layer_ids) * target.embedding_VW.shape[1], generator=generator)
    ids_BL = torch.randint(target.vocab_size, (1, L), generator=generator)
    batch = SimpleNamespace(ids_BL=ids_BL, mask_BL=torch.ones(1, L, dtype=torch.bool), states_BLF=states_BLF, doc_BL=None, position_BL=None)
    with torch.no_grad():
        return torch.stack([step for _, step in head.rows(batch, torch.arange(L - STEPS), target.embedding_VW, STEPS)])


def rebuilt(folder: Path, target: Target) -> Any:
    return head_from_flat(folder, target_layers=target.num_layers, vocab_size=target.vocab_size, embed_VW=target.embedding_VW)[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_option_of_training_is_missing_from_the_export(target: Target, make_head: Callable[..., Any], tmp_path: Path, option: str) -> None:
    head = make_head(target, **OPTIONS[option])
    with torch.no_grad():
        for parameter in head.parameters():  # norms that are left out or swapped must show
            if parameter.dim() == 1:
                parameter.mul_(torch.linspace(0.5, 2.0, len(parameter)))
    torch.testing.assert_close(logits(rebuilt(exported(head, target, tmp_path), target), target), logits(head, target), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "away"),
    [("norm_before_residual",) * 2, ("norm_output",) * 2, ("sliding_window", "layer_types"), ("eps", "rms_norm_eps")],
)  # fmt: skip
def test_config_without_the_option_is_another_head(
    target: Target, make_head: Callable[..., Any], tmp_path: Path, option: str, away: str
) -> None:
    head = make_head(target, **OPTIONS[option])
    out = exported(head, target, tmp_path)
    config = json.loads((out / "config.json").read_text())
    del config[away]
    config["eagle_config"].pop("return_hidden_post_norm")
    (out / "config.json").write_text(json.dumps(config))
    assert (logits(rebuilt(out, target), target) - logits(head, target)).abs().max() > 1e-3


def test_head_size_is_taken_for_width_over_heads(make_target: Callable[..., Target], make_head: Callable[..., Any], tmp_path: Path) -> None:
    """A sixteenth of width 5120, 64 heads and head size 128."""
    wide = make_target(hidden_size=320, num_attention_heads=64, num_key_value_heads=8, head_dim=8)
    out = exported(make_head(wide, num_attention_heads=64, num_key_value_heads=8, head_dim=8), wide, tmp_path)
    rows = load_file(out / "model.safetensors")["midlayer.self_attn.q_proj.weight"].shape[0]
    assert json.loads((out / "config.json").read_text())["head_dim"] == 8 and rows == 512
    assert rebuilt(out, wide).config.head_dim == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_of_another_precision_than_the_config_says(
    target: Target, make_head: Callable[..., Any], tmp_path: Path, dtype: str
) -> None:
    out = exported(make_head(target, num_hidden_layers=2, hidden_size=24), target, tmp_path, dtype=dtype)
    tensors = load_file(out / "model.safetensors")
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {getattr(torch, dtype)}
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype


def test_listed_layers_are_not_those_that_the_head_reads(target: Target, make_head: Callable[..., Any], tmp_path: Path) -> None:
    """As many layers times the target's width as fc reads; a list with the final layer on top of them is cut, any other is refused."""
    out = exported(make_head(target), target, tmp_path)
    config, fused = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")["fc.weight"].shape[1]
    assert len(config["eagle_aux_hidden_state_layer_ids"]) * config["target_hidden_size"] == fused
    del config["spectrain"], config["eagle_config"]  # as another trainer would write it
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, target.num_layers]
    (out / "config.json").write_text(json.dumps(config))
    assert rebuilt(out, target).layer_ids == (1, 2)
    config["eagle_aux_hidden_state_layer_ids"] = [1]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"states hs\[1\] are named and fc.weight reads 2 of them"):
        rebuilt(out, target)
