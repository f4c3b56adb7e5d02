"""The training loop, read top to bottom: prepare, then for each step: batches -> laws -> loss -> update -> measure -> save.

Legend: B rows or lines, L tokens, R counted rows of a batch, P supervised positions, K test-time steps, W target width, V target
vocabulary, Vd draft vocabulary.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import Tensor, nn

from spectrain.config import TrainingConfig
from spectrain.data.batches import Batch, Samples, leave_out_broken, pack, split
from spectrain.data.order import Lines, Order, Planner, Sizes, check_lines, dealt, row_shares, sizes
from spectrain.heads.base import check_vocabulary
from spectrain.heads.losses import Counts, Labels, LossResult, unrolled_loss
from spectrain.heads.targets import counted
from spectrain.training.checkpoint import Checkpoints, GracefulStop, only_run
from spectrain.training.fit import fit_start
from spectrain.training.joint import Backbone
from spectrain.training.noise import noisy
from spectrain.training.optim import averaged, make_optimizer, set_rates
from spectrain.training.schedule import Pace, learning_rate
from spectrain.training.sharding import Weights
from spectrain.training.tracking import Progress
from spectrain.training.watch import Watch

Measure = Callable[[Any], Mapping[str, Any]]
Save = Callable[[Any, str], None]
MOST_IDLE = 30  # steps in a row without an update; the scale of float16 takes up to twenty to come down


@dataclass
class TrainResult:
    """steps done of `total`, the best measured tau (None when nothing was measured), the history of measured points, rows an epoch draws by
    domain, how often a sample was left out because its states were not finite, and how many of the last steps in a row updated nothing."""

    steps: int = 0
    best: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    idle: int = 0
    total: int = 0


@dataclass(frozen=True)
class Work:
    """A batch on the device with its counted rows: flat numbers [R], which of them count at each step [K, R], and their weights [R]
    (None: all 1). broken: ids of its samples that were left out because they are not finite. seconds: spent waiting for it."""

    batch: Batch
    row_R: Tensor
    counts_KR: Tensor
    weight_R: Tensor | None
    broken: list[str]
    seconds: float

    @property
    def weight(self) -> Tensor:
        """What the loss of this batch is divided by, when it is alone."""
        first_R = self.counts_KR[0]
        return first_R.sum().float() if self.weight_R is None else self.weight_R[first_R].sum()


class Trainee(nn.Module):
    """The head with its loss: what accelerate wraps, so that one forward pass of a process is all that its gradients come from."""

    def __init__(self, head: Any, config: TrainingConfig, *, embed_VW: Tensor, output_VW: Tensor, backbone: Backbone | None = None) -> None:
        super().__init__()
        self.head, self.config, self.target_ids, self.backbone = head, config, head.target_ids, backbone
        self.embed_VW, self.rows_VdW = embed_VW, output_VW[head.target_ids].float()
        for layer in head.layers if config.compile else ():
            layer.compile(dynamic=True)  # what comes after attention; batches differ in their number of rows

    def forward(self, work: Work) -> LossResult:
        """The loss of row i at step k against the target's law after token i + 1 + k, summed over rows and steps."""
        with self._narrow(work.batch.ids_BL.device):
            return self._loss(work)

    def _narrow(self, device: torch.device) -> AbstractContextManager[Any]:
        """Products in half precision, the weights in float32, however they are kept on the processes."""
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.mixed_precision)
        return torch.autocast(device.type, dtype=kind) if kind else nullcontext()

    def _loss(self, work: Work) -> LossResult:
        batch, config, own_BLW = work.batch, self.config, None  # own: last states of the target as it is now, where it is trained
        if self.backbone is not None and self.backbone.joined:
            batch, own_BLW = self.backbone(batch, self.head.layer_ids)
        read = noisy(batch, config.noise) if config.noise and self.training else batch
        steps = self.head.outputs(read, work.row_R, self.embed_VW, config.ttt_steps, checkpointing=config.checkpointing)
        number_L = batch.mask_BL.flatten().cumsum(0) - 1  # of each supervised token among them
        labels = Labels(
            last_PW=batch.last_PW, lse_P=batch.lse_P, best_P=batch.best_P, rows_VdW=self.rows_VdW, number_R=number_L[work.row_R + 1],
            counts_KR=work.counts_KR, weight_R=work.weight_R, target_ids=self.target_ids,
        )  # fmt: skip
        found = unrolled_loss(list(steps), labels, config.loss)
        if self.backbone is None or own_BLW is None:
            return found
        return self.backbone.kept_close(found, own_BLW.flatten(0, 1)[work.row_R + 1], labels)


