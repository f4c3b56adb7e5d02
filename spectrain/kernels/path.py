"""The accepted path of a draft tree moved to the end of a cache's committed part.

Legend: X slabs (keys and values of all layers), B rows, G key/value heads, S slots, D head size, K path length.
"""

import torch
from torch import Tensor

from spectrain.kernels.divergence import Backend, chosen


def move_path_(slab_XBGSD: Tensor, lengths_B: Tensor, path_BK: Tensor, *, backend: Backend = "auto") -> None:
    """Slot lengths_B[b] + k := slot lengths_B[b] + path_BK[b, k] in every slab and head.

    A path names rising nodes, then -1 to its end; what its row holds beyond the path is of no use afterwards.
    """
    if chosen(backend, slab_XBGSD.device) == "triton":
        from spectrain.kernels import path_triton

        return path_triton.move_path_(slab_XBGSD, lengths_B, path_BK)
    row_B1 = torch.arange(len(lengths_B), device=lengths_B.device)[:, None]
    source_BK = lengths_B[:, None] + path_BK.clamp(min=0)
    goal_BK = lengths_B[:, None] + torch.arange(path_BK.shape[1], device=path_BK.device)
    # Gathered first, then written: source and goal may overlap.
    slab_XBGSD[:, row_B1, :, goal_BK] = slab_XBGSD[:, row_B1, :, source_BK]
