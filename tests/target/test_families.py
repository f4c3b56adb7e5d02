"""Targets of the usual families, as transformers builds them: windows, soft-caps, sinks, experts; and those that are refused."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf

from spectrain.data.rows import Row
from spectrain.decoding.generate import generate
from spectrain.decoding.shapes import Chain
from spectrain.decoding.tree import ancestors
from spectrain.drafters.scripted import Scripted
from spectrain.kernels import tree_attention
from spectrain.target.features import capture_row
from spectrain.target.model import Target, load_target

VOCAB, WINDOW, NEW = 96, 8, 24
PROMPTS = [[7, 12, 9], [8, 77, 20, 20, 64, 8, 77], [50, 51, 52, 7, 50, 51, 52, 7, 30, 31, 32, 33]]
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (tf.Qwen2Config, {"use_sliding_window": False, "sliding_window": WINDOW}),
    "qwen2 with a window": (tf.Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": (tf.Qwen3Config, {"head_dim": 16}),
    "mistral": (tf.MistralConfig, {"head_dim": 8, "sliding_window": WINDOW}),
    "gemma2": (tf.Gemma2Config, {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (tf.Gemma3TextConfig, {**GEMMA, "num_hidden_layers": 3, "layer_types": [*["sliding_attention"] * 2, "full_attention"]}),
    "phi3": (tf.Phi3Config, {"sliding_window": WINDOW}),
    "gpt-oss": (tf.GptOssConfig, {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (tf.Qwen3MoeConfig, {"head_dim": 8, **EXPERTS}),
    "mixtral": (tf.MixtralConfig, {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # does not tell the attention function its window
    "qwen2-moe": (
        tf.Qwen2MoeConfig,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "shared_expert_intermediate_size": 24, **EXPERTS},
    ),
}
WINDOWED = ["qwen2 with a window", "mistral", "gemma2", "gemma3", "phi3", "gpt-oss", "mixtral", "qwen2-moe"]
MIXED = ["qwen2 with a window", "gemma2", "gemma3", "gpt-oss", "qwen2-moe"]


def build(config_class: type[Any], settings: dict[str, Any], seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = config_class(**{**COMMON, **settings})
        model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.register())
    model = model.eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")) and "Gemma" in type(model).__name__:
            weight.fill_(5.0)  # or the scaled embedding outshouts the layers, and every answer is one token
    return model


@pytest.fixture(scope="module")
def family(make_tokenizer) -> Callable[[str], Target]:
    """family(name): the random target of that family."""
    return cache(lambda name: Target(model=build(*FAMILIES[name]), tokenizer=make_tokenizer(VOCAB), name=name))


@pytest.fixture(scope="module")
def answers(family, fresh_greedy) -> Callable[[str], list[list[int]]]:
    """answers(name): greedy answers to PROMPTS of transformers' own model, without cache or batch."""
    return cache(lambda name: [fresh_greedy(family(name), prompt, NEW) for prompt in PROMPTS])


def tokens(result: Any) -> list[list[int]]:
    return [row.tokens for row in result.rows]


def off(token: int) -> int:
    return (token + 1) % VOCAB


def following(texts: list[list[int]], ids: list[int], n: int) -> list[int]:
    """The next n tokens of the text that `ids` begins; junk behind its end."""
    whole = next(text for text in texts if text[: len(ids)] == ids)
    return (whole[len(ids) :] + [2] * n)[:n]


def texts_of(answers: list[list[int]]) -> list[list[int]]:
    return [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]


def accepted(result: Any) -> float:
    """Drafts accepted a round; the last round of a row does not count."""
    rounds = [r.accepted for row in result.rows for r in row.rounds[:-1]]
    return sum(rounds) / len(rounds)


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_decoding_is_not_the_models_own(name: str, family, answers) -> None:
    """PS2 too: prompts of 3, 7 and 12 tokens, alone and together."""
    assert all(len(set(answer)) > 3 for answer in answers(name))  # or nothing is tested
    settings = {"eos": None, "max_new_tokens": NEW}
    assert tokens(generate(family(name), PROMPTS, **settings)) == answers(name)
    assert [tokens(generate(family(name), [prompt], **settings))[0] for prompt in PROMPTS] == answers(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_last_state_of_a_head_is_not_what_the_output_layer_reads(name: str, family) -> None:
    ids_BN = torch.arange(22).reshape(2, 11) + 7
    out = family(name).forward(ids_BN, positions_BN=torch.arange(11).expand(2, -1), mask=None, cache=None, layer_ids=(1, -1))
    assert torch.equal(out.states_BNF[..., 32:], out.last_BKW) and not torch.equal(out.states_BNF[..., :32], out.last_BKW)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [slice(0, 3), slice(2, 3)], ids=["together", "alone"])
