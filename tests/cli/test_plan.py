"""`spectrain plan` on configs alone: exact counts of targets, heads and stores, and what it says when something does not fit."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import Result
from safetensors import safe_open
from torch.nn import Linear
from transformers import (
    AutoModelForCausalLM,
    CLIPTextConfig,
    DeepseekV3Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3MoeConfig,
    T5Config,
)

from spectrain.cli.plan_facts import Skeleton, head_size, probe_of, read_config, store_bytes, target_size
from spectrain.config import CaptureConfig, DataConfig, HeadConfig, Recipe, TargetConfig, TrainingConfig, load_config
from spectrain.data.row_store import RowStore
from spectrain.data.rows import Row
from spectrain.heads.base import HEADS, head_class
from spectrain.planning.sizes import HeadSize
from spectrain.target.capture import capture
from spectrain.target.model import Target
from spectrain.training.loop import _order
from spectrain.training.setup import new_head

ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "eagle3": [{}, {"num_layers": 2, "fc_norm": True}, {"hidden_size": 24, "norm_before_fc": True, "output": "frozen"}],
    "eagle": [{}, {"num_layers": 2, "bias": True}],
    "medusa": [{}, {"num_layers": 2, "shared_output": True, "num_heads": 3}],
    "hydra": [{}, {"prefix": False, "num_layers": 2, "num_heads": 3}],
}


@pytest.fixture(scope="module")
def deep(make_target: Callable[..., Target]) -> Target:
    return make_target(num_hidden_layers=7)


def a_row(i: int, prompt: int, answer: int) -> Row:
    ids = np.arange(10, 10 + prompt + answer, dtype=np.int32)
    return Row(str(i), "any", ids, np.array([0] * prompt + [1] * answer, np.uint8))


@pytest.mark.parametrize("kind", HEADS)
def test_counts_of_a_head_are_those_of_a_real_one(kind: str, deep: Target) -> None:
    for changes in VARIANTS[kind]:
        config = HeadConfig(kind=kind, draft_vocab_size=60, **changes)
        training = TrainingConfig(ttt_steps=config.num_heads if "num_heads" in head_class(kind).settings else 3)
        real = new_head(config, deep, [a_row(0, 5, 20)], seed=0)
        found = head_size(config, training, Skeleton(deep.config, deep.vocab_size, "tiny"))
        named = dict(real.named_parameters())
        assert found.params == sum(p.numel() for p in named.values()), changes
        assert found.trained == sum(p.numel() for p in named.values() if p.requires_grad), changes
        assert found.tables == sum(b.numel() * b.element_size() for b in real.buffers())
        assert found.output_params == sum(p.numel() for n, p in named.items() if n.startswith("lm_head"))
        assert found.kv_bytes(4) == 2 * 4 * int(np.prod(real.cache_layers)) * bool(real.cache_layers[0])
        assert found.with_vocabulary(70).params == found.params + 10 * found.outputs * found.width


def test_every_kind_has_a_variant() -> None:
    assert VARIANTS.keys() == HEADS.keys()


def test_counts_of_targets_are_those_of_real_models(tmp_path: Path, deep: Target) -> None:
    deep.model.config.save_pretrained(tmp_path / "dense")
    dense = target_size(read_config(str(tmp_path / "dense"), None), "dense", "bfloat16")
    assert dense.params == dense.active == sum(p.numel() for p in deep.model.parameters())
    assert (dense.weight_bytes, dense.kv_bytes, dense.tied) == (2 * dense.params, 2 * 7 * 2 * 8 * 2, False)
    assert dense.linear == sum(m.weight.numel() for n, m in deep.model.named_modules() if isinstance(m, Linear) and n != "lm_head")
    eight = target_size(read_config(str(tmp_path / "dense"), None), "dense", "bfloat16", "8bit")
    assert eight.weight_bytes == dense.weight_bytes - dense.linear
    assert dense.inside == sum(p.numel() for n, p in deep.model.named_parameters() if "embed" not in n and "lm_head" not in n)
    config = Qwen3MoeConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "mixture")
    mixture = target_size(read_config(str(tmp_path / "mixture"), None), "mixture", "float32")
    real = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert (mixture.params, mixture.tied, mixture.experts) == (real, True, 0.25)
    assert mixture.active == real - 2 * 6 * 3 * 32 * 16  # of the layers' eight experts six have no part in a token


def test_bytes_of_a_store_are_those_of_a_real_one(deep: Target, tmp_path: Path) -> None:
    rows = [a_row(i, 4 + i, 9) for i in range(5)]
    for kinds in (("int8", "bf16"), ("bf16", "bf16"), ("int8", "int8")):
        config = CaptureConfig(states=kinds[0], last=kinds[1])  # type: ignore[arg-type]
        data = DataConfig(rows="none", capture=config)
        recipe = Recipe(name="r", target=TargetConfig(name="t"), data=data, head=HeadConfig(draft_vocab_size=60))
        head = head_size(recipe.head, recipe.training, Skeleton(deep.config, deep.vocab_size, "tiny"))
        capture(rows, deep, (2, 3, 4), tmp_path / "-".join(kinds), config)
        size = 0
        for path in (tmp_path / "-".join(kinds)).glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            size += sum(t.nbytes for name, t in tensors.items() if name not in ("kept_runs", "asked_runs", "digests"))
        state, answer = store_bytes(recipe, head)
        kept, asked = sum(len(row) - 2 for row in rows), sum(row.supervised for row in rows)
        assert size == kept * state + asked * answer
        assert size < sum(map(len, rows)) * state + asked * answer  # as a plan has it: at most


def write_recipe(path: Path, **parts: Any) -> Path:
    recipe = {"name": "large", "target": {"name": str(path.parent / "target"), "dtype": "bfloat16"}, "data": {"rows": "not/there"},
              "head": {"draft_vocab_size": 32000}, "training": {"mixed_precision": "bf16"}, **parts}  # fmt: skip
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for a target of 70e9 parameters, of which there is a config and nothing else."""
    root = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=131072, rope_parameters=ROPE, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(root / "target")
    assert [p.name for p in (root / "target").iterdir()] == ["config.json"]
    return write_recipe(root / "large.yaml")


