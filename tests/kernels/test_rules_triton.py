"""The kernels of draws and chains: under triton's interpreter, on a GPU where there is one, compiled for a GPU that is not there."""

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it comes with torch for CUDA)")


def cases(*args: str, **env: str) -> str:
    command = [sys.executable, str(HERE / "rules_cases.py"), *args]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@needs_triton
def test_kernels_keep_other_tokens_than_their_twins() -> None:
    assert cases(TRITON_INTERPRET="1") == "same"


@needs_triton
@pytest.mark.slow
def test_law_of_the_kernels_is_off() -> None:
    """Every outcome of every coin of chains of one and two drafts, over the awkward laws."""
    assert cases("long", TRITON_INTERPRET="1") == "same"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernels_on_the_gpu_keep_other_tokens_than_their_twins() -> None:
    assert cases("cuda", "long") == "same"


@needs_triton
def test_kernel_of_a_rule_does_not_compile_or_spills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "scripts"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiling = importlib.import_module("compile_kernels")
    *_, surplus, verdict = compiling.draws(32)
    for variant in (surplus, verdict):
        usage = compiling.compiled(variant, 90)
        assert usage.spills == 0 and usage.registers > 32 and compiling.faults(variant, 90, usage) == []
