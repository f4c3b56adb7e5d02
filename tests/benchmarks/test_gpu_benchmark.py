"""benchmarks/gpu.py on tiny shapes through triton's interpreter: the ways agree, and what comes out is a table."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.py"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it comes with torch for CUDA)")


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The script as a module; it stands beside the package, not in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield importlib.import_module("gpu")


@pytest.mark.slow
def test_ways_disagree_or_leave_no_table(tmp_path: Path) -> None:
    sizes = ["--nodes", "1,3", "--contexts", "20", "--batches", "2"]
    command = [sys.executable, str(SCRIPT), "--toy", "--out", str(tmp_path), *sizes]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "cpu-interpreted/attention.json").read_text())["rows"]
    assert [(row["batch"], row["context"], row["nodes"]) for row in rows] == [(2, 20, 1), (2, 20, 3)]
    for row in rows:
        assert all(way["us"] > 0 and way["difference"] < 1e-5 for way in row["ways"].values()) and len(row["ways"]) == 3
    assert "| 2 | 20 | 3 |" in (tmp_path / "cpu-interpreted/attention.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_benchmark_measures_without_a_gpu(gpu: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_bandwidth_counts_other_bytes(gpu: ModuleType) -> None:
    """Rows of 1000 and 750 entries and 8 nodes each: 8 key heads of 128 in two bytes, keys and values."""
    case = gpu.Case(nodes=8, context=1000, batch=2)
    given = gpu.inputs_of(case, torch.device("cpu"), torch.bfloat16, 3 * 2**20)
    assert given.lengths_B.tolist() == [1000, 750]
    assert case.bytes_read(given.lengths_B, 2) == 2 * 8 * 128 * 2 * (1008 + 758)
    assert len(given.caches) == 1 + 3 * 2**20 // case.bytes_read(given.lengths_B, 2)


def test_way_that_failed_breaks_the_table(gpu: ModuleType) -> None:
    way = {"us": 10.0, "once_us": 2.0, "bandwidth": 1e12, "share": 0.5, "difference": 0.0}
    row = {"batch": 1, "context": 8, "nodes": 1, "ways": {"kernel": way, "sdpa": {"failed": "out of memory"}, "flex": way}}
    wide = {**row, "nodes": 64, "ways": {"kernel": {**way, "us": 11.0}, "sdpa": {**way, "us": 33.0}, "flex": way}}
    about = {"device": "X", "torch": "2", "triton": "3", "copy": 2e12}
    assert gpu.page([row, wide], about).splitlines()[-2:] == [
        "| 1 | 8 | 1 | 10.0 (2) 50% | out of memory | 10.0 (2) 50% | 1.00 |  |",
        "| 1 | 8 | 64 | 11.0 (2) 50% | 33.0 (2) 50% | 10.0 (2) 50% | 1.10 | 3.00 |",
    ]
