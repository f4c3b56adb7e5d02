"""The evaluation stage: arms -> records -> figures -> report."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spectrain.cli.assemble import Run, report_of, time_spent
from spectrain.cli.drafters import free_drafters, named_head
from spectrain.cli.trees import given_tree
from spectrain.config import EvaluationConfig
from spectrain.decoding.shapes import Chain
from spectrain.evaluation import asides, estimate, figures
from spectrain.evaluation.anatomy import Anatomy
from spectrain.evaluation.arms import AUTO, Named, Written, arms_of, chain_arm, keys_of
from spectrain.evaluation.gates import Gate, check, check_names
from spectrain.evaluation.measure import BASELINE, Arm, Draws, measure_speed, measure_tau
from spectrain.evaluation.paired import shared
from spectrain.evaluation.processes import ALONE, Processes
from spectrain.evaluation.records import Records
from spectrain.evaluation.speed import advise_depth
from spectrain.evaluation.suites import speed_subset, suite_of, suite_prompts
from spectrain.target.model import Target
from spectrain.target.passes import for_all
from spectrain.yields import Costs


class Inexact(ValueError):
    """Some answer differs from plain decoding by more than rounding."""


def evaluate(
    target: Target, head: Any, config: EvaluationConfig, out: Path, root: Path, *, extra: Mapping[str, Any], say: Any,
    processes: Processes = ALONE, drafters: Sequence[Named] | None = None, gates: Sequence[Gate] = (),
    other: tuple[Path, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure plain decoding and drafters in their shapes; returns the report (see evaluation/render.py).

    drafters: None are n-gram lookup and the head (head: None leaves it out). At temperature 0 every answer is compared with plain decoding
    (`check_exact`). Of several processes each answers its share of the prompts, the main one times, and all return the report. gates:
    conditions whose outcome goes into the report. other: file and content of an earlier report that must have an arm of this one.
    """
    begin = time.perf_counter()
    if drafters is None:
        drafters = [*free_drafters(), *([] if head is None else [named_head(head)])]
    run, arms = _open(target, drafters, config, out, root, say, processes)
    described = [arm.describe() for arm in arms]
    check_names(gates, arms=described, domains=list(run.prompts))
    if other is not None:
        shared({"arms": described}, other[1], file=str(other[0]))
    with run.spent("estimate"):
        _tell_hours(run, arms)
    for arm in arms:
        _tau_of(run, arm)
    with run.spent("costs"):
        costs = _costs(run, arms)
    arms, notes = _with_best_depths(run, arms, costs)
    timed = _time(run, arms)
    with run.spent("alpha, entropy, ranks"):
        looked = {plain.temperature: _looked_at(run, plain, arms) for plain in arms if plain.shape is None} if config.anatomy else {}
    report = report_of(run, arms, timed, costs, looked, _settings(run, timed), extra, notes)
    report["time"] = time_spent(run, time.perf_counter() - begin)
    if gates:
        report["gates"] = check(gates, report)
    return report


def _open(
    target: Target, drafters: Sequence[Named], config: EvaluationConfig, out: Path, root: Path, say: Any, processes: Processes
) -> tuple[Run, list[Arm]]:
    """Prompts, arms and what was measured of them before."""
    suite = suite_of(config, root)
    head = next((d.head for d in drafters if d.head is not None), None)
    tree = given_tree(config, root, head)
    arms = arms_of(drafters, config, None if tree is None else Written(Path(tree.path).name, tree.shape))
    prompts = suite_prompts(suite, target, root)
    chosen = speed_subset(
        prompts, target, number=config.speed_prompts, max_tokens=config.speed_prompt_tokens, template=suite.template_kwargs
    )
    texts = [(p.id, p.domain, p.turns) for p in figures.every(prompts)]
    placed = [] if processes.splits else [_placement(target, processes)]
    placed += [] if target.device.type == "cpu" else [target.device.type]
    base = [suite.model_dump(mode="json"), texts, target.fingerprints, str(target.model.dtype), config.seed, *placed]
    passes = (len(arms) + 1) * len(prompts) * config.speed_prompts * config.speed_max_new_tokens
    keys: dict[tuple[str, str], str] = {}
    run = Run(
        target, drafters, config, suite, tree, root, out, prompts, chosen, base, keys, Records(out / "records.jsonl", keys, processes),
        for_all(target, config.compile, passes=passes), processes, say,
    )  # fmt: skip
    _give_keys(run, arms)
    return run, arms


