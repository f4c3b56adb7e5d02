"""What tests/target/test_placement.py runs in every process, and in its own: all that is asked of a target, left behind in a file.

Usage: placed.py FOLDER PLACEMENT [TP_SIZE]     (FOLDER/target: the model; records go to FOLDER)
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import spectrain as st
from spectrain.config import CaptureConfig, HeadConfig
from spectrain.data.rows import Row
from spectrain.target.capture import capture
from spectrain.target.check import check_store
from spectrain.target.features import FeatureStore, OnlineFeatures
from spectrain.target.model import Target, load_target
from spectrain.training.setup import check_config, new_head, start_notes

LAYERS = (1, 2)
CONFIG = CaptureConfig(rows_per_shard=2, batch_tokens=40)
HEAD = HeadConfig(layer_ids=LAYERS, draft_vocab_size=30, norm_output=True)
PROMPTS = [[6, 7, 8, 9, 6, 7], [20, 21, 22]]


def rows() -> list[Row]:
    """Nine rows of unequal length, three of them turns of one conversation."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(6, 100, n) for n in (6, 11, 17, 5, 9, 14)]
    start = rng.integers(6, 100, 8)
    turns = [np.concatenate([start, rng.integers(6, 100, n)]) for n in (3, 5, 8)]
    single = [Row(f"r{i}", "a", x, [0] * (len(x) // 2) + [1] * (len(x) - len(x) // 2)) for i, x in enumerate(ids)]
    return [*single, *(Row(f"c#{i}", "b", x, [0] * 8 + [1] * (len(x) - 8), group="c") for i, x in enumerate(turns))]


def sha256(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.detach().contiguous().numpy().tobytes()).hexdigest()


def online(target: Target, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    batch = OnlineFeatures(target, rows(), LAYERS, CaptureConfig(batch_tokens=16)).batch(numbers)
    return {"states": batch.states_BLF, "last": batch.last_PW, "best": batch.best_P, "lse": batch.lse_P}


def answers(target: Target, head: Any) -> list[list[list[int]]]:
    """Tokens by head in chains and trees, greedy and drawn, by n-gram with a temperature, and without drafts."""
    drawn = {"temperature": 0.8, "seed": 3}
    chain, tree = {"drafter": head.eval()}, {"drafter": head, "shape": st.Tree.dynamic(top_k=3, depth=3, budget=8)}
    static = {"drafter": head, "shape": st.Tree.static([[0], [1], [0, 0], [0, 1], [0, 0, 0]])}
    how = (chain, {**chain, **drawn}, tree, {**tree, **drawn}, {**static, **drawn}, {"drafter": st.NGram(), **drawn}, {})
    return [[row.tokens for row in st.generate(target, PROMPTS, max_new_tokens=12, **kwargs).rows] for kwargs in how]


def weights(target: Target) -> dict[str, Any]:
    """Weights, and what is made of them."""
    check_config(HEAD, target)
    head = new_head(HEAD, target, rows(), seed=0)
    found = {"fingerprints": target.fingerprints, "rows": (sha256(target.embedding_VW), sha256(target.output_VW))}
    return {**found, "head": head.state_dict(), "notes": start_notes(HEAD, target), "answers": answers(target, head)}


def stored(target: Target, out: Path, rank: int = 0) -> dict[str, Any]:
    """A capture, one that makes a lost shard anew, and the check of the store."""
    made = [capture(rows(), target, LAYERS, out, CONFIG).shards]
    wait()
    if rank == 0:
        (out / "rows-0000004.safetensors").unlink()
    wait()
    made.append(capture(rows(), target, LAYERS, out, CONFIG).shards)
    wait()
    return {"made": made, "check": check_store(FeatureStore(out, rows()), target).text()}


def uneven(target: Target, counts: Sequence[int], rank: int) -> float:
    """The sum of logits of the last of `counts[rank]` passes over a row of its own."""
    total, ids_1L = 0.0, torch.arange(6, 12 + rank)[None]
    with target.in_step():
        for _ in range(counts[rank]):
            place = torch.arange(ids_1L.shape[1])[None]
            total = float(target.forward(ids_1L, positions_BN=place, mask=None, cache=None).logits_BKV.sum())
    return total


def wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def main(folder: Path, placement: str, tp_size: int | None) -> None:
    target = load_target(folder / "target", placement=placement, tp_size=tp_size)
    rank = dist.get_rank()
    place = target.placement
    found = {"place": (place.replica, place.replicas, place.leads), "shares": sum(p.numel() for p in shares(target))}
    found |= weights(target)
    found |= stored(target, folder / "states", rank)
    found["online"] = online(target, [(0, 5, 2), (3,)][rank % 2])
    if place.gathers:
        found["uneven"] = [uneven(target, counts, rank) for counts in ((3, 5), (2, 0))]
    found["whole"] = float(load_target(folder / "target").output_VW.abs().sum())  # what was done to this target is not done to others
    torch.save(found, folder / f"found-{rank}.pt")
    dist.destroy_process_group()


def shares(target: Target) -> list[torch.Tensor]:
    """What this process holds of every weight of the layers."""
    own = [getattr(p, "ds_tensor", p) for p in target.layers.parameters()]
    return [p.to_local() if hasattr(p, "to_local") else p for p in own]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
