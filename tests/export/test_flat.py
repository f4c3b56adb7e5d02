"""Flat EAGLE-3 folders read back: ours in every variant, and those of other trainers, made here from what is known of their layouts."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.export.eagle3 import export_eagle3
from spectrain.export.flat import head_from_flat, read_flat
from spectrain.heads.base import load_head, vocabulary_hash

HEADS = runpy.run_path(str(Path(__file__).with_name("small_heads.py")))
VARIANTS, head_config, head_tensors, target_ids, target_states, write_head = (
    HEADS[name] for name in ("VARIANTS", "head_config", "head_tensors", "target_ids", "target_states", "write_head")
)
KEY = "eagle_aux_hidden_state_layer_ids"
LAYERS = 8  # of the target; the default states are then hs[2], hs[4], hs[5]


def embedding(config: dict[str, Any]) -> Tensor:
    return target_states(config, 1)[1]


# Round trips.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_head_comes_back_whole(tmp_path: Path, variant: str, dtype: str) -> None:
    config = head_config(**VARIANTS[variant])
    head_dir, embed_VW = write_head(tmp_path / "head", config), embedding(config)
    out = export_eagle3(head_dir, tmp_path / "out", embed_VW=embed_VW, dtype=dtype)
    flat, written = read_flat(out, target_layers=LAYERS, embed_VW=embed_VW), head_tensors(config)
    assert flat.tensors.keys() == written.keys()
    for name, tensor in written.items():
        expected = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert flat.tensors[name].dtype == expected.dtype and torch.equal(flat.tensors[name], expected), name
    head, notes = head_from_flat(out, target_layers=LAYERS, vocab_size=40, embed_VW=embed_VW)
    before = load_head(head_dir)
    assert head.config == before.config and head.made_with.items() >= {"target": "org/model", "tokenizer_sha256": "1" * 64}.items()
    assert notes == ()
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in head.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_projection_of_another_trainer_is_lost(tmp_path: Path, dtype: str) -> None:
    """A folder without our file holds the product of projection and embedding alone."""
    config = head_config(**VARIANTS["narrower"])
    out = export_eagle3(write_head(tmp_path / "head", config), tmp_path / "out", embed_VW=embedding(config), dtype=dtype)
    (out / "embed_proj.spectrain").unlink()
    flat = read_flat(out, target_layers=LAYERS, embed_VW=embedding(config))
    assert flat.notes == ("embed_proj.weight is computed back from embed_tokens.weight",)
    expected = head_tensors(config)["embed_proj.weight"]
    torch.testing.assert_close(flat.tensors["embed_proj.weight"].float(), expected, rtol=0, atol=1e-5 if dtype == "float32" else 1e-2)


def test_projection_that_does_not_make_the_table_is_taken(tmp_path: Path) -> None:
    config = head_config(**VARIANTS["narrower"])
    out = export_eagle3(write_head(tmp_path / "head", config), tmp_path / "out", embed_VW=embedding(config))
    for other, message in ((torch.ones(8, 16), "no projection of the target's embedding"), (torch.ones(8, 15), r"is \[8, 15\], needed")):
        save_file({"embed_proj.weight": other}, out / "embed_proj.spectrain")
        with pytest.raises(ValueError, match=message):
            read_flat(out, target_layers=LAYERS, embed_VW=embedding(config))


def test_exported_head_over_the_whole_vocabulary_comes_back(tmp_path: Path) -> None:
    config = head_config(draft_vocab_size=40)
    out = export_eagle3(write_head(tmp_path / "head", config), tmp_path / "out")
    head, _ = head_from_flat(out, target_layers=LAYERS)
    assert head.target_ids.tolist() == list(range(40)) and head.t2d.all()


def test_folder_of_another_target_is_told_by_its_own_record(tmp_path: Path) -> None:
    out = export_eagle3(write_head(tmp_path / "head", head_config()), tmp_path / "out")
    with pytest.raises(ValueError, match="for a target of 8 layers, not 9"):
        read_flat(out, target_layers=9)
    tensors = load_file(out / "model.safetensors")
    ids_D, t2d_V = torch.arange(12), torch.arange(40) < 12
    save_file({**tensors, "d2t": ids_D - ids_D, "t2d": t2d_V}, out / "model.safetensors")
    with pytest.raises(ValueError, match="vocabulary is not the one"):
        read_flat(out, target_layers=LAYERS)


# Foreign folders: EAGLE-3 as published, without a word of ours.


def plain_config(**changes: Any) -> dict[str, Any]:
    """As in EAGLE's own folders: no ids, no flags, no rotary base."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "vocab_size": 40, "draft_vocab_size": 12, "tie_word_embeddings": False,
    }  # fmt: skip
    return {**config, **changes}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def renamed(tensors: dict[str, Tensor], **new: str) -> dict[str, Tensor]:
    """Names that begin with a key, beginning with its value instead; dots of the key as double underscores."""
    for key, start in new.items():
        old = key.replace("__", ".")
        tensors = {(start + n[len(old) :] if n.startswith(old) else n): t for n, t in tensors.items()}
    return tensors


