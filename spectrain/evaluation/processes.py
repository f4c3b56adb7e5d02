"""The processes that measure together, as `accelerate launch` or torchrun started them; without a launcher there is one.

Work is shared out without padding, and what is put together again are counts and answers, never means: figures are those of one process.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spectrain.config import TrainingConfig
from spectrain.training.setup import LONGEST_WAIT
from spectrain.training.watch import Watch

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """`index` of `number`. splits: each answers its share of the prompts; else all make the same passes, as a sharded target wants it.

    device: of this process, None for the usual one. group: where they meet; of gloo, whose waiting takes no processor time (20 ms in 8 s).
    """

    index: int = 0
    number: int = 1
    splits: bool = True
    device: str | None = None
    group: Any = None

    @property
    def leads(self) -> bool:
        """Whether this is the main process, which times, writes and talks."""
        return self.index == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Of an ordered list every `number`-th item, so that shares are alike; all of it where nothing is split."""
        return items[self.index :: self.number] if self.splits else items

    def each(self, value: T) -> list[T]:
        """What the processes hand in, in their order; the same list for all."""
        if self.number == 1:
            return [value]
        found: list[Any] = [None] * self.number
        dist.all_gather_object(found, value, group=self.group)
        return found

    def gathered(self, items: Sequence[T]) -> list[T]:
        """The items that the processes made of their shares, as one list; where nothing is split, the main one's."""
        found = self.each(items)
        return [item for part in (found if self.splits else found[:1]) for item in part]

    def on_main(self, work: Callable[[], T]) -> T:
        """The main process works while the others wait: its result is everyone's. Where it fails, it tells why and the others end, too."""
        if self.number == 1:
            return work()
        if not self.leads:
            done, result = self._told(None)
            if not done:
                raise SystemExit(1)
            return result  # type: ignore[no-any-return]
        try:
            result = work()
        except Exception:
            self._told((False, None))
            raise
        return self._told((True, result))[1]  # type: ignore[no-any-return]

    def alike(self, work: Callable[[], T]) -> T:
        """Work that makes passes and cannot be shared: the main process alone, or all where nothing is split; the main one's result."""
        if self.splits:
            return self.on_main(work)
        result = work()
        return self.on_main(lambda: result)

    def _told(self, value: Any) -> Any:
        """The main process's value."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


ALONE = Processes()


@contextmanager
def open_processes(*, splits: bool) -> Iterator[Processes]:
    """The processes that a launcher started (which tells their number as WORLD_SIZE), or one; each knows whether the others live.

    A process group that is there already stays.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield ALONE
        return
    from accelerate import PartialState

    own = not dist.is_initialized()
    state: Any = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    try:
        with Watch(state, minutes=TrainingConfig().stall_minutes):
            group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
            yield Processes(state.process_index, state.num_processes, splits, str(state.device), group)
    finally:
        if own:
            state.destroy_process_group()
