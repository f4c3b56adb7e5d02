"""Is every greedy answer plain decoding's? Each drafter x shape x batch in float32, every difference audited; and keyed seeds.

    python benchmarks/exactness.py [--quick] [--only REGEX] [--out FILE.json]                     small models, 10,000 tokens a cell
    python benchmarks/exactness.py --target FOLDER [--head FOLDER]... [--out FILE.json]          the same on a real model, fewer tokens

A difference is a tie when rounding explains it (spectrain/decoding/audit.py; of drawn tokens: when coins moved by NUDGE give it, too),
otherwise a fault. A cell on small models that commits fewer than 1.5 tokens a round does not count: its commit path was hardly run.
Cells that --out already holds, made by the same code with the same settings, are not run again. Exit code 1 after a fault or a cell
that does not count.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from exactness_worlds import SIZE, Question, RealWorld, SmallWorld, World
from torch import Tensor
from tqdm import tqdm

from spectrain.decoding.audit import TIE, Difference, greedy_audit
from spectrain.decoding.generate import Result, RowResult, generate
from spectrain.decoding.policies import Adaptive
from spectrain.decoding.sampling import Coins
from spectrain.decoding.shapes import Chain, Shape, Tree
from spectrain.heads.base import HEADS, load_head
from spectrain.target.model import load_target
from spectrain.yields import Costs

ROOT = Path(__file__).resolve().parents[1]
LEAST_TAU = 1.5
NUDGE = 1e-5  # what the rounding of a pass can do to a chance; the one such difference that was looked into lay 5e-8 from its coin
CHEAP = Costs(seconds=1e-3, v=(1.0, 1.02, 1.05, 1.08), c=0.02)  # a machine on which drafting pays
CHANCES = ((0.6, 0.2, 0.1), (0.6, 0.2, 0.1), (0.5, 0.2), (0.4,))
BUSHY = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0, 0]]
SHAPES: dict[str, Shape] = {
    "chain 1": Chain(1), "chain 4": Chain(4), "line": Tree.static([[0], [0, 0], [0, 0, 0]]), "single": Tree.static([[0]]),
    "bushy": Tree.static(BUSHY), "flat": Tree.static([[0], [1], [2], [3]]), "dynamic": Tree.dynamic(3, 4, 12),
    "optimised": Tree.optimised(CHANCES, CHEAP, max_budget=10),
}  # fmt: skip
POLICIES = {kind: Adaptive(kind, costs=CHEAP if kind == "marginal" else None) for kind in ("heuristic", "confidence", "ema", "marginal")}
RULES = {"rejection": "chain 4", "block": "chain 4", "multidraft": "bushy", "traversal": "bushy", "point_mass": "dynamic"}
KINDS = tuple(HEADS)
CHAINS_ONLY = ("ngram", "oracle chain", "ngram|eagle3")
FORKS_ONLY = ("oracle tree",)
CONTEXT = ("oracle chain", "oracle tree", "small model")
REPEATING = ("ngram", "suffix", *KINDS, "suffix|eagle3", "ngram|eagle3")
DRAFTERS = (*CONTEXT, *REPEATING)


@dataclass(frozen=True)
class Cell:
    """One way to decode on one model. rule: "" for greedy, otherwise the seeds of that rule are compared. goal: tokens."""

    model: str
    drafter: str
    shape: str
    batch: int
    goal: int
    policy: str = ""
    rule: str = ""
    compile: bool | str = False
    counts: bool = True

    @property
    def name(self) -> str:
        extra = [self.policy, self.rule and f"seeds of {self.rule}", f"compile={self.compile}" if self.compile else ""]
        return " / ".join([self.model, self.drafter, *filter(None, [self.shape]), *filter(None, extra), f"batch {self.batch}"])


@dataclass
class Tally:
    """What a cell's answers came to. rounds and committed: of all rows; found: the differences."""

    tokens: int = 0
    rows: int = 0
    rounds: int = 0
    committed: int = 0
    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, rows: Sequence[RowResult], found: Sequence[dict[str, Any]]) -> None:
        self.tokens += sum(len(row.tokens) for row in rows)
        self.rows += len(rows)
        self.rounds += sum(len(row.rounds) for row in rows)
        self.committed += sum(r.committed for row in rows for r in row.rounds)
        self.found += found

    def confirmed(self, rows: int, found: Sequence[dict[str, Any]]) -> None:
        """Plain answers looked at before the cell's own."""
        self.rows += rows
        self.found += found

    def report(self, cell: Cell, seconds: float) -> dict[str, Any]:
        """The cell's line of the table."""
        tau = self.committed / max(self.rounds, 1)
        gaps = [d["gap"] for d in self.found if d["kind"] == "tie"]
        faults = [d for d in self.found if d["kind"] == "fault"]
        return {
            "tokens": self.tokens, "rows": self.rows, "tau": round(tau, 3), "equal": self.rows - len(self.found), "ties": len(gaps),
            "largest_gap": max(gaps, default=None), "faults": len(faults), "examples": faults[:3], "seconds": round(seconds, 1),
            "enough": tau >= LEAST_TAU or not cell.counts,
        }  # fmt: skip


