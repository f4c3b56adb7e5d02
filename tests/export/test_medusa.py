"""Medusa folders: read by the rules of vLLM, the original code and TGI as written down here, and read back by the package.

Legend: L tokens, W width of the target, V its vocabulary, D draft vocabulary, K heads.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from spectrain.config import HeadConfig
from spectrain.export.engines import export_head, needs_target, serve_command
from spectrain.export.families import head_from_folder
from spectrain.heads.base import LAST, load_head, save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with, new_head

HEADS = {
    "own outputs": {},
    "shared output": {"shared_output": True},
    "two blocks": {"num_layers": 2},
    "whole vocabulary": {"draft_vocab_size": None},
    "shared, whole vocabulary": {"shared_output": True, "draft_vocab_size": None},
}


def medusa(target: Target, folder: Path, **settings: Any) -> Path:
    """A head directory with random weights: a started head would say the same at every depth."""
    config = HeadConfig(**{"kind": "medusa", "num_heads": 3, "draft_vocab_size": 37, **settings})
    counts_V = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(1)) * 1000
    head = new_head(config, target, [], seed=0, counts_V=counts_V.long() + 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    save_head(head, folder, run_yaml="", made_with=made_with(target, {}))
    return folder


def last_states(target: Target) -> Tensor:
    ids_1L = torch.randint(6, 100, (1, 20), generator=torch.Generator().manual_seed(3))
    out = target.forward(
        ids_1L, positions_BN=torch.arange(20)[None], mask=None, cache=None, layer_ids=(LAST,), logits_to_keep=1
    )  # fmt: skip
    assert out.states_BNF is not None
    return out.states_BNF[0]


def head_logits(head_dir: Path, states_LW: Tensor, steps: int) -> tuple[list[Tensor], Tensor]:
    head = load_head(head_dir)
    L = len(states_LW)
    batch = SimpleNamespace(ids_BL=torch.zeros(1, L, dtype=torch.long), states_BLF=states_LW[None], doc_BL=None, position_BL=None)
    return [logits for _, logits in head.rows(batch, torch.arange(L), torch.zeros(1), steps)], head.target_ids


# Readers that share nothing with the package.


def by_vllm(folder: Path, states_LW: Tensor) -> list[Tensor]:
    """Logits [L, V] of each head, as vLLM 0.32's models/medusa.py and configs/medusa.py have them."""
    config = json.loads((folder / "config.json").read_text())
    for key in list(config):
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    V, cut = config["vocab_size"], config.get("truncated_vocab_size") or config["vocab_size"]
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 1 and config["hidden_size"] == states_LW.shape[1]
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(files[0]).items():
        parts = name.split(".")
        if parts[0].isdigit() and parts[1].isdigit():
            bias = parts[-1]
            name = f"blocks.{parts[0]}.layers.{parts[1]}.{bias}" if "linear" in parts else f"lm_heads.{parts[0]}.weight"
        weights[name] = tensor
    assert cut == V  # else it makes a parameter of token_map, which its own check then misses in the file
    weights.pop("token_map", None)
    found = []
    for k in range(config["num_heads"]):
        x_LW = states_LW
        for j in range(config["num_hidden_layers"]):
            y_LW = x_LW @ weights[f"blocks.{k}.layers.{j}.weight"].T
            if config.get("medusa_fc_bias", False):
                y_LW = y_LW + weights[f"blocks.{k}.layers.{j}.bias"]
            x_LW = x_LW + silu(y_LW)
        rows = weights["lm_head.weight" if config.get("original_lm_head") else f"lm_heads.{k}.weight"]
        assert len(rows) == V  # else the engine refuses the tensor
        found.append(x_LW @ rows.T)
    return found


