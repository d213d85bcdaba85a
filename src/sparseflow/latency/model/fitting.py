"""Fits every part of a predictor to all or some measurements."""

from __future__ import annotations

from collections.abc import Collection

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.errors import InputError
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.measure.idle import LOAD_METRICS
from sparseflow.latency.measure.overlap import SUM
from sparseflow.latency.model.calibration import make_network_sample
from sparseflow.latency.model.composition import QUEUE, CompositionModel
from sparseflow.latency.model.contention import ContentionModel, ContentionSample
from sparseflow.latency.model.corrections import NO_CORRECTIONS, KernelCorrections
from sparseflow.latency.model.dataset import LatencyDataset, LoadedMeasurement
from sparseflow.latency.model.kernel_estimates import KernelIntervals
from sparseflow.latency.model.kernel_regressor import RATIO, KernelRegressor
from sparseflow.latency.model.launch_overhead import LaunchOverheadModel
from sparseflow.latency.model.predictor import TRAINED, Predictor

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
    graph_kernels = list({kernel.id: kernel for graph in graphs for kernel in graph.kernels}.values())
    composition = CompositionModel.fit(
        graphs,
        regressor.estimate_idle_ms(graph_kernels, measured_ms),
        [data.idle_ms[name] for name in model_names],
        mode or (QUEUE if data.host_ms else SUM),
        None if launch_overhead is None else launch_overhead.predict(graph_kernels),
    )
    metric = LOAD_METRICS[data.fingerprint.kind]
    predictor = Predictor(
        origin=TRAINED,
        measured_s=data.measured_s,
        fingerprint=data.fingerprint,
        peaks=None,
        corrections=NO_CORRECTIONS,
        graph_corrections=NO_CORRECTIONS,
        regressor=regressor,
        measured_ms=measured_ms,
        composition=composition,
        launch_overhead=launch_overhead,
        contention=ContentionModel.fit([], metric, 0.0, []),
        kernel_intervals=KernelIntervals(frequent=DEFAULT_INTERVAL, rare=DEFAULT_INTERVAL),
        idle_interval=DEFAULT_INTERVAL,
        loaded_interval=DEFAULT_INTERVAL,
        other_load=data.other_load,
        quality={},
    )
    if composition.mode != QUEUE:
        networks = [make_network_sample(predictor, data.graphs[n], data.idle_ms[n]) for n in model_names]
        predictor = predictor.model_copy(update={"graph_corrections": KernelCorrections.fit(networks)})
    selected = {*names, *model_names}
    rows = [
        measurement
        for measurement in data.loaded
        if measurement.target in selected and (levels is None or measurement.level in levels)
    ]
    jitter = [ratio for name in model_names for ratio in data.jitter.get(name, ())]
    samples = _make_samples(predictor, data, rows, metric)
    idle_load = data.idle_load.get(metric, 0.0)
    contention = ContentionModel.fit(samples, metric, idle_load, jitter, seed=seed)
    return predictor.model_copy(update={"contention": contention})


def _make_samples(
    predictor: Predictor, data: LatencyDataset, rows: list[LoadedMeasurement], metric: str
) -> list[ContentionSample]:
    unread = [measurement for measurement in rows if metric not in measurement.load]
    if unread:
        raise InputError(
            f"{len(unread)} of {len(rows)} measurements under load lack the load metric `{metric}`: "
            "collect with a `telemetry` source that provides it"
        )
    roofline = predictor.regressor.roofline
    bottlenecks = {
        measurement.target: _compute_model_bottlenecks(predictor, data.graphs[measurement.target])
        if measurement.is_model
        else roofline.compute_bottleneck_shares(data.kernels[measurement.target], measurement.idle_ms)
        for measurement in {row.target: row for row in rows}.values()
    }
    return [
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


def _compute_model_bottlenecks(predictor: Predictor, graph: Graph) -> tuple[float, ...]:
    """Return the bottleneck shares of a model: those of its kernels, weighted by contribution; a call is a
    launch.
    """
    kernels = {kernel.id: kernel for kernel in graph.kernels}
    estimates, composed = predictor.compose(graph)
    totals = [0.0, 0.0, composed.call_ms]
    for name, part in composed.parts.items():
        shares = predictor.regressor.roofline.compute_bottleneck_shares(kernels[name], estimates[name].ms)
        totals = [t + part.count * part.ms * w for t, w in zip(totals, shares, strict=True)]
    total = sum(totals)
    return tuple(t / total for t in totals) if total else (0.0, 0.0, 1.0)
