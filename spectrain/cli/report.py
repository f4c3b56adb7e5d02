"""`spectrain report`: a report shown and rendered again, or several as one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.cli.quickstart import show, wide_console
from spectrain.evaluation.comparison import compared, labels_of
from spectrain.evaluation.pictures import MISSING, can_draw
from spectrain.evaluation.policy import advice_by_service
from spectrain.evaluation.records import records_of
from spectrain.evaluation.render import write_report
from spectrain.evaluation.schema import ALL
from spectrain.evaluation.told import drawn_rules

BATCH = "bench.json"


def report(folders: Sequence[Path], *, out: Path | None, pictures: bool, as_json: bool) -> None:
    """Print the tables and the advice of a report, and write its files anew; several folders: one report of all, into `out`.

    ValueError where a folder has no whole report, or where several do not compare.
    """
    found = {label: _read(folder) for label, folder in zip(labels_of(folders), folders, strict=True)}
    if len(folders) == 1:
        content, out = _with_batches(next(iter(found.values())), folders[0]), out or folders[0]
    elif out is None:
        raise ValueError("several reports are put into one of their own; add --out FOLDER")
    else:
        content = compared(found, {label: records_of(folder, found[label]) for label, folder in zip(found, folders, strict=True)})
    write_report(content, out, pictures=pictures)
    if as_json:
        print(json.dumps(content))
    else:
        _show(content, out, pictures=pictures)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "report.json"
    if not path.is_file():
        raise ValueError(f"no report.json in {folder}; `spectrain evaluate` writes one")
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); `spectrain evaluate` writes it anew") from error


def _with_batches(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The report with what `spectrain bench` wrote into the same folder, and the advice that both give."""
    path = folder / BATCH
    if not path.is_file():
        return content
    batch = json.loads(path.read_text(encoding="utf-8"))
    timed = [arm for arm in content["arms"] if ALL in content["speed"].get(arm["name"], {})]
    first = {arm["name"]: content["speed"][arm["name"]][ALL] for arm in timed if arm.get("temperature") == timed[0].get("temperature")}
    return {**content, "batch": batch, "service": advice_by_service(first, batch)}


def _show(content: dict[str, Any], out: Path, *, pictures: bool) -> None:
    console = wide_console()
    show(content, out, console)
    told = [*(content.get("service") or []), *drawn_rules(content["arms"])]
    told += [f"{'met' if gate['met'] else 'NOT met'}: {gate['expression']}" for gate in content.get("gates") or []]
    for line in told + ([MISSING] if pictures and not can_draw() else []):
        console.print(line, soft_wrap=True, markup=False)
