"""Which head for the same work? Recipes trained on the same rows, states and order, for equal tokens and for equal minutes, and measured.

    python benchmarks/heads.py --out runs/heads [RECIPE.yaml ...] [--markdown FILE.md]
    python benchmarks/heads.py --out runs/dry --rows 24 --steps 8 --prompts 6 --tokens 12        a trial of every part

minutes: each head is trained for as many steps as fit in --minutes by the time that a step of it takes here, measured first on the first
batches; its schedule ends there. tokens: each head is trained for the steps that the last recipe's makes in these minutes. No acceptance
is measured while training, and the last step counts. A head of both is one run.
Each head is measured as a chain, as a dynamic tree and as the static tree that is best at batch 1 by its own ranks on prompts that were
kept out and by the costs measured here (where none is predicted to gain: the best of several sizes). All at temperature 0 and 1, and timed,
all arms of equal minutes, or of equal tokens, in turns on the same prompts.
A stopped run goes on where it was: rows, states, step times, heads, trees, every answer. OUT/heads.json holds all figures.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from heads_bench import ARMS, ROOT, Bench, Others, flat, say, short_name, write
from heads_report import MODES, compared, markdown

from spectrain.cli.evaluate import machine
from spectrain.decoding.shapes import StaticTree
from spectrain.evaluation.measure import Arm, Draws, compare, measure_speed
from spectrain.evaluation.metrics import speed_cell, tau_table
from spectrain.evaluation.speed import advise_depth
from spectrain.evaluation.suites import speed_subset
from spectrain.heads.base import load_head
from spectrain.training.setup import made_with

FAMILY = ("medusa", "hydra", "eagle", "hass", "eagle3")  # in the order in which their acceptance is expected to rise
TEMPERATURES = {"minutes": (0.0, 1.0), "tokens": (0.0, 1.0)}
PLAIN = "plain"
SECONDS = {"row": 0.52, "step": 0.4, "chain": 0.02, "dynamic": 0.028, "static": 0.023, "timed": 0.035, "head": 25.0}  # two quiet cores


def plan(names: Sequence[str], args: argparse.Namespace) -> list[str]:
    """What will be done and how long it is expected to take on two quiet cores."""
    heads, last = len(names), names[-1]
    training = args.minutes if args.steps is None else min(args.minutes, args.steps * SECONDS["step"] / 60)
    minutes = {
        "capture": args.rows * SECONDS["row"] / 60, "step times, costs and trees": heads * SECONDS["head"] / 60,
        "training, equal minutes": heads * training, f"training, as many tokens as {last} (at most)": (heads - 1) * training,
    }  # fmt: skip
    for mode, temperatures in TEMPERATURES.items():
        for t in temperatures:
            number, count = (args.prompts if t == 0 else args.sampled_prompts), heads if mode == "minutes" else heads - 1
            minutes[f"tau at T = {t:g}, {MODES[mode]}"] = count * number * args.tokens * sum(SECONDS[arm] for arm in ARMS) / 60
    runs = (len(ARMS) * heads + 1) * args.timed * args.tokens
    minutes["speed at T = 0 and 1, both comparisons"] = sum(map(len, TEMPERATURES.values())) * runs * SECONDS["timed"] / 60
    lines = [f"{', '.join(names)}: {args.rows} rows, {args.minutes:g} minutes a head, {args.prompts} prompts, {args.tokens} new tokens"]
    lines += [f"  {what:45} {m:5.1f} min" for what, m in minutes.items()]
    return [*lines, f"  {'in all, expected on two quiet AVX-512 cores':45} {sum(minutes.values()):5.1f} min"]


def acceptance(bench: Bench, steps: Mapping[str, int], mode: str, report: dict[str, Any]) -> None:
    """Puts tau, order and exactness of a mode's heads into the report."""
    for temperature in TEMPERATURES[mode]:
        asked, name_T, found = bench.asked(temperature), f"{temperature:g}", {}
        for name in bench.names:
            arms, folder = bench.arms(name, steps[name]), bench.folder(name, steps[name])
            made_of = [bench.weights(name, steps[name]), *(a.shape.paths for a in arms.values() if isinstance(a.shape, StaticTree))]
            found[name] = bench.answered(arms.values(), folder / f"records-{name_T}.jsonl", temperature, *made_of)
            report["shapes"][folder.name] = {arm: str(a.shape) for arm, a in arms.items()}
            report["tau"][mode].setdefault(name_T, {})[name] = {
                arm: tau_table({d: found[name].of(arm, "tau", rows) for d, rows in asked.items()}, a.shape.depth if a.shape else 0)
                for arm, a in arms.items()
            }
        report["order"][mode][name_T] = {
            arm: [
                compared(found[a].of(arm, "tau", flat(asked)), found[b].of(arm, "tau", flat(asked)))
                for a, b in zip(bench.names, bench.names[1:], strict=False)
            ]
            for arm in ARMS
        }
        if temperature == 0:
            plain = bench.answered([Arm(PLAIN)], bench.out / "plain-0.jsonl", 0.0).of(PLAIN, "tau", flat(asked))
            for name in bench.names:
                exact = {arm: compare(bench.target, found[name].of(arm, "tau", flat(asked)), plain, flat(asked)) for arm in ARMS}
                report["exactness"][bench.folder(name, steps[name]).name] = {arm: vars(e) for arm, e in exact.items()}


