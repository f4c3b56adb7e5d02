"""EAGLE-3 training against the trainer of speculators: the same rows, states, head and test-time steps, in one run.

    python benchmarks/training.py --target runs/quickstart/target --speculators-python EXE [--out benchmarks/results/NAME.json]
    python benchmarks/training.py --target runs/quickstart/target --only memory,long

speed: supervised tokens a second of `spectrain.training.loop.train` and of speculators' `Trainer` (in its own environment; see
speculators_training.py), and the peak memory of each process. One epoch an arm and round, arms interleaved, every arm a process of its
own; the clock runs from the end of the third step to that of the last one, without evaluation and saving. Both read the states that one
capture wrote, bfloat16 on disk, and train one layer over hs [2, 15, 27] with a draft vocabulary of 6144 in float32 with AdamW.
Inside both clocks: reading states from disk, and the target's law over the draft vocabulary, from its last state. speculators keeps the
output rows frozen: the arm `frozen` does too, the arm `trained` trains them, which is more work and the default.
Outside ours: the best token and the log-sum-exp over the full vocabulary, once at capture. Their cost is measured, and charged to one
epoch, and to three, as figures of their own. speculators needs neither: its law is scaled to 1 over the draft vocabulary.
memory: what a full draft vocabulary takes more than one of 6144. long: rows of 8192 tokens, two of them in a line, and one of 32,768.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from spectrain.cli.evaluate import machine
from spectrain.config import CaptureConfig, HeadConfig, PrepareConfig, TrainingConfig
from spectrain.data.batches import Batch
from spectrain.data.codes import encode
from spectrain.data.prepare import prepare
from spectrain.data.row_store import RowStore
from spectrain.data.rows import Row
from spectrain.heads.base import head_class, load_head, save_head
from spectrain.heads.losses import Counts
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target, load_target
from spectrain.target.states import _best_and_lse
from spectrain.training import loop
from spectrain.training.setup import made_with, new_head, open_accelerator
from spectrain.training.start import final_norm
from spectrain.training.tracking import Progress

ROOT = Path(__file__).resolve().parents[1]
ANSWERS = ROOT / "recipes/data/answers_smollm2.jsonl"
LAYERS, STEPS, VOCABULARY, LONGEST, WARM = (2, 15, 27), 3, 6144, 512, 3
PACKINGS, BATCHES = (512, 1024, 2048), (256, 512)
MIXED = {"float32": "no", "bfloat16": "bf16"}  # float32 weights, products in bfloat16
GOALS = {
    "spectrain / speculators": 2.0, "peak / peak of speculators": 1.0,
    "peak GB, 8192": 8.0, "peak GB, 2 x 8192": 8.0, "peak GB, 32768": 8.0,
}  # fmt: skip
GB = 1e9


def chosen(rows: RowStore, count: int) -> list[Row]:
    """About `count` rows of every domain in turn, none longer than the smallest packing, which would cut them."""
    short = [i for i in range(len(rows)) if len(rows[i]) <= LONGEST]
    return [rows[i] for i in short[:: max(1, len(short) // count)]][:count]


def make_inputs(target: Target, folder: Path, count: int) -> dict[str, Any]:
    """Rows, states, a fresh head and the target's rows, and the same in the form that speculators reads."""
    prepare([str(ANSWERS)], target.tokenizer, folder / "rows", PrepareConfig(max_length=640), stop_ids=target.eos_ids)
    store = RowStore(folder / "rows")
    rows = chosen(store, count)
    capture(rows, target, LAYERS, folder / "states", CaptureConfig(states="bf16", last="bf16"))
    head = new_head(HeadConfig(layer_ids=LAYERS, draft_vocab_size=VOCABULARY), target, rows, seed=0)
    save_head(head, folder / "head", run_yaml="", made_with=made_with(target, {}))
    save_file({"embed": target.embedding_VW.detach().float().clone()}, folder / "embed.safetensors")
    their_inputs(folder / "theirs", rows, FeatureStore(folder / "states", rows), final_norm(target), head)
    return {
        "rows": len(rows), "tokens": sum(map(len, rows)), "supervised": sum(row.supervised for row in rows), "longest": max(map(len, rows)),
    }  # fmt: skip


