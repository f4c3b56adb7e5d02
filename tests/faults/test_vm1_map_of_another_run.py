"""VM1: a draft vocabulary belongs to one corpus, tokenizer and size; no run takes over another's."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.heads.base import load_head, save_head
from spectrain.heads.eagle3 import Eagle3
from spectrain.heads.targets import vocabulary_key
from spectrain.target.model import Target
from spectrain.training.loop import train
from spectrain.training.setup import made_with, new_head

BY_HAND = runpy.run_path(str(Path(__file__).parents[1] / "training/by_hand.py"))
Samples, row_of = BY_HAND["Samples"], BY_HAND["row_of"]
A, B = [7, 8, 9, 10], [7, 60, 61, 62]


@pytest.fixture(scope="module")
def corpora(target: Target) -> dict[str, Any]:
    """Two corpora of two rows whose answers use four tokens each."""
    return {name: Samples.of(target, [row_of([20, 30], ids * 4, f"{name}{i}") for i in range(2)]) for name, ids in (("A", A), ("B", B))}


def head_for(target: Target, samples: Any, size: int | None = 4) -> Eagle3:
    return new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=size, init_layer="random"), target, samples.rows, seed=0)


def run(head: Eagle3, target: Target, samples: Any, out: Path, identity: str, *, steps: int = 1, name: str = "A") -> None:
    record = made_with(target, {"rows_sha256": name})
    train(
        head, samples, TrainingConfig(epochs=4, steps=steps, tokens_per_step=1, lr=1e-3), embed_VW=target.embedding_VW,
        output_VW=target.output_VW, out=out / "training", accelerator=Accelerator(cpu=True), identity={"rows": identity},
        save=lambda head, name: save_head(head, out / name, run_yaml="", made_with=record),
    )  # fmt: skip


def test_second_run_in_the_folder_takes_the_first_ones_map(target: Target, corpora: dict[str, Any], tmp_path: Path) -> None:
    run(head_for(target, corpora["A"]), target, corpora["A"], tmp_path, "rows A")
    assert load_head(tmp_path / "last").target_ids.tolist() == A
    second = head_for(target, corpora["B"])
    assert second.target_ids.tolist() == B
    with pytest.raises(ValueError, match="other settings or data"):  # the checkpoint in the folder is of corpus A
        run(second, target, corpora["B"], tmp_path, "rows B", name="B")
    shutil.rmtree(tmp_path / "training/checkpoints")
    run(second, target, corpora["B"], tmp_path, "rows B", name="B")
    assert load_head(tmp_path / "last").target_ids.tolist() == B


def test_whole_vocabulary_gets_a_map(target: Target, corpora: dict[str, Any], tmp_path: Path) -> None:
    run(head_for(target, corpora["A"]), target, corpora["A"], tmp_path, "rows A")
    shutil.rmtree(tmp_path / "training/checkpoints")
    run(head_for(target, corpora["A"], None), target, corpora["A"], tmp_path, "rows A")
    head = load_head(tmp_path / "last")
    assert head.config.draft_vocab_size == target.vocab_size and not head.d2t.any() and head.t2d.all()


def test_resume_mixes_the_new_scan_with_the_stored_map(target: Target, corpora: dict[str, Any], tmp_path: Path, capsys) -> None:
    """A head scanned from other data resumes: the checkpoint's map in head, loss and artifact, and a warning."""
    heads = [head_for(target, corpora["A"]), head_for(target, corpora["B"])]
    for name, head in zip(("same", "other"), heads, strict=True):
        run(head_for(target, corpora["A"]), target, corpora["A"], tmp_path / name, "x", steps=2)
        newest = tmp_path / name / "training/checkpoints/step-2.pt"
        saved = torch.load(newest, weights_only=True)
        torch.save({**saved, "pace": saved["pace"] | {"left": 4}}, newest)
        capsys.readouterr()
        run(head, target, corpora["A"], tmp_path / name, "x", steps=4)
        warned = "the draft vocabulary is the checkpoint's; a new scan of the rows would differ in 3 of 4 tokens" in capsys.readouterr().out
        assert warned == (name == "other")
        assert head.target_ids.tolist() == load_head(tmp_path / name / "last").target_ids.tolist() == A
    for name, tensor in heads[0].state_dict().items():
        assert torch.equal(heads[1].state_dict()[name], tensor)


def test_resume_with_another_size_is_a_traceback(target: Target, corpora: dict[str, Any], tmp_path: Path) -> None:
    run(head_for(target, corpora["A"]), target, corpora["A"], tmp_path, "x")
    with pytest.raises(ValueError, match="holds another head"):
        run(head_for(target, corpora["A"], 3), target, corpora["A"], tmp_path, "x")


def test_key_leaves_out_corpus_tokenizer_or_size(target: Target, corpora: dict[str, Any], tmp_path: Path) -> None:
    parts = {"rows_sha256": "A", "tokenizer_sha256": target.fingerprints["tokenizer_sha256"], "size": 4}
    keys = [vocabulary_key(**{**parts, **change}) for change in ({}, {"rows_sha256": "B"}, {"tokenizer_sha256": "t"}, {"size": 5})]
    assert len(set(keys)) == 4
    run(head_for(target, corpora["A"]), target, corpora["A"], tmp_path, "x")
    path = tmp_path / "last/made_with.json"
    record = json.loads(path.read_text())
    assert record["vocabulary_key"] == keys[0]
    path.write_text(json.dumps({**record, "rows_sha256": "B"}))
    with pytest.raises(ValueError, match="names another corpus, tokenizer or size"):
        load_head(tmp_path / "last")
