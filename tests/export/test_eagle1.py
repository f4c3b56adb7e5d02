"""EAGLE-1 folders: read by the rules of vLLM, SGLang and the original code as written down here, and read back by the package.

Legend: L tokens, W width of head and target, V target vocabulary, D draft vocabulary.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from spectrain.config import HeadConfig
from spectrain.export.engines import export_head, needs_target, serve_command
from spectrain.export.families import head_from_folder
from spectrain.heads.base import LAST, load_head, save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with, new_head

ENGINES = ["vllm", "sglang", "eagle"]
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "bias": {"bias": True},
    "whole vocabulary": {"draft_vocab_size": None},
}


def eagle(target: Target, folder: Path, **settings: Any) -> Path:
    """A head directory with random layers over the target's output rows."""
    config = HeadConfig(**{"kind": "eagle", "output": "frozen", "draft_vocab_size": 37, **settings})
    counts_V = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(1)) * 1000
    head = new_head(config, target, [], seed=0, counts_V=counts_V.long() + 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if not name.startswith("lm_head"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08 + name.endswith("norm.weight"))
    save_head(head, folder, run_yaml="", made_with=made_with(target, {}))
    return folder


def write(target: Target, head_dir: Path, to: str, out: Path, **more: Any) -> Path:
    return export_head(head_dir, to, out, embed_VW=target.embedding_VW, output_VW=target.output_VW, **more)


def sequence(target: Target, length: int) -> tuple[Tensor, Tensor]:
    """Ids and last states of the target."""
    ids_1L = torch.randint(6, 100, (1, length), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(length)[None]
    out = target.forward(ids_1L, positions_BN=positions, mask=None, cache=None, layer_ids=(LAST,), logits_to_keep=1)
    assert out.states_BNF is not None
    return ids_1L[0], out.states_BNF[0]


class Engine(nn.Module):
    """The draft model of vLLM's llama_eagle.py, SGLang's of that name and the original cnets1.py, from transformers' Llama layers: no norm
    before the first layer and none after the last. Which tensors a folder must and may hold is the engine's own rule."""

    def __init__(self, folder: Path, engine: str, target: Target) -> None:
        super().__init__()
        config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        assert config["architectures"] == ["LlamaForCausalLM" if engine == "vllm" else "LlamaForCausalLMEagle"]
        assert not config["tie_word_embeddings"] and not config["attention_bias"] and not config["mlp_bias"]
        fields = {key: value for key, value in config.items() if key not in ("spectrain", "architectures", "rope_parameters", "dtype")}
        self.model = LlamaModel(LlamaConfig(**fields, attn_implementation="eager"))
        self.model.layers[0].input_layernorm = nn.Identity()
        self.model.norm = nn.Identity()
        W = config["hidden_size"]
        self.fc = nn.Linear(2 * W, W, bias=engine != "vllm")
        embed_VW = weights.pop("embed_tokens.weight", None)
        assert (embed_VW is None) == (engine == "vllm")  # vLLM keeps what differs in a bit; the original loads it strictly
        own = {name if name.startswith("fc.") else f"model.{name}": tensor for name, tensor in weights.items()}
        told = self.load_state_dict(own, strict=False)
        assert told.missing_keys == ["model.embed_tokens.weight"] and not told.unexpected_keys
        self.embed_VW = embed_VW if engine == "eagle" and embed_VW is not None else target.embedding_VW.detach()
        self.output_VW = target.output_VW.detach()
        if engine == "sglang" and (folder / "token_map.pt").is_file():
            hot = torch.tensor(torch.load(folder / "token_map.pt", weights_only=True), dtype=torch.int64)
            rows_VW = torch.zeros_like(self.output_VW)
            rows_VW[hot] = self.output_VW[hot]
            self.output_VW, self.hot = rows_VW, hot

    def forward(self, states_LW: Tensor, next_N: Tensor) -> Tensor:
        """Logits [N, V] after each token; rows beyond the states are drafted from what the row before them left."""
        feature_NW = states_LW
        while True:
            read_NX = torch.cat([self.embed_VW[next_N[: len(feature_NW)]], feature_NW], dim=1)
            hidden_NW = self.model(inputs_embeds=self.fc(read_NX)[None]).last_hidden_state[0]
            if len(feature_NW) == len(next_N):
                return hidden_NW @ self.output_VW.T
            feature_NW = torch.cat([feature_NW, hidden_NW[-1:]])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_engine_reads_another_head(target: Target, tmp_path: Path, name: str, engine: str) -> None:
    """Three steps of drafting: the head's logits over its ids."""
    L, steps, head_dir = 10, 3, eagle(target, tmp_path / "head", **HEADS[name])
    if engine == "vllm" and HEADS[name].get("bias"):
        with pytest.raises(ValueError, match="has a bias in fc up to 0.*, and vLLM's has none; export it to sglang"):
            write(target, head_dir, engine, tmp_path / "out")
        return
    head, (ids_L, states_LW) = load_head(head_dir), sequence(target, L)
    batch = SimpleNamespace(ids_BL=ids_L[None], states_BLF=states_LW[None], doc_BL=None, position_BL=None, mask_BL=torch.ones(1, L) > 0)
    row_R = torch.arange(L - steps)
    read = Engine(write(target, head_dir, engine, tmp_path / "out"), engine, target)
    for ahead, own_RD in head.rows(batch, row_R, target.embedding_VW, steps):
        for i in row_R.tolist():
            found_NV = read(states_LW[: i + 1], ids_L[1 : i + ahead])
            torch.testing.assert_close(found_NV[-1, head.target_ids], own_RD[i], rtol=0, atol=1e-5)
    if engine == "sglang" and HEADS[name].get("draft_vocab_size", 37):
        assert torch.equal(read.hot, head.target_ids)


def test_published_folder_is_not_taken(target: Target, tmp_path: Path) -> None:
    """A pickle with a bias that was trained, the target's embedding in 16 bits, a config without rotary base."""
    head_dir = eagle(target, tmp_path / "head", bias=True, draft_vocab_size=None)
    theirs = {name: t for name, t in load_file(head_dir / "model.safetensors").items() if name.startswith(("fc", "layers"))}
    theirs["embed_tokens.weight"] = target.embedding_VW.bfloat16()
    (tmp_path / "theirs").mkdir()
    torch.save(theirs, tmp_path / "theirs/pytorch_model.bin")
    (tmp_path / "theirs/config.json").write_text(json.dumps({"num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 1}))
    head, notes = head_from_folder(tmp_path / "theirs", target)
    assert head.config.bias and head.config.rope_parameters["rope_theta"] == 10_000 and len(notes) == 1 and "10,000" in notes[0]
    state = head.state_dict()
    assert all(torch.equal(state[name], theirs[name]) for name in theirs if name != "embed_tokens.weight")
    assert torch.equal(head.lm_head.weight, target.output_VW)


def test_bias_of_zeros_is_kept(target: Target, tmp_path: Path) -> None:
    """SGLang's layout without a record of ours: other trainers write zeros where they have none."""
    out = write(target, eagle(target, tmp_path / "head"), "sglang", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "spectrain"}))
    head, notes = head_from_folder(out, target)
    assert not head.config.bias and notes == ("fc.bias is all zeros: left out",)


FAULTS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "embedding of its own": ({"embed_tokens.weight": torch.ones(100, 32)}, "embed_tokens.weight is not that of tiny"),
    "norm before the first layer": ({"layers.0.input_layernorm.weight": torch.ones(32)}, "layers.0.input_layernorm.weight"),
    "lost projection": ({"layers.0.self_attn.o_proj.weight": None}, "layers.0.self_attn.o_proj.weight"),
    "no layer": ({"layers.0.self_attn.k_proj.weight": None}, "no whole layers.0"),
    "rows of another target": ({"lm_head.weight": torch.ones(99, 32)}, "lm_head.weight has 99 rows, tiny has 100 ids"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_unsound_folder_is_read(target: Target, tmp_path: Path, fault: str) -> None:
    out = write(target, eagle(target, tmp_path / "head"), "vllm", tmp_path / "out")
    changes, message = FAULTS[fault]
    changed = {**load_file(out / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, out / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        head_from_folder(out, target)


class Surprise:
    def __reduce__(self) -> Any:
        return (print, ("surprise",))


def test_pickles_from_elsewhere_run(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write(target, eagle(target, tmp_path / "head"), "vllm", tmp_path / "out")
    faults = ((Surprise(), "more than plain tensors"), (["a"], "no list of ids"), ([5, 5, 7], "repeat"), ([99, 100], "none of tiny"))
    for value, message in faults:
        torch.save(value, out / "token_map.pt")
        with pytest.raises(ValueError, match=message):
            head_from_folder(out, target)
    assert capsys.readouterr().out == ""


@torch.no_grad()
def test_head_that_engines_would_compute_otherwise_is_written(target: Target, make_target: Any, tmp_path: Path) -> None:
    window = eagle(target, tmp_path / "window", sliding_window=5)
    trained = eagle(target, tmp_path / "trained", output="trained")
    head = load_head(trained)
    head.lm_head.weight.mul_(1.1)
    save_head(head, trained, run_yaml="", made_with=made_with(target, {}))
    plain = eagle(target, tmp_path / "plain")
    for to in ENGINES:
        for head_dir, message in ((window, "sliding_window 5, and engines give"), (trained, "head.output=frozen")):
            with pytest.raises(ValueError, match=message):
                write(target, head_dir, to, tmp_path / "out")
        with pytest.raises(ValueError, match="none were given.*name its target"):
            export_head(plain, to, tmp_path / "out")
    other = make_target(head_dim=4)
    long_heads = eagle(other, tmp_path / "heads")
    with pytest.raises(ValueError, match="4 attention heads of 4 for a width of 32.*export it to vllm or sglang"):
        write(other, long_heads, "eagle", tmp_path / "out")
    assert not (tmp_path / "out").exists() and needs_target(plain, "vllm")


def test_commands_and_notes(target: Target, tmp_path: Path) -> None:
    """Where an engine drafts from the whole vocabulary, the folder says so; SGLang's command names the ids."""
    head_dir = eagle(target, tmp_path / "head")
    folders = {to: write(target, head_dir, to, tmp_path / to) for to in ENGINES}
    notes = {to: "note" in json.loads((folder / "config.json").read_text())["spectrain"] for to, folder in folders.items()}
    assert notes == {"vllm": True, "sglang": False, "eagle": True}
    command = serve_command(folders["vllm"], "org/model", num_speculative_tokens=3)
    assert json.loads(command.split("'")[1]) == {"method": "eagle", "model": str(folders["vllm"]), "num_speculative_tokens": 3}
    command = serve_command(folders["sglang"], "org/model", engine="sglang", num_speculative_tokens=3)
    assert "--speculative-algorithm EAGLE " in command and f"--speculative-token-map {folders['sglang'] / 'token_map.pt'}" in command