def test_chain_that_is_partly_right_changes_the_answer(name: str, rows: slice, family, answers) -> None:
    texts = texts_of(answers(name))

    def draft(ids: list[int]) -> list[int]:
        right = following(texts, ids, 5)
        wrong_from = 1 + len(ids) % 4
        return [*right[:wrong_from], *(off(t) for t in right[wrong_from:])]

    result = generate(family(name), PROMPTS[rows], drafter=Scripted(draft), shape=Chain(5), eos=None, max_new_tokens=NEW)
    assert tokens(result) == answers(name)[rows]
    assert 1.5 < accepted(result) < 5


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [slice(0, 3), slice(2, 3)], ids=["together", "alone"])
def test_tree_that_is_partly_right_changes_the_answer(name: str, rows: slice, family, answers, scripted) -> None:
    """Three wrong siblings before each right node: a window counted in slots would end within the tree."""
    texts = texts_of(answers(name))

    def draft(ids: list[int]) -> list[tuple[int, int]]:
        nodes: list[tuple[int, int]] = []
        parent = 0
        for depth, right in enumerate(following(texts, ids, 4)):
            token = right if depth < 1 + len(ids) % 4 else off(off(off(off(right))))
            nodes += [(off(right), parent), (off(off(right)), parent), (off(off(off(right))), parent), (token, parent)]
            parent = len(nodes)
        return nodes

    result = generate(family(name), PROMPTS[rows], drafter=scripted(draft), shape=Chain(16), eos=None, max_new_tokens=NEW)
    assert tokens(result) == answers(name)[rows]
    assert 1.5 < accepted(result) < 4


@pytest.mark.parametrize("name", WINDOWED)
def test_roll_back_corrupts_a_window_layer(name: str, family, fresh_greedy) -> None:
    """CA3: window 8, a prompt of 12 tokens, bursts of 5 drafts of which 3 are rejected."""
    assert family(name).window == WINDOW
    expected = fresh_greedy(family(name), PROMPTS[2], 64)

    def draft(ids: list[int]) -> list[int]:
        right = following([PROMPTS[2] + expected], ids, 5)
        return [*right[:2], *(off(t) for t in right[2:])]

    result = generate(family(name), [PROMPTS[2]], drafter=Scripted(draft), shape=Chain(5), eos=None, max_new_tokens=64)
    assert tokens(result) == [expected]
    assert {r.accepted for r in result.rows[0].rounds[:-1]} == {2}


