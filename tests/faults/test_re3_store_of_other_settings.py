"""RE3: a half-built feature store is taken for one of other settings. The refusal names the field; another draft vocabulary is a hit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator

from spectrain.cli import stages
from spectrain.config import CaptureConfig, Recipe
from spectrain.data.rows import Row
from spectrain.target.capture import capture
from spectrain.target.features import FeatureStore
from spectrain.target.model import Target

CONFIG = CaptureConfig(rows_per_shard=2)
ROWS = [Row(f"r{i}", "d", np.arange(6, 12 + i), [0, 0, 0] + [1] * (3 + i)) for i in range(6)]
SHUFFLED = [ROWS[i] for i in (3, 1, 0, 2, 5, 4)]
CUT = [Row(r.id, r.domain, r.ids_L[:8], r.mask_L[:8]) for r in ROWS]


@pytest.fixture
def half(target: Target, tmp_path: Path) -> Path:
    """A store whose last shard is not made yet."""
    capture(ROWS, target, (1, 2), tmp_path / "s", CONFIG, prepared={"seed": 0, "max_length": 16})
    (tmp_path / "s" / "rows-0000004.safetensors").unlink()
    return tmp_path / "s"


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "shuffle seed": ({"rows": SHUFFLED, "prepared": {"seed": 1, "max_length": 16}}, "other rows: seed = 0, needed 1;"),
    "order, unsaid": ({"rows": SHUFFLED, "prepared": None}, r"rows_sha256 = .* \(the same rows in another order\)"),
    "length": ({"rows": CUT, "prepared": {"seed": 0, "max_length": 8}}, "other rows: max_length = 16, needed 8;"),
    "ids": ({"rows": CUT}, r"rows_sha256 = .* \(other rows\)"),
    "mask": ({"rows": [replace(ROWS[0], mask_L=[1] * 6), *ROWS[1:]]}, "rows_sha256 = "),
    "number of rows": ({"rows": ROWS[:4]}, "rows = 6, needed 4"),
    "layers": ({"layer_ids": (1, 3)}, r"layer_ids = \[1, 2\], needed \[1, 3\]"),
    "order of layers": ({"layer_ids": (2, 1)}, "layer_ids = "),
    "kind of states": ({"config": CONFIG.model_copy(update={"states": "bf16"})}, "states = 'int8', needed 'bf16'"),
    "kind of last state": ({"config": CONFIG.model_copy(update={"last": "int8"})}, "last = 'bf16', needed 'int8'"),
    "no last state": ({"last_state": "none"}, "last_state = 'post_norm', needed 'none'"),
    "rows a shard": ({"config": CONFIG.model_copy(update={"rows_per_shard": 3})}, "rows_per_shard = 2, needed 3"),
    "weights": ({"target": {"seed": 9}}, "embedding_sha256 = "),
    "precision of the target": ({"target": {"dtype": "bfloat16"}}, "target_dtype = 'float32', needed 'bfloat16'"),
    "template": ({"target": {"template": "{{ x }}"}}, "template_sha256 = "),
}


def changed(target: Target, make_target: Any, make_tokenizer: Any, change: dict[str, Any]) -> Target:
    if "template" in change:
        return replace(target, tokenizer=make_tokenizer(100, template=change["template"]))
    other = make_target(seed=change.get("seed", 0))
    return replace(other, model=other.model.bfloat16()) if "dtype" in change else other


@pytest.mark.parametrize("what", CHANGES)
def test_store_mixes_two_settings(what: str, half: Path, target: Target, make_target, make_tokenizer) -> None:
    change, named = CHANGES[what]
    before = {p.name: p.read_bytes() for p in half.iterdir()}
    call = {"rows": ROWS, "layer_ids": (1, 2), "config": CONFIG, "prepared": {"seed": 0, "max_length": 16}, **change}
    call["target"] = changed(target, make_target, make_tokenizer, change["target"]) if "target" in change else target
    with pytest.raises(ValueError, match=f"is a store with {named}.*delete it or capture into a new folder"):
        capture(call.pop("rows"), call.pop("target"), call.pop("layer_ids"), half, call.pop("config"), **call)
    assert {p.name: p.read_bytes() for p in half.iterdir()} == before


def test_what_is_not_in_the_store_makes_it_anew(half: Path, target: Target, monkeypatch) -> None:
    """Tokens a pass, what to do with damage and another name of the same folder of weights change nothing: only what is missing is made."""
    stamps = {p.name: p.stat().st_mtime_ns for p in half.iterdir()}
    config = CONFIG.model_copy(update={"batch_tokens": 64, "on_damage": "recapture"})
    done = capture(ROWS, replace(target, name="elsewhere"), (1, 2), half, config, prepared={"seed": 0, "max_length": 16})
    assert done.shards == 1
    assert {name: (half / name).stat().st_mtime_ns for name in stamps} == stamps
    assert len(FeatureStore(half, ROWS)) == 6


def test_reader_takes_a_store_of_other_rows(half: Path, target: Target) -> None:
    capture(ROWS, target, (1, 2), half, CONFIG)
    for rows, named in ((SHUFFLED, "the same rows in another order"), (CUT, "other rows"), (ROWS[:5], "rows = 6, needed 5")):
        with pytest.raises(ValueError, match=f"captured from other rows: .*{named}"):
            FeatureStore(half, rows)


def test_learning_rate_or_draft_vocabulary_makes_rows_and_states_anew(target: Target, tmp_path: Path) -> None:
    """Neither rows nor states depend on them: the second and third run in the folder find both done."""
    turns = [({"role": "user", "content": f"w{10 + i}"}, {"role": "assistant", "content": f"w{30 + i} w40 w50"}) for i in range(6)]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"id": f"c{i}", "domain": "d", "messages": chat}) + "\n" for i, chat in enumerate(turns)))
    recipe = {
        "name": "x", "target": {"name": "x"}, "data": {"answers": {"prompts": "x", "file": "x", "mix": {"d": 6}}},
        "head": {"layer_ids": [1, 2], "draft_vocab_size": 40}, "training": {"lr": 1e-3},
    }  # fmt: skip
    states, stamps = [], []
    for part, changes in (("head", {}), ("training", {"lr": 2e-3}), ("head", {"draft_vocab_size": 20})):
        one = Recipe.model_validate({**recipe, part: {**recipe[part], **changes}})
        data = stages.make_rows(one, target, file, tmp_path / "run")
        assert len(stages.capture_states(one, target, data, tmp_path / "run", Accelerator(cpu=True), lambda line: None)) == 6
        states.append(data.report.state)
        stamps.append({p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.suffix in (".arrow", ".safetensors", ".json")})
    assert states == ["built", "unchanged", "unchanged"]
    assert len(stamps[0]) >= 4 and stamps[0] == stamps[1] == stamps[2]
