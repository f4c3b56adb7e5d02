"""Every form of an EAGLE-3 head: training rows against step-by-step drafting, documents of a line, checkpointing.

Legend: B lines, L tokens, R rows, K test-time steps.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.heads.eagle3 import Eagle3
from spectrain.target.model import Target

D = runpy.run_path(str(Path(__file__).with_name("drafting.py")))
STEPS = D["STEPS"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "flags of speculators": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"num_hidden_layers": 2},
    "three layers": {"num_hidden_layers": 3, "norm_before_residual": True},
    "window": {"sliding_window": 3},
    "window shorter than a draft": {"sliding_window": 1},
    "window of two layers": {"sliding_window": 2, "num_hidden_layers": 2},
    "narrow": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1},
    "wide": {"hidden_size": 48, "num_attention_heads": 6},
    "three states": {"layer_ids": (0, 1, 2)},
    "four states": {"layer_ids": (0, 1, 2, 3), "fc_norm": True},
    "all at once": {
        "layer_ids": (0, 1, 2, 3, 4), "num_hidden_layers": 3, "sliding_window": 4, "hidden_size": 24, "fc_norm": True, "norm_output": True,
        "norm_before_residual": True,
    },
}  # fmt: skip

SIZES = {"layer_ids", "hidden_size", "num_attention_heads", "num_key_value_heads"}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_training_sees_other_context_than_drafting(target: Target, make_head, changes: dict[str, Any]) -> None:
    """MK1 for every form, in padded and packed lines."""
    D["rows_are_drafts"](make_head(target, **changes), target)


@pytest.mark.parametrize("name", [name for name, changes in VARIANTS.items() if not SIZES.issuperset(changes)])
@torch.no_grad()
def test_a_setting_changes_nothing(target: Target, make_head, name: str) -> None:
    """Each flag, layer and window has its say at every step, or the test above would hold for a head that reads no setting."""
    changes = VARIANTS[name]
    head, plain = make_head(target, **changes), make_head(target, **{n: v for n, v in changes.items() if n in SIZES})
    shared = {n: t for n, t in plain.state_dict().items() if n in head.state_dict()}
    head.load_state_dict({**head.state_dict(), **shared})
    batch = D["packed"](*D["sizes_of"](head, target))
    row_R = D["rows_within"](batch)
    pairs = list(zip(*(list(h.rows(batch, row_R, target.embedding_VW, STEPS)) for h in (head, plain)), strict=True))
    differ = [not torch.allclose(a, b, atol=1e-3) for (_, a), (_, b) in pairs]
    assert differ == [changes != {"norm_output": True}, True, True, True]  # the output handed on shows from the second step


@pytest.mark.parametrize("name", ["plain", "flags of speculators", "window of two layers", "all at once"])
def test_document_sees_its_neighbour(target: Target, make_head, name: str) -> None:
    D["neighbours_unseen"](make_head(target, **VARIANTS[name]), target)


@pytest.mark.parametrize("name", ["plain", "two layers", "window", "all at once"])
def test_checkpointing_changes_or_kills_gradients(target: Target, make_head, name: str) -> None:
    D["checkpointing_agrees"](make_head(target, **VARIANTS[name]), target)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["plain", "norm_output", "norm_before_residual", "two layers", "all at once"])
def test_autocast_rounds_the_residual_stream(target: Target, make_head, name: str, checkpointing: bool) -> None:
    """Products are bfloat16; the stream is float32 at every step, gradients are those of float32 but for the products' rounding."""
    head = make_head(target, **VARIANTS[name]).train()
    batch = D["packed"](*D["sizes_of"](head, target))
    row_R = D["rows_within"](batch)
    streams: list[torch.dtype] = []
    found = []
    for on in (False, True):
        head.zero_grad()
        hook = head.norm.register_forward_hook(lambda _, inputs, out: streams.append(inputs[0].dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            outputs = list(head.outputs(batch, row_R, target.embedding_VW, STEPS, checkpointing=checkpointing and on))
        hook.remove()
        sum((step.hidden_RH.float() @ step.output_VdH.T).logsumexp(-1).sum() for step in outputs).backward()
        found.append(({n: p.grad.clone() for n, p in head.named_parameters()}, torch.stack([s.hidden_RH.float() for s in outputs])))
    assert set(streams) == {torch.float32} and len(streams) == 2 * STEPS
    (wanted, hidden), (gradients, rounded) = found
    assert 0 < (rounded - hidden).norm() < 0.02 * hidden.norm()
    assert all(0 < (gradients[n] - g).norm() < 0.08 * g.norm() for n, g in wanted.items() if n != "lm_head.weight")


def test_checkpointing_holds_as_much_as_without(target: Target, make_head) -> None:
    """Tensors saved for the backward pass, of the whole unrolling."""
    head = make_head(target, num_hidden_layers=2).train()
    batch = D["packed"](*D["sizes_of"](head, target))
    held = []
    for checkpointing in (False, True):
        sizes: dict[int, int] = {}

        def keep(t: torch.Tensor, sizes=sizes) -> torch.Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            outputs = list(head.outputs(batch, D["rows_within"](batch), target.embedding_VW, STEPS, checkpointing=checkpointing))
        assert outputs[-1].hidden_RH.requires_grad
        weights = {p.untyped_storage().data_ptr() for p in head.parameters()}
        held.append(sum(n for at, n in sizes.items() if at not in weights))
    assert held[1] < 0.5 * held[0]


@pytest.mark.parametrize("calls", ["BY_LEVEL", "MIXED"])
@pytest.mark.parametrize("name", ["plain", "window", "window of two layers", "all at once"])
def test_a_branch_sees_its_neighbour(target: Target, make_head, name: str, calls: str) -> None:
    """Whatever layers and window."""
    D["branches_agree"](make_head(target, **VARIANTS[name]), target, D[calls])


@torch.no_grad()
def test_old_head_means_something_else(target: Target, make_head) -> None:
    """A config without the newer fields is that of a head of one layer, without flags and window, under the same names."""
    head = make_head(target)
    new = ("num_hidden_layers", "sliding_window", "fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    old = Eagle3(Eagle3.Config(**{n: v for n, v in head.config.model_dump().items() if n not in new}))
    old.load_state_dict(head.state_dict(), strict=True)
    batch = D["packed"](*D["sizes_of"](head, target))
    row_R = D["rows_within"](batch)
    pairs = zip(*(list(h.rows(batch, row_R, target.embedding_VW, STEPS)) for h in (head, old)), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert {n.split(".")[0] for n in head.state_dict()} == {"fc", "midlayer", "norm", "lm_head", "d2t", "t2d"}


def test_names_are_not_those_that_export_reads(target: Target, make_head) -> None:
    names = make_head(target, num_hidden_layers=3, fc_norm=True, hidden_size=16).state_dict()
    assert {n for n in names if n.startswith("fc_norm")} == {"fc_norm.0.weight", "fc_norm.1.weight"}
    assert names["fc_norm.0.weight"].shape == (32,) and names["embed_proj.weight"].shape == (16, 32)
    assert names["midlayer.self_attn.q_proj.weight"].shape == (32, 32) and names["above.1.self_attn.q_proj.weight"].shape == (32, 16)
    assert "above.0.hidden_norm.weight" not in names and names["above.0.input_layernorm.weight"].shape == (16,)
    assert make_head(target, norm_before_fc=True).state_dict()["input_norm.weight"].shape == (64,)