def test_70b_without_weights_says_that_it_must_be_sharded(large: Path, cli: Callable[..., Result]) -> None:
    result = cli("plan", large, "--gpus", 16, "--gpu-memory", 80, "--tokens", "1e9")
    out = result.output
    assert result.exit_code == 0, out
    assert "target  70.55G parameters of 2 bytes" in out and "131.42 GiB  70.55G parameters, whole on every device × 2 bytes" in out
    assert "DOES NOT FIT" in out and "--set target.placement=fsdp2 (tp within a machine" in out
    assert "weights gathered" in out and "hours on 16 device(s), with what was switched on above" in out
    assert "bf16 last state" in out and "tokens of cache" in out and "(assumed)" in out
    assert "4 copies of the target on 4 device(s) each" in out and "do not hold the target" not in out
    alone = cli("plan", large, "--tokens", "1e9").output
    assert "--set target.quantization=4bit (another target" in alone and "those of linear layers in" not in alone
    small = cli("plan", large, "--tokens", "1e9", "--gpu-memory", 20).output
    assert "the devices do not hold the target" in small and "it does not fit there" in small and "displaced" not in small
    sharded = cli("plan", large, "--gpus", 16, "--tokens", "1e9", "--placement", "fsdp2", "--json")
    found = json.loads(sharded.stdout)
    of_recipe = cli("plan", large, "--gpus", 16, "--tokens", "1e9", "--set", "target.placement=fsdp2", "--json")
    assert json.loads(of_recipe.stdout) == found
    assert found["target"]["params"] == 70_553_706_496 and found["fits"] and not found["ways"]
    assert found["peak_bytes"] == max(stage["bytes"] for stage in found["memory"].values()) < 80 * 2**30
    terms = found["memory"]["training"]["terms"]
    assert found["memory"]["training"]["bytes"] == pytest.approx(sum(t["value"] for t in terms)) and all(t["how"] for t in terms)
    assert found["store_bytes"]["int8 states, bf16 last state"] == 1e9 * 3 * (8192 + 10) + 5e8 * (2 * 8192 + 8)
    assert found["hours"]["training"]["device_hours"] == pytest.approx(16 * found["hours"]["training"]["hours"])