def speed(bench: Bench, steps: Mapping[str, int], mode: str, report: dict[str, Any]) -> None:
    """Puts the speed of a mode's heads into the report: all arms of all heads in turns on the same prompts."""
    number = max(1, bench.args.timed // len(bench.prompts))
    chosen = speed_subset(dict(list(bench.prompts.items())[: bench.args.timed]), bench.target, number=number, max_tokens=300)
    arms = [Arm(PLAIN)] + [
        replace(arm, name=f"{name} / {way}") for name in bench.names for way, arm in bench.arms(name, steps[name]).items()
    ]
    made_of = [[bench.weights(name, steps[name]) for name in bench.names], [str(arm.shape) for arm in arms], str(bench.compile)]
    report["timed"] |= {"prompts": len(flat(chosen)), "domains": list(chosen), "compile": str(bench.compile)}
    for temperature in TEMPERATURES[mode]:
        name_T, others = f"{temperature:g}", Others()
        records = bench.records(bench.out / f"speed-{mode}-{name_T}.jsonl", temperature, *made_of)
        measure_speed(
            bench.target, arms, flat(chosen), records, max_new_tokens=bench.args.tokens, baseline=False, compile=bench.compile,
            draws=Draws(temperature=temperature),
        )  # fmt: skip
        report["timed"]["others"][f"{mode}, {name_T}"] = others.share()
        report["speed"].setdefault(mode, {})[name_T] = {
            arm.name: {
                d: speed_cell(records.of(arm.name, "speed", rows), records.of(PLAIN, "speed", rows))
                for d, rows in {**chosen, "all": flat(chosen)}.items()
            }
            for arm in arms
        }


def predictions(bench: Bench, steps: Mapping[str, int], report: Mapping[str, Any]) -> dict[str, Any]:
    """By head of equal minutes: measured costs, the best chain that these and its measured survival predict, and its static tree."""
    found = {}
    for name in bench.names:
        head = load_head(bench.folder(name, steps[name]) / "head")
        (costs, warning), tree = bench.costs(name, head), bench.tree(name, steps[name], head)
        survival = report["tau"]["minutes"]["0"][name]["chain"]["all (micro)"]["acceptance"]
        depth, gain = advise_depth(survival, costs)
        found[name] = {"v": list(costs.v), "c": costs.c, "best chain": depth, "its gain": gain, "warning": warning, **tree}
    return found


def git_state() -> str:
    """The commit, and whether files differ from it."""
    commit, changed = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return (commit or "unknown") + (" with changes" if changed else "")


def settings_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [ROOT / f"recipes/{name}_smollm2.yaml" for name in FAMILY]
    parser.add_argument("recipes", nargs="*", type=Path, default=default, help="in the order in which acceptance is expected to rise")
    parser.add_argument("--out", type=Path, default=Path("runs/heads"), help="folder of all that is made")
    parser.add_argument("--target", help="another name or folder than the recipes' for their target")
    parser.add_argument("--rows", type=int, default=480, help="conversations to train on (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=6144, help="draft vocabulary of every head (%(default)s)")
    parser.add_argument("--minutes", type=float, default=2.5, help="of training a head (%(default)s)")
    parser.add_argument("--steps", type=int, help="of a training at most, for a trial")
    parser.add_argument("--prompts", type=int, default=36, help="for acceptance at temperature 0, over all domains (%(default)s)")
    parser.add_argument("--sampled-prompts", type=int, default=18, help="of these, at temperature 1 (%(default)s)")
    parser.add_argument("--timed", type=int, default=18, help="of these, timed one by one at both temperatures (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens an answer (%(default)s)")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="of the timed passes (%(default)s)")
    parser.add_argument("--markdown", type=Path, help="file for the tables, which are printed too")
    parser.add_argument("--plan", action="store_true", help="print the plan alone")
    args = parser.parse_args()
    args.sampled_prompts = min(args.sampled_prompts, args.prompts)
    args.timed = args.timed if args.steps is None else 2
    return args


def made(bench: Bench, names: Sequence[str], args: argparse.Namespace, load: float) -> dict[str, Any]:
    """The report before anything is measured: how, where and on what."""
    rows = bench.data.rows
    return {
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": machine(bench.target), "load": load, "git": git_state(),
        "versions": made_with(bench.target, {})["versions"], "target": bench.target.name, "heads": names, "domains": list(bench.prompts),
        "data": {"rows": len(rows), "supervised": sum(row.supervised for row in rows), "kept out": len(bench.data.validation)},
        "settings": {
            **{key: value for key, value in vars(args).items() if not isinstance(value, Path | list)},
            "threads": torch.get_num_threads(), "dtype": str(bench.target.model.dtype).removeprefix("torch."),
            "suite": f"{bench.suite.name} v{bench.suite.version}", "shapes": bench.shapes.model_dump(),
            "prompts": len(flat(bench.asked(0.0))), "sampled_prompts": len(flat(bench.asked(1.0))),
        },
        "runs": {}, "runs_of": {mode: {} for mode in MODES}, "shapes": {}, "tau": {mode: {} for mode in MODES},
        "order": {mode: {} for mode in MODES}, "exactness": {}, "speed": {}, "timed": {"others": {}},
    }  # fmt: skip


def main() -> int:
    args, load = settings_of(), os.getloadavg()[0]
    paths = {short_name(path): path for path in args.recipes}
    names = list(paths)
    say("\n".join(plan(names, args)))
    if args.plan:
        return 0
    bench, began = Bench.open(args, paths), time.monotonic()
    report = made(bench, names, args, load)
    steps = bench.steps()
    for mode in MODES:
        for name in names:
            folder = bench.folder(name, steps[mode][name]).name
            report["runs_of"][mode][name] = folder
            report["runs"][folder] = bench.run(name, steps[mode][name])
    for mode in MODES:
        acceptance(bench, steps[mode], mode, report)
    for mode in MODES:
        speed(bench, steps[mode], mode, report)
    report["predictions"] = predictions(bench, steps["minutes"], report)
    report["minutes of this call"] = (time.monotonic() - began) / 60
    write(args.out / "heads.json", report)
    text = markdown(report)
    if args.markdown:
        args.markdown.write_text(text)
    say(f"{text}\n{report['minutes of this call']:.1f} minutes; all figures: {args.out / 'heads.json'}")
    wrong = {key: arm for key, arms in report["exactness"].items() for arm, found in arms.items() if found["failed"]}
    if wrong:
        say(f"answers differ from plain decoding by more than rounding: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
