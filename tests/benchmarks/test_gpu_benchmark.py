"""benchmarks/gpu.py on tiny shapes on the CPU, its kernel through triton's interpreter: ways agree, drafts are as right as they are said
to be, bytes are those that are read, and what comes out is a table."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.yields import expected_tokens

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.py"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it comes with torch for CUDA)")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module() -> Iterator[Callable[[str], ModuleType]]:
    """module(name): one of the benchmark's; they stand beside the package, not in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield importlib.import_module


@pytest.fixture(scope="module")
def gpu(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("gpu")


@pytest.mark.slow
def test_ways_disagree_or_leave_no_table(tmp_path: Path) -> None:
    sizes = ["--nodes", "1,3", "--contexts", "20", "--batches", "2"]
    command = [sys.executable, str(SCRIPT), "--toy", "--parts", "a", "--out", str(tmp_path), *sizes]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "cpu-interpreted/attention.json").read_text())["rows"]
    assert [(row["batch"], row["context"], row["nodes"]) for row in rows] == [(2, 20, 1), (2, 20, 3)]
    for row in rows:
        assert all(way["us"] > 0 and way["difference"] < 1e-5 for way in row["ways"].values()) and len(row["ways"]) == 3
    assert "| 2 | 20 | 3 |" in (tmp_path / "cpu-interpreted/attention.md").read_text()


