"""The commands train, evaluate, report and export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console

from spectrain.cli import stages
from spectrain.cli.evaluate import check_exact, check_out, machine, told_of
from spectrain.cli.evaluate import evaluate as run_evaluation
from spectrain.cli.joint import MERGED, check_merged, open_for, write_merged
from spectrain.cli.quickstart import show, wide_console
from spectrain.cli.start import check_no_run, open_start
from spectrain.cli.trees import check_place, read_tree, write_tree
from spectrain.config import EvaluationConfig, Recipe, Suite, load_config, override, validate
from spectrain.evaluation.processes import open_processes
from spectrain.evaluation.render import write_report
from spectrain.export.engines import FORMATS, export_head, needs_target, serve_command
from spectrain.heads.base import check_head, load_head
from spectrain.target.model import Target, load_target
from spectrain.training.setup import made_with, open_accelerator
from spectrain.training.watch import Watch

DRAFTS = 4  # a round, in the command that serves a head without a number of its own


def train(path: Path, *, out: Path | None, fresh_answers: bool, overrides: list[str]) -> None:
    """All stages of a recipe up to the trained head; on several processes, where a launcher started them: then the main one talks and
    writes, and each knows whether the others live."""
    recipe = load_config(Recipe, path, overrides)
    out = out or Path("runs") / recipe.name
    _check_placement(recipe, fresh_answers)
    accelerator = open_accelerator(recipe.training, out / "training")
    console = Console(quiet=not accelerator.is_main_process, soft_wrap=True, markup=False)
    with Watch(accelerator, minutes=recipe.training.stall_minutes) as watch:
        watch.at("preparing target and rows", brisk=False)
        recipe, target, start, data = _prepare(recipe, _above(path, 1), out, accelerator, console.print, fresh=fresh_answers)
        console.print(stages.rows_line(data))
        watch.at("capturing states", brisk=False)
        store = stages.capture_states(recipe, target, data, out, accelerator, console.print)
        watch.at("preparing the training", brisk=False)
        result, _ = stages.run_training(recipe, target, data, store, out, accelerator, console.print, start=start, watch=watch)
    best = "" if result.best is None else f", best measured tau {result.best:.3f}"
    cut = "" if result.steps == result.total else f" of {result.total} (training.max_minutes are up; with more the same command goes on)"
    console.print(f"{result.steps} steps{cut}{best}; head: {out}/head")


def _check_placement(recipe: Recipe, fresh_answers: bool) -> None:
    """ValueError for what is not done with a target that the processes share."""
    if recipe.target.placement == "rank":
        return
    shared = f"a target that several processes share (target.placement {recipe.target.placement})"
    whole = "or let each process hold all of it: --set target.placement=rank"
    if fresh_answers:
        by_server = "let a server answer (spectrain regenerate PROMPTS --endpoint URL), prepare the answers, and add --set data.rows=FOLDER"
        raise ValueError(f"--fresh-answers is not done by {shared}; {by_server}; {whole}")
    if recipe.training.lora:
        raise ValueError(f"training.lora is not done on {shared}; train the head alone: --set training.lora=null; {whole}")


def _prepare(
    recipe: Recipe, root: Path, out: Path, accelerator: Accelerator, say: Any, *, fresh: bool
) -> tuple[Recipe, Target, Any, stages.Data]:
    """Recipe, target, the head to go on from, and rows. The main process makes what there is to make while the others wait; a target that
    they share is loaded and looked at by all together, since each of its passes needs all of them."""

    def opened() -> tuple[Recipe, Target, Any]:
        target = stages.open_target(recipe, out, str(accelerator.device))
        changed, start = open_start(recipe, target, say)  # refused before the long work
        return changed, target, start

    shared = None
    if recipe.target.placement != "rank":
        with accelerator.main_process_first():
            stages.target_name(recipe, out)
        shared = opened()
    with accelerator.main_process_first():
        own, target, start = shared or opened()
        if accelerator.is_main_process:
            file = stages.answers_file(own, target, root, out, fresh=fresh, say=say)
            data = stages.make_rows(own, target, file, out)
        else:
            data = stages.read_rows(own, target, out)
    return own, target, start, data


def _above(path: Path, levels: int) -> Path:
    """Where the paths inside a recipe or a suite start from: some levels above its file, or the topmost folder."""
    return path.resolve().parents[: levels + 1][-1]


def _settings(suite: Path, overrides: list[str]) -> EvaluationConfig:
    """Settings of an evaluation, and their files checked before the target is loaded, which takes long."""
    values: dict[str, object] = {"suite": str(suite.resolve())}
    override(values, overrides)
    config = validate(EvaluationConfig, values, where="--set")
    load_config(Suite, suite)
    read_tree(config, _above(suite, 2))
    return config


def evaluate(
    target_name: str, head: Path | None, suite: Path, out: Path, *, dtype: str, where: Mapping[str, Any], overrides: list[str]
) -> None:
    """Measure a head (or free drafters alone) and write the report; on several processes, where a launcher started them.

    where: further arguments of `load_target`, `placement` among them: a target that stands whole in each process lets them share the work.
    """
    config, console = _settings(suite, overrides), wide_console()
    with open_processes(splits=where["placement"] == "rank") as processes:
        console.quiet = not processes.leads
        target = open_for(target_name, head, dtype, console.print, device=processes.device, **where)
        trained = stages.open_head(head, target) if head else None
        processes.on_main(lambda: check_out(out, told_of(target, trained, config, load_config(Suite, suite))))
        extra = {"versions": made_with(target, {})["versions"]}
        report = run_evaluation(target, trained, config, out, _above(suite, 2), extra=extra, say=console.print, processes=processes)

        def tell() -> None:
            write_report(report, out)
            show(report, out, console)
            _tell_rules(report, console)
            check_exact(report)

        processes.on_main(tell)


def make_tree(
    target_name: str, head: Path | None, suite: Path, path: Path, *, dtype: str, where: Mapping[str, Any], overrides: list[str]
) -> None:
    """Write the tree that a head's measured acceptance makes; processes and `where` as in `evaluate`."""
    if head is None:
        raise ValueError("--write-tree counts what a head's drafts are accepted; add --head FOLDER")
    config, console = _settings(suite, overrides), wide_console()
    if config.temperature or config.tree:
        raise ValueError("--write-tree counts greedy answers and measures no tree; leave --tree and --temperature out")
    check_place(path)
    with open_processes(splits=where["placement"] == "rank") as processes:
        console.quiet = not processes.leads
        target = open_for(target_name, head, dtype, console.print, device=processes.device, **where)
        write_tree(
            target, stages.open_head(head, target), config, path, _above(suite, 2), versions=made_with(target, {})["versions"],
            machine=machine(target), say=lambda text: console.print(text, markup=False, soft_wrap=True), processes=processes,
        )  # fmt: skip
    console.print(f"Tree: {path}; measure it with spectrain evaluate … --tree {path}", soft_wrap=True)


