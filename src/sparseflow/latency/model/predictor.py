"""Latency predictor: all latency models of one device, in one JSON file.

The file contains the device fingerprint, the kernel regressor, the latencies of measured kernels, the models
of composition, launch overhead and contention, the intervals, and the errors on held-out data. Files of
another format or version are refused. XGBoost models are stored in XGBoost's JSON format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

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
from sparseflow.latency.measure.peaks import Peaks
from sparseflow.latency.model.co_runner import (
    MAX_RATE_PER_S,
    MIN_RATE_PER_S,
    CoRunnerPrediction,
    compute_core_share,
)
from sparseflow.latency.model.composition import QUEUE, VIEW_OPS, ComposedLatency, CompositionModel
from sparseflow.latency.model.contention import BOTTLENECKS, ContentionModel
from sparseflow.latency.model.corrections import KernelCorrections, get_class
from sparseflow.latency.model.kernel_estimates import KernelEstimate, KernelIntervals, estimate_kernels
from sparseflow.latency.model.kernel_regressor import LEARNED, MEASURED, KernelRegressor
from sparseflow.latency.model.launch_overhead import LaunchOverheadModel

TRAINED, SHIPPED, PEAKS, CALIBRATED = "trained", "shipped", "peaks", "calibrated"
"""Origin of a predictor: trained on collections of this device, shipped with the package for this kind of
device, transferred from another device by the peaks of both, or one of the latter two with corrections.
"""

MAX_IDLE_SLOWDOWN = 1.03
"""Maximum slowdown at which the interval of idle models applies."""

MAX_MS = 1e12
"""Maximum latency, milliseconds: three decades."""

MAX_GUESS_SHARE = 0.05
"""Largest share of a latency that may come from operators without measurements, nor related ones."""

_MAX_EXTRA_LAUNCHES = 0.25
"""Launches by which a kernel of a graph, or the call, can be slower, which a fit to large models does not
determine.
"""

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
        source: `"measured"`, `"learned"`, `"related"` (only its main operator was measured, such as `Conv` of
            `Conv_Relu`), `"composed"` (from the kernels of its subgraphs) or `"roofline"`.
        guess_share: Share of the latency by roofline.
    """

    kernel_id: str
    op: str
    count: int
    idle_ms: float
    mean_ms: float
    low_ms: float
    high_ms: float
    source: str
    guess_share: float


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
        coverage: Share of the latency of all kernels from those whose operator, or a related one, was
            measured; the rest is a guess by roofline.
        idle_ms: Mean latency without load.
        slowdown: `mean_ms` over `idle_ms`.
        threads: Threads within an operator; None is onnxruntime's choice.
        load: Metric -> share that was used; empty for an idle device.
        mode: `"sum"`, `"critical_path"` or `"queue"`.
        call_ms: Part of `idle_ms` that belongs to no kernel.
        memory: Weights, and peak of the activations.
        per_kernel: One entry per kernel, most expensive first.
        origin: Origin of the predictor: `"trained"`, `"shipped"`, `"peaks"` or `"calibrated"`.
        measured_s: POSIX time of the predictor's last measurement.
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
    threads: int | None
    load: Mapping[str, float]
    mode: str
    call_ms: float
    memory: MemoryEstimate
    per_kernel: tuple[KernelPrediction, ...]
    origin: str
    measured_s: float
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
        origin: `"trained"`, `"shipped"`, `"peaks"` or `"calibrated"`.
        measured_s: POSIX time of the last measurement of this device or, if shipped, of this kind of device.
        fingerprint: Device and settings.
        peaks: Peaks of the device; None if they were not measured, and the predictor cannot be transferred.
        corrections: Factors of the latencies of kernels, from a calibration.
        graph_corrections: Factors of the latencies of kernels inside graphs, from the training.
        regressor: Regressor of kernels.
        measured_ms: Kernel id -> measured idle latency.
        composition: Latency of a graph from the latencies of its kernels.
        launch_overhead: Host time per kernel; None unless the graph is a queue of host and device.
        contention: Effect of load.
        kernel_intervals: Intervals around the latency of learned kernels.
        idle_interval: Interval around the latency of a model on an idle device.
        loaded_interval: Interval around the latency of a model under load.
        other_load: Share of the device that other work used during the idle measurements; None if it was not
            read.
        quality: Errors on held-out data, in JSON types.
    """

    FORMAT: ClassVar[str] = "sparseflow.latency.predictor"
    VERSION: ClassVar[int] = 6
    HINT: ClassVar[str] = "run `sparseflow latency train` again"

    origin: Literal["trained", "shipped", "peaks", "calibrated"]
    measured_s: NonNegativeFloat
    fingerprint: DeviceFingerprint
    peaks: Peaks | None
    corrections: KernelCorrections
    graph_corrections: KernelCorrections
    regressor: KernelRegressor
    measured_ms: Mapping[str, PositiveFloat]
    composition: CompositionModel
    launch_overhead: LaunchOverheadModel | None
    contention: ContentionModel
    kernel_intervals: KernelIntervals
    idle_interval: ConformalInterval
    loaded_interval: ConformalInterval
    other_load: NonNegativeFloat | None
    quality: Mapping[str, Any]

    @model_validator(mode="after")
    def _check_launch_overhead(self) -> Self:
        if self.composition.mode == QUEUE and self.launch_overhead is None:
            raise ValueError("`launch_overhead` is required for the mode queue")
        return self

    def compose(self, graph: Graph) -> tuple[dict[str, KernelEstimate], ComposedLatency]:
        """Return kernel id -> estimate of the isolated kernel, and the idle latency of the graph."""
        estimates = self.estimate_kernels(graph.kernels)
        host_ms = None if self.launch_overhead is None else self.launch_overhead.predict(graph.kernels)
        isolated_ms = {name: estimate.ms for name, estimate in estimates.items()}
        composed = self.composition.compose(graph, isolated_ms, host_ms)
        factors = {
            kernel.id: 1.0 if kernel.node_op in VIEW_OPS else self._get_correction(kernel)
            for kernel in graph.kernels
        }
        return estimates, composed.scale(factors)

    def _get_correction(self, kernel: KernelSpec) -> float:
        """Return the factor of a kernel inside a graph."""
        name = get_class(kernel, self.regressor.roofline)
        return self.corrections.get_factor(name) * self.graph_corrections.get_factor(name)

    def estimate_kernels(self, kernels: Iterable[KernelSpec]) -> dict[str, KernelEstimate]:
        """Return kernel id -> estimate of the isolated kernel, also of those in subgraphs."""
        return estimate_kernels(kernels, self.measured_ms, self.regressor, self.kernel_intervals)

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
        estimates, composed = self.compose(graph)
        idle_ms = composed.total_ms
        if not 0.0 < idle_ms <= MAX_MS:
            raise FileFormatError(f"the predictor is damaged, its latency is {idle_ms:g} ms; {self.HINT}")
        delays_ms = self._compute_delays_ms(graph, composed, estimates, self.contention)
        total_delay_ms = _sum_delays_ms(composed, delays_ms) + self.contention.compute_delay_ms(
            composed.call_ms, _LAUNCH_ONLY
        )
        load_share = self.contention.get_load(load) if load is not None else 0.0
        mean_ms = self.contention.predict_mean_ms(idle_ms, total_delay_ms, load_share)
        runs_ms = self.contention.sample_runs(idle_ms, total_delay_ms, load_share, seed=seed).tolist()
        per_kernel = self._predict_per_kernel(graph, composed, estimates, delays_ms, mean_ms)
        interval = self.idle_interval if mean_ms <= MAX_IDLE_SLOWDOWN * idle_ms else self.loaded_interval
        kernels_ms = sum(kernel.count * kernel.mean_ms for kernel in per_kernel)
        guess_ms = sum(kernel.count * kernel.mean_ms * kernel.guess_share for kernel in per_kernel)
        guess_share = guess_ms / kernels_ms if kernels_ms else 0.0
        low_ms, high_ms = _compute_interval(interval, max(mean_ms - kernels_ms, 0.0), per_kernel)
        num_launches = 1 + sum(kernel.count for kernel in per_kernel)
        return Prediction(
            mean_ms=mean_ms,
            p50_ms=quantile(runs_ms, 0.5),
            p95_ms=quantile(runs_ms, 0.95),
            interval=(
                low_ms,
                high_ms + _MAX_EXTRA_LAUNCHES * num_launches * self.regressor.roofline.launch_ms,
            ),
            interval_coverage=interval.coverage,
            coverage=1.0 - guess_share,
            idle_ms=idle_ms,
            slowdown=mean_ms / idle_ms,
            threads=self.fingerprint.threads,
            load=dict(load or {}),
            mode=self.composition.mode,
            call_ms=composed.call_ms,
            memory=estimate_memory(graph),
            per_kernel=tuple(sorted(per_kernel, key=lambda kernel: -kernel.count * kernel.mean_ms)),
            origin=self.origin,
            measured_s=self.measured_s,
            notes=(
                *self._list_guess_notes([estimates[k.id] for k in graph.kernels], guess_share),
                *self._list_origin_notes(),
                *self._list_load_notes(load_share),
                *self.list_training_notes(),
            ),
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
        estimates, composed = self.compose(graph)
        contention = self._get_time_slicing()
        core_share = 1.0
        if self.fingerprint.kind == "cpu":
            cpus = self.fingerprint.cores if cpus is None else cpus
            check_between(1, self.fingerprint.cores, cpus=cpus)
            core_share = compute_core_share(2 * min(self.fingerprint.threads or cpus, cpus), cpus)
        delays_ms = self._compute_delays_ms(graph, composed, estimates, contention)
        call_delay_ms = contention.compute_delay_ms(composed.call_ms, _LAUNCH_ONLY)
        delay_ms = core_share * (_sum_delays_ms(composed, delays_ms) + call_delay_ms)
        idle_ms = composed.total_ms
        kernels = {kernel.id: kernel for kernel in graph.kernels}
        bottlenecks = [share * composed.call_ms / idle_ms for share in _LAUNCH_ONLY]
        for kernel_id, part in composed.parts.items():
            shares = self.regressor.roofline.compute_bottleneck_shares(
                kernels[kernel_id], estimates[kernel_id].ms
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

    def list_training_notes(self) -> list[str]:
        """List sentences about other work that disturbed the training."""
        if self.other_load is None:
            return ["the training did not read whether other work disturbed the idle measurements"]
        if self.other_load <= MAX_IDLE_LOAD:
            return []
        exact = self.fingerprint.kind == "cpu" and self.fingerprint.threads == 1
        effect = (
            "p50 and p95 contain no variation of idle runs"
            if exact
            else "the idle latency is too high; collect again on a quiet machine"
        )
        return [
            f"other work used {100 * self.other_load:.0f} % of the device during the idle measurements "
            f"of the training, so {effect}"
        ]

    def _list_origin_notes(self) -> Iterator[str]:
        if self.origin == PEAKS and self.peaks is not None:
            yield (
                f"this is a first answer from the peaks of this device ({self.peaks.format()}) and "
                "efficiencies that another device reaches; `sparseflow latency calibrate` corrects it in a "
                "minute"
            )
        elif self.origin == SHIPPED:
            yield (
                "the predictor was measured on another machine of this kind; `sparseflow latency calibrate` "
                "adapts it to this one in a minute"
            )

    def _list_load_notes(self, load: float) -> Iterator[str]:
        highest = self.contention.highest_load
        if load > highest + MAX_IDLE_LOAD:
            yield (
                f"the load of {100 * load:.0f} % is above the highest one of the training, "
                f"{100 * highest:.0f} %, so the slowdown is extrapolated"
            )

    @staticmethod
    def _list_guess_notes(estimates: Sequence[KernelEstimate], guess_share: float) -> Iterator[str]:
        """Yield sentences about kernels that were not measured."""
        if guess_share > MAX_GUESS_SHARE:
            names = ", ".join(sorted(frozenset().union(*(e.guessed_ops for e in estimates))))
            yield f"{100 * guess_share:.0f} % of the latency is a guess: the training did not measure {names}"
        unbounded = frozenset().union(*(e.unbounded_ops for e in estimates))
        if unbounded:
            names = ", ".join(sorted(unbounded))
            yield (
                f"nothing bounds the latency: the work of {names} is unknown; measure the model with "
                "`sparseflow latency run`"
            )

    def _compute_delays_ms(
        self,
        graph: Graph,
        composed: ComposedLatency,
        estimates: Mapping[str, KernelEstimate],
        contention: ContentionModel,
    ) -> dict[str, float]:
        """Return kernel id -> mean delay of one execution while the load is active, in milliseconds."""
        kernels = {kernel.id: kernel for kernel in graph.kernels}
        return {
            kernel_id: contention.compute_delay_ms(
                contribution.ms,
                self.regressor.roofline.compute_bottleneck_shares(
                    kernels[kernel_id], estimates[kernel_id].ms
                ),
            )
            for kernel_id, contribution in composed.parts.items()
        }

    def _predict_per_kernel(
        self,
        graph: Graph,
        composed: ComposedLatency,
        estimates: Mapping[str, KernelEstimate],
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
            estimate = estimates[kernel_id]
            scale = contribution.ms / estimate.ms if estimate.ms else 0.0
            predictions.append(
                KernelPrediction(
                    kernel_id=kernel_id,
                    op=kernels[kernel_id].op,
                    count=contribution.count,
                    idle_ms=contribution.ms,
                    mean_ms=contribution.ms + (mean_ms - composed.total_ms) * share,
                    low_ms=estimate.low_ms * scale if estimate.ms else contribution.ms,
                    high_ms=estimate.high_ms * scale if estimate.ms else contribution.ms,
                    source=estimate.source,
                    guess_share=estimate.guess_share,
                )
            )
        return predictions


def _sum_delays_ms(composed: ComposedLatency, delays_ms: Mapping[str, float]) -> float:
    """Sum the delays of all nodes of a graph."""
    return sum(
        contribution.count * delays_ms[kernel_id] for kernel_id, contribution in composed.parts.items()
    )


def _compute_interval(
    interval: ConformalInterval, call_ms: float, kernels: Sequence[KernelPrediction]
) -> tuple[float, float]:
    """Compute the interval around a mean latency, in milliseconds.

    The errors of operators are independent. Those of the kernels of an operator are not, so that a model of
    few operators has the interval of its kernels.

    Args:
        interval: Interval of models that consist of measured and learned kernels.
        call_ms: Latency of the call.
        kernels: All kernels; those that are neither measured nor learned have an interval each.
    """
    certain_ms = call_ms
    deviations: dict[str, tuple[float, float]] = {}
    low_ms = high_ms = 0.0
    for kernel in kernels:
        mean_ms, scale = (
            kernel.count * kernel.mean_ms,
            kernel.mean_ms / kernel.idle_ms if kernel.idle_ms else 1.0,
        )
        if kernel.source not in (MEASURED, LEARNED):
            low_ms += kernel.count * kernel.low_ms * scale
            high_ms += kernel.count * kernel.high_ms * scale
            continue
        certain_ms += mean_ms
        if kernel.source == LEARNED:
            below, above = deviations.get(kernel.op, (0.0, 0.0))
            below += mean_ms * math.log(kernel.idle_ms / kernel.low_ms)
            above += mean_ms * math.log(kernel.high_ms / kernel.idle_ms)
            deviations[kernel.op] = below, above
    below, above = (
        (math.hypot(*ends) for ends in zip(*deviations.values(), strict=True)) if deviations else (0, 0)
    )
    if certain_ms:
        low_ms += certain_ms * min(interval.low, math.exp(-below / certain_ms))
        high_ms += certain_ms * max(interval.high, math.exp(above / certain_ms))
    return low_ms, high_ms
