"""The tree attention and path kernels: under triton's interpreter, on a GPU where there is one, compiled for GPUs that are not there."""

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spectrain.kernels import tree_attention
from spectrain.target.model import load_target

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it comes with torch for CUDA)")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def script(name: str, *args: str, interpret: bool) -> str:
    env = {**os.environ, **({"TRITON_INTERPRET": "1"} if interpret else {})}
    done = subprocess.run([sys.executable, str(HERE / name), *args], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@needs_triton
def test_kernels_differ_from_their_twins() -> None:
    assert script("tree_attention_cases.py", interpret=True) == "same"


@needs_triton
def test_answer_with_the_kernel_is_another() -> None:
    """A plain target, and one with a soft-cap, and windows in some of its layers."""
    assert script("generator_cases.py", "cpu", "llama", "gemma2", interpret=True) == "same"


@needs_triton
@pytest.mark.slow
def test_answer_of_a_window_or_with_sinks_is_another() -> None:
    assert script("generator_cases.py", "cpu", "mistral", "gpt-oss", interpret=True) == "same"


@needs_gpu
def test_kernels_on_the_gpu_differ_from_their_twins() -> None:
    assert script("tree_attention_cases.py", "cuda", interpret=False) == "same"


@needs_gpu
def test_answer_on_the_gpu_is_another() -> None:
    assert script("generator_cases.py", "cuda", "llama", "mistral", "gemma2", "gpt-oss", interpret=False) == "same"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernel_is_taken_where_it_cannot_run() -> None:
    assert tree_attention.way_of("auto", torch.device("cpu")) == "torch"
    with pytest.raises(ValueError, match="needs a CUDA device, found cpu; use attention='auto' or 'torch'"):
        tree_attention.way_of("triton", torch.device("cpu"))
    with pytest.raises(ValueError, match="'flash' is unknown; choose auto, torch or triton"):
        load_target(".", device="cpu", attention="flash")  # type: ignore[arg-type]


@needs_triton
def test_gpu_is_not_given_the_kernel() -> None:
    assert tree_attention.way_of("auto", torch.device("cuda")) == "triton"
    assert tree_attention.way_of("torch", torch.device("cuda")) == "torch"


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """scripts/compile_kernels.py, with an empty store of compiled kernels."""
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "scripts"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return importlib.import_module("compile_kernels")


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernel_does_not_compile_or_spills(capability: int, compiling: ModuleType) -> None:
    variant = compiling.attention(128, torch.bfloat16, nodes=64)
    usage = compiling.compiled(variant, capability)
    assert compiling.faults(variant, capability, usage) == []
    assert 32 < usage.registers <= 255 and usage.shared > 2 * 64 * 128 * 2  # keys and values of a block at least


@needs_triton
def test_spills_go_unnoticed(compiling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that no register file holds."""
    monkeypatch.setattr(compiling.tree_attention_triton, "tiles", lambda *a: compiling.tree_attention_triton.Tiles(16, 32, 4, 2))
    variant = compiling.attention(128, torch.float32, nodes=1)
    usage = compiling.compiled(variant, 90)
    assert usage.spills > compiling.SPILLS
    assert "spills" in compiling.faults(variant, 90, usage)[0]
    much = compiling.Usage(registers=64, shared=200 * 1024, spills=0)
    assert "shared memory" in compiling.faults(variant, 80, much)[0] and compiling.faults(variant, 90, much) == []


@needs_triton
@pytest.mark.slow
def test_some_kernel_does_not_compile(compiling: ModuleType, tmp_path: Path) -> None:
    assert compiling.main(["--out", str(tmp_path / "compile.md")]) == 0
    kept, made = (path.read_text() for path in (HERE.parents[1] / "benchmarks/results/compile.md", tmp_path / "compile.md"))
    assert kept == made or f"triton {compiling.triton.__version__} " not in kept  # other compilers take other registers
