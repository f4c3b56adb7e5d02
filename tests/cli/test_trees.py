"""`evaluate --write-tree` and `--tree`: the counts are those of the generator's rounds, and what flatters a tree is told."""

import importlib
import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from spectrain.cli import trees as stage
from spectrain.cli.evaluate import evaluate
from spectrain.cli.probe import Probe
from spectrain.cli.trees import given_tree, read_tree, tree_notes, write_tree
from spectrain.cli.wiring import as_drafter
from spectrain.config import EvaluationConfig, HeadConfig, Suite, load_config
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Tree
from spectrain.evaluation import measure
from spectrain.evaluation.render import parse_report
from spectrain.evaluation.suites import suite_prompts
from spectrain.heads.base import HEADS, save_head
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target
from spectrain.training.setup import made_with, new_head
from spectrain.yields import Costs

evaluation = importlib.import_module("spectrain.cli.evaluate")  # the package has a command of this name
CHEAP = Costs(seconds=1.0, v=tuple(1.0 + 0.01 * n for n in range(65)), c=0.01)
SHAPES = {"chain": 2, "ngram": 2, "tree_top_k": 3, "tree_depth": 3, "tree_budget": 6}
Made = tuple[Path, dict[str, Any], list[str]]


@pytest.fixture(scope="module")
def small(make_target: Callable[..., Target]) -> Target:
    """Of so few words that a head that knows nothing is often right."""
    return make_target(vocab=12, seed=3)


@pytest.fixture(scope="module")
def head(small: Target, make_head: Callable[..., Any]) -> Any:
    return make_head(small, draft_vocab=10)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two suites over the same prompts, of which one passes over those of the other."""
    folder = tmp_path_factory.mktemp("suites")
    (folder / "eval/suites").mkdir(parents=True)
    for domain in ("red", "blue"):
        rows = [{"id": f"{domain}{i}", "domain": domain, "prompt": f"w{6 + i % 6} w{8 + i // 6} w{6 + len(domain)}"} for i in range(12)]
        (folder / f"eval/{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "version: 1\nfolder: eval\nprompts: {red: 4, blue: 4}\nmax_prompt_tokens: 30\nmax_new_tokens: 24\n"
    (folder / "eval/suites/one.yaml").write_text(f"name: one\n{text}")
    (folder / "eval/suites/other.yaml").write_text(f"name: other\n{text}skip: 4\n")
    return folder


def config(suite: str = "one", **changes: Any) -> EvaluationConfig:
    small = {"batch_size": 3, "speed_prompts": 1, "speed_max_new_tokens": 4, "compile": False, "shapes": SHAPES}
    return EvaluationConfig(suite=f"eval/suites/{suite}.yaml", **{**small, **changes})


@pytest.fixture(scope="module")
def made(small: Target, head: Any, root: Path) -> Made:
    """File, content and what was said of a tree whose nodes cost nearly nothing."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "measure_costs", lambda *args, **settings: CHEAP)
        content = write_tree(small, head, config(), root / "made/t.json", root, versions={"spectrain": "0"}, machine="m", say=said.append)
    return root / "made/t.json", content, said


def test_file_says_something_else(made: Made, small: Target, head: Any, root: Path) -> None:
    path, content, said = made
    with pytest.raises(ValueError, match="written as JSON, found t.txt; name it t.json"):
        write_tree(small, head, config(), Path("t.txt"), root, versions={}, machine="m", say=said.append)
    assert json.loads(path.read_text()) == json.loads(json.dumps(content)) and list(path.parent.iterdir()) == [path]
    assert content["head"] == {"kind": "Eagle3", "sha256": stage.weights_of(head)} and len(content["prompts"]) == 8
    assert content["target"] == {"name": "tiny", **small.fingerprints} and content["suite"]["name"] == "one v1"
    assert list(content["counts"]["by_domain"]) and set(content["counts"]["by_domain"]) == {"red", "blue"}
    assert len(content["counts"]["all"]["numerator"]) == 3 and {len(row) for row in content["counts"]["all"]["numerator"]} == {10}
    assert content["costs"]["v"] == list(CHEAP.v) and content["settings"]["temperature"] == 0.0
    (line,) = said
    assert line.startswith(f"A tree of {content['tree']['nodes']} nodes, depth {content['tree']['depth']}, width ")
    assert Tree.load(path).paths == tuple(map(tuple, content["tree"]["paths"]))


