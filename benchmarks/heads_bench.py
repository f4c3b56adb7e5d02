"""The work behind benchmarks/heads.py: rows and states that all heads share, trainings, trees and answers; each is made once and kept."""

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from accelerate import Accelerator

from spectrain.cli import stages
from spectrain.cli.capture import prepared_with
from spectrain.cli.probe import Probe
from spectrain.cli.trees import COST_CONTEXT
from spectrain.cli.trees import TIMED as TIMED_SIZES
from spectrain.cli.wiring import as_drafter
from spectrain.config import Recipe, ShapeConfig, Suite, dump_yaml, load_config
from spectrain.data.batches import Batch, Sample, Samples
from spectrain.data.codes import Codes
from spectrain.data.formats import Prompt
from spectrain.decoding.shapes import Chain, Shape, Tree
from spectrain.evaluation.measure import Arm, Draws, Records, measure_tau
from spectrain.evaluation.speed import measure_costs
from spectrain.evaluation.suites import suite_prompts
from spectrain.evaluation.trees import WIDTH, fitted, rising
from spectrain.heads.base import LAST, load_head
from spectrain.target.capture import capture
from spectrain.target.check import check_store
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target
from spectrain.target.passes import for_all
from spectrain.training.setup import layer_ids, open_accelerator
from spectrain.yields import Costs

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("chain", "dynamic", "static")
WARM, TIMED = 3, 15  # steps before the clock of a step runs, and steps on it
ALIKE = (  # what must not differ between recipes
    "training.seed=0", "training.accumulation=1", "training.packing=null", "training.domain_weights=null",
    "training.rows_per_epoch=null", 'training.mixed_precision="no"', "training.max_minutes=null", "training.epochs=100000",
)  # fmt: skip


def say(*words: object) -> None:
    print(*words, flush=True)


def write(path: Path, values: Any) -> None:
    """A JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(part, path)


def kept(path: Path, key: Any, make: Any) -> Any:
    """What `path` holds of the same key; otherwise it is made and written there."""
    key = json.loads(json.dumps(key))
    if path.is_file() and (found := json.loads(path.read_text()))["key"] == key:
        return found["value"]
    write(path, {"key": key, "value": (value := make())})
    return value


def short_name(path: Path) -> str:
    """`hass` of recipes/hass_smollm2.yaml."""
    return path.stem.rpartition("_")[0] or path.stem


class Part:
    """Samples of a store of several states with some of them, by their place."""

    def __init__(self, samples: Samples, places: Sequence[int], *, of: int) -> None:
        self._samples, self._places, self._of, self.rows = samples, list(places), of, samples.rows

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> Sample:
        sample = self._samples[i]
        return replace(sample, states=self._some(sample.states))

    def batch(self, numbers: Sequence[int]) -> Batch:
        batch = self._samples.batch(numbers)
        return replace(batch, states=self._some(batch.states))

    def _some(self, states: Codes) -> Codes:
        codes = states.codes.unflatten(-1, (self._of, -1))[..., self._places, :].flatten(-2)
        scale = None if states.scale is None else states.scale[..., self._places]
        place, kept_apart = (None if t is None else t[..., self._places, :] for t in (states.place, states.kept))
        return Codes(codes, scale, place, kept_apart)


class Others:
    """Share of the machine's processors that others used between the start and `share()`."""

    def __init__(self) -> None:
        self._busy, self._own, self._wall = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        return sum(times) - times.idle - getattr(times, "iowait", 0.0), time.process_time(), time.monotonic()

    def share(self) -> float:
        busy, own, wall = (now - was for now, was in zip(self._now(), (self._busy, self._own, self._wall), strict=True))
        return max(0.0, busy - own) / (max(wall, 1e-9) * (os.cpu_count() or 1))


def steps_for(seconds: Sequence[float], minutes: float, most: int | None) -> int:
    """Steps that fit in so many minutes, by the mean time of some of them; at most `most`, at least one."""
    fit = int(60 * minutes / (sum(seconds) / len(seconds)))
    return max(1, fit if most is None else min(fit, most))


