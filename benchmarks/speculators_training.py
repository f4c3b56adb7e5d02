"""One epoch of the EAGLE-3 trainer of speculators on a CPU; run by benchmarks/training.py with that package's own interpreter.

    EXE benchmarks/speculators_training.py < job.json

job: target, data (rows.jsonl, hidden_states/hs_N.safetensors, d2t-V.npy, t2d-V.npy), layers, vocabulary, packing, ttt_steps, precision
(float32 or bfloat16), warm (steps before the clock starts), workers, frozen (the output rows, as that trainer has them), threads, out.
Its own model, data set, sampler, collation and `Trainer.train_epoch` are used. What a CPU needs: devices named `cpu`, sdpa instead of
flex attention (which has no backward pass there), the eager loss instead of the Triton one, AdamW instead of Muon.
"""

import json
import logging
import resource
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset, disable_progress_bars  # noqa: E402
from hs_connectors import FileTransfer  # noqa: E402
from speculators.model import SpeculatorModel  # noqa: E402
from speculators.models.eagle3.data import shift_batch  # noqa: E402
from speculators.train import cli, trainer  # noqa: E402
from speculators.train.config import TrainConfig  # noqa: E402
from speculators.train.data import ArrowDataset  # noqa: E402
from speculators.train.dataloader import _setup_dataloader  # noqa: E402


def arrow(data: Path) -> None:
    """The rows as the data set that its trainer reads."""
    if (data / "state.json").exists():
        return
    rows = [json.loads(line) for line in (data / "rows.jsonl").read_text().splitlines()]
    columns = {name: [row[name] for row in rows] for name in ("input_ids", "loss_mask")}
    found = Dataset.from_dict({**columns, "seq_len": [len(row["input_ids"]) for row in rows]})
    found.set_format(type="torch")
    found.save_to_disk(str(data))


def settings(job: dict[str, Any]) -> Any:
    """Its command line, resolved by itself."""
    layers = [str(i) for i in job["layers"]]
    return TrainConfig.resolve(
        [
            "--verifier-name-or-path", job["target"], "--data-path", job["data"], "--draft-vocab-size", str(job["vocabulary"]),
            "--target-layer-ids", *layers, "--total-seq-len", str(job["packing"]), "--ttt-steps", str(job["ttt_steps"]),
            "--optimizer", "adamw", "--lr", "2e-3", "--loss-implementation", "eager", "--hidden-states-dtype", job["precision"],
            "--draft-attn-impl", "sdpa", "--full-attention-indices", "0", "--no-norm-before-residual", "--no-norm-before-fc",
            "--no-norm-output", "--save-path", job["out"], "--mask-token-id", "0",
        ]  # fmt: skip
    )


def epoch(job: dict[str, Any]) -> dict[str, Any]:
    data, dtype = Path(job["data"]), getattr(torch, job["precision"])
    arrow(data)
    cfg = settings(job)
    args = cli.argparse.Namespace(**cfg.flatten())
    cli.set_seed(0)
    d2t, t2d, size = cli.parse_vocab_mappings(args)
    kind = SpeculatorModel.registry["eagle3"]
    model = cli.build_draft_model(args, kind, t2d, d2t, size)
    model.lm_head.weight.requires_grad_(not job["frozen"])
    rows = ArrowDataset(
        max_len=job["packing"], datapath=str(data), transfer=FileTransfer(data / "hidden_states"), on_missing="raise",
        hidden_states_dtype=dtype,
    )  # fmt: skip
    loader = _setup_dataloader(rows, job["packing"], 576, num_workers=job["workers"], num_target_layers=3, preprocess=shift_batch)
    kwargs, _ = kind.get_trainer_kwargs(**vars(args))
    config = trainer.TrainerConfig(
        lr=args.lr, num_epochs=1, save_path=job["out"], train_call_kwargs=kwargs, weight_decay=0.0, hidden_states_dtype=dtype,
        log_freq=10**9,
    )  # fmt: skip
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    run = trainer.Trainer(model, config, loader)
    run.device_type = "cpu"
    return timed(run, model, job["warm"])


def timed(run: Any, model: Any, warm: int) -> dict[str, Any]:
    """The epoch, its first `warm` steps outside the clock. Tokens: supervised ones that reach the loss of step 0."""
    tokens: list[int] = []
    losses: list[float] = []
    ends: list[float] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: tokens.append(int(kwargs["loss_mask"].sum())), with_kwargs=True)
    model.register_forward_hook(lambda _, args, out: losses.append(float(out[1])))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    run.train_epoch(0, step_callback=lambda: ends.append(time.perf_counter()))
    seconds = ends[-1] - ends[warm - 1]
    return {
        "steps": len(ends), "tokens": sum(tokens[warm:]), "all tokens": sum(tokens), "seconds": seconds,
        "rate": sum(tokens[warm:]) / seconds,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "before": before, "loss": [losses[0], losses[-1]],
        "versions": {name: version(name) for name in ("speculators", "torch", "transformers")},
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }  # fmt: skip


def main() -> None:
    logging.disable(logging.WARNING)
    disable_progress_bars()
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    found = epoch(job)
    Path(job["out"], "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
