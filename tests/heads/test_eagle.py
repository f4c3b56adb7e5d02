"""EAGLE-1 and EAGLE-2, HASS: training rows against drafting, features against the target's last states, starts, what is refused.

Legend: B lines, L tokens, R rows, K test-time steps, W target width, V vocabulary.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.config import HeadConfig, LossConfig, TrainingConfig
from spectrain.data.order import sizes
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import LAST, load_head, save_head
from spectrain.heads.eagle import Eagle
from spectrain.target.features import OnlineFeatures
from spectrain.target.model import Target
from spectrain.training import loop
from spectrain.training.fit import fit_start
from spectrain.training.loop import Trainee, _work
from spectrain.training.setup import check_config, check_training, new_head

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training" / "by_hand.py"))
EAGLE = {"kind": "eagle", "layer_ids": None, "init_layer": "last"}  # in place of what `fresh` asks for
D = runpy.run_path(str(Path(__file__).with_name("drafting.py")))
STEPS = D["STEPS"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "two layers": {"num_hidden_layers": 2},
    "window": {"sliding_window": 3},
    "window shorter than a draft": {"sliding_window": 1},
    "all at once": {"num_hidden_layers": 3, "sliding_window": 2, "bias": True},
}
PROMPTS = [[7, 12, 9], [33, 50], [8, 77, 20, 64, 9]]


def head_of(target: Target, *, draft_vocab: int = 40, **changes: Any) -> Eagle:
    """A random head over every second id, with logits far apart."""
    c = target.config
    settings = {
        "hidden_size": c.hidden_size, "target_hidden_size": c.hidden_size, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_parameters": dict(c.rope_parameters),
        "max_position_embeddings": c.max_position_embeddings, "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab,
        "layer_ids": (LAST,), "target_layers": target.num_layers,
    }  # fmt: skip
    head = Eagle(Eagle.Config(**{**settings, **changes}))
    head.start_from(
        layer=None, norm=torch.ones(c.hidden_size), output_VW=target.output_VW, train_output=True, seed=0,
        target_ids=torch.arange(draft_vocab) * (target.vocab_size // draft_vocab),
    )  # fmt: skip
    with torch.no_grad():
        for n, weight in head.named_parameters():
            if weight.dim() == 2 and n != "lm_head.weight":
                weight.mul_(5)
            elif n == "fc.bias":
                weight.copy_(torch.randn(len(weight), generator=torch.Generator().manual_seed(1)))
    return head.eval()


def samples_of(target: Target, rows: list[Row]) -> OnlineFeatures:
    return OnlineFeatures(target, rows, (LAST,))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_training_sees_other_context_than_drafting(target: Target, changes: dict[str, Any]) -> None:
    """MK1: logits of every step, and guessed features, which are what the next step reads; the setting has its say."""
    head = head_of(target, **changes)
    D["rows_are_drafts"](head, target)
    batch = D["packed"](*D["sizes_of"](head, target))
    row_R = D["rows_within"](batch)
    outputs = list(head.outputs(batch, row_R, target.embedding_VW, STEPS))
    for step, feature_RW in zip(outputs, D["features"](head, batch, row_R, target.embedding_VW), strict=True):
        torch.testing.assert_close(step.feature_RW, feature_RW, atol=1e-5, rtol=1e-5)
    plain = head_of(target)
    plain.load_state_dict({n: head.state_dict()[n] for n in plain.state_dict()})
    without = list(plain.outputs(batch, row_R, target.embedding_VW, STEPS))
    assert all(torch.allclose(a.hidden_RH, b.hidden_RH, atol=1e-3) != bool(changes) for a, b in zip(outputs, without, strict=True))


@pytest.mark.parametrize("name", ["plain", "all at once"])
def test_document_sees_its_neighbour(target: Target, name: str) -> None:
    D["neighbours_unseen"](head_of(target, **VARIANTS[name]), target)


@pytest.mark.parametrize("calls", ["BY_LEVEL", "MIXED"])
@pytest.mark.parametrize("name", ["plain", "all at once"])
def test_a_branch_sees_its_neighbour(target: Target, name: str, calls: str) -> None:
    D["branches_agree"](head_of(target, **VARIANTS[name]), target, D[calls])


@pytest.mark.parametrize("pieces", [[1] * 10, [4, 1, 3], [9, 1]])
def test_settled_tokens_in_pieces_read_otherwise(target: Target, pieces: list[int]) -> None:
    D["portions_agree"](head_of(target, num_hidden_layers=2), target, pieces)


def test_rows_that_settle_unequal_numbers_are_mixed_up(target: Target) -> None:
    D["unequal_portions_agree"](head_of(target, num_hidden_layers=2), target)


@pytest.mark.parametrize(("of_head", "of_target"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_embeddings_of_another_precision_change_the_draft(target: Target, of_head: torch.dtype, of_target: torch.dtype) -> None:
    D["precisions_agree"](head_of(target, bias=True), target, of_head, of_target)


def test_a_row_reads_its_own_answer(target: Target) -> None:
    """Gradients show what step k of row i depends on: tokens up to i + 1 + k, states up to i; and that they run through all steps."""
    head, i = head_of(target), 3
    for k in range(STEPS):
        embed_VW = target.embedding_VW.clone().requires_grad_()
        states_BLW = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        batch = SimpleNamespace(ids_BL=torch.arange(12)[None] + 40, mask_BL=None, states_BLF=states_BLW, doc_BL=None, position_BL=None)
        outputs = list(head.outputs(batch, torch.tensor([i]), embed_VW, k + 1))
        features = [step.feature_RW for step in outputs]
        by_embed, by_state, *by_feature = torch.autograd.grad(features[-1].sum(), (embed_VW, states_BLW, *features[:-1]))
        assert (by_embed.abs().sum(-1) > 0).nonzero()[:, 0].tolist() == list(range(41, 40 + i + 2 + k))
        assert (by_state[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist() == list(range(i + 1))
        assert all(g.any() for g in by_feature)


@pytest.mark.parametrize("name", ["plain", "bias", "all at once"])
def test_checkpointing_changes_or_kills_gradients(target: Target, name: str) -> None:
    D["checkpointing_agrees"](head_of(target, **VARIANTS[name]), target)


@pytest.mark.parametrize("name", ["bias", "two layers"])
def test_autocast_rounds_the_residual_stream(target: Target, name: str) -> None:
    """Products are bfloat16; the stream and what is handed on are float32 at every step."""
    head = head_of(target, **VARIANTS[name]).train()
    batch = D["packed"](*D["sizes_of"](head, target))
    streams: list[torch.dtype] = []
    for layer in head.layers:
        layer.register_forward_hook(lambda _, inputs, out: streams.extend((inputs[0].dtype, out.dtype)))
    exact_KRW, rounded_KRW = (
        torch.stack([step.feature_RW for step in outputs])
        for on in (False, True)
        for outputs in [_outputs(head, batch, target, autocast=on)]
    )
    assert set(streams) == {torch.float32} and len(streams) == 4 * STEPS * len(head.layers)
    assert 0 < (rounded_KRW - exact_KRW).norm() < 0.02 * exact_KRW.norm()


def _outputs(head: Eagle, batch: SimpleNamespace, target: Target, *, autocast: bool) -> list[Any]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return list(head.outputs(batch, D["rows_within"](batch), target.embedding_VW, STEPS))


def seer(target: Target, draft_vocab: int | None = None) -> Eagle:
    """Of a target whose last state depends on the newest token alone, the head that knows it: e(x_{i + 1}) times a number is f_{i + 1}."""
    c = target.config
    head = head_of(target, draft_vocab=draft_vocab or target.vocab_size, num_attention_heads=1, num_key_value_heads=1, head_dim=2)
    with torch.no_grad():
        head.fc.weight.copy_(torch.eye(c.hidden_size, 2 * c.hidden_size) * c.hidden_size**0.5)
        for weight in (head.layers[0].self_attn.o_proj.weight, head.layers[0].mlp.down_proj.weight):
            weight.zero_()
    return head


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_feature_answers_to_another_token(make_table_target, shift: int) -> None:
    """Row i at step k is compared with the last state of token i + 1 + k: the loss of the head that knows these states is nothing, and
    one that knows the states of the token before or behind has a large one, at every step."""
    table_VV = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
    target = make_table_target(table_VV)
    head = seer(target)
    ids = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()
    samples = samples_of(target, [Row("a", "d", ids, [0] * 4 + [1] * 16)])
    config = TrainingConfig(ttt_steps=3, tokens_per_step=99, loss=LossConfig(mix={"smooth_l1": 1.0}))
    embed_VW = target.embedding_VW.detach().clone()
    if shift:  # its embedding of token i + 1 is that of the token before or behind
        embed_VW[ids] = embed_VW[torch.tensor(ids).roll(-shift)]
    trainee = Trainee(head.train(), config, embed_VW=embed_VW, output_VW=target.output_VW.detach())
    work = _work(samples, [[0]], config, torch.device("cpu"))
    losses = trainee(work).counts.means()["loss"]
    assert all(loss < 1e-6 if shift == 0 else loss > 0.1 for loss in losses), losses


def test_table_is_not_drafted_by_the_head_that_knows_it(make_table_target) -> None:
    """The same in drafting: every draft of the head that knows the next last state is accepted."""
    target = make_table_target(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)) * 3)
    rows = generate(target, [[3, 4]], drafter=HeadDrafter(seer(target)), shape=Chain(4), max_new_tokens=21, eos=None).rows
    assert [r.committed for r in rows[0].rounds] == [5] * 4


@pytest.mark.parametrize(
    ("ttt_steps", "mix", "noise"),
    [(1, {"smooth_l1": 1.0, "soft_ce": 0.1}, 0.2), (3, {"smooth_l1": 1.0, "soft_ce": 0.1, "top_k": 1.0}, 0.0)],
    ids=["EAGLE-1", "HASS"],
)
def test_conversation_learnt_by_heart_is_not_drafted(
    target: Target, tmp_path: Path, ttt_steps: int, mix: dict[str, float], noise: float
) -> None:
    """Chains of as many drafts as there were steps are accepted whole in every round but the last, which the answer's end cuts."""
    prompt, K = [7, 12, 9, 33], ttt_steps
    plain = generate(target, [prompt], max_new_tokens=21, eos=None).rows[0].tokens
    samples = samples_of(target, [BY_HAND["row_of"](prompt, plain)])
    head = BY_HAND["fresh"](target, samples, **EAGLE, draft_vocab_size=len(set(plain)), output="frozen", bias=True)
    output_VdW = head.lm_head.weight.detach().clone()
    config = TrainingConfig(
        epochs=100, ttt_steps=K, lr=1e-2, warmup=0.1, eval_steps=1000, noise=noise / 25, loss=LossConfig(mix=mix, top_k=5)
    )
    BY_HAND["run"](head, samples, target, tmp_path, config)
    row = generate(target, [prompt], drafter=HeadDrafter(head.eval()), shape=Chain(K), max_new_tokens=21, eos=None).rows[0]
    assert row.tokens == plain and all(r.committed == K + 1 for r in row.rounds[:-1]), [r.committed for r in row.rounds]
    assert torch.equal(head.lm_head.weight, output_VdW)


