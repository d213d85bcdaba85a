"""Predictor of a GPU profile: medians of unseen plans, alone and under load.

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

Condition = tuple[int, float, int]
"""Batch, load, new tokens."""
HeldOut = dict[Condition, list[tuple[Measurement, float]]]


@pytest.fixture(scope="module")
def held_out() -> HeldOut:
    """Requests of plans that the predictor had not seen, each with its predicted median."""
    profile = PlanProfile.load(FILE)
    plans = np.random.default_rng(0).permutation(
        sorted({measurement.plan.id for measurement in profile.successful})
    )
    predictions: HeldOut = defaultdict(list)
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
                predictions[measurement.batch, measurement.load, tokens].append((measurement, p50))
    return predictions


def test_half_of_requests_are_below_predicted_median(held_out: HeldOut) -> None:
    assert {(batch, load) for batch, load, _ in held_out} == {
        (b, load) for b in (1, 4, 8) for load in (0.0, 0.7)
    }
    for (_, _, tokens), rows in held_out.items():
        below = np.mean([measurement.total_ms(tokens) <= p50 for measurement, p50 in rows])
        assert 0.4 < below < 0.6


@pytest.mark.parametrize("tokens", [1, 2, 4, 7])
def test_predicted_medians_of_single_requests_are_accurate(held_out: HeldOut, tokens: int) -> None:
    cells = defaultdict(list)
    for measurement, p50 in held_out[1, 0.0, tokens]:
        cells[measurement.plan.id, measurement.text_tokens].append((measurement.total_ms(tokens), p50))
    errors = [
        abs(p50[0] / np.median(elapsed_ms) - 1.0)
        for elapsed_ms, p50 in (zip(*cell, strict=True) for cell in cells.values())
    ]
    # The medians of two halves of six requests differ by 5 % themselves.
    assert np.mean(errors) < 0.05
