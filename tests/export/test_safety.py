"""Folders from a stranger: nothing in them is run, nothing outside them is read, and what is damaged is refused by its name.

Legend: V target vocabulary.
"""

import json
import random
import runpy
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.export.families import head_from_folder
from spectrain.export.flat import read_flat
from spectrain.heads.base import check_head
from spectrain.target.model import Target

FUZZ, SMALL = (runpy.run_path(str(Path(__file__).with_name(name))) for name in ("test_fuzz.py", "small_heads.py"))
producers = FUZZ["producers"]
CASES, SEED = 300, 7
CONFIG = {k: v for k, v in SMALL["head_config"]().items() if k not in ("head", "format", "layer_ids", "target_layers")}


def folder_of(path: Path) -> Path:
    """A flat EAGLE-3 folder without a word of ours."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(SMALL["head_tensors"](SMALL["head_config"]()), path / "model.safetensors")
    return path


def read(folder: Path) -> Any:
    return read_flat(folder, target_layers=8)


# Names and links that lead elsewhere.


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/../../outside.safetensors", "{}/outside.safetensors", "link.safetensors"])
def test_index_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    theirs, name = folder_of(tmp_path / "theirs"), name.format(tmp_path)
    (theirs / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (theirs / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (theirs / "sub").mkdir()
    tensors = load_file(tmp_path / "outside.safetensors")
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    with pytest.raises(ValueError, match="leads out of the folder, to .*outside.safetensors"):
        read(theirs)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_link_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    theirs = folder_of(tmp_path / "theirs")
    (theirs / name).rename(tmp_path / "secret")
    (theirs / name).symlink_to("../secret")
    with pytest.raises(ValueError, match=f"{name} leads out of the folder, to .*secret"):
        read(theirs)


def test_links_of_the_hubs_cache_are_refused(tmp_path: Path) -> None:
    """It keeps files once, by their hash, and a snapshot is a folder of links to them."""
    snapshot, blobs = folder_of(tmp_path / "models--user--head/snapshots/abc"), tmp_path / "models--user--head/blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert read(snapshot).config["layer_ids"] == [2, 4, 5]


@pytest.mark.parametrize("map_", [None, {}, {"fc.weight": 5}, [1], {"fc.weight": "model-1.safetensors", "lost": "model-1.safetensors"}])
def test_index_that_names_no_files(tmp_path: Path, map_: Any) -> None:
    theirs = folder_of(tmp_path / "theirs")
    (theirs / "model.safetensors").rename(theirs / "model-1.safetensors")
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": map_}))
    with pytest.raises(ValueError, match="has no weight_map|lost are not in the files|lacks"):
        read(theirs)


# Headers that lie.


def with_header(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = {"fc.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
HEADERS: dict[str, bytes] = {
    "longer than the file": with_header(ONE, b"\0" * 16, length=2**40),
    "of no length": b"\x01",
    "no JSON": with_header(b"{" * 9, b""),
    "data that is not there": with_header(ONE, b"\0" * 8),
    "more data than it names": with_header(ONE, b"\0" * 64),
    "offsets beyond the file": with_header({"fc.weight": {**ONE["fc.weight"], "data_offsets": [0, 2**40]}}, b"\0" * 16),
    "shape of another size": with_header({"fc.weight": {**ONE["fc.weight"], "shape": [2**40, 2**40]}}, b"\0" * 16),
    "tensors that overlap": with_header({**ONE, "norm.weight": {**ONE["fc.weight"], "data_offsets": [8, 24]}}, b"\0" * 24),
    "unknown dtype": with_header({"fc.weight": {**ONE["fc.weight"], "dtype": "F7"}}, b"\0" * 16),
    "negative shape": with_header({"fc.weight": {**ONE["fc.weight"], "shape": [-2, -2]}}, b"\0" * 16),
    "a header of 100 MB": with_header(b"{" + b" " * 110_000_000 + b"}", b""),
}


@pytest.mark.parametrize("lie", HEADERS)
def test_header_lies(tmp_path: Path, lie: str) -> None:
    theirs = folder_of(tmp_path / "theirs")
    (theirs / "model.safetensors").write_bytes(HEADERS[lie])
    with pytest.raises(ValueError, match="model.safetensors cannot be read as safetensors"):
        read(theirs)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 100_000, "is not JSON"), ("[1]", "holds a JSON list"), ("\x00", "is not JSON"), (" " * 2**26, "67108864 bytes, a config has")],
)
def test_config_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    theirs = folder_of(tmp_path / "theirs")
    (theirs / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(theirs)


def test_number_too_large_to_be_one(tmp_path: Path) -> None:
    theirs = folder_of(tmp_path / "theirs")
    for key in ("rms_norm_eps", "head_dim", "max_position_embeddings", "rope_theta"):
        for number in (10**400, -1, 0):
            (theirs / "config.json").write_text(json.dumps({**CONFIG, "rope_parameters": None, key: number}))
            with pytest.raises(ValueError, match=key):
                read(theirs)


# Code.


class Surprise:
    def __reduce__(self) -> Any:
        return (print, ("surprise",))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt"])
def test_pickle_is_run(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    for value in (Surprise(), {"fc.weight": Surprise()}, [1], {"a": {"b": torch.ones(2)}}, {1: torch.ones(2)}):
        torch.save(value, tmp_path / file)
        with pytest.raises(ValueError, match=f"{file} holds more than (plain|named) tensors"):
            head_from_folder(tmp_path, target)
    for damaged in (b"", b"text", (tmp_path / file).read_bytes()[:200]):
        (tmp_path / file).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{file} holds more than plain tensors, or is damaged"):
            head_from_folder(tmp_path, target)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("odd", [torch.eye(4).to_sparse(), torch.empty(4, 4, device="meta")], ids=["sparse", "meta"])
def test_tensor_without_all_its_values_is_a_traceback(target: Target, tmp_path: Path, odd: Tensor) -> None:
    torch.save({"0.0.linear.weight": torch.eye(4), "0.1.weight": odd}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="medusa_lm_head.pt holds more than named tensors"):
        head_from_folder(tmp_path, target)


def test_pickle_that_is_a_link_leads_out_of_the_folder(target: Target, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "secret.pt")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/medusa_lm_head.pt").symlink_to("../secret.pt")
    with pytest.raises(ValueError, match="medusa_lm_head.pt leads out of the folder, to .*secret.pt"):
        head_from_folder(tmp_path / "theirs", target)


def test_code_in_the_folder_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = folder_of(tmp_path / "theirs")
    (theirs / "modeling.py").write_text("print('surprise')\nclass Head: ...\n")
    (theirs / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "modeling.Head"}, "trust_remote_code": True}))
    assert read(theirs).config["draft_vocab_size"] == 12 and capsys.readouterr().out == ""


def test_vocabulary_of_automodel_is_taken_from_its_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the model folder, where the folder has no table of its own."""
    theirs = folder_of(tmp_path / "step/model")
    tensors = load_file(theirs / "model.safetensors")
    ids_D = tensors.pop("d2t") + torch.arange(12)
    del tensors["t2d"]
    save_file(tensors, theirs / "model.safetensors")
    with pytest.raises(ValueError, match="lacks d2t"):
        read(theirs)
    torch.save({"selected_token_ids": ids_D, "epoch": 1}, tmp_path / "step/eagle_meta.pt")
    assert torch.equal(read(theirs).tensors["d2t"] + torch.arange(12), ids_D) and "eagle_meta.pt" in read(theirs).notes[-1]
    beyond = {"selected_token_ids": ids_D + 99}
    for value, message in ((Surprise(), "eagle_meta.pt holds more than"), (beyond, "head is of another target")):
        torch.save(value, tmp_path / "step/eagle_meta.pt")
        with pytest.raises(ValueError, match=message):
            read(theirs)
    assert capsys.readouterr().out == ""