def train(
    head: Any, samples: Samples, config: TrainingConfig, *, embed_VW: Tensor, output_VW: Tensor, out: Path, accelerator: Accelerator,
    save: Save, on_eval: Measure | None = None, identity: Mapping[str, Any] | None = None, backbone: Backbone | None = None,
    watch: Watch | None = None,
) -> TrainResult:  # fmt: skip
    """Train `head` on `samples` and keep the weights with the best measured acceptance.

    embed_VW, output_VW: the target's embedding and output rows. on_eval(head) -> plain values with `measured_tau`, called by every process
    with the whole head (which need not be `head` itself: its weights may be spread over the processes); save(head, name): write a head
    directory (`best`, `last`), called by the main one. backbone: the target, where it is trained too. watch: one that is open (None: a
    new one). identity: plain values (nested) that the run depends on; a checkpoint in `out` with the same ones is resumed, another is
    refused. It goes on in mid-epoch at any number of processes, however accelerate spreads the weights over them, and any accumulation: no
    batch is lost or comes twice, and the learning rate keeps its place in the data. A finished run, and one whose time is up, says so and
    returns. SIGINT and SIGTERM save and raise KeyboardInterrupt. Seeds this process's random generators. Raises ValueError when no row
    counts, nothing is learnt for MOST_IDLE steps or the whole run, another run is at work in `out`, on_eval gives no number, or the head
    has no table of its draft vocabulary.
    """
    check_vocabulary(head)
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    window = config.accumulation * world  # batches of a step, over all processes
    scanned_Vd = head.target_ids.tolist()  # the draft vocabulary, until a checkpoint brings its own
    row_sizes, order, shares, pace = _order(samples, config, window)
    set_seed(config.seed, device_specific=True)
    optimizer = make_optimizer(head.to(device), config, list(backbone.weights) if backbone else [])
    weights = Weights(head, optimizer, averaged(head, config.ema) if config.ema else None, accelerator)
    checkpoints = Checkpoints(
        out, _parts(**weights.parts, scaler=accelerator.scaler, adapter=backbone and backbone.weights),
        identity=identity or {}, keep_last=config.keep_last, accelerator=accelerator,
    )  # fmt: skip
    saved, notes = checkpoints.load()
    result, pace, spent, more = _resume(saved, order, pace, shares, config)
    notes += [*more, *_vocabulary_note(scanned_Vd, head.target_ids.tolist()), *_ended_note(result.steps, pace, spent, config)]
    started = saved_at = time.monotonic()
    # A run that goes on has its start behind it; the time that a fit takes is the run's.
    notes += fit_start(head, samples, row_sizes, embed_VW.detach().to(device), shares=shares) if saved is None else []
    trainee = Trainee(head, config, embed_VW=embed_VW.detach().to(device), output_VW=output_VW.detach().to(device), backbone=backbone)
    weights.prepare(trainee)
    step, over, measured = result.steps, _time_is_up(spent, config), _measured_so_far(saved, config, device)
    tracked = config if step < pace.last and not over else config.model_copy(update={"tracker": "none"})  # nothing to track
    trainee.train()
    with (
        Watch(accelerator, minutes=config.stall_minutes) if watch is None else nullcontext(watch) as watch, only_run(out, accelerator),
        Progress(pace.last, step, accelerator, tracked, out) as progress, GracefulStop() as stop,
    ):  # fmt: skip
        progress.note("\n".join(notes))
        while step < pace.last and not over:
            watch.at(f"step {step + 1}: loading")
            began = time.monotonic()
            batches, due = order.take(window, config.evals_per_epoch)  # due: a mark was passed at which to measure
            tokens = int(row_sizes.length_N[[i for lines in batches for line in lines for i in line]].sum())
            batches += [[]] * (window - len(batches))  # every process has as many, so that all take part in every update
            works = [_work(samples, lines, config, device) for lines in dealt(batches, row_sizes, world)[rank::world]]
            weight, broken = _over_all(works, accelerator)
            watch.at(f"step {step + 1}: passes")
            factor = learning_rate(pace.place(step), pace.total, config)
            set_rates(weights.optimizer, factor, config, gain=_join(backbone, step, pace, config, progress))
            counts, missed = _learn(weights, works, weight, config, accelerator)
            result.steps = step = step + 1
            if broken:
                result.skipped += broken
                progress.note(_broken_note(step, works))
            if missed:
                progress.note(f"step {step}: {missed}, update skipped")
                result.idle += 1
            else:
                measured, result.idle = measured + counts, 0
            now = time.monotonic()
            progress.step(
                step=step, counts=counts, lr=config.lr * factor, total_tokens=tokens, wait_seconds=sum(w.seconds for w in works),
                step_seconds=now - began,
            )  # fmt: skip
            seconds, late = spent + now - started, now - saved_at > 60 * config.checkpoint_minutes
            asked, over, late = _on_any(accelerator, stop.asked, _time_is_up(seconds, config), late)
            last = over or step == pace.last
            _check_learning(result, missed, config, last=last)
            if last or (due if config.eval_steps is None else step % config.eval_steps == 0):
                watch.at(f"step {step}: measuring", brisk=False)
                _measure(trainee, weights, on_eval, save, result, measured, step, seconds, accelerator, progress, last=last)
                measured = Counts.zeros(config.ttt_steps, device)
            if last or asked or late or (config.checkpoint_steps and step % config.checkpoint_steps == 0):
                watch.at(f"step {step}: saving", brisk=False)
                progress.flush()
                checkpoints.save(_place(result, order, pace, measured, spent + time.monotonic() - started))
                saved_at = time.monotonic()
            if asked:
                raise KeyboardInterrupt(f"stopped after step {step} of {pace.last}")
    return result


