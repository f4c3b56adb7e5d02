"""MK2: one sample whose states hold a NaN or an infinity among ten: nine used, one left out and counted, all weights finite."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import TrainingConfig
from spectrain.data.codes import Codes
from spectrain.target.model import Target

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
CONFIG = TrainingConfig(epochs=3, tokens_per_step=10**6, lr=5e-3, ttt_steps=4, warmup=0.2)


@pytest.mark.parametrize("changes", [{}, {"packing": 64}, {"packing": 64, "loss": {"weighting": "rows"}}], ids=["lines", "packed", "rows"])
@pytest.mark.parametrize("field", ["states", "last"])
def test_one_broken_sample_of_ten_takes_the_others_along(
    target: Target, field: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named once an epoch; the weights are those of a run without it."""
    Samples, rows = BY_HAND["Samples"], BY_HAND["random_rows"](10)
    ten = Samples.of(target, rows)
    nine = Samples(rows[:4] + rows[5:], ten.samples[:4] + ten.samples[5:])
    part = getattr(ten.samples[4], field).codes.clone()
    part[0, 3] = float("inf") if field == "states" else float("nan")
    ten.samples[4] = replace(ten.samples[4], **{field: Codes(part)})
    heads = [BY_HAND["fresh"](target, nine) for _ in range(2)]
    results = [
        BY_HAND["run"](head, some, target, tmp_path / str(len(some)), BY_HAND["changed"](CONFIG, **changes))
        for head, some in zip(heads, (ten, nine), strict=True)
    ]
    assert [result.skipped for result in results] == [3, 0] and [result.steps for result in results] == [3, 3]
    assert capsys.readouterr().out.count("1 samples left out, their states are not finite: 4\n") == 3
    for name, tensor in heads[0].state_dict().items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(tensor, heads[1].state_dict()[name], atol=1e-4, rtol=1e-3)
