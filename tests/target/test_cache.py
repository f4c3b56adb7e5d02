"""The slab cache: staged entries, committed paths, rows of unequal length."""

import pytest
import torch

from spectrain.decoding.tree import ancestors
from spectrain.target.cache import SlabCache
from spectrain.target.model import Target


def causal(nodes: int, rows: int) -> torch.Tensor:
    return torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, nodes, nodes)


def feed(target: Target, cache: SlabCache, ids: list[list[int]]) -> torch.Tensor:
    """Stage equal pieces of every row and return their logits; the caller commits."""
    start = cache.lengths_B[:, None]
    cache.stage(len(ids[0]))
    line = causal(len(ids[0]), len(ids))
    out = target.forward(torch.tensor(ids), positions_BN=start + line.sum(-1) - 1, mask=cache.visible(line), cache=cache)
    return out.logits_BKV


def fresh(target: Target, eager, ids: list[int]) -> torch.Tensor:
    return eager(target)(input_ids=torch.tensor([ids]), use_cache=False).logits[0].detach()


IDS = [7, 12, 9, 55, 31, 8, 77, 20, 20, 64]


@pytest.mark.parametrize("pieces", [[10], [1] * 10, [3, 4, 1, 2], [9, 1]])
def test_prompt_in_pieces_reads_otherwise(target: Target, eager, pieces: list[int]) -> None:
    cache, logits, at = target.new_cache(1, 12), [], 0
    for n in pieces:
        logits.append(feed(target, cache, [IDS[at : at + n]])[0])
        cache.commit(torch.tensor([n]))
        at += n
    torch.testing.assert_close(torch.cat(logits), fresh(target, eager, IDS), atol=1e-4, rtol=1e-4)


def test_left_padded_rows_read_their_padding(target: Target, eager) -> None:
    prompts = [IDS, IDS[:1], IDS[2:9], IDS[5:8]]
    L = len(IDS)
    length = torch.tensor([len(p) for p in prompts])
    cache = target.new_cache(4, L + 4)
    for slab in (*cache.keys, *cache.values):
        slab.fill_(1e4)
    positions = cache.stage(L, L - length)
    ids = torch.tensor([[99] * (L - len(p)) + p for p in prompts])
    mask = (torch.arange(L) <= positions[..., None])[:, None]
    out = target.forward(ids, positions_BN=positions, mask=mask, cache=cache)
    cache.commit(length)
    for b, prompt in enumerate(prompts):
        assert positions[b, L - len(prompt) :].tolist() == list(range(len(prompt)))
        torch.testing.assert_close(out.logits_BKV[b, L - len(prompt) :], fresh(target, eager, prompt), atol=1e-4, rtol=1e-4)
    after = feed(target, cache, [[3, 4]] * 4)
    for b, prompt in enumerate(prompts):
        torch.testing.assert_close(after[b], fresh(target, eager, [*prompt, 3, 4])[-2:], atol=1e-4, rtol=1e-4)


