"""What tests/training/test_watch.py runs in every process: steps with a sum over all processes, in which something happens to one of them.

Usage: watched.py FAULT WHO     (what happens to which process, -1: to each)
"""

import os
import signal
import sys
import time

import torch
from accelerate import Accelerator

from spectrain.training.watch import Watch

STEPS, AT, MINUTES = 40, 20, 0.1


def happen(fault: str, here: bool) -> None:
    """What happens at step AT; here: to this process."""
    if not here:
        if fault in ("fails", "interrupted"):
            time.sleep(1000)  # as in a collective that does not notice
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hangs":
        time.sleep(1000)
    elif fault == "late":
        time.sleep(60 * MINUTES * 0.5)
    elif fault == "fails":
        raise ValueError("row 7 is missing")
    elif fault == "interrupted":
        raise KeyboardInterrupt


def main(fault: str, who: int) -> None:
    accelerator = Accelerator(cpu=True)
    here = who in (accelerator.process_index, -1)
    with Watch(accelerator, minutes=MINUTES) as watch:
        watch.at("preparing", brisk=False)
        if fault == "late" and not here:
            time.sleep(60 * MINUTES * 1.5)  # long places may take any time
        accelerator.wait_for_everyone()
        for step in range(STEPS):
            watch.at(f"step {step}: loading")
            if step == AT:
                time.sleep(1)  # so that the last sign of life tells this place
                happen(fault, here)
            watch.at(f"step {step}: passes")
            accelerator.reduce(torch.ones(1), reduction="sum")
    accelerator.end_training()
    print("done")


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
