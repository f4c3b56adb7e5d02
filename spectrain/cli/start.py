"""The head that a recipe goes on from: read, checked against the target, and its layers taken over before states are captured."""

import hashlib
import json
from pathlib import Path
from typing import Any

from spectrain.config import HeadConfig, Recipe
from spectrain.export.families import head_from_folder
from spectrain.heads.base import check_head, kind_of, load_head
from spectrain.target.model import Target
from spectrain.training.setup import check_training

SAME = (  # called alike in the settings and in a head's config
    "layer_ids", "hidden_size", "sliding_window", "draft_vocab_size", "fc_norm", "norm_before_fc", "norm_output", "norm_before_residual",
    "num_heads", "shared_output", "prefix", "original", "bias",
)  # fmt: skip


def open_start(recipe: Recipe, target: Target, say: Any) -> tuple[Recipe, Any]:
    """The recipe with the sizes of the head that it goes on from (`head.start`), and that head; the recipe as it is and None for a new
    head. ValueError for a folder that holds no head, a head of another kind or target, other layers than the recipe names, or training
    settings that do not fit that head."""
    if recipe.head.start is None:
        return recipe, None
    folder = Path(recipe.head.start)
    if not folder.is_dir():
        raise ValueError(f"head.start: no folder {folder}; give a head directory such as runs/NAME/head, or the folder of an engine's head")
    check_no_run(folder)
    if (folder / "made_with.json").is_file():
        head = load_head(folder)
    else:
        head, notes = head_from_folder(folder, target, layer_ids=recipe.head.layer_ids)
        for note in notes:
            say(f"{folder}: {note}")
    if (kind := kind_of(head)) != recipe.head.kind:
        found = f"{folder} holds a head of kind {kind}, the recipe asks for head.kind {recipe.head.kind}"
        raise ValueError(f"{found}; go on from it as what it is (--set head.kind={kind}), or name another head.start")
    check_head(head, target.fingerprints, target.name, target.tokenizer, to_train=True)
    ids = tuple(head.layer_ids)
    if recipe.head.layer_ids not in (None, ids):
        way_out = "leave head.layer_ids out of the recipe (--set head.layer_ids=null)"
        raise ValueError(f"the recipe names head.layer_ids {list(recipe.head.layer_ids or ())}, {folder} reads {list(ids)}; {way_out}")
    recipe = recipe.model_copy(update={"head": _with_own(recipe.head, head.config, say)})
    check_training(recipe.head, recipe.training)  # again: with the number of heads that it has
    return recipe, head


def _with_own(wanted: HeadConfig, found: Any, say: Any) -> HeadConfig:
    """The settings with the sizes and flags of the head that is gone on from; what the recipe has otherwise is told."""
    layers = "num_layers" if hasattr(found, "num_layers") else "num_hidden_layers"  # residual blocks a head, or decoder layers
    names = {name: name for name in SAME} | {"num_layers": layers}
    own = {name: getattr(found, its) for name, its in names.items() if hasattr(found, its)}  # a head of another kind has others
    own["layer_ids"] = tuple(own["layer_ids"])
    if own.get("hidden_size") == found.target_hidden_size:
        own["hidden_size"] = None
    for name, value in own.items():
        if name in wanted.model_fields_set and (asked := getattr(wanted, name)) not in (None, value):
            own_way = f"head.{name} is {json.dumps(value)}, as in {wanted.start}"
            say(f"head.start: {own_way}; the {json.dumps(asked)} of the recipe is not looked at")
    return wanted.model_copy(update=own)


def check_no_run(folder: Path) -> None:
    """ValueError for the folder of a run where one of its heads was needed."""
    if not (folder / "made_with.json").is_file() and (folder / "head" / "made_with.json").is_file():
        raise ValueError(f"{folder} is the folder of a run; its best head is {folder / 'head'}")


def weights_hash(head: Any) -> str:
    """Hash of a head's weights and tables."""
    found = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()
