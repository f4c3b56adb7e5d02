"""Tree attention against its slow twin."""

import math

import pytest
import torch

from spectrain.decoding.tree import ancestors
from spectrain.kernels.tree_attention import _for_transformers, _with_triton, attend, attend_reference, packed, unpacked
from spectrain.target.cache import SlabCache


def inputs(heads: int, groups: int, nodes: int, slots: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads, nodes, 8, generator=g)
    k, v = torch.randn(2, groups, slots, 8, generator=g), torch.randn(2, groups, slots, 8, generator=g)
    mask = torch.rand(2, 1, nodes, slots, generator=g) > 0.5
    mask[..., 0] = True
    return q, k, v, mask


@pytest.mark.parametrize("nodes", [1, 2, 5])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_heads_read_the_wrong_keys(heads: int, groups: int, nodes: int, masked: bool) -> None:
    q, k, v, mask = inputs(heads, groups, nodes, slots=7)
    visible = mask if masked else None
    torch.testing.assert_close(attend(q, k, v, visible, scale=0.3), attend_reference(q, k, v, visible, scale=0.3), atol=1e-6, rtol=1e-5)


def test_masked_slot_has_influence() -> None:
    q, k, v, mask = inputs(4, 2, 3, slots=7)
    mask[..., 5] = False
    before = attend(q, k, v, mask, scale=0.3)
    k[:, :, 5], v[:, :, 5] = 1e4, 1e4
    assert torch.equal(attend(q, k, v, mask, scale=0.3), before)


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_soft_cap_or_sinks_are_ignored(nodes: int, masked: bool, softcap: float | None, sinks: bool) -> None:
    q, k, v, mask = inputs(6, 2, nodes, slots=7)
    visible, sinks_H = mask if masked else None, torch.linspace(-2, 3, 6) if sinks else None
    found = attend(q, k, v, visible, scale=0.3, softcap=softcap, sinks_H=sinks_H)
    torch.testing.assert_close(found, attend_reference(q, k, v, visible, scale=0.3, softcap=softcap, sinks_H=sinks_H), atol=1e-6, rtol=1e-5)
    assert (softcap is None and not sinks) == torch.allclose(found, attend(q, k, v, visible, scale=0.3), atol=1e-3)


def test_cap_and_sink_mean_something_else() -> None:
    """By hand: scores 3 and 1 capped at 2, a sink of 0.5; values 1 and 10."""
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([3.0, 1.0]).view(1, 1, 2, 1), torch.tensor([1.0, 10.0]).view(1, 1, 2, 1)
    capped = [2 * math.tanh(1.5), 2 * math.tanh(0.5)]
    a, b, sink = math.exp(capped[0]), math.exp(capped[1]), math.exp(0.5)
    for law in (attend, attend_reference):
        o = law(q, k, v, None, scale=1.0, softcap=2.0, sinks_H=torch.tensor([0.5]))
        assert float(o) == pytest.approx((a + 10 * b) / (a + b + sink), rel=1e-5)


@pytest.mark.parametrize("window", [None, 3, 7, 8])
@pytest.mark.parametrize("extra", [{}, {"softcap": 0.7}, {"s_aux": torch.linspace(-2, 3, 4)}])
def test_pass_without_mask_sees_what_comes_later(window: int | None, extra: dict) -> None:
    """Causal, and within the window that transformers passes on."""
    q, k, v, _ = inputs(4, 2, 7, slots=7)
    mask = torch.tensor([[[[s <= n and (window is None or n - s < window) for s in range(7)] for n in range(7)]]])
    found, _ = _for_transformers(torch.nn.Identity(), q, k, v, None, scaling=0.3, sliding_window=window, **extra)
    expected = attend_reference(q, k, v, mask, scale=0.3, softcap=extra.get("softcap"), sinks_H=extra.get("s_aux"))
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-6, rtol=1e-5)


