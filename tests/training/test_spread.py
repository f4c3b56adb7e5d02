"""Weights that accelerate spreads over processes (FSDP2, DeepSpeed ZeRO-2 and -3) train as those of one process, and are kept as theirs."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spectrain.config import TrainingConfig
from spectrain.heads.base import load_head
from spectrain.training.setup import open_accelerator

SCRIPT = Path(__file__).with_name("spread_processes.py")
BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # what `accelerate launch --config_file` sets
ZERO2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


def launch(folder: Path, way: dict[str, str], *names: str, world: int = 2) -> None:
    """These runs on several processes; fails when they do not end."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", str(SCRIPT), str(folder), *names]
    environment = {**os.environ, **way, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(start, capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run by one process, this one."""
    folder, main = tmp_path_factory.mktemp("one"), runpy.run_path(str(SCRIPT))["main"]

    def made(name: str) -> Path:
        if not (folder / name).exists():
            main(folder, name)
        return folder / name

    return made


def record(run: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((run / f"record-{rank}.json").read_text())  # type: ignore[no-any-return]


def half_done(run: Path, at: Path) -> Path:
    """A copy of a run as it stood after ten steps."""
    (at / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "checkpoints/step-10.pt", at / "checkpoints")
    return at


def assert_trained_alike(run: Path, whole: Path, *, way: str) -> None:
    """Losses, all that a checkpoint holds, and the heads that were written; what was measured is the same on all processes."""
    mine, theirs, other = record(run), record(whole), record(run, 1)
    done = len(mine["losses"])
    assert mine["way"] == other["way"] == way and done in (10, 20)
    torch.testing.assert_close(mine["losses"], theirs["losses"][-done:], **CLOSE)
    assert mine["measured"] == other["measured"] and mine["best"] == other["best"] == done // 10 and other["saved"] == []
    torch.testing.assert_close(mine["measured"], theirs["measured"][-(done // 10) :], atol=1e-4, rtol=1e-6)
    assert_same_state(run, whole)
    assert mine["saved"][-1] == "last"
    for name in set(mine["saved"]):
        mine_head, their_head = (load_file(folder / name / "model.safetensors") for folder in (run, whole))
        torch.testing.assert_close(mine_head, their_head, **CLOSE)
        assert load_head(run / name).target_ids.tolist() == load_head(whole / name).target_ids.tolist()


def assert_same_state(run: Path, whole: Path) -> None:
    states = [dict(BY_HAND["values"](BY_HAND["checkpoint"](folder, 20)["states"])) for folder in (run, whole)]
    assert states[0].keys() == states[1].keys()
    for path, value in states[0].items():
        if isinstance(value, torch.Tensor):
            near = {"atol": {"exp_avg": 1e-7, "exp_avg_sq": 1e-9}.get(path.rpartition("/")[2], 1e-5), "rtol": 1e-4}
            torch.testing.assert_close(value, states[1][path], msg=lambda text, path=path: f"{path}: {text}", **near)
        else:
            assert value == states[1][path], path


def assert_frozen_rows_stayed(run: Path) -> None:
    """DI3: bit by bit, in the head that was written and in the checkpoint; they are the target's rows."""
    target = runpy.run_path(str(SCRIPT))["TWO"]["tiny_target"]()
    saved = load_file(run / "last/model.safetensors")
    rows_VdW = target.output_VW[load_head(run / "last").target_ids]
    assert torch.equal(saved["lm_head.weight"], rows_VdW)
    assert torch.equal(BY_HAND["checkpoint"](run, 20)["states"]["head"]["lm_head.weight"], rows_VdW)


def check_way(way: str, environment: dict[str, str], one: Callable[[str], Path], folder: Path) -> None:
    """All that is said of a way, from one launch: a run from the start and one from the middle, with frozen rows, and with a gradient
    that is not finite; then what one process makes of its checkpoint."""
    kept = "plain" if way == "zero3" else "averaged"
    resumed = f"{kept}-resumed"
    half_done(one(kept), folder / resumed)
    launch(folder, environment, kept, resumed, "frozen", "poisoned")
    for name in (kept, "frozen", "poisoned"):
        assert_trained_alike(folder / name, one(name), way=way)
    assert_trained_alike(folder / resumed, one(kept), way=way)
    assert_frozen_rows_stayed(folder / "frozen")
    numbers = sum(t.numel() for name, t in BY_HAND["checkpoint"](folder / kept)["states"]["head"].items() if name not in ("d2t", "t2d"))
    held = [record(folder / kept, rank)["held"] for rank in range(2)]
    assert held == [numbers] * 2 if way == "zero2" else all(n < 0.6 * numbers for n in held) and sum(held) >= numbers
    half_done(folder / kept, folder / f"{kept}-back")
    runpy.run_path(str(SCRIPT))["main"](folder, f"{kept}-back")
    assert_same_state(folder / f"{kept}-back", one(kept))
    torch.testing.assert_close(record(folder / f"{kept}-back")["losses"], record(one(kept))["losses"][10:], **CLOSE)


def test_sharded_weights_train_otherwise_than_whole_ones(one: Callable[[str], Path], tmp_path: Path) -> None:
    check_way("fsdp2", FSDP2, one, tmp_path)


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize(("way", "environment"), [("zero2", ZERO2), ("zero3", ZERO3)])
def test_engine_trains_otherwise_than_one_process(
    way: str, environment: dict[str, str], one: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    pytest.importorskip("deepspeed")
    check_way(way, environment, one, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "environment"), [("fsdp2", FSDP2), ("zero3", ZERO3)])
def test_head_of_another_kind_trains_otherwise(way: str, environment: dict[str, str], one: Callable[[str], Path], tmp_path: Path) -> None:
    """ZeRO-3 here keeps no small weights on every process, as large heads have none."""
    if way == "zero3":
        pytest.importorskip("deepspeed")
        settings = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "gradient_clipping": "auto"}
        (tmp_path / "zero3.json").write_text(json.dumps({**settings, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}))
        environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "zero3.json")}
    names = ("plain", "medusa", "hydra", "eagle")
    launch(tmp_path, environment, *names)
    for name in names:
        assert_trained_alike(tmp_path / name, one(name), way=way)


