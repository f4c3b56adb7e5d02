"""What tests/training/test_distributed.py runs in every process: train a tiny head, leave weights, steps and losses behind.

Usage: two_processes.py FOLDER ACCUMULATION [STOP_AFTER]     (STOP_AFTER: the last process asks to stop at this step)
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.batches import Sample
from spectrain.data.masking import Row
from spectrain.kernels import tree_attention
from spectrain.target.features import capture_row
from spectrain.target.model import Target
from spectrain.training.loop import train
from spectrain.training.setup import new_head


class Samples:
    """Five rows of unequal length with their states in memory."""

    def __init__(self, target: Target, stop_after: int) -> None:
        g = torch.Generator().manual_seed(1)
        ids = [tuple(torch.randint(0, 100, (L,), generator=g).tolist()) for L in (10, 14, 7, 20, 9)]
        self.rows = [Row(str(i), "d", x, (0,) * 3 + (1,) * (len(x) - 3)) for i, x in enumerate(ids)]
        self.parts = [capture_row(row, target, (1, 2)) for row in self.rows]
        self.loaded, self.stop_after = 0, stop_after

    def __getitem__(self, i: int) -> Sample:
        self.loaded += 1
        if self.loaded == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        row, part = self.rows[i], self.parts[i]
        spread = {
            n: torch.zeros(len(row.ids_L), *part[n].shape[1:], dtype=part[n].dtype).index_copy(0, torch.arange(3, len(row.ids_L)), part[n])
            for n in ("last", "best", "lse")
        }
        return Sample(
            ids_L=torch.tensor(row.ids_L), mask_L=torch.tensor(row.mask_L), states_LF=part["states"].float(),
            last_LW=spread["last"].float(), best_L=spread["best"], lse_L=spread["lse"],
        )  # fmt: skip


def main(folder: Path, accumulation: int, stop_after: int) -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, initializer_range=0.25,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation=tree_attention.register()).eval().requires_grad_(False)
    target = Target(model=model, tokenizer=None, name="tiny")
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    samples = Samples(target, stop_after if rank == accelerator.num_processes - 1 else 0)
    head = new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=100, init_layer="random"), target, samples.rows, seed=0)
    settings = TrainingConfig(epochs=4, tokens_per_step=1, accumulation=accumulation, lr=5e-3)
    saved: list[str] = []

    def save(head: Any, name: str) -> None:
        saved.append(name)

    record: dict[str, Any] = {"world": accelerator.num_processes}
    try:
        result = train(
            head, samples, settings, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=folder, accelerator=accelerator,
            save=save, on_eval=lambda head: 1.0, identity="x",
        )  # fmt: skip
        record |= {"steps": result.steps, "losses": [point["loss"] for point in result.history]}
    except KeyboardInterrupt as stopped:
        record |= {"stopped": str(stopped)}
    torch.save(head.state_dict(), folder / f"weights-{rank}.pt")
    (folder / f"record-{rank}.json").write_text(json.dumps({**record, "saved": saved}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
