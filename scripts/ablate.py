"""What trainers of draft heads disagree on, measured: arms of eval/ablations.yaml, each trained on as many tokens, compared by tau.

    python scripts/ablate.py --out runs/ablate --results eval/results/ablations [--only REGEX]   the table of eval/ablations.yaml
    python scripts/ablate.py --out runs/dry --rows 24 --tokens 2000 --prompts 6                  a trial of every part

Every arm is one change of the recipe: same rows, order and number of supervised tokens; states are captured once for all arms with the
same rows and precision. tau is measured by the generator on held-out prompts, as a chain, and compared with the default's on the same
prompts: difference, 95 % interval over prompts, p, and the smallest difference that such a comparison finds in 80 % of cases. Of several
seeds a prompt's answers are one cluster. A group whose arms stand on other rows has a `base` arm of its own to be compared with. Of every
run one file is kept in --results, and a run whose file is there, made with the same settings and target, is not made again, on no machine;
a stopped one goes on where it was. What is expected to take how long is printed first.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from ablate_changes import CHANGES, HEADS, KEPT, Changed, all_positions, first_draft_lost, some_states
from accelerate import Accelerator

from spectrain.cli import stages
from spectrain.cli.capture import prepared_with
from spectrain.cli.evaluate import machine
from spectrain.cli.probe import Probe
from spectrain.cli.regenerate import regenerate
from spectrain.cli.wiring import as_drafter
from spectrain.config import Recipe, Suite, dump_yaml, load_config
from spectrain.data.batches import Batch, Samples, collate
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.evaluation.metrics import bootstrap, by_prompt, committed_and_rounds, ratio
from spectrain.evaluation.paired import compare
from spectrain.evaluation.suites import suite_prompts
from spectrain.heads.base import load_head, save_head
from spectrain.heads.targets import counted
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore, OnlineFeatures
from spectrain.target.model import Target
from spectrain.training.loop import Trainee, Work, train
from spectrain.training.setup import layer_ids, made_with, new_head, open_accelerator, supervised_counts

ROOT = Path(__file__).resolve().parents[1]
DEFAULT, BASE = "default", "base"
POINTS = 6  # of a training at which a checkpoint could be kept
ALIKE = ('training.mixed_precision="no"', "training.max_minutes=null", "training.epochs=100000", "data.prepare.validation_per_domain=3")


def say(*words: object) -> None:
    print(*words, flush=True)


@dataclass(frozen=True)
class Run:
    """One training: an arm of a group at a seed. set: its settings; change: what no setting makes; fresh: the target answers anew;
    conversations: rows are the table's conversations, with the answers that they have (own) or the target's (regenerated)."""

    group: str
    arm: str
    seed: int
    set: tuple[str, ...] = ()
    change: str | None = None
    fresh: bool = False
    conversations: str = ""

    @property
    def folder(self) -> str:
        return f"{re.sub(r'[^a-z0-9]+', '-', f'{self.group} {self.arm}'.lower()).strip('-')}-{self.seed}"


@dataclass
class Points:
    """`on_eval`: measures the head at a point of its training on kept-out rows, and tells what is to be highest where it is kept."""

    target: Target
    recipe: Recipe
    samples: Samples
    probe: Probe
    choose: Any
    found: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, head: Any) -> dict[str, Any]:
        point = {"loss": self.loss(head), "tau": float(self.probe(head)["measured_tau"])}
        self.found.append(point)
        return {"measured_tau": self.choose(point), "point": point}

    @torch.no_grad()
    def loss(self, head: Any) -> float:
        """Mean loss of a supervised token of the kept-out rows, over all steps, as training has it."""
        config = self.recipe.training
        trainee = Trainee(head, config, embed_VW=self.target.embedding_VW, output_VW=self.target.output_VW)
        total = weight = 0.0
        for batch in (collate([self.samples[i]]) for i in range(len(self.samples.rows))):
            counts_KX = torch.stack([counted_rows(batch, k) for k in range(config.ttt_steps)])
            row_R = counts_KX[0].nonzero()[:, 0]
            if len(row_R):
                found = trainee(Work(batch, row_R, counts_KX[:, row_R], None, [], 0.0))
                total, weight = total + float(found.total), weight + float(found.weight)
        return total / weight


def counted_rows(batch: Batch, k: int) -> torch.Tensor:
    return counted(batch.mask_BL, ahead=2 + k, doc_BL=batch.doc_BL).flatten()


class Bench:
    """All runs of one comparison in one folder: rows and states are made once for all that share them."""

    def __init__(self, args: argparse.Namespace, table: Mapping[str, Any]) -> None:
        self.args, self.table, self.out, self.results = args, table, args.out, args.results or args.out / "results"
        base = self.recipe(Run(DEFAULT, DEFAULT, 0))
        self.accelerator: Accelerator = open_accelerator(base.training, self.out)
        self.target = stages.open_target(base, self.out, str(self.accelerator.device))
        suite = load_config(Suite, ROOT / table["suite"])
        number = None if args.prompts is None else max(1, args.prompts // len(suite.prompts))
        few = {} if number is None else {"prompts": dict.fromkeys(suite.prompts, number)}
        self.suite = suite.model_copy(update=few)
        self.prompts = [p for rows in suite_prompts(self.suite, self.target, ROOT).values() for p in rows]
        self._stores: dict[str, tuple[stages.Data, FeatureStore]] = {}

    def recipe(self, run: Run) -> Recipe:
        """The recipe of a run; every run makes as many steps of as many supervised tokens."""
        asked = [f"target.name={self.args.target}"] if self.args.target else []
        asked += [f"data.prepare.max_rows={self.args.rows}"] if self.args.rows else []
        recipe = load_config(Recipe, ROOT / self.table["recipe"], [*asked, *ALIKE, *run.set, f"training.seed={run.seed}"])
        steps = max(POINTS, round((self.args.tokens or self.table["tokens"]) / recipe.training.tokens_per_step))
        every = max(1, steps // POINTS) if run.change in KEPT else steps
        training = recipe.training.model_copy(update={"steps": steps, "eval_steps": every})
        return recipe.model_copy(update={"training": training})

    def data(self, recipe: Recipe, *, fresh: bool, conversations: str) -> tuple[stages.Data, FeatureStore]:
        """Rows and states; the states are all that any arm of the table reads."""
        made_of = [recipe.data.model_dump(mode="json"), fresh, conversations, self.target.fingerprints]
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
        if key not in self._stores:
            folder = self.out / "data" / key
            folder.mkdir(parents=True, exist_ok=True)
            if conversations:
                answers = self.conversations(folder) if conversations == "regenerated" else ROOT / self.table["conversations"]
            else:
                answers = stages.answers_file(recipe, self.target, ROOT, folder, fresh=fresh, say=say)
            data = stages.make_rows(recipe, self.target, answers, folder)
            ids = tuple(sorted({i for run in runs_of(self.table, ".") for i in layer_ids(self.recipe(run).head, self.target)}))
            say(f"{stages.rows_line(data)}; states {list(ids)}")
            capture(data.rows, self.target, ids, folder / "states", recipe.data.capture, prepared=prepared_with(data.rows))
            self._stores[key] = data, FeatureStore(folder / "states", data.rows)
        return self._stores[key]

    def conversations(self, folder: Path) -> Path:
        """The table's conversations with every answer by the target, greedy."""
        out = folder / "answers.jsonl"
        some = [f"max_rows={self.args.rows}"] if self.args.rows else []
        regenerate(
            [str(ROOT / self.table["conversations"])], out=out, target=str(self.target.name), endpoint="", model="", api_key_env="",
            api_key_file=None, dtype="float32", revision=None, overrides=["max_new_tokens=128", *some], as_json=False,
        )  # fmt: skip
        return out

    def samples(self, run: Run, recipe: Recipe, store: FeatureStore) -> Samples:
        ids, own = list(store.layer_ids), layer_ids(recipe.head, self.target)
        some = Changed(store, partial(some_states, places=[ids.index(i) for i in own], of=len(ids)))
        return Changed(some, first_draft_lost) if run.change == "first_draft_lost" else some

    def run(self, run: Run) -> dict[str, Any]:
        """Train and measure, where that is not done yet."""
        recipe, folder = self.recipe(run), self.out / "runs" / run.folder
        settings = recipe.model_dump(mode="json", exclude_defaults=True)
        settings["target"] = self.target.fingerprints  # wherever it lies
        made_of = [settings, run.change, run.fresh, run.conversations, dump_yaml(self.suite), self.table["chain"]]
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
        done = self.results / f"{run.folder}.json"
        if done.is_file() and (found := json.loads(done.read_text()))["key"] == key:
            return found  # type: ignore[no-any-return]
        say(f"{run.group}: {run.arm}, seed {run.seed}")
        data, store = self.data(recipe, fresh=run.fresh, conversations=run.conversations)
        began = time.monotonic()
        points = self.train(run, recipe, data, self.samples(run, recipe, store), folder)
        trained = time.monotonic()
        answers = self.answers(load_head(folder / "best", device=str(self.target.device)), recipe)
        result = {
            "key": key, "group": run.group, "arm": run.arm, "seed": run.seed, "set": run.set, "change": run.change,
            "steps": recipe.training.steps, "tokens_per_step": recipe.training.tokens_per_step, "rows": len(data.rows),
            "supervised": int(data.rows.supervised_N.sum()), "points": points, "machine": machine(self.target),
            "versions": made_with(self.target, {})["versions"],
            "minutes": {"training": (trained - began) / 60, "measuring": (time.monotonic() - trained) / 60}, "answers": answers,
        }  # fmt: skip
        done.parent.mkdir(parents=True, exist_ok=True)
        part = done.with_suffix(".part")
        part.write_text(one_answer_a_line(result) + "\n")
        os.replace(part, done)
        shutil.rmtree(folder, ignore_errors=True)
        return result

    def train(self, run: Run, recipe: Recipe, data: stages.Data, samples: Samples, folder: Path) -> list[dict[str, float]]:
        target, counts_V = self.target, supervised_counts(data.rows, self.target.vocab_size)
        head = new_head(recipe.head, target, data.rows, seed=recipe.training.seed, counts_V=counts_V)
        if run.change in HEADS:
            HEADS[run.change](head, target, recipe)
        points: list[dict[str, float]] = []
        on_eval = None
        if run.change in KEPT:
            kept_out = stages.probe_rows(data.validation)
            probe = Probe(target, kept_out, recipe.evaluation.shapes, as_drafter)
            online = OnlineFeatures(target, kept_out, tuple(head.layer_ids), recipe.data.capture)
            on_eval = Points(target, recipe, online, probe, KEPT[run.change], points)
        divisor = mock.patch.object(Work, "weight", property(all_positions)) if run.change == "all_positions" else nullcontext()
        with divisor:
            self.loop(head, samples, run, recipe, data, folder, on_eval)
        self.accelerator.free_memory()
        return points

    def loop(
        self, head: Any, samples: Samples, run: Run, recipe: Recipe, data: stages.Data, folder: Path, on_eval: Points | None
    ) -> None:  # fmt: skip
        """The training itself; what is kept of it is in `folder`."""
        target = self.target
        made = made_with(target, {"rows_sha256": data.rows.rows_sha256, "group": run.group, "arm": run.arm})
        train(
            head, samples, recipe.training, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=folder / "training",
            accelerator=self.accelerator, on_eval=on_eval,
            identity={"recipe": recipe.model_dump(mode="json"), "change": run.change, "rows": data.rows.rows_sha256},
            save=lambda trained, name: save_head(trained, folder / name, run_yaml=dump_yaml(recipe), made_with=made),
        )  # fmt: skip

    def answers(self, head: Any, recipe: Recipe) -> list[dict[str, Any]]:
        """Greedy answers to the suite's prompts: what their rounds committed."""
        found, size = [], recipe.evaluation.batch_size
        ordered = sorted(self.prompts, key=lambda p: len(p.turns[0]))
        for start in range(0, len(ordered), size):
            some = ordered[start : start + size]
            chats = [p.chat for p in some]
            result = generate(
                self.target, chats, drafter=as_drafter(head), shape=Chain(self.table["chain"]), max_new_tokens=self.suite.max_new_tokens
            )
            found += [
                {"id": p.id, "domain": p.domain, "committed": "".join(str(r.committed) for r in row.rounds)}
                for p, row in zip(some, result.rows, strict=True)
            ]
        return found


