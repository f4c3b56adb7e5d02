"""The frozen target: loading (Hub name, folder, GGUF file), and one forward that returns logits and chosen hidden states.

`hs[i]` is the residual stream after i layers, before any final norm; `hs[0]` are the embeddings. The *last state* is what the
output layer reads, that is, after the final norm; among layer numbers it is `LAST`.

Legend: B rows, N positions of one pass, M staged nodes, L prompt columns, S cache slots, V vocabulary, W hidden width,
F = len(layer_ids) * W.
"""

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.data.identity import fingerprints
from spectrain.heads.base import LAST
from spectrain.kernels import tree_attention
from spectrain.kernels.divergence import Backend
from spectrain.target.cache import PassCache, SlabCache, causal_mask
from spectrain.target.devices import usable
from spectrain.target.placement import Placement, finish, loading, open_placement
from spectrain.target.quantised import full_weights, loading_options, quantization_of, settle
from spectrain.target.spread_cache import SpreadCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = ("full_attention", "sliding_attention")  # kinds of layer, in the names of transformers
ADAPTER_MARK = "spectrain_adapter_sha256"  # in the config of a model that an adapter was merged into
# [B, 1, N, S], or packed [B, 1, N, C]; one for each kind of layer where there are two; None: all are visible
Masks = Tensor | dict[str, Tensor] | None


@dataclass(frozen=True)
class TargetOutput:
    """`logits_BKV` of the positions asked for; `states_BNF` the chosen states side by side; `last_BKW` the last state."""

    logits_BKV: Tensor
    states_BNF: Tensor | None
    last_BKW: Tensor


