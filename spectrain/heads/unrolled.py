"""Decoder layers that are trained by unrolling their own drafts, and draft with a cache what they were trained on.

Row i reads a feature of token i and the token i + 1 in hand. At test-time step k it reads token i + 1 + k and its own output of step k - 1
at rotary position i + k, and attends to the keys of step 0 at rows 0 ... i and to its own keys of steps 1 ... k: what drafting with a
cache does. How feature and token come into the first layer, and what leaves the last one, is each head's own.

Legend: B rows, L tokens, R flat counted rows, T tokens whose keys of step 0 are needed, N nodes, M nodes of the draft so far, S cache
slots, H head width, W target width, A query heads, G key heads, D head size, C heads of a projection side by side, F width of the states
read, V target vocabulary, Vd draft vocabulary, X any.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config import Stage
from spectrain.heads.base import DraftState, HeadModule, KeyValueCache, StepOutput, TrainingBatch
from spectrain.heads.layers import GatedMLP, RMSNorm, narrow, rotary_frequencies, rotary_table, rotate
from spectrain.heads.places import Places, pick
from spectrain.kernels.tree_attention import attend
from spectrain.kernels.unrolled_attention import Unrolled, attend_base, attend_unrolled, working_type

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
KeyValue = tuple[Tensor, Tensor]
Parts = tuple[Tensor, ...]


class DecoderConfig(Stage):
    """Sizes of a head's decoder layers and of the target it belongs to. layer_ids: states of the target that are read, rising.
    sliding_window: settled tokens that a draft looks back on; its own drafts are seen always."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 1
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str = "silu"
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    sliding_window: int | None = None
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    target_layers: int

    def check(self, family: str) -> None:
        """ValueError for sizes that no such layer can have."""
        if self.hidden_act != "silu":
            raise ValueError(f"{family} heads use silu, the config says {self.hidden_act!r}")
        if self.num_hidden_layers < 1 or self.num_attention_heads % self.num_key_value_heads:
            heads = f"{self.num_attention_heads} query heads and {self.num_key_value_heads} key heads"
            found = f"{self.num_hidden_layers} layers, {heads}"
            raise ValueError(f"{found}: needed are a layer or more, and as many query heads for every key head")


