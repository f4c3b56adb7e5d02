"""A store that does not hold what it says is refused with what was found; what the check measures is returned."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.config import CaptureConfig
from spectrain.data.rows import Row
from spectrain.target.capture import capture
from spectrain.target.check import STORED, _flips, _runs, check_store, output_logits
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target
from spectrain.target.shards import open_shard, write_shard

ROWS = [Row(f"r{i}", "d", np.random.default_rng(i).integers(6, 100, 30), [0] * 10 + [1] * 20) for i in range(8)]
CONFIG = CaptureConfig(rows_per_shard=4)


def captured(target: Target, out: Path, **settings: Any) -> FeatureStore:
    capture(ROWS, target, (1, 2), out, CONFIG.model_copy(update=settings))
    return FeatureStore(out, ROWS)


@pytest.mark.parametrize(("last", "kl"), [("bf16", 1e-4), ("int8", 1e-3)])
def test_store_is_further_from_the_target_than_it_may(last: str, kl: float, target: Target, tmp_path: Path) -> None:
    found = check_store(captured(target, tmp_path / "s", last=last), target, sample=4)
    assert found.rows == 4 and found.tokens == 80 and 0 < found.kl < kl and found.top1 >= 0.98
    assert len(found.errors) == 2 and all(0 < e < 0.012 for e in found.errors)
    assert "4 rows, 80 tokens" in found.text() and "same best token" in found.text()


def test_answers_of_other_tokens_are_trained_on(target: Target, tmp_path: Path) -> None:
    """Best tokens and log-sum-exps stand beside the last states that they were made from, or the store is refused with what was found."""
    found = check_store(captured(target, tmp_path / "s"), target)
    assert found.said is not None and found.said >= 0.98 and found.lse is not None and found.lse < 0.01
    for name in ("best", "lse"):
        captured(target, tmp_path / name)
        rewrite(tmp_path / name, lambda tensors, name=name: {**tensors, name: tensors[name].roll(1)})
        with pytest.raises(ValueError, match="what is kept as the target's answers is not what its last states say .*delete it"):
            check_store(FeatureStore(tmp_path / name, ROWS), target)


def test_logits_are_not_those_of_the_last_state(make_target, tmp_path: Path) -> None:
    """Before rounding, the output layer makes the target's logits of its last states to 1e-4; not so where the logits also hang on the
    tokens, say."""
    target = make_target(seed=4)
    found = check_store(captured(target, tmp_path / "s"), target)
    assert found.exact is not None and found.exact <= 1e-4
    read: list[int] = []
    target.model.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(int(args[0].sum())))
    target.model.get_output_embeddings().register_forward_hook(lambda module, args, out: out + 0.01 * (read[-1] > 0) * args[0][..., :1])
    capture(ROWS, target, (1, 2), tmp_path / "t", CONFIG)
    with pytest.raises(ValueError, match=r"the output layer of tiny makes logits of its last states that differ by .* from its own"):
        check_store(FeatureStore(tmp_path / "t", ROWS), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_store_of_a_target_in_16_bits_is_held_to_wider_limits(dtype: torch.dtype, make_target, tmp_path: Path) -> None:
    """Its own logits move with what else is in a pass; its answers do not: they were made of the very states that are kept."""
    target = make_target(seed=4)
    target.model.to(dtype)
    found = check_store(captured(target, tmp_path / "s"), target)
    assert found.said is not None and found.said >= 0.98 and found.lse is not None and found.lse < 0.02 and found.exact == 0
    rewrite(tmp_path / "s", lambda tensors: {**tensors, "best": tensors["best"].where(torch.rand(len(tensors["best"])) < 0.85, 7)})
    with pytest.raises(ValueError, match="what is kept as the target's answers"):
        check_store(FeatureStore(tmp_path / "s", ROWS), target)


def test_last_states_in_8_bits_are_kept_without_a_word(target: Target, tmp_path: Path) -> None:
    """The tau that a head could reach with them is told, between what equal best tokens and what chance would give."""
    found = check_store(captured(target, tmp_path / "s", last="int8"), target)
    assert found.tau is not None and found.top1 is not None and 4 < found.tau <= 5
    assert f"tau {found.tau:.3f} of 5 by a chain of 4" in found.text()
    assert check_store(captured(target, tmp_path / "t"), target).tau is None


def test_a_run_of_drafts_ends_behind_its_first_fault() -> None:
    assert _runs([True, True, False, True, True, True, True]) == (2, 1, 0, 4) and _runs([True, True]) == ()


@pytest.mark.parametrize(("tokens", "most"), [(80, 2), (392, 6), (512, 7), (1494, 15), (100_000, 566)])
def test_share_that_a_sample_does_not_show_is_refused(tokens: int, most: int) -> None:
    """At least 99.5 % of a bf16 store's best tokens are the target's: 3 of 392 pass, and so does what chance adds to 0.5 %."""
    assert int(_flips(STORED["bf16"].top1, tokens)) == most and STORED["bf16"].top1 == 0.995 and STORED["bf16"].kl == 1e-4


def test_store_without_last_states_cannot_be_checked(target: Target, tmp_path: Path) -> None:
    capture(ROWS, target, (1, 2), tmp_path / "s", CONFIG, last_state="none")
    found = check_store(FeatureStore(tmp_path / "s", ROWS), target)
    assert found.kl is None and found.top1 is None and max(found.errors) < 0.012 and "KL" not in found.text()


def test_rows_that_happen_to_be_looked_at_have_no_states(target: Target, tmp_path: Path) -> None:
    """Of many rows a few are looked at; where these cannot be read, others can."""
    rows = [ROWS[i] if i in (1, 2) else Row(f"n{i}", "d", [7, 8], [0, 1]) for i in range(20)]
    capture(rows, target, (1, 2), tmp_path / "s", CONFIG)
    assert check_store(FeatureStore(tmp_path / "s", rows), target, sample=1).rows == 1


def rewrite(out: Path, change: Any) -> None:
    """Every shard anew, with other tensors under a right checksum."""
    for path in out.glob("rows-*"):
        shard = open_shard(path)
        write_shard(path, change({name: shard.whole(name) for name in shard.kinds}))


def test_wrong_states_are_trained_on(target: Target, make_target, tmp_path: Path) -> None:
    """FC1: last states from before the final norm; of other rows; states of another layer; of other weights under the same embedding."""
    out = tmp_path / "s"
    target = make_target(seed=4)  # not the session's: its norm is changed
    target.model.model.norm.weight.copy_(torch.linspace(0.5, 3, 32))
    store = captured(target, out)
    sample = [capture_states(target, row) for row in ROWS]
    before = torch.cat([s[10:] for s in sample[:4]]), torch.cat([s[10:] for s in sample[4:]])

    def without_norm(tensors: dict[str, Any]) -> dict[str, Any]:
        first = bytes(tensors["digests"][0].numpy()) == ROWS[0].digest
        return {**tensors, "last.codes": before[0 if first else 1].bfloat16()}

    rewrite(out, without_norm)
    with pytest.raises(ValueError, match="its last state gives other logits .*it is the state before the final norm; delete it"):
        check_store(FeatureStore(out, ROWS), target)
    rewrite(out, lambda tensors: {**tensors, "last.codes": tensors["last.codes"].flip(0)})
    with pytest.raises(ValueError, match="its last state gives other logits than the target .KL"):
        check_store(FeatureStore(out, ROWS), target)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "layer_ids": [1, 3]}))
    with pytest.raises(ValueError, match=r"what is kept as hs\[3\] differs by .* from the target's, it is hs\[2\]"):
        check_store(FeatureStore(out, ROWS), target)
    (out / "manifest.json").write_text(json.dumps(manifest))
    target.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # trained on, say, with its embedding frozen
    with pytest.raises(ValueError, match=r"what is kept as hs\[1\] differs by"):
        check_store(store, target)


def test_last_state_that_a_head_reads_is_trained_on_before_its_norm(make_target, tmp_path: Path) -> None:
    """FC1 for heads that read the last state: it is checked as hidden states are, and named; so is one kept as a hidden state."""
    target, out = make_target(seed=4), tmp_path / "s"
    target.model.model.norm.weight.copy_(torch.linspace(0.5, 3, 32))
    capture(ROWS, target, (-1,), out, CONFIG)
    assert 0 < check_store(FeatureStore(out, ROWS), target).errors[0] < 0.012
    manifest = (out / "manifest.json").read_text()
    for claimed, found, kept in ((-1, 3, r"the last state .*, it is hs\[3\]"), (3, -1, r"hs\[3\] .*, it is the last state")):
        (out / "manifest.json").write_text(json.dumps({**json.loads(manifest), "layer_ids": [claimed]}))
        other = tmp_path / f"other{found}"
        capture(ROWS, target, (found,), other, CONFIG)
        for path in other.glob("rows-*"):
            path.replace(out / path.name)
        with pytest.raises(ValueError, match=f"what is kept as {kept}"):
            check_store(FeatureStore(out, ROWS), target)


def capture_states(target: Target, row: Row) -> torch.Tensor:
    from spectrain.target.features import capture_row

    return capture_row(row, target, (target.num_layers,))["states"]


def test_store_of_another_target_is_taken(target: Target, make_target, tmp_path: Path) -> None:
    store = captured(target, tmp_path / "s")
    with pytest.raises(ValueError, match="captured from another target .tiny, now tiny.: embedding_sha256 = "):
        check_store(store, make_target(seed=9))
    store.manifest["target_revision"] = "abc"
    check_store(store, target)  # a folder has no revision
    with pytest.raises(ValueError, match="target_revision = 'abc', needed 'def'"):
        check_store(store, replace(target, revision="def"))


def test_store_with_nothing_to_read_passes(target: Target, tmp_path: Path) -> None:
    rows = [replace(row, mask_L=[0] * 30) for row in ROWS]
    capture(rows, target, (1,), tmp_path / "s", CONFIG)
    with pytest.raises(ValueError, match="no row with a state that can be read"):
        check_store(FeatureStore(tmp_path / "s", rows), target)


def test_logits_of_stored_states_leave_out_what_follows_the_output_layer(make_tokenizer) -> None:
    """A cap on the logits (Gemma-2)."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from spectrain.kernels import tree_attention
    from spectrain.target.features import capture_row

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, query_pre_attn_scalar=8, initializer_range=0.25, final_logit_softcapping=2.0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Gemma2ForCausalLM._from_config(config, attn_implementation=tree_attention.register()).eval().requires_grad_(False)
    target = Target(model=model, tokenizer=make_tokenizer(100), name="capped")
    part = capture_row(ROWS[0], target, (1,))
    logits_MV = output_logits(target, part["last"])
    assert float(logits_MV.abs().max()) < 2.0 < float((part["last"] @ target.output_VW.T).abs().max())
    torch.testing.assert_close(logits_MV.logsumexp(-1), part["lse"], atol=1e-5, rtol=1e-5)
    assert logits_MV.argmax(-1).tolist() == part["best"].tolist()
