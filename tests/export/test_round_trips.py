"""Every kind and variant of head through every format and back: the same head, bit for bit in the dtype of the folder, or refused.

Legend: V target vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config import HeadConfig
from spectrain.export.engines import FORMATS, export_head
from spectrain.export.families import head_from_folder
from spectrain.heads.base import HEADS, load_head, save_head
from spectrain.target.model import Target
from spectrain.training.setup import made_with, new_head

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "eagle3": {
        "plain": {}, "norm_before_residual": {"norm_before_residual": True}, "norm_before_fc": {"norm_before_fc": True},
        "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True}, "three layers": {"num_layers": 3},
        "window": {"sliding_window": 4, "num_layers": 2}, "narrower": {"hidden_size": 16}, "wider": {"hidden_size": 48},
        "five states": {"layer_ids": (1, 2, 4, 5, 7), "fc_norm": True, "norm_before_residual": True}, "two states": {"layer_ids": (3, 5)},
        "whole vocabulary": {"draft_vocab_size": None},
    },
    "eagle": {
        "plain": {}, "two layers": {"num_layers": 2}, "bias": {"bias": True}, "window": {"sliding_window": 4},
        "whole vocabulary": {"draft_vocab_size": None},
    },
    "medusa": {
        "plain": {}, "shared output": {"shared_output": True}, "two blocks": {"num_layers": 2},
        "whole vocabulary": {"draft_vocab_size": None}, "shared, whole": {"shared_output": True, "draft_vocab_size": None},
    },
    "hydra": {
        "plain": {}, "no prefix": {"prefix": False}, "original": {"original": True},
        "original, two blocks": {"original": True, "num_layers": 2},
        "original, whole vocabulary": {"original": True, "draft_vocab_size": None},
    },
}  # fmt: skip
IGNORED = ("norm_before_residual", "norm_before_fc", "narrower", "wider")
REFUSED = {  # (kind, variant): by format
    **{("eagle3", variant): {"sglang": "which SGLang ignores"} for variant in IGNORED},
    ("eagle3", "five states"): {"sglang": "norm_before_residual, which SGLang ignores"},
    ("eagle", "bias"): {"vllm": "a bias in fc"},
    ("eagle", "window"): dict.fromkeys(("vllm", "sglang", "eagle"), "sliding_window 4"),
    ("medusa", "two blocks"): {"medusa": "2 blocks a head"},
    **{("hydra", variant): {"hydra": "head.original=true"} for variant in ("plain", "no prefix")},
}  # fmt: skip
CASES = [(kind, variant, to) for kind, variants in VARIANTS.items() for variant in variants for to in FORMATS if kind in FORMATS[to]]


@pytest.fixture(scope="module")
def deep(make_target: Callable[..., Target]) -> Target:
    return make_target(num_hidden_layers=8)


def random_head(target: Target, folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    output = "frozen" if kind == "eagle" else "trained"
    config = HeadConfig(**{"kind": kind, "num_heads": 3, "draft_vocab_size": 37, "output": output} | settings)
    counts_V = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(1)) * 1000
    head = new_head(config, target, [], seed=0, counts_V=counts_V.long() + 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if not (kind == "eagle" and name.startswith("lm_head")):  # the target's rows
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + name.endswith("norm.weight"))
    save_head(head, folder, run_yaml="", made_with=made_with(target, {}))
    return folder


@pytest.mark.parametrize(("kind", "variant", "to"), CASES)
def test_head_comes_back_as_another(deep: Target, tmp_path: Path, kind: str, variant: str, to: str) -> None:
    head_dir, out = random_head(deep, tmp_path / "head", kind, VARIANTS[kind][variant]), tmp_path / "out"
    rows = {"embed_VW": deep.embedding_VW, "output_VW": deep.output_VW}
    if refused := REFUSED.get((kind, variant), {}).get(to):
        with pytest.raises(ValueError, match=refused):
            export_head(head_dir, to, out, **rows)
        assert not out.exists()
        return
    before = load_head(head_dir)
    for dtype in (torch.float32, torch.bfloat16):
        head, notes = head_from_folder(export_head(head_dir, to, out, dtype=str(dtype).removeprefix("torch."), **rows), deep)
        state = head.state_dict()
        assert notes == () and head.config == before.config and state.keys() == before.state_dict().keys()
        for name, tensor in before.state_dict().items():
            of_target = kind == "eagle" and name.startswith("lm_head")  # not in the folder: engines give it the target's
            expected = tensor.to(dtype).float() if tensor.is_floating_point() and not of_target else tensor
            assert torch.equal(state[name], expected), name
        assert head.made_with.items() >= {k: v for k, v in before.made_with.items() if k != "vocabulary_key"}.items()
        assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in head.parameters())


@pytest.mark.parametrize("kind", VARIANTS)
def test_format_without_a_place_for_a_kind_is_written(deep: Target, tmp_path: Path, kind: str) -> None:
    head_dir = random_head(deep, tmp_path / "head", kind, {})
    for to in (to for to, kinds in FORMATS.items() if kind not in kinds):
        with pytest.raises(ValueError, match=f"'{kind}', which the format {to} has no place for; export it to"):
            export_head(head_dir, to, tmp_path / "out")


def test_kind_or_format_is_forgotten() -> None:
    assert VARIANTS.keys() == HEADS.keys()
    assert {to for kind, variants in VARIANTS.items() for v in variants for to in FORMATS if kind in FORMATS[to]} == FORMATS.keys()
