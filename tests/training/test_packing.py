"""Packed lines train as the same rows side by side do; mixing, re-cut vocabularies and other windows in the loop.

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

from spectrain.config import TrainingConfig
from spectrain.heads.eagle3 import Eagle3
from spectrain.heads.losses import Counts
from spectrain.target.model import Target
from spectrain.training import loop
from spectrain.training.schedule import learning_rate

BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
Samples, random_rows, fresh, changed, run = (BY_HAND[name] for name in ("Samples", "random_rows", "fresh", "changed", "run"))
CONFIG = TrainingConfig(epochs=1, tokens_per_step=10**6, lr=5e-3, ttt_steps=4, warmup=0.2)


@pytest.fixture(scope="module")
def samples(target: Target) -> Any:
    """Twelve rows. Row 1 begins supervised, so packed behind another its span touches that one's; row 2 has two spans."""
    rows = random_rows(12)
    rows[1] = replace(rows[1], mask_L=[1] * len(rows[1]))
    rows[2] = replace(rows[2], mask_L=[0, 1, 1, 0, 0] + [1] * (len(rows[2]) - 5))
    return Samples.of(target, rows)


def losses(head: Eagle3, samples: Any, target: Target, lines: list[list[int]], config: TrainingConfig) -> tuple[float, Counts]:
    """Loss and counts of a batch; the gradients are left in the head."""
    head.zero_grad()
    work = loop._work(samples, lines, config, torch.device("cpu"))
    trainee = loop.Trainee(head, config, embed_VW=target.embedding_VW.detach(), output_VW=target.output_VW.detach())
    result = trainee(work)
    result.total.backward()
    assert not work.broken and float(result.weight) == pytest.approx(float(work.weight), rel=1e-6)
    return float(result.total.detach()), result.counts


@pytest.mark.parametrize("weighting", ["tokens", "rows"])
def test_neighbour_in_the_line_changes_loss_or_gradient(target: Target, samples: Any, weighting: str) -> None:
    """Lines of one to five documents against the same rows unpacked, float32."""
    lines = [[0, 1, 2], [3], [8, 7, 6, 5, 4], [1, 9], [11, 10]]
    head, loss = fresh(target, samples), {"weighting": weighting, "decay": 0.9}
    packed, counts = losses(head, samples, target, lines, changed(CONFIG, packing=200, loss=loss))
    gradients = [p.grad.clone() for p in head.parameters()]
    unpacked, others = losses(head, samples, target, [[i] for line in lines for i in line], changed(CONFIG, loss=loss))
    assert torch.equal(counts.rows_K, others.rows_K) and counts.rows_K.min() > 50 and torch.equal(counts.hits_K, others.hits_K)
    assert packed == pytest.approx(unpacked, rel=1e-5)
    torch.testing.assert_close(counts.flat(), others.flat(), atol=1e-4, rtol=1e-5)
    for mine, parameter in zip(gradients, head.parameters(), strict=True):
        assert parameter.grad.any()
        torch.testing.assert_close(mine, parameter.grad, atol=1e-5, rtol=1e-5)


def test_long_answers_weigh_more_than_short_ones(target: Target, samples: Any) -> None:
    """weighting rows: the loss of a batch is the mean over its samples of the mean over their rows (step 0)."""
    one = changed(CONFIG, ttt_steps=1, loss={"weighting": "rows"})
    head, mean = fresh(target, samples), []
    for i in range(5):
        total, counts = losses(head, samples, target, [[i]], one)
        assert total == pytest.approx(float(counts.loss_K[0] / counts.rows_K[0]), rel=1e-5)
        mean.append(total / 5)
    work = loop._work(samples, [[0, 1], [2, 3, 4]], changed(one, packing=200), torch.device("cpu"))
    assert float(work.weight) == pytest.approx(5, rel=1e-6)
    assert losses(head, samples, target, [[0, 1], [2, 3, 4]], changed(one, packing=200))[0] == pytest.approx(sum(mean) * 5, rel=1e-5)


