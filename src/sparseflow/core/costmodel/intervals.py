"""Intervals around predictions, from how far predictions were off on samples that were held out.

Split conformal prediction (Vovk et al. 2005; Lei et al. 2018), on the logarithm of measured over predicted,
so that an interval is a pair of factors. Where held-out samples are exchangeable with what comes, at least
the asked share of intervals holds the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseflow.errors import FileFormatError, InputError

COVERAGE = 0.90


@dataclass(frozen=True, kw_only=True)
class ConformalInterval:
    """Factors to multiply a prediction with.

    Attributes:
        low: At most 1.
        high: At least 1.
        coverage: Share of measurements that should be within.
        samples: Held-out samples that it is from.
    """

    low: float
    high: float
    coverage: float
    samples: int

    @classmethod
    def fit(
        cls, predicted: Sequence[float], measured: Sequence[float], coverage: float = COVERAGE
    ) -> ConformalInterval:
        """From held-out samples: below `low` and above `high` lies half of the rest each.

        Few samples give the largest errors seen, and cannot promise more than
        `(samples - 1) / (samples + 1)`.

        Raises:
            InputError: The lengths differ, there is no sample, one is not positive, or `coverage` is not
                between 0 and 1.
        """
        if len(predicted) != len(measured) or not predicted:
            raise InputError(f"{len(predicted)} predictions and {len(measured)} measurements for an interval")
        if not all(value > 0.0 and math.isfinite(value) for value in (*predicted, *measured)):
            raise InputError("an interval needs predictions and measurements above 0")
        if not 0.0 < coverage < 1.0:
            raise InputError(f"`coverage` (={coverage}) must lie between 0 and 1")
        errors = sorted(math.log(m / p) for p, m in zip(predicted, measured, strict=True))
        tail = (1.0 - coverage) / 2.0
        count = len(errors)
        below = max(math.floor(tail * (count + 1)) - 1, 0)
        above = min(math.ceil((1.0 - tail) * (count + 1)) - 1, count - 1)
        return cls(
            low=math.exp(min(errors[below], 0.0)),
            high=math.exp(max(errors[above], 0.0)),
            coverage=coverage,
            samples=count,
        )

    def bounds(self, predicted: float) -> tuple[float, float]:
        """The interval of one prediction, in its unit."""
        return predicted * self.low, predicted * self.high

    def to_dict(self) -> dict[str, Any]:
        """The interval in JSON's types."""
        return {"low": self.low, "high": self.high, "coverage": self.coverage, "samples": self.samples}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ConformalInterval:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            found = cls(
                low=float(record["low"]),
                high=float(record["high"]),
                coverage=float(record["coverage"]),
                samples=int(record["samples"]),
            )
            if not 0.0 <= found.low <= 1.0 <= found.high < math.inf:
                raise ValueError(f"{found.low} to {found.high} are no factors around 1")
            return found
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FileFormatError(f"an interval cannot be read: {error!r}") from error
