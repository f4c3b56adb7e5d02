"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858; the same head, chains and trees) and HASS (arXiv 2408.15766): the next last state is
guessed, and goes through the target's output rows.

Row i reads fc([embedding of token i + 1 | f_i]), f_i the target's last state of token i (after its final norm). Decoder layers follow, the
first without input norm, the last without a final norm; what leaves them is the guess of f_{i+1}, and the next step's feature. With one
test-time step it is EAGLE-1. HASS aligns training with drafting: a query reads the head's own guess, and of its keys those of the last k
drafts are made of guesses too, the earlier ones of the target's states; that is an unrolled pass (heads/unrolled.py). Its own
code makes the gradients of each step by themselves, a backward pass a step; here all steps are one loss, and gradients run through them.

Legend: B rows, N nodes, R counted rows, H = W width of head and target, U tokens whose embedding is needed, V target vocabulary, X any
(of `fit`: 2 H).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.heads.base import StepOutput
from spectrain.heads.layers import narrow
from spectrain.heads.places import Places, pick
from spectrain.heads.unrolled import PROJECTIONS, DecoderConfig, DecoderLayer, Entry, Parts, UnrolledHead

DEVIATION = 0.02  # of random weights, as in most models
FAINT = 0.1  # share of it for what a layer adds to the stream, so that it does not drown the first guess
ADDS = ("o_proj.weight", "down_proj.weight")
TOKEN, STATE = 0.2, 0.3  # deviation of the embedding's half of fc, and the share of the last state that is handed on, before a fit


class EagleConfig(DecoderConfig):
    """Sizes of a head and of the target it belongs to. bias: of fc, as the published checkpoints have it."""

    bias: bool = False


class Eagle(UnrolledHead):
    """The head. Its parameters are named as in the published checkpoints."""

    Config = EagleConfig
    settings = frozenset({"num_layers", "sliding_window", "bias"})
    gives_feature = True
    fitted = True  # False: freshly started, and `fit` would help (training/fit.py)

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        c = config
        c.check("EAGLE")
        if c.hidden_size != c.target_hidden_size:
            found = f"a head of width {c.hidden_size} for a target of width {c.target_hidden_size}"
            raise ValueError(f"{found}: EAGLE heads guess the target's own states, so their width is the target's")
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=c.bias)
        decoder = [DecoderLayer(c, norms=("input_layernorm",) if i else ()) for i in range(c.num_hidden_layers)]
        self.layers = nn.ModuleList(decoder)  # type: ignore[misc,assignment]
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)

    @property
    def layers(self) -> Any:
        """Decoder layers from below. A module's own submodules are kept apart from its other attributes, so the name is free for both."""
        return self._modules["layers"]

    def _fuse(self, states_XH: Tensor) -> Tensor:
        return states_XH.to(self.fc.weight.dtype)

    def _embed(self, token_X: Tensor, embed_VH: Tensor) -> Tensor:
        return embed_VH[token_X].to(self.fc.weight.dtype)

    def _entry(self, at: Places, embed_VW: Tensor) -> Entry:
        """The embedding's half of fc is the same at every step that reads the token: made once a token."""
        first = self.layers[0]
        of_embed, of_feature = self.fc.weight.split(self.config.hidden_size, dim=1)
        e_UH = F.linear(self._embed(at.in_hand_U, embed_VW), of_embed, self.fc.bias).to(of_embed.dtype)

        def read(feature_XH: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
            x_XH = parts[0] + F.linear(feature_XH, of_feature)
            return narrow(x_XH), x_XH

        return Entry(
            parts=lambda k: (pick(e_UH, at.later[k] if k else at.base_T),), read=read,
            project=lambda which, read_XH, _: F.linear(read_XH, getattr(first.self_attn, PROJECTIONS[which]).weight),
        )  # fmt: skip

    def _enter(self, x_BNH: Tensor, embed_BNH: Tensor) -> tuple[Tensor, Tensor]:
        x_BNH = self.fc(torch.cat([embed_BNH, x_BNH], dim=-1))
        return x_BNH, x_BNH

    def _leave(self, x_XH: Tensor) -> tuple[Tensor, Tensor]:
        return x_XH, x_XH

    def _step(self, ahead: int, hidden_RH: Tensor, feature_RH: Tensor) -> StepOutput:
        return StepOutput(ahead=ahead, hidden_RH=hidden_RH, output_VdH=self.lm_head.weight, feature_RW=feature_RH)

    @torch.no_grad()
    def start_from(
        self, *, layer: Mapping[str, Tensor] | None, norm: Tensor, output_VW: Tensor, target_ids: Tensor, train_output: bool, seed: int,
        sizes_J: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Begin at the target's output rows, with a mix of token and state and faint layers, all random; `seed` fixes them.

        The target's last layer is no better than random weights here, whatever way its norms are undone; what helps is a good first
        guess, which needs states of the target (`fit`).
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * DEVIATION)
                parameter.mul_(FAINT if name.endswith(ADDS) else 1.0)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        H = self.config.hidden_size
        self.fc.weight[:, :H] *= TOKEN / DEVIATION
        self.fc.weight[:, H:] = torch.eye(H) * STATE
        self.set_vocabulary(target_ids)
        self.lm_head.weight.copy_(output_VW[target_ids.to(output_VW.device)].float().cpu())
        self.train_output(train_output)
        self.fitted = False

    @torch.no_grad()
    def fit(self, guess_HX: Tensor) -> None:
        """Begin at a linear guess of the next last state from [embedding | state]; the layers are left to add to it."""
        self.fc.weight.copy_(guess_HX)
        self.fitted = True
