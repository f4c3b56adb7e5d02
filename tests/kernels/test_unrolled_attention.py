"""Attention of the unrolled steps against its slow twin, and against the count of keys by hand."""

import math
from itertools import accumulate

import pytest
import torch

import spectrain.kernels.unrolled_attention as module
from spectrain.kernels.unrolled_attention import Unrolled, attend_base, attend_unrolled

A, G, D = 6, 2, 8
Documents = list[list[int]]
PACKED: Documents = [[30, 41, 9], [70, 1]]  # 80 columns: padding in line 1, and a document of one token


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, and prefixes without a mask, in short lines."""
    monkeypatch.setattr(module, "PIECE", 8)
    monkeypatch.setattr(module, "PREFIX", 12)


def batch(lines: Documents, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(position_BL, doc_BL) of documents of the given lengths."""
    doc, position = torch.full((len(lines), L), -1), torch.zeros(len(lines), L, dtype=torch.long)
    for b, lengths in enumerate(lines):
        for d, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
            doc[b, end - length : end], position[b, end - length : end] = d, torch.arange(length)
    return position, doc


def counted(kind: str, doc_BL: torch.Tensor) -> torch.Tensor:
    real, column = doc_BL >= 0, torch.arange(doc_BL.shape[1])
    chosen = {
        "all": real,
        "gaps": real & (torch.rand(doc_BL.shape, generator=torch.Generator().manual_seed(1)) < 0.6),
        "single rows": real & (column % 23 == 5),
        "a document without": real & (doc_BL != 1),
        "turns": real & (column % 40 > 17),
        "none": torch.zeros_like(real),
    }[kind]
    return chosen.reshape(-1).nonzero()[:, 0]


