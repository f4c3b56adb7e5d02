"""The training loop: it learns, it resumes bit by bit, it counts once, and it leaves alone what is frozen."""

import os
import runpy
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.batches import Sample
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import load_head, save_head
from spectrain.heads.eagle3 import Eagle3
from spectrain.heads.losses import draft_counts
from spectrain.target.model import Target
from spectrain.training import loop
from spectrain.training.loop import _counts, _work, train
from spectrain.training.schedule import learning_rate
from spectrain.training.setup import new_head

PROMPTS = [[7, 12, 9], [33, 50], [8, 77, 20, 64, 9], [91, 5, 17, 40]]
LAYERS = (1, 2)


BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
Samples, sample_of, row_of = (BY_HAND[name] for name in ("Samples", "sample_of", "row_of"))


def answered(target: Target, prompts: list[list[int]]) -> Samples:
    answers = generate(target, prompts, max_new_tokens=20, eos=None).rows
    rows = [row_of(prompt, row.tokens, name=str(b)) for b, (prompt, row) in enumerate(zip(prompts, answers, strict=True))]
    return Samples.of(target, rows)


@pytest.fixture(scope="module")
def samples(target: Target) -> Samples:
    return answered(target, PROMPTS)


def subset(samples: Samples, numbers: list[int]) -> Samples:
    return Samples([samples.rows[i] for i in numbers], [samples.samples[i] for i in numbers])


def fresh(target: Target, samples: Samples, **changes: Any) -> Eagle3:
    config = HeadConfig(**{"layer_ids": LAYERS, "draft_vocab_size": 100, "init_layer": "random", **changes})
    return new_head(config, target, samples.rows, seed=0)


CONFIG = TrainingConfig(epochs=6, tokens_per_step=45, lr=5e-3, ttt_steps=3, warmup=0.2)  # 2 batches an epoch


def run(head: Eagle3, samples: Samples, target: Target, out: Path, config: TrainingConfig = CONFIG, **changes: Any):
    settings = {"save": lambda head, name: None, "accelerator": Accelerator(cpu=True), "identity": "x", **changes}
    return train(head, samples, config, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=out, **settings)


def weights(head: Eagle3) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_head_does_not_learn_two_rows_by_heart(make_target, tmp_path: Path) -> None:
    """Acceptance in training and tau on the same prompts reach their upper end; `best` on disk is the head that was measured."""
    target = make_target()
    target.output_VW.mul_(4)  # a target that is sure of its words
    samples, measured = answered(target, PROMPTS[:2]), []
    head = fresh(target, samples)

    def tau(head: Eagle3) -> float:
        assert not head.training
        rows = generate(target, PROMPTS[:2], drafter=HeadDrafter(head), shape=Chain(3), max_new_tokens=20, eos=None).rows
        rounds = [r for row in rows for r in row.rounds]
        measured.append(sum(r.committed for r in rounds) / len(rounds))
        return measured[-1]

    saved: dict[str, list[float]] = {}

    def save(head: Eagle3, name: str) -> None:
        saved.setdefault(name, []).append(measured[-1])
        save_head(head, tmp_path / name, run_yaml="", made_with={})

    config = replace_config(epochs=4, tokens_per_step=40, lr=1e-2)
    result = run(head, subset(samples, [0, 1] * 35), target, tmp_path / "run", config, on_eval=tau, save=save)
    assert head.training and result.steps == 140 and len(measured) == 4
    assert min(result.history[-1]["alpha"]) > 0.85 and result.history[-1]["hit"][0] > 0.95
    assert measured[0] < 3 and result.best == max(measured) > 3.4  # 19 tokens in rounds of 4 make 3.8 at most
    assert saved["best"] == sorted(saved["best"]) and saved["best"][-1] == result.best and saved["last"] == [measured[-1]]
    assert tau(load_head(tmp_path / "best")) == result.best
    assert_same(weights(load_head(tmp_path / "last")), weights(head))