def _join(backbone: Backbone | None, step: int, pace: Pace, config: TrainingConfig, progress: Progress) -> float:
    """Let the target take part from its share of the run on; the factor of its rate, which has a warm-up of its own."""
    if backbone is None:
        return 1.0
    if backbone.join(pace.place(step) / pace.total):
        progress.note(f"step {step}: the target is trained from here on, too")
    return backbone.gain(pace.place(step), pace.total, config.warmup)


def _parts(**parts: Any) -> dict[str, Any]:
    """What a checkpoint holds, by name; what the run has none of is left out."""
    return {name: part for name, part in parts.items() if part is not None}


def _over_all(works: Sequence[Work], accelerator: Accelerator) -> tuple[Tensor, int]:
    """Over all processes: the weight that the step's loss is divided by, and how many samples were left out."""
    weight = torch.stack([w.weight for w in works]).sum()
    weight, broken = accelerator.reduce(torch.stack([weight, weight.new_tensor(sum(len(w.broken) for w in works))]), reduction="sum")
    return weight, int(broken)


def _order(samples: Samples, config: TrainingConfig, window: int) -> tuple[Sizes, Order, dict[str, int], Pace]:
    """Sizes of the rows, the run's batches, rows an epoch draws by domain, and the pace of a new run. ValueError when no row counts or
    one is longer than a line."""
    found = sizes(samples.rows)
    if not found.supervised_N.any():
        raise ValueError("no row has two supervised tokens in a line: nothing to train on; check the answers and max_length")
    check_lines(samples.rows, found, config.packing)
    quota = row_shares(found, config.domain_weights, config.rows_per_epoch)
    planner = Planner(found, per_batch=config.tokens_per_step, seed=config.seed, quota=quota, packing=config.packing)
    order = Order(planner.plan, config.epochs)
    left = order.steps_left(window, config.steps)
    return found, order, quota, Pace(window, total=left, left=left)


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
        return TrainResult(rows=shares, total=fresh.last), fresh, 0.0, notes
    step, pace, window = saved["step"], Pace(**saved["pace"]), fresh.window
    result = TrainResult(step, saved["best"], saved["history"], shares, saved["skipped"], saved["idle"])
    order.go_to(saved["order"])
    if window != pace.window and step < pace.last:
        new = pace.changed(window, step=step, left=order.steps_left(window, config.steps and config.steps - step))
        notes.append(f"step {step}: now {window} batches a step instead of {pace.window}, {new.last} steps in all instead of {pace.last}")
        pace = new
    return replace(result, total=pace.last), pace, saved["seconds"], notes


