"""`spectrain bench`: tokens a second by batch with drafts and without, the policy that follows, and whether it holds."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from spectrain.cli.drafters import heads_of, open_drafters, parse_drafters
from spectrain.cli.evaluate import machine
from spectrain.cli.joint import tell_change
from spectrain.cli.measured import CLONE
from spectrain.cli.quickstart import wide_console
from spectrain.cli.room import open_target
from spectrain.config import BenchConfig, Suite, load_config, override, validate
from spectrain.decoding.shapes import Chain
from spectrain.evaluation.arms import Named
from spectrain.evaluation.batches import Bench, Kept, measure, minutes
from spectrain.evaluation.policy import advice_by_service
from spectrain.evaluation.price import roofline_table
from spectrain.evaluation.suites import find_suite, suite_hash, suite_prompts
from spectrain.target.model import Target
from spectrain.target.passes import for_all
from spectrain.training.setup import made_with

FORMAT = 3  # of bench.json
HEADS = ("batch", "plain", "always", "gain", "predicted", "tau", "v", "roof v", "depth", "table", "adaptive")


def bench(
    target_name: str, drafters: Sequence[str], out: Path, *, dtype: str, where: Mapping[str, Any], overrides: Sequence[str], as_json: bool
) -> None:
    """Measure and write `bench.json`; a second call makes what is missing. where: further arguments of `load_target`."""
    wanted = parse_drafters(drafters)
    if not wanted:
        raise ValueError("bench compares plain decoding with drafts; name a drafter: --head FOLDER, or --drafters ngram,suffix")
    values: dict[str, object] = {}
    override(values, overrides)
    config = validate(BenchConfig, values, where="--set")
    suite_file = find_suite(config.suite, [Path.cwd(), CLONE]).resolve()
    suite, heads = load_config(Suite, suite_file), heads_of(wanted)
    console = Console(stderr=True, width=100) if as_json else wide_console()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True, highlight=False)

    caches = (max(config.batches), config.max_new_tokens)
    target = open_target(target_name, heads[0] if len(heads) == 1 else None, dtype, say, where, caches=caches)
    opened = open_drafters(wanted, target)
    ids = _prompts(target, suite, suite_file, config)
    compile = for_all(target, config.compile, passes=config.max_new_tokens)  # alike where costs and where rounds are timed
    run = Bench(target, ids, config.batches, config.max_new_tokens, config.repeats, config.prompts, config.context, compile)
    content = {
        "format": FORMAT, "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "target": target.name,
        "suite": {"name": f"{suite.name} v{suite.version}", "sha256": suite_hash(suite), "prompts": len(ids)},
        "settings": {
            **config.model_dump(mode="json"), "dtype": str(target.model.dtype).removeprefix("torch."), "machine": machine(target),
            "temperature": 0.0,
        },
        "versions": made_with(target, {})["versions"], "batches": list(config.batches),
        **measured(run, opened, config, out, say),
    }  # fmt: skip
    content["service"] = advice_by_service(_latency(content), content)
    for found in opened:
        tell_change(content, found.head, "service")
    part = out / "bench.json.part"
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(out / "bench.json")
    if as_json:
        print(json.dumps(content))
    else:
        show(content, console)
        say(f"written: {out / 'bench.json'}; in Python: st.generate(…, policy=st.load_policy({str(out)!r}))")


def measured(run: Bench, drafters: Sequence[Named], config: BenchConfig, out: Path, say: Any) -> dict[str, Any]:
    """The parts `roofline` and `drafters` of bench.json."""
    target = run.target
    of = [target.fingerprints, str(target.model.dtype), machine(target)]
    base = [FORMAT, *of, list(map(list, run.prompts)), config.model_dump(mode="json")]
    keys = {d.name: hashlib.sha256(json.dumps([base, d.name, d.identity]).encode()).hexdigest()[:16] for d in drafters}
    kept = {d.name: Kept(out / "bench-runs.jsonl", keys[d.name]) for d in drafters}
    shapes = {d.name: _shape(d, config) for d in drafters}
    todo = minutes(run, kept, {d.name: (d.drafter, shapes[d.name]) for d in drafters})
    if todo:
        told = f"{len(drafters)} drafter(s) at batches {', '.join(map(str, run.batches))}: about {todo:.0f} minutes"
        say(f"{told}; what is finished is kept, and the same command goes on from there")
    most = max(shape.depth for shape in shapes.values())
    line = Kept(out / "bench-runs.jsonl", keys[drafters[0].name]).once(
        lambda: roofline_table(target, run.batches, nodes=most, context=run.context), "roofline"
    )
    return {"roofline": line, "drafters": {d.name: measure(run, kept[d.name], d.name, d.drafter, shapes[d.name], say) for d in drafters}}


def _shape(drafter: Named, config: BenchConfig) -> Chain:
    s = config.shapes.within(getattr(drafter.drafter, "max_depth", None))
    return Chain(s.ngram if drafter.lookup or not drafter.drafter.has_q else s.chain)


def _prompts(target: Target, suite: Suite, file: Path, config: BenchConfig) -> list[list[int]]:
    """Ids of the suite's prompts that fit, domains taken in turn; ValueError where none fits."""
    by_domain = suite_prompts(suite, target, file.parents[:3][-1])
    rows = [p for p in chain.from_iterable(zip_longest(*by_domain.values())) if p is not None]
    ids = [target.encode(p.chat, **suite.template_kwargs) for p in rows]
    fits = [found for found in ids if len(found) <= min(config.context, target.max_length - config.max_new_tokens)]
    if not fits:
        found = f"no prompt of suite {suite.name} has at most {config.context} tokens, the shortest has {min(map(len, ids))}"
        raise ValueError(f"{found}; raise --context")
    return fits


