"""Losses of draft heads, each with its formula, and the counts that every metric is divided from.

p: the target's law after a token, q: the draft's, both over the draft vocabulary; q sums to 1 there. By default p keeps its true mass
m = sum_v p_v <= 1; every other token has q = 0. `renormalise` scales p to m = 1, as most trainers do. Sums run over the draft vocabulary.

- soft_ce     - sum p log q. Cross-entropy with the target's law (EAGLE-3, arXiv 2503.01840); a row weighs as much as its mass.
- kl          sum p log(p / q) (Hinton et al., arXiv 1503.02531, up to a constant). Its gradient is that of soft_ce; its least value
              m log m, at q = p / m.
- reverse_kl  sum q log(q / p) (MiniLLM, arXiv 2306.08543). Its least value is - log m, at q = p / m.
- jsd         KL(p | M) / 2 + KL(q | M) / 2 with M = (p + q) / 2 (generalised in GKD, arXiv 2306.13649), over the full vocabulary: the
              tokens that the draft lacks add (1 - m) log 2 / 2.
- tv          1 - alpha with alpha = sum min(p, q): total variation over the full vocabulary, for alpha is the chance that a sampled
              draft is accepted (Leviathan et al., arXiv 2211.17192; as a loss: DistillSpec, arXiv 2310.08461).
- lk_alpha    - log alpha (LK losses, arXiv 2602.23881).
- lk_lambda   lambda kl + (1 - lambda) (1 - alpha), lambda = lk_scale exp(- lk_decay alpha), constant for the gradient (arXiv 2602.23881).
- top_k       - sum p log q over the k draft tokens that the target finds likeliest (HASS, arXiv 2408.15766).
- smooth_l1   mean over the width of smooth L1 (beta 1) between the head's guess of the target's last state and that state (EAGLE, arXiv
              2401.15077).

Legend: B rows, R flat counted rows, K test-time steps, P supervised tokens of a batch, N rows of a piece, X rows of a piece at all its
steps, V target vocabulary, Vd draft vocabulary, H head width, W target width, M first ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from spectrain.config import LossConfig
from spectrain.heads.base import StepOutput
from spectrain.kernels.divergence import Law, Mix, divergence, law_of

RANKS = 10


@dataclass(frozen=True)
class Counts:
    """Sums over counted rows by test-time step, [K] each; divided once, after summing over batches and ranks.

    loss: sum of losses. alpha: sum of sum_v min(p, q), the chance that a sampled draft is accepted. hits: rows where the
    draft's best token is the target's best of the full vocabulary. rows: number of counted rows. inside: rows where that token is in
    the draft vocabulary. reached: rows that count at steps 0 ... k; survived: those of them that are hits at all these steps.
    ranks_KM: rows where the draft puts the target's best token at rank m.
    """

    loss_K: Tensor
    alpha_K: Tensor
    hits_K: Tensor
    rows_K: Tensor
    inside_K: Tensor
    survived_K: Tensor
    reached_K: Tensor
    ranks_KM: Tensor

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(self.fields, other.fields, strict=True)))

    @classmethod
    def zeros(cls, steps: int, device: torch.device) -> "Counts":
        return cls.from_flat(torch.zeros(steps * (len(fields(cls)) - 1 + RANKS), device=device), steps)

    @classmethod
    def from_flat(cls, flat: Tensor, steps: int) -> "Counts":
        """The counts that `flat` made one tensor of."""
        parts = flat.split([steps] * (len(fields(cls)) - 1) + [steps * RANKS])
        sums = dict(zip((field.name for field in fields(cls)), parts, strict=True))
        return cls(**{**sums, "ranks_KM": parts[-1].view(steps, RANKS)})

    @property
    def fields(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def flat(self) -> Tensor:
        """All sums in one tensor, for reducing over processes and for checkpoints."""
        return torch.cat([f.flatten() for f in self.fields])

    def detach(self) -> "Counts":
        return Counts(*(f.detach() for f in self.fields))

    def means(self) -> dict[str, list[float]]:
        """By step; 0 where nothing is to be divided by. loss, alpha, hit (agreement): of all counted rows. coverage: share of them whose
        best token the head can draft; hit_inside: hits among those alone, no measure of acceptance. survival: share of the rows that
        reach this step and are hits all the way, so that its sum is the number of accepted drafts that greedy rows would have."""
        named = {
            "loss": (self.loss_K, self.rows_K), "alpha": (self.alpha_K, self.rows_K), "hit": (self.hits_K, self.rows_K),
            "coverage": (self.inside_K, self.rows_K), "hit_inside": (self.hits_K, self.inside_K),
            "survival": (self.survived_K, self.reached_K),
        }  # fmt: skip
        return {name: (sum_K / of_K.clamp(min=1)).tolist() for name, (sum_K, of_K) in named.items()}


@dataclass(frozen=True)
class Labels:
    """The target's law for a batch, never materialised: p after supervised token P = softmax of last_PW @ (its output rows).

    rows_VdW: output rows of the draft vocabulary (float32). lse_P: log-sum-exp over the full vocabulary, best_P: best id of it.
    number_R (int64, rising): row r at step k answers to the law after supervised token number_R[r] + k. counts_KR: which rows count.
    weight_R: weight of each row; None: 1. target_ids (rising): the draft vocabulary.
    """

    last_PW: Tensor
    lse_P: Tensor
    best_P: Tensor
    rows_VdW: Tensor
    number_R: Tensor
    counts_KR: Tensor
    weight_R: Tensor | None
    target_ids: Tensor

    def best_draft(self) -> Tensor:
        """best_P as draft tokens, -1 where it is none."""
        best_P = self.best_P.to(self.target_ids.dtype)
        at_P = torch.searchsorted(self.target_ids, best_P).clamp(max=len(self.target_ids) - 1)
        return torch.where(self.target_ids[at_P] == best_P, at_P, -1)


class LossResult(NamedTuple):
    """total: sum over counted rows and steps of decay**k * weight * loss, differentiable. weight: of the rows that count at step 0, what
    total is divided by. rank_KR: rank of the target's best token in the draft's logits; Vd where it is no draft token, or the row does
    not count. A tuple, since what spreads weights over processes looks for tensors in tuples."""

    total: Tensor
    counts: Counts
    weight: Tensor
    rank_KR: Tensor


@dataclass(frozen=True)
class _Span:
    """Rows of a step that answer to tokens of one piece: their numbers among the R rows, and their laws' among the piece's."""

    step: int
    row_N: Tensor | slice
    token_N: Tensor | slice


def piece_size(tokens: int, *, draft_vocab: int, steps: int, device: torch.device) -> int:
    """Supervised tokens a piece, so that the logits of its rows at all steps take 32 MiB on a CPU, 1 GiB elsewhere; pieces are as alike
    as can be. At least 64: adding to the gradient of the output rows costs as much as 16 rows of the product."""
    largest = max(64, (1 << (23 if device.type == "cpu" else 28)) // (draft_vocab * steps))
    return max(1, ceil(tokens / max(1, ceil(tokens / largest))))


def unrolled_loss(outputs: Sequence[StepOutput], labels: Labels, config: LossConfig, *, piece: int | None = None) -> LossResult:
    """The loss of a head's test-time steps, with gradients into hidden states, output rows and features.

    Goes through the supervised tokens in pieces: the law of a piece is made once for all steps, and the gradients are made at once, so
    no matrix is wider than a piece. Law and divergence are float32 (LS3: a bfloat16 difference of two close laws is wrong by some
    percent); under autocast the product of hidden states and output rows, and of their gradients, runs in its type. weighting
    "reach" multiplies step k of a row by its alphas at earlier steps. ValueError where smooth_l1 is asked of a head without features.
    """
    if "smooth_l1" in config.mix and any(out.feature_RW is None for out in outputs):
        raise ValueError("loss smooth_l1 needs a head that guesses the target's last state, this one gives none; set another loss.mix")
    device = outputs[0].hidden_RH.device
    wanted = torch.is_grad_enabled()
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else outputs[0].hidden_RH.dtype
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        work = _Work(outputs, labels, config, dtype, wanted)
        P, Vd = len(labels.lse_P), len(labels.rows_VdW)
        size = piece or piece_size(P, draft_vocab=Vd, steps=len(outputs), device=device)
        for lo, hi, spans in _pieces(labels, len(outputs), size):
            work.add(lo, hi, spans)
    tensors = [out.hidden_RH for out in outputs] + [out.output_VdH for out in outputs]
    total = (work.loss_KR * work.weight_KR).sum()
    if wanted:
        total = _Attached.apply(total, work.gradients(), *tensors)
    loss_KR = work.loss_KR
    if "smooth_l1" in config.mix:
        with torch.autocast(device.type, enabled=False):
            feature_KR = config.mix["smooth_l1"] * _feature_loss(outputs, labels)
            total = total + (feature_KR * work.weight_KR).sum()
            loss_KR = loss_KR + feature_KR.detach()
    weight = (work.base_R * labels.counts_KR[0]).sum()
    return LossResult(total, _counts(loss_KR, work.alpha_KR, work.rank_KR, labels), weight, work.rank_KR)


def _counts(loss_KR: Tensor, alpha_KR: Tensor, rank_KR: Tensor, labels: Labels) -> Counts:
    counts_KR = labels.counts_KR
    hit_KR = counts_KR & (rank_KR == 0)
    rank_KRM = counts_KR[..., None] & (rank_KR[..., None] == torch.arange(RANKS, device=rank_KR.device))
    flags = hit_KR, counts_KR, counts_KR & (rank_KR < len(labels.target_ids)), hit_KR.cumprod(0), counts_KR.cumprod(0), rank_KRM
    return Counts(loss_KR.sum(1), alpha_KR.sum(1), *(flag.sum(1).float() for flag in flags))


def _pieces(labels: Labels, steps: int, size: int) -> list[tuple[int, int, list[_Span]]]:
    """(first token, end, rows of each step that answer to them), in the order of the tokens; pieces that nobody reads are left out.

    The step before of a row lies one token earlier, so it comes in an earlier piece, or in the same one before.
    """
    device, P = labels.number_R.device, len(labels.lse_P)
    number_R, counts_KR = labels.number_R.cpu(), labels.counts_KR.cpu()
    assert bool((number_R[1:] > number_R[:-1]).all())
    edges = torch.arange(0, P + size, size)
    rows = [counts_R.nonzero()[:, 0] for counts_R in counts_KR[:steps]]
    tokens = [number_R[row_X] + k for k, row_X in enumerate(rows)]
    assert all(bool((token_X < P).all()) for token_X in tokens)
    bounds = [torch.searchsorted(token_X, edges).tolist() for token_X in tokens]
    pieces = []
    for i, lo in enumerate(range(0, P, size)):
        spans = [
            _Span(k, _index(rows[k][ends[i] : ends[i + 1]], device), _index(tokens[k][ends[i] : ends[i + 1]] - lo, device))
            for k, ends in enumerate(bounds)
            if ends[i] < ends[i + 1]
        ]
        if spans:
            pieces.append((lo, min(lo + size, P), spans))
    return pieces


def _index(number_N: Tensor, device: torch.device) -> Tensor | slice:
    """Rising numbers as a slice, where they follow one another."""
    first, last = int(number_N[0]), int(number_N[-1])
    return slice(first, last + 1) if last - first + 1 == len(number_N) else number_N.to(device)


class _Work:
    """Values by row and step, and gradients, as they are gathered piece by piece."""

    def __init__(self, outputs: Sequence[StepOutput], labels: Labels, config: LossConfig, dtype: torch.dtype, wanted: bool) -> None:
        self.labels, self.config, self.outputs = labels, config, outputs
        self.mix = Mix(
            **{name: weight for name, weight in config.mix.items() if name != "smooth_l1"},
            k=config.top_k, lk_scale=config.lk_scale, lk_decay=config.lk_decay,
        )  # fmt: skip
        self.best_P = labels.best_draft()
        self.dtype = dtype
        # In float16 small slopes would be lost before a scaler could lift them.
        self.slope_dtype = labels.rows_VdW.dtype if dtype == torch.float16 else dtype
        kind: dict[str, Any] = {"dtype": labels.rows_VdW.dtype, "device": labels.rows_VdW.device}
        K, R = len(outputs), len(labels.number_R)
        self.loss_KR, self.alpha_KR, self.weight_KR = (torch.zeros(K, R, **kind) for _ in range(3))
        self.rank_KR = torch.full((K, R), len(labels.target_ids), device=kind["device"])
        self.base_R = torch.ones(R, **kind) if labels.weight_R is None else labels.weight_R.to(**kind)
        self.reach_R = torch.ones(R, **kind)
        self.rows = {id(out.output_VdH): out.output_VdH.detach().to(dtype) for out in outputs}
        self.wanted = wanted and bool(config.mix.keys() - {"smooth_l1"})
        needs = [out.hidden_RH.requires_grad and wanted for out in outputs]
        self.hidden = [torch.zeros_like(o.hidden_RH, dtype=kind["dtype"]) if n else None for o, n in zip(outputs, needs, strict=True)]
        # Filled by the first piece: zeros to add to would cost a tenth of a small batch.
        self.output: dict[int, Tensor | None] = {id(o.output_VdH): None for o in outputs if o.output_VdH.requires_grad and wanted}

    def gradients(self) -> list[Tensor | None]:
        """Of total by the hidden states of each step and by its output rows (those that several steps share: at the first)."""
        rows = {id(out.output_VdH): out.output_VdH for out in self.outputs}
        left = {key: torch.zeros_like(rows[key], dtype=self.loss_KR.dtype) if g is None else g for key, g in self.output.items()}
        return [*self.hidden, *(left.pop(id(out.output_VdH), None) for out in self.outputs)]

    def add(self, lo: int, hi: int, spans: list[_Span]) -> None:
        """One piece: its law, then its rows at every step."""
        labels = self.labels
        last_NW = labels.last_PW[lo:hi].to(labels.rows_VdW.dtype)
        log_p_NV = torch.mm(last_NW, labels.rows_VdW.T).sub_(labels.lse_P[lo:hi, None])
        law_NV = law_of(log_p_NV, self.mix, renormalise=self.config.renormalise)
        for _, group in groupby(spans, key=lambda span: id(self.outputs[span.step].output_VdH)):
            self._steps(lo, law_NV, list(group))

    def _steps(self, lo: int, law_NV: Law, spans: list[_Span]) -> None:
        """Steps that share their output rows: one product for all of them, and one for each gradient."""
        hidden = [self.outputs[span.step].hidden_RH.detach()[span.row_N].to(self.dtype) for span in spans]
        hidden_XH = torch.cat(hidden)
        rows_VdH = self.rows[id(self.outputs[spans[0].step].output_VdH)]
        z_XV = torch.mm(hidden_XH, rows_VdH.T).to(self.loss_KR.dtype)
        sizes = [len(part) for part in hidden]
        weights = []
        for span, z_NV in zip(spans, z_XV.split(sizes), strict=True):
            weights.append(self._one_step(lo, law_NV, span, z_NV))
        if self.wanted:
            self._slopes(spans, sizes, z_XV, hidden_XH, rows_VdH, torch.cat(weights))

    def _one_step(self, lo: int, law_NV: Law, span: _Span, z_NV: Tensor) -> Tensor:
        """Values of a step's rows; z becomes their unweighted gradient; returns their weights."""
        k, row_N, token_N = span.step, span.row_N, span.token_N
        best_N = self.best_P[lo:][token_N]
        found = divergence(z_NV, law_NV.rows(token_N), self.mix, best_N=best_N, gradient=self.wanted)
        self.loss_KR[k, row_N], self.alpha_KR[k, row_N], self.rank_KR[k, row_N] = found.loss_N, found.alpha_N, found.rank_N
        weight_N = self.config.decay**k * self.base_R[row_N]
        if self.config.weighting == "reach":
            weight_N = weight_N * self.reach_R[row_N]
            self.reach_R[row_N] = self.reach_R[row_N] * found.alpha_N
        self.weight_KR[k, row_N] = weight_N
        return weight_N

    def _slopes(
        self, spans: list[_Span], sizes: list[int], slope_XV: Tensor, hidden_XH: Tensor, rows_VdH: Tensor, weight_X: Tensor
    ) -> None:
        """Add to the gradients; the weights of rows go in where the tensors are narrow."""
        wide = self.loss_KR.dtype
        slope_XV = slope_XV.to(self.slope_dtype)
        if (key := id(self.outputs[spans[0].step].output_VdH)) in self.output:
            weighted_XH = (hidden_XH.to(wide) * weight_X[:, None]).to(self.slope_dtype)
            if (output_VdH := self.output[key]) is None:
                self.output[key] = torch.mm(slope_XV.T, weighted_XH).to(wide)
            elif self.slope_dtype == wide:
                output_VdH.addmm_(slope_XV.T, weighted_XH)
            else:
                output_VdH.add_(torch.mm(slope_XV.T, weighted_XH))
        if any(self.hidden[span.step] is not None for span in spans):
            hidden_XH = torch.mm(slope_XV, rows_VdH.to(self.slope_dtype)).to(wide).mul_(weight_X[:, None])
            for span, part_NH in zip(spans, hidden_XH.split(sizes), strict=True):
                if (into_RH := self.hidden[span.step]) is not None:
                    into_RH[span.row_N] = part_NH


class _Attached(torch.autograd.Function):
    """A scalar whose gradients by some tensors are known already. They are given out once, scaled in place: copies of them took as long
    as a twentieth of the whole loss."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients, ctx.dtypes = gradients, [tensor.dtype for tensor in tensors]
        return total.clone()

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if (gradients := ctx.gradients) is None:
            raise RuntimeError("the gradients of this loss were given out already; compute the loss again")
        ctx.gradients = None
        return None, None, *(None if g is None else g.mul_(up).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))


def _feature_loss(outputs: Sequence[StepOutput], labels: Labels) -> Tensor:
    """Smooth L1 of each row and step [K, R], 0 where a row does not count."""
    steps = []
    for k, out in enumerate(outputs):
        assert out.feature_RW is not None
        row_N = labels.counts_KR[k].nonzero()[:, 0]
        wanted_NW = labels.last_PW[labels.number_R[row_N] + k].to(labels.rows_VdW.dtype)
        found_N = smooth_l1_loss(out.feature_RW[row_N].to(wanted_NW.dtype), wanted_NW, reduction="none").mean(-1)
        steps.append(found_N.new_zeros(len(labels.number_R)).index_put((row_N,), found_N))
    return torch.stack(steps)
