"""What the config.json of a head's folder says: read with types, so that a field of another kind is refused by its name and never taken
for something else ("false" is no switch that is off, true is no number). A field that is missing is None: its default is the reader's.

A key that changes what the head computes, and that no head here can follow, is refused, too (`FIXED`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field

from spectrain.config import Stage, validate
from spectrain.export.layout import CONFIG, FLAGS, SPECULATORS
from spectrain.heads.layers import rotary_frequencies

Whole = Annotated[int, Field(ge=1, le=2**40)]
Above = Annotated[float, Field(gt=0, lt=1e30)]
Ids = Annotated[list[Annotated[int, Field(ge=-1, le=2**20)]], Field(min_length=1)]
ROPE_BASE, NORM_EPS, POSITIONS = 10_000.0, 1e-6, 2048  # of transformers' LlamaConfig, which engines read such a config with
HEADS = 32  # of the same, and left out where it is that: by the speculators format alone, which writes differences
FIXED: dict[str, Any] = {  # what a head here has; another value would compute something else
    "logit_scale": 1.0, "partial_rotary_factor": 1.0, "eagle_config.use_aux_hidden_state": True, "eagle_config.next_layer_regular": True,
    "eagle_config.eh_proj_before_attn": False, "eagle_config.use_input_layernorm_in_first_layer": True,
    "eagle_config.use_last_layernorm": True, "eagle_config.use_mtp_layernorm": False, "eagle_config.parallel_draft_step": 1,
}  # fmt: skip
ROPE = {  # by type, the keys it needs and those it may have; every one a number, or a list of them
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", "original_max_position_embeddings"), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}
CORRECT = "correct the config, or download the folder again"


class Told(Stage):
    """Base: other keys are passed over, no value is turned into one of another kind."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Ours(Told):
    """The `spectrain` block of a folder that was exported here."""

    hs_layer_ids: Ids | None = None
    target_layers: Whole | None = None
    shared_output: bool | None = None
    fc_bias: bool | None = None


class Record(Told):
    """What every folder may have."""

    spectrain: Ours = Ours()


class Nested(Told):
    """`eagle_config`."""

    eagle_aux_hidden_state_layer_ids: Ids | None = None
    norm_before_fc: bool | None = None
    norm_output: bool | None = None
    return_hidden_post_norm: bool | None = None
    use_aux_hidden_state: bool | None = None
    next_layer_regular: bool | None = None
    eh_proj_before_attn: bool | None = None
    use_input_layernorm_in_first_layer: bool | None = None
    use_last_layernorm: bool | None = None
    use_mtp_layernorm: bool | None = None
    parallel_draft_step: int | None = None


class Layers(Record):
    """Decoder layers."""

    model_type: Any = None
    architectures: list[str] | None = None
    num_hidden_layers: Whole | None = None
    num_attention_heads: Whole | None = None
    head_dim: Whole | None = None
    hidden_act: str | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    max_position_embeddings: Whole | None = None
    sliding_window: int | None = None
    layer_types: Annotated[list[str], Field(min_length=1)] | None = None
    rope_theta: Above | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None


class Eagle3Told(Layers):
    """An EAGLE-3 head, flat or in the speculators format."""

    speculators_model_type: str | None = None
    vocab_size: Whole | None = None
    target_hidden_size: Whole | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_output: bool | None = None
    logit_scale: float | None = None
    eagle_aux_hidden_state_layer_ids: Ids | None = None
    eagle_config: Nested | None = None

    @property
    def nested(self) -> Nested:
        return self.eagle_config or Nested()


