"""`spectrain capture`: rows -> hidden states on disk or at a URL, with bytes and hours told before the work begins."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from spectrain.cli.start import open_start
from spectrain.config import CaptureConfig, Recipe, dump_yaml, load_config
from spectrain.data.row_store import RowStore
from spectrain.data.rows import Row
from spectrain.evaluation.processes import open_processes
from spectrain.target.capture import Captured, Estimate, capture, estimate, row_sizes, shard_tensors
from spectrain.target.check import Check, check_store
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target, load_target
from spectrain.target.placement import process
from spectrain.training.setup import layer_ids

TIMED_SECONDS = 10.0


def capture_rows(
    rows_dir: Path, *, target: str, recipe: Path, out: str, dtype: str = "float32", dry_run: bool = False, ignore_space: bool = False,
    overrides: Sequence[str] = (), as_json: bool = False,
) -> None:  # fmt: skip
    """Run `spectrain.target.capture.capture` for the head of a recipe; see `spectrain capture --help`.

    Several processes, started by a launcher or by hand with RANK and WORLD_SIZE, share the work; they need nothing of each other, unless
    each holds a part of the target only: how it lies on them, its bits and its adapter are the recipe's.
    """
    settings = load_config(Recipe, recipe, overrides)
    shared = settings.target.placement != "rank"
    with open_processes(splits=False) if shared else nullcontext():
        index, _ = process()
        console = Console(quiet=index > 0 or as_json)
        config, rows = settings.data.capture, RowStore(rows_dir)
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else None
        lying = settings.target.model_dump(include={"placement", "tp_size", "quantization", "adapter"})
        model = load_target(target, dtype=dtype, device=device, **lying)
        check_rows_of(rows, model)
        ids = layer_ids(open_start(settings, model, console.print)[0].head, model)
        told = announce(rows, model, ids, config)
        console.print(told.text())
        if dry_run:
            rate, world = tokens_per_second(rows, model, ids, config), model.placement.replicas
            hours = told.tokens / rate / 3600 / world
            console.print(f"{rate:.0f} tokens/s here: {_duration(hours)}" + (f" on {world} copies of the target" if world > 1 else ""))
            if as_json and not index:
                print(json.dumps({**asdict(told), "tokens_per_second": rate, "hours": hours}))
            return
        done = capture(
            rows, model, ids, out, config, rank=model.placement.replica, world=model.placement.replicas, prepared=prepared_with(rows),
            check_space=not ignore_space,
        )  # fmt: skip
        if shared:
            dist.barrier()  # the check makes passes of all, and reads what each has written
        elif index:
            return
        checked = check_store(FeatureStore(out, rows, on_damage=config.on_damage), model)
        console.print(summary(out, done, checked))
        if as_json and not index:
            print(json.dumps({**asdict(told), **asdict(done), "check": asdict(checked), "settings": dump_yaml(config)}))


def check_rows_of(rows: RowStore, target: Target) -> None:
    """ValueError when rows were made with another tokenizer or template than the target's."""
    for key, value in rows.fingerprints.items():
        if target.fingerprints.get(key, value) != value:
            found = f"{rows.folder} was prepared for another target ({key} differs)"
            raise ValueError(f"{found}; run `spectrain prepare` with --target {target.name}")


def prepared_with(rows: Any) -> Mapping[str, Any]:
    """Settings that the rows of a row store were made with; nothing for other rows."""
    identity = getattr(rows, "record", {}).get("identity", {})
    return {**identity.get("settings", {}), **{key: value for key, value in identity.items() if key in ("inputs", "tokenizer_rules")}}


def announce(rows: Sequence[Row], target: Target, ids: Sequence[int], config: CaptureConfig) -> Estimate:
    """Bytes of the store before it is made."""
    width = target.embedding_VW.shape[1]
    return estimate(*row_sizes(rows), width=width, num_states=len(ids), config=config, last_state="post_norm")


def tokens_per_second(
    rows: Sequence[Row], target: Target, ids: Sequence[int], config: CaptureConfig, *, seconds: float = TIMED_SECONDS
) -> float:
    """Measured on rows spread over all of them, for about `seconds`; writing not counted, since it goes on beside."""
    lengths_N, _ = row_sizes(rows)
    spread = np.linspace(0, len(rows) - 1, min(len(rows), 256)).astype(int)
    by_shard = [spread[i :: max(1, len(spread) // 8)] for i in range(max(1, len(spread) // 8))]
    kinds = (config.states, config.last)
    tokens, spent = 0, 0.0
    with target.in_step():  # processes that share a target measure for as long, not as many passes
        for count, numbers in enumerate(by_shard):
            started = time.monotonic()
            shard_tensors([rows[int(i)] for i in numbers], target, ids, kinds, config.batch_tokens, "post_norm")
            took = target.placement.agreed(time.monotonic() - started)
            if count == 0 and len(by_shard) > 1 and took < seconds:
                continue  # the first pass warms up
            tokens, spent = tokens + int(lengths_N[numbers].sum()), spent + took
            if spent > seconds:
                break
    return tokens / spent


def summary(out: str, done: Captured, checked: Check) -> str:
    """What was done and what the check found, for people."""
    rate = f" at {done.tokens / done.seconds:.0f} tokens/s" if done.shards else ""
    left_out = "".join(f"\nleft out {name}: {reason}" for name, reason in done.skipped.items())
    return f"{out}: {done.shards} shards made{rate}{left_out}\nchecked {checked.text()}"


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


