"""EAGLE-3 (arXiv 2503.01840): decoder layers over a fused feature and the token in hand, trained by unrolling the head's own drafts.

Row i reads g_i = fc(states of token i) and the embedding of token i + 1; the output before the final norm is the next step's feature
(heads/unrolled.py).

The first layer's queries, keys and values read [embedding | feature], those of further layers the layer below. The flags of EAGLE-3.1
are those of vLLM and speculators: fc_norm (a norm a fused state), norm_before_fc (one norm over all of them), norm_output (the feature
handed on is the output after the final norm), norm_before_residual (the residual stream starts from the normed feature).

Legend: N nodes, B rows, H head width, W target width, C heads of a projection side by side, F width of the states read, U tokens whose
embedding is needed, Q those that ask, J fused states, V target vocabulary, X any.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.heads.eagle3_start import start
from spectrain.heads.layers import RMSNorm, narrow
from spectrain.heads.places import Places, pick
from spectrain.heads.unrolled import PROJECTIONS, DecoderConfig, DecoderLayer, Entry, Parts, UnrolledHead


class Eagle3Config(DecoderConfig):
    """Sizes of a head and of the target it belongs to. layer_ids: hidden states hs[i] that are fused, rising."""

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


class Eagle3(UnrolledHead):
    """The head. Parameters of a head of one layer are named as in the published flat checkpoints; further layers are `above`."""

    Config = Eagle3Config
    settings = frozenset(
        {"init_layer", "num_layers", "hidden_size", "sliding_window", "fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"}
    )
    default_layer_ids = staticmethod(default_layer_ids)

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        c = config
        c.check("EAGLE-3")
        if c.fc_norm and c.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc both norm the fused states; a head has one of them")
        self.fc = nn.Linear(len(c.layer_ids) * c.target_hidden_size, c.hidden_size, bias=False)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in c.layer_ids)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(self.fc.in_features, c.rms_norm_eps)
        if c.hidden_size != c.target_hidden_size:
            self.embed_proj = nn.Linear(c.target_hidden_size, c.hidden_size, bias=False)
        self.midlayer = DecoderLayer(c, norms=("input_layernorm", "hidden_norm"), inputs=2)
        self.above = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_hidden_layers - 1))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)

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
        x_XF = states_XF.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            parts = x_XF.split(self.config.target_hidden_size, dim=-1)
            x_XF = torch.cat([norm(part_XW) for norm, part_XW in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            x_XF = self.input_norm(x_XF)
        return self.fc(x_XF).to(self.fc.weight.dtype)

    def _embed(self, token_X: Tensor, embed_VW: Tensor) -> Tensor:
        x = embed_VW[token_X].to(self.fc.weight.dtype)
        if self.config.hidden_size != self.config.target_hidden_size:
            x = self.embed_proj(x)
        return narrow(self.midlayer.input_layernorm(x))

    def _entry(self, at: Places, embed_VW: Tensor) -> Entry:
        """The embedding's half of q, k and v is the same at every step that reads the token: made once a token."""
        e_UH = self._embed(at.in_hand_U, embed_VW)
        weights = [narrow(getattr(self.midlayer.self_attn, name).weight) for name in PROJECTIONS]
        halves = [weight.split(self.config.hidden_size, dim=1) for weight in weights]
        e_QH = e_UH if len(at.ask_Q) == len(e_UH) else pick(e_UH, at.ask_Q)
        q_QC, k_UC, v_UC = (F.linear(x, of_embed) for x, (of_embed, _) in zip((e_QH, e_UH, e_UH), halves, strict=True))

        def parts(k: int) -> Parts:
            asks, tokens = (at.asks[k], at.later[k]) if k else (at.first_X, at.base_T)
            return pick(q_QC, asks), pick(k_UC, tokens), pick(v_UC, tokens)

        return Entry(
            parts, read=lambda feature_XH, _: self._normed(feature_XH),
            project=lambda which, read_XH, parts: parts[which] + F.linear(read_XH, halves[which][1]),
        )  # fmt: skip

    def _normed(self, x_XH: Tensor) -> tuple[Tensor, Tensor]:
        """The feature as the first layer reads it, and what the residual stream starts from."""
        normed_XH = self.midlayer.hidden_norm(x_XH)
        return narrow(normed_XH), normed_XH if self.config.norm_before_residual else x_XH

    def _enter(self, x_BNH: Tensor, embed_BNH: Tensor) -> tuple[Tensor, Tensor]:
        normed_BNH, residual_BNH = self._normed(x_BNH)
        return torch.cat([embed_BNH, normed_BNH], dim=-1), residual_BNH

    def _leave(self, x_XH: Tensor) -> tuple[Tensor, Tensor]:
        hidden_XH = self.norm(x_XH)
        return hidden_XH, hidden_XH if self.config.norm_output else x_XH
