"""The command `spectrain evaluate`: its options -> suite, drafters and target -> the stage, and what is written and said of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import spectrain
from spectrain.cli import stages
from spectrain.cli.assemble import told_of
from spectrain.cli.drafters import heads_of, open_drafters, parse_drafters
from spectrain.cli.evaluate import check_exact, check_out, machine
from spectrain.cli.evaluate import evaluate as run_evaluation
from spectrain.cli.quickstart import show, wide_console
from spectrain.cli.room import open_target
from spectrain.cli.trees import check_place, read_tree, write_tree
from spectrain.config import EvaluationConfig, override, validate
from spectrain.data.endpoint import Endpoint
from spectrain.evaluation.arms import AUTO, parse_form
from spectrain.evaluation.gates import parse as parse_gate
from spectrain.evaluation.paired import against
from spectrain.evaluation.processes import Processes, open_processes
from spectrain.evaluation.records import records_of
from spectrain.evaluation.render import parse_report, write_report
from spectrain.evaluation.suites import find_suite, suite_of
from spectrain.evaluation.told import drawn_rules
from spectrain.target.model import Target
from spectrain.training.setup import made_with

CLONE = Path(spectrain.__file__).resolve().parents[1]


class Unmet(ValueError):
    """A condition of --require does not hold."""


@dataclass(frozen=True)
class Asked:
    """What is measured of whom. where: further arguments of `load_target`; drafters: as `--drafters` has them; prompts: a file instead of
    the suite; against: an earlier report; require: conditions on the report; overrides: of the settings."""

    target: str
    suite: str
    where: Mapping[str, Any]
    drafters: Sequence[str] = ("ngram",)
    prompts: Path | None = None
    against: Path | None = None
    require: Sequence[str] = ()
    as_json: bool = False
    dtype: str = "float32"
    overrides: Sequence[str] = ()

    def settings(self) -> tuple[EvaluationConfig, Path]:
        """The settings and where paths inside a suite start from; their files are checked before the target is loaded, which takes long."""
        values: dict[str, object] = {}
        if self.prompts is not None:
            root, values["prompts"] = Path.cwd(), str(self.prompts.resolve())
        else:
            suite = find_suite(self.suite, [Path.cwd(), CLONE]).resolve()
            root, values["suite"] = suite.parents[:3][-1], str(suite)
        override(values, list(self.overrides))
        config = validate(EvaluationConfig, values, where="--set")
        suite_of(config, root)
        read_tree(config, root)
        for form in config.forms:
            if form != AUTO:
                parse_form(form)
        return config, root

    @property
    def console(self) -> Console:
        return Console(stderr=True, width=100) if self.as_json else wide_console()


def with_head(drafters: str | None, head: Path | None) -> tuple[str, ...]:
    """`--drafters` and `--head` as one list: a head alone is measured beside n-gram lookup."""
    listed = tuple(text.strip() for text in drafters.split(",") if text.strip()) if drafters is not None else ("ngram",)
    own = () if head is None or f"head:{head}" in listed else (f"head:{head}",)
    return listed + own


def overrides_of(shapes: str | None, tree: Path | None, temperature: str | None) -> list[str]:
    """`--shapes`, `--tree` and `--temperature` as settings; ValueError for what is no temperature, or a second written tree."""
    forms = [form.strip() for form in shapes.split(",") if form.strip()] if shapes is not None else []
    written = [Path(form.partition(":")[2]) for form in forms if form.startswith("tree:") and form.endswith(".json")]
    trees = written + ([] if tree is None else [tree])
    if len(trees) > 1:
        raise ValueError(f"one written tree is measured at a time, found {', '.join(map(str, trees))}; name one")
    found = [f"tree={json.dumps(str(trees[0].resolve()))}"] if trees else []
    if forms:
        found.append(f"forms={json.dumps([form for form in forms if not form.endswith('.json')])}")
    if temperature is not None:
        try:
            values = [float(part) for part in temperature.split(",")]
        except ValueError:
            raise ValueError(f"--temperature needs numbers with commas between, such as 0,0.7,1, found {temperature!r}") from None
        found.append(f"temperature={json.dumps(values)}")
    return found


def evaluate_by(
    asked: Asked, out: Path | None, *, head: Path | None, write_tree: Path | None, engine: str | None, endpoint: str, model: str, key: str
) -> None:
    """Here, by a running engine, or instead a tree made from a head's acceptance. out: None where only a tree is made. key: of the
    engine's server, "" where it wants none."""
    if write_tree is not None:
        make_tree(asked, head, write_tree)
    elif engine is not None:
        from spectrain.cli.served import evaluate_engine

        if not endpoint:
            raise ValueError(f"--engine {engine} needs the server's address: add --endpoint http://127.0.0.1:8000/v1")
        if asked.against or asked.require or set(asked.drafters) - {"ngram", f"head:{head}"}:
            raise ValueError("--engine measures what the engine drafts, and with --head the same here; leave the other options out")
        evaluate_engine(
            asked.target, head, *asked.settings(), out or Path(), kind=engine, endpoint=Endpoint(endpoint, model, key), dtype=asked.dtype,
            where=asked.where, as_json=asked.as_json,
        )  # fmt: skip
    else:
        evaluate(asked, out or Path())


