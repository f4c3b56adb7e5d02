"""Models and drafts of gpu.py: random weights of real shapes whose text counts, and drafts that are right as often as one likes.

A pass costs what it costs whatever the weights are. Here the attention and MLP of each layer add so little to the stream that the output
layer, which holds the embeddings one id further, says "the next id" after every token, in every precision and size of a pass. So a draft
that is right is known without a model, and can be made on the device.

Legend: B rows, N nodes of a draft (root included), D levels of it, V vocabulary, W width.
"""

import time
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.decoding.drafter import DraftSession, Round
from spectrain.decoding.shapes import Shape, Tree
from spectrain.decoding.tree import DraftTree
from spectrain.drafters.from_head import HeadDrafter
from spectrain.heads.eagle3 import Eagle3, default_layer_ids
from spectrain.kernels import tree_attention
from spectrain.target.model import Target

DEPTH = 7  # most levels of a draft
FAINT = 0.01  # what layers add to the stream, beside the usual
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 128256,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256,
    },
    "toy": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 320,
    },
}  # fmt: skip


@torch.no_grad()
def counting_target(shape: str, device: torch.device, dtype: torch.dtype) -> Target:
    """A Llama of this shape that counts."""
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    way = tree_attention.register(tree_attention.way_of("auto", device))
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=way)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(FAINT)
        layer.mlp.down_proj.weight.mul_(FAINT)
    model.model.embed_tokens.weight.normal_()
    model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0) / config.hidden_size**0.5)
    words = {f"w{i}": i for i in range(config.vocab_size)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0")
    return Target(model=model.eval().requires_grad_(False), tokenizer=tokenizer, name=f"random weights, {shape} shape")


@torch.no_grad()
def random_head(target: Target) -> HeadDrafter:
    """An EAGLE-3 head of the target's width with a draft vocabulary of a quarter, as the published ones have it."""
    c, V = target.config, target.vocab_size
    Vd = V // 4
    config = Eagle3.Config(
        hidden_size=c.hidden_size, target_hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps, rope_parameters=dict(c.rope_parameters), max_position_embeddings=c.max_position_embeddings,
        vocab_size=V, draft_vocab_size=Vd, layer_ids=default_layer_ids(target.num_layers), target_layers=target.num_layers,
    )  # fmt: skip
    with torch.device(target.device):
        head = Eagle3(config)
    head.set_vocabulary(torch.arange(Vd) * (V // Vd))
    return HeadDrafter(head.to(target.model.dtype).eval().requires_grad_(False))


def step_bytes(drafter: HeadDrafter, batch: int, context: int) -> int:
    """What a draft step has to read: all weights but the fusing layer's, which settled tokens alone pass, and the head's cache."""
    head = drafter.head
    size = next(head.parameters()).element_size()
    layers, kv_heads, head_dim = head.cache_layers
    weights = sum(p.numel() for name, p in head.named_parameters() if not name.startswith("fc."))
    return size * (weights + 2 * layers * kv_heads * head_dim * batch * context)


def pass_bytes(target: Target, batch: int, context: int) -> int:
    """What a pass has to read: all weights but the embedding, of which it reads a few rows, and the cache."""
    c, size = target.config, target.model.dtype.itemsize
    weights = sum(p.numel() for p in target.model.parameters()) - target.embedding_VW.numel()
    return size * (weights + 2 * target.num_layers * c.num_key_value_heads * c.head_dim * batch * context)


def paths(nodes: int) -> list[tuple[int, ...]]:
    """The drafted nodes of a tree of so many, root included: a line of first choices, then further choices beside it, level by level."""
    return [(0,) * (k % DEPTH) + (k // DEPTH,) for k in range(nodes - 1)]


def shape_of(nodes: int) -> Shape | None:
    return Tree.static(paths(nodes)) if nodes > 1 else None


@dataclass(frozen=True)
class Acting:
    """Drafts whose first choice is the right one with chance `alpha` at each level, given that it was above; all others are wrong.

    nodes: the tree, root included. head: makes its own draft first, of which only the time counts. times: when each draft was asked for.
    """

    nodes: int
    alpha: float
    head: HeadDrafter | None = None
    times: list[float] = field(default_factory=list)
    has_q: bool = field(default=False, init=False)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return () if self.head is None else self.head.layer_ids

    def start(self, target: Target, rows: int, max_length: int) -> "_Session":
        self.times.clear()
        return _Session(self, target, None if self.head is None else self.head.start(target, rows, max_length))


class _Session:
    sound = True

    def __init__(self, acting: Acting, target: Target, head: DraftSession | None) -> None:
        self._acting, self._target, self._head = acting, target, head
        self._generator = torch.Generator(target.device).manual_seed(0)
        self._tree = _layout(acting.nodes, target.device)

    def observe(self, states_BNF: Tensor | None, next_BN: Tensor, count_B: Tensor) -> None:
        if self._head is not None:
            self._head.observe(states_BNF, next_BN, count_B)

    def select(self, rows_R: Tensor) -> None:
        if self._head is not None:
            self._head.select(rows_R)

    def propose(self, round: Round) -> DraftTree | None:
        self._acting.times.append(time.perf_counter())
        if self._acting.nodes == 1:
            return None
        root_B1 = round.root(self._target.device)  # a copy from the host: before the head gives the device work that it would wait for
        if self._head is not None:
            self._head.propose(round)
        parents_N, depth_N, rank_N = self._tree
        B = len(root_B1)
        coin_BD = torch.rand(B, DEPTH, generator=self._generator, device=root_B1.device)
        right_BD = torch.cat([torch.ones_like(root_B1), (coin_BD < self._acting.alpha).long().cumprod(1)], dim=1)
        wrong_BN = 1 - right_BD[:, depth_N] * (rank_N == 0)
        tokens_BN = (root_B1 + depth_N + wrong_BN * (1 + rank_N)) % self._target.vocab_size
        if self._acting.nodes <= 1 + DEPTH:
            return DraftTree.chain(tokens_BN, torch.full_like(root_B1[:, 0], self._acting.nodes))
        num_B = torch.full_like(root_B1[:, 0], self._acting.nodes)
        return DraftTree(tokens_BN, parents_N.expand(B, -1), num_B, "point_mass")


def _layout(nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parent, depth and rank [N] of each node."""
    every = [(), *sorted(paths(nodes), key=lambda path: (len(path), path))]
    parents = [-1, *(every.index(path[:-1]) for path in every[1:])]
    ranks = [path[-1] if path else 0 for path in every]
    parents_N, depth_N, rank_N = (torch.tensor(values, device=device) for values in (parents, list(map(len, every)), ranks))
    return parents_N, depth_N, rank_N


def prompts(target: Target, batch: int, context: int) -> list[list[int]]:
    """Rows of random ids, a few tokens shorter one after the other."""
    generator = torch.Generator().manual_seed(0)
    lengths = [max(1, context - 3 * b) for b in range(batch)]
    return [torch.randint(2, target.vocab_size, (length,), generator=generator).tolist() for length in lengths]