def test_packed_run_learns_something_else(target: Target, samples: Any, tmp_path: Path) -> None:
    heads = [fresh(target, samples) for _ in range(2)]
    for head, packing in zip(heads, (None, 64), strict=True):
        result = run(head, samples, target, tmp_path / str(packing), changed(CONFIG, packing=packing, epochs=5))
        assert result.steps == 5 and result.rows == {"d": 12}
    for name, tensor in heads[0].state_dict().items():
        torch.testing.assert_close(heads[1].state_dict()[name], tensor, atol=1e-4, rtol=1e-3)


def test_row_longer_than_a_line_is_cut(target: Target, samples: Any, tmp_path: Path) -> None:
    longest = max(len(row) for row in samples.rows)
    name = next(row.id for row in samples.rows if len(row) == longest)
    with pytest.raises(ValueError, match=f"training.packing: row '{name}' has {longest} tokens"):
        run(fresh(target, samples), samples, target, tmp_path, changed(CONFIG, packing=longest - 1))


def test_other_vocabulary_size_needs_new_states(target: Target, samples: Any, tmp_path: Path) -> None:
    """The same samples train a head of any draft vocabulary: its law is the target's softmax, cut to the smaller set."""
    found = {}
    for size in (None, 60, 20):
        head = fresh(target, samples, draft_vocab_size=size)
        found[size] = run(head, samples, target, tmp_path / str(size), CONFIG).history[0]
        assert len(head.target_ids) == (size or 100) and head.t2d.nonzero()[:, 0].tolist() == head.target_ids.tolist()
    assert all(0 < point["loss"] < 9 for point in found.values())
    assert found[20]["loss"] < found[60]["loss"] < found[None]["loss"]  # the less the vocabulary can win


def test_domain_weights_are_ignored(target: Target, samples: Any, tmp_path: Path, monkeypatch, capsys) -> None:
    rows = [replace(row, domain="ab"[i < 3]) for i, row in enumerate(samples.rows)]
    mixed, loaded = Samples(rows, samples.samples), recorded(monkeypatch)
    config = changed(CONFIG, epochs=2, domain_weights={"a": 1, "b": 2}, tokens_per_step=40)
    result = run(fresh(target, mixed), mixed, target, tmp_path / "a", config)
    assert result.rows == {"a": 4, "b": 8}
    drawn = Counter(i for lines in loaded for line in lines for i in line)
    assert sum(drawn[i] for i in range(3)) == 16 and sum(drawn[i] for i in range(3, 12)) == 8
    assert "12 rows an epoch: a 4 (33.3%), b 8 (66.7%)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no weight for b; no rows of c"):
        run(fresh(target, mixed), mixed, target, tmp_path / "b", changed(CONFIG, domain_weights={"a": 1, "c": 2}))
    assert run(fresh(target, mixed), mixed, target, tmp_path / "c", changed(CONFIG, rows_per_epoch=4)).rows == {"a": 3, "b": 1}


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
    loaded, seen = recorded(monkeypatch), BY_HAND["watch_steps"](monkeypatch)
    one = changed(CONFIG, epochs=4, tokens_per_step=1, lr=1e-3, warmup=0.0)
    run(fresh(target, samples), samples, target, tmp_path / "one", one)
    whole, curve = list(loaded), [s["lr"] for s in seen]
    assert len(whole) == 48
    loaded.clear()
    seen.clear()
    for accumulation, steps, message in ((2, 8, "stopped after step 8 of 24"), (4, 3, "stopped after step 11 of 16")):
        BY_HAND["stop_after"](monkeypatch, steps)
        with pytest.raises(KeyboardInterrupt, match=message):
            run(fresh(target, samples), samples, target, tmp_path / "parts", changed(one, accumulation=accumulation))
        assert len(loaded) == {2: 16, 4: 28}[accumulation]
    BY_HAND["stop_after"](monkeypatch, 100)
    assert run(fresh(target, samples), samples, target, tmp_path / "parts", one).steps == 11 + 20 and loaded == whole
    places = [*range(8), 8, 10, 12, *(14 + k / 2 for k in range(20))]  # in the 24 steps that the first window made
    expected = [1e-3 * learning_rate(place, 24, one) for place in places]
    rates = [s["lr"] for s in seen]
    assert rates == pytest.approx(expected, rel=1e-9) and rates[-1] == pytest.approx(curve[-1], rel=0.01) == pytest.approx(5e-5, rel=0.03)
