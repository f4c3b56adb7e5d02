"""What tests/training/test_checkpoint.py runs: a training that is killed at every moment of a save, and goes on each time.

Usage: killed.py FOLDER     (leaves FOLDER/<moment>/{checkpoints,weights.pt,found.json}; moment "none": never killed)

Each run is a fork of this process. Killed in the second save (step 4 of 6), before the given one of its calls: 0 within the writing of the
file, then fsync of the file, rename, fsync of the folder, the same three for `latest`, and the removal of the first checkpoint.
"""

import io
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spectrain.config import TrainingConfig

BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
CONFIG = TrainingConfig(epochs=9, steps=6, tokens_per_step=1, ttt_steps=2, lr=5e-3, checkpoint_steps=2, ema=0.9, optimizer="muon")
MOMENTS = range(8)
SAVE = 2


def die_at(moment: int) -> None:
    """From now on the process kills itself before call number `moment` of its second save."""
    calls, saves = iter(range(10**6)), iter(range(1, 10**6))
    at = {"save": 0}

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if at["save"] == SAVE and next(calls) == moment - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    write = torch.save

    def save(content: Any, file: Any) -> None:
        at["save"] = next(saves)
        if at["save"] == SAVE and moment == 0:
            whole = io.BytesIO()
            write(content, whole)
            file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(content, file)

    torch.save, os.fsync, os.replace = save, killing(os.fsync), killing(os.replace)  # type: ignore[assignment]
    Path.unlink = killing(Path.unlink)  # type: ignore[method-assign]


def train(target: Any, samples: Any, folder: Path, moment: int | None) -> int:
    """Train in a fork; its exit status as of `os.waitpid`."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        head = BY_HAND["fresh"](target, samples)
        if moment is not None:
            die_at(moment)
        BY_HAND["run"](head, samples, target, folder, CONFIG)
        torch.save(head.state_dict(), folder / "weights.pt")
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def main(out: Path) -> None:
    target = runpy.run_path(str(Path(__file__).with_name("two_processes.py")))["tiny_target"]()
    samples = BY_HAND["Samples"].of(target, BY_HAND["random_rows"](4))
    assert train(target, samples, out / "none", None) == 0
    for moment in MOMENTS:
        folder = out / str(moment)
        assert train(target, samples, folder, moment) == signal.SIGKILL, moment
        found = sorted(path.name for path in (folder / "checkpoints").iterdir())
        latest = (folder / "checkpoints/latest").read_text()
        (folder / "found.json").write_text(json.dumps({"files": found, "latest": latest}))
        assert train(target, samples, folder, None) == 0, moment


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
