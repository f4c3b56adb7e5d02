"""What speculation costs beside its gain, worked out by hand from a small model's sizes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from spectrain.decoding.rows import StepRecord
from spectrain.decoding.shapes import Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.drafters.hybrid import Hybrid
from spectrain.drafters.lookup import NGram
from spectrain.drafters.small_model import SmallModel
from spectrain.evaluation.price import MATRIX, device_rates, drafter_parts, experts_share, price, roofline_of, roofline_table
from spectrain.planning.machines import MACHINES
from spectrain.target.lean import PackedLinear
from spectrain.target.model import Target

LAYER = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32  # of `target`: attention of 4 heads of 8, 2 for keys; MLP of 48; two norms
INSIDE = 3 * LAYER + 32
OUTPUT = 100 * 32
KV = 2 * 3 * 2 * 8 * 4
ATTENTION = 4 * 3 * 4 * 8


def test_roofline_is_of_another_model(target: Target, make_target: Callable[..., Target]) -> None:
    line = roofline_of(target, flops=1e9, bandwidth=1e8)
    assert line.weight_bytes == 4 * (INSIDE + OUTPUT) and line.token_flops == 2 * (INSIDE + OUTPUT)  # the embedding is looked up
    assert (line.kv_bytes, line.attention_flops, line.expert_bytes, line.active) == (KV, ATTENTION, 0, 1.0)
    tied = roofline_of(make_target(tie_word_embeddings=True), flops=1e9, bandwidth=1e8)
    assert (tied.weight_bytes, tied.token_flops) == (line.weight_bytes, line.token_flops)  # tied, it is the output layer
    assert experts_share(SimpleNamespace(num_local_experts=8, num_experts_per_tok=2)) == 0.25
    assert experts_share(SimpleNamespace(num_experts_per_tok=2)) == 1.0


def test_rate_is_that_of_products_that_no_pass_makes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed products are more than twice as fast here as plain ones: the ridge lies elsewhere."""
    made: list[int] = []
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: (made.append(len(x)), forward(self, x))[1])
    assert device_rates(target)[0] == "measured here" and set(made) == {MATRIX}


def test_table_of_a_roofline_lacks_a_batch(target: Target) -> None:
    found = roofline_table(target, (1, 64), nodes=4, context=0)
    assert [cell["positions"] for cell in found["intensity"]] == [5, 320] and set(found["predicted_v"]) == {"1", "64"}
    assert found["intensity"][0]["intensity"] == pytest.approx(5 / 2)  # weights of four bytes
    assert found["ridge"] == pytest.approx(found["flops"] / found["bandwidth"]) and found["device"] == "measured here"
    assert found["flops"] > 1e8 and found["bandwidth"] > 1e8
    assert MACHINES["h100"].rate(2) / MACHINES["h100"].bandwidth == pytest.approx(295, abs=0.5)


def test_free_drafts_are_called_free(target: Target) -> None:
    """Each round of 4 drafts verifies 5 positions and commits 2: computation rises though drafting costs none."""
    found = price(target, NGram(), {"tau": 2.0, "depth": 4.0, "nodes": 4.0})
    assert found["flops_ratio"] == pytest.approx(2.5) == found["positions_per_token"] and found["wasted_positions_per_token"] == 1.5
    assert found["drafter_bytes"] == found["kv_tokens_displaced"] == 0
    rounds = [StepRecord(8, 1, 2, {}, depth=8, nodes=9), StepRecord(0, 0, 1, {})]
    of_records = price(target, NGram(), {"tau": 1.5}, [SimpleNamespace(rounds=rounds)])
    assert of_records["positions_per_token"] == pytest.approx(10 / 3)


def test_head_is_left_out_of_the_price(target: Target, make_head: Callable[..., Any]) -> None:
    head = make_head(target)
    numbers = sum(p.numel() for p in head.parameters())
    chain = price(target, HeadDrafter(head), {"tau": 2.0, "depth": 3.0, "nodes": 3.0}, context=100)
    a_position = 2 * (INSIDE + OUTPUT) + ATTENTION * 100
    assert chain["flops_ratio"] == pytest.approx((4 * a_position + (2 + 2) * 2 * numbers) / (2 * a_position))
    assert chain["drafter_bytes"] == 4 * numbers and chain["kv_tokens_displaced"] == pytest.approx(4 * numbers / KV)
    assert chain["drafter_bytes_per_token"] == 2 * 1 * 2 * 8 * 4
    tree = price(target, HeadDrafter(head), {"tau": 2.0, "depth": 3.0, "nodes": 3.0}, context=100, shape=Tree.dynamic(4, 3, 3))
    assert tree["flops_ratio"] - chain["flops_ratio"] == pytest.approx(3 * 2 * 2 * numbers / (2 * a_position))


def test_parts_of_a_drafter_are_forgotten(target: Target, make_head: Callable[..., Any]) -> None:
    head = HeadDrafter(make_head(target))
    assert drafter_parts(Hybrid(NGram(), head)) == drafter_parts(head) and drafter_parts(NGram()) == []
    ((products, weights, cache),) = drafter_parts(SmallModel(target))
    assert (products, weights, cache) == (2 * (INSIDE + OUTPUT), 4 * (INSIDE + OUTPUT), KV)
