"""Which heads are written for which engine, and the command line that serves one.

Legend: W width of the target, V target vocabulary.
"""

import importlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.export.eagle3 import read_head
from spectrain.export.folder import TOKEN_MAP, check_files
from spectrain.export.layout import CONFIG, SPECULATORS, read_json

FORMATS: dict[str, dict[str, str]] = {  # by the kind of the head
    "eagle3": {"eagle3": "spectrain.export.eagle3:export_eagle3"},
    "vllm": {
        "eagle3": "spectrain.export.eagle3:export_eagle3",
        "medusa": "spectrain.export.medusa:export_vllm",
        "eagle": "spectrain.export.eagle1:export_vllm",
    },
    "speculators": {"eagle3": "spectrain.export.eagle3:export_speculators"},
    "sglang": {"eagle3": "spectrain.export.eagle3:export_sglang", "eagle": "spectrain.export.eagle1:export_sglang"},
    "medusa": {"medusa": "spectrain.export.medusa:export_original"},
    "eagle": {"eagle": "spectrain.export.eagle1:export_original"},
    "hydra": {"hydra": "spectrain.export.hydra:export_original"},
}

NAMING = ("speculators", "medusa", "hydra")  # formats whose folder names the target


def export_head(
    head_dir: Path, to: str, out: Path, *, dtype: str | None = None, embed_VW: Tensor | None = None, output_VW: Tensor | None = None,
    verifier: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Writes the head in `head_dir` to `out` in the format named `to`, one of FORMATS; returns `out`.

    dtype: "float32", "bfloat16" or "float16" of every weight; None keeps what the head was saved in. embed_VW, output_VW: the target's
    embedding and output rows, where `needs_target` says so. verifier: `name_or_path` and `architectures` of the target, for the formats of
    NAMING; None: the name of the training. ValueError for an unknown format, or one that has no place for such a head.
    """
    if to not in FORMATS:
        raise ValueError(f"export format {to!r} is unknown; choose one of {', '.join(FORMATS)}")
    kind = _kind(head_dir)
    if kind not in FORMATS[to]:
        others = [name for name, kinds in FORMATS.items() if kind in kinds]
        way_out = f"export it to {' or '.join(others)}" if others else "train one of another kind"
        raise ValueError(f"{head_dir} holds a head of kind {kind!r}, which the format {to} has no place for; {way_out}")
    module, function = FORMATS[to][kind].split(":")
    rows: dict[str, Any] = {"eagle3": {"embed_VW": embed_VW}, "eagle": {"embed_VW": embed_VW, "output_VW": output_VW}}.get(kind, {})
    if to in NAMING:
        rows["verifier"] = verifier
    path: Path = getattr(importlib.import_module(module), function)(Path(head_dir), out, dtype=dtype, **rows)
    return path


def needs_target(head_dir: Path, to: str) -> bool:
    """Whether `export_head` must be given the target's embedding and output rows: for EAGLE-1 heads, whose output layer an engine takes
    from the target, for those of another width than the target, and for the speculators format. Not where the format has no place for such
    a head, which `export_head` tells."""
    if (kind := _kind(head_dir)) not in FORMATS[to]:
        return False
    if kind != "eagle3":
        return bool(kind == "eagle")
    if to == "speculators":
        return True
    config = read_head(Path(head_dir))
    return bool(config["hidden_size"] != config["target_hidden_size"])


def _kind(head_dir: Path) -> Any:
    check_files(Path(head_dir))
    return read_json(Path(head_dir) / CONFIG).get("head")


def serve_command(out: Path, target: str, *, engine: str = "vllm", num_speculative_tokens: int, place: str | None = None) -> str:
    """The shell command that serves `target` with the head exported to `out`, drafting a chain of `num_speculative_tokens` a round.

    engine: "vllm" or "sglang". place: where the folder will be then; None: `out`. ValueError for another engine, less than one token, or
    more than a Medusa head has heads.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}; an engine drafts at least 1 token a round")
    config = read_json(out / CONFIG) if (out / CONFIG).is_file() else {}
    kind, place = config.get("spectrain", {}).get("head", "eagle3"), place or str(out)
    if kind == "medusa" and num_speculative_tokens > (heads := config.get("num_heads") or config["medusa_num_heads"]):
        raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}, {out} has {heads} heads; an engine runs as many at most")
    if kind == "hydra":
        raise ValueError(f"no engine reads the Hydra head in {out}; draft with it in spectrain generate")
    if engine == "vllm" and SPECULATORS in config and num_speculative_tokens == drafts(config):
        return shlex.join(["vllm", "serve", place])  # it names its target and its number of drafts
    if engine == "vllm":
        speculation = {"method": kind, "model": place, "num_speculative_tokens": num_speculative_tokens}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculation)])
    if engine == "sglang":
        chain = {
            "model-path": target,
            "speculative-algorithm": kind.upper(),  # for an EAGLE-3 head plain EAGLE would skip fc
            "speculative-draft-model-path": place,
            "speculative-num-steps": num_speculative_tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": num_speculative_tokens + 1,  # counts the token in hand
        }
        if window := config.get("sliding_window"):
            chain["speculative-draft-window-size"] = window - 1  # keys before the own one; no key of the config is read
        if (out / TOKEN_MAP).is_file():
            chain["speculative-token-map"] = f"{place}/{TOKEN_MAP}"
        arguments = [part for key, value in chain.items() for part in (f"--{key}", str(value))]
        return shlex.join(["python", "-m", "sglang.launch_server", *arguments])
    raise ValueError(f"engine {engine!r} is unknown; choose vllm or sglang")


def drafts(config: Mapping[str, Any]) -> int:
    """Drafts a round that a folder of the speculators format names, by its config.json."""
    return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
