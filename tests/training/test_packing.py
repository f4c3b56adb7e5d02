"""Packed lines train as the same rows side by side do; broken samples, mixing, re-cut vocabularies and other windows in the loop.

Legend: R counted rows.
"""

import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.codes import Codes
from spectrain.heads.eagle3 import Eagle3
from spectrain.target.model import Target
from spectrain.training import loop
from spectrain.training.schedule import learning_rate
from spectrain.training.setup import new_head

BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
Samples, row_of, random_rows = (BY_HAND[name] for name in ("Samples", "row_of", "random_rows"))
CONFIG = TrainingConfig(epochs=1, tokens_per_step=10**6, lr=5e-3, ttt_steps=4, warmup=0.2)


def changed(**changes: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({**CONFIG.model_dump(), **changes})


@pytest.fixture(scope="module")
def samples(target: Target) -> Any:
    """Twelve rows. Row 1 begins supervised, so packed behind another its span touches that one's; row 2 has two spans."""
    rows = random_rows(12)
    rows[1] = replace(rows[1], mask_L=[1] * len(rows[1]))
    rows[2] = replace(rows[2], mask_L=[0, 1, 1, 0, 0] + [1] * (len(rows[2]) - 5))
    return Samples.of(target, rows)


def fresh(target: Target, samples: Any, size: int | None = 60) -> Eagle3:
    return new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=size, init_layer="random"), target, samples.rows, seed=0)


def run(head: Eagle3, samples: Any, target: Target, out: Path, config: TrainingConfig, **changes: Any) -> loop.TrainResult:
    settings = {"save": lambda head, name: None, "accelerator": Accelerator(cpu=True), "identity": "x", **changes}
    return loop.train(head, samples, config, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=out, **settings)


def losses(head: Eagle3, samples: Any, target: Target, lines: list[list[int]], config: TrainingConfig) -> list[list[float]]:
    """Counts of a batch; the gradients are left in the head."""
    head.zero_grad()
    work = loop._work(samples, lines, config, torch.device("cpu"))
    counts = loop._counts(head, head, work, target.embedding_VW, target.output_VW[head.target_ids], config)
    loop._weighted(counts, config).backward()
    assert not work.broken
    return [f.tolist() for f in counts.fields]


def test_neighbour_in_the_line_changes_loss_or_gradient(target: Target, samples: Any) -> None:
    """Lines of one to five documents against the same rows unpacked, float32."""
    lines = [[0, 1, 2], [3], [8, 7, 6, 5, 4], [1, 9], [11, 10]]
    head = fresh(target, samples)
    packed = losses(head, samples, target, lines, changed(packing=200))
    gradients = [p.grad.clone() for p in head.parameters()]
    unpacked = losses(head, samples, target, [[i] for line in lines for i in line], CONFIG)
    assert packed[3] == unpacked[3] and min(packed[3]) > 50 and packed[2] == unpacked[2]
    torch.testing.assert_close(packed, unpacked, atol=1e-5, rtol=1e-5)
    for mine, parameter in zip(gradients, head.parameters(), strict=True):
        assert parameter.grad.any()
        torch.testing.assert_close(mine, parameter.grad, atol=1e-5, rtol=1e-5)


def test_packed_run_learns_something_else(target: Target, samples: Any, tmp_path: Path) -> None:
    heads = [fresh(target, samples) for _ in range(2)]
    for head, packing in zip(heads, (None, 64), strict=True):
        result = run(head, samples, target, tmp_path / str(packing), changed(packing=packing, epochs=5))
        assert result.steps == 5 and result.rows == {"d": 12}
    for name, tensor in heads[0].state_dict().items():
        torch.testing.assert_close(heads[1].state_dict()[name], tensor, atol=1e-4, rtol=1e-3)


def test_row_longer_than_a_line_is_cut(target: Target, samples: Any, tmp_path: Path) -> None:
    longest = max(len(row) for row in samples.rows)
    name = next(row.id for row in samples.rows if len(row) == longest)
    with pytest.raises(ValueError, match=f"training.packing: row '{name}' has {longest} tokens"):
        run(fresh(target, samples), samples, target, tmp_path, changed(packing=longest - 1))


@pytest.mark.parametrize("packing", [None, 64])
@pytest.mark.parametrize("field", ["states", "last"])
def test_one_broken_sample_of_ten_takes_the_others_along(
    target: Target, samples: Any, field: str, packing: int | None, tmp_path: Path, capsys
) -> None:
    """MK2: 9 of 10 are used, 1 is skipped, counted and named in each epoch; the weights are those of a run without it."""
    ten, nine = Samples(samples.rows[:10], samples.samples[:10]), Samples(samples.rows[:4] + samples.rows[5:10], [])
    nine.samples = samples.samples[:4] + samples.samples[5:10]
    part = getattr(ten.samples[4], field).codes.clone()
    part[0, 3] = float("inf") if field == "states" else float("nan")
    ten.samples[4] = replace(ten.samples[4], **{field: Codes(part)})
    heads = [fresh(target, nine), fresh(target, nine)]
    results = [
        run(head, some, target, tmp_path / str(len(some)), changed(epochs=3, packing=packing))
        for head, some in zip(heads, (ten, nine), strict=True)
    ]
    assert [result.skipped for result in results] == [3, 0]
    assert capsys.readouterr().out.count("1 samples left out, their states are not finite: 4\n") == 3
    for name, tensor in heads[0].state_dict().items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(tensor, heads[1].state_dict()[name], atol=1e-4, rtol=1e-3)