def _give_keys(run: Run, arms: Sequence[Arm]) -> None:
    """The keys of the arms' records; the baseline's is that of the first plain decoding that is timed."""
    c = run.config
    speed = {"new_tokens": c.speed_max_new_tokens, "compile": c.compile}
    run.keys.update(keys_of(arms, run.drafters, [*run.base, c.batch_size], speed))
    plain = next(arm.name for arm in arms if arm.temperature == c.timed_temperatures[0])
    run.keys[BASELINE, "speed"] = run.keys[plain, "speed"]


def _tell_hours(run: Run, arms: Sequence[Arm]) -> None:
    """Say before the work begins how long it takes at most."""
    c, template = run.config, run.suite.template_kwargs
    timed = [*(arm.name for arm in arms if arm.temperature in c.timed_temperatures), BASELINE]
    runs = sum(not run.records.has(n, "speed", p.id, 0, i) for n in timed for p in run.timed for i in range(c.speed_repeats))

    def seconds() -> tuple[float, float]:
        tau = estimate.seconds_of_tau(
            run.target, arms, run.every, run.records, max_new_tokens=run.suite.max_new_tokens, batch_size=c.batch_size, template=template
        )
        return tau, estimate.seconds_of_speed(run.target, runs, run.timed, max_new_tokens=c.speed_max_new_tokens, template=template)

    tau, speed = run.processes.alike(seconds)
    share = run.processes.number if run.processes.splits else 1
    if tau + speed:
        run.say(
            f"{len(arms)} arms on {len(run.every)} prompts: at most about {(tau / share + speed) / 3600:.2f} hours (tau "
            f"{tau / share / 60:.0f} minutes, speed {speed / 60:.0f}); what is finished is kept, and the same command goes on from there"
        )


def _tau_of(run: Run, arm: Arm) -> None:
    measure_tau(
        run.target, arm, run.every, run.records, max_new_tokens=run.suite.max_new_tokens, batch_size=run.config.batch_size,
        draws=Draws(arm.temperature, run.config.seed), template=run.suite.template_kwargs,
    )  # fmt: skip


def _costs(run: Run, arms: Sequence[Arm]) -> dict[str, Costs]:
    """Of the arms with drafts of the first temperature that is timed, by name; measured once, so that a resumed run advises the same."""
    first = [arm for arm in arms if arm.shape and arm.temperature == run.config.timed_temperatures[0]]
    if not first:
        return {}
    records = run.records.of(arms[0].name, "tau", run.timed)
    prompt = sum(r.prompt_tokens for r in records if not r.turn) / len(run.timed)
    context = 16 * max(1, round((prompt + run.config.speed_max_new_tokens / 2) / 16))
    of = [(arm.name, run.keys[arm.name, "tau"]) for arm in first]
    key = run.key("costs", of, context, run.config.compile)
    return asides.costs_of(
        run.target, first, context=context, compile=run.compile, path=run.out / "costs.json", key=key, processes=run.processes
    )


def _with_best_depths(run: Run, arms: list[Arm], costs: dict[str, Costs]) -> tuple[list[Arm], list[str]]:
    """With the shapes of the settings: add the depth of each head's chain that measured survival and costs predict to be fastest at
    batch 1, where it is another one."""
    notes: list[str] = []
    chains = [arm for arm in arms if arm.name in costs and isinstance(arm.shape, Chain) and _is_head(run, arm)]
    for chain in chains if AUTO in run.config.forms else []:
        assert chain.shape is not None
        found = costs[chain.name]
        survival = figures.tau_tables([chain], run.records, {"": run.every})[chain.name][""]["acceptance"]
        depth, gain = advise_depth(survival, found)
        arm = chain_arm(chain, depth or 1)
        if arm.name not in {other.name for other in arms}:
            last = max(i for i, other in enumerate(arms) if other.temperature == chain.temperature)
            arms = [*arms[: last + 1], arm, *arms[last + 1 :]]
            costs[arm.name] = found
            _give_keys(run, arms)
            _tau_of(run, arm)
        known = f"measured costs v(1..{len(found.v)}) = {', '.join(f'{v:.2f}' for v in found.v)}, c = {found.c:.2f}"
        whose = "" if len(chains) == 1 else f" of {chain.by}"
        if depth == 0:
            notes.append(f"No chain depth{whose} is predicted to gain over all domains ({known}).")
        else:
            notes.append(
                f"Predicted best chain{whose} at batch 1 over all domains: depth {depth}, {gain:.2f} times plain decoding ({known})."
            )
    return arms, notes