def eagle(folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(plain_config(num_hidden_layers=40)))  # one of their configs names the target's layers
    torch.save(head_tensors(head_config()), folder / "pytorch_model.bin")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return folder, {"rope_parameters": rope}, ["weights of 1", "10,000", r"no layer ids: hs\[2, 4, 5\]"]


def specforge(folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    config = plain_config(rope_theta=5e5, rope_scaling=None, eagle_config={KEY: [1, 3, 4]}, max_position_embeddings=2048)
    tensors = {**head_tensors(head_config()), "embed_tokens.weight": embedding(head_config()).bfloat16()}
    rope = {"rope_type": "default", "rope_theta": 5e5}
    return write(folder, config, tensors), {"rope_parameters": rope, "max_position_embeddings": 2048}, []


def modelopt(folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    nested = {KEY: [0, 3, 5], "use_aux_hidden_state": True, "next_layer_regular": True, "use_mtp_layernorm": False}
    tensors = {**renamed(head_tensors(head_config()), midlayer="layers.0"), "fc.bias": torch.zeros(16)}
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0, "original_max_position_embeddings": 2048}
    return (
        write(folder, plain_config(rope_theta=1e6, rope_scaling=yarn, eagle_config=nested), tensors),
        {"rope_parameters": rope, "layer_ids": (1, 4, 6)},
        [],
    )


def automodel(folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    config = head_config(norm_output=True, fc_norm=True, layer_ids=[1, 3, 6])
    tensors = {(f"model.{n}" if n not in ("d2t", "t2d", "lm_head.weight") else n): t for n, t in head_tensors(config).items()}
    said = plain_config(
        architectures=["LlamaEagle3DraftModel"], rope_theta=1e4, fc_norm=True, norm_output=True, eagle_config={KEY: [0, 2, 5]}
    )
    return write(folder, said, tensors), {"norm_output": True, "fc_norm": True, "layer_ids": (1, 3, 6)}, ["norm_output is on"]


def speculators(folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Two layers behind a window, the last state named beside those that fc reads, copies of the target's tensors."""
    config = head_config(num_hidden_layers=2, norm_before_fc=True, norm_before_residual=True)
    tensors = renamed(head_tensors(config), midlayer="layers.0", above__0="layers.1")
    tensors |= {
        "embed_tokens.weight": embedding(config),
        "verifier_norm.weight": torch.ones(16),
        "verifier_lm_head.weight": torch.ones(12, 16),
    }
    layer = plain_config(
        num_hidden_layers=2, sliding_window=6, layer_types=["sliding_attention"] * 2, rope_parameters=head_config()["rope_parameters"]
    )
    said = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": layer, "draft_vocab_size": 12,
        "norm_before_fc": True, "norm_output": False, KEY: [1, 3, 4, 8], "tie_word_embeddings": False,
    }  # fmt: skip
    expected = {"num_hidden_layers": 2, "norm_before_fc": True, "norm_before_residual": True, "sliding_window": 6, "layer_ids": (1, 3, 4)}
    expected["rope_parameters"] = head_config()["rope_parameters"]
    return write(folder, said, tensors), expected, ["norm_before_residual is missing: on", "layer id 8 is the last state"]


def sglang(folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The older names of the norms before fc; a second layer whose norm is hidden_norm, beside one of ones; two files."""
    config = head_config(fc_norm=True, num_hidden_layers=2)
    tensors = renamed(head_tensors(config), above__0="layers.1", midlayer="layers.0")
    for j, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{j}.weight")
    tensors["layers.1.hidden_norm.weight"] = tensors["layers.1.input_layernorm.weight"]
    tensors["layers.1.input_layernorm.weight"] = torch.ones(16)
    folder.mkdir()
    said = plain_config(num_hidden_layers=2, use_aux_norm=True, rope_theta=1e5, eagle_config={KEY: [2, 4, 5]})
    (folder / "config.json").write_text(json.dumps(said))
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, some in parts.items():
        save_file({name: tensors[name].clone() for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = {"fc_norm": True, "num_hidden_layers": 2, "rope_parameters": head_config()["rope_parameters"]}
    return folder, expected, ["the norm that was trained is taken"]


TRAINERS: list[Callable[[Path], tuple[Path, dict[str, Any], list[str]]]] = [eagle, specforge, modelopt, automodel, speculators, sglang]


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda t: t.__name__)
def test_folders_of_other_trainers(tmp_path: Path, trainer: Callable[[Path], tuple[Path, dict[str, Any], list[str]]]) -> None:
    folder, expected, said = trainer(tmp_path / "theirs")
    base = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "layer_ids": (2, 4, 5), "target_layers": LAYERS}
    config = head_config(**{**base, **expected})
    head, notes = head_from_flat(folder, target_layers=LAYERS, vocab_size=40, embed_VW=embedding(config))
    found = head.config.model_dump()
    assert found == {**found, **{key: value for key, value in config.items() if key not in ("head", "format")}}
    assert {flag for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if found[flag]} == {
        key for key, value in expected.items() if value is True
    }
    state = head.state_dict()
    assert state.keys() == head_tensors(config).keys() and all(torch.equal(state[n], t) for n, t in head_tensors(config).items())
    assert len(notes) == len(said)
    for note, pattern in zip(notes, said, strict=True):
        assert re.search(pattern, note), notes


def read_ids(tmp_path: Path, *, layers: int = LAYERS, fused: int = 3, config: dict[str, Any] | None = None, **arguments: Any) -> list[int]:
    said = plain_config(target_hidden_size=16, rope_theta=1e4, **(config or {}))
    folder = write(tmp_path / "theirs", said, head_tensors(head_config(layer_ids=list(range(1, fused + 1)))))
    ids: list[int] = read_flat(folder, target_layers=layers, **arguments).config["layer_ids"]
    return ids


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ({KEY: [1, 4, 6]}, {}, [1, 4, 6]),
        ({KEY: [1, 4, 6], "eagle_config": {KEY: [0, 3, 5]}}, {}, [1, 4, 6]),
        ({KEY: [1, 3, 4], "eagle_config": {KEY: [0, 2, 3]}}, {}, [1, 3, 4]),
        ({"eagle_config": {KEY: [2, 4, 5]}}, {}, [2, 4, 5]),
        ({"eagle_config": {KEY: [1, 3, 4]}}, {}, [2, 4, 5]),
        ({"eagle_config": {KEY: [1, 3, 4]}}, {"notation": "hs"}, [1, 3, 4]),
        ({"eagle_config": {KEY: [1, 4, 6]}}, {"notation": "hs"}, [1, 4, 6]),
        ({"eagle_config": {KEY: [1, 4, 6]}}, {"notation": "output"}, [2, 5, 7]),
        ({"eagle_config": {KEY: [6, 1, 4]}}, {"notation": "hs"}, [1, 4, 6]),
        ({KEY: [1, 4, 6]}, {"layer_ids": [2, 3, 4]}, [2, 3, 4]),
        ({}, {"layers": 30}, [2, 15, 27]),
    ],
)
def test_layer_ids_count_states_or_outputs(tmp_path: Path, config: dict[str, Any], arguments: dict[str, Any], expected: list[int]) -> None:
    assert read_ids(tmp_path, config=config, **arguments) == expected


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"eagle_config": {KEY: [1, 4, 6]}}, {}, "notation='hs' or 'output'"),
        ({KEY: [1, 3, 4]}, {}, "notation='hs'"),  # their training default, under a key that engines take for states
        ({KEY: [1, 4, 6], "eagle_config": {KEY: [1, 4, 6]}}, {}, "notation='hs'"),
        ({}, {"layers": 6}, r"hs\[2, 3, 3\] are named and fc.weight reads 3"),
        ({KEY: [1, 4]}, {}, r"hs\[1, 4\] are named and fc.weight reads 3"),
        ({KEY: [1, 4, 9]}, {}, "different ones from 1 to 7"),
        ({KEY: [0, 4, 6]}, {}, "different ones from 1 to 7"),
        ({}, {"layer_ids": [2, 2, 4]}, "layer_ids"),
        ({}, {"fused": 4}, "fc.weight reads 4 of them"),
    ],
)
def test_layer_ids_that_do_not_tell_are_asked_for(tmp_path: Path, config: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_ids(tmp_path, config=config, **arguments)


# Draft vocabulary.

IDS_D = target_ids(head_config())
ORDER_D = torch.arange(12).flip(0)
OFFSETS = {
    "ids": ({"d2t": IDS_D}, "target ids instead of offsets"),
    "32 bits": ({"d2t": (IDS_D - torch.arange(12)).int()}, None),
    "no t2d": ({"t2d": None}, None),
    "no d2t": ({"d2t": None}, None),
    "out of order": (
        {"d2t": IDS_D[ORDER_D] - torch.arange(12), "lm_head.weight": head_tensors(head_config())["lm_head.weight"][ORDER_D]},
        "sorted",
    ),
}


@pytest.mark.parametrize("table", OFFSETS)
def test_tables_of_the_draft_vocabulary(tmp_path: Path, table: str) -> None:
    changes, note = OFFSETS[table]
    tensors = {name: tensor for name, tensor in {**head_tensors(head_config()), **changes}.items() if tensor is not None}
    folder = write(tmp_path / "theirs", plain_config(**{"rope_theta": 1e4, KEY: [2, 4, 5]}), tensors)
    flat = read_flat(folder, target_layers=LAYERS)
    for name in ("d2t", "t2d", "lm_head.weight"):
        assert torch.equal(flat.tensors[name], head_tensors(head_config())[name]), name
    assert flat.notes == () if note is None else note in flat.notes[0]


def test_padded_vocabulary_of_the_target_is_taken_from_the_target(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", plain_config(rope_theta=1e4), head_tensors(head_config()))
    flat = read_flat(folder, target_layers=LAYERS, vocab_size=48, layer_ids=[2, 4, 5])
    assert flat.notes == ("layer ids hs[2, 4, 5] as given, whatever the folder names",)
    assert flat.config["vocab_size"] == 48 and len(flat.tensors["t2d"]) == 48
    assert vocabulary_hash(flat.tensors["t2d"].nonzero()[:, 0]) == vocabulary_hash(IDS_D)


# What is refused.


def spoiled(**changes: Tensor | None) -> dict[str, Tensor]:
    new = {**head_tensors(head_config()), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    return {name: tensor for name, tensor in new.items() if tensor is not None}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


EMBED_VW = embedding(head_config())
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "other embedding": ({}, spoiled(embed_tokens__weight=random(40, 16)), "is not the target's"),
    "embedding a little trained": ({}, spoiled(embed_tokens__weight=EMBED_VW + 0.05 * random(40, 16)), "is not the target's"),
    "other width, no embedding": ({"target_hidden_size": 12, KEY: [1, 2, 4, 6]}, spoiled(), "16 wide, its target 12"),
    "P-EAGLE": ({}, spoiled(mask_hidden=random(1, 1, 48)), "P-EAGLE"),
    "DFlash": ({"dflash_config": {}}, spoiled(), "DFlash"),
    "other speculators": ({"speculators_model_type": "mtp"}, spoiled(), "speculators_model_type 'mtp'"),
    "Qwen3 layers": ({}, spoiled(layers__0__self_attn__q_norm__weight=random(8)), "Qwen3 layers"),
    "EAGLE-1": ({}, spoiled(midlayer__hidden_norm__weight=None), "EAGLE-1"),
    "biases": ({}, spoiled(fc__bias=random(16)), "fc.bias is not zero"),
    "no output rows": ({}, spoiled(lm_head__weight=None), "lacks lm_head.weight"),
    "no norm": ({}, spoiled(midlayer__post_attention_layernorm__weight=None), "lacks midlayer.post_attention"),
    "more": ({}, spoiled(midlayer__extra__weight=random(3)), "has midlayer.extra.weight"),
    "a flag without its tensors": ({"fc_norm": True}, spoiled(), "lacks fc_norm.0.weight"),
    "misshapen": ({}, spoiled(midlayer__mlp__up_proj__weight=random(23, 16)), r"up_proj.weight \[23, 16\], needed \[24, 16\]"),
    "head size": ({"head_dim": 16}, spoiled(), "num_attention_heads 4 and head_dim 16 for 32 rows"),
    "mixed layers": ({"num_hidden_layers": 2, "layer_types": ["mamba", "sliding_attention"]}, spoiled(), "layer_types"),
    "part of a head turned": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, spoiled(), "turns the whole"),
    "no table": ({}, spoiled(d2t=None, t2d=None), "lacks d2t"),
    "table out of range": ({}, spoiled(d2t=IDS_D + 100, t2d=None), "needed: this head is of another target"),
    "tables disagree": ({}, spoiled(t2d=torch.arange(40) < 12), "t2d marks 12 others"),
    "NaN": ({}, spoiled(norm__weight=torch.full((16,), float("nan"))), "NaN"),
    "8 bits": ({}, spoiled(fc__weight=torch.ones(16, 48).to(torch.float8_e4m3fn)), "float8"),
    "activation": ({"hidden_act": "gelu"}, spoiled(), "gelu"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_no_head_here_can_be_is_refused(tmp_path: Path, fault: str) -> None:
    config, tensors, message = FAULTS[fault]
    folder = write(tmp_path / "theirs", plain_config(rope_theta=1e4, **config), tensors)
    embed_VW = None if "target_hidden_size" in config else EMBED_VW
    with pytest.raises(ValueError, match=message):
        head_from_flat(folder, target_layers=LAYERS, embed_VW=embed_VW)


def test_other_embedding_of_another_width_is_no_projection(tmp_path: Path) -> None:
    config = head_config(**VARIANTS["narrower"])
    tensors = {name: tensor for name, tensor in head_tensors(config).items() if name != "embed_proj.weight"}
    said = plain_config(hidden_size=8, target_hidden_size=16, rope_theta=1e4)
    folder = write(tmp_path / "theirs", said, {**tensors, "embed_tokens.weight": random(40, 8)})
    with pytest.raises(ValueError, match="no projection of the target's embedding"):
        read_flat(folder, target_layers=LAYERS, embed_VW=EMBED_VW)
    with pytest.raises(ValueError, match="is for a target of width 16, this one is 12"):
        read_flat(folder, target_layers=LAYERS, embed_VW=random(40, 12))


def test_embedding_is_not_taken_on_trust(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", plain_config(rope_theta=1e4), spoiled(embed_tokens__weight=EMBED_VW))
    with pytest.raises(ValueError, match="give the target's"):
        read_flat(folder, target_layers=LAYERS)


def test_flags_can_be_given(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", plain_config(rope_theta=1e4, norm_output=True), spoiled())
    flat = read_flat(folder, target_layers=LAYERS, flags={"norm_output": False, "norm_before_residual": True})
    assert (flat.config["norm_output"], flat.config["norm_before_residual"]) == (False, True)
    with pytest.raises(ValueError, match="flags swish are unknown"):
        read_flat(folder, target_layers=LAYERS, flags={"swish": True})


class Surprise:
    """What a folder from elsewhere must not run."""

    def __reduce__(self) -> Any:
        return (print, ("surprise",))


def test_pickles_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(plain_config()))
    torch.save({"fc.weight": Surprise()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin holds more than plain tensors.*convert it to model.safetensors"):
        read_flat(tmp_path, target_layers=LAYERS)
    assert "surprise" not in capsys.readouterr().out


def test_empty_and_half_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json is missing"):
        read_flat(tmp_path, target_layers=LAYERS)
    (tmp_path / "config.json").write_text(json.dumps(plain_config()))
    with pytest.raises(ValueError, match="neither model.safetensors"):
        read_flat(tmp_path, target_layers=LAYERS)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks model-1.safetensors"):
        read_flat(tmp_path, target_layers=LAYERS)
