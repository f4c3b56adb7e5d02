"""EAGLE-3: training rows against step-by-step drafting.

Legend: B rows, L tokens, R flat rows, K test-time steps.
"""

from types import SimpleNamespace

import pytest
import torch

from spectrain.heads.base import DraftState
from spectrain.heads.eagle3 import Eagle3, default_layer_ids
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target

STEPS = 4


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


def new_cache(head: Eagle3, rows: int = 1, dtype: torch.dtype = torch.float32) -> SlabCache:
    layers, kv_heads, head_dim = head.cache_layers
    return SlabCache(
        layers=layers, rows=rows, kv_heads=kv_heads, head_dim=head_dim, max_length=60, dtype=dtype, device=torch.device("cpu")
    )  # fmt: skip


def drafted(head: Eagle3, batch: SimpleNamespace, b: int, i: int, steps: int, embed_VW: torch.Tensor) -> list[torch.Tensor]:
    """Logits of a draft started from the prefix 0 ... i + 1 of row b and fed the true tokens."""
    cache, ids = new_cache(head), batch.ids_BL[b]
    logits, state = head.begin(batch.states_BLF[b : b + 1, : i + 1], ids[None, 1 : i + 2], torch.tensor([i + 1]), embed_VW, cache, None)
    found = [logits[0]]
    for k in range(1, steps):
        logits_BNV, state = head.extend(state, ids[None, i + 1 + k : i + 2 + k], torch.tensor([[k - 1]]), embed_VW, cache)
        found.append(logits_BNV[0, 0])
    return found


@pytest.mark.parametrize("lengths", [[9], [12, 5, 9], [7, 12]])
def test_training_sees_other_context_than_drafting(target: Target, head: Eagle3, lengths: list[int]) -> None:
    """MK1: keys 0 ... p of step 0 and the row's own keys of later steps, at position p + j, with the true token as input."""
    batch = batch_of(head, lengths)
    L = max(lengths)
    at = [(b, i) for b, n in enumerate(lengths) for i in range(n - 1 - STEPS)]
    row_R = torch.tensor([b * L + i for b, i in at])
    rows = list(head.rows(batch, row_R, target.embedding_VW, STEPS))
    assert [ahead for ahead, _ in rows] == [2, 3, 4, 5]
    for r, (b, i) in enumerate(at):
        for (_, logits_RV), expected_V in zip(rows, drafted(head, batch, b, i, STEPS, target.embedding_VW), strict=True):
            torch.testing.assert_close(logits_RV[r], expected_V, atol=1e-5, rtol=1e-5)


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
    """CA1: with drafts made and dropped between the pieces."""
    batch = batch_of(head, [11])
    embed = target.embedding_VW
    cache, state, at = new_cache(head), None, 0
    for n in pieces:
        logits, state = head.begin(
            batch.states_BLF[:, at : at + n], batch.ids_BL[:, at + 1 : at + n + 1], torch.tensor([n]), embed, cache, state
        )
        at += n
        _, grown = head.extend(state, torch.tensor([[5, 6]]), torch.tensor([[0, 0]]), embed, cache)
        head.extend(grown, torch.tensor([[7, 8, 9]]), torch.tensor([[1, 2, 2]]), embed, cache)
    whole_cache = new_cache(head)
    expected, whole = head.begin(batch.states_BLF[:, :10], batch.ids_BL[:, 1:11], torch.tensor([10]), embed, whole_cache, None)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.hidden_BMH, whole.hidden_BMH, atol=1e-5, rtol=1e-5)
    assert cache.lengths_B.tolist() == whole_cache.lengths_B.tolist() == [10]
    torch.testing.assert_close(cache.keys[0][:, :, :10], whole_cache.keys[0][:, :, :10], atol=1e-5, rtol=1e-5)


