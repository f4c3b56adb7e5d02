"""Going on from another head by the command line: what of the recipe counts, and which folders are taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from spectrain.cli.quickstart import quickstart
from spectrain.cli.start import open_start
from spectrain.config import HeadConfig, Recipe, TrainingConfig
from spectrain.heads.base import HEADS, save_head
from spectrain.training.setup import new_head

Cli = Callable[..., Any]


@pytest.fixture
def train(cli: Cli, project: Path, trained: Path, tmp_path: Path) -> Cli:
    """train(settings) -> Result of one step into tmp_path/run on the rows of a finished run."""

    def run(*settings: str) -> Any:
        own = (f"data.rows={trained / 'rows'}", "data.online=true", "training.steps=1", "training.lr=1e-9")
        options = [part for setting in (*own, *settings) for part in ("--set", setting)]
        return cli("train", project / "recipes/tiny.yaml", "--out", tmp_path / "run", *options)

    return run


@pytest.mark.parametrize("flat", [False, True])
def test_settings_beside_a_start_are_passed_over_in_silence(train: Cli, cli: Cli, trained: Path, tmp_path: Path, flat: bool) -> None:
    """The started head keeps its sizes and weights, what the recipe has otherwise is told, and run.yaml holds what was trained."""
    folder = trained / "head"
    if flat:
        assert cli("export", folder, "--to", "vllm", "--out", tmp_path / "flat").exit_code == 0
        folder = tmp_path / "flat"
    result = train(f"head.start={folder}", "head.num_layers=2", "head.fc_norm=true", "head.norm_output=false")
    assert result.exit_code == 0, result.output
    assert f"head.num_layers is 1, as in {folder}; the 2 of the recipe is not looked at" in result.output
    assert f"head.fc_norm is false, as in {folder}; the true of the recipe is not looked at" in result.output
    assert "head.norm_output" not in result.output
    head = yaml.safe_load((tmp_path / "run/head/run.yaml").read_text())["head"]
    assert (head["num_layers"], head["fc_norm"], head["hidden_size"]) == (1, False, None)
    ours, theirs = (load_file(f / "model.safetensors") for f in (trained / "head", tmp_path / "run/head"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), atol=1e-6) for name in ours)


def test_start_is_found_missing_after_the_answers(train: Cli, trained: Path, tmp_path: Path) -> None:
    told = train(f"head.start={tmp_path / 'none'}").stderr
    assert told.startswith(f"error: head.start: no folder {tmp_path / 'none'}; give a head directory such as ")
    assert train(f"head.start={trained}").stderr == f"error: {trained} is the folder of a run; its best head is {trained / 'head'}\n"
    assert not list((tmp_path / "run").rglob("*"))


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_number_of_heads_of_a_start_is_not_its_own(make_target, tmp_path: Path, kind: str) -> None:
    """Heads, blocks and outputs are the start's; test-time steps that are not as many are refused before the long work."""
    target, told = make_target(), []
    config = HeadConfig(kind=kind, num_heads=3, num_layers=2, draft_vocab_size=50, shared_output=kind == "medusa", prefix=kind == "medusa")
    head = new_head(config, target, [], seed=0, counts_V=torch.arange(100))
    save_head(head, tmp_path / "head", run_yaml="", made_with={"target": "tiny", **target.fingerprints})
    values = {"name": "x", "target": {"name": "tiny"}, "data": {"rows": "rows"}, "training": {"ttt_steps": 3}}
    recipe = Recipe(**values, head={"kind": kind, "start": str(tmp_path / "head"), "num_heads": 3, "num_layers": 1})
    found, start = open_start(recipe, target, told.append)
    of_head = ("num_heads", "num_layers", "draft_vocab_size", "shared_output", "prefix")
    assert all(getattr(found.head, name) == getattr(config, name) for name in of_head)
    assert len(told) == 1 and "head.num_layers is 2, as in" in told[0]
    again = new_head(found.head, target, [], seed=1, start=start)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in head.state_dict().items())
    other = recipe.model_copy(update={"training": TrainingConfig(ttt_steps=4)})
    with pytest.raises(ValueError, match=f"ttt_steps 4, and a {kind} head of head.num_heads 3.*ttt_steps=3"):
        open_start(other, target, told.append)
    for another in HEADS:  # whose states and settings would be refused first, or only after its states are captured
        if another != kind:
            asks = recipe.model_copy(update={"head": recipe.head.model_copy(update={"kind": another})})
            with pytest.raises(ValueError, match=f"holds a head of kind {kind}, the recipe asks for head.kind {another}; .*kind={kind}"):
                open_start(asks, target, told.append)


@pytest.mark.parametrize("command", ["generate", "export"])
def test_run_given_for_its_head_is_no_head(cli: Cli, project: Path, trained: Path, tmp_path: Path, command: str) -> None:
    options = {
        "generate": ["hello", "--target", project / "target", "--head", trained],
        "export": [trained, "--to", "vllm", "--out", tmp_path / "x"],
    }
    told = cli(command, *options[command]).stderr
    assert told == f"error: {trained} is the folder of a run; its best head is {trained / 'head'}\n"


@pytest.mark.parametrize(("engine", "starts"), [("vllm", "vllm serve "), ("sglang", "python -m sglang.launch_server ")])
def test_export_tells_the_command_of_another_engine(cli: Cli, trained: Path, tmp_path: Path, engine: str, starts: str) -> None:
    told = cli("export", trained / "head", "--to", engine, "--out", tmp_path / "x").stdout
    assert told.splitlines()[1].startswith(starts)


def test_quickstart_leaves_the_start_out(tmp_path: Path, project: Path) -> None:
    settings = [f"target.name={project / 'target'}", "head.layer_ids=null", "head.draft_vocab_size=null", "head.start=nowhere"]
    with pytest.raises(ValueError, match="head.start: no folder nowhere"):
        quickstart(out=tmp_path, fresh=False, fresh_answers=False, short=True, overrides=settings)
