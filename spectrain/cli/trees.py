"""`spectrain evaluate --write-tree` and `--tree`: a tree made from a head's measured acceptance, and what must be told when it is used."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spectrain.cli.probe import Probe
from spectrain.cli.wiring import as_drafter
from spectrain.config import EvaluationConfig, ShapeConfig
from spectrain.data.rows import Row
from spectrain.decoding.shapes import StaticTree, Tree
from spectrain.evaluation.processes import ALONE, Processes
from spectrain.evaluation.schema import check_tree_file
from spectrain.evaluation.speed import measure_costs
from spectrain.evaluation.suites import suite_hash, suite_of, suite_prompts
from spectrain.evaluation.trees import BUDGETS, WIDTH, fitted, joined, rising, sentence
from spectrain.target.model import Target
from spectrain.target.passes import for_all
from spectrain.yields import Costs

COST_CONTEXT = 256
TIMED = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 1 + max(BUDGETS))  # positions of the passes that are timed


def measured_tree(
    target: Target, head: Any, rows: Sequence[Row], shapes: ShapeConfig, costs: Costs, *, max_new_tokens: int, batch_size: int,
    processes: Processes = ALONE,
) -> dict[str, Any]:  # fmt: skip
    """Counts and trees (`evaluation.trees.fitted`) from the target's greedy answers to the prompts of some rows; what else the rows hold
    plays no part. As deep as the head drafts, or as the settings' chain and tree. Several processes share the batches."""
    depth = head.max_depth or max(shapes.chain, shapes.tree_depth)
    sizes = shapes.model_copy(update={"chain": depth, "tree_depth": depth, "tree_top_k": max(WIDTH, shapes.tree_top_k)})
    found = []
    for start in processes.share(range(0, len(rows), batch_size)):
        probe = Probe(target, rows[start : start + batch_size], sizes, as_drafter, max_new_tokens=max_new_tokens)
        found.append((start, probe.ranks(head), [row.domain for row in probe.rows]))
    parts = processes.gathered(found)
    parts.sort(key=lambda part: part[0])
    domains = [domain for _, _, told in parts for domain in told]
    return fitted(joined([ranks for _, ranks, _ in parts]), domains, costs, nodes=shapes.tree_budget)


def write_tree(
    target: Target, head: Any, config: EvaluationConfig, path: Path, root: Path, *, versions: Mapping[str, str], machine: str, say: Any,
    processes: Processes = ALONE,
) -> dict[str, Any]:  # fmt: skip
    """`write_tree_of` for the prompts of the settings' suite."""
    suite = suite_of(config, root)
    prompts = [p for rows in suite_prompts(suite, target, root).values() for p in rows]
    rows = []
    for p in prompts:
        ids = target.encode(p.chat, **suite.template_kwargs)
        rows.append(Row(p.id, p.domain, np.array([*ids, 0]), np.array([0] * len(ids) + [1])))
    return write_tree_of(
        target, head, rows, config, path, source={"name": f"{suite.name} v{suite.version}", "sha256": suite_hash(suite)},
        max_new_tokens=suite.max_new_tokens, versions=versions, machine=machine, say=say, processes=processes,
    )  # fmt: skip


def write_tree_of(
    target: Target, head: Any, rows: Sequence[Row], config: EvaluationConfig, path: Path, *, source: Mapping[str, str],
    max_new_tokens: int, versions: Mapping[str, str], machine: str, say: Any, processes: Processes = ALONE,
) -> dict[str, Any]:  # fmt: skip
    """Measure a head's acceptance on the prompts of some rows, write the file of its tree, and say what it is; returns what was written.

    source: name and hash of what the rows are of.
    """
    check_place(path)
    mode = for_all(target, config.compile, passes=len(rows) * max_new_tokens)
    timed = processes.alike(lambda: measure_costs(target, as_drafter(head), context=COST_CONTEXT, sizes=TIMED, compile=mode))
    costs, warning = rising(timed)
    found = measured_tree(
        target, head, rows, config.shapes, costs, max_new_tokens=max_new_tokens, batch_size=config.batch_size, processes=processes
    )
    content = {
        "format": 1, **found, "costs": {"seconds": costs.seconds, "v": list(costs.v), "c": costs.c},
        "warnings": [warning] if warning else [],
        "head": {"kind": type(head).__name__, "sha256": weights_of(head)}, "target": {"name": target.name, **target.fingerprints},
        "suite": dict(source), "prompts": [prompt_hash(row.prompt_ids) for row in rows],
        "settings": {
            "temperature": 0.0, "max_new_tokens": max_new_tokens, "context_of_costs": COST_CONTEXT, "compile": mode,
            "dtype": str(target.model.dtype).removeprefix("torch."), "machine": machine,
        },
        "versions": dict(versions), "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip
    if processes.leads:
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(content) + "\n", encoding="utf-8")
        part.replace(path)
    say(sentence(content))
    if warning:
        say(f"warning: {warning}")
    return content


