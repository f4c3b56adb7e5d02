"""Training on two processes of one thread each against one process of one thread: the same rows, batches, steps and updates.

    python benchmarks/scaling.py --target runs/quickstart/target --out benchmarks/results/scaling_cpu.json

A step is two batches of --batch supervised tokens, one a process, or both in one process (training.accumulation 2), so every arm makes the
same updates; their last losses are compared. Arms are interleaved, each is a launch of its own, and the medians over the rounds count; the
clock runs from the end of the third step to that of the last one, without evaluation and saving.

one       one process
ddp       two, gradients exchanged over gloo while they are made (DistributedDataParallel), as `accelerate launch` starts it
apart     two, the same steps without that exchange: the weights drift apart, only the time is of use. What ddp takes longer is what the
          exchange costs where it is not hidden behind the products; what apart falls short of twice `one` is no exchange: two processes
          share the machine's memory and caches, and the one with the shorter batch waits
fsdp2     two, the head sharded (FSDP2)
tuned     as ddp, with the settings of --ddp (a JSON object of DistributedDataParallelKwargs), where they are given
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from safetensors.torch import load_file, save_file
from training import ANSWERS, LAYERS, VOCABULARY, WARM, chosen  # beside this file

from spectrain.cli.evaluate import machine
from spectrain.config import CaptureConfig, HeadConfig, PrepareConfig, TrainingConfig
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore
from spectrain.heads.base import load_head, save_head
from spectrain.heads.losses import Counts
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target, load_target
from spectrain.training import loop
from spectrain.training.setup import made_with, new_head, open_accelerator
from spectrain.training.sharding import Weights
from spectrain.training.tracking import Progress

ARMS = ("one", "ddp", "apart", "fsdp2")
GOAL = 1.8  # supervised tokens a second of ddp, over those of one process
SHARDED = {  # what `accelerate launch` tells its processes
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "false",
}  # fmt: skip


def make_inputs(target: Target, folder: Path, count: int) -> dict[str, Any]:
    """Rows, their states and a fresh head, in a folder."""
    prepare([str(ANSWERS)], target.tokenizer, folder / "rows", PrepareConfig(max_length=640), stop_ids=target.eos_ids)
    rows = chosen(RowStore(folder / "rows"), count)
    capture(rows, target, LAYERS, folder / "states", CaptureConfig(states="bf16", last="bf16"))
    head = new_head(HeadConfig(layer_ids=LAYERS, draft_vocab_size=VOCABULARY), target, rows, seed=0)
    save_head(head, folder / "head", run_yaml="", made_with=made_with(target, {}))
    save_file({"embed": target.embedding_VW.detach().float().clone()}, folder / "embed.safetensors")
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    return {"rows": len(rows), "supervised": sum(row.supervised for row in rows), "trained weights": trained}


class Clock(Progress):
    """The loop's progress, which notes of each step when it ended, its counted tokens, its loss, and the seconds spent on its states."""

    steps: list[tuple[float, float, float, float]] = []

    def step(self, step: int, counts: Counts, *, wait_seconds: float, **values: Any) -> None:
        super().step(step, counts, wait_seconds=wait_seconds, **values)
        Clock.steps.append((time.perf_counter(), float(counts.rows_K[0]), counts.means()["loss"][0], wait_seconds))


class Apart(Weights):
    """In place of the loop's own: the update comes at the end of a window, the gradients stay in their process."""

    @contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        self._accelerator.gradient_state._set_sync_gradients(now)
        with self._accelerator.no_sync(self.model):
            yield


def child(job: dict[str, Any]) -> None:
    """One process of an arm; the main one leaves what was found."""
    torch.set_num_threads(1)
    folder, out = Path(job["folder"]), Path(job["out"])
    embed_VW = load_file(folder / "embed.safetensors")["embed"]
    rows = chosen(RowStore(folder / "rows"), job["rows"])
    world = int(os.environ.get("WORLD_SIZE", 1))
    config = TrainingConfig(
        epochs=10**6, steps=job["steps"], tokens_per_step=job["batch"], accumulation=2 // world, checkpoint_minutes=1e6, eval_steps=10**6
    )
    accelerator = open_accelerator(config, out)
    if job["ddp"]:
        accelerator.ddp_handler = DistributedDataParallelKwargs(**job["ddp"])
    loop.Progress = Clock  # type: ignore[misc]
    if job["arm"] == "apart":
        loop.Weights = Apart  # type: ignore[misc]
    loop.train(
        load_head(folder / "head").requires_grad_(True), FeatureStore(folder / "states", rows), config, embed_VW=embed_VW,
        output_VW=embed_VW, out=out / "training", accelerator=accelerator, save=lambda *_: None,
    )  # fmt: skip
    if not accelerator.is_main_process:
        return
    first, timed = Clock.steps[WARM - 1], Clock.steps[WARM:]
    seconds = timed[-1][0] - first[0]
    tokens, waited = sum(tokens for _, tokens, _, _ in timed), sum(wait for *_, wait in timed)
    found = {"tokens": tokens, "seconds": seconds, "rate": tokens / seconds, "waiting": waited / seconds, "loss": timed[-1][2]}
    (out / "found.json").write_text(json.dumps({**found, "world": accelerator.num_processes, "way": str(accelerator.distributed_type)}))