class _Attention(nn.Module):
    """Projections only."""

    def __init__(self, c: DecoderConfig, inputs: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(inputs, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)


class DecoderLayer(nn.Module):
    """A decoder layer, its norms by name; `inputs`: how many widths its projections read. Called for what comes after attention."""

    input_layernorm: RMSNorm
    hidden_norm: RMSNorm

    def __init__(self, c: DecoderConfig, *, norms: Sequence[str] = ("input_layernorm",), inputs: int = 1) -> None:
        super().__init__()
        for name in norms:
            setattr(self, name, RMSNorm(c.hidden_size, c.rms_norm_eps))
        self.self_attn = _Attention(c, c.hidden_size * inputs)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def forward(self, residual_XH: Tensor, attended_XC: Tensor) -> Tensor:
        x_XH = residual_XH + self.self_attn.o_proj(attended_XC)
        return x_XH + self.mlp(self.post_attention_layernorm(x_XH))


@dataclass(frozen=True)
class Entry:
    """How feature and tokens in hand come into the first layer of an unrolled pass.

    parts(k): what was made once a token of the tokens in hand, for the tokens of step k. read(feature, parts): what the layer reads, and
    what its residual stream starts from. project(which, read, parts): its queries, keys or values [X, C].
    """

    parts: Callable[[int], Parts]
    read: Callable[[Tensor, Parts], tuple[Tensor, Tensor]]
    project: Callable[[int, Tensor, Parts], Tensor]


class UnrolledHead(HeadModule):
    """Base of heads with decoder layers. A family says what its features are (`_fuse`), how they come in (`_entry` for an unrolled pass,
    `_enter` and `_embed` for a cached one), and what goes out (`_leave`)."""

    lm_head: nn.Linear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        frequencies, self._scaling = rotary_frequencies(
            config.rope_parameters, head_dim=config.head_dim, max_positions=config.max_position_embeddings
        )
        # Kept out of the module's tensors: a cast to bfloat16 would ruin the positions.
        self._frequencies = frequencies

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As of any module. The frequencies go where the weights go: brought there in each pass, the host would wait for the device."""
        found = super()._apply(fn, recurse)
        self._frequencies = self._frequencies.to(next(self.parameters()).device)
        return found

    @property
    def cache_layers(self) -> tuple[int, int, int]:
        return len(self.layers), self.config.num_key_value_heads, self.config.head_dim

    def _fuse(self, states_XF: Tensor) -> Tensor:
        """The feature of step 0, in the head's precision: under autocast, too, the residual stream is no rounded sum."""
        raise NotImplementedError

    def _embed(self, token_X: Tensor, embed_VW: Tensor) -> Tensor:
        """Embeddings of tokens in hand as the first layer takes them, in the head's precision: the target may be of another."""
        raise NotImplementedError

    def _entry(self, at: Places, embed_VW: Tensor) -> Entry:
        raise NotImplementedError

    def _enter(self, x_BNH: Tensor, embed_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """In a cached pass: what the first layer's projections read, and what its residual stream starts from."""
        raise NotImplementedError

    def _leave(self, x_XH: Tensor) -> tuple[Tensor, Tensor]:
        """What the output layer reads, and the feature of the next step."""
        raise NotImplementedError

    def _step(self, ahead: int, hidden_RH: Tensor, feature_RH: Tensor) -> StepOutput:
        return StepOutput(ahead=ahead, hidden_RH=hidden_RH, output_VdH=self.lm_head.weight)

    def _read(self, number: int, x_XH: Tensor, entry: Entry, parts: Parts) -> tuple[Tensor, Tensor]:
        """What layer `number` reads of the stream below it, and what its residual stream starts from."""
        return (narrow(self.layers[number].input_layernorm(x_XH)), x_XH) if number else entry.read(x_XH, parts)

    def _heads(self, x_XC: Tensor) -> Tensor:
        return x_XC.unflatten(-1, (-1, self.config.head_dim))

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(positions, self._frequencies.to(positions.device), self._scaling)

    def outputs(
        self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int, *, checkpointing: bool = False
    ) -> Iterator[StepOutput]:
        """What the output layer reads at the given flat rows (rising) at each test-time step; only they pass the last layer.

        In a packed batch each document has its own positions and sees itself alone. A row that reads beyond its document's end gives
        an output of no meaning; it does not count there. checkpointing: the backward pass computes the layers again.
        """
        at = Places.of(batch, row_R, steps, all_ask=len(self.layers) > 1)
        entry = self._entry(at, embed_VW)
        attention = self._attention(batch, at, row_R)
        run: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if checkpointing else _call
        first = partial(self._first_step, entry=entry, attention=attention, at=at)
        x_RH, base = run(first, _states_of(batch, at), entry.parts(0))
        hidden_RH, feature_RH = self._leave(x_RH)
        yield self._step(2, hidden_RH, feature_RH)
        own: list[list[KeyValue]] = [[] for _ in base]
        for k in range(1, steps):
            position_R = attention["layout"].position_R + k
            step = partial(self._later_step, entry=entry, attention=attention, position_R=position_R)
            x_RH, fresh = run(step, feature_RH, entry.parts(k), base, own)
            own = [[*pairs, pair] for pairs, pair in zip(own, fresh, strict=True)]  # a new list: a checkpoint keeps the old one
            hidden_RH, feature_RH = self._leave(x_RH)
            yield self._step(2 + k, hidden_RH, feature_RH)

    def _attention(self, batch: TrainingBatch, at: Places, row_R: Tensor) -> dict[str, Any]:
        layout = Unrolled.of(row_R, at.position_BL, batch.doc_BL)
        return {"layout": layout, "scale": self.config.head_dim**-0.5, "window": self.config.sliding_window}

    def _project(self, number: int, which: int, read_XH: Tensor, entry: Entry, parts: Parts) -> Tensor:
        """Queries, keys or values (`which`) of a layer [X, heads, D]."""
        if number:
            return self._heads(getattr(self.layers[number].self_attn, PROJECTIONS[which])(read_XH))
        return self._heads(entry.project(which, read_XH, parts))

    def _first_step(
        self, states_TF: Tensor, parts: Parts, *, entry: Entry, attention: Mapping[str, Any], at: Places
    ) -> tuple[Tensor, list[KeyValue]]:
        """Step 0: the stream at the counted rows, and every layer's base keys and values. Layers below the last pass all T tokens."""
        x_TH = self._fuse(states_TF)
        base: list[KeyValue] = []
        cos_TD, sin_TD = self._rotary(at.position_T)
        for number, layer in enumerate(self.layers[:-1]):
            read_TH, residual_TH = self._read(number, x_TH, entry, parts)
            q_TAD, k_TGD = (rotate(self._project(number, which, read_TH, entry, parts), cos_TD, sin_TD) for which in (0, 1))
            base.append((at.spread(_kept(k_TGD)), at.spread(_kept(self._project(number, 2, read_TH, entry, parts)))))
            o_BLAD = attend_base(at.spread(q_TAD), *base[-1], **attention)
            x_TH = layer(residual_TH, pick(o_BLAD.flatten(0, 1).flatten(1), at.token_T))
        number = len(self.layers) - 1
        read_TH, residual_TH = self._read(number, x_TH, entry, parts)
        k_TGD = rotate(self._project(number, 1, read_TH, entry, parts), cos_TD, sin_TD)
        base.append((at.spread(_kept(k_TGD)), at.spread(_kept(self._project(number, 2, read_TH, entry, parts)))))
        residual_RH = pick(residual_TH, at.row_R)
        read_RH = residual_RH if read_TH is residual_TH else pick(read_TH, at.row_R)
        q_RAD = rotate(self._project(number, 0, read_RH, entry, parts), cos_TD[at.row_R], sin_TD[at.row_R])
        o_RAD = attend_unrolled(q_RAD, *base[-1], [], [], **attention)
        return self.layers[-1](residual_RH, o_RAD.flatten(1)), base

    def _later_step(
        self, feature_RH: Tensor, parts: Parts, base: Sequence[KeyValue], own: Sequence[Sequence[KeyValue]], *,
        entry: Entry, attention: Mapping[str, Any], position_R: Tensor,
    ) -> tuple[Tensor, list[KeyValue]]:  # fmt: skip
        """A later step: the stream at the counted rows, and the keys and values that it adds, by layer."""
        x_RH, fresh = feature_RH, []
        cos_RD, sin_RD = self._rotary(position_R)
        for number, layer in enumerate(self.layers):
            read_RH, residual_RH = self._read(number, x_RH, entry, parts)
            q_RAD, k_RGD = (rotate(self._project(number, which, read_RH, entry, parts), cos_RD, sin_RD) for which in (0, 1))
            fresh.append((_kept(k_RGD), _kept(self._project(number, 2, read_RH, entry, parts))))
            own_k, own_v = zip(*own[number], fresh[-1], strict=True)
            x_RH = layer(residual_RH, attend_unrolled(q_RAD, *base[number], own_k, own_v, **attention).flatten(1))
        return x_RH, fresh

    def begin(
        self, states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, embed_VW: Tensor, cache: KeyValueCache, state: DraftState | None
    ) -> tuple[Tensor, DraftState]:
        """Rows of settled tokens with the target's own states: earlier drafts in the cache are dropped, these are committed."""
        hidden_B1H, fresh_B1H = self._settle(states_BNF, next_BN, count_B, embed_VW, cache)
        if state is not None:  # rows with nothing new keep their feature; their drafts are not used any more
            fresh_B1H = torch.where((count_B > 0)[:, None, None], fresh_B1H, state.hidden_BMH[:, :1])
        root = torch.ones(len(next_BN), 1, 1, dtype=torch.bool, device=next_BN.device)
        return self.lm_head(hidden_B1H[:, 0]), DraftState(hidden_BMH=fresh_B1H, ancestors_BMM=root)

    def _settle(
        self, states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, embed_VW: Tensor, cache: KeyValueCache
    ) -> tuple[Tensor, Tensor]:
        """Commit settled tokens to the cache; what leaves the layers at the newest one of each row, [B, 1, H] each."""
        cache.discard()
        B, N = next_BN.shape
        position_BN = cache.stage(N)
        within_NN = torch.ones(N, N, dtype=torch.bool, device=next_BN.device).tril().expand(B, N, N)
        found = self._cached(self._fuse(states_BNF), self._embed(next_BN, embed_VW), position_BN, cache, within_NN, newest_B=count_B)
        cache.commit(count_B)
        return found

    def extend(
        self, state: DraftState, tokens_BN: Tensor, parents_BN: Tensor, embed_VW: Tensor, cache: KeyValueCache
    ) -> tuple[Tensor, DraftState]:
        """Drafted nodes below nodes of the state (0 is the root); they read their parent's feature and see their ancestors."""
        feature_BNH = state.hidden_BMH.gather(1, parents_BN[..., None].expand(*parents_BN.shape, state.hidden_BMH.shape[2]))
        line_BNM = state.line(parents_BN)
        position_BN = cache.lengths_B[:, None] - 1 + line_BNM.sum(-1) - 1
        cache.stage(tokens_BN.shape[1])
        hidden_BNH, feature_BNH = self._cached(feature_BNH, self._embed(tokens_BN, embed_VW), position_BN, cache, line_BNM[:, :, 1:])
        return self.lm_head(hidden_BNH), state.grown(feature_BNH, line_BNM)

    def _cached(
        self, x_BNH: Tensor, embed_BNH: Tensor, position_BN: Tensor, cache: KeyValueCache, line_BNM: Tensor,
        newest_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass of the layers through the cache. newest_B: the nodes are settled tokens, this many a row; only the newest one of each
        row goes beyond the keys of the last layer."""
        cos, sin = self._rotary(position_BN)
        mask = None
        for number, layer in enumerate(self.layers):
            read_BNX, x_BNH = (layer.input_layernorm(x_BNH), x_BNH) if number else self._enter(x_BNH, embed_BNH)
            attention = layer.self_attn
            k_BGND = rotate(self._heads(attention.k_proj(read_BNX)), cos, sin).transpose(1, 2)
            k_BGSD, v_BGSD = cache.update(k_BGND, self._heads(attention.v_proj(read_BNX)).transpose(1, 2), number)
            if newest_B is not None and number == len(self.layers) - 1:
                at_B11 = (newest_B - 1).clamp(min=0)[:, None, None]
                read_BNX, x_BNH, line_BNM, cos, sin, place = (
                    t.gather(1, at_B11.expand(-1, 1, t.shape[-1])) for t in (read_BNX, x_BNH, line_BNM, cos, sin, position_BN[..., None])
                )
                position_BN, mask = place[..., 0], None
            if mask is None:
                mask = self._visible(cache, line_BNM, position_BN, settled=newest_B is not None)
            q_BAND = rotate(self._heads(attention.q_proj(read_BNX)), cos, sin).transpose(1, 2)
            o_BAND = attend(q_BAND, k_BGSD, v_BGSD, mask, scale=self.config.head_dim**-0.5)
            x_BNH = layer(x_BNH, o_BAND.transpose(1, 2).flatten(2))
        return self._leave(x_BNH)

    def _visible(self, cache: KeyValueCache, line_BNM: Tensor, position_BN: Tensor, *, settled: bool) -> Tensor:
        """Mask [B, 1, N, S] of a staged pass; a window leaves out settled tokens, never drafts."""
        mask_B1NS = cache.visible(line_BNM)
        if self.config.sliding_window is None:
            return mask_B1NS
        slot_S = torch.arange(mask_B1NS.shape[-1], device=mask_B1NS.device)
        inside_BNS = slot_S > position_BN[..., None] - self.config.sliding_window
        if not settled:
            inside_BNS = inside_BNS | (slot_S >= cache.lengths_B[:, None, None])
        return mask_B1NS & inside_BNS[:, None]


def _states_of(batch: TrainingBatch, at: Places) -> Tensor:
    """The states [T, F] of the tokens of step 0."""
    states_TF = batch.states_BLF.flatten(0, 1)
    return states_TF if len(at.token_T) == len(states_TF) else states_TF[at.token_T]


def _kept(x: Tensor) -> Tensor:
    """Keys or values in the type that attention works in: cast once, where each later step would cast them again."""
    return x.to(working_type(x))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
