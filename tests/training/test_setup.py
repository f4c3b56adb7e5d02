"""A new head: sizes, vocabulary and weights from the target and the rows."""

import pytest
import torch
import transformers as tf

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.rows import Row
from spectrain.heads.targets import draft_vocabulary
from spectrain.kernels import tree_attention
from spectrain.target.model import Target
from spectrain.training import setup
from spectrain.training.setup import (
    check_config,
    check_training,
    coverage_by_domain,
    coverage_lines,
    final_norm,
    layer_ids,
    made_with,
    new_head,
    start_notes,
    supervised_by_domain,
    supervised_counts,
)
from spectrain.training.start import norm_factors

ROWS = [
    Row("a", "code", (50, 60, 7, 7, 9), (0, 0, 1, 1, 1)),
    Row("b", "chat", (50, 9, 3, 50), (0, 1, 1, 0)),
]


def test_prompt_tokens_are_counted() -> None:
    counts = supervised_counts(ROWS, 100)
    assert len(counts) == 100 and counts.sum() == 5
    assert {i: int(n) for i, n in enumerate(counts) if n} == {7: 2, 9: 2, 3: 1}
    assert supervised_counts([], 100).sum() == 0


def test_coverage_is_not_that_of_the_supervised_tokens() -> None:
    vocabulary = draft_vocabulary(supervised_counts(ROWS, 100), 2)
    assert coverage_by_domain(ROWS, vocabulary) == {"code": (3, 3), "chat": (1, 2)}


def test_counts_depend_on_how_many_are_taken_at_once(monkeypatch) -> None:
    rows = [Row(str(i), "abc"[i % 3], [i, i + 1, i], [0, 1, 1]) for i in range(40)]
    whole = supervised_by_domain(rows, 50)
    monkeypatch.setattr(setup, "TOKENS_AT_ONCE", 5)
    pieces = supervised_by_domain(iter(rows), 50)
    assert list(whole) == list(pieces) == ["a", "b", "c"] and all(torch.equal(whole[d], pieces[d]) for d in whole)
    assert sum(int(c.sum()) for c in whole.values()) == 80 == supervised_counts(rows, 50).sum()


def test_served_answers_are_not_told_from_training_rows() -> None:
    """EV1: coverage of the rows that the map was cut from, and of answers that it was not, each under its name with its counts."""
    vocabulary = draft_vocabulary(supervised_counts(ROWS, 100), 2)
    served = [Row("c", "code", (7, 8, 8, 9), (0, 1, 1, 1)), Row("d", "maths", (3, 3), (0, 0))]
    training, validation = coverage_lines(vocabulary, {"training rows": ROWS, "validation rows": served})
    expected = "draft vocabulary of 2: coverage of training rows 80.00% (4/5): chat 50.00% (1/2), code 100.00% (3/3)"
    assert training == expected
    assert validation == "draft vocabulary of 2: coverage of validation rows 33.33% (1/3): code 33.33% (1/3), maths 0.00% (0/0)"


def test_head_has_other_sizes_than_the_target(make_target) -> None:
    """EX2: an explicit head size, grouped keys, base and scaling are those of the target; the vocabulary is counted."""
    rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    target = make_target(head_dim=16, rms_norm_eps=1e-4, rope_parameters=rope)
    head = new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=3), target, ROWS, seed=0)
    c = head.config
    assert (c.head_dim, c.num_attention_heads, c.num_key_value_heads, c.rms_norm_eps, c.vocab_size) == (16, 4, 2, 1e-4, 100)
    assert c.rope_parameters == rope and c.max_position_embeddings == 256 and c.target_layers == 3
    assert head.midlayer.self_attn.q_proj.weight.shape == (64, 64) and head.target_ids.tolist() == [3, 7, 9]
    assert torch.equal(head.lm_head.weight, target.output_VW[[3, 7, 9]]) and torch.equal(head.norm.weight, target.model.model.norm.weight)
    assert torch.equal(head.midlayer.mlp.up_proj.weight, target.layers[-1].mlp.up_proj.weight)