def replace_config(**changes: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({**CONFIG.model_dump(), **changes})


def test_resume_is_another_run(target: Target, samples: Samples, tmp_path: Path) -> None:
    """RE1: 6 steps in one go, and 3 + resume + 3: equal bit by bit, moments, schedule and history too."""
    config = replace_config(epochs=3)
    whole = fresh(target, samples)
    first = run(whole, samples, target, tmp_path / "whole", config)
    assert first.steps == 6

    part = fresh(target, samples)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3 of 6"):
        run(part, stopping(samples, after=6), target, tmp_path / "parts", config)
    resumed = fresh(target, samples)
    with torch.no_grad():
        for p in resumed.parameters():
            p.add_(1)  # whatever the new head was, the checkpoint counts
    second = run(resumed, samples, target, tmp_path / "parts", config)
    assert second.steps == 6
    assert_same(weights(whole), weights(resumed))
    a, b = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts"))
    assert a["step"] == b["step"] == 6 and a["schedule"]["_last_lr"] == b["schedule"]["_last_lr"]
    for mine, theirs in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True):
        assert mine["step"].dtype == torch.float32 and mine["step"] == 6
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def stopping(samples: Samples, after: int) -> Samples:
    """Sends SIGTERM to this process with sample number `after` (2 a step)."""

    class Stops(Samples):
        loaded = 0

        def __getitem__(self, i: int) -> Sample:
            self.loaded += 1
            if self.loaded == after:
                os.kill(os.getpid(), signal.SIGTERM)
            return self.samples[i]

    return Stops(samples.rows, samples.samples)


def test_finished_run_trains_on(target: Target, samples: Samples, tmp_path: Path) -> None:
    config = replace_config(epochs=1)
    head = fresh(target, samples)
    run(head, samples, target, tmp_path, config)
    before = weights(head)
    again = fresh(target, samples)
    assert run(again, samples, target, tmp_path, config).steps == 2
    assert_same(before, weights(again))


def test_signal_handlers_stay_behind(target: Target, samples: Samples, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(fresh(target, samples), stopping(samples, after=1), target, tmp_path)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 1
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".part") == []


def test_checkpoint_of_another_run_is_taken(target: Target, samples: Samples, tmp_path: Path) -> None:
    run(fresh(target, samples), samples, target, tmp_path, replace_config(steps=1))
    head = fresh(target, samples)
    before = weights(head)
    with pytest.raises(ValueError, match="other settings or data; use another output folder, or delete it"):
        run(head, samples, target, tmp_path, replace_config(steps=1), identity="y")
    assert_same(before, weights(head))


@pytest.mark.parametrize("harm", ["cut", "other version"])
def test_damaged_checkpoint_is_a_stack_trace(harm: str, target: Target, samples: Samples, tmp_path: Path) -> None:
    run(fresh(target, samples), samples, target, tmp_path, replace_config(steps=1))
    path = tmp_path / "checkpoint.pt"
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    else:
        saved = torch.load(path, weights_only=True)
        torch.save({key: value for key, value in saved.items() if key != "measured"}, path)
    with pytest.raises(ValueError, match=r"checkpoint.pt is damaged or of another version .*; delete it to start anew"):
        run(fresh(target, samples), samples, target, tmp_path, replace_config(steps=1))


def test_mixed_precision_blurs_the_targets_law(target: Target, samples: Samples, tmp_path: Path, monkeypatch) -> None:
    """The logits that p is made from stay float32 under bfloat16: with 8 bits p is wrong by a tenth, and its sum is not 1."""
    sums = []

    def spy(logits_KRV: Any, p_KRV: Any, *rest: Any) -> Any:
        sums.extend(p_RV.sum(-1) for p_RV in p_KRV)
        return draft_counts(logits_KRV, p_KRV, *rest)

    monkeypatch.setattr(loop, "draft_counts", spy)
    AcceleratorState._reset_state()  # one precision a process
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    try:
        run(fresh(target, samples), samples, target, tmp_path, replace_config(steps=1), accelerator=accelerator)
    finally:
        AcceleratorState._reset_state()
    assert len(sums) == 3 and all(torch.allclose(s, torch.ones_like(s), atol=1e-5) for s in sums)


