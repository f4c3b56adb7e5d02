"""Compile the Triton kernels for GPUs that need not be there, and say what they take: registers, shared memory, spills.

    python scripts/compile_kernels.py [--out benchmarks/results/compile.md] [--capability 80,90,100]

Exit code 1 when a kernel does not compile or takes more than the bounds below.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from spectrain.kernels import chain_triton, divergence_triton, draw_triton, path_triton, tree_attention_triton, walk_triton
from spectrain.kernels.tree_attention import FIELDS

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = {80: "A100", 90: "H100, H200", 100: "B200"}
SPILLS = 128  # bytes of registers that a thread may put into memory, stores and loads together: once a program, beside all it reads
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program may have
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ALIGNED = ["tt.divisibility", 16]


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched. types: of its arguments that are no constants; aligned: those known to be multiples of 16."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    warps: int
    stages: int = 3


@dataclass(frozen=True)
class Usage:
    """Of one thread: registers, and bytes spilled; of one program: bytes of shared memory."""

    registers: int
    shared: int
    spills: int


def attention(head_dim: int, dtype: torch.dtype, *, nodes: int, group: int = 4, softcap: bool = False, alone: bool = False) -> Variant:
    """Tree attention of `nodes` nodes with `group` query heads a key head."""
    size = tree_attention_triton.tiles(nodes * group, head_dim, dtype)
    element = f"*{NAMES[dtype]}"
    types = {"q_ptr": element, "k_ptr": element, "v_ptr": element, "o_ptr": element, "sink_ptr": element, "view_ptr": "*i64"}
    types |= {"part_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32", "softcap": "fp32"}
    strides = tuple(f"{t}_{dim}" for t, dims in (("q", "bhn"), ("k", "bgs"), ("v", "bgs")) for dim in dims)
    constants = {
        "R": group, "FIELDS": FIELDS, "WORDS": 1 if nodes <= 64 else 2, "SOFTCAP": softcap, "SINKS": False, "ALONE": alone, "WHOLE": True,
        "WIDEN": False, "BLOCK_X": size.x, "BLOCK_S": size.slots, "BLOCK_D": head_dim,
    }  # fmt: skip
    constants |= {name: 1 for name, value in (("N", nodes), ("P", 1 if alone else 2)) if value == 1}  # as a launch makes them
    name = f"tree attention, {NAMES[dtype]}, head {head_dim}, {nodes} nodes x {group}" + ", soft-cap" * softcap + ", one split" * alone
    aligned = (*(t for t in types if t.endswith("_ptr")), *strides, "D")
    return Variant(name, tree_attention_triton._attend_kernel, types, constants, aligned, size.warps, size.stages)


def join(head_dim: int) -> Variant:
    types = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "sink_ptr": "*bf16", "o_ptr": "*bf16"}
    constants = {"R": 4, "SINKS": True, "BLOCK_P": tree_attention_triton.MOST_SPLITS, "BLOCK_D": head_dim}
    name = f"tree attention, join of {tree_attention_triton.MOST_SPLITS} splits, head {head_dim}"
    return Variant(name, tree_attention_triton._join_kernel, types, constants, (*types, "D"), 4)


def path(head_dim: int, dtype: torch.dtype) -> Variant:
    types = {"slab_ptr": f"*{NAMES[dtype]}", "length_ptr": "*i64", "path_ptr": "*i64", "x_stride": "i64"}
    constants = {"BLOCK_K": path_triton.BLOCK_K, "BLOCK_D": head_dim}
    aligned = ("slab_ptr", "x_stride", "b_stride", "g_stride", "D")
    return Variant(f"path, {NAMES[dtype]}, head {head_dim}", path_triton._path_kernel, types, constants, aligned, 4)


def walk(nodes: int) -> Variant:
    types = {name: "*i64" for name in walk_triton._walk_kernel.arg_names if name.endswith("_ptr")}
    return Variant(f"greedy walk, {nodes} nodes", walk_triton._walk_kernel, types, {"BLOCK_N": nodes}, tuple(types), 1)


LAWS = {"p_ptr": "*fp32", "q_ptr": "*fp32", "p_sum_ptr": "*fp64", "q_sum_ptr": "*fp64", "left_ptr": "*fp64", "sum_ptr": "*fp64"}
LAWS |= {"u_ptr": "*fp64", "test_ptr": "*fp64", "end_ptr": "*fp64"}


def drawing(name: str, kernel: Any, constants: dict[str, Any], warps: int) -> Variant:
    """A kernel that reads laws and numbers in [0, 1); its other pointers are to ids and numbers of nodes."""
    types = {argument: LAWS.get(argument, "*i64") for argument in kernel.arg_names if argument.endswith("_ptr")}
    return Variant(name, kernel, types, constants, (*types, "p_stride") if "p_stride" in kernel.arg_names else tuple(types), warps)


def draws(chunks: int) -> Iterator[Variant]:
    """Keyed numbers, and draws from laws of so many chunks."""
    yield drawing("keyed numbers, 64 nodes", draw_triton._uniform_kernel, {"ROLE": 1, "BLOCK_X": 64}, 1)
    yield drawing("sum of a chunk", draw_triton._sum_kernel, {"BLOCK_V": draw_triton.CHUNK}, 4)
    blocks = {"BLOCK_C": chunks, "BLOCK_V": draw_triton.CHUNK}
    yield drawing(f"draw, {chunks} chunks", draw_triton._draw_kernel, blocks, 8)
    for whole, rule in ((False, "rejection"), (True, "block")):
        name, constants = f"{rule}, 16 nodes, {chunks} chunks", {"WHOLE": whole, "BLOCK_N": 16, **blocks}
        yield drawing(f"{name}: surplus", chain_triton._surplus_kernel, constants, 8)
        yield drawing(f"{name}: verdict", chain_triton._verdict_kernel, constants, 8)


def divergence() -> Variant:
    types = {name: "*fp32" for name in ("z_ptr", "log_p_ptr", "more_ptr", "loss_ptr", "alpha_ptr", "lse_ptr")}
    types |= {"best_ptr": "*i64", "rank_ptr": "*i64"}
    kernel = divergence_triton._divergence_kernel
    numbers = ("soft_ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "lk_scale", "lk_decay")
    constants = {"MORE": True, "LOGS": True, "OVERLAP": True, "GRADIENT": True, "BLOCK": divergence_triton.BLOCK}
    return Variant("divergence, every loss", kernel, types | dict.fromkeys(numbers, "fp32"), constants, tuple(types), 8)


def variants() -> Iterator[Variant]:
    """What the package launches, for a target with four query heads a key head."""
    for head_dim in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            for nodes in (1, 16, 64):
                yield attention(head_dim, dtype, nodes=nodes)
        yield join(head_dim)
    yield attention(128, torch.bfloat16, nodes=64, alone=True)
    yield attention(128, torch.bfloat16, nodes=128)
    yield attention(128, torch.float16, nodes=64)
    yield attention(256, torch.bfloat16, nodes=64, softcap=True)
    yield attention(256, torch.bfloat16, nodes=64, softcap=True, alone=True)
    yield path(128, torch.bfloat16)
    yield path(128, torch.float32)
    yield walk(64)
    yield from draws(32)
    yield divergence()


def compiled(variant: Variant, capability: int) -> Usage:
    """Compile for that capability; triton's own compiler and ptxas, no device needed."""
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in names}
    attrs = {(names.index(name),): [ALIGNED] for name in variant.aligned}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=attrs)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    target = re.search(r"\.target (sm_\w+)", made.asm["ptx"])
    assert target is not None and made.asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(made.asm["ptx"])
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", str(ptx), "-o", f"{folder}/kernel.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = [re.search(pattern, told) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")]
    registers, stores, loads = (int(found[1]) if found else 0 for found in numbers)
    return Usage(registers, int(made.metadata.shared), stores + loads)


def faults(variant: Variant, capability: int, usage: Usage) -> list[str]:
    """What of it is over the bounds."""
    where = f"{variant.name} on sm_{capability}"
    found = [f"{where} spills {usage.spills} bytes, at most {SPILLS} may"] if usage.spills > SPILLS else []
    if usage.shared > SHARED[capability]:
        found.append(f"{where} takes {usage.shared} bytes of shared memory, there are {SHARED[capability]}")
    return found


def table(found: dict[str, dict[int, Usage]], capabilities: list[int]) -> str:
    """The Markdown page."""
    heads = [f"sm_{c} ({CAPABILITIES.get(c, '')})" for c in capabilities]
    lines = [
        "# What the kernels take", "",
        f"Compiled ahead of time by triton {triton.__version__} and its ptxas, without a device: `python scripts/compile_kernels.py`. "
        f"Registers of a thread / shared memory of a program in KiB / bytes that a thread spills (at most {SPILLS}). No times.", "",
        "| kernel | warps | " + " | ".join(heads) + " |", "| --- | --- |" + " --- |" * len(heads),
    ]  # fmt: skip
    warps = {variant.name: variant.warps for variant in variants()}
    for name, by_capability in found.items():
        used = (by_capability[c] for c in capabilities)
        cells = [f"{u.registers} / {u.shared / 1024:.1f} / {u.spills}" for u in used]
        lines.append(f"| {name} | {warps[name]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/compile.md")
    parser.add_argument("--capability", default=",".join(map(str, CAPABILITIES)))
    options = parser.parse_args(args)
    capabilities = [int(c) for c in options.capability.split(",")]
    found: dict[str, dict[int, Usage]] = {}
    wrong: list[str] = []
    work = [(variant, capability) for variant in variants() for capability in capabilities]
    for variant, capability in tqdm(work, unit="kernel"):
        usage = compiled(variant, capability)
        found.setdefault(variant.name, {})[capability] = usage
        wrong += faults(variant, capability, usage)
    options.out.write_text(table(found, capabilities))
    print("\n".join(wrong) or f"{len(work)} kernels within their bounds: {options.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
