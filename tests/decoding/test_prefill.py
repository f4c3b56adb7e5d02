"""Prompts read in parts: the same states and logits as each alone, few passes and little padding; rows that take a place in a batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.decoding.generate import RowResult, generate
from spectrain.decoding.prefill import read_prompts
from spectrain.drafters.lookup import NGram
from spectrain.planning.batches import PASS, POSITIONS, parts
from spectrain.target.model import Target

LENGTHS = [3, 17, 4, 40, 3, 90, 16, 1]


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(6, 100, n).tolist() for n in lengths]


def passes_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the target's passes, as they are made."""
    seen: list[tuple[int, ...]] = []
    forward = Target.forward

    def watched(self: Target, ids_BN: Any, **more: Any) -> Any:
        seen.append(tuple(ids_BN.shape))
        return forward(self, ids_BN, **more)

    monkeypatch.setattr(Target, "forward", watched)
    return seen


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("positions", [1, 40, 1000])
def test_prompt_in_a_part_is_read_otherwise_than_alone(make_target: Callable[..., Target], positions: int, window: int | None) -> None:
    target = make_target()
    target.config.sliding_window = window  # of every layer, as in Mistral
    assert target.window == window
    asked, places, layers = prompts(LENGTHS), [9, 0, 3, 2, 7, 4, 5, 8], (0, 2)
    cache = target.new_cache(10, 100)
    others = [prompts([60])[0]] * 10
    read_prompts(target, cache, others, range(10), ())  # what stood there before
    before = [t[[1, 6]].clone() for t in (*cache.keys, *cache.values)]
    logits_RV, states_RLF = read_prompts(target, cache, asked, places, layers, positions)
    assert states_RLF is not None and states_RLF.shape[:2] == (8, 90)
    assert cache.lengths_B[places].tolist() == LENGTHS and cache.lengths_B[[1, 6]].tolist() == [60, 60]
    for r, ids in enumerate(asked):
        ids_1L, place_1L = torch.tensor([ids]), torch.arange(len(ids))[None]
        own = target.new_cache(1, len(ids))
        place_1L = own.stage(len(ids))
        out = target.forward(ids_1L, positions_BN=place_1L, mask=target.prompt_masks(own, place_1L), cache=own, layer_ids=layers)
        torch.testing.assert_close(logits_RV[r], out.logits_BKV[0, -1], rtol=1e-4, atol=1e-4)
        assert out.states_BNF is not None
        torch.testing.assert_close(states_RLF[r, : len(ids)], out.states_BNF[0], rtol=1e-4, atol=1e-4)
        for mine, alone in zip((*cache.keys, *cache.values), (*own.keys, *own.values), strict=True):
            torch.testing.assert_close(mine[places[r], :, : len(ids)], alone[0, :, : len(ids)], rtol=1e-4, atol=1e-4)
    after = [t[[1, 6]] for t in (*cache.keys, *cache.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "another row was written"


def test_parts_are_padded_or_too_large_or_lose_a_prompt() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4.5, 1.0, 200).astype(int) + 1, 3000).tolist()
    found = parts(lengths)
    assert sorted(b for part in found for b in part) == list(range(200))
    tops = [max(lengths[b] for b in part) for part in found]
    assert tops == sorted(tops)
    for part, top in zip(found, tops, strict=True):
        assert len(part) == 1 or len(part) * top <= POSITIONS
        assert len(part) * top - sum(lengths[b] for b in part) <= PASS
    assert sum(len(part) * top for part, top in zip(found, tops, strict=True)) < 1.1 * sum(lengths) < 0.3 * 200 * max(lengths)
    assert len(found) < 100 and parts([7] * 64) == [list(range(64))] and parts([]) == []
    assert parts([5, 3 * POSITIONS, 4]) == [[2, 0], [1]]


def test_prompts_of_like_length_take_more_passes_than_one(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = passes_seen(monkeypatch)
    generate(target, prompts([9, 8, 10]), max_new_tokens=2, eos=None, compile=False)
    assert seen == [(3, 10), (3, 1)]


ROWS = prompts([3, 4, 5, 6, 7, 9, 12, 14, 20, 30, 33])


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": list(range(11))}])
@pytest.mark.parametrize("size", [1, 3, 8, 50])
def test_row_that_takes_a_place_is_answered_otherwise(target: Target, settings: dict, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"max_new_tokens": 12, "eos": list(range(1, 12)), **settings}
    together = generate(target, ROWS, **how)
    lengths = [len(row.tokens) for row in together.rows]
    assert len(set(lengths)) > 4 and {row.finish_reason for row in together.rows} == {"stop", "length"}
    told: list[tuple[int, RowResult]] = []
    seen = passes_seen(monkeypatch)
    found = generate(target, ROWS, batch_size=size, on_row=lambda n, row: told.append((n, row)), **how)
    assert [(r.tokens, r.text, r.finish_reason, r.seed) for r in found.rows] == [
        (r.tokens, r.text, r.finish_reason, r.seed) for r in together.rows
    ]
    assert sorted(n for n, _ in told) == list(range(11)) and all(row == found.rows[n] for n, row in told)
    assert max(shape[0] for shape in seen) <= size
    rounds = sum(shape[1] == 1 for shape in seen)
    assert rounds == (sum(lengths) - 11 if size == 1 else rounds) and rounds >= (sum(lengths) - 11) / size
    if size == 3:
        assert rounds < sum(max(lengths[i : i + 3]) - 1 for i in range(0, 11, 3)), "a batch is refilled no earlier than it is empty"
        assert [n for n, _ in told] != list(range(11)), "short answers wait for long ones"


def test_answers_that_end_at_once_stop_the_refilling(make_table_target: Callable[..., Target]) -> None:
    target = make_table_target(9 * torch.eye(40)[torch.full((40,), 39)])  # 39, the end, follows everything
    rows = generate(target, [[3 + i] for i in range(9)], eos=39, batch_size=2).rows
    assert [row.tokens for row in rows] == [[39]] * 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "at least 1, found 0"), ({"batch_size": 2.5}, "found 2.5"), ({"batch_size": True}, "found True"),
        ({"max_rounds": 0}, "max_rounds must be None or an integer of at least 1"),
        ({"batch_size": 2, "drafter": NGram()}, "found the drafter NGram"), ({"batch_size": 2, "banned_tokens": [4]}, "found penalties"),
    ],
)  # fmt: skip
def test_batch_size_that_cannot_work_is_taken(target: Target, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(target, [[7], [8]], **settings)


def test_rounds_go_on_or_lose_what_they_said(target: Target) -> None:
    whole = generate(target, [[7, 40, 12], [9, 9, 9, 9]], drafter=NGram(), max_new_tokens=12, ignore_eos=True)
    cut = generate(target, [[7, 40, 12], [9, 9, 9, 9]], drafter=NGram(), max_new_tokens=12, ignore_eos=True, max_rounds=3)
    for row, full in zip(cut.rows, whole.rows, strict=True):
        assert len(row.rounds) == 3 and row.tokens == full.tokens[: 1 + sum(r.committed for r in full.rounds[:3])]