def test_other_vocabulary_size_needs_new_states(target: Target, samples: Any, tmp_path: Path) -> None:
    """The same samples train a head of any draft vocabulary: its law is the target's softmax, cut to the smaller set."""
    found = {}
    for size in (None, 60, 20):
        head = fresh(target, samples, size)
        found[size] = run(head, samples, target, tmp_path / str(size), CONFIG).history[0]
        assert len(head.target_ids) == (size or 100) and head.t2d.nonzero()[:, 0].tolist() == head.target_ids.tolist()
    assert all(0 < point["loss"] < 9 for point in found.values())
    assert found[20]["loss"] < found[60]["loss"] < found[None]["loss"]  # the less the vocabulary can win


def test_domain_weights_are_ignored(target: Target, samples: Any, tmp_path: Path, monkeypatch, capsys) -> None:
    rows = [replace(row, domain="ab"[i < 3]) for i, row in enumerate(samples.rows)]
    mixed, loaded = Samples(rows, samples.samples), recorded(monkeypatch)
    config = changed(epochs=2, domain_weights={"a": 1, "b": 2}, tokens_per_step=40)
    result = run(fresh(target, mixed), mixed, target, tmp_path / "a", config)
    assert result.rows == {"a": 4, "b": 8}
    drawn = Counter(i for lines in loaded for line in lines for i in line)
    assert sum(drawn[i] for i in range(3)) == 16 and sum(drawn[i] for i in range(3, 12)) == 8
    assert "12 rows an epoch: a 4 (33.3%), b 8 (66.7%)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no weight for b; no rows of c"):
        run(fresh(target, mixed), mixed, target, tmp_path / "b", changed(domain_weights={"a": 1, "c": 2}))
    assert run(fresh(target, mixed), mixed, target, tmp_path / "c", changed(rows_per_epoch=4)).rows == {"a": 3, "b": 1}


def recorded(monkeypatch) -> list[list[list[int]]]:
    """Batches that the loop loads, in order."""
    loaded: list[list[list[int]]] = []
    work: Callable[..., Any] = loop._work

    def wrapped(samples: Any, lines: list[list[int]], *rest: Any) -> Any:
        if lines:
            loaded.append(lines)
        return work(samples, lines, *rest)

    monkeypatch.setattr(loop, "_work", wrapped)
    return loaded


def test_other_window_loses_batches_or_jumps_in_rate(target: Target, samples: Any, tmp_path: Path, monkeypatch) -> None:
    """Windows of 2, then 4, then 1 batch, stopped in mid-epoch: each batch once, and the rate never leaves the curve of the data."""
    loaded, rates = recorded(monkeypatch), []
    note = loop.Progress.step
    monkeypatch.setattr(loop.Progress, "step", lambda self, step, counts, *, lr: (rates.append(lr), note(self, step, counts, lr=lr)))
    one = changed(epochs=4, tokens_per_step=1, lr=1e-3, warmup=0.0)
    run(fresh(target, samples), samples, target, tmp_path / "one", one)
    whole, curve = list(loaded), list(rates)
    assert len(whole) == 48
    loaded.clear()
    rates.clear()
    for accumulation, steps, message in ((2, 8, "stopped after step 8 of 24"), (4, 3, "stopped after step 11 of 16")):
        stop_after(monkeypatch, steps)
        with pytest.raises(KeyboardInterrupt, match=message):
            run(fresh(target, samples), samples, target, tmp_path / "parts", one.model_copy(update={"accumulation": accumulation}))
        assert len(loaded) == {2: 16, 4: 28}[accumulation]
    stop_after(monkeypatch, 100)
    assert run(fresh(target, samples), samples, target, tmp_path / "parts", one).steps == 11 + 20 and loaded == whole
    places = [*range(1, 9), 10, 12, 14, *(14 + k / 2 for k in range(1, 21))]  # in the 24 steps that the first window made
    expected = [1e-3 * learning_rate(place, 24, one) for place in places]
    assert rates == pytest.approx(expected, rel=1e-9) and rates[-1] == pytest.approx(curve[-1], rel=1e-9) == 5e-5


def stop_after(monkeypatch, steps: int) -> None:
    """The loop is asked to stop after this many steps of its own."""
    left = [steps]

    def on_any(accelerator: Any, *flags: bool) -> list[bool]:
        left[0] -= 1
        return [left[0] == 0, *flags[1:]]

    monkeypatch.setattr(loop, "_on_any", on_any)
