"""Rows that come tokenised already -> ids and mask.

Legend: L tokens.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from spectrain.data.dialects import json_value, kind

Whole = npt.NDArray[np.int64]

MASKS = ("loss_mask", "assistant_masks", "completion_mask")
IGNORED = -100  # a label that is not learnt from, as torch's cross entropy has it
INT32 = 2**31 - 1


def ids_and_mask(row: Mapping[str, Any]) -> tuple[Whole, Whole]:
    """(ids_L, mask_L) of a row with `input_ids` and a mask or labels. Raises ValueError with what does not fit."""
    ids = _whole(row.get("input_ids"), "input_ids")
    if ids.min() < 0 or ids.max() > INT32:
        raise ValueError(f"`input_ids` holds {ids.min() if ids.min() < 0 else ids.max()}; token ids are 0 to {INT32}")
    key = next((key for key in (*MASKS, "labels") if row.get(key) is not None), None)
    if key is None:
        raise ValueError(f"no mask: needed one of {', '.join(MASKS)} or labels ({IGNORED}: not supervised) beside input_ids")
    mask = _whole(row[key], key)
    if len(mask) != len(ids):
        raise ValueError(f"`{key}` has {len(mask)} entries for {len(ids)} input_ids")
    attended = _whole(row["attention_mask"], "attention_mask") if row.get("attention_mask") is not None else np.ones_like(ids)
    if len(attended) != len(ids) or not attended.all():
        raise ValueError("`attention_mask` holds zeros, or is not as long as `input_ids`; needed rows without padding")
    if key == "labels":
        supervised = mask != IGNORED
        if (wrong := supervised & (mask != ids)).any():
            at = int(wrong.argmax())
            raise ValueError(f"`labels` is {mask[at]} at place {at}, `input_ids` {ids[at]}; needed the same (not shifted) or {IGNORED}")
        mask = supervised.astype(np.int64)
    elif not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"`{key}` holds {mask[(mask != 0) & (mask != 1)][0]}; needed 0 and 1")
    return ids, mask


def _whole(value: Any, what: str) -> Whole:
    """A list of whole numbers (true and false count in a mask)."""
    value = json_value(value, what)
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        raise ValueError(f"`{what}` is {'an empty list' if isinstance(value, list) else kind(value)}; needed a list of whole numbers")
    try:
        numbers = np.asarray(value)
    except (ValueError, OverflowError):
        numbers = np.zeros((), dtype=object)
    if numbers.ndim != 1 or numbers.dtype.kind not in ("iu" if what in ("input_ids", "labels") else "iub"):
        raise ValueError(f"`{what}` must be one list of whole numbers")
    return numbers.astype(np.int64)
