"""A target that is to run: on which device, and whether it fits there, before its weights are read."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from spectrain.cli.joint import open_for
from spectrain.cli.plan_facts import read_config, target_size
from spectrain.evaluation.processes import ALONE, Processes
from spectrain.planning.machines import GiB
from spectrain.planning.sizes import TargetSize
from spectrain.target.devices import usable
from spectrain.target.model import DTYPES, Target
from spectrain.target.placement import process

BUILDS = (("bfloat16", None), ("bfloat16", "8bit"), ("bfloat16", "4bit"))  # dtype and quantization that are proposed, the largest first


def open_target(
    name: str, head: Path | None, dtype: str, say: Any, where: Mapping[str, Any], *, caches: tuple[int, int], processes: Processes = ALONE
) -> Target:
    """`open_for` on the device asked for. where: further arguments of `load_target`; caches: rows, and new tokens of each, that the run has
    room for in any case. ValueError for a device that cannot be had, and for a target that does not fit it, with what does."""
    device = device_of(where.get("device"), processes)
    check_room(name, dtype, {**where, "device": device}, caches=caches)
    return open_for(name, head, dtype, say, **{**where, "device": device})


def device_of(asked: str | None, processes: Processes = ALONE) -> str:
    """The device of this process: the one asked for, of several processes each has its own. ValueError for one that cannot be had."""
    if asked in (None, "auto") or processes.device is None:
        return usable(asked if processes.device is None else processes.device)
    own = torch.device(processes.device)
    if torch.device(usable(asked)) not in (own, torch.device(own.type)):
        told = f"device {asked} was asked for, and {processes.number} processes were started, of which this one has {own}"
        raise ValueError(f"{told}; leave it out: each process has a device of its own")
    return processes.device


def check_room(name: str, dtype: str, where: Mapping[str, Any], *, caches: tuple[int, int]) -> None:
    """ValueError unless weights and caches fit what is free, with what would fit: from the target's config alone.

    Not looked at: GGUF files, and what `load_target` refuses in its own words.
    """
    if name.endswith(".gguf") or dtype not in DTYPES:
        return
    try:
        size = target_size(read_config(name, None), name, dtype, where.get("quantization"))
    except ValueError:
        return
    placement, (_, world) = where.get("placement", "rank"), process()
    members = 1 if placement == "rank" else (where.get("tp_size") or world)
    positions = caches[0] * min(caches[1], size.max_length)
    free = _free(where["device"], everywhere=placement == "device_map")
    needed = bytes_a_device(size, placement, members, positions)
    if needed <= free:
        return
    told = f"{name} in {' '.join(filter(None, [dtype, size.quantization]))} needs {needed / GiB:.1f} GiB on {where['device']}"
    told += f" ({size.weight_bytes / GiB:.1f} of weights, {size.kv_bytes * positions / GiB:.1f} of caches for {positions:,} tokens)"
    if members > 1:
        told += f" in each of {members} processes"
    fits = list(_fitting(name, size, free, positions)) or ["nothing here does: a smaller target, or a device with more memory"]
    raise ValueError(f"{told}, and {free / GiB:.1f} GiB are free; what fits: {'; '.join(fits)}")


def bytes_a_device(size: TargetSize, placement: str, members: int, positions: int) -> float:
    """Weights and caches of a device, where `members` processes share the target as `placement` has it; rows of embedding and output layer
    are whole on each of them, and layers gathered to compute are left out."""
    caches = size.kv_bytes * positions
    if members == 1:
        return size.weight_bytes + caches
    rows = size.embedding * (1 if size.tied else 2) * size.bytes_a_weight
    return rows + (size.weight_bytes - rows) / members + caches / (members if placement == "tp" else 1)


def _free(device: str, *, everywhere: bool) -> float:
    """Bytes that are free on the device, or on all of them; on a CPU this process's share of them."""
    if torch.device(device).type == "cuda":
        devices = range(torch.cuda.device_count()) if everywhere else [device]
        return float(sum(torch.cuda.mem_get_info(d)[0] for d in devices))
    if torch.device(device).type == "cpu":
        return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return float("inf")


def _fitting(name: str, size: TargetSize, free: float, positions: int) -> Iterator[str]:
    """Options of the command with which the target fits so much memory."""
    if size.weight_bytes < free < bytes_a_device(size, "rank", 1, positions):
        yield f"caches of {int((free - size.weight_bytes) / size.kv_bytes):,} tokens: ask for fewer rows or new tokens"
    config = read_config(name, None)
    for dtype, quantization in BUILDS:
        other = target_size(config, name, dtype, quantization)
        needed = bytes_a_device(other, "rank", 1, positions)
        if other.weight_bytes < size.weight_bytes and needed <= free:
            options = " ".join(["--dtype", dtype, *(["--quantization", quantization] if quantization else [])])
            yield f"{options} ({needed / GiB:.1f} GiB)"
    for members in range(2, size.kv_heads + 1):
        needed = bytes_a_device(size, "tp", members, positions)
        if size.kv_heads % members == 0 and size.heads % members == 0 and not size.quantization and needed <= free:
            yield f"torchrun --nproc_per_node {members} -m spectrain … --placement tp, on as many devices ({needed / GiB:.1f} GiB on each)"
            return