def test_counts_are_not_those_of_the_rounds(made: Made, small: Target, head: Any, root: Path) -> None:
    """The rounds of the generator with the tree that the counts walk: at depth 1 each counts once, but for those that an end cuts."""
    _, content, _ = made
    prompts = [p for rows in suite_prompts(load_config(Suite, root / "eval/suites/one.yaml"), small, root).values() for p in rows]
    table = _all_rows(small, head, prompts)
    for nodes in (3, 6):
        shapes = config(shapes={**SHAPES, "tree_budget": nodes}).shapes
        found = stage.measured_tree(small, head, rows_of(small, prompts), shapes, CHEAP, max_new_tokens=24, batch_size=5)
        every = Tree.optimised(table, Costs(1.0, (1.0, 1.0), 0.0), max_budget=nodes)
        rows = generate(small, [p.chat for p in prompts], drafter=as_drafter(head), shape=every, max_new_tokens=24).rows
        rounds = [r for row in rows for r in row.rounds]
        counts = found["counts"]["all"]
        assert counts["denominator"][0] == len(rounds) > 20
        first = sum(counts["numerator"][0][m] for m in range(10) if (m,) in every.paths)
        assert first == sum(r.accepted >= 1 for r in rounds) > 5
    assert content["counts"]["all"] == counts, "batches of another size count otherwise"


def rows_of(target: Target, prompts: Any) -> list[Row]:
    return [Row(p.id, p.domain, np.array([*(ids := target.encode(p.chat)), 0]), np.array([0] * len(ids) + [1])) for p in prompts]


def _all_rows(target: Target, head: Any, prompts: Any) -> list[list[float]]:
    """The head's acceptance by depth and rank over all places of the answers, token by token through its own drafts."""
    hits, tries = [[0] * 10 for _ in range(3)], [0] * 3
    for p in prompts:
        answer = generate(target, [p.chat], max_new_tokens=24).rows[0].tokens
        ids = target.encode(p.chat)
        for place in range(1, len(answer)):
            known = True
            for depth in range(min(3, len(answer) - place)):
                if not known:
                    break
                rank = _rank(target, head, ids + answer[: place], answer[place : place + depth], answer[place + depth])
                tries[depth] += 1
                known = rank < 10
                if known:
                    hits[depth][rank] += 1
    return [[hit / n for hit in row] for row, n in zip(hits, tries, strict=True)]


def _rank(target: Target, head: Any, ids: list[int], drafts: list[int], token: int) -> int:
    """Place of a token among the head's choices after some settled tokens and right drafts."""
    states = target.forward(
        torch.tensor([ids[:-1]]), positions_BN=(cache := target.new_cache(1, len(ids))).stage(len(ids) - 1),
        mask=target.prompt_masks(cache, torch.arange(len(ids) - 1)[None]), cache=cache, layer_ids=head.layer_ids,
    ).states_BNF  # fmt: skip
    layers, heads, size = head.cache_layers
    own = SlabCache(
        layers=layers, rows=1, kv_heads=heads, head_dim=size, max_length=len(ids) + 8, dtype=torch.float32, device=target.device
    )  # fmt: skip
    with torch.no_grad():
        logits, state = head.begin(states, torch.tensor([ids[1:]]), torch.tensor([len(ids) - 1]), target.embedding_VW, own, None)
        for n, draft in enumerate(drafts):
            logits, state = head.extend(state, torch.tensor([[draft]]), torch.tensor([[n]]), target.embedding_VW, own)
            logits = logits[:, -1]
    order = head.target_ids[logits[0].topk(10).indices].tolist()
    return order.index(token) if token in order else 10


