"""Decoding side by side in one run: plain decoding here, n-gram lookup, and `generate()` of transformers; ratios, as JSON.

    python benchmarks/decoding.py --target runs/quickstart/target [--head runs/quickstart/head] [--out benchmarks/results/NAME.json]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from spectrain.cli.evaluate import machine
from spectrain.config import Suite, load_config
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram
from spectrain.evaluation.measure import Arm, Records, measure_speed, suite_prompts
from spectrain.evaluation.metrics import bootstrap, ratio_of_ratios, speed_cell
from spectrain.heads.base import load_head
from spectrain.target.model import load_target
from spectrain.training.setup import made_with

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.dtype)
    suite = load_config(Suite, ROOT / "eval/suites/short.yaml")
    prompts = [p for rows in suite_prompts(suite, target, ROOT).values() for p in rows]
    arms = [Arm("plain"), Arm("n-gram", NGram(), Chain(4), "n-gram")]
    if args.head:
        drafter = HeadDrafter(load_head(args.head, device=str(target.device)))
        arms += [Arm("head chain", drafter, Chain(4), "head"), Arm("head tree", drafter, Tree.dynamic(4, 5, 15), "head")]
    with tempfile.TemporaryDirectory() as folder:
        records = Records(Path(folder) / "records.jsonl", "benchmark")
        measure_speed(target, arms, prompts, records, max_new_tokens=args.max_new_tokens, baseline=True)
        plain, theirs = (records.of(name, "speed", prompts) for name in ("plain", "transformers"))
        quads = [(len(a.tokens), a.seconds, len(b.tokens), b.seconds) for a, b in zip(plain, theirs, strict=True)]
        against = bootstrap(quads, ratio_of_ratios)
        found = {arm.name: speed_cell(records.of(arm.name, "speed", prompts), plain) for arm in arms}
    result = {
        "machine": machine(target), "threads": torch.get_num_threads(), "dtype": args.dtype, "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens, "versions": made_with(target, {})["versions"],
        "plain_against_generate": {"ratio": against.value, "lo": against.lo, "hi": against.hi}, "arms": found,
    }  # fmt: skip
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