def test_rows_that_settle_unequal_numbers_are_mixed_up(target: Target, head: Eagle3) -> None:
    """Rows take in 6 and 3 tokens, then 1 and 4, then none and 2; each equals the row by itself."""
    batch = batch_of(head, [12, 12])
    embed = target.embedding_VW
    cache, state, at = new_cache(head, rows=2), None, [0, 0]
    for counts in ([6, 3], [1, 4], [0, 2]):
        N = max(counts)
        states = torch.stack([batch.states_BLF[b, at[b] : at[b] + N] for b in range(2)])
        following = torch.stack([batch.ids_BL[b, at[b] + 1 : at[b] + 1 + N] for b in range(2)])
        for b, n in enumerate(counts):  # what lies beyond a row's count must not matter
            states[b, n:], following[b, n:] = 1e3, 0
        logits, state = head.begin(states, following, torch.tensor(counts), embed, cache, state)
        at = [a + n for a, n in zip(at, counts, strict=True)]
        drafts = torch.tensor([[3], [4]])
        after, _ = head.extend(state, drafts, torch.zeros(2, 1, dtype=torch.long), embed, cache)
        for b in range(2):
            alone = new_cache(head)
            n = at[b]
            expected, its = head.begin(
                batch.states_BLF[b : b + 1, :n], batch.ids_BL[b : b + 1, 1 : n + 1], torch.tensor([n]), embed, alone, None
            )
            if counts[b]:
                torch.testing.assert_close(logits[b], expected[0], atol=1e-5, rtol=1e-5)
            expected_after, _ = head.extend(its, drafts[b : b + 1], torch.zeros(1, 1, dtype=torch.long), embed, alone)
            torch.testing.assert_close(after[b], expected_after[0], atol=1e-5, rtol=1e-5)
    assert cache.lengths_B.tolist() == [7, 9]


@pytest.mark.parametrize(("of_head", "of_target"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_embeddings_of_another_precision_change_the_draft(target: Target, make_head, of_head: torch.dtype, of_target: torch.dtype) -> None:
    """Drafting reads them in the head's precision: the logits of a head whose target has that precision."""
    head = make_head(target).requires_grad_(False).to(of_head)
    batch = batch_of(head, [7])
    embed = target.embedding_VW.bfloat16()  # exact in both, like the states
    found = []
    for dtype in (of_target, of_head):
        cache = new_cache(head, dtype=of_head)
        states, ids = batch.states_BLF[:, :6].bfloat16().to(dtype), batch.ids_BL[:, 1:7]
        logits, state = head.begin(states, ids, torch.tensor([6]), embed.to(dtype), cache, None)
        after, _ = head.extend(state, torch.tensor([[11, 12]]), torch.tensor([[0, 0]]), embed.to(dtype), cache)
        found.append((logits, after))
    for mixed, same in zip(*found, strict=True):
        assert mixed.dtype == of_head and torch.equal(mixed, same)


def test_a_branch_sees_its_neighbour(target: Target, head: Eagle3) -> None:
    """Every line of a draft tree equals the same line drafted alone."""
    batch = batch_of(head, [7])
    embed = target.embedding_VW
    start = (batch.states_BLF[:, :6], batch.ids_BL[:, 1:7], torch.tensor([6]), embed)
    cache = new_cache(head)
    _, state = head.begin(*start, cache, None)
    levels = [([11, 12, 13], [0, 0, 0]), ([14, 15, 16, 17], [1, 1, 3, 2]), ([18, 19], [7, 4])]
    tokens, parents, logits = [0], [-1], [torch.empty(0)]
    for level, above in levels:
        after, state = head.extend(state, torch.tensor([level]), torch.tensor([above]), embed, cache)
        tokens, parents, logits = tokens + level, parents + above, logits + list(after[0])
    for n in range(1, len(tokens)):
        line, m = [], n
        while m:
            line.insert(0, tokens[m])
            m = parents[m]
        alone = new_cache(head)
        _, its = head.begin(*start, alone, None)
        for depth, token in enumerate(line):
            after, its = head.extend(its, torch.tensor([[token]]), torch.tensor([[depth]]), embed, alone)
        torch.testing.assert_close(logits[n], after[0, 0], atol=1e-5, rtol=1e-5)
    assert isinstance(state, DraftState) and state.hidden_BMH.shape[1] == len(tokens)


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
