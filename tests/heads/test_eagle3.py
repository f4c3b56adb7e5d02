"""EAGLE-3: training rows against step-by-step drafting.

Legend: B rows, L tokens, R flat rows, K test-time steps.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spectrain.heads.eagle3 import Eagle3, default_layer_ids
from spectrain.target.model import Target

D = runpy.run_path(str(Path(__file__).with_name("drafting.py")))
STEPS = D["STEPS"]


@pytest.fixture(scope="module")
def head(target: Target, make_head) -> Eagle3:
    return make_head(target).requires_grad_(False)


def batch_of(head: Eagle3, lengths: list[int], seed: int = 0) -> SimpleNamespace:
    """Random ids and states, padded at the end with values that would show."""
    g = torch.Generator().manual_seed(seed)
    B, L = len(lengths), max(lengths)
    ids_BL = torch.randint(0, head.config.vocab_size, (B, L), generator=g)
    states_BLF = torch.randn(B, L, head.fc.in_features, generator=g)
    for b, n in enumerate(lengths):
        states_BLF[b, n:] = 1e3
    return one_document_a_line(ids_BL, states_BLF)


def one_document_a_line(ids_BL: torch.Tensor, states_BLF: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(ids_BL=ids_BL, mask_BL=torch.ones_like(ids_BL), states_BLF=states_BLF, doc_BL=None, position_BL=None)


@pytest.mark.parametrize("lengths", [[9], [12, 5, 9], [7, 12]])
def test_training_sees_other_context_than_drafting(target: Target, head: Eagle3, lengths: list[int]) -> None:
    """MK1: keys 0 ... p of step 0 and the row's own keys of later steps, at position p + j, with the true token as input."""
    batch = batch_of(head, lengths)
    L = max(lengths)
    row_R = torch.tensor([b * L + i for b, n in enumerate(lengths) for i in range(n - 1 - STEPS)])
    rows = list(head.rows(batch, row_R, target.embedding_VW, STEPS))
    assert [ahead for ahead, _ in rows] == [2, 3, 4, 5]
    for (_, logits_RV), expected_RV in zip(rows, D["drafted"](head, batch, row_R, target.embedding_VW), strict=True):
        torch.testing.assert_close(logits_RV, expected_RV, atol=1e-5, rtol=1e-5)


def test_only_some_rows_asked_for_change_the_others(target: Target, head: Eagle3) -> None:
    batch = batch_of(head, [12, 9])
    every = list(head.rows(batch, torch.arange(24), target.embedding_VW, 3))
    some_R = torch.tensor([2, 3, 7, 13, 20])
    for (_, all_RV), (_, some_RV) in zip(every, head.rows(batch, some_R, target.embedding_VW, 3), strict=True):
        torch.testing.assert_close(some_RV, all_RV[some_R], atol=1e-5, rtol=1e-5)


def test_padding_or_a_neighbour_changes_a_row(target: Target, head: Eagle3) -> None:
    batch = batch_of(head, [6, 12])
    alone = one_document_a_line(batch.ids_BL[:1, :6], batch.states_BLF[:1, :6])
    row_R = torch.arange(3)
    for (_, with_RV), (_, without_RV) in zip(
        head.rows(batch, row_R, target.embedding_VW, 3), head.rows(alone, row_R, target.embedding_VW, 3), strict=True
    ):
        torch.testing.assert_close(with_RV, without_RV, atol=1e-5, rtol=1e-5)


