"""Which copy of the target makes the passes of a generation: the stock model, one with packed products, or a compiled one.

The stock model (`eager`) is the slow twin of the others. Packed and compiled ones exist for plain float32 weights on a CPU. On a CUDA
device the stock model's passes are recorded as graphs (decoding/graphs.py), where its attention needs no mask.

Legend: B rows, N nodes.
"""

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from spectrain.target.cache import SlabCache
from spectrain.target.lean import Marks, compiled, kept, packable
from spectrain.target.model import Masks, Target

Mode = Literal["eager", "packed", "compiled", "graphs"]
PACKED_PASSES = 16  # about what packing the weights costs, in passes' gains
COMPILE_PASSES = 6000  # the same for compiling
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledTarget(Target):
    """A target whose decoder layers are compiled, once for one row and once for many, once for one node and once for many."""

    marks: Marks = dataclasses.field(default_factory=Marks)
    ready: set[tuple[bool, bool]] = dataclasses.field(default_factory=set)

    def masks(self, cache: SlabCache, line_BNM: Tensor) -> Masks:
        """As for any target, but never None: the compiled function reads the number of slots from the mask."""
        return self.by_kind(lambda window: cache.visible(line_BNM, window))

    @torch.inference_mode()
    def prepare(self, twin: Target, *, rows: bool, nodes: bool) -> None:
        """Compile for one or many rows and nodes; RuntimeError when the result is not the twin's."""
        if (rows, nodes) in self.ready:
            return
        B, N = 3 if rows else 1, 7 if nodes else 1
        context = max(1, min(19, self.max_length - N))  # sizes that are equal nowhere, so that none is taken for another
        ids_BL = torch.arange(context + N, device=self.device).expand(B, -1) % self.num_ids
        logits = []
        for target in (twin, self):
            cache = target.new_cache(B, 2 * context + N)
            positions = cache.stage(context)
            mask = twin.prompt_masks(cache, positions)
            twin.forward(ids_BL[:, :context], positions_BN=positions, mask=mask, cache=cache, logits_to_keep=1)
            cache.commit(torch.full((B,), context, device=self.device))
            positions = cache.stage(N)
            mask = target.masks(cache, torch.ones(N, N, dtype=torch.bool, device=self.device).tril().expand(B, N, N))
            self.marks.on = True
            try:
                logits.append(target.forward(ids_BL[:, context:], positions_BN=positions, mask=mask, cache=cache).logits_BKV)
            finally:
                self.marks.on = False
        error, size = float((logits[0] - logits[1]).abs().max()), float(logits[0].abs().max())
        if not error <= 1e-3 * max(1.0, size):
            raise RuntimeError(f"compiled logits differ by {error:.2g} from eager ones of size {size:.2g}")
        self.ready.add((rows, nodes))


def choose(target: Target, compile: bool | Literal["auto"], *, passes: int) -> Mode:
    """The mode for a generation of about `passes` passes; from call and machine alone, so that a call repeated is the same call.

    True: compiled; False: eager; "auto": compiled where the run is long enough to repay it, packed where it is longer than a few passes
    and memory holds the second copy of the weights. On CUDA both stand for graphs. ValueError for True where nothing can be compiled yet.
    """
    if not (isinstance(compile, bool) or compile == "auto"):
        raise ValueError(f"compile must be True, False or 'auto', found {compile!r}")
    other = target.quantization or (target.placement.sharded and f"placement {target.placement.kind}")
    if compile is True and other:
        raise ValueError(f"compile=True is for plain weights, those of {target.name} are in {other}; use compile='auto'")
    if compile is False or other:
        return "eager"
    if target.device.type == "cuda" and target.packs:
        return "graphs"
    dtype = str(target.model.dtype).removeprefix("torch.")
    if target.device.type != "cpu" or dtype != "float32":
        if compile is True:
            where = f"{target.name} is {dtype} on {target.device.type}"
            raise ValueError(f"compile=True is for float32 on a cpu, or attention='triton' on cuda; {where}; use compile='auto'")
        return "eager"
    if compile is True:
        return "compiled"
    if not (packable() and _roomy(target)):
        return "eager"
    return "compiled" if passes >= COMPILE_PASSES else "packed" if passes >= PACKED_PASSES else "eager"


def for_all(target: Target, compile: bool | Literal["auto"], *, passes: int) -> bool | Literal["auto"]:
    """One `compile` for many calls that make about `passes` passes together, so that all are made alike."""
    chosen: dict[Mode, bool | Literal["auto"]] = {"eager": False, "packed": "auto", "compiled": True, "graphs": "auto"}
    return chosen[choose(target, compile, passes=passes)]


def quick(target: Target) -> Target:
    """The target that is faster for many passes over whole rows: its packed copy, or itself where there can be none."""
    return _packed(target) if choose(target, "auto", passes=PACKED_PASSES) == "packed" else target


@dataclass(frozen=True)
class Passes:
    """Who makes a pass: `main` where it was compiled for (one or many rows, one or many nodes), `rest` elsewhere.

    Rows end one by one, and what is left is not worth another compilation.
    """

    mode: Mode
    main: Target
    rest: Target
    forms: frozenset[tuple[bool, bool]] = frozenset()

    def of(self, rows: int, nodes: int) -> Target:
        """The target for a pass over so many rows and nodes."""
        return self.main if (rows > 1, nodes > 1) in self.forms else self.rest


def passes_of(target: Target, mode: Mode, *, rows: int, nodes: int, strict: bool) -> Passes:
    """The passes of a generation with up to `rows` rows and trees of up to `nodes` nodes; copies are made once and kept.

    strict: a model that cannot be compiled is a ValueError, otherwise it is logged and the packed copy serves.
    """
    if mode in ("eager", "graphs"):
        return Passes(mode, target, target)
    twin = _packed(target)
    if mode == "packed":
        return Passes(mode, twin, twin)
    forms = frozenset((rows > 1, many) for many in {False, nodes > 1})
    try:
        return Passes(mode, _compiled(target, twin, forms), twin, forms)
    except Exception as error:  # a compiler, and models it was not made for, raise anything
        reason = " ".join(str(error).split("\n")[:2]).strip()
        if strict:
            raise ValueError(f"{target.name} cannot be compiled here ({reason}); use compile=False or compile='auto'") from error
        log.warning("%s cannot be compiled here (%s); going on without", target.name, reason)
        return Passes("packed", twin, twin)


def _packed(target: Target) -> Target:
    model = kept(target.model, target.copies)
    if "twin" not in target.copies:
        target.copies["twin"] = dataclasses.replace(target, model=model)
    return target.copies["twin"]  # type: ignore[no-any-return]


def _compiled(target: Target, twin: Target, forms: frozenset[tuple[bool, bool]]) -> Target:
    found = target.copies.get("compiled")
    if found is None:
        model, marks = compiled(twin.model, twin.layers, twin.kinds, twin.cache_keyword)
        found = CompiledTarget(model=model, tokenizer=target.tokenizer, name=target.name, revision=target.revision, marks=marks)
        target.copies["compiled"] = found
    assert isinstance(found, CompiledTarget)
    missing = sorted(forms - found.ready)
    for rows, nodes in tqdm(missing, desc="compile", unit="form", disable=None if missing else True):
        found.prepare(twin, rows=rows, nodes=nodes)
    return found


def _roomy(target: Target) -> bool:
    """Whether a second copy of the linear weights takes less than a quarter of the machine's memory."""
    weights = sum(m.weight.numel() for m in target.model.modules() if type(m) is torch.nn.Linear) * 4
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system tells
        return False
    return 4 * weights < memory
