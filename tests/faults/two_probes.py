"""What tests/faults/test_di2_duplicates_counted.py runs in every process, and alone: figures of nine prompts, and of one.

Usage: two_probes.py FOLDER     (leaves FOLDER/figures-<number of the process>.json)
"""

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spectrain.cli.joint import JointProbe
from spectrain.cli.probe import Probe, for_all
from spectrain.cli.wiring import as_drafter
from spectrain.config import HeadConfig, LoraConfig, ShapeConfig
from spectrain.data.rows import Row
from spectrain.evaluation.processes import Processes, open_processes
from spectrain.target.model import Target
from spectrain.training.joint import Backbone
from spectrain.training.setup import new_head

SHAPES = ShapeConfig(chain=3, tree_top_k=4, tree_depth=4, tree_budget=12)
SMALL = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))


def asked(number: int) -> list[Row]:
    """Prompts of two to six tokens of two domains, one of which has twice as many."""
    prompts = [[2 + (5 * b + 3 * i * i) % 10 for i in range(2 + b % 5)] for b in range(number)]
    return [Row(str(b), "even" if b % 3 else "odd", [*ids, 9, 1], [0] * len(ids) + [1, 1]) for b, ids in enumerate(prompts)]


def figures(processes: Processes) -> dict[str, Any]:
    """Of the probes and of nine values, of which this process looks at some."""
    looked: list[int] = []

    def values(items: Sequence[int]) -> list[int]:
        looked.extend(items)
        return [item * item for item in items]

    squares = for_all(processes, range(9), values)
    target = Target(SMALL["random_llama"](vocab=12, seed=3), SMALL["word_tokenizer"](12), "tiny")
    head = new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=12), target, asked(9), seed=0).eval()
    backbone = Backbone(target, LoraConfig(rank=2, alpha=4), seed=0).eval()
    with torch.no_grad():
        for p in backbone.weights:
            p.add_(0.1)
    joint = JointProbe(backbone, asked(3), SHAPES, as_drafter, held_out=asked(9), trained=[], processes=processes)
    probes = {count: Probe(target, asked(count), SHAPES, as_drafter, max_new_tokens=12, processes=processes) for count in (9, 1)}
    told = {f"of {count}": probe(head) for count, probe in probes.items()}
    return {"squares": squares, "looked": looked, **told, "joint": joint(head), "change": joint.change()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_processes(splits=True) as processes:
        (Path(sys.argv[1]) / f"figures-{processes.index}.json").write_text(json.dumps(figures(processes)))
