"""Decoding side by side in one run, as ratios: against transformers' `generate()`, step by step, by context, over many calls.

    python benchmarks/decoding.py --target runs/quickstart/target [--head runs/quickstart/head] [--out benchmarks/results/NAME.json]

Whole calls are interleaved prompt by prompt in rotating order after a warm-up; steps are interleaved medians. Like is compared with
like: eager with eager, compiled with compiled. The goals printed beside the ratios are those the project set itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from spectrain.cli.evaluate import machine
from spectrain.config import Suite, load_config
from spectrain.decoding.accept import accept
from spectrain.decoding.generate import generate
from spectrain.decoding.sampling import Sampling, probabilities
from spectrain.decoding.shapes import Chain, Tree
from spectrain.decoding.tree import DraftTree, ancestors
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram
from spectrain.drafters.scripted import Scripted
from spectrain.evaluation.metrics import bootstrap, ratio_of_ratios
from spectrain.evaluation.suites import suite_prompts
from spectrain.heads.base import load_head
from spectrain.target.model import Target, load_target
from spectrain.target.passes import PACKED_PASSES, choose, passes_of
from spectrain.training.setup import made_with

ROOT = Path(__file__).resolve().parents[1]
LOOKUP = 5  # drafts of prompt lookup, as in transformers' prompt_lookup_num_tokens; its n-grams: at most 2 tokens, first match
HF, HF_LOOKUP = "generate()", f"generate(prompt_lookup_num_tokens={LOOKUP})"
TREE_PARENTS = [-1, 0, 0, 0, 0, 1, 1, 2, 5, 5, 6, 8, 8, 9, 11, 13]  # 16 nodes, the root included
COMPILE: dict[str, bool | Literal["auto"]] = {"eager": False, "packed": "auto", "compiled": True}  # modes, and how to ask for them
Call = Callable[[list[int], int], tuple[list[int], float, float]]  # (prompt, new tokens) -> tokens, seconds, tau


def modes(target: Target) -> tuple[str, ...]:
    """Modes of passes that exist here and are compared."""
    lean = target.device.type == "cpu" and target.model.dtype == torch.float32
    return tuple(COMPILE) if lean else ("eager",)


def by_transformers(target: Target, **settings: Any) -> Call:
    def run(ids: list[int], tokens: int) -> tuple[list[int], float, float]:
        ids_1L = torch.tensor([ids], device=target.device)
        ours = target.model.config._attn_implementation
        target.model.set_attn_implementation("sdpa")
        try:
            begin = time.perf_counter()
            out = target.model.generate(ids_1L, attention_mask=torch.ones_like(ids_1L), max_new_tokens=tokens, do_sample=False, **settings)
            found = out[0, len(ids) :].tolist()
            return found, time.perf_counter() - begin, 0.0
        finally:
            target.model.set_attn_implementation(ours)

    return run


def by_spectrain(target: Target, **settings: Any) -> Call:
    def run(ids: list[int], tokens: int) -> tuple[list[int], float, float]:
        result = generate(target, [ids], max_new_tokens=tokens, **settings)
        rounds = result.rows[0].rounds
        return result.rows[0].tokens, result.seconds, sum(r.committed for r in rounds) / max(1, len(rounds))

    return run


def whole_calls(target: Target, head: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Every arm on every prompt; ratios of tokens a second with intervals over prompts."""
    lookup = {"drafter": NGram(longest=2, shortest=1, match="first"), "shape": Chain(LOOKUP)}
    arms: dict[str, Call] = {HF: by_transformers(target), HF_LOOKUP: by_transformers(target, prompt_lookup_num_tokens=LOOKUP)}
    shapes: dict[str, dict[str, Any]] = {"plain": {}, "lookup": lookup}
    if head is not None:
        drafter = HeadDrafter(head)
        shapes["head chain 4"] = {"drafter": drafter, "shape": Chain(4)}
        shapes["head tree 15"] = {"drafter": drafter, "shape": Tree.dynamic(4, 5, 15)}
    for name, settings in shapes.items():
        arms |= {f"{name}, {mode}": by_spectrain(target, compile=COMPILE[mode], **settings) for mode in modes(target)}
    names, found = list(arms), {name: [] for name in arms}
    for name in tqdm(names, desc="warm-up", disable=None):
        arms[name](prompts[0], 40)
    with tqdm(total=len(names) * len(prompts), desc="calls", disable=None) as bar:
        for i, ids in enumerate(prompts):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                found[name].append(arms[name](ids, tokens))
                bar.update()
    table: dict[str, Any] = {}
    for name in names:
        pairs = [(len(a[0]), a[1], len(b[0]), b[1]) for a, b in zip(found[name], found[HF], strict=True)]
        ratio = bootstrap(pairs, ratio_of_ratios)
        same = sum(a[0] == b[0] for a, b in zip(found[name], found[HF], strict=True))
        table[name] = {
            "tokens_per_s": sum(len(a[0]) for a in found[name]) / sum(a[1] for a in found[name]), "against_generate": ratio.value,
            "lo": ratio.lo, "hi": ratio.hi, "tau": statistics.mean(a[2] for a in found[name]), "equal": f"{same} of {len(prompts)}",
        }  # fmt: skip
    for mode in modes(target):
        if f"lookup, {mode}" not in found:
            continue
        pairs = [(len(a[0]), a[1], len(b[0]), b[1]) for a, b in zip(found[f"lookup, {mode}"], found[HF_LOOKUP], strict=True)]
        ratio = bootstrap(pairs, ratio_of_ratios)
        table[f"lookup, {mode}"]["against_lookup_of_generate"] = [ratio.value, ratio.lo, ratio.hi]
    return table