@torch.no_grad()
def test_fresh_head_guesses_nothing(make_target, tmp_path: Path) -> None:
    """The first guess is the least-squares one of the target's own states, made once: by hand in float64; what came from a checkpoint or a
    head directory is left alone."""
    target = make_target(initializer_range=0.1)
    rows = [Row(str(i), "d", ids, [0, 0, *[1] * 28]) for i, ids in enumerate(torch.randint(0, 100, (50, 30)).tolist())]
    samples = samples_of(target, rows)
    head = new_head(HeadConfig(kind="eagle", draft_vocab_size=60), target, rows, seed=0)
    assert all(p.isfinite().all() for p in head.parameters()) and not head.fitted
    assert torch.equal(head.lm_head.weight, target.output_VW[head.target_ids])
    of_rows = sizes(rows)
    (note,) = fit_start(head, samples, of_rows, target.embedding_VW, shares={"d": 50})
    used = [samples[i] for i in np.random.default_rng(0).permutation(50)[:37]]  # 28 tokens each: 32 a width of 32 are wanted
    assert f"fitted to {37 * 27} states" in note and head.fitted
    ids_SL, f_SLW = torch.stack([s.ids_L for s in used]), torch.stack([s.states.float() for s in used]).double()
    read_RX = torch.cat([target.embedding_VW[ids_SL[:, 2:29]].double(), f_SLW[:, 1:28]], dim=2).flatten(0, 1)
    next_RW = torch.stack([s.last.float()[:27] for s in used]).double().flatten(0, 1)  # of tokens 2 to 28
    usual_X = read_RX.square().mean(0).view(2, 32).median(dim=1).values.repeat_interleave(32)
    guess_XW = torch.linalg.solve(read_RX.T @ read_RX + 32 * usual_X.diag(), read_RX.T @ next_RW)
    torch.testing.assert_close(head.fc.weight, guess_XW.T.float(), atol=1e-4, rtol=1e-3)
    error, variance = (next_RW - read_RX @ guess_XW).square().mean(), next_RW.var(0).mean()
    assert error < 0.7 * variance
    save_head(head, tmp_path / "head", run_yaml="", made_with={})
    again = new_head(HeadConfig(kind="eagle", draft_vocab_size=60), target, rows, seed=0, start=load_head(tmp_path / "head"))
    for kept in (head, again):
        assert fit_start(kept, samples, of_rows, target.embedding_VW, shares={"d": 50}) == []
        assert torch.equal(kept.fc.weight, head.fc.weight)


