"""Which tokens are computed and kept, and passes of many rows against a pass of each row alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spectrain.data.rows import Row
from spectrain.target import states
from spectrain.target.model import Target
from spectrain.target.states import capture_row, passes, plan_rows, readable, run_lines


def row(name: str, ids: list[int], mask: list[int], group: str = "") -> Row:
    return Row(id=name, domain="d", ids_L=np.array(ids), mask_L=np.array(mask), group=group)


def test_tokens_that_nothing_reads_are_kept() -> None:
    """Row i answers token i + 2 at the earliest: states up to two before the last supervised token, logits at supervised ones."""
    cases = {(0, 0, 1, 1, 1, 0): 3, (1, 1, 0, 0, 1, 0): 3, (0, 1): 0, (0, 0, 0): 0, (1,): 0, (0, 0, 0, 1, 1): 3}
    for mask, kept in cases.items():
        plan = plan_rows([row("r", list(range(len(mask))), list(mask))], longest=64, last_state="post_norm")
        last = max((i for i, m in enumerate(mask) if m), default=-1)
        assert len(plan.ids_T) == last + 1, "tokens behind the last supervised one are computed"
        assert plan.kept_T.tolist() == [i < kept for i in range(last + 1)] and readable(plan.rows[0]) == kept
        assert plan.asked_T.tolist() == [bool(m) for m in mask[: last + 1]]
        assert not plan_rows(plan.rows, longest=64, last_state="none").asked_T.any()


TURNS = [
    row("c#0", [7, 8, 9, 10, 11, 12], [0, 0, 0, 1, 1, 1], "c"),
    row("c#1", [7, 8, 9, 20, 21, 22, 23, 24], [0, 0, 0, 0, 0, 1, 1, 1], "c"),
    row("c#2", [7, 8, 9, 20, 21, 30, 31, 32, 33], [0] * 6 + [1] * 3, "c"),
    row("c#3", [7, 8, 9, 10, 11, 12, 40, 41, 42], [0] * 7 + [1, 1], "c"),
    row("c#4", [7, 8, 9, 10], [0, 0, 1, 1], "c"),
]


def test_shared_beginnings_are_kept_twice() -> None:
    other = row("x", [7, 8, 9, 50, 51, 52], [0, 0, 0, 1, 1, 1])  # begins alike, but is another conversation
    plan = plan_rows([*TURNS, other], longest=64, last_state="post_norm")
    assert plan.ids_T.tolist() == [7, 8, 9, 10, 11, 12, 20, 21, 22, 23, 24, 30, 31, 32, 33, 40, 41, 42, 7, 8, 9, 50, 51, 52]
    assert plan.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 5, 6, 7, 8, 6, 7, 8, 0, 1, 2, 3, 4, 5]
    for r, tokens in zip(plan.rows, plan.row_tokens, strict=True):
        assert plan.ids_T[tokens].tolist() == r.ids_L[: len(tokens)].tolist()
    kept = plan.ids_T[plan.kept_T]
    for r, runs in zip(plan.rows, plan.kept_runs, strict=True):
        assert np.concatenate([kept[a:b] for a, b in runs]).tolist() == r.ids_L[: readable(r)].tolist()
    asked = plan.ids_T[plan.asked_T]
    for r, runs in zip(plan.rows, plan.asked_runs, strict=True):
        assert np.concatenate([asked[a:b] for a, b in runs]).tolist() == r.supervised_ids.tolist()
    assert len(plan.lines) == 2
    short = plan_rows([*TURNS, other], longest=12, last_state="post_norm")
    assert max(map(len, short.lines)) <= 12 and len(short.lines) > 2


def test_passes_hold_more_than_they_may_or_lose_a_line() -> None:
    rng = np.random.default_rng(0)
    rows = [row(f"r{i}", list(range(n)), [0] + [1] * (n - 1)) for i, n in enumerate(rng.integers(2, 60, 40))]
    plan = plan_rows([*rows, *TURNS, row("long", [5] * 200, [1] * 200)], longest=64, last_state="post_norm")
    groups = passes(plan, 128)
    assert sorted(line.first for group in groups for line in group) == sorted(line.first for line in plan.lines)
    for group in groups:
        assert len(group) == 1 or max(map(len, group)) * len(group) <= 128
        assert len({len(line.branches) > 1 for line in group}) == 1
    padded = sum(max(map(len, group)) * len(group) for group in groups)
    assert padded < 1.2 * len(plan.ids_T), "much of the work is padding"


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 4}], ids=["full", "window"])
def test_shared_pass_is_not_the_single_one(make_target, settings: dict[str, int]) -> None:
    """Turns of a conversation computed as one tree, two conversations in one pass, against a pass for each row."""
    if settings:
        from transformers import MistralConfig, MistralForCausalLM

        from spectrain.kernels import tree_attention

        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, initializer_range=0.25, **settings,
        )  # fmt: skip
        model = MistralForCausalLM._from_config(config, attn_implementation=tree_attention.register()).eval().requires_grad_(False)
        target = Target(model=model, tokenizer=make_target().tokenizer, name="windowed")
    else:
        target = make_target()
    second = [replace(r, id=f"d{r.id}", ids_L=r.ids_L + 50, group="d") for r in TURNS[1:]]
    plan = plan_rows([*TURNS, *second], longest=64, last_state="post_norm")
    (lines,) = passes(plan, 128)
    assert len(lines) == 2
    found = run_lines(plan, lines, target, (1, 2), kinds=("exact", "exact"))
    for r, kept, asked in zip(plan.rows, plan.kept_runs, plan.asked_runs, strict=True):
        alone = capture_row(r, target, (1, 2))
        states_KF = torch.cat([found.states.codes[a:b] for a, b in kept])
        torch.testing.assert_close(states_KF, alone["states"][: readable(r)], atol=1e-4, rtol=1e-4)
        for name, t in (("last", found.last.codes), ("best", found.best_P.long()), ("lse", found.lse_P)):
            torch.testing.assert_close(torch.cat([t[a:b] for a, b in asked]), alone[name], atol=1e-4, rtol=1e-4)


def test_logits_of_all_tokens_are_made(target: Target) -> None:
    """The output layer, half of a small model's work, reads supervised tokens alone."""
    plan = plan_rows(TURNS, longest=64, last_state="post_norm")
    seen: list[tuple[int, ...]] = []
    hook = target.model.get_output_embeddings().register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    try:
        run_lines(plan, plan.lines, target, (1,), kinds=("int8", "bf16"))
    finally:
        hook.remove()
    assert seen == [(1, int(plan.asked_T.sum()), 100)]
    assert not target.model.get_output_embeddings()._forward_pre_hooks


def test_states_that_are_not_finite_are_stored(make_target) -> None:
    target = make_target(seed=3)
    target.model.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    plan = plan_rows(TURNS, longest=64, last_state="post_norm")
    for kinds in (("int8", "bf16"), ("bf16", "bf16")):
        with pytest.raises(ValueError, match="tiny gives states or logits that are not finite in torch.float32; load it in bfloat16"):
            run_lines(plan, plan.lines, target, (2,), kinds=kinds)


def test_logits_are_summed_wrongly_in_parts(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_PV = torch.randn(11, 30)
    monkeypatch.setattr(states, "AT_A_TIME", {"cpu": 4 * 30 * 4})
    best_P, lse_P = states._best_and_lse(logits_PV)
    assert best_P.tolist() == logits_PV.argmax(-1).tolist() and best_P.dtype == torch.int32
    torch.testing.assert_close(lse_P, logits_PV.logsumexp(-1))