@dataclass(frozen=True)
class Target:
    """A frozen causal language model with its tokenizer. `load_target` makes it.

    One that is spread over processes (`placement`) is asked by all of them at the same time: for a pass, for weights, for fingerprints.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None = None
    placement: Placement = field(default_factory=Placement)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def adapter(self) -> str | None:
        """Hash of the adapter that was merged into the model (target/adapter.py), None for a model without one."""
        return getattr(self.model.config, ADAPTER_MARK, None)

    @property
    def quantization(self) -> str | None:
        """`8bit` or `4bit` where the linear layers are kept so (target/quantised.py)."""
        return quantization_of(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.embedding_VW.shape[0]

    @cached_property
    def num_ids(self) -> int:
        """Ids that the tokenizer knows; rows of embedding and output beyond them are padding."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def max_length(self) -> int:
        """Most positions that the model was made for."""
        return self.config.max_position_embeddings

    @property
    def embedding_VW(self) -> Tensor:
        return self._gathered[0] if self.placement.sharded else self.model.get_input_embeddings().weight

    @property
    def output_VW(self) -> Tensor:
        return self._gathered[1] if self.placement.sharded else self.model.get_output_embeddings().weight

    @cached_property
    def _gathered(self) -> tuple[Tensor, Tensor]:
        """Embedding and output rows in full, one tensor where they are tied; every process keeps them."""
        rows = [module.weight for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings())]
        first_VW = self.placement.whole(rows[0])
        return first_VW, first_VW if rows[0] is rows[1] else self.placement.whole(rows[1]).to(first_VW.device)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: those of the generation config and the tokenizer's own."""
        found = self.model.generation_config.eos_token_id
        listed = found if isinstance(found, list) else [found]
        return tuple(sorted({i for i in (*listed, self.tokenizer.eos_token_id) if i is not None}))

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that stand for single bytes, as tokenizers with byte fallback have them."""
        return frozenset(i for token, i in self.tokenizer.get_vocab().items() if re.fullmatch(r"<0x[0-9A-F]{2}>", token))

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, the one module list that has as many members as the config says."""
        decoder = self.model.get_decoder()  # without the vision tower, where there is one
        found = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == self.num_layers]
        if not found:
            raise ValueError(f"{type(self.model).__name__} has no list of {self.num_layers} decoder layers to take states from")
        return found[0]

    def layer_weights(self, i: int) -> dict[str, Tensor]:
        """Parameters of decoder layer i (0: the first) by name; where they are quantised, as what they stand for; where they are spread
        over processes, in full and on the CPU."""
        if self.placement.sharded:
            return {name: self.placement.whole(p).cpu() for name, p in self.layers[i].named_parameters()}
        return full_weights(self.layers[i])

    @cached_property
    def cache_keyword(self) -> str:
        # transformers 5.24 renamed `past_key_values` to `cache`.
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer that the config names; models with one window for all layers (Mistral, Phi-3) name none."""
        windowed = "sliding_attention" if getattr(self.config, "sliding_window", None) else "full_attention"
        return tuple(getattr(self.config, "layer_types", None) or [windowed] * self.num_layers)

    @cached_property
    def window(self) -> int | None:
        """Positions that a window layer sees, its own included; None without such layers."""
        return int(self.config.sliding_window) if "sliding_attention" in self.kinds else None

    @cached_property
    def copies(self) -> dict[str, Any]:
        """Lean copies of this target made so far, by mode, and of which state of it (target/passes.py)."""
        return {}

    def __getstate__(self) -> dict[str, Any]:  # packed weights can be neither copied nor stored
        return {name: value for name, value in self.__dict__.items() if name != "copies"}

    def check_kind(self) -> None:
        """ValueError with the cause unless a cache of keys and values is all that the model remembers, seen through masks alone."""
        c, odd = self.config, sorted(set(self.kinds) - set(KINDS))
        causes = {
            f"layers of the kinds {', '.join(odd)}": bool(odd),
            "a recurrent state": getattr(self.model, "_is_stateful", False),
            "an encoder": c.is_encoder_decoder,
            "attention to later tokens": getattr(c, "use_bidirectional_attention", False) or not getattr(c, "is_causal", True),
            "keys of unlike sizes or shared by layers": c.is_heterogeneous or getattr(c, "num_kv_shared_layers", 0),
            "compressed keys (latent attention)": getattr(c, "kv_lora_rank", None),
            "attention of its own making": not getattr(self.model, "_supports_attention_backend", False),
        }
        cause = next((cause for cause, holds in causes.items() if holds), None)
        if cause:
            raise ValueError(_refusal(self.name, type(self.model).__name__, cause))

    @property
    def packs(self) -> bool:
        """Whether its attention takes what a node sees in packed form (kernels/tree_attention.py)."""
        return self.config._attn_implementation == tree_attention.NAMES["triton"]

    def masks(self, cache: SlabCache, line_BNM: Tensor) -> Masks:
        """Masks of the N staged nodes of this pass; `line_BNM` marks what each sees of the M staged nodes (itself and its ancestors).

        To be called after `cache.stage`. The window is counted in positions along the line. None: one row, one node, no window reached.
        """
        if self.packs and line_BNM.shape[2] <= tree_attention.MOST_NODES:
            return self.by_kind(lambda window: tree_attention.packed(cache.lengths_B, line_BNM, window))
        if line_BNM.shape == (1, 1, 1) and not cache.fixed and self._in_window(cache.get_seq_length()):
            return None
        return self.by_kind(lambda window: cache.visible(line_BNM, window))

    def prompt_masks(self, cache: SlabCache, positions_BL: Tensor) -> Masks:
        """Masks of a causal pass; `positions_BL` as `cache.stage` gave them. None: an empty cache, no padding, no window reached."""
        if cache.fresh and self._in_window(positions_BL.shape[1]):
            return None
        return self.by_kind(lambda window: cache.causal(positions_BL, window))

    def _in_window(self, length: int) -> bool:
        return self.window is None or length <= self.window

    def by_kind(self, mask: Callable[[int | None], Tensor]) -> Masks:
        made = {kind: mask(self.window if kind == "sliding_attention" else None) for kind in sorted(set(self.kinds))}
        return made if len(made) > 1 else next(iter(made.values()))

    def new_cache(self, rows: int, max_length: int) -> SlabCache:
        """An empty cache for `rows` rows; refuses models whose state is no plain key/value cache."""
        self.check_kind()
        c = self.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        kv_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        each = self.placement.kv_heads(self.model, kv_heads)
        sizes: dict[str, Any] = {"rows": rows, "kv_heads": each, "head_dim": head_dim, "max_length": max_length, "dtype": self.model.dtype}
        if self.placement.kind == "device_map":
            return SpreadCache([next(layer.parameters()).device for layer in self.layers], **sizes)
        return SlabCache(layers=self.num_layers, device=self.device, **sizes)

    @torch.no_grad()
    def forward(
        self, ids_BN: Tensor, *, positions_BN: Tensor, mask: Masks, cache: PassCache | None,
        layer_ids: Sequence[int] = (), logits_to_keep: int | Tensor = 0,
    ) -> TargetOutput:  # fmt: skip
        """One pass without gradients; arguments of `run`."""
        return self.run(ids_BN, positions_BN=positions_BN, mask=mask, cache=cache, layer_ids=layer_ids, logits_to_keep=logits_to_keep)

    def run(
        self, ids_BN: Tensor, *, positions_BN: Tensor, mask: Masks, cache: PassCache | None,
        layer_ids: Sequence[int] = (), logits_to_keep: int | Tensor = 0,
    ) -> TargetOutput:  # fmt: skip
        """One pass. `mask`: of `masks` or `prompt_masks`; None is a causal pass over rows that start at position 0, or one node.

        `logits_to_keep`: 0 all positions, k the last k, or a tensor of positions (as in transformers).
        """
        N = ids_BN.shape[1]
        if mask is None and not self._in_window(N):  # not every model tells the attention function its window
            place_N = torch.arange(N, device=ids_BN.device)
            mask = self.by_kind(lambda window: causal_mask(place_N[None], place_N, window))
        kwargs = {self.cache_keyword: cache} if cache is not None else {}
        with self.placement.one_pass(self.device), taps(self, layer_ids) as states, tap_last(self) as last:
            output = self.model(
                input_ids=ids_BN, position_ids=positions_BN, attention_mask=mask, use_cache=cache is not None,
                logits_to_keep=logits_to_keep, return_dict=True, **kwargs,
            )  # fmt: skip
        device = output.logits.device  # of the input, also where layers are elsewhere
        states_BNF = torch.cat([states[i].to(device) for i in layer_ids], dim=-1) if layer_ids else None
        return TargetOutput(logits_BKV=output.logits, states_BNF=states_BNF, last_BKW=last[0].to(device))

    def in_step(self) -> AbstractContextManager[None]:
        """A section in which processes make different numbers of passes (`Placement.section`); all of them must enter it."""
        ids_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        return self.placement.section(lambda: self.forward(ids_11, positions_BN=ids_11, mask=None, cache=None), self.device)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes that tell whether a head, a store or an answer file belongs to this target."""
        # A target tuned with frozen embeddings differs in its layers alone.
        layer = [p for p in self.layer_weights(self.num_layers - 1).values() if p.dim() > 1]
        found = {**fingerprints(self.tokenizer), "embedding_sha256": _hash([self.embedding_VW]), "layers_sha256": _hash(layer)}
        more = {"adapter_sha256": self.adapter, "quantization": self.quantization}
        return found | {key: value for key, value in more.items() if value is not None}

    def encode(self, prompt: "str | Sequence[int] | Sequence[dict[str, Any]]", **template: Any) -> list[int]:
        """Token ids of a prompt: ids as they are, a string as plain text, a chat (list of messages) through the template (whose switches,
        such as `enable_thinking`, are the keywords)."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if prompt and isinstance(prompt[0], dict):
            text = self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True, **template)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return [int(i) for i in prompt]  # type: ignore[arg-type]


def _hash(weights: Iterable[Tensor], *, rows: int = 512) -> str:
    """Hash of some rows of each of these weights, spread over it."""
    digest = hashlib.sha256()
    for weight in weights:
        flat = weight.detach().flatten(0, -2)
        digest.update(flat[:: max(1, len(flat) // rows)].float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def taps(target: Target, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect hs[i] for the given i (`LAST`: the last state) during one forward pass; hooks are gone afterwards."""
    states: dict[int, Tensor] = {}
    if any(not 0 <= i <= target.num_layers for i in layer_ids if i != LAST):
        raise ValueError(f"hidden states {list(layer_ids)} asked for, {target.name} has hs[0] to hs[{target.num_layers}]")

    def after(i: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states[i] = output if isinstance(output, Tensor) else output[0]

        return hook

    places = {0: target.model.get_input_embeddings, LAST: target.model.get_decoder}
    modules = {i: places[i]() if i in places else target.layers[i - 1] for i in layer_ids}
    handles = [module.register_forward_hook(after(i)) for i, module in modules.items()]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def tap_last(target: Target) -> Iterator[list[Tensor]]:
    """Collect what the output layer reads during one forward pass (the last state, after the final norm)."""
    seen: list[Tensor] = []
    handle = target.model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()


def load_target(
    name: str | Path, *, dtype: str = "float32", device: str | None = None, revision: str | None = None,
    adapter: str | Path | None = None, quantization: str | None = None, placement: str = "rank", tp_size: int | None = None,
    attention: Backend = "auto",
) -> Target:  # fmt: skip
    """Load a Hub name, a folder or a `.gguf` file, frozen and in evaluation mode.

    device: "auto" or None: CUDA where there is a device, else the CPU. adapter: one of the target's, merged into its weights: the folder
    of a head that was trained together with it, or of peft's. quantization: `8bit` or `4bit` for the weights of its linear layers
    (target/quantised.py). placement, tp_size: how it lies on several processes, which then load it together, or on the devices of one
    (target/placement.py). attention: `triton` for the kernel, `torch` for masks; `auto`: the kernel on CUDA where triton is. Raises
    ValueError when a path does not exist, when the model has layers that cannot be rolled back, when the tokenizer has more ids than the
    model has rows, when the adapter is another target's, for an adapter and quantised weights, or for a device or placement that cannot
    be had.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name).expanduser()
    looks_local = str(name).endswith(".gguf") or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1
    if looks_local and not path.exists():
        raise ValueError(f"no model at {name}; give a folder, a .gguf file or a Hub name such as HuggingFaceTB/SmolLM2-135M-Instruct")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    text = str(path) if looks_local else str(name)
    device = usable(device)
    where: dict[str, Any] = {"revision": revision} if revision else {}
    bits = loading_options(quantization, name=text, dtype=DTYPES[dtype], device=device, adapter=adapter) if quantization else {}
    way = tree_attention.register(tree_attention.way_of(attention, torch.device(device)))
    place = open_placement(placement, tp_size, name=text, device=device, quantization=quantization, adapter=adapter)
    if text.endswith(".gguf"):
        text, where = str(path.parent), {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(text, **where)
    try:
        with loading(place, text, DTYPES[dtype], **where) as spread:
            model: Any = AutoModelForCausalLM.from_pretrained(
                text, dtype=DTYPES[dtype], attn_implementation=way, **where, **bits, **spread
            )
    except KeyError as error:  # models with a table of attention classes (Falcon, GPT-Neo)
        if error.args != (way,):
            raise
        raise ValueError(_refusal(str(name), "model", "attention of its own making")) from error
    settle(model, quantization, str(name))
    model = (model if place.sharded else model.to(device)).eval().requires_grad_(False)
    finish(place, model, DTYPES[dtype])
    target = Target(model=model, tokenizer=tokenizer, name=str(name), revision=revision, placement=place)
    target.check_kind()
    if len(tokenizer) > target.vocab_size:
        raise ValueError(f"{name}: the tokenizer has {len(tokenizer)} ids, the model only {model.config.vocab_size} rows")
    if place.sharded:
        _ = target.fingerprints, target.output_VW  # made while all processes are here
    if adapter is None:
        return target
    from spectrain.target.adapter import merged

    return merged(target, adapter)


def _refusal(name: str, kind: str, cause: str) -> str:
    return (
        f"{name} is a {kind} with {cause}, which cannot be verified and rolled back; "
        f"choose a target whose layers are all {' or '.join(KINDS)} with plain keys and values"
    )


def unpack_gguf(gguf: Path, folder: Path) -> None:
    """Write a dequantised copy of a GGUF file as a normal model folder, whole or not at all (float32)."""
    target = load_target(gguf, device="cpu")
    config = target.model.config
    plain = type(config).from_dict({k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "_name_or_path")})
    model = type(target.model)(plain)  # a model that was loaded from GGUF refuses to be saved
    model.load_state_dict(target.model.state_dict())
    model.generation_config = target.model.generation_config
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(part)
    target.tokenizer.save_pretrained(part)
    os.replace(part, folder)
