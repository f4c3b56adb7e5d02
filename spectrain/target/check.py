"""Does a store hold what it says: do its last states give the target's own logits, and are its states those of these layers?

Legend: M tokens looked at of one row, V vocabulary, W target width, S states.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from spectrain.data.rows import Row
from spectrain.heads.base import LAST
from spectrain.target.features import FeatureStore
from spectrain.target.manifest import check_target
from spectrain.target.model import Target
from spectrain.target.states import readable, row_pass

ROWS, TOKENS = 4, 128  # rows of a sample, supervised tokens looked at in each
DRAFTS = 4  # of the chain whose tau is told


@dataclass(frozen=True)
class Limits:
    """Most KL (nats a token), least share of equal best tokens, most relative error of a state."""

    kl: float
    top1: float
    error: float


# Best tokens flip at near ties: 3 of 392 of a right store in bf16, 2 of 1494 of another.
STORED = {"bf16": Limits(1e-4, 0.995, 0.02), "int8": Limits(0.05, 0.9, 0.1)}
# A target in 16 bits gives other logits by itself when rows stand in other batches: what was written down in the pass that made a last
# state (best tokens, log-sum-exps) is as close to it as to one in 32 bits, and is what decides.
HALF = Limits(0.05, 0.9, 0.15)
EXACT = 1e-4  # most difference of a logit by the output layer from a last state that nothing has rounded
LSE = {"bf16": 0.02, "int8": 0.1}  # most mean difference of a log-sum-exp


@dataclass(frozen=True)
class Check:
    """On a sample: rows and tokens looked at, mean KL of the law by the stored last states from the target's own (nats a token), share
    of equal best tokens, by state (as in layer_ids) the relative error in the mean; share of stored best tokens that are those by the
    stored last states, mean difference from the stored log-sum-exps (nats), and most difference of a logit that the output layer makes
    of the target's own last states. tau: tokens a round of a chain of drafts that are the best tokens by stored last states, the target's
    own before them; what a head could reach that learnt them by heart (of 8-bit last states only). None without stored last states."""

    rows: int
    tokens: int
    kl: float | None
    top1: float | None
    errors: tuple[float, ...]
    said: float | None = None
    lse: float | None = None
    exact: float | None = None
    tau: float | None = None

    def text(self) -> str:
        law = "" if self.kl is None else f"KL {self.kl:.1e}, same best token {self.top1:.2%}, "
        if self.tau is not None:
            law += f"tau {self.tau:.3f} of {1 + DRAFTS} by a chain of {DRAFTS} that says what these last states say, "
        return f"{self.rows} rows, {self.tokens} tokens against the target: {law}states within {max(self.errors):.1%}"


def check_store(store: FeatureStore, target: Target, *, sample: int = ROWS) -> Check:
    """Compare a sample of rows with passes of the target; what was found is returned.

    Raises ValueError when the store was made from another target, or when its states are not those it names: a state of another layer
    and a last state from before the final norm are called so.
    """
    check_target(store.folder, store.manifest, target)
    numbers = _sample(store.rows, sample)
    if not numbers:
        raise ValueError(f"{store.folder.name} has no row with a state that can be read; nothing to check or to train on")
    parts = [_compare(store, i, target) for i in numbers]
    tokens = sum(part.tokens for part in parts)
    errors = tuple(torch.stack([p.error_S for p in parts]).mean(0).tolist())
    found = Check(rows=len(parts), tokens=tokens, kl=None, top1=None, errors=errors)
    if store.manifest["last_state"] != "none":
        found = replace(
            found, **{name: sum(getattr(p, name) for p in parts) / tokens for name in ("kl", "top1", "said", "lse")},
            exact=max(p.exact for p in parts),
        )  # fmt: skip
        if store.manifest["last"] == "int8" and (rounds := [length for p in parts for length in p.runs]):
            found = replace(found, tau=1 + sum(rounds) / len(rounds))
    _judge(store, target, found, numbers[0])
    return found


def _sample(rows: Sequence[Row], count: int) -> list[int]:
    """Numbers of rows spread evenly, of which something can be read."""
    spread = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), 4 * count)).astype(int)).tolist()
    found = [i for i in spread if readable(rows[i])][:: max(1, len(spread) // count)][:count]
    return found or list(islice((i for i in range(len(rows)) if readable(rows[i])), count))


@dataclass(frozen=True)
class _Part:
    """Sums over the tokens of a row; exact: the largest."""

    tokens: int
    error_S: Tensor
    kl: float = 0.0
    top1: int = 0
    said: int = 0
    lse: float = 0.0
    exact: float = 0.0
    runs: tuple[int, ...] = ()


def _tokens(row: Row) -> Tensor:
    """Which of the row's supervised tokens are looked at, as numbers among them."""
    return torch.from_numpy(np.unique(np.linspace(0, row.supervised - 1, min(TOKENS, row.supervised)).astype(np.int64)))