class OriginalBlock(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


def by_original(folder: Path, states_LW: Tensor, vocab_size: int) -> list[Tensor]:
    """As the original code builds and loads its heads, from its pickle."""
    config, W = json.loads((folder / "config.json").read_text()), states_LW.shape[1]
    heads = torch.nn.ModuleList(
        torch.nn.Sequential(*([OriginalBlock(W)] * config["medusa_num_layers"]), torch.nn.Linear(W, vocab_size, bias=False))
        for _ in range(config["medusa_num_heads"])
    )
    told = heads.load_state_dict(torch.load(folder / "medusa_lm_head.pt", weights_only=True), strict=False)
    assert not told.missing_keys and set(told.unexpected_keys) <= {"token_map"}
    return [head(states_LW) for head in heads]


def by_tgi(folder: Path, states_LW: Tensor) -> list[Tensor]:
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "medusa_lm_head.safetensors")
    found = []
    for i in range(config["medusa_num_heads"]):
        x_LW = states_LW
        for j in range(config["medusa_num_layers"]):
            x_LW = x_LW + silu(x_LW @ weights[f"{i}.{j}.linear.weight"].T + weights[f"{i}.{j}.linear.bias"])
        found.append(x_LW @ weights[f"{i}.{config['medusa_num_layers']}.weight"].T)
    return found


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_engine_reads_another_head(target: Target, tmp_path: Path, name: str) -> None:
    """vLLM from both folders, the original code and TGI from the original one: the head's logits, and no other id ever on top."""
    head_dir, states_LW = medusa(target, tmp_path / "head", **HEADS[name]), last_states(target)
    own_K, ids_D = head_logits(head_dir, states_LW, 3)
    read = {"vllm": by_vllm(export_head(head_dir, "vllm", tmp_path / "vllm"), states_LW)}
    if HEADS[name].get("num_layers", 1) == 1:
        original = export_head(head_dir, "medusa", tmp_path / "original")
        read["original in vllm"] = by_vllm(original, states_LW)
        read["original"], read["tgi"] = by_original(original, states_LW, target.vocab_size), by_tgi(original, states_LW)
    for reader, found_K in read.items():
        assert len(found_K) == len(own_K) == 3
        for own_LD, found_LV in zip(own_K, found_K, strict=True):
            torch.testing.assert_close(found_LV[:, ids_D], own_LD, rtol=0, atol=1e-5, msg=reader)
            assert torch.equal(found_LV.argmax(-1), ids_D[own_LD.argmax(-1)]), reader


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"])
def test_published_folder_is_not_taken(target: Target, tmp_path: Path, file: str) -> None:
    """Its config says 2 heads where there are 3, or there is none; keys with and without the module's name."""
    generator = torch.Generator().manual_seed(4)
    shapes = {f"{k}.0.linear.{p}": (32, 32) if p == "weight" else (32,) for k in range(3) for p in ("weight", "bias")}
    tensors = {n: torch.randn(s, generator=generator) for n, s in (shapes | {f"{k}.1.weight": (100, 32) for k in range(3)}).items()}
    prefix = "medusa_head." if file == "pytorch_model.bin" else ""
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    (tmp_path / "theirs").mkdir()
    if file.endswith("safetensors"):
        save_file(named, tmp_path / "theirs" / file)
    else:
        torch.save(named, tmp_path / "theirs" / file)
        (tmp_path / "theirs/config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    head, notes = head_from_folder(tmp_path / "theirs", target)
    assert (head.config.num_heads, head.config.num_layers, head.config.shared_output, notes) == (3, 1, False, ())
    assert torch.equal(head.lm_head[2].weight, tensors["2.1.weight"])
    assert torch.equal(head.heads[1][0].linear.bias, tensors["1.0.linear.bias"])


def test_output_layers_that_are_the_targets_are_missed(target: Target, tmp_path: Path) -> None:
    """TGI's second version: blocks alone. Rows beyond the tokenizer's ids are left out."""
    (tmp_path / "theirs").mkdir()
    tensors = {f"{k}.0.linear.weight": torch.full((32, 32), float(k)) for k in range(2)}
    save_file(tensors, tmp_path / "theirs/medusa_lm_head.safetensors")
    padded = Target(model=target.model, tokenizer=target.tokenizer, name="padded")
    padded.__dict__["num_ids"] = 90
    head, notes = head_from_folder(tmp_path / "theirs", padded)
    assert head.config.shared_output and torch.equal(head.lm_head[0].weight, target.output_VW[:90])
    assert [note.split(":")[0] for note in notes] == ["no output layers", "rows from 90 on are no tokens of the tokenizer"]
    assert not head.heads[1][0].linear.bias.any()


FAULTS = {
    "sequential head": ({"sequential_head.weight": torch.zeros(32, 32)}, "holds sequential_head.weight, which is no part of a Medusa head"),
    "lost output layer": ({"1.1.weight": None}, "blocks of 2 heads and 1 output layers"),
    "lost block": ({"1.0.linear.weight": None}, "does not hold the weights of this head"),
    "another target": ({"0.1.weight": torch.zeros(99, 32)}, "output layers of 99 rows, tiny has 100 ids"),
    "NaN": ({"0.0.linear.bias": torch.full((32,), torch.nan)}, "NaN or infinite values in heads.0.0.linear.bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_unsound_folder_is_read(target: Target, tmp_path: Path, fault: str) -> None:
    tensors = load_file(export_head(medusa(target, tmp_path / "head", num_heads=2, draft_vocab_size=None), "medusa", tmp_path / "out")
                        / "medusa_lm_head.safetensors")  # fmt: skip
    changes, message = FAULTS[fault]
    (tmp_path / "theirs").mkdir()
    save_file({n: t for n, t in {**tensors, **changes}.items() if t is not None}, tmp_path / "theirs/model.safetensors")
    with pytest.raises(ValueError, match=message):
        head_from_folder(tmp_path / "theirs", target)


def test_folder_of_another_vocabulary_or_depth_is_taken(target: Target, make_target: Any, tmp_path: Path) -> None:
    out = export_head(medusa(target, tmp_path / "head"), "vllm", tmp_path / "out")
    with pytest.raises(ValueError, match="for a target of 3 layers, not 2"):
        head_from_folder(out, make_target(num_hidden_layers=2))
    tensors = load_file(out / "model.safetensors")
    save_file({**tensors, "token_map": torch.arange(37)}, out / "model.safetensors")
    with pytest.raises(ValueError, match="vocabulary is not the one"):
        head_from_folder(out, target)


def test_map_of_ids_that_are_none_is_a_traceback(target: Target, tmp_path: Path) -> None:
    out = export_head(medusa(target, tmp_path / "head"), "vllm", tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    for map_D, message in ((10**6 + torch.arange(37), "from 1000000 to 1000036"), (torch.zeros(37, dtype=torch.complex64), "no list")):
        save_file({**tensors, "token_map": map_D}, out / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            head_from_folder(out, target)


def test_rows_of_the_target_are_trained_with_the_head(target: Target, tmp_path: Path) -> None:
    """A folder without output layers takes the target's rows: as a copy."""
    W = target.output_VW.shape[1]
    torch.save({"0.0.linear.weight": torch.eye(W)}, tmp_path / "medusa_lm_head.pt")
    head, notes = head_from_folder(tmp_path, target, layer_ids=[-1])
    assert torch.equal(head.lm_head[0].weight, target.output_VW) and not any("layer ids" in note for note in notes)
    assert head.lm_head[0].weight.data_ptr() != target.output_VW.data_ptr()
    assert "not looked at" in head_from_folder(tmp_path, target, layer_ids=[1, 2])[1][-1]


def test_missing_rows_win() -> None:
    from spectrain.export.medusa import whole_rows

    rows_DW, x_LW = torch.randn(8, 16), 5 * torch.randn(1000, 16)
    logits_LV = x_LW @ whole_rows(rows_DW, torch.arange(8) * 3 + 2, 30).T
    assert ((logits_LV.argmax(-1) - 2) % 3 == 0).all()


def test_formats_and_commands(target: Target, tmp_path: Path) -> None:
    head_dir = medusa(target, tmp_path / "head")
    assert not needs_target(head_dir, "vllm")
    out = export_head(head_dir, "vllm", tmp_path / "out")
    command = serve_command(out, "org/model", num_speculative_tokens=3)
    assert json.loads(command.split("'")[1]) == {"method": "medusa", "model": str(out), "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="4, .* has 3 heads"):
        serve_command(out, "org/model", num_speculative_tokens=4)
    with pytest.raises(ValueError, match="'medusa', which the format sglang has no place for; export it to vllm or medusa"):
        export_head(head_dir, "sglang", tmp_path / "x")
    export_head(head_dir, "medusa", out)  # in place of the earlier export
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "medusa_lm_head.pt", "medusa_lm_head.safetensors"]
