"""Contention with a background load: mean and quantiles of a model's latency under load.

The load alternates between active and paused phases. While it is active, the device is time-sliced between
load and model::

    active = paused + slice * slices          slices: number of time slices that the load takes during a run
    paused = idle * (1 + overhead)            overhead: cost of a load that is present but paused
    mean   = 1 / (share / active + (1 - share) / paused)

`share` is the time share of active phases, read from telemetry and calibrated by the share that the load
reports. Runs follow each other without a pause, so the number of completed runs adds up over time. The total
delay of a run depends on the bottlenecks of its kernels (arithmetic, memory, launch). On a GPU, a run that
was waited for has yielded the device, and the next run starts with a wait; on a CPU it keeps the device.

By construction, the slowdown is 1 without load, at least 1, and grows with the load for all parameters.
Levels that were not measured interpolate or extrapolate, since no parameter belongs to a level.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt

from sparseflow.core.checks import check_between, check_one_of
from sparseflow.core.extras import require
from sparseflow.core.telemetry.schema import METRICS
from sparseflow.errors import DeviceError, InputError
from sparseflow.latency.measure.idle import LOAD_METRICS, MAX_IDLE_LOAD

if TYPE_CHECKING:
    import numpy as np

BOTTLENECKS = ("arithmetic", "memory", "launch")
"""Bottlenecks of a kernel, as shares that sum to 1."""

NUM_RUNS = 4000
"""Number of sampled runs; enough for the 95th percentile to within a fraction of a percent."""

CYCLE_SPREAD = 0.2
"""Maximum relative deviation of a cycle's length."""

_SLICES_MS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)
_CYCLES_MS = (20.0, 50.0, 100.0, 200.0, 400.0)
_JITTER_POINTS = 41
_PRIOR_WEIGHT = 2.0
_CALIBRATION_WEIGHT = 10.0
_FULL_OVERHEAD_SHARE = 0.1
"""Active share from which the overhead of a paused load is complete."""

_MAX_PHASES = 1000
"""Maximum number of simulated phases of a run."""

_SLICE_SPREAD = 0.1
"""Relative standard deviation of time slices, which smooths the number of slices."""


# Wider than any fit, and narrow enough that no product of them overflows.
Positive = Annotated[float, Field(ge=1e-6, le=1e6)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e6)]


@dataclass(frozen=True, kw_only=True)
class ContentionSample:
    """Runs of one target under load.

    Attributes:
        idle_ms: Idle latency.
        bottleneck_shares: Share of each of `BOTTLENECKS` in the latency.
        load: Share of the load metric.
        achieved: Active share that the load itself reports.
        mean_ms: Mean latency under load.
        ratios: Each sample over the idle latency; used for quantiles only.
        is_model: Whether the target is a full model; if there are any, only they are learned.
    """

    idle_ms: float
    bottleneck_shares: tuple[float, ...]
    load: float
    achieved: float
    mean_ms: float
    ratios: tuple[float, ...] = ()
    is_model: bool = False


