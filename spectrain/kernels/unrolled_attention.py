"""Attention of the unrolled steps of test-time training (EAGLE-3, arXiv 2503.01840): causal base keys plus a row's own keys.

Row i at step k sees the keys of step 0 at columns 0 ... i of its own document and its own keys of steps 1 ... k, in one softmax: what
drafting with a cache does. Backends: `dense` (the slow twin: every score at once), `merge` (pieces of rows joined by log-sum-exp; no
score outlives its piece), `flex` (torch's flex_attention, for CUDA). `auto`: flex on CUDA where Triton is; elsewhere dense for the
smallest batches, else merge.

Legend: B lines, L tokens, R flat counted rows (b * L + i, rising), A query heads, G key heads, X = A / G query heads of a key head,
D head size, K own keys, J = R * X (the query heads of one row stand together), N rows of a piece times X, S keys that a piece reads.
"""

import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BACKENDS = ("auto", "dense", "merge", "flex")
PIECE = 128  # columns that the rows of a piece may span: what a piece's triangle wastes is half of it a row
PREFIX = 512  # keys; above, the part that all rows of a piece see goes without a mask, in a call of its own
# Rows times columns. Forward and backward of three steps, nine heads on three of 64, one thread, ms, dense and merge: 5.0 and 6.8 with
# 30 rows of 60 columns, 8.5 and 9.1 with 60 of 120, 22.6 and 18.6 with 100 of 250, 65 and 38 with three lines of 100 of 250.
SMALL = 8192


@dataclass(frozen=True)
class Piece:
    """Counted rows first ... end - 1: one line, one document (it begins at column `start`), columns within PIECE of each other."""

    first: int
    end: int
    line: int
    start: int
    low: int
    high: int
    relative: Tensor | None  # columns less `low`, where some between are no counted rows


