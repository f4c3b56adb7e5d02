"""The public surface: what `import spectrain` offers, what it costs to import, and what the commands are called."""

import subprocess
import sys

import pytest

import spectrain as st

NAMES = {
    "load_target", "load_head", "generate", "NGram", "Suffix", "SmallModel", "Hybrid", "Scripted", "Chain", "Tree", "Adaptive", "DraftTree",
    "Coins", "accept", "acceptance", "optimal_acceptance", "greedy_audit", "measure_costs", "Costs", "encode_chat", "encode_turns",
    "draft_vocabulary", "align", "expected_tokens", "expected_tau", "speedup", "load_policy",
}  # fmt: skip
COMMANDS = {
    "quickstart", "prepare", "regenerate", "capture", "plan", "train", "generate", "evaluate", "bench", "report", "export", "import",
}  # fmt: skip


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_names_resolve() -> None:
    assert set(dir(st)) == NAMES | {"__version__"}
    for name in NAMES:
        assert getattr(st, name) is not None


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="load_target"):
        _ = st.load_targets


def test_importing_spectrain_imports_neither_torch_nor_transformers() -> None:
    found = python("import sys, spectrain; print([m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])")
    assert found.strip() == "[]"


def test_help_imports_neither_torch_nor_transformers() -> None:
    """Of spectrain, and of every command."""
    code = (
        "import sys\nfrom spectrain.__main__ import main\n"
        f"for command in ([], *([c] for c in {sorted(COMMANDS)})):\n"
        "    sys.argv = ['spectrain', *command, '--help']\n"
        "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code\n"
        "print([m for m in ('torch', 'transformers', 'accelerate', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    out = python(code)
    assert out.strip().endswith("[]")
    first = out[: out.index("Usage:", out.index("Usage:") + 1)]
    assert all(command in first for command in COMMANDS) and out.count("Usage: ") == 1 + len(COMMANDS)


def test_a_usage_error_is_exit_code_2_and_a_failure_1() -> None:
    run = [sys.executable, "-m", "spectrain"]
    assert subprocess.run([*run, "train"], capture_output=True).returncode == 2
    failed = subprocess.run([*run, "train", "recipes/nothing.yaml"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "no file recipes/nothing.yaml" in failed.stderr and "Traceback" not in failed.stderr
