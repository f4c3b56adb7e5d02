"""The training loop: it learns, it counts once, it stops in time, and what it measures is what it keeps."""

import math
import runpy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from spectrain.config import TrainingConfig
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import load_head, save_head
from spectrain.heads.eagle3 import Eagle3
from spectrain.heads.losses import LossResult
from spectrain.target.model import Target
from spectrain.training import loop
from spectrain.training.loop import Trainee, _work
from spectrain.training.schedule import learning_rate

PROMPTS = [[7, 12, 9], [33, 50], [8, 77, 20, 64, 9], [91, 5, 17, 40]]


BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
Samples, row_of, changed, weights, assert_same, checkpoint = (
    BY_HAND[name] for name in ("Samples", "row_of", "changed", "weights", "assert_same", "checkpoint")
)
CONFIG = TrainingConfig(epochs=6, tokens_per_step=45, lr=5e-3, ttt_steps=3, warmup=0.2)  # 2 batches an epoch


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
    return BY_HAND["fresh"](target, samples, **{"draft_vocab_size": 100, **changes})


def run(head: Eagle3, samples: Samples, target: Target, out: Path, config: TrainingConfig = CONFIG, **changes: Any) -> loop.TrainResult:
    return BY_HAND["run"](head, samples, target, out, config, **changes)


def replace_config(**changes: Any) -> TrainingConfig:
    return changed(CONFIG, **changes)


def test_head_does_not_learn_two_rows_by_heart(make_target, tmp_path: Path) -> None:
    """Acceptance in training and tau on the same prompts reach their upper end; `best` on disk is the head that was measured."""
    target = make_target()
    target.output_VW.mul_(4)  # a target that is sure of its words
    samples, measured = answered(target, PROMPTS[:2]), []
    head = fresh(target, samples)

    def tau(head: Eagle3) -> dict[str, float]:
        assert not head.training
        rows = generate(target, PROMPTS[:2], drafter=HeadDrafter(head), shape=Chain(3), max_new_tokens=20, eos=None).rows
        rounds = [r for row in rows for r in row.rounds]
        measured.append(sum(r.committed for r in rounds) / len(rounds))
        return {"measured_tau": measured[-1], "rounds": len(rounds)}

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
    assert tau(load_head(tmp_path / "best"))["measured_tau"] == result.best and all(p["rounds"] > 0 for p in result.history)
    assert_same(weights(load_head(tmp_path / "last")), weights(head))


def test_mixed_precision_blurs_the_targets_law(target: Target, samples: Samples, tmp_path: Path, monkeypatch) -> None:
    """Under bfloat16 the masters and the target's law stay float32: loss and acceptance are near those of float32, and the law is the
    same (with 8 bits p is wrong by a tenth, and its sum is not 1)."""
    seen: list[Any] = []

    def spy(outputs: Any, labels: Any, *rest: Any) -> LossResult:
        seen.append((outputs[0].hidden_RH.dtype, labels))
        return unrolled(outputs, labels, *rest)

    unrolled = loop.unrolled_loss
    monkeypatch.setattr(loop, "unrolled_loss", spy)
    found = []
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state()  # one precision a process
        try:
            head, accelerator = fresh(target, samples), Accelerator(cpu=True, mixed_precision=precision)
            found.append(run(head, samples, target, tmp_path / precision, replace_config(steps=1), accelerator=accelerator).history[0])
        finally:
            AcceleratorState._reset_state()
        assert all(p.dtype == torch.float32 for p in head.parameters())
        states = BY_HAND["values"](checkpoint(tmp_path / precision)["states"]["optimizer"])
        assert all(t.dtype == torch.float32 for path, t in states if path.endswith(("exp_avg", "exp_avg_sq")))
    assert seen[0][1].rows_VdW.dtype == seen[1][1].rows_VdW.dtype == seen[1][1].last_PW.dtype == torch.float32
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-2) and found[1]["loss"] != found[0]["loss"]
    assert found[1]["alpha"] == pytest.approx(found[0]["alpha"], rel=2e-2)


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
        trainee = Trainee(head, CONFIG, embed_VW=target.embedding_VW.detach(), output_VW=target.output_VW.detach())
        work = _work(chosen, lines, CONFIG, torch.device("cpu"))
        result = trainee(work)
        assert not result.counts.flat().any() and float(result.total.detach()) == float(result.weight) == float(work.weight) == 0.0
        result.total.backward()
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


