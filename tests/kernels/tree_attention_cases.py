"""The kernels of tree attention, path and walk against their twins over a grid; as a script: under triton's interpreter, or with `cuda`.

New memory is NaN (torch's deterministic mode fills it), and so are the cache's slots beyond the last node.
"""

import itertools
import sys

import torch
from torch import Tensor

from spectrain.decoding.rules import follow
from spectrain.decoding.tree import DraftTree, ancestors
from spectrain.kernels import tree_attention, tree_attention_triton
from spectrain.kernels.path import move_path_
from spectrain.kernels.walk_triton import walk
from spectrain.target.cache import SlabCache

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def parents_of(rows: int, nodes: int, kind: str, g: torch.Generator) -> Tensor:
    """Parents [B, N] of chains, stars, or trees that are drawn anew for each row."""
    node_N = torch.arange(nodes)
    if kind == "chain":
        return (node_N - 1).expand(rows, -1)
    drawn_BN = (torch.rand(rows, nodes, generator=g) * node_N).long() if kind == "tree" else torch.zeros(rows, nodes, dtype=torch.long)
    return torch.where(node_N == 0, -1, drawn_BN)


def check(
    lengths: list[int], nodes: int, *, heads: tuple[int, int] = (4, 2), head_dim: int = 64, kind: str = "tree", window: int | None = None,
    softcap: float | None = None, sinks: bool = False, splits: int | None = 1, dtype: torch.dtype = torch.float32, last: int = 0,
) -> None:  # fmt: skip
    """One pass through a cache whose rows hold so many committed entries; last: ask only for the last nodes of a tree staged in parts."""
    g = torch.Generator().manual_seed(len(lengths) + nodes)
    (H, G), B, D = heads, len(lengths), head_dim
    cache = SlabCache(layers=1, rows=B, kv_heads=G, head_dim=D, max_length=max(lengths) + nodes + 5, dtype=dtype, device=DEVICE)
    cache.lengths_B, cache._longest = torch.tensor(lengths, device=DEVICE), max(lengths)
    slab = torch.randn(2, B, G, cache.max_length + 1, D, generator=g).to(DEVICE, dtype)
    cache._split(slab)
    cache.stage(nodes)
    for b, length in enumerate(lengths):
        slab[:, b, :, length + nodes :] = float("nan")
    k, v = (x[:, :, : cache.get_seq_length()] for x in slab)
    line = ancestors(parents_of(B, nodes, kind, g)).to(DEVICE)[:, -last:]
    q = torch.randn(B, line.shape[1], H, D, generator=g).to(DEVICE, dtype).transpose(1, 2)
    sinks_H = torch.linspace(-2, 3, H).to(DEVICE, dtype) if sinks else None
    view = tree_attention.packed(cache.lengths_B, line, window)
    found = tree_attention_triton.attend_packed(q, k, v, view, scale=D**-0.5, softcap=softcap, sinks_H=sinks_H, splits=splits)
    mask = cache.visible(line, window)
    known = [x.nan_to_num() for x in (k, v)]
    expected = tree_attention.attend_reference(q, *known, mask, scale=D**-0.5, softcap=softcap, sinks_H=sinks_H).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def check_path(dtype: torch.dtype, K: int, head_dim: int) -> None:
    """Paths of unequal lengths, the shortest the root alone, the longest every node."""
    g = torch.Generator().manual_seed(K)
    lengths = torch.tensor([3, 0, 7], device=DEVICE)
    slab = torch.randn(4, 3, 2, 8 + 2 * K, head_dim, generator=g).to(DEVICE, dtype)
    path = torch.full((3, K), -1)
    path[:, 0] = 0
    path[1], path[2, : K - 1] = torch.arange(K), torch.arange(2 * K)[torch.randperm(2 * K - 1, generator=g)[: K - 1].sort().values + 1]
    path[2, : K - 1], path[2, 0] = path[2, : K - 1].sort().values, 0
    twin, before = slab.clone(), slab.clone()
    move_path_(twin, lengths, path.to(DEVICE), backend="torch")
    move_path_(slab, lengths, path.to(DEVICE), backend="triton")
    for b, (start, count) in enumerate(zip(lengths.tolist(), (path >= 0).sum(-1).tolist(), strict=True)):
        kept = slice(0, start + count)
        assert torch.equal(slab[:, b, :, kept], twin[:, b, :, kept])
        assert torch.equal(slab[:, b, :, start + K :], before[:, b, :, start + K :])
    assert K < 4 or not torch.equal(slab, before)


def check_walk(rows: int, nodes: int) -> None:
    """Most nodes carry the choice, siblings alike; rows of all sizes, padding that would match."""
    g = torch.Generator().manual_seed(nodes)
    parents = parents_of(rows, nodes, "tree", g)
    choice, other = (torch.randint(0, 9, (rows, nodes), generator=g) for _ in range(2))
    tokens = torch.where(torch.rand(rows, nodes, generator=g) < 0.8, choice.gather(1, parents.clamp(min=0)), other)
    num = torch.arange(rows) % nodes + 1
    twin = follow(choice, DraftTree(tokens, parents, num, "point_mass"))
    found = walk(*(t.to(DEVICE) for t in (choice, tokens, parents, num)))
    path, length, after = (t.cpu() for t in found)
    K = twin.path_BK.shape[1]
    assert torch.equal(path[:, :K], twin.path_BK) and (path[:, K:] == -1).all()
    assert torch.equal(length, twin.length_B) and torch.equal(after, twin.next_B)
    assert nodes < 9 or length.max() > 2


def main() -> None:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    for heads, splits in itertools.product([(4, 4), (4, 2), (6, 2), (4, 1)], [1, 3]):
        check([19, 3], 5, heads=heads, splits=splits)
    for head_dim, dtype in itertools.product([64, 80, 128, 256], [f32, bf16, f16]):
        check([37, 0], 3, head_dim=head_dim, dtype=dtype, splits=2)
    for kind, window in itertools.product(["chain", "star", "tree"], [None, 1, 4, 30]):
        check([50, 2], 7, kind=kind, window=window, splits=2)
    for softcap, sinks, splits in itertools.product([None, 0.7], [False, True], [1, 2]):
        check([20, 33], 4, softcap=softcap, sinks=sinks, splits=splits, window=9)
    for nodes, window in ((1, None), (63, None), (64, 6), (65, None), (128, 6)):
        check([31], nodes, heads=(2, 2), window=window, splits=2)
    check([40, 7], 12, last=4)  # the last level of a tree that is staged level by level
    check([0, 0], 1, splits=4)  # nothing but the root: three splits of four have no slots
    check([130, 4], 6, splits=None)
    for K, dtype, head_dim in itertools.product([1, 2, 5, 16, 17, 40], [f32, bf16], [8, 96]):
        check_path(dtype, K, head_dim)
    for rows, nodes in ((1, 1), (3, 2), (40, 9), (30, 33)):
        check_walk(rows, nodes)
    print("same")


if __name__ == "__main__":
    main()
