"""Where a target goes and whether it fits there: known from its config alone, before its weights are read."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from click.testing import Result

from spectrain.cli import guarded, room
from spectrain.cli.wiring import dtype_beside
from spectrain.evaluation.processes import Processes
from spectrain.planning.machines import GiB

LLAMA = str(Path(__file__).parents[1] / "recipes/configs/llama31_8b")  # 8.03e9 parameters, 1.05e9 of them embedding and output rows


def refused(dtype: str, free: float, monkeypatch: pytest.MonkeyPatch, *, caches: tuple[int, int] = (1, 256), **where: Any) -> str:
    monkeypatch.setattr(room, "_free", lambda device, everywhere: free * GiB)
    with pytest.raises(ValueError) as error:
        room.check_room(LLAMA, dtype, {"device": "cuda:0", **where}, caches=caches)
    return str(error.value)


@pytest.mark.parametrize(
    ("free", "fits"),
    [
        (20, ["--dtype bfloat16 (15.0 GiB)", "--dtype bfloat16 --quantization 8bit (8.5 GiB)", "4bit (5.6 GiB)", "nproc_per_node 2 "]),
        (9, ["--dtype bfloat16 --quantization 8bit (8.5 GiB)", "--quantization 4bit (5.6 GiB)", "nproc_per_node 8 "]),
        (6, ["--dtype bfloat16 --quantization 4bit (5.6 GiB)"]),
        (2, ["nothing here does: a smaller target, or a device with more memory"]),
    ],
)
def test_other_ways_fit(free: float, fits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = refused("float32", free, monkeypatch)
    assert told.startswith(f"{LLAMA} in float32 needs 30.0 GiB on cuda:0 (29.9 of weights, 0.1 of caches for 256 tokens), and {free}.0 GiB")
    proposed = told.partition("what fits: ")[2].split("; ")
    assert len(proposed) == len(fits) and all(part in whole for part, whole in zip(fits, proposed, strict=True)), told


def test_caches_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of 2,000 tokens of 128 KiB; rows end at the target's 131,072 positions."""
    told = refused("bfloat16", 30, monkeypatch, caches=(64, 2000))
    assert "needs 30.6 GiB" in told and "15.6 of caches for 128,000 tokens" in told and "caches of 123,2" in told
    assert "131,072 tokens" in refused("bfloat16", 30, monkeypatch, caches=(1, 10**9))
    room.check_room(LLAMA, "bfloat16", {"device": "cuda:0"}, caches=(60, 2000))


def test_spread_target_needs_all_of_it_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = refused("float32", 10, monkeypatch, placement="tp")
    assert "in each of 4 processes" in told and "needs 30.0" not in told
    monkeypatch.setattr(room, "_free", lambda device, everywhere: (40 if everywhere else 10) * GiB)
    room.check_room(LLAMA, "float32", {"device": "cuda:0", "placement": "device_map"}, caches=(1, 256))


def test_process_takes_a_device_of_another_one() -> None:
    second = Processes(1, 2, device="cpu")
    assert [room.device_of(asked, second) for asked in (None, "auto", "cpu")] == ["cpu"] * 3
    with pytest.raises(ValueError, match="device meta was asked for, and 2 processes were started, .* leave it out"):
        room.device_of("meta", second)


def test_head_reads_twice_the_bytes_of_its_target() -> None:
    for device, dtype, expected in (
        ("cuda:1", torch.float16, torch.bfloat16), ("cuda", torch.float32, torch.float32), ("cpu", torch.bfloat16, torch.float32),
    ):  # fmt: skip
        target = SimpleNamespace(device=torch.device(device), model=SimpleNamespace(dtype=dtype))
        assert dtype_beside(target) == expected


def test_weights_are_read_before_room_is_missed(cli: Callable[..., Result], project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_free", lambda device, everywhere: 1000.0)
    monkeypatch.setattr(room, "open_for", None)
    suite = ["--suite", project / "eval/suites/tiny.yaml"]
    for command in (["generate", "w9"], ["evaluate", *suite, "--out", project / "none"], ["bench", "--drafters", "ngram", *suite]):
        out = ["--out", project / "none"] if command[0] == "bench" else []
        result = cli(*command, "--target", project / "target", *out)
        assert result.exit_code == 1 and "GiB on cpu" in result.stderr and "what fits: " in result.stderr, result.output
    assert not (project / "none").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["generate", "w9"], ["evaluate", "--out", "none"], ["bench", "--drafters", "ngram", "--out", "none"]])
def test_device_or_attention_is_ignored(command: list[str], cli: Callable[..., Result], project: Path) -> None:
    suite = [] if command[0] == "generate" else ["--suite", project / "eval/suites/tiny.yaml"]
    ask = [*command, *suite, "--target", project / "target"]
    assert "device cuda was asked for" in cli(*ask, "--device", "cuda").stderr
    assert "attention 'triton' needs a CUDA device" in cli(*ask, "--attention", "triton").stderr
    assert cli(*ask, "--attention", "flash").exit_code == 2


def test_policy_of_a_file_is_not_taken(cli: Callable[..., Result], project: Path, tmp_path: Path) -> None:
    """Twelve tokens, of which prompt lookup drafts at most one a round, or none."""
    ask = ["generate", "w12 w44", "--target", project / "target", "--max-new-tokens", 12, "--json", "--device", "cpu", "--dtype", "float32"]
    plain = cli(*ask)
    file = tmp_path / "drafts.json"
    for table, drafted in (('{"1": 0, "8": 5}', 0), ('{"2": 1}', None)):
        file.write_text(table)
        found = cli(*ask, "--drafter", "ngram", "--policy", file)
        result, expected = (json.loads(text.stdout) for text in (found, plain))
        assert result["tokens"] == expected["tokens"] and (drafted is None or result["drafted"] == drafted)
        assert result["drafted"] <= result["rounds"]
    missing = cli(*ask, "--drafter", "ngram", "--policy", tmp_path / "none.json").stderr
    assert "none.json' is neither a file or folder here nor one of heuristic, confidence, ema, marginal, table" in missing


def test_memory_that_ends_is_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    @guarded
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB")

    with pytest.raises(typer.Exit):
        run()
    told = capsys.readouterr().err
    assert told.startswith("error: CUDA out of memory; ask for fewer rows or tokens, a smaller --dtype, --quantization, or a target spread")
