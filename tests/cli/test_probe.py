"""The probe while training: measured figures of the generator, and a simulation that comes to the same rounds."""

from collections.abc import Callable
from typing import Any

import pytest

from spectrain.cli.probe import Probe
from spectrain.cli.wiring import as_drafter
from spectrain.config import ShapeConfig
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.target.model import Target

SHAPES = ShapeConfig(chain=3, tree_top_k=4, tree_depth=4, tree_budget=12)


@pytest.fixture(scope="module")
def small(make_target: Callable[..., Target]) -> Target:
    """Of so few words that a head that knows nothing is often right."""
    return make_target(vocab=12, seed=3)


def asked(number: int = 14) -> list[Row]:
    """Prompts of two to six tokens of two domains, one of which has twice as many."""
    prompts = [[2 + (5 * b + 3 * i * i) % 10 for i in range(2 + b % 5)] for b in range(number)]
    return [Row(str(b), "even" if b % 3 else "odd", [*ids, 9, 1], [0] * len(ids) + [1, 1]) for b, ids in enumerate(prompts)]


@pytest.mark.parametrize(("seed", "limit"), [(0, 24), (1, 24), (0, 2)])
def test_simulated_rounds_are_not_the_measured_ones(small: Target, make_head: Callable[..., Any], seed: int, limit: int) -> None:
    """Exactly the same tokens and rounds in every domain, for a chain, the tree of the ranks and a tree with gaps."""
    head = make_head(small, draft_vocab=10, seed=seed)
    probe = Probe(small, asked(), SHAPES, as_drafter, max_new_tokens=limit)
    ranks = probe.ranks(head)
    tree = probe.best_tree(ranks)
    for shape in (Chain(3), Chain(1), tree, Tree.static([[0], [2], [2, 1], [2, 3], [2, 1, 0], [0, 0]])):
        measured, simulated = probe.measured(head, shape), probe.simulated(ranks, shape)
        assert measured.by_domain == simulated.by_domain and measured.rounds > 0, shape
        assert measured.tau == simulated.tau
    found = probe(head)
    assert found["sim_tau_chain"] == found["measured_tau"] and found["sim_tokens"] == found["measured_tokens"]
    assert found["sim_rounds"] == found["measured_rounds"] and found["sim_tau_tree"] == probe.measured(head, tree).tau
    if limit == 24:
        assert tree.budget == 12 and tree.depth <= 4 and tree.width <= 4
        assert 1.0 < found["measured_tau"] < found["sim_tau_tree"], "the test holds nothing where nothing is accepted"


def test_shape_beyond_the_ranks_is_cut_silently(small: Target, make_head: Callable[..., Any]) -> None:
    """A rank beyond the width is no child of any node."""
    probe = Probe(small, asked(), SHAPES, as_drafter, max_new_tokens=8)
    ranks = probe.ranks(make_head(small, draft_vocab=10))
    for shape in (Chain(5), Tree.static([[0], [4]])):
        with pytest.raises(ValueError, match="ranks are known to depth 4 and width 4"):
            probe.simulated(ranks, shape)


def test_figures_are_of_other_rounds(small: Target, make_head: Callable[..., Any]) -> None:
    head = make_head(small, draft_vocab=10)
    rows = asked()
    found = Probe(small, rows, SHAPES, as_drafter, max_new_tokens=24)(head)
    made = generate(small, [row.prompt_ids for row in rows], drafter=as_drafter(head), shape=Chain(3), max_new_tokens=24).rows
    rounds = [r for row in made for r in row.rounds]
    assert found["measured_tokens"] == sum(r.committed for r in rounds) and found["measured_rounds"] == len(rounds)
    assert found["acceptance"] == [sum(r.accepted >= d for r in rounds) / len(rounds) for d in (1, 2, 3)]
    assert found["measured_tau"] == pytest.approx(sum(found["tau_by_domain"].values()) / 2)
    assert set(found["tau_by_domain"]) == {"even", "odd"}
    for domain, tau in found["tau_by_domain"].items():
        mine = [r for row, ask in zip(made, rows, strict=True) if ask.domain == domain for r in row.rounds]
        assert tau == sum(r.committed for r in mine) / len(mine)


def test_answers_are_made_at_every_call(small: Target, make_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The target answers once; afterwards a simulation costs no pass of it. Heads of other layers get their own states."""
    probe = Probe(small, asked(), SHAPES, as_drafter, max_new_tokens=24)
    head, deeper = make_head(small, draft_vocab=10), make_head(small, draft_vocab=10, layer_ids=(0, 2))
    first = {name: probe.simulated(probe.ranks(h), Chain(3)).tau for name, h in (("head", head), ("deeper", deeper))}
    assert first["deeper"] == probe.measured(deeper, Chain(3)).tau
    monkeypatch.setattr(type(small), "forward", lambda *args, **kwargs: pytest.fail("the target was run again"))
    assert probe.simulated(probe.ranks(head), Chain(3)).tau == first["head"]
    assert probe.simulated(probe.ranks(deeper), Chain(3)).tau == first["deeper"]


def test_silent_target_is_a_tau_of_nothing(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="ends its answer to each of the 14 prompts that were kept out at the first token"):
        Probe(small, asked(), SHAPES, as_drafter, max_new_tokens=1)
