"""Hydra folders: read by the rules of the original code as written down here, and read back by the package.

Legend: L tokens, H width of head and target, V target vocabulary, D draft vocabulary.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaModel

from spectrain.config import HeadConfig
from spectrain.export.engines import FORMATS, export_head, serve_command
from spectrain.export.families import head_from_folder
from spectrain.heads.base import LAST, load_head, save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with, new_head

HEADS: dict[str, dict[str, Any]] = {"one block": {}, "two blocks": {"num_layers": 2}, "whole vocabulary": {"draft_vocab_size": None}}


def hydra(target: Target, folder: Path, *, same_blocks: bool = True, **settings: Any) -> Path:
    """A head directory with random weights, biases and norms among them."""
    config = HeadConfig(**{"kind": "hydra", "original": True, "num_heads": 3, "draft_vocab_size": 37, **settings})
    counts_V = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(1)) * 1000
    head = new_head(config, target, [], seed=0, counts_V=counts_V.long() + 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name))
        for blocks in head.heads if same_blocks else ():
            for block in blocks[2:]:
                block.load_state_dict(blocks[1].state_dict())
    save_head(head, folder, run_yaml="", made_with=made_with(target, {}))
    return folder


class Block(nn.Module):
    def __init__(self, width: int, more: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width * (more + 1), width)
        self.res_connection = nn.Linear(width * (more + 1), width) if more else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + silu(self.linear(x))


class Original(nn.Module):
    """The head of arXiv 2402.05109's code (prefix_mlp_head.py): the modules that it builds for a target and a folder's config."""

    def __init__(self, folder: Path, target: Target) -> None:
        super().__init__()
        config, base = json.loads((folder / "config.json").read_text()), target.config.to_dict()
        assert config["hydra_head_arch"] == "prefix-mlp" and config["grounded_heads"] and config["hidden_state_offset"] == 0
        heads, layers, H, V = config["hydra_num_heads"], config["hydra_num_layers"], base["hidden_size"], base["vocab_size"]
        self.prefix_embeding_layer = LlamaModel(LlamaConfig(**{**base, "num_hidden_layers": 1}, attn_implementation="eager"))
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(nn.Dropout(0.0), Block(H, i + 1), *([nn.Dropout(0.0), Block(H, 0)] * (layers - 1))) for i in range(heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(nn.Dropout(0.0), nn.Linear(H, V)) for _ in range(heads))
        self.embed = target.embedding_VW.detach()

    def forward(self, states_1LH: Tensor, ids_1L: Tensor) -> list[Tensor]:
        reads = [self.prefix_embeding_layer(inputs_embeds=states_1LH)[0]]
        logits = []
        for i, (mlp, output) in enumerate(zip(self.hydra_mlp, self.hydra_lm_head, strict=True)):
            reads.append(torch.roll(self.embed[ids_1L], shifts=-(i + 1), dims=1))
            logits.append(output(mlp(torch.cat(reads, dim=-1))))
        return logits


def sequence(target: Target, length: int) -> tuple[Tensor, Tensor]:
    """Ids and last states of the target."""
    ids_1L = torch.randint(6, 100, (1, length), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(length)[None]
    out = target.forward(ids_1L, positions_BN=positions, mask=None, cache=None, layer_ids=(LAST,), logits_to_keep=1)
    assert out.states_BNF is not None
    return ids_1L, out.states_BNF


@pytest.mark.parametrize("name", [*HEADS, "three blocks"])
@torch.no_grad()
def test_original_code_reads_another_head(target: Target, tmp_path: Path, name: str) -> None:
    head_dir = hydra(target, tmp_path / "head", **HEADS.get(name, {"num_layers": 3}))
    out = export_head(head_dir, "hydra", tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "hydra_lm_head.pt"]
    model, (ids_1L, states_1LH) = Original(out, target), sequence(target, 12)
    told = model.load_state_dict(torch.load(out / "hydra_lm_head.pt", weights_only=True), strict=False)
    assert told.missing_keys == ["prefix_embeding_layer.embed_tokens.weight"] and set(told.unexpected_keys) <= {"token_map"}
    head, found_K = load_head(head_dir), model(states_1LH, ids_1L)
    batch = SimpleNamespace(ids_BL=ids_1L, states_BLF=states_1LH, doc_BL=None, position_BL=None, mask_BL=None)
    row_R = torch.arange(12 - 3)
    for (_, own_RD), found_1LV in zip(head.rows(batch, row_R, target.embedding_VW, 3), found_K, strict=True):
        torch.testing.assert_close(found_1LV[0, row_R][:, head.target_ids], own_RD, rtol=0, atol=1e-5)
        assert torch.equal(found_1LV[0, row_R].argmax(-1), head.target_ids[own_RD.argmax(-1)])  # no other id ever on top


@torch.no_grad()
def test_published_folder_is_not_taken(target: Target, tmp_path: Path) -> None:
    """The original's own state dict: an embedding that nothing reads, blocks under two names, other numbers in the config."""
    out = export_head(hydra(target, tmp_path / "head", num_layers=3, draft_vocab_size=None), "hydra", tmp_path / "theirs")
    config = json.loads((out / "config.json").read_text())
    model = Original(out, target)
    model.load_state_dict(torch.load(out / "hydra_lm_head.pt", weights_only=True), strict=False)
    torch.save(model.state_dict(), out / "hydra_lm_head.pt")
    keys = ("hydra_head_arch", "grounded_heads", "hidden_state_offset")
    (out / "config.json").write_text(json.dumps({**{k: config[k] for k in keys}, "hydra_num_heads": 2}))
    head, notes = head_from_folder(out, target)
    assert (head.config.num_heads, head.config.num_layers, notes) == (3, 3, ())
    before, state = load_head(tmp_path / "head").state_dict(), head.state_dict()
    assert state.keys() == before.keys() and all(torch.equal(state[name], tensor) for name, tensor in before.items())
    head.heads[0][1].linear.bias.add_(1)  # under two names in the file, two blocks here
    assert not torch.equal(head.heads[0][1].linear.bias, head.heads[0][2].linear.bias)


