"""Conformal margins and residual scales."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.predictor.calibration import (
    conformal_margin,
    fit_residual_scale,
    residual_scale,
    summarize_scores,
)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2000), st.floats(0.001, 0.5), st.integers(0, 3))
def test_conformal_margin_is_quantile_of_scores(count: int, miss: float, seed: int) -> None:
    scores = np.random.default_rng(seed).normal(size=count)
    rank = math.ceil((count + 1) * (1.0 - miss))
    margin = conformal_margin(scores, miss)
    if rank <= count:
        assert margin == max(np.sort(scores)[rank - 1], 0.0)
    else:
        assert margin >= max(scores.max(), 0.0)
    assert conformal_margin(scores, miss / 2) >= margin >= 0.0
    assert conformal_margin(np.full(count, 2.0), miss) == pytest.approx(2.0)


def test_conformal_margin_extrapolates_exponential_tail() -> None:
    sampled = np.random.default_rng(1).exponential(size=(50, 600))
    for miss in (1e-3, 1e-4):
        margin = [conformal_margin(scores, miss) for scores in sampled]
        assert np.mean(margin) == pytest.approx(math.log(1 / miss), rel=0.1)


def test_summarize_scores_keeps_quantiles() -> None:
    scores = np.random.default_rng(1).normal(size=5000)
    summary = summarize_scores(scores, 600)
    assert len(summary) == 600 and conformal_margin(summary, 0.01) == pytest.approx(
        conformal_margin(scores, 0.01), rel=0.05
    )
    assert summarize_scores(scores[:10], 600).tolist() == sorted(scores[:10])


def test_fit_residual_scale_recovers_scale() -> None:
    generator, n = np.random.default_rng(2), 20000
    prefill, step = generator.uniform(10, 50, n), generator.uniform(1, 4, n)
    steps = generator.integers(0, 40, n).astype(float)
    remaining = steps * step
    sigma = residual_scale(np.array([0.04, 2e-3, 1e-3, 4e-4]), prefill, step, remaining)
    measured = prefill + remaining + sigma * generator.normal(size=n)
    scale = residual_scale(fit_residual_scale(prefill, step, remaining, measured), prefill, step, remaining)
    # Clipping large errors lowers all scales equally.
    ratio = scale / sigma
    assert ratio.std() / ratio.mean() < 0.05 and 0.85 < ratio.mean() < 1.0
