"""MK1: what a row attends to at a later step, at which position, and with which token in hand.

Legend: L tokens, R rows, A query heads, G key heads, D head size.
"""

from types import SimpleNamespace

import pytest
import torch

from spectrain.heads import unrolled
from spectrain.target.model import Target

ROW, STEP = 3, 2


@pytest.mark.parametrize("window", [None, 3])
def test_other_keys_position_or_token(target: Target, make_head, monkeypatch, window: int | None) -> None:
    """Row 3 at step 2: keys 0 ... 3 of step 0 and its own two (six in all), at position 5, with token 6 in hand. With a window of 3 only
    what stands above position 5 - 3 of the first four: one key, and its own two."""
    head = make_head(target, sliding_window=window)
    L, calls, places = 10, [], []
    attend, rotary = unrolled.attend_unrolled, head._rotary

    def watched(q_RAD, base_k, base_v, own_k, own_v, layout, **options):
        leaves = [t.detach().requires_grad_() for t in (base_k, base_v, *own_k, *own_v)]  # what this step reads, not what that came from
        k = len(own_k)
        calls.append((attend(q_RAD, *leaves[:2], leaves[2 : 2 + k], leaves[2 + k :], layout, **options), leaves))
        return attend(q_RAD, base_k, base_v, own_k, own_v, layout, **options)

    monkeypatch.setattr(unrolled, "attend_unrolled", lambda *args, layout, **options: watched(*args, layout, **options))
    monkeypatch.setattr(head, "_rotary", lambda positions: places.append(positions) or rotary(positions))
    embed_VW = target.embedding_VW.clone().requires_grad_()
    batch = SimpleNamespace(
        ids_BL=torch.arange(20, 20 + L)[None], mask_BL=None, states_BLF=torch.randn(1, L, 64), doc_BL=None, position_BL=None
    )  # fmt: skip
    outputs = list(head.outputs(batch, torch.tensor([1, ROW, 6]), embed_VW, STEP + 1))
    out_RAD, leaves = calls[STEP]
    gradients = torch.autograd.grad(out_RAD[1].square().sum(), leaves, retain_graph=True)
    seen = [(g.flatten(2).abs().sum(-1) > 0).nonzero().tolist() for g in gradients[:2]]
    assert seen[0] == seen[1] == [[0, i] for i in (range(ROW + 1) if window is None else [3])]
    assert [(g.flatten(1).abs().sum(-1) > 0).nonzero().tolist() for g in gradients[2:]] == [[[1]]] * 4  # its own of both later steps
    assert places[STEP].tolist() == [3, 5, 8]
    (by_embed_VW,) = torch.autograd.grad(outputs[STEP].hidden_RH[1].sum(), embed_VW)
    assert (by_embed_VW.abs().sum(-1) > 0).nonzero()[-1].item() == 20 + ROW + 1 + STEP
