"""Layer ids that a folder counts in one of two ways: both are tried on the target's text, and the head tells which it was trained on.

Legend: B rows, L tokens of a row, N nodes, F width of the states read, W target width, V target vocabulary, R counted tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spectrain.export.flat import Notation, head_from_flat
from spectrain.target.model import Target

AT_ONCE, ENOUGH = 512, 4096  # tokens of a row that are read, and of all rows together
SURE = 3.0  # standard deviations of the difference, were both right equally often


def head_by_agreement(folder: str | Path, target: Target, rows: Sequence[Sequence[int]]) -> tuple[Any, tuple[str, ...]]:
    """The EAGLE-3 head in a folder whose layer ids count states or outputs of layers, whichever makes its first drafts agree with the
    target's best tokens more often; and what was concluded. rows: token ids of text of the target's kind, a few thousand in all.

    ValueError where neither is a head, or the two are too close to tell.
    """
    heads, faults = dict[Notation, Any](), list[str]()
    notations: tuple[Notation, ...] = ("hs", "output")
    for notation in notations:
        try:
            heads[notation] = head_from_flat(
                folder, target_layers=target.num_layers, vocab_size=target.vocab_size, embed_VW=target.embedding_VW, notation=notation,
            )  # fmt: skip
        except ValueError as error:
            faults.append(str(error))
    if not heads:
        raise ValueError(faults[0])
    if len(heads) == 1:
        head, notes = next(iter(heads.values()))
        return head, (*notes, f"layer ids hs{list(head.layer_ids)}: in the other notation they are none")
    right = {notation: hits(head, target, rows) for notation, (head, _) in heads.items()}
    only = {a: int((right[a] & ~right[b]).sum()) for a, b in (notations, notations[::-1])}
    found = ", ".join(f"{float(hit_R.float().mean()):.1%} as hs{list(heads[n][0].layer_ids)}" for n, hit_R in right.items())
    if abs(only["hs"] - only["output"]) < SURE * max(1, sum(only.values())) ** 0.5:
        raise ValueError(
            f"{folder}: first drafts agree with {target.name} on {found} of {len(right['hs'])} tokens, too close to tell what its layer "
            "ids count; give more rows, or layer_ids"
        )
    head, notes = heads["hs" if only["hs"] > only["output"] else "output"]
    return head, (*notes, f"layer ids hs{list(head.layer_ids)}: first drafts agree with {target.name} on {found}")


@torch.no_grad()
def hits(head: Any, target: Target, rows: Sequence[Sequence[int]]) -> Tensor:
    """Where a head's first draft is the target's best token, bool [R]: two tokens after each state, given the token between."""
    found, left = list[Tensor](), ENOUGH
    for row in rows:
        ids_1L = torch.tensor([row[: min(AT_ONCE, left)]], device=target.device)
        L = ids_1L.shape[1]
        if L < 3:
            continue
        left -= L
        positions_1L = torch.arange(L, device=target.device)[None]
        out = target.forward(ids_1L, positions_BN=positions_1L, mask=None, cache=None, layer_ids=head.layer_ids)
        batch = SimpleNamespace(ids_BL=ids_1L, mask_BL=None, states_BLF=out.states_BNF, doc_BL=None, position_BL=None)
        _, logits_RV = next(iter(head.to(target.device).rows(batch, torch.arange(L - 1, device=target.device), target.embedding_VW, 1)))
        assert out.logits_BKV is not None
        found.append(head.target_ids[logits_RV.argmax(-1)] == out.logits_BKV[0, 1:].argmax(-1))
    if not found:
        raise ValueError("rows of less than three tokens tell nothing of a head; give rows of the target's answers")
    return torch.cat(found).cpu()
