"""The import contracts in pyproject.toml: the levels, and what the exact part may know."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, show_timings=False))"


def test_imports_keep_the_contracts() -> None:
    run = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 kept, 0 broken" in run.stdout