def _tell_rules(report: Mapping[str, Any], console: Console) -> None:
    """Where answers are draws: by which temperature and rules they were verified."""
    if temperature := report["settings"]["temperature"]:
        rules = ", ".join(f"{arm['name']} by rule {arm['rule']}" for arm in report["arms"][1:])
        console.print(f"Draws at temperature {temperature:g}: {rules}", soft_wrap=True)


def show_report(folder: Path) -> None:
    """Print a report's table and advice, and render its files anew."""
    path = folder / "report.json"
    if not path.is_file():
        raise ValueError(f"no report.json in {folder}; `spectrain evaluate` writes one")
    try:
        report = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); `spectrain evaluate` writes it anew") from error
    write_report(report, folder)
    show(report, folder, wide_console())
    _tell_rules(report, wide_console())


def export(head: Path, to: str, out: Path, target: str | None) -> None:
    """Write a head for an engine and print how to serve it, or (`merged`) the target with the adapter that was trained with the head.
    target: where the target is, for heads whose folder needs rows of it, and for those with an adapter."""
    rows: dict[str, Any] = {}
    check_no_run(head)
    if to == MERGED:
        print(f"wrote {write_merged(head, target, out)}")
        return
    if to in FORMATS and (head / "made_with.json").is_file():  # a missing head and an unknown format are told by the export itself
        check_merged(head, target)
    if to in FORMATS and needs_target(head):
        if target is None:
            raise ValueError(f"{head} takes rows of its target in an engine, which are checked or go into the folder: add --target NAME")
        model = load_target(target)
        check_head(load_head(head), model.fingerprints, model.name, model.tokenizer)
        rows = {"embed_VW": model.embedding_VW, "output_VW": model.output_VW}
    folder = export_head(head, to, out, **rows)
    made = json.loads((head / "made_with.json").read_text())
    served = made["target"] if target is None or "adapter_sha256" not in made else target
    engine = "sglang" if to in ("sglang", "eagle") else "vllm"
    print(f"wrote {folder}\n{serve_command(folder, served, engine=engine, num_speculative_tokens=load_head(head).max_depth or DRAFTS)}")
    if note := json.loads((folder / "config.json").read_text())["spectrain"].get("note"):
        print(note)
