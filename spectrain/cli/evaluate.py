"""The evaluation stage: arms -> records -> tables -> report, advice in words."""

import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from spectrain.cli.joint import tell_change
from spectrain.cli.trees import COST_CONTEXT, GivenTree, given_tree, suite_hash, tree_notes, weights_of
from spectrain.config import EvaluationConfig, Suite, load_config
from spectrain.data.formats import Prompt
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram
from spectrain.evaluation.measure import Arm, Draws, Records, compare, measure_speed, measure_tau, speed_subset, suite_prompts
from spectrain.evaluation.metrics import bootstrap, ratio_of_ratios, speed_cell, tau_table
from spectrain.evaluation.processes import ALONE, Processes
from spectrain.evaluation.speed import advise_depth, measure_costs
from spectrain.target.model import Target
from spectrain.target.passes import for_all
from spectrain.yields import Costs

PLAIN = "plain"


class Inexact(ValueError):
    """Some answer differs from plain decoding by more than rounding."""


def evaluate(
    target: Target, head: Any, config: EvaluationConfig, out: Path, root: Path, *, extra: Mapping[str, Any], say: Any,
    processes: Processes = ALONE,
) -> dict[str, Any]:  # fmt: skip
    """Measure plain decoding, n-gram lookup and the head as chains and as trees; returns the report (see evaluation/render.py).

    head: None leaves the head's arms out. At temperature 0 every answer is compared with plain decoding (`check_exact`). Of several
    processes each answers its share of the prompts, the main one times, and all return the report.
    """
    suite = load_config(Suite, root / config.suite)
    tree = given_tree(config, root, head)
    prompts = suite_prompts(suite, target, root)
    everything = [p for rows in prompts.values() for p in rows]
    key = _key(target, head, config, suite, everything, tree, processes)
    records, draws = Records(out / "records.jsonl", key, processes), Draws(config.temperature, config.seed)
    arms, costs, notes = _arms(head, config, tree), None, []
    nodes = 1 + max(arm.shape.budget for arm in arms if arm.shape)
    total = (len(arms) + 1) * len(prompts) * config.speed_prompts * config.speed_max_new_tokens
    compile = for_all(target, config.compile, nodes=nodes, passes=total)

    def tau_of(arm: Arm) -> None:
        measure_tau(target, arm, everything, records, max_new_tokens=suite.max_new_tokens, batch_size=config.batch_size, draws=draws)

    for arm in arms:
        tau_of(arm)
    if head is not None:
        costs = _costs(target, head, config, out / "costs.json", key, compile, processes)
        chain = next(arm for arm in arms if isinstance(arm.shape, Chain) and arm.label != "n-gram")
        arms, note = _with_best_depth(arms, chain, records, everything, costs)
        notes.append(note)
        tau_of(arms[-1])
    chosen = speed_subset(prompts, target, number=config.speed_prompts, max_tokens=config.speed_prompt_tokens)
    timed = [p for rows in chosen.values() for p in rows]
    measure_speed(target, arms, timed, records, max_new_tokens=config.speed_max_new_tokens, baseline=True, compile=compile, draws=draws)
    exactness = {}
    if config.temperature == 0:
        say("comparing every answer with plain decoding")
        exactness = processes.alike(lambda: _exactness(target, arms, records, everything, timed))
    if tree is not None:
        notes += tree_notes(tree, target, head, everything, temperature=config.temperature)
    report = {
        "title": extra.get("title", f"Speculative decoding of {target.name}"),
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "target": target.name,
        "suite": {"name": f"{suite.name} v{suite.version}", "sha256": suite_hash(suite)}, "made_of": told_of(target, head, config, suite),
        "settings": _settings(target, suite, config, compile, processes),
        "versions": extra["versions"], "arms": [arm.describe(config.temperature) for arm in arms], "domains": list(prompts),
        "tau": {arm.name: _tau(arm, records, prompts) for arm in arms}, "speed": _speed(arms, records, chosen, timed),
        "exactness": exactness, "baseline": _baseline(records, timed),
        "notes": [*notes, *_remarks(chosen, config)], "tree": tree and {"file": tree.path, "paths": tree.shape.paths},
        **{key: extra[key] for key in ("coverage", "training") if key in extra},
    }  # fmt: skip
    if costs is not None:
        report["costs"] = {"seconds": costs.seconds, "v": list(costs.v), "c": costs.c}
    report["advice"] = advice(report)
    tell_change(report, head)
    return report


def _settings(
    target: Target, suite: Suite, config: EvaluationConfig, compile: bool | Literal["auto"], processes: Processes
) -> dict[str, Any]:
    return {
        "max_new_tokens": suite.max_new_tokens, "temperature": config.temperature,
        "dtype": str(target.model.dtype).removeprefix("torch."), "threads": torch.get_num_threads(), "machine": machine(target),
        "compile": compile, "speed_max_new_tokens": config.speed_max_new_tokens, "placement": _placement(target, processes),
    }  # fmt: skip