def test_own_rows_give_the_batches_that_training_makes(project: Path, tmp_path: Path, cli: Callable[..., Result]) -> None:
    texts = [(f"w{20 + i} w{60 + i}", " ".join(f"w{10 + (7 * i + j) % 80}" for j in range(3 + i))) for i in range(20)]
    talks = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in texts]
    lines = [json.dumps({"id": str(i), "messages": talk}) + "\n" for i, talk in enumerate(talks)]
    (tmp_path / "talks.jsonl").write_text("".join(lines))
    made = cli("prepare", tmp_path / "talks.jsonl", "--target", project / "target", "--out", tmp_path / "rows", "--set", "validation=0.2")
    assert made.exit_code == 0, made.output
    result = cli("plan", project / "recipes/tiny.yaml", "--rows", tmp_path / "rows", "--device", "cpu2", "--json")
    assert result.exit_code == 0, result.output
    found, rows = json.loads(result.stdout), RowStore(tmp_path / "rows")
    assert found["data"]["tokens"] == sum(map(len, rows)) and found["data"]["longest"] == max(map(len, rows))
    answers = found["hours"]["regeneration in process"]
    assert answers["hours"] > 0 and "mean length" not in answers["note"] and "servers" in found["hours"]["regeneration"]["note"]
    prompts = sum(len(row.prompt_ids) for row in rows)
    told = int(answers["terms"][0]["how"].split(" positions, ")[1].split(" ")[0].replace(",", ""))
    assert prompts - len(rows) <= told <= prompts + len(rows)
    training = load_config(Recipe, project / "recipes/tiny.yaml", ["training.epochs=1"]).training
    assert found["data"]["batches"] == _order(SimpleNamespace(rows=rows), training, 1)[3].last  # type: ignore[arg-type]
    assert "measuring acceptance" in found["memory"]
    probed = {t["name"]: t["how"] for t in found["memory"]["measuring acceptance"]["terms"]}
    assert probed["target's cache"].startswith(f"{len(RowStore(tmp_path / 'rows', 'validation'))} rows × ")


def test_prompts_of_a_recipe_say_how_much_there_is_at_most(project: Path, cli: Callable[..., Result]) -> None:
    result = cli("plan", project / "recipes/tiny.yaml", "--device", "cpu2", "--set", "data.online=true")
    assert result.exit_code == 0, result.output
    assert "(11 prompts of the recipe, each of at most 480 + 14 tokens)" in result.output
    assert "(not made: data.online)" in result.output and "target's pass (online)" in result.output and "\n  capture " not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "h900"], "device 'h900' is unknown; there are h100,"),
        (["--tokens", "1e6", "--target", "nowhere/at/all"], "no config of a target at nowhere/at/all"),
        ([], "data.rows not/there is not there; say how much data there is: --rows FOLDER or --tokens N"),
        (["--tokens", "1e6", "--placement", "cloud"], "placement 'cloud' is unknown; there are rank, fsdp2, tp, zero3"),
        (["--tokens", "1e6", "--supervised-share", "2"], "--supervised-share lies above 0 and at most at 1, found 2.0"),
        (["--tokens", "1e6", "--gpus", "0"], "--gpus 0: a run has one device or more"),
        (["--tokens", "inf"], "--tokens is a number, such as 1e9, found inf"), (["--row-length", "9"], "add --tokens N or leave them out"),
        (["--tokens", "1e6", "--rows", "rows"], "--rows and --tokens both say how much data there is; give one of them"),
        (["--tokens", "1e6", "--row-length", "5000"], "--row-length 5000 is above 4096, which a row may have"),
        (["--tokens", "1e6", "--gpu-memory", "inf"], "memory of a device is a number above zero, found inf; mend --gpu-memory"),
        (["--tokens", "1e6", "--set", "head.kind=hawk"], "head 'hawk' is unknown; there are"),
        (["--tokens", "1e6", "--set", "head.draft_vocab_size=200000"], "head.draft_vocab_size 200000 is above the 128256 rows"),
        (["--tokens", "1e6", "--set", "head.size=3"], "head.size: unknown key"),
        (["--tokens", "1e6", "--set", "head.kind=medusa", "--set", "training.ttt_steps=5"], "training.ttt_steps 5, and a medusa head"),
        (["--tokens", "1e6", "--placement", "tp", "--gpus", "16", "--set", "target.tp_size=16"], "over 16 devices; 16 devices and the 8"),
        (["--tokens", "1e6", "--placement", "tp", "--gpus", "6", "--set", "target.tp_size=4"], "tp over 4 devices; 6 devices and"),
        (["--tokens", "1e6", "--placement", "zero3", "--set", "target.quantization=8bit"], "a quantised target stands whole on every"),
    ],
)
def test_errors_say_what_to_do(arguments: list[str], said: str, large: Path, cli: Callable[..., Result]) -> None:
    result = cli("plan", large, *arguments)
    assert result.exit_code == 1 and said in result.stderr and "Traceback" not in result.stderr, result.output


