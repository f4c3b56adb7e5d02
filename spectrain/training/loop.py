"""The training loop, read top to bottom: prepare, then for each step: batches -> laws -> loss -> update -> measure -> save.

Legend: B rows or lines, L tokens, R counted rows of a batch, P supervised positions, K test-time steps, W target width, V target
vocabulary, Vd draft vocabulary.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from spectrain.config import TrainingConfig
from spectrain.data.batches import Batch, Samples, leave_out_broken, pack, split
from spectrain.data.order import Lines, Order, Planner, check_lines, row_shares, sizes
from spectrain.data.rows import Row
from spectrain.heads.base import check_vocabulary
from spectrain.heads.losses import Counts, draft_counts
from spectrain.heads.targets import counted
from spectrain.training.checkpoint import GracefulStop, load_checkpoint, save_checkpoint
from spectrain.training.schedule import Pace, learning_rate
from spectrain.training.tracking import Progress


@dataclass
class TrainResult:
    """steps done, the best measured tau (None when nothing was measured), the history of measured points, rows an epoch draws by
    domain, and how often a sample was left out because its states were not finite."""

    steps: int = 0
    best: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    skipped: int = 0


@dataclass(frozen=True)
class _Work:
    """A batch on the device with its counted rows: flat numbers [R], and for each step k which of them count [K][R]; and the ids of
    its samples that were left out because they are not finite."""

    batch: Batch
    row_R: Tensor
    counts_KR: list[Tensor]
    broken: list[str]


def train(
    head: Any, samples: Samples, config: TrainingConfig, *, embed_VW: Tensor, output_VW: Tensor, out: Path, accelerator: Accelerator,
    save: Callable[[Any, str], None], on_eval: Callable[[Any], float] | None = None, identity: str = "",
) -> TrainResult:  # fmt: skip
    """Train `head` on `samples` and keep the checkpoint with the best measured acceptance.

    embed_VW, output_VW: the target's embedding and output rows. save(head, name): write a head directory (`best`, `last`).
    on_eval(head) -> measured tau. identity: hash of all that the run depends on; a checkpoint in `out` with the same identity is
    resumed, another is refused. It goes on in mid-epoch at any number of processes and accumulation: no batch is lost or comes twice,
    and the learning rate keeps its place in the data. SIGINT and SIGTERM save and raise KeyboardInterrupt. Raises ValueError when no
    row counts, or the head has no table of its draft vocabulary.
    """
    check_vocabulary(head)
    rank, world = accelerator.process_index, accelerator.num_processes
    window, device = config.accumulation * world, accelerator.device
    order, shares, pace = _order(samples.rows, config, window)

    trainable = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(pace.place(step), pace.total, config))
    model, optimizer = accelerator.prepare(head, optimizer)
    inner = accelerator.unwrap_model(model)
    scanned_Vd = head.target_ids.tolist()
    saved = load_checkpoint(out, identity, inner, optimizer, schedule)
    result, pace, spent, notes = _resume(saved, order, pace, shares, config)
    notes, step = [*notes, *_vocabulary_note(scanned_Vd, inner.target_ids.tolist())], result.steps
    embed_VW, rows_VdW = embed_VW.to(device), output_VW.to(device)[inner.target_ids.to(device)].float()
    progress, started = Progress(pace.last, step, accelerator, config.tracker, out), time.monotonic()
    progress.note("\n".join(notes))
    saved_at, measured = started, _measured_so_far(saved, config, device)
    model.train()
    with GracefulStop() as stop:
        while step < pace.last:
            batches, due = order.take(window, config.evals_per_epoch)
            batches += [[]] * (window - len(batches))  # every process has as many, so that all take part in every update
            works = [_work(samples, lines, config, device) for lines in batches[rank::world]]
            rows = torch.stack([w.counts_KR[0].sum() for w in works]).sum()
            rows_all, broken = accelerator.reduce(torch.stack([rows, rows.new_tensor(sum(len(w.broken) for w in works))]), reduction="sum")
            parts = []
            for i, work in enumerate(works):
                accelerator.gradient_state._set_sync_gradients(i == len(works) - 1)
                with accelerator.autocast():
                    part = _counts(model, inner, work, embed_VW, rows_VdW, config)
                # Ranks average their gradients, so the sum over all ranks' rows needs the factor `world`.
                accelerator.backward(_weighted(part, config) / rows_all.clamp(min=1) * world)
                parts.append(part.detach())
            updated = _update(optimizer, schedule, trainable, config, accelerator)
            result.steps = step = step + 1
            counts = Counts(*(accelerator.reduce(f, reduction="sum") for f in sum(parts[1:], start=parts[0]).fields))
            if updated:
                measured = measured + counts
            else:
                progress.note(f"step {step}: gradient not finite, update skipped")
            if broken:
                result.skipped += int(broken)
                progress.note(_broken_note(step, works))
            seconds = spent + time.monotonic() - started
            progress.step(step, counts, lr=float(schedule.get_last_lr()[0]))
            asked, over = _on_any(accelerator, stop.asked, config.max_minutes is not None and seconds > 60 * config.max_minutes)
            last = step == pace.last or over
            if due or last:
                _measure(inner, model, on_eval, save, result, measured, step, seconds, accelerator, progress, last=last)
                measured = Counts.zeros(config.ttt_steps, device)
            if asked or last or time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                place = {"step": pace.last if over else step, "seconds": seconds, "order": order.state, "pace": pace.state()}
                found = {"best": result.best, "history": result.history, "skipped": result.skipped, "measured": measured.fields}
                save_checkpoint(out, identity, inner, optimizer, schedule, {**place, **found}, accelerator)
                saved_at = time.monotonic()
            if asked:
                raise KeyboardInterrupt(f"stopped after step {step} of {pace.last}")
            if over:
                break
    progress.close()
    return result


def _order(rows: Sequence[Row], config: TrainingConfig, window: int) -> tuple[Order, dict[str, int], Pace]:
    """The run's batches, rows an epoch draws by domain, and the pace of a new run. ValueError when no row counts or one is longer
    than a line."""
    found = sizes(rows)
    if not found.supervised_N.any():
        raise ValueError("no row has two supervised tokens in a line: nothing to train on; check the answers and max_length")
    check_lines(rows, found, config.packing)
    quota = row_shares(found, config.domain_weights, config.rows_per_epoch)
    planner = Planner(found, per_batch=config.tokens_per_step, seed=config.seed, quota=quota, packing=config.packing)
    order = Order(planner.plan, config.epochs)
    left = order.steps_left(window, config.steps)
    return order, quota, Pace(window, total=left, left=left)


def _rows_note(shares: dict[str, int]) -> str:
    total = sum(shares.values())
    return f"{total} rows an epoch: " + ", ".join(f"{d} {n} ({n / total:.1%})" for d, n in shares.items())


def _resume(
    saved: dict[str, Any] | None, order: Order, fresh: Pace, shares: dict[str, int], config: TrainingConfig
) -> tuple[TrainResult, Pace, float, list[str]]:
    """Where the run stands, its pace, the seconds it has taken, and what there is to say: when the windows have another size than
    before, the steps in all change, and the learning rate keeps its place in the data."""
    notes = [_rows_note(shares)]
    if saved is None:
        return TrainResult(rows=shares), fresh, 0.0, notes
    step, pace, window = saved["step"], Pace(**saved["pace"]), fresh.window
    result = TrainResult(step, saved["best"], saved["history"], shares, saved["skipped"])
    order.go_to(saved["order"])
    if window != pace.window and step < pace.last:
        new = pace.changed(window, step=step, left=order.steps_left(window, config.steps and config.steps - step))
        notes.append(f"step {step}: now {window} batches a step instead of {pace.window}, {new.last} steps in all instead of {pace.last}")
        pace = new
    return result, pace, saved["seconds"], notes


def _measured_so_far(saved: dict[str, Any] | None, config: TrainingConfig, device: torch.device) -> Counts:
    """Counts since the last measured point."""
    return Counts.zeros(config.ttt_steps, device) if saved is None else Counts(*(f.to(device) for f in saved["measured"]))


def _vocabulary_note(scanned: list[int], kept: list[int]) -> list[str]:
    if scanned == kept:
        return []
    differing = len(set(scanned) - set(kept))
    return [f"the draft vocabulary is the checkpoint's; a new scan of the rows would differ in {differing} of {len(kept)} tokens"]


def _broken_note(step: int, works: Sequence[_Work]) -> str:
    ids = sorted(gather_object([i for work in works for i in work.broken]))
    named = ", ".join(ids[:5]) + (", …" if len(ids) > 5 else "")
    return f"step {step}: {len(ids)} samples left out, their states are not finite: {named}"


def _update(optimizer: Any, schedule: Any, trainable: Sequence[Tensor], config: TrainingConfig, accelerator: Accelerator) -> bool:
    """Clip, step, clear; False when the gradient was not finite and the update was left out."""
    norm = accelerator.clip_grad_norm_(trainable, config.max_grad_norm)
    finite = bool(torch.isfinite(norm))
    if finite or accelerator.scaler is not None:  # in float16 the scaler leaves the update out itself, and lowers its scale
        optimizer.step()
    with warnings.catch_warnings():  # of a first update that was left out, torch says that the order of the two calls is wrong
        warnings.simplefilter("ignore", UserWarning)
        schedule.step()
    optimizer.zero_grad()
    return finite


def _on_any(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """Each flag, true where it is true on any rank: signals and clocks differ, and all must leave the loop at the same step."""
    return [bool(f) for f in accelerator.reduce(torch.tensor(flags, dtype=torch.float, device=accelerator.device), reduction="sum")]


def _work(samples: Samples, lines: Lines, config: TrainingConfig, device: torch.device) -> _Work:
    """Load a batch; an empty list gives the first row with nothing counted, so that every rank takes part in every update."""
    wanted = lines or [[0]]
    numbers = [i for line in wanted for i in line]
    batch = samples.batch(numbers)
    if config.packing:
        single = iter(split(batch, [len(samples.rows[i]) for i in numbers]))
        batch = pack([[next(single) for _ in line] for line in wanted])
    batch, places = leave_out_broken(batch.to(device))
    counts_KBL = [counted(batch.mask_BL, ahead=2 + k, doc_BL=batch.doc_BL) & bool(lines) for k in range(config.ttt_steps)]
    row_R = (counts_KBL[0] if lines else counted(batch.mask_BL, ahead=2, doc_BL=batch.doc_BL)).flatten().nonzero()[:, 0]
    broken = [samples.rows[lines[b][doc]].id for b, doc in places] if lines else []
    return _Work(batch=batch, row_R=row_R, counts_KR=[c.flatten()[row_R] for c in counts_KBL], broken=broken)


def _counts(model: Any, head: Any, work: _Work, embed_VW: Tensor, rows_VdW: Tensor, config: TrainingConfig) -> Counts:
    """Loss and metrics of one batch against the target's law after token i + 1 + k, for row i at step k."""
    batch = work.batch
    logits = [logits for _, logits in model(batch, work.row_R, embed_VW, config.ttt_steps)]
    with torch.no_grad(), torch.autocast(batch.ids_BL.device.type, enabled=False):  # 8 bits of a logit would leave p wrong by a tenth
        p_PV = (batch.last_PW @ rows_VdW.T - batch.lse_P[:, None]).exp()
        number = (batch.mask_BL.flatten().cumsum(0) - 1).clamp(min=0)  # of each supervised token among them
        # Where a row does not count at this step, this is some other token's number.
        number_KR = [number[(work.row_R + 1 + k).clamp(max=len(number) - 1)] for k in range(config.ttt_steps)]
    return draft_counts(logits, [p_PV[x] for x in number_KR], [batch.best_P[x] for x in number_KR], work.counts_KR, head.target_ids)


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