@dataclass(frozen=True, kw_only=True)
class ContentionModel:
    """Effect of load on one device; create one with `ContentionModel.fit`.

    Attributes:
        metric: Name of the load metric.
        idle_load: Share of the metric without load.
        scale: Active share = `scale * excess ** power`, at most 1, for the normalized excess of the metric.
        power: See `scale`.
        idle_overhead: Relative increase of latency while the load is paused.
        delay_factors: Milliseconds of delay per millisecond of each of `BOTTLENECKS` while the load is
            active.
        slice_ms: Length of a time slice.
        yields_device: Whether a run starts with a wait while the load is active.
        cycle_ms: Mean length of the load's cycle.
        jitter: Quantiles, evenly spaced from 0 to 1, of idle runs over the idle latency.
        samples: Number of measurements under load of the fit; with 0 no load can be predicted.
        highest_load: Highest share of the metric in the fit.
    """

    metric: str
    idle_load: Annotated[float, Field(ge=0.0, le=1.0)]
    scale: Positive
    power: Positive
    idle_overhead: NonNegative
    delay_factors: Annotated[
        tuple[NonNegative, ...], Field(min_length=len(BOTTLENECKS), max_length=len(BOTTLENECKS))
    ]
    slice_ms: Positive
    yields_device: bool
    cycle_ms: Positive
    jitter: Annotated[tuple[Positive, ...], Field(min_length=2)]
    samples: NonNegativeInt
    highest_load: Annotated[float, Field(ge=0.0, le=1.0)]

    def __post_init__(self) -> None:
        check_one_of(METRICS, metric=self.metric)

    @classmethod
    def fit(
        cls,
        samples: Sequence[ContentionSample],
        metric: str,
        idle_load: float,
        jitter: Sequence[float],
        *,
        seed: int = 0,
    ) -> ContentionModel:
        """Fit to runs under load; without any, no load can be predicted.

        Args:
            samples: Kernels and full models at several levels.
            metric: Name of the load metric.
            idle_load: Share of the metric without load.
            jitter: Idle samples of full models over their idle latency.
            seed: Random seed.
        """
        import numpy as np

        points = np.linspace(0.0, 1.0, _JITTER_POINTS)
        initial = cls(
            metric=metric,
            idle_load=idle_load,
            scale=1.0,
            power=1.0,
            idle_overhead=0.0,
            delay_factors=(0.0,) * len(BOTTLENECKS),
            slice_ms=1.0,
            yields_device=False,
            cycle_ms=100.0,
            jitter=tuple(np.quantile(jitter, points).tolist()) if jitter else (1.0,) * _JITTER_POINTS,
            samples=len(samples),
            highest_load=max((sample.load for sample in samples), default=idle_load),
        )
        if not samples:
            return initial
        candidates = [_fit_means(initial, samples)]
        if metric == LOAD_METRICS["cuda"]:
            # Only a GPU is yielded between two runs.
            candidates += [
                _fit_means(replace(initial, yields_device=True, slice_ms=slice_ms), samples)
                for slice_ms in _SLICES_MS
            ]
        best = min(candidates, key=lambda entry: entry[1])[0]
        model_samples = [sample for sample in samples if sample.is_model and sample.ratios]
        return _fit_quantiles(best, model_samples, seed) if model_samples else best

    def check_fitted(self) -> None:
        """Check that measurements under load were part of the fit.

        Raises:
            InputError: There were none.
        """
        if not self.samples:
            raise InputError(
                "the predictor was trained on idle measurements only, so it cannot predict the latency under "
                "load: collect with `levels: [0, 0.3, 0.6, 0.9]` and train on that collection too"
            )

    def get_load(self, shares: Mapping[str, float]) -> float:
        """Return the load metric of a reading.

        Raises:
            DeviceError: The reading lacks the metric.
            InputError: The value is not in [0, 1], or exceeds the idle load and nothing was measured under
                load.
        """
        if self.metric not in shares:
            raise DeviceError(
                f"the load lacks the metric `{self.metric}` of the predictor, it contains "
                f"{', '.join(shares) or 'no metric'}: use a source that provides it"
            )
        check_between(0.0, 1.0, **{self.metric: shares[self.metric]})
        if shares[self.metric] > self.idle_load:
            self.check_fitted()
        return shares[self.metric]

    def compute_busy_share(self, load: float) -> float:
        """Return the time share of active phases of the load, in [0, 1]."""
        excess = max(load - self.idle_load, 0.0) / max(1.0 - self.idle_load, 1e-9)
        return min(self.scale * excess**self.power, 1.0) if excess > 0.0 else 0.0

    def compute_load(self, share: float) -> float:
        """Return the load metric at which the load is active for a time share: the inverse of
        `compute_busy_share`.
        """
        if share <= 0.0:
            return self.idle_load
        excess = (min(share, 1.0) / self.scale) ** (1.0 / self.power)
        return min(self.idle_load + excess * (1.0 - self.idle_load), 1.0)

    def compute_delay_ms(self, idle_ms: float, bottleneck_shares: Sequence[float]) -> float:
        """Return the mean delay of a kernel while the load is active."""
        return idle_ms * sum(
            factor * share for factor, share in zip(self.delay_factors, bottleneck_shares, strict=True)
        )

    def predict_paused_ms(self, idle_ms: float, share: float) -> float:
        """Return the mean latency of a run while the load is paused, given the load's active share."""
        return idle_ms * (1.0 + self.idle_overhead * min(share / _FULL_OVERHEAD_SHARE, 1.0))

    def predict_active_ms(self, paused_ms: float, delay_ms: float) -> float:
        """Return the mean latency of a run while the load is active, given the total delay of its kernels."""
        if not self.yields_device:
            return paused_ms + delay_ms
        slices = delay_ms / self.slice_ms
        full_slices = math.floor(slices)
        # Smoothed, since runs with short slices reach one slice more.
        partial_slices = _smooth_step(slices - full_slices - 1.0)
        if full_slices:
            partial_slices += _smooth_step(slices - full_slices) - 1.0
        return paused_ms + self.slice_ms * (1.0 + full_slices + partial_slices)

    def predict_mean_ms(self, idle_ms: float, delay_ms: float, load: float) -> float:
        """Return the mean latency under load."""
        share = self.compute_busy_share(load)
        if share <= 0.0:
            return idle_ms
        paused_ms = self.predict_paused_ms(idle_ms, share)
        active_ms = self.predict_active_ms(paused_ms, delay_ms)
        return 1.0 / (share / active_ms + (1.0 - share) / paused_ms)

    def sample_runs(
        self, idle_ms: float, delay_ms: float, load: float, *, num_runs: int = NUM_RUNS, seed: int = 0
    ) -> np.ndarray:
        """Sample latencies of single runs under load in milliseconds, shape [num_runs].

        Args:
            idle_ms: Idle latency.
            delay_ms: Total delay of its kernels.
            load: Share of the load metric.
            num_runs: Number of runs.
            seed: Random seed.
        """
        import numpy as np

        generator = np.random.default_rng(seed)
        points = np.linspace(0.0, 1.0, len(self.jitter))
        idle_runs_ms = idle_ms * np.interp(generator.random(num_runs), points, self.jitter)
        share = self.compute_busy_share(load)
        paused_ms = self.predict_paused_ms(idle_ms, share)
        idle_runs_ms *= paused_ms / idle_ms
        active_ms = self.predict_active_ms(paused_ms, delay_ms)
        if share <= 0.0 or active_ms <= paused_ms:
            return idle_runs_ms
        slices = delay_ms / self.slice_ms * (1.0 + _SLICE_SPREAD * generator.standard_normal(num_runs))
        first_slice = 1.0 if self.yields_device else generator.random(num_runs)
        active_runs_ms = idle_runs_ms + self.slice_ms * np.floor(np.maximum(slices, 0.0) + first_slice)
        # Runs follow each other, so the number of starts in a phase is proportional to its throughput.
        active_start_share = (share / active_ms) / (share / active_ms + (1.0 - share) / paused_ms)
        load_active = generator.random(num_runs) < active_start_share
        remaining = generator.random(num_runs)
        return _simulate_phases(
            generator, active_runs_ms, idle_runs_ms, load_active, remaining, share, self.cycle_ms
        )