def test_head_that_the_original_code_would_compute_otherwise_is_written(target: Target, tmp_path: Path) -> None:
    for name, settings, message in (
        ("plain", {"original": False}, "no norm after its prefix layer and no biases.*head.original=true"),
        ("window", {"sliding_window": 4}, "sliding_window 4"),
        ("blocks", {"num_layers": 3, "same_blocks": False}, "runs the second one 2 times, and heads.0.2 is another"),
    ):
        head = hydra(target, tmp_path / name, **settings)
        with pytest.raises(ValueError, match=message):
            export_head(head, "hydra", tmp_path / "out")
    for to in FORMATS.keys() - {"hydra"}:
        with pytest.raises(ValueError, match=f"'hydra', which the format {to} has no place for; export it to hydra"):
            export_head(tmp_path / "plain", to, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="no engine reads the Hydra head"):
        serve_command(export_head(hydra(target, tmp_path / "head"), "hydra", tmp_path / "out"), "org/model", num_speculative_tokens=2)
    with pytest.raises(ValueError, match="has a prefix layer"):
        hydra(target, tmp_path / "no prefix", prefix=False)


NORM, ROWS, OTHER = "prefix_embeding_layer.norm.weight", "hydra_lm_head.1.1.weight", "sequential_head.weight"
FAULTS: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], str]] = {
    "no prefix layer": ({NORM: None}, {}, f"without {NORM}"),
    "other architecture": ({}, {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch eagle-attn"),
    "not grounded": ({}, {"grounded_heads": False}, "grounded_heads False"),
    "states of a lower layer": ({}, {"hidden_state_offset": 100}, "hidden_state_offset 100"),
    "offset that is none": ({}, {"hidden_state_offset": "1"}, "hidden_state_offset: Input should be a valid integer"),
    "lost output layer": ({ROWS: None}, {}, "blocks of 3 heads and 2 output layers"),
    "rows of another target": ({f"hydra_lm_head.{k}.1.{p}": torch.ones(99, 32)[:, : 32 if p == "weight" else 1].squeeze(-1)
                                for k in range(3) for p in ("weight", "bias")}, {}, "output layers of 99 rows, tiny has 100 ids"),
    "short output layer": ({ROWS: torch.ones(50, 32)}, {}, "lm_head.1.weight are not of 100 rows"),
    "lost block": ({"hydra_mlp.1.1.linear.weight": None}, {}, "does not hold the weights of this head"),
    "layer of another target": ({"prefix_embeding_layer.layers.0.mlp.up_proj.weight": torch.ones(40, 32)}, {}, "mlp.up_proj"),
    "more": ({OTHER: torch.ones(3)}, {}, f"holds {OTHER}"),
    "NaN": ({NORM: torch.full((32,), torch.nan)}, {}, "NaN or infinite values in prefix_norm"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_unsound_folder_is_read(target: Target, tmp_path: Path, fault: str) -> None:
    out = export_head(hydra(target, tmp_path / "head", draft_vocab_size=None), "hydra", tmp_path / "out")
    changes, said, message = FAULTS[fault]
    tensors = {**torch.load(out / "hydra_lm_head.pt", weights_only=True), **changes}
    torch.save({name: tensor for name, tensor in tensors.items() if tensor is not None}, out / "hydra_lm_head.pt")
    (out / "config.json").write_text(json.dumps({**json.loads((out / "config.json").read_text()), **said}))
    with pytest.raises(ValueError, match=message):
        head_from_folder(out, target)
