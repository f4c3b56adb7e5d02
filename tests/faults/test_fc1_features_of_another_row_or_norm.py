"""FC1: stored features are not what the code believes: another norm, another row, a part of a row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from spectrain.config import CaptureConfig
from spectrain.data.rows import Row
from spectrain.kernels import tree_attention
from spectrain.target.capture import capture
from spectrain.target.check import output_logits
from spectrain.target.features import FeatureStore, OnlineFeatures, capture_row
from spectrain.target.model import Target
from spectrain.target.states import readable

LENGTHS = (42, 46, 43, 45, 37, 48, 42, 45)
LAYERS = (1, 2)
COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, {}),
    "window": (tf.MistralConfig, {"head_dim": 8, "sliding_window": 16}),
    "window in every second layer, soft-caps": (
        tf.Gemma2Config,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "experts": (tf.Qwen3MoeConfig, {"head_dim": 8, **EXPERTS}),
    "experts, sinks": (tf.GptOssConfig, {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.fixture(scope="module")
def family(make_tokenizer) -> Callable[[str], Target]:
    def make(name: str) -> Target:
        kind, settings = FAMILIES[name]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = tf.AutoModelForCausalLM.from_config(kind(**{**COMMON, **settings}), attn_implementation=tree_attention.register())
        return Target(model=model.eval().requires_grad_(False), tokenizer=make_tokenizer(96), name=name)

    return make


def rows_of(lengths: tuple[int, ...]) -> list[Row]:
    rng = np.random.default_rng(0)
    return [Row(f"r{i}", "d", rng.integers(2, 96, L), [0] * 5 + [1] * (L - 5)) for i, L in enumerate(lengths)]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_captured_together_are_mixed_up(name: str, family) -> None:
    """Prompts of 42,46,43,45,37,48,42,45 tokens in one pass: each within 1e-4 of its own capture, in its own length."""
    target, rows = family(name), rows_of(LENGTHS)
    features = OnlineFeatures(target, rows, LAYERS, CaptureConfig(batch_tokens=48 * 8))
    passes: list[int] = []
    hook = target.model.register_forward_pre_hook(lambda module, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True)
    try:
        batch = features.batch(range(8))
    finally:
        hook.remove()
    assert passes == [8]
    done = 0
    for b, row in enumerate(rows):
        alone, K, M = capture_row(row, target, LAYERS), readable(row), row.supervised
        assert alone["states"].shape[0] == len(row) == LENGTHS[b] and K == len(row) - 2
        torch.testing.assert_close(batch.states_BLF[b, :K], alone["states"][:K], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(batch.last_PW[done : done + M], alone["last"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(batch.lse_P[done : done + M], alone["lse"], atol=1e-4, rtol=1e-4)
        done += M


@pytest.mark.parametrize("name", FAMILIES)
def test_last_state_is_not_what_the_output_layer_reads(name: str, family, eager) -> None:
    """The output layer on the last states gives the target's own logits at every stored position, to 1e-4 before rounding."""
    target, rows = family(name), rows_of(LENGTHS)
    batch = OnlineFeatures(target, rows, LAYERS).batch(range(8))
    ours_PV = output_logits(target, batch.last_PW)
    with torch.no_grad():
        theirs = [eager(target)(input_ids=torch.from_numpy(row.ids_L)[None].long(), use_cache=False).logits[0, 5:] for row in rows]
    torch.testing.assert_close(ours_PV, torch.cat(theirs), atol=1e-4, rtol=1e-4)
    assert batch.best_P.tolist() == torch.cat(theirs).argmax(-1).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_shared_beginning_cuts_the_features_of_the_second_row(name: str, family, tmp_path: Path) -> None:
    """Two prompts that share 64 tokens: features in full length for both, stored once."""
    target, rng = family(name), np.random.default_rng(1)
    start = rng.integers(2, 96, 64)
    rows = [Row(f"c#{j}", "d", np.concatenate([start, rng.integers(2, 96, 9 + j)]), [0] * 66 + [1] * (7 + j), group="c") for j in range(2)]
    capture(rows, target, LAYERS, tmp_path / "s", CaptureConfig(states="bf16"))
    store = FeatureStore(tmp_path / "s", rows)
    stored = store._opened(0).shard.header["states.codes"]["shape"][0]
    assert stored == 64 + sum(readable(row) - 64 for row in rows)
    for i, row in enumerate(rows):
        sample, alone, K = store[i], capture_row(row, target, LAYERS), len(row) - 2
        assert sample.states.codes.shape == (len(row), 64) and len(sample.last.codes) == len(sample.best_M) == row.supervised
        torch.testing.assert_close(sample.states.float()[:K], alone["states"][:K], atol=1e-3, rtol=2**-7)
        torch.testing.assert_close(sample.lse_M, alone["lse"], atol=1e-4, rtol=1e-4)
