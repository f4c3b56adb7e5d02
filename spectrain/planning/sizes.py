"""What a plan is made from: sizes of target and head, the data, a batch, and the settings that memory and time depend on.

Legend: W target width, H head width, V target vocabulary, Vd draft vocabulary, K test-time steps, R counted rows, T tokens of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spectrain.planning.machines import Machine

PLACEMENTS = ("rank", "fsdp2", "tp", "zero3")
# Of a weight in a quantised linear layer, as bitsandbytes keeps it: 8 bits (a scale a row is not counted), or 4 and a float32 scale of 64.
QUANTISED = {"8bit": 1.0, "4bit": 0.5 + 4 / 64}


@dataclass(frozen=True)
class TargetSize:
    """params: all parameters; active: those that one token passes; embedding: V * W; tied: the output rows are the embedding; experts:
    share of a mixture's experts that one token passes (1: no mixture). inner: width inside the MLPs that one token passes. unit: parameters
    of the largest part that is gathered at a time (a decoder layer or the embedding). linear: weights of linear layers inside the decoder
    layers; quantization: how these are kept, None as all others."""

    name: str
    layers: int
    width: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    params: int
    active: int
    embedding: int
    tied: bool
    unit: int
    max_length: int
    bytes_a_weight: int
    experts: float = 1.0
    linear: int = 0
    quantization: str | None = None

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bytes_a_weight - self._saved

    @property
    def inside_bytes(self) -> float:
        """Of those that one token passes inside the decoder layers, read for a pass of one token."""
        return self.inside * self.bytes_a_weight - self._saved * min(1.0, self.inside / max(1, self.linear))

    @property
    def _saved(self) -> float:
        return self.linear * (self.bytes_a_weight - QUANTISED[self.quantization]) if self.quantization else 0.0

    @property
    def inside(self) -> int:
        """Parameters that one token passes inside the decoder layers."""
        return self.active - self.embedding * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> int:
        """Bytes a token of its cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_a_weight

    def pass_flops(self, tokens: float, supervised: float, context: float) -> float:
        """Of a causal pass: layers for every token, scores and sums of attention, output rows for the supervised tokens."""
        attention = 4 * self.layers * self.heads * self.head_dim * context
        return tokens * (2 * self.inside + attention) + supervised * 2 * self.embedding


@dataclass(frozen=True)
class Matrix:
    """A matrix of a head by its parameter's name."""

    name: str
    outputs: int
    inputs: int

    @property
    def size(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True)
class HeadSize:
    """params, trained: numbers of a head, exactly; tables: bytes of its draft vocabulary's tables. states: hidden states read; layers:
    decoder layers; heads, kv_heads, head_dim: of these; outputs: output layers. unrolled: every test-time step runs the same layers.
    max_depth: tokens that it drafts in a row, None where that is free."""

    kind: str
    params: int
    trained: int
    tables: int
    matrices: tuple[Matrix, ...]
    width: int
    target_width: int
    inner: int
    states: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab: int
    outputs: int
    output_trained: bool
    muon: int = 0
    max_depth: int | None = None

    @property
    def unrolled(self) -> bool:
        return self.kind in ("eagle", "eagle3")

    @property
    def output_params(self) -> int:
        return self.outputs * self.width * self.draft_vocab

    def kv_bytes(self, bytes_a_number: int) -> int:
        """Bytes a token of its cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_a_number

    def with_vocabulary(self, size: int) -> "HeadSize":
        """The same head with another draft vocabulary."""
        more = self.outputs * self.width * (size - self.draft_vocab)
        matrices = tuple(replace(m, outputs=size) if m.name.startswith("lm_head") else m for m in self.matrices)
        return replace(
            self, params=self.params + more, trained=self.trained + (more if self.output_trained else 0), draft_vocab=size,
            tables=self.tables + 8 * (size - self.draft_vocab), matrices=matrices,
        )  # fmt: skip


@dataclass(frozen=True)
class Data:
    """rows, tokens and supervised tokens of an epoch; longest row; mean context of a token is half its row. source: where they are from.

    most: (counted rows, tokens, tokens with padding) of the largest batch and batches: how many an epoch has, where the rows are known.
    """

    rows: float
    tokens: float
    supervised: float
    longest: int
    source: str
    most: tuple[int, int, int] | None = None
    batches: int | None = None

    @property
    def share(self) -> float:
        return self.supervised / self.tokens

    @property
    def length(self) -> float:
        return self.tokens / self.rows


@dataclass(frozen=True)
class Batch:
    """The largest batch of a process: rows counted R, tokens, tokens with padding."""

    rows: float
    tokens: float
    padded: float


PADDING = 1.1  # of lines sorted by length within a pool of batches
FILL = 0.8  # of tokens_per_step: rows are whole


@dataclass(frozen=True)
class Case:
    """All that a plan depends on. steps: test-time steps. store: bytes of a token's states, and of a supervised token's answer, as stored.
    store_name: the two precisions. pieces(tokens, vocabulary, steps): supervised tokens whose logits are made at once. logs: the loss
    needs logarithms beside probabilities. probe: rows, tokens a prompt and positions a row of the answers that acceptance is measured
    on. packed: a second copy of the target's linear weights is made for its passes (CPU). decode_batch: rows that are answered
    together; lengths_N2: (prompt tokens, answer tokens) of each, where the rows are known. capture_tokens: tokens a pass. tp_size:
    devices of one copy of the target under `tp` (None: those of a node). head_sharded: by FSDP2 or ZeRO-3."""

    machine: Machine
    gpus: int
    target: TargetSize
    head: HeadSize
    data: Data
    placement: str
    steps: int
    tokens_per_step: int
    accumulation: int
    epochs: float
    mixed: bool
    checkpointing: bool
    ema: bool
    online: bool
    logs: bool
    store: tuple[float, float]
    store_name: str
    capture_tokens: int
    probe: tuple[int, int, int]
    packed: bool
    decode_batch: int
    pieces: Callable[[int, int, int], int]
    tp_size: int | None = None
    head_sharded: bool = False
    lengths_N2: Any = field(default=None, compare=False)

    @property
    def split(self) -> int:
        """Devices that every product of the target is split over."""
        return min(self.gpus, self.tp_size or self.machine.node) if self.placement == "tp" else 1

    @property
    def shards(self) -> int:
        """Devices that the head's weights are sharded over."""
        return self.gpus if self.head_sharded else 1

    @property
    def batch(self) -> Batch:
        """Largest batch: a row that is longer than a step's tokens is a batch of its own."""
        d = self.data
        if d.most is not None:
            scale = min(1.0, max(self.tokens_per_step, d.longest * d.share) / d.most[0])
            return Batch(*(x * scale for x in d.most))
        rows = max(self.tokens_per_step, d.longest * d.share)
        return Batch(rows, rows / d.share, max(d.longest, PADDING * rows / d.share))

    @property
    def narrow(self) -> int:
        """Bytes of a number in the head's products."""
        return 2 if self.mixed else 4

    @property
    def optimizer_steps(self) -> float:
        """Of the run."""
        window = self.accumulation * self.gpus
        batches = self.data.batches or max(1.0, self.data.supervised / (FILL * self.tokens_per_step))
        return max(1.0, self.epochs * batches / window)
