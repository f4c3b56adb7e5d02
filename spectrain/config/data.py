"""Settings of target and data: where conversations come from, how they become rows, and rows states."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from spectrain.config.files import Fraction, Positive, Stage

ChatDialect = Literal["auto", "messages", "sharegpt", "alpaca", "pair", "prompt"]
Dialect = Literal["auto", "messages", "sharegpt", "alpaca", "pair", "prompt", "text", "tokens"]


def on_off(value: Any) -> Any:
    """YAML 1.1 reads `on` and `off` as truth values; as the name of a mode they are words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class TargetConfig(Stage):
    """name: Hub name, folder or .gguf file. adapter: folder of a peft adapter, or of a head that was trained with one; merged at loading.

    quantization: weights of the linear layers in so many bits (bitsandbytes). placement: how the target lies on several processes: whole
    on each (rank), layers sharded and gathered for every pass (fsdp2, zero3), or every product split over tp_size of them (tp; None: all
    processes of a machine).
    """

    name: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    adapter: str | None = None
    quantization: Literal["8bit", "4bit"] | None = None
    placement: Literal["rank", "fsdp2", "tp", "zero3"] = "rank"
    tp_size: Positive | None = None


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

    format: dialect of every input, or by pattern of file names (the first that fits counts); auto: found out per file. columns: our name
    -> the input's, where they differ (`domain: category`). domain: of rows that name none ("": their file's name). too_long: of a
    conversation with a row of more than max_length tokens, keep the beginning (cut) or nothing (reject). rows: one a conversation, one an
    assistant turn, or auto: a turn a row only where the template rewrites earlier turns. thinking: keep answers with reasoning (on),
    without (off), or all (mixed). template_kwargs: passed to the chat template. min_supervised: fewer supervised tokens in a line reject
    the row. disjoint_from: evaluation prompts (files or folders); conversations that ask or quote one of them, or share `near` of their
    runs of eight words with one, are rejected. max_rows: conversations drawn, every domain in its share. validation: share of them kept
    out; validation_per_domain: a number by domain instead, beside those drawn, with prompts of at most validation_prompt_tokens. workers:
    processes that tokenise.
    """

    format: Dialect | dict[str, Dialect] = "auto"
    columns: dict[str, str] = {}
    domain: str = ""
    max_length: Positive = 4096
    too_long: Literal["cut", "reject"] = "cut"
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

    format: ChatDialect | dict[str, ChatDialect] = "auto"
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
