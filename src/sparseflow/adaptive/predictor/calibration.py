"""Calibration: latency tables, residual scales and conformal scores of a profile.

Residual scales and scores come from cross-conformal prediction (Vovk 2015): plans and prompt lengths are
divided into folds, and the requests of each fold are predicted by tables that were fitted to the other folds.
Margins therefore cover the error on new plans and lengths, not only the scatter of repeated measurements. The
final tables are fitted to all measurements.

A score is the residual of a request divided by its scale: (measured - predicted) / `residual_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.adaptive.predictor.features import (
    PaddingBuckets,
    compute_plan_features,
    count_step_buckets,
    count_steps_per_bucket,
    get_bucket_start,
)
from sparseflow.adaptive.predictor.table import (
    LatencyTable,
    PhaseSamples,
    fit_table,
    interpolation_weights,
    select_log_spaced_knots,
    subdivide_knots,
)
from sparseflow.adaptive.profile.measurement import Measurement
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.costmodel.splits import split_group_k_fold
from sparseflow.core.extras import require
from sparseflow.errors import InputError

NUM_FOLDS = 5
"""Folds of plans and prompt lengths."""
MAX_LOADS = 4
"""Maximum number of measured loads with tables of their own."""
MAX_LOAD_GAP = 0.2
"""Largest distance between neighboring loads of a predictor, so that corrections at high load do not change
predictions of an idle device."""
MIN_BUSY_LOAD = 0.02
"""Smallest load of a predictor above 0. At higher loads more than one request in a hundred meets others,
which is what the upper prediction has to cover."""
MIN_RELATIVE_SCALE = 0.002
"""Smallest relative residual scale: no request repeats more closely."""
_MIN_BUCKET_FRACTION = 0.25
"""Fraction of measurements that must reach a step bucket."""
_TAIL_FRACTION = 0.05
_MIN_TAIL_SCORES = 10
"""Minimum number of scores from which a tail is extrapolated."""
_ERROR_QUANTILE = 0.98
"""Squared errors above this quantile are clipped: the scale describes typical errors, scores the rest."""


def residual_scale(
    coefficients: np.ndarray, prefill_ms: np.ndarray, step_ms: np.ndarray, decode_ms: np.ndarray
) -> np.ndarray:
    """Typical residual of a prediction.

    The square is a + b prefill^2 + c decode step + (d + `MIN_RELATIVE_SCALE`^2) (prefill + decode)^2: a timer
    resolution, an error of the prefill, independent errors of the steps, and an error of the request.

    Args:
        coefficients: a, b, c and d, shape [..., 4].
        prefill_ms: Predicted prefill, broadcastable.
        step_ms: Predicted time of one step of the last bucket.
        decode_ms: Predicted time of all steps.

    Returns:
        Milliseconds.
    """
    a, b, c, d = (coefficients[..., index] for index in range(4))
    total_ms = prefill_ms + decode_ms
    return np.sqrt(
        a
        + b * (prefill_ms * prefill_ms)
        + c * (decode_ms * step_ms)
        + (d + MIN_RELATIVE_SCALE**2) * (total_ms * total_ms)
    )


def fit_residual_scale(
    prefill_ms: np.ndarray, step_ms: np.ndarray, decode_ms: np.ndarray, measured_ms: np.ndarray
) -> np.ndarray:
    """Fit the coefficients [4] of `residual_scale` to held-out predictions, each argument of shape [n].

    Raises:
        MissingExtraError: SciPy is missing.
    """
    nnls = require("scipy.optimize", "adaptive").nnls
    total_ms = prefill_ms + decode_ms
    features = [np.ones_like(total_ms), prefill_ms**2, decode_ms * step_ms, total_ms**2]
    design = np.stack(features, axis=1) / total_ms[:, None] ** 2
    error = ((measured_ms - total_ms) / total_ms) ** 2
    error = np.minimum(error, np.quantile(error, _ERROR_QUANTILE))
    scale = np.maximum(design.mean(axis=0), 1e-300)
    return nnls(design / scale, error)[0] / scale


def conformal_margin(scores: np.ndarray, miss_rate: float) -> float:
    """Margin that a new score exceeds with probability `miss_rate`; at least 0.

    The margin is the conformal quantile of the scores. Beyond the largest score the tail is extrapolated as
    exponential.

    Args:
        scores: Scores in any order, shape [n], at least one.
        miss_rate: Probability between 0 and 1.
    """
    ordered = np.sort(scores)
    count = len(ordered)
    rank = math.ceil((count + 1) * (1.0 - miss_rate))
    if rank <= count:
        return max(float(ordered[rank - 1]), 0.0)
    tail_size = min(max(math.ceil(_TAIL_FRACTION * count), _MIN_TAIL_SCORES), count)
    slope = float(np.mean(ordered[-tail_size:] - ordered[-tail_size]))
    excess = slope * math.log(1.0 / (miss_rate * (count + 1)))
    return max(float(ordered[-1]) + excess, 0.0)


def summarize_scores(scores: np.ndarray, max_scores: int) -> np.ndarray:
    """Replace scores by at most `max_scores` evenly spaced quantiles, ascending."""
    ordered = np.sort(scores)
    if len(ordered) <= max_scores:
        return ordered
    return np.quantile(ordered, (np.arange(max_scores) + 0.5) / max_scores)


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseTables:
    """Latency tables of a request.

    Attributes:
        prefill: Prefill; tokens are those of the padded prompt.
        steps: One decode step in each step bucket; tokens are those of the padded context.
    """

    prefill: LatencyTable
    steps: tuple[LatencyTable, ...]

    def resample_loads(self, loads: np.ndarray) -> PhaseTables:
        """The same tables at other loads, [L'], interpolated linearly."""
        return PhaseTables(
            prefill=self.prefill.resample_loads(loads),
            steps=tuple(table.resample_loads(loads) for table in self.steps),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Everything that a predictor learns from a profile, at L loads.

    Attributes:
        tables: Latency tables.
        scale_coefficients: Coefficients of `residual_scale` at each load, shape [L, 4].
        scores: Scores of requests at each load.
        held_out: Predicted and measured median of each held-out combination of plan, prompt length, batch,
            load and number of steps, shape [combinations, 2], milliseconds.
        tiers: Measured tiers, ascending.
    """

    tables: PhaseTables
    scale_coefficients: np.ndarray
    scores: list[np.ndarray]
    held_out: np.ndarray
    tiers: tuple[Tier, ...]

    def add_loads(self) -> Calibration:
        """Add `MIN_BUSY_LOAD` and loads so that neighbors are at most `MAX_LOAD_GAP` apart.

        An added load has the scores of both measured neighbors, so the longer tail determines its margin.
        """
        measured = self.tables.prefill.loads
        loads = subdivide_knots(measured, MAX_LOAD_GAP)
        if measured[0] == 0.0 and len(measured) > 1 and loads[1] > MIN_BUSY_LOAD:
            loads = np.insert(loads, 1, MIN_BUSY_LOAD)
        weights = interpolation_weights(loads, measured)

        return replace(
            self,
            tables=self.tables.resample_loads(loads),
            scale_coefficients=weights @ self.scale_coefficients,
            scores=[np.concatenate([self.scores[index] for index in np.flatnonzero(row)]) for row in weights],
        )


def calibrate(profile: PlanProfile, *, seed: int) -> Calibration:
    """Fit tables, residual scales and scores to a profile.

    Raises:
        InputError: The profile has too few plans or prompt lengths.
        MissingExtraError: SciPy is missing.
    """
    measurements = profile.successful
    groups = [(measurement.plan.id, measurement.text_tokens) for measurement in measurements]
    if len(set(groups)) < NUM_FOLDS or not any(measurement.steps_ms for measurement in measurements):
        raise InputError(
            f"the profile has {len(set(groups))} combinations of plan and prompt length, and a predictor "
            f"needs at least {NUM_FOLDS}, with decode steps; profile more"
        )
    loads = select_log_spaced_knots(np.array([measurement.load for measurement in measurements]), MAX_LOADS)
    phases = _make_phase_samples(profile, measurements)
    tables = _fit_tables(phases, np.arange(len(measurements)), loads, profile)
    held_out_ms = np.empty((len(phases), len(measurements)))
    for fit_rows, held_out_rows in split_group_k_fold(groups, NUM_FOLDS, seed):
        rows = np.array(held_out_rows)
        fold = _fit_tables(phases, np.array(fit_rows), loads, profile)
        for times, table, phase in zip(held_out_ms, (fold.prefill, *fold.steps), phases, strict=True):
            times[rows] = _predict_phase(table, phase[rows])
    return _score_requests(tables, measurements, loads, held_out_ms[0], held_out_ms[1:]).add_loads()


def sum_decode_steps(bucket_ms: Sequence[np.ndarray] | np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Total time of decode steps.

    Args:
        bucket_ms: Time of one step in each bucket, shape [S, ...], milliseconds.
        steps: Number of steps; broadcasts with a row of `bucket_ms`.
    """
    counts = count_steps_per_bucket(steps, len(bucket_ms))
    return np.sum([count * time for count, time in zip(counts, bucket_ms, strict=True)], axis=0)


def _make_phase_samples(
    profile: PlanProfile, measurements: Sequence[Measurement]
) -> tuple[PhaseSamples, ...]:
    """Samples of the prefill and of each step bucket; `end_ms` is NaN for requests that end earlier.

    `start_ms` is filled in once the tables of the earlier phases are known.
    """
    geometry, vision_tokens = profile.space.geometry, profile.metadata.vision_tokens
    tier_index = {tier: index for index, tier in enumerate(geometry.tiers)}
    prompt = np.array(
        [m.text_tokens + (vision_tokens[m.plan.tier] if m.plan.tier else 0) for m in measurements],
        dtype=float,
    )
    steps = np.array([len(m.steps_ms) for m in measurements], dtype=float)
    padding = PaddingBuckets.from_config(profile.metadata.config)
    shared = {
        "batch": np.array([m.batch for m in measurements], dtype=float),
        "load": np.array([m.load for m in measurements]),
        "features": compute_plan_features([m.plan for m in measurements], geometry),
        "tier": np.array([tier_index[m.plan.tier] if m.plan.tier else 0 for m in measurements]),
        "start_ms": np.zeros(len(measurements)),
    }
    prefill = PhaseSamples(
        end_ms=np.array([m.prefill_ms for m in measurements], dtype=float),
        tokens=padding.pad_prompts(prompt),
        images=np.array([float(m.plan.tier is not None) for m in measurements]),
        repeats=np.ones(len(measurements)), **shared,
    )  # fmt: skip
    shared["images"] = np.zeros(len(measurements))
    # A bucket that few requests reach cannot be extrapolated from.
    num_buckets = count_step_buckets(int(np.quantile(steps, 1.0 - _MIN_BUCKET_FRACTION, method="lower")))
    counts = count_steps_per_bucket(steps, num_buckets)
    contexts = padding.mean_contexts(prompt, steps, num_buckets)
    ends = [get_bucket_start(bucket + 1) for bucket in range(num_buckets - 1)]

    def measure_end_ms(measurement: Measurement, bucket: int) -> float:
        num_steps = len(measurement.steps_ms)
        if num_steps <= get_bucket_start(bucket):
            return np.nan
        end = ends[bucket] if bucket < len(ends) else num_steps
        return measurement.total_ms(1 + min(num_steps, end))

    return prefill, *(
        PhaseSamples(
            end_ms=np.array([measure_end_ms(measurement, bucket) for measurement in measurements]),
            tokens=contexts[bucket], repeats=counts[bucket], **shared,
        )
        for bucket in range(num_buckets)
    )  # fmt: skip


def _fit_tables(
    phases: tuple[PhaseSamples, ...], rows: np.ndarray, loads: np.ndarray, profile: PlanProfile
) -> PhaseTables:
    num_tiers = len(profile.space.geometry.tiers) if profile.metadata.vision_tokens else 0
    prefill = fit_table(phases[0][rows], loads, num_tiers)
    start_ms = _predict_phase(prefill, phases[0])
    steps: list[LatencyTable] = []
    for phase in phases[1:]:
        bucket_rows = rows[np.isfinite(phase.end_ms[rows])]
        if not len(bucket_rows) and not steps:
            raise InputError(
                "too few plans and prompt lengths of the profile have decode steps; profile more"
            )
        if not len(bucket_rows):
            # No measurement reaches the bucket: use the bucket before it.
            steps.append(steps[-1])
            continue
        steps.append(fit_table(replace(phase, start_ms=start_ms)[bucket_rows], loads, 0))
        start_ms = start_ms + phase.repeats * _predict_phase(steps[-1], phase)
    return PhaseTables(prefill=prefill, steps=tuple(steps))


def _predict_phase(table: LatencyTable, phase: PhaseSamples) -> np.ndarray:
    """Predicted time of the phase at each row's own load, [n]."""
    latency_ms = table.predict(phase.tokens, phase.batch, phase.features, phase.images, phase.tier)
    return np.array(
        [np.interp(load, table.loads, row) for load, row in zip(phase.load, latency_ms, strict=True)]
    )


def _score_requests(
    tables: PhaseTables,
    measurements: Sequence[Measurement],
    loads: np.ndarray,
    prefill_ms: np.ndarray,
    bucket_ms: np.ndarray,
) -> Calibration:
    """Compare measurements with their held-out predictions of prefill, [n], and step in each bucket, [S,
    n]."""
    step_ms = bucket_ms[-1]
    nearest_load = np.abs(np.array([m.load for m in measurements])[:, None] - loads).argmin(axis=1)
    tiers = {measurement.plan.tier for measurement in measurements}
    coefficients, scores = [], []
    for load_index in range(len(loads)):
        rows = np.flatnonzero(nearest_load == load_index)
        # A measurement contains shorter requests; powers of two give short and long ones equal weight.
        prefixes = [(row, steps) for row in rows for steps in _list_prefix_steps(measurements[row])]
        index = np.array([row for row, _ in prefixes])
        num_steps = np.array([steps for _, steps in prefixes], dtype=float)
        measured_ms = np.array([measurements[row].total_ms(steps + 1) for row, steps in prefixes])
        prefill, step = prefill_ms[index], step_ms[index]
        decode = sum_decode_steps(bucket_ms[:, index], num_steps)
        coefficients.append(fit_residual_scale(prefill, step, decode, measured_ms))
        scale = residual_scale(coefficients[-1], prefill, step, decode)
        scores.append((measured_ms - prefill - decode) / scale)
    return Calibration(
        tables=tables, scale_coefficients=np.array(coefficients), scores=scores,
        held_out=_summarize_held_out(measurements, prefill_ms, bucket_ms),
        tiers=tuple(tier for tier in TIERS if tier in tiers),
    )  # fmt: skip


def _list_prefix_steps(measurement: Measurement) -> list[int]:
    """Steps of the shorter requests to score: 0, 1, 2, 4, ... and all."""
    steps = len(measurement.steps_ms)
    return sorted({0, steps, *(1 << power for power in range(steps.bit_length()) if 1 << power <= steps)})


def _summarize_held_out(
    measurements: Sequence[Measurement], prefill_ms: np.ndarray, bucket_ms: np.ndarray
) -> np.ndarray:
    steps = np.array([len(measurement.steps_ms) for measurement in measurements], dtype=float)
    predicted = prefill_ms + sum_decode_steps(bucket_ms, steps)
    measured = np.array([measurement.total_ms(1 + len(measurement.steps_ms)) for measurement in measurements])
    rows = group_repetitions(measurements)
    return np.array([(np.median(predicted[row]), np.median(measured[row])) for row in rows])


def group_repetitions(measurements: Sequence[Measurement]) -> list[list[int]]:
    """Indices of measurements with the same plan, prompt length, batch, load and number of steps."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, measurement in enumerate(measurements):
        groups.setdefault((*measurement.key[:4], len(measurement.steps_ms)), []).append(index)
    return list(groups.values())
