"""Run by test_memory.py in a process of its own: exports a head, reads the folder back, and prints the size of the head and the peak of the
process's memory, both in MB.

Legend: V target vocabulary, W its width.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from spectrain.export.engines import export_head
from spectrain.export.families import head_from_folder

MB = 10**6


def peak() -> int:
    """Most memory that this process has had, files that are mapped included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 // MB


@torch.no_grad()
def main(head_dir: Path, to: str, out: Path) -> None:
    export_head(head_dir, to, out)
    config = json.loads((head_dir / "config.json").read_text())
    V, W = config["vocab_size"], config["target_hidden_size"]
    rows_VW = torch.zeros(1, 1).expand(V, W)  # of a target; compared with nothing here
    target = SimpleNamespace(
        num_layers=config["target_layers"], vocab_size=V, num_ids=V, name="target", embedding_VW=rows_VW, output_VW=rows_VW
    )
    head, _ = head_from_folder(out, target)  # type: ignore[arg-type]
    size = 0
    for parameter in head.parameters():
        assert parameter.sum().isfinite()  # every value is there
        size += parameter.numel() * parameter.element_size()
    print(size // MB, peak())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