def tensors(R: int, B: int, L: int, steps: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(steps)
    shapes = [(R, A, D), (B, L, G, D), (B, L, G, D)] + [(R, G, D)] * (2 * steps)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def solve(
    x: list[torch.Tensor], layout: Unrolled, backend: str, window: int | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    steps = (len(x) - 3) // 2
    o = attend_unrolled(*x[:3], x[3 : 3 + steps], x[3 + steps :], layout, scale=D**-0.5, window=window, backend=backend)
    g = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(o.dtype)
    return o.detach(), torch.autograd.grad((o * g).sum(), x)


def same(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance * 5, rtol=tolerance * 10)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("rows", ["all", "gaps", "single rows", "a document without", "turns", "none"])
def test_merged_pieces_differ_from_one_softmax(rows: str, steps: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    position, doc = batch(PACKED, 80)
    row = counted(rows, doc)
    layout = Unrolled.of(row, position, doc)
    for dtype in (torch.float32, torch.float64):
        x = tensors(len(row), 2, 80, steps, dtype)
        wanted, gradients = solve(x, layout, "dense", window)
        for engine in ("flash", "plain"):
            with monkeypatch.context() as m:
                if engine == "plain":  # what runs where torch has no CPU kernel
                    m.setattr(module, "_flash", module._plain)
                    m.setattr(module, "_flash_back", module._plain_back)
                found, own = solve(x, layout, "merge", window)
            same(found, wanted, dtype)
            for a, b in zip(own, gradients, strict=True):
                same(a, b, dtype)


@pytest.mark.parametrize("window", [None, 20])
def test_bfloat16_sums_lose_more_than_the_inputs(window: int | None) -> None:
    position, doc = batch(PACKED, 80)
    layout = Unrolled.of(counted("turns", doc), position, doc)
    x = tensors(len(layout.row_R), 2, 80, 2, torch.bfloat16)
    wanted, gradients = solve([t.detach().float().requires_grad_() for t in x], layout, "dense", window)
    found, own = solve(x, layout, "merge", window)
    assert found.dtype == torch.bfloat16
    same(found.float(), wanted, torch.bfloat16)
    for a, b in zip(own, gradients, strict=True):
        assert (a.float() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("steps", [0, 2])
def test_lines_without_document_numbers(steps: int) -> None:
    position = torch.arange(50).expand(2, 50)
    row = torch.tensor([0, 3, 4, 5, 30, 31, 49, 50, 77, 78, 99])
    x = tensors(len(row), 2, 50, steps)
    alone, numbered = Unrolled.of(row, position), Unrolled.of(row, position, torch.zeros(2, 50, dtype=torch.long))
    for a, b in ((solve(x, alone, "merge"), solve(x, numbered, "dense")), (solve(x, alone, "dense"), solve(x, numbered, "merge"))):
        same(a[0], b[0], torch.float32)
        for p, q in zip(a[1], b[1], strict=True):
            same(p, q, torch.float32)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # compiled on CUDA only
@pytest.mark.parametrize("backend", ["dense", "merge", "flex"])
@pytest.mark.parametrize(("window", "keys"), [(None, 6), (6, 6), (5, 5), (3, 3), (2, 2), (1, 2)])
def test_row_3_of_step_2_sees_other_than_six_keys(backend: str, window: int | None, keys: int) -> None:
    """Base keys 0 ... 3 and its own of steps 1 and 2; a window takes base keys from the left, never its own."""
    position, doc = batch([[5, 7]], 12)
    layout = Unrolled.of(torch.tensor([5 + 3]), position, doc)
    base_v = torch.zeros(1, 12, 1, D)
    base_v[0, :, 0, 0] = torch.tensor([9e3] * 5 + [10.0, 20.0, 30.0, 40.0] + [9e3] * 3)  # other documents and later columns shout
    own_v = [torch.full((1, 1, D), v) for v in (50.0, 60.0)]
    own_k = [torch.zeros(1, 1, D)] * 2
    q, k = torch.ones(1, 2, D), torch.zeros(1, 12, 1, D)
    o = attend_unrolled(q, k, base_v, own_k, own_v, layout, scale=1.0, window=window, backend=backend)
    assert o[0, :, 0].tolist() == pytest.approx([sum([60, 50, 40, 30, 20, 10][:keys]) / keys] * 2, rel=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # compiled on CUDA only
@pytest.mark.parametrize("rows", ["all", "gaps", "single rows", "turns"])
@pytest.mark.parametrize(("steps", "window"), [(0, None), (2, None), (0, 20), (3, 20), (3, 2)])
def test_flex_mask_differs_from_the_slow_twin(rows: str, steps: int, window: int | None) -> None:
    lines: Documents = [[150, 130, 20], [299]]
    position, doc = batch(lines, 300)
    row = counted(rows, doc)
    layout = Unrolled.of(row, position, doc)
    with torch.no_grad():  # torch has no gradient of it on the CPU
        x = [t.detach() for t in tensors(len(row), 2, 300, steps)]
        own = x[3 : 3 + steps], x[3 + steps :]
        o = {n: attend_unrolled(*x[:3], *own, layout, scale=0.3, window=window, backend=n) for n in ("dense", "flex")}
    same(o["flex"], o["dense"], torch.float32)


def test_flex_block_mask_skips_or_doubts_wrong_blocks() -> None:
    from spectrain.kernels.unrolled_attention_flex import BLOCK, interval_mask

    row = torch.arange(100, 1000)
    low = torch.where(row < 500, 0, 500)
    blocks = interval_mask(low, row, 1000)
    seen = (torch.arange(1000) >= low[:, None]) & (torch.arange(1000) <= row[:, None])
    for i in range(8):
        part = seen[i * BLOCK : (i + 1) * BLOCK]
        full = {j for j in range(8) if part[:, j * BLOCK : (j + 1) * BLOCK].all() and (j + 1) * BLOCK <= 1000}
        some = {j for j in range(8) if part[:, j * BLOCK : (j + 1) * BLOCK].any()}
        assert blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None
        told_full = set(blocks.full_kv_indices[0, 0, i, : blocks.full_kv_num_blocks[0, 0, i]].tolist())
        told_part = set(blocks.kv_indices[0, 0, i, : blocks.kv_num_blocks[0, 0, i]].tolist())
        assert told_full == full and told_part == some - full


@pytest.mark.parametrize("backend", ["dense", "merge"])
@pytest.mark.parametrize("window", [None, 7])
def test_every_token_as_query(backend: str, window: int | None) -> None:
    """Step 0 over all tokens against torch's own attention, document by document; zeros and no gradient at padding."""
    position, doc = batch(PACKED, 80)
    q, k, v = (torch.randn(2, 80, n, D, requires_grad=True) for n in (A, G, G))
    o = attend_base(q, k, v, Unrolled.of(counted("turns", doc), position, doc), scale=D**-0.5, window=window, backend=backend)
    wanted = torch.zeros_like(o)
    for b, lengths in enumerate(PACKED):
        for end, n in zip(accumulate(lengths), lengths, strict=True):
            at = slice(end - n, end)
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            mask = mask if window is None else mask.triu(1 - window)
            one = (x[b, at].transpose(0, 1)[None] for x in (q, k, v))
            part = torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=mask, enable_gqa=True)
            wanted[b, at] = part[0].transpose(0, 1)
    same(o, wanted, torch.float32)
    g = torch.randn(o.shape)
    for a, b in zip(torch.autograd.grad((o * g).sum(), (q, k, v)), torch.autograd.grad((wanted * g).sum(), (q, k, v)), strict=True):
        same(a, b, torch.float32)
    assert not o[doc < 0].any()


def test_wild_padding_reaches_a_row() -> None:
    position, doc = batch(PACKED, 80)
    layout = Unrolled.of(counted("turns", doc), position, doc)
    x = tensors(len(layout.row_R), 2, 80, 2)
    before, _ = solve(x, layout, "merge")
    with torch.no_grad():
        for t in x[1:3]:
            t[doc < 0] = math.nan
    after, gradients = solve(x, layout, "merge")
    assert torch.equal(before, after)
    assert all(g.isfinite().all() for g in gradients)


def test_scores_are_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 4096 tokens keeps its inputs and a number a row and head; no piece makes more than PIECE rows of scores."""
    monkeypatch.undo()
    position, doc = batch([[4096]], 4096)
    layout = Unrolled.of(torch.arange(4096), position, doc)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=g).requires_grad_() for s in ((4096, 2, 8), (1, 4096, 1, 8), (1, 4096, 1, 8)))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        own = k[0] * 2
        o = attend_unrolled(q, k, v, [own], [own], layout, scale=1.0, backend="auto")
        o.sum().backward()
    assert max(kept) <= q.numel()
    parts = [part for piece in layout.pieces for part in layout.parts(piece, back=None, X=2, dtype=q.dtype)]
    assert (
        max(mask.numel() for _, mask in parts if mask is not None) <= 2 * module.PIECE * (module.PREFIX + module.PIECE) < 4096 * 4096 // 50
    )


@pytest.mark.parametrize("backend", ["merge", "dense"])
def test_autocast_takes_the_sums_to_bfloat16(backend: str) -> None:
    """On a CPU they stay float32, in which torch's kernel is faster; the result has autocast's type, gradients those of the inputs."""
    position, doc = batch(PACKED, 80)
    layout = Unrolled.of(counted("turns", doc), position, doc)
    x = tensors(len(layout.row_R), 2, 80, 2)
    x[0] = x[0].detach().bfloat16().requires_grad_()  # projections under autocast give bfloat16, rotated keys are float32
    wanted, _ = solve([x[0].detach().float().requires_grad_(), *x[1:]], layout, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, gradients = solve(x, layout, backend)
        none = attend_unrolled(x[0][:0], *x[1:3], [], [], Unrolled.of(layout.row_R[:0], position, doc), scale=1.0)
    assert torch.equal(found, wanted.bfloat16()) and [g.dtype for g in gradients] == [t.dtype for t in x]
    assert none.dtype == torch.bfloat16 and none.requires_grad


def test_size_chooses_the_backend() -> None:
    small, large = torch.zeros(30, A, D), torch.zeros(100, A, D)
    assert (module._best(small, 60), module._best(large, 250)) == ("dense", "merge")


def test_wrong_window_or_backend_is_taken() -> None:
    position, doc = batch(PACKED, 80)
    layout = Unrolled.of(counted("turns", doc), position, doc)
    x = tensors(len(layout.row_R), 2, 80, 0)
    with pytest.raises(ValueError, match="window of 0"):
        attend_unrolled(*x, [], [], layout, scale=1.0, window=0)
    with pytest.raises(ValueError, match="'sdpa' is unknown; there are auto, dense"):
        attend_unrolled(*x, [], [], layout, scale=1.0, backend="sdpa")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has gradients on CUDA only")
@pytest.mark.parametrize("backend", ["flex", "merge"])
@pytest.mark.parametrize(("steps", "window"), [(0, None), (2, None), (3, 20), (3, 2)])
def test_gpu_differs_from_the_slow_twin(backend: str, steps: int, window: int | None) -> None:
    position, doc = batch([[150, 130, 20], [299]], 300)
    row = counted("turns", doc)
    g = torch.Generator().manual_seed(0)
    shapes = [(len(row), 6, 16), (2, 300, 2, 16), (2, 300, 2, 16)] + [(len(row), 2, 16)] * (2 * steps)
    x = [torch.randn(s, generator=g).cuda().requires_grad_() for s in shapes]
    layout = Unrolled.of(row.cuda(), position.cuda(), doc.cuda())
    weight = torch.randn(len(row), 6, 16, generator=g).cuda()
    o = {
        n: attend_unrolled(*x[:3], x[3 : 3 + steps], x[3 + steps :], layout, scale=0.25, window=window, backend=n)
        for n in ("dense", backend)
    }
    torch.testing.assert_close(o[backend], o["dense"], atol=3e-3, rtol=3e-3)  # the kernel may multiply in TF32
    own, wanted = (torch.autograd.grad((o[n] * weight).sum(), x, allow_unused=True) for n in (backend, "dense"))
    for a, b in zip(own, wanted, strict=True):
        found = torch.zeros_like(b) if a is None else a  # base keys out of every row's window
        assert (found - b).norm() <= 5e-3 * b.norm() + 1e-5
