"""Configs with fields that are missing, of another kind, or too many: a clear error, the same head, or the documented default of whoever
wrote the folder. Never another head, and never an error that tells nothing.

Legend: V target vocabulary.
"""

import copy
import json
import random
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.export.engines import export_head
from spectrain.export.families import head_from_folder
from spectrain.export.flat import head_from_flat
from spectrain.target.model import Target

HERE = Path(__file__).parent
FLAT, TRIPS, SMALL = (runpy.run_path(str(HERE / name)) for name in ("test_flat.py", "test_round_trips.py", "small_heads.py"))
CASES, SEED = 500, 20260
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OTHER: dict[type, list[Any]] = {  # values of another kind than a field's own
    bool: ["false", "true", 0, 1, 1.5, [True], {"a": 1}],
    int: ["8", 8.5, True, [8], {"a": 1}, float("nan"), ""],
    float: ["1e-5", True, [1e-5], {"a": 1}, float("nan"), float("inf"), ""],
    str: [5, True, ["silu"], {"a": 1}, 1.5],
    list: ["2,4,5", 5, True, [2.5], ["2"], [True], [[2]], [], {"a": 1}],
    dict: ["x", 5, True, [], [1, 2]],
}
EXTRA = ["zzz", "NormOutput", "norm-output", "quantization_config", "auto_map", "use_cache", "bos_token_id", "initializer_range"]
TOLD_AS = {  # fields whose error names them otherwise
    "vocabulary_sha256": "draft vocabulary", "type": "rope", "rope_type": "rope", "target_hidden_size": "width",
}  # fmt: skip


@dataclass
class Producer:
    """A folder of somebody's, how it is read, and what a missing field means there (name of the config's field: value)."""

    folder: Path
    read: Callable[[Path], tuple[Any, Any]]
    missing: dict[str, dict[str, Any]]


def flat_missing(*, residual: bool, wide: int) -> dict[str, dict[str, Any]]:
    """Of EAGLE-3 folders, by their readers: transformers' LlamaConfig, and the engines' own flags."""
    ids = {"layer_ids": (2, 4, 5)}
    default = {"rope_type": "default", "rope_theta": 1e4}
    return {
        "rms_norm_eps": {"rms_norm_eps": 1e-6}, "max_position_embeddings": {"max_position_embeddings": 2048},
        "norm_before_residual": {"norm_before_residual": residual}, "norm_output": {"norm_output": False},
        "eagle_aux_hidden_state_layer_ids": ids, "eagle_config": ids, "hs_layer_ids": ids, "spectrain": ids,
        "rope_theta": {"rope_parameters": default}, "rope_parameters": {"rope_parameters": default},
        "rope_scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "sliding_window": {"sliding_window": None}, "layer_types": {"sliding_window": None},
        "target_hidden_size": {"target_hidden_size": wide},
    }  # fmt: skip


@pytest.fixture(scope="module")
def producers(tmp_path_factory: pytest.TempPathFactory, make_target: Callable[..., Target]) -> dict[str, Producer]:
    home = tmp_path_factory.mktemp("producers")
    found = {}
    config = SMALL["head_config"](**SMALL["VARIANTS"]["all flags"])
    embed_VW = SMALL["target_states"](config, 1)[1]

    def read_flat(folder: Path) -> tuple[Any, Any]:
        return head_from_flat(folder, target_layers=8, vocab_size=40, embed_VW=embed_VW)

    for trainer in FLAT["TRAINERS"]:
        name = trainer.__name__
        found[name] = Producer(trainer(home / name)[0], read_flat, flat_missing(residual=name == "speculators", wide=16))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 2048}
    found["modelopt"].missing["rope_theta"] = {"rope_parameters": yarn}
    head_dir = SMALL["write_head"](home / "flat head", config)
    for to in ("vllm", "speculators"):
        out = export_head(head_dir, to, home / f"ours {to}", embed_VW=embed_VW)
        found[f"ours {to}"] = Producer(out, read_flat, flat_missing(residual=to == "speculators", wide=16))
    target = make_target(num_hidden_layers=8)
    rows = {"embed_VW": target.embedding_VW, "output_VW": target.output_VW}
    for kind, variant, to in (
        ("medusa", "shared output", "vllm"), ("medusa", "plain", "medusa"), ("eagle", "plain", "vllm"), ("eagle", "bias", "sglang"),
        ("hydra", "original", "hydra"),
    ):  # fmt: skip
        head_dir = TRIPS["random_head"](target, home / f"{kind} {to} head", kind, TRIPS["VARIANTS"][kind][variant])
        missing = flat_missing(residual=False, wide=32) if kind == "eagle" else {}
        out = export_head(head_dir, to, home / f"{kind} {to}", **rows)
        found[f"{kind} {to}"] = Producer(out, lambda folder: head_from_folder(folder, target), missing)
    return found


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field, those of objects in objects too."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield (*path, key)
            yield from paths_of(below, (*path, key))


