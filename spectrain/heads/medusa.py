"""Medusa (arXiv 2401.10774): heads side by side over the target's last state; head k answers the token k + 2 after the state's own.

Head k: residual blocks x + silu(W x + b) with weights of their own, then an output layer of its own, or one that all share. The heads do
not see each other's drafts: the law after a node is that of its depth, whatever the tokens above it are.

A new head says what the target says after the state it reads, less surely: blocks begin at zero, output layers at a share of the target's
rows. Output layers that stay as they are have the rows themselves.

Legend: B rows, L tokens, R flat counted rows, N nodes, D depths, W target width, V target vocabulary, Vd draft vocabulary, X any.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config import Stage
from spectrain.heads.base import DraftState, HeadModule, KeyValueCache, StepOutput, TrainingBatch
from spectrain.heads.layers import SHARE, ResidualBlock, caller, depths, newest


class MedusaConfig(Stage):
    """Sizes of the heads and of the target they belong to. num_heads: most drafts on a path. num_layers: residual blocks a head.
    shared_output: one output layer for all heads."""

    target_hidden_size: int
    num_heads: int
    num_layers: int = 1
    shared_output: bool = False
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    target_layers: int


class Medusa(HeadModule):
    """All heads of a target together."""

    Config = MedusaConfig
    settings = frozenset({"num_heads", "num_layers", "shared_output"})
    cache_layers = (0, 1, 1)
    heads: Any

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        c = config
        if min(c.num_heads, c.num_layers) < 1:
            raise ValueError(f"a Medusa head of {c.num_heads} heads with {c.num_layers} blocks; needed are one or more of both")
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(c.target_hidden_size) for _ in range(c.num_layers))) for _ in range(c.num_heads)
        )
        outputs = 1 if c.shared_output else c.num_heads
        self.lm_head = nn.ModuleList(nn.Linear(c.target_hidden_size, c.draft_vocab_size, bias=False) for _ in range(outputs))

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return self.config.num_heads  # type: ignore[no-any-return]

    @property
    def layers(self) -> list[nn.Module]:
        """The residual blocks."""
        return [block for head in self.heads for block in head]

    @torch.no_grad()
    def start_from(
        self, *, layer: Mapping[str, Tensor] | None, norm: Tensor, output_VW: Tensor, target_ids: Tensor, train_output: bool, seed: int,
        sizes_J: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Begin at the target: see above. Nothing is random."""
        self.set_vocabulary(target_ids)
        for output in self.lm_head:
            output.weight.copy_(output_VW[target_ids.to(output_VW.device)] * (SHARE if train_output else 1.0))
        self.train_output(train_output)

    def _output(self, k: int) -> nn.Linear:
        return self.lm_head[0 if self.config.shared_output else k]  # type: ignore[return-value]

    def _read(self, states_XW: Tensor) -> Tensor:
        """In the head's precision: under autocast, too, the residual stream is no rounded sum."""
        return states_XW.to(self.lm_head[0].weight.dtype)

    def outputs(
        self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int, *, checkpointing: bool = False
    ) -> Iterator[StepOutput]:
        """What the output layer of each head reads at the given flat rows; `steps` of the heads."""
        x_RW, call = self._read(batch.states_BLF.flatten(0, 1)[row_R]), caller(checkpointing=checkpointing)
        for k in range(steps):
            yield StepOutput(ahead=2 + k, hidden_RH=call(self.heads[k], x_RW), output_VdH=self._output(k).weight)

    def begin(
        self, states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, embed_VW: Tensor, cache: KeyValueCache, state: DraftState | None
    ) -> tuple[Tensor, DraftState]:
        """Keep the newest settled state of each row; nothing is written to the cache."""
        x_B1W = newest(self._read(states_BNF), count_B, None if state is None else state.hidden_BMH[:, :1])
        root_B11 = torch.ones(len(x_B1W), 1, 1, dtype=torch.bool, device=x_B1W.device)
        return self._logits(0, x_B1W)[:, 0], DraftState(hidden_BMH=x_B1W, ancestors_BMM=root_B11)

    def extend(
        self, state: DraftState, tokens_BN: Tensor, parents_BN: Tensor, embed_VW: Tensor, cache: KeyValueCache
    ) -> tuple[Tensor, DraftState]:
        """Drafted nodes: the law after each is that of its depth. Nodes of one depth get one row of logits, expanded."""
        line_BNM = state.line(parents_BN)
        depth_BN = line_BNM.sum(-1) - 1
        x_B1W = state.hidden_BMH[:, :1]
        low, high = depths(state.level, line_BNM)
        logits_BDV = torch.cat([self._logits(k, x_B1W) for k in range(low, high + 1)], dim=1)
        at_BNV = (depth_BN - low)[..., None].expand(-1, -1, logits_BDV.shape[-1])
        logits_BNV = logits_BDV.expand(-1, tokens_BN.shape[1], -1) if low == high else logits_BDV.gather(1, at_BNV)
        return logits_BNV, state.grown(x_B1W.expand(-1, tokens_BN.shape[1], -1), line_BNM)

    def _logits(self, k: int, x_B1W: Tensor) -> Tensor:
        return self._output(k)(self.heads[k](x_B1W))  # type: ignore[no-any-return]
