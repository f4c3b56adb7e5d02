"""greedy_audit tells rounding from faults."""

import dataclasses

import pytest
import torch

from spectrain.decoding.audit import greedy_audit
from spectrain.decoding.generate import Result, generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.lookup import NGram
from spectrain.target.model import Target

PROMPTS = [[2, 1, 2], [3, 3], [0, 1, 2, 3]]


@pytest.fixture(scope="module")
def target(make_table_target) -> Target:
    """After 2 come 3 and, within 0.0004, 1; after 3 comes 2."""
    table = torch.tensor([[0.0, 3.0, 1.0, 0.5], [1.0, 0.0, 4.0, 0.5], [0.0, 5.0 - 4e-4, 0.0, 5.0], [0.0, 1.0, 3.0, 0.5]])
    return make_table_target(table)


def changed(result: Result, row: int, at: int, token: int) -> Result:
    rows = list(result.rows)
    tokens = list(rows[row].tokens)
    tokens[at] = token
    rows[row] = dataclasses.replace(rows[row], tokens=tokens)
    return dataclasses.replace(result, rows=rows)


def test_equal_answers_are_reported(target: Target) -> None:
    settings = {"max_new_tokens": 12, "eos": None}
    result = generate(target, PROMPTS, drafter=NGram(), shape=Chain(3), **settings)
    audit = greedy_audit(target, PROMPTS, result, **settings)
    assert (audit.rows, audit.equal, audit.ties, audit.faults, audit.tokens) == (3, 3, 0, 0, 36)


def test_tie_is_called_a_fault(target: Target) -> None:
    settings = {"max_new_tokens": 6, "eos": None}
    plain = generate(target, PROMPTS, **settings)
    at = plain.rows[0].tokens.index(3)  # stands after a 2, where 1 is nearly as good
    audit = greedy_audit(target, PROMPTS, changed(plain, 0, at, 1), plain=plain, **settings)
    (difference,) = audit.differences
    assert difference.kind == "tie" and (difference.row, difference.at, difference.tokens) == (0, at, (1, 3))
    assert difference.gap == pytest.approx(4e-4, abs=5e-5)
    assert greedy_audit(target, PROMPTS, changed(plain, 0, at, 1), plain=plain, tie=1e-4, **settings).faults == 1


def test_another_token_passes_for_a_tie(target: Target) -> None:
    settings = {"max_new_tokens": 6, "eos": None}
    plain = generate(target, PROMPTS, **settings)
    at = plain.rows[1].tokens.index(3)
    (difference,) = greedy_audit(target, PROMPTS, changed(plain, 1, at, 0), **settings).differences
    assert difference.kind == "fault" and difference.gap == pytest.approx(5.0, abs=0.01)


def test_early_end_passes_for_a_tie(target: Target) -> None:
    settings = {"max_new_tokens": 6, "eos": None}
    plain = generate(target, PROMPTS, **settings)
    short = dataclasses.replace(plain, rows=[dataclasses.replace(r, tokens=r.tokens[:-1]) for r in plain.rows])
    audit = greedy_audit(target, PROMPTS, short, plain=plain, **settings)
    assert audit.faults == 3 and all(d.gap is None and d.tokens[0] is None for d in audit.differences)


def test_processors_are_left_out_of_the_gap(target: Target) -> None:
    """With token 3 forbidden the target says 1 after 2; its raw logits would call that a tie with 3."""
    settings = {"max_new_tokens": 6, "eos": None, "banned_tokens": (3,)}
    plain = generate(target, PROMPTS, **settings)
    at = plain.rows[0].tokens.index(1)
    (difference,) = greedy_audit(target, PROMPTS, changed(plain, 0, at, 3), plain=plain, **settings).differences
    assert difference.kind == "fault" and difference.gap == float("inf")
