"""SparseFlow turns sparsity into latency that you can measure, predict and promise.

The names below are loaded when they are first used, so that `import sparseflow` stays quick and works
without any extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparseflow.spiking.explain import explain
    from sparseflow.spiking.modules import SparseConv2d
    from sparseflow.spiking.optimize import layer_times, optimize, restore
    from sparseflow.spiking.registry import register_neuron

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
    "SparseConv2d": "sparseflow.spiking.modules",
    "explain": "sparseflow.spiking.explain",
    "layer_times": "sparseflow.spiking.optimize",
    "optimize": "sparseflow.spiking.optimize",
    "register_neuron": "sparseflow.spiking.registry",
    "restore": "sparseflow.spiking.optimize",
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
