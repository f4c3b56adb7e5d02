"""What to switch on when a plan does not fit, in order: what costs nothing first, what changes the target's own answers last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spectrain.planning.memory import peak
from spectrain.planning.sizes import Case

LEAST_TOKENS = 64  # supervised, of a step: below, an update is noise and a step is overhead
SMALL_VOCABULARY = 32000


@dataclass(frozen=True)
class Way:
    """how: the setting. peak: bytes of the largest stage with this and all ways before it."""

    how: str
    peak: float


Step = tuple[str, Callable[[Case], Case | None]]


def _halves(case: Case) -> Case | None:
    """Smaller batches, more of them a step; a row that is longer than a batch stays."""
    factor = 1
    while case.tokens_per_step // (2 * factor) >= LEAST_TOKENS and factor < 16:
        factor *= 2
    return None if factor == 1 else replace(case, tokens_per_step=case.tokens_per_step // factor, accumulation=case.accumulation * factor)


def _if(condition: bool, case: Case, **changes: object) -> Case | None:
    return replace(case, **changes) if condition else None  # type: ignore[arg-type]


def _quantised(how: str) -> Step:
    """A quantised target is another one than the plain: its answers, rows and heads are its own."""
    told = f"--set target.quantization={how} (another target: answers, states and head are then those of the quantised one)"
    return told, lambda c: _if(c.placement == "rank" and how != c.target.quantization, c, target=replace(c.target, quantization=how))


WAYS: Sequence[Step] = (
    ("--set target.dtype=bfloat16", lambda c: _if(
        c.target.bytes_a_weight == 4, c, target=replace(c.target, bytes_a_weight=2), packed=False)),
    ("--set training.mixed_precision=bf16", lambda c: _if(not c.mixed and c.machine.kind == "cuda", c, mixed=True)),
    ("--set data.online=false (capture first)", lambda c: _if(c.online, c, online=False)),
    ("--set training.checkpointing=true", lambda c: _if(not c.checkpointing, c, checkpointing=True)),
    ("--set training.tokens_per_step=… training.accumulation=… (as much a step, in smaller batches)", _halves),
    ("--set data.capture.batch_tokens=512", lambda c: _if(c.capture_tokens > 512, c, capture_tokens=512)),
    (f"--set head.draft_vocab_size={SMALL_VOCABULARY}", lambda c: _if(
        c.head.draft_vocab > SMALL_VOCABULARY, c, head=c.head.with_vocabulary(SMALL_VOCABULARY))),
    ("--set training.ema=null", lambda c: _if(c.ema, c, ema=False)),
    ("--set target.placement=fsdp2 (tp within a machine and zero3 take as little)", lambda c: _if(
        c.placement == "rank" and c.gpus > 1 and not c.target.quantization, c, placement="fsdp2")),
    ("the head sharded, too: accelerate launch --config_file recipes/accelerate/gpu_8_fsdp2.yaml (or gpu_8_zero3, gpu_2x8_fsdp2)",
     lambda c: _if(c.gpus > 1 and not c.head_sharded, c, head_sharded=True)),
    _quantised("8bit"),
    _quantised("4bit"),
)  # fmt: skip


def ways_to_fit(case: Case) -> tuple[list[Way], Case]:
    """The shortest list, in the order of WAYS, after which the case fits; all that help where none suffices. And the case then."""
    taken: list[Step] = []
    now = case
    for step in WAYS:
        if fits(now):
            break
        changed = step[1](now)
        if changed is not None and peak(changed) < peak(now):
            taken, now = [*taken, step], changed
    if fits(now):
        for step in list(taken):
            without = [other for other in taken if other is not step]
            if fits(_applied(case, without)):
                taken = without
    found, so_far = [], case
    for step in taken:
        so_far = _applied(so_far, [step])
        found.append(Way(step[0], peak(so_far)))
    return found, so_far


def _applied(case: Case, steps: Sequence[Step]) -> Case:
    for _, change in steps:
        case = change(case) or case
    return case


def fits(case: Case) -> bool:
    """Whether the largest stage is within a device's memory."""
    return peak(case) <= case.machine.memory