def shapes_of(drafter: str) -> list[str]:
    """Chains for drafters that draw nothing else, forks for the one that draws nothing but forks, all for the rest."""
    kept = {True} if drafter in CHAINS_ONLY else {False} if drafter in FORKS_ONLY else {True, False}
    return [name for name, shape in SHAPES.items() if shape.is_chain in kept]


def grid(goal: int) -> list[Cell]:
    """The cells on small models: context-driven answers for drafters that know or imitate the model, repeating ones for the rest."""
    cells = [Cell(model, "plain", "", b, goal, counts=False) for model in ("llama", "calm llama", "gemma2", "table") for b in (3, 1)]
    places = [("llama", (8, 3, 1), CONTEXT), ("calm llama", (8, 3, 1), REPEATING), ("gemma2", (3,), DRAFTERS), ("table", (8,), REPEATING)]
    for model, batches, drafters in places:
        cells += [Cell(model, d, s, b, goal) for b in batches for d in drafters for s in shapes_of(d)]
    for b in (8, 3, 1):
        cells += [Cell("llama", "small model", "chain 4", b, goal, policy=kind) for kind in POLICIES]
        cells += [Cell("llama", "small model", "bushy", b, goal, policy=kind) for kind in POLICIES if kind != "confidence"]
    seeds = goal // 3
    cells += [Cell("llama", "small model", shape, 8, seeds, rule=rule, counts=False) for rule, shape in RULES.items()]
    cells += [Cell("calm llama", kind, shape, 8, seeds, rule=rule, counts=False) for kind in KINDS for rule, shape in RULES.items()]
    cells += [Cell("table", f"suffix|{kind}", shape, 8, goal) for kind in KINDS for shape in ("chain 4", "bushy") if kind != "eagle3"]
    return sorted(cells, key=lambda cell: -cell.batch)  # the cheap ones first: a run that is stopped has seen the most


def quick_grid(goal: int) -> list[Cell]:
    """One cell of every kind, without the slow parts."""
    chosen = [
        ("llama", "oracle chain", "chain 4", 8, ""), ("llama", "oracle tree", "bushy", 3, ""), ("llama", "small model", "line", 3, ""),
        ("llama", "small model", "dynamic", 8, ""), ("llama", "small model", "chain 4", 3, "heuristic"),
        ("gemma2", "ngram", "chain 4", 3, ""), ("gemma2", "small model", "bushy", 3, ""), ("gemma2", "oracle tree", "dynamic", 8, ""),
        ("table", "suffix", "bushy", 8, ""), ("table", "eagle3", "optimised", 8, ""), ("table", "suffix|eagle3", "chain 4", 3, ""),
    ]  # fmt: skip
    cells = [Cell(model, "plain", "", 3, goal, counts=False) for model in ("llama", "gemma2", "table")]
    cells += [Cell(model, drafter, shape, batch, goal, policy=policy) for model, drafter, shape, batch, policy in chosen]
    others = [kind for kind in KINDS if kind != "eagle3"]
    cells += [Cell("table", kind, shape, batch, goal) for kind in others for shape, batch in (("bushy", 8), ("dynamic", 3))]
    return cells + [Cell("llama", "small model", RULES[rule], 3, goal, rule=rule, counts=False) for rule in ("block", "traversal")]


