"""Latencies of requests: as measured where they were, by ratios where they were not, scatter and all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from sparseflow.adaptive.profile import PlanProfile
from sparseflow.adaptive.study.latencies import RequestSize, sample_latencies
from sparseflow.errors import InputError
from tests.adaptive.study import small


@pytest.fixture(scope="module")
def model(study_inputs: Path) -> object:
    return small.opened(study_inputs / "model")


def test_sample_latencies_of_measured_size_are_measurements(model) -> None:
    profile = small.profile_of(model)
    latencies = sample_latencies(profile, [RequestSize(6, 4), RequestSize(12, 2)])
    assert (
        latencies.measured.all()
        and latencies.ms.shape == (2, len(profile.space), 3)
        and latencies.load == 0.0
    )
    for index, plan in enumerate(profile.space.plans):
        for row, (tokens, new) in enumerate([(6, 4), (12, 2)]):
            measured = [
                measurement.total_ms(new)
                for measurement in profile.measurements
                if (measurement.plan, measurement.text_tokens) == (plan, tokens)
            ]
            np.testing.assert_allclose(sorted(latencies.ms[row, index]), sorted(measured), rtol=1e-5)


def test_sample_latencies_of_other_length_are_scaled(model) -> None:
    profile = small.profile_of(model, repeats=5, noise=0.05)
    sizes = [RequestSize(7, 3), RequestSize(9, 1), RequestSize(16, 4), RequestSize(6, 9)]
    latencies = sample_latencies(profile, sizes)
    for index, plan in enumerate(profile.space.plans):
        own_profile = {
            tokens: np.array(
                [
                    measurement.total_ms(4) / small.truth(plan, tokens, 4)
                    for measurement in profile.measurements
                    if (measurement.plan, measurement.text_tokens) == (plan, tokens)
                ]
            )
            for tokens in (6, 12)
        }
        # The nearer length, and of two that are as near the longer.
        for row, nearby_rows in enumerate((6, 12, 12, 6)):
            factors = latencies.ms[row, index] / small.truth(plan, *sizes[row][:2])
            np.testing.assert_allclose(factors / own_profile[nearby_rows], 1.0, atol=0.08)
            # Each request keeps its own factor: what differs between them is as it was.
            np.testing.assert_allclose(
                factors / factors.mean(),
                own_profile[nearby_rows] / own_profile[nearby_rows].mean(),
                rtol=1e-4,
            )


def test_sample_latencies_of_unmeasured_plans_use_stand_ins(model) -> None:
    profile = small.profile_of(model, plans=6, repeats=4, noise=0.05)
    latencies = sample_latencies(profile, [RequestSize(6, 2), RequestSize(12, 4)])
    assert latencies.measured.sum() == 18 and not latencies.measured.all()
    off, spread = [], []
    for index, plan in enumerate(profile.space.plans):
        if not latencies.measured[index]:
            off.append(np.median(latencies.ms[0, index]) / small.truth(plan, 6, 2) - 1.0)
            spread.append(latencies.ms[0, index].std() / latencies.ms[0, index].mean())
    assert np.abs(off).mean() < 0.1
    assert 0.02 < np.mean(spread) < 0.1
    second = sample_latencies(profile, [RequestSize(6, 2), RequestSize(12, 4)])
    np.testing.assert_array_equal(second.ms, latencies.ms)
    other = sample_latencies(profile, [RequestSize(6, 2), RequestSize(12, 4)], seed=1)
    assert (other.ms[:, ~latencies.measured] != latencies.ms[:, ~latencies.measured]).any()


def test_sample_latencies_uses_smallest_load_and_single_requests(model) -> None:
    profile = small.profile_of(model)
    busy, several = (
        [
            replace(
                small.make_measurement(measurement.plan, measurement.text_tokens, factor=factor),
                round=measurement.round,
                **options,
            )
            for measurement in profile.measurements
        ]
        for factor, options in ((9.0, {"load": 0.5}), (7.0, {"batch": 4}))
    )
    extended = replace(profile, measurements=(*profile.measurements, *busy, *several))
    expected, samples = (
        sample_latencies(profile, [RequestSize(6, 4)]),
        sample_latencies(extended, [RequestSize(6, 4)]),
    )
    np.testing.assert_allclose(samples.ms, expected.ms, rtol=0.02)
    assert sample_latencies(replace(profile, measurements=tuple(busy)), [RequestSize(6, 4)]).load == 0.5


def test_sample_latencies_repeats_rare_measurements(model) -> None:
    profile = small.profile_of(model)
    first = profile.space.plans[0]
    fewer = replace(
        profile,
        measurements=tuple(
            measurement
            for measurement in profile.measurements
            if measurement.plan != first or measurement.round == 0
        ),
    )
    latencies = sample_latencies(fewer, [RequestSize(6, 4)])
    assert latencies.ms.shape[2] == 3 and len(set(latencies.ms[0, 0].tolist())) == 1


def test_sample_latencies_with_invalid_arguments_raises(model) -> None:
    profile = small.profile_of(model)
    with pytest.raises(InputError, match=r"`sizes`"):
        sample_latencies(profile, [RequestSize(6, 0)])
    with pytest.raises(InputError, match=r"at least 1"):
        sample_latencies(profile, [])
    low = PlanProfile(
        metadata=profile.metadata,
        measurements=tuple(
            measurement for measurement in profile.measurements if measurement.plan.tier == "low"
        ),
    )
    # A tier that was left out, as where it has no room, takes what is predicted, and scatters as others do.
    latencies = sample_latencies(low, [RequestSize(6, 2)])
    assert np.isfinite(latencies.ms).all() and (latencies.ms > 0.0).all()
    assert [plan.tier for plan, known in zip(low.space.plans, latencies.measured, strict=True) if known] == [
        "low"
    ] * int(latencies.measured.sum())
    batched = replace(
        profile, measurements=tuple(replace(measurement, batch=2) for measurement in profile.measurements)
    )
    with pytest.raises(InputError, match=r"batch size 1"):
        sample_latencies(batched, [RequestSize(6, 2)])
