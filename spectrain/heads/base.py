"""What a draft head is, which heads there are, and how one is kept on disk.

A head directory holds `model.safetensors`, `config.json`, `run.yaml` (settings of the run) and `made_with.json` (versions, target,
hashes), and `tokens.json.gz` (the target's tokens by id); and the folder `adapter`, in peft's format, where the target was trained too. It
is written whole or not at all.

Legend: B rows, N nodes or tokens, F width of the states read, W target width, H head width, Vd draft vocabulary.
"""

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spectrain.config import validate
from spectrain.heads.targets import vocabulary_key
from spectrain.heads.tokens import first_difference

HEADS = {
    "eagle3": "spectrain.heads.eagle3:Eagle3",
    "eagle": "spectrain.heads.eagle:Eagle",
    "medusa": "spectrain.heads.medusa:Medusa",
    "hydra": "spectrain.heads.hydra:Hydra",
}
LAST = -1  # in place of a layer number: the last state, which the output layer reads, after the final norm
FORMAT = 1
TOKENS = "tokens.json.gz"
NO_PART_OF_ADAPTER = {"base_model_name_or_path", "peft_version", "inference_mode"}
ADAPTER = "adapter"  # folder of the target's adapter, in the directory of a head that was trained together with one


class KeyValueCache(Protocol):
    """The cache calls that a head makes; the generator passes one in."""

    lengths_B: Tensor
    staged: int

    def stage(self, num: int, pad_B: Tensor | None = None) -> Tensor: ...
    def update(self, k_BGND: Tensor, v_BGND: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...
    def visible(self, ancestors_BNM: Tensor) -> Tensor: ...
    def commit(self, count_B: Tensor, path_BK: Tensor | None = None) -> None: ...
    def discard(self) -> None: ...


@dataclass(frozen=True)
class DraftState:
    """Nodes of the current draft, the root first: their features and the ancestor relation among them.

    hidden_BMH: feature that a child of each node reads. ancestors_BMM: entry (n, m) = m is n or an ancestor of n. level: depth of all nodes
    that are added next, where the host knows it.
    """

    hidden_BMH: Tensor
    ancestors_BMM: Tensor
    level: int | None = None

    def line(self, parents_BN: Tensor) -> Tensor:
        """Boolean [B, N, M + N] of N nodes to be added below nodes of the draft: what each sees, itself and its ancestors."""
        B, N = parents_BN.shape
        above_BNM = self.ancestors_BMM.gather(1, parents_BN[..., None].expand(B, N, self.ancestors_BMM.shape[2]))
        return torch.cat([above_BNM, torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)], dim=2)

    def grown(self, hidden_BNH: Tensor, line_BNM: Tensor) -> "DraftState":
        """With N more nodes: their features, and `line` of them."""
        later_BMN = self.ancestors_BMM.new_zeros(*self.ancestors_BMM.shape[:2], hidden_BNH.shape[1])
        ancestors_BMM = torch.cat([torch.cat([self.ancestors_BMM, later_BMN], dim=2), line_BNM], dim=1)
        return DraftState(hidden_BMH=torch.cat([self.hidden_BMH, hidden_BNH], dim=1), ancestors_BMM=ancestors_BMM)


class TrainingBatch(Protocol):
    """What a head reads of a batch: ids, mask and states of the target, padded at the end; where several documents share a line,
    the document (padding -1) and the position in it of each token."""

    ids_BL: Tensor
    mask_BL: Tensor
    doc_BL: Tensor | None
    position_BL: Tensor | None

    @property
    def states_BLF(self) -> Tensor: ...


@dataclass(frozen=True)
class StepOutput:
    """One test-time step of a head over its R counted rows; they answer the token `ahead` of their own.

    hidden_RH: what the output layer reads. output_VdH: its rows: logits = hidden @ output.T, made piece by piece by the losses.
    feature_RW: the head's guess of the target's last state, where the family has one.
    """

    ahead: int
    hidden_RH: Tensor
    output_VdH: Tensor
    feature_RW: Tensor | None = None


