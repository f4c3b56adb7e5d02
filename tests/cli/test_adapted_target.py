"""A recipe's target with an adapter, or with weights in few bits: named by the head that is trained on it, and needed to use it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from spectrain.config import LoraConfig
from spectrain.heads.base import adapter_hash, load_head
from spectrain.target.adapter import save_adapter, with_adapter
from spectrain.target.model import Target, load_target

EVALUATION = [f"--set={key}" for key in ("speed_max_new_tokens=4", "speed_prompts=1", "batch_size=4", "shapes.chain=2")]


@pytest.fixture(scope="module")
def adapter(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of the project's target, in a folder of its own."""
    _, wrapped = with_adapter(target := load_target(project / "target"), LoraConfig(rank=2, alpha=4), seed=0)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in wrapped.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=g) * 0.2)
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(wrapped, target, folder)
    return folder


@pytest.fixture(scope="module")
def run(project: Path, cli: Callable[..., Result]) -> Callable[..., tuple[Path, Result]]:
    """run(name, *settings): the folder of a short run of the project's recipe on its own answers, and what it said."""

    def train(name: str, *settings: str) -> tuple[Path, Result]:
        out, few = project / "runs" / name, ("training.epochs=1", "data.answers.max_new_tokens=6", *settings)
        return out, cli("train", project / "recipes/tiny.yaml", "--out", out, "--fresh-answers", *(f"--set={key}" for key in few))

    return train


def test_head_of_an_adapted_target_is_taken_for_the_bare_targets(
    project: Path, adapter: Path, run: Callable[..., tuple[Path, Result]], cli: Callable[..., Result]
) -> None:
    """The run states, store and head name the adapter; the head directory holds it, so that the same target is loaded from it."""
    out, result = run("adapted", f"target.adapter={adapter}")
    assert result.exit_code == 0, result.output
    made, manifest = (json.loads((out / name).read_text()) for name in ("head/made_with.json", "states/manifest.json"))
    assert made["adapter_sha256"] == manifest["adapter_sha256"] == adapter_hash(adapter) == adapter_hash(out / "head/adapter")
    bare, adapted = load_target(project / "target"), load_target(project / "target", adapter=out / "head")
    assert made["layers_sha256"] == adapted.fingerprints["layers_sha256"] != bare.fingerprints["layers_sha256"]
    generate = ["generate", "w9 w30", "--target", project / "target", "--max-new-tokens", "4", "--json"]
    assert cli(*generate, "--head", out / "head").exit_code == 0
    (out / "head/adapter").rename(out / "head/moved")
    alone = cli(*generate, "--head", out / "head")
    assert alone.exit_code == 1 and "an adapter of its target, and " in alone.stderr and "target is without it" in alone.stderr
    (out / "head/moved").rename(out / "head/adapter")
    _, other = run("adapted", "target.adapter=null")
    assert other.exit_code == 1 and f"is a store with adapter_sha256 = {made['adapter_sha256']!r}, needed None" in other.stderr


@pytest.mark.slow
def test_libraries_talk_into_what_a_command_prints(
    project: Path, adapter: Path, run: Callable[..., tuple[Path, Result]], start: Callable[..., tuple[int, str, str]]
) -> None:
    """peft brings bitsandbytes along, saving a model DeepSpeed, and both speak of the missing GPU."""
    out, result = run("talk", f"target.adapter={adapter}")
    assert result.exit_code == 0, result.output
    export = ("export", out / "head", "--to", "merged", "--target", project / "target", "--out", out / "merged")
    assert start("-m", "spectrain", *export) == (0, f"wrote {out / 'merged'}\n", "")


def test_merged_target_cannot_be_served_or_trained_on(
    project: Path, adapter: Path, run: Callable[..., tuple[Path, Result]], cli: Callable[..., Result], save_target: Callable[..., Path]
) -> None:
    """A folder that an adapter was merged into is a target like any other: a head of it needs no adapter beside it."""
    merged = save_target(load_target(project / "target", adapter=adapter), project / "runs/merged")
    out, result = run("on-merged", f"target.name={merged}")
    assert result.exit_code == 0, result.output
    assert load_head(out / "head").adapter is None and not (out / "head/adapter").exists()
    export = ["export", out / "head", "--to", "vllm", "--out", out / "export"]
    without = cli(*export)
    assert without.exit_code == 1 and "engines serve the target as it is" in without.stderr
    assert cli(*export, "--target", merged).exit_code == 0


def test_target_in_few_bits_is_trained_on_as_another(
    project: Path, run: Callable[..., tuple[Path, Result]], cli: Callable[..., Result], adapter: Path, target: Target
) -> None:
    pytest.importorskip("bitsandbytes")
    out, result = run("bits", "target.quantization=8bit")
    assert result.exit_code == 0, result.output
    made, manifest = (json.loads((out / name).read_text()) for name in ("head/made_with.json", "states/manifest.json"))
    assert made["quantization"] == manifest["quantization"] == "8bit"
    generate = ["generate", "w9 w30", "--target", project / "target", "--head", out / "head", "--max-new-tokens", "4", "--json"]
    plain = cli(*generate)
    assert plain.exit_code == 1 and "load it so (--quantization 8bit), or go on from the head" in plain.stderr
    assert cli(*generate, "--quantization", "8bit").exit_code == 0
    again: Any = run("on", "target.quantization=null", f"head.start={out / 'head'}")[1]
    assert again.exit_code == 0, again.output
    _, both = run("both", "target.quantization=8bit", f"target.adapter={adapter}")
    assert both.exit_code == 1 and "cannot be merged into weights in 8bit" in both.stderr
