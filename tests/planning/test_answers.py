"""Hours of answers made in process: the passes of a batch against the generator's own, and seconds against measured ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.decoding.generate import generate
from spectrain.planning.answers import Held, in_process, passes_of
from spectrain.planning.batches import parts
from spectrain.planning.machines import MACHINES
from spectrain.planning.sizes import Case, Data, HeadSize, TargetSize
from spectrain.planning.terms import total
from spectrain.target.model import Target

SMOLLM2 = TargetSize(
    "135M", layers=30, width=576, vocab=49152, heads=9, kv_heads=3, head_dim=64, inner=1536, params=134_515_008, active=134_515_008,
    embedding=28_311_552, tied=True, unit=28_311_552, max_length=8192, bytes_a_weight=4,
)  # fmt: skip
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
HEAD = HeadSize("eagle3", 1, 1, 1, (), 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, False)
# Tokens of the prompt and of the answer (96 at most) of 30 prompts of the recipes, by the real model; seconds of one core, by batch size.
MEASURED = [
    (38, 52), (38, 83), (38, 96), (39, 70), (39, 96), (39, 96), (39, 96), (39, 96), (40, 96), (45, 83), (47, 96), (54, 96), (61, 46),
    (65, 49), (83, 46), (94, 96), (105, 3), (110, 96), (111, 96), (124, 96), (188, 96), (191, 7), (197, 96), (247, 96), (262, 96),
    (300, 74), (310, 96), (345, 96), (406, 96), (462, 31),
]  # fmt: skip
SECONDS = {30: 17.2, 8: 19.0}
CORE = replace(MACHINES["cpu2"], flops32=MACHINES["cpu2"].flops32 / 2)


def a_case(pairs: Any, batch: int, machine: str = "cpu2", **changes: Any) -> Case:
    pairs = np.array(pairs)
    tokens, answered = int(pairs.sum()), int(pairs[:, 1].sum())
    settings: dict[str, Any] = {
        "gpus": 1, "placement": "rank", "steps": 3, "tokens_per_step": 256, "accumulation": 1, "epochs": 1, "mixed": False,
        "checkpointing": False, "ema": False, "online": False, "logs": False, "store": (1, 1), "store_name": "", "capture_tokens": 2048,
        "probe": (0, 0, 0), "packed": True, "pieces": lambda tokens, vocabulary, steps: tokens,
    }  # fmt: skip
    return Case(
        machine=MACHINES[machine], target=SMOLLM2, head=HEAD, data=Data(len(pairs), tokens, answered, int(pairs.sum(1).max()), "test"),
        decode_batch=batch, lengths_N2=pairs, **{**settings, **changes},
    )  # fmt: skip


def seconds(case: Case) -> float:
    return in_process(case).hours * 3600


@pytest.mark.parametrize("size", [8, 4, 3, 1])
def test_passes_are_those_that_the_generator_makes(
    make_table_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:  # fmt: skip
    next_V = torch.arange(1, 41).clamp(max=39)  # token i is followed by i + 1, and 39 ends the answer
    target = make_table_target(9 * torch.eye(40)[next_V])
    prompts = [[3] * length + [last] for length, last in ((1, 38), (2, 37), (9, 30), (4, 30), (80, 22), (6, 10), (83, 9), (7, 9))]
    seen: list[tuple[int, int]] = []
    forward = Target.forward

    def watched(self: Target, ids_BN: Any, **more: Any) -> Any:
        seen.append(tuple(ids_BN.shape))
        return forward(self, ids_BN, **more)

    monkeypatch.setattr(Target, "forward", watched)
    rows = generate(target, prompts, max_new_tokens=25, eos=39, batch_size=size, compile=False).rows
    pairs = [(row.prompt_tokens, len(row.tokens)) for row in rows]
    assert [answer for _, answer in pairs] == [1, 2, 9, 9, 17, 25, 25, 25]  # the last two are cut off
    read, made = passes_of(pairs, size)
    assert sorted(n for lengths in read for n in lengths) == sorted(map(len, prompts))
    planned = [(len(part), lengths[part[-1]]) for lengths in read for part in parts(lengths)]
    assert [shape for shape in seen if shape[1] > 1] == planned
    assert [rows for rows, columns in seen if columns == 1] == [some.rows for some in made for _ in range(some.passes)]
    if size == 8:
        assert planned == [(6, 10), (2, 84)] and made[0] == Held(1, 8, 85) and passes_of([(4, 1)], 8) == ([[4]], [])


@pytest.mark.parametrize("batch", SECONDS)
def test_prompts_of_unlike_length_take_what_they_took(batch: int) -> None:
    assert seconds(replace(a_case(MEASURED, batch), machine=CORE)) == pytest.approx(SECONDS[batch], rel=0.25)


def test_recorded_answers_take_what_they_took() -> None:
    record = json.loads((RESULTS / "data_cpu.json").read_text())["regenerate"]
    assert seconds(a_case(record["lengths"], record["batch"])) == pytest.approx(record["seconds"], rel=0.25)


def test_padding_and_rows_that_end_are_counted() -> None:
    unlike = a_case([(100, 50)] * 8 + [(104, 50)] * 8, 16)  # nine of them make a pass, seven another
    padded = {t.name: t for t in in_process(unlike).terms}["all prompts"]
    assert "1,664 positions, 1,632 of them tokens" in padded.how
    alike, far = a_case([(100, 50)] * 16, 16), a_case([(20, 50)] * 15 + [(1300, 50)], 16)
    assert alike.data.tokens == far.data.tokens
    assert seconds(far) > 1.5 * seconds(alike)  # every pass sees as many slots as the longest row has
    assert seconds(a_case([(20, 50)] * 15 + [(1300, 50)], 1)) < 4 * seconds(far)
    long, short = a_case([(30, 200)] * 2, 2), a_case([(30, 200), (30, 20)], 2)
    assert seconds(long) > seconds(short) > 0.75 * seconds(long)  # nearly as many passes, though 220 tokens instead of 400


def test_places_of_rows_that_end_stay_empty() -> None:
    _, made = passes_of([(30, 200)] + [(30, 40)] * 5, 2)
    assert [(some.passes, some.rows) for some in made] == [(39, 2)] * 5 + [(4, 1)]
    full, apart = a_case([(30, 200)] + [(30, 40)] * 5, 2), [a_case([(30, 200), (30, 40)], 2), *[a_case([(30, 40)] * 2, 2)] * 2]
    assert seconds(full) < 0.8 * sum(map(seconds, apart))


def test_many_rows_are_told_from_some_of_their_batches() -> None:
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.integers(10, 2000, 40_000), rng.integers(1, 300, 40_000)], axis=1)
    whole = a_case(pairs, 8)
    parts = [a_case(part, 8) for part in np.array_split(pairs[np.argsort(pairs[:, 0], kind="stable")], 16)]
    assert seconds(whole) == pytest.approx(sum(map(seconds, parts)), rel=0.03)


def test_rows_of_unknown_length_are_taken_to_be_alike() -> None:
    case = a_case([(100, 50)] * 48, 16)
    unknown = in_process(replace(case, lengths_N2=None))
    assert unknown.hours == pytest.approx(in_process(case).hours, rel=1e-9) and "of the mean length" in unknown.note
    assert unknown.hours * 3600 == pytest.approx(total(unknown.terms))


def test_a_gpu_reads_while_it_multiplies() -> None:
    small = SMOLLM2.pass_flops(1, 1, 150) * 512
    pairs = [(100, 101)] * 512
    h100 = a_case(pairs, 512, machine="h100")
    terms = {t.name: t.value for t in in_process(h100).terms}
    bytes_read = SMOLLM2.weight_bytes + 512 * 151 * SMOLLM2.kv_bytes
    by_bytes, by_products = bytes_read / (3.35e12 * 0.5), small / (67e12 * 0.3)
    assert terms["all answers"] == pytest.approx(100 * max(by_bytes, by_products), rel=0.02)
