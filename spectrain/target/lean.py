"""Lean passes on a CPU: the stock model with other products and compiled layers. The stock model is the slow twin.

Decoding is one pass over 1 to about 100 positions at a time and should cost what reading the weights costs. Two things stand in the
way. BLAS reads a plain float32 matrix at half of the memory's speed for one row, and for more rows copies it into its own order at every
call; a matrix that is kept in the order of oneDNN costs neither. And a model of 30 layers calls a thousand small operations; layers that
are compiled call fewer.

Both work on a copy of the modules that shares the parameters: the target or head itself stays as it was loaded. What is packed is a
second copy of the weights, made anew when a weight has changed (`kept`).

Legend: B rows, N nodes, H width, G key heads, S slots, D head size.
"""

import copy
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.target.cache import SlabCache

ROWS = 64  # of the products that the packed order is made for; it serves all others as well (docs/lab_log.md)
CHUNK = 10  # most layers compiled as one: with more of them a pass gains little and compilation takes longer (docs/lab_log.md)


def packable() -> bool:
    """Whether torch has oneDNN's products of packed float32 weights here."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedLinear(nn.Module):
    """A linear layer with a second copy of its weight in the order that oneDNN reads; memory is twice the layer's. Without gradients."""

    packed: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.register_buffer("packed", packed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product [..., outputs] of x [..., inputs]."""
        product = torch.ops.spectrain.packed_linear if torch.compiler.is_compiling() else _product
        return product(x, self.packed, self.bias)  # type: ignore[no-any-return]


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


# The compiler takes packed weights for constants of its own; an operator that it does not know it calls as it is.
torch.library.define("spectrain::packed_linear", "(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
torch.library.impl("spectrain::packed_linear", "CompositeExplicitAutograd", _product)


@torch.library.register_fake("spectrain::packed_linear")
def _size(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def shared_copy(module: nn.Module) -> Any:
    """A copy of the modules that shares every parameter and buffer."""
    return copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})


def packed(model: nn.Module) -> Any:
    """A copy of the model with packed products."""
    out = shared_copy(model)
    for parent in list(out.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return out


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


def kept(module: nn.Module, copies: dict[str, Any]) -> Any:
    """The packed copy of a module; `copies` keeps it, and all else in there, until a weight or a module is another."""
    modules = tuple(id(m) for m in module.modules())
    state = modules, tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in module.parameters())
    if copies.get("state") != state:  # weights were trained, merged, loaded anew, or modules were exchanged
        copies.clear()
        copies |= {"state": state, "packed": packed(module)}
    return copies["packed"]


def compiled(model: nn.Module, layers: nn.ModuleList, kinds: Sequence[str], cache_keyword: str) -> tuple[Any, "Marks"]:
    """A copy of the model whose decoder layers run as compiled chunks of one kind each; and what marks its sizes as changing.

    All chunks of one form share one compiled function, so that 30 layers cost the compilation of a few.
    """
    out, marks = shared_copy(model), Marks()
    own = next(m for m, original in zip(out.modules(), model.modules(), strict=True) if original is layers)
    regions: dict[tuple[str, int], Any] = {}
    members = list(own)
    for first, size in chunks(kinds):
        for local, layer in enumerate(members[first : first + size]):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = local  # equal in every chunk, else each would be compiled anew
        form = (kinds[first], size)
        regions[form] = regions.get(form) or _compiled_region()
        chunk = _Chunk(regions[form], members[first : first + size], first, cache_keyword, marks)
        for local in range(size):
            own[first + local] = _Member(chunk, local)
    return out, marks


def _compiled_region() -> Any:
    """`_region` compiled, for the chunks of one form of one model.

    Guards on modules are off, since checking hundreds of them costs more than compiling wins; nothing may then share the function but
    chunks that differ in their tensors alone. The compiler keeps what it made by code object, hence a code object for each.
    """
    own = types.FunctionType(_region.__code__.replace(), _region.__globals__)
    return torch.compile(own, fullgraph=True, options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe})


class Marks:
    """Tells the compiler, during a first pass, which sizes will change: positions and slots always, rows where there are several."""

    def __init__(self) -> None:
        self.on = False

    def mark(self, t: Any, *dims: int) -> None:
        for dim in dims:
            if self.on and isinstance(t, Tensor) and dim < t.dim() and t.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(t, dim)


def chunks(kinds: Sequence[str], most: int = CHUNK) -> list[tuple[int, int]]:
    """(first layer, number of layers) of chunks of one kind, as large as `most` allows and of equal size within a run of one kind."""
    found: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[start]:
            run = i - start
            size = max(s for s in range(1, min(most, run) + 1) if run % s == 0)
            found += [(first, size) for first in range(start, i, size)]
            start = i
    return found


class _Slabs:
    """Keys and values of a chunk's layers as the compiled function sees them."""

    is_compileable = True

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], slots_BN: Tensor, end: int) -> None:
        self._keys, self._values, self._slots_BN, self._end = keys, values, slots_BN, end

    def update(self, k_BGND: Tensor, v_BGND: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        row_B1 = torch.arange(len(keys), device=keys.device)[:, None]
        keys[row_B1, :, self._slots_BN] = k_BGND.transpose(1, 2)
        values[row_B1, :, self._slots_BN] = v_BGND.transpose(1, 2)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._end


def _region(
    layers: Sequence[nn.Module], hidden_BNH: Tensor, mask_B1NS: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor],
    slots_BN: Tensor, cache_keyword: str, kwargs: dict[str, Any],
) -> list[Tensor]:  # fmt: skip
    """A chunk's layers one after the other; returns the output [B, N, H] of each."""
    cache = _Slabs(keys, values, slots_BN, mask_B1NS.shape[-1])
    out = []
    for layer in layers:
        result = layer(hidden_BNH, attention_mask=mask_B1NS, **{cache_keyword: cache}, **kwargs)
        hidden_BNH = result[0] if isinstance(result, tuple) else result
        out.append(hidden_BNH)
    return out