def test_learning_rate_ends_elsewhere() -> None:
    config = replace_config(warmup=0.1, final_lr=0.05)
    rates = [learning_rate(step, 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.525) and rates[100] == pytest.approx(0.05) and min(rates[10:]) >= 0.05
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(0, 1, replace_config(warmup=0.0)) == 1.0
    wsd = replace_config(warmup=0.1, final_lr=0.2, schedule="wsd", cooldown=0.3)
    rates = [learning_rate(step, 100, wsd) for step in range(102)]
    assert rates[4] == pytest.approx(0.5) and set(rates[9:71]) == {1.0}
    assert rates[71:101] == pytest.approx([1 - 0.8 * k / 30 for k in range(1, 31)]) and rates[101] == rates[100]
    assert learning_rate(95, 100, replace_config(warmup=0.9, schedule="wsd", cooldown=0.5, final_lr=0.0)) == pytest.approx(0.5)
    flat = replace_config(warmup=0.1, schedule="constant")
    assert learning_rate(4, 100, flat) == pytest.approx(0.5) and {learning_rate(s, 100, flat) for s in range(9, 101)} == {1.0}


def test_step_and_epoch_limits_save_too_late(target: Target, samples: Samples, tmp_path: Path) -> None:
    """EX1: measured at every epoch's end and at the last step, each once; both `best` and `last` are there."""
    for name, changes, steps in (
        ("twice", {"evals_per_epoch": 2}, [1, 2, 3, 4, 5]),
        ("once", {"evals_per_epoch": 1}, [2, 4, 5]),
        ("steps", {"eval_steps": 3}, [3, 5]),
    ):
        saved: list[str] = []
        result = run(
            fresh(target, samples), samples, target, tmp_path / name, replace_config(epochs=4, steps=5, **changes),
            on_eval=lambda head, saved=saved: {"measured_tau": 2.0 - len(saved) / 10},
            save=lambda head, name, saved=saved: saved.append(name),
        )  # fmt: skip
        assert [point["step"] for point in result.history] == steps and result.steps == 5
        assert saved == ["best", "last"] and result.best == 2.0


def test_rejected_measurement_is_kept(target: Target, samples: Samples, tmp_path: Path) -> None:
    """What is measured is kept as it is; what cannot be written down is told at once, not at the next start."""
    config = replace_config(steps=1)
    told = {"measured_tau": 1.5, "tau_by_domain": {"a": 1.25}, "tokens": 7}
    result = run(fresh(target, samples), samples, target, tmp_path / "a", config, on_eval=lambda head: told)
    assert result.best == 1.5 and result.history[0].items() >= told.items()
    assert checkpoint(tmp_path / "a")["history"] == result.history
    with pytest.raises(TypeError, match="not JSON serializable"):
        run(fresh(target, samples), samples, target, tmp_path / "b", config, on_eval=lambda head: {"measured_tau": torch.ones(2)})


@pytest.mark.parametrize("told", [{"measured_tau": math.nan}, {"measured_tau": math.inf}, {"measured_tau": "2"}, {"tau": 2.0}])
def test_measurement_without_a_number_is_the_best(target: Target, samples: Samples, tmp_path: Path, told: dict[str, Any]) -> None:
    """Nothing is greater than NaN: it would stay the best for ever. No head is kept by it, and the head is back in training mode."""
    head, saved = fresh(target, samples), []
    with pytest.raises(ValueError, match=f"on_eval gave measured_tau {told.get('measured_tau', 'not at all')}; needed: a finite number"):
        run(head, samples, target, tmp_path, on_eval=lambda head: told, save=lambda head, name: saved.append(name))
    assert head.training and saved == []


def test_head_that_was_not_measured_replaces_the_best(target: Target, samples: Samples, tmp_path: Path) -> None:
    taus, saved = iter([None, 2.0, None, 1.5, 2.5, None]), []
    result = run(
        fresh(target, samples), samples, target, tmp_path, on_eval=lambda head: {"measured_tau": next(taus)},
        save=lambda head, name: saved.append((name, len(saved))),
    )  # fmt: skip
    assert result.best == 2.5 and [name for name, _ in saved] == ["best", "best", "best", "last"]


def test_error_of_a_measurement_spoils_the_run(target: Target, samples: Samples, tmp_path: Path) -> None:
    """It reaches the caller; the run goes on from its last checkpoint to the same end."""
    config, (head, whole) = replace_config(eval_steps=5, checkpoint_steps=2), (fresh(target, samples) for _ in range(2))

    def fails(head: Eagle3) -> dict[str, float]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run(head, samples, target, tmp_path / "parts", config, on_eval=fails)
    assert head.training and checkpoint(tmp_path / "parts")["step"] == 4
    run(head, samples, target, tmp_path / "parts", config)
    run(whole, samples, target, tmp_path / "whole", config)
    assert_same(weights(head), weights(whole))


def test_time_limit_ends_the_run_for_good(target: Target, samples: Samples, tmp_path: Path, monkeypatch, capsys) -> None:
    """A run whose time is up has saved all; called again it says so and returns; with more minutes it goes on to the same end."""
    config, saved = replace_config(epochs=2), []

    def go(minutes: float | None, out: str = "timed") -> tuple[Eagle3, loop.TrainResult]:
        head = fresh(target, samples)
        some = changed(config, max_minutes=minutes)
        return head, run(head, samples, target, tmp_path / out, some, save=lambda head, name: saved.append(name))

    result = go(1e-9)[1]
    assert (result.steps, result.total) == (1, 4) and saved == ["best", "last"] and len(result.history) == 1
    assert checkpoint(tmp_path / "timed")["step"] == 1
    capsys.readouterr()
    again = go(1e-9)[1]
    assert (again.steps, again.total) == (1, 4) and saved == ["best", "last"]
    told = capsys.readouterr().out
    assert "stands at step 1 of 4 and has had 0.0 of its 1e-09 minutes; to go on: --set training.max_minutes=" in told
    head, result = go(None)
    assert result.steps == 4 and [point["step"] for point in result.history] == [1, 2, 4]
    assert_same(weights(head), weights(go(None, "whole")[0]))


def test_waiting_for_data_is_not_told(target: Target, samples: Samples, tmp_path: Path, monkeypatch) -> None:
    class Slow(Samples):
        def batch(self, numbers: Any) -> Any:
            time.sleep(0.05)
            return super().batch(numbers)

    seen = BY_HAND["watch_steps"](monkeypatch)
    slow = Slow(samples.rows, samples.samples)
    run(fresh(target, samples), slow, target, tmp_path, replace_config(epochs=1, tokens_per_step=1, accumulation=2))
    assert len(seen) == 2 and all(0.1 <= s["wait_seconds"] <= s["step_seconds"] for s in seen)
    assert sum(s["total_tokens"] for s in seen) == sum(len(row) for row in samples.rows)


def test_average_is_not_what_is_measured_and_kept(target: Target, samples: Samples, tmp_path: Path, monkeypatch) -> None:
    """EMA by hand: d = min(ema, (1 + n) / (10 + n)); the first step is its start."""
    head, after, kept = fresh(target, samples), [], {}
    BY_HAND["watch_steps"](monkeypatch, lambda **told: after.append(weights(head)))
    measured: list[Any] = []
    run(
        head, samples, target, tmp_path, replace_config(epochs=3, ema=0.2, eval_steps=6),
        save=lambda head, name: kept.update({name: weights(head)}),
        on_eval=lambda head: (measured.append(weights(head)), {"measured_tau": 1.0})[1],
    )  # fmt: skip
    expected = after[0]["fc.weight"].double()
    for n, step in enumerate(after[1:], start=1):
        d = min(0.2, (1 + n) / (10 + n))
        expected = d * expected + (1 - d) * step["fc.weight"].double()
    assert len(after) == 6 and (1 + 1) / (10 + 1) < 0.2 < (1 + 2) / (10 + 2)
    torch.testing.assert_close(measured[0]["fc.weight"].double(), expected, atol=1e-6, rtol=1e-6)
    for name in ("best", "last"):
        assert_same(kept[name], measured[0])
    assert not torch.allclose(measured[0]["fc.weight"], after[-1]["fc.weight"], atol=1e-4)


@pytest.mark.parametrize("packing", [None, 64])
def test_noise_reaches_the_labels_or_another_row(target: Target, samples: Samples, monkeypatch, packing: int | None) -> None:
    """Uniform of width noise * 512 / tokens of the row, by row whatever line it stands in; labels stay; none out of training mode."""
    head, read, labels = fresh(target, samples), [], []
    outputs, unrolled, config = head.outputs, loop.unrolled_loss, replace_config(noise=0.2, packing=packing)
    monkeypatch.setattr(head, "outputs", lambda batch, *rest, **more: (read.append(batch), outputs(batch, *rest, **more))[1])
    monkeypatch.setattr(loop, "unrolled_loss", lambda steps, given, *rest: (labels.append(given), unrolled(steps, given, *rest))[1])
    trainee = Trainee(head, config, embed_VW=target.embedding_VW.detach(), output_VW=target.output_VW.detach())
    work = _work(samples, [[0, 1], [2]] if packing else [[0], [1], [2]], config, torch.device("cpu"))
    trainee(work)
    error_BLF = read[0].states_BLF - work.batch.states_BLF
    line_first = [(0, 0), (0, 23), (1, 0)] if packing else [(0, 0), (1, 0), (2, 0)]
    for (line, first), length in zip(line_first, (23, 22, 25), strict=True):
        at = line, slice(first, first + length)
        reach = 0.2 * 512 / length / 2
        assert 0.99 * reach < float(error_BLF[at].max()) <= reach * 1.001 and -0.99 * reach > float(error_BLF[at].min()) >= -reach * 1.001
        assert float(error_BLF[at].std()) == pytest.approx(reach / 3**0.5, rel=0.05)
    assert torch.equal(labels[0].last_PW, work.batch.last_PW) and torch.equal(read[0].mask_BL, work.batch.mask_BL)
    trainee.eval()
    trainee(work)
    assert read[1] is work.batch


def test_noise_of_a_resumed_run_is_another(target: Target, samples: Samples, tmp_path: Path, monkeypatch) -> None:
    config = replace_config(epochs=2, noise=0.05)
    whole, parts, plain = (fresh(target, samples) for _ in range(3))
    run(whole, samples, target, tmp_path / "whole", config)
    run(plain, samples, target, tmp_path / "plain", replace_config(epochs=2))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        BY_HAND["stop_after"](patch, 2)
        run(parts, samples, target, tmp_path / "parts", config)
    parts = fresh(target, samples)
    run(parts, samples, target, tmp_path / "parts", config)
    assert_same(weights(parts), weights(whole))
    assert not torch.allclose(weights(whole)["fc.weight"], weights(plain)["fc.weight"], atol=1e-4)


class Scaled(Accelerator):
    """float32 on the CPU with the scaler of float16 (accelerate gives one on a GPU only). Scales above `largest` overflow."""

    def __init__(self, scale: float, largest: float = math.inf) -> None:
        super().__init__(cpu=True)
        self.scaler, self.largest = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100), largest

    def unscale_gradients(self, optimizer: Any = None) -> None:
        for prepared in self._optimizers:
            if self.scaler.get_scale() > self.largest:
                prepared.param_groups[0]["params"][0].grad.fill_(math.inf)
            self.scaler.unscale_(prepared.optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_scaled_gradients_train_otherwise(target: Target, samples: Samples, tmp_path: Path, optimizer: str, capsys) -> None:
    """The loss scale of float16: one that overflows leaves the update out, of both optimizers, and is halved; the rest is the run
    without one; a resumed run has the scale that it had."""
    config = replace_config(epochs=3, schedule="constant", warmup=0.0, optimizer=optimizer, muon_lr=1e-3, ema=0.5)
    plain, scaled, large = (fresh(target, samples) for _ in range(3))
    run(plain, samples, target, tmp_path / "plain", config)
    run(scaled, samples, target, tmp_path / "scaled", config, accelerator=Scaled(2.0**10))
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(scaled)[name], tensor, atol=1e-5, rtol=1e-4)
    capsys.readouterr()
    run(large, samples, target, tmp_path / "large", config, accelerator=Scaled(2.0**12, largest=2.0**10))
    assert capsys.readouterr().out.count("gradient not finite, update skipped") == 2
    states = checkpoint(tmp_path / "large")["states"]
    assert states["scaler"]["scale"] == 2.0**10 and int(states["ema"]["n_averaged"]) == 4
    counters = [int(t) for path, t in BY_HAND["values"](states["optimizer"]) if path.endswith("/step")]
    assert counters and set(counters) == {4} and all(t.isfinite().all() for t in weights(large).values())
    again = Scaled(3.0)
    assert run(fresh(target, samples), samples, target, tmp_path / "large", config, accelerator=again).steps == 6
    assert again.scaler.state_dict() == states["scaler"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own doing
def test_compiled_layers_train_otherwise(target: Target, samples: Samples, tmp_path: Path, monkeypatch) -> None:
    """The layers are compiled once for all sizes (here by a backend that runs the graph as it is); names of weights stay."""
    graphs: list[Any] = []
    compile_as_usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **kwargs: compile_as_usual(call, backend=backend, **kwargs))

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain, compiled = fresh(target, samples, num_layers=2), fresh(target, samples, num_layers=2)
    run(plain, samples, target, tmp_path / "plain", replace_config(epochs=2, tokens_per_step=1))
    assert not graphs
    run(compiled, samples, target, tmp_path / "compiled", replace_config(epochs=2, tokens_per_step=1, compile=True, ema=0.9))
    assert 1 <= len(graphs) <= 4
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(compiled)[name], tensor, atol=1e-6, rtol=1e-5)
