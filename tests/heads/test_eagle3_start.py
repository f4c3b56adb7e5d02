"""Where an EAGLE-3 head begins: at the target's own weights, under every flag.

Legend: B lines, L tokens, R rows, W target width, H head width, V and Vd vocabularies.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from spectrain.config import HeadConfig
from spectrain.data.rows import Row
from spectrain.heads.eagle3 import Eagle3
from spectrain.target.model import Target
from spectrain.training.setup import new_head

FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


def test_start_at_the_target_copies_other_rows(target: Target, make_head) -> None:
    head = make_head(target)
    layer = dict(target.layers[-1].named_parameters())
    ids = torch.arange(40) * 2 + 1
    head.midlayer.self_attn.q_proj = torch.nn.Linear(64, 32, bias=False)
    head.start_from(
        layer=layer, norm=target.model.model.norm.weight, output_VW=target.output_VW, target_ids=ids, train_output=False, seed=1
    )
    assert torch.equal(head.target_ids, ids) and head.t2d.nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(head.lm_head.weight, target.output_VW[ids]) and not head.lm_head.weight.requires_grad
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(head.midlayer.self_attn, name).weight[:, 32:], layer[f"self_attn.{name}.weight"])
    for name in ("self_attn.o_proj.weight", "mlp.up_proj.weight", "post_attention_layernorm.weight"):
        assert torch.equal(dict(head.midlayer.named_parameters())[name], layer[name])
    assert torch.equal(head.midlayer.hidden_norm.weight, layer["input_layernorm.weight"])
    assert torch.equal(head.norm.weight, target.model.model.norm.weight)
    fused = {
        "self_attn.qkv_proj.weight": torch.ones(64, 32),
        "mlp.gate_up_proj.weight": torch.ones(96, 32),
        "self_attn.q_proj.bias": torch.ones(32),
    }
    head.start_from(
        layer=fused, norm=target.model.model.norm.weight, output_VW=target.output_VW, target_ids=ids, train_output=False, seed=1
    )  # what has no place in the head is left out
    again = make_head(target)
    again.start_from(
        layer=layer, norm=target.model.model.norm.weight, output_VW=target.output_VW, target_ids=ids, train_output=True, seed=1
    )
    assert torch.equal(again.fc.weight, head.fc.weight) and again.lm_head.weight.requires_grad


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS), FLAGS[1:], (FLAGS[0], *FLAGS[2:])], ids="+".join)
@pytest.mark.parametrize("num_layers", [1, 2])
@torch.no_grad()
def test_flag_throws_the_start_away(make_target, flags: tuple[str, ...], num_layers: int) -> None:
    """A new head says much what the target's last layer makes of the last fused state; a random one does not."""
    target = make_target(initializer_range=0.1, seed=2)
    with torch.no_grad():
        for norm, at in ((target.model.model.norm, 0.5), (target.layers[-1].input_layernorm, 2.0)):
            norm.weight.copy_(torch.rand(32, generator=torch.Generator().manual_seed(1)) + at)
        target.layers[-2].mlp.down_proj.weight.mul_(20)  # states of another size than 1
    settings = {"layer_ids": (1, 2), "draft_vocab_size": None, "num_layers": num_layers, **dict.fromkeys(flags, True)}
    row = Row("a", "code", tuple(range(100)), (1,) * 100)
    last, random = (new_head(HeadConfig(**settings, init_layer=init), target, [row], seed=0) for init in ("last", "random"))
    near, far = (copied(target, head) for head in (last, random))
    assert near < (0.004 if num_layers == 1 else 0.1) * far, (near, far)
    if flags == ("norm_output",):  # shows from the second step: what is handed on has the direction of the stream, and its size
        plain = new_head(HeadConfig(**{**settings, "norm_output": False}), target, [row], seed=0)
        (_, first_RV), (_, second_RV) = (list(rows_of(target, h, 2))[1] for h in (last, plain))
        torch.testing.assert_close(first_RV.softmax(-1), second_RV.softmax(-1), atol=0.01, rtol=0.1)


def text() -> torch.Tensor:
    return torch.randint(0, 100, (1, 40), generator=torch.Generator().manual_seed(3))


def rows_of(target: Target, head: Eagle3, steps: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits of the head at 30 rows of one text."""
    out = target.forward(text(), positions_BN=torch.arange(40)[None], mask=None, cache=None, layer_ids=head.layer_ids)
    batch = SimpleNamespace(ids_BL=text(), mask_BL=None, states_BLF=out.states_BNF, doc_BL=None, position_BL=None)
    return head.rows(batch, torch.arange(30), target.embedding_VW, steps)


def copied(target: Target, head: Eagle3) -> float:
    """Mean KL divergence from the target's law after token i, of the head's law that reads the states up to i."""
    (_, logits_RV), *_ = rows_of(target, head, 1)
    out = target.forward(text(), positions_BN=torch.arange(40)[None], mask=None, cache=None)
    law_RV = out.logits_BKV[0, :30][:, head.target_ids].log_softmax(-1)
    return float((law_RV.exp() * (law_RV - logits_RV.log_softmax(-1))).sum(-1).mean())


@pytest.mark.parametrize("width", [16, 24, 48])
@torch.no_grad()
def test_another_width_starts_from_nothing(make_target, width: int) -> None:
    """The head's axes are orthonormal main directions of the output rows: embeddings, last state and output rows go through the same."""
    target = make_target()
    row = Row("a", "code", tuple(range(100)), (1,) * 100)
    head, random = (
        new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=60, hidden_size=width, init_layer=init), target, [row], seed=0)
        for init in ("last", "random")
    )
    basis_WH = head.embed_proj.weight.T
    inside = min(width, 32)
    assert torch.allclose(basis_WH.T @ basis_WH, torch.diag(torch.tensor([1.0] * inside + [0.0] * (width - inside))), atol=1e-5)
    assert torch.equal(head.fc.weight[:, 32:], basis_WH.T) and not head.fc.weight[:, :32].any()
    rows_VdW = target.output_VW[head.target_ids] * target.model.model.norm.weight
    assert torch.allclose(head.lm_head.weight, rows_VdW @ basis_WH, atol=1e-5)
    kept = (rows_VdW @ basis_WH).square().sum() / rows_VdW.square().sum()
    by_value = torch.linalg.svdvals(rows_VdW).square()
    assert kept == pytest.approx(float(by_value[:width].sum() / by_value.sum()), abs=1e-4)
    assert copied(target, head) < copied(target, random)
    assert head.config.num_attention_heads % head.config.num_key_value_heads == 0 and head.config.head_dim == 8
    assert (head.config.num_attention_heads, head.config.intermediate_size) == {16: (2, 24), 24: (4, 32), 48: (6, 72)}[width]