class DraftHead(Protocol):
    """A trainable drafter on the target's hidden states. It never sees the target: embeddings come as arguments.

    settings: fields of `HeadConfig` that are of its family, beside those of every head. gives_feature: whether its outputs hold a guess
    of the target's last state. layer_ids: states of the target that it reads, hs numbers that rise, or `LAST`. max_depth: most drafts on
    a path; None: any. cache_layers: layers, key heads and head size of the cache that it drafts with (no layers: it needs none).
    layers: the modules whose calls `training.compile` compiles.
    """

    settings: frozenset[str]
    config: Any
    gives_feature: bool
    layer_ids: tuple[int, ...]
    target_ids: Tensor

    @property
    def max_depth(self) -> int | None: ...

    @property
    def layers(self) -> Sequence[torch.nn.Module]: ...

    @property
    def cache_layers(self) -> tuple[int, int, int]: ...

    def outputs(
        self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int, *, checkpointing: bool = False
    ) -> Iterator[StepOutput]:
        """What the output layer reads at the given flat rows (b * L + i, rising), one a test-time step; for training."""

    def rows(self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int) -> Iterator[tuple[int, Tensor]]:
        """(ahead, logits [R, Vd]) of the given flat rows, one pair a test-time step: `outputs` through the output layer."""

    def begin(
        self, states_BNF: Tensor, next_BN: Tensor, count_B: Tensor, embed_VW: Tensor, cache: KeyValueCache, state: DraftState | None
    ) -> tuple[Tensor, DraftState]:
        """Take in settled tokens; returns the logits [B, Vd] after the newest one and a state that holds the root alone."""

    def extend(
        self, state: DraftState, tokens_BN: Tensor, parents_BN: Tensor, embed_VW: Tensor, cache: KeyValueCache
    ) -> tuple[Tensor, DraftState]:
        """Add drafted nodes below nodes of `state`; returns their logits [B, N, Vd] and the grown state."""


class HeadModule(nn.Module):
    """What all heads have alike: a config, the states they read, both tables of the draft vocabulary, an output layer `lm_head`."""

    gives_feature = False
    settings: frozenset[str] = frozenset()
    max_depth: int | None = None
    lm_head: Any
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @staticmethod
    def default_layer_ids(num_layers: int) -> tuple[int, ...]:
        """The states that a head of this family reads where the recipe names none."""
        return (LAST,)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.config.layer_ids  # type: ignore[no-any-return]

    @property
    def layers(self) -> list[Any]:
        """The modules whose calls `training.compile` compiles."""
        return []

    @property
    def target_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Fill both tables; target_ids: the draft vocabulary [Vd], rising."""
        self.d2t.copy_(target_ids.cpu() - torch.arange(len(target_ids)))
        self.t2d.zero_()[target_ids.cpu()] = True

    def train_output(self, wanted: bool) -> None:
        """Train the output layer, or leave it as it is."""
        self.lm_head.requires_grad_(wanted)

    def outputs(
        self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int, *, checkpointing: bool = False
    ) -> Iterator[StepOutput]:
        """See `DraftHead`."""
        raise NotImplementedError

    def rows(self, batch: TrainingBatch, row_R: Tensor, embed_VW: Tensor, steps: int) -> Iterator[tuple[int, Tensor]]:
        """(ahead, logits [R, Vd]) of the given flat rows at each test-time step."""
        for step in self.outputs(batch, row_R, embed_VW, steps):
            yield step.ahead, F.linear(step.hidden_RH, step.output_VdH)


def head_class(kind: str) -> Any:
    """The class behind a name in `HEADS`; ValueError names those that exist."""
    if not isinstance(kind, str) or kind not in HEADS:
        raise ValueError(f"head {kind!r} is unknown; there are {', '.join(HEADS)}")
    module, name = HEADS[kind].split(":")
    return getattr(importlib.import_module(module), name)


def kind_of(head: Any) -> str:
    """The name of a head's class in `HEADS`."""
    return next(name for name, where in HEADS.items() if where.endswith(":" + type(head).__name__))


def vocabulary_hash(target_ids: Tensor) -> str:
    """Hash of a draft vocabulary."""
    return hashlib.sha256(target_ids.cpu().numpy().tobytes()).hexdigest()


def check_vocabulary(head: Any) -> None:
    """ValueError unless both tables of the draft vocabulary are there and say the same: without them a head can only say the ids
    0 ... Vd - 1 of the target's vocabulary."""
    ids, marked = head.target_ids.cpu(), head.t2d.cpu().nonzero()[:, 0]
    if not torch.equal(ids, marked):
        found = f"d2t leads to {len(ids)} ids, t2d marks {len(marked)}" + ("" if len(marked) else " (the table was never filled)")
        raise ValueError(f"the head has no table of its draft vocabulary: {found}; start it from draft_vocabulary, or train it anew")


