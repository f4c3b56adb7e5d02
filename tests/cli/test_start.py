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
from spectrain.export.engines import export_head
from spectrain.heads.base import HEADS, load_head, save_head
from spectrain.target.model import load_target
from spectrain.training.setup import made_with, new_head

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


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_import_of_an_export_is_another_head(cli: Cli, project: Path, trained: Path, tmp_path: Path, kind: str) -> None:
    head_dir, options = trained / "head", ("--target", project / "target")
    if kind != "eagle3":
        target, head_dir = load_target(project / "target"), tmp_path / "head"
        config = HeadConfig(kind=kind, num_heads=2, draft_vocab_size=50, output="frozen")
        head = new_head(config, target, [], seed=0, counts_V=torch.arange(target.vocab_size))
        save_head(head, head_dir, run_yaml="", made_with=made_with(target, {}))
    missing = cli("export", head_dir, "--to", "vllm", "--out", tmp_path / "out")
    assert (missing.exit_code, "add --target NAME" in missing.stderr) == ((1, True) if kind == "eagle" else (0, False))
    told = cli("export", head_dir, "--to", "vllm", "--out", tmp_path / "out", *options).stdout.splitlines()
    drafts = {"medusa": 2, "eagle": 4, "eagle3": 4}[kind]
    assert f'"method": "{kind}"' in told[1] and f'"num_speculative_tokens": {drafts}' in told[1]
    assert ("drafts all of them" in told[-1]) == (kind == "eagle")
    done = cli("import", tmp_path / "out", "--out", tmp_path / "back", *options)
    assert done.exit_code == 0 and done.stdout.endswith(f"wrote {tmp_path / 'back'}\n"), done.output
    before, after = load_head(head_dir), load_head(tmp_path / "back")
    assert after.config == before.config and after.made_with.items() >= before.made_with.items()
    assert all(torch.equal(t, after.state_dict()[n]) for n, t in before.state_dict().items())
    for folder, out, message in (
        (tmp_path / "back", tmp_path / "new", "is a head directory; train, evaluate and export take it as it is"),
        (tmp_path / "out", tmp_path / "back", "is there already; choose another --out"),
        (tmp_path / "none", tmp_path / "new", "no folder"),
    ):
        assert message in cli("import", folder, "--out", out, *options).stderr


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_start_from_a_folder_of_an_engine_is_another_head(make_target, tmp_path: Path, kind: str) -> None:
    target, told = make_target(), []
    config = HeadConfig(kind=kind, num_heads=3, draft_vocab_size=50, output="frozen")
    head = new_head(config, target, [], seed=0, counts_V=torch.arange(100))
    save_head(head, tmp_path / "head", run_yaml="", made_with=made_with(target, {}))
    out = export_head(tmp_path / "head", "vllm", tmp_path / "out", embed_VW=target.embedding_VW, output_VW=target.output_VW)
    values = {"name": "x", "target": {"name": "tiny"}, "data": {"rows": "rows"}, "training": {"ttt_steps": 3 if kind == "medusa" else 1}}
    heads = {"num_heads": 3} if kind == "medusa" else {}
    found, start = open_start(Recipe(**values, head={"kind": kind, "start": str(out), **heads}), target, told.append)
    again = new_head(found.head, target, [], seed=1, start=start)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in head.state_dict().items()) and not told


def test_quickstart_leaves_the_start_out(tmp_path: Path, project: Path) -> None:
    settings = [f"target.name={project / 'target'}", "head.layer_ids=null", "head.draft_vocab_size=null", "head.start=nowhere"]
    with pytest.raises(ValueError, match="head.start: no folder nowhere"):
        quickstart(out=tmp_path, fresh=False, fresh_answers=False, short=True, overrides=settings)