REFUSED: list[tuple[dict[str, str], dict[str, Any], str]] = [
    (FSDP2, {"optimizer": "muon"}, "FSDP2, and training.optimizer muon .* --set training.optimizer=adamw, or launch without it"),
    (FSDP2, {"lora": {}}, "FSDP2, and training.lora does not work with it: --set training.lora=null"),
    (FSDP2, {"mixed_precision": "fp16"}, "training.mixed_precision fp16 .* --set training.mixed_precision=bf16"),
    (FSDP2, {"compile": True}, "training.compile does not work with it: --set training.compile=false"),
    ({**FSDP2, "FSDP_VERSION": "1"}, {}, "FSDP and fsdp_version 1; set fsdp_version: 2"),
    ({**FSDP2, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {}, "fsdp_auto_wrap_policy; a head is one unit: .* NO_WRAP"),
    ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, {}, "FSDP and fsdp_offload_params"),
    ({**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {}, "set fsdp_cpu_ram_efficient_loading: false"),
    (ZERO2, {"optimizer": "muon"}, "DeepSpeed, and training.optimizer muon"),
    (ZERO3, {"ema": 0.9}, "ZeRO-3 and training.ema does not work with it: use zero_stage 2 or --set training.ema=null"),
    ({**ZERO2, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, {}, "DeepSpeed and zero_stage 1; use stage 2 or 3"),
    ({**ZERO2, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, {}, "offload_optimizer; the head fits"),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "changes", "told"), REFUSED)
def test_launch_that_heads_do_not_train_with_begins(
    environment: dict[str, str], changes: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "ACCELERATE_USE_DEEPSPEED" in environment:
        pytest.importorskip("deepspeed")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=told):
        open_accelerator(TrainingConfig(**changes), tmp_path)
