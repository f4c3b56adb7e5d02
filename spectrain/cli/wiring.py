"""What the public API adds to the stages: heads turned into drafters, checks before long work."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generate import Result
from spectrain.decoding.generate import generate as run
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.hybrid import Hybrid
from spectrain.evaluation.speed import measure_costs as measure
from spectrain.heads.base import check_head
from spectrain.heads.base import load_head as read_head
from spectrain.target.model import Target
from spectrain.yields import Costs


def as_drafter(drafter: Any) -> Drafter:
    """A drafter as it is; a draft head wrapped as one."""
    if hasattr(drafter, "extend"):
        return HeadDrafter(drafter)
    found: Drafter = drafter
    return found


def dtype_beside(target: Target) -> torch.dtype:
    """The precision of a head that drafts for this target: float32, but bfloat16 for a target in 16 bits on a GPU, where a draft costs
    the bytes that it reads."""
    return torch.bfloat16 if target.device.type == "cuda" and target.model.dtype.itemsize == 2 else torch.float32


def load_head(where: str | Path, target: Target | None = None, revision: str | None = None) -> Any:
    """A draft head from a head directory or a Hub repository ("user/repo"), on the target's device (`dtype_beside`: its precision).

    revision: of the repository, a branch, tag or commit; `head.made_with["hub"]` says which commit was read. Only weights and settings are
    fetched. ValueError for what is neither a folder nor a repository, and, with a target, when the head was trained for another one
    (generate and evaluate check it again).
    """
    folder, commit = Path(where), None
    if not folder.exists() and str(where).count("/") == 1 and not str(where).startswith((".", "~")):
        from spectrain.export.hub import fetch_head

        try:
            folder, commit = fetch_head(str(where), revision)
        except ValueError as error:
            raise ValueError(f"there is no folder {where}, and from the Hub: {error}") from error
    elif revision is not None and folder.exists():
        raise ValueError(f"{where} is a folder here, which has no revision {revision!r}; leave revision out")
    head = read_head(folder, device=str(target.device), dtype=dtype_beside(target)) if target else read_head(folder)
    if commit is not None:
        head.made_with = {**head.made_with, "hub": f"{where}@{commit}"}
    if target is not None:
        check_head(head, target.fingerprints, target.name, target.tokenizer)
    return head


def hybrid(a: Any, b: Any, **settings: Any) -> Hybrid:
    """`Hybrid` of two drafters, each of which may be a draft head."""
    return Hybrid(as_drafter(a), as_drafter(b), **settings)


def measure_costs(target: Target, drafter: Any, **settings: Any) -> Costs:
    """`spectrain.evaluation.speed.measure_costs`, with a draft head accepted as the drafter."""
    return measure(target, as_drafter(drafter), **settings)


@functools.wraps(run)
def generate(target: Target, prompts: Sequence[Any], *, drafter: Any = None, **settings: Any) -> Result:
    """`spectrain.decoding.generate.generate`, with a draft head accepted as the drafter; see there for every argument."""
    return run(target, prompts, drafter=None if drafter is None else as_drafter(drafter), **settings)
