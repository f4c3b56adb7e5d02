"""Hydra and Hydra++ (arXiv 2402.05109): heads that read the drafts before their own.

Head k reads [prefix state of token i | embeddings of tokens i + 1 ... i + 1 + k] side by side: a residual block that projects them to one
width, residual blocks above it, an output layer of its own without bias. The prefix state is the target's last state, passed through a
decoder layer that sees all tokens up to it (`prefix`, the ++), or as it is. Only that layer has a cache, and of settled tokens alone.

A new head says what the target says after the prefix state, less surely: blocks begin at zero, their projection hands on a share of the
prefix state, output layers are the target's rows.

As the original code has them (`original`), a norm follows the prefix layer, and output layers have a bias, which an unrolled pass reads as
a last column against a state that ends in 1.

Legend: B rows, L tokens, R flat counted rows, N nodes, M nodes of the draft so far, K heads, H width of head and target, Y = (K + 1) * H,
V target vocabulary, Vd draft vocabulary, X any.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.heads.base import DraftState, KeyValueCache, StepOutput, TrainingBatch
from spectrain.heads.layers import SHARE, ResidualBlock, RMSNorm, caller, depths, narrow, newest
from spectrain.heads.places import Places
from spectrain.heads.unrolled import PROJECTIONS, DecoderConfig, DecoderLayer, Entry, Parts, UnrolledHead

DEVIATION = 0.02  # of random weights, as in most models
ADDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


class HydraConfig(DecoderConfig):
    """Sizes of the heads and of the target they belong to. num_heads: most drafts on a path. num_layers: residual blocks a head. prefix:
    a decoder layer over the states. original: with the norm and the biases of the original code."""

    num_hidden_layers: ClassVar[int] = 1  # type: ignore[misc]
    num_heads: int
    num_layers: int = 1
    prefix: bool = True
    original: bool = False


class Hydra(UnrolledHead):
    """All heads of a target together."""

    Config = HydraConfig
    settings = frozenset({"init_layer", "init_output", "num_heads", "num_layers", "original", "prefix", "sliding_window"})
    heads: Any
    lm_head: Any

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        c, H = config, config.hidden_size
        c.check("Hydra")
        if min(c.num_heads, c.num_layers) < 1:
            raise ValueError(f"a Hydra head of {c.num_heads} heads with {c.num_layers} blocks; needed are one or more of both")
        if c.target_hidden_size != H:
            raise ValueError(f"a Hydra head of width {H} for a target of width {c.target_hidden_size}; its width is the target's")
        if c.sliding_window and not c.prefix:
            raise ValueError("a Hydra head without a prefix layer looks back on nothing: leave head.sliding_window out")
        if c.original and not c.prefix:
            raise ValueError("a Hydra head as the original code has it has a prefix layer: set head.prefix=true, or head.original=false")
        self.prefix = DecoderLayer(c) if c.prefix else None
        self.prefix_norm = RMSNorm(H, c.rms_norm_eps) if c.original else None
        self.heads = nn.ModuleList(
            nn.Sequential(ResidualBlock(H, inputs=k + 2), *(ResidualBlock(H) for _ in range(c.num_layers - 1))) for k in range(c.num_heads)
        )
        self.lm_head = nn.ModuleList(nn.Linear(H, c.draft_vocab_size, bias=c.original) for _ in range(c.num_heads))

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return self.config.num_heads  # type: ignore[no-any-return]

    @property
    def layers(self) -> list[Any]:
        """The prefix layer, where there is one."""
        return [] if self.prefix is None else [self.prefix]

    @torch.no_grad()
    def start_from(
        self, *, layer: Mapping[str, Tensor] | None, norm: Tensor, output_VW: Tensor, target_ids: Tensor, train_output: bool, seed: int,
        sizes_J: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Begin at the target: see above; the prefix layer at the target's last one (`layer`, by name, norms as factors) as far as it is
        given, at random (`seed`) where not."""
        self.set_vocabulary(target_ids)
        for head, output in zip(self.heads, self.lm_head, strict=True):
            for parameter in head[0].res_connection.parameters():
                parameter.zero_()
            head[0].res_connection.weight[:, : self.config.hidden_size] = SHARE * torch.eye(self.config.hidden_size)
            output.weight.copy_(output_VW[target_ids.to(output_VW.device)])
            if output.bias is not None:
                output.bias.zero_()
        if self.prefix_norm is not None:  # states leave the final norm about so large, and shall stay so
            self.prefix_norm.weight.fill_(float(norm.float().square().mean().sqrt()))
        if self.prefix is not None:
            _fill_prefix(self.prefix, layer or {}, torch.Generator().manual_seed(seed))
        self.train_output(train_output)

    def _fuse(self, states_XH: Tensor) -> Tensor:
        return states_XH.to(self.lm_head[0].weight.dtype)

    def _embed(self, token_X: Tensor, embed_VW: Tensor) -> Tensor:
        return embed_VW[token_X].to(self.lm_head[0].weight.dtype)

    def _entry(self, at: Places, embed_VW: Tensor) -> Entry:
        """The prefix layer reads states alone."""

        def project(which: int, read_XH: Tensor, parts: Parts) -> Tensor:
            return getattr(self.layers[0].self_attn, PROJECTIONS[which])(read_XH)  # type: ignore[no-any-return]

        return Entry(parts=lambda k: (), read=lambda x_XH, parts: self._enter(x_XH, x_XH), project=project)

    def _enter(self, x_BNH: Tensor, embed_BNH: Tensor) -> tuple[Tensor, Tensor]:
        return narrow(self.layers[0].input_layernorm(x_BNH)), x_BNH

    def _leave(self, x_XH: Tensor) -> tuple[Tensor, Tensor]:
        if self.prefix_norm is not None:
            x_XH = self.prefix_norm(x_XH)
        return x_XH, x_XH

    def _hidden(self, k: int, x_XY: Tensor) -> Tensor:
        """What the output layer of head k reads of a prefix state and k + 1 embeddings side by side (more of them: unread)."""
        return self.heads[k](x_XY[..., : (k + 2) * self.config.hidden_size])  # type: ignore[no-any-return]

    def outputs(
        self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int, *, checkpointing: bool = False
    ) -> Iterator[StepOutput]:
        """What the output layer of each head reads at the given flat rows (rising); `steps` of the heads."""
        call = caller(checkpointing=checkpointing)
        x_RY = self._prefix_states(batch, row_R, embed_VW, call)
        ids_N, L = batch.ids_BL.flatten(), batch.ids_BL.shape[1]
        column_R = row_R % L
        for k in range(steps):
            in_hand_R = ids_N[row_R - column_R + (column_R + 1 + k).clamp(max=L - 1)]
            x_RY = torch.cat([x_RY, self._embed(in_hand_R, embed_VW)], dim=1)
            hidden_RH, output = call(partial(self._hidden, k), x_RY), self.lm_head[k]
            if output.bias is None:
                yield StepOutput(ahead=2 + k, hidden_RH=hidden_RH, output_VdH=output.weight)
            else:
                rows_VdX = torch.cat([output.weight, output.bias[:, None]], dim=1)
                yield StepOutput(ahead=2 + k, hidden_RH=F.pad(hidden_RH, (0, 1), value=1.0), output_VdH=rows_VdX)

    def _prefix_states(self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, call: Callable[..., Any]) -> Tensor:
        """The prefix states [R, H] of the counted rows."""
        states_NH = batch.states_BLF.flatten(0, 1)
        if self.prefix is None:
            return self._fuse(states_NH[row_R])
        at = Places.of(batch, row_R, 1, all_ask=False)
        first = partial(self._first_step, entry=self._entry(at, embed_VW), attention=self._attention(batch, at, row_R), at=at)
        return self._leave(call(first, states_NH[at.token_T], ())[0])[0]

    def begin(
        self, states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, embed_VW: Tensor, cache: KeyValueCache, state: DraftState | None
    ) -> tuple[Tensor, DraftState]:
        """Settled tokens pass the prefix layer and stay in its cache; of the newest one of each row, its state and the token in hand."""
        if self.prefix is None:
            x_B1H = newest(self._fuse(states_BNF), count_B, None)
        else:
            x_B1H, _ = self._settle(states_BNF, next_BN, count_B, embed_VW, cache)
        in_hand_B1 = newest(next_BN[..., None], count_B, None)[..., 0]
        x_B1Y = torch.cat([x_B1H, self._embed(in_hand_B1, embed_VW)], dim=2)
        x_B1Y = F.pad(x_B1Y, (0, (self.config.num_heads - 1) * self.config.hidden_size))
        if state is not None:
            x_B1Y = torch.where((count_B > 0)[:, None, None], x_B1Y, state.hidden_BMH[:, :1])
        root_B11 = torch.ones(len(next_BN), 1, 1, dtype=torch.bool, device=next_BN.device)
        return self.lm_head[0](self._hidden(0, x_B1Y[:, 0])), DraftState(hidden_BMH=x_B1Y, ancestors_BMM=root_B11)

    def extend(
        self, state: DraftState, tokens_BN: Tensor, parents_BN: Tensor, embed_VW: Tensor, cache: KeyValueCache
    ) -> tuple[Tensor, DraftState]:
        """Drafted nodes: what their parent read, and their own embedding behind it; nothing is written to the cache."""
        line_BNM = state.line(parents_BN)
        depth_BN = line_BNM.sum(-1) - 1
        row_B1 = torch.arange(len(tokens_BN), device=tokens_BN.device)[:, None]
        x_BNKH = state.hidden_BMH[row_B1, parents_BN].unflatten(-1, (-1, self.config.hidden_size))
        e_BN1H = self._embed(tokens_BN, embed_VW)[:, :, None]
        x_BNY = x_BNKH.scatter(2, (depth_BN + 1)[..., None, None].expand_as(e_BN1H), e_BN1H).flatten(2)
        return self._logits(depth_BN, x_BNY, *depths(state.level, line_BNM)), state.grown(x_BNY, line_BNM)

    def _logits(self, depth_BN: Tensor, x_BNY: Tensor, low: int, high: int) -> Tensor:
        """Those of the head of each node's depth, which lies between `low` and `high`."""
        if low == high:
            return self.lm_head[low](self._hidden(low, x_BNY))  # type: ignore[no-any-return]
        logits_BNV = x_BNY.new_empty(*depth_BN.shape, self.config.draft_vocab_size)
        for k in range(low, high + 1):
            logits_BNV[depth_BN == k] = self.lm_head[k](self._hidden(k, x_BNY[depth_BN == k]))
        return logits_BNV


def _fill_prefix(prefix: DecoderLayer, layer: Mapping[str, Tensor], generator: torch.Generator) -> None:
    """The target's layer where a part of it fits, else random; at first it adds nothing. The target's own sums are of the size of its
    residual stream before the final norm, many times that of the state here, which they would drown."""
    for name, parameter in prefix.named_parameters():
        given = layer.get(name)
        if name in ADDS:
            parameter.zero_()
        elif given is not None and given.shape == parameter.shape:
            parameter.copy_(given)
        elif parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * DEVIATION)
        else:
            parameter.fill_(1.0)
