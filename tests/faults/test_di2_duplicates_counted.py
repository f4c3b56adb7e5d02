"""DI2: where the examples do not come out even over the processes, some are counted twice, and a figure depends on their number."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

from spectrain.evaluation.processes import ALONE

SCRIPT = Path(__file__).with_name("two_probes.py")


def test_figures_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    """Nine examples, and one, so that a process has none: each is looked at once, and all figures are those of one process, to the bit."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT), str(tmp_path)]
    run = subprocess.run(start, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    alone = json.loads(json.dumps(runpy.run_path(str(SCRIPT))["figures"](ALONE)))
    assert alone.pop("looked") == list(range(9)) and alone["squares"] == [i * i for i in range(9)]
    assert alone["of 9"]["measured_rounds"] > alone["of 1"]["measured_rounds"] > 0 and alone["joint"]["target_kl"] > 0
    found = [json.loads((tmp_path / f"figures-{rank}.json").read_text()) for rank in range(2)]
    assert [figures.pop("looked") for figures in found] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    assert found == [alone, alone]
