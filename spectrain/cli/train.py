"""The command train."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console

from spectrain.cli import stages
from spectrain.cli.start import open_start
from spectrain.config import Recipe, load_config
from spectrain.target.model import Target
from spectrain.training.setup import open_accelerator
from spectrain.training.watch import Watch


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
