"""Several processes of a run: when one has died, is stopped or hangs, the others say so and end, instead of waiting for it for ever.

Each process writes some times a minute into the store of the process group that it lives, and where it is; a thread of each looks at what
the others wrote. Nothing here is a collective: the main thread may hang in one. Silence is counted in looks of one's own, so that a run
that was stopped as a whole and let go on is no alarm.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

MOST_SECONDS = 5.0  # between two looks; a twelfth of the patience where that is less
LOOKS = 10  # without a sign of life until a process counts as silent; the two that are left of twelve are for all to tell it
SURE = 2  # looks until a process that has ended is told: one that leaves in good order says so
MANY = 20  # times the longest stay at a brisk place so far, until a stay counts as a stall
FIRST = 16  # brisk places during which a stay may take MANY times the patience: first passes compile kernels
DONE, STOPPED = "done", "stopped"  # ways to leave; any other is the text of an error
GO_ON = "The same command goes on from the last checkpoint"


@dataclass(frozen=True)
class _Place:
    """Where a process is. number: how many places it has come to; since: when it came, by its own clock."""

    number: int
    text: str
    brisk: bool
    since: float


class Watch:
    """While open, every process of the run knows whether the others live, and ends with a message where one does not.

    One is opened around a whole run and handed on to what says where the process is. minutes: how long a process may be silent. With one
    process it does nothing. All open and leave it together; one that leaves with an error or by Ctrl-C takes the others along. Raises
    ValueError when a process does not come, and in place of an error of the communication when it was another process that ended.
    """

    def __init__(self, accelerator: Accelerator, *, minutes: float) -> None:
        self._accelerator, self._minutes = accelerator, minutes
        self._rank, self._world = accelerator.process_index, accelerator.num_processes
        self._interval = min(MOST_SECONDS, 60 * minutes / (LOOKS + 2))
        self._looks = round(60 * minutes / self._interval) - 2  # of patience
        self._place, self._longest, self._brisk = _Place(0, "the start", False, time.monotonic()), 0.0, 0
        self._left, self._over, self._stay = "", threading.Event(), 0
        self._others: list[_Other] = []
        self._rounds = self._lost = 0
        self._thread_id, process = threading.get_ident(), psutil.Process()
        self._me = {"host": socket.gethostname(), "pid": process.pid, "born": process.create_time()}

    def at(self, text: str, brisk: bool = True) -> None:
        """This process is at `text` from now on; all processes come to the same places in the same order.

        brisk: a stay much longer than any before is a stall. Others (preparing, measuring, saving) may take any time.
        """
        if self._world == 1:
            return
        now, before = time.monotonic(), self._place
        if before.brisk:
            self._longest, self._brisk = max(self._longest, now - before.since), self._brisk + 1
        self._place = _Place(before.number + 1, text, brisk, now)

    def __enter__(self) -> "Watch":
        if self._world == 1:
            return self
        self._open()
        self._talker = threading.Thread(target=self._talk, daemon=True)
        self._talker.start()
        threading.Thread(target=self._judge, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._world == 1:
            return
        try:
            self._end_together(error)
        except BaseException as found:
            error = found
            raise
        finally:
            self._left = DONE if error is None else STOPPED if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            self._over.set()
            # A thread within the store when Python ends would abort the process; a store whose process ends may take seconds to refuse.
            self._talker.join(60 * self._minutes)

    def _end_together(self, error: BaseException | None) -> None:
        """Wait for all at the end of a run; where that or the run itself failed in the communication, ValueError names who has ended.

        Where nobody is seen to have ended, silence may tell it: the other thread then ends this process meanwhile.
        """
        failed = error
        if error is None:
            self.at("the end")
            try:
                self._accelerator.wait_for_everyone()
            except RuntimeError as broken:
                failed = broken
        if failed is None or not _of_the_communication(failed):
            return
        self.at("an error of the communication", brisk=False)
        until = time.monotonic() + 60 * self._minutes + SURE * self._interval
        while time.monotonic() < until:
            for other in self._others:
                if told := other.ended():
                    raise ValueError(f"{told}. {GO_ON}") from failed
            time.sleep(0.05)  # connections of a process close before it has ended
        raise failed

    def _open(self) -> None:
        """A client of its own to the store, and the sign that this process is there."""
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = default.clone()
        number = (self._store.add("spectrain/watch", 1) - 1) // self._world  # a run may open several, one after the other
        self._keys = [f"spectrain/watch/{number}/{rank}" for rank in range(self._world)]
        self._store.set(self._keys[self._rank], self._sign(0))
        try:
            self._store.wait(self._keys, timedelta(minutes=max(1.0, self._minutes)))
        except RuntimeError as error:
            raise ValueError(f"not all of the {self._world} processes have come to the start of the run; look for their errors") from error
        signs = [json.loads(sign) for sign in self._store.multi_get(self._keys)]
        self._others = [_Other(rank, self._world, sign) for rank, sign in enumerate(signs) if rank != self._rank]

    def _sign(self, beat: int) -> str:
        place, line = self._place, "" if self._left else _line(self._thread_id)
        where = {"number": place.number, "place": place.text, "stalled": self._stalled(), "line": line}
        return json.dumps({"beat": beat, "left": self._left, **where, **self._me})

    def _stalled(self) -> bool:
        """Whether the stay at the place is far too long for it."""
        patience = self._looks * self._interval
        most = max(patience, MANY * self._longest) if self._brisk >= FIRST else MANY * patience
        return self._place.brisk and self._stay * self._interval > most

    def _talk(self) -> None:
        """Write this process's sign and read the others', until the watch is left; a store that fails is told by the judge."""
        beat, over = 0, False
        try:
            while not over:
                over = self._over.wait(self._interval)
                beat += 1
                self._store.set(self._keys[self._rank], self._sign(beat))
                signs = self._store.multi_get(self._keys)
                for other in self._others:
                    other.hear(json.loads(signs[other.rank]))
                self._rounds = beat
        except RuntimeError:
            return

    def _judge(self) -> None:
        """Count silences and stays; when it is clear that a process is gone, say so and end this one, whatever its main thread hangs in."""
        number, rounds = -1, 0
        while not self._over.wait(self._interval):
            self._stay, number = (self._stay + 1 if self._place.number == number else 0), self._place.number
            self._lost, rounds = (self._lost + 1 if self._rounds == rounds else 0), self._rounds
            if told := self._verdict():
                stopped = told == STOPPED
                message = "stopped by another process" if stopped else f"error: {told}. {GO_ON}"
                os.write(2, f"\n{message}\n".encode())  # the main thread may hang with the lock of sys.stderr
                if not stopped:
                    tell_launcher(message)
                if not self._over.wait(SURE * self._interval):  # so that the others find it, too, before a launcher ends them
                    os._exit(130 if stopped else 1)

    def _verdict(self) -> str:
        """What is wrong; "" for nothing."""
        if self._lost > self._looks:
            ended = next((told for other in self._others if (told := other.ended())), "")
            seconds = self._lost * self._interval
            return ended or (
                f"the store of the processes' launcher, on the machine of process 0, has not answered for {seconds:.0f} s: "
                f"it has ended or is stopped, or its machine is gone; {self._here()}"
            )
        faults = [text for other in self._others if (text := other.fault(self._looks, self._interval))]
        if STOPPED in faults:
            return STOPPED
        if faults:
            return f"{'; '.join(faults)}; {self._here()}"
        return self._standstill() if self._stalled() and all(other.sign["stalled"] for other in self._others) else ""

    def _standstill(self) -> str:
        """Nobody moves, and nobody is at a place that may take long: those that are furthest behind, and where."""
        mine = {"rank": self._rank, **json.loads(self._sign(0))}
        signs = sorted([mine, *({"rank": other.rank, **other.sign} for other in self._others)], key=lambda s: (s["number"], s["rank"]))
        behind = [sign for sign in signs if sign["number"] == signs[0]["number"]]
        ahead = [sign for sign in signs if sign["number"] > signs[0]["number"]]
        told = "; ".join(f"{_name(s['rank'], self._world, s)} stands still at {_where(s)}" for s in behind)
        waiting = f"; the others wait at {_where(ahead[0])}" if ahead else ""
        return f"no process has moved on for {self._stay * self._interval:.0f} s: {told}{waiting}"

    def _here(self) -> str:
        return f"process {self._rank} is at {self._place.text}"


def tell_launcher(message: str) -> None:
    """Let a launcher of torch's (torchrun, accelerate launch) show this in its own report, the last that is seen; else nothing is done."""
    try:
        raise ChildProcessError(message) from None
    except ChildProcessError as error:
        get_error_handler().record_exception(error)


