"""What a device can do: figures of data sheets, or measured, and the share of them that each stage is taken to reach.

flops: dense products of 16-bit floats a second; flops32: of 32-bit floats (no TF32: torch's default). bandwidth: of the device's memory,
bytes a second. link: bytes a second that a device sends within its node, net: to other nodes. memory: bytes a device. reserve: bytes that
no term counts (context of the driver, workspaces, loaded libraries, pieces that the allocator keeps). step_seconds: of a training step,
whatever its size (calls of Python, launches of kernels).
"""

from dataclasses import dataclass, replace
from math import isfinite

GiB = 2**30
OPTIONS = {"memory": "gpu-memory", "flops": "gpu-flops"}  # of the command; others have the figure's name


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak: capture, training and answers (products of passes over a token of each row) of flops; decode of the bandwidth."""

    capture: float
    training: float
    answers: float
    decode: float


@dataclass(frozen=True)
class Machine:
    """One device of several alike; see above. source: where its figures are from."""

    name: str
    kind: str
    memory: float
    flops: float
    flops32: float
    bandwidth: float
    link: float
    net: float
    efficiency: Efficiency
    source: str
    reserve: float = 2 * GiB
    step_seconds: float = 0.02
    node: int = 8

    def rate(self, bytes_a_weight: int) -> float:
        """Products a second at this width of the numbers."""
        return self.flops32 if bytes_a_weight == 4 else self.flops

    def between(self, devices: int) -> float:
        """Bytes a second that each of so many devices sends to its neighbour in a ring."""
        return self.link if devices <= self.node else self.net


GUESS = Efficiency(capture=0.4, training=0.3, answers=0.3, decode=0.5)
SHEET = "peaks from the vendor's data sheet; shares of them and seconds a step are assumptions: nothing of this package was timed on a GPU"
MACHINES = {
    "h100": Machine("h100", "cuda", 80 * GiB, 989e12, 67e12, 3.35e12, 450e9, 50e9, GUESS, SHEET),
    "h200": Machine("h200", "cuda", 139 * GiB, 989e12, 67e12, 4.8e12, 450e9, 50e9, GUESS, SHEET),
    "a100": Machine("a100", "cuda", 80 * GiB, 312e12, 19.5e12, 2.0e12, 300e9, 25e9, GUESS, SHEET),
    "l40s": Machine("l40s", "cuda", 45 * GiB, 362e12, 91.6e12, 0.864e12, 32e9, 25e9, GUESS, SHEET),
    # Two cores with AVX-512 (docs/lab_log.md, a model of 135M parameters), packed products: 190e9 a core; capture 162e9, a row more in a
    # pass of 1 to 64 costs products at 110e9; bytes of a pass of few rows at 36e9. Training has torch's products, of 145e9 a core.
    # Loaded modules take 0.55e9 bytes, the allocator keeps some 0.1e9.
    "cpu2": Machine(
        "cpu2", "cpu", 16 * GiB, 380e9, 380e9, 40e9, 5e9, 1e9, Efficiency(capture=0.85, training=0.435, answers=0.58, decode=0.9),
        "two cores with AVX-512, measured (docs/lab_log.md)", reserve=0.65e9, step_seconds=0.06, node=1,
    ),
}  # fmt: skip


def machine(
    name: str, *, memory: float | None = None, flops: float | None = None, bandwidth: float | None = None, link: float | None = None
) -> Machine:
    """A device by name, with figures of one's own: memory in GiB, flops in 1e12 a second, bandwidth and link in 1e9 bytes a second.

    ValueError for an unknown name, or a figure that is no number above zero.
    """
    if name not in MACHINES:
        known = f"there are {', '.join(MACHINES)}"
        raise ValueError(f"device {name!r} is unknown; {known}; for another one: --gpu-memory, --gpu-flops, --bandwidth, --link")
    given = {"memory": (memory, GiB), "flops": (flops, 1e12), "bandwidth": (bandwidth, 1e9), "link": (link, 1e9), "net": (link, 1e9)}
    for key, (value, _) in given.items():
        if value is not None and not (isfinite(value) and value > 0):
            raise ValueError(f"{key} of a device is a number above zero, found {value}; mend --{OPTIONS.get(key, key)}")
    own = {key: value * unit for key, (value, unit) in given.items() if value is not None}
    told = f"{MACHINES[name].source}; {', '.join(own)} as given" if own else MACHINES[name].source
    return replace(MACHINES[name], **own, source=told)  # type: ignore[arg-type]
