"""Products and activations by the names of a head's matrices, against what the heads really do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spectrain.cli.plan_facts import Skeleton, head_size
from spectrain.config import HeadConfig, LossConfig, TrainingConfig
from spectrain.data.batches import Batch as States
from spectrain.data.codes import Codes
from spectrain.heads.base import HEADS, head_class
from spectrain.heads.losses import Labels, unrolled_loss
from spectrain.heads.targets import counted
from spectrain.planning import head_work
from spectrain.planning.machines import MACHINES
from spectrain.planning.sizes import Batch, Case, Data, HeadSize, TargetSize
from spectrain.target.model import Target
from spectrain.training.setup import head_sizes

B, L, PROMPT, K, W, VD = 4, 128, 64, 3, 64, 100
WAYS = [{}, {"num_layers": 2}, {"output": "frozen"}]


@pytest.fixture(scope="module")
def wide(make_target: Callable[..., Target]) -> Target:
    """Sizes that no two of are alike, so that one cannot stand for another."""
    return make_target(
        vocab=300, hidden_size=W, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, head_dim=20, num_hidden_layers=7
    )


def config_of(kind: str, **changes: Any) -> tuple[HeadConfig, TrainingConfig]:
    more = {"num_heads": K} if "num_heads" in head_class(kind).settings else {}
    return HeadConfig(kind=kind, draft_vocab_size=VD, **more, **changes), TrainingConfig(ttt_steps=K)


def made(kind: str, target: Target, **changes: Any) -> tuple[Any, HeadSize]:
    """A real head, and the plan's size of it."""
    config, training = config_of(kind, **changes)
    cls = head_class(kind)
    values = {**head_sizes(config, target), "draft_vocab_size": VD}
    head = cls(cls.Config(**{name: value for name, value in values.items() if name in cls.Config.model_fields}))
    head.train_output(config.output == "trained")
    return head, head_size(config, training, Skeleton(target.config, target.vocab_size, "tiny"))


def a_case(head: HeadSize, **changes: Any) -> Case:
    target = TargetSize("t", 7, W, 300, 4, 2, 20, 160, 10**6, 10**6, 300 * W, False, 10**5, 512, 4)
    settings: dict[str, Any] = {
        "machine": MACHINES["cpu2"], "gpus": 1, "target": target, "head": head, "data": Data(10, 1280, 640, L, "test"), "placement": "rank",
        "steps": K, "tokens_per_step": 256, "accumulation": 1, "epochs": 1, "mixed": False, "checkpointing": False, "ema": False,
        "online": False, "logs": False, "store": (200, 136), "store_name": "", "capture_tokens": 512, "probe": (0, 0, 0), "packed": False,
        "decode_batch": 8, "pieces": lambda tokens, vocabulary, steps: tokens,
    }  # fmt: skip
    return Case(**{**settings, **changes})


def a_batch(head: Any) -> tuple[States, torch.Tensor, torch.Tensor]:
    """A batch with its counted rows and the embedding."""
    g = torch.Generator().manual_seed(0)
    ids_BL, mask_BL = torch.randint(0, 300, (B, L), generator=g), torch.zeros(B, L, dtype=torch.long)
    mask_BL[:, PROMPT:] = 1
    P = int(mask_BL.sum())
    states = Codes(torch.randn(B, L, len(head.layer_ids) * W, generator=g))
    batch = States(ids_BL, mask_BL, states, Codes(torch.randn(P, W, generator=g)), torch.zeros(P, dtype=torch.long), torch.full((P,), 6.0))
    return batch, counted(mask_BL, ahead=2).flatten().nonzero()[:, 0], torch.randn(300, W, generator=g)


def products(counter: FlopCounterMode, *, matrices: bool) -> float:
    """Of plain matrices, or of anything."""
    names = ("aten.mm", "aten.addmm")
    return float(sum(v for k, v in counter.get_flop_counts()["Global"].items() if not matrices or str(k) in names))


@pytest.mark.parametrize("changes", WAYS, ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_products_are_those_that_torch_counts(kind: str, changes: dict[str, Any], wide: Target) -> None:
    head, size = made(kind, wide, **changes)
    batch, row_R, embed_VW = a_batch(head)
    with FlopCounterMode(display=False) as forward:
        outputs = list(head.outputs(batch, row_R, embed_VW, K))
    counts_KR = torch.stack([counted(batch.mask_BL, ahead=2 + k) for k in range(K)]).flatten(1)[:, row_R]
    number_L = batch.mask_BL.flatten().cumsum(0) - 1
    labels = Labels(batch.last_PW, batch.lse_P, batch.best_P, embed_VW[:VD], number_L[row_R + 1], counts_KR, None, torch.arange(VD))
    with FlopCounterMode(display=False) as loss:
        result = unrolled_loss(outputs, labels, LossConfig())
    with FlopCounterMode(display=False) as backward:
        result.total.backward()
    planned, once = Batch(len(row_R), B * L, B * L), head_work.layer_flops(size, Batch(len(row_R), B * L, B * L), K)
    assert once == pytest.approx(products(forward, matrices=True), rel=0.02)
    assert 2 * once - head_work.constant_inputs(size, planned) == pytest.approx(products(backward, matrices=True), rel=0.02)
    assert sum(head_work.loss_flops(a_case(size), planned)) == pytest.approx(products(loss, matrices=False), rel=0.03)


def saved(head: Any, *, mixed: bool, checkpointing: bool) -> tuple[float, int]:
    """Bytes that a forward pass leaves for the backward pass, hidden states and their gradients with them; and its counted rows."""
    batch, row_R, embed_VW = a_batch(head)
    given = [*head.parameters(), embed_VW, batch.states.codes]
    known = {t.untyped_storage().data_ptr() for t in given}
    found: dict[int, int] = {}
    alive = []

    def note(t: torch.Tensor) -> torch.Tensor:
        alive.append(t)
        if (where := t.untyped_storage()).data_ptr() not in known:
            found[where.data_ptr()] = where.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        outputs = list(head.outputs(batch, row_R, embed_VW, K, checkpointing=checkpointing))
    for output in outputs:
        note(output.hidden_RH)
    return sum(found.values()) + 4 * K * W * len(row_R), len(row_R)


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", HEADS)
def test_activations_are_those_that_autograd_saves(kind: str, mixed: bool, wide: Target) -> None:
    for changes in WAYS[:2]:
        head, size = made(kind, wide, **changes)
        measured, R = saved(head, mixed=mixed, checkpointing=False)
        planned, how = head_work.saved_bytes(a_case(size, mixed=mixed), Batch(R, B * L, B * L))
        assert planned == pytest.approx(measured, rel=0.15), (changes, how)


@pytest.mark.parametrize("kind", HEADS)
def test_activations_where_layers_are_computed_again(kind: str, wide: Target) -> None:
    head, size = made(kind, wide)
    measured, R = saved(head, mixed=False, checkpointing=True)
    case, batch = a_case(size, checkpointing=True), Batch(R, B * L, B * L)
    row, token = head_work._again(case)
    again = row * R + token * B * L
    keys = 4 * 2 * size.kv_heads * size.head_dim * size.layers * (B * L + (K - 1) * R) if size.unrolled else 0  # held by the pass itself
    assert head_work.saved_bytes(case, batch)[0] - again - keys == pytest.approx(measured, rel=0.1)
    assert head_work.saved_bytes(case, batch)[0] < head_work.saved_bytes(a_case(size), batch)[0]
