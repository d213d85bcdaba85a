"""Learning from requests as they end: factors for a machine that drifts, margins that keep their promise.

Factors: of each phase, at each load, the exponentially weighted median of measured over table. A median,
since what comes now and then must move margins and not the middle. A load of which little was seen, or
nothing for long, follows all others.

Margins: adaptive conformal inference (Gibbs & Candès 2021). With m the asked share of misses, the share asked
for next, m_t, moves by ::

    m_{t+1} = m_t + g (m - [request t missed])

and the margin is the quantile 1 - m_t of the latest scores. Whatever the scores do, the share of misses comes
to m. m_t is kept between m / 20 and 5 m: at the lower end the margin is far beyond every score seen, and what
a machine once did shall not be paid for hours later. For the same reason the margin of a load that none of
many requests had, such as that of an idle machine once a crowd has come, is again the profile's.

Who refuses requests by what is predicted sees none of them end, so a prediction that has grown too high would
stay so. `forget` goes back towards what was known at the beginning, as far as asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparseflow.adaptive.predictor.calibration import margin
from sparseflow.errors import FileFormatError

WINDOW = 600
"""Latest scores at one load that a margin is from."""
_STALE = 200
"""Requests at other loads after which a margin is what it was at the beginning."""
_AWAY = 0.005
"""What observations weigh less with each request at other loads: half of the weight is gone after 140."""
_MEMORY = 64
_FADE = 0.95
"""What an observation weighs less with each later one: half of the weight is in the last 14."""
_DOUBT = 2.0
"""Weight, in observations, of what is assumed before there are any."""
_LARGEST = math.log(20.0)
_STEP = 0.005
_LEAST, _MOST = 1.0 / 20.0, 5.0


class RunningMedian:
    """An exponentially weighted median of logarithms."""

    def __init__(self) -> None:
        # The first place is for what is assumed.
        self._logs, self._weights = np.zeros((2, 1))

    def add(self, log: float, weight: float) -> None:
        """Take in one, with a weight in (0, 1]; older ones fade by as much."""
        first = 2 if len(self._logs) > _MEMORY else 1
        log = min(max(log, -_LARGEST), _LARGEST)
        self._logs = np.concatenate([[0.0], self._logs[first:], [log]])
        self._weights = np.concatenate([[0.0], self._weights[first:] * _FADE**weight, [weight]])

    def forget(self, share: float) -> None:
        """Take so much weight from all of them."""
        self._weights *= 1.0 - share

    def value(self, assumed: float) -> float:
        """The median, where `assumed` counts as some observations."""
        self._logs[0], self._weights[0] = assumed, _DOUBT
        order = self._logs.argsort()
        logs, weights = self._logs[order], self._weights[order]
        # Each stands at the middle of its weight.
        at = weights.cumsum() - 0.5 * weights
        half = 0.5 * weights.sum()
        after = int(at.searchsorted(half))
        if after in (0, len(at)):
            return float(logs[min(after, len(at) - 1)])
        way = (half - at[after - 1]) / (at[after] - at[after - 1])
        return float(logs[after - 1] + way * (logs[after] - logs[after - 1]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"logs": self._logs[1:].tolist(), "weights": self._weights[1:].tolist()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RunningMedian:
        """What `to_dict` gave. Raises FileFormatError where it is something else."""
        made = cls()
        try:
            made._logs, made._weights = (
                np.array([0.0, *[float(each) for each in record[name]][-_MEMORY:]])
                for name in ("logs", "weights")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"not what was observed: {error!r}") from error
        finite = np.isfinite(made._logs).all() and np.isfinite(made._weights).all()
        if not finite or (made._weights < 0.0).any() or len(made._logs) != len(made._weights):
            raise FileFormatError("what was observed must be finite, each with a weight that is not negative")
        return made


class DriftCorrection:
    """Factors of one phase, at each load.

    Args:
        loads: How many.

    Attributes:
        values: Multiply times of the table by them: [L].
    """

    def __init__(self, loads: int) -> None:
        self._everywhere, self._at = RunningMedian(), [RunningMedian() for _ in range(loads)]
        self.values = np.ones(loads)

    def add(self, ratio: float, weights: np.ndarray) -> None:
        """Take in measured over table, above 0, with a weight at each load: [L], in [0, 1]."""
        self._everywhere.add(math.log(ratio), float(weights.sum()))
        for middle, weight in zip(self._at, weights.tolist(), strict=True):
            if weight > 0.0:
                middle.add(math.log(ratio), weight)
            else:
                middle.forget(_AWAY)
        self._settle()

    def forget(self, share: float) -> None:
        """Weigh what was seen less, by so much; what is assumed counts the more."""
        for middle in (self._everywhere, *self._at):
            middle.forget(share)
        self._settle()

    def _settle(self) -> None:
        all_over = self._everywhere.value(0.0)
        self.values = np.exp([middle.value(all_over) for middle in self._at])

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"everywhere": self._everywhere.to_dict(), "at": [middle.to_dict() for middle in self._at]}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> DriftCorrection:
        """What `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            made = cls(len(record["at"]))
            made._everywhere = RunningMedian.from_dict(record["everywhere"])
            made._at = [RunningMedian.from_dict(each) for each in record["at"]]
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"not factors: {error!r}") from error
        made._settle()
        return made


class ConformalMargin:
    """The margin at one load.

    Args:
        miss: Share of requests that may be above it.
        scores: To begin with, at least one; the first ones are the first to go.

    Attributes:
        value: Spreads to add.
    """

    def __init__(self, miss: float, scores: np.ndarray) -> None:
        self._miss = self._now = miss
        self._scores = self._given = np.array(scores, dtype=np.float64)[-WINDOW:]
        self._seen = self._away = 0
        self.value = margin(self._scores, miss)

    def add(self, score: float, *, missed: bool) -> None:
        """Take in a request that ended.

        Args:
            score: (measured - predicted) / spread.
            missed: Whether it took longer than was promised.
        """
        moved = self._now + _STEP * (self._miss - missed)
        self._now = min(max(moved, self._miss * _LEAST), self._miss * _MOST)
        self._scores = np.append(self._scores[-(WINDOW - 1) :], score)
        self._seen, self._away = min(self._seen + 1, WINDOW), 0
        self.value = margin(self._scores, self._now)

    def elsewhere(self) -> None:
        """A request ended that was at another load."""
        self._away += 1
        if self._away == _STALE:
            self.forget(1.0)

    def forget(self, share: float) -> None:
        """Let so much of what was added go, the oldest first, and what it did to the share of misses."""
        self._now += share * (self._miss - self._now)
        self._seen = int((1.0 - share) * self._seen)
        latest = self._scores[len(self._scores) - self._seen :]
        self._scores = np.concatenate([self._given, latest])[-WINDOW:]
        self.value = margin(self._scores, self._now)

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"now": self._now, "scores": self._scores.tolist()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], miss: float) -> ConformalMargin:
        """What `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            scores, now = np.array(record["scores"], dtype=np.float64), float(record["now"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"not a margin: {error!r}") from error
        if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all() or not 0.0 < now < 1.0:
            raise FileFormatError(
                "a margin needs at least one score, all finite, and a share between 0 and 1"
            )
        made = cls(miss, scores)
        made._now = now
        made.value = margin(scores, now)
        return made
