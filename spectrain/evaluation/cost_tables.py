"""Tables of what speculation costs and gains: rounds, predictions, prices, batches, the device's limits, a serving engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectrain.evaluation.schema import Report
from spectrain.evaluation.tables import Table, count
from spectrain.evaluation.words import SIGNS, num, signed, span, speed_text


def cost_tables(report: Report) -> list[Table]:
    """All of them that the report has figures for, in the reader's order."""
    parts = (_speed, _gap, _costs, _price, _batches, _roofline, _served)
    return [table for part in parts for table in part(report)]


def _speed(report: Report) -> list[Table]:
    rows = []
    for arm in report.arms:
        for domain in report.rows:
            if c := report.speed_of(arm.name, domain):
                predicted = c.tau / c.break_even if c.tau is not None and c.break_even else None
                costs = map(num, (predicted, c.tau, c.v, c.draft, c.other, c.break_even))
                size = [num(c.tokens_per_s, 1), f"{c.tokens:,}", num(c.seconds, 1), f"{c.prompts:,}"]
                rows.append([report.label(arm), domain, speed_text(c), *costs, *size])
    head = "arm | domain | speed-up | τ ÷ break-even | τ | v | draft | other | break-even | tokens/s | tokens | seconds | prompts"
    note = (
        "break-even = v + draft + other, the cost of a round in plain passes of this run. "
        "τ here is that of the speed run, whose answers may be shorter."
    )
    return [Table("Speed and cost of a round", note, head, rows, labels=2)] if rows else []


def _gap(report: Report) -> list[Table]:
    rows = []
    for name, cells in (report.gap or {}).items():
        for domain, cell in cells.items():
            by = cell.by.model_dump() if cell.by else {}
            off = cell.predicted / cell.measured - 1 if cell.predicted is not None and cell.measured else None
            parts = [_percent(_grown(by.get(part))) for part in ("tau", "draft", "verify", "other")]
            rows.append([name, domain, num(cell.predicted), num(cell.measured), _percent(off), *parts])
    note = (
        "Predicted from τ as counted on the timed prompts and from costs that were measured apart; off by: predicted over measured. Split: "
        "what another τ while timed, and rounds that cost more or less than measured apart, make of it (their growths multiply)."
    )
    head = "arm | domain | predicted | measured | off by | τ | draft | verify | other"
    return [Table("Speed-up predicted and measured", note, head, rows, labels=2)] if rows else []


def _percent(share: float | None) -> str:
    return SIGNS["none"] if share is None else f"{100 * share:+.1f} %".replace("-", "−")


def _grown(logarithm: float | None) -> float | None:
    return None if logarithm is None else math.exp(logarithm) - 1


def _costs(report: Report) -> list[Table]:
    costs = report.costs or {}
    names = ("start", "c", "other", "plain")
    known = costs.get("by_arm") or costs.get("by_drafter") or {}
    rows = [[name, *(num(found.get(part), 3) for part in names)] for name, found in known.items()]
    passes = ", ".join(num(v) for v in costs.get("v", []))
    note = (
        f"In passes over one position ({1000 * costs.get('seconds', 0.0):.1f} ms each). A pass over 1, 2, … positions costs {passes}. "
        "A round costs start + depth × step to draft and other beside its pass; a plain round costs plain beside its own."
    )
    return [Table("Costs measured apart", note, "drafts | start | step | other | plain", rows)] if rows else []


def _price(report: Report) -> list[Table]:
    rows = [
        [
            name, f"{num(p.flops_ratio)}×", num(p.positions_per_token), num(p.wasted_positions_per_token),
            SIGNS["none"] if p.drafter_bytes is None else f"{p.drafter_bytes / 2**20:,.1f} MiB", num(p.kv_tokens_displaced, 0),
        ]
        for name, p in (report.price or {}).items()
    ]  # fmt: skip
    note = "Per committed token; plain decoding has 1 position, none wasted. Then the drafter's bytes and the cache tokens they displace."
    head = "arm | computation | positions | wasted positions | drafter | cache tokens displaced"
    return [Table("What speculation costs", note, head, rows)] if rows else []


