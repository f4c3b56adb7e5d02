"""Hydra: heads that read the drafts before their own, with a prefix layer over the states or without; trained and drafting alike."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import load_head, save_head
from spectrain.target.model import Target
from spectrain.training.optim import make_optimizer
from spectrain.training.setup import check_config, check_training, new_head, start_notes
from spectrain.training.start import last_layer

D = runpy.run_path(str(Path(__file__).with_name("drafting.py")))
VARIANTS: dict[str, dict[str, Any]] = {
    "plus plus": {}, "plain": {"prefix": False}, "three blocks": {"num_layers": 3}, "window": {"sliding_window": 3},
    "original": {"original": True, "num_layers": 2},
    "deeper": {"num_heads": 6, "num_layers": 2, "prefix": False},
}  # fmt: skip
PROMPTS = [[9, 55, 31], [7], [50, 51, 52, 7, 50, 51, 52, 7]]


def head_of(target: Target, name: str = "plus plus") -> Any:
    return D["random_head"]("hydra", target, **VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_training_sees_other_context_than_drafting(target: Target, name: str) -> None:
    D["rows_are_drafts"](head_of(target, name), target)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("plus plus", range(-3, 1)), ("plain", range(1)), ("window", range(-2, 1)), ("deeper", range(1)), ("three blocks", range(-3, 1)),
        ("original", range(-3, 1)),
    ],
)  # fmt: skip
def test_head_reads_other_tokens_than_those_before_its_own(target: Target, name: str, states: range) -> None:
    """Step k of row i: tokens i + 1 ... i + 1 + k, and the states that the prefix layer sees."""
    D["reads_only"](head_of(target, name), target, tokens=[range(1, k + 2) for k in range(4)], states=[states] * 4)
    D["neighbours_unseen"](head_of(target, name), target)


@pytest.mark.parametrize("name", ["plus plus", "plain", "window", "original"])
@pytest.mark.parametrize("pieces", [[1] * 10, [4, 6], [9, 1]])
def test_settled_tokens_in_pieces_read_otherwise(target: Target, pieces: list[int], name: str) -> None:
    D["portions_agree"](head_of(target, name), target, pieces)


@pytest.mark.parametrize("name", ["plus plus", "plain"])
def test_rows_that_settle_unequal_numbers_are_mixed_up(target: Target, name: str) -> None:
    D["unequal_portions_agree"](head_of(target, name), target)


@pytest.mark.parametrize("calls", ["BY_LEVEL", "MIXED"])
@pytest.mark.parametrize("name", ["plus plus", "plain"])
def test_a_branch_sees_its_neighbour(target: Target, name: str, calls: str) -> None:
    D["branches_agree"](head_of(target, name), target, D[calls])


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_fresh_head_says_something_else_than_the_target(target: Target, name: str) -> None:
    """At every depth a quarter of the target's own logits after the state that is read, whatever the tokens in hand."""
    head = D["plain_head"]("hydra", target, layer=last_layer(target)[0], **VARIANTS[name])
    ids_1L = torch.tensor([[7, 12, 9, 55, 31, 8]])
    out = target.forward(ids_1L, positions_BN=torch.arange(6)[None], mask=None, cache=None, layer_ids=(-1,))
    batch = D["padded"](32, 100, [6])
    batch.states_BLF = out.states_BNF
    for _, logits_RV in head.rows(batch, torch.arange(6), target.embedding_VW, head.max_depth):
        torch.testing.assert_close(4 * logits_RV, out.logits_BKV[0][:, head.target_ids], atol=1e-5, rtol=1e-5)
    blocks = {n: p for n, p in head.named_parameters() if ".linear." in n}
    assert len(blocks) == 2 * head.config.num_heads * head.config.num_layers and not any(p.any() for p in blocks.values())


