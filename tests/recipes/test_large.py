"""The recipes for large targets: their whole way with a shrunken model of the same class, and what their files promise."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.main import get_command

import spectrain as st
from spectrain.cli import app
from spectrain.config import PrepareConfig, Recipe, RegenerateConfig, load_config, override, validate
from spectrain.data.row_store import RowStore
from spectrain.training.setup import check_settings, check_training

ROOT = Path(__file__).parents[2]
ALL = sorted((ROOT / "recipes").glob("*.yaml"))
LARGE = [path for path in ALL if not path.stem.endswith("_smollm2")]
CLASSES = {
    "llama31_8b": "LlamaForCausalLM", "llama33_70b": "LlamaForCausalLM", "qwen3_8b": "Qwen3ForCausalLM", "gpt_oss_20b": "GptOssForCausalLM",
}  # fmt: skip
SETTINGS_OF = {"regenerate": RegenerateConfig, "prepare": PrepareConfig}
STAGES = ("regeneration", "capture", "training")  # of the hours in a header; answers come from servers
Run = Callable[..., Result]
Small = Callable[[Path], list[str]]


def ids(path: Path) -> str:
    return path.stem


def commands_of(recipe: Path) -> list[tuple[str, list[str]]]:
    """The commands of spectrain in a recipe's header, with their arguments, in order; the launcher's file is there."""
    lines = re.findall(r"^#   +(.*)$", recipe.read_text(), re.MULTILINE)
    words: dict[str, str] = {}
    found = []
    for line in "\n".join(lines).replace("\\\n", "").split("\n"):
        if named := re.fullmatch(r'([TL])="?([^"]*)"?', line):
            words[f"${named[1]}"] = named[2]
            continue
        for name, value in words.items():
            line = line.replace(name, value)
        launcher, _, own = line.rpartition("spectrain ")
        for config in re.findall(r"--config_file (\S+)", launcher):
            assert (ROOT / config).is_file(), config
        if "vllm" not in line:
            name, *arguments = shlex.split(own)
            found.append((name, arguments))
    return found


def drafts_change_nothing(recipe: Path, folder: Path, target_folder: Path) -> None:
    """A saved head is of the recipe's kind and its drafts, greedily verified, leave plain decoding's tokens."""
    target = st.load_target(target_folder)
    head = st.load_head(folder, target)
    assert type(target.model).__name__ == CLASSES[recipe.stem.partition("_")[2]]
    assert type(head).__name__.lower() == load_config(Recipe, recipe).head.kind
    prompts = [[{"role": "user", "content": text}] for text in ("What of rain 3?", "And sun?")]
    plain = st.generate(target, prompts, max_new_tokens=24)
    drafted = st.generate(target, prompts, drafter=head, shape=st.Chain(4), max_new_tokens=24)
    assert [row.tokens for row in drafted.rows] == [row.tokens for row in plain.rows]
    assert all(round.drafted for row in drafted.rows for round in row.rounds[:3])


@pytest.mark.parametrize("recipe", LARGE, ids=ids)
def test_recipe_leads_to_no_head(recipe: Path, small: Small, small_target: Callable, run: Run, tmp_path: Path) -> None:
    settings, target = small(recipe), small_target(recipe)
    rows = load_config(Recipe, recipe, [s.removeprefix("--set=") for s in settings]).data.rows
    store = ["--head-config", recipe, "--out", tmp_path / "states", "--dtype", "bfloat16"]
    captured = " ".join(run("capture", rows, "--target", target, *store, *settings).output.split())  # lines are broken anywhere
    assert "shards made" in captured and "same best token 100.00%" in captured
    result = run("train", recipe, "--out", tmp_path / "run", *settings, f"--set=data.states={tmp_path / 'states'}")
    assert "2 steps, best measured tau" in result.output
    drafts_change_nothing(recipe, tmp_path / "run/head", target)


@pytest.mark.parametrize("recipe", ALL, ids=ids)
def test_recipe_cannot_be_read(recipe: Path) -> None:
    found = load_config(Recipe, recipe)
    assert found.name == recipe.stem
    check_settings(found.head)
    check_training(found.head, found.training)
    assert recipe.read_text().startswith("# ") and "\n# Hardware: " in recipe.read_text()


@pytest.mark.parametrize("recipe", LARGE, ids=ids)
def test_figures_of_a_header_are_another_plans(recipe: Path, run: Run) -> None:
    """GiB of a device, TiB of the store, hours by stage; nobody has measured them, so they are the plan's or nothing."""
    text = recipe.read_text()
    asked = re.search(r"All of this is planned, not measured: (.*)", text)
    assert asked
    config = Path(__file__).with_name("configs") / recipe.stem.partition("_")[2]
    plan = json.loads(run("plan", recipe, "--target", config, *asked[1].split(), "--json").stdout)
    assert plan["fits"] and not plan["ways"] and plan["device"]["memory"] == 80 * 2**30
    store = plan["store_bytes"]["int8 states, bf16 last state"] / 2**40
    hours = {stage: found["hours"] for stage, found in plan["hours"].items()}
    said = re.search(r" (\d+) GiB of each in use.* ([\d.]+) TiB.*answers (\d\.\d), capture (\d\.\d), training (\d\.\d)", text, re.DOTALL)
    assert said
    planned = (f"{plan['peak_bytes'] / 2**30:.0f}", *(f"{x:.1f}" for x in (store, *(hours[stage] for stage in STAGES))))
    assert said.groups() == planned and set(hours) == {*STAGES, "regeneration in process"}


