"""What an evaluation has measured -> its report: every figure that the page shows, and what was known while it was made."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spectrain.cli.joint import tell_change
from spectrain.cli.trees import GivenTree, tree_notes
from spectrain.config import EvaluationConfig, Suite
from spectrain.data.formats import Prompt
from spectrain.data.rows import Row
from spectrain.evaluation import asides, figures
from spectrain.evaluation.anatomy import Anatomy, alpha_table, entropies, rank_table
from spectrain.evaluation.arms import Named
from spectrain.evaluation.measure import Arm, Draws
from spectrain.evaluation.policy import advice_by_service
from spectrain.evaluation.processes import Processes
from spectrain.evaluation.records import Records
from spectrain.evaluation.schema import ALL, MICRO
from spectrain.evaluation.suites import suite_hash, told_of_suite, too_long
from spectrain.evaluation.told import FREE, advice, losses, remarks
from spectrain.heads.targets import DraftVocabulary
from spectrain.target.model import Target
from spectrain.training.setup import coverage_by_domain, coverage_lines
from spectrain.yields import Costs

FORMAT = 2  # of report.json


@dataclass
class Spent:
    """Seconds of this call by what they were spent on."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


@dataclass(frozen=True)
class Run:
    """What stays the same for a whole evaluation. base: what every answer depends on; keys: of the records, by arm and mode."""

    target: Target
    drafters: Sequence[Named]
    config: EvaluationConfig
    suite: Suite
    tree: GivenTree | None
    root: Path
    out: Path
    prompts: Mapping[str, list[Prompt]]
    chosen: Mapping[str, list[Prompt]]
    base: list[Any]
    keys: dict[tuple[str, str], str]
    records: Records
    compile: bool | Literal["auto"]
    processes: Processes
    say: Any
    spent: Spent = field(default_factory=Spent)

    @property
    def every(self) -> list[Prompt]:
        return figures.every(self.prompts)

    @property
    def timed(self) -> list[Prompt]:
        return figures.every(self.chosen)

    def key(self, *parts: Any) -> str:
        return hashlib.sha256(json.dumps([self.base, *parts], sort_keys=True).encode()).hexdigest()[:16]


