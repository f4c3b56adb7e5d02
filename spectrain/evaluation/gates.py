"""Conditions on a report for CI, such as `tau.code>=2.0`: parsed before the work begins, checked when the report is there.

metric[.domain][@arm] OP number, with OP one of >= <= > < ==. Metrics: tau, speedup, acceptance.i (unconditional, of position i), alpha (its
arms are drafters) and exact (share of answers that are plain decoding's or tie with it). Without a domain: all of them together (tau:
micro). Without an arm: the highest of the drafting ones, for exact the lowest.
"""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.evaluation.schema import ALL, MACRO, MICRO

COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}
METRICS = ("tau", "speedup", "acceptance", "alpha", "exact")
FORM = re.compile(
    r"\s*(?P<metric>[a-z]+)(?:\.(?P<rest>[^@]*?))?(?:\s*@\s*(?P<arm>.+?))?\s*(?P<op>>=|<=|==|>|<)\s*(?P<number>[-+0-9.eE]+)\s*"
)
Found = tuple[float, str]  # a value and the arm it is of


@dataclass(frozen=True)
class Gate:
    """One condition. position: of acceptance, from 1; 0 for other metrics. arm: None for the best."""

    expression: str
    metric: str
    position: int
    domain: str
    arm: str | None
    op: str
    number: float


def parse(expression: str) -> Gate:
    """A gate from its text; ValueError saying what is not understood."""
    match = FORM.fullmatch(expression)
    if match is None:
        needed = "metric[.domain][@arm] OP number, such as 'tau.code>=2.0' or 'acceptance.1@head chain:4>=0.5' (OP: >= <= > < ==)"
        raise ValueError(f"--require {expression!r} is no condition; needed: {needed}")
    metric, rest = match["metric"], match["rest"] or ""
    if metric not in METRICS:
        raise ValueError(f"--require {expression!r}: metric {metric!r} is unknown; there are {', '.join(METRICS)}")
    position = 0
    if metric == "acceptance":
        first, _, rest = rest.partition(".")
        if not first.isdigit() or int(first) < 1:
            raise ValueError(f"--require {expression!r}: acceptance is of a position, such as acceptance.1 or acceptance.2.code")
        position = int(first)
    if metric == "exact" and rest:
        raise ValueError(f"--require {expression!r}: exactness is counted over all domains; leave {rest!r} out")
    try:
        number = float(match["number"])
    except ValueError as error:
        raise ValueError(f"--require {expression!r}: {match['number']!r} is no number") from error
    return Gate(expression, metric, position, rest or ALL, match["arm"], match["op"], number)


def check_names(gates: Sequence[Gate], *, arms: Sequence[Mapping[str, Any]], domains: Sequence[str]) -> None:
    """ValueError for a domain, an arm or a position that the evaluation does not have.

    arms: as in a report (`name`, `drafter`, `depth`).
    """
    drafting = [arm for arm in arms if arm["depth"]]
    for gate in gates:
        names = list(dict.fromkeys(name for arm in drafting for name in (_drafters(arm) if gate.metric == "alpha" else [arm["name"]])))
        if gate.arm is not None and gate.arm not in names:
            raise ValueError(f"--require {gate.expression!r}: there is no {gate.arm!r}, there are {', '.join(names) or 'no drafting arms'}")
        known = [ALL, *([MACRO] if gate.metric == "tau" else []), *domains]
        if gate.domain not in known:
            raise ValueError(f"--require {gate.expression!r}: there is no domain {gate.domain!r}, there are {', '.join(known)}")
        deepest = max((arm["depth"] for arm in drafting if gate.arm in (None, arm["name"])), default=0)
        if gate.position > deepest:
            raise ValueError(f"--require {gate.expression!r}: the deepest draft there has {deepest} tokens; ask for a position up to it")


def _drafters(arm: Mapping[str, Any]) -> list[str]:
    """The names that alpha may be kept under: the drafter's, and with its temperature where several are measured."""
    name = str(arm.get("by") or arm["drafter"])
    return [name, *([f"{name} T={arm['temperature']:g}"] if arm.get("temperature") else [])]


def check(gates: Sequence[Gate], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each gate with its value, the arm that it is of, and whether it is met; a figure that was not measured (None) is not.

    ValueError as of `check_names`.
    """
    check_names(gates, arms=report["arms"], domains=report["domains"])
    rows = []
    for gate in gates:
        worst = gate.metric == "exact"
        found = [pair for pair in _values(gate, report) if gate.arm in (None, pair[1])]
        value, arm = (min if worst else max)(found) if found else (None, gate.arm)
        met = value is not None and bool(COMPARE[gate.op](value, gate.number))
        rows.append({"expression": gate.expression, "value": value, "met": met, "arm": arm})
    return rows


def _values(gate: Gate, report: Mapping[str, Any]) -> Iterator[Found]:
    """What was measured, of each drafting arm (alpha: of each drafter)."""
    for name, cells in _tables(gate, report).items():
        value = _value(gate, cells)
        if value is not None:
            yield float(value), name


def _tables(gate: Gate, report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    part = {"speedup": "speed", "alpha": "alpha", "exact": "exactness"}.get(gate.metric, "tau")
    table = report.get(part) or {}
    drafting = {arm["name"] for arm in report["arms"] if arm["depth"]}
    return {name: cells for name, cells in table.items() if gate.metric == "alpha" or name in drafting}


def _value(gate: Gate, cells: Mapping[str, Any]) -> float | None:
    if gate.metric == "exact":
        return (cells["equal"] + cells["ties"]) / cells["prompts"] if cells["prompts"] else None
    together = MICRO if gate.metric in ("tau", "acceptance") else ALL
    cell = cells.get(together if gate.domain == ALL else gate.domain)
    if cell is None:
        return None
    if gate.metric == "acceptance":
        shares = cell["acceptance"]
        return shares[gate.position - 1] if gate.position <= len(shares) else None
    found: float | None = cell[{"tau": "tau", "speedup": "speedup", "alpha": "value"}[gate.metric]]
    return found