def runs_of(table: Mapping[str, Any], only: str) -> Iterator[Run]:
    """The default at every seed that a group asks for, then the arms whose "group: arm" matches, after the base of their group where it has
    one. ValueError for an unknown change."""
    chosen: list[Run] = []
    for group, content in table["groups"].items():
        before = len(chosen)
        for arm, how in content["arms"].items():
            if (change := how.get("change")) is not None and change not in CHANGES:
                raise ValueError(f"{group}: {arm} asks for the change {change!r}; there are {', '.join(sorted(CHANGES))}")
            if re.search(only, f"{group}: {arm}"):
                chosen += [run_of(group, arm, seed, how) for seed in content.get("seeds", [0])]
        if "base" in content and len(chosen) > before:
            chosen[before:before] = [run_of(group, BASE, seed, content["base"]) for seed in content.get("seeds", [0])]
    for seed in sorted({run.seed for run in chosen if "base" not in table["groups"][run.group]}):
        yield Run(DEFAULT, DEFAULT, seed)
    yield from chosen


def run_of(group: str, arm: str, seed: int, how: Mapping[str, Any]) -> Run:
    return Run(group, arm, seed, tuple(how.get("set", ())), how.get("change"), how.get("fresh", False), how.get("conversations", ""))


def one_answer_a_line(result: Mapping[str, Any]) -> str:
    """As JSON that a person can look through and a diff show."""
    head = json.dumps({name: value for name, value in result.items() if name != "answers"}, indent=1)
    answers = ",\n".join(f"  {json.dumps(answer)}" for answer in result["answers"])
    return f'{head[:-2]},\n "answers": [\n{answers}\n ]\n}}'


