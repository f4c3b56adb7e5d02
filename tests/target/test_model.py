"""Hidden states of the target, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from spectrain.kernels import tree_attention
from spectrain.target.model import Target, load_target

IDS = torch.tensor([[7, 12, 9, 55, 31, 8]])


def whole(target: Target, layer_ids: tuple[int, ...], **kwargs):
    L = IDS.shape[1]
    mask = torch.ones(1, 1, L, L, dtype=torch.bool).tril()
    return target.forward(IDS, positions_BN=torch.arange(L)[None], mask=mask, cache=None, layer_ids=layer_ids, **kwargs)


def test_state_numbers_are_off_by_one(target: Target, eager) -> None:
    theirs = eager(target)(input_ids=IDS, output_hidden_states=True)
    out = whole(target, (0, 1, 2))
    assert out.states_BNF is not None
    for i, state in enumerate(out.states_BNF.chunk(3, dim=-1)):
        torch.testing.assert_close(state, theirs.hidden_states[i], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.logits_BKV, theirs.logits, atol=1e-4, rtol=1e-4)


def test_last_layers_state_is_normed_or_the_last_state_is_not(target: Target, eager) -> None:
    theirs = eager(target)(input_ids=IDS, output_hidden_states=True)
    out = whole(target, (3,))
    torch.testing.assert_close(target.model.model.norm(out.states_BNF), theirs.hidden_states[3], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(out.states_BNF, theirs.hidden_states[3], atol=1e-2)
    torch.testing.assert_close(out.last_BKW, theirs.hidden_states[3], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.last_BKW @ target.output_VW.T, out.logits_BKV, atol=1e-4, rtol=1e-4)


def test_last_state_of_a_head_is_not_what_the_output_layer_reads(target: Target) -> None:
    """At every position and beside other layers, also where logits are asked of the last one alone."""
    every = whole(target, ())
    for kept, length in ((0, 6), (1, 1), (torch.tensor([1, 4]), 2)):
        for layer_ids in ((-1,), (-1, 1), (2, -1, 0)):
            out = whole(target, layer_ids, logits_to_keep=kept)
            own = dict(zip(layer_ids, out.states_BNF.chunk(len(layer_ids), dim=-1), strict=True))
            assert torch.equal(own[-1], every.last_BKW) and out.logits_BKV.shape[1] == length
            assert all(torch.equal(x, whole(target, (i,)).states_BNF) for i, x in own.items())
    torch.testing.assert_close(every.logits_BKV, whole(target, (-1,)).states_BNF @ target.output_VW.T, atol=1e-4, rtol=1e-4)


def test_logits_of_chosen_positions_are_shifted(target: Target) -> None:
    every = whole(target, ())
    some = whole(target, (1,), logits_to_keep=torch.tensor([1, 4]))
    torch.testing.assert_close(some.logits_BKV, every.logits_BKV[:, [1, 4]])
    assert some.states_BNF.shape[1] == IDS.shape[1]
    torch.testing.assert_close(whole(target, (), logits_to_keep=1).logits_BKV, every.logits_BKV[:, -1:])


@pytest.mark.parametrize("layer_ids", [(4,), (-2,), (1, 9)])
def test_states_that_do_not_exist_are_given(target: Target, layer_ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tiny has hs\[0\] to hs\[3\]"):
        whole(target, layer_ids)
    assert not target.model.get_input_embeddings()._forward_hooks and not target.layers[0]._forward_hooks


def test_hooks_stay_on_the_model_after_an_error(target: Target) -> None:
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[1000]]), positions_BN=torch.tensor([[0]]), mask=None, cache=None, layer_ids=(0, 1))
    modules = [target.model.get_input_embeddings(), *target.layers, target.model.get_output_embeddings()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


SLIDING = {
    "mistral": (MistralConfig, {"sliding_window": 8}, 8),
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 8),
    "qwen2-full": (Qwen2Config, {"use_sliding_window": False, "sliding_window": 8}, None),
}


@pytest.mark.parametrize("kind", SLIDING)
def test_window_is_lost_by_loading(make_tokenizer, tmp_path: Path, kind: str) -> None:
    config_class, settings, window = SLIDING[kind]
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = config_class(**sizes, **settings, num_key_value_heads=2, bos_token_id=None, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    make_tokenizer(20).save_pretrained(tmp_path / "m")
    target = load_target(tmp_path / "m", device="cpu")
    assert target.window == window and target.new_cache(1, 8).max_length == 8
    assert target.model.config._attn_implementation == tree_attention.NAME


def test_window_that_is_switched_off_is_refused(target: Target, make_tokenizer) -> None:
    config = MistralConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, sliding_window=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.register())
    assert Target(model=model, tokenizer=make_tokenizer(20), name="full").new_cache(1, 8).max_length == 8


@pytest.mark.parametrize("name", ["./nowhere/model", "/nowhere/model", "~/nowhere", "nowhere.gguf", "a/b/c"])
def test_missing_path_is_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match="no model at .*folder"):
        load_target(name)


def test_loaded_target_differs_from_the_saved_one(target: Target, tmp_path: Path, monkeypatch) -> None:
    target.model.save_pretrained(tmp_path / "m")
    target.tokenizer.save_pretrained(tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (tmp_path / "m", "~/m"):
        loaded = load_target(name, device="cpu")
        torch.testing.assert_close(whole(loaded, ()).logits_BKV, whole(target, ()).logits_BKV)
        assert loaded.fingerprints == target.fingerprints
        assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
        assert loaded.eos_ids == (1,)


def test_unknown_dtype_is_a_traceback(target: Target, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path / "m")
    target.tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="dtype"):
        load_target(tmp_path / "m", dtype="float23", device="cpu")


def test_tokenizer_with_more_ids_than_rows_is_taken(target: Target, make_tokenizer, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path / "m")
    make_tokenizer(120).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="120 ids.*100 rows"):
        load_target(tmp_path / "m", device="cpu")


def test_several_end_ids_are_cut_to_one(target: Target) -> None:
    tokenizer = target.tokenizer
    model = type(target.model)(LlamaConfig.from_dict(target.model.config.to_dict()))
    model.generation_config.eos_token_id = [9, 4]
    assert Target(model=model, tokenizer=tokenizer, name="x").eos_ids == (1, 4, 9)
    model.generation_config.eos_token_id = None
    assert Target(model=model, tokenizer=tokenizer, name="x").eos_ids == (1,)


def test_another_tokenizer_has_the_same_fingerprint(target: Target, make_tokenizer, make_target) -> None:
    other = Target(model=target.model, tokenizer=make_tokenizer(99), name="x").fingerprints
    assert other["tokenizer_sha256"] != target.fingerprints["tokenizer_sha256"]
    assert other["embedding_sha256"] == target.fingerprints["embedding_sha256"]
    assert make_target(seed=1).fingerprints["embedding_sha256"] != target.fingerprints["embedding_sha256"]
    tuned = make_target()
    tuned.model.model.layers[-1].self_attn.q_proj.weight.data[1, 2] += 1
    differing = {key for key, value in tuned.fingerprints.items() if value != target.fingerprints[key]}
    assert differing == {"layers_sha256"}, "a target tuned with frozen embeddings"
    template = Target(model=target.model, tokenizer=make_tokenizer(100, template="{{ messages }}"), name="x").fingerprints
    assert template["template_sha256"] != target.fingerprints["template_sha256"]


def test_chat_gets_two_starts_or_plain_text_gets_a_template(target: Target) -> None:
    chat = [{"role": "user", "content": "w10 w11"}]
    ids = target.encode(chat)
    assert ids == target.tokenizer(target.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
    assert ids[-2:] == [2, 5] and target.encode("w10 w11") == [10, 11] and target.encode([10, 11]) == [10, 11]


def test_fingerprints_are_not_plain_text(target: Target) -> None:
    assert json.dumps(target.fingerprints) and all(len(v) == 64 for v in target.fingerprints.values())
