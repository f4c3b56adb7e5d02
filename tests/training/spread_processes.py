"""What tests/training/test_spread.py runs in every process, however accelerate was launched: runs of 20 steps, each in a folder of its own.

Usage: spread_processes.py FOLDER NAME…     (a run goes on from what lies in FOLDER/NAME; up to a dash its name says what is trained)
"""

import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.batches import Sample
from spectrain.data.codes import Codes
from spectrain.heads.base import save_head
from spectrain.training import loop
from spectrain.training.setup import new_head, open_accelerator
from spectrain.training.sharding import way_of

TWO = runpy.run_path(str(Path(__file__).with_name("two_processes.py")))
RUNS: dict[str, dict[str, Any]] = {  # changes of head and training
    "averaged": {"ema": 0.9}, "plain": {}, "frozen": {"head": {"output": "frozen"}}, "poisoned": {}, "masked": {},
    "eagle": {"head": {"kind": "eagle"}}, "medusa": {"head": {"kind": "medusa"}}, "hydra": {"head": {"kind": "hydra"}},
}  # fmt: skip


class Samples(TWO["Samples"]):
    """Rows that are all broken while `broken` says so."""

    broken = staticmethod(lambda: False)

    def __getitem__(self, i: int) -> Sample:
        found = self.samples[i]
        return replace(found, states=Codes(found.states.float() * math.nan)) if self.broken() else found


def settings(name: str, world: int) -> tuple[HeadConfig, TrainingConfig]:
    """Of a run: windows of four batches, of which each epoch has five, so that some processes have empty ones at every other step."""
    changes = dict(RUNS[name.partition("-")[0]])
    head = {"kind": "eagle3", "draft_vocab_size": 99, **changes.pop("head", {})}
    if head["kind"] == "eagle3":
        head |= {"layer_ids": (1, 2), "init_layer": "random"}
    config = TrainingConfig(
        epochs=10, tokens_per_step=1, accumulation=4 // world, lr=5e-3, weight_decay=0.01, max_grad_norm=0.5, checkpoint_steps=10,
        ttt_steps=4 if head["kind"] in ("medusa", "hydra") else 3, eval_steps=10, keep_last=9, **changes,
    )  # fmt: skip
    return HeadConfig(**head), config


def one_run(name: str, out: Path, target: Any, accelerator: Any) -> None:
    """Train, and leave a record: losses, measured points, what was saved and how many numbers of the head this process holds."""
    rank, world = accelerator.process_index, accelerator.num_processes
    head_config, config = settings(name, world)
    samples = Samples.of(target, TWO["five_rows"](), (1, 2) if head_config.kind == "eagle3" else (-1,))
    losses, report = loop.unrolled_loss, loop.Progress.step
    record: dict[str, Any] = {"world": world, "way": way_of(accelerator), "losses": [], "measured": [], "saved": []}
    head = new_head(head_config, target, samples.rows, seed=0)

    def third(what: str) -> bool:
        """Whether this is the last process, in step 3 of a run of this name."""
        return name == what and rank == world - 1 and len(record["losses"]) == 2

    def poisoned(*args: Any) -> Any:
        found = losses(*args)
        return found._replace(total=found.total * math.inf) if third("poisoned") else found

    def save(head: Any, name: str) -> None:
        record["saved"].append(name)
        save_head(head, out / name, run_yaml="", made_with={})

    def measure(head: Any) -> dict[str, float]:
        assert not head.training
        record["measured"].append(float(sum(p.detach().double().abs().sum() for p in head.parameters())))
        return {"measured_tau": len(record["measured"]) + rank}  # what the main process says counts

    def step(self: Any, **told: Any) -> None:
        record["losses"].append(told["counts"].means()["loss"][0])
        report(self, **told)

    loop.Progress.step, loop.unrolled_loss = step, poisoned  # type: ignore[method-assign]
    samples.broken = lambda: third("masked")
    try:
        result = loop.train(
            head, samples, config, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=out, accelerator=accelerator, save=save,
            on_eval=measure, identity={"run": name.partition("-")[0]},
        )  # fmt: skip
    finally:
        loop.Progress.step, loop.unrolled_loss = report, losses  # type: ignore[method-assign]
    held = sum(getattr(p, "ds_tensor", p.to_local() if hasattr(p, "to_local") else p).numel() for p in head.parameters())
    record |= {"steps": result.steps, "best": result.best, "history": len(result.history), "skipped": result.skipped, "held": held}
    (out / f"record-{rank}.json").write_text(json.dumps(record))
    accelerator.free_memory()
    accelerator.wait_for_everyone()


def main(folder: Path, *names: str) -> None:
    target, accelerator = TWO["tiny_target"](), open_accelerator(settings(names[0], 2)[1], folder)
    for name in names:
        one_run(name, folder / name, target, accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
