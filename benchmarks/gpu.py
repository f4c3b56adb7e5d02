"""What a GPU makes of the generator: (a) tree attention, (b) passes over n nodes, (c) a head's draft step, (d) whole answers.

    python benchmarks/gpu.py [--parts a,b,c,d] [--models 8b,1b] [--out benchmarks/results] [--batches 1,8,32] [--nodes 1,8,16,32,64]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --toy --out DIR    (no GPU: tiny shapes on the CPU; its times mean nothing)

Each part writes a JSON file and a table into a folder named after the device and takes a few minutes; parts can be run one by one. Weights
are random, nothing is downloaded. What is measured and how: gpu_attention.py (a), gpu_rounds.py and gpu_model.py (b, c, d).
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_attention
import gpu_tables
import torch
from gpu_model import counting_target, random_head
from gpu_rounds import Sizes, answers, draft_steps, steps
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"a": "attention", "b": "steps", "c": "draft", "d": "answers"}
TOY = Sizes(batches=(1, 2), nodes=(1, 4, 12), alphas=(0.8,), context=20, rounds=14, gamma=3)


def parsed(args: list[str]) -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=listed, default=list(NAMES))
    parser.add_argument("--models", type=listed, default=["8b", "1b"], help="of parts b, c and d; the goals are for the first one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--nodes", type=numbers)
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768], help="of part a")
    parser.add_argument("--context", type=int, help="of parts b, c and d")
    parser.add_argument("--batches", type=numbers)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args(args)
    if unknown := set(options.parts) - set(NAMES):
        parser.error(f"parts are {', '.join(NAMES)}; found {', '.join(sorted(unknown))}")
    return options


def sizes_of(options: argparse.Namespace) -> Sizes:
    given = {name: getattr(options, name) for name in ("nodes", "batches", "context") if getattr(options, name)}
    return Sizes(**{**vars(TOY if options.toy else Sizes()), **given})


def of_attention(options: argparse.Namespace, sizes: Sizes, device: torch.device, copy: float) -> Iterator[dict[str, Any]]:
    """Part a."""
    on_cuda = device.type == "cuda"
    cold_bytes = gpu_attention.COLD * torch.cuda.get_device_properties(device).L2_cache_size if on_cuda else 0
    dtype = torch.bfloat16 if on_cuda else torch.float32
    for case in gpu_attention.cases(sizes.batches, options.contexts, sizes.nodes, toy=options.toy):
        yield gpu_attention.measured(case, device, dtype, cold_bytes=cold_bytes, copy=copy)


def of_models(part: str, options: argparse.Namespace, sizes: Sizes, device: torch.device, copy: float) -> Iterator[dict[str, Any]]:
    """Parts b, c and d, model by model."""
    for name in ["toy"] if options.toy else options.models:
        target = counting_target(name, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        if part == "b":
            yield from steps(target, sizes, copy)
        elif part == "c":
            yield from draft_steps(target, random_head(target), sizes, copy)
        else:
            yield from answers(target, random_head(target), sizes)


def run(part: str, options: argparse.Namespace, device: torch.device, about: dict[str, Any], folder: Path) -> str:
    """Measure a part, keep rows and table after each row, and return the table."""
    sizes, rows, page = sizes_of(options), [], ""
    found = of_attention(options, sizes, device, about["copy"]) if part == "a" else of_models(part, options, sizes, device, about["copy"])
    about = {**about, "context": sizes.context}
    with torch.inference_mode(part == "a"):  # generate() sees to it itself
        for row in tqdm(found, desc=NAMES[part], unit="row", disable=None):
            rows.append(row)
            (folder / f"{NAMES[part]}.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            page = gpu_attention.page(rows, about) if part == "a" else gpu_tables.page(part, rows, about)
            (folder / f"{NAMES[part]}.md").write_text(page)
    return page


def main(args: list[str]) -> int:
    options = parsed(args)
    if not torch.cuda.is_available() and not options.toy:
        print("no GPU: torch.cuda.is_available() is false; --toy runs the logic on the CPU", file=sys.stderr)
        return 1
    import triton

    device = torch.device("cpu" if options.toy else "cuda")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, interpreted"
    copy = gpu_attention.copy_bandwidth(device, 1 << 31 if device.type == "cuda" else 1 << 16)
    about = {"device": name, "torch": torch.__version__, "triton": triton.__version__, "copy": copy}
    folder = options.out / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        print(run(part, options, device, about, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
