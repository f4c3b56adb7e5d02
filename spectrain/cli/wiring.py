"""What the public API adds to the stages: heads turned into drafters, checks before long work."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spectrain.decoding.generate import Drafter, Result, Stream
from spectrain.decoding.generate import generate as run
from spectrain.decoding.shapes import Shape
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import check_head
from spectrain.heads.base import load_head as read_head
from spectrain.target.model import Target


def as_drafter(drafter: Any) -> Drafter:
    """A drafter as it is; a draft head wrapped as one."""
    if hasattr(drafter, "extend"):
        return HeadDrafter(drafter)
    found: Drafter = drafter
    return found


def load_head(where: str | Path, target: Target | None = None, revision: str | None = None) -> Any:
    """A draft head from a head directory or a Hub repository, on the target's device.

    With a target, ValueError when the head was trained for another one (generate and evaluate check it again).
    """
    folder = Path(where)
    if not folder.exists() and str(where).count("/") == 1 and not str(where).startswith((".", "~")):
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(where), revision=revision))
    head = read_head(folder, device=str(target.device) if target else "cpu")
    if target is not None:
        check_head(head, target.fingerprints, target.name)
    return head


def generate(
    target: Target, prompts: Sequence[Any], *, drafter: Any = None, shape: Shape | None = None, rule: str = "auto",
    temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, max_new_tokens: int = 256,
    stop: Sequence[str] = (), eos: str | int | Iterable[int] | None = "auto", ignore_eos: bool = False,
    seed: int | Sequence[int] = 0, stream: Stream | None = None,
) -> Result:  # fmt: skip
    """`spectrain.decoding.generate.generate`, with a draft head accepted as the drafter; see there for every argument."""
    return run(
        target, prompts, drafter=None if drafter is None else as_drafter(drafter), shape=shape, rule=rule, temperature=temperature,
        top_p=top_p, top_k=top_k, min_p=min_p, max_new_tokens=max_new_tokens, stop=stop, eos=eos, ignore_eos=ignore_eos, seed=seed,
        stream=stream,
    )  # fmt: skip
