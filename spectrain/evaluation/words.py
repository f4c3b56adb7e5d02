"""Figures and verdicts of a report as words, and what its terms mean."""

from __future__ import annotations

from spectrain.evaluation.schema import NUMBER, Report, Speed, Tau

SIGNS = {"win": "▲", "even": "≈", "loss": "▼", "none": "–"}  # a colour never stands alone
DISCS = {"win": "🟢 ", "even": "⚪ ", "loss": "🔴 ", "none": ""}
STYLES = {"win": "green", "even": "default", "loss": "red", "none": "dim"}
LEGEND = "▲ faster  ≈ no clear difference  ▼ slower  – one prompt, no interval"
DEFINITIONS = {
    "τ (tau)": "tokens committed per verification pass, the target's own token included; prefill and its token are left out. "
    "Plain decoding has τ = 1. Two τ compare only at equal depth, width, budget, rule and temperature.",
    "micro, macro": "micro: all committed tokens over all verification passes, so that long answers weigh more. "
    "Macro: the mean over the domains, each counting the same.",
    "break-even": "the τ at which speculation costs exactly what it saves, v + draft + other; above it an arm beats plain decoding.",
    "v, draft, other": "the cost of one round in plain decoding passes: its verification pass, its drafter, and everything else "
    "(acceptance, cache, bookkeeping).",
    "speed-up": "tokens per second over plain decoding by the same code, in the same run, on the same prompts; τ ÷ break-even predicts it.",
    "interval": "[low, high] from a bootstrap over prompts, since the rounds of one prompt are not independent. "
    "▲ the speed-up's interval lies above 1, ≈ it contains 1, ▼ it lies below 1.",
    "acceptance by position": "unconditional: how often the first i drafted tokens were all accepted; conditional: how often token i was, "
    "given that those before it were.",
    "draft acceptance": "accepted over drafted tokens. It falls with the length of the draft, so it compares shapes badly; τ does not.",
    "exactness": "equal: the same tokens as plain decoding; tie: the first difference lies where the target's best tokens are level "
    "within rounding, so that either is right; failed: any other difference. Above temperature 0 answers are draws and are not compared.",
    "rule": "how drafts are verified. Greedy at temperature 0; above it point_mass for drafts that were not drawn (n-grams, dynamic "
    "trees), block for a sampled chain, traversal for a sampled tree. All of these keep the target's law.",
    "coverage": "share of the tokens in the target's own answers that a head's draft vocabulary holds; the others it can never draft.",
}
MEASURED_DEFINITIONS = {  # shown where the report has the part
    "alpha": ("α (alpha)", "the chance that a draft drawn from the drafter's law q is accepted under the target's law p: E[Σ min(p, q)]."),
    "ranks": (
        "rank",
        "the place of a choice among the drafter's own, 1 the most likely. Rank and depth say which nodes of a tree are worth their pass.",
    ),
    "pairs": (
        "p-value, smallest difference",
        "how often a difference this large comes about when there is none; and the difference that this many prompts would find in four "
        "runs of five (5 %, two-sided). A difference below the smallest one is not shown to be none.",
    ),
    "price": (
        "price",
        "what speculation costs beside its gain: the target and the drafter compute more, and positions that are not kept are wasted.",
    ),
}


def num(value: NUMBER, digits: int = 2) -> str:
    """A number, a dash where it was not measured."""
    return SIGNS["none"] if value is None else f"{value:,.{digits}f}"


def pct(value: NUMBER) -> str:
    """A share in percent."""
    return SIGNS["none"] if value is None else f"{100 * value:.1f} %"


def span(lo: NUMBER, hi: NUMBER) -> str:
    """An interval, nothing where there is none."""
    return "" if lo is None or hi is None else f"[{lo:.2f}, {hi:.2f}]"


def signed(value: NUMBER, digits: int = 2) -> str:
    """A difference with its sign."""
    return SIGNS["none"] if value is None else f"{value:+.{digits}f}".replace("-", "−")


def with_span(value: NUMBER, lo: NUMBER, hi: NUMBER) -> str:
    """A number and its interval."""
    return f"{num(value)} {span(lo, hi)}".strip()


def p_value(value: NUMBER) -> str:
    """A p-value; "<0.001" below the resolution that is worth reading."""
    return "<0.001" if value is not None and value < 0.001 else num(value, 3)


def tau_text(cell: Tau | None) -> str:
    """τ and its interval."""
    return SIGNS["none"] if cell is None else with_span(cell.tau, cell.lo, cell.hi)


def verdict(cell: Speed | None) -> str:
    """win, even or loss by the interval of the speed-up; none where there is no interval."""
    if cell is None or cell.speedup is None or cell.lo is None or cell.hi is None:
        return "none"
    return "win" if cell.lo > 1 else "loss" if cell.hi < 1 else "even"


def speed_text(cell: Speed | None) -> str:
    """Sign, speed-up and interval."""
    if cell is None or cell.speedup is None:
        return SIGNS["none"]
    return f"{SIGNS[verdict(cell)]} {cell.speedup:.2f}× {span(cell.lo, cell.hi)}".strip()


def exact_text(report: Report) -> tuple[str, str]:
    """A verdict and a sentence on how the answers compare with plain decoding's."""
    found = [report.exactness[arm.name] for arm in report.drafted if arm.name in report.exactness]
    prompts, equal, ties = (sum(getattr(e, key) for e in found) for key in ("prompts", "equal", "ties"))
    drawn = [f"{t:g}" for t in report.temperatures if t]
    if drawn and not prompts:
        return "none", f"– Draws at temperature {', '.join(drawn)} are not compared with plain decoding: see the notes."
    if not prompts:
        return "none", "– Exactness was not checked."
    if other := prompts - equal - ties:
        return "loss", f"▼ Not exact: {other:,} of {prompts:,} answers differ from plain decoding."
    rest = f" Draws at temperature {', '.join(drawn)} are not compared." if drawn else ""
    return "win", f"▲ Exact: all {prompts:,} answers are those of plain decoding, {ties:,} of them up to a tie.{rest}"


def lead(report: Report) -> str:
    """How the figures were taken, in one line."""
    s = report.settings
    lengths = f"τ with up to {s.max_new_tokens:,} new tokens a prompt, speed with up to {s.speed_max_new_tokens:,}"
    temperatures = ", ".join(f"{t:g}" for t in report.temperatures)
    passes = f"; {s.passes} passes" if s.passes else ""
    return f"{lengths}; temperature {temperatures}; {s.dtype}{passes}; {s.threads} threads; {s.machine}."


def definitions(report: Report) -> dict[str, str]:
    """The terms that this report uses."""
    return DEFINITIONS | dict(entry for part, entry in MEASURED_DEFINITIONS.items() if getattr(report, part))


def gates_text(report: Report) -> list[tuple[str, str]]:
    """A verdict and a sentence for each required figure."""
    return [
        ("win" if gate.met else "loss", f"{'▲ met' if gate.met else '▼ not met'}: {gate.expression} (found {num(gate.value, 3)})")
        for gate in report.gates or []
    ]
