"""Tree attention against its slow twin."""

import pytest
import torch

from spectrain.kernels.tree_attention import _for_transformers, attend, attend_reference


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


def test_soft_cap_is_ignored() -> None:
    q, k, v, mask = inputs(4, 2, 3, slots=7)
    with pytest.raises(ValueError, match="soft-cap"):
        _for_transformers(torch.nn.Identity(), q, k, v, mask, scaling=0.3, softcap=30.0)


def test_default_scale_is_that_of_the_head_size() -> None:
    q, k, v, mask = inputs(4, 2, 3, slots=7)
    o, weights = _for_transformers(torch.nn.Identity(), q, k, v, mask)
    assert weights is None
    torch.testing.assert_close(o, attend_reference(q, k, v, mask, scale=8**-0.5).transpose(1, 2), atol=1e-6, rtol=1e-5)
