"""What a head of any kind has to do: training rows against drafting with a cache. Small random heads to try it on.

Tests load it with runpy, since tests are no package.

Legend: B lines, L tokens, R flat rows, N nodes, W target width.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.generate import generate
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import head_class
from spectrain.heads.layers import rotary_settings
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target

STEPS = 4
DOCUMENTS = ((8, 5), (9,), (6, 7, 4))  # tokens of each, by line
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def plain_head(kind: str, target: Target, *, draft_vocab: int = 40, train_output: bool = True, layer: Any = None, **changes: Any) -> Any:
    """A new head over every second id of a small target, as `start_from` leaves it."""
    c = target.config
    sizes = {
        "hidden_size": c.hidden_size, "target_hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps, "rope_parameters": rotary_settings(c), "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab, "layer_ids": (-1,), "target_layers": target.num_layers,
        "num_heads": STEPS, "num_layers": 1,
    }  # fmt: skip
    cls = head_class(kind)
    head = cls(cls.Config(**{**{n: v for n, v in sizes.items() if n in cls.Config.model_fields}, **changes}))
    head.start_from(
        layer=layer, norm=torch.ones(c.hidden_size), output_VW=target.output_VW, train_output=train_output, seed=0,
        target_ids=torch.arange(draft_vocab) * max(1, target.vocab_size // draft_vocab),
    )  # fmt: skip
    return head.eval()


@torch.no_grad()
def random_head(kind: str, target: Target, *, seed: int = 0, **changes: Any) -> Any:
    """A head whose parts all have their say, with logits far apart."""
    head, g = plain_head(kind, target, **changes), torch.Generator().manual_seed(seed)
    for name, p in head.named_parameters():
        if "norm" not in name:
            p.copy_(torch.randn(p.shape, generator=g) * (0.3 if p.dim() < 2 else p.shape[1] ** -0.5))
    return head


def packed(width: int, vocab: int, seed: int = 0, documents: Sequence[Sequence[int]] = DOCUMENTS) -> SimpleNamespace:
    """Documents side by side and padding behind, with values that would show."""
    g = torch.Generator().manual_seed(seed)
    B, L = len(documents), max(map(sum, documents)) + 2
    ids_BL = torch.randint(0, vocab, (B, L), generator=g)
    states_BLF = torch.randn(B, L, width, generator=g)
    doc_BL, position_BL = torch.full((B, L), -1), torch.zeros(B, L, dtype=torch.long)
    for b, line in enumerate(documents):
        first = 0
        for number, n in enumerate(line):
            doc_BL[b, first : first + n], position_BL[b, first : first + n] = number, torch.arange(n)
            first += n
        states_BLF[b, first:] = 1e3
    return SimpleNamespace(ids_BL=ids_BL, mask_BL=None, states_BLF=states_BLF, doc_BL=doc_BL, position_BL=position_BL)


def padded(width: int, vocab: int, lengths: Sequence[int], seed: int = 0) -> SimpleNamespace:
    """A document a line, and padding behind it."""
    batch = packed(width, vocab, seed, [[n] for n in lengths])
    batch.doc_BL = batch.position_BL = None
    return batch


def sizes_of(head: Any, target: Target) -> tuple[int, int]:
    """Width of the states that the head reads, and the target's vocabulary."""
    return len(head.layer_ids) * target.config.hidden_size, target.vocab_size


def rows_within(batch: SimpleNamespace, steps: int = STEPS) -> Tensor:
    """Flat rows of a packed batch whose every step reads within their document, without the first row of each, so that they are no
    whole."""
    at_BL = batch.position_BL
    ok_BL = (batch.doc_BL >= 0) & (batch.doc_BL.roll(-steps, 1) == batch.doc_BL) & (at_BL.roll(-steps, 1) == at_BL + steps)
    return (ok_BL & (at_BL > 0)).flatten().nonzero()[:, 0]


