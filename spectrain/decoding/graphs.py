"""Passes of fixed shapes recorded once and replayed: on a CUDA device as graphs, which cost one launch instead of thousands.

A recorded pass reads and writes the same memory at every replay. It must be a function of tensors alone: whatever else it reads (sizes,
weights, caches) has to be the same at every call of its name. Decoding has two kinds: verification, and each step of a head's draft.

The recorder is an argument. That of CUDA (`cuda_graphs`) needs a device; the tests have one that keeps the operators of a pass on a CPU.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from spectrain.target.model import Target

Pass = Callable[..., tuple[Tensor, ...]]
Recorded = tuple[tuple[Tensor, ...], Callable[[], None]]  # where the results are, and what makes them anew
Recorder = Callable[[Callable[[], tuple[Tensor, ...]]], Recorded]
USES = 4  # of a pass before it is recorded: recording costs a few passes
log = logging.getLogger(__name__)


@dataclass
class _Recording:
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


@dataclass
class Graphs:
    """Recorded passes of one generation, by name, key and shapes. One that cannot be recorded ends recording, with a line in the log.

    open: makes a recorder. uses: of a pass before it is recorded. failed: whether one could not be recorded.
    """

    open: Callable[[], Recorder]
    uses: int = USES
    _record: Recorder | None = field(default=None, init=False)
    _seen: dict[Hashable, int] = field(default_factory=dict, init=False)
    _recordings: dict[Hashable, _Recording] = field(default_factory=dict, init=False)
    failed: bool = field(default=False, init=False)

    def call(self, name: str, key: Hashable, function: Pass, *inputs: Tensor) -> tuple[Tensor, ...]:
        """function(*inputs). What it returns is good until the next call, of whatever name: all recordings share their memory.

        key: what the function depends on beside its inputs' values and shapes.
        """
        key = name, key, tuple((t.shape, t.dtype) for t in inputs)
        found = self._recordings.get(key)
        if found is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            found = self._recorded(name, function, inputs) if self._seen[key] > self.uses and not self.failed else None
            if found is None:
                return function(*inputs)
            self._recordings[key] = found
        for mine, given in zip(found.inputs, inputs, strict=True):
            mine.copy_(given)
        found.replay()
        return found.outputs

    def _recorded(self, name: str, function: Pass, inputs: tuple[Tensor, ...]) -> _Recording | None:
        mine = [t.clone() for t in inputs]
        try:
            self._record = self._record or self.open()
            return _Recording(mine, *self._record(lambda: function(*mine)))
        except Exception as error:  # models do anything in a pass, and CUDA says so in many ways
            log.warning("no graph of %s (%s); going on without graphs", name, " ".join(str(error).split("\n")[:2]).strip())
            self.failed = True
            return None

    def forget(self) -> None:
        """Drop every recording: what they read was moved. Memory of graphs that are all gone takes no new ones, hence another recorder."""
        self._seen.clear()
        self._recordings.clear()
        self._record = None


def cuda_graphs(device: torch.device) -> Recorder:
    """Records CUDA graphs, all in one pool of memory and on one stream."""
    with torch.cuda.device(device):
        pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.device(device):
            graph.replay()

    def record(function: Callable[[], tuple[Tensor, ...]]) -> Recorded:
        with torch.cuda.device(device):
            main, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                function()  # what a library sets up at its first call must not be recorded
            main.wait_stream(side)
            with torch.cuda.stream(main), torch.cuda.graph(graph, pool=pool, stream=side):  # a capture that fails leaves its own stream on
                outputs = function()
        return outputs, partial(replay, graph)

    return record


def graphs_for(target: Target, compile: bool | Literal["auto"], *, processors: bool) -> Graphs | None:
    """A recorder for one generation, None where there is nothing to record; where that is on a CUDA device, the log says why.

    processors: whether outside functions look at the logits, which the host then reads in every round.
    """
    if target.device.type != "cuda" or compile is False:
        return None
    reasons = {
        f"{target.name} is spread out (placement {target.placement.kind})": target.placement.sharded,
        f"its weights are in {target.quantization}": target.quantization is not None,
        "its attention takes masks; load it with attention='triton'": not target.packs,
        "penalties, bans or logits processors read every round": processors,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is None:
        return Graphs(partial(cuda_graphs, target.device))
    log.info("no CUDA graphs: %s", why)
    return None