def _place(result: TrainResult, order: Order, pace: Pace, measured: Counts, seconds: float) -> dict[str, Any]:
    """The place in the run, as a checkpoint holds it."""
    so_far = {"best": result.best, "history": result.history, "skipped": result.skipped, "idle": result.idle}
    place = {"step": result.steps, "seconds": seconds, "order": order.state, "pace": pace.state()}
    return {**place, **so_far, "measured": measured.flat().cpu()}


def _time_is_up(seconds: float, config: TrainingConfig) -> bool:
    return config.max_minutes is not None and seconds > 60 * config.max_minutes


def _ended_note(step: int, pace: Pace, spent: float, config: TrainingConfig) -> list[str]:
    if step >= pace.last:
        return [f"the run is finished: all {step} steps are done"]
    if config.max_minutes is not None and _time_is_up(spent, config):
        had = f"the run stands at step {step} of {pace.last} and has had {spent / 60:.1f} of its {config.max_minutes:g} minutes"
        return [f"{had}; to go on: --set training.max_minutes=… (null: no limit)"]
    return []


def _measured_so_far(saved: dict[str, Any] | None, config: TrainingConfig, device: torch.device) -> Counts:
    """Counts since the last measured point."""
    return Counts.zeros(config.ttt_steps, device) if saved is None else Counts.from_flat(saved["measured"].to(device), config.ttt_steps)


def _vocabulary_note(scanned: list[int], kept: list[int]) -> list[str]:
    if scanned == kept:
        return []
    differing = len(set(scanned) - set(kept))
    return [f"the draft vocabulary is the checkpoint's; a new scan of the rows would differ in {differing} of {len(kept)} tokens"]


def _broken_note(step: int, works: Sequence[Work]) -> str:
    ids = sorted(gather_object([i for work in works for i in work.broken]))
    named = ", ".join(ids[:5]) + (", …" if len(ids) > 5 else "")
    return f"step {step}: {len(ids)} samples left out, their states are not finite: {named}"


def _learn(
    weights: Weights, works: Sequence[Work], weight: Tensor, config: TrainingConfig, accelerator: Accelerator
) -> tuple[Counts, str]:  # fmt: skip
    """A step: gradients of the loss summed over its batches on all processes, divided by `weight`; clip, update, average. Returns the
    step's counts, over all processes, and why the update was left out ("": it was not)."""
    counts = Counts.zeros(config.ttt_steps, accelerator.device)
    if not weight > 0:
        return counts, "no row counts"
    for i, work in enumerate(works):
        with weights.exchange(now=i == len(works) - 1):
            loss = weights.model(work)
            # Processes average their gradients, so the sum over all of them needs the factor.
            accelerator.backward(loss.total / weight * accelerator.num_processes)
        counts = counts + loss.counts.detach()
    counts = Counts.from_flat(accelerator.reduce(counts.flat(), reduction="sum"), config.ttt_steps)
    missed = _update(weights, config, accelerator)
    weights.optimizer.zero_grad()
    return counts, missed


def _update(weights: Weights, config: TrainingConfig, accelerator: Accelerator) -> str:
    """Clip, step, average; why the update was left out."""
    finite = math.isfinite(weights.clip(config.max_grad_norm))
    if finite or accelerator.scaler is not None:  # in float16 the scaler leaves the update out itself, and lowers its scale
        weights.optimizer.step()
    if finite and weights.average is not None:
        weights.average.update_parameters(weights.head)
    return "" if finite else "gradient not finite"