def test_same_seed_makes_another_head(target: Target) -> None:
    heads = [new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=9), target, ROWS, seed=s).state_dict() for s in (0, 0, 1)]
    assert all(torch.equal(heads[0][k], heads[1][k]) for k in heads[0])
    assert not torch.equal(heads[0]["midlayer.self_attn.q_proj.weight"], heads[2]["midlayer.self_attn.q_proj.weight"])


def test_making_a_head_changes_the_target(target: Target) -> None:
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    head = new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=9), target, ROWS, seed=0)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(1)
    assert all(torch.equal(v, before[k]) for k, v in target.model.state_dict().items())


@pytest.mark.parametrize("ids", [(0, 1), (2, 1), (1, 1), (1, 3), (5, 6)])
def test_layers_that_do_not_rise_within_the_target_are_read(target: Target, ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="that rise within 1 to 2"):
        layer_ids(HeadConfig(layer_ids=ids), target)


def test_shallow_target_gets_colliding_layers(target: Target, make_target) -> None:
    with pytest.raises(ValueError, match="3 layers is too shallow"):
        layer_ids(HeadConfig(), target)
    assert layer_ids(HeadConfig(), make_target(num_hidden_layers=8)) == (2, 4, 5)


def test_vocabulary_above_the_targets_is_taken(target: Target) -> None:
    with pytest.raises(ValueError, match="draft vocabulary of 101 asked for; needed 1 to 100"):
        new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=101), target, ROWS, seed=0)


def test_too_large_vocabulary_is_told_late(target: Target) -> None:
    with pytest.raises(
        ValueError, match="head.draft_vocab_size 101 is above the 100 tokens of tiny; lower it: --set head.draft_vocab_size=100"
    ):
        check_config(HeadConfig(layer_ids=(1, 2), draft_vocab_size=101), target)
    with pytest.raises(ValueError, match=r"head.hidden_size 50 is no multiple of its 6 query heads.*head.hidden_size=48"):
        check_config(HeadConfig(layer_ids=(1, 2), draft_vocab_size=9, hidden_size=50), target)


LLAMA = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (tf.LlamaConfig(**LLAMA), False),
        (tf.Gemma3TextConfig(**LLAMA), False),
        (tf.Gemma2Config(**LLAMA, final_logit_softcapping=30.0), True),
        (tf.GraniteConfig(**LLAMA, logits_scaling=8.0), True),
        (tf.CohereConfig(**LLAMA, logit_scale=0.0625), True),
    ],
    ids=lambda x: getattr(x, "model_type", None),
)
def test_law_of_a_target_with_a_cap_or_scale_is_learnt_without(config, refused: bool, dtype: torch.dtype, make_tokenizer) -> None:
    """FC1: training computes the target's law as last state times output rows; what a model does behind these would be missing."""
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.register()).to(dtype).eval()
    target = Target(model=model, tokenizer=make_tokenizer(96), name="tiny")
    if not refused:
        return check_config(HeadConfig(layer_ids=(1, 2), draft_vocab_size=9), target)
    with pytest.raises(ValueError, match=r"tiny changes its logits behind the output rows \(a cap, a scale or a bias\), by [1-9]"):
        check_config(HeadConfig(layer_ids=(1, 2), draft_vocab_size=9), target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tf.GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, eos_token_id=1), "names no base of the rotary positions"),
        (tf.OlmoConfig(**LLAMA), "tiny has no final norm of width 32"),
    ],
    ids=["no rotary positions", "norms without weights"],
)
def test_target_that_lacks_what_a_head_copies_is_told_late(config, message: str, make_tokenizer) -> None:
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.register()).eval()
    with pytest.raises(ValueError, match=message):
        check_config(HeadConfig(layer_ids=(1, 2)), Target(model=model, tokenizer=make_tokenizer(96), name="tiny"))


