"""The key/value cache of a target whose layers lie on several devices: each layer's entries where the layer is.

Legend: B rows, G key/value heads, N staged nodes of one pass, S slots, D head size, K path length, R rows that stay, X slabs of a device.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain.kernels.path import move_path_
from spectrain.target.cache import SlabCache


class SpreadCache(SlabCache):
    """`SlabCache` with a device for each layer; lengths, and with them masks and positions, are on that of the first one."""

    def __init__(
        self, devices: Sequence[torch.device], *, rows: int, kv_heads: int, head_dim: int, max_length: int, dtype: torch.dtype
    ) -> None:
        self._places, first = list(devices), devices[0]
        layers = Counter(devices)
        self._others = {
            device: torch.zeros(2 * layers[device], rows, kv_heads, max_length + 1, head_dim, dtype=dtype, device=device)
            for device in layers if device != first
        }  # fmt: skip
        super().__init__(
            layers=layers[first], rows=rows, kv_heads=kv_heads, head_dim=head_dim, max_length=max_length, dtype=dtype, device=first
        )

    def _split(self, slab_XBGSD: Tensor) -> None:
        super()._split(slab_XBGSD)
        left = {device: iter(slab) for device, slab in {self._places[0]: slab_XBGSD, **self._others}.items()}
        pairs = [(next(left[device]), next(left[device])) for device in self._places]
        self.keys, self.values = [key for key, _ in pairs], [value for _, value in pairs]

    def update(self, k_BGND: Tensor, v_BGND: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As of `SlabCache`, on the layer's device."""
        with self.at(self.lengths_B, self._slots_BN.to(k_BGND.device)):
            return super().update(k_BGND, v_BGND, layer)

    def commit(self, count_B: Tensor, path_BK: Tensor | None = None) -> None:
        """As of `SlabCache`, on every device."""
        if path_BK is not None:
            for device, slab_XBGSD in self._others.items():
                move_path_(slab_XBGSD, self.lengths_B.to(device), path_BK.to(device))
        super().commit(count_B, path_BK)

    def select(self, rows_R: Tensor) -> None:
        """As of `SlabCache`, on every device."""
        self._others = {device: slab_XBGSD[:, rows_R.to(device)] for device, slab_XBGSD in self._others.items()}
        super().select(rows_R)