def _record(head: Any, made_with: Mapping[str, Any]) -> dict[str, Any]:
    """How the head was made, with the hash of its draft vocabulary and, where corpus and tokenizer are named, the key of it."""
    record = {**made_with, "vocabulary_sha256": vocabulary_hash(head.target_ids)}
    if key := _key(record, len(head.target_ids)):
        record["vocabulary_key"] = key
    return record


def _key(made_with: Mapping[str, Any], size: int) -> str | None:
    rows, tokenizer = made_with.get("rows_sha256"), made_with.get("tokenizer_sha256")
    return vocabulary_key(rows_sha256=rows, tokenizer_sha256=tokenizer, size=size) if rows and tokenizer else None


def adapter_hash(folder: Path) -> str:
    """Hash of an adapter in peft's format: its weights, and of its settings what says how they count."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        weights = (folder / "adapter_model.safetensors").read_bytes()
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} holds no whole adapter ({error}); copy or train it anew") from error
    told = {key: sorted(v) if isinstance(v, list) else v for key, v in config.items() if key not in NO_PART_OF_ADAPTER}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode() + weights).hexdigest()


def save_head(head: Any, out: Path, *, run_yaml: str, made_with: Mapping[str, Any], adapter: Callable[[Path], str] | None = None) -> None:
    """Write a head directory, replacing an earlier one only once the new one is whole.

    `head.tokens` (of `pack_tokens`), where it is set, is kept too. adapter(folder): write the adapter of the target that was trained with
    the head, and return its hash. ValueError for a head without a table of its draft vocabulary.
    """
    check_vocabulary(head)
    part, old = out.with_name(out.name + ".part"), out.with_name(out.name + ".old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    config = {"head": kind_of(head), "format": FORMAT, **head.config.model_dump(mode="json")}
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copymode(part / "config.json", part / "model.safetensors")  # safetensors writes files that only their owner can read
    (part / "run.yaml").write_text(run_yaml)
    if adapter is not None:
        made_with = {**made_with, "adapter_sha256": adapter(part / ADAPTER)}
    (part / "made_with.json").write_text(json.dumps(_record(head, made_with), indent=2) + "\n")
    if tokens := getattr(head, "tokens", None):
        (part / TOKENS).write_bytes(tokens)
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(part, out)
    shutil.rmtree(old, ignore_errors=True)


def load_head(folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", mapped: bool = False) -> Any:
    """Load a head directory in evaluation mode. `head.adapter`: the folder of the target's adapter, None for a head trained alone.

    mapped: weights stay in the file, in its precision, as far as nothing changes them: to look at a head, not to keep it; they are not
    looked through. Raises ValueError when the folder is none, is damaged, of a newer format, when its tensors do not fit its config or are
    no finite weights, or when the adapter is damaged or another one.
    """
    folder = Path(folder)
    config, made_with = (_read_json(folder, name) for name in ("config.json", "made_with.json"))
    if config.pop("format", None) != FORMAT:
        raise ValueError(f"{folder} is of another format than {FORMAT}; update spectrain or train the head anew")
    cls = head_class(config.pop("head", ""))
    sizes = validate(cls.Config, config, where=f"{folder}/config.json")
    try:
        with _without_weights():  # sizes may be anything until the tensors were held to them
            head = cls(sizes)
        tensors = load_file(folder / "model.safetensors")
        own = tensors if mapped else {name: tensor.clone() for name, tensor in tensors.items()}
        head.load_state_dict(own, strict=True, assign=True)
    except (SafetensorError, OSError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{folder}/model.safetensors does not hold this head ({error}); train or export it anew") from error
    _check_tensors(head, folder, finite=not mapped)
    if vocabulary_hash(head.target_ids) != made_with.get("vocabulary_sha256"):
        raise ValueError(f"{folder}: the draft vocabulary is not the one the head was trained with; train it anew")
    if made_with.get("vocabulary_key", key := _key(made_with, len(head.target_ids))) != key:
        found = f"{folder}/made_with.json names another corpus, tokenizer or size than"
        raise ValueError(f"{found} the draft vocabulary was cut for (vocabulary_key); train the head anew")
    check_vocabulary(head)
    wanted, head.adapter = made_with.get("adapter_sha256"), None
    if wanted is not None and (folder / ADAPTER).is_dir():  # a target that was saved with one in it has no folder of it
        head.adapter = folder / ADAPTER
        if adapter_hash(head.adapter) != wanted:
            raise ValueError(f"{head.adapter} is not the adapter that the head was trained with; copy the whole directory again")
    head.made_with = made_with
    head.tokens = (folder / TOKENS).read_bytes() if (folder / TOKENS).is_file() else None
    return (head if mapped else head.to(device=device, dtype=dtype)).eval().requires_grad_(False)


def _check_tensors(head: Any, folder: Path, *, finite: bool) -> None:
    """ValueError for weights in 8 bits and tables of another type, and, if asked for, for weights that are NaN or infinite."""
    tensors, tables = dict(head.named_parameters()), {"d2t": torch.int64, "t2d": torch.bool}
    odd = [f"{name} in {weight.dtype}" for name, weight in tensors.items() if not weight.is_floating_point() or weight.itemsize < 2]
    odd += [f"{name} in {getattr(head, name).dtype}" for name, dtype in tables.items() if getattr(head, name).dtype != dtype]
    if odd or (finite and (odd := [f"NaN or infinite values in {name}" for name, w in tensors.items() if not bool(w.isfinite().all())])):
        raise ValueError(f"{folder}/model.safetensors holds {', '.join(odd)}; copy the head again, or take an earlier checkpoint")


def _without_weights() -> Any:
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=False)


def check_head(head: Any, fingerprints: Mapping[str, str], target: str, tokenizer: Any = None, *, to_train: bool = False) -> None:
    """ValueError when a head was trained for another target than the one with these hashes; with the target's tokenizer, it names the
    first id that the two read otherwise. to_train: the head is trained further, and may have begun on weights in other bits."""
    made_with = getattr(head, "made_with", {})
    for key in ("tokenizer_sha256", "embedding_sha256"):
        if key in made_with and made_with[key] != fingerprints[key]:
            what = key.removesuffix("_sha256")
            where = _first_token(head, target, tokenizer) if what == "tokenizer" else ""
            raise ValueError(
                f"this head was trained for {made_with.get('target')} (its {what} differs from that of {target}{where}); "
                f"load that target, or train a head: spectrain train RECIPE --set target.name={target}"
            )
    if made_with and made_with.get("adapter_sha256") != fingerprints.get("adapter_sha256"):
        raise ValueError(_adapter_differs(head, made_with, fingerprints, target))
    if made_with and not to_train and made_with.get("quantization") != fingerprints.get("quantization"):
        raise ValueError(_quantization_differs(made_with.get("quantization"), fingerprints.get("quantization"), target))


def _quantization_differs(trained: str | None, loaded: str | None, target: str) -> str:
    has = f"this head was trained on the states of a target {_kept(trained)}, and {target} is loaded {_kept(loaded)}"
    load = f"load it so (--quantization {trained})" if trained else "load it without quantization"
    go_on = f"spectrain train RECIPE --set head.start=HEAD --set target.quantization={loaded or 'null'}"
    return f"{has}; {load}, or go on from the head: {go_on}"


def _kept(quantization: str | None) -> str:
    return f"with its weights in {quantization}" if quantization else "in full precision"


def _adapter_differs(head: Any, made_with: Mapping[str, Any], fingerprints: Mapping[str, str], target: str) -> str:
    has = "has another one" if "adapter_sha256" in fingerprints else "is without it"
    if "adapter_sha256" not in made_with:
        return f"{target} has an adapter, and this head was trained for the target without one; load the target that it was made from"
    where = repr(str(getattr(head, "adapter", None) or "HEAD"))
    load = f"load_target({str(made_with.get('target'))!r}, adapter={where})"
    return f"this head was trained together with an adapter of its target, and {target} {has}; load them together: {load}"


def _first_token(head: Any, target: str, tokenizer: Any) -> str:
    """Where the two tokenizers differ first, as far as it is known: heads of earlier versions keep no tokens."""
    packed = getattr(head, "tokens", None)
    found = first_difference(packed, tokenizer.get_vocab()) if packed and tokenizer is not None else None
    if found is None:
        return ""
    number, its, ours = found
    of_head, of_target = ("no token" if token is None else repr(token) for token in (its, ours))
    return f", first at id {number}: {of_head} of the head, {of_target} of {target}"


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} is no head directory: {name} is missing; train one with `spectrain train RECIPE`")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); train or copy the head anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}, an object was needed; train or copy the head anew")
    return found
