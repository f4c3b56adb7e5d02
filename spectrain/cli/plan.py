"""`spectrain plan`: memory, disk, hours and the cost of the served head from a recipe and the target's config, the arithmetic shown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from spectrain.cli import plan_facts as facts
from spectrain.config import Recipe, load_config
from spectrain.heads.losses import piece_size
from spectrain.planning.answers import in_process
from spectrain.planning.hours import FILL, Hours, Served, capture, regeneration, served, training
from spectrain.planning.machines import GiB, Machine, machine
from spectrain.planning.memory import peak, stages
from spectrain.planning.sizes import PADDING, PLACEMENTS, Case
from spectrain.planning.terms import Term, short, total
from spectrain.planning.ways import Way, fits, ways_to_fit
from spectrain.yields import break_even

STORES = (("int8", "int8"), ("int8", "bf16"), ("bf16", "bf16"))


@dataclass(frozen=True)
class Plan:
    """A case, its memory by stage, what makes it fit and the case then, hours of that one, cost of the served head, bytes of the store by
    precision, and what is not counted."""

    recipe: Recipe
    case: Case
    memory: dict[str, list[Term]]
    ways: list[Way]
    after: Case
    hours: list[Hours]
    served: Served
    stores: dict[str, float]
    notes: Sequence[str]


def make_plan(
    recipe: Recipe, device: Machine, *, gpus: int, rows: Path | None = None, tokens: float | None = None, length: int | None = None,
    share: float | None = None, target: str | None = None, placement: str | None = None, head_sharded: bool = False,
    decode_batch: int | None = None,
) -> Plan:  # fmt: skip
    """A plan; no weights are loaded. placement: instead of the recipe's.

    ValueError for a target without a config, or that cannot stand so; a head that it cannot have; or data of unknown size.
    """
    placement = placement or recipe.target.placement
    if placement not in PLACEMENTS:
        raise ValueError(f"placement {placement!r} is unknown; there are {', '.join(PLACEMENTS)}")
    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: a run has one device or more")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--supervised-share lies above 0 and at most at 1, found {share}")
    name = target or recipe.target.name
    config = facts.read_config(name, recipe.target.revision if target is None else None)
    of_target = facts.target_size(config, name, recipe.target.dtype, recipe.target.quantization)
    head = facts.head_size(recipe.head, recipe.training, facts.Skeleton(config.get_text_config(), of_target.vocab, name))
    data, store = facts.data_of(recipe, rows=rows, tokens=tokens, length=length, share=share, longest=of_target.max_length)
    t, kind, logs = recipe.training, torch.device(device.kind), {"reverse_kl", "jsd"}
    case = Case(
        machine=device, gpus=gpus, target=of_target, head=head, data=data, placement=placement, steps=t.ttt_steps,
        tokens_per_step=t.tokens_per_step, accumulation=t.accumulation, epochs=t.epochs, mixed=t.mixed_precision != "no",
        checkpointing=t.checkpointing, ema=t.ema is not None, online=recipe.data.online, logs=bool(logs & t.loss.mix.keys()),
        store=facts.store_bytes(recipe, head), store_name=f"{recipe.data.capture.states} states, {recipe.data.capture.last} last state",
        capture_tokens=recipe.data.capture.batch_tokens, probe=facts.probe_of(recipe, head, store, of_target.max_length),
        packed=device.kind == "cpu" and of_target.bytes_a_weight == 4 and 4 * of_target.weight_bytes < device.memory,
        decode_batch=decode_batch or (recipe.data.answers.batch_size if recipe.data.answers else 64),
        pieces=lambda tokens, vocabulary, steps: piece_size(tokens, draft_vocab=vocabulary, steps=steps, device=kind),
        tp_size=recipe.target.tp_size, head_sharded=head_sharded and gpus > 1, lengths_N2=facts.answer_lengths(store),
    )  # fmt: skip
    _check_placement(case)
    ways, after = ways_to_fit(case)
    by_kinds = {kinds: facts.store_bytes(recipe, head, states=kinds[0], last=kinds[1]) for kinds in STORES}
    stores = {f"{s} states, {last} last state": data.tokens * a + data.supervised * b for (s, last), (a, b) in by_kinds.items()}
    hours = [regeneration(after), in_process(after), *([] if after.online else [capture(after)]), training(after)]
    return Plan(recipe, case, stages(case), ways, after, hours, served(after), stores, facts.unsaid(recipe, config))


def _check_placement(case: Case) -> None:
    """ValueError for a target that cannot stand on the devices as it is asked to."""
    t, split = case.target, case.split
    if t.quantization and case.placement != "rank":
        found = f"target.quantization {t.quantization} and placement {case.placement}: a quantised target stands whole on every device"
        raise ValueError(f"{found}; leave one of them out: --set target.quantization=null, or --placement rank")
    if case.gpus % split or t.kv_heads % split:
        found = f"placement tp over {split} devices; {case.gpus} devices and the {t.kv_heads} key heads of {t.name} are to be multiples"
        raise ValueError(f"{found} of that; choose another number: --set target.tp_size=N")


def plan(
    path: Path, *, device: str, gpus: int, memory: float | None, flops: float | None, bandwidth: float | None, link: float | None,
    rows: Path | None, tokens: float | None, length: int | None, share: float | None, target: str | None, placement: str | None,
    head_sharded: bool, decode_batch: int | None, overrides: Sequence[str], as_json: bool,
) -> None:  # fmt: skip
    """Print a plan; see `spectrain plan --help`."""
    recipe = load_config(Recipe, path, overrides)
    made = make_plan(
        recipe, machine(device, memory=memory, flops=flops, bandwidth=bandwidth, link=link), gpus=gpus, rows=rows, tokens=tokens,
        length=length, share=share, target=target, placement=placement, head_sharded=head_sharded,
        decode_batch=decode_batch,
    )  # fmt: skip
    print(json.dumps(as_values(made)) if as_json else as_text(made))


def as_values(made: Plan) -> dict[str, Any]:
    """The plan as plain values, in bytes, seconds and hours."""
    c, s = made.case, made.served
    return {
        "recipe": made.recipe.name, "device": asdict(c.machine), "gpus": c.gpus, "placement": c.placement, "head_sharded": c.head_sharded,
        "target": asdict(c.target), "data": asdict(c.data),
        "head": {name: value for name, value in asdict(c.head).items() if name != "matrices"},
        "memory": {name: {"bytes": total(terms), "terms": [asdict(t) for t in terms]} for name, terms in made.memory.items()},
        "peak_bytes": peak(c), "fits": fits(c), "ways": [asdict(w) for w in made.ways], "fits_then": fits(made.after),
        "store_bytes": made.stores, "hours": {h.stage: {"hours": h.hours, "device_hours": h.hours * c.gpus, "note": h.note,
                                                        "terms": [asdict(t) for t in h.terms]} for h in made.hours},
        "served": asdict(s), "not_counted": list(made.notes),
    }  # fmt: skip


def as_text(made: Plan) -> str:
    """The plan for people."""
    return "\n".join([*_heading(made), *_memory(made), *_disk(made), *_hours(made), *_served(made), *_notes(made)])


def _heading(made: Plan) -> list[str]:
    c, t, h, d, m = made.case, made.case.target, made.case.head, made.case.data, made.case.machine
    mixture = f", {short(t.active)} of them pass a token" if t.experts < 1 else ""
    mixture += f", those of linear layers in {t.quantization}" if t.quantization else ""
    tied = "which are the output rows, too" if t.tied else "and as many output rows"
    peaks = f"{short(m.flops)} products a second of 16 bits and {short(m.flops32)} of 32, {short(m.bandwidth)}B/s"
    kept = f"{h.states} state(s) of {h.target_width}, draft vocabulary {h.draft_vocab:,}"
    rows = f"{short(t.embedding)} embeddings, {tied}"
    return [
        f"{made.recipe.name}: head {h.kind} for {t.name} on {c.gpus} × {m.name}",
        f"  device  {m.memory / GiB:.0f} GiB, {peaks}",
        f"  target  {short(t.params)} parameters of {t.bytes_a_weight} bytes{mixture} ({rows}), {t.layers} layers",
        f"  head    {short(h.params)} parameters, {short(h.trained)} trained; {kept}",
        f"  data    {short(d.rows)} rows, {short(d.tokens)} tokens, {short(d.supervised)} supervised ({d.source}); "
        f"{c.epochs} epochs of {c.tokens_per_step} supervised tokens a batch",
    ]  # fmt: skip


def _memory(made: Plan) -> list[str]:
    c = made.case
    room = c.machine.memory
    lines = ["", f"memory of a device, {room / GiB:.0f} GiB"]
    shown: set[str] = set()
    for stage, terms in made.memory.items():
        lines.append(f"  {stage:<43}{_bytes(total(terms)):>11}  {'fits' if total(terms) <= room else 'DOES NOT FIT'}")
        lines += [f"    {t.name:<41}{_bytes(t.value):>11}  {'as above' if t.name + t.how in shown else t.how}" for t in terms]
        shown |= {t.name + t.how for t in terms}
    if not fits(c):
        lines.append("  what to switch on, in this order:")
        lines += [f"    {way.how}: {_bytes(way.peak)} then" for way in made.ways]
        if not fits(made.after):
            lines.append(f"    nothing here makes it fit: {_bytes(peak(made.after))} are left; more or larger devices, or a smaller target")
    return lines


def _disk(made: Plan) -> list[str]:
    c, width = made.case, made.case.head.target_width
    lines = ["", "disk of the store of states" + (" (not made: data.online)" if c.online else "")]
    for name, size in made.stores.items():
        lines.append(f"  {name:<43}{_bytes(size):>11}{'  as the recipe has it' if name == c.store_name else ''}")
    state, answer = c.store
    supervised = f"{short(c.data.supervised)} supervised × {answer:,}"
    told = f"{short(c.data.tokens)} tokens × {state:,} bytes ({c.head.states} × {width}) + {supervised}"
    return [*lines, f"  {told}; at most: beginnings that rows share are kept once"]


def _hours(made: Plan) -> list[str]:
    c = made.after
    e = c.machine.efficiency
    lines = ["", f"hours on {c.gpus} device(s)" + ("" if fits(made.case) else ", with what was switched on above")]
    shares = f"capture {e.capture:.0%}, training {e.training:.0%} of the products; decoding {e.decode:.0%} of the bandwidth"
    lines.append(f"  share of the peak reached: {shares}")
    for h in made.hours:
        lines.append(f"  {h.stage:<43}{_time(h.hours * 3600):>11}  {h.hours * c.gpus:,.2f} device hours; {h.note}")
        lines += [f"    {t.name:<41}{_time(t.value):>11}  {t.how}" for t in h.terms]
    return lines


def _served(made: Plan) -> list[str]:
    s, c = made.served, made.after
    depth = made.recipe.evaluation.shapes.within(c.head.max_depth).chain
    lost = s.tokens_without - s.tokens_with
    displaced = f"{short(round(lost))} displaced ({lost / max(1.0, s.tokens_without):.1%})"
    without = "the devices do not hold the target"
    if s.tokens_without:
        without = f"{short(round(s.tokens_without))} without the head: {displaced}"
    pays = f"a chain of {depth} pays above tau {break_even(depth, s.c):.2f}"
    return [
        "", f"the head where it is served, {c.target.bytes_a_weight} bytes a number, on {s.devices} device(s)",
        f"  weights                                    {_bytes(s.weights):>11}  {s.weights / c.target.weight_bytes:.1%} of the target's",
        f"  cache a token                              {_bytes(s.kv_head):>11}  beside {_bytes(s.kv_target)} of the target",
        f"  tokens of cache                            {short(round(s.tokens_with)):>11}  {without}",
        f"  a draft step                               {s.c:>11.3f}  passes of the target at batch 1, by bytes read: {pays}",
    ]  # fmt: skip


def _notes(made: Plan) -> list[str]:
    c = made.case
    lines = ["", "device: " + made.case.machine.source]
    lines.append(f"assumed: lines are padded by {PADDING - 1:.0%}, batches filled to {FILL:.0%}" if c.data.most is None else
                 "batches are those that training makes of these rows")  # fmt: skip
    if c.gpus > 1 or c.placement != "rank":
        told = "sharded targets and heads are tested on two processes of a CPU, not on GPUs"
        head = "sharded" if c.head_sharded else "whole on every device"
        lines.append(f"placement of the target: {c.placement}; the head: {head}; {told}")
    return [*lines, *(f"not counted: {note}" for note in made.notes)]


def _bytes(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} bytes"


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400 * 2), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / (86400 if unit == 'days' else size):,.2f} {unit}"
    return f"{seconds * 1000:.2f} ms"