def new_cache(head: Any, rows: int, dtype: torch.dtype = torch.float32) -> SlabCache:
    layers, kv_heads, head_dim = head.cache_layers
    device = torch.device("cpu")
    return SlabCache(layers=layers, rows=rows, kv_heads=kv_heads, head_dim=head_dim, max_length=60, dtype=dtype, device=device)


def drafted(head: Any, batch: SimpleNamespace, row_R: Tensor, embed_VW: Tensor, steps: int = STEPS) -> list[Tensor]:
    """Logits of `followed` drafts."""
    return [logits_RV for logits_RV, _ in followed(head, batch, row_R, embed_VW, steps)]


def features(head: Any, batch: SimpleNamespace, row_R: Tensor, embed_VW: Tensor, steps: int = STEPS) -> list[Tensor]:
    """What the node below each of `followed` drafts reads."""
    return [feature_RH for _, feature_RH in followed(head, batch, row_R, embed_VW, steps)]


def followed(head: Any, batch: SimpleNamespace, row_R: Tensor, embed_VW: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Logits and features of drafts that start from each row's prefix within its document and are fed the true tokens; a row of the
    cache each."""
    B, L = batch.ids_BL.shape
    position_BL = torch.arange(L).expand(B, L) if batch.position_BL is None else batch.position_BL
    at = [(int(r) // L, int(r) % L, int(position_BL.flatten()[r])) for r in row_R]
    count_R = torch.tensor([p + 1 for *_, p in at])
    N = int(count_R.max())
    states, following = torch.full((len(at), N, batch.states_BLF.shape[2]), 1e3), torch.zeros(len(at), N, dtype=torch.long)
    for r, (b, i, p) in enumerate(at):
        states[r, : p + 1], following[r, : p + 1] = batch.states_BLF[b, i - p : i + 1], batch.ids_BL[b, i - p + 1 : i + 2]
    cache = new_cache(head, len(at))
    logits, state = head.begin(states, following, count_R, embed_VW, cache, None)
    found = [(logits, state.hidden_BMH[:, 0])]
    for k in range(1, steps):
        token_R1 = torch.tensor([[int(batch.ids_BL[b, i + 1 + k])] for b, i, _ in at])
        after, state = head.extend(state, token_R1, torch.full_like(token_R1, k - 1), embed_VW, cache)
        found.append((after[:, 0], state.hidden_BMH[:, k]))
    return found


@torch.no_grad()
def rows_are_drafts(head: Any, target: Target) -> None:
    """MK1: every step of a training row gives what drafting gives, in padded and in packed lines."""
    W, V = sizes_of(head, target)
    one, several = padded(W, V, [12, 5, 9]), packed(W, V)
    for batch, row_R in (
        (one, torch.tensor([b * 14 + i for b, n in enumerate([12, 5, 9]) for i in range(n - STEPS)])), (several, rows_within(several)),
    ):  # fmt: skip
        rows = list(head.rows(batch, row_R, target.embedding_VW, STEPS))
        assert [ahead for ahead, _ in rows] == [2, 3, 4, 5] and len(row_R) == (14 if batch is one else 10)
        for (_, logits_RV), expected_RV in zip(rows, drafted(head, batch, row_R, target.embedding_VW), strict=True):
            torch.testing.assert_close(logits_RV, expected_RV, **CLOSE)


def reads_only(head: Any, target: Target, *, tokens: Sequence[range], states: Sequence[range], i: int = 3) -> None:
    """Gradients show what step k of row i depends on: the tokens (i + these) whose embeddings and the states that it reads."""
    W, V = sizes_of(head, target)
    for k in range(STEPS):
        batch = padded(W, V, [12])
        embed_VW = target.embedding_VW.clone().requires_grad_()
        batch.ids_BL = torch.arange(14)[None] + 40
        batch.states_BLF.requires_grad_()
        logits_RV = list(head.rows(batch, torch.tensor([i]), embed_VW, k + 1))[k][1]
        by_embed, by_state = torch.autograd.grad(logits_RV.sum(), (embed_VW, batch.states_BLF), allow_unused=True)
        read = [] if by_embed is None else (by_embed.abs().sum(-1) > 0).nonzero()[:, 0].tolist()
        assert read == [40 + i + n for n in tokens[k]]
        assert (by_state[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist() == [i + n for n in states[k]]


def neighbours_unseen(head: Any, target: Target) -> None:
    """Bit for bit: what stands in another document, or in the padding, changes no row of this one."""
    W, V = sizes_of(head, target)
    batch, other = packed(W, V), packed(W, V, seed=1)
    row_R = rows_within(batch)
    mine_BL = torch.zeros_like(batch.doc_BL, dtype=torch.bool)
    mine_BL[0] = batch.doc_BL[0] == 0
    mine_BL[2] = batch.doc_BL[2] == 1
    mixed = SimpleNamespace(**vars(batch))
    mixed.ids_BL = torch.where(mine_BL, batch.ids_BL, other.ids_BL)
    mixed.states_BLF = torch.where(mine_BL[..., None], batch.states_BLF, other.states_BLF)
    at_R = mine_BL.flatten()[row_R]
    assert 0 < at_R.sum() < len(row_R)
    pairs = zip(*(list(head.rows(b, row_R, target.embedding_VW, STEPS)) for b in (batch, mixed)), strict=True)
    for (_, logits_RV), (_, with_other_RV) in pairs:
        assert torch.equal(logits_RV[at_R], with_other_RV[at_R])
        assert not torch.isclose(logits_RV[~at_R], with_other_RV[~at_R]).all(-1).any()


@torch.no_grad()
def portions_agree(head: Any, target: Target, pieces: Sequence[int]) -> None:
    """CA1: settled tokens in portions, with drafts made and dropped between them, read as in one."""
    batch, embed = padded(*sizes_of(head, target), [11]), target.embedding_VW
    cache, state, at = new_cache(head, 1), None, 0
    for n in pieces:
        part = batch.states_BLF[:, at : at + n], batch.ids_BL[:, at + 1 : at + n + 1]
        logits, state = head.begin(*part, torch.tensor([n]), embed, cache, state)
        at += n
        _, grown = head.extend(state, torch.tensor([[5, 6]]), torch.tensor([[0, 0]]), embed, cache)
        head.extend(grown, torch.tensor([[7, 8, 9]]), torch.tensor([[1, 2, 2]]), embed, cache)
    whole_cache = new_cache(head, 1)
    expected, whole = head.begin(batch.states_BLF[:, :at], batch.ids_BL[:, 1 : at + 1], torch.tensor([at]), embed, whole_cache, None)
    torch.testing.assert_close(logits, expected, **CLOSE)
    torch.testing.assert_close(state.hidden_BMH, whole.hidden_BMH, **CLOSE)
    assert state.hidden_BMH.shape[1] == 1 and cache.lengths_B.tolist() == whole_cache.lengths_B.tolist()
    for kept, expected_kept in zip(cache.keys, whole_cache.keys, strict=True):  # a draft's own keys never stay for an accepted token
        torch.testing.assert_close(kept[:, :, :at], expected_kept[:, :, :at], **CLOSE)


@torch.no_grad()
def unequal_portions_agree(head: Any, target: Target) -> None:
    """Rows take in 6 and 3 tokens, then 1 and 4, then none and 2; each equals the row by itself."""
    batch, embed = padded(*sizes_of(head, target), [12, 12]), target.embedding_VW
    cache, state, at = new_cache(head, 2), None, [0, 0]
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
            alone, n = new_cache(head, 1), at[b]
            part = batch.states_BLF[b : b + 1, :n], batch.ids_BL[b : b + 1, 1 : n + 1]
            expected, its = head.begin(*part, torch.tensor([n]), embed, alone, None)
            if counts[b]:
                torch.testing.assert_close(logits[b], expected[0], **CLOSE)
            expected_after, _ = head.extend(its, drafts[b : b + 1], torch.zeros(1, 1, dtype=torch.long), embed, alone)
            torch.testing.assert_close(after[b], expected_after[0], **CLOSE)


# Nodes with their parents, in the calls that add them: by levels, and of unlike depth in one call.
BY_LEVEL = [([11, 12, 13], [0, 0, 0]), ([14, 15, 16, 17], [1, 1, 3, 2]), ([18, 19], [7, 4])]
MIXED = [([11, 12, 13], [0, 0, 0]), ([14, 15], [1, 3]), ([16, 17, 18, 19], [0, 4, 2, 5])]


@torch.no_grad()
def branches_agree(head: Any, target: Target, calls: Sequence[tuple[list[int], list[int]]]) -> None:
    """Every line of a draft tree equals the same line drafted alone; two rows whose trees differ."""
    batch, embed = padded(*sizes_of(head, target), [7, 7]), target.embedding_VW
    start = (batch.states_BLF[:, :6], batch.ids_BL[:, 1:7], torch.tensor([6, 4]), embed)
    cache = new_cache(head, 2)
    _, state = head.begin(*start, cache, None)
    tokens, parents, logits = [[0], [0]], [[-1], [-1]], [[torch.empty(0)], [torch.empty(0)]]
    for level, above in calls:
        rows = [(level, above), ([t + 20 for t in reversed(level)], sorted(above))]
        level_BN, above_BN = (torch.tensor([row[side] for row in rows]) for side in (0, 1))
        after, state = head.extend(state, level_BN, above_BN, embed, cache)
        for b, (its, over) in enumerate(rows):
            tokens[b], parents[b], logits[b] = tokens[b] + its, parents[b] + over, logits[b] + list(after[b])
    for b in range(2):
        for n in range(1, len(tokens[b])):
            line, m = [], n
            while m:
                line.insert(0, tokens[b][m])
                m = parents[b][m]
            alone = new_cache(head, 1)
            _, its = head.begin(*(t[b : b + 1] for t in start[:3]), embed, alone, None)
            for depth, token in enumerate(line):
                after, its = head.extend(its, torch.tensor([[token]]), torch.tensor([[depth]]), embed, alone)
            torch.testing.assert_close(logits[b][n], after[0, 0], **CLOSE)
    assert state.hidden_BMH.shape[1] == state.ancestors_BMM.shape[1] == len(tokens[0])


def checkpointing_agrees(head: Any, target: Target, *, unread: frozenset[str] = frozenset()) -> None:
    """RB3: equal gradients with and without, and none of them zero, although the embeddings and states need none."""
    batch = packed(*sizes_of(head, target))
    found = []
    for checkpointing in (False, True):
        head.train().zero_grad()
        outputs = head.outputs(batch, rows_within(batch), target.embedding_VW, STEPS, checkpointing=checkpointing)
        loss = sum((step.hidden_RH @ step.output_VdH.T).logsumexp(-1).sum() / (k + 1) for k, step in enumerate(outputs))
        loss.backward()
        found.append({n: p.grad.clone() for n, p in head.named_parameters()})
    for n, gradient in found[0].items():
        assert gradient.any(), n
        torch.testing.assert_close(found[1][n], gradient, atol=1e-6 * float(gradient.abs().max()), rtol=1e-6)


def autocast_agrees(head: Any, target: Target) -> None:
    """Products are bfloat16; what goes to the output layer is a float32 sum, gradients are those of float32 but for the rounding."""
    batch = packed(*sizes_of(head, target))
    found = []
    for on in (False, True):
        head.train().zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            outputs = list(head.outputs(batch, rows_within(batch), target.embedding_VW, STEPS))
        assert {step.hidden_RH.dtype for step in outputs} == {torch.float32}
        sum((step.hidden_RH @ step.output_VdH.T).logsumexp(-1).sum() for step in outputs).backward()
        found.append(({n: p.grad.clone() for n, p in head.named_parameters()}, torch.stack([s.hidden_RH for s in outputs])))
    (wanted, hidden), (gradients, rounded) = found
    assert 0 < (rounded - hidden).norm() < 0.02 * hidden.norm()
    assert all(0 < (gradients[n] - g).norm() < 0.08 * g.norm() for n, g in wanted.items() if "lm_head" not in n)


@torch.no_grad()
def precisions_agree(head: Any, target: Target, of_head: torch.dtype, of_target: torch.dtype) -> None:
    """States and embeddings are read in the head's precision: the logits of a head whose target has that precision."""
    head, batch = head.to(of_head), padded(*sizes_of(head, target), [7])
    embed, found = target.embedding_VW.bfloat16(), []  # exact in both, like the states
    for dtype in (of_target, of_head):
        cache = new_cache(head, 1, of_head)
        states, ids = batch.states_BLF[:, :6].bfloat16().to(dtype), batch.ids_BL[:, 1:7]
        logits, state = head.begin(states, ids, torch.tensor([6]), embed.to(dtype), cache, None)
        after, _ = head.extend(state, torch.tensor([[11, 12]]), torch.tensor([[0, 0]]), embed.to(dtype), cache)
        found.append((logits, after))
    for mixed, same in zip(*found, strict=True):
        assert mixed.dtype == of_head and torch.equal(mixed, same)


@torch.no_grad()
def laws_are_the_heads(head: Any, target: Target, shape: Any, law: str) -> None:
    """The q of every node that has children is the head's law at the temperature after this line of drafts, made anew from the whole
    text: over the target's vocabulary, zero off the draft vocabulary."""
    trees: list[tuple[list[list[int]], Any]] = []

    class Watched(HeadDrafter):
        def start(self, *args: Any) -> Any:
            session = super().start(*args)
            propose = session.propose

            def watch(round: Any) -> Any:
                trees.append(([list(ids) for ids in round.committed], propose(round)))
                return trees[-1][1]

            session.propose = watch
            return session

    prompts, settings = [[9, 55, 31], [7], [50, 51, 52, 7, 50, 51]], {"eos": None, "max_new_tokens": 5, "temperature": 0.7}
    generate(target, prompts, drafter=Watched(head), shape=shape, seed=1, **settings)
    compared = 0
    for committed, tree in trees[:3]:
        assert tree.law == law
        for b, ids in enumerate(committed):
            for n in sorted({int(p) for p in tree.parents_BN[b, 1 : tree.num_B[b]]}):
                line, m = [], n
                while m:
                    line.insert(0, int(tree.tokens_BN[b, m]))
                    m = int(tree.parents_BN[b, m])
                wanted_V = (_law_after(head, target, ids, line) / 0.7).softmax(-1)
                torch.testing.assert_close(tree.q_BNV[b, n][head.target_ids], wanted_V, atol=1e-4, rtol=1e-3)
                assert abs(float(tree.q_BNV[b, n].sum()) - 1) < 1e-5
                compared += 1
    assert compared > 12


def _law_after(head: Any, target: Target, ids: list[int], line: list[int]) -> Tensor:
    """Logits [Vd] of a head that reads all of `ids` with the target's own states, then the line."""
    N, cache = len(ids) - 1, new_cache(head, 1)
    ids_1N = torch.tensor([ids[:N]])
    out = target.forward(ids_1N, positions_BN=torch.arange(N)[None], mask=None, cache=None, layer_ids=head.layer_ids)
    logits, state = head.begin(out.states_BNF, torch.tensor([ids[1:]]), torch.tensor([N]), target.embedding_VW, cache, None)
    for depth, token in enumerate(line):
        after, state = head.extend(state, torch.tensor([[token]]), torch.tensor([[depth]]), target.embedding_VW, cache)
        logits = after[:, 0]
    return logits[0]
