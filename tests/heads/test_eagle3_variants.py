"""Every form of an EAGLE-3 head: training rows against step-by-step drafting, documents of a line, checkpointing.

Legend: B lines, L tokens, R rows, K test-time steps.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain.heads.eagle3 import Eagle3
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target

STEPS = 4
DOCUMENTS = ((8, 5), (9,), (6, 7, 4))  # tokens of each, by line
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


def packed(head: Eagle3, seed: int = 0) -> SimpleNamespace:
    """Documents side by side and padding behind, with values that would show."""
    g = torch.Generator().manual_seed(seed)
    B, L = len(DOCUMENTS), max(map(sum, DOCUMENTS)) + 2
    ids_BL = torch.randint(0, head.config.vocab_size, (B, L), generator=g)
    states_BLF = torch.randn(B, L, head.fc.in_features, generator=g)
    doc_BL, position_BL = torch.full((B, L), -1), torch.zeros(B, L, dtype=torch.long)
    for b, line in enumerate(DOCUMENTS):
        first = 0
        for number, n in enumerate(line):
            doc_BL[b, first : first + n], position_BL[b, first : first + n] = number, torch.arange(n)
            first += n
        states_BLF[b, first:] = 1e3
    return SimpleNamespace(ids_BL=ids_BL, mask_BL=None, states_BLF=states_BLF, doc_BL=doc_BL, position_BL=position_BL)


def rows_within(batch: SimpleNamespace, steps: int) -> torch.Tensor:
    """Flat rows whose every step reads within their document, the first row of each document left out so that they are no whole."""
    ends = batch.doc_BL.roll(-steps, 1)
    ok_BL = (batch.doc_BL >= 0) & (ends == batch.doc_BL) & (batch.position_BL.roll(-steps, 1) == batch.position_BL + steps)
    return (ok_BL & (batch.position_BL > 0)).flatten().nonzero()[:, 0]


def new_cache(head: Eagle3, rows: int) -> SlabCache:
    layers, kv_heads, head_dim = head.cache_layers
    device = torch.device("cpu")
    return SlabCache(layers=layers, rows=rows, kv_heads=kv_heads, head_dim=head_dim, max_length=40, dtype=torch.float32, device=device)


def drafted(head: Eagle3, batch: SimpleNamespace, row_R: torch.Tensor, embed_VW: torch.Tensor) -> list[torch.Tensor]:
    """Logits of drafts that start from each row's prefix within its document and are fed the true tokens: a cache row a row."""
    L = batch.ids_BL.shape[1]
    at = [(int(r) // L, int(r) % L, int(batch.position_BL.flatten()[r])) for r in row_R]
    count_R = torch.tensor([p + 1 for *_, p in at])
    N = int(count_R.max())
    states, following = torch.full((len(at), N, head.fc.in_features), 1e3), torch.zeros(len(at), N, dtype=torch.long)
    for r, (b, i, p) in enumerate(at):
        states[r, : p + 1], following[r, : p + 1] = batch.states_BLF[b, i - p : i + 1], batch.ids_BL[b, i - p + 1 : i + 2]
    cache = new_cache(head, len(at))
    logits, state = head.begin(states, following, count_R, embed_VW, cache, None)
    found = [logits]
    for k in range(1, STEPS):
        token_R1 = torch.tensor([[int(batch.ids_BL[b, i + 1 + k])] for b, i, _ in at])
        after, state = head.extend(state, token_R1, torch.full_like(token_R1, k - 1), embed_VW, cache)
        found.append(after[:, 0])
    return found


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_training_sees_other_context_than_drafting(target: Target, make_head, changes: dict[str, Any]) -> None:
    """MK1 for every form, in packed lines."""
    head = make_head(target, **changes)
    batch = packed(head)
    row_R = rows_within(batch, STEPS)
    rows = list(head.rows(batch, row_R, target.embedding_VW, STEPS))
    assert [ahead for ahead, _ in rows] == [2, 3, 4, 5] and len(row_R) == 10
    for (_, logits_RV), expected_RV in zip(rows, drafted(head, batch, row_R, target.embedding_VW), strict=True):
        torch.testing.assert_close(logits_RV, expected_RV, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name, changes in VARIANTS.items() if not SIZES.issuperset(changes)])
@torch.no_grad()
def test_a_setting_changes_nothing(target: Target, make_head, name: str) -> None:
    """Each flag, layer and window has its say at every step, or the test above would hold for a head that reads no setting."""
    changes = VARIANTS[name]
    head, plain = make_head(target, **changes), make_head(target, **{n: v for n, v in changes.items() if n in SIZES})
    shared = {n: t for n, t in plain.state_dict().items() if n in head.state_dict()}
    head.load_state_dict({**head.state_dict(), **shared})
    batch = packed(head)
    row_R = rows_within(batch, STEPS)
    pairs = list(zip(*(list(h.rows(batch, row_R, target.embedding_VW, STEPS)) for h in (head, plain)), strict=True))
    differ = [not torch.allclose(a, b, atol=1e-3) for (_, a), (_, b) in pairs]
    assert differ == [changes != {"norm_output": True}, True, True, True]  # the output handed on shows from the second step


@pytest.mark.parametrize("name", ["plain", "flags of speculators", "window of two layers", "all at once"])
def test_document_sees_its_neighbour(target: Target, make_head, name: str) -> None:
    """Bit for bit: what stands in another document, or in the padding, changes no row of this one."""
    head = make_head(target, **VARIANTS[name])
    batch, other = packed(head), packed(head, seed=1)
    row_R = rows_within(batch, STEPS)
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


@pytest.mark.parametrize("name", ["plain", "two layers", "window", "all at once"])
def test_checkpointing_changes_or_kills_gradients(target: Target, make_head, name: str) -> None:
    """RB3: equal gradients with and without, and none of them zero, although the embeddings and states need none."""
    head = make_head(target, **VARIANTS[name]).train()
    batch = packed(head)
    row_R = rows_within(batch, STEPS)
    found = []
    for checkpointing in (False, True):
        head.zero_grad()
        outputs = head.outputs(batch, row_R, target.embedding_VW, STEPS, checkpointing=checkpointing)
        loss = sum((step.hidden_RH @ step.output_VdH.T).logsumexp(-1).sum() / (k + 1) for k, step in enumerate(outputs))
        loss.backward()
        found.append({n: p.grad.clone() for n, p in head.named_parameters()})
    for n, gradient in found[0].items():
        assert gradient.any(), n
        torch.testing.assert_close(found[1][n], gradient, atol=1e-6 * float(gradient.abs().max()), rtol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["plain", "norm_output", "norm_before_residual", "two layers", "all at once"])
def test_autocast_rounds_the_residual_stream(target: Target, make_head, name: str, checkpointing: bool) -> None:
    """Products are bfloat16; the stream is float32 at every step, gradients are those of float32 but for the products' rounding."""
    head = make_head(target, **VARIANTS[name]).train()
    batch = packed(head)
    row_R = rows_within(batch, STEPS)
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
    batch = packed(head)
    held = []
    for checkpointing in (False, True):
        sizes: dict[int, int] = {}

        def keep(t: torch.Tensor, sizes=sizes) -> torch.Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            outputs = list(head.outputs(batch, rows_within(batch, STEPS), target.embedding_VW, STEPS, checkpointing=checkpointing))
        assert outputs[-1].hidden_RH.requires_grad
        weights = {p.untyped_storage().data_ptr() for p in head.parameters()}
        held.append(sum(n for at, n in sizes.items() if at not in weights))
    assert held[1] < 0.5 * held[0]


@pytest.mark.parametrize("name", ["window", "window of two layers", "all at once"])
@torch.no_grad()
def test_a_branch_sees_its_neighbour(target: Target, make_head, name: str) -> None:
    """Every line of a draft tree equals the same line drafted alone, whatever layers and window."""
    head = make_head(target, **VARIANTS[name])
    batch = packed(head)
    start = (batch.states_BLF[1:2, :6], batch.ids_BL[1:2, 1:7], torch.tensor([6]), target.embedding_VW)
    cache = new_cache(head, 1)
    _, state = head.begin(*start, cache, None)
    tokens, parents = [0, 11, 12, 13, 14, 15, 16], [-1, 0, 0, 1, 1, 2, 4]
    logits = [torch.empty(0)]
    for first, end in ((1, 3), (3, 6), (6, 7)):
        level, above = torch.tensor([tokens[first:end]]), torch.tensor([parents[first:end]])
        after, state = head.extend(state, level, above, target.embedding_VW, cache)
        logits += list(after[0])
    for n in range(1, len(tokens)):
        line, m = [], n
        while m:
            line.insert(0, tokens[m])
            m = parents[m]
        alone = new_cache(head, 1)
        _, its = head.begin(*start, alone, None)
        for depth, token in enumerate(line):
            after, its = head.extend(its, torch.tensor([[token]]), torch.tensor([[depth]]), target.embedding_VW, alone)
        torch.testing.assert_close(logits[n], after[0, 0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_old_head_means_something_else(target: Target, make_head) -> None:
    """A config without the newer fields is that of a head of one layer, without flags and window, under the same names."""
    head = make_head(target)
    new = ("num_hidden_layers", "sliding_window", "fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    old = Eagle3(Eagle3.Config(**{n: v for n, v in head.config.model_dump().items() if n not in new}))
    old.load_state_dict(head.state_dict(), strict=True)
    batch = packed(head)
    row_R = rows_within(batch, STEPS)
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
