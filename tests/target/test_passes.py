"""Lean passes equal the stock model's: packed products, compiled layers, and the choice between them."""

import copy

import pytest
import torch
from torch import nn

from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.target.lean import PackedLinear, chunks, packed
from spectrain.target.model import Target
from spectrain.target.passes import COMPILE_PASSES, PACKED_PASSES, choose, passes_of, quick

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11] * 5]


@pytest.fixture(scope="module")
def wide(make_target) -> Target:
    return make_target(vocab=96, hidden_size=64, intermediate_size=96, head_dim=16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (3, 16)])
def test_packed_weights_give_another_product(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(40, 96, bias=bias), torch.randn(*shape, 40)
    with torch.no_grad():
        assert torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)


def test_packed_copy_owns_its_weights_or_changes_the_model(wide: Target) -> None:
    before = [type(m) for m in wide.model.modules()]
    copy = packed(wide.model)
    assert [type(m) for m in wide.model.modules()] == before
    assert {p.data_ptr() for p in copy.parameters()} == {p.data_ptr() for p in wide.model.parameters()}
    assert sum(isinstance(m, PackedLinear) for m in copy.modules()) == 3 * 7 + 1  # seven in a layer, and the output layer
    assert set(copy.state_dict()) == set(wide.model.state_dict())


def test_last_state_of_a_packed_pass_is_another(wide: Target) -> None:
    """What a head reads as the last state is what the output layer reads, at every position of every copy of the target."""
    ids_BL, found = torch.arange(22).reshape(2, 11), []
    for mode in ("eager", "packed"):
        target = passes_of(wide, mode, rows=2, nodes=11, strict=True).of(2, 11)
        out = target.forward(ids_BL, positions_BN=torch.arange(11).expand(2, -1), mask=None, cache=None, layer_ids=(-1,))
        assert torch.equal(out.states_BNF, out.last_BKW)
        found.append(out.states_BNF)
    assert torch.allclose(*found, atol=1e-4)


def test_odd_sizes_are_cut(make_target) -> None:
    odd = make_target(vocab=101, hidden_size=36, intermediate_size=52, head_dim=6)
    settings = {"eos": None, "max_new_tokens": 40}
    fast = generate(odd, PROMPTS, compile="auto", **settings)
    assert [r.tokens for r in fast.rows] == [r.tokens for r in generate(odd, PROMPTS, compile=False, **settings).rows]
    assert fast.mode == "packed"


def test_chunks_mix_kinds_or_lose_layers() -> None:
    assert chunks(["full"] * 30, most=10) == [(0, 10), (10, 10), (20, 10)]
    assert chunks(["full"] * 7, most=4) == [(i, 1) for i in range(7)]
    gemma = (["sliding"] * 5 + ["full"]) * 2
    assert chunks(gemma, most=10) == [(0, 5), (5, 1), (6, 5), (11, 1)]
    assert sum(size for _, size in chunks(gemma, most=3)) == 12


def test_choice_depends_on_more_than_the_call(wide: Target, monkeypatch) -> None:
    many, few = COMPILE_PASSES, PACKED_PASSES
    assert choose(wide, False, passes=many) == "eager"
    assert choose(wide, True, passes=1) == "compiled"
    assert choose(wide, "auto", passes=few - 1) == "eager"
    assert choose(wide, "auto", passes=few) == choose(wide, "auto", passes=many - 1) == "packed"
    assert choose(wide, "auto", passes=many) == "compiled"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose(wide, "auto", passes=many) == "eager" and quick(wide) is wide
    with pytest.raises(ValueError, match="compile must be True, False or 'auto', found 'max'"):
        choose(wide, "max", passes=1)  # type: ignore[arg-type]


def test_half_precision_takes_packed_float32(make_target) -> None:
    target = make_target()
    target.model.to(torch.bfloat16)
    assert choose(target, "auto", passes=COMPILE_PASSES) == "eager"
    told = "compile=True is for float32 on a cpu, or attention='triton' on cuda; tiny is bfloat16 on cpu; use compile='auto'"
    with pytest.raises(ValueError, match=told):
        choose(target, True, passes=1)


def test_packed_old_weights_answer(make_target) -> None:
    """After training in place, merging an adapter, or exchanging a module."""
    target, settings = make_target(seed=3, hidden_size=64), {"eos": None, "max_new_tokens": 40}
    generate(target, PROMPTS, **settings)
    other = make_target(seed=4, hidden_size=64).model

    def same() -> bool:
        fast, slow = (generate(target, PROMPTS, compile=c, **settings) for c in ("auto", False))
        assert fast.mode == "packed"
        return [r.tokens for r in fast.rows] == [r.tokens for r in slow.rows]

    with torch.no_grad():
        for p, q in zip(target.model.parameters(), other.parameters(), strict=True):
            p.copy_(q)
    assert same()
    target.model.model.layers[1].mlp = make_target(seed=5, hidden_size=64).model.model.layers[1].mlp
    assert same()