def test_accumulated_batches_weigh_otherwise_than_one(target: Target, samples: Samples, tmp_path: Path) -> None:
    """LS2: batches of 1, 1 and 2 rows in one window equal one batch of all four."""
    uneven = Samples.of(target, samples.rows[:1] + [cut(samples.rows[i], keep) for i, keep in ((1, 4), (2, 9), (3, 12))])
    one, many, lone = fresh(target, uneven), fresh(target, uneven), fresh(target, uneven)
    run(one, uneven, target, tmp_path / "one", replace_config(epochs=2, tokens_per_step=10**6))
    run(many, uneven, target, tmp_path / "many", replace_config(epochs=2, tokens_per_step=1, accumulation=4))
    run(lone, uneven, target, tmp_path / "lone", replace_config(epochs=2, tokens_per_step=1, accumulation=7))
    for other in (many, lone):  # 7: the window is filled up with empty batches
        for name, tensor in weights(one).items():
            torch.testing.assert_close(tensor, weights(other)[name], atol=2e-5, rtol=1e-4)


def cut(row: Row, keep: int) -> Row:
    n = int(row.mask_L.argmax()) + keep
    return replace(row, ids_L=row.ids_L[:n], mask_L=row.mask_L[:n])


def test_padding_changes_the_loss(target: Target, samples: Samples, tmp_path: Path) -> None:
    """MK2: rows of unequal length in one batch: the token-weighted mean of the rows alone."""
    rows = Samples.of(target, [cut(samples.rows[0], 3), cut(samples.rows[2], 9)])

    def first_loss(chosen: Samples, name: str) -> float:
        return run(fresh(target, samples), chosen, target, tmp_path / name, replace_config(steps=1, tokens_per_step=999)).history[0]["loss"]

    together, alone = first_loss(rows, "both"), [first_loss(subset(rows, [i]), str(i)) for i in (0, 1)]
    assert together == pytest.approx((alone[0] * 2 + alone[1] * 8) / 10, rel=1e-5)  # n supervised tokens have n - 1 rows


def test_loss_is_not_that_of_the_targets_law(target: Target, samples: Samples, tmp_path: Path) -> None:
    """The first loss against float64 by hand: soft cross-entropy of row i with the target's law after token i + 1."""
    head, row = fresh(target, samples), samples.rows[2]
    one = subset(samples, [2])
    result = run(head, one, target, tmp_path, replace_config(steps=1, tokens_per_step=999))
    again = fresh(target, samples)
    L, first = len(row.ids_L), int(row.mask_L.argmax())
    mask = torch.ones(1, 1, L, L, dtype=torch.bool).tril()
    logits = target.forward(torch.tensor(row.ids_L.tolist())[None], positions_BN=torch.arange(L)[None], mask=mask, cache=None).logits_BKV[0]
    batch = one.batch([0])
    with torch.no_grad():
        for k in range(3):
            at = torch.arange(first - 1, L - 2 - k)  # tokens i + 1 ... i + 2 + k are of the answer
            drafts = list(again.rows(batch, at, target.embedding_VW, k + 1))[k][1].double()
            p = logits[at + 1 + k].double().softmax(-1)
            alpha = torch.minimum(p, drafts.softmax(-1)).sum(-1).mean().item()
            hit = (drafts.argmax(-1) == p.argmax(-1)).double().mean().item()
            assert result.history[0]["alpha"][k] == pytest.approx(alpha, abs=2e-2) and result.history[0]["hit"][k] == pytest.approx(
                hit, abs=1e-6
            )
            if k == 0:
                loss = -(p * drafts.log_softmax(-1)).sum(-1).mean().item()
                assert result.history[0]["loss"] == pytest.approx(loss, rel=2e-2)  # states are kept in bfloat16


def test_rows_without_an_answer_take_part(target: Target, samples: Samples, tmp_path: Path) -> None:
    """A row with one supervised token has nothing to learn from: no step is spent on it."""
    mixed = Samples.of(target, [cut(samples.rows[0], 1), samples.rows[1], cut(samples.rows[2], 1)])
    head = fresh(target, samples)
    result = run(head, mixed, target, tmp_path / "mixed", replace_config(epochs=1, tokens_per_step=1))
    assert result.steps == 1 and all(tensor.isfinite().all() for tensor in weights(head).values())


