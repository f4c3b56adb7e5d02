"""Small targets, tokenizers, heads and drafters that the tests share. Nothing is downloaded."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.decoding.drafter import Round
from spectrain.decoding.tree import DraftTree
from spectrain.heads.eagle3 import Eagle3
from spectrain.kernels import tree_attention
from spectrain.target.model import Target

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<start> system w1 w2 <end> {% endif %}"
    "{% for m in messages %}<start> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<start>", "system", "user", "assistant")


def word_tokenizer(size: int, template: str = CHATML) -> PreTrainedTokenizerFast:
    """Ids 0-5 are pad, end, start and the roles; every other id is the word `w<id>`."""
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), size))][:size]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=words[0], eos_token=words[1], chat_template=template)


def random_llama(*, vocab: int = 100, **changes: Any) -> LlamaForCausalLM:
    """A random Llama whose logits are far apart, with tree attention."""
    settings = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.25, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    seed = changes.pop("seed", 0)
    config = LlamaConfig(**{**settings, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(config, attn_implementation=tree_attention.register())
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """make_tokenizer(size, template=CHATML): a word a token."""
    return word_tokenizer


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """make_target(vocab=100, seed=0, **fields of LlamaConfig): a random Llama of 3 layers, on the CPU."""

    def make(**changes: Any) -> Target:
        model = random_llama(**changes)
        return Target(model=model, tokenizer=word_tokenizer(model.config.vocab_size), name="tiny")

    return make


@pytest.fixture(scope="session")
def target(make_target: Callable[..., Target]) -> Target:
    """The random target that most tests use."""
    return make_target()


@pytest.fixture(scope="session")
def eager() -> Callable[[Target], Any]:
    """eager(target): transformers' own model with the same weights and its own attention."""

    def make(target: Target) -> Any:
        model = copy.deepcopy(target.model)
        model.set_attn_implementation("eager")
        return model

    return make


@pytest.fixture(scope="session")
def make_table_target() -> Callable[[Tensor], Target]:
    """make_table_target(table): a real Llama whose logits after token i are table[i], whatever stood before."""

    def make(table_VV: Tensor) -> Target:
        V = len(table_VV)
        model = random_llama(
            vocab=V, hidden_size=V, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=2,
            rms_norm_eps=1e-12,
        )  # fmt: skip
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.lm_head.weight.copy_(table_VV.T / V**0.5)
        return Target(model=model, tokenizer=word_tokenizer(V), name="table")

    return make


@pytest.fixture(scope="session")
def make_head() -> Callable[..., Eagle3]:
    """make_head(target, draft_vocab=40, seed=0, **fields of its config): a random EAGLE-3 head over every second id."""

    def make(target: Target, *, draft_vocab: int = 40, seed: int = 0, **changes: Any) -> Eagle3:
        c = target.config
        settings = {
            "hidden_size": c.hidden_size, "target_hidden_size": c.hidden_size, "intermediate_size": 48,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
            "rope_parameters": dict(c.rope_parameters), "max_position_embeddings": c.max_position_embeddings,
            "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab, "layer_ids": (1, 2), "target_layers": target.num_layers,
        }  # fmt: skip
        head = Eagle3(Eagle3.Config(**{**settings, **changes}))
        step = max(1, target.vocab_size // draft_vocab)
        head.start_from(
            layer=None, norm=torch.ones(c.hidden_size), output_VW=target.output_VW,
            target_ids=torch.arange(draft_vocab) * step, train_output=True, seed=seed,
        )  # fmt: skip
        with torch.no_grad():
            for weight in (head.fc.weight, *head.midlayer.parameters()):
                if weight.dim() == 2:
                    weight.mul_(10)  # logits far apart
        return head.eval()

    return make


@pytest.fixture(scope="session")
def fresh_greedy(eager: Callable[[Target], Any]) -> Callable[..., list[int]]:
    """fresh_greedy(target, ids, n): n greedy tokens, a whole forward of transformers' own model for each."""

    @torch.no_grad()
    def decode(target: Target, ids: Sequence[int], n: int) -> list[int]:
        model, tokens = eager(target), list(ids)
        for _ in range(n):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens[len(ids) :]

    return decode


@dataclass
class ScriptedDrafter:
    """Drafts what `script(committed ids of one row)` returns: a list of (token, parent) for the nodes after the root."""

    script: Callable[[list[int]], list[tuple[int, int]]]
    layer_ids: tuple[int, ...] = ()
    has_q: bool = False
    fails_at: int | None = None
    rounds: int = 0

    def start(self, target: Target, rows: int, max_length: int) -> "ScriptedDrafter":
        return self

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None: ...

    def select(self, rows_R: Tensor) -> None: ...

    def propose(self, round: Round) -> DraftTree | None:
        committed = round.committed
        self.rounds += 1
        if self.rounds == self.fails_at:
            raise RuntimeError("the drafter fell over")
        drafts = [self.script(list(ids)) for ids in committed]
        N = 1 + max(map(len, drafts))
        tokens_BN, parents_BN = torch.zeros(len(drafts), N, dtype=torch.long), torch.zeros(len(drafts), N, dtype=torch.long)
        parents_BN[:, 0] = -1
        for b, (ids, draft) in enumerate(zip(committed, drafts, strict=True)):
            tokens_BN[b, 0] = ids[-1]
            for n, (token, parent) in enumerate(draft, 1):
                tokens_BN[b, n], parents_BN[b, n] = token, parent
        return DraftTree(tokens_BN, parents_BN, torch.tensor([1 + len(d) for d in drafts]), "point_mass")


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedDrafter]:
    """scripted(script): a drafter whose drafts the test writes."""
    return ScriptedDrafter