def test_second_target_runs_the_first_ones_code(make_target) -> None:
    """Constants that no tensor shows, such as the norm's epsilon, differ between models of one form."""
    for eps in (1e-6, 0.3):
        target = make_target(hidden_size=64, rms_norm_eps=eps)
        fast, slow = (generate(target, PROMPTS, compile=c, eos=None, max_new_tokens=24) for c in (True, False))
        assert fast.mode == "compiled" and [r.tokens for r in fast.rows] == [r.tokens for r in slow.rows]


@pytest.mark.parametrize("shape", [Chain(4), Tree.dynamic(3, 3, 7)], ids=str)
def test_compiled_answers_differ(wide: Target, make_head, shape) -> None:
    """Several rows that end one by one; the states that the head reads come from compiled layers."""
    drafter = HeadDrafter(make_head(wide))
    settings = {"drafter": drafter, "shape": shape, "max_new_tokens": 30}
    eager, fast = (generate(wide, PROMPTS, compile=c, **settings) for c in (False, True))
    assert (eager.mode, fast.mode) == ("eager", "compiled")
    assert [r.tokens for r in fast.rows] == [r.tokens for r in eager.rows]
    rounds = [[(s.drafted, s.accepted) for s in r.rounds] for r in fast.rows]
    assert rounds == [[(s.drafted, s.accepted) for s in r.rounds] for r in eager.rows]


def test_compiled_logits_and_states_differ(wide: Target) -> None:
    passes = passes_of(wide, "compiled", rows=2, nodes=5, strict=True)
    fast, found = passes.of(2, 5), []
    assert passes.of(1, 5) is passes.rest and fast is passes.main
    for target in (wide, fast):
        cache = target.new_cache(2, 40)
        positions = cache.stage(6)
        ids_BL = torch.arange(22).reshape(2, 11)
        wide.forward(ids_BL[:, :6], positions_BN=positions, mask=wide.prompt_masks(cache, positions), cache=cache)
        cache.commit(torch.tensor([6, 4]))
        positions = cache.stage(5)
        line_BNN = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 5, 5)
        out = target.forward(
            ids_BL[:, 6:], positions_BN=positions, mask=target.masks(cache, line_BNN), cache=cache, layer_ids=(0, 1, 2, 3, -1)
        )
        assert torch.equal(out.states_BNF[..., -64:], out.last_BKW)
        found.append((out.logits_BKV, out.states_BNF, torch.cat(cache.keys)[:, :, :9]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_model_that_cannot_be_compiled_ends_the_call(make_target, monkeypatch) -> None:
    target = make_target()

    def broken(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("spectrain.target.passes.CompiledTarget.prepare", broken)
    with pytest.raises(ValueError, match="tiny cannot be compiled here .no C.. compiler.; use compile=False or compile='auto'"):
        generate(target, PROMPTS, compile=True, max_new_tokens=4)
    monkeypatch.setattr("spectrain.target.passes.COMPILE_PASSES", 4)
    assert generate(target, PROMPTS, compile="auto", max_new_tokens=4).mode == "packed"


def test_packed_copies_are_lost_or_shared_with_a_copy(make_target, make_head) -> None:
    """Of a target and a head that have answered: their deep copies answer with weights of their own."""
    target = make_target(seed=3, hidden_size=64)
    drafter, settings = HeadDrafter(make_head(target)), {"eos": None, "max_new_tokens": 24}
    before = generate(target, PROMPTS, drafter=drafter, **settings)
    assert before.mode == "packed" and "packed" in drafter.copies and isinstance(drafter.copies["packed"].lm_head, PackedLinear)
    other, its_drafter = copy.deepcopy((target, drafter))
    assert [r.tokens for r in generate(other, PROMPTS, drafter=its_drafter, **settings).rows] == [r.tokens for r in before.rows]
    with torch.no_grad():
        its_drafter.head.lm_head.weight.zero_()
    changed, same = (generate(other, PROMPTS, drafter=d, **settings) for d in (its_drafter, drafter))
    assert [r.tokens for r in changed.rows] == [r.tokens for r in before.rows]
    drafted = [[[s.accepted for s in r.rounds] for r in result.rows] for result in (before, same, changed)]
    assert drafted[0] == drafted[1] and drafted[0] != drafted[2]
