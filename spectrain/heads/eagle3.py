"""EAGLE-3 (arXiv 2503.01840): one decoder layer over a fused feature and the token in hand, trained by unrolling its own drafts.

Row i reads g_i = fc(states of token i) and the embedding of token i + 1. At test-time step k it reads the embedding of token
i + 1 + k and its own output of step k - 1 at rotary position i + k, and attends to the keys of step 0 at rows 0 ... i and to its own
keys of steps 1 ... k: what drafting with a cache does. The output before the final norm is the next step's feature.

Legend: B rows, L tokens, R flat counted rows, Q counted rows of a batch row (padded), N nodes, H width, A query heads,
G key heads, D head size, K steps, F width of the states read, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from spectrain.config import Stage
from spectrain.heads.base import DraftState, KeyValueCache, TrainingBatch
from spectrain.heads.layers import GatedMLP, RMSNorm, rotary_frequencies, rotary_table, rotate
from spectrain.kernels.tree_attention import attend


class Eagle3Config(Stage):
    """Sizes of a head and of the target it belongs to. layer_ids: hidden states hs[i] that are fused, rising."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str = "silu"
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    target_layers: int


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """(2, n // 2, n - 3), the published choice; ValueError for targets so shallow that these collide."""
    ids = (2, num_layers // 2, num_layers - 3)
    if not ids[0] < ids[1] < ids[2]:
        way_out = "name rising ids with --set head.layer_ids=[1,2,3]"
        raise ValueError(f"a target of {num_layers} layers is too shallow for hs{list(ids)}; {way_out}")
    return ids


class _Attention(nn.Module):
    """Projections only; q, k and v read [embedding | feature]."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = _Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)


class Eagle3(nn.Module):
    """The head. Parameters are named as in the published flat checkpoints."""

    Config = Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c = self.config = config
        if c.hidden_act != "silu":
            raise ValueError(f"EAGLE-3 heads use silu, the config says {c.hidden_act!r}")
        if c.hidden_size != c.target_hidden_size:
            raise ValueError(f"hidden_size {c.hidden_size} must equal the target's {c.target_hidden_size}: the embeddings are shared")
        self.fc = nn.Linear(len(c.layer_ids) * c.target_hidden_size, c.hidden_size, bias=False)
        self.midlayer = _Layer(c)
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

    @torch.no_grad()
    def start_from(
        self, *, layer: Mapping[str, Tensor] | None, norm: Tensor, output_VW: Tensor, target_ids: Tensor, train_output: bool, seed: int
    ) -> None:
        """Begin at the target: its output rows of the draft vocabulary, its final norm, and, if given, its last decoder layer.

        The layer's weights go to the feature's half of q, k and v; the embedding's half starts small; fc starts as a copy of the
        last fused state. `seed` fixes whatever is random.
        """
        generator = torch.Generator().manual_seed(seed)
        H = self.config.hidden_size
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        self.d2t.copy_(target_ids.cpu() - torch.arange(len(target_ids)))
        self.t2d.zero_()[target_ids.cpu()] = True
        self.lm_head.weight.copy_(output_VW[target_ids])
        self.lm_head.weight.requires_grad_(train_output)
        self.norm.weight.copy_(norm)
        if layer is None:
            return
        # Random weights on the other states would drown it: their first token reaches 25,000 in some models.
        self.fc.weight.zero_()
        self.fc.weight[:, -H:] += torch.eye(H)
        own = dict(self.midlayer.named_parameters())
        for name, tensor in layer.items():
            if name == "input_layernorm.weight":
                self.midlayer.hidden_norm.weight.copy_(tensor)
            elif name in own and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                own[name][:, H:] = tensor
            elif name in own:  # what a layer has beside these (fused projections, biases) has no place in the head
                own[name].copy_(tensor)

    def _qkv(self, embed_XH: Tensor, feature_XH: Tensor) -> Tensor:
        m = self.midlayer
        return torch.cat([m.input_layernorm(embed_XH), m.hidden_norm(feature_XH)], dim=-1)

    def _heads(self, which: str, x: Tensor) -> Tensor:
        """Project and split into heads: [..., heads, D]."""
        return getattr(self.midlayer.self_attn, which)(x).unflatten(-1, (-1, self.config.head_dim))

    def _finish(self, feature_XH: Tensor, attended_XH: Tensor) -> tuple[Tensor, Tensor]:
        """The rest of the layer: returns the next feature (before the final norm) and the logits."""
        m = self.midlayer
        x = feature_XH + m.self_attn.o_proj(attended_XH)
        x = x + m.mlp(m.post_attention_layernorm(x))
        return x, self.lm_head(self.norm(x))

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(positions, self._frequencies.to(positions.device), self._scaling)

    def forward(self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int) -> list[tuple[int, Tensor]]:
        """`rows` as a list; training calls the head through here so that wrappers (DDP) see it."""
        return list(self.rows(batch, row_R, embed_VW, steps))

    def rows(self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int) -> Iterator[tuple[int, Tensor]]:
        """Logits of the given flat rows at each test-time step; only those rows go through MLP and output layer.

        In a packed batch each document has its own positions and sees itself alone. A row that reads beyond its document's end gives
        logits of no meaning; it does not count there.
        """
        ids_BL, states_BLF = batch.ids_BL, batch.states_BLF
        B, L = ids_BL.shape
        feature_BLH = self.fc(states_BLF)
        in_hand_BL = torch.cat([ids_BL[:, 1:], ids_BL[:, -1:]], dim=1)
        x_BLX = self._qkv(embed_VW[in_hand_BL], feature_BLH)
        position_BL = torch.arange(L, device=ids_BL.device).expand(B, L) if batch.position_BL is None else batch.position_BL
        cos, sin = self._rotary(position_BL)
        base_k_BLGD, base_v_BLGD = rotate(self._heads("k_proj", x_BLX), cos, sin), self._heads("v_proj", x_BLX)
        where = _Where(row_R, position_BL, batch.doc_BL)
        x_RX, feature_RH = x_BLX.flatten(0, 1)[row_R], feature_BLH.flatten(0, 1)[row_R]
        own_k: list[Tensor] = []
        own_v: list[Tensor] = []
        for k in range(steps):
            cos, sin = self._rotary((where.position_R + k)[None])
            if k:
                token_R = ids_BL[where.batch_R, (where.column_R + 1 + k).clamp(max=L - 1)]
                x_RX = self._qkv(embed_VW[token_R], feature_RH)
                own_k.append(rotate(self._heads("k_proj", x_RX)[None], cos, sin)[0])
                own_v.append(self._heads("v_proj", x_RX))
            q_RAD = rotate(self._heads("q_proj", x_RX)[None], cos, sin)[0]
            attended_RX = self._unrolled_attention(q_RAD, base_k_BLGD, base_v_BLGD, own_k, own_v, where)
            feature_RH, logits_RV = self._finish(feature_RH, attended_RX)
            yield 2 + k, logits_RV

    def _unrolled_attention(
        self, q_RAD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, own_k: list[Tensor], own_v: list[Tensor], where: "_Where"
    ) -> Tensor:
        """Softmax over the base keys of its document's rows up to i and the row's own keys of earlier steps, in one normalisation."""
        G, D = self.config.num_key_value_heads, self.config.head_dim
        q_BQGXD = where.padded(q_RAD * D**-0.5).unflatten(2, (G, -1))
        s_BGXQL = torch.einsum("bqgxd,blgd->bgxql", q_BQGXD, k_BLGD)
        s_BGXQL = s_BGXQL.masked_fill(~where.visible_BQL[:, None, None], float("-inf"))
        if not own_k:
            o_BQGXD = torch.einsum("bgxql,blgd->bqgxd", s_BGXQL.softmax(-1), v_BLGD)
            return where.flat(o_BQGXD).flatten(1)
        k_BQKGD, v_BQKGD = where.padded(torch.stack(own_k, dim=1)), where.padded(torch.stack(own_v, dim=1))
        s_BGXQK = torch.einsum("bqgxd,bqkgd->bgxqk", q_BQGXD, k_BQKGD)
        L = s_BGXQL.shape[-1]
        w = torch.cat([s_BGXQL, s_BGXQK], dim=-1).softmax(-1)
        o_BQGXD = torch.einsum("bgxql,blgd->bqgxd", w[..., :L], v_BLGD) + torch.einsum("bgxqk,bqkgd->bqgxd", w[..., L:], v_BQKGD)
        return where.flat(o_BQGXD).flatten(1)

    def begin(
        self, states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, embed_VW: Tensor, cache: KeyValueCache, state: DraftState | None
    ) -> tuple[Tensor, DraftState]:
        """Rows of settled tokens with the target's own states: earlier drafts in the cache are dropped, these are committed."""
        cache.discard()
        B, N = next_BN.shape
        position_BN = cache.stage(N)
        within_NN = torch.ones(N, N, dtype=torch.bool, device=next_BN.device).tril().expand(B, N, N)
        feature_BNH = self.fc(states_BNF.to(self.fc.weight.dtype))
        feature_BNH, logits_BNV = self._cached(feature_BNH, embed_VW[next_BN], position_BN, cache, within_NN, last_B=count_B)
        cache.commit(count_B)
        fresh_B1H = feature_BNH
        if state is not None:  # rows with nothing new keep their feature; their drafts are not used any more
            fresh_B1H = torch.where((count_B > 0)[:, None, None], fresh_B1H, state.hidden_BMH[:, :1])
        root = torch.ones(B, 1, 1, dtype=torch.bool, device=next_BN.device)
        return logits_BNV[:, 0], DraftState(hidden_BMH=fresh_B1H, ancestors_BMM=root)

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
        feature_BNH, logits_BNV = self._cached(feature_BNH, embed_VW[tokens_BN], position_BN, cache, line_BNM[:, :, 1:])
        later_BMN = torch.zeros(B, M, N, dtype=torch.bool, device=tokens_BN.device)
        ancestors_BMM = torch.cat([torch.cat([state.ancestors_BMM, later_BMN], dim=2), line_BNM], dim=1)
        return logits_BNV, DraftState(hidden_BMH=torch.cat([state.hidden_BMH, feature_BNH], dim=1), ancestors_BMM=ancestors_BMM)

    def _cached(
        self, feature_BNH: Tensor, embed_BNH: Tensor, position_BN: Tensor, cache: KeyValueCache, line_BNM: Tensor,
        last_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass of the layer through the cache; with `last_B` only node last_B - 1 of each row goes beyond the keys."""
        x_BNX = self._qkv(embed_BNH.to(feature_BNH.dtype), feature_BNH)  # the target may be of another precision
        cos, sin = self._rotary(position_BN)
        k_BGND = rotate(self._heads("k_proj", x_BNX), cos, sin).transpose(1, 2)
        k_BGSD, v_BGSD = cache.update(k_BGND, self._heads("v_proj", x_BNX).transpose(1, 2), 0)
        if last_B is not None:
            at_B11 = (last_B - 1).clamp(min=0)[:, None, None]
            x_BNX, feature_BNH, line_BNM, cos, sin = (
                t.gather(1, at_B11.expand(-1, 1, t.shape[-1])) for t in (x_BNX, feature_BNH, line_BNM, cos, sin)
            )
        q_BAND = rotate(self._heads("q_proj", x_BNX), cos, sin).transpose(1, 2)
        o_BAND = attend(q_BAND, k_BGSD, v_BGSD, cache.visible(line_BNM), scale=self.config.head_dim**-0.5)
        return self._finish(feature_BNH, o_BAND.transpose(1, 2).flatten(2))


class _Where:
    """Flat rows and their place in the batch: pad to [B, Q, ...] for attention, and back."""

    def __init__(self, row_R: Tensor, position_BL: Tensor, doc_BL: Tensor | None) -> None:
        B, L = position_BL.shape
        self.batch_R, self.column_R = row_R // L, row_R % L
        self.position_R = position_BL[self.batch_R, self.column_R]
        lists = [torch.nonzero(self.batch_R == b)[:, 0] for b in range(B)]
        self._index_BQ = pad_sequence(lists, batch_first=True, padding_value=-1)
        self._keep_BQ = self._index_BQ >= 0
        column_BQ = self.column_R[self._index_BQ.clamp(min=0)]
        self.visible_BQL = torch.arange(L, device=row_R.device) <= column_BQ[..., None]
        if doc_BL is not None:
            self.visible_BQL &= doc_BL[:, None] == doc_BL.gather(1, column_BQ)[..., None]

    def padded(self, x_RX: Tensor) -> Tensor:
        return x_RX[self._index_BQ.clamp(min=0)]

    def flat(self, x_BQX: Tensor) -> Tensor:
        # Rows stand in order of batch row and column, so the kept entries in reading order are the flat rows.
        return x_BQX[self._keep_BQ]
