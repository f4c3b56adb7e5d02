"""Any head in an engine's or a trainer's folder, read as what its tensors show it to be: Medusa, Hydra, EAGLE-1 or EAGLE-3."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.export.eagle1 import read_eagle1
from spectrain.export.flat import AmbiguousIds, Notation, head_from_flat
from spectrain.export.foreign import open_folder
from spectrain.export.hydra import read_hydra
from spectrain.export.medusa import read_medusa
from spectrain.export.notation import head_by_agreement
from spectrain.export.told import Record, read_told
from spectrain.target.model import Target

MEDUSA = re.compile(r"^(medusa_heads?\.|blocks\.\d+\.layers\.)|^\d+\.\d+\.linear\.")


def head_from_folder(
    folder: str | Path, target: Target, *, layer_ids: Sequence[int] | None = None, notation: Notation | None = None,
    rows: Sequence[Sequence[int]] = (),
) -> tuple[Any, tuple[str, ...]]:  # fmt: skip
    """The head in a folder, in float32 and ready to train for `target`, and what was concluded in reading it.

    Of EAGLE-3 heads: layer_ids: the states that are fused, where the folder does not name them. notation: what its ids count, "hs" or
    "output", where that cannot be told. rows: token ids of the target's answers, on which both are tried where neither is given.
    ValueError for a folder that holds no head, one of another family or target, or one that a head here cannot express.
    """
    folder = Path(folder)
    config, tensors = open_folder(folder)
    read = {"medusa": read_medusa, "eagle": read_eagle1, "hydra": read_hydra}.get(family(tensors))
    if read is not None:
        if (layers := read_told(Record, config, folder).spectrain.target_layers or target.num_layers) != target.num_layers:
            raise ValueError(f"{folder} was trained for a target of {layers} layers, not {target.num_layers}; load that target")
        head, notes = read(folder, config, tensors, target)
        given = notation is not None or (layer_ids is not None and tuple(layer_ids) != head.layer_ids)
        return head, (*notes, *(["layer ids are told of EAGLE-3 heads alone: those given are not looked at"] if given else []))
    del tensors  # they are read again
    try:
        return head_from_flat(
            folder, target_layers=target.num_layers, vocab_size=target.vocab_size, embed_VW=target.embedding_VW, layer_ids=layer_ids,
            notation=notation,
        )  # fmt: skip
    except AmbiguousIds:
        if not rows:
            raise
    return head_by_agreement(folder, target, rows)


def family(tensors: Mapping[str, Tensor]) -> str:
    """The kind of head that has such tensors; configs are wrong about it more often."""
    if any(MEDUSA.match(name) for name in tensors):
        return "medusa"
    if any(name.startswith(("hydra_", "prefix_embeding_layer.")) for name in tensors):
        return "hydra"
    fc_WX = tensors.get("fc.weight")
    doubled = fc_WX is not None and fc_WX.dim() == 2 and fc_WX.shape[1] == 2 * fc_WX.shape[0]
    return "eagle" if doubled and not any("hidden_norm" in name for name in tensors) else "eagle3"