def best_tried(entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of trees of several sizes the one with the best predicted speed-up, by tau on answers that it was not fitted to where it is known."""
    return max(entries, key=lambda e: (e["tau"] or e["tau_table"]) / e["break_even"])


def figures(folder: Path) -> dict[str, Any]:
    """Of a finished training, from its metrics: steps, supervised tokens, minutes, and the means of its last tenth."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "step"]
    steps, seconds = sum(line["steps"] for line in lines), sum(line["seconds"] for line in lines)
    late = [line for line in lines if line["step"] > 0.9 * steps] or lines[-1:]
    rows = sum(line["sums"]["rows"][0] for line in late)

    def mean(of: Any) -> float:
        return float(sum(of(line) * line["sums"]["rows"][0] for line in late) / max(1, rows))

    return {
        "steps": steps, "supervised": int(sum(line["sums"]["rows"][0] for line in lines)), "minutes": seconds / 60,
        "seconds_a_step": seconds / steps, "loss": mean(lambda line: line["loss"][0]),
        "hit": [mean(lambda line, k=k: line["hit"][k]) for k in range(len(lines[0]["hit"]))],
        "alpha": [mean(lambda line, k=k: line["alpha"][k]) for k in range(len(lines[0]["alpha"]))],
    }  # fmt: skip


@dataclass
class Bench:
    """All heads of one comparison in one folder."""

    args: argparse.Namespace
    out: Path
    paths: Mapping[str, Path]
    accelerator: Accelerator
    target: Target
    recipes: Mapping[str, Recipe]
    data: stages.Data

    @classmethod
    def open(cls, args: argparse.Namespace, paths: Mapping[str, Path]) -> "Bench":
        """Target and rows, made by the last recipe's settings; then every recipe on these rows."""
        out, target_name = args.out, [f"target.name={args.target}"] if args.target else []
        few = ["data.prepare.validation_per_domain=1"] if args.steps else []
        first = load_config(Recipe, list(paths.values())[-1], [*target_name, f"data.prepare.max_rows={args.rows}", *few, *ALIKE])
        accelerator = open_accelerator(first.training, out)
        target = stages.open_target(first, out, str(accelerator.device))
        data = stages.make_rows(first, target, stages.answers_file(first, target, ROOT, out, fresh=False, say=say), out)
        say(stages.rows_line(data))
        own = [f"target.name={target.name}", f"data.rows={out / 'rows'}", f"head.draft_vocab_size={args.vocabulary}"]
        alike = [*ALIKE, *own, f"training.tokens_per_step={first.training.tokens_per_step}"]
        recipes = {name: load_config(Recipe, path, alike) for name, path in paths.items()}
        for recipe in recipes.values():
            stages.check_config(recipe.head, target)
            stages.check_training(recipe.head, recipe.training)
        return cls(args, out, paths, accelerator, target, recipes, data)

    @property
    def names(self) -> list[str]:
        return list(self.recipes)

    @cached_property
    def _store(self) -> FeatureStore:
        """One store of all the states that any of the heads reads."""
        found = {i for recipe in self.recipes.values() for i in layer_ids(recipe.head, self.target)}
        ids = (*sorted(found - {LAST}), *([LAST] if LAST in found else []))
        where, config = self.out / "states", self.recipes[self.names[-1]].data.capture
        capture(self.data.rows, self.target, ids, where, config, prepared=prepared_with(self.data.rows))
        store = FeatureStore(where, self.data.rows)
        say(f"states {list(ids)}: {check_store(store, self.target).text()}")
        return store

    def samples(self, name: str) -> Part:
        ids = self._store.layer_ids
        return Part(self._store, [ids.index(i) for i in layer_ids(self.recipes[name].head, self.target)], of=len(ids))

    def _train(self, name: str, steps: int, folder: Path, *, log_steps: int) -> dict[str, Any]:
        """One training without measuring; returns its figures."""
        recipe = self.recipes[name]
        changes = {"steps": steps, "eval_steps": steps, "log_steps": log_steps}
        recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})
        others, data = Others(), replace(self.data, validation=[])  # type: ignore[arg-type]
        stages.run_training(recipe, self.target, data, self.samples(name), folder, self.accelerator, lambda *_: None)
        self.accelerator.free_memory()
        shutil.rmtree(folder / "training/checkpoints", ignore_errors=True)
        head = load_head(folder / "head")
        output = sum(p.numel() for p in head.lm_head.parameters()) if recipe.head.output == "frozen" else 0
        return {
            **figures(folder / "training"), "others": others.share(), "trained": sum(p.numel() for p in head.parameters()) - output,
            "recipe": recipe.model_dump(mode="json", include={"head", "training"}),
        }  # fmt: skip

    def _key(self, name: str) -> list[Any]:
        return [self.data.rows.rows_sha256, self.recipes[name].model_dump(mode="json", include={"head", "training"})]

    def step_seconds(self, name: str) -> list[float]:
        """Seconds of steps of a head, on the batches that every head sees first."""

        def make() -> list[float]:
            folder = self.out / "timing" / name
            shutil.rmtree(folder, ignore_errors=True)
            self._train(name, min(WARM + TIMED, self.args.steps or WARM + TIMED), folder, log_steps=1)
            lines = map(json.loads, (folder / "training/metrics.jsonl").read_text().splitlines())
            seconds = [line["seconds"] for line in lines if line["kind"] == "step"]
            shutil.rmtree(folder)
            return seconds[WARM:] or seconds

        found: list[float] = kept(self.out / "timing" / f"{name}.json", self._key(name), make)
        return found

    def steps(self) -> dict[str, dict[str, int]]:
        """By mode and head."""
        fit = {name: steps_for(self.step_seconds(name), self.args.minutes, self.args.steps) for name in self.names}
        return {"minutes": fit, "tokens": dict.fromkeys(fit, fit[self.names[-1]])}

    def run(self, name: str, steps: int) -> dict[str, Any]:
        """A head trained for so many steps, if it is not there already."""
        folder = self.folder(name, steps)
        say(f"{name}, {steps} steps: {folder}")
        found: dict[str, Any] = kept(
            folder / "trained.json", [steps, *self._key(name)], lambda: self._train(name, steps, folder, log_steps=10)
        )
        return found

    def folder(self, name: str, steps: int) -> Path:
        return self.out / "heads" / f"{name}-{steps}"

    @cached_property
    def shapes(self) -> ShapeConfig:
        return self.recipes[self.names[-1]].evaluation.shapes

    @cached_property
    def suite(self) -> Suite:
        """The suite of the last recipe with as many prompts and tokens as asked for."""
        suite = load_config(Suite, ROOT / self.recipes[self.names[-1]].evaluation.suite)
        number = max(1, self.args.prompts // len(suite.prompts))
        return suite.model_copy(update={"prompts": dict.fromkeys(suite.prompts, number), "max_new_tokens": self.args.tokens})

    @cached_property
    def prompts(self) -> dict[str, list[Prompt]]:
        return suite_prompts(self.suite, self.target, ROOT)

    def asked(self, temperature: float) -> dict[str, list[Prompt]]:
        """The prompts at a temperature, by domain."""
        number = max(1, self.args.sampled_prompts // len(self.prompts))
        return {domain: rows if temperature == 0 else rows[:number] for domain, rows in self.prompts.items()}

    @cached_property
    def compile(self) -> Any:
        total = (1 + len(ARMS) * len(self.names)) * self.args.timed * self.args.tokens
        asked = {"auto": "auto", "on": True, "off": False}[self.args.compile]
        return for_all(self.target, asked, passes=total)  # type: ignore[arg-type]

    @cached_property
    def probe(self) -> Probe:
        """Answers of the target to prompts that were kept out, for the ranks behind the static trees."""
        s = self.shapes
        rows, depth = stages.probe_rows(self.data.validation), max(s.chain, s.tree_depth)
        sizes = s.model_copy(update={"chain": depth, "tree_depth": depth, "tree_top_k": max(WIDTH, s.tree_top_k)})
        return Probe(self.target, rows, sizes, as_drafter, max_new_tokens=self.args.tokens)

    def costs(self, name: str, head: Any) -> tuple[Costs, str]:
        """Measured once a family, since its weights do not matter; and a warning where the machine was too busy for it."""

        def make() -> dict[str, Any]:
            trial = self.args.steps is not None
            costs = measure_costs(
                self.target, as_drafter(head), context=COST_CONTEXT, sizes=(1, 16) if trial else TIMED_SIZES, repeats=1 if trial else 7,
                compile=self.compile,
            )  # fmt: skip
            return {"seconds": costs.seconds, "v": costs.v, "c": costs.c}

        key = [self._key(name)[1]["head"], str(self.compile)]
        found = kept(self.out / "costs" / f"{name}.json", key, make)
        return rising(Costs(seconds=found["seconds"], v=tuple(found["v"]), c=found["c"]))

    def tree(self, name: str, steps: int, head: Any) -> dict[str, Any]:
        """The head's own static tree with what is expected of it, and the counts behind it; `pays`: whether it is predicted to gain,
        else it is the best of those of several sizes."""
        costs, _ = self.costs(name, head)

        def make() -> dict[str, Any]:
            domains = [row.domain for row in self.probe.rows]
            found = fitted(self.probe.ranks(head), domains, costs, nodes=self.shapes.tree_budget)
            pays = bool(found["tree"]["paths"])
            return {"pays": pays, "counts": found["counts"], "tree": found["tree"] if pays else best_tried(found["budgets"])}

        key = [self.weights(name, steps), costs.v, costs.c, self.args.tokens]
        found: dict[str, Any] = kept(self.folder(name, steps) / "tree.json", key, make)
        return found

    def weights(self, name: str, steps: int) -> str:
        return hashlib.sha256((self.folder(name, steps) / "head/model.safetensors").read_bytes()).hexdigest()

    def arms(self, name: str, steps: int) -> dict[str, Arm]:
        """The ways in which a head drafts."""
        head = stages.open_head(self.folder(name, steps) / "head", self.target)
        s, drafter = self.shapes.within(head.max_depth), as_drafter(head)
        tree = Tree.static(self.tree(name, steps, head)["tree"]["paths"])
        shapes: dict[str, Shape] = {
            "chain": Chain(s.chain), "dynamic": Tree.dynamic(top_k=s.tree_top_k, depth=s.tree_depth, budget=s.tree_budget), "static": tree
        }  # fmt: skip
        return {arm: Arm(arm, drafter, shapes[arm], name) for arm in ARMS}

    def records(self, path: Path, temperature: float, *made_of: Any) -> Records:
        """Answers so far, of these heads on these prompts with these settings."""
        prompts = [(p.id, p.turns) for rows in self.prompts.values() for p in rows]
        key = [made_of, temperature, dump_yaml(self.suite), prompts, self.target.fingerprints, str(self.target.model.dtype)]
        return Records(path, hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16])

    def answered(self, arms: Iterable[Arm], path: Path, temperature: float, *made_of: Any) -> Records:
        """Records of the arms at a temperature."""
        records, asked = self.records(path, temperature, *made_of), flat(self.asked(temperature))
        for arm in arms:
            measure_tau(
                self.target, arm, asked, records, max_new_tokens=self.args.tokens, batch_size=36, draws=Draws(temperature=temperature)
            )
        return records


def flat(groups: Mapping[str, Sequence[Prompt]]) -> list[Prompt]:
    return [p for rows in groups.values() for p in rows]
