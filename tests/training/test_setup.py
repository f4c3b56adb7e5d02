"""A new head: sizes, vocabulary and weights from the target and the rows."""

import pytest
import torch
import transformers as tf

from spectrain.config import HeadConfig
from spectrain.data.rows import Row
from spectrain.heads.targets import draft_vocabulary
from spectrain.kernels import tree_attention
from spectrain.target.model import Target
from spectrain.training import setup
from spectrain.training.setup import (
    check_config,
    coverage_by_domain,
    coverage_lines,
    final_norm,
    layer_ids,
    made_with,
    new_head,
    supervised_by_domain,
    supervised_counts,
)

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


@pytest.mark.parametrize("ids", [(0, 1), (2, 1), (1, 1), (1, 3), (5,)])
def test_layers_that_do_not_rise_within_the_target_are_read(target: Target, ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must rise within 1 to 2"):
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


def test_counts_given_are_counted_again(target: Target) -> None:
    counts = supervised_counts(ROWS, 100)
    heads = [
        new_head(HeadConfig(layer_ids=(1, 2), draft_vocab_size=3), target, rows, seed=0, counts_V=c)
        for rows, c in ((ROWS, None), ((), counts))
    ]
    assert heads[0].target_ids.tolist() == heads[1].target_ids.tolist() == [3, 7, 9]


def test_another_norm_is_copied(target: Target) -> None:
    assert final_norm(target) is not None and final_norm(target).data_ptr() == target.model.model.norm.weight.data_ptr()


def test_artifact_does_not_say_how_it_was_made(target: Target) -> None:
    record = made_with(target, {"seed": 3})
    assert (
        record["target"] == "tiny" and record["seed"] == 3 and record["versions"]["torch"] and record.items() >= target.fingerprints.items()
    )
