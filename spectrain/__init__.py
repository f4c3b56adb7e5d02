"""spectrain: train, measure and export draft heads for speculative decoding. Names resolve lazily (see `spectrain.api`)."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name in _PACKAGES:
        raise AttributeError(name)
    from spectrain import api

    return getattr(api, name)


def __dir__() -> list[str]:
    from spectrain import api

    return ["__version__", *api.NAMES]


_PACKAGES = frozenset(
    ["api", "cli", "config", "data", "decoding", "drafters", "evaluation", "export", "heads", "kernels", "target", "training", "yields"]
)