def test_path_of_a_tree_is_not_what_stays_in_the_cache(target: Target, eager) -> None:
    """Two rows of unequal length, a tree each, different paths: node logits and the next pass equal fresh forwards."""
    prompts = [IDS, IDS[:4]]
    cache = target.new_cache(2, 30)
    positions = cache.stage(10, torch.tensor([0, 6]))
    ids = torch.tensor([prompts[0], [0] * 6 + prompts[1]])
    target.forward(ids, positions_BN=positions, mask=(torch.arange(10) <= positions[..., None])[:, None], cache=cache)
    cache.commit(torch.tensor([10, 4]))
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10], [15, 16, 17, 18, 19, 11]])
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 1, 0, 4]])
    line = ancestors(parents)
    start = cache.lengths_B[:, None]
    cache.stage(6)
    out = target.forward(tokens, positions_BN=start + line.sum(-1) - 1, mask=cache.visible(line), cache=cache)
    for b, prompt in enumerate(prompts):
        for n in range(6):
            path = tokens[b][line[b, n]].tolist()
            torch.testing.assert_close(out.logits_BKV[b, n], fresh(target, eager, [*prompt, *path])[-1], atol=1e-4, rtol=1e-4)
    cache.commit(torch.tensor([4, 2]), torch.tensor([[0, 1, 3, 4], [0, 4, -1, -1]]))
    assert cache.lengths_B.tolist() == [14, 6]
    after = feed(target, cache, [[21], [22]])
    torch.testing.assert_close(after[0, 0], fresh(target, eager, [*prompts[0], 5, 6, 8, 9, 21])[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after[1, 0], fresh(target, eager, [*prompts[1], 15, 19, 22])[-1], atol=1e-4, rtol=1e-4)


def test_slots_never_written_are_read(target: Target, eager) -> None:
    cache = target.new_cache(1, 20)
    for slab in (*cache.keys, *cache.values):
        slab.fill_(float("nan"))
    feed(target, cache, [IDS[:6]])
    cache.commit(torch.tensor([6]))
    logits = feed(target, cache, [IDS[6:]])
    torch.testing.assert_close(logits[0], fresh(target, eager, IDS)[6:], atol=1e-4, rtol=1e-4)


def test_dropped_drafts_are_still_seen(target: Target, eager) -> None:
    cache = target.new_cache(2, 20)
    feed(target, cache, [IDS[:4], IDS[2:6]])
    cache.commit(torch.tensor([4, 4]))
    feed(target, cache, [[90, 91, 92, 93, 94]] * 2)
    cache.commit(torch.tensor([0, 2]))
    feed(target, cache, [[80, 81, 82]] * 2)
    cache.discard()
    for slab in (*cache.keys, *cache.values):  # whatever lies behind the committed part
        slab[0, :, 4:], slab[1, :, 6:] = 1e4, 1e4
    logits = feed(target, cache, [[33], [34]])
    torch.testing.assert_close(logits[0, 0], fresh(target, eager, [*IDS[:4], 33])[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1, 0], fresh(target, eager, [*IDS[2:6], 90, 91, 34])[-1], atol=1e-4, rtol=1e-4)


def test_rows_are_mixed_up_after_some_have_left(target: Target, eager) -> None:
    cache = target.new_cache(3, 20)
    feed(target, cache, [IDS[:4], IDS[2:6], IDS[4:8]])
    cache.commit(torch.tensor([4, 2, 3]))
    cache.select(torch.tensor([2, 1]))
    assert cache.lengths_B.tolist() == [3, 2] and cache.get_seq_length() == 3
    logits = feed(target, cache, [[33], [34]])
    torch.testing.assert_close(logits[0, 0], fresh(target, eager, [*IDS[4:7], 33])[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1, 0], fresh(target, eager, [*IDS[2:4], 34])[-1], atol=1e-4, rtol=1e-4)


def test_overflow_is_silent(target: Target) -> None:
    cache = target.new_cache(1, 5)
    cache.stage(4)
    cache.commit(torch.tensor([4]))
    with pytest.raises(ValueError, match="holds 5 entries a row, 6 are needed"):
        cache.stage(2)
    cache.stage(1)
    with pytest.raises(ValueError, match="max_length"):
        cache.stage(1)


def seen(parents: list[int], length: int, node: int, slot: int, window: int) -> bool:
    """Whether a node sees a slot, from the definitions: positions, parents, window."""
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    if slot < length:
        position, seen_before = slot, True
    else:
        other, at = slot - length, node
        while at not in (other, -1):
            at = parents[at]
        position, seen_before = length + depth[other] if other < len(parents) else -1, at == other
    return seen_before and length + depth[node] - position < window


@pytest.mark.parametrize("window", [1, 2, 4, 7, 100])
def test_window_is_counted_in_slots(window: int) -> None:
    """Two rows of unequal length with a tree each; the second pass stages nodes behind those of the first."""
    cache = SlabCache(layers=1, rows=2, kv_heads=1, head_dim=2, max_length=30, dtype=torch.float32, device=torch.device("cpu"))
    cache.stage(6)
    cache.commit(torch.tensor([6, 3]))
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2, 4, 4], [-1, 0, 1, 2, 3, 0, 5, 4]])
    line = ancestors(parents)
    for first, last in ((0, 5), (5, 8)):
        cache.stage(last - first)
        mask = cache.visible(line[:, first:last, :last], window)
        assert mask.shape == (2, 1, last - first, 6 + last)
        for b, length in enumerate((6, 3)):
            for node in range(first, last):
                expected = [seen(parents[b, :last].tolist(), length, node, slot, window) for slot in range(6 + last)]
                assert mask[b, 0, node - first].tolist() == expected, (b, node)
    torch.testing.assert_close(cache.visible(line[:, 5:]), cache.visible(line[:, 5:], 100))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_prompt_in_two_pieces_sees_beyond_its_window(window: int | None) -> None:
    cache = SlabCache(layers=1, rows=2, kv_heads=1, head_dim=2, max_length=30, dtype=torch.float32, device=torch.device("cpu"))
    for width, real in ((5, [5, 2]), (4, [1, 4])):
        lengths = cache.lengths_B.tolist()
        positions = cache.stage(width, width - torch.tensor(real))
        mask = cache.causal(positions, window)
        for b in range(2):
            for column in range(width - real[b], width):
                at = lengths[b] + column - (width - real[b])
                expected = [slot <= at and (window is None or at - slot < window) for slot in range(mask.shape[-1])]
                assert mask[b, 0, column].tolist() == expected
        assert bool(mask.any(-1).all())  # a padding column sees something, or it would read NaN
        cache.commit(torch.tensor(real))