def at(config: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def changed(config: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str, tuple[Any, ...]]:
    """The config with one field changed; how, and which."""
    config, fields = copy.deepcopy(config), list(paths_of(config))
    how = draw.choice(["missing", "null", "other kind", "other kind", "extra"])
    path = draw.choice(fields)
    if how == "extra":
        homes = [(), *(p for p in fields if isinstance(at(config, p), dict))]
        home = draw.choice(homes)
        path = (*home, draw.choice(EXTRA))
        at(config, home)[path[-1]] = draw.choice([1, "x", None, True, [1], {"factor": 2.0}, 0.5])
    elif how == "missing":
        del at(config, path[:-1])[path[-1]]
    elif how == "null":
        at(config, path[:-1])[path[-1]] = None
    else:
        kind = type(at(config, path))
        at(config, path[:-1])[path[-1]] = draw.choice(OTHER.get(kind, ["x", 5, []]))
    return config, how, path


def judge(producer: Producer, before: Any, how: str, path: tuple[Any, ...]) -> str:
    """What became of a changed config; "" where that is wrong."""
    try:
        head, _ = producer.read(producer.folder)
    except ValueError as error:
        told = str(error)
        names = {str(part) for part in path} | {TOLD_AS.get(str(part), str(part)) for part in path}
        return "refused" if any(name in told for name in names) else f"an error that does not name the field: {told}"
    same = all(torch.equal(a, b) for a, b in zip(before.state_dict().values(), head.state_dict().values(), strict=True))
    if not same or head.state_dict().keys() != before.state_dict().keys():
        return "another head: other weights"
    if head.config == before.config:
        return "the same"
    default = producer.missing.get(path[-1], {}) if how in ("missing", "null") else {}
    if default and head.config == before.config.model_copy(update=default):
        return "the default"
    differ = {k: v for k, v in head.config.model_dump().items() if getattr(before.config, k) != v}
    return f"another head: {differ}"


def test_changed_config_makes_another_head(producers: dict[str, Producer]) -> None:
    draw, outcomes, faults = random.Random(SEED), dict[str, int](), list[str]()
    configs = {name: json.loads((p.folder / "config.json").read_text()) for name, p in producers.items()}
    heads = {name: p.read(p.folder)[0] for name, p in producers.items()}
    for case in range(CASES):
        name = draw.choice(sorted(producers))
        config, how, path = changed(configs[name], draw)
        where = producers[name].folder / "config.json"
        where.write_text(json.dumps(config))
        try:
            found = judge(producers[name], heads[name], how, path)
        except Exception as error:  # what must not come: an error that is no ValueError
            found = f"a stray {type(error).__name__}: {error}"
        where.write_text(json.dumps(configs[name]))
        outcomes[found if found in ("refused", "the same", "the default") else "wrong"] = outcomes.get(found, 0) + 1
        if found not in ("refused", "the same", "the default"):
            faults.append(f"case {case}: {name}, {'.'.join(map(str, path))} {how}: {found}")
    assert not faults, "\n".join(faults)
    assert all(outcomes[outcome] >= 15 for outcome in ("refused", "the same", "the default")), outcomes
