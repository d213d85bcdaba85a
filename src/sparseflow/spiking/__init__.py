"""Spiking networks: find the convolutions that read spikes, and skip the zeros.

`optimize` is the way in; `graph` describes a network, `dispatch` decides, `plan` runs, `kernels` computes.
"""

from sparseflow.spiking.explain import Explanation, LayerReport, explain
from sparseflow.spiking.modules import SparseConv2d
from sparseflow.spiking.optimize import layer_times, optimize, restore
from sparseflow.spiking.registry import register_neuron

__all__ = [
    "Explanation",
    "LayerReport",
    "SparseConv2d",
    "explain",
    "layer_times",
    "optimize",
    "register_neuron",
    "restore",
]