def _latency(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Cells of batch 1 for `advice_by_service`, where that was measured."""
    first = {name: found["rows"][0] for name, found in content["drafters"].items() if found["rows"][0]["batch"] == 1}
    if not first:
        return {}
    plain = next(iter(first.values()))["plain"]
    own = {"plain": {"tokens_per_s": plain, "speedup": 1.0}}
    best = {name: max(("speculative", "table") if row["k"] else ("speculative",), key=row.__getitem__) for name, row in first.items()}
    gains = {name: first[name][arm] / first[name]["plain"] for name, arm in best.items()}  # each over its own plain decoding
    return own | {name: {"tokens_per_s": first[name][arm], "speedup": gains[name]} for name, arm in best.items()}


def show(content: Mapping[str, Any], console: Console) -> None:
    """A table a drafter (always: drafting to the full depth; depth: of the table), its policy in the words of the engines, whether it
    holds, and the advice."""
    for name, found in content["drafters"].items():
        made = ", ".join(dict.fromkeys(row["mode"] for row in found["rows"]))
        table = Table(title=f"{name}, {found['shape']}: tokens/s by batch, {made} passes", box=SIMPLE)
        for head in HEADS:
            table.add_column(head, justify="right", no_wrap=True)
        for row in found["rows"]:
            line = content["roofline"]["predicted_v"][str(row["batch"])]
            table.add_row(
                str(row["batch"]), f"{row['plain']:.1f}", f"{row['speculative']:.1f}", f"{row['speedup']:.2f}", f"{row['predicted']:.2f}",
                f"{row['tau']:.2f}", f"{row['v']:.2f}", f"{line:.2f}", str(row["k"]), f"{row['table']:.1f}", f"{row['adaptive']:.1f}",
            )  # fmt: skip
        console.print(table)
        for text in _told(found):
            console.print(text, markup=False, soft_wrap=True, highlight=False)
    for text in content["service"]:
        console.print(text, markup=False, soft_wrap=True, highlight=False)


def _told(found: Mapping[str, Any]) -> list[str]:
    policy, check = found["policy"], found["verified"]
    if policy["vllm"] is None:
        told = ["Policy: draft nothing at these batches."]
    else:
        options = {
            "vLLM --speculative-config": policy["vllm"],
            "SGLang --speculative-adaptive, in the file of --speculative-adaptive-config": policy["sglang"],
        }
        told = [f"{option}: {json.dumps(value)}" for option, value in options.items()]
    missed = [f"{row['policy']} at batch {row['batch']} ({row['ratio']:.2f})" for row in check["rows"] if not row["met"]]
    bound = f"{100 * check['slack']:.0f} % of the better of plain and drafting"
    held = f"all within {bound}" if check["met"] else f"NOT within {bound}: {', '.join(missed)}"
    return [*told, f"Policies run in the same bench: {held}"]