def test_counts_given_are_counted_again(target: Target) -> None:
    counts = supervised_counts(ROWS, 100)
    heads = [
        new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=3), target, rows, seed=0, counts_V=c)
        for rows, c in ((ROWS, None), ((), counts))
    ]
    assert heads[0].target_ids.tolist() == heads[1].target_ids.tolist() == [3, 7, 9]


def test_another_norm_is_copied(target: Target) -> None:
    assert torch.equal(final_norm(target), target.model.model.norm.weight)
    assert torch.equal(norm_factors(torch.nn.LayerNorm(4), 4), torch.ones(4))


def of_family(config, make_tokenizer, seed: int = 0) -> Target:
    """A random model whose norms are no ones."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.register()).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(torch.rand(parameter.shape))
    return Target(model=model, tokenizer=make_tokenizer(config.vocab_size), name="tiny")


GEMMA = {**LLAMA, "query_pre_attn_scalar": 8}
FAMILIES = {  # config, what of the last layer fits beside its norms, and why the rest does not
    "llama": (tf.LlamaConfig(**LLAMA), ("attention", "mlp"), ""),
    "phi3": (tf.Phi3Config(**LLAMA), ("attention", "mlp"), ""),
    "gemma2": (tf.Gemma2Config(**GEMMA, final_logit_softcapping=None), (), "its norms are input_layernorm, post_attention_l"),
    "gemma3": (tf.Gemma3TextConfig(**GEMMA), (), "its norms are input_layernorm, post_att"),
    "gelu": (tf.LlamaConfig(**LLAMA, hidden_act="gelu"), ("attention",), "its activation is gelu, a head's is silu"),
    "qwen2": (tf.Qwen2Config(**LLAMA), ("mlp",), "a head's attention has no k_proj.bias, q_proj.bias, v_proj.bias"),
    "qwen3": (tf.Qwen3Config(**LLAMA), ("mlp",), "a head's attention has no k_norm.weight, q_norm.weight"),
    "part": (tf.Phi3Config(**LLAMA, partial_rotary_factor=0.5), ("mlp",), "it turns a share of each head only"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_of_another_family_is_copied_as_if_it_were_llamas(family: str, make_tokenizer) -> None:
    """EX2: what means the same is copied, norms as the factors that they are; the rest starts at random, faint, and it is said."""
    config, fits, reason = FAMILIES[family]
    target = of_family(config, make_tokenizer)
    wanted = HeadConfig(layer_ids=(1, 2), draft_vocab_size=9)
    head, notes = new_head(wanted, target, ROWS, seed=0), start_notes(wanted, target)
    assert len(notes) == 2 - len(fits) and all(reason in note and "starts at random" in note for note in notes)
    layer, x = target.layers[-1], torch.randn(5, 32)
    before_mlp = layer.pre_feedforward_layernorm if family.startswith("gemma") else layer.post_attention_layernorm
    for ours, theirs in (
        (head.norm, target.model.model.norm), (head.midlayer.hidden_norm, layer.input_layernorm),
        (head.midlayer.post_attention_layernorm, before_mlp),
    ):  # fmt: skip
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    q, o = (getattr(head.midlayer.self_attn, f"{name}_proj").weight for name in "qo")
    theirs = layer.self_attn
    whole_q = theirs.q_proj.weight if hasattr(theirs, "q_proj") else theirs.qkv_proj.weight[:32]
    assert torch.equal(q[:, 32:], whole_q) == torch.equal(o, theirs.o_proj.weight) == ("attention" in fits)
    up, down = head.midlayer.mlp.up_proj.weight, head.midlayer.mlp.down_proj.weight
    whole_up = layer.mlp.up_proj.weight if hasattr(layer.mlp, "up_proj") else layer.mlp.gate_up_proj.weight[48:]
    assert torch.equal(up, whole_up) == torch.equal(down, layer.mlp.down_proj.weight) == ("mlp" in fits)
    assert ("attention" in fits or o.detach().std() < 0.003) and ("mlp" in fits or down.detach().std() < 0.003)


def test_what_starts_at_random_is_not_said(target: Target) -> None:
    base = HeadConfig(layer_ids=(1, 2))
    assert start_notes(base, target) == start_notes(base.model_copy(update={"init_layer": "random", "num_layers": 2}), target) == []
    assert start_notes(base.model_copy(update={"num_layers": 3}), target) == ["2 layer(s) above the first start at random"]
    assert "head.hidden_size 16 is not the width 32" in start_notes(base.model_copy(update={"hidden_size": 16}), target)[0]


def test_head_goes_on_from_another_one(target: Target) -> None:
    """The copy has sizes, flags, vocabulary and weights of the given head, and is trained without touching it."""
    config = HeadConfig(layer_ids=(1, 2), draft_vocab_size=3, fc_norm=True, num_layers=2)
    first = new_head(config, target, ROWS, seed=0).bfloat16().eval().requires_grad_(False)
    head = new_head(HeadConfig(draft_vocab_size=50), target, (), seed=7, start=first)
    assert head.config == first.config and head.target_ids.tolist() == [3, 7, 9] and head.training and head.tokens
    assert all(torch.equal(head.state_dict()[n], t.to(head.state_dict()[n].dtype)) for n, t in first.state_dict().items())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in head.parameters())
    before = {n: t.clone() for n, t in first.state_dict().items()}
    with torch.no_grad():
        head.fc.weight.add_(1)
    assert all(torch.equal(t, before[n]) for n, t in first.state_dict().items())
    assert not new_head(HeadConfig(output="frozen"), target, (), seed=0, start=first).lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64, "head_dim": 16}, "reads states of width 32, tiny has 64; start from a head of this target, or"),
        ({"vocab": 120}, "reads a vocabulary of 100, tiny has 120"),
        ({"num_hidden_layers": 5}, "reads a target of layers 3, tiny has 5"),
    ],
)
def test_head_of_another_target_is_gone_on_from(target: Target, make_target, changes: dict, message: str) -> None:
    first = new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=3), target, ROWS, seed=0)
    with pytest.raises(ValueError, match=message):
        new_head(HeadConfig(), make_target(**changes), (), seed=0, start=first)


def test_head_without_tables_or_with_other_states_is_gone_on_from(target: Target, make_head) -> None:
    with pytest.raises(ValueError, match=r"head.layer_ids \[1, 3\]: .* that rise within 1 to 2"):
        new_head(HeadConfig(), target, (), seed=0, start=make_head(target, layer_ids=(1, 3)))
    blank = make_head(target)
    blank.t2d.zero_()
    with pytest.raises(ValueError, match="no table of its draft vocabulary"):
        new_head(HeadConfig(), target, (), seed=0, start=blank)
    padded = Target(model=target.model, tokenizer=target.tokenizer, name="tiny")
    padded.__dict__["num_ids"] = 50
    with pytest.raises(ValueError, match="head.start drafts the id 78, the tokenizer of tiny ends at 49"):
        new_head(HeadConfig(), padded, (), seed=0, start=make_head(target))


def test_loss_that_the_head_has_no_output_for_is_told_late() -> None:
    check_training(HeadConfig(), TrainingConfig(loss={"mix": {"kl": 1.0, "top_k": 0.5}}))
    with pytest.raises(ValueError, match="smooth_l1.*head of kind eagle3 guesses none; leave it out: --set training.loss.mix=soft_ce"):
        check_training(HeadConfig(), TrainingConfig(loss={"mix": {"soft_ce": 0.1, "smooth_l1": 1.0}}))


def test_artifact_does_not_say_how_it_was_made(target: Target) -> None:
    record = made_with(target, {"seed": 3})
    assert (
        record["target"] == "tiny" and record["seed"] == 3 and record["versions"]["torch"] and record.items() >= target.fingerprints.items()
    )
