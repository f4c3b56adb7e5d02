"""EAGLE-3 (arXiv 2503.01840): decoder layers over a fused feature and the token in hand, trained by unrolling the head's own drafts.

Row i reads g_i = fc(states of token i) and the embedding of token i + 1. At test-time step k it reads the embedding of token
i + 1 + k and its own output of step k - 1 at rotary position i + k, and attends to the keys of step 0 at rows 0 ... i and to its own
keys of steps 1 ... k: what drafting with a cache does. The output before the final norm is the next step's feature.

The first layer's queries, keys and values read [embedding | feature], those of further layers the layer below. The flags of EAGLE-3.1
are those of vLLM and speculators: fc_norm (a norm a fused state), norm_before_fc (one norm over all of them), norm_output (the feature
handed on is the output after the final norm), norm_before_residual (the residual stream starts from the normed feature).

Legend: B rows, L tokens, R flat counted rows, T tokens whose keys of step 0 are needed, U tokens whose embedding is, Q those that ask,
N nodes, M nodes of the draft so far, S cache slots, H head width, W target width, A query heads, G key heads, D head size, C heads of a
projection side by side, F width of the states read, V target vocabulary, Vd draft vocabulary, X any.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config import Stage
from spectrain.heads.base import DraftState, KeyValueCache, StepOutput, TrainingBatch
from spectrain.heads.eagle3_start import start
from spectrain.heads.layers import GatedMLP, RMSNorm, narrow, rotary_frequencies, rotary_table, rotate
from spectrain.heads.places import Places, pick
from spectrain.kernels.tree_attention import attend
from spectrain.kernels.unrolled_attention import Unrolled, attend_base, attend_unrolled, working_type

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
KeyValue = tuple[Tensor, Tensor]


class Eagle3Config(Stage):
    """Sizes of a head and of the target it belongs to. layer_ids: hidden states hs[i] that are fused, rising. sliding_window: settled
    tokens that a draft looks back on; its own drafts are seen always."""

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
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """(2, n // 2, n - 3), the published choice; ValueError for targets so shallow that these collide."""
    ids = (2, num_layers // 2, num_layers - 3)
    if not ids[0] < ids[1] < ids[2]:
        way_out = "name rising ids with --set head.layer_ids=[1,2,3]"
        raise ValueError(f"a target of {num_layers} layers is too shallow for hs{list(ids)}; {way_out}")
    return ids


def _check(c: Eagle3Config) -> None:
    if c.hidden_act != "silu":
        raise ValueError(f"EAGLE-3 heads use silu, the config says {c.hidden_act!r}")
    if c.fc_norm and c.norm_before_fc:
        raise ValueError("fc_norm and norm_before_fc both norm the fused states; a head has one of them")
    if c.num_hidden_layers < 1 or c.num_attention_heads % c.num_key_value_heads:
        found = f"{c.num_hidden_layers} layers, {c.num_attention_heads} query heads and {c.num_key_value_heads} key heads"
        raise ValueError(f"{found}: needed are a layer or more, and as many query heads for every key head")


class _Attention(nn.Module):
    """Projections only."""

    def __init__(self, c: Eagle3Config, inputs: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(inputs, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)


class _Layer(nn.Module):
    """A decoder layer; the first one has a norm of its own for the feature. Called for what comes after attention."""

    def __init__(self, c: Eagle3Config, *, first: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if first:
            self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = _Attention(c, c.hidden_size * (2 if first else 1))
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def forward(self, residual_XH: Tensor, attended_XC: Tensor) -> Tensor:
        x_XH = residual_XH + self.self_attn.o_proj(attended_XC)
        return x_XH + self.mlp(self.post_attention_layernorm(x_XH))


class Eagle3(nn.Module):
    """The head. Parameters of a head of one layer are named as in the published flat checkpoints; further layers are `above`."""

    Config = Eagle3Config
    gives_feature = False  # no loss can ask for the target's last state
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c = self.config = config
        _check(c)
        self.fc = nn.Linear(len(c.layer_ids) * c.target_hidden_size, c.hidden_size, bias=False)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in c.layer_ids)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(self.fc.in_features, c.rms_norm_eps)
        if c.hidden_size != c.target_hidden_size:
            self.embed_proj = nn.Linear(c.target_hidden_size, c.hidden_size, bias=False)
        self.midlayer = _Layer(c, first=True)
        self.above = nn.ModuleList(_Layer(c, first=False) for _ in range(c.num_hidden_layers - 1))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))
        frequencies, self._scaling = rotary_frequencies(c.rope_parameters, head_dim=c.head_dim, max_positions=c.max_position_embeddings)
        # Kept out of the module's tensors: a cast to bfloat16 would ruin the positions.
        self._frequencies = frequencies

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.config.layer_ids

    @property
    def target_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def cache_layers(self) -> tuple[int, int, int]:
        return self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim

    @property
    def layers(self) -> list[Any]:
        """Decoder layers from below."""
        return [self.midlayer, *self.above]

    def start_from(
        self, *, layer: Mapping[str, Tensor] | None, norm: Tensor, output_VW: Tensor, target_ids: Tensor, train_output: bool, seed: int,
        sizes_J: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Begin at the target; see `eagle3_start.start`."""
        start(
            self, layer=layer, norm_W=norm, output_VW=output_VW, target_ids=target_ids, train_output=train_output, seed=seed,
            sizes_J=sizes_J,
        )  # fmt: skip

    def _fuse(self, states_XF: Tensor) -> Tensor:
        """The feature of step 0, in the head's precision: under autocast, too, the residual stream is no rounded sum."""
        x_XF = states_XF.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            parts = x_XF.split(self.config.target_hidden_size, dim=-1)
            x_XF = torch.cat([norm(part_XW) for norm, part_XW in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            x_XF = self.input_norm(x_XF)
        return self.fc(x_XF).to(self.fc.weight.dtype)

    def _embed(self, token_X: Tensor, embed_VW: Tensor) -> Tensor:
        """Normed embeddings of tokens in hand, in the head's precision: the target may be of another."""
        x = embed_VW[token_X].to(self.fc.weight.dtype)
        if self.config.hidden_size != self.config.target_hidden_size:
            x = self.embed_proj(x)
        return narrow(self.midlayer.input_layernorm(x))

    def _read(self, number: int, x_XH: Tensor) -> tuple[Tensor, Tensor]:
        """What layer `number` reads of the stream below it, and what its residual stream starts from."""
        if number:
            return narrow(self.layers[number].input_layernorm(x_XH)), x_XH
        normed_XH = self.midlayer.hidden_norm(x_XH)
        return narrow(normed_XH), normed_XH if self.config.norm_before_residual else x_XH

    def _leave(self, x_XH: Tensor) -> tuple[Tensor, Tensor]:
        """What the output layer reads, and the feature of the next step."""
        hidden_XH = self.norm(x_XH)
        return hidden_XH, hidden_XH if self.config.norm_output else x_XH

    def _heads(self, x_XC: Tensor) -> Tensor:
        return x_XC.unflatten(-1, (-1, self.config.head_dim))

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(positions, self._frequencies.to(positions.device), self._scaling)

    def rows(self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int) -> Iterator[tuple[int, Tensor]]:
        """(ahead, logits [R, Vd]) of the given flat rows at each test-time step."""
        for step in self.outputs(batch, row_R, embed_VW, steps):
            yield step.ahead, F.linear(step.hidden_RH, step.output_VdH)

    def outputs(
        self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int, *, checkpointing: bool = False
    ) -> Iterator[StepOutput]:
        """What the output layer reads at the given flat rows (rising) at each test-time step; only they pass the last layer.

        In a packed batch each document has its own positions and sees itself alone. A row that reads beyond its document's end gives
        an output of no meaning; it does not count there. checkpointing: the backward pass computes the layers again.
        """
        at = Places.of(batch, row_R, steps, all_ask=len(self.above) > 0)
        layout = Unrolled.of(row_R, at.position_BL, batch.doc_BL)
        states_TF = batch.states_BLF.flatten(0, 1)
        states_TF = states_TF if len(at.token_T) == len(states_TF) else states_TF[at.token_T]
        # The embedding's half of q, k and v is the same at every step that reads the token: made once a token.
        e_UH = self._embed(at.in_hand_U, embed_VW)
        weights = [narrow(getattr(self.midlayer.self_attn, name).weight) for name in PROJECTIONS]
        halves = [weight.split(self.config.hidden_size, dim=1) for weight in weights]
        e_QH = e_UH if len(at.ask_Q) == len(e_UH) else pick(e_UH, at.ask_Q)
        q_QC, k_UC, v_UC = (F.linear(x, of_embed) for x, (of_embed, _) in zip((e_QH, e_UH, e_UH), halves, strict=True))
        attention = {"layout": layout, "scale": self.config.head_dim**-0.5, "window": self.config.sliding_window}
        project = partial(self._project, [of_feature for _, of_feature in halves])
        run: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if checkpointing else _call
        parts = pick(q_QC, at.first_X), pick(k_UC, at.base_T), pick(v_UC, at.base_T)
        x_RH, base = run(partial(self._first_step, project=project, attention=attention, at=at), states_TF, parts)
        hidden_RH, feature_RH = self._leave(x_RH)
        yield StepOutput(ahead=2, hidden_RH=hidden_RH, output_VdH=self.lm_head.weight)
        own: list[list[KeyValue]] = [[] for _ in base]
        for k in range(1, steps):
            parts = pick(q_QC, at.asks[k]), pick(k_UC, at.later[k]), pick(v_UC, at.later[k])
            step = partial(self._later_step, project=project, attention=attention, position_R=layout.position_R + k)
            x_RH, fresh = run(step, feature_RH, parts, base, own)
            own = [[*pairs, pair] for pairs, pair in zip(own, fresh, strict=True)]  # a new list: a checkpoint keeps the old one
            hidden_RH, feature_RH = self._leave(x_RH)
            yield StepOutput(ahead=2 + k, hidden_RH=hidden_RH, output_VdH=self.lm_head.weight)

    def _project(self, of_feature: Sequence[Tensor], number: int, which: int, read_XH: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Queries, keys or values (`which`) of a layer [X, heads, D]; in the first one the feature's half joins the embedding's part."""
        if number:
            return self._heads(getattr(self.layers[number].self_attn, PROJECTIONS[which])(read_XH))
        return self._heads(parts[which] + F.linear(read_XH, of_feature[which]))

    def _first_step(
        self, states_TF: Tensor, parts: Sequence[Tensor], *, project: Callable[..., Tensor], attention: Mapping[str, Any], at: Places
    ) -> tuple[Tensor, list[KeyValue]]:
        """Step 0: the stream at the counted rows, and every layer's base keys and values. Layers below the last pass all T tokens."""
        x_TH = self._fuse(states_TF)
        base: list[KeyValue] = []
        cos_TD, sin_TD = self._rotary(at.position_T)
        for number, layer in enumerate(self.layers[:-1]):
            read_TH, residual_TH = self._read(number, x_TH)
            q_TAD, k_TGD = (rotate(project(number, which, read_TH, parts), cos_TD, sin_TD) for which in (0, 1))
            base.append((at.spread(_kept(k_TGD)), at.spread(_kept(project(number, 2, read_TH, parts)))))
            o_BLAD = attend_base(at.spread(q_TAD), *base[-1], **attention)
            x_TH = layer(residual_TH, pick(o_BLAD.flatten(0, 1).flatten(1), at.token_T))
        number = len(self.above)
        read_TH, residual_TH = self._read(number, x_TH)
        k_TGD = rotate(project(number, 1, read_TH, parts), cos_TD, sin_TD)
        base.append((at.spread(_kept(k_TGD)), at.spread(_kept(project(number, 2, read_TH, parts)))))
        residual_RH = pick(residual_TH, at.row_R)
        read_RH = residual_RH if read_TH is residual_TH else pick(read_TH, at.row_R)
        q_RAD = rotate(project(number, 0, read_RH, parts), cos_TD[at.row_R], sin_TD[at.row_R])
        o_RAD = attend_unrolled(q_RAD, *base[-1], [], [], **attention)
        return self.layers[-1](residual_RH, o_RAD.flatten(1)), base

    def _later_step(
        self, feature_RH: Tensor, parts: Sequence[Tensor], base: Sequence[KeyValue], own: Sequence[Sequence[KeyValue]], *,
        project: Callable[..., Tensor], attention: Mapping[str, Any], position_R: Tensor,
    ) -> tuple[Tensor, list[KeyValue]]:  # fmt: skip
        """A later step: the stream at the counted rows, and the keys and values that it adds, by layer."""
        x_RH, fresh = feature_RH, []
        cos_RD, sin_RD = self._rotary(position_R)
        for number, layer in enumerate(self.layers):
            read_RH, residual_RH = self._read(number, x_RH)
            q_RAD, k_RGD = (rotate(project(number, which, read_RH, parts), cos_RD, sin_RD) for which in (0, 1))
            fresh.append((_kept(k_RGD), _kept(project(number, 2, read_RH, parts))))
            own_k, own_v = zip(*own[number], fresh[-1], strict=True)
            x_RH = layer(residual_RH, attend_unrolled(q_RAD, *base[number], own_k, own_v, **attention).flatten(1))
        return x_RH, fresh

    def begin(
        self, states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, embed_VW: Tensor, cache: KeyValueCache, state: DraftState | None
    ) -> tuple[Tensor, DraftState]:
        """Rows of settled tokens with the target's own states: earlier drafts in the cache are dropped, these are committed."""
        cache.discard()
        B, N = next_BN.shape
        position_BN = cache.stage(N)
        within_NN = torch.ones(N, N, dtype=torch.bool, device=next_BN.device).tril().expand(B, N, N)
        embed_BNH = self._embed(next_BN, embed_VW)
        hidden_B1H, fresh_B1H = self._cached(self._fuse(states_BNF), embed_BNH, position_BN, cache, within_NN, newest_B=count_B)
        cache.commit(count_B)
        if state is not None:  # rows with nothing new keep their feature; their drafts are not used any more
            fresh_B1H = torch.where((count_B > 0)[:, None, None], fresh_B1H, state.hidden_BMH[:, :1])
        root = torch.ones(B, 1, 1, dtype=torch.bool, device=next_BN.device)
        return self.lm_head(hidden_B1H[:, 0]), DraftState(hidden_BMH=fresh_B1H, ancestors_BMM=root)

    def extend(
        self, state: DraftState, tokens_BN: Tensor, parents_BN: Tensor, embed_VW: Tensor, cache: KeyValueCache
    ) -> tuple[Tensor, DraftState]:
        """Drafted nodes below nodes of the state (0 is the root); they read their parent's feature and see their ancestors."""
        B, N = tokens_BN.shape
        M = state.hidden_BMH.shape[1]
        above_BNM = state.ancestors_BMM.gather(1, parents_BN[..., None].expand(B, N, M))
        self_NN = torch.eye(N, dtype=torch.bool, device=tokens_BN.device).expand(B, N, N)
        line_BNM = torch.cat([above_BNM, self_NN], dim=2)
        feature_BNH = state.hidden_BMH.gather(1, parents_BN[..., None].expand(B, N, state.hidden_BMH.shape[2]))
        position_BN = cache.lengths_B[:, None] - 1 + line_BNM.sum(-1) - 1
        cache.stage(N)
        hidden_BNH, feature_BNH = self._cached(feature_BNH, self._embed(tokens_BN, embed_VW), position_BN, cache, line_BNM[:, :, 1:])
        later_BMN = torch.zeros(B, M, N, dtype=torch.bool, device=tokens_BN.device)
        ancestors_BMM = torch.cat([torch.cat([state.ancestors_BMM, later_BMN], dim=2), line_BNM], dim=1)
        grown = DraftState(hidden_BMH=torch.cat([state.hidden_BMH, feature_BNH], dim=1), ancestors_BMM=ancestors_BMM)
        return self.lm_head(hidden_BNH), grown

    def _cached(
        self, x_BNH: Tensor, embed_BNH: Tensor, position_BN: Tensor, cache: KeyValueCache, line_BNM: Tensor,
        newest_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass of the layers through the cache. newest_B: the nodes are settled tokens, this many a row; only the newest one of each
        row goes beyond the keys of the last layer."""
        cos, sin = self._rotary(position_BN)
        mask = None
        for number, layer in enumerate(self.layers):
            read_BNX, x_BNH = self._read(number, x_BNH)
            if not number:
                read_BNX = torch.cat([embed_BNH, read_BNX], dim=-1)
            attention = layer.self_attn
            k_BGND = rotate(self._heads(attention.k_proj(read_BNX)), cos, sin).transpose(1, 2)
            k_BGSD, v_BGSD = cache.update(k_BGND, self._heads(attention.v_proj(read_BNX)).transpose(1, 2), number)
            if newest_B is not None and number == len(self.above):
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


def _kept(x: Tensor) -> Tensor:
    """Keys or values in the type that attention works in: cast once, where each later step would cast them again."""
    return x.to(working_type(x))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
