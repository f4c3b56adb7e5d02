"""`spectrain quickstart`: every stage on a small real model, in one folder, each skipped when it is done."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import spectrain
from spectrain.cli import stages
from spectrain.cli.evaluate import check_exact, evaluate
from spectrain.cli.start import open_start
from spectrain.config import Recipe, load_config
from spectrain.evaluation.render import terminal_table, write_report
from spectrain.export.engines import export_head, serve_command
from spectrain.training.setup import made_with, open_accelerator

RECIPE = "recipes/eagle3_smollm2.yaml"
SHORT = (  # for CI: the same stages in a few minutes
    "data.prepare.max_rows=240", "training.epochs=2", "evaluation.suite=eval/suites/short.yaml", "evaluation.speed_prompts=1",
    "evaluation.speed_max_new_tokens=32",
)  # fmt: skip
WORK = (
    "answers.jsonl", "answers.made_with.json", "answers.rejected.jsonl", "conversations.jsonl", "rows", "states", "training", "head",
    "last", "evaluation", "export", "minutes.json",
)  # fmt: skip


def wide_console() -> Console:
    """The terminal, or 100 columns where the output goes to a file: what the table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=100)


class Stopwatch:
    """Says which stage runs, and how long each took."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.minutes: dict[str, float] = {}
        self._name, self._begin = "", time.monotonic()

    def start(self, name: str) -> None:
        self.stop()
        self._name, self._begin = name, time.monotonic()
        self._console.rule(f"[bold]{name}", align="left")

    def stop(self) -> None:
        if self._name:
            self.minutes[self._name] = (time.monotonic() - self._begin) / 60
        self._name = ""


def clone_root() -> Path:
    """The folder of the clone that spectrain runs from; ValueError elsewhere."""
    root = Path(spectrain.__file__).resolve().parents[1]
    if not (root / RECIPE).is_file():
        raise ValueError("quickstart needs the recipes and prompts of a clone of spectrain; clone it and run scripts/quickstart.sh there")
    return root


def quickstart(*, out: Path, fresh: bool, fresh_answers: bool, short: bool, overrides: list[str]) -> dict[str, Any]:
    """Run all stages; returns the report. Raises ValueError with the way out, or when an answer is not exactly the target's."""
    root, console = clone_root(), wide_console()
    recipe = load_config(Recipe, root / RECIPE, [*(SHORT if short else ()), *overrides])
    if recipe.head.kind != "eagle3" or recipe.training.lora is not None:  # it exports what it has trained
        raise ValueError("quickstart trains an EAGLE-3 head on a frozen target; for others: spectrain train recipes/medusa_smollm2.yaml")
    if fresh:
        for name in WORK:
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    watch, say = Stopwatch(console), console.print
    watch.start("target")
    accelerator = open_accelerator(recipe.training, out / "training")
    target = stages.open_target(recipe, out, str(accelerator.device))
    recipe, start = open_start(recipe, target, say)
    say(f"{recipe.target.name}: {target.num_layers} layers, vocabulary {target.vocab_size}, {recipe.target.dtype} on {target.device}")
    watch.start("answers")
    file = stages.answers_file(recipe, target, root, out, fresh=fresh_answers, say=say)
    data = stages.make_rows(recipe, target, file, out)
    say(stages.rows_line(data), markup=False)
    watch.start("capture")
    store = stages.capture_states(recipe, target, data, out, accelerator, say)
    watch.start("training")
    result, _ = stages.run_training(recipe, target, data, store, out, accelerator, say, start=start)
    watch.start("evaluation")
    head = stages.open_head(out / "head", target)
    extra = {
        "title": "SmolLM2-135M-Instruct with an EAGLE-3 head", "versions": made_with(target, {})["versions"],
        "training": {"steps": result.history},
    }  # fmt: skip
    report = evaluate(target, head, recipe.evaluation, out / "evaluation", root, extra=extra, say=say)
    watch.start("report and export")
    write_report(report, out / "evaluation")
    folder = export_head(out / "head", "eagle3", out / "export")
    watch.stop()
    (out / "minutes.json").write_text(json.dumps(watch.minutes, indent=2) + "\n")
    show(report, out / "evaluation", console)
    console.print(f"Head: {out}/head; exported: {out}/export")
    depth = recipe.evaluation.shapes.chain
    console.print(
        f"Serve it with vLLM:\n{serve_command(folder, str(out / 'target'), num_speculative_tokens=depth)}", soft_wrap=True, highlight=False
    )
    console.print("Minutes: " + ", ".join(f"{name} {m:.1f}" for name, m in watch.minutes.items()))
    check_exact(report)
    return report


def arms_table(report: dict[str, Any]) -> Table:
    """Over all domains: what a round costs, how deep drafts are accepted, and tokens per second beside plain decoding's."""
    columns = ("arm", "shape", "tau", "break-even", "acceptance by position", "tokens/s", "× plain")
    table = Table(*columns, box=SIMPLE_HEAD, title="all domains")
    for arm in report["arms"]:
        tau, speed = report["tau"][arm["name"]]["all (micro)"], report["speed"].get(arm["name"], {}).get("all")
        accepted = " ".join(f"{share:.2f}" for share in tau["acceptance"])
        digits = {"break_even": ".2f", "tokens_per_s": ".1f", "speedup": ".2f"}
        timed = [f"{speed[name]:{form}}" if speed else "–" for name, form in digits.items()]
        figures = (f"{tau['tau']:.2f}", timed[0], accepted, *timed[1:])
        table.add_row(arm["name"], arm["shape"], *figures)
    return table


def show(report: dict[str, Any], folder: Path, console: Console) -> None:
    """The table and the advice, and where the rest is."""
    for table in [*terminal_table(report), arms_table(report)]:
        console.print(table)
    for sentence in report["advice"]:
        console.print(f"[bold]{sentence}")
    console.print(f"Report: {folder}/report.html, report.md, report.json")