def _smooth_step(slices: float) -> float:
    return 1.0 / (1.0 + math.exp(-slices / (_SLICE_SPREAD / 2.0)))


def _simulate_phases(
    generator: np.random.Generator,
    active_ms: np.ndarray,
    paused_ms: np.ndarray,
    load_active: np.ndarray,
    remaining: np.ndarray,
    share: float,
    cycle_ms: float,
) -> np.ndarray:
    """Return latencies of runs that start within a phase, with the fraction `remaining` of it left."""
    import numpy as np

    count = len(active_ms)
    latency_ms, remaining_work = np.zeros(count), np.ones(count)
    unfinished = np.ones(count, dtype=bool)
    for _ in range(_MAX_PHASES):
        if not unfinished.any():
            return latency_ms
        lengths = cycle_ms * generator.uniform(1.0 - CYCLE_SPREAD, 1.0 + CYCLE_SPREAD, count)
        phase = remaining * lengths * np.where(load_active, share, 1.0 - share)
        pace = np.where(load_active, active_ms, paused_ms)
        step = np.minimum(remaining_work * pace, phase)
        latency_ms[unfinished] += step[unfinished]
        remaining_work[unfinished] -= (step / pace)[unfinished]
        unfinished &= remaining_work > 1e-9
        load_active, remaining = ~load_active, np.ones(count)
    # Over so many phases the pace is the mean one.
    pace = 1.0 / (share / active_ms + (1.0 - share) / paused_ms)
    latency_ms[unfinished] += (remaining_work * pace)[unfinished]
    return latency_ms