def _check_learning(result: TrainResult, missed: str, config: TrainingConfig, *, last: bool) -> None:
    """ValueError when no step of the run, or none for long, has updated the weights."""
    if result.idle >= MOST_IDLE or (last and result.idle == result.steps):
        ways = {"no row counts": "capture the states anew", "gradient not finite": f"lower training.lr ({config.lr:g}) and start anew"}
        raise ValueError(f"nothing learnt in the last {result.idle} steps, up to step {result.steps}: {missed}; {ways[missed]}")


def _on_any(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """Each flag, true where it is true on any rank: signals and clocks differ, and all must leave the loop at the same step."""
    return [bool(f) for f in accelerator.reduce(torch.tensor(flags, dtype=torch.float, device=accelerator.device), reduction="sum")]


def _work(samples: Samples, lines: Lines, config: TrainingConfig, device: torch.device) -> Work:
    """Load a batch; an empty list gives the first row with nothing counted, so that every rank takes part in every update."""
    began = time.monotonic()
    wanted = lines or [[0]]
    numbers = [i for line in wanted for i in line]
    batch = samples.batch(numbers)
    if config.packing:
        single = iter(split(batch, [len(samples.rows[i]) for i in numbers]))
        batch = pack([[next(single) for _ in line] for line in wanted])
    batch, places = leave_out_broken(batch.to(device))
    waited = time.monotonic() - began
    counts_KBL = torch.stack([counted(batch.mask_BL, ahead=2 + k, doc_BL=batch.doc_BL) for k in range(config.ttt_steps)])
    row_R = counts_KBL[0].flatten().nonzero()[:, 0]
    return Work(
        batch=batch, row_R=row_R, counts_KR=counts_KBL.flatten(1)[:, row_R] & bool(lines),
        weight_R=_row_weights(batch, row_R) if config.loss.weighting == "rows" else None,
        broken=[samples.rows[lines[b][doc]].id for b, doc in places] if lines else [], seconds=waited,
    )  # fmt: skip


def _row_weights(batch: Batch, row_R: Tensor) -> Tensor:
    """Weights [R] that sum to 1 over the counted rows of every sample, however long it is."""
    L = batch.ids_BL.shape[1]
    doc_R = torch.zeros_like(row_R) if batch.doc_BL is None else batch.doc_BL.flatten()[row_R]
    _, sample_R, size_S = (row_R // L * L + doc_R).unique(return_inverse=True, return_counts=True)
    return 1.0 / size_S[sample_R].float()


def _measure(
    trainee: Trainee, weights: Weights, on_eval: Measure | None, save: Save, result: TrainResult, counts: Counts, step: int,
    seconds: float, accelerator: Accelerator, progress: Progress, *, last: bool,
) -> None:  # fmt: skip
    """Measure acceptance with the real generator, on every process with the whole head, of the averaged weights where there are such, and
    keep the best head (and the last); then go back to training mode."""
    chosen = weights.whole()
    trainee.eval()
    chosen.eval()
    try:
        found = {"measured_tau": None} if on_eval is None else _checked(on_eval(chosen))
        (found,) = broadcast_object_list([found])  # all go on from one and the same figure
        tau = found["measured_tau"]
        best = result.best is None or (tau is not None and tau > result.best)
        result.best = tau if best else result.best
        for name in [*(["best"] if best else []), *(["last"] if last else [])] if accelerator.is_main_process else []:
            save(chosen, name)
    finally:
        trainee.train()
    accelerator.wait_for_everyone()
    means = counts.means()
    point = {"step": step, "minutes": seconds / 60, "loss": means["loss"][0], "alpha": means["alpha"], "hit": means["hit"], **found}
    result.history.append(point)
    progress.measured(point)


def _checked(told: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, as it will be read back: plain values only. ValueError without a finite `measured_tau` (None: not measured)."""
    found: dict[str, Any] = json.loads(json.dumps(dict(told)))
    tau = found.get("measured_tau", math.nan)
    if tau is not None and not (isinstance(tau, int | float) and math.isfinite(tau)):
        raise ValueError(f"on_eval gave measured_tau {told.get('measured_tau', 'not at all')}; needed: a finite number, or None")
    return found