T = TypeVar("T", bound=Record)
TOP = {*FLAGS, SPECULATORS, "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "spectrain"}  # read beside the layer in speculators


def read_told(kind: type[T], config: Mapping[str, Any], folder: Path) -> T:
    """A config read as `kind`. ValueError names every field of another type, and every key that no head here can follow."""
    where = f"{folder}/{CONFIG}"
    try:
        told = validate(kind, {key: value for key, value in config.items() if value is not None}, where=where)
    except ValueError as error:
        raise ValueError(f"{error}\n{CORRECT}") from error
    for key, has in FIXED.items():
        value: Any = told
        for part in key.split("."):
            value = getattr(value, part, None)
        if value is not None and value != has:
            raise ValueError(f"{where} has {key} {value!r}; heads here have {has!r}: train one instead of taking this")
    return told


def eagle3_values(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of an EAGLE-3 config in one: of the speculators format, those of its layer, and flags and ids as vLLM takes them."""
    if SPECULATORS not in config and "transformer_layer_config" not in config:
        return dict(config)
    if SPECULATORS not in config:
        raise ValueError(f"{folder}/{CONFIG} has transformer_layer_config and no {SPECULATORS}, which says what it is of; {CORRECT}")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{folder}/{CONFIG} has transformer_layer_config {layer!r}, the settings of a layer were needed; {CORRECT}")
    if layer.get("model_type", "llama") != "llama":
        raise ValueError(
            f"{folder}/{CONFIG} has a layer of model_type {layer['model_type']!r}; heads here have Llama layers: train one instead"
        )
    heads = {} if layer.get("num_attention_heads") or layer.get("head_dim") else {"num_attention_heads": HEADS}
    return {k: v for k, v in layer.items() if k not in TOP} | heads | {k: v for k, v in config.items() if k in TOP}


def rope_of(told: Layers, folder: Path, notes: list[str]) -> dict[str, Any]:
    """Rotary settings in today's spelling, with the keys of their type alone. A missing base is what training used: 10,000, whatever the
    target has. ValueError for settings without a type, of an unknown one, or with a key that is missing or no number."""
    where = f"{folder}/{CONFIG}"
    found = {key: value for key, value in (told.rope_parameters or told.rope_scaling or {}).items() if value is not None}
    if any(isinstance(value, dict) for value in found.values()) or found.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{where} has rope settings {found}; one set that turns the whole of each attention head was needed")
    base = found.pop("rope_theta", told.rope_theta)
    if base is None:
        base = ROPE_BASE
        notes.append("no rope_theta: 10,000, which such heads were trained with, not the target's")
    kind = found.get("rope_type", found.get("type"))
    if kind is None and found:
        raise ValueError(f"{where} has rope settings {found} without rope_type, so they say nothing; {CORRECT}")
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in ROPE:
        raise ValueError(f"{where} has rope_type {kind!r}; needed is one of {', '.join(ROPE)}")
    needed, more = ROPE[kind]
    if missing := [key for key in needed if key not in found]:
        raise ValueError(f"{where} has rope settings of type {kind} without {', '.join(missing)}; {CORRECT}")
    rope = {"rope_theta": base, **{key: found[key] for key in (*needed, *more) if key in found}}
    if bad := [f"{key} {value!r}" for key, value in rope.items() if not _number(value, key)]:
        raise ValueError(f"{where} has {', '.join(bad)} among its rope settings; numbers above 0 were needed: {CORRECT}")
    return {"rope_type": kind, **rope}


def _number(value: Any, key: str) -> bool:
    if key == "truncate":
        return isinstance(value, bool)
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list) and bool(value) and all(_number(each, "") for each in value)
    kinds = int if key == "original_max_position_embeddings" else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < 1e30


def check_rope(rope: Mapping[str, Any], head_dim: int, positions: int, folder: Path) -> None:
    """ValueError for rotary settings that give no finite frequencies for heads of this size."""
    try:
        frequencies, scaling = rotary_frequencies(rope, head_dim=head_dim, max_positions=positions)
        sound = len(frequencies) == head_dim // 2 and bool(frequencies.isfinite().all()) and 0 < scaling < 1e6
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError):
        sound = False
    if not sound:
        found = f"{folder}/{CONFIG} has rope settings {dict(rope)} for attention heads of {head_dim}"
        raise ValueError(f"{found}, which give no positions; {CORRECT}")
