"""Which device a target goes to: what is asked for, looked at before anything is loaded."""

import torch


def usable(asked: str | None) -> str:
    """The device asked for; None and "auto": CUDA where there is a device, else the CPU.

    ValueError for a name that is none, for CUDA where torch was built without it or finds no device, and for one of several devices that
    is not there.
    """
    if asked is None or asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ValueError(f"device {asked!r} is unknown; choose auto, cpu, cuda, or one of several as cuda:1") from error
    if device.type == "cuda":
        _check_cuda(device)
    return asked


def _check_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built is None:
            found = f"torch {torch.__version__} was built without CUDA"
            way_out = "install one that has it, as https://pytorch.org/get-started/locally says for this machine"
        else:
            found = f"torch {torch.__version__}, built for {built}, finds no device"
            way_out = "see whether `nvidia-smi` lists one, and what CUDA_VISIBLE_DEVICES hides"
        raise ValueError(f"device {device} was asked for, and {found}; {way_out}, or take device cpu")
    there = torch.cuda.device_count()
    if device.index is not None and device.index >= there:
        listed = ", ".join(f"cuda:{i}" for i in range(there))
        raise ValueError(f"device {device} was asked for, there {'is' if there == 1 else 'are'} {listed}; choose one of them")