def test_bfloat16_softmax_is_rounded() -> None:
    q, k, v, mask = (x.bfloat16() if x.is_floating_point() else x for x in inputs(4, 2, 3, slots=7))
    found = attend(q, k, v, mask, scale=0.3, softcap=5.0, sinks_H=torch.ones(4, dtype=torch.bfloat16))
    expected = attend_reference(q, k, v, mask, scale=0.3, softcap=5.0, sinks_H=torch.ones(4, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_default_scale_is_that_of_the_head_size() -> None:
    q, k, v, mask = inputs(4, 2, 3, slots=7)
    o, weights = _for_transformers(torch.nn.Identity(), q, k, v, mask)
    assert weights is None
    torch.testing.assert_close(o, attend_reference(q, k, v, mask, scale=8**-0.5).transpose(1, 2), atol=1e-6, rtol=1e-5)


def test_packed_view_is_another_mask() -> None:
    """By hand: a row of 5 committed slots; root, two children, a child of the second; a window of 3 positions."""
    line = ancestors(torch.tensor([[-1, 0, 0, 2]]))
    assert packed(torch.tensor([5]), line).tolist() == [[[[0, 5, 9, 0b1], [0, 5, 9, 0b11], [0, 5, 9, 0b101], [0, 5, 9, 0b1101]]]]
    assert packed(torch.tensor([5]), line, window=2).tolist() == [[[[4, 5, 9, 0b1], [5, 5, 9, 0b11], [5, 5, 9, 0b101], [5, 5, 9, 0b1100]]]]
    assert packed(torch.tensor([5]), line, window=3)[0, 0, 3].tolist() == [5, 5, 9, 0b1101]


@pytest.mark.parametrize("nodes", [1, 7, 64, 65, 128])
@pytest.mark.parametrize("window", [None, 1, 5, 60])
def test_packed_view_shows_other_slots_than_the_mask(nodes: int, window: int | None) -> None:
    g = torch.Generator().manual_seed(nodes)
    parents = (torch.rand(3, nodes, generator=g) * torch.arange(nodes)).long()
    parents[0], parents[:, 0] = torch.arange(-1, nodes - 1), -1
    line = ancestors(parents)[:, nodes // 3 :]  # the last ones of a tree that is staged in parts
    slabs = SlabCache(layers=1, rows=3, kv_heads=1, head_dim=1, max_length=200, dtype=torch.float32, device=torch.device("cpu"))
    slabs.stage(40)
    slabs.commit(torch.tensor([40, 0, 3]))
    slabs.stage(nodes)
    view = packed(slabs.lengths_B, line, window)
    assert view.shape[3] == (4 if nodes <= 64 else 5)
    assert torch.equal(unpacked(view, slabs.get_seq_length()), slabs.visible(line, window))


def test_packed_view_on_meta_tensors_asks_for_values() -> None:
    """A host read would raise."""
    q, k, v = (torch.empty(2, heads, length, 64, device="meta") for heads, length in ((4, 3), (2, 20), (2, 20)))
    view = packed(torch.empty(2, dtype=torch.long, device="meta"), torch.empty(2, 3, 3, dtype=torch.bool, device="meta"), window=4)
    o, _ = _with_triton(torch.nn.Identity(), q, k, v, view)
    assert o.shape == (2, 3, 4, 64)


def test_packed_view_of_a_kind_without_a_kernel_is_refused() -> None:
    """float64 goes the torch way."""
    q, k, v, _ = (x.double() for x in inputs(4, 2, 3, slots=9))
    view = packed(torch.tensor([6, 2]), ancestors(torch.tensor([[-1, 0, 0], [-1, 0, 1]])), window=4)
    o, _ = _with_triton(torch.nn.Identity(), q, k, v, view, scaling=0.3, softcap=2.0)
    torch.testing.assert_close(o.transpose(1, 2), attend_reference(q, k, v, unpacked(view, 9), scale=0.3, softcap=2.0))