def _fit_means(
    initial: ContentionModel, samples: Sequence[ContentionSample]
) -> tuple[ContentionModel, float]:
    """Fit scale, power, overhead and delays of `initial` to the means; return the model and its cost."""
    import numpy as np

    optimize = require("scipy.optimize", "latency")
    # Predictions are about full models, and an isolated kernel is delayed differently.
    samples = [sample for sample in samples if sample.is_model] or samples
    measured = np.log([max(sample.mean_ms, sample.idle_ms) for sample in samples])
    blocks = sorted(
        {
            (sample.load, sample.achieved)
            for sample in samples
            if initial.compute_busy_share(sample.load) > 0.0
            and sample.achieved > 0.0
            # The readings of a CPU need no calibration where they contain other work.
            and (
                initial.metric != LOAD_METRICS["cpu"]
                or sample.load - initial.idle_load <= sample.achieved + MAX_IDLE_LOAD
            )
        }
    )

    def make_model(values: Sequence[float]) -> ContentionModel:
        scale, power, idle_overhead, *delay_factors = (float(v) for v in values)
        return replace(
            initial, scale=scale, power=power, idle_overhead=idle_overhead, delay_factors=tuple(delay_factors)
        )

    def errors(values: Sequence[float]) -> np.ndarray:
        model = make_model(values)
        predicted = [
            model.predict_mean_ms(
                sample.idle_ms, model.compute_delay_ms(sample.idle_ms, sample.bottleneck_shares), sample.load
            )
            for sample in samples
        ]
        # The share that the load reports calibrates the readings.
        means = [
            _CALIBRATION_WEIGHT * math.log(model.compute_busy_share(load) / achieved)
            for load, achieved in blocks
        ]
        prior = [_PRIOR_WEIGHT * value for value in (math.log(model.scale), math.log(model.power), values[2])]
        return np.concatenate([np.log(predicted) - measured, means, prior])

    solved = optimize.least_squares(
        errors,
        [1.0, 1.0, 0.01, 1.0, 1.0, 1.0],
        bounds=([0.3, 0.3, 0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.5, 20.0, 20.0, 20.0]),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
    )
    return make_model(solved.x), float(solved.cost)


def _fit_quantiles(
    initial: ContentionModel, samples: Sequence[ContentionSample], seed: int
) -> ContentionModel:
    """Fit the length of a cycle, and of a slice unless it is known, to the median and 95th percentile."""
    import numpy as np

    fractions = (0.5, 0.95)
    measured = [np.quantile(sample.ratios, fractions) * sample.idle_ms for sample in samples]

    def compute_error(model: ContentionModel) -> float:
        error = 0.0
        for sample, quantiles_ms in zip(samples, measured, strict=True):
            delay_ms = model.compute_delay_ms(sample.idle_ms, sample.bottleneck_shares)
            runs_ms = model.sample_runs(sample.idle_ms, delay_ms, sample.load, num_runs=1000, seed=seed)
            error += float(np.abs(np.log(np.quantile(runs_ms, fractions) / quantiles_ms)).sum())
        return error

    slices_ms = (initial.slice_ms,) if initial.yields_device else _SLICES_MS
    grid = itertools.product(_CYCLES_MS, slices_ms)
    candidates = [replace(initial, cycle_ms=cycle_ms, slice_ms=slice_ms) for cycle_ms, slice_ms in grid]
    return min(candidates, key=compute_error)
