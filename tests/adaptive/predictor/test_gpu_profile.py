"""A predictor of what was measured on a GPU: medians of plans that it has not seen, alone and beside others.

`results/adaptive/profile-cuda.parquet` is of the shipped model with photos, in an engine on an H200.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.profile import Measurement, PlanProfile

FILE = Path(__file__).resolve().parents[3] / "results" / "adaptive" / "profile-cuda.parquet"

Way = tuple[int, float, int]
"""Batch, load, new tokens."""
Held = dict[Way, list[tuple[Measurement, float]]]


@pytest.fixture(scope="module")
def held_out() -> Held:
    """Requests of plans that the predictor had not seen, each with its predicted median."""
    profile = PlanProfile.load(FILE)
    plans = np.random.default_rng(0).permutation(
        sorted({measurement.plan.id for measurement in profile.successful})
    )
    actual: Held = defaultdict(list)
    for part in (set(plans[::2].tolist()), set(plans[1::2].tolist())):
        known = tuple(measurement for measurement in profile.successful if measurement.plan.id not in part)
        predictor = PlanLatencyPredictor.fit(replace(profile, measurements=known))
        unknown = [measurement for measurement in profile.successful if measurement.plan.id in part]
        for tokens in (1, 2, 4, 7):
            queries = [
                LatencyQuery(
                    plan=measurement.plan, text_tokens=measurement.text_tokens,
                    images=int(measurement.plan.tier is not None), new_tokens=tokens,
                    batch=measurement.batch, load=measurement.load,
                )
                for measurement in unknown
            ]  # fmt: skip
            for measurement, p50 in zip(unknown, predictor.predict(queries)[0].tolist(), strict=True):
                actual[measurement.batch, measurement.load, tokens].append((measurement, p50))
    return actual


def test_half_of_the_requests_are_below_the_median_however_they_are_run(held_out: Held) -> None:
    assert {(batch, load) for batch, load, _ in held_out} == {
        (b, load) for b in (1, 4, 8) for load in (0.0, 0.7)
    }
    for (_, _, tokens), rows in held_out.items():
        below = np.mean([measurement.total_ms(tokens) <= p50 for measurement, p50 in rows])
        assert 0.4 < below < 0.6


@pytest.mark.parametrize("tokens", [1, 2, 4, 7])
def test_medians_alone(held_out: Held, tokens: int) -> None:
    cells = defaultdict(list)
    for measurement, p50 in held_out[1, 0.0, tokens]:
        cells[measurement.plan.id, measurement.text_tokens].append((measurement.total_ms(tokens), p50))
    errors = [
        abs(p50[0] / np.median(elapsed_ms) - 1.0)
        for elapsed_ms, p50 in (zip(*c, strict=True) for c in cells.values())
    ]
    # Medians of six requests, half of which differ from the other half by 5 % themselves.
    assert np.mean(errors) < 0.05
