"""`spectrain evaluate --engine`: a suite through a running engine, domain by domain, and the same prompts here beside it."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.cli import stages
from spectrain.cli.joint import tell_change
from spectrain.cli.prepare import load_tokenizer
from spectrain.cli.quickstart import wide_console
from spectrain.cli.room import open_target
from spectrain.cli.trees import weights_of
from spectrain.config import EvaluationConfig, Suite
from spectrain.data.endpoint import Endpoint, look
from spectrain.data.formats import Prompt, read_jsonl
from spectrain.drafters.from_head import HeadDrafter
from spectrain.evaluation import served
from spectrain.evaluation.measure import Draws
from spectrain.evaluation.render import write_report
from spectrain.evaluation.suites import suite_hash, suite_of, suite_prompts
from spectrain.target.model import Target

FILE, RECORDS = "served.json", "served.jsonl"


@dataclass(frozen=True)
class Work:
    """What is asked of whom. head: None where nothing is measured here. key: hash of all that the figures depend on, "" where the engine
    does not say when it was started: another head may be served at the same address by now."""

    target: Target
    head: Any
    suite: Suite
    config: EvaluationConfig
    engine: served.Engine
    endpoint: Endpoint
    depth: int
    key: str


def evaluate_engine(
    target_name: str, head: Path | None, config: EvaluationConfig, root: Path, out: Path, *, kind: str, endpoint: Endpoint, dtype: str,
    where: Mapping[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Measure what a running engine accepts of its drafts, and with a head what we accept of them; write served.json, and into the folder's
    report where there is one. Without a head only the target's tokenizer is loaded. kind: of the engine, `vllm` or `sglang`. As many rows
    are asked together as are answered together here (the setting batch_size). root: where paths inside the suite start from."""
    suite, endpoint = suite_of(config, root), replace(endpoint, concurrency=config.batch_size)
    console = Console(stderr=True, width=100) if as_json else wide_console()
    _check_report(out, suite)
    engine = _engine(kind)
    text = served.read_metrics(endpoint)
    before, server = served.counts_of(text, engine), look(endpoint)
    if head is None:
        target, trained = Target(model=None, tokenizer=load_tokenizer(target_name), name=target_name), None
    else:
        target = open_target(target_name, head, dtype, console.print, where, caches=(config.batch_size, suite.max_new_tokens))
        trained = stages.open_head(head, target)
    depth = len(before.positions) or config.shapes.chain
    started = served.start_of(text)
    parts = [endpoint.base, server.model, started, depth, suite.model_dump(mode="json"), config.seed, config.batch_size, target_name]
    known = hashlib.sha256(json.dumps([*parts, "" if trained is None else weights_of(trained)]).encode()).hexdigest()[:16]
    work = Work(target, trained, suite, config, engine, endpoint, depth, known if started else "")
    records = list(_records(work, suite_prompts(suite, target, root), out, console))
    found = {
        "engine": kind, "endpoint": endpoint.base, "model": server.model, "depth": depth, "rule": engine.rule,
        "concurrency": endpoint.concurrency, "suite": {"name": f"{suite.name} v{suite.version}", "sha256": suite_hash(suite)},
        "head": None if head is None else str(head), "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "rows": served.table(records, engine), "notes": served.notes(records, depth),
    }  # fmt: skip
    tell_change(found, trained, "notes")
    _write(found, out)
    for line in _told(found):
        console.print(line)
    console.print(f"Served: {out}/{FILE}", highlight=False)
    if as_json:
        print(json.dumps(found))


def _engine(kind: str) -> served.Engine:
    if kind not in served.ENGINES:
        raise ValueError(f"unknown engine {kind!r}; there are {', '.join(served.ENGINES)}")
    return served.ENGINES[kind]


def _check_report(out: Path, suite: Suite) -> None:
    """ValueError where the folder's report is of another suite, whose figures these are not to stand beside."""
    path = out / "report.json"
    if path.is_file():
        there = json.loads(path.read_text(encoding="utf-8"))["suite"]
        if there["sha256"] != suite_hash(suite):
            raise ValueError(f"{path} is of the suite {there['name']} as it was then; choose another folder for --out, or that suite")