class _Chunk:
    def __init__(self, region: Any, layers: list[nn.Module], first: int, cache_keyword: str, marks: Marks) -> None:
        self._region, self._layers, self._first, self._cache_keyword, self._marks = region, layers, first, cache_keyword, marks
        self.outputs: list[Tensor] = []

    def run(self, hidden_BNH: Tensor, kwargs: dict[str, Any]) -> None:
        self.outputs = []  # an earlier pass may have failed half-way
        cache: SlabCache = kwargs.pop(self._cache_keyword)
        mask = kwargs.pop("attention_mask")
        part = slice(self._first, self._first + len(self._layers))
        keys, values = (side[part] for side in cache.separate())
        if self._marks.on:
            for t in (hidden_BNH, cache.slots_BN, kwargs.get("position_ids"), *(kwargs.get("position_embeddings") or ())):
                self._marks.mark(t, 0, 1)
            for t in (*keys, *values):
                self._marks.mark(t, 0, 2)
            self._marks.mark(mask, 0, 2, 3)
        self.outputs = self._region(self._layers, hidden_BNH, mask, keys, values, cache.slots_BN, self._cache_keyword, kwargs)


class _Member(nn.Module):
    """Stands where a layer stood: the first of a chunk runs it, every one hands out its layer's output (hooks see it as ever)."""

    def __init__(self, chunk: _Chunk, local: int) -> None:
        super().__init__()
        self._chunk, self._local = chunk, local

    def __getattr__(self, name: str) -> Any:  # models read such fields as the layer's kind
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._chunk._layers[self._local], name)

    def forward(self, hidden_BNH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:
            raise RuntimeError("its layers take more than the hidden states by position")
        if self._local == 0:
            self._chunk.run(hidden_BNH, kwargs)
        out = self._chunk.outputs[self._local]
        if self._local + 1 == len(self._chunk.outputs):
            self._chunk.outputs = []
        return out
