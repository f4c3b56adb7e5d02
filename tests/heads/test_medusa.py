"""Medusa: heads over the last state, trained and drafting alike; what they begin with; trees, laws and settings."""

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
from spectrain.training.setup import check_config, check_training, new_head

D = runpy.run_path(str(Path(__file__).with_name("drafting.py")))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "three blocks": {"num_layers": 3}, "shared": {"shared_output": True, "num_layers": 2}, "deeper": {"num_heads": 6},
}  # fmt: skip
PROMPTS = [[9, 55, 31], [7], [50, 51, 52, 7, 50, 51, 52, 7]]


def head_of(target: Target, name: str = "plain") -> Any:
    return D["random_head"]("medusa", target, **VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_training_sees_other_context_than_drafting(target: Target, name: str) -> None:
    D["rows_are_drafts"](head_of(target, name), target)


def test_head_reads_more_than_the_state_of_its_row(target: Target) -> None:
    """No token, and one state: the row's own."""
    D["reads_only"](head_of(target), target, tokens=[range(0)] * 4, states=[range(1)] * 4)
    D["neighbours_unseen"](head_of(target), target)


@pytest.mark.parametrize("pieces", [[1] * 10, [4, 6], [9, 1]])
def test_settled_tokens_in_pieces_read_otherwise(target: Target, pieces: list[int]) -> None:
    D["portions_agree"](head_of(target), target, pieces)


def test_rows_that_settle_unequal_numbers_are_mixed_up(target: Target) -> None:
    D["unequal_portions_agree"](head_of(target), target)


@pytest.mark.parametrize("calls", ["BY_LEVEL", "MIXED"])
def test_a_branch_sees_its_neighbour(target: Target, calls: str) -> None:
    D["branches_agree"](head_of(target, "shared"), target, D[calls])


@torch.no_grad()
def test_law_depends_on_the_tokens_above_or_not_on_the_depth(target: Target) -> None:
    head, cache, embed = head_of(target), None, target.embedding_VW
    logits, state = head.begin(torch.randn(1, 3, 32), torch.tensor([[1, 2, 3]]), torch.tensor([3]), embed, cache, None)
    after, state = head.extend(state, torch.tensor([[5, 6]]), torch.tensor([[0, 0]]), embed, cache)
    later, _ = head.extend(state, torch.tensor([[7, 8]]), torch.tensor([[1, 2]]), embed, cache)
    assert torch.equal(after[0, 0], after[0, 1]) and torch.equal(later[0, 0], later[0, 1])
    assert not torch.allclose(logits[0], after[0, 0], atol=0.1) and not torch.allclose(after[0, 0], later[0, 0], atol=0.1)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_fresh_head_says_something_else_than_the_target(target: Target, name: str) -> None:
    """Zero blocks and a quarter of the target's rows, or all of rows that stay: at every depth the target's own law after the state that
    is read, less surely where it has to be unlearnt."""
    head, fixed = (D["plain_head"]("medusa", target, train_output=train, **VARIANTS[name]) for train in (True, False))
    ids_1L = torch.tensor([[7, 12, 9, 55, 31, 8]])
    out = target.forward(ids_1L, positions_BN=torch.arange(6)[None], mask=None, cache=None, layer_ids=(-1,))
    batch = D["padded"](32, 100, [6])
    batch.states_BLF = out.states_BNF
    for share, some in ((0.25, head), (1.0, fixed)):
        for _, logits_RV in some.rows(batch, torch.arange(6), target.embedding_VW, head.max_depth):
            torch.testing.assert_close(logits_RV, share * out.logits_BKV[0][:, head.target_ids], atol=1e-5, rtol=1e-5)
    blocks = [p for n, p in head.named_parameters() if n.startswith("heads.")]
    assert len(blocks) == 2 * head.config.num_heads * head.config.num_layers and not any(p.any() for p in blocks)


@pytest.mark.parametrize(("shared", "outputs"), [(False, 3), (True, 1)])
def test_blocks_share_their_weights(target: Target, shared: bool, outputs: int) -> None:
    """[block] * n is n times the same block: one trained block moves no other, and each has its tensors on disk."""
    head = D["plain_head"]("medusa", target, num_heads=3, num_layers=2, shared_output=shared)
    named = dict(head.named_parameters())
    assert len({p.data_ptr() for p in named.values()}) == len(named) == 2 * 3 * 2 + outputs
    assert {n for n in named if "lm_head" in n} == {f"lm_head.{k}.weight" for k in range(outputs)}
    assert named["heads.2.1.linear.weight"].shape == (32, 32)
    with torch.no_grad():
        head.heads[1][0].linear.bias.fill_(1.0)
    moved = {n for n, p in named.items() if n.startswith("heads.") and p.any()}
    assert moved == {"heads.1.0.linear.bias"}


def test_shared_output_gets_the_gradient_of_one_head(target: Target) -> None:
    head = D["random_head"]("medusa", target, shared_output=True)
    batch = D["packed"](32, 100)
    outputs = list(head.outputs(batch, D["rows_within"](batch), target.embedding_VW, 4))
    assert len({id(step.output_VdH) for step in outputs}) == 1
    D["checkpointing_agrees"](head, target)


def test_frozen_output_is_trained(target: Target) -> None:
    head = D["plain_head"]("medusa", target, train_output=False)
    assert {n for n, p in head.named_parameters() if p.requires_grad} == {n for n in dict(head.named_parameters()) if "heads." in n}
    head.train_output(True)
    assert all(p.requires_grad for p in head.parameters())


@pytest.mark.parametrize("name", ["plain", "shared"])
def test_checkpointing_or_autocast_changes_gradients(target: Target, name: str) -> None:
    D["checkpointing_agrees"](head_of(target, name), target)
    D["autocast_agrees"](head_of(target, name), target)


@pytest.mark.parametrize(("of_head", "of_target"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_states_of_another_precision_change_the_draft(target: Target, of_head: torch.dtype, of_target: torch.dtype) -> None:
    D["precisions_agree"](head_of(target), target, of_head, of_target)


SHAPES = [Chain(4), Chain(2), Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]), Tree.dynamic(3, 4, 12)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_generation_differs_from_plain_decoding(target: Target, shape: Any) -> None:
    settings = {"eos": None, "max_new_tokens": 12}
    plain = generate(target, PROMPTS, **settings)
    drafted = generate(target, PROMPTS, drafter=HeadDrafter(head_of(target)), shape=shape, **settings)
    assert [r.tokens for r in drafted.rows] == [r.tokens for r in plain.rows]
    assert {r.drafted for row in drafted.rows for r in row.rounds} == {shape.budget}


@pytest.mark.parametrize(("shape", "law"), [(SHAPES[0], "iid"), (SHAPES[2], "without_replacement")], ids=["chain", "tree"])
def test_law_of_drawn_drafts_is_not_the_heads(target: Target, shape: Any, law: str) -> None:
    D["laws_are_the_heads"](head_of(target), target, shape, law)


def test_deeper_drafts_than_heads_are_asked_for(target: Target) -> None:
    head = head_of(target)
    assert head.max_depth == 4 and head_of(target, "deeper").max_depth == 6
    with pytest.raises(ValueError, match="4"):
        generate(target, PROMPTS, drafter=HeadDrafter(head), shape=Chain(5))


def test_saved_head_drafts_something_else(target: Target, tmp_path: Path) -> None:
    for name in VARIANTS:
        head = head_of(target, name)
        save_head(head, tmp_path / "head", run_yaml="name: x\n", made_with={"target": "tiny", **target.fingerprints})
        loaded = load_head(tmp_path / "head")
        assert loaded.config == head.config and loaded.max_depth == head.max_depth and loaded.layer_ids == (-1,)
        assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in head.state_dict().items())


def test_settings_are_taken_from_another_family(target: Target) -> None:
    config = HeadConfig(kind="medusa", num_heads=3, num_layers=2, draft_vocab_size=50, shared_output=True, output="frozen")
    check_config(config, target)
    head = new_head(config, target, [], seed=0, counts_V=torch.arange(100))
    assert (head.config.num_heads, head.config.num_layers, head.config.shared_output, head.layer_ids) == (3, 2, True, (-1,))
    assert head.config.draft_vocab_size == 50 and head.tokens and not any(p.requires_grad for p in head.lm_head.parameters())
    again = new_head(config.model_copy(update={"output": "trained"}), target, [], seed=0, start=head)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in head.state_dict().items())
    assert all(p.requires_grad for p in again.lm_head.parameters())
    for changes in ({"hidden_size": 16}, {"sliding_window": 4}, {"fc_norm": True}, {"prefix": False}, {"bias": True}):
        with pytest.raises(ValueError, match=f"kind medusa has no head.{next(iter(changes))}"):
            check_config(config.model_copy(update=changes), target)
    with pytest.raises(ValueError, match="reads the last state.*head.layer_ids=null"):
        check_config(config.model_copy(update={"layer_ids": (1, 2)}), target)
    with pytest.raises(ValueError, match="ttt_steps=3"):
        check_training(config, TrainingConfig(ttt_steps=4))
    with pytest.raises(ValueError, match="5 heads with 0 blocks"):
        type(head)(head.config.model_copy(update={"num_heads": 5, "num_layers": 0}))


def test_muon_takes_what_reads_the_targets_states(target: Target) -> None:
    """Nothing is left for it: AdamW has all."""
    head = head_of(target, "three blocks")
    optimizer = make_optimizer(head, TrainingConfig(optimizer="muon"))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in head.parameters()}