def _batches(report: Report) -> list[Table]:
    rows, policies, told, made = [], [], [], dict[str, None]()
    for name, found in (report.batch or {}).get("drafters", {}).items():
        told.append(_verified(name, found))
        for row in found["rows"]:
            made |= {row["mode"]: None} if "mode" in row else {}
            sign = f"{SIGNS['win' if row['speedup'] > 1 else 'loss']} {row['speedup']:.2f}× {span(row.get('lo'), row.get('hi'))}".strip()
            rates = [num(row.get(key), 1) for key in ("plain", "speculative", "table", "adaptive")]
            rest = [count(row.get("k")), num(row.get("tau")), num(row.get("break_even"))]
            rows.append([name, f"{row['batch']}", sign, num(row.get("predicted")), *rates, *rest])
        for engine, setting in (found.get("policy") or {}).items():
            if setting is not None:
                shown = {key: value for key, value in setting.items() if key != "costs"}
                policies.append([name, engine, json.dumps(shown)])
    if not rows:
        return []
    head = "drafter | batch | drafting | predicted | tokens/s plain | always drafting | depth by batch | adaptive | depth | τ | break-even"
    note = "Tokens a second of a batch that stays full; in brackets the lowest and highest set of rows. Depth: of the policy by batch."
    note += "".join(f" Passes: {how}." for how in made)
    tables = [Table("By batch", " ".join(filter(None, [note, *told])), head, rows)]
    how = "How an engine, or this generator, is told to draft by batch."
    return tables + ([Table("Policies by batch", how, "drafter | for | setting", policies, labels=3)] if policies else [])


def _verified(name: str, found: Mapping[str, Any]) -> str:
    check = found.get("verified")
    if not check:
        return ""
    within = f"within {100 * check['slack']:.0f} % of the better of always drafting and never"
    missed = ", ".join(f"{row['policy']} at {row['batch']}" for row in check["rows"] if not row["met"])
    return f"{name}: not {within}: {missed}." if missed else f"{name}: both policies stay {within}."


def _roofline(report: Report) -> list[Table]:
    r = report.roofline or (report.batch or {}).get("roofline") or {}
    predicted = r.get("predicted_v", {})
    entries = [{**entry, "predicted v": predicted.get(str(entry["batch"]))} for entry in r.get("intensity", [])]
    note = "; ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in r.items() if not isinstance(value, (dict, list)))
    return as_they_are("Roofline", f"Predicted from the device: {note}. Intensity: products a byte, beside the ridge.", entries)


def as_they_are(title: str, note: str, entries: Iterable[Mapping[str, Any]]) -> list[Table]:
    """A table of entries that share their keys; what is nested is left out."""
    kept = [{key: value for key, value in entry.items() if not isinstance(value, (dict, list))} for entry in entries]
    names = list(dict.fromkeys(key for entry in kept for key in entry))
    rows = [[_plain(entry.get(name)) for name in names] for entry in kept]
    return [Table(title, note, " | ".join(name.replace("_", " ") for name in names), rows)] if rows and names else []


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 1e5 else num(value)
    return SIGNS["none"] if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _served(report: Report) -> list[Table]:
    if report.served is None:
        return []
    s = report.served
    rows = [
        [
            r.domain, f"{r.temperature or 0:g}", count(r.drafts), num(r.tau), num(r.own_tau), signed(r.difference), _list(r.acceptance),
            _list(r.own_acceptance), num(r.tokens_per_s, 1), SIGNS["none"] if r.compared is None else f"{r.equal} of {r.compared}",
        ]
        for r in s.rows
    ]  # fmt: skip
    how = [f"tokens {s.rule}" if s.rule else "", f"drafts of {s.depth}" if s.depth else ""]
    note = ", ".join(filter(None, [f"The suite through {s.engine}, by its own counters", *how])) + "."
    note += " Acceptance is by position in percent; equal: answers that are this generator's."
    head = "domain | T | rounds | τ served | τ here | difference | accepted, served | accepted, here | tokens/s | equal"
    return [Table("Served by an engine", " ".join([note, *(s.notes or [])]), head, rows)]


def _list(shares: Sequence[float] | None) -> str:
    return " ".join(f"{100 * share:.1f}" for share in shares or []) or SIGNS["none"]
