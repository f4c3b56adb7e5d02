"""States in 8 bits: what they lose, and what happens to tokens with a few huge channels."""

import pytest
import torch

from spectrain.data import codes
from spectrain.data.codes import KEPT, Codes, bytes_a_token, concatenate, encode, pad

W, S = 64, 3


def states(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, S * W, generator=torch.Generator().manual_seed(seed))


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(((x - y).norm(dim=-1) / x.norm(dim=-1)).max())


@pytest.mark.parametrize(("kind", "worst"), [("exact", 0.0), ("bf16", 2**-8), ("int8", 0.012)])
def test_states_are_lost(kind: str, worst: float) -> None:
    x = states(50) * torch.logspace(-3, 3, 50)[:, None]
    kept = encode(x, states=S, kind=kind)
    assert kept.float().shape == x.shape and kept.float().dtype == torch.float32
    assert error(x, kept.float()) <= worst
    assert kept.codes.dtype == {"exact": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[kind]
    if kind != "exact":
        assert sum(t[0].numel() * t.element_size() for t in kept.tensors.values()) == bytes_a_token(width=W, states=S, kind=kind)


def test_massive_channels_drown_the_others() -> None:
    """A first token with a few channels of 25,000: the others keep 8 bits of their own, and no other state or token is touched."""
    x = states(4)
    huge = x.clone()
    huge[1, [3, 17, W + 5]] = torch.tensor([24_890.0, -4_400.0, 1_274.0])
    ours, plain = (encode(y, states=S, kind="int8").float() for y in (huge, x))
    body = torch.ones(S * W, dtype=torch.bool)
    body[[3, 17, W + 5]] = False
    assert error(huge[1:2, body], ours[1:2, body]) < 0.02
    torch.testing.assert_close(ours[1, ~body], huge[1, ~body], rtol=2**-8, atol=0)
    assert torch.equal(ours[[0, 2, 3]], plain[[0, 2, 3]])


def test_token_of_zeros_or_narrow_states_break_the_codes() -> None:
    assert not encode(torch.zeros(2, S * W), states=S, kind="int8").float().any()
    narrow = torch.randn(3, 2 * KEPT)
    torch.testing.assert_close(encode(narrow, states=2, kind="int8").float(), narrow, rtol=2**-8, atol=0)
    assert encode(torch.empty(0, S * W), states=S, kind="int8").float().shape == (0, S * W)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_parts_together_are_not_the_whole(kind: str) -> None:
    parts = [encode(states(n, n), states=S, kind=kind) for n in (2, 5, 1)]
    joined, padded = concatenate(parts), pad(parts)
    assert torch.equal(joined.float(), torch.cat([p.float() for p in parts]))
    assert torch.equal(joined[slice(2, 7)].float(), parts[1].float())
    assert torch.equal(joined.to("cpu")[torch.tensor([7, 0])].float(), joined.float()[[7, 0]])
    for part, line in zip(parts, padded.float(), strict=True):
        assert torch.equal(line[: len(part.codes)], part.float()) and not line[len(part.codes) :].any()


def test_channels_kept_apart_change_places() -> None:
    """Each value goes where its mark is: in a token with less marks than channels to spare, in padding, in both signs, without a gap."""
    x = torch.arange(1.0, 2 * W + 1).view(1, -1).repeat(3, 1)
    x[1, [60, 3, 61, 4, W + 9, W, W + 1, 2 * W - 1]] = torch.tensor([-900.0, 800.0, 700.0, -600.0, 5e3, -4e3, 3e3, -2e3])
    x[2] = 0.0
    kept = encode(x, states=2, kind="int8")
    assert ((kept.codes == codes.MARK).sum(-1) == 2 * KEPT).all() and kept.place is None
    padded = pad([kept, kept[slice(0, 1)]]).float()
    torch.testing.assert_close(padded[0], x, rtol=0.02, atol=3.0)
    assert padded[0, 1, [60, 3, 61, 4]].tolist() == [-900.0, 800.0, 700.0, -600.0]
    assert torch.equal(padded[1, :1], padded[0, :1]) and not padded[1, 1:].any()


def test_a_rounded_scale_makes_a_code_a_mark() -> None:
    """Scales are rounded to bfloat16, down too: the largest code must not pass 127 on either side."""
    x = torch.cat([torch.ones(2**12, 1) * 9, torch.logspace(-2, 2, 2**12)[:, None] * torch.tensor([1.0, -1.0])], 1)
    kept = encode(torch.nn.functional.pad(x, (KEPT - 1, 0), value=1e4), states=1, kind="int8")
    assert ((kept.codes == codes.MARK).sum(-1) == KEPT).all()
    assert kept.codes[kept.codes != codes.MARK].abs().max() <= codes.LEVELS


def test_parts_of_two_kinds_are_joined() -> None:
    with pytest.raises(AssertionError):
        codes.concatenate([encode(states(1), states=S, kind="int8"), Codes(states(1))])