def real_grid(model: str, depths: Mapping[str, int | None]) -> list[Cell]:
    """The cells on a real model: 500 tokens at batch 8 and 100 at batch 1, and the passes of the faster copies. depths: of the kinds of
    head that there are, the most drafts on a path (None: any)."""
    cells = [Cell(model, "plain", "", 1, 100, counts=False)]
    for batch, goal in ((8, 500), (1, 100)):
        for drafter in DRAFTERS:
            kind = next((part for part in drafter.split("|") if part in KINDS), None)
            most = 0 if kind and kind not in depths else depths.get(kind or "") or len(CHANCES)
            cells += [Cell(model, drafter, s, batch, goal, counts=False) for s in shapes_of(drafter) if SHAPES[s].depth <= most]
    for mode in (True, "auto"):
        cells += [Cell(model, d, s, 8, 500, compile=mode, counts=False) for d, s in (("suffix", "chain 4"), ("oracle tree", "bushy"))]
    return cells


def chunks(world: World, batch: int) -> Iterator[tuple[list[Question], dict[str, Any]]]:
    """Questions in batches, without end, from the world's kinds of sets by turns; and the settings that go with them."""
    for first in itertools.count(step=world.kinds):
        sets = [world.questions(first + kind) for kind in range(world.kinds)]
        for start in range(0, SIZE, batch):
            for questions in sets:
                yield questions[start : start + batch], {"eos": questions[0].eos, "max_new_tokens": world.new_tokens}


def settings_of(world: World, cell: Cell) -> dict[str, Any]:
    """What `generate` gets besides prompts, ends and lengths."""
    if cell.drafter == "plain":
        return {"compile": cell.compile}
    policy = POLICIES[cell.policy] if cell.policy else None
    return {"drafter": world.drafter(cell.drafter), "shape": SHAPES[cell.shape], "policy": policy, "compile": cell.compile}


def run_cell(world: World, cell: Cell) -> dict[str, Any]:
    """Decode until the cell has its tokens; returns its line of the table."""
    tally, settings = Tally(), settings_of(world, cell)
    started = time.perf_counter()
    if cell.drafter == "plain":
        tally.confirmed(*world.confirm())
    for number, (questions, ends) in enumerate(chunks(world, cell.batch), 1):
        prompts = [q.prompt for q in questions]
        if cell.rule:
            rows, found = compare_seeds(world, prompts, {**settings, **ends, "rule": cell.rule})
        else:
            rows, found = compare_greedy(world, questions, {**settings, **ends}, ends)
        tally.add(rows, found)
        if tally.tokens >= cell.goal and number % world.kinds == 0:
            return tally.report(cell, time.perf_counter() - started)
    raise AssertionError("chunks never end")