def test_path_is_copied_in_some_layers_only() -> None:
    cache = SlabCache(layers=3, rows=2, kv_heads=2, head_dim=4, max_length=12, dtype=torch.float32, device=torch.device("cpu"))
    cache.stage(2)
    cache.commit(torch.tensor([2, 1]))
    cache.stage(5)
    for i, slab in enumerate((*cache.keys, *cache.values)):
        slab.copy_(100 * i + torch.arange(13.0)[None, None, :, None] + 20 * torch.arange(2.0)[:, None, None, None])
    cache.commit(torch.tensor([3, 2]), torch.tensor([[0, 2, 4], [0, 3, -1]]))
    for i, slab in enumerate((*cache.keys, *cache.values)):
        assert (slab[0, :, :5] - 100 * i).unique(dim=-1).squeeze().tolist() == [[0.0, 1, 2, 4, 6]] * 2
        assert (slab[1, :, :3] - 100 * i - 20).unique(dim=-1).squeeze().tolist() == [[0.0, 1, 4]] * 2
    cache.select(torch.tensor([1]))
    assert [float(slab[0, 0, 2, 0]) for slab in (*cache.keys, *cache.values)] == [100.0 * i + 24 for i in range(6)]


def test_bound_of_a_device_passes_for_a_full_cache_or_hides_one(target: Target, eager) -> None:
    """A cache of fixed shapes does not look at its lengths: what rows may have grown by adds up, until it is told or must look."""
    cache, plain = (target.new_cache(2, 24) for _ in range(2))
    ids, more = [IDS[:6], IDS[4:10]], [[3, 4, 5, 6], [9, 8, 7, 6]]
    logits = []
    for slab in (cache, plain):
        feed(target, slab, ids)
        slab.commit(torch.tensor([6, 4]))
        slab.fixed = slab is cache
        for n in range(4):
            if n == 1:
                slab.bound(7)
            logits.append(feed(target, slab, more))
            slab.commit(torch.tensor([1, 2]))
    assert cache.lengths_B.tolist() == plain.lengths_B.tolist() == [10, 12] and cache.get_seq_length() == 25
    torch.testing.assert_close(torch.stack(logits[:4]), torch.stack(logits[4:]), atol=1e-5, rtol=1e-5)
    for _ in range(3):  # 8 more entries by what is possible: too many, had the host not looked again
        feed(target, cache, more)
        cache.commit(torch.tensor([1, 2]))
    assert cache.lengths_B.tolist() == [13, 18]
    feed(target, cache, more)
    cache.commit(torch.tensor([4, 4]))
    with pytest.raises(ValueError, match="the cache holds 24 entries a row, 26 are needed"):
        cache.stage(4)