@torch.inference_mode()
def steps(target: Target, ids: list[int], *, repeats: int) -> dict[str, Any]:
    """A round without its drafting, against the bare forward over as many cached positions in the same mode."""
    drafts: dict[str, tuple[int, Any, Any]] = {"plain": (1, None, None)}
    parents_1N = torch.tensor([TREE_PARENTS], device=target.device)

    def chain(committed: list[int]) -> list[int]:
        return [7, 8, 9, 10]

    def bush(committed: list[int]) -> DraftTree:
        tokens_1N = torch.tensor([[committed[-1], *range(20, 19 + len(TREE_PARENTS))]], device=target.device)
        return DraftTree(tokens_1N, parents_1N, torch.tensor([len(TREE_PARENTS)], device=target.device), "point_mass")

    drafts |= {"chain of 4": (5, Scripted(chain), Chain(4)), "tree of 16 nodes": (16, Scripted(bush), Tree.dynamic(4, 8, 15))}
    table: dict[str, Any] = {}
    for compile in (COMPILE[mode] for mode in modes(target)):
        mode = choose(target, compile, passes=100)
        maker = passes_of(target, mode, rows=1, nodes=16, strict=True)
        for name, (n, drafter, shape) in drafts.items():
            cache, device = target.new_cache(1, len(ids) + 64), target.device
            positions = cache.stage(len(ids))
            mask = target.prompt_masks(cache, positions)
            target.forward(torch.tensor([ids], device=device), positions_BN=positions, mask=mask, cache=cache, logits_to_keep=1)
            cache.commit(torch.tensor([len(ids)], device=device))
            bare: list[float] = []
            whole: list[float] = []
            for _ in range(repeats):
                result = generate(target, [ids], drafter=drafter, shape=shape, max_new_tokens=PACKED_PASSES, eos=None, compile=compile)
                whole += [sum(r.seconds.values()) - r.seconds.get("draft", 0.0) for r in result.rows[0].rounds[1:]]
                for _ in range(8):
                    begin = time.perf_counter()
                    positions = cache.stage(n)
                    one = maker.of(1, n)
                    mask = one.masks(cache, torch.ones(1, n, n, dtype=torch.bool, device=device).tril())
                    one.forward(torch.full((1, n), 9, device=device), positions_BN=positions, mask=mask, cache=cache)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    bare.append(time.perf_counter() - begin)
                    cache.discard()
            step, forward = statistics.median(whole), statistics.median(bare)
            row = {"step_ms": 1e3 * step, "forward_ms": 1e3 * forward, "ratio": step / forward, "outside": 1 - forward / step}
            table[f"{name}, {mode}"] = row
    return table


