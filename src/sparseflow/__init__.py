"""SparseFlow turns sparsity into latency that you can measure, predict and promise.

Names are imported on first access, so that `import sparseflow` is fast and works without any extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.spiking.api import layer_times, optimize, restore
    from sparseflow.spiking.explanation import explain
    from sparseflow.spiking.graph.registry import register_neuron
    from sparseflow.spiking.runtime.sparse_conv import SparseConv2d

__version__ = "0.2.0"

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
        "spiking.api": ["layer_times", "optimize", "restore"],
        "spiking.explanation": ["explain"],
        "spiking.graph.registry": ["register_neuron"],
        "spiking.runtime.sparse_conv": ["SparseConv2d"],
    },
    submodules=["adaptive", "codesign", "latency", "pruning", "spiking", "tuning"],
)
