"""A low-rank adapter (LoRA, arXiv 2106.09685) of a target: made for training, kept in peft's own format, merged into the weights for use,
and how far it moves the target's law.

A target with an adapter is another model, and what speculative decoding gives back is its answers, not the first one's. So a head that was
trained with one names it (`adapter_sha256`), and a merged model keeps the same hash in its config, also when it is saved as a folder.

Legend: N tokens, V vocabulary.
"""

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config import LoraConfig
from spectrain.data.rows import Row
from spectrain.heads.base import ADAPTER, adapter_hash
from spectrain.target.lean import shared_copy
from spectrain.target.model import ADAPTER_MARK, Target
from spectrain.target.quantised import no_merging
from spectrain.target.states import row_pass

RECORD = "made_with.json"  # beside the adapter: fingerprints of the target that it belongs to
FILES = ("adapter_config.json", "adapter_model.safetensors", RECORD)
TIED = ("tokenizer_sha256", "embedding_sha256")  # the fingerprints that tell one target from another


def check_lora(config: LoraConfig, target: Target) -> list[str]:
    """Names of the linear layers that get an adapter. ValueError without peft, and for a target that has none by the names asked for."""
    if find_spec("peft") is None:
        raise ValueError("training.lora needs peft, which is not installed: pip install peft; or leave it out: --set training.lora=null")
    if target.quantization:
        found = f"an adapter that is trained on weights in {target.quantization} cannot be merged into them"
        raise ValueError(f"{found}; load them plain (--set target.quantization=null), or train the head alone: --set training.lora=null")
    if target.placement.sharded:
        found = f"training.lora needs the target whole on every process, its placement is {target.placement.kind}"
        raise ValueError(f"{found}; set --set target.placement=rank, or train the head alone: --set training.lora=null")
    if target.adapter is not None:
        found = f"{target.name} has an adapter merged into it already"
        raise ValueError(f"{found}; choose the target without it, or train the head alone: --set training.lora=null")
    inside = {id(m) for m in target.layers.modules() if isinstance(m, nn.Linear)}
    there = [name for name, m in target.model.named_modules() if id(m) in inside]
    kinds = sorted({name.rpartition(".")[2] for name in there})
    odd = sorted(set(config.modules or ()) - set(kinds))
    if odd or not there:
        has = f"its layers have the linear layers {', '.join(kinds)}" if kinds else "its layers have no linear layers"
        raise ValueError(f"training.lora.modules {', '.join(odd) or 'null'}: {target.name} has no such part to adapt; {has}")
    return [name for name in there if config.modules is None or name.rpartition(".")[2] in config.modules]


def with_adapter(target: Target, config: LoraConfig, *, seed: int) -> tuple[Target, Any]:
    """The target with a new adapter that changes nothing yet, and the peft model that saves it. Every weight of the target itself is
    shared, and its own modules stay as they are."""
    import peft

    names = check_lora(config, target)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=names, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = shared_copy(target.model)
    with torch.random.fork_rng(), _without_hints():
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, settings)
    wrapped.peft_config["default"].base_model_name_or_path = target.name
    return dataclasses.replace(target, model=model.eval()), wrapped


def save_adapter(wrapped: Any, target: Target, folder: Path) -> str:
    """Write the adapter of `target` as peft does, with what it belongs to; returns its hash."""
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # an empty form
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")  # else its owner alone can read it
    (folder / RECORD).write_text(json.dumps({"target": target.name, **{key: target.fingerprints[key] for key in TIED}}, indent=2) + "\n")
    return adapter_hash(folder)


def find_adapter(where: str | Path) -> Path:
    """The folder of an adapter: the one named, or that of a head directory. ValueError where there is none."""
    for folder in (Path(where), Path(where) / ADAPTER):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise ValueError(f"no adapter in {where}; give a head directory with a folder {ADAPTER}, or an adapter as peft saves it")


def copied(where: str | Path) -> Callable[[Path], str]:
    """What writes an adapter, as it is, into another folder, and returns its hash."""
    source = find_adapter(where)

    def write(folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return adapter_hash(folder)

    return write


def merged(target: Target, where: str | Path) -> Target:
    """The target with an adapter merged into its weights, which are changed in place; as it is, where this adapter is in it already.

    ValueError for an adapter of another target, for one more on top of another, and for quantised weights.
    """
    folder = find_adapter(where)
    if target.quantization:
        raise ValueError(no_merging(folder, target.quantization))
    sha256 = adapter_hash(folder)
    if target.adapter == sha256:
        return target
    if target.adapter is not None:
        raise ValueError(f"{target.name} has another adapter than {folder} merged into it; load the target that it was made from")
    import peft

    record = json.loads((folder / RECORD).read_text()) if (folder / RECORD).is_file() else {}
    if odd := [key.removesuffix("_sha256") for key in TIED if record.get(key, target.fingerprints[key]) != target.fingerprints[key]]:
        found = f"{folder} is an adapter of {record.get('target')}, whose {' and '.join(odd)} differs from that of {target.name}"
        raise ValueError(f"{found}; load that target")
    try:
        with _without_hints():
            model = peft.PeftModel.from_pretrained(target.model, str(folder)).merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the adapter {folder} does not fit {target.name}: {' '.join(str(error).split())[:300]}") from error
    setattr(model.config, ADAPTER_MARK, sha256)
    return Target(model=model.eval().requires_grad_(False), tokenizer=target.tokenizer, name=target.name, revision=target.revision)


@contextmanager
def _without_hints() -> Iterator[None]:
    """peft asks models for names that transformers has renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@dataclass(frozen=True)
class LawChange:
    """Sums over `tokens` laws: the divergence KL(original, adapted) in nats, and how often both find the same token likeliest."""

    tokens: int = 0
    kl_nats: float = 0.0
    agree: int = 0

    def __add__(self, other: "LawChange") -> "LawChange":
        return LawChange(self.tokens + other.tokens, self.kl_nats + other.kl_nats, self.agree + other.agree)

    def record(self, rows: str) -> dict[str, Any]:
        """Sums and figures as a report keeps them; rows: what they were counted on."""
        per = {"kl": self.kl_nats / max(1, self.tokens), "agreement": self.agree / max(1, self.tokens)}
        return {**per, "kl_nats": self.kl_nats, "agree": self.agree, "tokens": self.tokens, "rows": rows}


@torch.no_grad()
def law_change(original: Target, adapted: Target, rows: Sequence[Row]) -> LawChange:
    """Both targets' laws for every supervised token of the rows, given what stands before it."""
    total = LawChange()
    for row in rows:
        at_N = torch.from_numpy(row.mask_L[1:].astype("int64")).nonzero()[:, 0]
        if len(at_N):
            p_NV, q_NV = (_log_law(t, row, at_N) for t in (original, adapted))
            kl = float((p_NV.exp() * (p_NV - q_NV)).sum(dtype=torch.float64))
            total += LawChange(len(at_N), kl, int((p_NV.argmax(-1) == q_NV.argmax(-1)).sum()))
    return total


def _log_law(target: Target, row: Row, at_N: Tensor) -> Tensor:
    return row_pass(row, target, (), at_N).logits_BKV[0, :, : target.num_ids].float().log_softmax(-1)


def change_text(change: Mapping[str, Any]) -> str:
    """The figures of a `LawChange.record` in words, with numerator and denominator."""
    kl = f"KL(original, adapted) {change['kl']:.4f} nats a token ({change['kl_nats']:.2f} over {change['tokens']} tokens)"
    return f"{kl}, greedy agreement {change['agreement']:.2%} ({change['agree']}/{change['tokens']}), on {change['rows']}"