def compare_greedy(
    world: World, questions: Sequence[Question], settings: dict[str, Any], ends: dict[str, Any]
) -> tuple[list[RowResult], list[dict[str, Any]]]:
    """Answers, and where they are not plain decoding's: in their tokens, their end, or the record of their rounds."""
    prompts = [q.prompt for q in questions]
    result = generate(world.target, prompts, **settings)
    plain = Result(rows=[q.answer for q in questions], seconds=0.0)
    audit = greedy_audit(world.target, prompts, result, plain=plain, **ends)
    found = [told(d, questions) for d in audit.differences]
    different = {d.row for d in audit.differences}
    for b, (row, question) in enumerate(zip(result.rows, questions, strict=True)):
        wrong = (row.finish_reason, row.text) != (question.answer.finish_reason, question.answer.text) and b not in different
        miscounted = 1 + sum(r.committed for r in row.rounds) != len(row.tokens) or any(r.accepted > r.drafted for r in row.rounds)
        if wrong or miscounted:
            what = "its end" if wrong else "the record of its rounds"
            found.append({"kind": "fault", "gap": None, "what": what, "prompt": list(question.prompt)})
    return result.rows, found


def told(d: Difference, questions: Sequence[Question]) -> dict[str, Any]:
    return {"kind": d.kind, "gap": d.gap, "what": f"token {d.at}: {d.tokens[0]} for {d.tokens[1]}", "prompt": list(questions[d.row].prompt)}


def compare_seeds(world: World, prompts: Sequence[Any], settings: dict[str, Any]) -> tuple[list[RowResult], list[dict[str, Any]]]:
    """Sampled answers of a batch, and the rows that are not what the same seed gives alone."""
    settings = {**settings, "temperature": 0.8}
    rows = generate(world.target, prompts, seed=11, **settings).rows
    found = []
    for prompt, row in zip(prompts, rows, strict=True):
        asked = {"prompts": [prompt], "seed": row.seed, **settings}
        alone = generate(world.target, **asked).rows[0]
        if alone.tokens != row.tokens:
            both = min(len(alone.tokens), len(row.tokens))
            at = next((i for i in range(both) if alone.tokens[i] != row.tokens[i]), both)
            is_tie = any(nudged(world, asked, by)[: at + 1] == row.tokens[: at + 1] for by in (NUDGE, -NUDGE))
            what = f"seed {row.seed}, token {at}: not what it is alone"
            found.append({"kind": "tie" if is_tie else "fault", "gap": NUDGE if is_tie else None, "what": what, "prompt": list(prompt)})
    return rows, found


def nudged(world: World, asked: dict[str, Any], by: float) -> list[int]:
    """The tokens of one row with every coin moved by so much: another one than before shows a coin that lay so close to its border."""
    uniform = Coins.uniform

    def moved(coins: Coins, nodes: int | Tensor, role: str, number: int = 0) -> Tensor:
        return (uniform(coins, nodes, role, number) + by).clamp(0.0, 1 - 2**-53)

    with mock.patch.object(Coins, "uniform", moved):
        tokens: list[int] = generate(world.target, **asked).rows[0].tokens
    return tokens