def report_of(
    run: Run, arms: Sequence[Arm], timed: Sequence[Arm], costs: Mapping[str, Costs], looked: Mapping[float, Sequence[Anatomy]],
    settings: Mapping[str, Any], extra: Mapping[str, Any], notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """The report of an evaluation (see evaluation/render.py). costs: by arm; looked: by temperature; notes: what is known so far."""
    target, c, records = run.target, run.config, run.records
    if 0.0 in c.temperatures:
        run.say("comparing every answer with plain decoding")
    with run.spent("comparing"):
        exact = run.processes.alike(
            lambda: figures.exactness(target, arms, records, run.prompts, run.chosen, run.suite.template_kwargs)
        )
    tau, speed = figures.tau_tables(arms, records, run.prompts), figures.speed_tables(timed, records, run.chosen)
    missing = sum(figures.left_out(records, a.name, run.prompts) for a in arms if a.shape is None)
    told = remarks(
        c, min(map(len, run.chosen.values())), missing, too_long(c, run.prompts, run.root), any(d.label not in FREE for d in run.drafters)
    )
    head = next((d.head for d in run.drafters if d.head is not None), None)
    of_tree = [] if run.tree is None else tree_notes(
        run.tree, target, head, run.every, temperature=max(c.temperatures), template=run.suite.template_kwargs
    )
    suite = told_of_suite(run.suite, run.prompts, target, run.root)
    report = {
        "format": FORMAT, "title": extra.get("title", f"Speculative decoding of {target.name}"),
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "target": target.name, "licences": suite.pop("licences"), "suite": suite,
        "made_of": told_of(target, run.drafters, c, run.suite), "settings": settings, "versions": extra["versions"],
        "arms": [arm.describe() for arm in arms], "domains": list(run.prompts), "tau": tau,
        "speed": {arm.name: speed.get(arm.name, {}) for arm in arms}, "exactness": exact,
        "baseline": figures.baseline(records, timed[0].name, run.timed),
        "slices": figures.sliced(arms, records, run.prompts, {t: entropies(found) for t, found in looked.items()}),
        "pairs": figures.paired(arms, records, run.prompts), **_alphas(run, arms, looked),
        "keys": {arm.name: run.keys[arm.name, "tau"] for arm in arms}, "notes": [*notes, *told, *of_tree],
        "tree": run.tree and {"file": run.tree.path, "paths": run.tree.shape.paths},
        **_coverage(run, arms[0], head), **({"training": extra["training"]} if "training" in extra else {}),
    }  # fmt: skip
    if costs:
        report["gap"] = figures.gaps(timed, records, run.chosen, costs, speed)
        report["costs"] = _told_costs(arms, costs)
    report["advice"] = [*advice(report), *losses(report)]
    tell_change(report, head)
    return report | _beside(run, arms, timed, tau, speed)


def _coverage(run: Run, plain: Arm, head: Any) -> dict[str, Any]:
    """Share of plain decoding's answers inside a head's reduced draft vocabulary, by domain, and said with its counts."""
    if head is None or len(head.target_ids) == run.target.num_ids:
        return {}
    vocabulary = DraftVocabulary(target_ids=head.target_ids.cpu(), d2t=head.d2t.cpu(), t2d=head.t2d.cpu())
    records = run.records.of(plain.name, "tau", run.every)
    answers = [Row(r.id, r.domain, np.array(r.tokens), np.ones(len(r.tokens), np.uint8)) for r in records]
    for line in coverage_lines(vocabulary, {"plain decoding's answers": answers}):
        run.say(line)
    return {"coverage": {domain: inside / max(of, 1) for domain, (inside, of) in coverage_by_domain(answers, vocabulary).items()}}


def _beside(
    run: Run, arms: Sequence[Arm], timed: Sequence[Arm], tau: Mapping[str, Any], speed: Mapping[str, Any]
) -> dict[str, Any]:
    """Prices, an answer to look at, advice by level of service, and what `bench` and `--engine` left in the same folder."""
    found: dict[str, Any] = {name: _left(run.out / file) for name, file in (("batch", "bench.json"), ("served", "served.json"))}
    first = [arm for arm in timed if arm.temperature == run.config.timed_temperatures[0]]
    found["service"] = advice_by_service({arm.name: speed[arm.name][ALL] for arm in first}, found["batch"])
    found["price"] = figures.prices(run.target, arms, run.records, run.prompts, tau)
    drafted = [arm for arm in arms if arm.shape and arm.temperature == arms[0].temperature]
    if drafted:
        best = max(drafted, key=lambda arm: tau[arm.name][MICRO]["tau"])
        domain = max(run.prompts, key=lambda d: tau[best.name][d]["tau"])
        prompt, tokens = run.chosen[domain][0], run.config.speed_max_new_tokens
        key = run.key("example", best.name, run.keys[best.name, "tau"], prompt.id, tokens)
        with run.spent("example"):
            found["example"] = asides.shown(
                run.target, best, prompt, max_new_tokens=tokens, draws=Draws(best.temperature, run.config.seed),
                path=run.out / "example.json", key=key, processes=run.processes,
            )  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _left(path: Path) -> Any:
    """The content of a file that another command wrote; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _alphas(run: Run, arms: Sequence[Arm], looked: Mapping[float, Sequence[Anatomy]]) -> dict[str, Any]:
    """alpha of each drafter at each temperature, and the ranks of what heads draft at temperature 0."""
    found: dict[str, Any] = {"alpha": {}, "ranks": {}}
    for temperature, anatomy in looked.items():
        tail = f" T={temperature:g}" if temperature and len(run.config.temperatures) > 1 else ""
        for name in sorted(anatomy[0].alpha) if anatomy else []:
            found["alpha"][name + tail] = alpha_table(anatomy, name)
        for name in sorted(anatomy[0].ranks) if anatomy else []:
            nodes = max(arm.shape.budget for arm in arms if arm.shape and arm.by == name)
            found["ranks"][name] = rank_table(anatomy, name, nodes=nodes)
    return {name: table for name, table in found.items() if table}


def _told_costs(arms: Sequence[Arm], costs: Mapping[str, Costs]) -> dict[str, Any]:
    """Costs of the first head's chain (or of what drafts first), and of every drafter and arm."""
    known = [arm for arm in arms if arm.name in costs]
    first = next((arm for arm in known if arm.label not in ("n-gram", "suffix")), known[0])
    told = {arm.name: {name: asdict(costs[arm.name])[name] for name in ("c", "start", "other", "plain")} for arm in known}
    by_drafter = {arm.by: told[arm.name] for arm in reversed(known)}
    c = costs[first.name]
    return {"seconds": c.seconds, "v": list(c.v), "c": c.c, "by_drafter": by_drafter, "by_arm": told}


def time_spent(run: Run, wall: float) -> dict[str, Any]:
    """Seconds of this call by what they went to. overhead: all that is neither an answer nor another pass of target or drafter; its share
    is of the seconds that all answers of this report took, now or earlier."""
    records = [r for (key, *_), runs in run.records.found.items() if key in set(run.keys.values()) for r in runs.values()]
    answering = sum(r.seconds for r in records)
    passes = run.records.seconds + sum(run.spent.seconds.values()) + run.records.warm_up
    return {
        "wall": wall, "answers_now": run.records.seconds, "warm_up": run.records.warm_up, **run.spent.seconds,
        "overhead": wall - passes, "answers": answering, "overhead_share": (wall - passes) / max(answering, 1e-9),
    }  # fmt: skip


def told_of(target: Target, drafters: Sequence[Named], config: EvaluationConfig, suite: Suite) -> dict[str, str]:
    """What a folder's report is of, as far as another one of it would not be its successor."""
    heads = sorted(d.identity[:12] for d in drafters if d.head is not None)
    return {
        "target": target.fingerprints["layers_sha256"][:12], "head": ", ".join(heads) or "none",
        "suite": f"{suite.name} v{suite.version} ({suite_hash(suite)[:12]})",
        "temperature": ", ".join(f"{t:g}" for t in sorted(config.temperatures)),
    }  # fmt: skip
