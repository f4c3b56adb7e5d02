"""Reading samples: from a store, or computed when asked for; against a pass for each row."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spectrain.config import CaptureConfig
from spectrain.data.batches import Batch, Sample, collate
from spectrain.data.codes import MARK
from spectrain.data.order import sizes
from spectrain.data.rows import Row
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore, OnlineFeatures, _Chosen, capture_row
from spectrain.target.model import Target
from spectrain.target.shards import write_shard
from spectrain.target.states import readable

LAYERS = (1, 3)
CONFIG = CaptureConfig(rows_per_shard=4, batch_tokens=48)
FIELDS = tuple(Sample.__dataclass_fields__)


def make_rows(seed: int = 0) -> list[Row]:
    """Single rows, turns of a conversation across two shards, one without a supervised token, one with text behind the last one."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> np.ndarray:
        return rng.integers(6, 100, n)

    start = ids(9)
    turns = [Row(f"c#{j}", "b", np.concatenate([start[: 5 + j], ids(5)]), [0] * (6 + j) + [1] * 4, group="c") for j in range(4)]
    rows = [Row(f"r{i}", "a", ids(n), [0] * (n // 2) + [1] * (n - n // 2)) for i, n in enumerate((6, 3, 11))]
    return [*rows, *turns, Row("none", "a", ids(5), [0] * 5), Row("tail", "a", ids(12), [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0])]


def same(a: Sample | Batch, b: Sample | Batch) -> bool:
    def tensors(x: Any) -> list[torch.Tensor]:
        found = [getattr(x, f) for f in FIELDS if hasattr(x, f)] + [getattr(x, f) for f in ("ids_BL", "best_P", "lse_P") if hasattr(x, f)]
        return [t for f in found for t in (f.tensors.values() if hasattr(f, "tensors") else [f])]

    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@pytest.fixture
def store(target: Target, tmp_path: Path) -> FeatureStore:
    rows = make_rows()
    capture(rows, target, LAYERS, tmp_path / "s", CONFIG)
    return FeatureStore(tmp_path / "s", rows)


@pytest.mark.parametrize(("kind", "worst"), [("bf16", 2**-8), ("int8", 0.012)])
def test_stored_states_are_not_the_targets(kind: str, worst: float, target: Target, eager, tmp_path: Path) -> None:
    """Against transformers' own hidden states: by layer, to the precision of the codes; last states, best ids, log-sum-exps."""
    rows = make_rows()
    capture(rows, target, LAYERS, tmp_path / "s", CONFIG.model_copy(update={"states": kind}))
    store = FeatureStore(tmp_path / "s", rows)
    assert len(store) == len(rows) and store.layer_ids == LAYERS
    for i, row in enumerate(rows):
        ids_L, mask_L = (torch.from_numpy(x.astype(np.int64)) for x in (row.ids_L, row.mask_L))
        with torch.no_grad():
            theirs = eager(target).model(input_ids=ids_L[None], output_hidden_states=True, use_cache=False)
        sample, K = store[i], readable(row)
        assert torch.equal(sample.ids_L, ids_L) and torch.equal(sample.mask_L, mask_L)
        ours = sample.states.float()
        assert ours.shape == (len(row), 2 * 32) and not ours[K:].any()
        if not K:
            continue
        first = theirs.hidden_states[1][0, :K]
        assert ((ours[:K, :32] - first).norm(dim=-1) / first.norm(dim=-1)).max() < worst
        normed = target.model.model.norm(ours[:K, 32:])  # hs[3] is the state before the final norm
        assert ((normed - theirs.hidden_states[3][0, :K]).norm(dim=-1) / normed.norm(dim=-1)).max() < worst
        logits_MV = target.model.lm_head(theirs.last_hidden_state[0, mask_L.bool()])
        torch.testing.assert_close(sample.last.float() @ target.output_VW.T, logits_MV, atol=5e-2, rtol=1e-2)
        torch.testing.assert_close(sample.lse_M, logits_MV.logsumexp(-1), atol=1e-4, rtol=1e-4)
        assert sample.best_M.tolist() == logits_MV.argmax(-1).tolist() and sample.best_M.dtype == torch.int64


@pytest.mark.parametrize(("kind", "worst"), [("bf16", 2**-8), ("int8", 0.012)])
def test_last_states_that_a_head_reads_are_not_those_of_the_law(kind: str, worst: float, target: Target, eager, tmp_path: Path) -> None:
    """A store of the last state, and the same states computed while training: transformers' own at every token that can be read, and at
    supervised ones those that the law is made of."""
    rows = make_rows()
    capture(rows, target, (-1,), tmp_path / "s", CONFIG.model_copy(update={"states": kind, "last": kind}))
    store, online = FeatureStore(tmp_path / "s", rows), OnlineFeatures(target, rows, (-1,), CONFIG)
    assert store.layer_ids == (-1,)
    for i, row in enumerate(rows):
        ids_1L, at_M = torch.from_numpy(row.ids_L.astype(np.int64))[None], torch.from_numpy(np.flatnonzero(row.mask_L))
        with torch.no_grad():
            theirs = eager(target).model(input_ids=ids_1L, use_cache=False).last_hidden_state[0]
        K = readable(row)
        for sample, most in ((store[i], worst), (online[i], 1e-5)):
            ours, last = sample.states.float(), sample.last.float()
            assert ours.shape == (len(row), 32) and not ours[K:].any()
            assert not K or ((ours[:K] - theirs[:K]).norm(dim=-1) / theirs[:K].norm(dim=-1)).max() < most
            assert torch.equal(ours[at_M[at_M < K]], last[at_M < K])


def test_batch_is_not_its_samples(store: FeatureStore) -> None:
    for numbers in ([0], [3, 4, 5, 6], [8, 0, 7, 5], [7], [2, 2]):
        batch, expected = store.batch(numbers), collate([store[i] for i in numbers])
        assert torch.equal(batch.ids_BL, expected.ids_BL) and torch.equal(batch.mask_BL, expected.mask_BL)
        assert torch.equal(batch.states_BLF, expected.states_BLF) and batch.states.codes.dtype == torch.int8
        assert torch.equal(batch.last_PW, expected.last_PW) and batch.last.codes.dtype == torch.bfloat16
        assert torch.equal(batch.best_P, expected.best_P) and torch.equal(batch.lse_P, expected.lse_P)
        assert len(batch.best_P) == int(batch.mask_BL.sum())
    torch.testing.assert_close(store.batch([4]).states_BLF[0], store[4].states.float())


@pytest.mark.parametrize("numbers", [[0], [3, 4, 5, 6, 8], [6, 2, 3, 7]])
def test_online_features_are_others(numbers: list[int], store: FeatureStore, target: Target) -> None:
    """In the target's precision, equal to a pass for each row; and to the store within its rounding."""
    online = OnlineFeatures(target, store.rows, LAYERS, CONFIG)
    ours, stored = online.batch(numbers), store.batch(numbers)
    assert len(online) == len(store) and torch.equal(ours.ids_BL, stored.ids_BL) and torch.equal(ours.mask_BL, stored.mask_BL)
    alone = [capture_row(store.rows[i], target, LAYERS) for i in numbers]
    for b, (i, part) in enumerate(zip(numbers, alone, strict=True)):
        K = readable(store.rows[i])
        torch.testing.assert_close(ours.states_BLF[b, :K], part["states"][:K], atol=1e-4, rtol=1e-4)
        assert not ours.states_BLF[b, K:].any()
    for field, name in (("last_PW", "last"), ("best_P", "best"), ("lse_P", "lse")):
        torch.testing.assert_close(getattr(ours, field), torch.cat([part[name] for part in alone]), atol=1e-4, rtol=1e-4)
    kept = ours.states_BLF.norm(dim=-1) > 0
    off = (ours.states_BLF - stored.states_BLF).norm(dim=-1)[kept] / ours.states_BLF.norm(dim=-1)[kept]
    assert 0 < off.max() < 0.012
    assert same(online[numbers[0]], online[numbers[0]])


def test_last_states_are_stored_where_no_loss_needs_them(store: FeatureStore, target: Target, tmp_path: Path) -> None:
    capture(store.rows, target, LAYERS, tmp_path / "none", CONFIG, last_state="none")
    bare = FeatureStore(tmp_path / "none", store.rows)
    batch = bare.batch([0, 3, 4])
    assert torch.equal(batch.states_BLF, store.batch([0, 3, 4]).states_BLF)
    assert batch.last.codes.shape == (0, 32) and not len(batch.best_P) and not len(batch.lse_P)


def test_samples_of_a_store_depend_on_how_it_was_made(store: FeatureStore, target: Target, tmp_path: Path) -> None:
    """Rows a shard and tokens a pass: the same states, whatever was computed together."""
    for rows_per_shard, batch_tokens in ((1, 1), (9, 512)):
        out = tmp_path / f"{rows_per_shard}"
        config = CaptureConfig(states="bf16", rows_per_shard=rows_per_shard, batch_tokens=batch_tokens)
        capture(store.rows, target, LAYERS, out, config)
    alone, together = (FeatureStore(tmp_path / name, store.rows) for name in ("1", "9"))
    for i in range(len(store)):
        torch.testing.assert_close(alone[i].states.float(), together[i].states.float(), atol=1e-2, rtol=1e-2)
        assert torch.equal(alone[i].best_M, together[i].best_M)


def test_damaged_or_missing_shard_is_read(store: FeatureStore, tmp_path: Path) -> None:
    rows, path = store.rows, tmp_path / "s" / "rows-0000004.safetensors"
    with pytest.raises(ValueError, match="no feature store; run `spectrain capture`"):
        FeatureStore(tmp_path / "nowhere", rows)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    late = FeatureStore(tmp_path / "s", rows)
    assert same(late[3], store[3])
    with pytest.raises(ValueError, match="rows-0000004.safetensors is damaged .checksum"):
        late.batch([3, 5])
    path.unlink()
    with pytest.raises(ValueError, match="rows-0000004.safetensors is damaged .it is missing"):
        FeatureStore(tmp_path / "s", rows, on_damage="skip")._opened(4)
    with pytest.raises(ValueError, match="1 of 3 shards missing, first rows-0000004"):
        FeatureStore(tmp_path / "s", rows)
    left = FeatureStore(tmp_path / "s", rows, on_damage="skip")
    assert [row.id for row in left.rows] == ["r0", "r1", "r2", "c#0", "tail"] and left.rows[3:4] == [rows[3]]
    assert left.skipped == {path.name: "it is missing"} and left.skipped_rows == 4
    assert same(left[4], store[8])


def test_shards_that_changed_places_are_read(store: FeatureStore, tmp_path: Path) -> None:
    """Each shard is whole; its rows are not those that its name says."""
    a, b = (tmp_path / "s" / f"rows-000000{n}.safetensors" for n in (0, 4))
    a_bytes, b_bytes = a.read_bytes(), b.read_bytes()
    a.write_bytes(b_bytes), b.write_bytes(a_bytes)
    with pytest.raises(ValueError, match="rows-0000000.safetensors is damaged .row r1 is not the one that was captured"):
        FeatureStore(tmp_path / "s", store.rows)[1]


def test_store_is_lost_on_the_way_to_another_process(store: FeatureStore) -> None:
    store[0]
    assert same(pickle.loads(pickle.dumps(store))[5], store[5])


def test_manifest_that_is_no_manifest_is_read(store: FeatureStore, tmp_path: Path) -> None:
    path = tmp_path / "s" / "manifest.json"
    for text, named in (("{", "is damaged"), ("[]", "format = None, needed 3"), ('{"format": 1}', "format = 1, needed 3")):
        path.write_text(text)
        with pytest.raises(ValueError, match=named):
            FeatureStore(tmp_path / "s", store.rows)


def test_store_of_an_earlier_format_is_thrown_away_or_misread(store: FeatureStore, target: Target, tmp_path: Path) -> None:
    """Format 2 named the channels kept apart and had float32 scales: it is read as it was, and not gone on with."""
    wanted = [store[i] for i in range(len(store))]
    for path in (tmp_path / "s").glob("*.safetensors"):
        tensors = {name: t.clone() for name, t in load_file(path).items()}
        parts = tensors["states.codes"].unflatten(-1, (len(LAYERS), -1))
        place = (parts == MARK).nonzero()[:, -1].view(tensors["states.kept"].shape).to(torch.int16)
        old = {"states.codes": parts.masked_fill(parts == MARK, 0).flatten(-2), "states.scale": tensors["states.scale"].float()}
        write_shard(path, {**tensors, **old, "states.place": place})
    manifest = tmp_path / "s" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 2'))
    found = FeatureStore(tmp_path / "s", store.rows)
    assert found[0].states.place is not None
    assert all(torch.equal(found[i].states.float(), x.states.float()) for i, x in enumerate(wanted))
    with pytest.raises(ValueError, match="a store with format = 2, needed 3; delete it or capture into a new folder"):
        capture(store.rows, target, LAYERS, tmp_path / "s", CONFIG)


def test_dropout_of_the_target_shows_in_its_states(make_target) -> None:
    """RB3."""
    target = make_target(attention_dropout=0.5)
    first, second = (capture_row(make_rows()[2], target, LAYERS) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_row_of_another_mask_is_read(store: FeatureStore, tmp_path: Path) -> None:
    rows = [replace(store.rows[0], mask_L=[1] * 6), *store.rows[1:]]
    with pytest.raises(ValueError, match="was captured from other rows: rows_sha256"):
        FeatureStore(tmp_path / "s", rows)
    assert copy.copy(store).rows is store.rows


class Indexed(list[Row]):
    """Rows with the arrays that a row store has."""

    lengths_N = np.array([5, 6, 7, 8])
    supervised_N = np.array([3, 3, 3, 3])
    domain_N = np.array([0, 1, 1, 0])
    domain_names = ("b", "a")


def test_rows_left_after_damage_cannot_be_planned() -> None:
    found = sizes(_Chosen(Indexed(make_rows()[:4]), [0, 2]))
    assert found.length_N.tolist() == [5, 7] and [found.domains[d] for d in found.domain_N] == ["b", "a"]
