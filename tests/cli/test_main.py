"""What the `spectrain` command does around each command."""

import subprocess
import sys
from pathlib import Path

IN_A_GROUP = """
import sys
import torch.distributed as dist
from spectrain.cli import main

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
for words in (["plan", "--nothing"], ["--help"]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        print("code", end.code, "in a group", dist.is_initialized())
"""


def test_process_that_is_done_stays_in_its_group(tmp_path: Path) -> None:
    """One that failed stays: the others may still be at work with it, and the launcher ends them."""
    ran = subprocess.run([sys.executable, "-c", IN_A_GROUP, str(tmp_path / "store")], capture_output=True, text=True, check=False)
    told = [line for line in ran.stdout.splitlines() if line.startswith("code")]
    assert told == ["code 2 in a group True", "code 0 in a group False"], ran.stdout + ran.stderr
