"""SparseFlow turns sparsity into latency that you can measure, predict and promise.

The names below are loaded when they are first used, so that `import sparseflow` stays quick and works
without any extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparseflow.spiking import (
        SparseConv2d,
        explain,
        layer_times,
        optimize,
        register_neuron,
        restore,
    )

__version__ = "0.1.0"

__all__ = [
    "SparseConv2d",
    "__version__",
    "explain",
    "layer_times",
    "optimize",
    "register_neuron",
    "restore",
]

_HOME = {
    "SparseConv2d": "sparseflow.spiking",
    "explain": "sparseflow.spiking",
    "layer_times": "sparseflow.spiking",
    "optimize": "sparseflow.spiking",
    "register_neuron": "sparseflow.spiking",
    "restore": "sparseflow.spiking",
}


def __getattr__(name: str) -> object:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'sparseflow' has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
