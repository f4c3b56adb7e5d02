"""A process that has died, is stopped or hangs: the others end with code 1 and say which, instead of waiting for ever."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("watched.py")
GO_ON = "The same command goes on from the last checkpoint"


@contextmanager
def two_processes(fault: str, who: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes as launchers start them, but with nobody who ends one when the other ends; process 0 holds the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), fault, str(who)], env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=pipe, stderr=pipe, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


CASES = {  # what happens, to which process; what the other says, with its exit code
    "stopped": ("stopped", 1, r"process 1 of 2 .host .*, pid {pid}. has not been heard of for [67] s, last at step 20: loading, in "
                r"watched.py:\d+ main; it is stopped .kill -CONT {pid}.; process 0 is at step 20: passes", 1),
    "store stopped": ("stopped", 0, r"the store of the processes' launcher, on the machine of process 0, has not answered for [67] s", 1),
    "hangs": ("hangs", 1, r"no process has moved on for \d+ s: process 1 of 2 .* stands still at step 20: loading, in watched.py:\d+ "
              r"happen; the others wait at step 20: passes", 1),
    "killed": ("killed", 1, r"process 1 of 2 .*pid {pid}. has ended .killed, or by an error of its own, .*; it was last at step 20: lo", 1),
    "store killed": ("killed", 0, r"process 0 of 2 .*pid {pid}. has ended", 1),
    "fails": ("fails", 1, r"process 1 of 2 .*pid {pid}. ended at step 20: loading by an error: ValueError: row 7 is missing", 1),
    "interrupted": ("interrupted", 1, "stopped by another process", 130),
}  # fmt: skip


@pytest.mark.parametrize("case", ["stopped", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "stopped")])
def test_other_process_waits_for_ever(case: str) -> None:
    fault, who, words, code = CASES[case]
    with two_processes(fault, who) as started:
        _, said = started[1 - who].communicate(timeout=100)
        assert started[1 - who].returncode == code, said
    assert re.search(words.replace("{pid}", str(started[who].pid)), said) and (GO_ON in said) == (code == 1), said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "who", "code"), [("late", 1, 0), ("interrupted", -1, 130)])
def test_alarm_is_false(fault: str, who: int, code: int) -> None:
    """One prepares for long, the other loads a batch for half of the patience; or Ctrl-C on both."""
    with two_processes(fault, who) as started:
        said = [process.communicate(timeout=100) for process in started]
        assert [process.returncode for process in started] == [code] * 2, said
    assert [err for _, err in said] == ["", ""] and [out for out, _ in said] == ["done\n" if code == 0 else ""] * 2