def evaluate(asked: Asked, out: Path) -> None:
    """Measure the drafters and write the report; on several processes, where a launcher started them.

    A target that stands whole in each process lets them share the work. Raises `Inexact` and `Unmet` when the report is written.
    """
    wanted, console = parse_drafters(asked.drafters), asked.console
    heads, gates, other = heads_of(wanted), [parse_gate(text) for text in asked.require], _earlier(asked.against)
    config, root = asked.settings()
    with open_processes(splits=asked.where["placement"] == "rank") as processes:
        console.quiet = not processes.leads
        adapted = heads[0] if len(heads) == 1 else None
        target = _opened(asked, adapted, config, root, processes, console)
        drafters = open_drafters(wanted, target)
        processes.on_main(lambda: check_out(out, told_of(target, drafters, config, suite_of(config, root))))
        report = run_evaluation(
            target, None, config, out, root, extra={"versions": made_with(target, {})["versions"]}, processes=processes, drafters=drafters,
            say=lambda text: console.print(text, markup=False, soft_wrap=True, highlight=False), gates=gates, other=other,
        )  # fmt: skip

        def tell() -> None:
            if other is not None:
                file, then = other
                both = (records_of(out, report), records_of(file.parent, then))
                report["against"] = against(report, then, file=str(file), now=both[0], then=both[1])
            write_report(report, out, pictures=True)
            show(report, out, console)
            _tell(report, console)
            if asked.as_json:
                print(json.dumps(report))
            check_exact(report)
            _check_gates(report)

        processes.on_main(tell)


def make_tree(asked: Asked, head: Path | None, path: Path) -> None:
    """Write the tree that a head's measured acceptance makes; processes as in `evaluate`."""
    if head is None:
        raise ValueError("--write-tree counts what a head's drafts are accepted; add --head FOLDER")
    (config, root), console = asked.settings(), asked.console
    if any(config.temperatures) or config.tree:
        raise ValueError("--write-tree counts greedy answers and measures no tree; leave --tree and --temperature out")
    check_place(path)
    with open_processes(splits=asked.where["placement"] == "rank") as processes:
        console.quiet = not processes.leads
        target = _opened(asked, head, config, root, processes, console)
        write_tree(
            target, stages.open_head(head, target), config, path, root, versions=made_with(target, {})["versions"],
            machine=machine(target), say=lambda text: console.print(text, markup=False, soft_wrap=True), processes=processes,
        )  # fmt: skip
    console.print(f"Tree: {path}; measure it with spectrain evaluate … --tree {path}", soft_wrap=True)


def _opened(asked: Asked, head: Path | None, config: EvaluationConfig, root: Path, processes: Processes, console: Console) -> Target:
    """The target, with a head's adapter where it has one, on this process's device."""
    caches = (config.batch_size, suite_of(config, root).max_new_tokens)
    return open_target(asked.target, head, asked.dtype, console.print, asked.where, caches=caches, processes=processes)


def _earlier(path: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """The report to compare with, and its file; ValueError where there is none."""
    if path is None:
        return None
    file = path / "report.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--against needs the report.json of an earlier evaluation, there is no {file}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); `spectrain evaluate` writes it anew") from error
    try:
        parse_report(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return file, content


def _tell(report: Mapping[str, Any], console: Console) -> None:
    """What to do at which level of service, by which rules draws were verified, what was compared, which conditions hold, and what the
    time went to."""
    lines = [*report["service"], *drawn_rules(report["arms"])]
    for row in (report.get("against") or {"rows": []})["rows"]:
        if row["domain"].startswith("all"):
            lines.append(f"{row['arm']}: tau {row['then']:.2f} then, {row['now']:.2f} now")
    lines += [f"{'met' if g['met'] else 'NOT met'}: {g['expression']} (found {_figure(g['value'])})" for g in report.get("gates", [])]
    t = report["time"]
    passes = t["wall"] - t["answers_now"] - t["overhead"]
    lines.append(
        f"Time: answers {t['answers_now'] / 60:.1f} min, other passes {passes / 60:.1f} min, the evaluation's own work "
        f"{t['overhead'] / 60:.1f} min ({100 * t['overhead_share']:.1f} % of the time of the answers)"
    )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _check_gates(report: Mapping[str, Any]) -> None:
    if unmet := [f"{g['expression']} (found {_figure(g['value'])})" for g in report.get("gates", []) if not g["met"]]:
        raise Unmet(f"not met: {'; '.join(unmet)}")
