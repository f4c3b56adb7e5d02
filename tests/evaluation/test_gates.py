"""Conditions for CI: what is parsed, which figure of which arm is taken, and what is refused before any work."""

from typing import Any

import pytest

from spectrain.evaluation.gates import check, check_names, parse

ARMS: list[dict[str, Any]] = [
    {"name": "plain", "drafter": "none", "by": "none", "depth": 0},
    {"name": "ngram chain:8", "drafter": "NGram", "by": "ngram", "depth": 8},
    {"name": "head:a chain:4 T=0.7", "drafter": "Eagle3", "by": "head:a", "depth": 4, "temperature": 0.7},
]  # fmt: skip
DOMAINS = ["code", "code_edit", "chat.v2"]


def tau(value: float, acceptance: list[float]) -> dict[str, Any]:
    return {"tau": value, "acceptance": acceptance}


REPORT: dict[str, Any] = {
    "arms": ARMS, "domains": DOMAINS,
    "tau": {
        "plain": {"all (micro)": tau(9.0, [])},
        "ngram chain:8": {"code": tau(1.5, [0.2] * 8), "all (micro)": tau(1.4, [0.3] * 8), "all (macro)": tau(1.3, [0.3] * 8)},
        "head:a chain:4 T=0.7": {
            "code": tau(2.5, [0.6, 0.4, 0.3, 0.2]), "chat.v2": tau(1.9, [0.5, 0.1, 0.0, 0.0]),
            "all (micro)": tau(2.2, [0.55, 0.3, 0.2, 0.1]), "all (macro)": tau(2.1, [0.55, 0.3, 0.2, 0.1]),
        },
    },
    "speed": {"plain": {"all": {"speedup": 1.0}}, "ngram chain:8": {"all": {"speedup": 1.2}, "code": {"speedup": 0.9}}},
    "alpha": {"head:a T=0.7": {"all": {"value": 0.7}, "code": {"value": 0.8}}, "ngram": {"all": {"value": 0.9}}},
    "exactness": {
        "ngram chain:8": {"prompts": 20, "equal": 18, "ties": 2, "failed": 0},
        "head:a chain:4 T=0.7": {"prompts": 20, "equal": 18, "ties": 1, "failed": 1},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "value", "met", "arm"),
    [
        ("tau.code>=2.0", 2.5, True, "head:a chain:4 T=0.7"),
        ("tau>=2.2", 2.2, True, "head:a chain:4 T=0.7"),
        ("tau>2.2", 2.2, False, "head:a chain:4 T=0.7"),
        (" tau.all <= 2.2 ", 2.2, True, "head:a chain:4 T=0.7"),
        ("tau.all (macro)==2.1", 2.1, True, "head:a chain:4 T=0.7"),
        ("tau.code@ngram chain:8 >= 2", 1.5, False, "ngram chain:8"),
        ("tau @ ngram chain:8 >= 1", 1.4, True, "ngram chain:8"),
        ("tau.chat.v2@head:a chain:4 T=0.7<2e0", 1.9, True, "head:a chain:4 T=0.7"),
        ("tau@head:a chain:4 T=0.7>=2", 2.2, True, "head:a chain:4 T=0.7"),
        ("acceptance.1>=0.5", 0.55, True, "head:a chain:4 T=0.7"),
        ("acceptance.2.chat.v2>=0.5", 0.1, False, "head:a chain:4 T=0.7"),
        ("acceptance.7>=0.1", 0.3, True, "ngram chain:8"),
        ("speedup>=1", 1.2, True, "ngram chain:8"),
        ("speedup.code>=1", 0.9, False, "ngram chain:8"),
        ("speedup.code_edit>=0.1", None, False, None),
        ("alpha@head:a T=0.7>=0.75", 0.7, False, "head:a T=0.7"),
        ("alpha@head:a>=0.5", None, False, "head:a"),
        ("alpha.code>=0.75", 0.8, True, "head:a T=0.7"),
        ("alpha>0.8", 0.9, True, "ngram"),
        ("exact>=1", 0.95, False, "head:a chain:4 T=0.7"),
        ("exact@ngram chain:8==1", 1.0, True, "ngram chain:8"),
    ],
)
def test_gate_reads_another_figure(expression: str, value: float | None, met: bool, arm: str | None) -> None:
    assert check([parse(expression)], REPORT) == [{"expression": expression, "value": value, "met": met, "arm": arm}]


def test_gate_passes_on_what_was_not_measured() -> None:
    without = {**REPORT, "alpha": None, "exactness": {}, "speed": {}}
    rows = check([parse(e) for e in ("alpha<2", "exact>=0", "speedup>=0", "tau>=0")], without)
    assert [(row["value"], row["met"]) for row in rows] == [(None, False)] * 3 + [(2.2, True)]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("tau", "is no condition; needed: metric"), ("tau.code=2", "is no condition"), ("tau>=", "is no condition"),
        ("", "is no condition"),
        (">=2", "is no condition"), ("tau>=two", "is no condition"), ("tau>=1.2.3", "'1.2.3' is no number"),
        ("tua.code>=2", "metric 'tua' is unknown; there are tau, speedup, acceptance, alpha, exact"),
        ("acceptance>=0.5", "acceptance is of a position"), ("acceptance.code>=0.5", "acceptance is of a position"),
        ("acceptance.0>=0.5", "acceptance is of a position"), ("exact.code>=1", "leave 'code' out"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_taken_for_one(expression: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(expression)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("tau.cod>=2", "there is no domain 'cod', there are all, all .macro., code, code_edit, chat.v2"),
        ("speedup.all (macro)>=2", "there is no domain"), ("acceptance.1.all (macro)>=0", "there is no domain"),
        ("tau@head>=2", "there is no 'head', there are ngram chain:8, head:a chain:4 T=0.7"), ("tau@plain>=1", "there is no 'plain'"),
        ("alpha@ngram chain:8>=0", "there are ngram, head:a, head:a T=0.7"), ("acceptance.9>=0", "the deepest draft there has 8 tokens"),
        ("acceptance.5@head:a chain:4 T=0.7>=0", "the deepest draft there has 4 tokens"),
    ],
)  # fmt: skip
def test_name_that_is_not_there_fails_after_hours(expression: str, said: str) -> None:
    gate = parse(expression)
    with pytest.raises(ValueError, match=said):
        check_names([gate], arms=ARMS, domains=DOMAINS)
    with pytest.raises(ValueError, match=said):
        check([gate], REPORT)
