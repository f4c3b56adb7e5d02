"""`spectrain capture`: bytes and hours first, then the store and what its check found."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from spectrain.cli.capture import capture_rows
from spectrain.config import PrepareConfig
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target

command = import_module("spectrain.cli.capture")


@pytest.fixture
def asked(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Rows, recipe and target as the command takes them."""
    lines = [
        {"prompt": f"w{10 + i} w{20 + i}", "response": f"w{30 + i} w40 w{50 + i}"}
        for i in range(12)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare([str(tmp_path / "c.jsonl")], target.tokenizer, tmp_path / "rows", PrepareConfig(max_length=32))
    recipe = {
        "name": "x", "target": {"name": "x"}, "data": {"rows": "rows", "capture": {"rows_per_shard": 5}},
        "head": {"layer_ids": [1, 2], "draft_vocab_size": 40},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(command, "load_target", lambda name, **settings: target)
    monkeypatch.setattr(command, "TIMED_SECONDS", 0.01)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return {"rows_dir": tmp_path / "rows", "target": "x", "recipe": tmp_path / "r.yaml", "out": str(tmp_path / "s")}


def test_dry_run_writes(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    capture_rows(**asked, dry_run=True)
    said = " ".join(capsys.readouterr().out.split())
    rows = RowStore(asked["rows_dir"])
    assert f"12 rows, {rows.lengths_N.sum()} tokens" in said and "bytes a token" in said and "tokens/s here" in said and "minutes" in said
    assert not Path(asked["out"]).exists()
    capture_rows(**asked, dry_run=True, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["tokens_per_second"] > 0 and told["hours"] == pytest.approx(told["tokens"] / told["tokens_per_second"] / 3600)


def test_store_of_the_command_is_another(asked: dict[str, Any], target: Target, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Process 1 of 2, as launchers start it, then the other one; settings of the rows are in the manifest, and named when they change."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    capture_rows(**asked)
    assert not capsys.readouterr().out, "every process talks"
    monkeypatch.setenv("RANK", "0")
    capture_rows(**asked)
    said = " ".join(capsys.readouterr().out.split())
    assert "0 shards made" in said and "same best token 100.00%" in said
    store = FeatureStore(asked["out"], RowStore(asked["rows_dir"]))
    assert store.manifest["prepared"]["max_length"] == 32 and len(store) == 12 and store.layer_ids == (1, 2)
    prepare([str(asked["rows_dir"].parent / "c.jsonl")], target.tokenizer, asked["rows_dir"], PrepareConfig(max_length=15))
    with pytest.raises(ValueError, match="other rows: max_length = 32, needed 15"):
        capture_rows(**asked)


def test_rows_of_another_target_are_captured(asked: dict[str, Any], make_tokenizer, target: Target, monkeypatch) -> None:
    other = Target(model=target.model, tokenizer=make_tokenizer(100, template="{{ x }}"), name="other")
    monkeypatch.setattr(command, "load_target", lambda name, **settings: other)
    with pytest.raises(ValueError, match="prepared for another target .template_sha256 differs.; run .* --target other"):
        capture_rows(**asked)


DIES = """
import os, signal, sys, time
from pathlib import Path
import torch
from spectrain.cli import app
from spectrain.target import capture

def shard_tensors(rows, *args, whole=capture.shard_tensors):
    if os.environ["RANK"] == sys.argv[1] and rows[0].id == sys.argv[2]:
        while not Path(sys.argv[3]).exists():  # a second thread writes its first shard
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] not in ("-1", os.environ["RANK"]):
        time.sleep(120)  # until the launcher ends it, too
    return whole(rows, *args)

torch.set_num_threads(1)
capture.shard_tensors = shard_tensors
app(sys.argv[4:])
"""


@pytest.mark.slow  # three launches
def test_launch_in_which_a_process_dies_is_lost(
    asked: dict[str, Any], target: Target, save_target: Callable[..., Path], tmp_path: Path
) -> None:
    """`accelerate launch` on two processes. One is killed in its second shard: the launch fails, no half of a file is read, and the same
    launch makes what is missing; a store is as one process makes it."""
    (tmp_path / "dies.py").write_text(DIES)
    folder = save_target(target, tmp_path / "target")
    rows = RowStore(asked["rows_dir"])

    def launch(out: Path, victim: int) -> subprocess.CompletedProcess[str]:
        config = Path(__file__).parents[2] / "recipes/accelerate/cpu_2.yaml"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, tmp_path / "dies.py"]
        command += [victim, rows[9].id, out / "rows-0000003.safetensors", "capture", asked["rows_dir"], "--target", folder]
        command += ["--head-config", asked["recipe"], "--out", out, "--set", "data.capture.rows_per_shard=3"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=300)

    whole, out = tmp_path / "whole", tmp_path / "two"
    assert launch(whole, -1).returncode == 0
    assert launch(out, 1).returncode != 0
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("rows-*.safetensors")}
    assert set(before) == {"rows-0000003.safetensors"}
    again = launch(out, -1)
    assert again.returncode == 0, again.stdout + again.stderr
    assert " ".join(again.stdout.split()).count("same best token 100.00%") == 1
    files = [{p.name: p.read_bytes() for p in store.iterdir() if ".part-" not in p.name} for store in (whole, out)]
    assert files[0] == files[1] and len(files[0]) == 5
    assert before.items() <= {p.name: p.stat().st_mtime_ns for p in out.iterdir()}.items(), "what was there is made again"
