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
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor

from spectrain.config import validate
from spectrain.export.layout import CONFIG, TABLES, WEIGHTS, check_weights, read_json, unsound
from spectrain.heads.base import check_vocabulary, head_class, load_head, vocabulary_hash

MADE_WITH = "made_with.json"
FORMAT = 1  # of the head directory read and of the `spectrain` block written
MADE_WITH_KEYS = ("target", "target_revision", "tokenizer_sha256", "template_sha256", "vocabulary_sha256", "versions")
MEDUSA_WEIGHTS, MEDUSA_PICKLED, HYDRA_PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt"
TOKEN_MAP = "token_map.pt"  # target ids of a draft vocabulary, a list, as SGLang reads it
PROJECTION_FILE = "embed_proj.spectrain"  # safetensors, under a name that engines pass over: they refuse tensors that they do not know
OURS = {  # of the `spectrain` block, beside made_with.json
    "format", "head", "hs_layer_ids", "target_layers", "embedding", "shared_output", "fc_bias", "note",
}  # fmt: skip
FILES = {CONFIG, WEIGHTS, MEDUSA_WEIGHTS, MEDUSA_PICKLED, HYDRA_PICKLED, TOKEN_MAP, PROJECTION_FILE}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_files(head_dir: Path) -> None:
    """ValueError unless a folder has the files of a head directory."""
    if missing := [name for name in (CONFIG, WEIGHTS, MADE_WITH) if not (head_dir / name).is_file()]:
        raise ValueError(
            f"{head_dir} lacks {', '.join(missing)}; a head directory with {CONFIG}, {WEIGHTS} and {MADE_WITH} was needed: give the "
            "folder of a finished training"
        )


def read_made_with(head_dir: Path) -> dict[str, Any]:
    """made_with.json; ValueError for one that does not tie the head to its target."""
    made_with = read_json(head_dir / MADE_WITH)
    if missing := [key for key in MADE_WITH_KEYS if key not in made_with]:
        raise ValueError(f"{head_dir / MADE_WITH} lacks {', '.join(missing)}, which tie a head to its target; train the head again")
    return made_with


def open_head(head_dir: Path) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """The head in a head directory, its weights as they were saved (without the tables of its draft vocabulary), and made_with.json."""
    head = load_head(head_dir, mapped=True)
    tensors = {name: tensor.detach() for name, tensor in head.state_dict().items() if name not in TABLES}
    return head, tensors, read_made_with(head_dir)


def hold(kind: str, fields: Mapping[str, Any], state: Mapping[str, Tensor], where: Path) -> Any:
    """A float32 head of a config's fields that takes the given tensors (tables of the draft vocabulary among them) as its own: those in
    float32 are not copied. ValueError for tensors that do not fit, are not finite, or leave the draft vocabulary open."""
    cls = head_class(kind)
    config = validate(cls.Config, fields, where=f"{where}/{CONFIG}")
    check_weights(state, where)
    with init_empty_weights(include_buffers=False):
        head = cls(config)
    own: dict[str, Tensor] = {}
    taken = set[int]()
    for name, tensor in state.items():
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        own[name] = tensor.clone() if tensor.data_ptr() in taken else tensor.contiguous()  # a pickle may hold one tensor under two names
        taken.add(own[name].data_ptr())
    try:
        head.load_state_dict(own, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{where} does not hold the weights of this head ({error}); correct its config, or download it again") from error
    check_vocabulary(head)
    return head


def build(
    kind: str, fields: Mapping[str, Any], state: Mapping[str, Tensor], target_ids: Tensor, config: Mapping[str, Any], where: Path
) -> Any:
    """`hold` for a head whose folder has no tables. state: its weights. target_ids: its draft vocabulary, rising. config: the folder's,
    whose `spectrain` block says how the head was made. ValueError beside that of `hold` for another draft vocabulary than the trained."""
    sound = 0 <= int(target_ids[0]) and int(target_ids[-1]) < fields["vocab_size"] and bool((target_ids.diff() > 0).all())
    if not sound:
        raise ValueError(f"{where} drafts ids that repeat, or are none of the {fields['vocab_size']} of the target; load its target")
    t2d_V = torch.zeros(fields["vocab_size"], dtype=torch.bool).index_fill_(0, target_ids, True)
    head = hold(kind, fields, {**state, "d2t": target_ids - torch.arange(len(target_ids)), "t2d": t2d_V}, where)
    head.made_with = {key: value for key, value in (config.get("spectrain") or {}).items() if key not in OURS}
    check_trained(head.made_with, head.target_ids, where)
    return head


def check_trained(made_with: Mapping[str, Any], target_ids: Tensor, where: Path) -> None:
    """ValueError for a draft vocabulary that is not the one of the training."""
    if made_with.get("vocabulary_sha256", found := vocabulary_hash(target_ids)) != found:
        raise ValueError(f"{where}: the draft vocabulary is not the one the head was trained with; export or download the head again")


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
        before, after = (unsound(values) for values in (tensor, converted[name]))
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
    out: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, weights: str | None = WEIGHTS,
    pickled: Mapping[str, Any] | None = None, beside: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:  # fmt: skip
    """Writes the files to a new sibling of `out`, then gives it the name; an error leaves `out` as it was. weights: name of the file with
    the tensors (None: there is none). pickled, beside: what goes into further files, by their names; beside as safetensors."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.parent / f".{out.name}-{uuid.uuid4().hex}"
    new.mkdir()
    try:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, some in {**({weights: tensors} if weights else {}), **(beside or {})}.items():
            save_file(some, new / name, metadata={"format": "pt"})
            shutil.copymode(new / CONFIG, new / name)  # safetensors writes files that only their owner, so maybe not the server, can read
        for name, value in (pickled or {}).items():
            torch.save(value, new / name)
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
