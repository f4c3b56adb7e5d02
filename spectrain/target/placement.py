"""How a target lies on several processes: whole on each of them (`rank`), or one copy spread over them; or over the devices of one.

`fsdp2` (torch's fully_shard, arXiv 2304.11277) and `zero3` (DeepSpeed, arXiv 1910.02054): every process keeps a share of every weight,
makes passes over rows of its own, and gathers a layer's weights for its part of a pass. So all must make equally many passes; where they
would not, a section (`Placement.section`) lets those that are done go on with passes of one token. `tp` (arXiv 1909.08053): the products
themselves are split over `members` processes, which make every pass together; several such groups need nothing of each other.
`device_map`: one process, layers one after the other on its devices, as accelerate divides them; passes wait for each device in turn.

The loading is transformers' own: each process reads its share of the files, with zero3 the first one reads them for all.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal["rank", "fsdp2", "tp", "zero3", "device_map"]
DEVICE_MAP = "auto"  # alike on all devices (accelerate's `balanced`), what does not fit is refused
LOADING = timedelta(hours=2)  # processes read shares of unlike size, from disks that they share
T = TypeVar("T")


@dataclass
class Placement:
    """members: processes that make every pass together (tp), which `group` joins. engine: DeepSpeed's, whose hooks live as long as it
    does. stepping: whether a section is open."""

    kind: Kind = "rank"
    members: int = 1
    group: Any = None
    engine: Any = None
    stepping: bool = False

    @property
    def sharded(self) -> bool:
        return self.kind != "rank"

    @property
    def gathers(self) -> bool:
        """Whether a pass needs one of every other process at the same time."""
        return self.kind in ("fsdp2", "zero3")

    @property
    def replica(self) -> int:
        """Which rows this process makes passes over, of `replicas` parts: its own, or those of its group."""
        return process()[0] // self.members

    @property
    def replicas(self) -> int:
        return process()[1] // self.members

    @property
    def member(self) -> int:
        """This process among those of its group."""
        return process()[0] % self.members

    @property
    def leads(self) -> bool:
        """Whether this process writes what its group has computed."""
        return self.member == 0

    @contextmanager
    def section(self, idle: Callable[[], object], device: torch.device) -> Iterator[None]:
        """A part of the work in which processes make different numbers of passes: who is done makes `idle` passes until all are.

        A section inside another one does nothing. All processes must enter it. An error in it is raised at once, and the others' next
        pass fails when this process has gone.
        """
        if not self.gathers or self.stepping:
            yield
            return
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False
        while _any_passes(False, device):
            idle()

    @contextmanager
    def one_pass(self, device: torch.device) -> Iterator[None]:
        """Around a pass: the others are told of it in a section. Gathered weights are inference tensors from the first pass on, so all
        passes are made in that mode."""
        if not self.gathers:
            yield
            return
        if self.stepping:
            _any_passes(True, device)
        with torch.inference_mode():
            yield

    def agreed(self, own: T) -> T:
        """What the first process of the group has found, so that all of them do the same."""
        if self.members == 1:
            return own
        told = [own]
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        return told[0]

    def of_members(self, own: T) -> list[T]:
        """What every process of the group has, in order."""
        if self.members == 1:
            return [own]
        found: list[Any] = [None] * self.members
        dist.all_gather_object(found, own, group=self.group)
        return found

    def whole(self, weight: Tensor) -> Tensor:
        """A weight in full, on every process; all of them must ask for it. One that is not spread comes as it is."""
        if not self.sharded:
            return weight.detach()
        from torch.distributed.tensor import DTensor

        if isinstance(weight, DTensor):
            return weight.full_tensor().detach()
        if hasattr(weight, "ds_shape"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([weight]):
                return weight.detach().clone()
        return weight.detach()

    def kv_heads(self, model: Any, heads: int) -> int:
        """Key heads whose cache this process holds."""
        return heads if self.kind != "tp" else _kv_heads_each(model.tp_plan, heads, self.members) or heads


def full_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight in full, also of one that is spread."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


def process() -> tuple[int, int]:
    """Number of this process and how many there are: of the process group, or as the launcher says before there is one."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _any_passes(own: bool, device: torch.device) -> bool:
    passing = torch.tensor(float(own), device=device)
    dist.all_reduce(passing)
    return bool(passing)


def open_placement(
    kind: str, tp_size: int | None, *, name: str, device: str, quantization: str | None = None, adapter: object = None
) -> Placement:
    """The placement asked for, with a process group where there is none yet. ValueError for what cannot be had, with the way out."""
    if kind not in get_args(Kind):
        raise ValueError(f"placement {kind!r} is unknown; choose one of {', '.join(get_args(Kind))}")
    if tp_size is not None and kind != "tp":
        raise ValueError(f"tp_size {tp_size} belongs to placement tp, found placement {kind}; leave it out or choose tp")
    if kind == "rank":
        return Placement()
    accelerator = torch.accelerator.current_accelerator()
    there, world, several = "cpu" if accelerator is None else accelerator.type, process()[1], kind != "device_map"
    for wrong, found, way_out in (
        (name.endswith(".gguf"), f"{name} is a GGUF file", "write it as a folder first: spectrain.target.model.unpack_gguf"),
        (quantization is not None, f"quantization {quantization} was asked for", "leave one of the two out"),
        (adapter is not None, f"an adapter was to be merged ({adapter})", "merge it into a folder first, and load that"),
        (torch.device(device).type != there, f"device {device} was asked for", f"leave it out: the processes of this machine use {there}"),
        (kind == "zero3" and find_spec("deepspeed") is None, "DeepSpeed is missing", "pip install 'spectrain[deepspeed]', or take fsdp2"),
        (several and world < 2, "this is one process", "start several: torchrun --nproc_per_node N -m spectrain …, or accelerate launch"),
        (not several and world > 1, f"these are {world} processes", "start one, without a launcher, or choose placement tp"),
    ):  # fmt: skip
        if wrong:
            over = "several processes" if several else "the devices of one process"
            raise ValueError(f"placement {kind} spreads a target over {over}, and {found}; {way_out}")
    if not several:
        return Placement("device_map")
    members = tp_size or int(os.environ.get("LOCAL_WORLD_SIZE", world)) if kind == "tp" else 1
    if kind == "tp" and (members < 2 or world % members):
        raise ValueError(f"tp_size {members} and {world} processes; needed is 2 or more, and a number of processes that it divides")
    if not dist.is_initialized():
        dist.init_process_group(timeout=LOADING)
    return Placement(kind, members)  # type: ignore[arg-type]