def records(results: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """Answers of all seeds of an arm; those to one prompt are its turns."""
    return [
        SimpleNamespace(id=a["id"], turn=seed, rounds=[SimpleNamespace(committed=int(c)) for c in a["committed"]])
        for seed, result in results.items()
        for a in result["answers"]
    ]  # fmt: skip


def tau_of(found: Sequence[Any]) -> Any:
    return bootstrap(by_prompt(found, [committed_and_rounds(r) for r in found]), ratio)


def rows_of(table: Mapping[str, Any], done: Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One row an arm, those of a group below its default: tau and the difference from the default at the same seeds."""
    rows = []
    for group, content in table["groups"].items():
        arms = [arm for arm in content["arms"] if (group, arm) in done]
        for arm in arms:
            own = done[group, arm]
            base = {seed: done[(group, BASE) if "base" in content else (DEFAULT, DEFAULT)][seed] for seed in own}
            if arm == arms[0]:
                tau = tau_of(records(base))
                rows.append({"group": group, "arm": str(content["default"]), "default": True, "seeds": len(base), **vars(tau)})
            d, tau = compare(records(own), records(base)), tau_of(records(own))
            rows.append({
                "group": group, "arm": arm, "default": False, "seeds": len(own), **vars(tau), "difference": d.value, "d_lo": d.lo,
                "d_hi": d.hi, "p": d.p, "smallest": d.smallest, "points": next(iter(own.values()))["points"],
            })  # fmt: skip
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| question | arm | seeds | tau | difference | p | found from |", "| --- | --- | --: | --: | --: | --: | --: |"]
    for r in rows:
        tau = f"{r['value']:.3f} [{r['lo']:.3f}, {r['hi']:.3f}]"
        if r["default"]:
            lines.append(f"| {r['group']} | {r['arm']} (default) | {r['seeds']} | {tau} | | | |")
        else:
            change = f"{r['difference']:+.3f} [{r['d_lo']:+.3f}, {r['d_hi']:+.3f}]"
            lines.append(f"| | {r['arm']} | {r['seeds']} | {tau} | {change} | {r['p']:.3f} | {r['smallest']:.3f} |")
    return "\n".join(lines) + "\n"


def estimate(bench: Bench, runs: Sequence[Run], seconds: Mapping[str, float]) -> str:
    steps = bench.recipe(runs[0]).training.steps or 0
    data = {(run.fresh, run.conversations, *(s for s in run.set if s.startswith("data."))) for run in runs}
    hours = (len(runs) * (steps * seconds["step"] + len(bench.prompts) * seconds["prompt"]) + len(data) * seconds["data"]) / 3600
    what = f"{len(runs)} trainings of {steps} steps and {len(bench.prompts)} prompts each, {len(data)} sets of states"
    return f"{what}: about {hours:.1f} hours on two quiet AVX-512 cores, less what is done already"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablate"), help="folder of all that is made")
    parser.add_argument("--table", type=Path, default=ROOT / "eval/ablations.yaml")
    parser.add_argument("--only", default="", help="arms whose 'group: arm' this regular expression finds")
    parser.add_argument("--target", help="another name or folder than the recipe's for its target")
    parser.add_argument("--rows", type=int, help="conversations drawn (default: the recipe's)")
    parser.add_argument("--tokens", type=int, help="supervised tokens of a training (default: the table's)")
    parser.add_argument("--prompts", type=int, help="prompts that tau is measured on (default: the suite's)")
    parser.add_argument("--results", type=Path, help="folder with a file of each run (default: OUT/results)")
    args = parser.parse_args()
    table = yaml.safe_load(args.table.read_text(encoding="utf-8"))
    runs = list(runs_of(table, args.only))
    if not runs:
        print(f"no arm of {args.table} matches {args.only!r}", file=sys.stderr)
        return 2
    bench = Bench(args, table)
    say(estimate(bench, runs, {"step": 0.5, "prompt": 0.6, "data": 420.0}))
    done: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        done.setdefault((run.group, run.arm), {})[run.seed] = bench.run(run)
        rows = rows_of(table, done)
        (bench.results.parent / "ablations.md").write_text(markdown(rows), encoding="utf-8")
    say(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
