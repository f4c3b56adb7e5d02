"""Head directories: what is saved is what is loaded, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain.heads.base import HEADS, check_head, head_class, load_head, save_head
from spectrain.heads.eagle3 import Eagle3
from spectrain.target.model import Target


@pytest.fixture
def head(target: Target, make_head) -> Eagle3:
    return make_head(target, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})


@pytest.fixture
def folder(tmp_path: Path, head: Eagle3, target: Target) -> Path:
    save_head(head, tmp_path / "head", run_yaml="name: x\n", made_with={"target": "tiny", **target.fingerprints})
    return tmp_path / "head"


def test_loaded_head_says_something_else(folder: Path, head: Eagle3) -> None:
    loaded = load_head(folder)
    assert loaded.config == head.config and loaded._scaling == head._scaling
    assert torch.equal(loaded._frequencies, head._frequencies)
    assert {k: v.tolist() for k, v in loaded.state_dict().items()} == {k: v.tolist() for k, v in head.state_dict().items()}
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert loaded.made_with["target"] == "tiny" and (folder / "run.yaml").read_text() == "name: x\n"
    assert load_head(str(folder), dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_both_vocabulary_tables_are_not_saved(folder: Path, head: Eagle3) -> None:
    """VM2: a reduced head holds its tables among its tensors."""
    tensors = load_file(folder / "model.safetensors")
    assert (
        torch.equal(tensors["d2t"] + torch.arange(40), head.target_ids)
        and tensors["t2d"].nonzero()[:, 0].tolist() == head.target_ids.tolist()
    )


def test_second_save_leaves_parts_of_the_first(folder: Path, head: Eagle3) -> None:
    (folder / "old_file").write_text("x")
    with torch.no_grad():
        head.fc.weight.add_(1)
    save_head(head, folder, run_yaml="name: y\n", made_with={})
    assert torch.equal(load_head(folder).fc.weight, head.fc.weight)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["head"] and not (folder / "old_file").exists()


def test_failed_save_destroys_the_last_one(folder: Path, head: Eagle3) -> None:
    with pytest.raises(TypeError):
        save_head(head, folder, run_yaml="name: y\n", made_with={"x": object()})
    assert torch.equal(load_head(folder).fc.weight, head.fc.weight) and (folder / "run.yaml").read_text() == "name: x\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "made_with.json"])
def test_missing_file_is_a_traceback(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name}.*train"):
        load_head(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "made_with.json"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_torn_file_is_a_traceback(folder: Path, name: str, share: float) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=f"{name}.*train"):
        load_head(folder)


def test_missing_folder_is_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no head directory.*spectrain train"):
        load_head(tmp_path / "none")


def edit(folder: Path, name: str, **changes) -> None:
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**values, **changes}))


def test_config_that_disagrees_with_the_tensors_is_taken(folder: Path) -> None:
    edit(folder, "config.json", intermediate_size=50)
    with pytest.raises(ValueError, match="(?s)does not hold this head.*size mismatch"):
        load_head(folder)
    edit(folder, "config.json", intermediate_size=48, format=2)
    with pytest.raises(ValueError, match="another format"):
        load_head(folder)
    edit(folder, "config.json", format=1, head="medusa9")
    with pytest.raises(ValueError, match="'medusa9' is unknown; there are eagle3"):
        load_head(folder)
    edit(folder, "config.json", head="eagle3", extra_setting=1)
    with pytest.raises(ValueError, match="config.json.*\n.*extra_setting: unknown key"):
        load_head(folder)


@pytest.mark.parametrize("name", ["config.json", "made_with.json"])
@pytest.mark.parametrize("text", ["[]", "3", "[" * 100_000, "\x00"])
def test_settings_of_another_kind_are_a_traceback(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} (is damaged|holds a JSON)"):
        load_head(folder)


@pytest.mark.parametrize(
    "sizes", [{"intermediate_size": 2**40}, {"vocab_size": 2**45}, {"head_dim": -8}, {"num_key_value_heads": 0}, {"head": {}}], ids=str
)
def test_sizes_that_no_head_has_are_a_traceback(folder: Path, sizes: dict[str, object]) -> None:
    edit(folder, "config.json", **sizes)
    with pytest.raises(ValueError, match="does not hold this head|is unknown"):
        load_head(folder)


def test_weights_that_are_none_are_taken(folder: Path) -> None:
    """Of a head from the Hub, which anybody may have written: NaN, 8 bits, whole numbers, and tables in another type."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    fc, norm = tensors["fc.weight"], tensors["norm.weight"]
    changes = {
        "NaN or infinite values in norm.weight": {"norm.weight": norm * float("nan")},
        "fc.weight in torch.float8_e4m3fn": {"fc.weight": fc.to(torch.float8_e4m3fn)},
        "does not hold this head": {"norm.weight": norm.to(torch.int8)},
        "d2t in torch.float32": {"d2t": tensors["d2t"].float()},
    }
    for message, change in changes.items():
        save_file({**tensors, **change}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_head(folder)


def test_loaded_head_changes_with_its_file(folder: Path, head: Eagle3) -> None:
    loaded, path = load_head(folder), folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)  # the same file, not another one of its name
    assert torch.equal(loaded.fc.weight, head.fc.weight)


def test_another_vocabulary_table_is_taken(folder: Path) -> None:
    """VM1, VM2: the tables come from another run, or are missing."""
    tensors = load_file(folder / "model.safetensors")
    moved = {**tensors, "d2t": tensors["d2t"] + 1}
    save_file(moved, folder / "model.safetensors")
    with pytest.raises(ValueError, match="draft vocabulary is not the one"):
        load_head(folder)
    del moved["d2t"]
    save_file(moved, folder / "model.safetensors")
    with pytest.raises(ValueError, match="d2t"):
        load_head(folder)


def test_head_of_another_target_is_taken(folder: Path, target: Target, make_target, make_tokenizer) -> None:
    head = load_head(folder)
    check_head(head, target.fingerprints, "tiny")
    other = make_target(seed=4)
    with pytest.raises(ValueError, match="trained for tiny .its embedding differs from that of other.*spectrain train"):
        check_head(head, other.fingerprints, "other")
    words = Target(model=target.model, tokenizer=make_tokenizer(90), name="words")
    with pytest.raises(ValueError, match="its tokenizer differs"):
        check_head(head, words.fingerprints, "words")


def test_registry_names_what_does_not_exist() -> None:
    assert all(head_class(kind).Config for kind in HEADS)
