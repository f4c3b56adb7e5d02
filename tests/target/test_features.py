"""The feature store: what is captured, resumed, refused."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spectrain.data.masking import Row
from spectrain.target import features
from spectrain.target.features import FeatureStore, capture, capture_row, rows_hash, store_bytes
from spectrain.target.model import Target

LENGTHS = [6, 3, 11, 9, 4]


def make_rows(n: int = 5, seed: int = 0) -> list[Row]:
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        L = LENGTHS[i % 5]
        ids = torch.randint(0, 100, (L,), generator=g).tolist()
        rows.append(Row(id=f"r{i}", domain="d", ids_L=tuple(ids), mask_L=(0,) * (L // 2) + (1,) * (L - L // 2)))
    return rows


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(features, "ROWS_PER_SHARD", 2)


def test_stored_states_are_not_the_targets(target: Target, eager, tmp_path: Path) -> None:
    """FC1: by row: states of the layers, the last state that gives the target's logits, its best id and log-sum-exp."""
    rows = make_rows()
    capture(rows, target, (1, 3), tmp_path / "s")
    store = FeatureStore(tmp_path / "s", rows)
    assert len(store) == 5
    for i, row in enumerate(rows):
        theirs = eager(target)(input_ids=torch.tensor([row.ids_L]), output_hidden_states=True)
        sample, mask = store[i], torch.tensor(row.mask_L).bool()
        assert sample.ids_L.tolist() == list(row.ids_L) and sample.mask_L.tolist() == list(row.mask_L)
        assert sample.states_LF.dtype == torch.float32
        torch.testing.assert_close(sample.states_LF[:, :32], theirs.hidden_states[1][0], atol=1e-2, rtol=1e-2)  # kept in bfloat16
        torch.testing.assert_close(target.model.model.norm(sample.states_LF[:, 32:]), theirs.hidden_states[3][0], atol=3e-2, rtol=2e-2)
        logits = theirs.logits[0]
        torch.testing.assert_close((sample.last_LW @ target.output_VW.T)[mask], logits[mask], atol=5e-2, rtol=1e-2)
        torch.testing.assert_close(sample.lse_L[mask], logits.logsumexp(-1)[mask], atol=1e-4, rtol=1e-4)
        assert sample.best_L[mask].tolist() == logits.argmax(-1)[mask].tolist()
        assert not sample.last_LW[~mask].any() and not sample.lse_L[~mask].any()


def test_row_without_supervised_tokens_breaks_the_store(target: Target, tmp_path: Path) -> None:
    rows = [replace(make_rows()[0], mask_L=(0,) * 6), make_rows()[1]]
    capture(rows, target, (1,), tmp_path / "s")
    sample = FeatureStore(tmp_path / "s", rows)[0]
    assert sample.states_LF.shape == (6, 32) and not sample.last_LW.any()


def test_announced_bytes_are_not_those_written(target: Target, tmp_path: Path) -> None:
    """ME1: 4 states of width 4096 in bfloat16 are 32,768 bytes a token; the announced bytes are those of the shards."""
    row = Row("r", "d", (1,) * 2048, (0,) * 2048)
    assert store_bytes([row], target_width=4096, num_states=4) == 2048 * 32_768 == 64 * 2**20
    rows = make_rows()
    capture(rows, target, (1, 2), tmp_path / "s")
    written = 0
    for i in range(len(rows)):
        part = capture_row(rows[i], target, (1, 2))
        written += sum(part[name].numel() * part[name].element_size() for name in ("states", "last"))
    assert written == store_bytes(rows, target_width=32, num_states=2)


