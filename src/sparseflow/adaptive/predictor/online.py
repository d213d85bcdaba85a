"""Online learning from finished requests: drift correction and adaptive conformal margins.

Drift correction: for each phase and load, the exponentially weighted median of measured over predicted time.
The median ignores outliers, which belong in the margin. Loads with few or old observations follow the median
over all loads.

Margins: adaptive conformal inference (Gibbs & Candès 2021). With the target miss rate m, the effective miss
rate m_t follows ::

    m_{t+1} = m_t + step (m - [request t missed])

and the margin is the conformal quantile 1 - m_t of the latest scores. The observed miss rate converges to m
for any sequence of scores. m_t stays between m / 20 and 5 m: at the lower end the margin is far above all
scores, and one bad period must not inflate margins for hours. For the same reason the margin of a load that
none of many requests had returns to its calibrated value.

A server that refuses requests because of high predictions observes no corrections to them. `forget` moves
back towards the calibrated state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from sparseflow.adaptive.predictor.calibration import conformal_margin
from sparseflow.core.artifact import ArrayField
from sparseflow.errors import InputError

WINDOW_SIZE = 600
"""Latest scores at one load that determine its margin."""
_STALE_AFTER = 200
"""Requests at other loads after which a margin returns to its calibrated value."""
_IDLE_DECAY = 0.005
"""Relative loss of weight per request at other loads: the half-life is 140 requests."""
_MEMORY_SIZE = 64
_DECAY = 0.95
"""Factor on the weight of an observation per later one: the last 14 have half of the weight."""
_PRIOR_WEIGHT = 2.0
"""Weight of the prior, in observations."""
_MAX_LOG = math.log(20.0)
_STEP_SIZE = 0.005
_MIN_RATE_FACTOR, _MAX_RATE_FACTOR = 1.0 / 20.0, 5.0


@dataclass(kw_only=True, eq=False)
class RunningMedian:
    """Exponentially weighted median of logarithms.

    Attributes:
        logs: Latest observations, oldest first, shape [n].
        weights: Their weights, shape [n].
    """

    logs: Annotated[np.ndarray, ArrayField(np.float64, ndim=1)] = field(default_factory=lambda: np.empty(0))
    weights: Annotated[np.ndarray, ArrayField(np.float64, ndim=1, ge=0.0)] = field(
        default_factory=lambda: np.empty(0)
    )

    def __post_init__(self) -> None:
        if len(self.logs) != len(self.weights):
            raise InputError(f"expected one weight per log, got {len(self.weights)} and {len(self.logs)}")

    def add(self, log: float, weight: float) -> None:
        """Add an observation with a weight in (0, 1]; older weights decay accordingly."""
        num_kept = _MEMORY_SIZE - 1
        self.logs = np.append(self.logs[-num_kept:], min(max(log, -_MAX_LOG), _MAX_LOG))
        self.weights = np.append(self.weights[-num_kept:] * _DECAY**weight, weight)

    def forget(self, fraction: float) -> None:
        """Reduce all weights by `fraction`."""
        self.weights = self.weights * (1.0 - fraction)

    def compute(self, prior: float) -> float:
        """Compute the median, with `prior` as an additional observation."""
        logs, weights = np.append(prior, self.logs), np.append(_PRIOR_WEIGHT, self.weights)
        order = logs.argsort()
        logs, weights = logs[order], weights[order]
        # Each observation is at the center of its weight, and values between two are interpolated.
        return float(np.interp(0.5 * weights.sum(), weights.cumsum() - 0.5 * weights, logs))


@dataclass(kw_only=True, eq=False)
class DriftCorrection:
    """Correction factors of one phase at each load.

    Attributes:
        overall: Observations at all loads.
        per_load: Observations at each load.
    """

    overall: RunningMedian = field(default_factory=RunningMedian)
    per_load: tuple[RunningMedian, ...]

    @classmethod
    def create(cls, num_loads: int) -> DriftCorrection:
        """Create a correction without observations."""
        return cls(per_load=tuple(RunningMedian() for _ in range(num_loads)))

    def compute_factors(self) -> np.ndarray:
        """Compute the factors on the predicted times, shape [L]."""
        overall = self.overall.compute(0.0)
        return np.exp([median.compute(overall) for median in self.per_load])

    def add(self, ratio: float, weights: np.ndarray) -> None:
        """Add an observation.

        Args:
            ratio: Measured over predicted time, above 0.
            weights: Weight of the observation at each load, shape [L], in [0, 1].
        """
        self.overall.add(math.log(ratio), float(weights.sum()))
        for median, weight in zip(self.per_load, weights.tolist(), strict=True):
            if weight > 0.0:
                median.add(math.log(ratio), weight)
            else:
                median.forget(_IDLE_DECAY)

    def forget(self, fraction: float) -> None:
        """Reduce the weight of all observations by `fraction`."""
        for median in (self.overall, *self.per_load):
            median.forget(fraction)


@dataclass(frozen=True, kw_only=True, eq=False)
class MarginState:
    """Stored state of a `ConformalMargin`.

    Attributes:
        miss_rate: Effective miss rate.
        scores: Latest scores, oldest first, at least one.
    """

    miss_rate: Annotated[float, Field(gt=0.0, lt=1.0)]
    scores: Annotated[np.ndarray, ArrayField(np.float64, ndim=1)]

    def __post_init__(self) -> None:
        if not len(self.scores):
            raise InputError("`scores` is empty; a margin needs at least one score")


class ConformalMargin:
    """Adaptive conformal margin at one load.

    Args:
        state: Initial scores, of which the first ones are replaced first, and effective miss rate.
        target_rate: Target fraction of requests above the margin.

    Attributes:
        value: Margin, in units of the residual scale.
    """

    def __init__(self, state: MarginState, target_rate: float) -> None:
        self._miss_rate, self._target_rate = state.miss_rate, target_rate
        self._scores = self._initial_scores = state.scores[-WINDOW_SIZE:]
        self._num_observed = self._num_skipped = 0
        self.value = conformal_margin(self._scores, self._miss_rate)

    @property
    def state(self) -> MarginState:
        """State to store."""
        return MarginState(miss_rate=self._miss_rate, scores=self._scores)

    def add(self, score: float, *, missed: bool) -> None:
        """Add a finished request.

        Args:
            score: (measured - predicted) / residual scale.
            missed: Whether it took longer than the upper prediction.
        """
        rate = self._miss_rate + _STEP_SIZE * (self._target_rate - missed)
        self._miss_rate = min(
            max(rate, self._target_rate * _MIN_RATE_FACTOR), self._target_rate * _MAX_RATE_FACTOR
        )
        self._scores = np.append(self._scores[-(WINDOW_SIZE - 1) :], score)
        self._num_observed, self._num_skipped = min(self._num_observed + 1, WINDOW_SIZE), 0
        self.value = conformal_margin(self._scores, self._miss_rate)

    def skip(self) -> None:
        """Note that a request at another load finished."""
        self._num_skipped += 1
        if self._num_skipped == _STALE_AFTER:
            self.forget(1.0)

    def forget(self, fraction: float) -> None:
        """Remove a fraction of the observed scores, oldest first, and of the change of the miss rate."""
        self._miss_rate += fraction * (self._target_rate - self._miss_rate)
        self._num_observed = int((1.0 - fraction) * self._num_observed)
        latest = self._scores[len(self._scores) - self._num_observed :]
        self._scores = np.concatenate([self._initial_scores, latest])[-WINDOW_SIZE:]
        self.value = conformal_margin(self._scores, self._miss_rate)