@pytest.mark.parametrize("kind", HEADS)
def test_another_kind_has_other_ranks_than_it_drafts(kind: str, small: Target, root: Path) -> None:
    """Every family: the tree of its counts accepts in the generator what its ranks say, and is no deeper than the head drafts."""
    reads = (1, 2) if kind == "eagle3" else None
    recipe = HeadConfig(kind=kind, draft_vocab_size=10, init_layer="random", num_heads=2, layer_ids=reads)
    head = new_head(recipe, small, (), seed=0, counts_V=torch.arange(12, 0, -1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:  # blocks begin at zero
                weight.add_(0.5 * torch.randn(weight.shape, generator=generator))
    prompts = [p for rows in suite_prompts(load_config(Suite, root / "eval/suites/one.yaml"), small, root).values() for p in rows]
    rows = rows_of(small, prompts)
    shapes = config().shapes
    found = stage.measured_tree(small, head.eval(), rows, shapes, CHEAP, max_new_tokens=24, batch_size=9)
    depth = head.max_depth or 3
    assert len(found["counts"]["all"]["denominator"]) == depth and depth == (2 if kind in ("medusa", "hydra") else 3)
    tree = Tree.static(next(entry["paths"] for entry in found["budgets"] if entry["nodes"] == 8))
    probe = Probe(small, rows, shapes.model_copy(update={"tree_top_k": 10}), as_drafter, max_new_tokens=24)
    measured, simulated = probe.measured(head, tree), probe.simulated(probe.ranks(head), tree)
    assert tree.depth <= depth and measured.by_domain == simulated.by_domain and measured.tau > 1.2


def test_tree_is_measured_as_another(made: Made, small: Target, head: Any, root: Path, tmp_path: Path) -> None:
    """The arm's rounds are the tree's, its tau is compared with what the file expects, and prompts that made it are told."""
    path, content, _ = made
    report = evaluate(small, head, config(tree=str(path)), tmp_path, root, extra={"versions": {}}, say=lambda text: None)
    arm = next(arm for arm in report["arms"] if arm["name"] == "head tree:t.json")
    assert (arm["budget"], arm["depth"], arm["rule"]) == (content["tree"]["nodes"], content["tree"]["depth"], "greedy")
    parse_report(json.loads(json.dumps(report)))
    assert report["exactness"]["head tree:t.json"]["equal"] == report["exactness"]["head tree:t.json"]["prompts"]
    notes = " ".join(report["notes"])
    assert f"tau {content['tree']['tau']:.2f} was expected" in notes and "fitted to 8 of the 8 prompts" in notes
    assert "another head" not in notes and "counted at temperature 0" not in notes
    assert report["tau"]["head tree:t.json"]["all (micro)"]["tau"] > report["tau"]["head chain:2"]["all (micro)"]["tau"]
    smaller = given_tree(config(tree=str(path), tree_nodes=content["budgets"][0]["nodes"]), root, head)
    assert smaller is not None and smaller.shape.budget == content["budgets"][0]["nodes"]
    others = [p for rows in suite_prompts(load_config(Suite, root / "eval/suites/other.yaml"), small, root).values() for p in rows]
    notes = " ".join(tree_notes(smaller, small, head, others, temperature=0.0, template={}))
    assert "flattered" not in notes and f"tau {content['budgets'][0]['tau']:.2f} was expected" in notes


def test_foreign_tree_is_taken_for_the_heads_own(made: Made, small: Target, make_head: Callable[..., Any], root: Path) -> None:
    path, _, _ = made
    other = make_head(small, draft_vocab=10, seed=1)
    tree = given_tree(config(tree=str(path)), root, other)
    assert tree is not None
    notes = " ".join(tree_notes(tree, small, other, [], temperature=1.0, template={}))
    assert "measured with another head (Eagle3, of other weights)" in notes and "counted at temperature 0" in notes
    listed = root / "list.json"
    listed.write_text("[[0], [1]]")
    own = given_tree(config(tree=str(listed)), root, other)
    assert own is not None and "where it comes from is not known" in tree_notes(own, small, other, [], temperature=0.0, template={})[0]


def test_tree_that_cannot_be_drafted_is_accepted(made: Made, head: Any, root: Path) -> None:
    path, content, _ = made
    depth = content["tree"]["depth"]
    with pytest.raises(ValueError, match=rf"has depth {depth}, this SimpleNamespace drafts at most {depth - 1} tokens.*--write-tree"):
        given_tree(config(tree=str(path)), root, types.SimpleNamespace(max_depth=depth - 1))
    assert given_tree(config(tree=str(path)), root, types.SimpleNamespace(max_depth=depth)) is not None
    with pytest.raises(ValueError, match="add --head"):
        given_tree(config(tree=str(path)), root, None)
    with pytest.raises(ValueError, match="name the file with --tree"):
        given_tree(config(tree_nodes=4), root, head)
    none = root / "none.json"
    none.write_text(json.dumps({**content, "tree": {"paths": [], "nodes": 0, "tau": None}}))
    with pytest.raises(ValueError, match="no tree pays at batch 1; measure one of its others with --set tree_nodes=N, of 4, "):
        given_tree(config(tree=str(none)), root, head)
    assert given_tree(config(tree=str(none), tree_nodes=4), root, head).shape.budget == 4  # type: ignore[union-attr]
    assert given_tree(config(), root, None) is None
    none.write_text("[]")
    with pytest.raises(ValueError, match="none.json is a list without paths.*leave --tree out"):
        given_tree(config(tree=str(none)), root, head)


FAULTS = {
    "format": 2, "tree": None, "tree.paths": [[1, 0]], "tree.nodes": 1.5, "tree.tau": "2.1", "budgets": {}, "budgets.0.paths": [["0"]],
    "budgets.0.nodes": 5, "budgets.0.tau": float("nan"), "head": [], "head.kind": None, "head.sha256": 3, "suite": "one", "suite.name": 1,
    "prompts": [1],
}  # fmt: skip


@pytest.mark.parametrize("place", FAULTS)
@pytest.mark.parametrize("way", ["changed", "left out"])
def test_damage_of_a_file_shows_after_the_work(place: str, way: str, made: Made, root: Path) -> None:
    """Every key that is read later is looked at when the file is, and the message names it."""
    content = json.loads(made[0].read_text())
    *above, last = place.split(".")
    part = content
    for key in above:
        part = part[int(key) if key.isdigit() else key]
    part[last] = FAULTS[place]
    if way == "left out":
        del part[last]
    (root / "damaged.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="damaged.json") as found:
        read_tree(config(tree="damaged.json"), root)
    assert last in str(found.value) or "path 0 is" in str(found.value) or "path 0," in str(found.value) or "TypeError" in str(found.value)


def test_tree_of_equal_size_lends_its_figures(made: Made, small: Target, head: Any, root: Path) -> None:
    content = json.loads(made[0].read_text())
    size = content["budgets"][0]["nodes"]
    content["tree"] = {**content["tree"], "paths": [[9 - i] for i in range(size)], "nodes": size, "tau": 7.77}
    (root / "equal.json").write_text(json.dumps(content))
    told = []
    for nodes in (None, size):
        tree = read_tree(config(tree="equal.json", tree_nodes=nodes), root)
        assert tree is not None
        told += tree_notes(tree, small, head, [], temperature=0.0, template={})
    assert "tau 7.77 was expected" in told[0] and f"tau {content['budgets'][0]['tau']:.2f} was expected" in told[1]


def test_stopped_draws_end_elsewhere(
    made: Made, small: Target, head: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at temperature 1, in tau and again in the timed part: all answers and rounds are those of the unbroken run."""
    short = (root / "eval/suites/one.yaml").read_text().replace("red: 4, blue: 4", "red: 2, blue: 2").replace("_tokens: 24", "_tokens: 9")
    (root / "eval/suites/short.yaml").write_text(short)
    settings = {"temperature": 1.0, "tree": str(made[0]), "shapes": {**SHAPES, "chain": 1}}

    def run(out: Path) -> dict[Any, Any]:
        evaluate(small, head, config("short", **settings), out, root, extra={"versions": {}}, say=lambda text: None)
        rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
        assert len({row["key"] for row in rows}) == len({(row["arm"], row["mode"]) for row in rows}) - 1  # the baseline has plain's
        return {(row["arm"], row["mode"], row["id"]): (row["tokens"], [r[:3] for r in row["rounds"]]) for row in rows}

    monkeypatch.setattr(evaluation, "advise_depth", lambda survival, costs: (1, 1.5))
    whole = run(tmp_path / "whole")
    calls: list[int] = []

    def stopping(*args: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) in (5, 18):
            raise KeyboardInterrupt
        return generate(*args, **settings)

    monkeypatch.setattr(measure, "generate", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped")
    lines = [json.loads(line) for line in (tmp_path / "stopped/records.jsonl").read_text().splitlines()]
    assert len(lines) < len(whole) and {line["mode"] for line in lines} == {"tau", "speed"}
    assert run(tmp_path / "stopped") == whole and len({tuple(tokens) for tokens, _ in whole.values()}) > 8


@pytest.fixture
def on_disk(small: Target, head: Any, root: Path, save_target: Callable[..., Path]) -> list[Any]:
    """Options that name the target and the head as folders."""
    if not (root / "head").exists():
        save_target(small, root / "target")
        save_head(head, root / "head", run_yaml="", made_with=made_with(small, {}))
    return ["--target", root / "target", "--head", root / "head"]


@pytest.mark.slow
def test_commands_make_and_measure_and_draft_the_tree(root: Path, on_disk: list[Any], cli: Callable[..., Result], tmp_path: Path) -> None:
    suite, both = root / "eval/suites/one.yaml", on_disk
    small = ["--set=speed_max_new_tokens=4", "--set=speed_prompts=1", "--set=compile=false"]
    result = cli("evaluate", *both, "--suite", suite, "--write-tree", tmp_path / "t.json", *small)
    assert result.exit_code == 0, result.output
    assert ("A tree of" in result.output or "A chain of" in result.output or "No tree is predicted to pay" in result.output), result.output
    content = json.loads((tmp_path / "t.json").read_text())
    assert not (tmp_path / "out").exists() and content["head"]["kind"] == "Eagle3"
    nodes = content["budgets"][0]["nodes"]
    result = cli("evaluate", *both, "--suite", suite, "--tree", tmp_path / "t.json", "--out", tmp_path / "out", "--temperature", 1, *small,
                 f"--set=tree_nodes={nodes}")  # fmt: skip
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    rules = ("ngram chain:8 by rule point_mass", "head chain:4 by rule block", "head tree:4x5x15 by rule point_mass")
    assert f"Draws at temperature 1: {', '.join(rules)}" in told
    assert "head tree:t.json by rule traversal" in told and "comparing every answer" not in told
    listed = tmp_path / "l.json"
    listed.write_text(json.dumps(content["budgets"][0]["paths"]))
    ask = ["generate", "w12 w44", *both, "--max-new-tokens", 9, "--json"]
    tree, plain = (json.loads(cli(*ask, *more).stdout) for more in (["--tree-file", listed], ["--drafter", "none"]))
    assert tree["tokens"] == plain["tokens"] and tree["drafted"] == nodes * tree["rounds"]
    listed.write_text("[]")
    told = cli("generate", "w12 w44", *both, "--max-new-tokens", 3, "--tree-file", listed)
    assert told.exit_code == 0 and "l.json has no nodes" in " ".join(told.output.split())
    alone = cli("generate", "w12 w44", *both[:2], "--tree-file", listed)
    assert alone.exit_code == 1 and "add --head FOLDER" in alone.stderr


def test_place_of_the_file_is_looked_at_after_the_work(root: Path, on_disk: list[Any], cli: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "d.json").mkdir()
    (tmp_path / "f").touch()
    write = ["evaluate", "--target", "nowhere/at/all", *on_disk[2:], "--suite", root / "eval/suites/one.yaml", "--write-tree"]
    for name, said in (("t.txt", "name it .*t.json"), ("d.json", "is a folder; name a file inside it"), ("f/t.json", "exists.*f")):
        result = cli(*write, tmp_path / name)
        assert result.exit_code == 1 and re.search(said, result.stderr), result.output
    result = cli(*write, tmp_path / "new/t.json", "--out", tmp_path / "o")
    assert result.exit_code == 2 and "give one of them" in " ".join(result.stderr.split()), result.output


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 2, "--out FOLDER is needed"), (["--write-tree", "t.json", "--head", "h", "--temperature", 1], 1, "counts greedy answers"),
        (["--write-tree", "t.json"], 1, "add --head FOLDER"), (["--out", "o", "--tree", "missing.json"], 1, "no file .*missing.json"),
        (["--out", "o", "--temperature", -1], 1, "temperature"), (["--out", "o", "--set", "temperature=nan"], 1, "temperature"),
    ],
)  # fmt: skip
def test_useless_options_start_the_work(options: list[Any], code: int, said: str, project: Path, cli: Callable[..., Result]) -> None:
    result = cli("evaluate", "--target", project / "target", "--suite", project / "eval/suites/tiny.yaml", *options)
    assert result.exit_code == code and re.search(said, " ".join((result.output + result.stderr).split())), result.output
