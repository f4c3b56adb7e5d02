"""Target and head spread over the same processes: neither gets in the other's way."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("placed_training.py")
ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "DS_ACCELERATOR": "cpu"}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize(
    ("placement", "way", "launched"),
    [("zero3", "zero3", ZERO3), ("rank", "zero3", ZERO3), ("fsdp2", "fsdp2", FSDP2), ("tp", "whole", {}), ("fsdp2", "whole", {})],
)
def test_head_learns_otherwise_from_a_spread_target(
    placement: str, way: str, launched: dict[str, str], tmp_path: Path, make_target: Any, make_tokenizer: Any
) -> None:
    """DeepSpeed and FSDP of the head take hold of the target, or leave it; processes with fewer passes wait for ever."""
    if way == "zero3":
        pytest.importorskip("deepspeed")
    for name in ("one", "two"):
        make_target().model.save_pretrained(tmp_path / name / "target")
        make_tokenizer(100).save_pretrained(tmp_path / name / "target")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    run = subprocess.run(
        [*start, str(tmp_path / "two"), placement], capture_output=True, text=True, timeout=400, env={**os.environ, **launched}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    runpy.run_path(str(SCRIPT))["main"](tmp_path / "one", "rank")
    one = json.loads((tmp_path / "one/record-0.json").read_text())
    for rank in range(2):
        found = json.loads((tmp_path / f"two/record-{rank}.json").read_text())
        assert found["way"] == way and found["steps"] == one["steps"]
        torch.testing.assert_close(found["history"], one["history"], atol=1e-5, rtol=1e-5)
