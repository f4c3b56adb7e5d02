"""The evidence of a report as tables: counts, acceptance, slices, α, comparisons, exactness, and what `cost_tables.py` has."""

from __future__ import annotations

from collections.abc import Iterable

from spectrain.evaluation.cost_tables import cost_tables
from spectrain.evaluation.schema import MACRO, MICRO, Report, Tau
from spectrain.evaluation.tables import Table, count, signed_span
from spectrain.evaluation.words import SIGNS, num, p_value, pct, signed, span, tau_text, with_span

SLICES = {"context": "tokens of context", "position": "position in the answer", "part": "part", "entropy": "target's entropy, nats"}


def tau_rows(report: Report) -> Iterable[tuple[str, str, Tau]]:
    """(arm, domain, cell) of every τ."""
    for arm in report.arms:
        cells = report.tau.get(arm.name, {})
        yield from ((report.label(arm), key, cells[key]) for key in [*report.domains, MACRO, MICRO] if key in cells)


def _shares(report: Report, field: str, title: str, note: str, *, first: int = 1) -> list[Table]:
    found = [(arm, key, getattr(cell, field) or []) for arm, key, cell in tau_rows(report) if key != MACRO]  # shares of rounds are micro
    depth = max((len(values) for *_, values in found), default=0)
    rows = [[arm, key, *map(pct, values), *[SIGNS["none"]] * (depth - len(values))] for arm, key, values in found if values]
    head = " | ".join(["arm", "domain", *(str(i + first) for i in range(depth))])
    return [Table(title, note, head, rows, labels=2, heat=True)] if rows else []


def _tokens(report: Report) -> Table:
    drafts = any(cell.draft_acceptance is not None for *_, cell in tau_rows(report))
    rows = [
        [arm, key, tau_text(c), *([pct(c.draft_acceptance)] * drafts), f"{c.tokens:,}", f"{c.rounds:,}", f"{c.prompts:,}"]
        for arm, key, c in tau_rows(report)
    ]
    head = "arm | domain | τ" + " | draft acceptance" * drafts + " | tokens | passes | prompts"
    return Table("Tokens per pass", "τ = tokens ÷ passes.", head, rows, labels=2)


def _slices(report: Report) -> list[Table]:
    rows = []
    for name, parts in (report.slices or {}).items():
        for part, cells in parts.items():
            for c in cells:
                counts = [count(n) for n in (c.tokens, c.rounds, c.prompts)]
                rows.append([name, SLICES.get(part, part), c.label, tau_text(c), with_span(c.first, c.first_lo, c.first_hi), *counts])
    note = (
        "By the tokens before a round, the token at which it begins, thinking or answer, and the target's entropy at its first draft, "
        "which is known as far as an answer is plain decoding's: above temperature 0 of few rounds."
    )
    head = "arm | by | slice | τ | first draft accepted | tokens | passes | prompts"
    return [Table("Context, position, part, entropy", note, head, rows, labels=3)] if rows else []


def _alpha(report: Report) -> list[Table]:
    found = [(drafter, domain, cell) for drafter, cells in (report.alpha or {}).items() for domain, cell in cells.items()]
    depth = max((len(cell.by_depth or []) for *_, cell in found), default=0)
    rows = []
    for drafter, domain, cell in found:
        deeper = [num(value) for value in cell.by_depth or []]
        rows.append([drafter, domain, with_span(cell.value, cell.lo, cell.hi), *deeper, *[SIGNS["none"]] * (depth - len(deeper))])
    head = " | ".join(["drafter", "domain", "α", *(f"depth {i + 1}" for i in range(depth))])
    note = "E[Σ min(p, q)] on the target's own answers; below depth 1 given that the drafts before were right."
    return [Table("Acceptance of one draft, α", note, head, rows, labels=2)] if rows else []


def _pairs(report: Report) -> list[Table]:
    rows = [
        [
            p.a, p.b, f"{signed(p.difference)} {signed_span(p.lo, p.hi)}".strip(), p_value(p.p), p_value(p.p_adjusted), num(p.smallest),
            count(p.prompts),
        ]
        for p in report.pairs or []
    ]  # fmt: skip
    note = (
        "τ of the first less τ of the second on the same prompts. p is adjusted for the number of comparisons beside it. A difference "
        "below the smallest that so few prompts show is not shown to be none."
    )
    head = "arm | less arm | difference of τ | p | p adjusted | smallest found | prompts"
    return [Table("Arms compared on the same prompts", note, head, rows, labels=2)] if rows else []


def _exactness(report: Report) -> list[Table]:
    rows = [
        [arm.name, f"{e.prompts:,}", f"{e.equal:,}", f"{e.ties:,}", f"▼ {e.failed:,}" if e.failed else "0"]
        for arm in report.arms
        if (e := report.exactness.get(arm.name))
    ]
    note = "Against plain decoding's answers to the same prompts: those that τ is counted on, turn by turn, and those that were timed."
    return [Table("Exactness", note, "arm | answers | equal | ties | failed", rows)] if rows else []


def _baseline(report: Report) -> list[Table]:
    if (b := report.baseline) is None:
        return []
    ratio = f"{num(b.ratio)}× {span(b.lo, b.hi)}".strip()
    rows = [["spectrain, plain", num(b.plain_tokens_per_s, 1), ratio], [b.name, num(b.tokens_per_s, 1), "1.00×"]]
    note = "Plain decoding by both on the same prompts. At a ratio below 1 the speed-ups above flatter: their baseline is the slower one."
    return [Table("Against an independent decoder", note, "decoder | tokens/s | ratio", rows)]


def _coverage(report: Report) -> list[Table]:
    rows = [[domain, pct(value)] for domain, value in (report.coverage or {}).items()]
    return [Table("Draft-vocabulary coverage", "", "domain | coverage", rows)] if rows else []


def evidence(report: Report) -> list[Table]:
    """Every figure of the report that the charts and the first table rest on."""
    return [
        _tokens(report),
        *_shares(report, "acceptance", "Acceptance by position, unconditional", "The first i tokens all accepted."),
        *_shares(report, "conditional", "Acceptance by position, conditional", "Token i, given those before it."),
        *_shares(report, "lengths", "Rounds by accepted drafts", "Share of the rounds that accepted so many.", first=0),
        *cost_tables(report),
        *_slices(report),
        *_alpha(report),
        *_pairs(report),
        *_exactness(report),
        *_baseline(report),
        *_coverage(report),
    ]
