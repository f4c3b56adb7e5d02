"""Where an EAGLE-3 head begins: at the target's own output rows, final norm and last decoder layer, as far as they fit.

The start is a head that drafts as the target's last layer would, were it to follow the last fused state. Under the flags of EAGLE-3.1 the
residual stream has another size than the target's: norms do not see the size of what they read, so it is enough to shrink what the
layer adds to the stream (o_proj, down_proj) alike, and to move the scale of a norm that the stream itself passes into what reads it.

Legend: H head width, W target width, J fused states, V target vocabulary, Vd draft vocabulary, N rows of a projection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVIATION = 0.02  # of random weights, as in most models
FAINT = 0.1  # share of it for what a random block adds to the stream, so that it does not drown what was copied
ADDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


@dataclass(frozen=True)
class _Sizes:
    """stream: root mean square of the head's residual stream, where a flag sets it (None: that of the target's states). last: that of the
    last fused state. joined: that of all fused states side by side."""

    stream: float | None
    last: float
    joined: float

    @property
    def shrink(self) -> float:
        return 1.0 if self.stream is None else self.stream / self.last


@torch.no_grad()
def start(
    head: Any, *, layer: Mapping[str, Tensor] | None, norm_W: Tensor, output_VW: Tensor, target_ids: Tensor, train_output: bool,
    seed: int, sizes_J: Sequence[float] | None = None,
) -> None:  # fmt: skip
    """Fill a head from tensors of the target; `seed` fixes whatever is random.

    layer: weights of the target's last decoder layer by name, norms as the factors that they are; what is missing starts at random (empty:
    all of it). None: nothing of a layer, and the fused states are mixed at random. norm_W: factors of the final norm. sizes_J: typical
    root mean square of each fused state, which the flags of EAGLE-3.1 need.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * DEVIATION)
        else:
            parameter.fill_(1.0)
    c = head.config
    head.set_vocabulary(target_ids)
    norm_W = norm_W.float().cpu()
    sizes = _sizes(head, norm_W, sizes_J)
    rows_VdW = output_VW[target_ids.to(output_VW.device)].float().cpu()
    basis_WH = _fill_output(head, rows_VdW, norm_W, sizes.stream or 1.0)
    head.train_output(train_output)
    for above in head.above:
        _faint(above, ADDS)
    if layer is None:
        return
    # Random weights on the other states would drown it: their first token reaches 25,000 in some models.
    head.fc.weight.zero_()
    size = sizes.shrink
    if c.fc_norm or c.norm_before_fc:  # the last state comes in as large as 1, or as its share of all
        size = (sizes.stream or 1.0) * (1.0 if c.fc_norm else sizes.joined / sizes.last)
    head.fc.weight[:, -c.target_hidden_size :] = basis_WH.T * size
    _fill_layer(head, layer, sizes)


def _sizes(head: Any, norm_W: Tensor, sizes_J: Sequence[float] | None) -> _Sizes:
    c = head.config
    found_J = torch.tensor([1.0] * len(c.layer_ids) if sizes_J is None else list(sizes_J))
    stream = None
    if c.norm_output:  # the next step's stream starts from the final norm's output: the whole of it is of this size
        stream = float(norm_W.square().mean().sqrt())
    elif c.fc_norm or c.norm_before_fc or c.norm_before_residual:
        stream = 1.0
    return _Sizes(stream=stream, last=float(found_J[-1]), joined=float(found_J.square().mean().sqrt()))


def _fill_output(head: Any, rows_VdW: Tensor, norm_W: Tensor, size: float) -> Tensor:
    """Final norm, output rows and, for another width, the embedding's projection. Returns the head's axes in the target's space [W, H]."""
    c = head.config
    if c.hidden_size == c.target_hidden_size and not c.norm_output:
        head.lm_head.weight.copy_(rows_VdW)
        head.norm.weight.copy_(norm_W)
        return torch.eye(c.target_hidden_size)
    # The norm's factors have no counterpart in other axes, and must not bend what norm_output hands on: they move to the rows.
    rows_VdW = rows_VdW * norm_W / size
    head.norm.weight.fill_(size)
    basis_WH = torch.eye(c.target_hidden_size)
    if c.hidden_size != c.target_hidden_size:
        basis_WH = _principal(rows_VdW, c.hidden_size)
        head.embed_proj.weight.copy_(basis_WH.T)
    head.lm_head.weight.copy_(rows_VdW @ basis_WH)
    return basis_WH


def _principal(rows_VdW: Tensor, width: int) -> Tensor:
    """The `width` directions of most weight among the rows, orthonormal columns [W, width]; zeros where the rows have fewer."""
    W = rows_VdW.shape[1]
    directions_WW = torch.linalg.eigh((rows_VdW.T @ rows_VdW).double()).eigenvectors.flip(1).float()
    return torch.nn.functional.pad(directions_WW, (0, max(width - W, 0)))[:, :width]


def _faint(layer: Any, names: Sequence[str]) -> None:
    own = dict(layer.named_parameters())
    for name in names:
        own[name].mul_(FAINT)


def _fill_layer(head: Any, layer: Mapping[str, Tensor], sizes: _Sizes) -> None:
    """The target's layer into the first one: the feature's half of q, k and v is its own, the embedding's half stays small."""
    c, H = head.config, head.config.hidden_size
    own = dict(head.midlayer.named_parameters())
    # What has no place in the head (fused projections, biases), or none of its width, is left out.
    fits = {n: t for n, t in layer.items() if n in own and t.shape == ((own[n].shape[0], H) if _reads_both(n) else own[n].shape)}
    inner_H = fits.pop("input_layernorm.weight", torch.ones(H)).float().cpu()
    stream = sizes.stream or 1.0
    # Where the residual stream starts from the normed feature, the norm's factors would bend it: they move to q, k and v.
    factor_H = inner_H / stream if c.norm_before_residual else torch.ones(H)
    head.midlayer.hidden_norm.weight.copy_(torch.full((H,), stream) if c.norm_before_residual else inner_H)
    for name, tensor in fits.items():
        if _reads_both(name):
            own[name][:, H:] = tensor.float().cpu() * factor_H
        else:
            own[name].copy_(tensor.float().cpu() * (sizes.shrink if name in ADDS else 1.0))
    _faint(head.midlayer, [name for name in ADDS if name not in fits])


def _reads_both(name: str) -> bool:
    return name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
