"""DI1: all samples of one process in step 3 are left out, so that it has nothing to learn from: nobody waits, and all learn the same."""

import json
import runpy
from pathlib import Path

import pytest
import torch

SPREAD = runpy.run_path(str(Path(__file__).parents[1] / "training/test_spread.py"))


@pytest.mark.parametrize("way", ["whole", *(pytest.param(way, marks=pytest.mark.slow) for way in ("fsdp2", "zero2", "zero3"))])
def test_process_without_supervised_tokens_hangs_the_others(way: str, tmp_path: Path) -> None:
    if way.startswith("zero"):
        pytest.importorskip("deepspeed")
    SPREAD["launch"](tmp_path, {"whole": {}, "fsdp2": SPREAD["FSDP2"], "zero2": SPREAD["ZERO2"], "zero3": SPREAD["ZERO3"]}[way], "masked")
    first, other = (json.loads((tmp_path / f"masked/record-{rank}.json").read_text()) for rank in range(2))
    assert first["way"] == other["way"] == way and first["steps"] == other["steps"] == 20
    assert first["skipped"] == other["skipped"] > 0  # told on both
    assert first["losses"] == other["losses"] and first["measured"] == other["measured"]
    assert torch.tensor([*first["losses"], *first["measured"]]).isfinite().all()
