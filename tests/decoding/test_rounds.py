"""What the host does during a round: it reads nothing, sends nothing late, and records passes that give the same when replayed.

The first two are seen on meta tensors, which have no values: a host that reads one is refused.

Legend: B rows, L prompt length, F width of the states read.
"""

import copy
import logging
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.decoding import generate as generator
from spectrain.decoding import rules
from spectrain.decoding.generate import generate, law_and_rule
from spectrain.decoding.graphs import Graphs, graphs_for
from spectrain.decoding.rounds import FACTS, Batch, Clock, Run, advance
from spectrain.decoding.rows import rows_of
from spectrain.decoding.sampling import Sampling
from spectrain.decoding.shapes import Chain, Shape, Tree
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.kernels import tree_attention
from spectrain.target.model import Target
from spectrain.target.passes import Passes, choose, for_all
from spectrain.target.placement import Placement

random_head = runpy.run_path(str(Path(__file__).parents[1] / "heads" / "drafting.py"))["random_head"]
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
PROMPTS = [[7, 12, 9, 55], [31], [8, 77, 20, 20, 64, 5, 9]]
KINDS = {"eagle3": {"layer_ids": (1, 2)}, "eagle": {}, "hydra": {}, "medusa": {}}


def without_values(target: Target) -> Target:
    """The target on the device `meta`, with the attention that it has on CUDA."""
    model = copy.deepcopy(target.model).to("meta")
    model.config._attn_implementation = tree_attention.register("triton")
    there = Target(model=model, tokenizer=target.tokenizer, name="meta")
    there.__dict__["fingerprints"] = target.fingerprints
    return there


class MetaRounds:
    """A batch on the device `meta` whose prompts were read."""

    def __init__(self, target: Target, head: Any, shape: Shape, rule: str, temperature: float, **settings: Any) -> None:
        there, drafter = without_values(target), HeadDrafter(copy.deepcopy(head).to("meta"))
        assert there.packs
        law, rule = law_and_rule(rule, shape, temperature=temperature, drafter=drafter)
        rows = rows_of(there, PROMPTS, ends=frozenset(), stop=(), max_new_tokens=90, seed=0)
        self.run = Run(
            there, Passes("eager", there, there), drafter.layer_ids, shape, law, rule, Sampling(temperature, **settings), None
        )
        self.batch = Batch(rows, there.new_cache(len(rows), 160), drafter.start(there, len(rows), 160), None, None)
        length_B = torch.tensor([row.prompt_length for row in rows], device="meta")
        L = max(map(len, PROMPTS))
        self.batch.cache.stage(L)
        self.batch.cache.commit(length_B)
        states = torch.empty(len(rows), L, len(drafter.layer_ids) * there.config.hidden_size, device="meta")
        self.batch.session.observe(states, torch.zeros(len(rows), L, dtype=torch.long, device="meta"), length_B)
        for row in rows:
            row.ids.append(3)

    def play(self) -> tuple[Tensor, int]:
        """A round, of which every row is said to have accepted one draft."""
        report, nodes = advance(self.run, self.batch, Clock(torch.device("meta")))
        for row in self.batch.rows:
            row.ids += [4, 5]
            row.settled += 2
        self.batch.cache.bound(max(row.settled for row in self.batch.rows))
        return report, nodes