@torch.inference_mode()
def by_context(target: Target, contexts: tuple[int, ...] = (256, 1024, 4096), repeats: int = 200) -> dict[str, Any]:
    """Milliseconds of masking, walking and committing a tree of 16 nodes behind a longer and longer context."""
    device = target.device
    parents_1N = torch.tensor([TREE_PARENTS], device=device)
    tree = DraftTree(torch.arange(16, device=device)[None], parents_1N, torch.tensor([16], device=device), "point_mass")
    p_1NV = probabilities(torch.randn(1, 16, target.vocab_size, device=device), Sampling())
    path_1K, none_B, table = torch.tensor([[0, 1, 5, 8]], device=device), torch.tensor([0], device=device), {}
    for context in contexts:
        cache = target.new_cache(1, context + 64)
        cache.stage(context)
        cache.commit(torch.tensor([context], device=device))
        cache.stage(16)
        parts: dict[str, Callable[[], Any]] = {
            "mask": lambda cache=cache: target.masks(cache, ancestors(parents_1N)), "walk": lambda: accept(p_1NV, tree, "greedy", None),
            "commit": lambda cache=cache: cache.commit(none_B, path_1K),
        }  # fmt: skip
        table[str(context)] = {name: 1e3 * _median(run, repeats) for name, run in parts.items()}
    return table


def memory(target: Target, head: Any, ids: list[int], calls: int = 50) -> dict[str, Any]:
    """Resident memory after the first calls and after many."""
    drafter = HeadDrafter(head) if head is not None else NGram()
    resident = []
    for i in tqdm(range(calls), desc="memory", disable=None):
        generate(target, [ids, ids[: 5 + i % 7]], drafter=drafter, shape=Chain(4), max_new_tokens=12 + i % 5)
        resident.append(_resident_mib())
    return {"calls": calls, "mib_after_10": resident[9], "mib_after_all": resident[-1], "growth": resident[-1] / resident[9] - 1}


def compile_seconds(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of compiling for one row, one node and many, with an empty cache on disk and again with a full one."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--target", args.target, "--dtype", args.dtype, "--only-compile"]
        runs = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    cold, warm = (float(out.strip().splitlines()[-1]) for out in runs)
    return {"cold": cold, "warm": warm}


def _only_compile(target: Target) -> float:
    passes_of(target, "packed", rows=1, nodes=16, strict=True)
    begin = time.perf_counter()
    passes_of(target, "compiled", rows=1, nodes=16, strict=True)
    return time.perf_counter() - begin


def _median(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def goals(result: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """(what, found, goal, reached)."""
    calls, step = result["calls"], result["steps"]
    plain = {"eager": ">= 1.0", "packed": ">= 1.0", "compiled": ">= 1.4"}
    rows = [
        *((f"plain {m} ÷ generate()", calls[f"plain, {m}"]["against_generate"], g) for m, g in plain.items() if f"plain, {m}" in calls),
        *(
            (f"lookup {mode} ÷ transformers' lookup", calls[f"lookup, {mode}"]["against_lookup_of_generate"][0], ">= 1.3")
            for mode in COMPILE if f"lookup, {mode}" in calls
        ),
        *((f"{name}: step ÷ bare forward", row["ratio"], "<= 1.15") for name, row in step.items() if name.startswith("tree")),
        *((f"{name}: share outside the forward", row["outside"], "<= 0.05") for name, row in step.items()),
        ("memory growth over 50 calls", result["memory"]["growth"], "<= 0.02"),
    ]
    return [(what, found, goal, found >= float(goal[3:]) if goal[0] == ">" else found <= float(goal[3:])) for what, found, goal in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.dtype)
    if args.only_compile:
        print(_only_compile(target))
        return
    suite = load_config(Suite, ROOT / "eval/suites/short.yaml")
    prompts = [target.encode(p.chat) for rows in suite_prompts(suite, target, ROOT).values() for p in rows][: args.prompts]
    head = load_head(args.head, device=str(target.device)) if args.head else None
    result = {
        "machine": machine(target), "threads": torch.get_num_threads(), "dtype": args.dtype, "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens, "versions": made_with(target, {})["versions"],
        "calls": whole_calls(target, head, prompts, args.max_new_tokens), "steps": steps(target, (prompts[0] * 9)[:256], repeats=4),
        "by_context_ms": by_context(target), "memory": memory(target, head, prompts[0]),
    }  # fmt: skip
    if "compiled" in modes(target):
        result["compile_seconds"] = compile_seconds(args)
    print(json.dumps(result, indent=2))
    for what, found, goal, reached in goals(result):
        print(f"{what:48s} {found:7.3f}  goal {goal:8s} {'reached' if reached else 'NOT REACHED'}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
