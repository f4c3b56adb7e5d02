"""Laws, draws and coins."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.decoding.sampling import ROLES, Coins, Sampling, draw, draw_children, probabilities, row_seed


def law(logits: list[float], **settings: float) -> list[float]:
    return probabilities(torch.tensor([[logits]]), Sampling(**settings))[0, 0].tolist()  # type: ignore[arg-type]


LOGITS = [math.log(x) for x in (0.1, 0.6, 0.3)]


def test_temperature_zero_is_no_law() -> None:
    assert law([1.0, 3.0, 2.0]) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, [0.1, 0.6, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.46, 0.36 / 0.46, 0.09 / 0.46]),
        ({"temperature": 1.0, "top_p": 0.5}, [0, 1, 0]),
        ({"temperature": 1.0, "top_p": 0.65}, [0, 2 / 3, 1 / 3]),
        ({"temperature": 1.0, "top_k": 2}, [0, 2 / 3, 1 / 3]),
        ({"temperature": 1.0, "top_k": 7}, [0.1, 0.6, 0.3]),
        ({"temperature": 1.0, "min_p": 0.4}, [0, 2 / 3, 1 / 3]),
        ({"temperature": 1.0, "min_p": 1.0}, [0, 1, 0]),
        ({"temperature": 2.0, "top_k": 2, "top_p": 0.3}, [0, 1, 0]),
    ],
)
def test_law_is_not_the_transformed_softmax(settings: dict[str, float], expected: list[float]) -> None:
    assert law(LOGITS, **settings) == pytest.approx(expected, abs=1e-6)


def test_transforms_are_not_applied_at_every_node() -> None:
    logits = torch.tensor(LOGITS).expand(2, 5, 3) + torch.arange(5.0)[:, None]
    p = probabilities(logits, Sampling(temperature=1.0, top_p=0.5))
    assert torch.equal(p, torch.tensor([0.0, 1.0, 0.0]).expand(2, 5, 3))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44])
def test_tiny_temperature_gives_nan(temperature: float) -> None:
    assert law([10.0, 30.0, 20.0], temperature=temperature) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": t} for t in (-1, float("nan"), float("inf"), 1e31, 10**400, None, "1", True, [0.5], 1j, torch.tensor(0.5))),
        *({"top_k": k} for k in (-1, 2.5, 2.0, True, None, "2", 2**63)), *({"top_p": p} for p in (0, 1.1, None, "0.9", True, float("nan"))),
        *({"min_p": p} for p in (-0.1, 2, None, "0.1", False)),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_taken(settings: dict[str, Any]) -> None:
    (field,) = settings
    with pytest.raises(ValueError, match=f"^{field} is out of range: found"):
        Sampling(**{"temperature": 1.0, **settings})


def test_largest_temperature_gives_nan() -> None:
    assert law([3e38, -math.inf, -3e38], temperature=1e30) == pytest.approx([1, 0, 0])
    assert law([1.0, -math.inf, 5.0], temperature=1e30) == pytest.approx([0.5, 0, 0.5])
    numbers = {"temperature": np.float32(0.5), "top_k": np.int64(2), "top_p": np.float64(0.9), "min_p": np.float32(0)}
    assert law(LOGITS, **numbers) == law(LOGITS, temperature=0.5, top_k=2, top_p=0.9)


def test_impossible_token_is_drawn() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    below_one = math.nextafter(1.0, 0.0)
    u = torch.tensor([[0.0, 0.2499999, 0.25, 0.5, below_one]], dtype=torch.float64)
    assert draw(p.expand(1, 5, 5), u).tolist() == [[1, 1, 3, 3, 3]]


def test_impossible_token_is_drawn_from_a_large_law() -> None:
    g = torch.Generator().manual_seed(0)
    p = torch.rand(64, 4, 1001, generator=g).float()
    p[torch.rand(64, 4, 1001, generator=g) < 0.7] = 0
    p = p / p.sum(-1, keepdim=True)  # sums are not exactly 1
    for u in (0.0, 1.0 - 2**-53, 0.999999, 1e-9):
        tokens = draw(p, torch.full((64, 4), u, dtype=torch.float64))
        assert (p.gather(-1, tokens[..., None]) > 0).all()


def coins(seeds: list[int], lengths: list[int]) -> Coins:
    return Coins(seed_B=torch.tensor(seeds), length_B=torch.tensor(lengths))


def test_a_coin_is_used_twice() -> None:
    drawn = [
        coins([seed], [length]).uniform(16, role, number=number)
        for seed in (0, 1, 2**62, -5) for length in (1, 2, 3, 1000) for role in ROLES for number in (0, 1, 2)
    ]  # fmt: skip
    values = torch.cat(drawn, dim=1)[0]
    assert len(values.unique()) == len(values) == 4 * 4 * 4 * 3 * 16


def test_coins_are_uneven_or_correlated() -> None:
    u = coins(list(range(200)), [7] * 200).uniform(50, "choice").flatten()
    assert 0 <= u.min() and u.max() < 1
    counts = torch.histc(u.float(), bins=20, min=0, max=1)
    assert ((counts - 500) ** 2 / 500).sum() < 50  # chi-square of 19 degrees: 50 has a chance of 1e-4
    for other in (coins(list(range(200)), [8] * 200).uniform(50, "choice"), coins(list(range(200)), [7] * 200).uniform(50, "accept")):
        assert torch.corrcoef(torch.stack([u, other.flatten()]))[0, 1].abs() < 0.04
    by_node = u.view(200, 50)
    assert torch.corrcoef(torch.stack([by_node[:, :-1].flatten(), by_node[:, 1:].flatten()]))[0, 1].abs() < 0.04


def test_coin_depends_on_the_other_rows() -> None:
    both = coins([5, 9], [3, 4]).uniform(6, "choice")
    assert torch.equal(both[1:], coins([9], [4]).uniform(6, "choice"))
    assert torch.equal(both[1:, :2], coins([9], [4]).uniform(2, "choice"))


def test_rows_share_a_seed() -> None:
    seeds = [row_seed(7, b) for b in range(1000)]
    assert seeds[0] == 7 and len(set(seeds)) == 1000
    assert not set(seeds[1:]) & {row_seed(8, b) for b in range(1000)}


def test_pick_and_below_share_a_coin() -> None:
    """Each call is the coin of its own key, whatever other nodes are asked beside it; a chance of 0 never passes, one of 1 always."""
    tosses = coins(list(range(500)), [4] * 500)
    node = torch.stack([torch.full((500,), 6), torch.arange(500) % 9], dim=1)
    u = tosses.uniform(9, "accept", number=2).gather(1, node)
    whole = torch.tensor([0.5, 2.0])
    assert torch.equal(tosses.below(0.3 * whole.expand(500, 2), whole.expand(500, 2), node, "accept", number=2), u < 0.3)
    assert not tosses.below(torch.zeros(500, 2), torch.ones(500, 2), node, "accept").any()
    assert tosses.below(torch.ones(500, 2), torch.ones(500, 2), node, "accept").all()
    p = torch.tensor([0.1, 0.0, 0.6, 0.3]).expand(500, 2, 4)
    assert torch.equal(tosses.pick(p, node, "residual", number=1), draw(p, tosses.uniform(9, "residual", number=1).gather(1, node)))


def test_coins_of_other_keys_are_related() -> None:
    """Pairs of keys that differ in one part: the pairs of numbers fill the unit square evenly (99 degrees; 160 has a chance of 1e-4)."""
    rows = torch.arange(5000)
    one = Coins(rows, torch.full((5000,), 5))
    base = one.uniform(3, "accept")[:, 1]
    others = [
        one.uniform(3, "accept")[:, 2], one.uniform(3, "residual")[:, 1], one.uniform(3, "draft")[:, 1], one.uniform(3, "choice")[:, 1],
        one.uniform(3, "accept", number=1)[:, 1], Coins(rows, torch.full((5000,), 6)).uniform(3, "accept")[:, 1],
        Coins(rows, torch.full((5000,), 6)).uniform(3, "accept")[:, 0],  # the same position, a round later
        Coins(rows + 1, torch.full((5000,), 5)).uniform(3, "accept")[:, 1],
    ]  # fmt: skip
    for other in others:
        counts = torch.bincount((base * 10).long() * 10 + (other * 10).long(), minlength=100)
        assert ((counts - 50.0) ** 2 / 50).sum() < 160


def test_coin_of_zero_accepts_the_impossible(monkeypatch) -> None:
    monkeypatch.setattr(Coins, "uniform", lambda self, node, role, number=0: torch.zeros(node.shape, dtype=torch.float64))
    node, part = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[0.0, 1e-300]], dtype=torch.float64)
    assert coins([0], [1]).below(part, torch.ones(1, 2), node, "accept").tolist() == [[False, True]]


@pytest.mark.parametrize("law", ["iid", "without_replacement"])
def test_children_follow_another_law(law: str) -> None:
    rows = 20_000
    q = torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(rows, 2, 4)
    node = torch.tensor([[0, 3]]).expand(rows, 2)
    tokens, alive = draw_children(q, node, 4, law, coins(list(range(rows)), [2] * rows))
    assert tokens.shape == (rows, 2, 4) and alive[..., :3].all()
    assert alive[..., 3].all() if law == "iid" else not alive[..., 3].any()
    pairs = torch.bincount(tokens[:, 1, 0] * 4 + tokens[:, 1, 1], minlength=16) / rows
    first = q[0, 0]
    second = first.expand(4, 4) if law == "iid" else (first * (1 - torch.eye(4))) / (1 - first[:, None])
    torch.testing.assert_close(pairs, (first[:, None] * second).flatten(), atol=0.015, rtol=0)
    joint = torch.bincount(tokens[:, 0, 0] * 4 + tokens[:, 1, 0], minlength=16) / rows
    torch.testing.assert_close(joint, (first[:, None] * first).flatten(), atol=0.015, rtol=0)
    if law == "without_replacement":
        assert (tokens[..., :3].sort(-1).values == torch.tensor([0, 2, 3])).all()


def test_point_masses_are_drawn() -> None:
    with pytest.raises(ValueError, match="draws no children"):
        draw_children(torch.ones(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), 1, "point_mass", coins([0], [1]))
