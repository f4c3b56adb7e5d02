"""What every export has alike: the head directory that is read, and the folder that appears whole or not at all.

Legend: X any.
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.config import validate
from spectrain.export.layout import CONFIG, WEIGHTS, read_json, read_tensors
from spectrain.heads.base import head_class, load_head, vocabulary_hash

MADE_WITH = "made_with.json"
FORMAT = 1  # of the head directory read and of the `spectrain` block written
MADE_WITH_KEYS = ("target", "target_revision", "tokenizer_sha256", "template_sha256", "vocabulary_sha256", "versions")
MEDUSA_WEIGHTS, MEDUSA_PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
TOKEN_MAP = "token_map.pt"  # target ids of a draft vocabulary, a list, as SGLang reads it
OURS = {  # of the `spectrain` block, beside made_with.json
    "format", "head", "hs_layer_ids", "target_layers", "embedding", "shared_output", "fc_bias", "note",
}  # fmt: skip
FILES = {CONFIG, WEIGHTS, MEDUSA_WEIGHTS, MEDUSA_PICKLED, TOKEN_MAP}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_made_with(head_dir: Path) -> dict[str, Any]:
    """made_with.json; ValueError for one that does not tie the head to its target."""
    made_with = read_json(head_dir / MADE_WITH)
    if missing := [key for key in MADE_WITH_KEYS if key not in made_with]:
        raise ValueError(f"{head_dir / MADE_WITH} lacks {', '.join(missing)}, which tie a head to its target; train the head again")
    return made_with


def open_head(head_dir: Path) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """The head in a head directory, its weights as they were saved (without the tables of its draft vocabulary), and made_with.json."""
    head, tensors = load_head(head_dir), read_tensors(head_dir / WEIGHTS)
    return head, {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}, read_made_with(head_dir)


def build(
    kind: str, fields: Mapping[str, Any], state: Mapping[str, Tensor], target_ids: Tensor, ours: Mapping[str, Any], where: Path
) -> Any:
    """A float32 head from what a folder holds. fields: of its config. state: its weights. target_ids: its draft vocabulary, rising.
    ours: the folder's `spectrain` block. ValueError for weights that do not fit, are not finite, or are of another draft vocabulary."""
    cls = head_class(kind)
    head = cls(validate(cls.Config, fields, where=f"{where}/{CONFIG}"))
    head.set_vocabulary(target_ids)
    try:
        head.load_state_dict({**{name: head.get_buffer(name) for name in ("d2t", "t2d")}, **state})
    except RuntimeError as error:
        raise ValueError(f"{where} does not hold the weights of this head ({error}); correct its config, or download it again") from error
    if bad := [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]:
        raise ValueError(f"{where} holds NaN or infinite values in {', '.join(bad)}; download the folder again")
    head.made_with = {key: value for key, value in ours.items() if key not in OURS}
    if head.made_with.get("vocabulary_sha256", found := vocabulary_hash(head.target_ids)) != found:
        raise ValueError(f"{where}: the draft vocabulary is not the one the head was trained with; export or download the head again")
    return head


def cast(tensors: dict[str, Tensor], dtype: str | None, head_dir: Path) -> tuple[dict[str, Tensor], str]:
    """Brings every weight to one dtype and refuses values that are not finite, before or after. Returns the dtype's name too."""
    names = {value: key for key, value in DTYPES.items()}
    weights = {name: tensor for name, tensor in tensors.items() if tensor.dtype not in (torch.int64, torch.bool)}
    found = {tensor.dtype for tensor in weights.values()}
    if not found <= names.keys() or (dtype is None and len(found) > 1):
        raise ValueError(
            f"{head_dir / WEIGHTS} holds weights in {', '.join(sorted(map(str, found)))}, needed one of {', '.join(DTYPES)}; "
            "save the head in one of them, or choose one with dtype= where they are mixed"
        )
    dtype = dtype or names[found.pop()]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    converted = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
    for name, tensor in weights.items():
        before, after = (int((~torch.isfinite(values)).sum()) for values in (tensor, converted[name]))
        if after:
            raise ValueError(
                f"{head_dir / WEIGHTS}: {name} holds {before} NaN or infinite values, {after} as {dtype}, needed none; "
                + ("export an earlier checkpoint" if before else "choose another dtype, such as bfloat16")
            )
    return {**tensors, **converted}, dtype


def check_destination(out: Path) -> Path:
    """The absolute path of a folder to write; ValueError where its replacement would delete anything but an earlier export."""
    out = Path(out).resolve()
    if not out.exists():
        return out
    if not out.is_dir():
        raise ValueError(f"{out} is a file, a folder was needed; choose another --out")
    names = {path.name for path in out.iterdir()}
    foreign = sorted(names - FILES)
    if names and (foreign or not _is_export(out)):
        raise ValueError(
            f"{out} holds {', '.join(foreign or sorted(names))}, needed an empty folder or an earlier export (which is replaced); "
            "choose another --out or move those files away"
        )
    return out


def _is_export(out: Path) -> bool:
    try:
        return "spectrain" in read_json(out / CONFIG)
    except (OSError, ValueError):
        return False


def write_folder(
    out: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, weights: str = WEIGHTS, pickled: Mapping[str, Any] | None = None
) -> None:
    """Writes the files (weights: name of the one with the tensors; pickled: what goes into further ones, by their names) to a new sibling
    of `out`, then gives it the name; an error leaves `out` as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.parent / f".{out.name}-{uuid.uuid4().hex}"
    new.mkdir()
    try:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, new / weights, metadata={"format": "pt"})
        for name, value in (pickled or {}).items():
            torch.save(value, new / name)
        shutil.copymode(new / CONFIG, new / weights)  # safetensors writes files that only their owner, so maybe not the server, can read
        swap(new, out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def swap(new: Path, out: Path) -> None:
    """Gives the folder `new` the name `out`, in place of an earlier one."""
    if not out.exists():
        new.rename(out)
        return
    old = new.with_name(f"{new.name}-old")
    out.rename(old)
    try:
        new.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)
