"""Shrunken models of the recipes' targets: the same class of model and the same chat template, random weights, on the disk."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from click.testing import Result
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar
from typer.testing import CliRunner

from spectrain.cli import app

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TEMPLATES = runpy.run_path(str(HERE.parent / "golden/conftest.py"))  # real templates, and tokenizers that know their special tokens
TEMPLATE_OF = {"llama31_8b": "llama3_1", "llama33_70b": "llama3_1", "qwen3_8b": "qwen3", "gpt_oss_20b": "gptoss"}
SIZES = {  # 8 layers: 7 is the fewest with default layer ids
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "initializer_range": 0.25,
}  # fmt: skip
WORDS = "sun rain wind snow hill lake road tree bird fish".split()
Run = Callable[..., Result]


def target_of(recipe: Path) -> str:
    """The target's part of a recipe's name: eagle3_qwen3_8b is of qwen3_8b."""
    return recipe.stem.partition("_")[2]


def shrunken(name: str, folder: Path) -> Path:
    """The folder of a target with the config of tests/recipes/configs/`name`, its sizes and the number of its tokens made small."""
    template = TEMPLATE_OF[name]
    tokenizer = TEMPLATES["build"](TEMPLATES["source_of"](template), **TEMPLATES["SETTINGS"].get(template, {}))
    config = AutoConfig.from_pretrained(HERE / "configs" / name)
    for key, value in SIZES.items():
        if hasattr(config, key) and getattr(config, key) is not None:
            setattr(config, key, value)
    config.vocab_size, config.pad_token_id = 16 * (len(tokenizer) // 16 + 1), tokenizer.pad_token_id
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if (kinds := getattr(config, "layer_types", None)) is not None:
        config.layer_types = kinds[: config.num_hidden_layers]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def talks(*, reasoning: bool) -> list[dict[str, Any]]:
    """Conversations of two domains and two turns; with reasoning, two of three have some in their answers."""
    found = []
    for i in range(6):
        a, b, c = (WORDS[(i * k) % len(WORDS)] for k in (1, 3, 7))
        texts = [f"What of {a} {i}?", f"A {a} has a {b}.", f"And {c}?", f"It has {b}, too."]
        messages: list[dict[str, str]] = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        if reasoning and i % 3:
            for message in messages[1::2]:
                message["reasoning_content"] = f"{a} or {b}"
        found.append({"id": str(i), "domain": ("red", "blue")[i % 2], "messages": messages})
    return found


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """small_target(recipe): the folder of its target, shrunken."""
    root = tmp_path_factory.mktemp("targets")
    return cache(lambda recipe: shrunken(target_of(recipe), root / target_of(recipe)))


@pytest.fixture(scope="session")
def small_rows(tmp_path_factory: pytest.TempPathFactory, small_target: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """small_rows(recipe): the folder of rows prepared for it, one a domain kept out."""

    @cache
    def rows_of(recipe: Path) -> Path:
        root = tmp_path_factory.mktemp(target_of(recipe))
        lines = [json.dumps(talk) for talk in talks(reasoning=target_of(recipe) in ("qwen3_8b", "gpt_oss_20b"))]
        (root / "answers.jsonl").write_text("\n".join(lines))
        options = ["--target", small_target(recipe), "--out", root / "rows", "--set", "validation_per_domain=1"]
        command_line("prepare", root / "answers.jsonl", *options)
        return root / "rows"

    return rows_of


@pytest.fixture(scope="session")
def small(small_target: Callable[[Path], Path], small_rows: Callable[[Path], Path]) -> Callable[[Path], list[str]]:
    """small(recipe): `--set` that make its run a small one: its places, its sizes and nothing else."""

    def options(recipe: Path) -> list[str]:
        target, rows = small_target(recipe), small_rows(recipe)
        settings = [
            f"target.name={target}", f"data.rows={rows}", f"data.states={rows.parent / 'states'}", "data.capture.batch_tokens=256",
            "head.draft_vocab_size=40", "training.tokens_per_step=32", "training.steps=2", "target.placement=rank",
        ]  # fmt: skip
        return [f"--set={setting}" for setting in settings]

    return options


def command_line(*arguments: Any) -> Result:
    """A command in this process; an error is raised."""
    disable_progress_bar()  # as main() does where stderr is no terminal
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def run() -> Iterator[Run]:
    """run(*arguments): a command in this process that must succeed."""
    AcceleratorState._reset_state()  # one precision a process, and the recipes have another than most tests
    yield command_line
    AcceleratorState._reset_state()


@pytest.fixture(scope="session")
def launch() -> Callable[..., str]:
    """launch(config, *arguments): a command on two processes of `accelerate launch --config_file recipes/accelerate/config`; its output."""

    def start(config: str, *arguments: Any) -> str:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"recipes/accelerate/{config}"]
        command = [*launcher, "--num_processes", "2", "-m", "spectrain", *map(str, arguments)]
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return start