def test_parts_leave_no_figures(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Passes, draft steps and answers of a tiny model: every row is there and whole."""
    assert gpu.main(["--toy", "--parts", "b,c,d", "--out", str(tmp_path), "--batches", "2", "--nodes", "1,12"]) == 0
    folder = tmp_path / "cpu-interpreted"
    steps, draft, answers = (json.loads((folder / f"{name}.json").read_text())["rows"] for name in ("steps", "draft", "answers"))
    assert [(row["way"], row["nodes"]) for row in steps] == [("graphs", 1), ("graphs", 12), ("eager", 1), ("eager", 12)]
    assert all(min(row["verify"], row["other"], row["wall"], row["share_round"], row["v"]) > 0 and row["rounds"] > 0 for row in steps)
    assert [row["v"] for row in steps[::2]] == [1.0, 1.0] and steps[2]["mode"] == "eager" and all(row["tau"] > 1 for row in steps[1::2])
    assert [row["way"] for row in draft] == ["graphs", "eager"] and all(row["floor"] > 0 for row in draft)
    assert all(row["generate"] > 0 and row["tau"] > 1 and row["ratio"] == row["realised"] / row["predicted"] for row in answers)
    printed = capsys.readouterr().out
    for name, rows in (("steps", steps), ("draft", draft), ("answers", answers)):
        page = (folder / f"{name}.md").read_text()
        assert page.count("| random weights, toy shape |") == len(rows) and page in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_benchmark_measures_without_a_gpu(gpu: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "a,e"])
    assert "parts are a, b, c, d; found e" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_are_right_more_or_less_often(module: Callable[[str], ModuleType], dtype: torch.dtype) -> None:
    """Tokens a round of chains and bushes are those of their chance, and every answer counts, whoever drafts."""
    m = module("gpu_model")
    target = m.counting_target("toy", CPU, dtype)
    prompts = m.prompts(target, 4, 15)
    for nodes, alpha, head in ((6, 0.6, None), (6, 0.9, m.random_head(target)), (20, 0.7, None)):
        shape = m.shape_of(nodes)
        acting = m.Acting(nodes, alpha, head)
        rows = generate(target, prompts, drafter=acting, shape=shape, max_new_tokens=150, ignore_eos=True, compile=False).rows
        for ids, row in zip(prompts, rows, strict=True):
            assert row.tokens == [(ids[-1] + 1 + i) % target.vocab_size for i in range(150)]
        rounds = [r for row in rows for r in row.rounds[:-1]]
        assert all(r.nodes == nodes and r.drafted == nodes - 1 for r in rounds) and len(acting.times) == max(len(r.rounds) for r in rows)
        tau = sum(r.committed for r in rounds) / len(rounds)
        assert tau == pytest.approx(expected_tokens(alpha, shape.depth), rel=0.12)
    plain = m.Acting(1, 0.5)
    rows = generate(target, prompts, drafter=plain, shape=Chain(1), max_new_tokens=9, ignore_eos=True, compile=False).rows
    assert all(r.drafted == 0 for row in rows for r in row.rounds) and len(plain.times) == 8


def test_bytes_of_a_pass_or_step_are_others(module: Callable[[str], ModuleType]) -> None:
    """8B shape in bf16: 8.03e9 parameters, 525e6 of them embeddings; a draft step reads 749 MB, and 4 KiB of cache a token."""
    m = module("gpu_model")
    target = m.counting_target("8b", torch.device("meta"), torch.bfloat16)
    assert m.pass_bytes(target, 1, 0) == 2 * (8_030_261_248 - 128256 * 4096)
    assert m.pass_bytes(target, 8, 1000) - m.pass_bytes(target, 1, 0) == 8000 * 131072
    head = m.random_head(target)
    assert m.step_bytes(head, 1, 0) == pytest.approx(749e6, rel=0.002)
    assert m.step_bytes(head, 8, 1000) - m.step_bytes(head, 1, 0) == 8000 * 4096


def test_goals_are_those_of_other_rows(module: Callable[[str], ModuleType]) -> None:
    """Of graphs at batch 1 of the first model alone."""
    t = module("gpu_tables")
    row = {
        "model": "8b", "batch": 1, "nodes": 1, "way": "graphs", "mode": "graphs", "verify": 4e-3, "other": 1e-4, "wall": 4.2e-3,
        "v": 1.0, "v_round": 1.0, "share": 0.85, "share_round": 0.81,
    }  # fmt: skip
    rows = [row, {**row, "nodes": 64, "v": 1.2}, {**row, "nodes": 64, "v": 1.0, "way": "eager"}, {**row, "batch": 8, "share_round": 0.1}]
    assert [line[1:] for line in t.reached("b", rows)] == [(1.2, "NOT reached"), (0.81, "reached")]
    step = {"model": "8b", "batch": 1, "way": "graphs", "mode": "graphs", "step": 2e-4, "start": 1e-4, "floor": 1.75e-4, "ratio": 1.14}
    assert [line[1:] for line in t.reached("c", [step])] == [(1.14, "reached")]
    assert t.reached("c", [{**step, "ratio": -3.0}])[0][2] == t.reached("c", [{**step, "way": "eager"}])[0][2] == "not measured"
    failed = {"model": "8b", "batch": 32, "nodes": 64, "way": "graphs", "failed": "CUDA out of memory"}
    lines = t.page("b", [row, failed], {"device": "X", "torch": "2", "copy": 4e12, "context": 1024}).splitlines()
    assert lines[-1].startswith("| 8b | 32 | 64 | graphs | CUDA out of memory |") and lines[-1].count("|") == lines[-2].count("|")
    assert lines[-2] == "| 8b | 1 | 1 | graphs | graphs | 4,000 | 100 | 4,200 | 1.00 | 1.00 | 85% | 81% |"


def test_bandwidth_counts_other_bytes(module: Callable[[str], ModuleType]) -> None:
    """Rows of 1000 and 750 entries and 8 nodes each: 8 key heads of 128 in two bytes, keys and values."""
    a = module("gpu_attention")
    case = a.Case(nodes=8, context=1000, batch=2)
    given = a.inputs_of(case, CPU, torch.bfloat16, 3 * 2**20)
    assert given.lengths_B.tolist() == [1000, 750]
    assert case.bytes_read(given.lengths_B, 2) == 2 * 8 * 128 * 2 * (1008 + 758)
    assert len(given.caches) == 1 + 3 * 2**20 // case.bytes_read(given.lengths_B, 2)


def test_way_that_failed_breaks_the_table(module: Callable[[str], ModuleType]) -> None:
    way = {"us": 10.0, "once_us": 2.0, "bandwidth": 1e12, "share": 0.5, "difference": 0.0}
    row = {"batch": 1, "context": 8, "nodes": 1, "ways": {"kernel": way, "sdpa": {"failed": "out of memory"}, "flex": way}}
    wide = {**row, "nodes": 64, "ways": {"kernel": {**way, "us": 11.0}, "sdpa": {**way, "us": 33.0}, "flex": way}}
    about = {"device": "X", "torch": "2", "triton": "3", "copy": 2e12}
    assert module("gpu_attention").page([row, wide], about).splitlines()[-2:] == [
        "| 1 | 8 | 1 | 10.0 (2) 50% | out of memory | 10.0 (2) 50% | 1.00 |  |",
        "| 1 | 8 | 64 | 11.0 (2) 50% | 33.0 (2) 50% | 10.0 (2) 50% | 1.10 | 3.00 |",
    ]
