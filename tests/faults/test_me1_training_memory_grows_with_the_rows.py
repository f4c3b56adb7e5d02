"""ME1: a training over 10,000 rows of a store holds within 10 % of the memory that one over 1,000 rows does, after as many steps."""

import multiprocessing
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from spectrain.config import CaptureConfig, TrainingConfig
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the children do nothing with the parent's threads

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
STORE = runpy.run_path(str(Path(__file__).with_name("test_me1_store_fills_the_disk.py")))
STEPS, LAYERS = 50, (1, 2, 3)


class Same(STORE["Same"]):
    """As a row store has them: sizes and domains as arrays."""

    domain_names = ("d",)

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.domain_N = np.zeros(count, np.int64)


def resident(target: Target, head: Any, samples: FeatureStore, out: Path, send: Any) -> None:
    """Memory after STEPS steps of 200 rows, and halfway there."""
    seen = []
    report = BY_HAND["loop"].Progress.step

    def step(self: Any, **told: Any) -> None:
        report(self, **told)
        seen.append(psutil.Process().memory_info().rss)

    BY_HAND["loop"].Progress.step = step
    config = TrainingConfig(epochs=99, steps=STEPS, tokens_per_step=1200, ttt_steps=2, eval_steps=999)
    BY_HAND["run"](head, samples, target, out, config)
    send.send((seen[STEPS // 2], seen[-1]))


@pytest.mark.slow  # half a minute
def test_trainer_keeps_what_it_has_read(make_target: Any, tmp_path: Path) -> None:
    target, config = make_target(num_hidden_layers=4), CaptureConfig(states="bf16", rows_per_shard=50)
    used: dict[int, tuple[int, int]] = {}
    capture(Same(50), target, LAYERS, tmp_path / "few", config)
    for count in (1_000, 10_000):
        rows = Same(count)
        STORE["_repeated"](tmp_path / "few", tmp_path / str(count), rows, target)
        samples = FeatureStore(tmp_path / str(count), rows)
        head = BY_HAND["fresh"](target, BY_HAND["Samples"](rows.rows, []), layer_ids=LAYERS, draft_vocab_size=20)
        receive, send = multiprocessing.Pipe(duplex=False)
        arguments = (target, head, samples, tmp_path / f"run {count}", send)
        process = multiprocessing.get_context("fork").Process(target=resident, args=arguments)
        process.start()
        send.close()
        used[count] = receive.recv()
        process.join()
    assert used[10_000][1] < 1.1 * used[1_000][1]
    assert used[1_000][1] < 1.05 * used[1_000][0], "it grows with the steps"
