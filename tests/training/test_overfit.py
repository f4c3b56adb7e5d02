"""One conversation is learnt until every draft is accepted: training and drafting agree. And: states computed while training and
stored ones teach alike, and the target's law is made once a token.

Legend: K test-time steps, V vocabulary, W target width, H head width.
"""

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.config import CaptureConfig, HeadConfig, TrainingConfig
from spectrain.data.batches import Batch
from spectrain.data.codes import Codes
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters.from_head import HeadDrafter
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore, OnlineFeatures
from spectrain.target.model import Target
from spectrain.training.setup import layer_ids, new_head

BY_HAND = runpy.run_path(str(Path(__file__).with_name("by_hand.py")))
PROMPT, ANSWER, K = [7, 12, 9, 33], 25, 4


HEADS: dict[str, dict[str, Any]] = {
    "eagle-3": {"layer_ids": BY_HAND["LAYERS"]},
    "two layers, norm_output": {"layer_ids": BY_HAND["LAYERS"], "num_layers": 2, "norm_output": True},
    "medusa": {"kind": "medusa", "num_heads": K},
    "medusa, shared output": {"kind": "medusa", "num_heads": K, "num_layers": 2, "shared_output": True},
    "hydra": {"kind": "hydra", "num_heads": K},
    "hydra, original": {"kind": "hydra", "num_heads": K, "original": True},
    "hydra, no prefix": {"kind": "hydra", "num_heads": K, "num_layers": 2, "prefix": False},
    "eagle": {"kind": "eagle"},
}


RARER = ("eagle", "hydra, original")
SLOW = ("two layers, norm_output", "eagle", "medusa, shared output", "hydra, original")  # half a minute together; their plain forms stay


@pytest.mark.parametrize(
    "changes", [pytest.param(changes, marks=pytest.mark.slow if name in SLOW else ()) for name, changes in HEADS.items()], ids=HEADS
)
def test_conversation_learnt_by_heart_is_not_drafted(target: Target, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Learnt with K test-time steps, chains of K drafts are accepted whole in every round but the last, which the answer's end cuts."""
    plain = generate(target, [PROMPT], max_new_tokens=ANSWER, eos=None).rows[0].tokens
    config = HeadConfig(**{**changes, "init_layer": "random", "draft_vocab_size": len(set(plain))})
    rows = [BY_HAND["row_of"](PROMPT, plain)]
    samples = OnlineFeatures(target, rows, layer_ids(config, target))
    head = new_head(config, target, rows, seed=0)
    training = TrainingConfig(epochs=140, ttt_steps=K, lr=1e-2, warmup=0.1, eval_steps=1000)
    result = BY_HAND["run"](head, samples, target, tmp_path, training)
    assert result.history[0]["hit"][0] < 1 and len(set(plain)) > 15
    row = generate(target, [PROMPT], drafter=HeadDrafter(head.eval()), shape=Chain(K), max_new_tokens=ANSWER, eos=None).rows[0]
    assert row.tokens == plain and [r.drafted for r in row.rounds[:-1]] == [K] * 4
    assert [r.committed for r in row.rounds] == [K + 1] * 4 + [K]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own doing
@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra, no prefix", *(pytest.param(name, marks=pytest.mark.slow) for name in RARER)])
def test_settings_that_change_no_result_do(target: Target, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers (by a backend that runs the graph as it is), activations made again, lines of several documents; beside Muon."""
    compile_as_usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **kwargs: compile_as_usual(call, backend="eager", **kwargs))
    config, rows = HeadConfig(**HEADS[name], draft_vocab_size=60), BY_HAND["random_rows"](6)
    samples, steps = OnlineFeatures(target, rows, layer_ids(config, target)), BY_HAND["watch_steps"](monkeypatch)
    same = {"ttt_steps": K, "epochs": 4, "optimizer": "muon", "ema": 0.9, "tokens_per_step": 1000}
    for n, changes in enumerate(({}, {"packing": 64, "checkpointing": True, "compile": True})):
        head = new_head(config, target, rows, seed=0)
        start = BY_HAND["weights"](head)
        BY_HAND["run"](head, samples, target, tmp_path / str(n), TrainingConfig(**same, **changes))
        assert all(not torch.equal(start[name], p) for name, p in head.named_parameters())
    assert len(steps) == 8 and steps[3]["loss"] < steps[2]["loss"] < steps[0]["loss"]
    assert [s["loss"] for s in steps[:4]] == pytest.approx([s["loss"] for s in steps[4:]], rel=1e-4)


class Rounded(OnlineFeatures):
    """States as they are computed, in the precision of a bfloat16 store; without it they keep the target's."""

    def batch(self, numbers: Sequence[int]) -> Batch:
        batch = super().batch(numbers)
        return replace(batch, states=Codes(batch.states.codes.bfloat16()), last=Codes(batch.last.codes.bfloat16()))


def test_stored_states_teach_otherwise_than_computed_ones(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same precision: the same loss and counts at every step, but for states on the border of two bfloat16 numbers (other rows
    share the pass)."""
    rows, config = BY_HAND["random_rows"](9), CaptureConfig(states="bf16", rows_per_shard=4)
    capture(rows, target, BY_HAND["LAYERS"], tmp_path / "states", config)
    seen = BY_HAND["watch_steps"](monkeypatch)
    for samples in (Rounded(target, rows, BY_HAND["LAYERS"]), FeatureStore(tmp_path / "states", rows)):
        training = TrainingConfig(epochs=2, tokens_per_step=40, lr=5e-3)
        BY_HAND["run"](BY_HAND["fresh"](target, samples), samples, target, tmp_path / type(samples).__name__, training)
    half = len(seen) // 2
    assert half > 4 and len({s["loss"] for s in seen[:half]}) == half
    for online, stored in zip(seen[:half], seen[half:], strict=True):
        assert online["loss"] == pytest.approx(stored["loss"], rel=1e-6)
        torch.testing.assert_close(online["counts"].flat(), stored["counts"].flat(), rtol=1e-5, atol=1e-5)


class Products(TorchDispatchMode):
    """Rows that are multiplied with a matrix of this size, in all products."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.size, self.rows = size, 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and tuple(args[-1].shape) == self.size:
            self.rows += len(args[-2])
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_law_of_the_target_is_made_at_every_step(target: Target, tmp_path: Path, checkpointing: bool) -> None:
    """Products of last states with the target's output rows [W, V]: one row a supervised token, for all K steps together."""
    samples = BY_HAND["Samples"].of(target, BY_HAND["random_rows"](4))
    head = BY_HAND["fresh"](target, samples, draft_vocab_size=60, hidden_size=16)  # H is not W: other products have other sizes
    config = TrainingConfig(epochs=2, tokens_per_step=20, ttt_steps=5, checkpointing=checkpointing)
    with Products(32, 60) as laws, Products(16, 60) as drafts:
        BY_HAND["run"](head, samples, target, tmp_path, config)
    assert laws.rows == 2 * sum(row.supervised for row in samples.rows)
    assert drafts.rows == 2 * sum(sum(row.supervised - 1 - k for k in range(5)) for row in samples.rows)