def _placement(target: Target, processes: Processes) -> str:
    """How the target lay while it was timed."""
    return "rank" if processes.splits else f"{target.placement.kind} over {processes.number} processes"


def told_of(target: Target, head: Any, config: EvaluationConfig, suite: Suite) -> dict[str, str]:
    """What a folder's report is of, as far as another one of it would not be its successor."""
    return {
        "target": target.fingerprints["layers_sha256"][:12], "head": "none" if head is None else weights_of(head)[:12],
        "suite": f"{suite.name} v{suite.version} ({suite_hash(suite)[:12]})", "temperature": f"{config.temperature:g}",
    }  # fmt: skip


def check_out(out: Path, made_of: Mapping[str, str]) -> None:
    """Make the folder; ValueError where it holds the report of another target, head, suite or temperature, which would be lost."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("made_of", made_of) if path.is_file() else made_of
    except json.JSONDecodeError:  # a damaged one is made anew
        return
    if differs := [f"{name} {found.get(name)}, now {made_of[name]}" for name in made_of if found.get(name) != made_of[name]]:
        raise ValueError(f"{path} is of another evaluation ({'; '.join(differs)}); choose another folder for --out, or delete it")


def check_exact(report: Mapping[str, Any]) -> None:
    """Raise `Inexact` naming arms and prompts when an answer was not the target's own."""
    failed = {arm: cell["failed_ids"] for arm, cell in report["exactness"].items() if cell["failed"]}
    if failed:
        raise Inexact(f"answers differ from plain decoding by more than rounding: {json.dumps(failed)}; this is a fault, please report it")


def _arms(head: Any, config: EvaluationConfig, given: GivenTree | None) -> list[Arm]:
    s = config.shapes.within(None if head is None else head.max_depth)
    arms = [Arm(PLAIN), Arm("n-gram", NGram(), Chain(s.ngram), "n-gram")]
    if head is not None:
        drafter, label = HeadDrafter(head), type(head).__name__
        tree = Tree.dynamic(top_k=s.tree_top_k, depth=s.tree_depth, budget=s.tree_budget)
        arms += [Arm("head chain", drafter, Chain(s.chain), label), Arm("head tree", drafter, tree, label)]
        if given is not None:
            arms.append(Arm("head static tree", drafter, given.shape, label))
    return arms


def _with_best_depth(arms: list[Arm], chain: Arm, records: Records, prompts: Sequence[Prompt], costs: Costs) -> tuple[list[Arm], str]:
    """Add the chain depth that measured survival and measured costs predict to be fastest at batch 1, if it is another one."""
    assert chain.shape is not None
    survival = tau_table({"": records.of(chain.name, "tau", prompts)}, chain.shape.depth)[""]["acceptance"]
    depth, gain = advise_depth(survival, costs)
    arm = Arm(f"head chain {depth or 1}", chain.drafter, Chain(depth or 1), chain.label)
    arms = arms if arm.shape == chain.shape else [*arms, arm]
    known = f"measured costs v(1..{len(costs.v)}) = {', '.join(f'{v:.2f}' for v in costs.v)}, c = {costs.c:.2f}"
    if depth == 0:
        return arms, f"No chain depth is predicted to gain over all domains ({known})."
    return arms, f"Predicted best chain at batch 1 over all domains: depth {depth}, {gain:.2f} times plain decoding ({known})."


def _costs(
    target: Target, head: Any, config: EvaluationConfig, path: Path, key: str, compile: bool | Literal["auto"], processes: Processes
) -> Costs:
    """Costs measured once for each key and kept, so that a resumed run advises the same depth."""
    found = processes.on_main(lambda: json.loads(path.read_text()) if path.exists() else {})
    if known := found.get(key):
        return Costs(seconds=known["seconds"], v=tuple(known["v"]), c=known["c"])
    costs = processes.alike(
        lambda: measure_costs(target, HeadDrafter(head), context=COST_CONTEXT, sizes=config.shapes.chain + 1, compile=compile)
    )
    if processes.leads:
        part = path.with_suffix(".part")
        part.write_text(json.dumps({**found, key: {"seconds": costs.seconds, "v": costs.v, "c": costs.c}}))
        part.replace(path)
    return costs