def _compare(store: FeatureStore, i: int, target: Target) -> _Part:
    row, sample = store.rows[i], store[i]
    asked_M = _tokens(row)
    at_M = torch.from_numpy(np.flatnonzero(row.mask_L))[asked_M]
    own = row_pass(row, target, store.layer_ids, at_M)
    assert own.states_BNF is not None
    K, S = readable(row), len(store.layer_ids)
    theirs, ours = (x.float().cpu()[:K].unflatten(-1, (S, -1)) for x in (own.states_BNF[0], sample.states.float()))
    error_S = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)).mean(0)
    if store.manifest["last_state"] == "none":
        return _Part(len(at_M), error_S)
    own_MV = own.logits_BKV[0].float()
    logits_MV = output_logits(target, sample.last[asked_M].float()).float()
    log_p, log_q, best_M = own_MV.log_softmax(-1), logits_MV.log_softmax(-1), logits_MV[:, : target.num_ids].argmax(-1)
    lse_M = logits_MV[:, : target.num_ids].logsumexp(-1)
    same_M = best_M == own_MV[:, : target.num_ids].argmax(-1)
    return _Part(
        len(at_M), error_S, kl=float((log_p.exp() * (log_p - log_q)).sum()),
        top1=int(same_M.sum()), said=int((best_M.cpu() == sample.best_M[asked_M]).sum()),
        lse=float((lse_M.cpu() - sample.lse_M[asked_M]).abs().sum()),
        exact=float((output_logits(target, own.last_BKW[0]).float() - own_MV).abs().max()),
        runs=_runs(same_M.tolist()),
    )  # fmt: skip


def _runs(same: Sequence[bool]) -> tuple[int, ...]:
    """Drafts that are accepted of a chain which begins at each of these tokens: up to the first that is not the target's."""
    rounds = (same[i : i + DRAFTS] for i in range(len(same) - DRAFTS + 1))
    return tuple((*drafts, False).index(False) for drafts in rounds)


@torch.no_grad()
def output_logits(target: Target, last_MW: Tensor) -> Tensor:
    """Logits [M, V] that the target makes of these last states, with all that it does behind its output layer (caps, scales)."""
    last_1MW = last_MW.to(target.device, target.model.dtype)[None]
    with _instead(target, last_1MW):
        ids_11 = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        return target.forward(ids_11, positions_BN=ids_11, mask=None, cache=None).logits_BKV[0]


@contextmanager
def _instead(target: Target, last_1MW: Tensor) -> Iterator[None]:
    handle = target.model.get_output_embeddings().register_forward_pre_hook(lambda module, args: (last_1MW,))
    try:
        yield
    finally:
        handle.remove()


def _limits(store: FeatureStore, target: Target, kind: str) -> Limits:
    exact = target.model.dtype == torch.float32 and store.manifest["target_dtype"] == "float32"
    return STORED[kind] if exact else Limits(max(STORED[kind].kl, HALF.kl), min(STORED[kind].top1, HALF.top1), HALF.error)


