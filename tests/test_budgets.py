"""The budgets on lengths, complexity and prints, and the script that measures lengths."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True)


def test_package_is_within_its_budgets() -> None:
    run = python("scripts/budgets.py")
    assert run.returncode == 0, run.stdout + run.stderr


def test_complexity_statements_and_prints() -> None:
    run = python("-m", "ruff", "check", "--no-cache", "--select", "C901,PLR0915,T20", "spectrain")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * 400, "400 lines"),
        ("def f() -> None:\n" + "    x = 1\n" * 59, "f has 60 lines"),
        ("def train() -> None:\n" + "    x = 1\n" * 119, "train has 120 lines"),
        ("class A:\n    def f(self, a: int, b, *rest) -> int: ...\n", "f is public and lacks types for: b, rest"),
        ("def f(a: int): ...\n", "f is public and lacks types for: return"),
    ],
)
def test_breach_is_found(tmp_path: Path, source: str, complaint: str) -> None:
    (tmp_path / "module.py").write_text(source)
    run = python("scripts/budgets.py", str(tmp_path))
    assert run.returncode == 1
    assert complaint in run.stdout


def test_just_within_is_not_a_breach(tmp_path: Path) -> None:
    function = "def f() -> None:\n" + "    x = 1\n" * 58
    train = "def train() -> None:\n" + "    x = 1\n" * 118
    (tmp_path / "module.py").write_text(function + train + "def _private(a): ...\n" + "x = 1\n" * 220)
    run = python("scripts/budgets.py", str(tmp_path))
    assert run.returncode == 0, run.stdout