def their_inputs(folder: Path, rows: Sequence[Row], store: FeatureStore, norm: torch.Tensor, head: Any) -> None:
    """A file a row: hidden_states [L, 4, W], token_ids [L]. Their trainer norms the last state itself, so it is given without the scale."""
    (folder / "hidden_states").mkdir(parents=True)
    lines = []
    for i, row in enumerate(rows):
        sample = store[i]
        states = sample.states.float().unflatten(-1, (len(LAYERS), -1))
        last = torch.zeros(len(row), states.shape[-1])
        last[sample.mask_L.bool()] = sample.last.float() / norm.float()
        both = torch.cat([states, last[:, None]], 1).bfloat16()
        save_file({"hidden_states": both, "token_ids": sample.ids_L}, folder / f"hidden_states/hs_{i}.safetensors")
        lines.append(json.dumps({"input_ids": row.ids_L.tolist(), "loss_mask": row.mask_L.tolist()}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    np.save(folder / f"d2t-{VOCABULARY}.npy", head.d2t.numpy())
    np.save(folder / f"t2d-{VOCABULARY}.npy", head.t2d.numpy())


@torch.no_grad()
def labels(folder: Path, count: int) -> float:
    """Seconds a supervised token of what capture computes more than speculators needs: logits of the full vocabulary, best token and
    log-sum-exp."""
    rows = chosen(RowStore(folder / "rows"), count)
    last_PW = FeatureStore(folder / "states", rows).batch(range(len(rows))).last_PW
    output_VW = load_file(folder / "embed.safetensors")["embed"]
    begin = time.perf_counter()
    for part in last_PW.split(512):
        _best_and_lse(part @ output_VW.T)
    return (time.perf_counter() - begin) / len(last_PW)


class Watch(Progress):
    """The loop's progress, which also notes when each step ended, the memory by then, and the loss."""

    ends: list[float]
    peaks: list[int]
    losses: list[float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Watch.ends, Watch.peaks, Watch.losses = [], [], []

    def step(self, step: int, counts: Counts, **values: Any) -> None:
        super().step(step, counts, **values)
        Watch.losses.append(counts.means()["loss"][0])
        Watch.peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        Watch.ends.append(time.perf_counter())


class Counting:
    """Samples that note how many supervised tokens each batch has."""

    def __init__(self, samples: Any) -> None:
        self.samples, self.rows, self.tokens = samples, samples.rows, list[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.samples[i]

    def batch(self, numbers: Sequence[int]) -> Batch:
        found = self.samples.batch(numbers)
        self.tokens.append(int(found.mask_BL.sum()))
        return found


class Synthetic:
    """Rows of random tokens with random states in 8 bits, made when they are read; the first 16 tokens of each are a prompt."""

    def __init__(self, count: int, length: int, vocabulary: int, width: int) -> None:
        found = np.random.default_rng(0)
        mask_L = (np.arange(length) >= 16).astype(np.uint8)
        self.rows = [Row(str(i), "any", found.integers(0, vocabulary, length, dtype=np.int32), mask_L) for i in range(count)]
        self.width = width

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Sequence[int]) -> Batch:
        rows = [self.rows[i] for i in numbers]
        ids_BL = torch.stack([torch.from_numpy(row.ids_L.astype(np.int64)) for row in rows])
        mask_BL = torch.stack([torch.from_numpy(row.mask_L.astype(np.int64)) for row in rows])
        P = int(mask_BL.sum())
        states = encode(torch.randn(*ids_BL.shape, len(LAYERS) * self.width), states=len(LAYERS), kind="int8")
        last = encode(torch.randn(P, self.width), states=1, kind="bf16")
        return Batch(ids_BL, mask_BL, states, last, ids_BL[mask_BL.bool()], torch.full((P,), 15.0))


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One arm in a process that has never held the target."""
    torch.set_num_threads(job["threads"])
    folder, long = Path(job["folder"]), job.get("long")
    embed_VW = load_file(folder / "embed.safetensors")["embed"]
    head = load_head(folder / "head").requires_grad_(True)
    if long:
        config = head.config.model_copy(update={"max_position_embeddings": 32768, "draft_vocab_size": long["vocabulary"]})
        head = head_class("eagle3")(config)
        ids, norm = torch.arange(long["vocabulary"]), torch.ones(embed_VW.shape[1])
        head.start_from(layer=None, norm=norm, output_VW=embed_VW, target_ids=ids, train_output=True, seed=0)
        samples: Any = Synthetic(long["rows"], long["length"], len(embed_VW), embed_VW.shape[1])
    else:
        samples = FeatureStore(folder / "states", chosen(RowStore(folder / "rows"), job["rows"]))
    head.lm_head.requires_grad_(not job["frozen"])
    counting, warm = Counting(samples), 0 if long else WARM
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loop.Progress = Watch  # type: ignore[misc]
    config = TrainingConfig(epochs=1, ttt_steps=STEPS, checkpoint_minutes=1e6, **job["training"])
    with tempfile.TemporaryDirectory() as out:
        loop.train(
            head, counting, config, embed_VW=embed_VW, output_VW=embed_VW, out=Path(out), accelerator=open_accelerator(config, Path(out)),
            save=lambda *_: None,
        )  # fmt: skip
    tokens = counting.tokens[: len(Watch.ends)]
    seconds = Watch.ends[-1] - Watch.ends[warm - 1] if warm else float("nan")
    return {
        "steps": len(Watch.ends), "tokens": sum(tokens[warm:]), "all tokens": sum(tokens), "seconds": seconds,
        "rate": sum(tokens[warm:]) / seconds, "peak": Watch.peaks[-1], "before": before, "loss": [Watch.losses[0], Watch.losses[-1]],
        "trained": sum(p.numel() for p in head.parameters() if p.requires_grad),
    }  # fmt: skip


def run_child(executable: str, script: str, job: dict[str, Any], folder: Path, extra: Sequence[str] = ()) -> dict[str, Any]:
    """One arm; ValueError with its last words when it fails."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [executable, str(ROOT / "benchmarks" / script), *extra]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(job["threads"])}
        found = subprocess.run(command, input=json.dumps({**job, "out": out}), text=True, env=environment, capture_output=True, check=False)
        if found.returncode:
            raise ValueError(f"{script} failed: {found.stderr[-3000:]}")
        return json.loads(Path(out, "found.json").read_text())


def ours(folder: Path, threads: int, **job: Any) -> dict[str, Any]:
    return run_child(sys.executable, "training.py", {"folder": str(folder), "threads": threads, **job}, folder, ["--child"])


def theirs(folder: Path, threads: int, executable: str, **job: Any) -> dict[str, Any]:
    fixed = {"data": str(folder / "theirs"), "layers": LAYERS, "vocabulary": VOCABULARY, "ttt_steps": STEPS, "warm": WARM}
    return run_child(executable, "speculators_training.py", {**fixed, "threads": threads, **job}, folder)


def speed(folder: Path, inputs: dict[str, Any], args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """All arms, interleaved; the middle of the rounds counts."""
    threads = torch.get_num_threads()
    arms: dict[str, Any] = {}
    for packing in args.packings if args.speculators_python else ():
        job: dict[str, Any] = {"target": args.target, "packing": packing, "frozen": True, "workers": 0, "precision": precision}
        arms[f"speculators, packed to {packing}"] = partial(theirs, folder, threads, args.speculators_python, **job)
    for size, frozen in [(size, True) for size in args.batches] + [(args.batches[0], False)]:
        training = {"tokens_per_step": size, "mixed_precision": MIXED[precision]}
        job = {"rows": inputs["rows"], "frozen": frozen, "training": training}
        arms[f"spectrain, {'frozen' if frozen else 'trained'}, {size} a step"] = partial(ours, folder, threads, **job)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    of_labels: list[float] = []
    for n in range(args.rounds):
        of_labels.append(labels(folder, inputs["rows"]))
        for name, arm in arms.items():
            one = arm()
            found[name].append({**one, "load": os.getloadavg()[0]})
            told = f"{one['rate']:7.1f} supervised tokens/s, peak {one['peak'] / GB:.2f} GB, {one['steps']} steps"
            print(f"{precision}, round {n + 1}: {name:34} {told}", flush=True)
    return {"arms": found, "labels, seconds a token": of_labels, **ratios(found, statistics.median(of_labels))}


def ratios(found: dict[str, list[dict[str, Any]]], of_labels: float) -> dict[str, Any]:
    """Medians, and ours against their best packing: alone, and with the target's labels charged to one epoch and to three."""
    rate = {name: statistics.median(one["rate"] for one in rounds) for name, rounds in found.items()}
    peak = {name: max(one["peak"] for one in rounds) / GB for name, rounds in found.items()}
    charged = {n: {k: 1 / (1 / r + of_labels / n) for k, r in rate.items() if k.startswith("spectrain")} for n in (1, 3)}
    result: dict[str, Any] = {"supervised tokens/s": rate, "peak GB": peak, "charged to one": charged[1], "charged to three": charged[3]}
    their_best = max((name for name in rate if name.startswith("speculators")), key=lambda k: rate[k], default=None)
    our_best = max((name for name in rate if "frozen" in name), key=lambda k: rate[k])
    trained = next(name for name in rate if "trained" in name)
    if their_best:
        base = rate[their_best]
        result |= {
            "best": [our_best, their_best], "spectrain / speculators": rate[our_best] / base,
            "charged to one / speculators": charged[1][our_best] / base, "charged to three / speculators": charged[3][our_best] / base,
            "trained / speculators": rate[trained] / base, "peak / peak of speculators": peak[our_best] / peak[their_best],
            "smallest peak of speculators": min(v for k, v in peak.items() if k.startswith("speculators")),
        }  # fmt: skip
    return result


def memory(folder: Path, threads: int) -> dict[str, Any]:
    """Peak memory of a step over a row of 2048 and of 8192 tokens with 6144 and with all 49,152 output rows, which stay frozen.

    What the longer row takes more with the full vocabulary than with the small one is the loss's own: two [tokens, vocabulary] float32
    tensors alone would be `two tensors MB`.
    """
    peak: dict[str, float] = {}
    for length in (2048, 8192):
        for vocabulary in (VOCABULARY, 49152):
            job = {"rows": 1, "length": length, "vocabulary": vocabulary}
            found = ours(folder, threads, frozen=True, long=job, training={"tokens_per_step": 10**6, "steps": 1})
            peak[f"{length} tokens, {vocabulary} rows"] = found["peak"] / GB
    extra = [peak[f"{n} tokens, 49152 rows"] - peak[f"{n} tokens, {VOCABULARY} rows"] for n in (2048, 8192)]
    return {
        "peak GB": peak, "full vocabulary MB more": {"2048": extra[0] * 1e3, "8192": extra[1] * 1e3},
        "of it by tokens MB": (extra[1] - extra[0]) * 1e3, "two tensors MB": 2 * 4 * 6144 * (49152 - VOCABULARY) / 1e6,
    }  # fmt: skip


def long_rows(folder: Path, threads: int) -> dict[str, Any]:
    """Peak memory and seconds of a step over long rows; the head has SmolLM2's sizes, and 32,768 positions."""
    result: dict[str, Any] = {}
    for name, rows, length, packing in (("8192", 1, 8192, None), ("2 x 8192", 2, 8192, 16384), ("32768", 1, 32768, None)):
        job = {"rows": rows, "length": length, "vocabulary": VOCABULARY}
        begin = time.perf_counter()
        training = {"tokens_per_step": 10**6, "packing": packing, "steps": 1}
        found = ours(folder, threads, frozen=False, long=job, training=training)
        result[f"peak GB, {name}"] = found["peak"] / GB
        result[f"seconds with start, {name}"] = time.perf_counter() - begin
        print(f"{name}: peak {found['peak'] / GB:.2f} GB, {result[f'seconds with start, {name}']:.0f} s", flush=True)
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the small model")
    parser.add_argument("--speculators-python", help="interpreter of an environment with speculators 0.9.0 and torch for the CPU")
    parser.add_argument("--rows", type=int, default=130)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packings", type=int, nargs="*", default=PACKINGS, help="tokens of a batch of speculators")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="supervised tokens of a batch of ours")
    parser.add_argument("--precisions", nargs="*", default=["float32"], choices=list(MIXED))
    parser.add_argument("--only", default="speed,memory,long", help="parts to run")
    parser.add_argument("--keep", type=Path, help="folder for rows and states (default: a temporary one); used again when it is there")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, device="cpu")
    result: dict[str, Any] = {"machine": machine(target), "versions": made_with(target, {})["versions"], "goals": GOALS}
    known = folder / "inputs.json"
    if not known.exists():
        known.write_text(json.dumps(make_inputs(target, folder, args.rows)))
    del target
    inputs = result["inputs"] = json.loads(known.read_text())
    threads = torch.get_num_threads()
    speeds = {name: partial(speed, folder, inputs, args, name) for name in args.precisions}
    parts = {"speed": lambda: {name: one() for name, one in speeds.items()}}
    parts |= {"memory": partial(memory, folder, threads), "long": partial(long_rows, folder, threads)}
    return {**result, **{name: parts[name]() for name in args.only.split(",") if name}}


def report(result: dict[str, Any]) -> None:
    """What was found, and the figures with a goal."""
    speeds = result.get("speed", {})
    for precision, part in speeds.items():
        print(precision, json.dumps({name: value for name, value in part.items() if name != "arms"}, indent=1))
    print(json.dumps({name: result[name] for name in ("memory", "long") if name in result}, indent=1))
    for where, part in [*speeds.items(), *((name, result[name]) for name in ("long",) if name in result)]:
        for name in GOALS:
            if name in part:
                print(f"{where:10} {name:30} {part[name]:8.2f}   goal {GOALS[name]}")


def main() -> None:
    if "--child" in sys.argv:
        job = json.load(sys.stdin)
        Path(job["out"], "found.json").write_text(json.dumps(child(job)))
        return
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args, args.keep or Path(temporary))
    report(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
