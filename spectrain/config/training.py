"""Settings of a head, its losses and its training."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from spectrain.config.files import Fraction, Positive, Stage


class HeadConfig(Stage):
    """Of every head. kind: a name in `spectrain.heads.base.HEADS`. draft_vocab_size: the most frequent supervised tokens that the head
    can draft; None: all that the tokenizer has. start: a head to go on from (a head directory, or a flat EAGLE-3 folder of ours or of
    another trainer); sizes, flags and draft vocabulary are then its own. output: train the output layer, or keep it frozen; it starts as
    a copy of the target's rows (Medusa's, where it is trained, as a quarter of them; Hydra's by init_output). layer_ids: states that are
    read: hidden states hs[i], one to five, of an EAGLE-3 head (None: (2, n // 2, n - 3)); the other heads read the last state (-1, the
    only one they can read).

    init_layer (eagle3, hydra): start the first decoder layer from the target's last layer, or at random. num_layers: decoder layers; of
    Medusa and Hydra residual blocks a head. num_heads (medusa, hydra): drafts that they can make on a path. hidden_size (eagle3): width of
    the head (None: the target's). sliding_window (not medusa): settled tokens that a draft looks back on (None: all of them).
    shared_output (medusa): one output layer for all heads instead of one each. prefix (hydra): a decoder layer over the states first.
    original (hydra): a norm after that layer and biases in the output layers, as in the published heads; their code reads no others.
    init_output (hydra): start the output layers from the target's rows, or at random.
    bias (eagle): a bias where embedding and state are joined, as in the published checkpoints; vLLM has none.
    EAGLE-3.1 flags, as vLLM and speculators name them: fc_norm: a norm of its own for every fused state; norm_before_fc: one norm over all
    of them; norm_output: the next draft reads the output after the final norm; norm_before_residual: the residual stream starts from the
    normed feature.
    """

    kind: str = "eagle3"
    layer_ids: Annotated[tuple[Annotated[int, Field(ge=-1)], ...], Field(min_length=1, max_length=5)] | None = None
    draft_vocab_size: Positive | None = 6144
    start: str | None = None
    init_layer: Literal["last", "random"] = "last"
    output: Literal["trained", "frozen"] = "trained"
    init_output: Literal["target", "random"] = "target"
    num_layers: Annotated[int, Field(ge=1, le=4)] = 1
    num_heads: Annotated[int, Field(ge=1, le=16)] = 4
    hidden_size: Positive | None = None
    sliding_window: Positive | None = None
    shared_output: bool = False
    prefix: bool = True
    original: bool = False
    bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @model_validator(mode="after")
    def _fits(self) -> "HeadConfig":
        if self.kind == "eagle3" and self.layer_ids is not None and min(self.layer_ids) < 0:
            raise ValueError(f"head.layer_ids {list(self.layer_ids)}: an EAGLE-3 head fuses one to five hidden states hs[i]")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("head.fc_norm and head.norm_before_fc both norm the fused states; set one of them")
        if self.output == "frozen" and self.init_output == "random":
            raise ValueError("head.output frozen would leave output layers at random; set head.init_output=target, or head.output=trained")
        return self


LossName = Literal["soft_ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "top_k", "smooth_l1"]


def one_loss(value: Any) -> Any:
    """A loss by its name alone counts fully."""
    return {value: 1.0} if isinstance(value, str) else value


class LossConfig(Stage):
    """What is minimised; the formulas are in `spectrain.heads.losses`.

    mix: losses and their weights; a name alone counts fully. decay: weight of step k is decay**k. renormalise: the target's law over the
    draft vocabulary alone, scaled to 1, as other trainers have it; off: its true mass there, so that a row weighs as much as the head can
    win. weighting: of tokens: all alike; rows: all rows alike, however long; reach: by the chance that a draft gets as far as this step.
    top_k: tokens of the top_k loss. lk_scale, lk_decay: of lk_lambda.
    """

    mix: Annotated[dict[LossName, Annotated[float, Field(gt=0)]], BeforeValidator(one_loss), Field(min_length=1)] = {"soft_ce": 1.0}
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    renormalise: bool = False
    weighting: Literal["tokens", "rows", "reach"] = "tokens"
    top_k: Positive = 10
    lk_scale: Fraction = 1.0
    lk_decay: Annotated[float, Field(ge=0)] = 3.0


class LoraConfig(Stage):
    """The target trained together with the head (Medusa-2, arXiv 2401.10774 §2.2), by an adapter of low rank (LoRA, arXiv 2106.09685).

    rank, alpha, dropout: of the adapter; it adds alpha / rank times its product. modules: names of the linear layers that get one (None:
    all in the decoder layers). start: share of the run during which the head learns alone. lr: of the adapter (the paper: a quarter of the
    head's), by the same schedule and with a warm-up of its own. weight: of the divergence KL(original, adapted) beside the head's loss,
    which keeps the target's law close.
    """

    rank: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    start: Annotated[float, Field(ge=0, lt=1)] = 0.4
    lr: Annotated[float, Field(gt=0)] = 1e-4
    weight: Annotated[float, Field(ge=0)] = 10.0


class TrainingConfig(Stage):
    """ttt_steps: test-time training steps. tokens_per_step: supervised tokens a batch (a step is `accumulation` batches on every process).

    packing: tokens of a line that several rows share; None: a row a line, padded. domain_weights: how often each domain's rows are drawn
    (None: as many as there are); rows_per_epoch: rows drawn for an epoch (None: as many as there are).
    optimizer: muon takes the matrices inside the head at muon_lr, AdamW the rest. lr is reached after `warmup` (share of all steps);
    then schedule: cosine falls to `final_lr` times itself, wsd keeps it and falls linearly over the last `cooldown` of the run, constant
    keeps it. ema: weights averaged over steps with this factor are measured and saved (None: the weights themselves).
    noise: uniform noise on the states that a head reads while training: its width at a row of 512 tokens, the wider the shorter the row.
    lora: train the target, too, by an adapter (None: only the head).
    checkpointing: compute activations again in the backward pass. compile: torch.compile the decoder layer.
    evals_per_epoch, eval_steps: how often acceptance is measured (a number of steps, where it is given, instead). max_minutes: stop
    after this time (a schedule cut short, not stretched); a later call with more minutes goes on. checkpoint_minutes,
    checkpoint_steps: how often the run's state is saved, whichever comes first; keep_last: how many of those are kept. stall_minutes: of
    several processes, how long one may be silent until the others stop. log_steps: steps a line of metrics.jsonl.
    """

    epochs: Positive = 3
    ttt_steps: Positive = 3
    loss: LossConfig = LossConfig()
    tokens_per_step: Positive = 256
    accumulation: Positive = 1
    packing: Positive | None = None
    domain_weights: dict[str, Annotated[float, Field(ge=0)]] | None = None
    rows_per_epoch: Positive | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 2e-3
    muon_lr: Annotated[float, Field(gt=0)] = 2e-2
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: Fraction = 0.04
    cooldown: Fraction = 0.2
    final_lr: Fraction = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    noise: Annotated[float, Field(ge=0)] = 0.0
    lora: LoraConfig | None = None
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    checkpointing: bool = False
    compile: bool = False
    evals_per_epoch: Positive = 1
    eval_steps: Positive | None = None
    steps: Positive | None = None
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    checkpoint_minutes: Annotated[float, Field(gt=0)] = 2.0
    checkpoint_steps: Positive | None = None
    keep_last: Positive = 1
    stall_minutes: Annotated[float, Field(gt=0)] = 1.0
    log_steps: Positive = 10
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    seed: int = 0
