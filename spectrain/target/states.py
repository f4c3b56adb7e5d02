"""Hidden states of rows in few passes: which tokens are computed and kept, and the passes themselves.

What a head needs and no more. A row of a head answers token i + 2 at the earliest from the state of token i, and only supervised
tokens are answered: states are kept of the tokens up to two before the last supervised one. Logits and last states are needed
at supervised tokens. What stands behind the last supervised token is not computed. Rows of one group (turns of one conversation) that
begin alike share these tokens: they are computed and kept once, by a pass over the tree of their tokens.

Legend: T tokens of a plan, each once; L tokens of a row, M its supervised ones; B lines of a pass, N their tokens, P supervised tokens
of a pass; S states, W target width, F = S * W; K kept tokens of a pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrain.data.codes import Codes, encode
from spectrain.data.rows import Row
from spectrain.target.model import Target, TargetOutput

Numbers = npt.NDArray[np.int64]
LastState = Literal["post_norm", "none"]
AT_A_TIME = {"cpu": 2**22, "cuda": 2**28}  # bytes of float32 logits summed at once: what a core's cache holds, on a GPU what memory allows


@dataclass(frozen=True)
class Line:
    """Tokens first:stop of a plan that are computed side by side: one row, or several of a group (`branches`: each one's tokens)."""

    first: int
    stop: int
    branches: tuple[Numbers, ...]

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Plan:
    """The tokens of some rows, each once: id, position, whether its states are kept, whether it is supervised; and for each row
    the numbers of its tokens, up to the last supervised one."""

    rows: Sequence[Row]
    lines: tuple[Line, ...]
    row_tokens: tuple[Numbers, ...]
    ids_T: Numbers
    positions_T: Numbers
    kept_T: npt.NDArray[np.bool_]
    asked_T: npt.NDArray[np.bool_]

    @property
    def kept_runs(self) -> list[list[tuple[int, int]]]:
        """By row: the runs of kept tokens (numbers among all kept ones) that its states are put together from."""
        number_T = np.cumsum(self.kept_T) - 1
        return [_runs(number_T[tokens[: readable(row)]]) for row, tokens in zip(self.rows, self.row_tokens, strict=True)]

    @property
    def asked_runs(self) -> list[list[tuple[int, int]]]:
        """By row: the runs of supervised tokens (numbers among all supervised ones) that are its own."""
        number_T = np.cumsum(self.asked_T) - 1
        own = (tokens[row.mask_L[: len(tokens)].astype(bool)] for row, tokens in zip(self.rows, self.row_tokens, strict=True))
        return [_runs(number_T[tokens[self.asked_T[tokens]]]) for tokens in own]


def readable(row: Row) -> int:
    """Tokens of a row whose states can be read: up to two before the last supervised one."""
    return max(0, end(row) - 2)


def end(row: Row) -> int:
    """Tokens up to the last supervised one, which included; 0 without one."""
    at_M = np.flatnonzero(row.mask_L)
    return int(at_M[-1]) + 1 if len(at_M) else 0


def plan_rows(rows: Sequence[Row], *, longest: int, last_state: LastState) -> Plan:
    """The tokens to compute. Rows of a group that stand side by side share their beginnings, in lines of at most `longest` tokens.

    last_state: "none" asks for no logits and no last states.
    """
    row_tokens: list[Numbers] = []
    open_rows: list[int] = []  # rows of the line being built
    lines: list[Line] = []
    ids: list[Numbers] = []
    positions: list[Numbers] = []
    total = 0
    for n, row in enumerate(rows):
        L = end(row)
        shared, of = max(((_common(rows[k], row, L, len(row_tokens[k])), k) for k in _same_group(rows, open_rows, row)), default=(0, -1))
        first = lines[-1].first if open_rows else total
        if not shared or total - first + L - shared > longest:
            open_rows, shared, first = [], 0, total
        own = np.arange(total, total + L - shared)
        tokens = np.concatenate([row_tokens[of][:shared], own]) if shared else own
        row_tokens.append(tokens)
        ids.append(row.ids_L[shared:L].astype(np.int64))
        positions.append(np.arange(shared, L))
        total += len(own)
        line = Line(first, total, (*(lines[-1].branches if open_rows else ()), tokens))
        lines = [*lines[:-1], line] if open_rows else [*lines, line]
        open_rows.append(n)
    kept_T, asked_T = np.zeros(total, bool), np.zeros(total, bool)
    for row, tokens in zip(rows, row_tokens, strict=True):
        kept_T[tokens[: readable(row)]] = True
        asked_T[tokens[row.mask_L[: len(tokens)].astype(bool)]] = last_state != "none"
    return Plan(
        rows, tuple(line for line in lines if len(line)), tuple(row_tokens), np.concatenate([*ids, np.zeros(0, np.int64)]),
        np.concatenate([*positions, np.zeros(0, np.int64)]), kept_T, asked_T,
    )  # fmt: skip


def _same_group(rows: Sequence[Row], open_rows: Sequence[int], row: Row) -> list[int]:
    return list(open_rows) if open_rows and rows[open_rows[0]].group == row.group else []


def _common(a: Row, b: Row, L: int, most: int) -> int:
    """Tokens that two rows have in common at their beginning, at most `most` and L."""
    n = min(L, most)
    differ = np.flatnonzero(a.ids_L[:n] != b.ids_L[:n])
    return int(differ[0]) if len(differ) else n


def _runs(numbers: Numbers) -> list[tuple[int, int]]:
    """Rising numbers as (first, stop) of each stretch without a gap."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(numbers, cuts) if len(part)]


def passes(plan: Plan, batch_tokens: int) -> list[list[Line]]:
    """Lines that go through the target together: of like length and kind, at most `batch_tokens` with padding, or one line."""
    order = sorted(plan.lines, key=lambda line: (len(line.branches) > 1, -len(line)))
    groups: list[list[Line]] = []
    for line in order:
        last = groups[-1] if groups else []
        alike = bool(last) and (len(last[0].branches) > 1) == (len(line.branches) > 1)
        if alike and len(last[0]) * (len(last) + 1) <= batch_tokens:
            last.append(line)
        else:
            groups.append([line])
    return groups


@dataclass(frozen=True)
class States:
    """What is kept of some lines, in their order: states [K, F]; at supervised tokens last [P, W], the best id best_P (int32) and the
    log-sum-exp lse_P (float32) of the target's logits."""

    states: Codes
    last: Codes
    best_P: Tensor
    lse_P: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By the names that a shard has for them."""
        parts = {"states": self.states, "last": self.last}
        named = {f"{part}.{name}": t for part, c in parts.items() for name, t in c.tensors.items()}
        return {**named, "best": self.best_P, "lse": self.lse_P}


def no_states(target: Target, *, num_states: int, kinds: tuple[str, str]) -> States:
    """The States of no token: names, dtypes and widths of all others."""
    empty_0F = torch.empty(0, num_states * target.embedding_VW.shape[1], dtype=target.model.dtype)
    last = encode(empty_0F[:, : target.embedding_VW.shape[1]], states=1, kind=kinds[1])
    return States(encode(empty_0F, states=num_states, kind=kinds[0]), last, torch.empty(0, dtype=torch.int32), torch.empty(0))


def run_lines(
    plan: Plan, lines: Sequence[Line], target: Target, layer_ids: Sequence[int], *, kinds: tuple[str, str]
) -> States:
    """One pass over lines of like kind, causal without a mask or with that of their trees; kinds: of states and last, for `encode`.

    Raises ValueError when the target gives values that are not finite.
    """
    B, N = len(lines), max(map(len, lines))
    ids_BN, positions_BN = np.zeros((B, N), np.int64), np.tile(np.arange(N), (B, 1))
    kept_BN, asked_BN = np.zeros((B, N), bool), np.zeros((B, N), bool)
    for b, line in enumerate(lines):
        part = slice(line.first, line.stop)
        for to, of in ((ids_BN, plan.ids_T), (positions_BN, plan.positions_T), (kept_BN, plan.kept_T), (asked_BN, plan.asked_T)):
            to[b, : len(line)] = of[part]
    device = target.device
    kept_K, asked_P = (torch.from_numpy(x.ravel().nonzero()[0]).to(device) for x in (kept_BN, asked_BN))
    mask = None
    if any(len(line.branches) > 1 for line in lines):
        mask = target.by_kind(partial(_tree_mask, lines, torch.from_numpy(positions_BN).to(device)))
    out = _forward(target, torch.from_numpy(ids_BN), torch.from_numpy(positions_BN), mask, layer_ids, asked_P)
    assert out.states_BNF is not None
    codes = encode(out.states_BNF.flatten(0, 1)[kept_K], states=len(layer_ids), kind=kinds[0])
    best_P, lse_P = _best_and_lse(out.logits_BKV[0][:, : target.num_ids])  # rows beyond are padding: never said
    if not (lse_P.isfinite().all() and all(t.isfinite().all() for t in codes.tensors.values() if t.is_floating_point())):
        found = f"{target.name} gives states or logits that are not finite in {target.model.dtype}"
        raise ValueError(f"{found}; load it in bfloat16 or float32")
    return States(codes.to("cpu"), encode(out.last_BKW[0], states=1, kind=kinds[1]).to("cpu"), best_P.cpu(), lse_P.cpu())


def _forward(target: Target, ids_BN: Tensor, positions_BN: Tensor, mask: object, layer_ids: Sequence[int], at_P: Tensor) -> TargetOutput:
    """A pass whose logits [1, P, V] and last states [1, P, W] are those of the flat tokens at_P alone."""
    with selected(target, at_P):
        return target.forward(
            ids_BN.to(target.device), positions_BN=positions_BN.to(target.device), mask=mask, cache=None, layer_ids=layer_ids  # type: ignore[arg-type]
        )


@contextmanager
def selected(target: Target, at_P: Tensor) -> Iterator[None]:
    """The output layer reads only these of the flat tokens; what the model does to its logits afterwards (caps, scales) stays."""
    output = target.model.get_output_embeddings()
    handle = output.register_forward_pre_hook(lambda module, args: (args[0].flatten(0, 1)[at_P][None],))
    try:
        yield
    finally:
        handle.remove()


def _tree_mask(lines: Sequence[Line], positions_BN: Tensor, window: int | None) -> Tensor:
    """Mask [B, 1, N, N]: a token sees those of its own row up to itself and, with a window, of these the last `window` positions."""
    B, N = positions_BN.shape
    sees_BNN = torch.eye(N, dtype=torch.bool, device=positions_BN.device).repeat(B, 1, 1)  # padding sees itself
    for b, line in enumerate(lines):
        for branch in line.branches:
            at_L = torch.from_numpy(branch - line.first).to(positions_BN.device)
            L = len(at_L)
            sees_BNN[b, at_L[:, None], at_L[None]] = torch.ones(L, L, dtype=torch.bool, device=at_L.device).tril()
    if window is not None:
        sees_BNN &= positions_BN[:, None, :] > positions_BN[:, :, None] - window
    return sees_BNN[:, None]


def _best_and_lse(logits_PV: Tensor) -> tuple[Tensor, Tensor]:
    """Best id (int32) and log-sum-exp (float32) of each row of logits, some rows at a time."""
    rows = max(1, AT_A_TIME.get(logits_PV.device.type, 2**28) // (4 * logits_PV.shape[1]))
    parts = [(_argmax(part), part.logsumexp(-1)) for part in (raw.float() for raw in logits_PV.split(rows))]
    return torch.cat([best for best, _ in parts]).int(), torch.cat([lse for _, lse in parts])


def _argmax(x_PV: Tensor) -> Tensor:
    """On a CPU by numpy, whose search is three times as fast."""
    return x_PV.argmax(-1) if x_PV.device.type != "cpu" else torch.from_numpy(x_PV.numpy().argmax(-1))


def row_pass(row: Row, target: Target, layer_ids: Sequence[int], at_M: Tensor) -> TargetOutput:
    """One row in one pass of its own, logits and last states at the tokens at_M: the slow twin of `run_lines`."""
    ids_1L = torch.from_numpy(row.ids_L.astype(np.int64))[None].to(target.device)
    positions = torch.arange(ids_1L.shape[1], device=target.device)[None]
    return target.forward(ids_1L, positions_BN=positions, mask=None, cache=None, layer_ids=layer_ids, logits_to_keep=at_M.to(target.device))


def capture_row(row: Row, target: Target, layer_ids: Sequence[int]) -> dict[str, Tensor]:
    """States of one row in a pass of its own, in the target's precision: states [L, F]; at supervised tokens last [M, W], best id [M]
    and log-sum-exp [M] of the logits."""
    out = row_pass(row, target, layer_ids, torch.from_numpy(row.mask_L.astype(np.int64)).nonzero()[:, 0])
    assert out.states_BNF is not None
    logits_MV = out.logits_BKV[0]
    lse_M = logits_MV.float().logsumexp(-1)
    return {"states": out.states_BNF[0].cpu(), "last": out.last_BKW[0].cpu(), "best": logits_MV.argmax(-1).cpu(), "lse": lse_M.cpu()}
