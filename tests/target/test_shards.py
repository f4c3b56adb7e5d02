"""Files of a store: safetensors that others can read, and damage that is always seen and named."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spectrain.target.shards import Damaged, open_shard, write_shard

TENSORS = {
    "codes": torch.arange(-60, 60, dtype=torch.int8).reshape(10, 12), "scale": torch.rand(10, 3), "last": torch.randn(7, 5).bfloat16(),
    "best": torch.arange(7, dtype=torch.int32), "none": torch.empty(0, 4), "place": torch.arange(5, dtype=torch.int16),
}  # fmt: skip


def test_other_libraries_cannot_read_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write_shard(path, TENSORS)
    theirs, ours = load_file(path), open_shard(path)
    ours.verify()
    assert theirs.keys() == TENSORS.keys() == ours.kinds.keys()
    for name, t in TENSORS.items():
        assert torch.equal(theirs[name], t) and torch.equal(ours.whole(name), t) and ours.kinds[name] == (t.dtype, t.shape[1:])
    part = torch.empty(3, 12, dtype=torch.int8)
    ours.read(ours.open(), "codes", 4, part)
    assert torch.equal(part, TENSORS["codes"][4:7])


def test_damage_is_not_seen(tmp_path: Path) -> None:
    """Every bit of every byte that is not padding: a flipped one is found by the header or by the checksum, never read."""
    path = tmp_path / "s.safetensors"
    write_shard(path, TENSORS)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    padding = range(8 + len(whole[8 : 8 + length].rstrip()), 8 + length)
    places = [(i, bit) for i in range(len(whole)) if i not in padding for bit in ((0, 3, 7) if i < 8 + length else (i % 8,))]
    for i, bit in places:
        torn = bytearray(whole)
        torn[i] ^= 1 << bit
        path.write_bytes(torn)
        try:
            shard = open_shard(path)
            shard.verify()
        except Damaged as damage:
            assert "s.safetensors is damaged" in str(damage) and "recapture" in str(damage)
        else:  # a few bits of the header mean nothing, such as a letter of its checksum in capitals
            assert all(torch.equal(shard.whole(name), t) for name, t in TENSORS.items()), (i, bit)


@pytest.mark.parametrize("size", [0, 5, 8, 40, 600, -1])
def test_part_of_a_file_is_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "s.safetensors"
    write_shard(path, TENSORS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Damaged, match="s.safetensors is damaged"):
        open_shard(path)
    path.write_bytes(np.random.default_rng(0).bytes(2000))
    with pytest.raises(Damaged, match="is damaged"):
        open_shard(path)
    path.unlink()
    with pytest.raises(Damaged, match="No such file"):
        open_shard(path)
