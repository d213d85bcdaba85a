"""Spiking networks: find the convolutions that read spikes, and skip the zeros.

- `graph` describes a network: traced graph, spike values, convolution sites and fusable groups;
- `profile` measures it: firing statistics, dense baselines and benchmarks;
- `autotune` decides how each group runs, by timing the candidates on this device;
- `runtime` and `backends` run it: plans, CUDA graphs, and the kernels of CPUs and GPUs;
- `models` and `demo` hold the spiking ResNets, the pretrained network and the demo.

`api` (`optimize`, `restore`, `layer_times`) and `explanation` (`explain`) are the entry points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.spiking.api import layer_times, optimize, restore
    from sparseflow.spiking.backends.spec import NeuronSpec
    from sparseflow.spiking.explanation import Explanation, explain
    from sparseflow.spiking.graph.analysis import SpikeGraph, analyze
    from sparseflow.spiking.graph.registry import register_neuron, unregister_neuron
    from sparseflow.spiking.models.pretrained import load_images, load_network, normalize
    from sparseflow.spiking.nir_import import import_nir
    from sparseflow.spiking.runtime.sparse_conv import SparseConv2d
    from sparseflow.spiking.saved_plan import load_plan, save_plan

__all__ = [
    "Explanation",
    "NeuronSpec",
    "SparseConv2d",
    "SpikeGraph",
    "analyze",
    "explain",
    "import_nir",
    "layer_times",
    "load_images",
    "load_network",
    "load_plan",
    "normalize",
    "optimize",
    "register_neuron",
    "restore",
    "save_plan",
    "unregister_neuron",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "api": ["layer_times", "optimize", "restore"],
        "backends.spec": ["NeuronSpec"],
        "explanation": ["Explanation", "explain"],
        "graph.analysis": ["SpikeGraph", "analyze"],
        "graph.registry": ["register_neuron", "unregister_neuron"],
        "models.pretrained": ["load_images", "load_network", "normalize"],
        "nir_import": ["import_nir"],
        "runtime.sparse_conv": ["SparseConv2d"],
        "saved_plan": ["load_plan", "save_plan"],
    },
)
