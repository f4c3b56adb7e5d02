"""Small targets whose answers can be drafted: random models of stock classes, a target with known answers, noisy copies, brief heads.

Nothing is downloaded. Widths and ranges are chosen so that logits lie far apart: rounding then turns few tokens.

Legend: V vocabulary, L tokens, M supervised tokens, F width of the states read, W hidden width.
"""

import contextlib
import copy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedTokenizerFast

from spectrain.config import HeadConfig, TrainingConfig
from spectrain.data.batches import Batch, Sample, collate
from spectrain.data.rows import Row
from spectrain.heads.base import LAST, head_class
from spectrain.kernels import tree_attention
from spectrain.target.features import OnlineFeatures
from spectrain.target.model import Target
from spectrain.training.loop import train
from spectrain.training.setup import new_head

VOCAB = 96
DEPTH = 4  # drafts on a path of a head that can make a fixed number of them
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
}  # fmt: skip


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A word `w<id>` a token; id 1 ends an answer."""
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1")


def _random(config: Any, name: str, seed: int) -> Target:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.register())
    return Target(model=model.eval().requires_grad_(False), tokenizer=word_tokenizer(config.vocab_size), name=name)


def llama_target(*, calm: float = 1.0, seed: int = 0) -> Target:
    """A random Llama. calm: factor on what attention and MLP add; 1: the whole context decides, near 0: the last token does, and answers
    repeat themselves with variations."""
    target = _random(LlamaConfig(**COMMON), "llama" if calm == 1 else "calm llama", seed)
    with torch.no_grad():
        for layer in target.layers:
            layer.self_attn.o_proj.weight.mul_(calm)
            layer.mlp.down_proj.weight.mul_(calm)
    return target


def gemma_target(*, calm: float, seed: int = 0) -> Target:
    """A random Gemma 2: layers with a window of 24 and without by turns, soft-caps, norms after attention and MLP (factor `calm`)."""
    target = _random(Gemma2Config(**COMMON, **GEMMA), "gemma2", seed)
    for name, weight in target.model.named_parameters():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            weight.data.fill_(calm - 1)  # these norms multiply by 1 + weight
    return target


def table_target(table_VV: torch.Tensor) -> Target:
    """A real Llama whose logits after token i are table[i], whatever stood before: embedding = identity, branches zero."""
    V = len(table_VV)
    changes = {"vocab_size": V, "hidden_size": V, "head_dim": 8, "rms_norm_eps": 1e-12}
    target = _random(LlamaConfig(**{**COMMON, **changes}), "table", 0)
    with torch.no_grad():
        for layer in target.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.embedding_VW.copy_(torch.eye(V))
        target.output_VW.copy_(table_VV.T / V**0.5)  # the final norm makes a row of the identity sqrt(V) long
    return target


def cycle_table(lengths: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """A table over VOCAB tokens whose best successors form cycles of these lengths, and each token's best successor."""
    assert sum(lengths) == VOCAB
    generator = torch.Generator().manual_seed(seed)
    order, successor, start = torch.randperm(VOCAB, generator=generator).tolist(), [0] * VOCAB, 0
    for length in lengths:
        ring = order[start : start + length]
        for at, token in enumerate(ring):
            successor[token] = ring[(at + 1) % length]
        start += length
    table_VV = torch.randn(VOCAB, VOCAB, generator=generator)
    table_VV[torch.arange(VOCAB), successor] = 8.0
    return table_VV, successor


def noisy_copy(target: Target, noise: float, seed: int = 0) -> Target:
    """The same model with noise on every matrix, in parts of its standard deviation: a small model that is right most of the time."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
    return Target(model=model, tokenizer=target.tokenizer, name=f"{target.name} with noise")


@dataclass
class Samples:
    """Rows with their states in memory, made at the first use."""

    features: OnlineFeatures

    @property
    def rows(self) -> Sequence[Row]:
        return self.features.rows

    @cached_property
    def _samples(self) -> list[Sample]:
        return [self.features[i] for i in range(len(self))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Sample:
        return self._samples[i]

    def batch(self, numbers: Sequence[int]) -> Batch:
        return collate([self._samples[i] for i in numbers])


def brief_head(target: Target, kind: str, texts: Sequence[tuple[Sequence[int], Sequence[int]]], *, epochs: int, seed: int = 0) -> Any:
    """A head of this kind that has seen these (prompt, answer) pairs `epochs` times; it leaves out a sixth of the vocabulary."""
    rows = [
        Row(id=str(i), domain="", ids_L=(*prompt, *answer), mask_L=(0,) * len(prompt) + (1,) * len(answer))
        for i, (prompt, answer) in enumerate(texts)
    ]
    reads_last = head_class(kind).default_layer_ids(VOCAB) == (LAST,)
    config = HeadConfig(
        kind=kind, draft_vocab_size=VOCAB * 5 // 6, init_layer="random", layer_ids=None if reads_last else (1, 2), num_heads=DEPTH
    )
    head = new_head(config, target, rows, seed=seed)
    samples = Samples(OnlineFeatures(target, rows, head.layer_ids))
    settings = TrainingConfig(epochs=epochs, ttt_steps=head.max_depth or 3, tokens_per_step=256, lr=1e-2, warmup=0.05)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # what training says is no result here
        train(
            head, samples, settings, embed_VW=target.embedding_VW, output_VW=target.output_VW, out=Path(folder),
            accelerator=Accelerator(cpu=True), save=lambda head, name: None,
        )  # fmt: skip
    return head.eval()
