"""Coverage and error of a predictor on held-out plans and prompt lengths.

Plans and prompt lengths are divided into folds. The requests of each fold are predicted by a predictor whose
tables, scales and margins were fitted to the other folds only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sparseflow.adaptive.predictor.calibration import NUM_FOLDS, calibrate, group_repetitions
from sparseflow.adaptive.predictor.features import LatencyQuery
from sparseflow.adaptive.predictor.model import DEFAULT_LEVEL, PlanLatencyPredictor
from sparseflow.adaptive.profile.measurement import Measurement
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.costmodel.splits import split_group_k_fold
from sparseflow.core.metrics import bootstrap_mean, mape

QUANTILES = (0.75, 0.9, 0.95, 0.98, 0.99)
"""Validated quantiles besides the median."""


@dataclass(frozen=True, kw_only=True)
class QuantileCoverage:
    """Coverage of a predicted quantile.

    Attributes:
        quantile: Quantile; 0.5 is the median.
        coverage: Fraction of requests at most as slow as predicted.
        low: Lower end of the 95 % bootstrap interval of the coverage, over plans and prompt lengths.
        high: Upper end.
    """

    quantile: float
    coverage: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """Result of `validate`.

    Attributes:
        quantiles: Coverage of each quantile, ascending.
        p50_error: Mean relative error of the medians of `cells`.
        cells: Load, measured median and predicted median of each combination of plan, prompt length, batch,
            load and number of steps, milliseconds.
        requests: Number of predicted requests.
    """

    quantiles: tuple[QuantileCoverage, ...]
    p50_error: float
    cells: tuple[tuple[float, float, float], ...]
    requests: int

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self)


def can_validate(profile: PlanProfile) -> bool:
    """Whether a profile has enough plans and prompt lengths to leave each fold out."""
    groups = {_get_group(measurement) for measurement in profile.successful}
    return len(groups) - -(-len(groups) // NUM_FOLDS) >= NUM_FOLDS


def fit_folds(
    profile: PlanProfile, *, levels: Sequence[float] = (DEFAULT_LEVEL,), seed: int = 0
) -> Iterator[tuple[list[int], dict[float, PlanLatencyPredictor]]]:
    """Fit predictors with one fold left out at a time.

    Yields:
        Indices of the held-out measurements in `profile.successful`, and a predictor for each level.

    Raises:
        InputError: The profile has too few plans or prompt lengths; see `can_validate`.
    """
    measurements = profile.successful
    groups = [_get_group(measurement) for measurement in measurements]
    for fit_rows, held_out_rows in split_group_k_fold(groups, NUM_FOLDS, seed):
        part = replace(profile, measurements=tuple(measurements[row] for row in fit_rows))
        calibration = calibrate(part, seed=seed)
        yield (
            held_out_rows,
            {
                level: PlanLatencyPredictor.from_calibration(
                    calibration, profile.metadata, profile.space, level=level
                )
                for level in levels
            },
        )


def validate(profile: PlanProfile, *, seed: int = 0) -> ValidationResult:
    """Predict every request of a profile with predictors that have not seen its plan and prompt length.

    Raises:
        InputError: The profile has too few plans or prompt lengths; see `can_validate`.
    """
    measurements = profile.successful
    measured_ms = np.array([m.total_ms(1 + len(m.steps_ms)) for m in measurements])
    median_ms = np.empty(len(measurements))
    is_covered = {level: np.empty(len(measurements), dtype=bool) for level in QUANTILES}
    for rows, predictors in fit_folds(profile, levels=QUANTILES, seed=seed):
        queries = [make_query(measurements[row]) for row in rows]
        for level, predictor in predictors.items():
            median, upper = predictor.predict(queries)
            median_ms[rows], is_covered[level][rows] = median, measured_ms[rows] <= upper
    is_covered = {0.5: measured_ms <= median_ms, **is_covered}
    groups = [_get_group(measurement) for measurement in measurements]
    quantiles = []
    for quantile, covered in is_covered.items():
        low, high = bootstrap_mean(covered, groups)
        quantiles.append(
            QuantileCoverage(quantile=quantile, coverage=float(covered.mean()), low=low, high=high)
        )
    cells = tuple(
        (measurements[rows[0]].load, float(np.median(measured_ms[rows])), float(np.median(median_ms[rows])))
        for rows in group_repetitions(measurements)
    )
    p50_error = mape([predicted for *_, predicted in cells], [measured for _, measured, _ in cells])
    return ValidationResult(
        quantiles=tuple(quantiles), p50_error=p50_error, cells=cells, requests=len(measurements)
    )


def make_query(measurement: Measurement, new_tokens: int | None = None) -> LatencyQuery:
    """Query for a measured request, or for its first `new_tokens` tokens."""
    return LatencyQuery(
        plan=measurement.plan, text_tokens=measurement.text_tokens,
        images=int(measurement.plan.tier is not None),
        new_tokens=1 + len(measurement.steps_ms) if new_tokens is None else new_tokens,
        batch=measurement.batch, load=measurement.load,
    )  # fmt: skip


def _get_group(measurement: Measurement) -> tuple[str, int]:
    return measurement.plan.id, measurement.text_tokens
