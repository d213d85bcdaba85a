"""Comparison of two runs: the ratio of their paired samples, its interval and a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparseflow.core.report.figures import format_value
from sparseflow.core.timing import Interval, bootstrap_median

Verdict = Literal["better", "worse", "inconclusive"]

MIN_PAIRS = 6
"""Fewest pairs of a verdict: with five, even samples that all agree are not significant at 5 %."""

_TIMES = ("latency_ms", "measured_ms")
_LABELS = ("case", "candidate", "method", "budget_ms")
_PAIR_KEYS = ("round", "sample", "question")


@dataclass(frozen=True, kw_only=True)
class Series:
    """Samples with equal labels in two runs.

    Attributes:
        name: Labels of the series.
        old_ms, new_ms: Median of each run.
        pairs: Number of pairs.
        speedup: Median of old over new of the pairs with its 95 % bootstrap interval.
    """

    name: str
    old_ms: float
    new_ms: float
    pairs: int
    speedup: Interval

    @property
    def verdict(self) -> Verdict:
        """Better or worse if the interval excludes 1 and there are enough pairs."""
        if self.pairs < MIN_PAIRS or self.speedup.low <= 1.0 <= self.speedup.high:
            return "inconclusive"
        return "better" if self.speedup.low > 1.0 else "worse"


def compare_rows(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Compare the series that both runs contain.

    Rows with equal values of `case`, `candidate`, `method` and `budget_ms` form a series. Its samples are
    paired by `round`, `sample` or `question`. Rows without a positive `latency_ms` or `measured_ms`, such as
    those of failed measurements, are skipped.
    """
    old_series, new_series = group_times(old), group_times(new)
    series = []
    for name, old_times in old_series.items():
        new_times = new_series.get(name, {})
        keys = [key for key in old_times if key in new_times]
        if keys:
            before = np.array([old_times[key] for key in keys])
            after = np.array([new_times[key] for key in keys])
            series.append(
                Series(
                    name=name,
                    old_ms=float(np.median(before)),
                    new_ms=float(np.median(after)),
                    pairs=len(keys),
                    speedup=bootstrap_median((before / after).tolist()),
                )
            )
    return series


def group_times(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[tuple[Any, ...], float]]:
    """Group the samples of a run: name of the series -> key of the pair -> milliseconds."""
    groups: dict[str, dict[tuple[Any, ...], float]] = {}
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        time_ms = next((row[name] for name in _TIMES if isinstance(row.get(name), int | float)), 0.0)
        if not 0.0 < time_ms < np.inf:
            continue
        labels = [_format_label(row[name]) for name in _LABELS if row.get(name) is not None]
        name = ", ".join(labels) or "all samples"
        key = tuple(row.get(pair_key) for pair_key in _PAIR_KEYS)
        # Samples without a key of their own are numbered in the order of measurement.
        groups.setdefault(name, {})[*key, counts[name, key]] = float(time_ms)
        counts[name, key] += 1
    return groups


def summarize(series: Sequence[Series]) -> Verdict:
    """Verdict of a comparison: better or worse if at least one series is, and none is the opposite."""
    verdicts = {item.verdict for item in series}
    if "better" in verdicts and "worse" not in verdicts:
        return "better"
    return "worse" if "worse" in verdicts and "better" not in verdicts else "inconclusive"


def _format_label(value: object) -> str:
    return f"{format_value(value)} ms" if isinstance(value, float) else str(value)