def check_place(path: Path) -> None:
    """Make the folder of a tree's file; ValueError or OSError where no such file can be written."""
    if path.suffix != ".json":
        raise ValueError(f"a tree is written as JSON, found {path}; name it {path.with_suffix('.json')}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file inside it, such as {path / 'tree.json'}")
    path.parent.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class GivenTree:
    """The tree of a file, and what the file says of it (nothing where it is a list of paths)."""

    path: str
    shape: StaticTree
    content: Mapping[str, Any]


def given_tree(config: EvaluationConfig, root: Path, head: Any) -> GivenTree | None:
    """The tree that the settings name; ValueError for one that this head cannot draft."""
    tree, told = read_tree(config, root), config.tree
    if tree is None:
        return None
    if head is None:
        raise ValueError(f"the tree of {told} is drafted by a head; add --head FOLDER")
    shape = tree.shape
    if head.max_depth is not None and shape.depth > head.max_depth:
        kind = type(head).__name__
        raise ValueError(
            f"the tree of {told} has depth {shape.depth}, this {kind} drafts at most {head.max_depth} tokens in a row; measure a tree of "
            "its own with --write-tree FILE"
        )
    return tree


def read_tree(config: EvaluationConfig, root: Path) -> GivenTree | None:
    """The tree that the settings name, whatever head drafts it; ValueError for a damaged file or one without such a tree."""
    if config.tree is None:
        if config.tree_nodes is not None:
            raise ValueError("tree_nodes picks a tree of a file; name the file with --tree FILE")
        return None
    path, told = root / config.tree, config.tree
    shape = Tree.load(path, config.tree_nodes)
    found = json.loads(path.read_text(encoding="utf-8"))
    content = found if isinstance(found, dict) else {}
    if content:
        check_tree_file(content, told)
    if not content and not shape.paths:
        raise ValueError(f"{told} is a list without paths, so there is no tree to measure; leave --tree out")
    if not shape.paths:
        sizes = ", ".join(str(entry["nodes"]) for entry in content["budgets"])
        raise ValueError(f"{told} says that no tree pays at batch 1; measure one of its others with --set tree_nodes=N, of {sizes} nodes")
    return GivenTree(told, shape, content)


def tree_notes(
    tree: GivenTree, target: Target, head: Any, prompts: Sequence[Any], *, temperature: float, template: Mapping[str, Any]
) -> list[str]:  # fmt: skip
    """What a reader must know of a tree's figures: where it comes from, what was expected of it, and what flatters or hampers it here.

    template: switches of the chat template, by which prompts are told apart as they were when the tree was made.
    """
    content = tree.content
    if not content:
        return [f"The static tree is a list of paths from {tree.path}; where it comes from is not known."]
    own = (entry for entry in (content["tree"], *content["budgets"]) if set(map(tuple, entry["paths"])) == set(tree.shape.paths))
    tau = next((entry["tau"] for entry in own), None)
    expected = "" if tau is None else f", where tau {tau:.2f} was expected of it at temperature 0 on prompts it is not fitted to"
    notes = [f"The static tree of {tree.path} was made from acceptance measured on {content['suite']['name']}{expected}."]
    if content["head"]["sha256"] != weights_of(head):
        notes.append(
            f"It was measured with another head ({content['head']['kind']}, of other weights), so this head may want another tree: "
            "measure its own with --write-tree."
        )
    known = set(content["prompts"])
    same = sum(prompt_hash(target.encode(p.chat, **template)) in known for p in prompts)
    if same:
        notes.append(
            f"It was fitted to {same} of the {len(prompts)} prompts of this evaluation, so its tau here is flattered: measure it on other "
            "prompts, such as those of another suite."
        )
    if temperature:
        notes.append(
            "Its ranks were counted at temperature 0. Here its children are drawn, and draw k is accepted otherwise than choice k: "
            "the form is not made for this."
        )
    return notes


def weights_of(head: Any) -> str:
    """Hash of a head's weights and tables."""
    found = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        found.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def prompt_hash(ids: Sequence[int]) -> str:
    """Hash of a prompt's token ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]