@torch.no_grad()
def test_prefix_layer_begins_elsewhere_than_at_the_last_layer(target: Target) -> None:
    """Names and shapes of the target's last layer; what it adds to the state begins at nothing."""
    layer, notes = last_layer(target)
    head, anew = (D["plain_head"]("hydra", target, layer=some) for some in (layer, None))
    own = dict(head.prefix.named_parameters())
    assert not notes and set(own) == set(layer)
    for name, p in own.items():
        assert torch.equal(p, layer[name] * (0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1))
    again = D["plain_head"]("hydra", target)
    assert all(torch.equal(p, again.state_dict()[n]) for n, p in anew.state_dict().items())
    assert 0.015 < anew.prefix.self_attn.q_proj.weight.std() < 0.025
    other = {n: t[:4] if n == "mlp.down_proj.weight" else t for n, t in layer.items() if "q_proj" not in n}
    partly = D["plain_head"]("hydra", target, layer=other)  # what is missing, or of another size, starts at random
    assert not torch.equal(partly.prefix.self_attn.q_proj.weight, layer["self_attn.q_proj.weight"])
    assert torch.equal(partly.prefix.self_attn.k_proj.weight, layer["self_attn.k_proj.weight"])


def test_blocks_share_their_weights(target: Target) -> None:
    """[block] * n is n times the same block; every head has an output layer of its own, without bias."""
    head = D["plain_head"]("hydra", target, num_heads=3, num_layers=3, prefix=False)
    named = dict(head.named_parameters())
    assert len({p.data_ptr() for p in named.values()}) == len(named) == 3 * (4 + 2 * 2 + 1)
    assert {n for n in named if "lm_head" in n} == {f"lm_head.{k}.weight" for k in range(3)}
    assert [named[f"heads.{k}.0.linear.weight"].shape for k in range(3)] == [(32, 64), (32, 96), (32, 128)]
    assert named["heads.2.0.res_connection.weight"].shape == (32, 128) and named["heads.2.2.linear.weight"].shape == (32, 32)


def test_frozen_output_is_trained(target: Target) -> None:
    head = D["plain_head"]("hydra", target, train_output=False)
    assert {n for n, p in head.named_parameters() if not p.requires_grad} == {f"lm_head.{k}.weight" for k in range(4)}


@pytest.mark.parametrize("name", ["plus plus", "plain", "three blocks", "original"])
def test_checkpointing_or_autocast_changes_gradients(target: Target, name: str) -> None:
    D["checkpointing_agrees"](head_of(target, name), target)
    D["autocast_agrees"](head_of(target, name), target)


@pytest.mark.parametrize("name", ["plus plus", "plain"])
@pytest.mark.parametrize(("of_head", "of_target"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_states_of_another_precision_change_the_draft(target: Target, of_head: torch.dtype, of_target: torch.dtype, name: str) -> None:
    D["precisions_agree"](head_of(target, name), target, of_head, of_target)


SHAPES = [Chain(4), Chain(2), Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]), Tree.dynamic(3, 4, 12)]


