"""What tests/training/test_distributed.py runs in every process: train a tiny head, leave weights, steps and losses behind.

Usage: two_processes.py FOLDER ACCUMULATION [STOP_AFTER]     (STOP_AFTER: the last process asks to stop at this step)
"""

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.batches import Sample
from spectrain.kernels import tree_attention
from spectrain.target.model import Target
from spectrain.training import checkpoint, loop
from spectrain.training.setup import new_head

BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))


class Samples(BY_HAND["Samples"]):
    """Five rows of unequal length with their states in memory; asks to stop with sample number `stop_after`."""

    loaded = stop_after = 0

    def __getitem__(self, i: int) -> Sample:
        self.loaded += 1
        if self.loaded == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.samples[i]


def five_rows() -> list[Any]:
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 100, (L,), generator=g).tolist() for L in (10, 14, 7, 20, 9)]
    return [BY_HAND["row_of"](x[:3], x[3:], name=str(i)) for i, x in enumerate(ids)]


def tiny_target() -> Target:
    """A random Llama of three layers, the same in every process."""
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, initializer_range=0.25,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation=tree_attention.register()).eval().requires_grad_(False)
    words = SimpleNamespace(get_vocab=lambda: {f"w{i}": i for i in range(100)})
    return Target(model=model, tokenizer=words, name="tiny")


def main(folder: Path, accumulation: int, stop_after: int) -> None:
    target = tiny_target()
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    samples = Samples.of(target, five_rows())
    samples.stop_after = stop_after if rank == accelerator.num_processes - 1 else 0
    head = new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=100, init_layer="random"), target, samples.rows, seed=0)
    settings = TrainingConfig(epochs=4, tokens_per_step=1, accumulation=accumulation, lr=5e-3, ema=0.9)
    saved: list[str] = []
    write_whole = checkpoint.write_whole

    def slow(path: Path, write: Callable[..., Any]) -> None:
        time.sleep(1)
        write_whole(path, write)

    def save(head: Any, name: str) -> None:
        saved.append(name)

    record: dict[str, Any] = {"world": accelerator.num_processes, "rates": [], "tokens": []}
    report = loop.Progress.step

    def step(self: Any, **told: Any) -> None:
        record["rates"].append(told["lr"])
        record["tokens"].append(told["total_tokens"])
        report(self, **told)

    loop.Progress.step = step  # type: ignore[method-assign]
    checkpoint.write_whole = slow if stop_after else write_whole
    try:
        result = loop.train(
            head, samples, settings, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=folder, accelerator=accelerator,
            save=save, on_eval=lambda head: {"measured_tau": 1.0}, identity={"run": "x"},
        )  # fmt: skip
        record |= {"steps": result.steps, "losses": [point["loss"] for point in result.history]}
    except KeyboardInterrupt as stopped:
        record |= {"stopped": str(stopped), "kept": (folder / "checkpoints/latest").exists()}
    finally:
        loop.Progress.step, checkpoint.write_whole = report, write_whole  # type: ignore[method-assign]
    torch.save(head.state_dict(), folder / f"weights-{rank}.pt")
    (folder / f"record-{rank}.json").write_text(json.dumps({**record, "saved": saved}))
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
