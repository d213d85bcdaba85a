"""Fits every part of a predictor to all or some measurements."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.errors import InputError
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.measure.overlap import SUM
from sparseflow.latency.model.composition import QUEUE, CompositionModel
from sparseflow.latency.model.contention import LOAD_METRICS, ContentionModel, ContentionSample
from sparseflow.latency.model.dataset import LatencyDataset, LoadedMeasurement
from sparseflow.latency.model.kernel_regressor import RATIO, KernelRegressor
from sparseflow.latency.model.launch_overhead import LaunchOverheadModel
from sparseflow.latency.model.predictor import Predictor

DEFAULT_INTERVAL = ConformalInterval(low=0.5, high=2.0, coverage=0.9, samples=0)
"""Interval of a predictor without held-out data."""


def fit_predictor(
    data: LatencyDataset,
    kind: str = RATIO,
    *,
    kernels: Collection[str] | None = None,
    models: Collection[str] | None = None,
    levels: Collection[float] | None = None,
    mode: str | None = None,
    seed: int = 0,
) -> Predictor:
    """Fit a predictor with default intervals.

    Args:
        data: Measurements.
        kind: Regressor, one of `kernel_regressor.KINDS`.
        kernels: Ids of the kernels to learn; by default all.
        models: Names of the models to learn; by default all.
        levels: Levels of load to learn; by default all.
        mode: Composition, one of `composition.MODES`; by default a queue if kernels were measured in a
            stream, otherwise a sum.
        seed: Random seed of the trees.

    Raises:
        InputError: There is nothing to learn.
        MissingExtraError: XGBoost or scipy is missing.
    """
    names = [n for n in data.list_device_kernels() if kernels is None or n in kernels]
    model_names = [n for n in data.list_models() if models is None or n in models]
    measured_ms = {name: data.idle_ms[name] for name in names}
    regressor = KernelRegressor.fit(
        [data.kernels[n] for n in names], list(measured_ms.values()), kind, free_ops=data.free_ops, seed=seed
    )
    streamed_names = [n for n in data.host_ms if kernels is None or n in kernels]
    launch_overhead = None
    if streamed_names:
        launch_overhead = LaunchOverheadModel.fit(
            [data.kernels[n] for n in streamed_names], [data.host_ms[n] for n in streamed_names], seed=seed
        )
    graphs = [data.graphs[name] for name in model_names]
    graph_kernels = {kernel.id: kernel for graph in graphs for kernel in graph.kernels}
    composition = CompositionModel.fit(
        graphs,
        estimate_idle_ms(graph_kernels, measured_ms, regressor),
        [data.idle_ms[name] for name in model_names],
        mode or choose_mode(data),
        None if launch_overhead is None else launch_overhead.predict(graph_kernels.values()),
    )
    selected = {*names, *model_names}
    rows = [
        measurement
        for measurement in data.loaded
        if measurement.target in selected and (levels is None or measurement.level in levels)
    ]
    return Predictor(
        fingerprint=data.fingerprint,
        regressor=regressor,
        measured_ms=measured_ms,
        composition=composition,
        launch_overhead=launch_overhead,
        contention=_fit_contention(
            data, rows, model_names, regressor, measured_ms, composition, launch_overhead, seed
        ),
        kernel_interval=DEFAULT_INTERVAL,
        idle_interval=DEFAULT_INTERVAL,
        loaded_interval=DEFAULT_INTERVAL,
        quality={},
    )


def choose_mode(data: LatencyDataset) -> str:
    """Return the composition that fits the measurements: a queue of host and device, or a sum."""
    return QUEUE if data.host_ms else SUM


def estimate_idle_ms(
    kernels: Mapping[str, KernelSpec], measured_ms: Mapping[str, float], regressor: KernelRegressor
) -> dict[str, float]:
    """Return kernel id -> idle latency of the isolated kernel: measured, learned or by roofline."""
    return {name: ms for name, (ms, _) in regressor.estimate_idle_ms(kernels, measured_ms).items()}


def _fit_contention(
    data: LatencyDataset,
    rows: list[LoadedMeasurement],
    models: list[str],
    regressor: KernelRegressor,
    measured_ms: Mapping[str, float],
    composition: CompositionModel,
    launch_overhead: LaunchOverheadModel | None,
    seed: int,
) -> ContentionModel:
    metric = LOAD_METRICS[data.fingerprint.kind]
    unread = [measurement for measurement in rows if metric not in measurement.load]
    if unread:
        raise InputError(
            f"{len(unread)} of {len(rows)} measurements under load lack the load metric `{metric}`: "
            "collect with a `telemetry` source that provides it"
        )
    bottlenecks = {
        measurement.target: _compute_model_bottlenecks(
            data.graphs[measurement.target], regressor, measured_ms, composition, launch_overhead
        )
        if measurement.is_model
        else regressor.roofline.compute_bottleneck_shares(
            data.kernels[measurement.target], measurement.idle_ms
        )
        for measurement in {row.target: row for row in rows}.values()
    }
    samples = [
        ContentionSample(
            idle_ms=measurement.idle_ms,
            bottleneck_shares=bottlenecks[measurement.target],
            load=measurement.load[metric],
            achieved=measurement.achieved,
            mean_ms=measurement.slowdown * measurement.idle_ms,
            ratios=measurement.ratios,
            is_model=measurement.is_model,
        )
        for measurement in rows
    ]
    jitter = [ratio for name in models for ratio in data.jitter[name]]
    return ContentionModel.fit(samples, metric, data.idle_load.get(metric, 0.0), jitter, seed=seed)


def _compute_model_bottlenecks(
    graph: Graph,
    regressor: KernelRegressor,
    measured_ms: Mapping[str, float],
    composition: CompositionModel,
    launch_overhead: LaunchOverheadModel | None,
) -> tuple[float, ...]:
    """Return the bottleneck shares of a model: those of its kernels, weighted by contribution; a call is a
    launch.
    """
    kernels = {kernel.id: kernel for kernel in graph.kernels}
    idle_ms = estimate_idle_ms(kernels, measured_ms, regressor)
    composed = composition.compose(
        graph, idle_ms, None if launch_overhead is None else launch_overhead.predict(kernels.values())
    )
    totals = [0.0, 0.0, composed.call_ms]
    for name, part in composed.parts.items():
        shares = regressor.roofline.compute_bottleneck_shares(kernels[name], idle_ms[name])
        totals = [t + part.count * part.ms * w for t, w in zip(totals, shares, strict=True)]
    total = sum(totals)
    return tuple(t / total for t in totals) if total else (0.0, 0.0, 1.0)
