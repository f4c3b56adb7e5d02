"""Laws, draws and coins."""

import math

import pytest
import torch

from spectrain.decoding.sampling import ROLES, Coins, Sampling, draw, probabilities, row_seed


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
    [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2}, {"temperature": float("nan")}],
)
def test_settings_out_of_range_are_taken(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Sampling(**settings)  # type: ignore[arg-type]


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
        coins([seed], [length]).uniform(16, role, draw=number)
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
