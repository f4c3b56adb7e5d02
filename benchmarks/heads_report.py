"""What benchmarks/heads.py says of its figures: who is ahead of whom, prompt by prompt, and the tables for docs/results.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from spectrain.evaluation.metrics import Numbers, bootstrap, ratio_of_ratios

MODES = {"minutes": "equal minutes", "tokens": "equal supervised tokens"}
SLACK = 0.1  # of the minutes that a training was to take
QUIET = 0.05  # share of the processors that other processes may take


def compared(first: Sequence[Any], second: Sequence[Any]) -> dict[str, float]:
    """tau of the second head over that of the first on the same prompts in the same order, micro, with its 95 % interval over prompts."""
    quads = [(*_work(b), *_work(a)) for a, b in zip(first, second, strict=True)]
    found = bootstrap(quads, ratio_of_ratios)
    return {"ratio": found.value, "lo": found.lo, "hi": found.hi}


def _work(record: Any) -> Numbers:
    return float(sum(r.committed for r in record.rounds)), float(len(record.rounds))


def verdict(ratio: Mapping[str, float]) -> str:
    """`<` where the second is ahead by more than its interval, `>` where the first is, `=` where prompts do not tell."""
    return "<" if ratio["lo"] > 1 else ">" if ratio["hi"] < 1 else "="


def order_line(names: Sequence[str], ratios: Sequence[Mapping[str, float]]) -> str:
    """The heads in the expected order with what lies between neighbours."""
    signs = [f"{verdict(r)} {name}" for name, r in zip(names[1:], ratios, strict=True)]
    told = ", ".join(
        f"{b}/{a} {r['ratio']:.3f} [{r['lo']:.3f}, {r['hi']:.3f}]" for a, b, r in zip(names, names[1:], ratios, strict=False)
    )
    return " ".join([names[0], *signs]) + (f" ({told})" if told else "")


def cell(found: Mapping[str, Any], value: str, digits: int = 2) -> str:
    """A figure with its interval."""
    if found["lo"] is None:  # of a single prompt
        return f"{found[value]:.{digits}f}"
    return f"{found[value]:.{digits}f} [{found['lo']:.{digits}f}, {found['hi']:.{digits}f}]"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown, the figures on the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown(report: Mapping[str, Any]) -> str:
    """Every table of a report."""
    parts = [_how(report), *_training(report), *_predictions(report)]
    for mode in MODES:
        for temperature, arms in report["tau"][mode].items():
            parts += _acceptance(report, mode, temperature, arms)
    for mode, by_temperature in report["speed"].items():
        for temperature, cells in by_temperature.items():
            parts += _speed(report, mode, temperature, cells)
    return "\n".join(parts) + "\n"


def _how(report: Mapping[str, Any]) -> str:
    s, data, versions = report["settings"], report["data"], ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    others = [run["others"] for run in report["runs"].values()] + list(report["timed"]["others"].values())
    quiet = "The machine was quiet" if max(others) <= QUIET else "THE MACHINE WAS NOT QUIET"
    told = f"other processes took {min(others):.0%} to {max(others):.0%} of its processors, load at the start {report['load']:.1f}"
    return (
        f"`benchmarks/heads.py`, {report['made']}: {report['machine']}, {s['threads']} threads, {s['dtype']}, {versions}, commit "
        f"{report['git']}. {data['rows']} rows, {data['supervised']} supervised tokens, the same states and order for every head; draft "
        f"vocabulary {s['vocabulary']}. {quiet}: {told}. Acceptance on {s['prompts']} prompts of {s['suite']}, {s['tokens']} new tokens "
        f"(at temperature above 0 on {s['sampled_prompts']} of them); intervals of 95 % over prompts. The last step of each schedule "
        "counts.\n"
    )


def _training(report: Mapping[str, Any]) -> list[str]:
    columns = ["head", "trained weights, M", "ms a step", "trained on", "steps", "supervised tokens", "minutes", "loss (of its own kind)"]
    columns.append("top-1 by depth")
    rows = []
    for mode, told in MODES.items():
        for name, key in report["runs_of"][mode].items():
            run = report["runs"][key]
            late = mode == "minutes" and abs(run["minutes"] / report["settings"]["minutes"] - 1) > SLACK
            hits = " ".join(f"{h:.2f}" for h in run["hit"])
            rows.append(
                [name, f"{run['trained'] / 1e6:.1f}", f"{1e3 * run['seconds_a_step']:.0f}", told, str(run["steps"]), str(run["supervised"]),
                 f"{run['minutes']:.2f}" + (" (not as fitted)" if late else ""), f"{run['loss']:.3f}", hits]
            )  # fmt: skip
    return table(columns, rows)


def _predictions(report: Mapping[str, Any]) -> list[str]:
    """What costs and acceptance on prompts that were kept out say of each head of equal minutes."""
    rows = []
    for name, p in report["predictions"].items():
        tree, depth = p["tree"], p["best chain"]
        expected = f"{tree['tau_table']:.2f}" if tree["tau"] is None else cell(tree, "tau")
        chain = f"{depth}: {p['its gain']:.2f}" if depth else "none gains"
        rows.append(
            [name, f"{p['c']:.2f}", f"{p['v'][-1]:.2f} ({len(p['v'])})", chain, f"{tree['nodes']}, depth {tree['depth']}", expected,
             f"{tree['break_even']:.2f}", "yes" if p["pays"] else "no"]
        )  # fmt: skip
    columns = ["head", "c", "v (positions)", "best chain at T = 0: × plain", "static tree: nodes", "expected tau", "break-even", "pays"]
    warned = [f"{name}: {p['warning']}.  " for name, p in report["predictions"].items() if p["warning"]]
    return ["", "### Costs and trees, measured before", "", *table(columns, rows), *([""] if warned else []), *warned]


def _acceptance(report: Mapping[str, Any], mode: str, temperature: str, arms: Mapping[str, Any]) -> list[str]:
    """tau by domain for every arm; arms: name of head -> name of arm -> domain -> figures."""
    domains = report["domains"]
    lines = ["", f"### tau at T = {temperature}, {MODES[mode]}", ""]
    rows = []
    for name, found in arms.items():
        for arm, tau in found.items():
            shape = report["shapes"][report["runs_of"][mode][name]][arm]
            rows.append([name, shape, *(cell(tau[d], "tau") for d in ("all (macro)", "all (micro)", *domains))])
    lines += table(["head", "shape", "macro", "micro", *domains], rows)
    names = list(arms)
    lines += [""]
    for arm, ratios in report["order"][mode][temperature].items():
        lines.append(f"{arm}: {order_line(names, ratios)}.  ")
    return lines


def _speed(report: Mapping[str, Any], mode: str, temperature: str, cells: Mapping[str, Any]) -> list[str]:
    """Speed of the heads of a mode, all arms in turns on the same prompts; by domain tau ÷ break-even, and times plain decoding."""
    told = report["timed"]
    how = f"Batch 1, {told['prompts']} prompts, arms in turns. By domain: tau ÷ break-even, × plain."
    lines = ["", f"### Speed at T = {temperature}, {MODES[mode]}", "", how, ""]
    rows = []
    for key, found_by in cells.items():
        name, _, arm = key.partition(" / ")
        found = found_by["all"]
        shape = report["shapes"][report["runs_of"][mode][name]][arm] if arm else "–"
        by_domain = [f"{found_by[d]['tau']:.2f} ÷ {found_by[d]['break_even']:.2f}, {cell(found_by[d], 'speedup')}" for d in told["domains"]]
        rows.append(
            [name, shape, f"{found['tau']:.2f}", f"{found['break_even']:.2f}", f"{found['v']:.2f}", f"{found['draft']:.2f}",
             cell(found, "speedup"), f"{found['tokens_per_s']:.1f}", *by_domain]
        )  # fmt: skip
    columns = ["head", "shape", "tau", "break-even", "verify", "draft", "× plain", "tokens/s", *told["domains"]]
    return lines + table(columns, rows)