def _key(
    target: Target, head: Any, config: EvaluationConfig, suite: Suite, prompts: Sequence[Prompt], tree: GivenTree | None = None,
    processes: Processes = ALONE,
) -> str:  # fmt: skip
    """Hash of all that the figures depend on; of a tree's file its paths count, not its name."""
    texts = [(p.id, p.domain, p.turns) for p in prompts]
    settings = [config.model_dump(mode="json", exclude={"tree", "tree_nodes"}), suite.model_dump(mode="json")]
    weights, paths = "" if head is None else weights_of(head), tree.shape.paths if tree else ()
    placed = [] if processes.splits else [_placement(target, processes)]
    parts = [*settings, texts, target.fingerprints, str(target.model.dtype), weights, paths, *placed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _tau(arm: Arm, records: Records, prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, Any]:
    depth = arm.shape.depth if arm.shape else 0
    return tau_table({domain: records.of(arm.name, "tau", rows) for domain, rows in prompts.items()}, depth)


def _speed(
    arms: Sequence[Arm], records: Records, chosen: Mapping[str, Sequence[Prompt]], timed: Sequence[Prompt]
) -> dict[str, dict[str, Any]]:
    groups = {**chosen, "all": timed}
    return {
        arm.name: {d: speed_cell(records.of(arm.name, "speed", rows), records.of(PLAIN, "speed", rows)) for d, rows in groups.items()}
        for arm in arms
    }


def _exactness(
    target: Target, arms: Sequence[Arm], records: Records, everything: Sequence[Prompt], timed: Sequence[Prompt]
) -> dict[str, Any]:
    found = {}
    for arm in arms[1:]:
        parts = [
            compare(target, records.of(arm.name, mode, rows), records.of(PLAIN, mode, rows), rows)
            for mode, rows in (("tau", everything), ("speed", timed))
        ]
        failed = [i for part in parts for i in part.failed]
        sums = {name: sum(getattr(part, name) for part in parts) for name in ("prompts", "equal", "ties")}
        found[arm.name] = {**sums, "failed": len(failed), "failed_ids": failed}
    return found


def _baseline(records: Records, timed: Sequence[Prompt]) -> dict[str, Any]:
    """Plain decoding here against transformers' generate(), whole calls, prompts paired."""
    ours, theirs = (records.of(name, "speed", timed) for name in (PLAIN, "transformers"))
    quads = [(len(a.tokens), a.seconds, len(b.tokens), b.seconds) for a, b in zip(ours, theirs, strict=True)]
    interval = bootstrap(quads, ratio_of_ratios)
    rates = [sum(len(r.tokens) for r in rows) / sum(r.seconds for r in rows) for rows in (theirs, ours)]
    same = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
    return {
        "name": "transformers generate()", "tokens_per_s": rates[0], "plain_tokens_per_s": rates[1], "ratio": interval.value,
        "lo": interval.lo, "hi": interval.hi, "prompts": len(timed), "equal": same,
    }  # fmt: skip


def _remarks(chosen: Mapping[str, Sequence[Prompt]], config: EvaluationConfig) -> list[str]:
    few = min(map(len, chosen.values()))
    drawn = [
        f"At temperature {config.temperature:g} every answer is a draw, and one drafter's draws are not another's: answers are not "
        "compared with plain decoding, and lengths differ by chance. What holds instead is a law: every rule used here keeps the target's "
        "own, which the project's tests show by exact enumeration for each rule and by the generator's frequencies on small models.",
    ]
    return [
        *(drawn if config.temperature else []),
        f"Speed is decoding speed at batch 1 on {few} or more prompts a domain, {config.speed_max_new_tokens} new tokens, without the "
        "prompt's pass; tau is measured in batches on more prompts. With so few timed prompts an interval is little more than their range, "
        "and a single one has none: its speed-up decides nothing.",
        "A head's tau depends on how long it was trained and on what; this one is a demonstration.",
    ]


def advice(report: Mapping[str, Any]) -> list[str]:
    """Which drafter to use where, and where none pays: by measured speed-up whose interval lies above 1; one prompt has no interval."""
    best: dict[str, list[str]] = {}
    for domain in report["domains"]:
        cells = {arm["name"]: report["speed"][arm["name"]][domain] for arm in report["arms"][1:]}
        gains = {name: cell for name, cell in cells.items() if (cell["lo"] or 0) > 1}
        name = max(gains, key=lambda n: gains[n]["speedup"], default=PLAIN)
        best.setdefault(name, []).append(domain + (f" ({gains[name]['speedup']:.2f}×)" if name in gains else ""))
    drafted = [arm["name"] for arm in report["arms"][1:]]
    untold = [d for d in report["domains"] if all(report["speed"][name][d]["lo"] is None for name in drafted)]
    nowhere = [d for d in best.pop(PLAIN, []) if d not in untold]
    parts = [f"{name} for {', '.join(domains)}" for name, domains in best.items()]
    told = []
    if parts:
        rest = f"; no drafter pays for {', '.join(nowhere)}: decode plainly there." if nowhere else "."
        told.append("Use " + "; ".join(parts) + rest)
    elif nowhere:
        told.append("Nothing here is faster than plain decoding.")
    if untold:
        told.append(f"One timed prompt tells too little to advise on {', '.join(untold)}: time more (setting speed_prompts).")
    heads = [arm["name"] for arm in report["arms"] if arm["drafter"] not in ("none", "n-gram")]
    winning = [d for d in report["domains"] if any(report["speed"][h][d]["tau"] > report["speed"][h][d]["break_even"] for h in heads)]
    if heads:
        told.append(f"The head's tau lies above its break-even in {', '.join(winning) if winning else 'no domain in this run'}.")
    return told


def machine(target: Target) -> str:
    """The machine in a few words."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
