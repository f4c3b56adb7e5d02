"""What a plan reads: the target's config (no weights), the head's real class on torch's meta device, and the index of prepared rows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError

from spectrain.cli.probe import PROBE_TOKENS
from spectrain.cli.stages import PACKAGE, PROBE_PROMPT_TOKENS, PROBE_ROWS, package_gguf, probe_rows
from spectrain.config import HeadConfig, Recipe, TrainingConfig
from spectrain.data.codes import bytes_a_token
from spectrain.data.order import Planner, row_shares, sizes
from spectrain.data.row_store import RowStore
from spectrain.evaluation.price import experts_share
from spectrain.heads.base import head_class
from spectrain.planning.sizes import Data, HeadSize, Matrix, TargetSize
from spectrain.target.capture import ANSWER_BYTES
from spectrain.target.model import Target
from spectrain.training.optim import OUTSIDE
from spectrain.training.setup import check_settings, check_training, head_sizes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")  # of a target's config
MOST_BATCHES = 20_000  # looked at, spread over an epoch's
UNIT_LENGTH = 1024  # tokens a row, where nothing is known
UNIT_SHARE = 0.5  # of them supervised


@dataclass(frozen=True)
class Skeleton:
    """What sizes of a head are made from: a target without weights. config: of its text model."""

    config: Any
    vocab_size: int
    name: str

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)


def read_config(name: str, revision: str | None) -> Any:
    """The config of a target: a folder with config.json, a Hub name, a .gguf file, `package:NAME`. ValueError when there is none."""
    from transformers import AutoConfig

    found, where = name, {"revision": revision} if revision else {}
    path = package_gguf(name.removeprefix(PACKAGE)) if name.startswith(PACKAGE) else Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        found, where = str(path.parent), {"gguf_file": path.name}
    elif path.exists():
        found = str(path)
    try:
        return AutoConfig.from_pretrained(found, **where)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        told = str(error).strip().split("\n")[0]
        raise ValueError(f"no config of a target at {name} ({told}); give a folder with its config.json or a Hub name: --target") from error


def target_size(config: Any, name: str, dtype: str, quantization: str | None = None) -> TargetSize:
    """Counts of a model made from its config on the meta device, where tensors have shapes and no memory. ValueError for a model that
    is no causal one of attention layers."""
    c = config.get_text_config()
    if lacking := [n for n in NEEDED if not isinstance(getattr(c, n, None), int)]:
        kind = type(c).__name__
        raise ValueError(f"{name} is no target: its config ({kind}) has no {', '.join(lacking)}; choose a causal model of attention layers")
    model = _skeleton(config, c, name)
    Target(model=model, tokenizer=cast(Any, None), name=name).check_kind()
    sizes_by_name = {n: p.numel() for n, p in model.named_parameters()}  # shared ones once
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    experts = sum(count for n, count in sizes_by_name.items() if re.search(r"\.experts\.", n) and "shared" not in n)
    share = experts_share(c) if experts else 1.0
    layers = [count for prefix, count in _by_layer(sizes_by_name).items() if prefix]
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight is not output]
    W, heads = c.hidden_size, c.num_attention_heads
    params = sum(sizes_by_name.values())
    inner = getattr(c, "moe_intermediate_size", None) or getattr(c, "intermediate_size", None) or 4 * W
    return TargetSize(
        name=name, layers=c.num_hidden_layers, width=W, vocab=embedding.shape[0], heads=heads,
        kv_heads=getattr(c, "num_key_value_heads", None) or heads, head_dim=getattr(c, "head_dim", None) or W // heads,
        inner=inner * (getattr(c, "num_experts_per_tok", None) or 1 if experts else 1), params=params,
        active=round(params - experts * (1 - share)), embedding=embedding.numel(), tied=output is embedding,
        unit=max([*layers, embedding.numel()]), max_length=c.max_position_embeddings, bytes_a_weight=BYTES[dtype], experts=share,
        linear=sum(linear), quantization=quantization,
    )  # fmt: skip


def _skeleton(config: Any, text: Any, name: str) -> Any:
    """The model of a config, or of its text part, without memory."""
    from transformers import AutoModelForCausalLM

    known = AutoModelForCausalLM._model_mapping
    made_of = next((c for c in (config, text) if type(c) in known), None)
    if made_of is None:
        raise ValueError(f"{name} is no target: transformers makes no causal model of a {type(config).__name__}; choose another --target")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made_of)


def _by_layer(counts: dict[str, int]) -> dict[str, int]:
    """Parameters of each decoder layer, by its name up to its number; "" for what is in none."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        match = re.match(r"(.*?layers\.\d+)\.", name)
        key = match[1] if match else ""
        found[key] = found.get(key, 0) + count
    return found


