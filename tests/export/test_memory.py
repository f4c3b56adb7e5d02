"""Large heads: export and import have the head in memory once, not two or three times."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spectrain.export.layout import VARIANTS, head_shapes

HEADS = runpy.run_path(str(Path(__file__).with_name("small_heads.py")))
LIMIT = 1200  # MB of the whole process; torch and transformers alone have about 330
W, V = 1024, 65000
SMALL = {"vocab_size": V, "draft_vocab_size": V - 1}


def eagle3(folder: Path) -> None:
    config = HEADS["head_config"](
        hidden_size=W, target_hidden_size=W, intermediate_size=16384, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
        **SMALL, layer_ids=[2, 16, 29], target_layers=32,
    )  # fmt: skip
    tables = {name: tensor for name, tensor in HEADS["head_tensors"]({**HEADS["head_config"](), **SMALL}).items() if name in ("d2t", "t2d")}
    shapes = head_shapes({**VARIANTS, **config})
    HEADS["write_head"](folder, config, {**{n: torch.ones(s) for n, s in shapes.items() if n not in tables}, **tables})


def medusa(folder: Path) -> None:
    config: dict[str, Any] = {
        "head": "medusa", "format": 1, "target_hidden_size": W, "num_heads": 2, "num_layers": 1, "shared_output": False, "vocab_size": V,
        "draft_vocab_size": V, "layer_ids": [-1], "target_layers": 32,
    }  # fmt: skip
    tensors = {f"heads.{k}.0.linear.{name}": torch.ones(shape) for k in range(2) for name, shape in (("weight", (W, W)), ("bias", (W,)))}
    tensors |= {f"lm_head.{k}.weight": torch.ones(V, W) for k in range(2)}
    folder.mkdir()
    save_file({**tensors, "d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "made_with.json").write_text(json.dumps(HEADS["made_with"](config)))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "to"), [(eagle3, "vllm"), (medusa, "vllm"), (medusa, "medusa")])
def test_head_is_held_in_memory_more_than_once(tmp_path: Path, make: Any, to: str) -> None:
    make(tmp_path / "head")
    script = Path(__file__).with_name("memory.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "head"), to, str(tmp_path / "out")],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    size, peak = map(int, run.stdout.split()[-2:])
    print(f"{size} MB, peak {peak} MB")
    assert size >= 500 and peak < LIMIT
