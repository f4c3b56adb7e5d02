"""Files for accelerate and DeepSpeed: accelerate reads them, our training takes what they ask for, and they run."""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands import launch as launcher
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from spectrain.config import TrainingConfig
from spectrain.training.sharding import deepspeed_plugin, fsdp_plugin

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes/accelerate").glob("*.yaml"))
PROCESSES = {"cpu_2": 2, "gpu_1": 1, "gpu_8_ddp": 8, "gpu_8_fsdp2": 8, "gpu_8_zero2": 8, "gpu_8_zero3": 8, "gpu_2x8_fsdp2": 16}
TRAINED = ("ACCELERATE_USE_", "ACCELERATE_DEEPSPEED", "ACCELERATE_CONFIG", "ACCELERATE_GRADIENT", "FSDP_")


def started(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Namespace, Mapping[str, str]]:
    """What `accelerate launch` would start by this file: by which launcher, with which arguments and environment."""
    called: list[tuple[str, Namespace]] = []
    for name in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
        monkeypatch.setattr(launcher, name, lambda args, name=name: called.append((name, args)))
    # Not the first machine, whose port must be free.
    asked = ["--config_file", str(path), "--machine_rank", "1", "--main_process_ip", "127.0.0.1", "-m", "spectrain", "train", "recipe"]
    launcher.launch_command(launcher.launch_command_parser().parse_args(asked))
    ((name, args),) = called
    if name == "multi_gpu_launcher":
        return name, args, prepare_multi_gpu_env(args)
    return name, args, (prepare_deepspeed_cmd_env if name == "deepspeed_launcher" else prepare_simple_launcher_cmd_env)(args)[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_starts_something_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many processes as the name says, sharded as the name says, by settings that training does not refuse; and a frozen target that
    transformers loads whole on all of them."""
    monkeypatch.chdir(ROOT)
    name, args, env = started(path, monkeypatch)
    assert args.num_processes == PROCESSES[path.stem] and args.num_machines == (2 if "2x8" in path.stem else 1)
    assert name == ("simple" if path.stem == "gpu_1" else "deepspeed" if "zero" in path.stem else "multi_gpu") + "_launcher"
    for key, value in env.items():
        if key.startswith(TRAINED):
            monkeypatch.setenv(key, value)
    if "zero" in path.stem:
        pytest.importorskip("deepspeed")
    zero, fsdp = deepspeed_plugin(TrainingConfig(max_grad_norm=0.5)), fsdp_plugin(TrainingConfig())
    assert (fsdp is not None) == ("fsdp2" in path.stem) and (zero is not None) == ("zero" in path.stem)
    assert env.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "false"
    if zero is not None:
        assert zero.zero_stage == int(path.stem[-1]) and not zero.zero3_init_flag
        assert (zero.deepspeed_config["gradient_clipping"], zero.deepspeed_config["gradient_accumulation_steps"]) == (0.5, 1)
    if fsdp is not None:
        assert fsdp.fsdp_version == 2 and fsdp.reshard_after_forward is False


def test_every_file_is_known() -> None:
    assert [path.stem for path in FILES] == sorted(PROCESSES)
    stages = [json.loads(path.read_text())["zero_optimization"]["stage"] for path in sorted((ROOT / "recipes/deepspeed").glob("*.json"))]
    assert stages == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FILES if path.stem.startswith("gpu_8_")], ids=lambda path: path.stem)
def test_file_leads_to_no_head(path: Path, small: Callable, launch: Callable[..., str], tmp_path: Path) -> None:
    """Each of them on two processes of this machine."""
    if "zero" in path.stem:
        pytest.importorskip("deepspeed")
    recipe = ROOT / "recipes/eagle3_llama31_8b.yaml"
    settings: list[Any] = [s for s in small(recipe) if "states" not in s] + [f"--set=data.states={tmp_path / 'states'}"]
    out = launch(path.name, "train", recipe, "--out", tmp_path / "run", *settings)
    assert out.count("2 steps, best measured tau") == 1 and (tmp_path / "run/head/config.json").is_file()