@pytest.mark.parametrize("name", ["plus plus", "plain", "original"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_generation_differs_from_plain_decoding(target: Target, shape: Any, name: str) -> None:
    settings = {"eos": None, "max_new_tokens": 12}
    plain = generate(target, PROMPTS, **settings)
    drafted = generate(target, PROMPTS, drafter=HeadDrafter(head_of(target, name)), shape=shape, **settings)
    assert [r.tokens for r in drafted.rows] == [r.tokens for r in plain.rows]
    assert {r.drafted for row in drafted.rows for r in row.rounds} == {shape.budget}


@pytest.mark.parametrize("name", ["plus plus", "plain"])
@pytest.mark.parametrize(("shape", "law"), [(SHAPES[0], "iid"), (SHAPES[2], "without_replacement")], ids=["chain", "tree"])
def test_law_of_drawn_drafts_is_not_the_heads(target: Target, shape: Any, law: str, name: str) -> None:
    D["laws_are_the_heads"](head_of(target, name), target, shape, law)


def test_deeper_drafts_than_heads_are_asked_for(target: Target) -> None:
    head = head_of(target)
    assert (head.max_depth, head.cache_layers) == (4, (1, 2, 8))
    assert (head_of(target, "deeper").max_depth, head_of(target, "deeper").cache_layers) == (6, (0, 2, 8))
    with pytest.raises(ValueError, match="4"):
        generate(target, PROMPTS, drafter=HeadDrafter(head), shape=Chain(5))


def test_saved_head_drafts_something_else(target: Target, tmp_path: Path) -> None:
    for name in VARIANTS:
        head = head_of(target, name)
        save_head(head, tmp_path / "head", run_yaml="name: x\n", made_with={"target": "tiny", **target.fingerprints})
        loaded = load_head(tmp_path / "head")
        assert loaded.config == head.config and loaded.max_depth == head.max_depth and loaded.layer_ids == (-1,)
        assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in head.state_dict().items())


def test_settings_are_taken_from_another_family(target: Target, make_target) -> None:
    config = HeadConfig(kind="hydra", num_heads=3, num_layers=2, draft_vocab_size=50, output="frozen")
    check_config(config, target)
    head = new_head(config, target, [], seed=0, counts_V=torch.arange(100))
    assert (head.config.num_heads, head.config.num_layers, head.config.prefix, head.layer_ids) == (3, 2, True, (-1,))
    assert torch.equal(head.prefix.self_attn.q_proj.weight, target.layers[-1].self_attn.q_proj.weight)
    again = new_head(config, target, [], seed=0, start=head)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in head.state_dict().items())
    bare = new_head(config.model_copy(update={"prefix": False}), target, [], seed=0, counts_V=torch.arange(100))
    assert bare.layers == [] and not any("prefix" in n for n in bare.state_dict())
    rows = [new_head(config.model_copy(update={"init_output": init}), target, [], seed=0, counts_V=torch.arange(100)).lm_head[2].weight
            for init in ("target", "random", "random")]  # fmt: skip
    assert torch.equal(rows[0], target.output_VW[head.target_ids]) and torch.equal(rows[1], rows[2])
    assert rows[1].std() == pytest.approx(0.02, rel=0.1) and abs(torch.corrcoef(torch.stack([r.flatten() for r in rows[:2]]))[0, 1]) < 0.2
    with pytest.raises(ValueError, match="head.output frozen would leave output layers at random"):
        HeadConfig(kind="hydra", output="frozen", init_output="random")
    for changes in ({"hidden_size": 16}, {"shared_output": True}, {"fc_norm": True}, {"bias": True}):
        with pytest.raises(ValueError, match=f"kind hydra has no head.{next(iter(changes))}"):
            check_config(config.model_copy(update=changes), target)
    with pytest.raises(ValueError, match="reads the last state.*head.layer_ids=null"):
        check_config(config.model_copy(update={"layer_ids": (1, 2)}), target)
    with pytest.raises(ValueError, match="ttt_steps=3"):
        check_training(config, TrainingConfig(ttt_steps=4))


def test_notes_tell_of_layers_that_hydra_has_not(target: Target, make_target) -> None:
    """Its residual blocks are no decoder layers above the first; without a prefix layer nothing of the target's last one is asked for."""
    odd = make_target(attention_bias=True)
    config = HeadConfig(kind="hydra", num_layers=4)
    assert start_notes(config, target) == []
    assert len(start_notes(config, odd)) == 1 and start_notes(config.model_copy(update={"prefix": False}), odd) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "0 heads with 1 blocks"), ({"target_hidden_size": 16}, "its width is the target's"),
        ({"prefix": False, "sliding_window": 3}, "looks back on nothing"), ({"hidden_act": "gelu"}, "use silu"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_work_are_taken(target: Target, changes: dict[str, Any], message: str) -> None:
    head = D["plain_head"]("hydra", target)
    with pytest.raises(ValueError, match=message):
        type(head)(head.config.model_copy(update=changes))


def test_muon_takes_output_rows_or_what_reads_the_targets_states(target: Target) -> None:
    """Its are the seven matrices of the prefix layer."""
    head = head_of(target, "three blocks")
    muon, *adamw = make_optimizer(head, TrainingConfig(optimizer="muon")).param_groups
    inside = {id(p) for p in head.prefix.parameters() if p.dim() == 2}
    assert {id(p) for p in muon["params"]} == inside and len(inside) == 7
    assert {id(p) for group in adamw for p in group["params"]} == {id(p) for p in head.parameters()} - inside
