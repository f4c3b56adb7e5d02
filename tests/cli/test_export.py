"""The commands export and import: what they print, what goes into the folder, and what they ask for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from spectrain.config import HeadConfig
from spectrain.heads.base import load_head, save_head
from spectrain.target.model import load_target
from spectrain.training.setup import made_with, new_head

Cli = Callable[..., Any]
KEY = "eagle_aux_hidden_state_layer_ids"


def test_speculators_folder_does_not_name_its_target(cli: Cli, project: Path, trained: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", ("--target", project / "target")
    missing = cli("export", trained / "head", "--to", "speculators", "--out", out)
    assert missing.exit_code == 1 and "add --target NAME" in missing.stderr and not out.exists()
    told = cli("export", trained / "head", "--to", "speculators", "--out", out, "--dtype", "bfloat16", *options)
    assert told.stdout == f"wrote {out}\nvllm serve {out}\n", told.output
    made = json.loads((trained / "head/made_with.json").read_text())
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"name_or_path": made["target"], "architectures": ["LlamaForCausalLM"]}
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16, torch.int64, torch.bool}
    done = cli("import", out, "--out", tmp_path / "back", *options)
    assert done.exit_code == 0, done.output
    before, after = load_head(trained / "head"), load_head(tmp_path / "back")
    assert after.config == before.config
    for name, tensor in before.state_dict().items():
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(after.state_dict()[name], expected), name


def test_command_for_a_head_that_no_engine_reads_is_told(cli: Cli, project: Path, tmp_path: Path) -> None:
    target = load_target(project / "target")
    head = new_head(HeadConfig(kind="hydra", original=True, num_heads=2, draft_vocab_size=None), target, [], seed=0)
    save_head(head, tmp_path / "head", run_yaml="", made_with=made_with(target, {}))
    assert cli("export", tmp_path / "head", "--to", "hydra", "--out", tmp_path / "out").stdout == f"wrote {tmp_path / 'out'}\n"
    done = cli("import", tmp_path / "out", "--out", tmp_path / "back", "--target", project / "target")
    assert done.exit_code == 0, done.output
    assert all(torch.equal(t, load_head(tmp_path / "back").state_dict()[n]) for n, t in head.state_dict().items())


def test_layer_ids_of_either_kind_are_guessed(cli: Cli, project: Path, trained: Path, tmp_path: Path) -> None:
    """States hs[1, 3, 5], or outputs of layers, hs[2, 4, 6]: told by the notation, or by rows, where the head agrees with the target."""
    folder, target = tmp_path / "theirs", load_target(project / "target")
    head = new_head(HeadConfig(layer_ids=(1, 3, 5), draft_vocab_size=None), target, [], seed=0)
    save_head(head, tmp_path / "head", run_yaml="", made_with=made_with(target, {}))
    assert cli("export", tmp_path / "head", "--to", "vllm", "--out", folder).exit_code == 0
    config = json.loads((folder / "config.json").read_text())
    ids = config.pop(KEY)
    del config["spectrain"]
    (folder / "config.json").write_text(json.dumps({**config, "eagle_config": {KEY: ids}}))
    options = ("--target", project / "target", "--out", tmp_path / "back")
    asked = cli("import", folder, *options)
    assert asked.exit_code == 1 and "spectrain import --rows FOLDER" in asked.stderr and not (tmp_path / "back").exists()
    tried = cli("import", folder, *options, "--rows", trained / "rows")
    assert tried.exit_code == 1 and "too close to tell what its layer ids count; give more rows" in tried.stderr, tried.output
    told = cli("import", folder, *options, "--notation", "output")
    assert told.exit_code == 0 and load_head(tmp_path / "back").layer_ids == (2, 4, 6), told.output


def test_format_without_a_place_for_the_head_asks_for_its_target(cli: Cli, project: Path, tmp_path: Path) -> None:
    target = load_target(project / "target")
    head = new_head(HeadConfig(kind="eagle", output="frozen", draft_vocab_size=None), target, [], seed=0)
    save_head(head, tmp_path / "head", run_yaml="", made_with={**made_with(target, {}), "quantization": "8bit"})
    refused = cli("export", tmp_path / "head", "--to", "medusa", "--out", tmp_path / "out")
    assert refused.exit_code == 1 and "which the format medusa has no place for; export it to vllm" in refused.stderr
    done = cli("export", tmp_path / "head", "--to", "vllm", "--out", tmp_path / "out", "--target", project / "target")
    assert done.exit_code == 0, done.output  # there is no way to load it in 8 bits for this, and its rows are the same