class _Other:
    """What is known of another process."""

    def __init__(self, rank: int, world: int, sign: Mapping[str, Any]) -> None:
        self.rank, self._world, self.sign, self._silent, self._since_left = rank, world, sign, 0, 0
        self._process = _visible(sign)

    def hear(self, sign: Mapping[str, Any]) -> None:
        """A look at its sign."""
        self._silent = self._silent + 1 if sign["beat"] == self.sign["beat"] else 0
        self._since_left = self._since_left + 1 if sign["left"] else 0
        self.sign = sign

    def ended(self) -> str:
        """That its process on this machine is no more; "" while it is, and where this cannot be seen."""
        if self._process is None or (self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE):
            return ""
        return f"{self._named} has ended (killed, or by an error of its own, which it told); it was last at {_where(self.sign)}"

    def fault(self, looks: int, interval: float) -> str:
        """What is wrong with it after this many looks of patience; "" for nothing, "stopped" for a Ctrl-C there."""
        left = self.sign["left"]
        if left in (DONE, STOPPED):
            return left if left == STOPPED and self._since_left > looks else ""
        if left:
            return f"{self._named} ended at {self.sign['place']} by an error: {left}" if self._since_left > SURE else ""
        if self._silent > SURE and (told := self.ended()):
            return told
        if self._silent <= looks:
            return ""
        stopped = self._process is not None and self._process.status() == psutil.STATUS_STOPPED
        cause = f"it is stopped (kill -CONT {self.sign['pid']})" if stopped else "it is stopped or hangs, or its machine is gone"
        return f"{self._named} has not been heard of for {self._silent * interval:.0f} s, last at {_where(self.sign)}; {cause}"

    @property
    def _named(self) -> str:
        return _name(self.rank, self._world, self.sign)


def _name(rank: int, world: int, sign: Mapping[str, Any]) -> str:
    return f"process {rank} of {world} (host {sign['host']}, pid {sign['pid']})"


def _where(sign: Mapping[str, Any]) -> str:
    return f"{sign['place']}, in {sign['line']}" if sign["line"] else str(sign["place"])


def _line(thread_id: int) -> str:
    """The line of Python that a thread is in."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}" if frame else "no Python"


def _visible(sign: Mapping[str, Any]) -> psutil.Process | None:
    """The process of a sign, where it runs on this machine and is seen from here (containers may share a name)."""
    try:
        found = psutil.Process(sign["pid"])
        return found if sign["host"] == socket.gethostname() and found.create_time() == sign["born"] else None
    except psutil.Error:
        return None


def _of_the_communication(error: BaseException | None) -> bool:
    """Whether a collective failed, as it does when another process is gone; gloo's errors are plain ones."""
    if error is None:
        return False
    plain = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return isinstance(error, dist.DistError) or plain or _of_the_communication(error.__cause__)
