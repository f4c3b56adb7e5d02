"""Settings of every stage: one frozen model a stage, unknown keys refused, YAML in and out. Every default is written here."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def on_off(value: Any) -> Any:
    """YAML 1.1 reads `on` and `off` as truth values; as the name of a mode they are words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Stage(BaseModel):
    """Base of all stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=Stage)


class TargetConfig(Stage):
    """name: Hub name, folder or .gguf file."""

    name: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class AnswersConfig(Stage):
    """How the target answers training prompts. mix: number of prompts by domain. sampled: share answered at `temperature`."""

    prompts: str
    file: str
    mix: dict[str, Positive]
    max_prompt_tokens: Positive = 480
    max_new_tokens: Positive = 128
    sampled: Fraction = 0.25
    temperature: Annotated[float, Field(gt=0)] = 0.7
    batch_size: Positive = 48
    seed: int = 0


class PrepareConfig(Stage):
    """Conversations -> rows.

    format: dialect of every input; auto: found out per file. columns: our name -> the input's, where they differ (`domain: category`).
    domain: of rows that name none ("": their file's name). rows: one a conversation, one an assistant turn, or auto: a turn a row
    only where the template rewrites earlier turns. thinking: keep answers with reasoning (on), without (off), or all (mixed).
    template_kwargs: passed to the chat template. min_supervised: fewer supervised tokens in a line reject the row. disjoint_from:
    evaluation prompts (files or folders); conversations that ask one of them, or share `near` of their runs of eight words with one,
    are rejected. max_rows: conversations drawn, every domain in its share. validation: share of them kept out; validation_per_domain:
    a number by domain instead, beside those drawn, with prompts of at most validation_prompt_tokens. workers: processes that tokenise.
    """

    format: Literal["auto", "messages", "sharegpt", "alpaca", "pair", "prompt", "text", "tokens"] = "auto"
    columns: dict[str, str] = {}
    domain: str = ""
    max_length: Positive = 4096
    rows: Literal["auto", "conversation", "turn"] = "auto"
    thinking: Annotated[Literal["mixed", "on", "off"], BeforeValidator(on_off)] = "mixed"
    template_kwargs: dict[str, Any] = {}
    min_supervised: Positive = 2
    deduplicate: bool = True
    disjoint_from: tuple[str, ...] = ()
    near: Annotated[float, Field(gt=0, le=1)] = 0.35
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    validation_per_domain: Annotated[int, Field(ge=0)] = 0
    validation_prompt_tokens: Positive | None = None
    max_rows: Positive | None = None
    workers: Positive = 1
    seed: int = 0


class RegenerateConfig(Stage):
    """Answers by the target.

    format, columns, domain: of the input, as for `PrepareConfig`. temperatures: temperature -> share of the prompts. thinking: what the
    chat template is told (default: nothing), through its switch thinking_key ("": the one that it reads). template_kwargs: more for the
    template. extra_body: more fields for every request to an endpoint. max_rows: conversations taken (None: all). batch_size: in process;
    concurrency, retries, timeout (seconds): of an endpoint.
    """

    format: Literal["auto", "messages", "sharegpt", "alpaca", "pair", "prompt"] = "auto"
    columns: dict[str, str] = {}
    domain: str = ""
    temperatures: Annotated[dict[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]], Field(min_length=1)] = {0.0: 1.0}
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 1024
    max_prompt_tokens: Positive | None = None
    thinking: Annotated[Literal["default", "on", "off", "mixed"], BeforeValidator(on_off)] = "default"
    thinking_key: str = ""
    template_kwargs: dict[str, Any] = {}
    extra_body: dict[str, Any] = {}
    max_rows: Positive | None = None
    batch_size: Positive = 64
    concurrency: Positive = 64
    retries: Annotated[int, Field(ge=0)] = 6
    timeout: Annotated[float, Field(gt=0)] = 600.0
    seed: int = 0


class CaptureConfig(Stage):
    """Hidden states on disk. states: precision of the fused states (int8: a scale a token and state). last: of the last state.
    rows_per_shard: rows a file. batch_tokens: tokens a pass, padding included. on_damage: what to do with a shard that cannot be read."""

    states: Literal["int8", "bf16"] = "int8"
    last: Literal["bf16", "int8"] = "bf16"
    rows_per_shard: Positive = 64
    batch_tokens: Positive = 2048
    on_damage: Literal["stop", "recapture", "skip"] = "stop"


class DataConfig(Stage):
    """What is trained on. rows: a folder of `spectrain prepare`; where it is named, `answers` and `prepare` are not looked at.

    states: folder or URL of the hidden states (None: <run>/states); online: compute them while training and keep none.
    """

    answers: AnswersConfig | None = None
    rows: str | None = None
    prepare: PrepareConfig = PrepareConfig()
    capture: CaptureConfig = CaptureConfig()
    states: str | None = None
    online: bool = False

    @model_validator(mode="after")
    def _has_rows(self) -> "DataConfig":
        if self.answers is None and self.rows is None:
            raise ValueError("needed: `rows` (a folder of `spectrain prepare`) or `answers` (prompts that the target answers)")
        return self


class HeadConfig(Stage):
    """kind: a name in `spectrain.heads.base.HEADS`. layer_ids: hidden states hs[i] to read, two to five; None is (2, n // 2, n - 3).

    draft_vocab_size: the most frequent supervised tokens that the head can draft; None: all that the tokenizer has.
    start: a head to go on from (a head directory, or a flat EAGLE-3 folder of ours or of another trainer); sizes, flags and draft
    vocabulary are then its own. init_layer: else start the first decoder layer from the target's last layer, or at random. output: train a
    copy of the target's rows, or keep the copy frozen. num_layers: decoder layers. hidden_size: width of the head (None: the target's).
    sliding_window: settled tokens that a draft looks back on (None: all of them).
    EAGLE-3.1 flags, as vLLM and speculators name them: fc_norm: a norm of its own for every fused state; norm_before_fc: one norm over all
    of them; norm_output: the next draft reads the output after the final norm; norm_before_residual: the residual stream starts from the
    normed feature.
    """

    kind: str = "eagle3"
    layer_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=2, max_length=5)] | None = None
    draft_vocab_size: Positive | None = 6144
    start: str | None = None
    init_layer: Literal["last", "random"] = "last"
    output: Literal["trained", "frozen"] = "trained"
    num_layers: Annotated[int, Field(ge=1, le=4)] = 1
    hidden_size: Positive | None = None
    sliding_window: Positive | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @model_validator(mode="after")
    def _one_norm(self) -> "HeadConfig":
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("head.fc_norm and head.norm_before_fc both norm the fused states; set one of them")
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


class TrainingConfig(Stage):
    """ttt_steps: test-time training steps. tokens_per_step: supervised tokens a batch (a step is `accumulation` batches on every process).

    packing: tokens of a line that several rows share; None: a row a line, padded. domain_weights: how often each domain's rows are drawn
    (None: as many as there are); rows_per_epoch: rows drawn for an epoch (None: as many as there are).
    optimizer: muon takes the matrices inside the head at muon_lr, AdamW the rest. lr is reached after `warmup` (share of all steps);
    then schedule: cosine falls to `final_lr` times itself, wsd keeps it and falls linearly over the last `cooldown` of the run, constant
    keeps it. ema: weights averaged over steps with this factor are measured and saved (None: the weights themselves).
    checkpointing: compute activations again in the backward pass. compile: torch.compile the decoder layer.
    evals_per_epoch, eval_steps: how often acceptance is measured (a number of steps, where it is given, instead). max_minutes: stop
    after this time (a schedule cut short, not stretched); a later call with more minutes goes on. checkpoint_minutes,
    checkpoint_steps: how often the run's state is saved, whichever comes first; keep_last: how many of those are kept. log_steps:
    steps a line of metrics.jsonl.
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
    log_steps: Positive = 10
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    seed: int = 0


class ShapeConfig(Stage):
    """chain: depth of the head's chain. ngram: depth of n-gram drafts, which cost nothing to make. tree: top_k, depth and budget."""

    chain: Positive = 4
    ngram: Positive = 8
    tree_top_k: Positive = 4
    tree_depth: Positive = 5
    tree_budget: Positive = 15


class EvaluationConfig(Stage):
    """suite: a file of eval/suites. speed_prompts: prompts by domain timed one by one, of at most speed_prompt_tokens tokens.

    compile: how the timed passes are made, the same for every arm (true, false, or "auto": compiled where the whole run repays it).
    """

    suite: str = "eval/suites/quick.yaml"
    shapes: ShapeConfig = ShapeConfig()
    batch_size: Positive = 36
    speed_prompts: Positive = 2
    speed_prompt_tokens: Positive = 300
    speed_max_new_tokens: Positive = 64
    compile: bool | Literal["auto"] = "auto"
    seed: int = 0


class Recipe(Stage):
    """Everything that a run needs. `name` and `note` are for people."""

    name: str
    note: str = ""
    target: TargetConfig
    data: DataConfig
    head: HeadConfig = HeadConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


class Suite(Stage):
    """Evaluation prompts by domain: `prompts[domain]` = prompts to take; files are `<folder>/<domain>.jsonl`."""

    name: str
    version: Positive
    folder: str
    prompts: dict[str, Positive]
    max_prompt_tokens: Positive
    max_new_tokens: Positive
    seed: int = 0

    @model_validator(mode="after")
    def _has_domains(self) -> "Suite":
        if not self.prompts:
            raise ValueError("a suite needs at least one domain under `prompts`")
        return self


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text; this loader reads it as the number it is."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.(inf|nan)$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """YAML with numbers such as `1e-4` read as numbers."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def load_config(kind: type[S], path: str | Path, overrides: Iterable[str] = ()) -> S:
    """Read a YAML file and apply `a.b=c` overrides. Raises ValueError naming file, key and what was needed."""
    path = Path(path)
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ValueError(f"no file {path}" + (f"; there are {', '.join(near)}" if near else ""))
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold keys and values, found {type(values).__name__}")
    override(values, overrides)
    return validate(kind, values, where=str(path))


def override(values: dict[str, Any], overrides: Iterable[str]) -> None:
    """Put `a.b=c` into values; ValueError for what is no key and value."""
    for text in overrides:
        key, found, value = text.partition("=")
        if not found or not key:
            raise ValueError(f"--set needs key=value, found {text!r}; for example --set training.epochs=2")
        try:
            _put(values, key.split("."), parse_yaml(value))
        except yaml.YAMLError as error:
            raise ValueError(f"--set {text}: the value is not valid YAML: {error}") from error


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        below = values.setdefault(key, {})
        if not isinstance(below, dict):
            raise ValueError(f"--set {'.'.join(keys)}: {key} holds a value, not further keys")
        values = below
    values[keys[-1]] = value


def validate(kind: type[S], values: Mapping[str, Any], *, where: str) -> S:
    """Check values against a stage; ValueError lists every fault with the key's full name and the keys that exist."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            path = fault["loc"][:-1] if fault["loc"][-1:] == ("[key]",) else fault["loc"]  # a key that is wrong itself
            key = ".".join(str(part) for part in path)
            if fault["type"] == "extra_forbidden":
                lines.append(f"  {key}: unknown key; known here: {', '.join(_fields_at(kind, path[:-1]))}")
            elif fault["type"] == "model_type":
                lines.append(f"  {key}: needs keys below it ({', '.join(_fields_at(kind, path))}), found {fault.get('input')!r}")
            elif fault["type"] == "missing":
                lines.append(f"  {key}: {fault['msg']}")
            else:
                lines.append(f"  {key}: {fault['msg']} (found {fault.get('input')!r})")
        raise ValueError(f"{where}:\n" + "\n".join(lines)) from error


def _fields_at(kind: type[Stage], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        below = kind.model_fields[str(part)].annotation
        found = [t for t in (below, *get_args(below)) if isinstance(t, type) and issubclass(t, Stage)]
        if not found:
            return []
        kind = found[0]
    return sorted(kind.model_fields)


def dump_yaml(config: Stage) -> str:
    """The settings as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