def run_arm(arm: str, job: dict[str, Any]) -> dict[str, Any]:
    """One launch; ValueError with its last words when it fails."""
    with tempfile.TemporaryDirectory() as out:
        Path(out, "job.json").write_text(json.dumps({**job, "arm": arm, "out": out, "ddp": job["ddp"] if arm == "tuned" else None}))
        launch = [] if arm == "one" else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(SHARDED if arm == "fsdp2" else {})}
        load = os.getloadavg()[0]
        command = [sys.executable, *launch, __file__, "--child", str(Path(out, "job.json"))]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise ValueError(f"{arm} failed: {ended.stderr[-3000:]}")
        found = json.loads(Path(out, "found.json").read_text())
        if found["world"] != (1 if arm == "one" else 2) or ("FSDP" in found["way"]) != (arm == "fsdp2"):
            raise ValueError(f"{arm} ran on {found['world']} processes as {found['way']}")
        return {**found, "load before": load}


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, and what they are to one process."""
    rate = {arm: statistics.median(one["rate"] for one in rounds) for arm, rounds in found.items()}
    told: dict[str, Any] = {
        "supervised tokens/s": rate, "times one process": {arm: r / rate["one"] for arm, r in rate.items() if arm != "one"},
        "share waiting for states": {arm: statistics.median(one["waiting"] for one in rounds) for arm, rounds in found.items()},
        "last loss": {arm: rounds[-1]["loss"] for arm, rounds in found.items()},
    }  # fmt: skip
    if "apart" in rate:
        if told["last loss"]["apart"] == told["last loss"].get("ddp"):
            raise ValueError("apart ended with the loss of ddp: it did not leave out the exchange")
        told["share of a step in exchange that is not hidden"] = {
            arm: 1 - rate[arm] / rate["apart"] for arm in rate if arm not in ("one", "apart")
        }
    return told


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the small model")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--batch", type=int, default=512, help="supervised tokens of a batch; a step has two")
    parser.add_argument("--steps", type=int, default=23, help=f"of an arm and round; the first {WARM} are not timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", default=ARMS, choices=ARMS)
    parser.add_argument("--ddp", type=json.loads, help='adds the arm `tuned`; such as \'{"gradient_as_bucket_view": true}\'')
    parser.add_argument("--keep", type=Path, help="folder for rows and states (default: a temporary one); used again when it is there")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    target, known = load_target(args.target, device="cpu"), folder / "inputs.json"
    about = {"machine": machine(target), "cpus": os.cpu_count(), "versions": made_with(target, {})["versions"]}
    if not known.exists():
        known.write_text(json.dumps(make_inputs(target, folder, args.rows)))
    del target
    inputs = json.loads(known.read_text())
    job = {"folder": str(folder), "rows": args.rows, "batch": args.batch, "steps": args.steps, "ddp": args.ddp}
    arms = [*dict.fromkeys(("one", *args.arms)), *(["tuned"] if args.ddp else [])]
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for n in range(args.rounds):
        for arm in arms if n % 2 == 0 else arms[::-1]:
            one = run_arm(arm, job)
            found[arm].append(one)
            told = f"{one['rate']:7.1f} supervised tokens/s, waiting {one['waiting']:.1%}, load before {one['load before']:.1f}"
            print(f"round {n + 1}: {arm:6} {told}", flush=True)
    asked = {name: value for name, value in job.items() if name != "folder"}
    return {**about, "date": time.strftime("%Y-%m-%d"), "goal": GOAL, "job": asked, "inputs": inputs, **summary(found), "rounds": found}


def main() -> None:
    if "--child" in sys.argv:
        child(json.loads(Path(sys.argv[-1]).read_text()))
        return
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args, args.keep or Path(temporary))
    print(json.dumps({name: value for name, value in result.items() if name != "rounds"}, indent=1))
    if "ddp" in result["times one process"]:
        print(f"ddp on two processes: {result['times one process']['ddp']:.2f} times one, goal {GOAL}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
