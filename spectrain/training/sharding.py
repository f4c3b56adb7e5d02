"""The trained weights on several processes: whole on each of them, or spread over them (FSDP2, DeepSpeed ZeRO-2 and ZeRO-3), as accelerate
was launched.

Whatever the way, `Weights` reads and restores what one process would have: full weights, moments by weight, the average. So a run goes on
under any other way, at any number of processes. A head is one unit: it is gathered whole for its pass, since its parts read each other's
weights outside their own calls.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel

from spectrain.config import TrainingConfig
from spectrain.training.checkpoint import Stateful

Way = Literal["whole", "fsdp2", "zero2", "zero3"]
MOMENTS = ("exp_avg", "exp_avg_sq")
NONE = (None, "none")  # where nothing is offloaded


def deepspeed_plugin(config: TrainingConfig) -> DeepSpeedPlugin | None:
    """What accelerate was launched with, where that is DeepSpeed, with our clipping. ValueError for what heads are not trained with."""
    if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return None
    if find_spec("deepspeed") is None:
        raise ValueError("accelerate was launched with DeepSpeed, which is not installed: pip install 'spectrain[deepspeed]'")
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=1, zero3_init_flag=False)
    settings, zero = plugin.deepspeed_config, plugin.deepspeed_config["zero_optimization"]
    offloaded = [name for name in ("offload_optimizer", "offload_param") if zero.get(name, {}).get("device") not in NONE]
    narrow = [name for name in ("bf16", "fp16", "torch_autocast") if settings.get(name, {}).get("enabled") is True]
    own = [name for name in ("optimizer", "scheduler") if name in settings]
    for found, way_out in (
        ([f"zero_stage {zero['stage']}"] if zero["stage"] not in (2, 3) else [], "use stage 2 or 3, or launch without DeepSpeed"),
        (offloaded, "the head fits on the device: leave it out"),
        (narrow, "the weights stay float32: leave it out, and set --set training.mixed_precision=bf16"),
        (own, "the recipe has both: leave it out"),
    ):  # fmt: skip
        if found:
            raise ValueError(f"accelerate was launched with DeepSpeed and {', '.join(found)}; {way_out}")
    _check(config, "DeepSpeed", zero3=zero["stage"] == 3)
    settings |= {
        "gradient_clipping": config.max_grad_norm, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": "auto",
    }  # fmt: skip
    return plugin


def fsdp_plugin(config: TrainingConfig) -> FullyShardedDataParallelPlugin | None:
    """What accelerate was launched with, where that is FSDP. ValueError for what heads are not trained with."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return None
    plugin = FullyShardedDataParallelPlugin()
    for wrong, found, way_out in (
        (plugin.fsdp_version != 2, f"fsdp_version {plugin.fsdp_version}", "set fsdp_version: 2"),
        (plugin.auto_wrap_policy is not None, "an fsdp_auto_wrap_policy", "a head is one unit: set fsdp_auto_wrap_policy: NO_WRAP"),
        (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "fsdp_offload_params", "the head fits on the device: leave it out"),
        (plugin.activation_checkpointing, "fsdp_activation_checkpointing", "use ours: --set training.checkpointing=true"),
        # transformers would load a target into the first process alone
        (plugin.cpu_ram_efficient_loading, "fsdp_cpu_ram_efficient_loading", "set fsdp_cpu_ram_efficient_loading: false"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"accelerate was launched with FSDP and {found}; {way_out}")
    _check(config, "FSDP2", zero3=False)
    return plugin


def _check(config: TrainingConfig, name: str, *, zero3: bool) -> None:
    """ValueError for settings that need whole weights on every process."""
    whole = "or launch without it (accelerate launch --multi_gpu), every process with the whole head"
    for wrong, setting, way_out in (
        (config.optimizer == "muon", "training.optimizer muon", "--set training.optimizer=adamw"),
        (config.lora is not None, "training.lora", "--set training.lora=null"),
        (config.mixed_precision == "fp16", "training.mixed_precision fp16", "--set training.mixed_precision=bf16"),
        (config.compile, "training.compile", "--set training.compile=false"),
        (zero3 and config.ema is not None, "ZeRO-3 and training.ema", "use zero_stage 2 or --set training.ema=null"),
    ):
        if wrong:
            raise ValueError(f"accelerate was launched with {name}, and {setting} does not work with it: {way_out}, {whole}")


def way_of(accelerator: Accelerator) -> Way:
    """How weights are kept on the processes of this accelerator."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "zero3" if accelerator.state.deepspeed_plugin.zero_stage == 3 else "zero2"
    return "fsdp2" if accelerator.is_fsdp2 else "whole"


@dataclass(frozen=True)
class Part:
    """A part of a checkpoint that is restored before the weights are spread (`before`), and read afterwards."""

    before: Stateful
    read: Callable[[], Any]

    def state_dict(self) -> Any:
        return self.read()

    def load_state_dict(self, state_dict: Any) -> Any:
        return self.before.load_state_dict(state_dict)


class Weights:
    """A head's weights, their optimizer and their average (None: there is none): ordinary until `prepare`, then spread over the processes.

    model: what makes the head's pass. parts: what a checkpoint holds of them, by name; to be restored before `prepare`. Reading them is
    collective: every process takes part, and the main one gets the tensors.
    """

    def __init__(self, head: Any, optimizer: torch.optim.Optimizer, average: AveragedModel | None, accelerator: Accelerator) -> None:
        self.head, self.average, self._plain, self._accelerator = head, average, optimizer, accelerator
        self.model: Any = None
        self.optimizer: Any = optimizer
        self.way = way_of(accelerator)
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        found: dict[str, Stateful | None] = {"head": head, "optimizer": optimizer, "ema": average}
        if self.way != "whole":
            read = {"head": self._read_head, "optimizer": self._read_optimizer, "ema": self._read_average}
            found = {name: part and Part(part, read[name]) for name, part in found.items()}
        self.parts = {name: part for name, part in found.items() if part is not None}

    def prepare(self, trainee: nn.Module) -> None:
        """Wrap the module that makes the head's pass (from then on `model`), and the optimizer."""
        state = self._plain.state_dict()
        if self.way != "whole":
            self._empty = _without_weights(self.head)
            self._numbers = [group["params"] for group in state["param_groups"]]
            self._plain.state.clear()  # it is of the weights as they were
        self.model, self.optimizer = self._accelerator.prepare(_Gathered(trainee) if self.way == "zero3" else trainee, self._plain)
        if self.way == "fsdp2":
            self._trained = [p for group in self._plain.param_groups for p in group["params"]]
            self._spread_moments(state)
            self._spread_average()
        elif self.way != "whole":
            self._fill_engine(state["state"])

    @contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        """Passes within exchange gradients between processes, and let the optimizer step (under DeepSpeed: make its step), only at the end
        of a window."""
        self._accelerator.gradient_state._set_sync_gradients(now)
        with nullcontext() if now else self._accelerator.no_sync(self.model):
            yield

    def whole(self) -> Any:
        """The head as it is measured and saved, the average where there is one, with full weights: the head itself where each process
        has all of it, else a copy. Collective."""
        average = self.average
        chosen = average.module if average is not None and int(average.n_averaged) else self.head  # it was made before the start was fitted
        if self.way in ("whole", "zero2"):
            return chosen
        found = deepcopy(self._empty)
        found.load_state_dict(self._full(chosen, to=self._accelerator.device), assign=True)
        return found.requires_grad_(False)

    def clip(self, most: float) -> float:
        """Scale the gradients down to this norm; returns the one that they had, over all processes. Under DeepSpeed the engine has clipped,
        and made the step unless it has left it out itself: then the norm is infinite.

        ValueError when the engine has stepped on gradients that are not finite.
        """
        known = self._trained if self.way == "whole" else list(self.head.parameters())  # accelerate finds FSDP's by their order
        norm = self._accelerator.clip_grad_norm_(known, most)
        if self.way not in ("zero2", "zero3"):
            return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if self.optimizer.step_was_skipped:
            return math.inf
        if not math.isfinite(norm):
            raise ValueError("DeepSpeed made a step on gradients that are not finite; the same command goes on from the last checkpoint")
        return float(norm)

    def _full(self, module: nn.Module, *, to: torch.device | None) -> dict[str, Tensor]:
        """Full tensors of a module, on the device `to`; a process that gives none only takes part."""
        if self.way != "zero3":
            return _gathered(module.state_dict(), to=to)  # type: ignore[no-any-return]
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(module.parameters())):
            return {name: tensor.detach().to(to, copy=True) for name, tensor in module.state_dict().items() if to is not None}

    @property
    def _keeps(self) -> torch.device | None:
        """Where this process keeps what a checkpoint holds."""
        return torch.device("cpu") if self._accelerator.is_main_process else None

    def _read_head(self) -> dict[str, Tensor]:
        return self._full(self.head, to=self._keeps)

    def _read_average(self) -> dict[str, Tensor]:
        assert self.average is not None
        return self._full(self.average, to=self._keeps)

    def _read_optimizer(self) -> dict[str, Any]:
        if self.way == "fsdp2":
            return _gathered(self._plain.state_dict(), to=self._keeps)  # type: ignore[no-any-return]
        from deepspeed.utils import safe_get_full_optimizer_state

        step = next(iter(self.optimizer.optimizer.optimizer.state.values()))["step"]
        state: dict[int, Any] = {}
        for i, p in enumerate(self._trained):
            found = {"step": step, **{key: safe_get_full_optimizer_state(p, key) for key in MOMENTS}}
            state[i] = {key: value.to(self._keeps, copy=True) for key, value in found.items() if self._keeps is not None}
        groups = [{**group, "params": numbers} for group, numbers in zip(self.optimizer.param_groups, self._numbers, strict=True)]
        return {"state": state, "param_groups": groups}

    def _spread_moments(self, state: Mapping[str, Any]) -> None:
        """Full moments to the places of their weights."""
        spread = {
            i: {key: _like(value, self._trained[i]) if key in MOMENTS else value for key, value in own.items()}
            for i, own in state["state"].items()
        }
        self._plain.load_state_dict({**state, "state": spread})

    def _spread_average(self) -> None:
        if self.average is None:
            return
        for (name, mine), theirs in zip(self.average.module.named_parameters(), self.head.parameters(), strict=True):
            above, _, last = name.rpartition(".")
            setattr(self.average.module.get_submodule(above), last, nn.Parameter(_like(mine.detach(), theirs), requires_grad=False))

    def _fill_engine(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Moments and step into DeepSpeed's flat partitions, which else have none before their first step (and ZeRO-2 then finds those of
        the first group alone)."""
        from deepspeed.utils import safe_set_full_optimizer_state

        engine, step = self.optimizer.optimizer, max((float(own["step"]) for own in state.values()), default=0.0)
        flat = engine.fp32_partitioned_groups_flat if self.way == "zero3" else engine.single_partition_of_fp32_groups
        for part in flat:
            moments = {key: torch.zeros_like(part) for key in MOMENTS}
            engine.optimizer.state[part] = {"step": torch.tensor(step, device=part.device), **moments}
        if self.way == "zero2":
            engine._lazy_init_hp_params_optimizer_state()
        for i, own in state.items():
            for key in MOMENTS:
                safe_set_full_optimizer_state(self._trained[i], own[key].to(self._accelerator.device), key)


class _Gathered(nn.Module):
    """A head's pass under ZeRO-3, whose weights are gathered before it and let go of after its backward pass.

    DeepSpeed takes that for done once the inputs have their gradients, and a batch has none: so there is one more input. Its gradient is
    the last that is made, since autograd takes the nodes that are ready in the order opposite to that in which they were made.
    """

    def __init__(self, trainee: nn.Module) -> None:
        super().__init__()
        from deepspeed.utils import set_z3_leaf_module

        self.unit = _Unit(trainee)
        set_z3_leaf_module(self.unit, True)

    def forward(self, work: Any) -> Any:
        return self.unit(work, torch.zeros((), device=work.batch.ids_BL.device, requires_grad=True))


class _Unit(nn.Module):
    def __init__(self, trainee: nn.Module) -> None:
        super().__init__()
        self.trainee = trainee

    def forward(self, work: Any, last: Tensor) -> Any:
        found = self.trainee(work)
        return found._replace(total=found.total + 0 * last)


def _without_weights(head: Any) -> Any:
    """A copy of a head whose weights take no memory."""
    return deepcopy(head, {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in head.parameters()})


def _like(full: Tensor, spread: Any) -> DTensor:
    return distribute_tensor(full.to(spread.device), spread.device_mesh, spread.placements)


def _gathered(tree: Any, *, to: torch.device | None) -> Any:
    """Nested states with full tensors on the device `to`; a process that gives none only takes part."""
    if isinstance(tree, DTensor):
        full = tree.full_tensor()
        return None if to is None else full.to(to)
    if isinstance(tree, Mapping):
        return {key: _gathered(value, to=to) for key, value in tree.items()}
    return tree