@dataclass(frozen=True, eq=False)
class Unrolled:
    """Where the counted rows of a batch stand. Made once a batch, used by all steps and layers.

    start_R: first column of the row's document. A document is contiguous, and its positions rise by one a column.
    """

    row_R: Tensor
    position_BL: Tensor
    doc_BL: Tensor | None
    batch_R: Tensor
    column_R: Tensor
    position_R: Tensor
    start_R: Tensor
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)  # masks, by what they depend on

    @staticmethod
    def of(row_R: Tensor, position_BL: Tensor, doc_BL: Tensor | None = None) -> "Unrolled":
        """row_R: int64, rising; doc_BL: document of each token, padding -1, None for one document a line."""
        L = position_BL.shape[1]
        batch_R, column_R = row_R // L, row_R % L
        position_R = position_BL.reshape(-1)[row_R]
        if doc_BL is None:
            return Unrolled(row_R, position_BL, doc_BL, batch_R, column_R, position_R, torch.zeros_like(row_R))
        column_L = torch.arange(L, device=row_R.device)
        begins_BL = torch.ones_like(doc_BL, dtype=torch.bool)
        begins_BL[:, 1:] = doc_BL[:, 1:] != doc_BL[:, :-1]
        start_BL = torch.where(begins_BL, column_L, 0).cummax(1).values
        return Unrolled(row_R, position_BL, doc_BL, batch_R, column_R, position_R, start_BL.reshape(-1)[row_R])

    @cached_property
    def tokens(self) -> "Unrolled":
        """The layout in which every token of a document is a counted row."""
        everything = torch.arange(self.position_BL.numel(), device=self.row_R.device)
        if self.doc_BL is not None:
            everything = everything[self.doc_BL.reshape(-1) >= 0]
        return Unrolled.of(everything, self.position_BL, self.doc_BL)

    @cached_property
    def pieces(self) -> list[Piece]:
        """Rows of each document cut where the columns leave a span of PIECE. Brings row numbers to the CPU, once."""
        L = self.position_BL.shape[1]
        document_R = self.row_R - self.column_R + self.start_R  # flat column of the document's first token
        rows: list[int] = self.row_R.tolist()
        documents: list[int] = document_R.tolist()
        assert all(a < b for a, b in pairwise(rows)), "counted rows must rise"
        pieces: list[Piece] = []
        first = 0
        while first < len(rows):
            last_of_document = bisect_left(documents, documents[first] + 1, lo=first)
            end = bisect_left(rows, rows[first] + PIECE, lo=first, hi=last_of_document)
            low, high, start = rows[first] % L, rows[end - 1] % L, documents[first] % L
            whole = high - low == end - 1 - first
            pieces.append(Piece(first, end, rows[first] // L, start, low, high, None if whole else self.column_R[first:end] - low))
            first = end
        return pieces

    @cached_property
    def steady(self) -> bool:
        """Whether positions rise by one a column in every document with counted rows (a window needs it)."""
        first_R = self.position_BL[self.batch_R, self.start_R]
        return bool((self.position_R - first_R == self.column_R - self.start_R).all())

    def mask(self, piece: Piece, low: int, high: int, *, back: int | None, X: int, dtype: torch.dtype) -> Tensor:
        """[N, S]: 0 where a row of the piece sees column low ... high - 1 of its line, -inf elsewhere; the last columns i - back ... i.

        All masks are cuts of one band, which depends on `back` alone: what a row sees depends on the column's distance to it.
        """
        before = PREFIX if back is None else back
        key = (before, back is None, X, dtype)
        if key not in self.scratch:
            device = self.row_R.device
            distance = torch.arange(PIECE, device=device)[:, None] - torch.arange(-before, PIECE, device=device)
            hidden = distance < 0 if back is None else (distance < 0) | (distance > back)
            band = torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self.scratch[key] = band.repeat_interleave(X, dim=0)
        band = self.scratch[key]
        left = before + low - piece.low
        cut = band[:, left : left + high - low]
        if piece.relative is None:
            return cut[: (piece.end - piece.first) * X]
        return cut.unflatten(0, (PIECE, X))[piece.relative].flatten(0, 1)

    def parts(self, piece: Piece, *, back: int | None, X: int, dtype: torch.dtype) -> list[tuple[slice, Tensor | None]]:
        """The columns of its line that a piece reads, with a mask where not all rows see all of them; every row sees one in each part."""
        end = piece.high + 1
        if back is not None and piece.high - back <= piece.start:
            back = None
        low = piece.start if back is None else max(piece.start, piece.low - back)
        if piece.low == piece.high:
            return [(slice(low, end), None)]
        if back is not None or piece.low - low <= PREFIX:
            return [(slice(low, end), self.mask(piece, low, end, back=back, X=X, dtype=dtype))]
        edge = slice(piece.low, end)
        return [(slice(low, piece.low), None), (edge, self.mask(piece, piece.low, end, back=None, X=X, dtype=dtype))]


def attend_unrolled(
    q_RAD: Tensor, base_k_BLGD: Tensor, base_v_BLGD: Tensor, own_k: Sequence[Tensor], own_v: Sequence[Tensor], layout: Unrolled, *,
    scale: float, window: int | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Attention of the counted rows at step k = len(own_k); own_k and own_v: [R, G, D] each, oldest step first. Returns [R, A, D].

    With a window w a row sees of the base keys only those whose position > its own + k - w; its own keys always.
    """
    if window is not None and window < 1:
        raise ValueError(f"a sliding window of {window} positions sees nothing; it must be at least 1 (None: no window)")
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is unknown; there are {', '.join(BACKENDS)}")
    assert len(own_k) == len(own_v) and q_RAD.shape[1] % base_k_BLGD.shape[2] == 0
    if backend == "auto":
        backend = _best(q_RAD, base_k_BLGD.shape[1])
    kind, dtype = q_RAD.device.type, working_type(q_RAD)
    given = torch.get_autocast_dtype(kind) if _autocast(q_RAD) else q_RAD.dtype
    q_RAD, base_k_BLGD, base_v_BLGD, *own = (x.to(dtype) for x in (q_RAD, base_k_BLGD, base_v_BLGD, *own_k, *own_v))
    own_k, own_v = own[: len(own_k)], own[len(own_k) :]  # a list, whatever came in
    with torch.autocast(kind, enabled=False):  # the joining sums need float32
        if len(q_RAD) == 0:  # an empty result that still belongs to the graph
            o_RAD = q_RAD + 0 * sum(x.sum() for x in (base_k_BLGD, base_v_BLGD, *own))
        elif backend == "dense":
            o_RAD = _dense(q_RAD, base_k_BLGD, base_v_BLGD, own_k, own_v, layout, scale=scale, window=window)
        else:
            assert window is None or layout.steady, "a window needs positions that rise by one a column"
            back = None if window is None else window - 1 - len(own_k)  # the farthest base column, counted back from the row; < 0: none
            attend = _attend_flex if backend == "flex" else _attend_merge
            o_RAD = attend(q_RAD, base_k_BLGD, base_v_BLGD, own_k, own_v, layout, scale=scale, back=back)
        return o_RAD.to(given)


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def working_type(x: Tensor) -> torch.dtype:
    """The precision in which queries, keys and values such as x are read: under autocast its own, but on a CPU float32. Forward and
    backward of torch's CPU kernel take 1.4 to 2.4 times as long in bfloat16 (60 rows of 150 columns, 128 of 1024; nine heads on three)."""
    if not _autocast(x):
        return x.dtype
    return torch.float32 if x.device.type == "cpu" else torch.get_autocast_dtype(x.device.type)


def _attend_flex(*args: Any, **settings: Any) -> Tensor:
    from spectrain.kernels.unrolled_attention_flex import attend_flex

    return attend_flex(*args, **settings)


def _attend_merge(
    q_RAD: Tensor, base_k_BLGD: Tensor, base_v_BLGD: Tensor, own_k: Sequence[Tensor], own_v: Sequence[Tensor], layout: Unrolled, *,
    scale: float, back: int | None,
) -> Tensor:  # fmt: skip
    nothing = q_RAD.new_zeros(len(q_RAD), 0, *base_k_BLGD.shape[2:])
    own_k_RKGD = torch.stack(list(own_k), dim=1) if own_k else nothing
    own_v_RKGD = torch.stack(list(own_v), dim=1) if own_v else nothing
    result: Tensor = _Merge.apply(q_RAD, base_k_BLGD, base_v_BLGD, own_k_RKGD, own_v_RKGD, layout, scale, back)
    return result


def _best(q_RAD: Tensor, L: int) -> str:
    if q_RAD.is_cuda:  # flex_attention on CUDA knows no float64 and no heads below 16
        known = q_RAD.dtype != torch.float64 and q_RAD.shape[2] >= 16
        return "flex" if known and importlib.util.find_spec("triton") else "merge"
    return "dense" if len(q_RAD) * L <= SMALL else "merge"


def attend_base(
    q_BLAD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, layout: Unrolled, *, scale: float, window: int | None = None, backend: str = "auto"
) -> Tensor:
    """Step 0 over all tokens of all documents: causal attention within each. Returns [B, L, A, D], zeros at padding."""
    layout = layout.tokens
    q_XAD = q_BLAD.flatten(0, 1)
    whole = len(layout.row_R) == len(q_XAD)
    q_RAD = q_XAD if whole else q_XAD[layout.row_R]
    o_RAD = attend_unrolled(q_RAD, k_BLGD, v_BLGD, [], [], layout, scale=scale, window=window, backend=backend)
    o_XAD = o_RAD if whole else o_RAD.new_zeros(q_XAD.shape).index_copy(0, layout.row_R, o_RAD)
    return o_XAD.view(q_BLAD.shape)


def _dense(
    q_RAD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, own_k: Sequence[Tensor], own_v: Sequence[Tensor], layout: Unrolled, *,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """The slow twin: line by line, all scores at once, documents and positions compared entry by entry, in float32 or better."""
    B, L, G, D = k_BLGD.shape
    kind = torch.promote_types(q_RAD.dtype, torch.float32)
    results = []
    for b in range(B):
        at = layout.batch_R == b
        q_QGXD = q_RAD[at].to(kind).unflatten(1, (G, -1)) * scale
        column_Q1 = layout.column_R[at][:, None]
        seen_QL = torch.arange(L, device=q_RAD.device) <= column_Q1
        if layout.doc_BL is not None:
            seen_QL = seen_QL & (layout.doc_BL[b] == layout.doc_BL[b][column_Q1])
        if window is not None:
            seen_QL = seen_QL & (layout.position_BL[b] > layout.position_R[at][:, None] + len(own_k) - window)
        s_GXQL = torch.einsum("qgxd,lgd->gxql", q_QGXD, k_BLGD[b].to(kind)).masked_fill(~seen_QL, float("-inf"))
        s_own = [torch.einsum("qgxd,qgd->gxq", q_QGXD, k[at].to(kind))[..., None] for k in own_k]
        w_GXQS = torch.cat([s_GXQL, *s_own], dim=-1).softmax(-1)
        o_QGXD = torch.einsum("gxql,lgd->qgxd", w_GXQS[..., :L], v_BLGD[b].to(kind))
        for j, v in enumerate(own_v):
            o_QGXD = o_QGXD + torch.einsum("gxq,qgd->qgxd", w_GXQS[..., L + j], v[at].to(kind))
        results.append(o_QGXD.flatten(1, 2))
    return torch.cat(results).to(q_RAD.dtype)


def _fold(x_RAD: Tensor, G: int) -> Tensor:
    """[1, G, J, D], contiguous: the query heads of one key head next to each other, so that a piece of rows is a view."""
    return x_RAD.unflatten(1, (G, -1)).transpose(0, 1).flatten(1, 2).contiguous()[None]


def _unfold(x_1GJD: Tensor, R: int) -> Tensor:
    return x_1GJD[0].unflatten(1, (R, -1)).transpose(0, 1).flatten(1, 2)


def _flash(q_1GND: Tensor, k_1GSD: Tensor, v_1GSD: Tensor, mask_NS: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one piece and its log-sum-exp [1, G, N], by torch's CPU kernel, or by plain products where that is not."""
    if q_1GND.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o_1GND, lse_1GN = op(q_1GND, k_1GSD, v_1GSD, 0.0, False, attn_mask=mask_NS, scale=scale)
        return o_1GND, lse_1GN
    return _plain(q_1GND, k_1GSD, v_1GSD, mask_NS, scale)


def _flash_back(
    g_1GND: Tensor, q_1GND: Tensor, k_1GSD: Tensor, v_1GSD: Tensor, o_1GND: Tensor, lse_1GN: Tensor, mask_NS: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part of a joined attention. With the output and log-sum-exp of the whole it gives the share of this part:
    d score = w (g . v - g . o), w = exp(score - lse) (arXiv 2310.01889)."""
    if q_1GND.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v = op(g_1GND, q_1GND, k_1GSD, v_1GSD, o_1GND, lse_1GN, 0.0, False, attn_mask=mask_NS, scale=scale)
        return q, k, v
    return _plain_back(g_1GND, q_1GND, k_1GSD, v_1GSD, o_1GND, lse_1GN, mask_NS, scale)


def _scores(q_1GND: Tensor, k_1GSD: Tensor, mask_NS: Tensor | None, scale: float) -> Tensor:
    s_1GNS = (q_1GND @ k_1GSD.transpose(-1, -2)).to(torch.promote_types(q_1GND.dtype, torch.float32)).mul_(scale)
    return s_1GNS if mask_NS is None else s_1GNS.add_(mask_NS)


def _plain(q_1GND: Tensor, k_1GSD: Tensor, v_1GSD: Tensor, mask_NS: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    s_1GNS = _scores(q_1GND, k_1GSD, mask_NS, scale)
    lse_1GN = s_1GNS.logsumexp(-1)
    return s_1GNS.sub_(lse_1GN[..., None]).exp_().to(v_1GSD.dtype) @ v_1GSD, lse_1GN


def _plain_back(
    g_1GND: Tensor, q_1GND: Tensor, k_1GSD: Tensor, v_1GSD: Tensor, o_1GND: Tensor, lse_1GN: Tensor, mask_NS: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    w_1GNS = _scores(q_1GND, k_1GSD, mask_NS, scale).sub_(lse_1GN[..., None]).exp_()
    share_1GN1 = (g_1GND * o_1GND).to(w_1GNS.dtype).sum(-1, keepdim=True)
    d_1GNS = ((g_1GND @ v_1GSD.transpose(-1, -2)).to(w_1GNS.dtype) - share_1GN1).mul_(w_1GNS).mul_(scale).to(q_1GND.dtype)
    return d_1GNS @ k_1GSD, d_1GNS.transpose(-1, -2) @ q_1GND, w_1GNS.to(g_1GND.dtype).transpose(-1, -2) @ g_1GND


def _join(o_XD: Tensor, lse_X: Tensor, more_XD: Tensor, more_X: Tensor) -> None:
    """Add the attention over further keys to (output, log-sum-exp), in place."""
    total_X = torch.logaddexp(lse_X, more_X)
    o_XD.mul_((lse_X - total_X).exp_()[..., None]).add_(more_XD * (more_X - total_X).exp_()[..., None])
    lse_X.copy_(total_X)


def _own(q_1GJD: Tensor, k_RKGD: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [G, R, X, D] and own keys [G, R, K, D] in the precision of the sums, and their scores [G, R, X, K]."""
    kind = torch.promote_types(q_1GJD.dtype, torch.float32)
    q_GRXD, k_GRKD = q_1GJD[0].to(kind).unflatten(1, (len(k_RKGD), -1)), k_RKGD.permute(2, 0, 1, 3).to(kind)
    return q_GRXD, k_GRKD, (q_GRXD @ k_GRKD.transpose(-1, -2)).mul_(scale)


def _own_back(
    g_1GJD: Tensor, q_1GJD: Tensor, k_RKGD: Tensor, v_RKGD: Tensor, o_1GJD: Tensor, lse_1GJ: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_flash_back` for the own keys: gradients [1, G, J, D] of the queries and [R, K, G, D] of keys and values."""
    q_GRXD, k_GRKD, s_GRXK = _own(q_1GJD, k_RKGD, scale)
    g_GRXD, o_GRXD = (x[0].to(s_GRXK.dtype).view_as(q_GRXD) for x in (g_1GJD, o_1GJD))
    w_GRXK = s_GRXK.sub_(lse_1GJ.view(*s_GRXK.shape[:3], 1)).exp_()
    v_GRKD = v_RKGD.permute(2, 0, 1, 3).to(s_GRXK.dtype)
    share_GRX1 = (g_GRXD * o_GRXD).sum(-1, keepdim=True)
    d_GRXK = (g_GRXD @ v_GRKD.transpose(-1, -2)).sub_(share_GRX1).mul_(w_GRXK).mul_(scale)
    dk_GRKD, dv_GRKD = d_GRXK.transpose(-1, -2) @ q_GRXD, w_GRXK.transpose(-1, -2) @ g_GRXD
    return (d_GRXK @ k_GRKD).flatten(1, 2)[None], dk_GRKD.permute(1, 2, 0, 3), dv_GRKD.permute(1, 2, 0, 3)


class _Merge(torch.autograd.Function):
    """Base keys piece by piece, then the own keys of all rows. Saves its inputs, its output and a number a row and head."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q_RAD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, own_k_RKGD: Tensor, own_v_RKGD: Tensor, layout: Unrolled, scale: float,
        back: int | None,
    ) -> Tensor:  # fmt: skip
        G = k_BLGD.shape[2]
        X = q_RAD.shape[1] // G
        q_1GJD = _fold(q_RAD, G)
        kind = torch.promote_types(q_RAD.dtype, torch.float32)
        o_1GJD = torch.zeros_like(q_1GJD, dtype=kind)
        lse_1GJ = torch.full(q_1GJD.shape[:3], float("-inf"), dtype=kind, device=q_RAD.device)
        for piece in layout.pieces if back is None or back >= 0 else ():
            rows = slice(piece.first * X, piece.end * X)
            for number, (keys, mask) in enumerate(layout.parts(piece, back=back, X=X, dtype=q_RAD.dtype)):
                k, v = (x[piece.line, keys].transpose(0, 1)[None] for x in (k_BLGD, v_BLGD))
                o, lse = _flash(q_1GJD[:, :, rows], k, v, mask, scale)
                if number:
                    _join(o_1GJD[:, :, rows], lse_1GJ[:, :, rows], o, lse)
                else:
                    o_1GJD[:, :, rows], lse_1GJ[:, :, rows] = o, lse
        if own_k_RKGD.shape[1]:
            s_GRXK = _own(q_1GJD, own_k_RKGD, scale)[2]
            own_GRX = s_GRXK.logsumexp(-1)
            own_GRXD = s_GRXK.sub_(own_GRX[..., None]).exp_() @ own_v_RKGD.permute(2, 0, 1, 3).to(kind)
            _join(o_1GJD, lse_1GJ, own_GRXD.flatten(1, 2)[None], own_GRX.flatten(1)[None])
        o_RAD = _unfold(o_1GJD.to(q_RAD.dtype), len(q_RAD))
        ctx.save_for_backward(q_RAD, k_BLGD, v_BLGD, own_k_RKGD, own_v_RKGD, o_RAD, lse_1GJ)
        ctx.layout, ctx.scale, ctx.back = layout, scale, back
        return o_RAD

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g_RAD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_RAD, k_BLGD, v_BLGD, own_k_RKGD, own_v_RKGD, o_RAD, lse_1GJ = ctx.saved_tensors
        G, back, dtype, kind = k_BLGD.shape[2], ctx.back, q_RAD.dtype, lse_1GJ.dtype
        X = q_RAD.shape[1] // G
        q_1GJD, o_1GJD, g_1GJD = (_fold(x, G) for x in (q_RAD, o_RAD, g_RAD))
        dq_1GJD = torch.zeros_like(q_1GJD, dtype=kind)
        dk_BLGD, dv_BLGD = (torch.zeros(k_BLGD.shape, dtype=kind, device=q_RAD.device) for _ in range(2))
        for piece in ctx.layout.pieces if back is None or back >= 0 else ():
            rows = slice(piece.first * X, piece.end * X)
            q, o, g, lse = (x[:, :, rows] for x in (q_1GJD, o_1GJD, g_1GJD, lse_1GJ))
            for keys, mask in ctx.layout.parts(piece, back=back, X=X, dtype=dtype):
                k, v = (x[piece.line, keys].transpose(0, 1)[None] for x in (k_BLGD, v_BLGD))
                dq, dk, dv = _flash_back(g, q, k, v, o, lse, mask, ctx.scale)
                dq_1GJD[:, :, rows] += dq
                dk_BLGD[piece.line, keys] += dk[0].transpose(0, 1)
                dv_BLGD[piece.line, keys] += dv[0].transpose(0, 1)
        own: tuple[Tensor | None, Tensor | None] = (None, None)
        if own_k_RKGD.shape[1]:
            dq, dk, dv = _own_back(g_1GJD, q_1GJD, own_k_RKGD, own_v_RKGD, o_1GJD, lse_1GJ, ctx.scale)
            dq_1GJD += dq
            own = dk.to(dtype), dv.to(dtype)
        return _unfold(dq_1GJD.to(dtype), len(q_RAD)), dk_BLGD.to(dtype), dv_BLGD.to(dtype), *own, None, None, None
