"""Targets whose linear layers keep their weights in 8 or 4 bits (bitsandbytes): how they are loaded, multiplied and read.

Weights alone are in few bits; what is multiplied with them is not rounded. In 8 bits bitsandbytes also rounds the inputs of a product
(LLM.int8(), arXiv 2208.07339), by what stands in them: the last bit of a sum then turns whole steps of the code, and the law of a token
depends on the pass that it is computed in. A verified draft would not be the target's own answer, and states would not be those
of decoding. The same holds of its 4 bit products on some processors, which are made in bfloat16.

Legend: N outputs, K inputs of a linear layer.
"""

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("8bit", "4bit")


def loading_options(kind: str, *, name: str, dtype: torch.dtype, device: str, adapter: object = None) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise a model while it is loaded: 8 bits with a scale a row, or 4 bits as NF4 with a scale
    for 64 weights (QLoRA, arXiv 2305.14314); embedding and output layer stay as they are.

    Raises ValueError for an unknown kind, without bitsandbytes, for a GGUF file, and for an adapter to merge.
    """
    if kind not in KINDS:
        raise ValueError(f"quantization {kind!r} is unknown; choose one of {', '.join(KINDS)}, or leave it out")
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"quantization {kind} needs bitsandbytes, which is not installed: pip install 'spectrain[quantized]'")
    if name.endswith(".gguf"):
        raise ValueError(f"{name} is quantised in its own way, and is loaded in full precision; leave quantization {kind} out")
    if adapter is not None:
        raise ValueError(no_merging(adapter, kind))
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}


def no_merging(adapter: object, kind: str) -> str:
    """Why an adapter is not merged into quantised weights, and what to do instead."""
    told = f"the adapter {adapter} cannot be merged into weights in {kind}"
    return f"{told}; merge it into the plain target, save that as a folder, and load the folder with quantization {kind}"


def quantization_of(model: Any) -> str | None:
    """`8bit` or `4bit` for a model whose linear layers bitsandbytes keeps, also for one that was saved so; None for any other."""
    return next((kind for kind in KINDS if getattr(model, f"is_loaded_in_{kind}", False)), None)


def settle(model: Any, asked: str | None, name: str) -> None:
    """Let every quantised layer of a loaded model multiply its inputs as they are, in the model's own precision.

    Raises ValueError unless the model is quantised as it was asked for (one that was saved quantised needs no asking).
    """
    found = quantization_of(model)
    if asked not in (None, found):
        has = f"is kept in {found}" if found else "is kept in another way, or has no linear layers to quantise"
        raise ValueError(f"{name} {has}, and quantization {asked} was asked for; leave it out, or choose the plain model")
    for module in model.modules() if found else ():
        if _bits(module) == 8:
            module.forward = partial(_product, module)
        elif _bits(module) == 4:
            module.support_avx512bf16_for_cpu = False  # it would lay the weights out anew and multiply in bfloat16


def _bits(module: nn.Module) -> int | None:
    return {"Linear8bitLt": 8, "Linear4bit": 4}.get(type(module).__name__)


def _product(module: Any, x: Tensor) -> Tensor:
    """The product [..., N] of x [..., K]."""
    return F.linear(x, dequantised(module, x.dtype), module.bias)


def dequantised(module: Any, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] that a quantised linear layer stands for."""
    if _bits(module) == 8:
        scale_N = module.weight.SCB / 127
        return module.weight.data.to(dtype).mul_(scale_N[:, None])
    from bitsandbytes.functional import dequantize_4bit

    weight_NK: Tensor = dequantize_4bit(module.weight.data, module.weight.quant_state)
    return weight_NK.to(dtype)


def full_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters of a decoder layer by name, detached; those of quantised linear layers as what they stand for, in float32."""
    found = {name: p.detach() for name, p in layer.named_parameters()}
    for name, module in layer.named_modules():
        if _bits(module):
            found[f"{name}.weight"] = dequantised(module, torch.float32)
    return found
