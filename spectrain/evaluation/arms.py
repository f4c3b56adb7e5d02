"""Which ways to decode are compared: drafters by shapes by temperatures, each beside plain decoding, and what their answers depend on."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spectrain.config import EvaluationConfig
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.shapes import Chain, Shape, StaticTree, Tree
from spectrain.evaluation.measure import PLAIN, Arm

AUTO = "auto"
FORMS = "auto, chain:DEPTH, tree:TOP_KxDEPTHxBUDGET or tree:FILE.json"


@dataclass(frozen=True)
class Named:
    """A drafter under the name that its arms have. label: its kind; identity: of all that its drafts depend on; head: the one behind it.

    lookup: it copies one continuation of earlier text, so of a tree it would read depth and budget alone.
    """

    name: str
    drafter: Drafter
    label: str
    identity: str
    head: Any = None
    lookup: bool = False


@dataclass(frozen=True)
class Written:
    """The tree of a file under the name of the file."""

    name: str
    shape: StaticTree


def parse_form(form: str) -> Shape:
    """The shape of chain:4 or tree:10x6x48 (top_k, depth, budget); ValueError with the forms that there are."""
    if found := re.fullmatch(r"chain:([1-9]\d*)", form):
        return Chain(int(found[1]))
    if found := re.fullmatch(r"tree:([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", form):
        return Tree.dynamic(*map(int, found.groups()))
    raise ValueError(f"shape {form!r} is unknown; needed {FORMS}, such as --shapes chain:4,tree:10x6x48")


def form_of(shape: Shape) -> str:
    """The shape as `--shapes` has it."""
    return f"chain:{shape.depth}" if isinstance(shape, Chain) else f"tree:{shape.width}x{shape.depth}x{shape.budget}"


def arms_of(drafters: Sequence[Named], config: EvaluationConfig, written: Written | None = None) -> list[Arm]:
    """Plain decoding, then every drafter in each of its shapes; all of it at each temperature.

    Where several temperatures are measured, names end in theirs above 0. ValueError for a shape that a drafter cannot have.
    """
    found = []
    for temperature in config.temperatures:
        tail = f" T={temperature:g}" if len(config.temperatures) > 1 and temperature else ""
        plain = PLAIN + tail
        found.append(Arm(plain, temperature=temperature, plain=plain))
        for d in drafters:
            for form, shape in _shapes_of(d, config, written).items():
                found.append(Arm(f"{d.name} {form}{tail}", d.drafter, shape, d.label, temperature, plain, d.name))
    return found


def chain_arm(arm: Arm, depth: int) -> Arm:
    """The same drafter at the same temperature with a chain of another depth."""
    assert isinstance(arm.shape, Chain)
    return replace(arm, name=arm.name.replace(form_of(arm.shape), f"chain:{depth}"), shape=Chain(depth))


def _shapes_of(drafter: Named, config: EvaluationConfig, written: Written | None) -> dict[str, Shape]:
    """Shapes by form, each once."""
    found: list[Shape] = []
    for form in config.forms:
        found += _auto(drafter, config) if form == AUTO else [_fitting(drafter, parse_form(form))]
    if drafter.lookup:
        chains = [shape for shape in found if isinstance(shape, Chain)]
        found = list(chains or [Chain(min(shape.depth, shape.budget)) for shape in found])
    shapes = {form_of(shape): shape for shape in found}
    if written is not None and drafter.head is not None:
        shapes[f"tree:{written.name}"] = _fitting(drafter, written.shape)
    return shapes


def _auto(drafter: Named, config: EvaluationConfig) -> list[Shape]:
    s = config.shapes.within(getattr(drafter.drafter, "max_depth", None))
    tree = Tree.dynamic(top_k=s.tree_top_k, depth=s.tree_depth, budget=s.tree_budget)
    if drafter.lookup:
        return [Chain(s.ngram)]
    return [Chain(s.chain if drafter.drafter.has_q else s.ngram), tree]


def _fitting(drafter: Named, shape: Shape) -> Shape:
    most = getattr(drafter.drafter, "max_depth", None)
    if most is not None and shape.depth > most:
        asked = form_of(shape)
        raise ValueError(f"{asked} is {shape.depth} tokens deep, and {drafter.name} drafts at most {most}; ask for shapes of depth {most}")
    return shape


def keys_of(arms: Sequence[Arm], drafters: Sequence[Named], base: Sequence[Any], speed: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """The key of each arm's records by arm and mode: a hash of all that its answers depend on.

    base: what all answers depend on. speed: what the timed ones depend on, too, and so does an arm's time on which others of its
    temperature are timed in turns with it, so that adding an arm keeps the answers that tau is counted on and times all of them anew.
    """
    identity = {d.name: d.identity for d in drafters}
    own = {arm.name: [arm.by, identity.get(arm.by, ""), repr(arm.shape), arm.temperature] for arm in arms}
    keys = {(name, "tau"): _hash(base, "tau", of) for name, of in own.items()}
    for arm in arms:
        together = [own[other.name] for other in arms if other.temperature == arm.temperature]
        keys[arm.name, "speed"] = _hash(base, speed, together, own[arm.name])
    return keys


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