def test_document_sees_its_neighbour(target: Target, head: Eagle3) -> None:
    """Three documents in one line, and padding: every row gives what it gives with its document alone in a line."""
    alone = [batch_of(head, [n], seed=n) for n in (8, 5, 9)]
    joined = SimpleNamespace(
        ids_BL=torch.cat([*(b.ids_BL for b in alone), torch.full((1, 3), 7)], dim=1), mask_BL=None,
        states_BLF=torch.cat([*(b.states_BLF for b in alone), torch.full((1, 3, head.fc.in_features), 1e3)], dim=1),
        doc_BL=torch.tensor([[0] * 8 + [1] * 5 + [2] * 9 + [-1] * 3]),
        position_BL=torch.tensor([[*range(8), *range(5), *range(9), 0, 0, 0]]),
    )  # fmt: skip
    first = 0
    for batch in alone:
        n = batch.ids_BL.shape[1]
        for k, (_, alone_RV) in enumerate(head.rows(batch, torch.arange(n - 1), target.embedding_VW, 3)):
            at_R = torch.arange(n - 1 - k)  # rows that read within the document at this step
            joined_RV = list(head.rows(joined, torch.arange(first, first + n - 1), target.embedding_VW, 3))[k][1]
            torch.testing.assert_close(joined_RV[at_R], alone_RV[at_R], atol=1e-5, rtol=1e-5)
        first += n


def test_a_row_reads_its_own_answer(target: Target, head: Eagle3) -> None:
    """Gradients show what step k of row i depends on: tokens up to i + 1 + k, states up to i."""
    batch = batch_of(head, [12])
    i = 3
    for k in range(STEPS):
        embed_VW = target.embedding_VW.clone().requires_grad_()
        batch.ids_BL = torch.arange(12)[None] + 40
        batch.states_BLF = batch.states_BLF.detach().requires_grad_()
        logits_RV = list(head.rows(batch, torch.tensor([i]), embed_VW, k + 1))[k][1]
        by_embed, by_state = torch.autograd.grad(logits_RV.sum(), (embed_VW, batch.states_BLF))
        assert (by_embed.abs().sum(-1) > 0).nonzero()[:, 0].tolist() == list(range(41, 40 + i + 2 + k))
        assert (by_state[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist() == list(range(i + 1))


def test_no_row_asked_for_gives_nan(target: Target, make_head) -> None:
    head = make_head(target).train()
    rows = [logits for _, logits in head.rows(batch_of(head, [6, 4]), torch.tensor([], dtype=torch.long), target.embedding_VW, 2)]
    assert [tuple(x.shape) for x in rows] == [(0, 40)] * 2
    sum(x.sum() for x in rows).backward()
    assert all(p.grad is None or not p.grad.any() for p in head.parameters())


@pytest.mark.parametrize("pieces", [[1] * 10, [4, 6], [9, 1], [3, 3, 4]])
def test_settled_tokens_in_pieces_read_otherwise(target: Target, head: Eagle3, pieces: list[int]) -> None:
    D["portions_agree"](head, target, pieces)


def test_rows_that_settle_unequal_numbers_are_mixed_up(target: Target, head: Eagle3) -> None:
    D["unequal_portions_agree"](head, target)


@pytest.mark.parametrize(("of_head", "of_target"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_embeddings_of_another_precision_change_the_draft(target: Target, make_head, of_head: torch.dtype, of_target: torch.dtype) -> None:
    D["precisions_agree"](make_head(target).requires_grad_(False), target, of_head, of_target)


@pytest.mark.parametrize(("layers", "ids"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (7, (2, 3, 4))])
def test_default_layers_are_not_the_published_ones(layers: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(layers) == ids


@pytest.mark.parametrize("layers", [1, 3, 5, 6])
def test_default_layers_of_a_shallow_target_collide(layers: int) -> None:
    with pytest.raises(ValueError, match="too shallow"):
        default_layer_ids(layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "use silu, the config says 'gelu'"),
        ({"fc_norm": True, "norm_before_fc": True}, "a head has one of them"),
        ({"num_hidden_layers": 0}, "0 layers.*needed are a layer or more"),
        ({"num_key_value_heads": 3}, "4 query heads and 3 key heads.*as many query heads"),
    ],
)
def test_sizes_that_cannot_work_are_taken(target: Target, make_head, changes: dict, message: str) -> None:
    config = {**make_head(target).config.model_dump(), **changes}
    with pytest.raises(ValueError, match=message):
        Eagle3(Eagle3.Config(**config))