@pytest.mark.parametrize("name", FAMILIES)
def test_states_are_not_those_of_the_model(name: str, family, eager) -> None:
    """Through hooks: in one pass without a cache, behind a cached prompt in a tree, and as they are stored."""
    target = family(name)
    ids = torch.tensor([PROMPTS[2] + PROMPTS[1]])
    L, layer_ids = ids.shape[1], tuple(range(target.num_layers))
    theirs = eager(target)(input_ids=ids, output_hidden_states=True, use_cache=False)
    expected = torch.cat(theirs.hidden_states[:-1], dim=-1)
    close = {"atol": 1e-4, "rtol": 1e-4}
    whole = target.forward(ids, positions_BN=torch.arange(L)[None], mask=None, cache=None, layer_ids=layer_ids)
    torch.testing.assert_close(whole.states_BNF, expected, **close)
    torch.testing.assert_close(whole.last_BKW, theirs.hidden_states[-1], **close)
    torch.testing.assert_close(whole.logits_BKV, theirs.logits, **close)

    stored = capture_row(Row(id="r", domain="d", ids_L=tuple(ids[0].tolist()), mask_L=(0,) * 3 + (1,) * (L - 3)), target, layer_ids)
    torch.testing.assert_close(stored["states"].float(), expected[0], atol=1e-3, rtol=2**-8)
    assert stored["best"].tolist() == theirs.logits[0, 3:].argmax(-1).tolist()

    slabs = target.new_cache(1, 64)
    positions = slabs.stage(12)
    out = target.forward(ids[:, :12], positions_BN=positions, mask=target.prompt_masks(slabs, positions), cache=slabs, layer_ids=layer_ids)
    torch.testing.assert_close(out.states_BNF, expected[:, :12], **close)
    slabs.commit(torch.tensor([12]))
    # Nodes 0, 2, 4, ... are the text; each has a brother that is not.
    parents = torch.tensor([[-1, *(2 * (n // 2) for n in range(2 * (L - 13)))]])
    text = [0, *range(2, 2 * (L - 12), 2)]
    nodes = torch.full((1, parents.shape[1]), 5)
    nodes[0, text] = ids[0, 12:]
    line = ancestors(parents)
    slabs.stage(parents.shape[1])
    out = target.forward(nodes, positions_BN=11 + line.sum(-1), mask=target.masks(slabs, line), cache=slabs, layer_ids=layer_ids)
    torch.testing.assert_close(out.states_BNF[:, text], expected[:, 12:], **close)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("prompts", [PROMPTS[2:], [PROMPTS[2], PROMPTS[2][::-1]]], ids=["one row", "two rows"])
@pytest.mark.parametrize("pieces", [(7, 5), (9, 3), (6, 6)])
def test_prompt_in_pieces_reads_otherwise(name: str, prompts: list[list[int]], pieces: tuple[int, ...], family, eager) -> None:
    target = family(name)
    slabs, ids, logits = target.new_cache(len(prompts), 20), torch.tensor(prompts), []
    for piece in ids.split(pieces, dim=1):
        positions = slabs.stage(piece.shape[1])
        mask = target.prompt_masks(slabs, positions)
        logits.append(target.forward(piece, positions_BN=positions, mask=mask, cache=slabs).logits_BKV)
        slabs.commit(torch.full((len(prompts),), piece.shape[1]))
    expected = eager(target)(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_another_decoding(name: str, family) -> None:
    """Drafts change nothing but near-ties, which a pass of another width may round the other way; a router may round a token to another
    expert, and what that moves is measured against float32."""
    exact = family(name)
    target = Target(model=copy.deepcopy(exact.model).to(torch.bfloat16), tokenizer=exact.tokenizer, name=name)
    plain = tokens(generate(target, PROMPTS[2:], eos=None, max_new_tokens=NEW))[0]
    text = PROMPTS[2] + plain
    drafter = Scripted(lambda ids: following([text], ids, 3) if ids == text[: len(ids)] else [])
    result = generate(target, PROMPTS[2:], drafter=drafter, shape=Chain(3), eos=None, max_new_tokens=NEW)
    found = tokens(result)[0]
    assert len(found) == NEW and result.rows[0].rounds[0].accepted > 0
    differs = next((i for i in range(NEW) if found[i] != plain[i]), None)
    if differs is not None:
        ids = torch.tensor([PROMPTS[2] + plain[:differs]])
        at = torch.arange(ids.shape[1])[None]
        logits, truth = (
            t.forward(ids, positions_BN=at, mask=None, cache=None, logits_to_keep=1).logits_BKV[0, 0].float() for t in (target, exact)
        )
        routed = any(getattr(target.config, key, None) for key in ("num_experts", "num_local_experts"))
        limit = 2 * (logits - truth).abs().max() if routed else 4 * 2**-8 * logits.abs().max()
        assert (logits[found[differs]] - logits[plain[differs]]).abs() <= limit


def test_masks_are_of_the_wrong_kind(family) -> None:
    """One tensor for layers of one kind, two for mixed layers; none where all is visible and no window is reached."""
    for name in FAMILIES:
        target = family(name)
        slabs = target.new_cache(1, 32)
        slabs.stage(WINDOW - 1)
        assert target.prompt_masks(slabs, torch.arange(WINDOW - 1)[None]) is None
        slabs.commit(torch.tensor([WINDOW - 1]))
        line = torch.ones(1, 1, 1, dtype=torch.bool)
        slabs.stage(1)
        assert target.masks(slabs, line) is None
        slabs.commit(torch.tensor([1]))
        slabs.stage(1)
        masks = target.masks(slabs, line)
        full, windowed = [[True] * 9], [[False, *[True] * 8]]
        if name in MIXED:
            assert {kind: mask[0, 0].tolist() for kind, mask in masks.items()} == {"full_attention": full, "sliding_attention": windowed}
        else:
            assert masks[0, 0].tolist() == windowed if name in WINDOWED else masks is None


def test_states_come_from_the_vision_tower(make_tokenizer) -> None:
    """A model that also sees, with as many layers in its vision tower as in its decoder."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**COMMON, **GEMMA, "layer_types": ["sliding_attention", "full_attention"]}
    config = tf.Gemma3Config(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}, mm_tokens_per_image=4)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.register()).eval().requires_grad_(False)
    target = Target(model=model, tokenizer=make_tokenizer(VOCAB), name="seeing")
    ids = torch.tensor([PROMPTS[2]])
    theirs = copy.deepcopy(model)
    theirs.set_attn_implementation("eager")
    expected = theirs(input_ids=ids, output_hidden_states=True, use_cache=False)
    out = target.forward(ids, positions_BN=torch.arange(12)[None], mask=None, cache=None, layer_ids=(1,))
    torch.testing.assert_close(out.states_BNF, expected.hidden_states[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.logits_BKV, expected.logits, atol=1e-4, rtol=1e-4)


REFUSED: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "mamba": (tf.MambaConfig, {}, "MambaForCausalLM with layers of the kinds linear_attention"),
    "jamba": (tf.JambaConfig, {}, "JambaForCausalLM with layers of the kinds linear_attention"),
    "lfm2": (tf.Lfm2Config, {"layer_types": ["conv", "full_attention"]}, "Lfm2ForCausalLM with layers of the kinds conv"),
    "qwen3-next": (
        tf.Qwen3NextConfig,
        {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
        "Qwen3NextForCausalLM with layers of the kinds linear_attention",
    ),
    "llama4": (tf.Llama4TextConfig, {"num_local_experts": 2}, "layers of the kinds chunked_attention"),
    "rwkv": (tf.RwkvConfig, {"num_attention_heads": None}, "RwkvForCausalLM with a recurrent state"),
    "gemma3 embedder": (tf.Gemma3TextConfig, {**GEMMA, "use_bidirectional_attention": True}, "attention to later tokens"),
    "deepseek": (tf.DeepseekV3Config, {"n_routed_experts": 8}, "compressed keys"),
    "bloom": (tf.BloomConfig, {"n_head": 4}, "BloomForCausalLM with attention of its own making"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_cannot_be_rolled_back_is_taken(name: str, make_tokenizer) -> None:
    config_class, settings, words = REFUSED[name]
    target = Target(model=build(config_class, settings), tokenizer=make_tokenizer(VOCAB), name=f"a {name}")
    with pytest.raises(ValueError, match=f"a {name} is a .*{words}.*choose a target"):
        target.check_kind()
    with pytest.raises(ValueError, match=words):
        generate(target, [[5, 6]], max_new_tokens=2)


def test_encoder_is_overlooked(make_tokenizer) -> None:
    model = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration with an encoder"):
        Target(model=model, tokenizer=make_tokenizer(VOCAB), name="t5").new_cache(1, 8)


@pytest.mark.parametrize(("config_class", "settings", "words"), [
    (tf.FalconConfig, {}, "attention of its own making"),
    (tf.Lfm2Config, {"layer_types": ["conv", "full_attention"]}, "Lfm2ForCausalLM with layers of the kinds conv"),
])  # fmt: skip
def test_load_takes_a_model_that_cannot_be_rolled_back(config_class, settings, words, make_tokenizer, tmp_path) -> None:
    tf.AutoModelForCausalLM.from_config(config_class(**{**COMMON, **settings})).save_pretrained(tmp_path / "m")
    make_tokenizer(VOCAB).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=words):
        load_target(tmp_path / "m", device="cpu")
