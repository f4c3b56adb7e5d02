"""The training loop, read top to bottom: prepare, then for each step: batches -> laws -> loss -> update -> measure -> save.

Legend: B rows, L tokens, R counted rows of a batch, P supervised positions, K test-time steps, W target width, Vd draft vocabulary.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from spectrain.config import TrainingConfig
from spectrain.data.batches import Batch, Sample, collate, plan_batches
from spectrain.data.masking import Row
from spectrain.heads.losses import Counts, draft_counts
from spectrain.heads.targets import counted
from spectrain.training.checkpoint import GracefulStop, load_checkpoint, save_checkpoint
from spectrain.training.tracking import Progress


class Samples(Protocol):
    """Rows with their states: a feature store."""

    rows: Sequence[Row]

    def __getitem__(self, i: int) -> Sample: ...


@dataclass
class TrainResult:
    """steps done, the best measured tau (None when nothing was measured), and the history of measured points."""

    steps: int = 0
    best: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Work:
    """A batch on the device with its counted rows: flat numbers [R], and for each step k which of them count [K][R]."""

    batch: Batch
    row_R: Tensor
    counts_KR: list[Tensor]


def train(
    head: Any, samples: Samples, config: TrainingConfig, *, embed_VW: Tensor, output_VW: Tensor, out: Path, accelerator: Accelerator,
    save: Callable[[Any, str], None], on_eval: Callable[[Any], float] | None = None, identity: str = "",
) -> TrainResult:  # fmt: skip
    """Train `head` on `samples` and keep the checkpoint with the best measured acceptance.

    embed_VW, output_VW: the target's embedding and output rows. save(head, name): write a head directory (`best`, `last`).
    on_eval(head) -> measured tau. identity: hash of all that the run depends on; a checkpoint in `out` with the same identity is
    resumed, another is refused. SIGINT and SIGTERM save and raise KeyboardInterrupt. Raises ValueError when no row counts.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    window = config.accumulation * world
    epochs = _epochs(samples.rows, config, window)
    steps = [batches for epoch in epochs for batches in epoch]
    total = min(len(steps), config.steps or len(steps))
    measure_at = _measure_steps([len(epoch) for epoch in epochs], config.evals_per_epoch, total)
    embed_VW, device = embed_VW.to(accelerator.device), accelerator.device
    rows_VdW = output_VW.to(device)[head.target_ids.to(device)].float()

    trainable = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, total, config))
    model, optimizer = accelerator.prepare(head, optimizer)
    inner = accelerator.unwrap_model(model)
    result, step, spent = TrainResult(), 0, 0.0
    resumed = load_checkpoint(out, identity, inner, optimizer, schedule)
    if resumed:
        step, spent = resumed["step"], resumed["seconds"]
        result = TrainResult(step, resumed["best"], resumed["history"])
    progress, started = Progress(total, step, accelerator, config.tracker, out), time.monotonic()
    saved_at, measured = started, Counts.zeros(config.ttt_steps, device)
    model.train()
    with GracefulStop() as stop:
        while step < total:
            mine = [steps[step][i] for i in range(rank, window, world)]
            works = [_work(samples, rows, config.ttt_steps, device) for rows in mine]
            rows_all = accelerator.reduce(torch.stack([w.counts_KR[0].sum() for w in works]).sum().float(), reduction="sum").clamp(min=1)
            parts = []
            for i, work in enumerate(works):
                accelerator.gradient_state._set_sync_gradients(i == len(works) - 1)
                with accelerator.autocast():
                    part = _counts(model, inner, work, embed_VW, rows_VdW, config)
                # Ranks average their gradients, so the sum over all ranks' rows needs the factor `world`.
                accelerator.backward(_weighted(part, config) / rows_all * world)
                parts.append(part.detach())
            updated = _update(optimizer, schedule, trainable, config, accelerator)
            step += 1
            result.steps = step
            counts = Counts(*(accelerator.reduce(f, reduction="sum") for f in sum(parts[1:], start=parts[0]).fields))
            if updated:
                measured = measured + counts
            else:
                progress.note(f"step {step}: gradient not finite, update skipped")
            seconds = spent + time.monotonic() - started
            progress.step(step, counts, lr=float(schedule.get_last_lr()[0]))
            asked, over = _on_any(accelerator, stop.asked, config.max_minutes is not None and seconds > 60 * config.max_minutes)
            last = step == total or over
            if step in measure_at or last:
                _measure(inner, model, on_eval, save, result, measured, step, seconds, accelerator, progress, last=last)
                measured = Counts.zeros(config.ttt_steps, device)
            if asked or last or time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                state = {"step": total if over else step, "seconds": seconds, "best": result.best, "history": result.history}
                save_checkpoint(out, identity, inner, optimizer, schedule, state, accelerator)
                saved_at = time.monotonic()
            if asked:
                raise KeyboardInterrupt(f"stopped after step {step} of {total}")
            if over:
                break
    progress.close()
    return result


