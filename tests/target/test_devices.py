"""The device that is asked for: what cannot be had is said before anything is loaded, with the way out."""

import pytest
import torch

from spectrain.kernels import tree_attention
from spectrain.target import devices
from spectrain.target.devices import usable
from spectrain.target.model import load_target


def test_device_is_another_one_than_asked_for() -> None:
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    assert [usable(asked) for asked in (None, "auto", "cpu", "meta")] == [usual, usual, "cpu", "meta"]
    with pytest.raises(ValueError, match="device 'gpu' is unknown; choose auto, cpu, cuda, or one of several as cuda:1"):
        load_target("anything", device="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("built", "words"),
    [
        (None, ["device cuda:1 was asked for", "was built without CUDA", "install one that has it", "or take device cpu"]),
        ("13.0", ["built for 13.0, finds no device", "nvidia-smi", "CUDA_VISIBLE_DEVICES", "or take device cpu"]),
    ],
)
def test_missing_cuda_is_found_far_inside(built: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(ValueError) as error:
        load_target("anything", device="cuda:1")
    assert all(word in str(error.value) for word in words), error.value


def test_device_that_is_not_there_is_found_far_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.usable("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match="device cuda:2 was asked for, there are cuda:0, cuda:1; choose one of them"):
        usable("cuda:2")


def test_missing_triton_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "find_spec", lambda name: None)
    for device in ("cuda", "cpu"):
        with pytest.raises(ValueError, match="needs the package triton, which is not installed: pip install triton, or attention='torch'"):
            tree_attention.way_of("triton", torch.device(device))
        assert tree_attention.way_of("torch", torch.device(device)) == "torch"
