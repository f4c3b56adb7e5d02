"""Targets with weights in 8 or 4 bits: their own law in every pass, their own states and heads, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.cli.start import open_start
from spectrain.config import CaptureConfig, HeadConfig, LoraConfig, Recipe
from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain, Tree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.base import check_head, load_head, save_head
from spectrain.target import quantised
from spectrain.target.adapter import check_lora
from spectrain.target.capture import capture
from spectrain.target.check import check_store
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target, load_target
from spectrain.target.passes import choose
from spectrain.training.setup import made_with, new_head, start_notes

pytest.importorskip("bitsandbytes", reason="pip install 'spectrain[quantized]'")
KINDS = ("8bit", "4bit")
ROWS = [Row(f"r{i}", "d", np.random.default_rng(i).integers(6, 100, 30), [0] * 10 + [1] * 20) for i in range(6)]
PROMPTS = [[7], [9, 55, 31], [50, 51, 52, 7, 50, 51, 52, 7, 50, 51, 52, 7]]


@pytest.fixture(scope="module")
def folder(make_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain target; wide enough that a row of weights has more than one block of 64, with inputs that bitsandbytes takes apart."""
    target = make_target(hidden_size=128, intermediate_size=192, head_dim=32, initializer_range=0.12)
    return save(target, tmp_path_factory.mktemp("plain") / "target")


def save(target: Target, where: Path) -> Path:
    target.model.save_pretrained(where)
    target.tokenizer.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def plain(folder: Path) -> Target:
    return load_target(folder)


@pytest.fixture(scope="module", params=KINDS)
def quantised_target(request: pytest.FixtureRequest, folder: Path) -> Target:
    return load_target(folder, quantization=request.param)


def last_logits(target: Target, ids: list[int]) -> torch.Tensor:
    ids_1L = torch.tensor([ids])
    return target.forward(ids_1L, positions_BN=torch.arange(len(ids))[None], mask=None, cache=None).logits_BKV[0]


def test_law_of_a_token_depends_on_its_pass(quantised_target: Target, plain: Target) -> None:
    """Alone behind a cache, among others, in another batch: the same law but for rounding; and it is not the plain target's."""
    ids = ROWS[0].ids_L.tolist()
    whole_LV = last_logits(quantised_target, ids)
    cache = quantised_target.new_cache(1, len(ids))
    for i, token in enumerate(ids):
        positions_11 = cache.stage(1)
        mask = quantised_target.masks(cache, torch.ones(1, 1, 1, dtype=torch.bool))
        out = quantised_target.forward(torch.tensor([[token]]), positions_BN=positions_11, mask=mask, cache=cache)
        torch.testing.assert_close(out.logits_BKV[0, 0], whole_LV[i], atol=1e-4, rtol=1e-4)
        cache.commit(torch.ones(1, dtype=torch.long))
    torch.testing.assert_close(last_logits(quantised_target, ids[:11]), whole_LV[:11], atol=1e-4, rtol=1e-4)
    assert (whole_LV - last_logits(plain, ids)).abs().max() > 0.02
    kept = {p.dtype for name, p in quantised_target.model.named_parameters() if name.endswith("proj.weight")}
    assert kept == {torch.int8 if quantised_target.quantization == "8bit" else torch.uint8}


