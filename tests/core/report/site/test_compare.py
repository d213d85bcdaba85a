"""Comparison of runs: pairs, series and verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from sparseflow.core.report.site.compare import compare_rows, group_times, summarize


def make_rows(factor: float, rounds: int = 8, **labels: Any) -> list[dict[str, Any]]:
    return [
        {**labels, "round": index, "latency_ms": factor * (1.0 + index % 4 / 100)} for index in range(rounds)
    ]


@pytest.mark.parametrize(
    ("factor", "rounds", "verdict"),
    [(0.5, 8, "better"), (2.0, 8, "worse"), (1.0, 8, "inconclusive"), (0.5, 5, "inconclusive")],
)
def test_verdict_follows_interval_and_pairs(factor: float, rounds: int, verdict: str) -> None:
    (series,) = compare_rows(make_rows(1.0), make_rows(factor, rounds, candidate=None))
    assert series.verdict == verdict and series.pairs == rounds
    assert series.speedup.median == pytest.approx(1.0 / factor)


def test_pairs_have_equal_labels_and_rounds() -> None:
    old = make_rows(1.0, candidate="a") + make_rows(4.0, candidate="b")
    new = make_rows(2.0, candidate="b")[::-1] + make_rows(1.0, candidate="c")
    (series,) = compare_rows(old, new)
    assert series.name == "b" and series.speedup.low == series.speedup.high == pytest.approx(2.0)


def test_repeated_keys_are_paired_in_order() -> None:
    rows = [{"question": 1, "method": "budget", "budget_ms": 5.0, "measured_ms": float(x)} for x in (3, 4)]
    assert list(group_times(rows)["budget, 5 ms"].values()) == [3.0, 4.0]


@pytest.mark.parametrize("value", [None, 0.0, -1.0, "text", float("inf")])
def test_rows_without_a_time_are_skipped(value: object) -> None:
    assert group_times([{"latency_ms": value, "round": 0}]) == {}


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [((0.5, 1.0), "better"), ((2.0, 1.0), "worse"), ((2.0, 0.5), "inconclusive"), ((), "inconclusive")],
)
def test_summarize_needs_series_that_agree(factors: tuple[float, ...], verdict: str) -> None:
    series = [item for factor in factors for item in compare_rows(make_rows(1.0), make_rows(factor))]
    assert summarize(series) == verdict
