"""Memory, hours and ways to fit: pure arithmetic, and against what was measured on two cores with a model of 135M parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.planning import hours, memory, ways
from spectrain.planning.machines import MACHINES, GiB, machine
from spectrain.planning.sizes import PLACEMENTS, Case, Data, HeadSize, Matrix, TargetSize
from spectrain.planning.terms import product, short, total

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SMALL = TargetSize(
    "135M", layers=30, width=576, vocab=49152, heads=9, kv_heads=3, head_dim=64, inner=1536, params=134_515_008, active=134_515_008,
    embedding=28_311_552, tied=True, unit=28_311_552, max_length=8192, bytes_a_weight=4,
)  # fmt: skip
LARGE = TargetSize(
    "70B", layers=80, width=8192, vocab=128256, heads=64, kv_heads=8, head_dim=128, inner=28672, params=70_553_706_496,
    active=70_553_706_496, embedding=128256 * 8192, tied=False, unit=128256 * 8192, max_length=131072, bytes_a_weight=2,
)  # fmt: skip


def eagle3(target: TargetSize, draft_vocab: int, *, trained: bool = True) -> HeadSize:
    """One layer over three states."""
    W, I = target.width, target.inner  # noqa: E741
    A, G = target.heads * target.head_dim, target.kv_heads * target.head_dim
    shapes = {
        "fc.weight": (W, 3 * W), "midlayer.self_attn.q_proj.weight": (A, 2 * W), "midlayer.self_attn.k_proj.weight": (G, 2 * W),
        "midlayer.self_attn.v_proj.weight": (G, 2 * W), "midlayer.self_attn.o_proj.weight": (W, A),
        "midlayer.mlp.gate_proj.weight": (I, W), "midlayer.mlp.up_proj.weight": (I, W), "midlayer.mlp.down_proj.weight": (W, I),
        "lm_head.weight": (draft_vocab, W),
    }  # fmt: skip
    matrices = tuple(Matrix(name, *shape) for name, shape in shapes.items())
    params = sum(m.size for m in matrices) + 4 * W
    return HeadSize(
        "eagle3", params, params - (0 if trained else draft_vocab * W), 8 * draft_vocab + target.vocab, matrices, W, W, I, 3, 1,
        target.heads, target.kv_heads, target.head_dim, draft_vocab, 1, trained,
    )  # fmt: skip


def case(target: TargetSize, head: HeadSize, data: Data, name: str = "cpu2", **changes: Any) -> Case:
    settings: dict[str, Any] = {
        "gpus": 1, "placement": "rank", "steps": 3, "tokens_per_step": 256, "accumulation": 1, "epochs": 1, "mixed": False,
        "checkpointing": False, "ema": False, "online": False, "logs": False, "store": (3 * (target.width + 20), 2 * target.width + 8),
        "store_name": "", "capture_tokens": 2048, "probe": (0, 0, 0), "packed": True, "decode_batch": 64,
        "pieces": lambda tokens, vocabulary, steps: min(tokens, 2**28 // (vocabulary * steps)),
    }  # fmt: skip
    return Case(machine=MACHINES[name], target=target, head=head, data=data, **{**settings, **changes})


def on_gpus(gpus: int, **changes: Any) -> Case:
    data = Data(rows=1e6, tokens=1e9, supervised=5e8, longest=4096, source="test")
    return case(LARGE, eagle3(LARGE, 32000), data, "h100", gpus=gpus, mixed=True, packed=False, **{"tokens_per_step": 4096, **changes})


FORTY = Data(40, 8865, 3496, 640, "40 rows", most=(155, 1150, 1212), batches=17)
MANY = Data(1883, 407_942, 188_444, 640, "1,883 rows", most=(462, 2039, 2382), batches=418)


@pytest.mark.parametrize(
    ("data", "changes", "measured"),
    [
        (FORTY, {"probe": (10, 288, 346)}, 2148e6),
        (MANY, {"probe": (32, 256, 314), "ema": True, "tokens_per_step": 512}, 2743e6),
    ],
    ids=["40 rows", "1883 rows, averaged weights"],
)
def test_memory_is_what_runs_took(data: Data, changes: dict[str, Any], measured: float) -> None:
    """Peak resident memory of two `spectrain train` (docs/scaling.md)."""
    planned = memory.peak(case(SMALL, eagle3(SMALL, 6144), data, **changes))
    assert planned == pytest.approx(measured, rel=0.15)


ARMS = [("trained, 256", True, 256), ("frozen, 256", False, 256), ("frozen, 512", False, 512)]


@pytest.mark.parametrize(("arm", "trained", "tokens"), ARMS)
def test_training_takes_the_time_that_it_took(arm: str, trained: bool, tokens: int) -> None:
    """The better of two rounds, beside other jobs; what the rounds differ by is more than what the plan is off."""
    found = json.loads((RESULTS / "training_cpu.json").read_text())
    inputs, rounds = found["inputs"], found["speed"]["float32"]["arms"][f"spectrain, {arm} a step"]
    steps = rounds[0]["steps"]
    data = Data(inputs["rows"], inputs["tokens"], inputs["supervised"], inputs["longest"], "", most=(tokens, 600, 600), batches=steps)
    planned = hours.training(case(SMALL, eagle3(SMALL, 6144, trained=trained), data, tokens_per_step=tokens))
    assert inputs["supervised"] / (planned.hours * 3600) == pytest.approx(max(r["rate"] for r in rounds), rel=0.25)


def test_capture_takes_the_time_that_it_took() -> None:
    found = json.loads((RESULTS / "data_cpu.json").read_text())["capture"]
    data = Data(50, found["tokens"], found["supervised"], 640, "")
    planned = hours.capture(case(SMALL, eagle3(SMALL, 6144), data))
    assert found["tokens"] / (planned.hours * 3600) == pytest.approx(found["tokens/s"]["capture"], rel=0.25)


def test_answers_take_the_time_that_they_took() -> None:
    """Of a server whose batch stays full: places of rows that ended are filled again, until no prompt is left (test_answers.py)."""
    found = json.loads((RESULTS / "data_cpu.json").read_text())["regenerate"]
    data = Data(found["prompts"], found["tokens"] + found["prompt tokens"], found["tokens"], 207, "")
    assert hours.regeneration(case(SMALL, eagle3(SMALL, 6144), data)).hours * 3600 == pytest.approx(found["seconds"], rel=0.25)


def test_every_stage_is_the_sum_of_its_terms_and_terms_say_how() -> None:
    found = memory.stages(on_gpus(8, probe=(32, 256, 314), ema=True))
    assert list(found) == ["capture", "training", "measuring acceptance"]
    weights = {t.name: t for t in found["training"]}
    assert weights["target's weights"].value == 2 * LARGE.params and "70.55G parameters, whole on every device × 2 bytes" in weights[
        "target's weights"].how  # fmt: skip
    assert weights["moments of Adam"].value == 8 * eagle3(LARGE, 32000).params
    assert memory.peak(on_gpus(8)) == max(total(terms) for terms in memory.stages(on_gpus(8)).values())
    assert "target's logits of supervised tokens" in {t.name for t in memory.stages(on_gpus(8, online=True))["training"]}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_more_devices_take_no_more_memory_and_no_more_time(placement: str) -> None:
    sizes = [memory.peak(on_gpus(n, placement=placement)) for n in (2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0] == sizes[2]) == (placement == "rank")
    spent = [hours.training(on_gpus(n, placement=placement)).hours for n in (2, 4, 8)]
    assert spent == sorted(spent, reverse=True)
    assert hours.regeneration(on_gpus(32)).hours < hours.regeneration(on_gpus(8)).hours


def test_what_saves_memory_does() -> None:
    base = on_gpus(8, tokens_per_step=16384)
    less = [replace(base, checkpointing=True), replace(base, tokens_per_step=4096), replace(base, head=base.head.with_vocabulary(8000)),
            replace(base, head_sharded=True), replace(base, placement="fsdp2")]  # fmt: skip
    assert all(memory.peak(c) < memory.peak(base) for c in less)
    assert memory.peak(replace(base, ema=True)) - memory.peak(base) == 4 * base.head.params


def test_sharded_head_is_whole_for_its_pass() -> None:
    """Of weights, gradients, two moments and buckets (20 bytes a weight) what is gathered and made whole stays, the rest is shared."""
    base, shared = (total(memory.head_terms(on_gpus(16, head_sharded=sharded))) for sharded in (False, True))
    assert base - shared == pytest.approx((20 - 8 - 16 / 16) * on_gpus(16).head.params)
    steps = [{t.name: t.value for t in hours.step_terms(on_gpus(16, head_sharded=sharded))} for sharded in (False, True)]
    assert steps[0]["optimizer"] == 16 * steps[1]["optimizer"]
    assert steps[0]["gradients between devices"] == steps[1]["weights and gradients between devices"]


def test_70b_on_80_gib_needs_a_sharded_target_and_nothing_else() -> None:
    found, after = ways.ways_to_fit(on_gpus(16))
    assert [w.how.split()[:2] for w in found] == [["--set", "target.placement=fsdp2"]]
    assert after.placement == "fsdp2" and ways.fits(after) and found[-1].peak == memory.peak(after)
    assert not ways.fits(replace(on_gpus(16), placement="rank"))


def test_70b_on_one_device_is_quantised_or_does_not_fit() -> None:
    linear = LARGE.params - 2 * LARGE.embedding
    base = replace(on_gpus(1), target=replace(LARGE, linear=linear))
    found, after = ways.ways_to_fit(base)
    assert "--set target.quantization=4bit (another target" in found[-1].how and after.placement == "rank" and ways.fits(after)
    assert memory.peak(replace(base, target=replace(base.target, quantization="8bit"))) > base.machine.memory
    two, four = (replace(base.target, quantization=q).weight_bytes for q in ("8bit", "4bit"))
    assert (two, four) == (linear + 4 * LARGE.embedding, 0.5625 * linear + 4 * LARGE.embedding)
    assert memory.total(memory.target_terms(after)) == four
    read = hours.served(after).c * (0.5625 * linear + 2 * LARGE.embedding)
    assert read == pytest.approx(hours.served(base).c * 2 * (linear + LARGE.embedding))
    small = replace(base, machine=replace(base.machine, memory=20 * GiB))
    assert not ways.fits(ways.ways_to_fit(small)[1])


def test_ways_come_in_order_and_none_is_needless() -> None:
    tight = case(
        replace(SMALL, bytes_a_weight=2), eagle3(SMALL, 49152), Data(1000, 1e6, 5e5, 4096, ""), "h100", packed=False, tokens_per_step=16384
    )
    tight = replace(tight, machine=replace(tight.machine, memory=0.95 * memory.peak(tight)))
    found, after = ways.ways_to_fit(tight)
    assert ways.fits(after) and found
    order = [step[0] for step in ways.WAYS]
    assert [order.index(way.how) for way in found] == sorted(order.index(way.how) for way in found)
    assert ways.ways_to_fit(after) == ([], after)


def test_sharded_targets_pay_with_what_they_send() -> None:
    gathered = {t.name: t.value for t in hours.capture(on_gpus(16, placement="fsdp2")).terms}
    passes = 1e9 / 16 / 2048
    weights = 2 * (LARGE.params - 2 * LARGE.embedding)
    assert gathered["weights gathered"] == pytest.approx(passes * weights * 15 / 16 / 50e9)
    assert hours.capture(on_gpus(16, placement="fsdp2", capture_tokens=32768)).hours < hours.capture(on_gpus(16, placement="fsdp2")).hours
    assert [t.name for t in hours.capture(on_gpus(8, placement="tp")).terms] == ["products", "sums between the parts of layers"]


def test_parts_of_layers_are_those_of_tp_size() -> None:
    layers = {n: memory.target_terms(on_gpus(16, placement="tp", tp_size=n))[0].value for n in (None, 4, 8)}
    assert layers[None] == layers[8] == 2 * (LARGE.params - 2 * LARGE.embedding) / 8 and layers[4] == 2 * layers[8]
    assert [on_gpus(n, placement=p, tp_size=4).split for n, p in ((16, "tp"), (2, "tp"), (16, "fsdp2"))] == [4, 2, 1]


def test_head_where_it_is_served() -> None:
    found = hours.served(on_gpus(16))
    assert (found.kv_target, found.kv_head, found.devices) == (2 * 80 * 8 * 128 * 2, 2 * 8 * 128 * 2, 4)
    room = 0.9 * 4 * 80 * GiB - LARGE.weight_bytes
    assert found.tokens_without == pytest.approx(room / found.kv_target)
    assert found.tokens_with == pytest.approx((room - found.weights) / (found.kv_target + found.kv_head))


def test_mixtures_read_the_experts_that_their_rows_need() -> None:
    dense = on_gpus(16)
    mixture = replace(dense, target=replace(LARGE, active=20 * 10**9, experts=0.1))
    few, many = (hours.regeneration(replace(mixture, decode_batch=n)).terms[0] for n in (1, 256))
    assert "bound by bandwidth" in few.how
    assert few.value < many.value < hours.regeneration(replace(dense, decode_batch=256)).terms[0].value
    assert hours.capture(mixture).hours < hours.capture(dense).hours


def test_figures_of_a_device() -> None:
    own = machine("h100", memory=40, flops=500, bandwidth=1000, link=25)
    assert (own.memory, own.flops, own.bandwidth, own.link, own.net) == (40 * GiB, 500e12, 1e12, 25e9, 25e9)
    assert "flops" in own.source and own.rate(4) == MACHINES["h100"].flops32
    assert (MACHINES["h100"].between(8), MACHINES["h100"].between(16)) == (450e9, 50e9)
    with pytest.raises(ValueError, match=r"device 'h900' is unknown; there are h100, .*--gpu-flops"):
        machine("h900")
    with pytest.raises(ValueError, match="memory of a device is a number above zero, found -1; mend --gpu-memory"):
        machine("h100", memory=-1)
    for value in (float("inf"), float("nan"), 0.0):
        with pytest.raises(ValueError, match="link of a device is a number above zero.*mend --link"):
            machine("h100", link=value)


def test_terms_say_what_was_multiplied() -> None:
    found = product("x", (134_515_008, "parameters"), (4, "bytes"))
    assert (found.value, found.how) == (4 * 134_515_008, "134.5M parameters × 4 bytes")
    assert [short(n) for n in (0.5, 12345, 123456, 8.1e9, 3e13, 1.4e20)] == ["0.5", "12,345", "123.5k", "8.1G", "30T", "140E"]