def _is_head(run: Run, arm: Arm) -> bool:
    return any(d.name == arm.by and d.head is not None for d in run.drafters)


def _time(run: Run, arms: Sequence[Arm]) -> list[Arm]:
    """Time the arms of each temperature in turns; returns those that were timed."""
    c, found = run.config, []
    for temperature in c.timed_temperatures:
        own = [arm for arm in arms if arm.temperature == temperature]
        measure_speed(
            run.target, own, run.timed, run.records, max_new_tokens=c.speed_max_new_tokens, baseline=temperature == c.timed_temperatures[0],
            compile=run.compile, draws=Draws(temperature, c.seed), repeats=c.speed_repeats, template=run.suite.template_kwargs,
        )  # fmt: skip
        found += own
    return found


def _looked_at(run: Run, plain: Arm, arms: Sequence[Arm]) -> list[Anatomy]:
    """Plain decoding's answers of a temperature, looked at by target and drafters."""
    depth = max((arm.shape.depth for arm in arms if arm.shape), default=1)
    answers = asides.answers_of(run.target, plain, run.records, run.every, run.suite.template_kwargs)
    key = run.key("anatomy", run.keys[plain.name, "tau"], [(d.name, d.identity) for d in run.drafters], depth)
    return asides.anatomies(
        run.target, answers, run.drafters, temperature=plain.temperature, depth=depth, path=run.out / "anatomy.jsonl", key=key,
        processes=run.processes,
    )  # fmt: skip


def _settings(run: Run, timed: Sequence[Arm]) -> dict[str, Any]:
    target, c = run.target, run.config
    passes = sorted({r.passes for arm in timed for r in run.records.of(arm.name, "speed", run.timed)})
    return {
        "max_new_tokens": run.suite.max_new_tokens, "temperature": c.temperatures[0], "temperatures": list(c.temperatures),
        "speed_temperatures": list(c.timed_temperatures), "dtype": str(target.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(), "machine": machine(target), "compile": run.compile, "batch_size": c.batch_size,
        "speed_max_new_tokens": c.speed_max_new_tokens, "speed_repeats": c.speed_repeats, "seed": c.seed,
        "placement": _placement(target, run.processes), "passes": ", ".join(passes),
    }  # fmt: skip


def _placement(target: Target, processes: Processes) -> str:
    """How the target lay while it was timed."""
    return target.placement.kind if processes.splits else f"{target.placement.kind} over {processes.number} processes"


def check_out(out: Path, made_of: Mapping[str, str]) -> None:
    """Make the folder; ValueError where it holds the report of another target or suite, or of a head or temperature that would be lost."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("made_of", made_of) if path.is_file() else made_of
    except json.JSONDecodeError:  # a damaged one is made anew
        return
    lost = [name for name in made_of if not _parts(found.get(name)) <= _parts(made_of[name])]
    if differs := [f"{name} {found.get(name)}, now {made_of[name]}" for name in lost]:
        raise ValueError(f"{path} is of another evaluation ({'; '.join(differs)}); choose another folder for --out, or delete it")


def _parts(value: str | None) -> set[str]:
    return set((value or "").split(", ")) - {"none", ""}


def check_exact(report: Mapping[str, Any]) -> None:
    """Raise `Inexact` naming arms and prompts when an answer was not the target's own."""
    failed = {arm: cell["failed_ids"] for arm, cell in report["exactness"].items() if cell["failed"]}
    if failed:
        raise Inexact(f"answers differ from plain decoding by more than rounding: {json.dumps(failed)}; this is a fault, please report it")


def machine(target: Target) -> str:
    """The machine in a few words."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
