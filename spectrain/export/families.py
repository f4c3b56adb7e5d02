"""Any head in an engine's or a trainer's folder, read as what its tensors show it to be: Medusa, EAGLE-1 or EAGLE-3."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.export.eagle1 import read_eagle1
from spectrain.export.flat import head_from_flat
from spectrain.export.foreign import open_folder
from spectrain.export.medusa import read_medusa
from spectrain.target.model import Target

MEDUSA = re.compile(r"^(medusa_heads?\.|blocks\.\d+\.layers\.)|^\d+\.\d+\.linear\.")


def head_from_folder(folder: str | Path, target: Target, *, layer_ids: Sequence[int] | None = None) -> tuple[Any, tuple[str, ...]]:
    """The head in a folder, in float32 and ready to train for `target`, and what was concluded in reading it.

    layer_ids: the states that an EAGLE-3 head fuses, where its folder does not name them. ValueError for a folder that holds no head, one
    of another family or target, or one that a head here cannot express.
    """
    folder = Path(folder)
    config, tensors = open_folder(folder)
    read = {"medusa": read_medusa, "eagle": read_eagle1}.get(family(tensors, folder))
    if read is None:
        return head_from_flat(
            folder, target_layers=target.num_layers, vocab_size=target.vocab_size, embed_VW=target.embedding_VW, layer_ids=layer_ids,
        )  # fmt: skip
    if (layers := config.get("spectrain", {}).get("target_layers", target.num_layers)) != target.num_layers:
        raise ValueError(f"{folder} was trained for a target of {layers} layers, not {target.num_layers}; load that target")
    return read(folder, config, tensors, target)


def family(tensors: Mapping[str, Tensor], where: Path) -> str:
    """The kind of head that has such tensors; configs are wrong about it more often. ValueError for Hydra, which is not read."""
    if any(MEDUSA.match(name) for name in tensors):
        return "medusa"
    if any(name.startswith(("hydra_", "prefix_embeding_layer.")) for name in tensors):
        raise ValueError(
            f"{where} holds a Hydra head, whose original norms the prefix state once more: heads here cannot express it; train one with "
            "recipes/hydra_smollm2.yaml"
        )
    fc_WX = tensors.get("fc.weight")
    doubled = fc_WX is not None and fc_WX.shape[1] == 2 * fc_WX.shape[0]
    return "eagle" if doubled and not any("hidden_norm" in name for name in tensors) else "eagle3"