def head_size(head: HeadConfig, training: TrainingConfig, target: Skeleton) -> HeadSize:
    """Counts of the head's own class, made on the meta device. ValueError for settings that this head or target cannot have."""
    check_settings(head)
    check_training(head, training)
    cls = head_class(head.kind)
    # The form of the rotary positions has no parameters, and some forms compute with real numbers.
    values = {**head_sizes(head, cast(Target, target)), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if head.draft_vocab_size is not None and head.draft_vocab_size > target.vocab_size:
        found = f"head.draft_vocab_size {head.draft_vocab_size} is above the {target.vocab_size} rows of {target.name}"
        raise ValueError(f"{found}; lower it: --set head.draft_vocab_size={target.vocab_size} (null: all of them)")
    values["draft_vocab_size"] = head.draft_vocab_size or target.vocab_size
    with torch.device("meta"):
        made = cls(cls.Config(**{name: value for name, value in values.items() if name in cls.Config.model_fields}))
    made.train_output(head.output == "trained")
    named = list(made.named_parameters())
    muon = [p for name, p in named if p.requires_grad and p.dim() == 2 and name.split(".")[0] not in OUTSIDE]
    layers, kv_heads, head_dim = made.cache_layers
    c = made.config
    return HeadSize(
        kind=head.kind, params=sum(p.numel() for _, p in named), trained=sum(p.numel() for _, p in named if p.requires_grad),
        tables=sum(b.numel() * b.element_size() for b in made.buffers()),
        matrices=tuple(Matrix(n, *p.shape) for n, p in named if p.dim() == 2),
        width=getattr(c, "hidden_size", c.target_hidden_size), target_width=c.target_hidden_size,
        inner=c.intermediate_size if layers else 0, states=len(made.layer_ids), layers=layers,
        heads=c.num_attention_heads if layers else 0, kv_heads=kv_heads if layers else 0, head_dim=head_dim if layers else 0,
        draft_vocab=c.draft_vocab_size, outputs=sum(n.startswith("lm_head") for n, _ in named), output_trained=head.output == "trained",
        muon=sum(p.numel() for p in muon) if training.optimizer == "muon" else 0, max_depth=made.max_depth,
    )  # fmt: skip


def store_bytes(recipe: Recipe, head: HeadSize, *, states: str | None = None, last: str | None = None) -> tuple[int, int]:
    """Bytes of a store: of a token's states, and of what a supervised token adds."""
    kinds = states or recipe.data.capture.states, last or recipe.data.capture.last
    width = head.target_width
    return (
        bytes_a_token(width=width, states=head.states, kind=kinds[0]), bytes_a_token(width=width, states=1, kind=kinds[1]) + ANSWER_BYTES
    )  # fmt: skip


def data_of(
    recipe: Recipe, *, rows: Path | None, tokens: float | None, length: int | None, share: float | None, longest: int
) -> tuple[Data, RowStore | None]:
    """Rows, tokens and supervised tokens of an epoch: of prepared rows, as told, or the most that the recipe's prompts give.

    longest: tokens that the target takes. Raises ValueError when nothing says how much there is.
    """
    if tokens is None and (length or share):
        raise ValueError("--row-length and --supervised-share tell of the rows of --tokens; add --tokens N or leave them out")
    if tokens is not None and rows is not None:
        raise ValueError("--rows and --tokens both say how much data there is; give one of them")
    folder = rows or (Path(recipe.data.rows) if recipe.data.rows and Path(recipe.data.rows).exists() else None)
    if folder is not None and tokens is None:
        return _of_rows(recipe, folder)
    most = min(recipe.data.prepare.max_length, longest)
    if tokens is not None:
        if not isfinite(tokens):
            raise ValueError(f"--tokens is a number, such as 1e9, found {tokens}")
        if length and length > most:
            found = f"--row-length {length} is above {most}, which a row may have (data.prepare.max_length, and the target's {longest})"
            raise ValueError(f"{found}; lower it, or raise the setting: --set data.prepare.max_length=N")
        mean, part = length or min(UNIT_LENGTH, most), share or UNIT_SHARE
        told = f"--tokens; rows of {mean} tokens, {part:.0%} of them supervised" + ("" if length and share else " (assumed)")
        return Data(tokens / mean, tokens, tokens * part, most, told), None
    if recipe.data.answers is None:
        found = f"data.rows {recipe.data.rows} is not there" if recipe.data.rows else "the recipe names no rows"
        raise ValueError(f"{found}; say how much data there is: --rows FOLDER or --tokens N")
    a = recipe.data.answers
    asked = sum(a.mix.values())
    each = min(most, a.max_prompt_tokens + a.max_new_tokens)
    told = f"{asked} prompts of the recipe, each of at most {a.max_prompt_tokens} + {a.max_new_tokens} tokens"
    return Data(asked, asked * each, asked * min(a.max_new_tokens, each), each, told), None


def _of_rows(recipe: Recipe, folder: Path) -> tuple[Data, RowStore]:
    store, t = RowStore(folder), recipe.training
    found = sizes(store)
    tokens, supervised = int(found.length_N.sum()), int(found.supervised_N.sum())
    if not supervised:
        raise ValueError(f"{folder} has no row with two supervised tokens; prepare it from answers")
    quota = row_shares(found, t.domain_weights, t.rows_per_epoch)
    plan = Planner(found, per_batch=t.tokens_per_step, seed=t.seed, quota=quota, packing=t.packing).plan(0)
    largest = (0, 0, 0)
    for k in range(0, len(plan), max(1, ceil(len(plan) / MOST_BATCHES))):
        lines = plan[k]
        lengths = [[int(found.length_N[i]) for i in line] for line in lines]
        padded = len(lines) * max(map(sum, lengths))
        counted = sum(int(found.supervised_N[i]) for line in lines for i in line)
        largest = max(largest, (counted, sum(map(sum, lengths)), padded), key=lambda x: x[0] + x[2])
    drawn = sum(quota.values()) / max(1, int((found.supervised_N > 0).sum()))
    told, longest = f"{len(store):,} rows of {folder}", int(found.length_N.max())
    return Data(len(store) * drawn, tokens * drawn, supervised * drawn, longest, told, largest, len(plan)), store


def answer_lengths(store: RowStore | None) -> Any:
    """(prompt tokens, answer tokens) [N, 2] of the rows that answer something; of a conversation of several turns as if it had one."""
    if store is None:
        return None
    found = sizes(store)
    answered_N = found.supervised_N > 0
    return np.stack([found.length_N - found.supervised_N, found.supervised_N], axis=1)[answered_N]


def probe_of(recipe: Recipe, head: HeadSize, store: RowStore | None, longest: int) -> tuple[int, int, int]:
    """Rows that acceptance is measured on, the longest prompt of them, and the positions that their caches have."""
    chain = recipe.evaluation.shapes.within(head.max_depth).chain
    prepare = recipe.data.prepare
    if store is not None:
        validation = RowStore(store.folder, "validation")
        prompts = [len(row.prompt_ids) for row in probe_rows(validation)] if len(validation) else []
    elif prepare.validation or prepare.validation_per_domain:
        domains = len(recipe.data.answers.mix) if recipe.data.answers else PROBE_ROWS
        count = min(PROBE_ROWS, domains * (prepare.validation_per_domain or PROBE_ROWS))
        prompts = [min(longest, prepare.validation_prompt_tokens or PROBE_PROMPT_TOKENS)] * count
    else:
        prompts = []
    prompt = max(prompts, default=0)
    return len(prompts), prompt, prompt + PROBE_TOKENS + 2 * (1 + chain)


def unsaid(recipe: Recipe, config: Any) -> Sequence[str]:
    """What the recipe or the target has and the plan does not count."""
    notes = []
    if recipe.training.lora is not None:
        notes.append("training.lora: passes and activations of the target that is trained, too, are not counted")
    if recipe.head.start is not None:
        notes.append("head.start: sizes are those of the recipe, the head that is started from may have others")
    c = config.get_text_config()
    if set(getattr(c, "layer_types", None) or ()) - {"full_attention"} or getattr(c, "sliding_window", None):
        notes.append("windows of the target's attention: caches are those of layers that keep every token, and attention sees all of them")
    if getattr(config, "quantization_config", None):
        notes.append("the target's config is of quantised weights; counted are those of target.dtype")
    if recipe.training.max_minutes is not None or recipe.training.steps is not None:
        notes.append("training.steps and training.max_minutes end a run earlier: hours are those of all epochs")
    return notes
