"""Budgets that ruff does not hold: modules < 400 lines, functions < 60 (`train` < 120), public signatures typed.

Usage: budgets.py [FOLDER]...    (default: spectrain; exit code 1 if anything is over)
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 400
FUNCTION_LINES = 60
TRAIN_LINES = 120  # the training loop reads top to bottom in one function

Function = ast.FunctionDef | ast.AsyncFunctionDef


def untyped(function: Function) -> list[str]:
    """Names of the parameters without a type, and "return" where the result has none."""
    a = function.args
    given = [*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs, *([a.kwarg] if a.kwarg else [])]
    names = [arg.arg for arg in given if arg.annotation is None and arg.arg not in ("self", "cls")]
    return names if function.returns is not None or function.name == "__init__" else [*names, "return"]


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Functions of a module and methods of its classes whose names do not start with an underscore."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, Function) and (not node.name.startswith("_") or node.name in ("__init__", "__call__")):
            yield node


def over_budget(path: Path) -> Iterator[str]:
    """One line for each breach in one file."""
    source = path.read_text(encoding="utf-8")
    if (lines := len(source.splitlines())) >= MODULE_LINES:
        yield f"{path}: {lines} lines, a module has fewer than {MODULE_LINES}"
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, Function) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            budget = TRAIN_LINES if node.name == "train" else FUNCTION_LINES
            if lines >= budget:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, a function has fewer than {budget}"
    for function in public_functions(tree.body):
        if names := untyped(function):
            yield f"{path}:{function.lineno}: {function.name} is public and lacks types for: {', '.join(names)}"


def main(folders: list[str]) -> int:
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    found = [line for path in files for line in over_budget(path)]
    print("\n".join(found) or f"{len(files)} modules within their budgets")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["spectrain"]))