def test_drafts_change_the_answer_of_a_quantised_target(quantised_target: Target, make_head: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos": None}
    expected = [row.tokens for row in generate(quantised_target, PROMPTS, **settings).rows]
    assert all(len(set(tokens)) > 5 for tokens in expected)  # or nothing is tested
    head = make_head(quantised_target)
    for shape in (Chain(4), Tree.dynamic(3, 4, 9)):
        found = generate(quantised_target, PROMPTS, drafter=HeadDrafter(head), shape=shape, **settings)
        assert [row.tokens for row in found.rows] == expected


def test_states_of_other_weights_are_trained_on(quantised_target: Target, plain: Target, tmp_path: Path) -> None:
    """A store is that of the target as it is loaded; it says in what its weights were kept."""
    for target, other in ((quantised_target, plain), (plain, quantised_target)):
        out = tmp_path / str(target.quantization)
        capture(ROWS, target, (1, 2), out, CaptureConfig(rows_per_shard=4))
        store = FeatureStore(out, ROWS)
        assert store.manifest.get("quantization") == target.quantization
        found = check_store(store, target)
        assert found.tokens == 80 and found.kl is not None and found.kl < 1e-4 and found.top1 >= 0.98  # a near tie may flip
        told = f"quantization = {target.quantization!r}, needed {other.quantization!r}; "
        with pytest.raises(ValueError, match=f"{told}capture into a new"):
            check_store(store, other)
        with pytest.raises(ValueError, match=f"is a store with {told}.*capture into a new folder"):
            capture(ROWS, other, (1, 2), out, CaptureConfig(rows_per_shard=4))


def test_target_is_another_one_at_each_loading(quantised_target: Target, plain: Target, folder: Path, tmp_path: Path) -> None:
    """Equal after passes, loaded again, and saved with its weights as they are; embedding and output rows are the plain target's."""
    kind = quantised_target.quantization
    again = load_target(folder, quantization=kind)
    last_logits(again, [7, 8, 9])
    assert again.fingerprints == quantised_target.fingerprints and again.fingerprints["quantization"] == kind
    differing = {key for key, value in again.fingerprints.items() if plain.fingerprints.get(key) != value}
    assert differing == {"layers_sha256", "quantization"} and "quantization" not in plain.fingerprints
    assert torch.equal(again.embedding_VW, plain.embedding_VW) and torch.equal(again.output_VW, plain.output_VW)
    kept = load_target(save(again, tmp_path / "kept"))
    assert kept.fingerprints == again.fingerprints
    assert torch.equal(last_logits(kept, [7, 8, 9]), last_logits(again, [7, 8, 9]))
    told = f"kept is kept in {kind}, and quantization .* was asked for; leave it out"
    with pytest.warns(UserWarning, match="already has a `quantization_config`"), pytest.raises(ValueError, match=told):
        load_target(tmp_path / "kept", quantization=next(k for k in KINDS if k != kind))


def test_head_starts_at_random_on_quantised_weights(quantised_target: Target, plain: Target) -> None:
    """It begins with what the last layer's weights stand for: near the plain ones, not equal to them."""
    config = HeadConfig(layer_ids=(1, 2), draft_vocab_size=40, fc_norm=True)
    ours, theirs = (new_head(config, target, ROWS, seed=0) for target in (quantised_target, plain))
    assert start_notes(config, quantised_target) == []
    most = 0.02 if quantised_target.quantization == "8bit" else 0.2
    for name, weight in theirs.midlayer.named_parameters():
        found = dict(ours.midlayer.named_parameters())[name]
        assert found.dtype == torch.float32 and (found - weight).norm() < most * weight.norm(), name
    assert not torch.equal(ours.midlayer.mlp.down_proj.weight, theirs.midlayer.mlp.down_proj.weight)


def test_head_serves_other_weights_than_it_learnt_from(
    quantised_target: Target, plain: Target, make_head: Callable[..., Any], tmp_path: Path
) -> None:
    """Refused both ways, with what to do; to go on from it with the other weights is allowed."""
    heads = {}
    for target in (quantised_target, plain):
        save_head(make_head(target), tmp_path / str(target.quantization), run_yaml="", made_with=made_with(target, {}))
        head = heads[target.quantization] = load_head(tmp_path / str(target.quantization))
        assert head.made_with.get("quantization") == target.quantization
        check_head(head, target.fingerprints, target.name, target.tokenizer)
    kind = quantised_target.quantization
    trained = "this head was trained on the states of a target"
    load = rf"load it so \(--quantization {kind}\), or go on from the head: .*target.quantization=null"
    with pytest.raises(ValueError, match=f"{trained} with its weights in {kind}, and .* is loaded in full precision; {load}"):
        generate(plain, PROMPTS, drafter=HeadDrafter(heads[kind]), shape=Chain(2), max_new_tokens=2)
    load = f"load it without quantization, or go on from the head: .*target.quantization={kind}"
    with pytest.raises(ValueError, match=f"{trained} in full precision, and .* is loaded with its weights in {kind}; {load}"):
        generate(quantised_target, PROMPTS, drafter=HeadDrafter(heads[None]), shape=Chain(2), max_new_tokens=2)
    start = {"start": str(tmp_path / "None")}
    recipe = Recipe.model_validate({"name": "x", "target": {"name": plain.name}, "head": start, "data": {"rows": "rows"}})
    assert open_start(recipe, quantised_target, print)[1] is not None


def test_weights_that_cannot_be_quantised_so_are_loaded_otherwise(
    folder: Path, plain: Target, quantised_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = quantised_target.quantization
    with pytest.raises(ValueError, match="quantization '3bit' is unknown; choose one of 8bit, 4bit"):
        load_target(folder, quantization="3bit")
    with pytest.raises(ValueError, match=f"adapter somewhere cannot be merged into weights in {kind}; merge it into the plain target"):
        load_target(folder, quantization=kind, adapter="somewhere")
    with pytest.raises(ValueError, match=f"an adapter that is trained on weights in {kind} cannot be merged .*training.lora=null"):
        check_lora(LoraConfig(), quantised_target)
    with pytest.raises(ValueError, match=f"compile=True is for plain weights, those of .* are in {kind}; use compile='auto'"):
        choose(quantised_target, True, passes=10**6)
    assert choose(quantised_target, "auto", passes=10**6) == "eager"
    assert choose(plain, "auto", passes=10**6) == "compiled"
    gguf = folder / "model.gguf"
    gguf.touch()
    with pytest.raises(ValueError, match=f"gguf is quantised in its own way, .*leave quantization {kind} out"):
        load_target(gguf, quantization=kind)
    gguf.unlink()
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs bitsandbytes, which is not installed: pip install 'spectrain\[quantized\]'"):
        load_target(folder, quantization=kind)
