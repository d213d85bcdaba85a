"""CPU kernels of plan selection; `controllers/test_cpu_policy.py` tests `run_stage`."""

from __future__ import annotations

import numpy as np
import pytest

from sparseflow.adaptive.kernels.policy_inference import cpu
from sparseflow.adaptive.predictor.calibration import MIN_RELATIVE_SCALE, residual_scale


@pytest.mark.parametrize("loads", [1, 3])
@pytest.mark.parametrize("plans", [1, 7])
@pytest.mark.parametrize("scale", [0.0, 0.25])
def test_predict_quantiles_matches_numpy_reference(loads: int, plans: int, scale: float) -> None:
    random = np.random.default_rng(loads + plans)
    prefill, step, tail_ms = random.uniform(1.0, 9.0, (3, loads, plans))
    factors, margins, spreads = (
        random.uniform(0.5, 2.0, (2, loads)),
        random.uniform(0, 3, loads),
        random.uniform(0, 0.1, (loads, 4)),
    )
    first, later = factors[0][:, None], factors[1][:, None]
    middle = prefill * first + tail_ms * later
    spread = residual_scale(spreads[:, None], prefill * first, step * later, tail_ms * later)
    high = middle + margins[:, None] * spread
    for low in range(loads - (scale > 0.0)):
        expected = []
        for times in (np.maximum.accumulate(values, axis=0) for values in (middle, high)):
            upper = times[min(low + 1, loads - 1)]
            expected.append(times[low] + scale * (upper - times[low]) + 2.5)
        quantiles = cpu.predict_quantiles(
            prefill,
            step,
            tail_ms,
            factors[0],
            factors[1],
            margins,
            spreads,
            MIN_RELATIVE_SCALE,
            low,
            scale,
            2.5,
        )
        np.testing.assert_allclose(quantiles, expected, rtol=1e-12)


def test_select_with_capacity_keeps_plans_that_fit() -> None:
    vision, allowed = np.array([10.0, 30.0, 60.0, np.inf]), np.array([False, True, True, True])
    for images, max_tokens, expected in (
        (1.0, 9.0, [1]), (1.0, 30.0, [1]), (1.0, 60.0, [1, 2]), (0.5, 30.0, [1, 2]), (2.0, 61.0, [1]),
        (0.05, 2.0, [1]),  # token counts are rounded: 1.5 becomes 2
    ):  # fmt: skip
        selected = cpu.select_with_capacity(vision, images, allowed, max_tokens)
        assert np.flatnonzero(selected).tolist() == expected


@pytest.mark.parametrize("width", [1, 5, 33])
def test_mean_embedding_excludes_placeholders(width: int) -> None:
    vectors = np.random.default_rng(width).normal(size=(3, width)).astype(np.float32)
    rows, left_out = np.array([-1, 0, -1, 2, 1]), np.array([9, 0])
    mean_word = np.empty(width, np.float32)
    assert cpu.mean_embedding(np.array([9, 1, 3, 3, 0]), left_out, rows, vectors, mean_word) == 3
    np.testing.assert_allclose(mean_word, (vectors[0] + 2.0 * vectors[2]) / 3.0, rtol=1e-5)
    assert cpu.mean_embedding(np.array([9, 9]), left_out, rows, vectors, mean_word) == 0
    for unknown in (2, 5, -1):
        assert cpu.mean_embedding(np.array([1, unknown]), left_out, rows, vectors, mean_word) == cpu.UNKNOWN
