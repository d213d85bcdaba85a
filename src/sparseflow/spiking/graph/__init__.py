"""Analysis of a network: which convolutions read spikes, and which layers form a fusable group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.spiking.graph.analysis import SpikeGraph, analyze
    from sparseflow.spiking.graph.sites import ConvSite, Refusal
    from sparseflow.spiking.graph.values import SpikeValue

__all__ = ["ConvSite", "Refusal", "SpikeGraph", "SpikeValue", "analyze"]

__getattr__, __dir__ = attach(
    __name__,
    {"analysis": ["SpikeGraph", "analyze"], "sites": ["ConvSite", "Refusal"], "values": ["SpikeValue"]},
)
