"""What tests/training/test_placed_training.py runs: a head trained on the states of a spread target, however accelerate was launched.

Usage: placed_training.py FOLDER PLACEMENT     (FOLDER/target: the model; alone it is one process)
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import spectrain as st
from spectrain.config import CaptureConfig, HeadConfig, TrainingConfig
from spectrain.target.features import OnlineFeatures
from spectrain.target.model import load_target
from spectrain.training import loop
from spectrain.training.setup import new_head, open_accelerator
from spectrain.training.sharding import way_of

PLACED = runpy.run_path(str(Path(__file__).parents[1] / "target/placed.py"))


def main(folder: Path, placement: str) -> None:
    config = TrainingConfig(epochs=3, tokens_per_step=20, lr=5e-3)
    out = folder / "run"
    accelerator = open_accelerator(config, out)
    config = config.model_copy(update={"accumulation": 2 // accelerator.num_processes})
    target = load_target(folder / "target", placement=placement, device=str(accelerator.device))
    rows = PLACED["rows"]()
    head = new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=30), target, rows, seed=0)

    def measure(head: Any) -> dict[str, float]:
        found = st.generate(target, [[6, 7, 8, 9]], drafter=head, max_new_tokens=10)
        return {"measured_tau": 1.0 + sum(found.rows[0].tokens) / 1000}

    result = loop.train(
        head, OnlineFeatures(target, rows, (1, 2), CaptureConfig(batch_tokens=16)), config, embed_VW=target.embedding_VW,
        output_VW=target.output_VW, out=out, accelerator=accelerator, save=lambda head, name: None, on_eval=measure, identity={},
    )  # fmt: skip
    told = [(point["loss"], point["measured_tau"]) for point in result.history]
    record = {"way": way_of(accelerator), "steps": result.steps, "history": told}
    (folder / f"record-{accelerator.process_index}.json").write_text(json.dumps(record))
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
