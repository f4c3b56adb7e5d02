"""`--drafters none,ngram,suffix,head:runs/eagle3,model:FOLDER`: what each of them names, opened for a target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.cli.stages import open_head
from spectrain.cli.trees import weights_of
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram
from spectrain.drafters.small_model import SmallModel
from spectrain.drafters.suffix import Suffix
from spectrain.evaluation.arms import Named
from spectrain.heads.base import ADAPTER
from spectrain.target.model import Target, load_target

KINDS = "none, ngram, suffix, head:FOLDER or model:FOLDER"


def parse_drafters(texts: Sequence[str]) -> list[tuple[str, str]]:
    """(kind, place) of each, plain decoding left out, which is always measured. ValueError for what is none, or there twice."""
    found = []
    for text in texts:
        kind, _, place = text.partition(":")
        if (kind not in ("none", "ngram", "suffix") or place) and not (kind in ("head", "model") and place):
            raise ValueError(f"drafter {text!r} is unknown; needed {KINDS}, such as --drafters ngram,head:runs/eagle3/head")
        found.append((kind, str(Path(place)) if kind == "head" else place))
    if twice := [text for text, drafter in zip(texts, found, strict=True) if found.count(drafter) > 1]:
        raise ValueError(f"drafter {twice[-1]!r} is there twice; name each once")
    return [(kind, place) for kind, place in found if kind != "none"]


def heads_of(drafters: Sequence[tuple[str, str]]) -> list[Path]:
    """Folders of the heads; ValueError where one of several was trained together with its target, which is then another one."""
    heads = [Path(place) for kind, place in drafters if kind == "head"]
    adapted = [head for head in heads if (head / ADAPTER).is_dir()]
    if adapted and len(heads) > 1:
        raise ValueError(f"{adapted[0]} was trained together with its target, which is another one for other heads; evaluate it alone")
    return heads


def open_drafters(drafters: Sequence[tuple[str, str]], target: Target) -> list[Named]:
    """The drafters for a target, each under a name of its own: `head` and `model`, or of several the ends of their paths that differ."""
    named = {kind: _names([place for k, place in drafters if k == kind], kind) for kind in ("head", "model")}
    found = [_opened(kind, place, named.get(kind, {}).get(place, kind), target) for kind, place in drafters]
    names = [d.name for d in found]
    if alike := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two drafters would both be called {alike[0]} in the report; rename the folder of one")
    return found


def free_drafters() -> list[Named]:
    """What needs no training: n-gram lookup."""
    return [Named("ngram", NGram(), "n-gram", repr(NGram()), lookup=True)]


def named_head(head: Any, name: str = "head") -> Named:
    """An opened head."""
    return Named(name, HeadDrafter(head), type(head).__name__, weights_of(head), head)


def _opened(kind: str, place: str, name: str, target: Target) -> Named:
    if kind == "head":
        return named_head(open_head(Path(place), target), name)
    if kind == "ngram":
        return free_drafters()[0]
    if kind == "suffix":
        return Named("suffix", Suffix(), "suffix", "suffix, its own text")
    small = load_target(place, dtype=str(target.model.dtype).removeprefix("torch."), device=str(target.device))
    return Named(name, SmallModel(small), "model", small.fingerprints["layers_sha256"])


def _names(places: Sequence[str], kind: str) -> dict[str, str]:
    if len(places) == 1:
        return {places[0]: kind}
    parts = {place: Path(place).parts for place in places}
    for length in range(1, 1 + max(map(len, parts.values()), default=0)):
        ends = {place: "/".join(part[-length:]) for place, part in parts.items()}
        if len(set(ends.values())) == len(ends):
            return ends
    return {place: place for place in places}