# Tensors.

CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "lost": lambda t: None,
    "flat": lambda t: t.flatten() if t.dim() > 1 else t[None],
    "short": lambda t: t[:-1],
    "long": lambda t: torch.cat([t, t[:1]]),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t.flatten()[0],
    "NaN": lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t.double() * float("nan"),
    "infinite": lambda t: torch.full_like(t, float("inf")) if t.is_floating_point() else t.double() + float("inf"),
    "8 bits": lambda t: t.to(torch.int8),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
}
AS_WELL = {"layers.1.hidden_norm.weight"}  # without it the folder is a whole one with another norm


def tensors_of(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    some = sorted(folder.glob("*.safetensors")) or sorted({*folder.glob("*.bin"), *folder.glob("hydra*.pt")})
    path = some[0]
    return path, load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def test_damaged_tensor_makes_another_head(producers: dict[str, Any]) -> None:
    draw, faults, refused = random.Random(SEED), list[str](), 0
    names = [name for name in sorted(producers) if name != "sglang"]  # whose tensors are in two files
    before = {name: producers[name].read(producers[name].folder)[0] for name in names}
    files = {name: tensors_of(producers[name].folder) for name in names}
    for _ in range(CASES):
        name = draw.choice(names)
        path, tensors = files[name]
        key, how = draw.choice(sorted(tensors.keys() - AS_WELL)), draw.choice(list(CHANGES))
        new = {n: t for n, t in {**tensors, key: CHANGES[how](tensors[key])}.items() if t is not None}
        new = {n: t.clone().contiguous() for n, t in new.items()}
        save_file(new, path) if path.suffix == ".safetensors" else torch.save(new, path)
        try:
            head, _ = producers[name].read(producers[name].folder)
            state, own = head.state_dict(), before[name].state_dict()
            same = head.config == before[name].config and all(torch.equal(state[n], own[n]) for n in own)
            found = "" if same else "another head"
        except ValueError:
            found, refused = "", refused + 1
        except Exception as error:
            found = f"a stray {type(error).__name__}: {error}"
        if found:
            faults.append(f"{name}, {key} {how}: {found}")
    for path, tensors in files.values():
        save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    assert not faults, "\n".join(faults)
    assert CASES * 0.7 < refused < CASES  # some tensors are not needed


# Targets.


def test_head_of_another_target_is_taken(producers: dict[str, Any], make_target: Callable[..., Target]) -> None:
    other = make_target(num_hidden_layers=8, vocab=101)
    for name in ("medusa vllm", "medusa medusa", "eagle sglang", "hydra hydra"):
        with pytest.raises(ValueError, match="100|of another target|not that of"):
            head_from_folder(producers[name].folder, other)
    own = make_target(num_hidden_layers=8)
    swapped = {**own.fingerprints, "tokenizer_sha256": "0" * 64}
    for name in ("medusa vllm", "eagle vllm", "hydra hydra"):
        head, _ = head_from_folder(producers[name].folder, own)
        check_head(head, own.fingerprints, own.name, own.tokenizer)
        with pytest.raises(ValueError, match="its tokenizer differs"):
            check_head(head, swapped, own.name, own.tokenizer)
