"""Tree attention side by side (part a of gpu.py): our kernel, SDPA with a dense mask, flex_attention with a block mask.

One attention layer of an 8B shape (32 query heads, 8 key heads, 128 wide, bf16), rows of unequal length. The calls of a way go over as
many caches as do not fit the second-level cache together, and are replayed as one CUDA graph: launches cost what they cost in a captured
round. Bandwidth counts keys and values once. What is made once a round (mask, block mask, packed view) is timed apart.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from spectrain.decoding.tree import ancestors
from spectrain.kernels import tree_attention, tree_attention_triton
from spectrain.target.cache import SlabCache

REPEATS = 11
COLD = 4  # times the second-level cache that the caches of one measurement hold together
CLOSE = 2e-2  # largest difference of two ways in bf16
Ways = dict[str, Callable[[int], Tensor]]  # by name: attention [B, N, H, D] over the i-th cache


@dataclass(frozen=True)
class Case:
    """One shape of the sweep."""

    nodes: int
    context: int
    batch: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def bytes_read(self, lengths: Tensor, size: int) -> int:
        """Keys and values that the rows hold, tree included."""
        return 2 * self.kv_heads * self.head_dim * size * int((lengths + self.nodes).sum())


@dataclass(frozen=True)
class Inputs:
    """What all ways of a case are given; caches: [(keys, values)] with equal lengths."""

    q_BHND: Tensor
    caches: list[tuple[Tensor, Tensor]]
    lengths_B: Tensor
    line_BNN: Tensor
    slabs: SlabCache


def inputs_of(case: Case, device: torch.device, dtype: torch.dtype, cold_bytes: int) -> Inputs:
    """Random queries, caches and trees; the longest row has the context asked for, the shortest three quarters of it."""
    g = torch.Generator().manual_seed(0)
    B, N = case.batch, case.nodes
    lengths_B = torch.linspace(case.context, case.context * 3 // 4, B).long().to(device)
    parents_BN = (torch.rand(B, N, generator=g) * torch.arange(N)).long()
    parents_BN[:, 0] = -1
    slabs = SlabCache(
        layers=1, rows=B, kv_heads=case.kv_heads, head_dim=case.head_dim, max_length=case.context + N, dtype=dtype, device=device
    )
    slabs.lengths_B, slabs._longest = lengths_B, case.context
    slabs.stage(N)
    each = case.bytes_read(lengths_B, dtype.itemsize)
    shape = (2, B, case.kv_heads, case.context + N, case.head_dim)
    caches = [torch.randn(shape, dtype=dtype, device=device) for _ in range(1 + cold_bytes // each)]
    q_BHND = torch.randn(B, N, case.heads, case.head_dim, dtype=dtype, device=device).transpose(1, 2)
    return Inputs(q_BHND, [(cache[0], cache[1]) for cache in caches], lengths_B, ancestors(parents_BN).to(device), slabs)


def sees(view_B1NC: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """flex_attention's mask function of a packed view."""

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        first, length, end = (view_B1NC[b, 0, q, field] for field in range(tree_attention.FIELDS))
        node = (kv - length).clamp(min=0)
        word = view_B1NC[b, 0, q, (tree_attention.FIELDS + node // tree_attention.WORD).clamp(max=view_B1NC.shape[3] - 1)]
        return (kv >= first) & (kv < end) & ((kv < length) | (((word >> (node % tree_attention.WORD)) & 1) == 1))

    return mod


def ways_of(case: Case, given: Inputs) -> tuple[Ways, dict[str, Callable[[], Any]]]:
    """The ways to compare, and what each of them makes once a round."""
    device, scale = given.q_BHND.device, case.head_dim**-0.5
    slots = given.caches[0][0].shape[2]
    torch.compiler.reset()  # every shape is compiled for itself, and the compiler gives up on a function after a few of them
    compiled = (lambda f: torch.compile(f, dynamic=False)) if device.type == "cuda" else (lambda f: f)
    flex, block_mask = compiled(flex_attention), compiled(create_block_mask)

    def view() -> Tensor:
        return tree_attention.packed(given.lengths_B, given.line_BNN)

    def blocks() -> Any:
        return block_mask(sees(view()), case.batch, None, case.nodes, slots, device=str(device))

    dense_B1NS, view_B1NC, blocks_made = given.slabs.visible(given.line_BNN), view(), functools.cache(blocks)

    def by_kernel(i: int) -> Tensor:
        return tree_attention_triton.attend_packed(given.q_BHND, *given.caches[i], view_B1NC, scale=scale)

    def by_sdpa(i: int) -> Tensor:
        return tree_attention.attend(given.q_BHND, *given.caches[i], dense_B1NS, scale=scale).transpose(1, 2)

    def by_flex(i: int) -> Tensor:
        return flex(given.q_BHND, *given.caches[i], block_mask=blocks_made(), scale=scale, enable_gqa=True).transpose(1, 2)

    ways = {"kernel": by_kernel, "sdpa": by_sdpa, "flex": by_flex}
    return ways, {"kernel": view, "sdpa": lambda: given.slabs.visible(given.line_BNN), "flex": blocks}


def seconds_of(run: Callable[[], Any], device: torch.device, *, graph: bool = True) -> float:
    """Median seconds of a run; on a GPU between events, and with `graph` as a CUDA graph."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    replay: Callable[[], Any] = run
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        replay = captured.replay
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second, read and written, of a copy of so many bytes."""
    source, goal = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / seconds_of(lambda: goal.copy_(source), device)


def measured(case: Case, device: torch.device, dtype: torch.dtype, *, cold_bytes: int, copy: float) -> dict[str, Any]:
    """Microseconds, bytes a second and share of the copy bandwidth of each way; a way that fails says why, and the others go on."""
    given = inputs_of(case, device, dtype, cold_bytes)
    ways, makers = ways_of(case, given)
    expected = ways["sdpa"](0).float()
    row: dict[str, Any] = {**dataclasses.asdict(case), "caches": len(given.caches), "ways": {}}
    for name, way in ways.items():
        try:
            difference = float((way(0).float() - expected).abs().max())
            seconds = seconds_of(lambda way=way: [way(i) for i in range(len(given.caches))], device) / len(given.caches)
            once = seconds_of(makers[name], device, graph=False)
        except Exception as error:  # compilers raise anything, and a dense mask may not fit
            row["ways"][name] = {"failed": str(error).split("\n")[0][:200]}
            continue
        rate = case.bytes_read(given.lengths_B, dtype.itemsize) / seconds
        found = {"us": seconds * 1e6, "once_us": once * 1e6, "bandwidth": rate, "share": rate / copy, "difference": difference}
        row["ways"][name] = found
    wrong = {name: way["difference"] for name, way in row["ways"].items() if way.get("difference", 0.0) > CLOSE}
    if wrong:
        raise RuntimeError(f"{case}: results differ from SDPA's by {wrong}")
    return row


def page(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        f"# Tree attention on {about['device']}", "",
        f"torch {about['torch']}, triton {about['triton']}; copy {about['copy'] / 1e12:.2f} TB/s. "
        "Microseconds a layer (once a round) and share of the copy bandwidth.", "",
        "| batch | context | nodes | kernel | SDPA, dense mask | flex_attention | kernel to 1 node | SDPA / kernel |", "| --- " * 8 + "|",
    ]  # fmt: skip
    single = {(row["batch"], row["context"]): row["ways"]["kernel"].get("us") for row in rows if row["nodes"] == 1}

    def ratio(a: float | None, b: float | None) -> str:
        return f"{a / b:.2f}" if a and b else ""

    def cell(way: dict[str, Any]) -> str:
        return way["failed"][:40] if "failed" in way else f"{way['us']:.1f} ({way['once_us']:.0f}) {way['share']:.0%}"

    for row in rows:
        kernel, sdpa, flex = (row["ways"][name] for name in ("kernel", "sdpa", "flex"))
        growth, gain = ratio(kernel.get("us"), single.get((row["batch"], row["context"]))), ratio(sdpa.get("us"), kernel.get("us"))
        cells = [row["batch"], row["context"], row["nodes"], cell(kernel), cell(sdpa), cell(flex), growth, gain]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def cases(batches: Sequence[int], contexts: Sequence[int], nodes: Sequence[int], *, toy: bool) -> Iterator[Case]:
    small = {"heads": 4, "kv_heads": 2, "head_dim": 64} if toy else {}
    for batch, context, n in itertools.product(batches, contexts, nodes):
        yield Case(n, context, batch, **small)
