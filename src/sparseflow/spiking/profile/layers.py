"""Profiles of convolutions: inputs, sparsity and the latency of their groups in the optimized network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.api import layer_times, optimize
from sparseflow.spiking.graph import analyze
from sparseflow.spiking.profile.firing import FiringStats, profile_firing


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Profile of one convolution.

    Attributes:
        name: Module name.
        fed_by: Names of the neurons that feed it.
        values: Kind of its input values, such as `"binary"`.
        replaceable: Whether it can be replaced by a sparse group.
        reason: Why it cannot be replaced; None if it can.
        latency_ms: Latency of its group in the optimized network; None without a group.
        firing: Firing statistics of its input; None if it was not called.
    """

    name: str
    fed_by: tuple[str, ...]
    values: str
    replaceable: bool
    reason: str | None
    latency_ms: float | None
    firing: FiringStats | None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; the fields of `firing` become fields of the record."""
        record: dict[str, Any] = {**asdict(self), "fed_by": list(self.fed_by)}
        firing = record.pop("firing")
        return record | (firing or {})


def profile_layers(model: nn.Module, x: torch.Tensor) -> list[LayerProfile]:
    """Profile the convolutions of a spiking network, which is optimized in place.

    Args:
        model: Spiking network in evaluation mode.
        x: Input, [batch, channels, height, width].

    Raises:
        ModelError, SampleError: See `optimize`.
    """
    graph = analyze(model, x)
    firing = profile_firing(model, (x,), [site.name for site in graph.sites])
    optimize(model, x)
    times = layer_times(model, x)
    return [
        LayerProfile(
            name=site.name,
            fed_by=tuple(site.fed_by),
            values=site.value.kind,
            replaceable=site.replaceable,
            reason=site.reason,
            latency_ms=times.get(site.name),
            firing=firing.get(site.name),
        )
        for site in graph.sites
    ]
