"""Penalties, bans and processors through the whole generator: with drafts the answer is that of plain decoding, and of transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, TopKLogitsWarper

from spectrain.decoding.generate import generate
from spectrain.decoding.policies import Adaptive
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.lookup import NGram
from spectrain.drafters.scripted import Scripted
from spectrain.drafters.small_model import SmallModel
from spectrain.target.model import Target

PROMPTS = [[5, 9, 5, 9, 7], [11, 12, 13], [20] * 9]
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5}, "frequency": {"frequency_penalty": 0.7}, "presence": {"presence_penalty": 1.1},
    "min_new": {"min_new_tokens": 8, "eos": list(range(0, 100, 3))}, "banned": {"banned_tokens": tuple(range(0, 100, 2))},
    "forced": {"forced_tokens": {0: 17, 3: 4, 9: 4}},
    "ngrams": {"logits_processors": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])},
    "all": {
        "repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1, "min_new_tokens": 5, "banned_tokens": (1, 2, 3),
        "forced_tokens": {6: 50}, "logits_processors": [NoRepeatNGramLogitsProcessor(3)],
    },
}  # fmt: skip


def tokens(result) -> list[list[int]]:
    return [row.tokens for row in result.rows]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["ngram", "self", "tree", "head"])
def test_drafts_change_what_the_settings_make(target: Target, make_head, kind: str, name: str) -> None:
    drafter, shape = {
        "ngram": (NGram(shortest=1), Chain(4)), "self": (SmallModel(target), Chain(4)),
        "tree": (SmallModel(target), Tree.static([[0], [1], [0, 0], [0, 1], [0, 0, 0]])),
        "head": (HeadDrafter(make_head(target)), Tree.dynamic(3, 3, 7)),
    }[kind]  # fmt: skip
    settings = {"max_new_tokens": 20, "eos": None, **SETTINGS[name]}
    plain, fast = generate(target, PROMPTS, **settings), generate(target, PROMPTS, drafter=drafter, shape=shape, **settings)
    assert tokens(fast) == tokens(plain)
    assert tokens(plain) != tokens(generate(target, PROMPTS, **{**settings, **dict.fromkeys(SETTINGS[name], None), **NEUTRAL}))
    if kind == "self":  # the drafter obeys the same settings, on the drafts' own history
        rounds = [r for row in fast.rows for r in row.rounds[:-1]]
        assert all(r.accepted == r.drafted for r in rounds) and rounds


NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0, "banned_tokens": (),
    "forced_tokens": None, "logits_processors": (),
}  # fmt: skip


def test_repetition_penalty_is_not_that_of_transformers(target: Target, eager) -> None:
    ids = torch.tensor([PROMPTS[0]])
    wanted = eager(target).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, repetition_penalty=1.4, eos_token_id=None,
        no_repeat_ngram_size=3,
    )[0, 5:].tolist()  # fmt: skip
    found = generate(
        target, PROMPTS[:1], drafter=SmallModel(target), shape=Chain(3), max_new_tokens=20, eos=None, repetition_penalty=1.4,
        logits_processors=[NoRepeatNGramLogitsProcessor(3)],
    )  # fmt: skip
    assert tokens(found) == [wanted]


@pytest.mark.parametrize("depth", range(1, 6))
def test_forbidden_token_appears_inside_a_block(make_table_target, depth: int) -> None:
    """SA1: 10 -> 11 -> 12, and 13 second after 11; with 12 forbidden the answer is 11, 13, ..."""
    table = torch.zeros(16, 16)
    table[10, 11], table[11, 12], table[11, 13], table[13, 10], table[12, 12] = 9.0, 9.0, 5.0, 9.0, 9.0
    target = make_table_target(table)
    drafter = Scripted(lambda ids: [{10: 11, 11: 12, 12: 12, 13: 10}[ids[-1]], *[12] * 5])
    found = generate(target, [[3, 10]], drafter=drafter, shape=Chain(depth), banned_tokens=(12,), max_new_tokens=9, eos=None)
    assert tokens(found) == [[11, 13, 10, 11, 13, 10, 11, 13, 10]]


def test_top_p_acts_on_the_first_token_of_a_block_only(make_table_target) -> None:
    """SA1: p = (0.6, 0.3, 0.1) and top-p 0.5 leave token 0 alone, 1000 times."""
    target = make_table_target(torch.tensor([0.6, 0.3, 0.1]).log().expand(3, 3).clone())
    drafter = Scripted(lambda ids: [1, 2, 0, 0, 0])
    found = generate(target, [[1]] * 10, drafter=drafter, shape=Chain(5), temperature=1.0, top_p=0.5, max_new_tokens=100, eos=None, seed=3)
    assert {t for row in tokens(found) for t in row} == {0}


FORK = Tree.static([[0], [1], [0, 0], [0, 1]])
BY_ROW = [Adaptive("ema"), Adaptive("heuristic"), Adaptive("confidence")]  # on chains these look at their own row alone


@pytest.mark.parametrize("rule, shape, policy", [
    ("rejection", Chain(3), None), ("block", Chain(3), None), ("multidraft", FORK, None), ("traversal", FORK, None),
    ("point_mass", Tree.dynamic(2, 2, 5), None), ("typical", Chain(3), None), *(("block", Chain(3), policy) for policy in BY_ROW),
    *(("point_mass", Chain(3), policy) for policy in BY_ROW),
], ids=lambda v: v.kind if isinstance(v, Adaptive) else str(v))  # fmt: skip
def test_row_in_a_batch_draws_other_tokens_than_alone(target: Target, make_head, rule: str, shape, policy) -> None:
    drafter = HeadDrafter(make_head(target))
    settings = {
        "drafter": drafter, "shape": shape, "rule": rule, "policy": policy, "temperature": 0.8, "max_new_tokens": 18, "eos": 7,
        "repetition_penalty": 1.2,
    }  # fmt: skip
    together = generate(target, PROMPTS, seed=5, **settings)
    assert len({tuple(t) for t in tokens(together)}) == 3
    for prompt, row in zip(PROMPTS, together.rows, strict=True):
        alone = generate(target, [prompt], seed=row.seed, **settings).rows[0]
        assert alone.tokens == row.tokens
        assert [(r.drafted, r.accepted) for r in alone.rounds] == [(r.drafted, r.accepted) for r in row.rounds]


def test_rule_that_does_not_fit_is_taken(target: Target, make_head) -> None:
    head = HeadDrafter(make_head(target))
    for settings, message in (
        ({"rule": "block", "shape": Tree.static([[0], [1]])}, "traversal"), ({"rule": "block", "drafter": NGram()}, "point_mass|no law|q"),
        ({"rule": "nonsense"}, "unknown"), ({"rule": "traversal", "shape": Tree.dynamic(2, 2, 3)}, "point_mass"),
        ({"banned_tokens": (500,)}, "banned_tokens"), ({"forced_tokens": {-1: 3}}, "forced_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"policy": Adaptive("confidence"), "shape": Tree.static([[0], [1]])}, "confidence"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            generate(target, PROMPTS, **{"drafter": head, "shape": Chain(2), "temperature": 1.0, "max_new_tokens": 3, **settings})


def test_auto_stands_for_another_rule(target: Target, make_head) -> None:
    head, bush = HeadDrafter(make_head(target)), Tree.static([[0], [1], [0, 0]])
    for drafter, shape, temperature, wanted in (
        (head, Chain(2), 0.0, ("greedy", "point_mass")), (head, Chain(2), 1.0, ("block", "iid")),
        (head, bush, 1.0, ("traversal", "without_replacement")), (head, Tree.dynamic(2, 2, 3), 1.0, ("point_mass", "point_mass")),
        (NGram(), Chain(2), 1.0, ("point_mass", "point_mass")), (None, None, 1.0, ("point_mass", "point_mass")),
    ):  # fmt: skip
        result = generate(target, PROMPTS, drafter=drafter, shape=shape, temperature=temperature, max_new_tokens=3)
        assert (result.rule, result.law) == wanted


def test_records_leave_out_depth_and_nodes(target: Target) -> None:
    found = generate(target, PROMPTS[:1], drafter=SmallModel(target), shape=Tree.static([[0], [1], [0, 0], [0, 0, 0]]), max_new_tokens=13)
    assert all((r.drafted, r.depth, r.nodes, r.accepted) == (4, 3, 5, 3) for r in found.rows[0].rounds[:-1])
    assert set(found.rows[0].rounds[0].seconds) == {"draft", "verify", "accept", "commit"}


def test_processor_list_is_ignored_when_sampling(target: Target) -> None:
    one = [TopKLogitsWarper(1)]
    found = generate(
        target, PROMPTS, temperature=1.0, logits_processors=one, max_new_tokens=12, eos=None, drafter=NGram(), shape=Chain(3)
    )
    assert tokens(found) == tokens(generate(target, PROMPTS, max_new_tokens=12, eos=None))


def test_ranks_left_out_bias_the_law(target: Target, make_head, monkeypatch) -> None:
    """The second of two draws was not drawn from q without the first: such a tree is a point mass, or refused before any pass."""
    head, gaps = HeadDrafter(make_head(target)), Tree.static([[1], [2], [1, 0]])
    auto = generate(target, PROMPTS, drafter=head, shape=gaps, temperature=1.0, max_new_tokens=4)
    assert (auto.law, auto.rule) == ("point_mass", "point_mass")
    monkeypatch.setattr(Target, "forward", None)
    for rule in ("traversal", "multidraft"):
        with pytest.raises(ValueError, match="rank"):
            generate(target, PROMPTS, drafter=head, shape=gaps, rule=rule, temperature=1.0)
        with pytest.raises(ValueError, match="point_mass"):
            generate(target, PROMPTS, drafter=head, shape=Tree.dynamic(2, 2, 3), rule=rule, temperature=1.0, max_new_tokens=1)


@pytest.mark.parametrize(("settings", "message"), [
    ({"eos": -1}, "eos must be 'auto', None .no end., an id"), ({"eos": [1, 10**6]}, "found 1000000"),
    ({"eos": ["<end>"]}, "found '<end>'"),
    ({"drafter": "ngram"}, "st.NGram"), ({"drafter": NGram}, "st.NGram"), ({"shape": 5}, "st.Chain"), ({"policy": "ema"}, "st.Adaptive"),
    ({"stop": [5]}, "stop must be a string"), ({"seed": 1.5}, "seeds must be integers"), ({"seed": None}, "seeds must be integers"),
    ({"max_new_tokens": 2.5}, "max_new_tokens"), ({"forced_tokens": {0: 500}}, "forced_tokens"), ({"compile": 1}, "compile must be"),
    ({"policy": Adaptive("confidence"), "drafter": NGram()}, "NGram has none; use 'heuristic' or 'ema'"),
], ids=str)  # fmt: skip
def test_argument_of_another_kind_ends_in_a_traceback(target: Target, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(target, PROMPTS, **{"drafter": NGram(), "shape": Chain(2), "max_new_tokens": 3, **settings})


def test_prompts_of_another_kind_are_misread(target: Target) -> None:
    wanted = tokens(generate(target, [[5, 6], [7, 8]], max_new_tokens=3))
    assert tokens(generate(target, torch.tensor([[5, 6], [7, 8]]), max_new_tokens=3)) == wanted
    assert tokens(generate(target, [torch.tensor([5, 6]), np.array([7, 8])], max_new_tokens=3)) == wanted
    for prompts in (5, None, [5.5], [[1.7, 2]], "w5 w6", torch.tensor([5, 6])):
        with pytest.raises(ValueError, match="prompt"):
            generate(target, prompts, max_new_tokens=3)


def test_nan_is_decoded(make_target) -> None:
    target = make_target()
    target.model.model.layers[2].mlp.down_proj.weight[3, 3] = float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="tiny gives NaN for a logit"):
            generate(target, PROMPTS, temperature=temperature, max_new_tokens=3)


def test_finished_rows_keep_working(target: Target, monkeypatch) -> None:
    widths, forward = [], Target.forward

    def spy(self, ids_BN, **settings):
        widths.append(len(ids_BN))
        return forward(self, ids_BN, **settings)

    monkeypatch.setattr(Target, "forward", spy)
    prompts = [[5 + i, 6] for i in range(8)]
    rows = generate(target, prompts, drafter=SmallModel(target), shape=Chain(2), max_new_tokens=60, eos=list(range(0, 100, 9))).rows
    lengths = sorted(len(r.tokens) for r in rows)
    assert lengths[0] < lengths[-1] and widths[0] == 8 and widths[-1] < 8
    assert len({w for w in widths}) > 1 and widths == sorted(widths, reverse=True) or min(widths) < 4


def test_time_is_lost_between_phases(target: Target) -> None:
    result = generate(target, PROMPTS[:1], drafter=NGram(shortest=1), shape=Chain(3), max_new_tokens=200, eos=None, compile=False)
    row = result.rows[0]
    told = row.prefill_seconds + sum(sum(r.seconds.values()) for r in row.rounds)
    assert 0.8 * result.seconds < told < result.seconds
