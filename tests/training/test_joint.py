"""Head and target trained together: when the target joins, what moves it, what holds it, and that a run goes on as it would have."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from spectrain.config import LoraConfig, TrainingConfig
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import LAST, load_head, save_head
from spectrain.kernels import tree_attention
from spectrain.target.adapter import law_change
from spectrain.target.features import OnlineFeatures
from spectrain.target.model import Target, load_target
from spectrain.training import setup
from spectrain.training.joint import Backbone
from spectrain.training.loop import Trainee, _work
from spectrain.training.optim import make_optimizer, set_rates

BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
random_rows, changed, weights, assert_same, checkpoint, stop_after = (
    BY_HAND[name] for name in ("random_rows", "changed", "weights", "assert_same", "checkpoint", "stop_after")
)
LORA = LoraConfig(rank=4, alpha=8, start=0.5, lr=5e-3)
CONFIG = TrainingConfig(epochs=2, ttt_steps=3, tokens_per_step=45, lr=5e-3, warmup=0.1, lora=LORA)  # 3 batches an epoch
ROWS = random_rows(10)


def lora(**changes: Any) -> LoraConfig:
    return LORA.model_copy(update=changes)


def fresh(target: Target, kind: str = "medusa") -> Any:
    own = {"layer_ids": None, "num_heads": 3} if kind == "medusa" else {}
    return BY_HAND["fresh"](target, OnlineFeatures(target, ROWS, (LAST,)), kind=kind, **own)


def run(
    target: Target, out: Path, config: TrainingConfig = CONFIG, *, kind: str = "medusa", **changes: Any
) -> tuple[Any, Backbone | None]:  # fmt: skip
    head = fresh(target, kind)
    backbone = Backbone(target, config.lora, seed=config.seed) if config.lora else None
    BY_HAND["run"](head, OnlineFeatures(target, ROWS, head.layer_ids), target, out, config, backbone=backbone, **changes)
    return head, backbone


def logits(target: Target, row: Row) -> Tensor:
    ids_1L = torch.tensor(row.ids_L.tolist())[None]
    return target.forward(ids_1L, positions_BN=torch.arange(len(row))[None], mask=None, cache=None).logits_BKV[0]


def trainee(target: Target, config: LoraConfig, *, kind: str = "medusa", seed: int = 0, **settings: Any) -> Trainee:
    """A head and a backbone, both some way from where they start, with the backbone taking part."""
    backbone = Backbone(target, config, seed=0, checkpointing=settings.get("checkpointing", False))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in backbone.weights:
            p.add_(torch.randn(p.shape, generator=g) * 0.05)
    assert backbone.join(0.5)
    return Trainee(
        fresh(target, kind), changed(CONFIG, lora=config.model_dump(), **settings), embed_VW=target.embedding_VW,
        output_VW=target.output_VW, backbone=backbone,
    )  # fmt: skip


def gradients(trained: Trainee, lines: list[list[int]]) -> tuple[float, list[Tensor]]:
    samples = OnlineFeatures(trained.backbone.original, ROWS, trained.head.layer_ids)  # type: ignore[union-attr]
    total = trained(_work(samples, lines, trained.config, torch.device("cpu"))).total
    parameters = [p for p in trained.parameters() if p.requires_grad]
    return float(total.detach()), list(torch.autograd.grad(total, parameters))


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_target_moves_before_it_joins(make_target: Callable[..., Target], tmp_path: Path, monkeypatch: Any, capsys: Any, kind: str) -> None:
    """Until half of the run head and law are bit by bit those of a run that trains the head alone; then both move. The target itself
    never does."""
    target = make_target()
    before, first = weights(target.model), logits(target, ROWS[0])
    alone, head = fresh(target, kind), fresh(target, kind)
    backbone = Backbone(target, LORA, seed=0)
    seen: list[tuple[Any, Tensor]] = []
    now = {"head": alone, "target": target}
    BY_HAND["watch_steps"](monkeypatch, lambda **told: seen.append((weights(now["head"]), logits(now["target"], ROWS[0]))))
    samples = OnlineFeatures(target, ROWS, head.layer_ids)
    BY_HAND["run"](alone, samples, target, tmp_path / "alone", changed(CONFIG, lora=None))
    steps, now = len(seen), {"head": head, "target": backbone.target}
    BY_HAND["run"](head, samples, target, tmp_path / "both", CONFIG, backbone=backbone)
    told = capsys.readouterr().out
    half = steps // 2
    assert steps == 6 and len(seen) == 12 and told.count(f"step {half}: the target is trained from here on, too") == 1
    for step in range(half):
        assert_same(seen[step][0], seen[steps + step][0])
        assert torch.equal(seen[steps + step][1], first)
    for step in range(half, steps):
        assert not torch.equal(seen[steps + step][1], first)
    assert any(not torch.equal(t, seen[steps - 1][0][name]) for name, t in seen[-1][0].items())
    assert_same(weights(target.model), before)
    assert torch.equal(logits(target, ROWS[0]), first) and not backbone.target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


def test_divergence_does_not_hold_the_law(target: Target, tmp_path: Path) -> None:
    """Two runs of the same data: with the divergence in the loss the law ends much closer to where it was."""
    apart = {}
    for weight in (0.0, 10.0):
        config = changed(CONFIG, lora=lora(weight=weight, start=0.0, lr=2e-2).model_dump())
        _, backbone = run(target, tmp_path / str(weight), config)
        assert backbone is not None
        apart[weight] = law_change(target, backbone.target, ROWS)
    assert apart[0.0].tokens == apart[10.0].tokens == sum(row.supervised for row in ROWS)
    assert 0 < apart[10.0].kl_nats < 0.5 * apart[0.0].kl_nats


def test_loss_is_not_the_heads_with_the_divergence(target: Target) -> None:
    """Against float64 by hand, values and gradients: weight times the sum of KL(original, adapted) after the tokens in hand of all rows
    of the head's first step; and the head's own loss reaches the adapter, too."""
    without, trained = (trainee(target, lora(weight=weight)) for weight in (0.0, 3.0))
    backbone = trained.backbone
    assert backbone is not None
    found, plain = gradients(trained, [[0], [1]]), gradients(without, [[0], [1]])
    total = torch.zeros((), dtype=torch.float64)
    for row in ROWS[:2]:
        first, L = int(row.mask_L.argmax()), len(row)
        out = backbone.target.run(
            torch.tensor(row.ids_L.tolist())[None], positions_BN=torch.arange(L)[None], mask=None, cache=None
        ).logits_BKV[0]
        p_NV, q_NV = (x[first : L - 1].double().log_softmax(-1) for x in (logits(target, row), out))
        total = total + (p_NV.exp() * (p_NV - q_NV)).sum()
    wanted = 3 * float(total.detach())
    assert wanted > 3e-3 and found[0] - plain[0] == pytest.approx(wanted, rel=1e-3)
    by_hand = torch.autograd.grad(total, list(backbone.weights))
    of_head = len(found[1]) - len(by_hand)
    for whole, head, slope in zip(found[1][of_head:], plain[1][of_head:], by_hand, strict=True):
        torch.testing.assert_close(whole - head, 3 * slope, atol=2e-4, rtol=2e-3)
        assert head.abs().max() > 0 and slope.abs().max() > 0
    for whole, head in zip(found[1][:of_head], plain[1][:of_head], strict=True):
        torch.testing.assert_close(whole, head)


@pytest.fixture(scope="module")
def windowed(target: Target) -> Target:
    """A target whose layers see the last five tokens."""
    sizes = {name: getattr(target.config, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=5, initializer_range=0.25)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MistralForCausalLM._from_config(config, attn_implementation=tree_attention.register())
    return Target(model=model.eval().requires_grad_(False), tokenizer=target.tokenizer, name="windowed")


@pytest.mark.parametrize(("kind", "window"), [("medusa", True), ("eagle3", False)])
def test_rows_see_each_other(request: Any, target: Target, kind: str, window: bool) -> None:
    """Padded side by side, packed in lines, or recomputed in the backward pass: loss and gradients are those of the rows alone."""
    target = request.getfixturevalue("windowed") if window else target
    alone = [gradients(trainee(target, LORA, kind=kind), [[i]]) for i in range(3)]
    wanted = [sum(parts) for parts in zip(*(found[1] for found in alone), strict=True)]
    for lines, settings in ([[0], [1], [2]], {}), ([[0, 1], [2]], {"packing": 64}), ([[0], [1], [2]], {"checkpointing": True}):
        total, found = gradients(trainee(target, LORA, kind=kind, **settings), lines)
        assert total == pytest.approx(sum(part for part, _ in alone), rel=1e-4), settings
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("after", [1, 3])
def test_resumed_run_differs(target: Target, tmp_path: Path, monkeypatch: Any, after: int) -> None:
    """Stopped while the head learns alone, or when both do: weights, average and adapter end as in one go, dropout's draws as well."""
    config = changed(CONFIG, ema=0.9, accumulation=2, lora=lora(dropout=0.2).model_dump())
    whole, backbone = run(target, tmp_path / "whole", config)
    with monkeypatch.context() as patch:
        stop_after(patch, after)
        with pytest.raises(KeyboardInterrupt, match=f"stopped after step {after} of 4"):
            run(target, tmp_path / "parts", config)
    assert checkpoint(tmp_path / "parts")["step"] == after
    again, other = run(target, tmp_path / "parts", config)
    assert backbone is not None and other is not None
    assert_same(weights(again), weights(whole))
    assert_same(weights(other.weights), weights(backbone.weights))
    one, two = (checkpoint(tmp_path / name)["states"] for name in ("whole", "parts"))
    BY_HAND["assert_same_state"](one, two)
    assert set(one) == {"head", "optimizer", "ema", "adapter"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adapter_has_the_rate_of_the_head(target: Target, optimizer: str) -> None:
    """Its own rate by the same schedule, and no decay, which would pull the target back by a force of its own; all is clipped together."""
    trained = trainee(target, LORA, kind="eagle3", optimizer=optimizer, weight_decay=0.1)
    assert trained.backbone is not None
    found = make_optimizer(trained.head, trained.config, list(trained.backbone.weights))
    set_rates(found, 0.5, trained.config)
    groups = [g for g in found.param_groups if any(p is trained.backbone.weights[0] for p in g["params"])]
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [(0.5 * LORA.lr, 0.0, 42)]
    assert sum(len(g["params"]) for g in found.param_groups) == sum(p.requires_grad for p in trained.parameters())
    set_rates(found, 0.5, trained.config, gain=0.25)
    assert groups[0]["lr"] == 0.125 * LORA.lr and all(g["lr"] == getattr(trained.config, g["rate"]) / 2 for g in found.param_groups[:-1])
    assert [trained.backbone.gain(place, 20, 0.2) for place in (9, 10, 11, 13, 14, 20)] == [0.0, 0.25, 0.5, 1.0, 1.0, 1.0]
    changed_rate = trained.config.model_copy(update={"lora": lora(lr=1e-9)})
    set_rates(found, 1.0, changed_rate)
    assert groups[0]["lr"] == 1e-9 and found.param_groups[0]["lr"] > 1e-9


def test_dropout_stays_on_or_off(target: Target) -> None:
    """On in the adapter while training, off when it is measured; the frozen modules never change their mode."""
    trained = trainee(target, lora(dropout=0.5))
    backbone, samples = trained.backbone, OnlineFeatures(target, ROWS, (LAST,))
    assert backbone is not None
    work = _work(samples, [[0]], trained.config, torch.device("cpu"))

    def last_states() -> Tensor:
        with torch.no_grad():
            return backbone(work.batch, (LAST,))[1]

    on, again = last_states(), last_states()
    trained.eval()
    off, still = last_states(), last_states()
    assert not torch.equal(on, again) and torch.equal(off, still)
    trained.train()
    assert not torch.equal(last_states(), off) and not backbone.target.layers[0].self_attn.training
    assert [m.training for n, m in backbone.named_modules() if n.endswith("lora_dropout.default")] == [True] * 21


def test_saved_head_and_adapter_answer_otherwise(target: Target, tmp_path: Path) -> None:
    """What is read back from disk, the adapter merged into the weights, drafts and answers as head and target did when training ended."""
    folder = tmp_path / "target"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    found: dict[str, Any] = {}
    prompts = [row.prompt_ids for row in ROWS[:4]]

    def answers(some: Target, head: Any) -> list[tuple[list[int], list[tuple[int, int]]]]:
        drafted = generate(some, prompts, drafter=HeadDrafter(head), shape=Chain(3), max_new_tokens=24, eos=None).rows
        plain = generate(some, prompts, max_new_tokens=24, eos=None).rows
        assert [row.tokens for row in drafted] == [row.tokens for row in plain]
        return [(row.tokens, [(r.drafted, r.accepted) for r in row.rounds]) for row in drafted]

    config = changed(CONFIG, epochs=3, lora=lora(start=0.0, lr=2e-2, weight=0.0).model_dump())
    backbone = Backbone(target, config.lora, seed=0)

    def save(head: Any, name: str) -> None:
        if name == "last":
            found[name] = answers(backbone.target, head)
        save_head(head, tmp_path / name, run_yaml="", made_with=setup.made_with(target, {}), adapter=backbone.save)

    head = fresh(target)
    samples = OnlineFeatures(target, ROWS, head.layer_ids)
    BY_HAND["run"](head, samples, target, tmp_path / "run", config, backbone=backbone, save=save)
    loaded, adapted = load_head(tmp_path / "last"), load_target(folder, adapter=tmp_path / "last")
    assert found["last"] != answers(target, head)  # the adapter has said something
    assert answers(adapted, loaded) == found["last"]
    assert sum(accepted for _, rounds in found["last"] for _, accepted in rounds) > 0
    assert loaded.adapter == tmp_path / "last/adapter" and adapted.adapter == loaded.made_with["adapter_sha256"]
    apart = law_change(adapted, backbone.target, ROWS)
    assert apart.agree == apart.tokens and abs(apart.kl_nats) < 1e-3 < law_change(target, adapted, ROWS).kl_nats
