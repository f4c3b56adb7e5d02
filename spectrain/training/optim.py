"""What moves the weights: AdamW, or Muon beside it as one optimizer; their rates; and the average of the weights over steps.

Which weights Muon takes: the matrices of the decoder layers, in which a direction is as good as another, so that a step of equal size along
all of them (what orthogonalising the update does) learns more of the rare ones. AdamW keeps norms (no matrices), the output rows (a row a
token: rare tokens must stay slow), and the projections of the target's states and embeddings (`fc`, `embed_proj`, the residual blocks
`heads` of Medusa and Hydra): their inputs have a few entries a hundred times larger than the rest, and a step of equal size along those
drowns the others (Hydra, 40 steps: .25 drafts kept of held-out rows, .18 with its blocks in Muon). A head without decoder layers has AdamW
alone.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.swa_utils import AveragedModel

from spectrain.config import TrainingConfig

Many = tuple[Tensor, ...] | list[Tensor]
ADAPTER_RATE = "lora.lr"
OUTSIDE = ("fc", "lm_head", "embed_proj", "heads")  # matrices at a head's borders


class Together(torch.optim.Optimizer):
    """Several optimizers, each with its own weights, that step, scale (float16) and are saved as one."""

    def __init__(self, **parts: torch.optim.Optimizer) -> None:
        self.parts = parts  # nothing of the base class is kept: groups and states are those of the parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """ValueError when the states are of other optimizers."""
        if self.parts.keys() != state_dict.keys():
            raise ValueError(f"states of {', '.join(map(str, state_dict))}; needed those of {', '.join(self.parts)}")
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])


def make_optimizer(head: nn.Module, config: TrainingConfig, adapter: Sequence[Tensor] = ()) -> torch.optim.Optimizer:
    """The optimizer of a head's trainable weights, and of the weights of an adapter, at `lora.lr`. Weight decay is for matrices of the head
    alone: it would pull the scales of norms to zero, and an adapter's weights say by how much the target changes."""
    named = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    inner = [p for name, p in named if p.dim() == 2 and name.split(".")[0] not in OUTSIDE] if config.optimizer == "muon" else []
    taken = {id(p) for p in inner}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": some, "weight_decay": decay, "rate": "lr"}
        for some, decay in (([p for p in rest if p.dim() > 1], config.weight_decay), ([p for p in rest if p.dim() < 2], 0.0))
        if some
    ] + ([{"params": list(adapter), "weight_decay": 0.0, "rate": ADAPTER_RATE}] if adapter else [])
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True) if groups else None
    if adamw is not None and adapter:  # what is made of the target's weights is made anew by their versions, which a fused step leaves
        adamw.register_step_post_hook(lambda *_: increment_version(adapter))
    if not inner:
        assert adamw is not None
        return adamw
    muon = torch.optim.Muon([{"params": inner, "rate": "muon_lr"}], lr=config.muon_lr, weight_decay=config.weight_decay)
    return Together(muon=muon, **({} if adamw is None else {"adamw": adamw}))


def set_rates(optimizer: torch.optim.Optimizer, factor: float, config: TrainingConfig, *, gain: float = 1.0) -> None:
    """Give every group its own rate times `factor`, and an adapter that times `gain`."""
    for group in optimizer.param_groups:
        group["lr"] = attrgetter(group["rate"])(config) * factor * (gain if group["rate"] == ADAPTER_RATE else 1.0)


def averaged(head: nn.Module, decay: float) -> AveragedModel:
    """A copy of the head that holds the average of its weights, in evaluation mode; `update_parameters(head)` takes in a step.

    average <- d average + (1 - d) weights with d = min(decay, (1 + n) / (10 + n)) after n steps, so that a short run is not an average
    of its beginning (the rule of TensorFlow's ExponentialMovingAverage).
    """

    @torch.no_grad()
    def mix(average: Many, weights: Many, count: Tensor | int) -> None:
        n = int(count)
        torch._foreach_lerp_(list(average), list(weights), 1 - min(decay, (1 + n) / (10 + n)))

    copy = AveragedModel(head, multi_avg_fn=mix)
    return copy.requires_grad_(False).eval()
