"""Latency predictor: all latency models of one device, in one JSON file.

The file contains the device fingerprint, the kernel regressor, the latencies of measured kernels, the models
of composition, launch overhead and contention, the intervals, and the errors on held-out data. Files of
another format or version are refused. XGBoost models are stored in XGBoost's JSON format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_between
from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.core.metrics import quantile
from sparseflow.errors import FileFormatError
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.graph.memory import MemoryEstimate, estimate_memory
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.idle import MAX_IDLE_LOAD
from sparseflow.latency.model.co_runner import (
    MAX_RATE_PER_S,
    MIN_RATE_PER_S,
    CoRunnerPrediction,
    compute_core_share,
)
from sparseflow.latency.model.composition import QUEUE, ComposedLatency, CompositionModel
from sparseflow.latency.model.contention import BOTTLENECKS, ContentionModel
from sparseflow.latency.model.kernel_regressor import LEARNED, ROOFLINE, KernelRegressor
from sparseflow.latency.model.launch_overhead import LaunchOverheadModel

MAX_IDLE_SLOWDOWN = 1.03
"""Maximum slowdown at which the interval of idle models applies."""

MAX_MS = 1e12
"""Maximum latency, milliseconds: three decades."""

MAX_GUESS_SHARE = 0.05
"""Largest share of a latency that may come from operators without measurements."""

_LAUNCH_ONLY = (0.0, 0.0, 1.0)
"""Shares of `contention.BOTTLENECKS` in the overhead of a call."""


@dataclass(frozen=True, kw_only=True)
class KernelPrediction:
    """Predicted latency of one kernel inside the graph, per execution.

    Attributes:
        kernel_id: Id of the kernel.
        op: Canonical name of the kernel.
        count: Number of nodes whose time counts.
        idle_ms: Mean idle latency.
        mean_ms: Mean latency under load.
        low_ms: Lower end of the interval while idle.
        high_ms: Upper end of the interval while idle; infinite if the work of the operator is unknown.
        source: `"measured"`, `"learned"` or `"roofline"`.
    """

    kernel_id: str
    op: str
    count: int
    idle_ms: float
    mean_ms: float
    low_ms: float
    high_ms: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted latency of a model.

    Attributes:
        mean_ms: Mean latency.
        p50_ms: Median of runs.
        p95_ms: 95th percentile of runs.
        interval: Low and high end of the interval around `mean_ms`, milliseconds. The high end is infinite if
            the work of an operator that was not measured is unknown.
        interval_coverage: Expected share of measurements within such intervals.
        coverage: Share of `mean_ms` from kernels whose operator was measured; the rest is a guess by
            roofline.
        idle_ms: Mean latency without load.
        slowdown: `mean_ms` over `idle_ms`.
        load: Metric -> share that was used; empty for an idle device.
        mode: `"sum"`, `"critical_path"` or `"queue"`.
        call_ms: Part of `idle_ms` that belongs to no kernel.
        memory: Weights, and peak of the activations.
        per_kernel: One entry per kernel, most expensive first.
        notes: Sentences about limits of this prediction.
        co_runner: Model that runs beside this one; None without one.
    """

    mean_ms: float
    p50_ms: float
    p95_ms: float
    interval: tuple[float, float]
    interval_coverage: float
    coverage: float
    idle_ms: float
    slowdown: float
    load: Mapping[str, float]
    mode: str
    call_ms: float
    memory: MemoryEstimate
    per_kernel: tuple[KernelPrediction, ...]
    notes: tuple[str, ...]
    co_runner: CoRunnerPrediction | None = None

    @property
    def is_guess(self) -> bool:
        """Whether the interval has no high end, or more than `MAX_GUESS_SHARE` of the mean is by roofline."""
        return math.isinf(self.interval[1]) or self.coverage < 1.0 - MAX_GUESS_SHARE

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; an infinite end of an interval is None."""
        record = {
            **asdict(self),
            "interval": [None if math.isinf(end) else end for end in self.interval],
            "load": dict(self.load),
            "memory": {**vars(self.memory), "peak_bytes": self.memory.peak_bytes},
        }
        if self.co_runner is not None:
            record["co_runner"] |= {"duty": self.co_runner.duty, "active_share": self.co_runner.active_share}
        for kernel in record["per_kernel"]:
            if math.isinf(kernel["high_ms"]):
                kernel["high_ms"] = None
        return record


class Predictor(Artifact):
    """Latency models of one device; `train` creates one.

    Attributes:
        fingerprint: Device and settings.
        regressor: Regressor of kernels.
        measured_ms: Kernel id -> measured idle latency.
        composition: Latency of a graph from the latencies of its kernels.
        launch_overhead: Host time per kernel; None unless the graph is a queue of host and device.
        contention: Effect of load.
        kernel_interval: Interval around the latency of a learned kernel.
        idle_interval: Interval around the latency of a model on an idle device.
        loaded_interval: Interval around the latency of a model under load.
        other_load: Share of the device that other work used during the idle measurements; None if it was not
            read.
        quality: Errors on held-out data, in JSON types.
    """

    FORMAT: ClassVar[str] = "sparseflow.latency.predictor"
    VERSION: ClassVar[int] = 4
    HINT: ClassVar[str] = "run `sparseflow latency train` again"

    fingerprint: DeviceFingerprint
    regressor: KernelRegressor
    measured_ms: Mapping[str, PositiveFloat]
    composition: CompositionModel
    launch_overhead: LaunchOverheadModel | None
    contention: ContentionModel
    kernel_interval: ConformalInterval
    idle_interval: ConformalInterval
    loaded_interval: ConformalInterval
    other_load: NonNegativeFloat | None
    quality: Mapping[str, Any]

    @model_validator(mode="after")
    def _check_launch_overhead(self) -> Self:
        if self.composition.mode == QUEUE and self.launch_overhead is None:
            raise ValueError("`launch_overhead` is required for the mode queue")
        return self

    def compose(self, graph: Graph) -> tuple[dict[str, float], ComposedLatency]:
        """Return kernel id -> isolated idle latency in milliseconds, and the idle latency of the graph."""
        isolated_ms = self.regressor.estimate_idle_ms(graph.kernels, self.measured_ms)
        host_ms = None if self.launch_overhead is None else self.launch_overhead.predict(graph.kernels)
        return isolated_ms, self.composition.compose(graph, isolated_ms, host_ms)

    def compute_kernel_interval(self, kernel: KernelSpec, isolated_ms: float) -> tuple[float, float, str]:
        """Return both ends of the interval of an isolated idle latency, milliseconds, and its source."""
        source = self.regressor.get_source(kernel, self.measured_ms)
        low_ms = high_ms = isolated_ms
        if source == LEARNED:
            low_ms, high_ms = self.kernel_interval.bounds(isolated_ms)
        elif source == ROOFLINE:
            _, low_ms, high_ms = self.regressor.roofline.estimate_ms(kernel)
        return low_ms, high_ms, source

    def predict(self, graph: Graph, load: Mapping[str, float] | None = None, *, seed: int = 0) -> Prediction:
        """Predict the latency of a graph under load.

        Args:
            graph: Graph that onnxruntime executes on this device.
            load: Metric -> share; None for an idle device.
            seed: Random seed of the sampled runs.

        Raises:
            DeviceError: The load lacks the metric of the contention model.
            FileFormatError: The predictor is damaged and gives an impossible latency.
            InputError: The share is not in [0, 1], or the predictor was trained on idle measurements only.
        """
        isolated_ms, composed = self.compose(graph)
        idle_ms = composed.total_ms
        if not 0.0 < idle_ms <= MAX_MS:
            raise FileFormatError(f"the predictor is damaged, its latency is {idle_ms:g} ms; {self.HINT}")
        delays_ms = self._compute_delays_ms(graph, composed, isolated_ms, self.contention)
        total_delay_ms = _sum_delays_ms(composed, delays_ms) + self.contention.compute_delay_ms(
            composed.call_ms, _LAUNCH_ONLY
        )
        load_share = self.contention.get_load(load) if load is not None else 0.0
        mean_ms = self.contention.predict_mean_ms(idle_ms, total_delay_ms, load_share)
        runs_ms = self.contention.sample_runs(idle_ms, total_delay_ms, load_share, seed=seed).tolist()
        per_kernel = self._predict_per_kernel(graph, composed, isolated_ms, delays_ms, mean_ms)
        interval = self.idle_interval if mean_ms <= MAX_IDLE_SLOWDOWN * idle_ms else self.loaded_interval
        roofline_kernels = [kernel for kernel in per_kernel if kernel.source == ROOFLINE]
        supported_ms = mean_ms - sum(kernel.count * kernel.mean_ms for kernel in roofline_kernels)
        return Prediction(
            mean_ms=mean_ms,
            p50_ms=quantile(runs_ms, 0.5),
            p95_ms=quantile(runs_ms, 0.95),
            interval=_compute_interval(interval, supported_ms, roofline_kernels),
            interval_coverage=interval.coverage,
            coverage=supported_ms / mean_ms,
            idle_ms=idle_ms,
            slowdown=mean_ms / idle_ms,
            load=dict(load or {}),
            mode=self.composition.mode,
            call_ms=composed.call_ms,
            memory=estimate_memory(graph),
            per_kernel=tuple(sorted(per_kernel, key=lambda kernel: -kernel.count * kernel.mean_ms)),
            notes=tuple(self._list_notes(graph, roofline_kernels, 1.0 - supported_ms / mean_ms)),
        )

    def predict_with_co_runner(
        self, graph: Graph, other: Graph, rate_per_s: float, *, cpus: int | None = None, seed: int = 0
    ) -> Prediction:
        """Predict the latency of a graph, whose runs follow each other, beside runs of another one at a rate.

        Args:
            graph: Graph that onnxruntime executes on this device.
            other: Graph of the co-runner, with as many threads.
            rate_per_s: Runs of the co-runner per second.
            cpus: CPUs that both use; by default all of the device.
            seed: Random seed of the sampled runs.

        Raises:
            InputError: The rate or the number of CPUs is out of range, or on a GPU the predictor was trained
                on idle measurements only.
            FileFormatError: As `predict`.
        """
        co_runner = self._describe_co_runner(other, rate_per_s, cpus)
        contention = replace(self._get_time_slicing(), cycle_ms=1e3 / rate_per_s)
        scaled = replace(
            contention, delay_factors=tuple(co_runner.core_share * f for f in contention.delay_factors)
        )
        load = {}
        if co_runner.core_share:
            load = {contention.metric: scaled.compute_load(co_runner.active_share)}
        prediction = self.model_copy(update={"contention": scaled}).predict(graph, load or None, seed=seed)
        return replace(
            prediction, load={}, co_runner=co_runner, notes=(*prediction.notes, *co_runner.list_notes())
        )

    def _get_time_slicing(self) -> ContentionModel:
        """Return the model of contention; on a CPU without measurements under load, that of fair slices.

        Raises:
            InputError: There are no measurements under load of a GPU.
        """
        if self.contention.samples or self.fingerprint.kind != "cpu":
            self.contention.check_fitted()
            return self.contention
        return replace(self.contention, samples=1, delay_factors=(1.0,) * len(BOTTLENECKS))

    def _describe_co_runner(self, graph: Graph, rate_per_s: float, cpus: int | None) -> CoRunnerPrediction:
        check_between(MIN_RATE_PER_S, MAX_RATE_PER_S, rate_per_s=rate_per_s)
        isolated_ms, composed = self.compose(graph)
        contention = self._get_time_slicing()
        core_share = 1.0
        if self.fingerprint.kind == "cpu":
            cpus = self.fingerprint.cores if cpus is None else cpus
            check_between(1, self.fingerprint.cores, cpus=cpus)
            core_share = compute_core_share(2 * min(self.fingerprint.threads or cpus, cpus), cpus)
        delays_ms = self._compute_delays_ms(graph, composed, isolated_ms, contention)
        delay_ms = core_share * _sum_delays_ms(composed, delays_ms)
        idle_ms = composed.total_ms
        kernels = {kernel.id: kernel for kernel in graph.kernels}
        bottlenecks = [0.0] * len(BOTTLENECKS)
        for kernel_id, part in composed.parts.items():
            shares = self.regressor.roofline.compute_bottleneck_shares(
                kernels[kernel_id], isolated_ms[kernel_id]
            )
            bottlenecks = [
                total + share * part.count * part.ms / idle_ms
                for total, share in zip(bottlenecks, shares, strict=True)
            ]
        active_ms = contention.predict_active_ms(idle_ms, delay_ms) if core_share else idle_ms
        return CoRunnerPrediction(
            model=graph.model_path,
            rate_per_s=rate_per_s,
            idle_ms=idle_ms,
            mean_ms=active_ms,
            core_share=core_share,
            bottleneck_shares=dict(zip(BOTTLENECKS, bottlenecks, strict=True)),
        )

    def _list_notes(
        self, graph: Graph, roofline_kernels: Sequence[KernelPrediction], guess_share: float
    ) -> Iterator[str]:
        """Yield sentences about limits of a prediction."""
        if guess_share > MAX_GUESS_SHARE:
            names = ", ".join(sorted({kernel.op for kernel in roofline_kernels}))
            yield f"{100 * guess_share:.0f} % of the latency is a guess: the training did not measure {names}"
        unbounded = {kernel.kernel_id for kernel in roofline_kernels if math.isinf(kernel.high_ms)}
        if unbounded:
            names = ", ".join(sorted({kernel.op for kernel in graph.kernels if kernel.id in unbounded}))
            yield (
                f"nothing bounds the latency: the work of {names} is unknown; measure the model with "
                "`sparseflow latency run`"
            )
        if self.other_load is None:
            yield "the training did not read whether other work disturbed the idle measurements"
        elif self.other_load > MAX_IDLE_LOAD:
            yield (
                f"other work used {100 * self.other_load:.0f} % of the device during the idle measurements "
                "of the training, so p50 and p95 contain no variation of idle runs"
            )

    def _compute_delays_ms(
        self,
        graph: Graph,
        composed: ComposedLatency,
        isolated_ms: Mapping[str, float],
        contention: ContentionModel,
    ) -> dict[str, float]:
        """Return kernel id -> mean delay of one execution while the load is active, in milliseconds."""
        kernels = {kernel.id: kernel for kernel in graph.kernels}
        return {
            kernel_id: contention.compute_delay_ms(
                contribution.ms,
                self.regressor.roofline.compute_bottleneck_shares(kernels[kernel_id], isolated_ms[kernel_id]),
            )
            for kernel_id, contribution in composed.parts.items()
        }

    def _predict_per_kernel(
        self,
        graph: Graph,
        composed: ComposedLatency,
        isolated_ms: Mapping[str, float],
        delays_ms: Mapping[str, float],
        mean_ms: float,
    ) -> list[KernelPrediction]:
        """Distribute the increase under load over the kernels by their delays."""
        kernels = {kernel.id: kernel for kernel in graph.kernels}
        kernel_delay_ms = _sum_delays_ms(composed, delays_ms)
        predictions = []
        for kernel_id, contribution in composed.parts.items():
            if kernel_delay_ms:
                share = delays_ms[kernel_id] / kernel_delay_ms
            else:
                share = contribution.ms / (composed.total_ms - composed.call_ms)
            kernel, kernel_ms = kernels[kernel_id], isolated_ms[kernel_id]
            low_ms, high_ms, source = self.compute_kernel_interval(kernel, kernel_ms)
            low_ratio, high_ratio = (low_ms / kernel_ms, high_ms / kernel_ms) if kernel_ms else (1.0, 1.0)
            predictions.append(
                KernelPrediction(
                    kernel_id=kernel_id,
                    op=kernel.op,
                    count=contribution.count,
                    idle_ms=contribution.ms,
                    mean_ms=contribution.ms + (mean_ms - composed.total_ms) * share,
                    low_ms=contribution.ms * low_ratio,
                    high_ms=math.inf if math.isinf(high_ratio) else contribution.ms * high_ratio,
                    source=source,
                )
            )
        return predictions


def _sum_delays_ms(composed: ComposedLatency, delays_ms: Mapping[str, float]) -> float:
    """Sum the delays of all nodes of a graph."""
    return sum(
        contribution.count * delays_ms[kernel_id] for kernel_id, contribution in composed.parts.items()
    )


def _compute_interval(
    interval: ConformalInterval, supported_ms: float, roofline_kernels: Sequence[KernelPrediction]
) -> tuple[float, float]:
    """Compute the interval around a mean latency, in milliseconds.

    Args:
        interval: Interval of the latency of kernels whose operator was measured.
        supported_ms: Their latency.
        roofline_kernels: The other kernels, which have an interval each.
    """
    low_ms, high_ms = supported_ms * interval.low, supported_ms * interval.high
    low_ms += sum(
        kernel.count * kernel.low_ms * kernel.mean_ms / kernel.idle_ms for kernel in roofline_kernels
    )
    high_ms += sum(
        kernel.count * kernel.high_ms * kernel.mean_ms / kernel.idle_ms for kernel in roofline_kernels
    )
    return low_ms, high_ms