def test_no_recipe(tmp_path: Path, cli: Callable[..., Result]) -> None:
    result = cli("plan", tmp_path / "none.yaml")
    assert result.exit_code == 1 and "no file" in result.stderr


@pytest.mark.parametrize("kind", HEADS)
def test_every_kind_has_a_plan(kind: str, large: Path, cli: Callable[..., Result]) -> None:
    set_ = ["--set", f"head.kind={kind}", "--set", "training.ttt_steps=4"]
    result = cli("plan", large, "--tokens", "1e9", "--gpus", 8, "--placement", "tp", "--json", *set_)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 0 < found["served"]["c"] < 0.2 and found["hours"]["training"]["hours"] > 0
    assert (found["served"]["kv_head"] > 0) == (kind != "medusa")


@pytest.mark.parametrize(("kind", "depth"), [("eagle3", 4), ("medusa", 2), ("hydra", 2)])
def test_chain_is_deeper_than_the_head_drafts(kind: str, depth: int, large: Path, cli: Callable[..., Result]) -> None:
    """The recipe's chain of 4, or as many as there are heads."""
    set_ = ["--set", f"head.kind={kind}", "--set", "training.ttt_steps=2", *(["--set", "head.num_heads=2"] if depth == 2 else [])]
    result = cli("plan", large, "--tokens", "1e6", *set_)
    assert result.exit_code == 0 and f"a chain of {depth} pays above tau" in result.output, result.output
    head = HeadSize("", 0, 0, 0, (), 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, False, max_depth=depth)
    recipe = load_config(Recipe, large, ["data.prepare.validation=0.1"])
    assert probe_of(recipe, head, None, 4096)[2] == probe_of(recipe, replace(head, max_depth=None), None, 4096)[2] - 2 * (4 - depth)


@pytest.mark.parametrize(
    ("made_of", "said"),
    [
        (MambaConfig(), r"its config \(MambaConfig\) has no num_attention_heads.*; choose a causal model"),
        (T5Config(), r"its config \(T5Config\) has no max_position_embeddings|transformers makes no causal model of a T5Config"),
        (CLIPTextConfig(), "transformers makes no causal model of a CLIPTextConfig; choose another --target"),
        (DeepseekV3Config(num_hidden_layers=1, n_routed_experts=8), "with compressed keys .latent attention., which cannot be verified"),
        ({"model_type": "llama", "num_hidden_layers": "many"}, "no config of a target at .*num_hidden_layers"),
    ],
)  # fmt: skip
def test_target_that_cannot_be_trained_on_has_a_plan(
    made_of: Any, said: str, large: Path, tmp_path: Path, cli: Callable[..., Result]
) -> None:
    if isinstance(made_of, dict):
        (tmp_path / "config.json").write_text(json.dumps(made_of))
    else:
        made_of.save_pretrained(tmp_path)
    result = cli("plan", large, "--tokens", "1e6", "--target", tmp_path)
    assert result.exit_code == 1 and re.search(said, result.stderr), result.output


def test_windows_are_planned_without_a_word(large: Path, tmp_path: Path, cli: Callable[..., Result]) -> None:
    MistralConfig(sliding_window=4096).save_pretrained(tmp_path)
    result = cli("plan", large, "--tokens", "1e6", "--target", tmp_path)
    assert result.exit_code == 0 and "not counted: windows of the target's attention" in result.output, result.output
    assert "windows of" not in cli("plan", large, "--tokens", "1e6").output