class Store:
    """Finished cells, in memory and in a file where one is given."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self.cells: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            held = json.loads(path.read_text())
            if held["settings"] == settings:
                self.cells = held["cells"]
            else:
                tqdm.write(f"{path} was made by other code or with other settings: all cells are run again")

    def add(self, name: str, line: dict[str, Any]) -> None:
        self.cells[name] = line
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_name(self._path.name + ".part")
            part.write_text(json.dumps({"settings": self._settings, "cells": self.cells}, indent=1) + "\n")
            os.replace(part, self._path)


def code_hash() -> str:
    """Of every line that has a part in the result."""
    here = Path(__file__).parent
    files = sorted([*(ROOT / "spectrain").rglob("*.py"), *here.glob("exactness*.py"), here / "small_models.py"])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def run(cells: Sequence[Cell], worlds: dict[str, World], store: Store) -> dict[str, dict[str, Any]]:
    """Run the cells that the store lacks; returns the line of each."""
    with tqdm(cells, unit="cell", disable=None) as bar:
        for cell in bar:
            bar.set_description(cell.name)
            if cell.name not in store.cells:
                store.add(cell.name, run_cell(worlds[cell.model], cell))
    return {cell.name: store.cells[cell.name] for cell in cells}


def small_worlds(*, quick: bool, device: str = "cpu") -> dict[str, World]:
    return {name: SmallWorld(name, quick=quick, device=device) for name in ("llama", "calm llama", "gemma2", "table")}


def failed(line: dict[str, Any]) -> bool:
    return line["faults"] > 0 or not line["enough"]


def table(lines: dict[str, dict[str, Any]]) -> str:
    """The result to read."""
    width = max(map(len, lines))
    rows = [f"{'cell':{width}}  tokens    tau  equal         ties (largest gap)  faults"]
    for name, x in lines.items():
        gap = "" if x["largest_gap"] is None else f" ({x['largest_gap']:.1e})"
        equal, note = f"{x['equal']}/{x['rows']}", "" if x["enough"] else f"  tau below {LEAST_TAU}: does not count"
        rows.append(f"{name:{width}}  {x['tokens']:6}  {x['tau']:5.2f}  {equal:12}  {x['ties']:4}{gap:16}  {x['faults']:4}{note}")
        rows += [f"    {e['what']} (prompt {e['prompt']})" for e in x["examples"]]
    total = {key: sum(x[key] for x in lines.values()) for key in ("tokens", "rows", "equal", "ties", "faults")}
    gaps = [x["largest_gap"] for x in lines.values() if x["largest_gap"] is not None]
    rows.append(
        f"{len(lines)} cells, {total['tokens']} tokens, {total['equal']} of {total['rows']} answers equal, {total['ties']} ties"
        f" (largest gap {max(gaps, default=0.0):.1e}, a tie is below {TIE:.0e}), {total['faults']} faults,"
        f" {sum(not x['enough'] for x in lines.values())} cells that do not count"
    )
    return "\n".join(rows)


def kind_of(head: Any) -> str:
    """The name of a head's family in `HEADS`."""
    return next(kind for kind, where in HEADS.items() if where.endswith(":" + type(head).__name__))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a real model instead of the small ones: folder, .gguf file or Hub name")
    parser.add_argument("--head", type=Path, action="append", default=[], help="a head directory for it; once for each kind")
    parser.add_argument("--quick", action="store_true", help="a small grid with few tokens")
    parser.add_argument("--tokens", type=int, help="tokens a cell on small models (10000; quick: 400)")
    parser.add_argument("--only", default="", help="only cells whose name this regular expression finds")
    parser.add_argument("--device", default="cpu", help="where the models answer, such as cuda")
    parser.add_argument("--out", type=Path, help="JSON file of the result; cells in it are not run again")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.target is None else torch.get_num_threads())  # on tensors this small, threads wait for each other
    tokens = args.tokens or (400 if args.quick else 10_000)
    if args.target is None:
        cells, worlds = (quick_grid if args.quick else grid)(tokens), small_worlds(quick=args.quick, device=args.device)
        if args.device != "cpu":  # plain decoding, the reference, stays eager
            cells = [replace(cell, compile="auto") for cell in cells]
    else:
        name = Path(args.target).name
        heads = {kind_of(head): head for head in (load_head(folder, device=args.device) for folder in args.head)}
        if len(heads) < len(args.head):
            parser.error("two heads are of one kind; run the grid once for each of them")
        worlds = {name: RealWorld(load_target(args.target, device=args.device), heads, ROOT / "eval/prompts")}
        cells = real_grid(name, {kind: head.max_depth for kind, head in heads.items()})
    settings = {
        "code": code_hash(), "torch": torch.__version__, "transformers": transformers.__version__, "quick": args.quick, "tokens": tokens,
        "device": args.device, "cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
    }  # fmt: skip
    chosen = [cell for cell in cells if re.search(args.only, cell.name)]
    if not chosen:
        parser.error(f"--only {args.only!r} fits none of the {len(cells)} cells, the first of which is {cells[0].name!r}")
    lines = run(chosen, worlds, Store(args.out, settings))
    print(table(lines))
    return int(any(map(failed, lines.values())))


if __name__ == "__main__":
    raise SystemExit(main())
