"""Conformal prediction intervals.

Split conformal prediction (Vovk et al. 2005; Lei et al. 2018) on log(measured / predicted), so that an
interval is a pair of factors. If held-out and future samples are exchangeable, at least the requested
fraction of intervals contains the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from sparseflow.core.config import StrictModel
from sparseflow.errors import InputError

COVERAGE = 0.90
"""Default coverage."""


class ConformalInterval(StrictModel):
    """Factors that turn a prediction into an interval.

    Attributes:
        low: Factor of the lower end, at most 1.
        high: Factor of the upper end, at least 1.
        coverage: Intended fraction of measurements inside the interval.
        samples: Number of held-out samples that it was fitted to.
    """

    low: float = Field(ge=0.0, le=1.0)
    high: float = Field(ge=1.0)
    coverage: float
    samples: int

    @classmethod
    def fit(
        cls, predicted: Sequence[float], measured: Sequence[float], coverage: float = COVERAGE
    ) -> ConformalInterval:
        """Fit to held-out samples, with equal tails below `low` and above `high`.

        With few samples the ends are the largest observed errors, and the coverage is only
        `(samples - 1) / (samples + 1)`.

        Raises:
            InputError: The lengths differ, there is no sample, a value is not positive, or `coverage` is not
                between 0 and 1.
        """
        if len(predicted) != len(measured) or not predicted:
            raise InputError(
                "an interval needs equally many predictions and measurements, at least one; got "
                f"{len(predicted)} predictions and {len(measured)} measurements"
            )
        if not all(value > 0.0 and math.isfinite(value) for value in (*predicted, *measured)):
            raise InputError("predictions and measurements of an interval must be finite and above 0")
        if not 0.0 < coverage < 1.0:
            raise InputError(f"`coverage` (={coverage}) must lie between 0 and 1")
        errors = sorted(math.log(m / p) for p, m in zip(predicted, measured, strict=True))
        tail = (1.0 - coverage) / 2.0
        count = len(errors)
        lower = max(math.floor(tail * (count + 1)) - 1, 0)
        upper = min(math.ceil((1.0 - tail) * (count + 1)) - 1, count - 1)
        return cls(
            low=math.exp(min(errors[lower], 0.0)),
            high=math.exp(max(errors[upper], 0.0)),
            coverage=coverage,
            samples=count,
        )

    def bounds(self, predicted: float) -> tuple[float, float]:
        """Lower and upper end for one prediction, in its unit."""
        return predicted * self.low, predicted * self.high
