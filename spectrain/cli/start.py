"""The head that a recipe goes on from: read, checked against the target, and its layers taken over before states are captured."""

import hashlib
from pathlib import Path
from typing import Any

from spectrain.config import Recipe
from spectrain.export.flat import head_from_flat
from spectrain.heads.base import check_head, load_head
from spectrain.target.model import Target


def open_start(recipe: Recipe, target: Target, say: Any) -> tuple[Recipe, Any]:
    """The recipe with the layers of the head that it goes on from (`head.start`), and that head; the recipe as it is and None for a new
    head. ValueError for a folder that holds no head, a head of another target, or other layers than the recipe names."""
    if recipe.head.start is None:
        return recipe, None
    folder = Path(recipe.head.start)
    if (folder / "made_with.json").is_file():
        head = load_head(folder)
        check_head(head, target.fingerprints, target.name, target.tokenizer)
    else:
        head, notes = head_from_flat(
            folder, target_layers=target.num_layers, vocab_size=target.vocab_size, embed_VW=target.embedding_VW,
            layer_ids=recipe.head.layer_ids,
        )  # fmt: skip
        for note in notes:
            say(f"{folder}: {note}")
    ids = tuple(head.layer_ids)
    if recipe.head.layer_ids not in (None, ids):
        way_out = "leave head.layer_ids out of the recipe (--set head.layer_ids=null)"
        raise ValueError(f"the recipe names head.layer_ids {list(recipe.head.layer_ids or ())}, {folder} reads {list(ids)}; {way_out}")
    return recipe.model_copy(update={"head": recipe.head.model_copy(update={"layer_ids": ids})}), head


def weights_hash(head: Any) -> str:
    """Hash of a head's weights and tables."""
    found = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()
