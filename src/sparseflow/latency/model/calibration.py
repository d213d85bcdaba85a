"""Calibration of a predictor by measurements of kernels and networks on its device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.core.costmodel.splits import split_k_fold
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.model.composition import VIEW_OPS
from sparseflow.latency.model.corrections import (
    NO_CORRECTIONS,
    CorrectionSample,
    KernelCorrections,
    get_class,
)
from sparseflow.latency.model.kernel_estimates import KernelIntervals
from sparseflow.latency.model.predictor import CALIBRATED, PEAKS, Predictor

CALIBRATED_INTERVAL = ConformalInterval(low=0.7, high=1.4, coverage=0.9, samples=0)
"""Narrowest interval of a calibrated predictor whose efficiencies come from another device."""

_FOLDS = 5
"""Folds of the kernels; each is predicted by corrections that were fitted without it."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A calibrated predictor.

    Attributes:
        predictor: The predictor.
        ratios_before: Measured over predicted latency of each network without corrections.
        ratios_after: The same with corrections that were fitted without the network's measurement.
    """

    predictor: Predictor
    ratios_before: tuple[float, ...]
    ratios_after: tuple[float, ...]


def calibrate_predictor(
    predictor: Predictor,
    kernels: Sequence[KernelSpec],
    kernel_ms: Sequence[float],
    graphs: Sequence[Graph],
    graph_ms: Sequence[float],
) -> Calibration:
    """Correct a predictor by measurements on its device.

    Args:
        predictor: Shipped or transferred predictor.
        kernels: Measured kernels.
        kernel_ms: Idle latency of each kernel.
        graphs: Measured networks.
        graph_ms: Idle latency of each network.
    """
    initial = predictor.model_copy(update={"corrections": NO_CORRECTIONS})
    roofline = predictor.regressor.roofline
    isolated_ms = predictor.regressor.estimate_idle_ms(kernels, predictor.measured_ms)
    samples = [
        CorrectionSample(
            class_ms={get_class(kernel, roofline): isolated_ms[kernel.id]},
            measured_ms=measured_ms,
            is_network=False,
        )
        for kernel, measured_ms in zip(kernels, kernel_ms, strict=True)
    ]
    networks = [make_network_sample(initial, graph, ms) for graph, ms in zip(graphs, graph_ms, strict=True)]
    corrections = KernelCorrections.fit([*samples, *networks])
    ratios_after = []
    for index, network in enumerate(networks):
        remaining = [*networks[:index], *networks[index + 1 :]]
        held_out = KernelCorrections.fit([*samples, *remaining])
        ratios_after.append(network.measured_ms / network.predict_ms(held_out))
    narrowest = CALIBRATED_INTERVAL if predictor.origin == PEAKS else predictor.idle_interval
    errors = ConformalInterval.fit([1.0] * len(ratios_after), ratios_after)
    interval = _combine(narrowest, errors)
    calibrated = predictor.model_copy(
        update={
            "origin": CALIBRATED,
            "measured_s": time.time(),
            "corrections": corrections,
            "kernel_intervals": _fit_kernel_intervals(predictor.kernel_intervals, samples, networks),
            "idle_interval": interval,
            "loaded_interval": interval,
        }
    )
    return Calibration(
        predictor=calibrated,
        ratios_before=tuple(n.measured_ms / n.predict_ms(NO_CORRECTIONS) for n in networks),
        ratios_after=tuple(ratios_after),
    )


def _combine(first: ConformalInterval, second: ConformalInterval) -> ConformalInterval:
    """Return the first interval, with the ends of the second where it is wider."""
    return first.model_copy(update={"low": min(first.low, second.low), "high": max(first.high, second.high)})


def _fit_kernel_intervals(
    known: KernelIntervals, kernels: Sequence[CorrectionSample], networks: Sequence[CorrectionSample]
) -> KernelIntervals:
    """Fit the interval of frequent operators to kernels; return the known ones with fewer than `_FOLDS`.

    Each kernel is predicted by corrections that were fitted without it.
    """
    if len(kernels) < _FOLDS:
        return known
    predicted_ms: list[float] = []
    measured_ms: list[float] = []
    for train_indices, test_indices in split_k_fold(len(kernels), _FOLDS):
        corrections = KernelCorrections.fit([*(kernels[n] for n in train_indices), *networks])
        predicted_ms += [kernels[n].predict_ms(corrections) for n in test_indices]
        measured_ms += [kernels[n].measured_ms for n in test_indices]
    frequent = ConformalInterval.fit(predicted_ms, measured_ms)
    return KernelIntervals(frequent=frequent, rare=_combine(frequent, known.rare))


def make_network_sample(predictor: Predictor, graph: Graph, measured_ms: float) -> CorrectionSample:
    """Describe a network by the latency of its kernels inside the graph.

    Args:
        predictor: Predictor without `corrections`.
        graph: Graph of the network.
        measured_ms: Its latency.
    """
    _, composed = predictor.compose(graph)
    kernels = {kernel.id: kernel for kernel in graph.kernels}
    class_ms: dict[str, float] = {}
    other_ms = composed.call_ms
    for kernel_id, part in composed.parts.items():
        kernel = kernels[kernel_id]
        if kernel.node_op in VIEW_OPS:
            other_ms += part.count * part.ms
        else:
            name = get_class(kernel, predictor.regressor.roofline)
            class_ms[name] = class_ms.get(name, 0.0) + part.count * part.ms
    return CorrectionSample(class_ms=class_ms, other_ms=other_ms, measured_ms=measured_ms, is_network=True)