def _epochs(rows: Sequence[Row], config: TrainingConfig, window: int) -> list[list[list[list[int]]]]:
    """By epoch its steps, each a window of batches; the last window is filled with empty batches. ValueError when no row counts."""
    # A supervised token counts from the second in a line on: the first one is in hand when drafting starts.
    weights = [row.supervised if any(a and b for a, b in pairwise(row.mask_L[1:])) else 0 for row in rows]
    if not any(weights):
        raise ValueError("no row has two supervised tokens in a line: nothing to train on; check the answers and max_length")
    epochs = []
    for epoch in range(config.epochs):
        batches = plan_batches([len(row.ids_L) for row in rows], weights, per_batch=config.tokens_per_step, seed=config.seed, epoch=epoch)
        windows = [batches[i : i + window] for i in range(0, len(batches), window)]
        epochs.append([w + [[]] * (window - len(w)) for w in windows])
    return epochs


def _update(optimizer: Any, schedule: Any, trainable: Sequence[Tensor], config: TrainingConfig, accelerator: Accelerator) -> bool:
    """Clip, step, clear; False when the gradient was not finite and the update was left out."""
    norm = accelerator.clip_grad_norm_(trainable, config.max_grad_norm)
    finite = bool(torch.isfinite(norm))
    if finite or accelerator.scaler is not None:  # in float16 the scaler leaves the update out itself, and lowers its scale
        optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return finite


def _on_any(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """Each flag, true where it is true on any rank: signals and clocks differ, and all must leave the loop at the same step."""
    return [bool(f) for f in accelerator.reduce(torch.tensor(flags, dtype=torch.float, device=accelerator.device), reduction="sum")]


def _measure_steps(epoch_lengths: Sequence[int], per_epoch: int, total: int) -> set[int]:
    """Steps after which acceptance is measured: `per_epoch` evenly spaced ones in each epoch."""
    starts = [sum(epoch_lengths[:e]) for e in range(len(epoch_lengths))]
    return {s + math.ceil(n * k / per_epoch) for s, n in zip(starts, epoch_lengths, strict=True) for k in range(1, per_epoch + 1)} | {total}


def learning_rate(step: int, total: int, config: TrainingConfig) -> float:
    """Factor of lr at optimizer step `step`: linear warm-up, then a cosine down to `final_lr`."""
    warm = max(1, round(config.warmup * total))
    if step < warm:
        return (step + 1) / warm
    share = min(1.0, (step - warm) / max(1, total - warm))
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * share))


def _work(samples: Samples, rows: Sequence[int], steps: int, device: torch.device) -> _Work:
    """Load a batch; an empty list gives the first row with nothing counted, so that every rank takes part in every update."""
    batch = collate([samples[i] for i in rows or [0]]).to(device)
    counts_KBL = [counted(batch.mask_BL, ahead=2 + k) & bool(rows) for k in range(steps)]
    row_R = (counts_KBL[0] if rows else counted(batch.mask_BL, ahead=2)).flatten().nonzero()[:, 0]
    return _Work(batch=batch, row_R=row_R, counts_KR=[c.flatten()[row_R] for c in counts_KBL])


def _counts(model: Any, head: Any, work: _Work, embed_VW: Tensor, rows_VdW: Tensor, config: TrainingConfig) -> Counts:
    """Loss and metrics of one batch against the target's law after token i + 1 + k, for row i at step k."""
    batch = work.batch
    logits = [logits for _, logits in model(batch, work.row_R, embed_VW, config.ttt_steps)]
    with torch.no_grad():
        at_P = batch.mask_BL.flatten().nonzero()[:, 0]
        p_PV = (batch.last_BLW.flatten(0, 1)[at_P] @ rows_VdW.T - batch.lse_BL.flatten()[at_P, None]).exp()
        number = torch.zeros_like(batch.ids_BL).flatten().index_put((at_P,), torch.arange(len(at_P), device=at_P.device))
        # Beyond the row's end the position is that of a row that does not count at this step.
        position_KR = [(work.row_R + 1 + k).clamp(max=batch.mask_BL.numel() - 1) for k in range(config.ttt_steps)]
    return draft_counts(
        logits, [p_PV[number[x]] for x in position_KR], [batch.best_BL.flatten()[x] for x in position_KR], work.counts_KR,
        head.target_ids,
    )  # fmt: skip


def _weighted(counts: Counts, config: TrainingConfig) -> Tensor:
    weight_K = config.decay ** torch.arange(len(counts.loss_K), device=counts.loss_K.device)
    return (counts.loss_K * weight_K).sum()


def _measure(
    head: Any, model: Any, on_eval: Callable[[Any], float] | None, save: Callable[[Any, str], None], result: TrainResult,
    counts: Counts, step: int, seconds: float, accelerator: Accelerator, progress: Progress, *, last: bool,
) -> None:  # fmt: skip
    """Measure acceptance with the real generator, keep the best head (and the last), go back to training mode."""
    tau = None
    if accelerator.is_main_process:
        if on_eval is not None:
            model.eval()
            tau = float(on_eval(head))
            model.train()
        if tau is None or result.best is None or tau > result.best:
            result.best = tau
            save(head, "best")
        if last:
            save(head, "last")
    accelerator.wait_for_everyone()
    means = counts.means()
    point = {
        "step": step, "minutes": seconds / 60, "loss": means["loss"][0], "alpha": means["alpha"], "hit": means["hit"], "measured_tau": tau,
    }  # fmt: skip
    result.history.append(point)
    progress.measured(point)