def _judge(store: FeatureStore, target: Target, found: Check, example: int) -> None:
    """ValueError with what was found where a figure is beyond its limit."""
    told = "delete it and capture again"
    limit = _limits(store, target, store.manifest["states"])
    for s, (layer, error) in enumerate(zip(store.layer_ids, found.errors, strict=True)):
        if not error <= limit.error:
            near = _nearest(store, target, example, s)
            raise ValueError(f"{store.folder.name}: what is kept as {_named(layer)} differs by {error:.1%} from the target's{near}; {told}")
    if found.kl is None or found.top1 is None:
        return
    limit = _limits(store, target, store.manifest["last"])
    if not found.kl <= limit.kl or (1 - found.top1) * found.tokens > _flips(limit.top1, found.tokens):
        was = f"gives other logits than the target (KL {found.kl:.1e}, same best token {found.top1:.1%} of {found.tokens})"
        raise ValueError(f"{store.folder.name}: its last state {was}{_norm(store, target, example)}; {told}")
    _judge_answers(store, target, found)


def _judge_answers(store: FeatureStore, target: Target, found: Check) -> None:
    """ValueError where the output layer does not make the target's logits of its last states, or a store's best tokens and log-sum-exps
    are not those by its last states."""
    assert found.said is not None and found.lse is not None and found.exact is not None
    if not found.exact <= EXACT:
        was = f"the output layer of {target.name} makes logits of its last states that differ by {found.exact:.1e} from its own"
        raise ValueError(f"{was} (needed {EXACT:.0e}); a head would be trained on another law: is there a layer behind it?")
    kind = store.manifest["last"]
    if (1 - found.said) * found.tokens > _flips(STORED[kind].top1, found.tokens) or not found.lse <= LSE[kind]:
        was = f"{found.said:.1%} of {found.tokens} best tokens, log-sum-exps within {found.lse:.3f}"
        raise ValueError(f"{store.folder.name}: what is kept as the target's answers is not what its last states say ({was}); "
                         "delete it and capture again")  # fmt: skip


def _flips(top1: float, tokens: int) -> float:
    """Most best tokens of a sample that may differ: what a share of `top1` gives, and three standard errors, since a small sample cannot
    show shares this close to 1."""
    return (1 - top1) * tokens + 3 * (top1 * (1 - top1) * tokens) ** 0.5


def _named(layer: int) -> str:
    return "the last state" if layer == LAST else f"hs[{layer}]"


def _states(store: FeatureStore, target: Target, i: int) -> dict[int, Tensor]:
    """hs[0], hs[1] ... and the last state of row i by the target."""
    layers = (*range(target.num_layers + 1), LAST)
    out = row_pass(store.rows[i], target, layers, torch.zeros(1, dtype=torch.long))
    assert out.states_BNF is not None
    return dict(zip(layers, out.states_BNF[0].float().cpu().unflatten(-1, (len(layers), -1)).unbind(1), strict=True))


def _off(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-6)).mean())


def _nearest(store: FeatureStore, target: Target, i: int, s: int) -> str:
    K = readable(store.rows[i])
    ours = store[i].states.float()[:K].unflatten(-1, (len(store.layer_ids), -1))[:, s]
    off = {layer: _off(ours, x[:K]) for layer, x in _states(store, target, i).items()}
    best = min(off, key=lambda layer: off[layer])
    return f", it is {_named(best)}" if off[best] < HALF.error else ""


def _norm(store: FeatureStore, target: Target, i: int) -> str:
    at_M = torch.from_numpy(np.flatnonzero(store.rows[i].mask_L))
    before = _states(store, target, i)[target.num_layers][at_M]
    return ", it is the state before the final norm" if _off(store[i].last.float(), before) < HALF.error else ""
