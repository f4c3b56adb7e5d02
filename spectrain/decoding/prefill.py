"""Prompts read into rows of the cache: those of like length together, in passes of a bounded size (planning/batches.py).

A pass fills its rows from their first slot on, with padding behind each prompt. So it is plainly causal and sees what it writes; what is
written of the padding lies behind the row's length, where nothing looks before it is overwritten.

Legend: B rows of the cache, R prompts, P prompts of one pass, L columns, G key/value heads, D head size, V vocabulary, F width of the
states that the drafter reads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain.planning.batches import POSITIONS, parts
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target
from spectrain.target.states import selected


class _Rows:
    """Some rows of a slab as the cache of a pass that fills them from their first slot on."""

    is_compileable = False

    def __init__(self, cache: SlabCache, rows_P: Tensor, columns: int) -> None:
        self._cache, self._rows_P, self._columns = cache, rows_P, columns

    def update(self, k_PGLD: Tensor, v_PGLD: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows_P = self._rows_P.to(k_PGLD.device)  # which is not the first layer's where a target lies on several devices
        self._cache.keys[layer][rows_P, :, : self._columns] = k_PGLD
        self._cache.values[layer][rows_P, :, : self._columns] = v_PGLD
        return k_PGLD, v_PGLD

    def get_seq_length(self, layer: int = 0) -> int:
        return self._columns


def read_prompts(
    target: Target, cache: SlabCache, prompts: Sequence[Sequence[int]], rows: Sequence[int], layer_ids: Sequence[int],
    positions: int = POSITIONS,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Read prompts into these rows of the cache, whatever they held; positions: most of a pass, padding included.

    Returns the logits [R, V] after each prompt's last token, and its states [R, L, F], padded behind it, where any are read.
    """
    device = target.device
    longest = max(map(len, prompts))
    logits: dict[int, Tensor] = {}
    states_RLF = None
    for part in parts([len(ids) for ids in prompts], positions):
        L = len(prompts[part[-1]])
        ids_PL = torch.tensor([[*prompts[r], *[0] * (L - len(prompts[r]))] for r in part], device=device)
        last_P = torch.tensor([p * L + len(prompts[r]) - 1 for p, r in enumerate(part)], device=device)
        row_P = torch.tensor([rows[r] for r in part], device=device)
        with selected(target, last_P):
            out = target.forward(
                ids_PL, positions_BN=torch.arange(L, device=device).expand_as(ids_PL), mask=None, cache=_Rows(cache, row_P, L),
                layer_ids=layer_ids,
            )  # fmt: skip
        logits |= zip(part, out.logits_BKV[0], strict=True)
        if out.states_BNF is not None:
            if states_RLF is None:
                states_RLF = out.states_BNF.new_zeros(len(prompts), longest, out.states_BNF.shape[2])
            states_RLF[torch.tensor(part, device=device), :L] = out.states_BNF
    cache.settle(torch.tensor(list(rows), device=device), torch.tensor([len(ids) for ids in prompts], device=device), longest)
    return torch.stack([logits[r] for r in range(len(prompts))]), states_RLF
