"""Verification reads nothing of a device: on `meta` tensors, which hold nothing, every read raises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.decoding import rules, sampling
from spectrain.decoding.accept import RULES, Accepted, accept, verify
from spectrain.decoding.sampling import Coins, Sampling, draw_children, nucleus_floor, probabilities
from spectrain.decoding.tree import DraftTree

CHAIN, TREE, DEEP = (-1, 0, 1, 2), (-1, 0, 0, 1, 1, 2, 2), (-1, 0, 1, 0, 2, 4, 4, 3, 5)
FITS = [
    *((rule, "point_mass", parents) for rule in ("greedy", "point_mass", "typical") for parents in (CHAIN, TREE, DEEP)),
    *((rule, "iid", CHAIN) for rule in ("rejection", "block", "multidraft", "traversal")),
    *((rule, law, parents) for rule in ("multidraft", "traversal") for law in ("iid", "without_replacement") for parents in (TREE, DEEP)),
    *((rule, "iid", (-1,)) for rule in RULES),
]
V = 6


def drafted(parents: tuple[int, ...], law: str, rows: int) -> tuple[Tensor, DraftTree, Coins]:
    """p near q, and a tree whose rows end at different nodes."""
    N, g = len(parents), torch.Generator().manual_seed(len(parents))
    p, q = ((1.5 * torch.randn(rows, N, V, generator=g)).softmax(-1) for _ in range(2))
    coins = Coins(torch.arange(rows), torch.arange(rows) % 3)
    tokens = torch.zeros(rows, N, dtype=torch.long)
    for n in range(N):
        children = [c for c in range(N) if parents[c] == n]
        if children:
            drawn = "iid" if law == "point_mass" else law
            tokens[:, children] = draw_children(q[:, n : n + 1], torch.full((rows, 1), n), len(children), drawn, coins)[0][:, 0]
    num = N - torch.arange(rows) % min(N, 3)
    tree = DraftTree(tokens, torch.tensor(parents).expand(rows, N), num, law, None if law == "point_mass" else q)
    return 0.6 * p + 0.4 * q, tree, coins


def on_meta(*parts: Tensor) -> list[Tensor]:
    return [part.to("meta") for part in parts]


@pytest.mark.parametrize(("rule", "law", "parents"), FITS)
def test_rule_reads_the_host(rule: str, law: str, parents: tuple[int, ...]) -> None:
    p, tree, coins = drafted(parents, law, rows=3)
    q = None if tree.q_BNV is None else tree.q_BNV.to("meta")
    tree = DraftTree(*on_meta(tree.tokens_BN, tree.parents_BN, tree.num_B), tree.law, q)
    got = verify(p.to("meta"), tree, rule, Coins(*on_meta(coins.seed_B, coins.length_B)))
    assert got.path_BK.shape == (3, len(parents) - 1) and got.length_B.shape == got.next_B.shape == (3,)
    assert got.path_BK.device.type == got.length_B.device.type == got.next_B.device.type == "meta"
    assert got.path_BK.dtype == got.length_B.dtype == got.next_B.dtype == torch.int64


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_transform_or_draw_reads_the_host(settings: dict[str, Any]) -> None:
    for vocab in (V, 2000):
        p = probabilities(torch.empty(2, 3, vocab, device="meta"), Sampling(**settings))
        assert p.shape == (2, 3, vocab)
    coins = Coins(*(torch.empty(2, dtype=torch.long, device="meta") for _ in range(2)))
    for law in ("iid", "without_replacement"):
        tokens, alive = draw_children(p, torch.empty(2, 3, dtype=torch.long, device="meta"), 4, law, coins)
        assert tokens.shape == alive.shape == (2, 3, 4)


def test_read_goes_unnoticed() -> None:
    """The checks of `accept` read, and so does a rule that looks whether it is done."""
    p, tree, coins = drafted(CHAIN, "iid", rows=3)
    assert tree.q_BNV is not None
    tree = DraftTree(*on_meta(tree.tokens_BN, tree.parents_BN, tree.num_B), "iid", tree.q_BNV.to("meta"))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        accept(p.to("meta"), tree, "block", coins)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        bool(tree.num_B.any())


def same(one: Accepted, other: Accepted) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("path_BK", "length_B", "next_B"))


@pytest.mark.parametrize(("rule", "law", "parents"), FITS)
def test_way_of_a_device_keeps_other_tokens(rule: str, law: str, parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that run to their bounds, all rows where some are meant, the draws of all nodes at once."""
    p, tree, coins = drafted(parents, law, rows=60)
    expected = verify(p, tree, rule, coins)
    asked: list[Tensor] = []

    def unread(numbers: Tensor) -> bool:
        asked.append(numbers)
        return False

    monkeypatch.setattr(rules, "readable", unread)
    assert same(verify(p, tree, rule, coins), expected)
    assert len(parents) == 1 or len(set(expected.length_B.tolist())) > 1
    assert asked or rule in ("rejection", "block") or len(parents) == 1


def test_nucleus_of_a_device_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.randn(2, 3, 3000, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    expected: Callable[[], Tensor] = lambda: torch.cat([nucleus_floor(p, top_p) for top_p in (0.3, 0.9, 0.999)])  # noqa: E731
    before = expected()
    monkeypatch.setattr(sampling, "readable", lambda numbers: False)
    assert torch.equal(expected(), before) and len(before.unique()) > 10
