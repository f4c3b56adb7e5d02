"""VM2: head and target read the same ids, padded rows are no tokens, and a reduced head carries its table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.drafters import from_head
from spectrain.export.engines import export_head
from spectrain.heads.base import TOKENS, check_head, load_head, save_head
from spectrain.heads.eagle3 import Eagle3
from spectrain.heads.targets import draft_vocabulary
from spectrain.target.model import Target
from spectrain.training.loop import train
from spectrain.training.setup import check_config, made_with, new_head

ROWS = [Row("a", "d", [5, 6, 77, 80, 91, 77], [0, 0, 1, 1, 1, 1])]


def head_for(target: Target, size: int | None) -> Eagle3:
    return new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=size), target, ROWS, seed=0)


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    save_head(head_for(target, 12), tmp_path / "head", run_yaml="", made_with=made_with(target, {}))
    return tmp_path / "head"


class Words:
    """A tokenizer's vocabulary: `w<id>` as the target's, with some ids changed."""

    def __init__(self, target: Target, changed: dict[int, str | None]) -> None:
        words = {i: word for word, i in target.tokenizer.get_vocab().items()} | changed
        self.vocab = {word: i for i, word in words.items() if word is not None}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({41: "été", 77: "x"}, "first at id 41: 'w41' of the head, 'été' of other"),
        ({0: "w9", 9: "<pad>"}, "first at id 0: '<pad>' of the head, 'w9' of other"),
        ({99: None}, "first at id 99: 'w99' of the head, no token of other"),
        ({100: "new"}, "first at id 100: no token of the head, 'new' of other"),
    ],
)
def test_other_tokenizer_is_taken_or_not_named(target: Target, folder: Path, changed: dict[int, str | None], said: str) -> None:
    head, fingerprints = load_head(folder), {**target.fingerprints, "tokenizer_sha256": "another"}
    with pytest.raises(ValueError, match=f"its tokenizer differs from that of other, {said}.*spectrain train RECIPE"):
        check_head(head, fingerprints, "other", Words(target, changed))
    check_head(head, target.fingerprints, "same", target.tokenizer)
    with pytest.raises(ValueError, match="its tokenizer differs from that of other\\);"):
        check_head(head, fingerprints, "other")


def test_head_of_an_earlier_version_does_not_load(target: Target, folder: Path, tmp_path: Path) -> None:
    """It keeps no tokens: refused with the present words. A head that is saved again keeps them."""
    save_head(load_head(folder), tmp_path / "again", run_yaml="", made_with={})
    assert (tmp_path / "again" / TOKENS).read_bytes() == (folder / TOKENS).read_bytes()
    (folder / TOKENS).unlink()
    with pytest.raises(ValueError, match="its tokenizer differs from that of other\\);"):
        check_head(load_head(folder), {**target.fingerprints, "tokenizer_sha256": "another"}, "other", Words(target, {41: "x"}))


def test_padded_row_is_in_the_draft_vocabulary() -> None:
    """152064 rows, 151665 tokens."""
    counts_V = torch.zeros(152064, dtype=torch.long)
    counts_V[151660:] = 5
    for size in (10, 151665, None):
        ids = draft_vocabulary(counts_V, size, num_ids=151665).target_ids
        assert len(ids) == (size or 151665) and ids.max() == 151664
    with pytest.raises(ValueError, match="of 151666 asked for; needed 1 to 151665 .*of 152064 rows, the rest is padding"):
        draft_vocabulary(counts_V, 151666, num_ids=151665)


@pytest.fixture(scope="module")
def padded(make_table_target, make_tokenizer) -> Target:
    """20 rows, 16 tokens; the target would like best to say a padded id after any token."""
    table_VV = torch.randn(20, 20, generator=torch.Generator().manual_seed(0)) * 3
    table_VV[:, 16:] += 30
    return Target(model=make_table_target(table_VV).model, tokenizer=make_tokenizer(16), name="padded")


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_row_is_drafted_or_emitted(padded: Target, make_head, size: int | None, temperature: float, monkeypatch) -> None:
    ids = draft_vocabulary(torch.arange(20), size, num_ids=padded.num_ids).target_ids
    head = make_head(padded, draft_vocab=len(ids), layer_ids=(0, 1), num_attention_heads=2, num_key_value_heads=1)
    head.start_from(layer=None, norm=torch.ones(20), output_VW=padded.output_VW, target_ids=ids, train_output=False, seed=0)
    trees: list[Any] = []
    grow = from_head.grow
    monkeypatch.setattr(from_head, "grow", lambda *args: trees.append(grow(*args)) or trees[-1])
    result = generate(
        padded, [[7, 8], [9]], drafter=from_head.HeadDrafter(head), shape=Chain(3), max_new_tokens=24, eos=None, temperature=temperature
    )
    assert all(len(row.tokens) == 24 and max(row.tokens) < 16 for row in result.rows)
    assert len(trees) > 5 and all(int(tree.tokens_BN.max()) < 16 for tree in trees)


def test_vocabulary_beyond_the_tokenizer_is_taken(target: Target, make_tokenizer) -> None:
    short = Target(model=target.model, tokenizer=make_tokenizer(90), name="short")
    assert head_for(short, None).target_ids.tolist() == list(range(90))
    check_config(HeadConfig(layer_ids=(1, 2), draft_vocab_size=None), short)
    with pytest.raises(ValueError, match="head.draft_vocab_size 91 is above the 90 tokens of short; lower it"):
        check_config(HeadConfig(layer_ids=(1, 2), draft_vocab_size=91), short)


def test_reduced_head_without_a_table_is_trained_or_saved(target: Target, tmp_path: Path) -> None:
    for name in ("d2t", "t2d"):
        head = head_for(target, 12)
        getattr(head, name).zero_()
        with pytest.raises(ValueError, match="no table of its draft vocabulary"):
            train(
                head, None, TrainingConfig(), embed_VW=target.embedding_VW, output_VW=target.output_VW, out=tmp_path,
                accelerator=Accelerator(cpu=True), save=lambda head, name: None,
            )  # fmt: skip
        with pytest.raises(ValueError, match="no table of its draft vocabulary"):
            save_head(head, tmp_path / "head", run_yaml="", made_with={})
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("name", ["d2t", "t2d"])
@pytest.mark.parametrize("how", ["missing", "zero"])
def test_reduced_head_without_a_table_is_loaded_or_exported(folder: Path, tmp_path: Path, name: str, how: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    zero = {name: torch.zeros_like(tensors.pop(name))} if how == "zero" else {}
    tensors.pop(name, None)
    save_file({**tensors, **zero}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="d2t|t2d|draft vocabulary"):
        load_head(folder)
    with pytest.raises(ValueError, match="d2t|t2d|draft vocabulary"):
        export_head(folder, "vllm", tmp_path / "out")


def test_exported_head_leaves_its_table_behind(target: Target, folder: Path, tmp_path: Path) -> None:
    """Both tables of a reduced head, none for a head of the whole vocabulary."""
    exported = load_file(export_head(folder, "vllm", tmp_path / "out") / "model.safetensors")
    assert (
        (exported["d2t"] + torch.arange(12)).tolist() == exported["t2d"].nonzero()[:, 0].tolist() == load_head(folder).target_ids.tolist()
    )
    save_head(head_for(target, None), tmp_path / "whole", run_yaml="", made_with=made_with(target, {}))
    whole = load_file(export_head(tmp_path / "whole", "vllm", tmp_path / "out") / "model.safetensors")
    assert not {"d2t", "t2d"} & whole.keys() and len(whole["lm_head.weight"]) == target.vocab_size
