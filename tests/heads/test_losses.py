"""The unrolled loss against plain autograd in float64: values, gradients, counts, weights, pieces."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, smooth_l1_loss
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.config import LossConfig
from spectrain.heads import losses
from spectrain.heads.base import StepOutput
from spectrain.heads.losses import RANKS, Counts, Labels, unrolled_loss
from spectrain.kernels.divergence import Mix, divergence_reference

K, W, H, V, VD = 3, 6, 5, 23, 11
MIXED = {"soft_ce": 0.7, "lk_lambda": 0.4, "reverse_kl": 0.2, "top_k": 0.3, "smooth_l1": 0.5}


def inputs(lengths: tuple[int, ...] = (4, 1, 2, 7), seed: int = 0, own: bool = False) -> tuple[list[StepOutput], Labels]:
    """Answers of some supervised tokens each, float64: the rows of one answer those of its tokens but the last. own: output rows a step."""
    g = torch.Generator().manual_seed(seed)
    P = sum(lengths)
    numbers, counts, first = [], [], 0
    for length in lengths:
        numbers += list(range(first, first + length - 1))
        counts += [[i + k < length for k in range(1, K + 1)] for i in range(length - 1)]
        first += length

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    # A row of number i at step k answers to the law after token i + k, which must be followed by one more of its answer.
    rows, last, R = random(V, W), random(P, W), len(numbers)
    target_ids = torch.randperm(V, generator=g)[:VD].sort().values
    logits = last @ rows.T
    best, shared, outputs = logits.argmax(-1), normalize(random(VD, H)), []
    for k in range(K):
        output, hidden = normalize(random(VD, H)) if own else shared, random(R, H)
        for r in range(0, R, 2):  # every other row drafts the best token, where the head has it
            at = (target_ids == best[min(numbers[r] + k, P - 1)]).nonzero()
            if len(at):
                hidden[r] = output.detach()[at[0, 0]] * 4
        outputs.append(StepOutput(2 + k, hidden.requires_grad_(), output.requires_grad_(), random(R, W).requires_grad_()))
    return outputs, Labels(
        last_PW=last, lse_P=logits.logsumexp(-1), best_P=logits.argmax(-1).int(), rows_VdW=rows[target_ids],
        number_R=torch.tensor(numbers, dtype=torch.long), weight_R=None,
        counts_KR=torch.tensor(counts, dtype=torch.bool).reshape(R, K).T.contiguous(),
        target_ids=target_ids,
    )  # fmt: skip


def leaves(outputs: list[StepOutput]) -> list[Tensor]:
    found = [out.hidden_RH for out in outputs] + [out.output_VdH for out in outputs] + [out.feature_RW for out in outputs]
    return [leaf for i, leaf in enumerate(found) if leaf is not None and all(leaf is not other for other in found[:i])]


def gradients(total: Tensor, outputs: list[StepOutput]) -> list[Tensor]:
    found = torch.autograd.grad(total, leaves(outputs), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves(outputs), found, strict=True)]


def slow(outputs: list[StepOutput], labels: Labels, config: LossConfig) -> tuple[Tensor, dict[str, Any]]:
    """Total and sums of the formulas, a row and step at a time."""
    R = len(labels.number_R)
    mix = Mix(
        **{n: w for n, w in config.mix.items() if n != "smooth_l1"}, k=config.top_k, lk_scale=config.lk_scale, lk_decay=config.lk_decay
    )
    full_rows = {name: [0.0] * K for name in ("loss", "alpha", "hits", "rows", "inside", "survived", "reached")}
    ranks, rank_KR, total, base = [[0] * RANKS for _ in range(K)], torch.full((K, R), VD), torch.zeros((), dtype=torch.float64), 0.0
    ids = labels.target_ids.tolist()
    for r in range(R):
        weight = reach = 1.0 if labels.weight_R is None else float(labels.weight_R[r])
        base += weight if labels.counts_KR[0, r] else 0.0
        lives, reached = True, True
        for k, out in enumerate(outputs):
            if not (reached := reached and bool(labels.counts_KR[k, r])):
                continue
            token = int(labels.number_R[r]) + k
            log_p = (labels.rows_VdW @ labels.last_PW[token] - labels.lse_P[token])[None]
            z = out.output_VdH @ out.hidden_RH[r]
            loss, alpha = divergence_reference(z[None], log_p, mix, renormalise=config.renormalise)
            if name_weight := config.mix.get("smooth_l1"):
                loss = loss + name_weight * smooth_l1_loss(out.feature_RW[r], labels.last_PW[token])
            total = total + config.decay**k * (reach if config.weighting == "reach" else weight) * loss[0]
            reach *= alpha.item()
            best = int(labels.best_P[token])
            if best in ids:
                rank = int((z > z[ids.index(best)]).sum())
                rank_KR[k, r] = rank
                if rank < RANKS:
                    ranks[k][rank] += 1
                full_rows["inside"][k] += 1
            lives = lives and int(rank_KR[k, r]) == 0
            full_rows["hits"][k] += int(rank_KR[k, r]) == 0
            for name, value in (("loss", loss.item()), ("alpha", alpha.item()), ("rows", 1), ("survived", lives), ("reached", 1)):
                full_rows[name][k] += value
    return total, {**full_rows, "ranks": ranks, "rank_KR": rank_KR, "weight": base}


CONFIGS = {
    "plain": LossConfig(),
    "mixed": LossConfig(mix=MIXED, decay=0.8, top_k=3, renormalise=True),
    "reach": LossConfig(mix={"kl": 1.0, "smooth_l1": 0.1}, weighting="reach", decay=0.9),
    "rows": LossConfig(mix={"lk_alpha": 1.0, "jsd": 0.5, "tv": 0.5}, weighting="rows"),
    "features": LossConfig(mix="smooth_l1"),
}


@pytest.mark.parametrize("piece", [1, 2, 5, 64])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_depends_on_the_piece_or_differs_from_the_formula(name: str, own: bool, piece: int) -> None:
    config, (outputs, labels) = CONFIGS[name], inputs(own=own)
    if config.weighting == "rows":
        labels = replace(labels, weight_R=torch.linspace(0.1, 2, len(labels.number_R), dtype=torch.float64))
    total, sums = slow(outputs, labels, config)
    found = unrolled_loss(outputs, labels, config, piece=piece)
    torch.testing.assert_close(found.total, total)
    for mine, expected in zip(gradients(3 * found.total, outputs), gradients(total, outputs), strict=True):
        torch.testing.assert_close(mine, 3 * expected, atol=1e-12, rtol=1e-10)
    assert torch.equal(found.rank_KR, sums["rank_KR"]) and float(found.weight) == pytest.approx(sums["weight"])
    for field in ("loss", "alpha", "hits", "rows", "inside", "survived", "reached"):
        assert getattr(found.counts, f"{field}_K").tolist() == pytest.approx(sums[field])
    assert found.counts.ranks_KM.tolist() == sums["ranks"]
    assert sums["reached"][2] < sums["rows"][0] and sums["inside"][0] < sums["rows"][0] and 0 < sums["survived"][0]


def test_frozen_output_or_evaluation_makes_gradients() -> None:
    outputs, labels = inputs()
    frozen = [replace(out, output_VdH=out.output_VdH.detach()) for out in outputs]
    found, whole = (unrolled_loss(some, labels, LossConfig()) for some in (frozen, outputs))
    hidden = [out.hidden_RH for out in outputs]
    for a, b in zip(torch.autograd.grad(found.total, hidden), torch.autograd.grad(whole.total, hidden), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        alone = unrolled_loss(outputs, labels, LossConfig())
    assert not alone.total.requires_grad and torch.equal(alone.total, whole.total.detach())


@pytest.mark.parametrize("mix", [{"soft_ce": 1.0}, MIXED])
def test_sums_of_batches_are_not_the_sum_of_one(mix: dict[str, float]) -> None:
    """Counts and totals of some batches are those of all their tokens in one; a batch of which nothing counts adds nothing."""
    config = LossConfig(mix=mix)
    parts = [unrolled_loss(*inputs(lengths, seed=3), config) for lengths in ((4, 1), (2, 7), (1,))]
    added = sum((part.counts for part in parts[1:]), start=parts[0].counts)
    assert added.rows_K.tolist() == [10, 7, 5] == added.reached_K.tolist() and parts[2].counts.flat().tolist() == [0.0] * (K * (7 + RANKS))
    assert float(added.loss_K.sum()) == pytest.approx(sum(part.total.item() for part in parts))
    back = Counts.from_flat(added.flat(), K)
    assert all(torch.equal(a, b) for a, b in zip(back.fields, added.fields, strict=True)) and back.ranks_KM.shape == (K, RANKS)
    assert all(torch.equal(a, b) for a, b in zip((added + Counts.zeros(K, torch.device("cpu"))).fields, added.fields, strict=True))


def test_head_without_features_is_trained_on_them() -> None:
    outputs, labels = inputs()
    with pytest.raises(ValueError, match="smooth_l1 needs a head that guesses"):
        unrolled_loss([replace(out, feature_RW=None) for out in outputs], labels, LossConfig(mix=MIXED))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_mixed_precision_reaches_law_or_divergence(kind: torch.dtype) -> None:
    """Under autocast the gradients stay near those in full precision; the law does not change at all."""
    outputs, labels = inputs(lengths=(60,))
    single = [
        StepOutput(o.ahead, o.hidden_RH.detach().float().requires_grad_(), o.output_VdH.detach().float().requires_grad_()) for o in outputs
    ]
    labels = replace(labels, last_PW=labels.last_PW.float(), lse_P=labels.lse_P.float(), rows_VdW=labels.rows_VdW.float())
    exact = unrolled_loss(single, labels, LossConfig())
    expected = torch.autograd.grad(exact.total, leaves(single))
    with torch.autocast("cpu", dtype=kind):
        found = unrolled_loss(single, labels, LossConfig())
    assert found.total.dtype == torch.float32 and found.total.item() == pytest.approx(exact.total.item(), rel=3e-3)
    for mine, other in zip(torch.autograd.grad(found.total, leaves(single)), expected, strict=True):
        assert mine.dtype == torch.float32 and 0 < (mine - other).norm() < 0.02 * other.norm()


class Sizes(TorchDispatchMode):
    """The largest output of any operation."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return found