def _records(work: Work, prompts: Mapping[str, Sequence[Prompt]], out: Path, console: Console) -> Iterator[dict[str, Any]]:
    """A record a temperature and domain, made where it is not there; one that is not of the suite alone is made again by the next call."""
    path = out / RECORDS
    kept = [row for _, row in read_jsonl(path)] if path.is_file() else []
    done = {(row["temperature"], row["domain"]): row for row in kept if row["key"] == work.key and row["key"] and row["alone"]}
    for temperature in work.config.temperatures:
        for number, (domain, rows) in enumerate(prompts.items(), 1):
            if (temperature, domain) not in done:
                console.print(f"{domain} ({number} of {len(prompts)}), temperature {temperature:g}", highlight=False)
                record = _measured(work, domain, rows, temperature, out)
                done[temperature, domain] = record
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            yield done[temperature, domain]


def _measured(work: Work, domain: str, prompts: Sequence[Prompt], temperature: float, out: Path) -> dict[str, Any]:
    suite, engine, endpoint = work.suite, work.engine, work.endpoint
    settings = {
        "temperature": temperature, "top_p": 1.0, "max_new_tokens": suite.max_new_tokens, "template_kwargs": dict(suite.template_kwargs),
    }  # fmt: skip
    before = served.counts_of(served.read_metrics(endpoint), engine)
    answers = served.ask(prompts, endpoint, out / "served" / f"{domain}-{temperature:g}", settings)
    if not answers.turns:
        reason = max(answers.refused, key=lambda r: answers.refused[r])
        raise ValueError(f"the engine answered none of the {domain} prompts: {reason}")
    counts = served.counts_after(endpoint, engine, before, answers)
    if not counts.rounds:
        raise ValueError(f"the engine answered {len(answers.turns)} turns and drafted nothing; start it with {engine.option}")
    own = None
    if work.head is not None:
        own = served.measure_own(
            work.target, answers, HeadDrafter(work.head), engine, depth=work.depth, max_new_tokens=suite.max_new_tokens,
            batch_size=work.config.batch_size, draws=Draws(temperature, work.config.seed), template=suite.template_kwargs,
        )  # fmt: skip
    return {
        "key": work.key, "domain": domain, "temperature": temperature, "answers": len(answers.turns), "tokens": answers.tokens,
        "seconds": answers.seconds, "refused": answers.refused, "counts": asdict(counts), "own": None if own is None else asdict(own),
        "alone": (counts.tokens, counts.requests) == (answers.tokens, len(answers.turns)),
    }  # fmt: skip


def _write(found: Mapping[str, Any], out: Path) -> None:
    """The table's own file, and the folder's report with it."""
    part = out / f".{FILE}.part"
    part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    part.replace(out / FILE)
    path = out / "report.json"
    if path.is_file():
        write_report({**json.loads(path.read_text(encoding="utf-8")), "served": found}, out)


def _told(found: Mapping[str, Any]) -> Iterator[Any]:
    """The table for the terminal, and what must be known of it."""
    beside = "own_tau" in found["rows"][0]
    for temperature in dict.fromkeys(row["temperature"] for row in found["rows"]):
        same = "" if temperature else "; equal: answers that are the same"
        here = f", then by this generator{same}" if beside else ""
        title = f"{found['engine']}, drafts of {found['depth']}, temperature {temperature:g} (tokens {found['rule']}{here})"
        table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
        for name in ["domain", "rounds", "tau", "accepted by position, %", "tokens/s", *(["equal"] if beside and not temperature else [])]:
            table.add_column(name, justify="left" if name == "domain" else "right")
        for row in found["rows"]:
            if row["temperature"] == temperature:
                table.add_row(*(Text(cell) for cell in _cells(row)), style="" if row["alone"] else "yellow")
        yield table
    for note in found["notes"]:
        yield Text(f"note: {note}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    mark = "" if row["alone"] else " *"
    shares = " ".join(f"{100 * share:.1f}" for share in row["acceptance"]) or "–"
    if "own_tau" not in row:
        return [row["domain"] + mark, f"{row['drafts']:,}", f"{row['tau']:.3f}", shares, f"{row['tokens_per_s']:.1f}"]
    own = " ".join(f"{100 * share:.1f}" for share in row["own_acceptance"]) or "–"
    return [
        row["domain"] + mark, f"{row['drafts']:,}\n{row['own_drafts']:,}", f"{row['tau']:.3f}\n{row['own_tau']:.3f}", f"{shares}\n{own}",
        f"{row['tokens_per_s']:.1f}", *([f"{row['equal']} of {row['compared']}"] if "equal" in row else []),
    ]  # fmt: skip