CASES: list[tuple[str, Shape, str, float]] = [
    ("eagle3", Chain(4), "auto", 0.0), ("eagle3", Tree.static(PATHS), "auto", 0.0), ("eagle3", Tree.dynamic(3, 3, 8), "auto", 0.0),
    ("eagle3", Chain(4), "rejection", 0.8), ("eagle3", Chain(4), "block", 0.8), ("eagle3", Chain(4), "typical", 0.8),
    ("eagle3", Tree.static(PATHS), "multidraft", 0.8), ("eagle3", Tree.static(PATHS), "traversal", 0.8),
    ("eagle3", Tree.static(PATHS, law="iid"), "traversal", 0.8), ("eagle3", Tree.dynamic(3, 3, 8), "point_mass", 0.8),
    *((kind, shape, "auto", 0.8) for kind in ("eagle", "hydra", "medusa") for shape in (Chain(3), Tree.static(PATHS))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape", "rule", "temperature"), CASES, ids=str)
def test_host_reads_something_in_a_round(target: Target, kind: str, shape: Shape, rule: str, temperature: float) -> None:
    head = random_head(kind, target, **KINDS[kind])
    rounds = MetaRounds(target, head, shape, rule, temperature, top_p=0.9 if temperature else 1.0)
    with torch.inference_mode():
        for _ in range(3):
            report, nodes = rounds.play()
    assert report.is_meta and report.shape == (len(PROMPTS), FACTS + 1 + shape.depth) and nodes == 1 + shape.budget


@pytest.mark.parametrize("part", ["draft", "rule"])
def test_planted_read_goes_unnoticed(target: Target, make_head, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    rounds = MetaRounds(target, make_head(target), Chain(3), "auto", 0.0)
    head, greedy = rounds.batch.session._head, rules.greedy
    extend = head.extend
    if part == "draft":
        monkeypatch.setattr(head, "extend", lambda state, tokens, *more: extend(state, tokens + int(tokens.max()), *more))
    else:
        monkeypatch.setattr(rules, "greedy", lambda p, tree: greedy(p, tree) if p.sum().item() else None)
    with torch.inference_mode(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        rounds.play()


class Calls(TorchFunctionMode):
    """The functions called, by name; those that bring numbers of the host to a device are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        listed = any(isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,)))
        if listed or name in ("tensor", "new_tensor", "as_tensor", "asarray", "from_numpy"):
            self.sent.append(len(self.names))
        self.names.append(name)
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.is_meta and name in ("to", "copy_") and not all(t.is_meta for t in tensors(args)):
            self.sent.append(len(self.names) - 1)
        return found


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("eagle3", shape) for shape in (Chain(4), Tree.static(PATHS), Tree.dynamic(3, 3, 8))] + [(kind, Chain(3)) for kind in KINDS],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_something_is_sent_to_a_device_at_work(target: Target, kind: str, shape: Shape, temperature: float) -> None:
    """A copy from the host's own memory waits for all that was asked of the device before, and cannot be recorded."""
    rounds = MetaRounds(target, random_head(kind, target, **KINDS[kind]), shape, "auto", temperature)
    with torch.inference_mode():
        rounds.play()
        with Calls() as seen:
            rounds.play()
    first = min(seen.names.index(name) for name in ("linear", "embedding"))
    assert seen.sent and max(seen.sent) < first, [(i, seen.names[i]) for i in seen.sent if i > first]


class Tape(TorchDispatchMode):
    """The operators of a pass with the tensors that they read and wrote: what a CUDA graph keeps, on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "equal.default")), func
        found = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, tensors(found)))
        return found

    def play(self) -> None:
        """Every operator again, into the memory of its first results; views are where they were."""
        for func, args, kwargs, results in self.steps:
            given = {t.untyped_storage().data_ptr() for t in tensors([args, list(kwargs.values())])}
            if func._schema.is_mutable or not all(t.untyped_storage().data_ptr() in given for t in results):
                for mine, new in zip(results, tensors(func(*args, **kwargs)), strict=True):
                    if new is not mine and mine.numel():
                        mine.copy_(new)


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [t for part in found for t in tensors(part)] if isinstance(found, list | tuple) else []


class Recorder:
    """Passes on tapes. Before one is played the results of all others are spoiled, as their memory is shared."""

    def __init__(self) -> None:
        self.results: list[tuple[Tensor, ...]] = []
        self.played = 0

    def __call__(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        with Tape() as tape:
            results = function()
        self.results.append(results)

        def play() -> None:
            self.played += 1
            for result in (t for others in self.results for t in others):
                result.fill_(float("nan") if result.is_floating_point() else 0)
            tape.play()

        return results, play


def with_graphs(monkeypatch: pytest.MonkeyPatch, record: Any) -> None:
    """Generations record their passes from now on; those of CUDA need a device."""

    def graphs_for(*args: Any, **more: Any) -> Graphs:
        return Graphs(lambda: record, uses=2)

    monkeypatch.setattr(generator, "graphs_for", graphs_for)


@pytest.mark.parametrize(
    ("kind", "shape", "temperature"),
    [
        ("eagle3", Chain(3), 0.0), ("eagle3", Tree.static(PATHS), 0.0), ("eagle3", Tree.dynamic(3, 3, 8), 0.0), ("eagle3", Chain(3), 0.8),
        ("eagle3", Tree.static(PATHS), 0.8), ("eagle", Chain(3), 0.0), ("hydra", Chain(3), 0.0), ("medusa", Tree.static(PATHS), 0.0),
        (None, Chain(3), 0.0),
    ],
    ids=str,
)  # fmt: skip
def test_replayed_pass_reads_what_was_recorded(
    target: Target, monkeypatch: pytest.MonkeyPatch, kind: str | None, shape: Shape, temperature: float
) -> None:
    """Tokens and rounds are those of passes that are made anew. A row ends early, so that the cache is moved."""
    head = HeadDrafter(random_head(kind, target, **KINDS[kind])) if kind else None

    def answers(**more: Any) -> list[tuple[Any, ...]]:
        settings = {"temperature": temperature, "compile": False, "seed": 3, "max_new_tokens": 60, **more}
        rows = generate(target, PROMPTS, drafter=head, shape=shape, **settings).rows
        return [(r.tokens, r.finish_reason, [(s.drafted, s.accepted, s.depth, s.nodes) for s in r.rounds]) for r in rows]

    free = [tokens for tokens, *_ in answers(eos=None)]
    ends = next(i for i in free[0][12:] if i not in free[0][:12] + free[1][:40])
    expected = answers(eos=ends)
    assert 12 < len(expected[0][0]) < 60 and len(expected[1][0]) >= 40
    recorder = Recorder()
    with_graphs(monkeypatch, recorder)
    assert answers(eos=ends) == expected
    assert recorder.played >= 20 and len(recorder.results) >= (3 if kind else 1)


def test_pass_that_cannot_be_recorded_ends_the_answer(
    target: Target, make_head, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = HeadDrafter(make_head(target))
    expected = generate(target, PROMPTS, drafter=head, eos=None, max_new_tokens=20, compile=False).rows

    def fails(function: Callable[[], tuple[Tensor, ...]]) -> Any:
        function()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with_graphs(monkeypatch, fails)
    with caplog.at_level(logging.WARNING):
        found = generate(target, PROMPTS, drafter=head, eos=None, max_new_tokens=20, compile=False).rows
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    (line,) = [r.getMessage() for r in caplog.records if "graph" in r.getMessage()]
    assert line.endswith("(operation not permitted when stream is capturing more); going on without graphs")
    graphs = Graphs(lambda: fails, uses=0)
    assert not graphs.failed and graphs.call("pass", None, lambda t: (t + 1,), torch.ones(1))[0] == 2 and graphs.failed


def test_graphs_are_missing_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """What CUDA would get, told without one: nothing is recorded before the first pass."""
    there = SimpleNamespace(
        name="tiny", device=torch.device("cuda", 1), placement=Placement(), quantization=None, packs=True,
        model=SimpleNamespace(dtype=torch.float16),
    )  # fmt: skip
    assert graphs_for(there, "auto", processors=False) is not None and graphs_for(there, False, processors=False) is None
    assert choose(there, "auto", passes=9) == choose(there, True, passes=9) == "graphs" and choose(there, False, passes=9) == "eager"
    assert for_all(there, "auto", passes=9) == "auto" and for_all(there, False, passes=9) is False
    cases = [
        ({"packs": False}, {}, "its attention takes masks; load it with attention='triton'"), ({}, {"processors": True}, "penalties, bans"),
        ({"quantization": "4bit"}, {}, "its weights are in 4bit"), ({"placement": Placement(kind="tp")}, {}, "spread out (placement tp)"),
    ]  # fmt: skip
    with caplog.at_level(logging.INFO):
        for changes, more, told in cases:
            caplog.clear()
            other = SimpleNamespace(**{**vars(there), **changes})
            assert graphs_for(other, "auto", **{"processors": False, **more}) is None
            assert len(caplog.records) == 1 and "no CUDA graphs: " in caplog.text and told in caplog.text
    with pytest.raises(ValueError, match="or attention='triton' on cuda; tiny is float16 on cuda; use compile='auto'"):
        choose(SimpleNamespace(**{**vars(there), "packs": False}), True, passes=9)
    caplog.clear()
    here = SimpleNamespace(**{**vars(there), "device": torch.device("cpu")})
    assert graphs_for(here, "auto", processors=False) is None and not caplog.records


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("shape", "temperature"), [(Chain(3), 0.0), (Tree.static(PATHS), 0.8), (Tree.dynamic(3, 3, 8), 0.0), (None, 0.0)], ids=str
)
def test_graph_on_the_gpu_gives_another_answer(
    target: Target, caplog: pytest.LogCaptureFixture, shape: Shape | None, temperature: float
) -> None:
    model = copy.deepcopy(target.model).to("cuda")
    model.config._attn_implementation = tree_attention.register("triton")
    there = Target(model=model, tokenizer=target.tokenizer, name="tiny")
    head = HeadDrafter(random_head("eagle3", target, layer_ids=(1, 2)).to("cuda")) if shape else None
    found = {}
    with caplog.at_level(logging.INFO):
        for compile in (False, "auto"):
            result = generate(
                there, PROMPTS, drafter=head, shape=shape, temperature=temperature, eos=None, max_new_tokens=60, compile=compile
            )
            found[result.mode] = [row.tokens for row in result.rows]
    assert set(found) == {"eager", "graphs"} and found["eager"] == found["graphs"]
    assert not [r for r in caplog.records if "graph" in r.getMessage()]


class Careless:
    """A drafter of a user whose tree is none: node 1 is its own parent."""

    layer_ids, has_q = (), False

    def start(self, target: Target, rows: int, max_length: int) -> "Careless":
        return self

    def observe(self, *settled: Any) -> None: ...

    def select(self, rows_R: Tensor) -> None: ...

    def propose(self, round: Any) -> DraftTree:
        root_B1 = round.root(torch.device("cpu"))
        parents_BN = torch.tensor([[-1, 1]]).expand(len(root_B1), 2)
        return DraftTree(root_B1.repeat(1, 2), parents_BN, torch.full((len(root_B1),), 2), "point_mass")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tree_of_a_user_is_not_looked_through(target: Target, temperature: float) -> None:
    with pytest.raises(ValueError, match="parents must precede their children"):
        generate(target, PROMPTS, drafter=Careless(), temperature=temperature, max_new_tokens=9)
