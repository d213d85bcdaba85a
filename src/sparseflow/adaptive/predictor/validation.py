"""Whether a predictor keeps its promises: held against requests of a profile that it had not seen.

Plans and lengths are divided into parts, and each part's requests are predicted by a predictor that was
fitted to the others, margins and all. What a fit is judged by has told it nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparseflow.adaptive.predictor.calibration import FOLDS, calibrate
from sparseflow.adaptive.predictor.features import LatencyQuery
from sparseflow.adaptive.predictor.model import LEVEL, PlanLatencyPredictor
from sparseflow.adaptive.profile.measurement import Measurement
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.costmodel.splits import split_group_k_fold
from sparseflow.core.metrics import bootstrap_mean, mape

QUANTILES = (0.75, 0.9, 0.95, 0.98, 0.99)
"""Those that are promised, beside the median."""


@dataclass(frozen=True, kw_only=True)
class QuantileCoverage:
    """A promised quantile, and the share of requests that were within it.

    Attributes:
        promised: The quantile; 0.5 is the median.
        share: Of requests.
        low: Lower end of its 95 % interval, over plans and lengths.
        high: Upper end.
    """

    promised: float
    share: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """What a check found.

    Attributes:
        observed: For each promised quantile, ascending.
        p50_error: Mean relative error of medians, of each plan, length, batch and load.
        cells: Load, measured and predicted median of each of these, milliseconds.
        requests: How many were predicted.
    """

    observed: tuple[QuantileCoverage, ...]
    p50_error: float
    cells: tuple[tuple[float, float, float], ...]
    requests: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "observed": [dict(vars(each)) for each in self.observed],
            "p50_error": self.p50_error,
            "cells": [list(cell) for cell in self.cells],
            "requests": self.requests,
        }


def enough(profile: PlanProfile) -> bool:
    """Whether a profile has plans and lengths enough to be divided so that each part can be left out."""
    groups = {_group(visit) for visit in profile.timed}
    return len(groups) - -(-len(groups) // FOLDS) >= FOLDS


def unseen(
    profile: PlanProfile, *, levels: Sequence[float] = (LEVEL,), seed: int = 0
) -> Iterator[tuple[list[int], dict[float, PlanLatencyPredictor]]]:
    """For each part: places of its visits in `profile.timed`, and predictors by level that saw the others.

    Raises:
        InputError: The profile has too few plans or lengths; see `enough`.
    """
    visits = profile.timed
    for learnt, judged in split_group_k_fold([_group(visit) for visit in visits], FOLDS, seed):
        found = calibrate(replace(profile, visits=tuple(visits[at] for at in learnt)), folds=FOLDS, seed=seed)
        yield (
            judged,
            {
                level: PlanLatencyPredictor.of(found, profile.about, profile.space, level=level)
                for level in levels
            },
        )


def check(profile: PlanProfile, *, seed: int = 0) -> ValidationResult:
    """Predict every request of a profile by what was fitted to others.

    Raises:
        InputError: The profile has too few plans or lengths; see `enough`.
    """
    visits = profile.timed
    measured = np.array([visit.total_ms(1 + len(visit.steps_ms)) for visit in visits])
    medians = np.empty(len(visits))
    within = {level: np.empty(len(visits), dtype=bool) for level in QUANTILES}
    for judged, predictors in unseen(profile, levels=QUANTILES, seed=seed):
        asks = [ask_of(visits[at]) for at in judged]
        for level, predictor in predictors.items():
            middle, high = predictor.predict(asks)
            medians[judged], within[level][judged] = middle, measured[judged] <= high
    within = {0.5: measured <= medians, **within}
    groups = [_group(visit) for visit in visits]
    observed = []
    for promised, met in within.items():
        low, high = bootstrap_mean(met, groups)
        observed.append(QuantileCoverage(promised=promised, share=float(met.mean()), low=low, high=high))
    cells = _cells(visits, measured, medians)
    return ValidationResult(
        observed=tuple(observed), p50_error=mape([each[2] for each in cells], [each[1] for each in cells]),
        cells=cells, requests=len(visits),
    )  # fmt: skip


def ask_of(visit: Measurement, new_tokens: int | None = None) -> LatencyQuery:
    """What a predictor is asked about a visit, or about one of fewer new tokens that it begins with."""
    return LatencyQuery(
        plan=visit.plan, text_tokens=visit.text_tokens, images=int(visit.plan.tier is not None),
        new_tokens=1 + len(visit.steps_ms) if new_tokens is None else new_tokens, batch=visit.batch,
        load=visit.load,
    )  # fmt: skip


def _cells(
    visits: Sequence[Measurement], measured: np.ndarray, medians: np.ndarray
) -> tuple[tuple[float, float, float], ...]:
    found: dict[tuple[object, ...], list[int]] = {}
    for at, visit in enumerate(visits):
        found.setdefault((*visit.key[:4], len(visit.steps_ms)), []).append(at)
    return tuple(
        (visits[cell[0]].load, float(np.median(measured[cell])), float(np.median(medians[cell])))
        for cell in found.values()
    )


def _group(visit: Measurement) -> tuple[str, int]:
    return visit.plan.id, visit.text_tokens
