"""Which weights which optimizer takes, and that both are one to whoever steps, scales and saves them."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from spectrain.config import TrainingConfig
from spectrain.heads.eagle3 import Eagle3, Eagle3Config
from spectrain.training.optim import Together, averaged, make_optimizer, set_rates

MUON = TrainingConfig(optimizer="muon", lr=1e-3, muon_lr=1e-2, weight_decay=0.1)
SIZES: dict[str, Any] = {
    "hidden_size": 16, "target_hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "max_position_embeddings": 64, "vocab_size": 40,
    "draft_vocab_size": 20, "layer_ids": (1, 2), "target_layers": 4,
}  # fmt: skip


def head(**changes: Any) -> Eagle3:
    torch.manual_seed(0)
    return Eagle3(Eagle3Config(**{**SIZES, **changes}))


def named(head: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Group of each weight by its name."""
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(p)] for name, p in head.named_parameters() if id(p) in of}


@pytest.mark.parametrize(
    "changes", [{}, {"num_hidden_layers": 2, "fc_norm": True}, {"num_hidden_layers": 3, "hidden_size": 8, "norm_before_fc": True}]
)
def test_muon_takes_norms_or_borders(changes: dict[str, Any]) -> None:
    """Every matrix of every layer, and nothing else."""
    one = head(**changes)
    optimizer = make_optimizer(one, MUON)
    assert isinstance(optimizer, Together)
    groups = named(one, optimizer)
    assert groups.keys() == dict(one.named_parameters()).keys()
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(groups)
    for name, group in groups.items():
        inner = name.startswith(("midlayer.", "above.")) and one.get_parameter(name).dim() == 2
        assert group["rate"] == ("muon_lr" if inner else "lr") and ("momentum" in group) == inner, name
        assert group["weight_decay"] == (0.1 if one.get_parameter(name).dim() == 2 else 0.0), name
    assert {name for name, group in groups.items() if group["rate"] == "lr" and one.get_parameter(name).dim() == 2} == {
        "fc.weight", "lm_head.weight", *(["embed_proj.weight"] if "hidden_size" in changes else [])
    }  # fmt: skip
    assert sum(group["rate"] == "muon_lr" for group in groups.values()) == 7 * changes.get("num_hidden_layers", 1)


def test_frozen_weights_are_in_an_optimizer() -> None:
    for config in (MUON, TrainingConfig()):
        one = head()
        one.lm_head.requires_grad_(False)
        assert named(one, make_optimizer(one, config)).keys() == dict(one.named_parameters()).keys() - {"lm_head.weight"}


def test_one_rate_for_both() -> None:
    one = head()
    optimizer = make_optimizer(one, MUON)
    set_rates(optimizer, 0.5, MUON)
    assert {(group["rate"], group["lr"]) for group in optimizer.param_groups} == {("lr", 5e-4), ("muon_lr", 5e-3)}


def test_both_step_and_come_back() -> None:
    """A step moves every weight; muon's update has singular values near each other; saved and loaded, the next step is the same."""
    one, two = head(), head()
    before = {name: p.detach().clone() for name, p in one.named_parameters()}
    optimizer, other = make_optimizer(one, MUON), make_optimizer(two, MUON)

    def step(head: Eagle3, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in head.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in head.parameters())

    step(one, optimizer, 1)
    assert all(not torch.equal(before[name], p) for name, p in one.named_parameters())
    name = "midlayer.self_attn.k_proj.weight"
    moved = (one.get_parameter(name) - before[name] * (1 - 0.1 * 1e-2)) / 1e-2
    sizes = torch.linalg.svdvals(moved.detach())
    assert sizes.max() < 1.4 and sizes.min() > 0.5
    two.load_state_dict(one.state_dict())
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    step(one, optimizer, 2)
    step(two, other, 2)
    assert all(torch.equal(p, two.get_parameter(name)) for name, p in one.named_parameters())
    with pytest.raises(ValueError, match="states of state, param_groups; needed those of muon, adamw"):
        other.load_state_dict(make_optimizer(one, TrainingConfig()).state_dict())


def test_average_follows_or_shares_the_weights() -> None:
    one = head()
    average = averaged(one, 0.999)
    assert not average.module.training and not any(p.requires_grad for p in average.module.parameters())
    assert {p.data_ptr() for p in one.parameters()}.isdisjoint(p.data_ptr() for p in average.module.parameters())
    start = one.norm.weight.detach().clone()
    for _ in range(3):
        average.update_parameters(one)
        with torch.no_grad():
            one.norm.weight.add_(1.0)
    one.d2t[0] = 7
    expected = start + (1 - 2 / 11) * 1.0  # 1 -> 2 at n = 1: d = 2 / 11; -> 3 at n = 2: d = 3 / 12
    expected = 3 / 12 * expected + (1 - 3 / 12) * (start + 2.0)
    torch.testing.assert_close(average.module.norm.weight, expected)
    average.update_parameters(one)
    assert average.module.d2t[0] == 7


def test_average_of_frozen_weights_moves() -> None:
    """By no bit, whatever the factor."""
    one = head()
    one.lm_head.requires_grad_(False)
    average, before = averaged(one, 0.7), one.lm_head.weight.clone()
    for _ in range(9):
        average.update_parameters(one)
        with torch.no_grad():
            one.fc.weight.add_(1.0)
    assert torch.equal(average.module.lm_head.weight, before) and not torch.equal(average.module.fc.weight, one.fc.weight)
