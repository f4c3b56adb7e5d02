"""What speculation costs beside its gain: computation, positions that are not kept, memory; and the roofline of a target on a device."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from spectrain.decoding.drafter import Drafter
from spectrain.decoding.shapes import Shape
from spectrain.evaluation.speed import mean_draft
from spectrain.planning.machines import MACHINES
from spectrain.target.lean import PackedLinear
from spectrain.target.model import Target
from spectrain.target.passes import quick
from spectrain.yields import Roofline

MATRIX = 1024  # rows and columns of the product whose rate is measured
READ = 2**26  # numbers that are read to measure the bandwidth: more than any cache holds


def roofline_of(target: Target, *, flops: float, bandwidth: float) -> Roofline:
    """The numbers of a loaded target with those of a device (products and bytes a second)."""
    c, params = target.config, dict(target.model.named_parameters())  # a parameter that is shared is there once
    embedding = target.model.get_input_embeddings().weight
    lookup = embedding is not target.model.get_output_embeddings().weight  # rows of an embedding of its own are looked up
    experts = [p for name, p in params.items() if ".experts." in name and "shared" not in name]
    share = experts_share(c) if experts else 1.0
    read = [p for p in params.values() if not (lookup and p is embedding)]
    of_experts = sum(map(_numel, experts))
    heads = c.num_attention_heads
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    kv_heads = getattr(c, "num_key_value_heads", None) or heads
    return Roofline(
        flops=flops, bandwidth=bandwidth, weight_bytes=sum(map(_bytes, read)) - sum(map(_bytes, experts)),
        token_flops=2 * (sum(map(_numel, read)) - of_experts * (1 - share)),
        kv_bytes=2 * target.num_layers * kv_heads * head_dim * target.model.dtype.itemsize,
        attention_flops=4 * target.num_layers * heads * head_dim, expert_bytes=sum(map(_bytes, experts)), active=share,
    )  # fmt: skip


def experts_share(config: Any) -> float:
    """Share of a mixture's experts that a token passes, by the config; 1 where it has none."""
    every = next((n for n in ("num_local_experts", "num_experts", "n_routed_experts") if getattr(config, n, None)), None)
    return float(config.num_experts_per_tok / getattr(config, every)) if every and getattr(config, "num_experts_per_tok", None) else 1.0


def _numel(weight: Tensor) -> int:
    """Numbers of a weight; one of 4 bits is kept in bytes."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else int(state.shape.numel())


def _bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


@torch.inference_mode()
def device_rates(target: Target) -> tuple[str, float, float]:
    """(where the figures are from, products a second, bytes a second) of the target's device at the width of its numbers.

    Of a GPU that is known by name those of its data sheet; of any other device measured here and now, in about a second.
    """
    dtype = target.model.dtype
    if target.device.type == "cuda":
        name = torch.cuda.get_device_name(target.device)
        found = next((machine for key, machine in MACHINES.items() if key in name.lower()), None)
        if found is not None:
            return f"{name}, data sheet", found.rate(dtype.itemsize), found.bandwidth
    square = torch.ones(MATRIX, MATRIX, dtype=dtype, device=target.device)
    line = torch.ones(READ, dtype=dtype, device=target.device)
    linear = nn.Linear(MATRIX, MATRIX, bias=False, dtype=dtype, device=target.device)
    layer = linear if quick(target) is target else PackedLinear(linear)  # the products that its passes are made of
    product, reading = _seconds(lambda: layer(square), target.device), _seconds(line.sum, target.device)
    return "measured here", 2 * MATRIX**3 / product, READ * dtype.itemsize / reading


def _seconds(run: Any, device: torch.device) -> float:
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def roofline_table(target: Target, batches: Sequence[int], *, nodes: int, context: int) -> dict[str, Any]:
    """The roofline of a target on its device, with passes over 1 + `nodes` positions of each row of each batch.

    intensity: products a byte of such a pass; compute_bound: whether it lies above the device's ridge; predicted_v: its predicted cost in
    passes of plain decoding of the same batch.
    """
    device, flops, bandwidth = device_rates(target)
    line = roofline_of(target, flops=flops, bandwidth=bandwidth)
    found = {batch: line.intensity(1 + nodes, batch, context) for batch in batches}
    return {
        "device": device, "flops": flops, "bandwidth": bandwidth, "ridge": line.ridge, "weight_bytes": line.weight_bytes,
        "expert_bytes": line.expert_bytes, "kv_bytes": line.kv_bytes, "context": context,
        "intensity": [
            {"batch": batch, "positions": batch * (1 + nodes), "intensity": value, "compute_bound": value > line.ridge}
            for batch, value in found.items()
        ],
        "predicted_v": {str(b): line.verify(1 + nodes, b, context) / line.verify(1, b, context) for b in batches},
    }  # fmt: skip


def price(
    target: Target, drafter: Drafter, tau: Mapping[str, Any], records: Sequence[Any] | None = None, *, shape: Shape | None = None,
    context: int = 256,
) -> dict[str, float]:  # fmt: skip
    """What an arm costs beside its gain, per committed token where plain decoding has 1 position, none of them wasted.

    tau: the arm's cell of counts, with mean `depth` (draft steps) and `nodes` (drafted tokens) of a round where no records are given;
    shape: of the drafts (None: a chain), whose width is taken for the nodes that are extended on a level. flops_ratio: products of target
    and drafter a committed token, over plain decoding's. drafter_bytes: its weights; drafter_bytes_per_token: its cache;
    kv_tokens_displaced: tokens of the target's cache for which the weights' memory would do.
    """
    depth, nodes = (tau["depth"], tau["nodes"]) if records is None else mean_draft(records, shape)
    line = roofline_of(target, flops=1.0, bandwidth=1.0)
    a_position = line.token_flops + line.attention_flops * context
    parts = drafter_parts(drafter)
    extended = (shape.width if shape else 1) * max(0.0, depth - 1)
    drafted = sum(flops * (tau["tau"] + extended) for flops, _, _ in parts)
    bytes_, cache = sum(part[1] for part in parts), sum(part[2] for part in parts)
    return {
        "flops_ratio": (a_position * (1 + nodes) + drafted) / (a_position * tau["tau"]), "positions_per_token": (1 + nodes) / tau["tau"],
        "wasted_positions_per_token": (1 + nodes) / tau["tau"] - 1, "drafter_bytes": bytes_, "drafter_bytes_per_token": cache,
        "kv_tokens_displaced": bytes_ / line.kv_bytes,
    }  # fmt: skip


def drafter_parts(drafter: Any) -> list[tuple[float, float, float]]:
    """(products of a draft step for one node, bytes of the weights, bytes a token of the cache) of each model in a drafter.

    A head of a fixed number of drafts has a part for each, of which a step runs one. A settled token costs about what a step does.
    """
    if isinstance(small := getattr(drafter, "target", None), Target):
        line = roofline_of(small, flops=1.0, bandwidth=1.0)
        return [(line.token_flops, line.weight_bytes + line.expert_bytes, line.kv_bytes)]
    head = getattr(drafter, "head", None)
    if isinstance(head, nn.Module):
        params = list(head.parameters())
        layers, kv_heads, head_dim = cast(Any, head).cache_layers
        size = params[0].element_size()
        steps = getattr(head, "max_depth", None) or 1
        return [(2.0 * sum(map(_numel, params)) / steps, sum(map(_bytes, params)), 2 * layers * kv_heads * head_dim * size)]
    return [found for name in ("first", "second") if hasattr(drafter, name) for found in drafter_parts(getattr(drafter, name))]