def test_few_states_make_a_wild_guess(target: Target) -> None:
    """Fewer rows than unknowns: the guess stays small."""
    rows = [Row("a", "d", torch.randint(0, 100, (12,)).tolist(), [0] * 2 + [1] * 10)]
    head = new_head(HeadConfig(kind="eagle", draft_vocab_size=60), target, rows, seed=0)
    assert fit_start(head, samples_of(target, rows), sizes(rows), target.embedding_VW, shares={"d": 1})
    assert head.fc.weight.isfinite().all() and float(head.fc.weight.detach()[:, 32:].norm()) < 3


def test_start_is_fitted_to_rows_that_the_run_leaves_out(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a domain that is never drawn are not read: the guess is that of a run without them."""
    drawn = BY_HAND["random_rows"](4)
    rows = [*drawn, *(Row(f"x{i}", "left out", [7] * 30, [0] * 3 + [1] * 27) for i in range(4))]
    alone, beside = (BY_HAND["fresh"](target, samples_of(target, drawn), **EAGLE) for _ in range(2))
    same = {"steps": 1, "lr": 1e-12}
    BY_HAND["run"](alone, samples_of(target, drawn), target, tmp_path / "alone", TrainingConfig(**same))
    weights = {"d": 1.0, "left out": 0.0}
    BY_HAND["run"](beside, samples_of(target, rows), target, tmp_path / "beside", TrainingConfig(domain_weights=weights, **same))
    told = [line for line in capsys.readouterr().out.splitlines() if "first guess is fitted" in line]
    assert len(told) == 2 and told[0].partition(" in ")[0] == told[1].partition(" in ")[0]
    torch.testing.assert_close(beside.fc.weight, alone.fc.weight, atol=1e-4, rtol=1e-3)


def test_average_of_no_step_is_measured(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first update the weights are the fitted ones; the average is of what stood there before."""
    samples, guesses, seen, missed = samples_of(target, BY_HAND["random_rows"](4)), [], [], iter(["gradient not finite"])
    fit, update = Eagle.fit, loop._update
    monkeypatch.setattr(Eagle, "fit", lambda self, guess: (guesses.append(guess), fit(self, guess))[1])
    monkeypatch.setattr(loop, "_update", lambda *args: next(missed, None) or update(*args))

    def measure(head: Eagle) -> dict[str, float]:
        seen.append(head.fc.weight.detach().clone())
        return {"measured_tau": 1.0}

    config = TrainingConfig(eval_steps=1, steps=2, ema=0.9, tokens_per_step=10)
    BY_HAND["run"](BY_HAND["fresh"](target, samples, **EAGLE), samples, target, tmp_path, config, on_eval=measure)
    assert len(seen) == 2 and torch.equal(seen[0], guesses[0]) and not torch.equal(seen[1], guesses[0])


def test_fit_takes_no_time_of_the_run(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples = [0.0], samples_of(target, BY_HAND["random_rows"](2))

    def fit(*_: Any, **__: Any) -> list[str]:
        clock[0] += 60.0
        return []

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(loop, "fit_start", fit)
    head = BY_HAND["fresh"](target, samples, **EAGLE)
    result = BY_HAND["run"](head, samples, target, tmp_path, TrainingConfig(eval_steps=1, tokens_per_step=1, max_minutes=0.5))
    assert result.steps == 1 and result.history[0]["minutes"] == 1.0


def test_start_is_fitted_again_on_resuming(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = BY_HAND["random_rows"](4)
    samples = samples_of(target, rows)
    config = TrainingConfig(epochs=2, tokens_per_step=30, ttt_steps=2, noise=0.1)
    whole, part, rest = (BY_HAND["fresh"](target, samples, **EAGLE) for _ in range(3))
    BY_HAND["run"](whole, samples, target, tmp_path / "whole", config)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        BY_HAND["stop_after"](patch, 1)
        BY_HAND["run"](part, samples, target, tmp_path / "parts", config)
    BY_HAND["run"](rest, samples, target, tmp_path / "parts", config)
    BY_HAND["assert_same"](BY_HAND["weights"](rest), BY_HAND["weights"](whole))


SHAPES = {
    "chain": Chain(4),
    "static": Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic": Tree.dynamic(top_k=3, depth=3, budget=6),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafts_change_the_text(target: Target, make_table_target, shape: Any) -> None:
    """Greedy, a batch of unequal rows: token for token what plain decoding gives, of a head that is wrong and of one that is right after
    every second token; sampled: the same again with the same seed."""
    table = make_table_target(torch.randn(100, 100, generator=torch.Generator().manual_seed(0)) * 3)
    half = seer(table)
    half.fc.weight.data[:, 1:100:2] = 0
    settings = {"shape": shape, "max_new_tokens": 20, "eos": None}
    for model, head in ((target, head_of(target, num_hidden_layers=2, sliding_window=4, bias=True)), (table, half)):
        rows = generate(model, PROMPTS, drafter=HeadDrafter(head), **settings).rows
        assert [r.tokens for r in rows] == [r.tokens for r in generate(model, PROMPTS, max_new_tokens=20, eos=None).rows]
    accepted = [round.accepted for row in rows for round in row.rounds]
    assert 0 in accepted and max(accepted) > 0
    found = [generate(table, PROMPTS, drafter=HeadDrafter(half), temperature=1.0, seed=3, **settings).rows for _ in range(2)]
    assert [r.tokens for r in found[0]] == [r.tokens for r in found[1]] and any(r.accepted for row in found[0] for r in row.rounds)


def test_loaded_head_says_something_else(target: Target, tmp_path: Path) -> None:
    head = head_of(target, num_hidden_layers=2, bias=True)
    save_head(head, tmp_path / "head", run_yaml="", made_with={})
    loaded = load_head(tmp_path / "head")
    assert isinstance(loaded, Eagle) and loaded.config == head.config and loaded.layer_ids == (LAST,)
    BY_HAND["assert_same"](loaded.state_dict(), head.state_dict())
    names = {n.rpartition(".")[0] for n in head.state_dict() if n.startswith("layers.0.")}
    attention = {f"layers.0.self_attn.{p}_proj" for p in "qkvo"}
    assert names == attention | {f"layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")} | {"layers.0.post_attention_layernorm"}
    assert {"fc.weight", "fc.bias", "layers.1.input_layernorm.weight"} <= head.state_dict().keys() and len(head.layers) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16, "head_dim": 4}, "a head of width 16 for a target of width 32"),
        ({"hidden_act": "gelu"}, "EAGLE heads use silu"),
        ({"num_hidden_layers": 0}, "0 layers.*needed are a layer or more"),
    ],
)
def test_sizes_that_cannot_work_are_taken(target: Target, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_of(target, **changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 16}, "a head of kind eagle has no head.hidden_size"),
        ({"norm_output": True, "num_heads": 2}, "a head of kind eagle has no head.norm_output, head.num_heads"),
        ({"layer_ids": (1, 2)}, r"head.layer_ids \[1, 2\], but a head of kind eagle reads the last state"),
    ],
)
def test_setting_of_another_family_is_taken(target: Target, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(HeadConfig(kind="eagle", draft_vocab_size=60, **settings), target)


def test_feature_loss_is_refused() -> None:
    check_training(HeadConfig(kind="eagle"), TrainingConfig(loss=LossConfig(mix={"smooth_l1": 1.0, "soft_ce": 0.1})))
    with pytest.raises(ValueError, match="a head of kind eagle3 guesses none"):
        check_training(HeadConfig(), TrainingConfig(loss=LossConfig(mix={"smooth_l1": 1.0})))
