"""What tests/cli/test_evaluate_processes.py runs in every process: commands, one after the other; leaves their exit codes behind.

Usage: on_two_processes.py FOLDER COMMANDS     (COMMANDS: a JSON list of lists of arguments of `spectrain`)
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from spectrain.cli import app


def code_of(arguments: list[str]) -> int:
    """As the command line would end."""
    try:
        app(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("the command line always exits")


if __name__ == "__main__":
    torch.set_num_threads(1)
    state = PartialState(cpu=True)  # opened once for all commands
    codes = [code_of(arguments) for arguments in json.loads(sys.argv[2])]
    (Path(sys.argv[1]) / f"codes-{os.environ['RANK']}.json").write_text(json.dumps(codes))
    state.destroy_process_group()
