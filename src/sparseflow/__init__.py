"""SparseFlow turns sparsity into latency that you can measure, predict and promise.

The names below are loaded when they are first used, so that `import sparseflow` stays quick and works
without any extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

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

__getattr__, __dir__ = attach(
    __name__,
    {
        "spiking.explain": ["explain"],
        "spiking.modules": ["SparseConv2d"],
        "spiking.optimize": ["layer_times", "optimize", "restore"],
        "spiking.registry": ["register_neuron"],
    },
    submodules=["adaptive", "codesign", "latency", "pruning", "spiking", "tuning"],
)