def test_batch_without_rows_moves_or_breaks_the_weights(target: Target, samples: Samples) -> None:
    """DI1, MK2: an empty batch, and one whose mask is all zero: loss and every gradient exactly zero, none missing."""
    unmasked = Samples.of(target, [replace(samples.rows[0], mask_L=(0,) * len(samples.rows[0]))])
    for chosen, lines in ((samples, []), (unmasked, [[0]]), (unmasked, [])):
        head = fresh(target, samples)
        work = _work(chosen, lines, CONFIG, torch.device("cpu"))
        counts = _counts(head, head, work, target.embedding_VW, target.output_VW, CONFIG)
        assert all(f.tolist() == [0.0] * 3 for f in counts.fields)
        counts.loss_K.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_nothing_to_learn_is_a_finished_run(target: Target, samples: Samples, tmp_path: Path) -> None:
    """RB1: no supervised token at all, and none with another one before it."""
    for rows in ([replace(row, mask_L=(0,) * len(row.mask_L)) for row in samples.rows], [cut(row, 1) for row in samples.rows]):
        empty = Samples.of(target, rows)
        with pytest.raises(ValueError, match="nothing to train on"):
            run(fresh(target, samples), empty, target, tmp_path)


def test_broken_gradient_spoils_the_weights(target: Target, samples: Samples, tmp_path: Path, capsys) -> None:
    """A law beyond float32 makes the loss infinite: the update is left out and said, weights stay finite."""
    broken = Samples(samples.rows, samples.samples)
    broken.samples[1] = replace(broken.samples[1], lse_M=broken.samples[1].lse_M - 1e4)
    head = fresh(target, samples)
    result = run(head, broken, target, tmp_path, replace_config(epochs=2, tokens_per_step=1))
    assert result.steps == 8 and all(tensor.isfinite().all() for tensor in weights(head).values())
    assert all(0 < point["loss"] < 9 for point in result.history)
    assert capsys.readouterr().out.count("gradient not finite, update skipped") == 2


def test_frozen_rows_move(target: Target, samples: Samples, tmp_path: Path) -> None:
    """RB3: with weight decay, the frozen copy of the output rows stays bitwise, and so does the target."""
    head = fresh(target, samples, output="frozen")
    before, of_target = weights(head), {k: v.clone() for k, v in target.model.state_dict().items()}
    run(head, samples, target, tmp_path, replace_config(epochs=5, weight_decay=0.1))
    after = weights(head)
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"]) and torch.equal(before["d2t"], after["d2t"])
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    optimizer = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["optimizer"]
    sizes = [s["exp_avg"].numel() for s in optimizer["state"].values()]
    assert sum(sizes) == trained == sum(p.numel() for p in head.parameters()) - head.lm_head.weight.numel()
    assert len(sizes) == sum(len(group["params"]) for group in optimizer["param_groups"])
    assert all(torch.equal(v, of_target[k]) for k, v in target.model.state_dict().items()) and not target.model.training
    moving = fresh(target, samples)
    run(moving, samples, target, tmp_path / "b", replace_config(epochs=1))
    assert not torch.equal(weights(moving)["lm_head.weight"], before["lm_head.weight"])


def test_learning_rate_ends_elsewhere() -> None:
    config = replace_config(warmup=0.1, final_lr=0.05)
    rates = [learning_rate(step, 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.525) and rates[100] == pytest.approx(0.05) and min(rates[10:]) >= 0.05
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(0, 1, replace_config(warmup=0.0)) == 1.0


def test_step_and_epoch_limits_save_too_late(target: Target, samples: Samples, tmp_path: Path) -> None:
    """EX1: measured at every epoch's end and at the last step, each once; both `best` and `last` are there."""
    saved = []
    result = run(
        fresh(target, samples), samples, target, tmp_path, replace_config(epochs=4, steps=5, evals_per_epoch=2),
        on_eval=lambda head: 2.0 - len(saved) / 10, save=lambda head, name: saved.append(name),
    )  # fmt: skip
    assert [point["step"] for point in result.history] == [1, 2, 3, 4, 5] and result.steps == 5
    assert saved == ["best", "last"] and result.best == 2.0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5


def test_time_limit_leaves_nothing_saved(target: Target, samples: Samples, tmp_path: Path) -> None:
    saved = []
    result = run(
        fresh(target, samples),
        samples,
        target,
        tmp_path,
        replace_config(epochs=4, max_minutes=1e-9),
        save=lambda head, name: saved.append(name),
    )
    assert result.steps == 1 and saved == ["best", "last"] and len(result.history) == 1
    assert run(fresh(target, samples), samples, target, tmp_path, replace_config(epochs=4, max_minutes=1e-9)).steps == 8