def test_full_disk_is_noticed_at_the_end(target: Target, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(10**6, 0, 100))
    with pytest.raises(ValueError, match="the store needs .* has 0 MiB left"):
        capture(make_rows(), target, (1,), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_row_longer_than_the_target_takes_is_captured(make_target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a row has 11 tokens, tiny takes 10"):
        capture(make_rows(), make_target(max_position_embeddings=10), (1,), tmp_path / "s")


def counting(monkeypatch) -> list[str]:
    seen: list[str] = []

    def spy(row: Row, target: Target, layer_ids) -> dict:
        seen.append(row.id)
        return capture_row(row, target, layer_ids)

    monkeypatch.setattr(features, "capture_row", spy)
    return seen


def test_stopped_capture_starts_over(target: Target, tmp_path: Path, monkeypatch) -> None:
    rows, out = make_rows(), tmp_path / "s"
    capture(rows, target, (1,), out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert len(before) == 4
    seen = counting(monkeypatch)
    capture(rows, target, (1,), out)
    assert seen == []
    (out / "rows-0000002.safetensors").unlink()
    (out / "rows-0000004.part").write_bytes(b"torn")
    with pytest.raises(ValueError, match="incomplete .1 shards missing.*run the capture again"):
        FeatureStore(out, rows)
    capture(rows, target, (1,), out)
    assert seen == ["r2", "r3"]
    assert {name: (out / name).read_bytes() for name in before} == before


def test_interrupted_shard_is_readable(target: Target, tmp_path: Path, monkeypatch) -> None:
    """ME1: a killed run leaves no row that loads."""

    def fails(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(features.os, "replace", lambda a, b: fails() if str(b).endswith(".safetensors") else Path(a).rename(b))
    with pytest.raises(KeyboardInterrupt):
        capture(make_rows(), target, (1,), tmp_path / "s")
    assert not list((tmp_path / "s").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda rows, target, other: (rows[::-1], target, (1, 2)), "rows_sha256"),
        (lambda rows, target, other: ([replace(rows[0], mask_L=(1,) * 6), *rows[1:]], target, (1, 2)), "rows_sha256"),
        (lambda rows, target, other: (rows[:3], target, (1, 2)), "rows"),
        (lambda rows, target, other: (rows, target, (1, 3)), "layer_ids"),
        (lambda rows, target, other: (rows, target, (2, 1)), "layer_ids"),
        (lambda rows, target, other: (rows, other, (1, 2)), "embedding_sha256"),
    ],
)
def test_store_of_something_else_is_taken(target: Target, make_target, tmp_path: Path, change, field: str) -> None:
    """RE3: the refusal names the field."""
    rows = make_rows()
    capture(rows, target, (1, 2), tmp_path / "s")
    with pytest.raises(ValueError, match=f"a store with {field} = .*capture into a new folder"):
        capture(*change(rows, target, make_target(seed=9)), tmp_path / "s")


def test_store_of_another_template_or_dtype_is_taken(target: Target, make_tokenizer, tmp_path: Path, monkeypatch) -> None:
    rows = make_rows()
    capture(rows, target, (1,), tmp_path / "s")
    with pytest.raises(ValueError, match="template_sha256"):
        capture(rows, Target(model=target.model, tokenizer=make_tokenizer(100, template="{{ x }}"), name="t"), (1,), tmp_path / "s")
    monkeypatch.setattr(features, "DTYPE", torch.float16)
    with pytest.raises(ValueError, match=r"dtype = 'torch.bfloat16', needed 'torch.float16'"):
        capture(rows, target, (1,), tmp_path / "s")


def test_folder_of_something_else_is_overwritten(target: Target, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="holds files but no manifest"):
        capture(make_rows(), target, (1,), tmp_path)


def test_damaged_store_is_read(target: Target, tmp_path: Path) -> None:
    rows, out = make_rows(), tmp_path / "s"
    with pytest.raises(ValueError, match="no feature store; run `spectrain capture`"):
        FeatureStore(out, rows)
    capture(rows, target, (1,), out)
    with pytest.raises(ValueError, match="captured from other rows .rows_sha256"):
        FeatureStore(out, rows[::-1])
    shard = out / "rows-0000002.safetensors"
    content = shard.read_bytes()
    store = FeatureStore(out, rows)
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="rows-0000002.safetensors is damaged .*delete it and run the capture again"):
        store[2]
    assert store[1].ids_L.tolist() == list(rows[1].ids_L)


def test_manifest_does_not_say_how_it_was_made(target: Target, tmp_path: Path) -> None:
    rows = make_rows()
    capture(rows, target, (1, 2), tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert manifest["layer_ids"] == [1, 2] and manifest["last_state"] == "post_norm" and manifest["rows_sha256"] == rows_hash(rows)
    assert manifest.items() >= target.fingerprints.items()


def test_dropout_of_the_target_shows_in_its_states(make_target) -> None:
    """RB3."""
    target = make_target(attention_dropout=0.5)
    first, second = (capture_row(make_rows()[2], target, (1, 2)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
