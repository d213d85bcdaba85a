"""Which convolutions read spikes: `analyze(model)` and what it finds."""

from sparseflow.spiking.graph.analysis import SpikeGraph, analyze
from sparseflow.spiking.graph.sites import ConvSite, Refusal
from sparseflow.spiking.graph.value import Value

__all__ = ["ConvSite", "Refusal", "SpikeGraph", "Value", "analyze"]