@contextmanager
def loading(placement: Placement, name: str, dtype: torch.dtype, **where: Any) -> Iterator[dict[str, Any]]:
    """Arguments of `from_pretrained` that spread a model while it is loaded; to be closed with `finish`.

    A head that is trained by DeepSpeed would have transformers spread the target, too: only zero3 shows it a DeepSpeed config here.
    Raises ValueError for a model that cannot be split as asked for, and for a launch that would leave it empty.
    """
    from transformers import AutoConfig
    from transformers.integrations import HfDeepSpeedConfig, is_fsdp_enabled, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    if is_fsdp_enabled():  # its default, with which transformers loads weights in the first process alone
        found = "accelerate was launched with FSDP and fsdp_cpu_ram_efficient_loading, which leaves a frozen target empty on all processes"
        raise ValueError(f"{found} but the first; set fsdp_cpu_ram_efficient_loading: false in the launch file, or launch without FSDP")
    if not placement.sharded:
        yield {}
        return
    from transformers.distributed import DistributedConfig

    class Copies(DistributedConfig):
        """Groups that make passes over rows of their own need no exchange of weights between them."""

        dp_size = 1

    found = AutoConfig.from_pretrained(name, **where)
    _check_weights(found, name, placement.kind)
    config, world = found.get_text_config(), process()[1]
    if placement.kind == "fsdp2":
        yield {"distributed_config": DistributedConfig(fsdp_size=world)}
    elif placement.kind == "device_map":
        yield {"device_map": DEVICE_MAP}
    elif placement.kind == "tp":
        size = placement.members
        experts = size if _check_tp(config, name, size) else None
        copies = world // size
        yield {"distributed_config": Copies(tp_size=size, tp_plan="auto", ep_size=experts, dp_replicate_size=copies)}
    else:
        shown = HfDeepSpeedConfig(zero3_config(dtype, config.hidden_size))  # transformers keeps a weak reference
        try:
            yield {}
        finally:
            unset_hf_deepspeed_config()
            del shown


def _check_weights(config: Any, name: str, kind: Kind) -> None:
    """ValueError for a model that was saved quantised in a way that cannot be spread."""
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method and (kind == "zero3" or method == "bitsandbytes"):
        raise ValueError(f"{name} was saved quantised ({method}), which placement {kind} cannot spread; choose placement rank")


def zero3_config(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """DeepSpeed's settings of a frozen target; norms and biases stay whole on each process, as transformers' `auto` has it."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10 * width},
        "bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16},
    }  # fmt: skip


def _check_tp(config: Any, name: str, size: int) -> bool:
    """ValueError unless heads and experts divide by the size of the group; whether experts are to be spread whole."""
    plan, experts_plan = config.base_model_tp_plan or {}, config.base_model_ep_plan or {}
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    experts = getattr(config, "num_experts", None) or 0 if "moe_tp_experts" not in plan.values() and experts_plan else 0
    for wrong, found in (
        (not plan, "transformers has no plan to split it"),
        (_kv_heads_each(plan, kv_heads, size) is None or heads % size, f"it has {heads} query and {kv_heads} key heads"),
        (experts % size, f"it has {experts} experts"),
    ):
        if wrong:
            fit = [n for n in range(2, kv_heads + 1) if not (heads % n or kv_heads % n or experts % n)] if plan else []
            way_out = f"choose a tp_size of {', '.join(map(str, fit))}, or placement fsdp2" if fit else "choose placement fsdp2"
            raise ValueError(f"{name} cannot be split over tp_size {size} processes: {found}; {way_out}")
    return experts > 0


def _kv_heads_each(plan: dict[str, str], heads: int, size: int) -> int | None:
    """Key heads of one of `size` processes; all of them where attention is not split, None where they do not divide."""
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    found = get_kv_heads_per_rank(plan, heads, size)
    assert not isinstance(found, list)
    return found


def finish(placement: Placement, model: Any, dtype: torch.dtype) -> None:
    """Make a loaded model ready for passes; the placement learns of its group or engine."""
    if placement.kind == "tp":
        from torch.distributed.tensor import DTensor

        placement.group = next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh.get_group()
    elif placement.kind == "device_map":
        lies_on = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
        if len(lies_on) > 1 and lies_on & {"cpu", "disk"}:
            found = f"the devices have no room for all of it: parts would lie on {', '.join(sorted(lies_on))}"
            raise ValueError(f"{found}; choose a smaller dtype, quantization 8bit or 4bit, or more devices")
    elif placement.kind == "zero3":
        kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        if kept and dtype != torch.float32:
            found = f"{type(model).__name__} keeps {', '.join(sorted(kept))} in float32 beside {str(dtype).removeprefix('torch.')}"
            raise ValueError(f"placement zero3 has one dtype for all weights, and {found}; choose placement fsdp2 or dtype float32")
        import deepspeed

        placement.engine, *_ = deepspeed.initialize(model=model, config=zero3_config(dtype, model.config.get_text_config().hidden_size))