def test_matrix_of_all_tokens_and_the_vocabulary_is_made() -> None:
    """8,192 tokens and the full vocabulary of 49,152, three steps; few of the rows count, for time."""
    P, wide, g = 8192, 49152, torch.Generator().manual_seed(0)
    rows, output, hidden, last = (torch.randn(n, 8, generator=g) for n in (wide, wide, P - 1, P))
    counts = torch.zeros(3, P - 1, dtype=torch.bool)
    counts[:, 4090:4110] = True
    labels = Labels(
        last, torch.full((P,), 20.0), torch.zeros(P, dtype=torch.int32), rows, torch.arange(P - 1), counts, None, torch.arange(wide)
    )
    outputs = [StepOutput(2 + k, hidden.requires_grad_(), output.requires_grad_()) for k in range(3)]
    with Sizes() as sizes:
        found = unrolled_loss(outputs, labels, LossConfig(mix={"kl": 1.0, "top_k": 1.0}))
        found.total.backward()
    assert found.counts.rows_K.tolist() == [20] * 3 and hidden.grad is not None and hidden.grad[4090:4110].any()
    assert wide * 8 <= sizes.largest <= 64 * 3 * wide < P * wide / 40


def test_law_is_made_once_a_step_or_gradients_are_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's labels cost a product a token, however many steps read them."""
    made: list[int] = []
    law_of = losses.law_of
    monkeypatch.setattr(losses, "law_of", lambda log_p_NV, *rest, **more: (made.append(len(log_p_NV)), law_of(log_p_NV, *rest, **more))[1])
    outputs, labels = inputs(lengths=(9, 9))
    total = unrolled_loss(outputs, labels, LossConfig(), piece=4).total
    assert sum(made) == 18 and len(made) == 5
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given out already"):
        total.backward()


@pytest.mark.parametrize(
    ("tokens", "draft_vocab", "expected"), [(260, 6144, 260), (600, 6144, 300), (8192, 49152, 64), (1, 6144, 1), (0, 6144, 1)]
)
def test_last_piece_is_a_sliver_or_pieces_outgrow_memory(tokens: int, draft_vocab: int, expected: int) -> None:
    assert losses.piece_size(tokens, draft_vocab=draft_vocab, steps=3, device=torch.device("cpu")) == expected
