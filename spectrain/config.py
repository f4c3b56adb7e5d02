"""Settings of every stage: one frozen model a stage, unknown keys refused, YAML in and out. Every default is written here."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


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


class DataConfig(Stage):
    """answers: rows to train on are made from these. validation: conversations by domain kept out of training."""

    answers: AnswersConfig
    max_length: Positive = 640
    max_rows: Positive | None = None
    validation_per_domain: Positive = 2


class HeadConfig(Stage):
    """kind: a name in `spectrain.heads.base.HEADS`. layer_ids: hidden states hs[i] to read; None is (2, n // 2, n - 3).

    init_layer: start the decoder layer from the target's last layer, or at random. output: train a copy of the target's rows,
    or keep the copy frozen.
    """

    kind: str = "eagle3"
    layer_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    draft_vocab_size: Positive = 6144
    init_layer: Literal["last", "random"] = "last"
    output: Literal["trained", "frozen"] = "trained"


class TrainingConfig(Stage):
    """ttt_steps: test-time training steps. decay: weight of step k is decay**k. tokens_per_step: supervised tokens a step and rank.

    lr is reached after `warmup` (share of all steps) and falls to `final_lr` times itself by a cosine. evals_per_epoch: how
    often acceptance is measured. max_minutes: stop early after this time (a schedule cut short, not stretched).
    """

    epochs: Positive = 3
    ttt_steps: Positive = 3
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    tokens_per_step: Positive = 256
    accumulation: Positive = 1
    lr: Annotated[float, Field(gt=0)] = 2e-3
    warmup: Fraction = 0.04
    final_lr: Fraction = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    evals_per_epoch: Positive = 1
    steps: Positive | None = None
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    checkpoint_minutes: Annotated[float, Field(gt=0)] = 2.0
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
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
            key = ".".join(str(part) for part in fault["loc"])
            if fault["type"] == "extra_forbidden":
                known = ", ".join(_fields_at(kind, fault["loc"][:-1]))
                lines.append(f"  {key}: unknown key; known here: {known}")
            else:
                lines.append(f"  {key}: {fault['msg']} (found {fault.get('input')!r})")
        raise ValueError(f"{where}:\n" + "\n".join(lines)) from error


def _fields_at(kind: type[Stage], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        below = kind.model_fields[str(part)].annotation
        if not (isinstance(below, type) and issubclass(below, Stage)):
            return []
        kind = below
    return sorted(kind.model_fields)


def dump_yaml(config: Stage) -> str:
    """The settings as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
