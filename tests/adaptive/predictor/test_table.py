"""Latency tables: basis, interpolation and fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.predictor.features import compute_plan_features
from sparseflow.adaptive.predictor.table import (
    MAX_KNOTS,
    LatencyTable,
    PhaseSamples,
    fit_table,
    interpolation_weights,
    locate_interval,
    monotone_hinge_basis,
    select_log_spaced_knots,
    subdivide_knots,
)
from tests.adaptive.fake_runner import make_space

SPACE = make_space()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-50, 200), min_size=1, max_size=9, unique=True), st.floats(-100, 400))
def test_hinge_basis_is_monotone_and_interpolates(values: list[float], x: float) -> None:
    knots = np.array(sorted(values))
    if len(knots) > 1 and np.diff(knots).min() < 1e-3:
        return
    generator = np.random.default_rng(0)
    increments = generator.random(len(knots))
    index = increments.cumsum()
    low, fraction = locate_interval(np.array([x]), knots)
    high = min(low[0] + 1, len(knots) - 1)
    looked_up = index[low[0]] + fraction[0] * (index[high] - index[low[0]])
    assert (monotone_hinge_basis(np.array([x]), knots) @ increments)[0] == pytest.approx(looked_up, rel=1e-9)
    if knots[0] <= x <= knots[-1]:
        assert looked_up == pytest.approx(np.interp(x, knots, index), rel=1e-9)
    higher = monotone_hinge_basis(np.array([x, x + 1.0]), knots) @ increments
    assert higher[1] >= higher[0]


def test_select_log_spaced_knots_keeps_ends() -> None:
    assert select_log_spaced_knots(np.array([3.0, 1.0, 3.0]), 5).tolist() == [1.0, 3.0]
    knots = select_log_spaced_knots(np.arange(100.0), MAX_KNOTS)
    assert len(knots) <= MAX_KNOTS and knots[0] == 0.0 and knots[-1] == 99.0
    assert np.diff(knots).max() == np.diff(knots)[-1]


def test_predict_interpolates_coefficients() -> None:
    generator = np.random.default_rng(5)
    loads, batches, tokens = np.array([0.0, 0.5]), np.array([1.0, 4.0, 8.0]), np.array([10.0, 20.0, 50.0])
    increments = generator.random((2, 3, 3, 4))
    table = LatencyTable(
        loads=loads, batches=batches, tokens=tokens, coefficients=increments.cumsum(0).cumsum(1).cumsum(2),
        vision=generator.random((2, 3)).cumsum(0).cumsum(1),
    )  # fmt: skip
    n = 40
    x, b, t = generator.uniform(0, 80, n), generator.uniform(1, 12, n), generator.random((n, 4))
    images, tier = generator.integers(0, 3, n).astype(float), generator.integers(0, 3, n)
    predicted = table.predict(x, b, t, images, tier)
    for row in range(n):
        for level in range(2):
            reached = increments[: level + 1].sum(axis=0)
            by_batch, by_tokens = (
                monotone_hinge_basis(b[row : row + 1], batches)[0],
                monotone_hinge_basis(x[row : row + 1], tokens)[0],
            )
            expected = np.einsum("mjk,m,j,k->", reached, by_batch, by_tokens, t[row])
            assert predicted[row, level] == pytest.approx(
                expected + images[row] * table.vision[level, tier[row]]
            )


def test_resample_loads_keeps_predictions() -> None:
    generator = np.random.default_rng(0)
    coefficients = generator.random((3, 1, 2, 6)).cumsum(0).cumsum(2)
    table = LatencyTable(
        loads=np.array([0.0, 0.35, 0.7]), batches=np.ones(1), tokens=np.array([20.0, 200.0]),
        coefficients=coefficients, vision=generator.random((3, 3)).cumsum(0).cumsum(1),
    )  # fmt: skip
    loads = subdivide_knots(np.array([0.0, 0.7]), 0.2)
    assert loads.tolist() == pytest.approx([0.0, 0.175, 0.35, 0.525, 0.7]) and loads[-1] == 0.7
    assert subdivide_knots(np.array([0.3]), 0.2).tolist() == [0.3]
    coarse = replace(
        table, loads=np.array([0.0, 0.7]), coefficients=table.coefficients[[0, -1]],
        vision=table.vision[[0, -1]],
    )  # fmt: skip
    resampled = coarse.resample_loads(loads)
    arguments = (
        np.full(3, 80.0),
        np.ones(3),
        compute_plan_features(SPACE.plans[::100], SPACE.geometry),
        np.ones(3),
        np.arange(3),
    )
    assert resampled.predict(*arguments) @ interpolation_weights(np.array([0.5]), loads)[0] == pytest.approx(
        coarse.predict(*arguments) @ interpolation_weights(np.array([0.5]), coarse.loads)[0]
    )
    assert (resampled.predict(*arguments)[:, [0, -1]] == coarse.predict(*arguments)).all()


def test_fit_table_recovers_coefficients_despite_outliers() -> None:
    generator = np.random.default_rng(6)
    plans = [SPACE.plans[index] for index in generator.integers(0, 225, 400)]
    tokens = generator.choice([20.0, 60.0, 200.0], 400)
    work = compute_plan_features(plans, SPACE.geometry)
    ms = work @ [1.0, 0.2, 0.05, 0.0, 0.1, 0.02] * (1 + tokens / 100)
    ms[::40] *= 3.0
    measured = PhaseSamples(
        end_ms=ms, load=np.zeros(400), batch=np.ones(400), tokens=tokens, features=work, images=np.zeros(400),
        tier=np.zeros(400, dtype=int), start_ms=np.zeros(400), repeats=np.ones(400),
    )  # fmt: skip
    table = fit_table(measured, np.zeros(1), 0)
    predicted = table.predict(tokens, np.ones(400), work, np.zeros(400), np.zeros(400, dtype=int))[:, 0]
    undisturbed = np.arange(400) % 40 != 0
    np.testing.assert_allclose(predicted[undisturbed], ms[undisturbed], rtol=0.01)


def test_fit_table_with_wide_noise_predicts_medians() -> None:
    generator = np.random.default_rng(6)
    plans = [SPACE.plans[index] for index in generator.integers(0, 225, 3000)]
    work = compute_plan_features(plans, SPACE.geometry)
    truth = work @ [1.0, 0.2, 0.05, 0.0, 0.1, 0.02]
    none = np.zeros(3000)
    measured = PhaseSamples(
        end_ms=truth * np.exp(0.4 * generator.normal(size=3000)), load=none, batch=none + 1.0, tokens=none,
        features=work, images=none, tier=none.astype(int), start_ms=none, repeats=none + 1.0,
    )  # fmt: skip
    predicted = fit_table(measured, np.zeros(1), 0).predict(none, none + 1.0, work, none, none.astype(int))[
        :, 0
    ]
    assert np.median(predicted / truth) == pytest.approx(1.0, abs=0.03)


def test_fit_table_of_second_phase_fits_median_of_sum() -> None:
    # Each phase is delayed in less than half of its runs, and the sum of both in most of them.
    generator = np.random.default_rng(7)
    plans = [SPACE.plans[index] for index in generator.integers(0, 225, 4000)]
    work, none = compute_plan_features(plans, SPACE.geometry), np.zeros(4000)
    undisturbed = work @ [1.0, 0.2, 0.05, 0.0, 0.1, 0.02]
    phases = undisturbed * (1.0 + (generator.random((2, 4000)) < 0.4))
    shared = {"load": none, "batch": none + 1.0, "tokens": none, "images": none, "features": work}
    options: Any = {**shared, "tier": none.astype(int), "repeats": none + 1.0}
    arguments = (none, none + 1.0, work, none, none.astype(int))
    first = fit_table(PhaseSamples(end_ms=phases[0], start_ms=none, **options), np.zeros(1), 0).predict(
        *arguments
    )[:, 0]
    assert np.median(first / undisturbed) == pytest.approx(1.0, abs=0.02)
    total_ms = phases.sum(axis=0)
    second = fit_table(PhaseSamples(end_ms=total_ms, start_ms=first, **options), np.zeros(1), 0).predict(
        *arguments
    )[:, 0]
    assert np.median((first + second) / np.median(total_ms / undisturbed) / undisturbed) == pytest.approx(
        1.0, abs=0.02
    )