@pytest.mark.parametrize("recipe", LARGE, ids=ids)
def test_command_of_a_header_does_not_exist(recipe: Path) -> None:
    """Every option, setting and file that a header's commands name is there, and what one writes the next one reads."""
    commands, written = commands_of(recipe), {"PROMPTS"}
    assert [name for name, _ in commands if name != "evaluate"][-2:] in (["plan", "train"], ["capture", "train"], ["train", "export"])
    for name, words in commands:
        options = {option: p for p in get_command(app).commands[name].params for option in p.opts}
        where = iter(words)
        for word in where:
            if not word.startswith("--"):
                assert word in written or Path(ROOT / word).is_file() or word.startswith(("answers/", "runs/")), (name, word)
                continue
            assert word in options, (name, word)
            value = next(where)
            if word == "--set":
                assert name in SETTINGS_OF, name
                values: dict[str, Any] = {}
                override(values, [value])
                validate(SETTINGS_OF[name], values, where=name)
            written |= {value} if word == "--out" else set()
    assert load_config(Recipe, recipe).data.rows in written


@pytest.mark.parametrize(("kind", "expected"), [("mixed", {True, False}), ("on", {True}), ("off", {False})])
def test_rows_of_the_other_kind_of_answers(
    kind: str, expected: set[bool], small_target: Callable, small_rows: Callable, run: Run, tmp_path: Path
) -> None:
    """The header of the recipe for Qwen3: thinking=on, off or mixed of the same answers."""
    recipe = ROOT / "recipes/eagle3_qwen3_8b.yaml"
    target, answers = small_target(recipe), small_rows(recipe).parent / "answers.jsonl"
    run("prepare", answers, "--target", target, "--out", tmp_path, "--set", "rows=turn", "--set", f"thinking={kind}")
    tokenizer = AutoTokenizer.from_pretrained(target)
    said = [tokenizer.decode([int(i) for i in row.supervised_ids]) for row in RowStore(tmp_path)]
    assert {"<think>" in text and " or " in text for text in said} == expected and len(said) == {"mixed": 12, "on": 8, "off": 4}[kind]


@pytest.mark.slow
def test_70b_on_two_processes_leads_elsewhere(
    small: Small, small_target: Callable, launch: Callable, run: Run, tmp_path: Path
) -> None:
    """The recipe as it stands, target sharded: the states and the head of one process with a whole target."""
    recipe = ROOT / "recipes/eagle3_llama33_70b.yaml"
    settings = [s for s in small(recipe) if "placement" not in s and "states" not in s]
    settings += ["--set=training.tokens_per_step=16", f"--set=data.states={tmp_path / 'states'}"]
    out = launch("cpu_2.yaml", "train", recipe, "--out", tmp_path / "two", *settings)
    assert out.count("2 steps, best measured tau") == 1
    drafts_change_nothing(recipe, tmp_path / "two/head", small_target(recipe))
    whole = ["--set=target.placement=rank", "--set=training.accumulation=2"]
    result = run("train", recipe, "--out", tmp_path / "one", *settings, *whole)  # the same states, the same batches a step
    assert "2 steps, best measured tau" in result.output
    one, two = (load_file(tmp_path / name / "head/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.allclose(one[k].float(), two[k].float(), atol=1e-3) for k in one)


def test_table_of_the_docs_is_of_other_plans(run: Run) -> None:
    text = (ROOT / "docs/scaling.md").read_text()
    rows = [[cell.strip(" `") for cell in line[1:-1].split("|")] for line in text.split("\n") if "` | `--gpus" in line]
    assert {row[0] for row in rows} == {path.stem for path in LARGE}
    for name, options, *figures in rows:
        config = Path(__file__).with_name("configs") / name.partition("_")[2]
        asked = ["--target", config, "--device", "h100", "--tokens", "1e8", *options.split(), "--json"]
        plan = json.loads(run("plan", ROOT / f"recipes/{name}.yaml", *asked).stdout)
        memory, hours = plan["memory"], plan["hours"]
        store = [f"{plan['store_bytes']['int8 states, bf16 last state'] / 2**40:.1f}"] if "capture" in memory else ["–"]
        planned = [f"{memory[stage]['bytes'] / 2**30:.1f}" if stage in memory else "–" for stage in ("capture", "training")] + store
        planned += [f"{hours[stage]['hours']:.2f}" if stage in hours else "–" for stage in ("regeneration", "capture", "training")]
        assert figures == planned, (name, options)
