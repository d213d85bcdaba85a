"""Checking a predictor: its promises are held against requests that it had not seen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sparseflow.adaptive.predictor.validation import QUANTILES, can_validate, fit_folds, make_query, validate
from sparseflow.adaptive.profile import PlanProfile, collect_profile, select_representative_plans
from sparseflow.errors import InputError
from tests.adaptive.fake_runner import FakeRunner, make_space


@cache
def profiled(noise: float = 0.03) -> PlanProfile:
    runner, plans = FakeRunner(noise=noise), make_space()
    with TemporaryDirectory() as scratch:
        return collect_profile(
            runner,
            plans,
            Path(scratch) / "p.parquet",
            text_tokens=(16, 64),
            plans=select_representative_plans(plans, 27),
            rounds=6,
            decode_steps=4,
            warmup_runs=0,
        )


def test_validate_coverage_matches_quantiles() -> None:
    profile = validate(profiled())
    assert [row.quantile for row in profile.quantiles] == [0.5, *QUANTILES]
    for row in profile.quantiles:
        assert row.low <= row.coverage <= row.high
        assert row.coverage == pytest.approx(row.quantile, abs=0.08)
    assert profile.quantiles[-1].coverage > 0.97
    assert profile.p50_error < 0.04
    assert profile.requests == 27 * 2 * 6 and len(profile.cells) == 27 * 2
    assert profile.to_dict()["quantiles"][0]["quantile"] == 0.5


def test_fit_folds_holds_out_plans_and_lengths() -> None:
    full = profiled()
    observed = []
    for outcomes, predictors in fit_folds(full, levels=(0.9, 0.99)):
        part_plans = {
            (full.successful[index].plan.id, full.successful[index].text_tokens) for index in outcomes
        }
        remaining = {
            (measurement.plan.id, measurement.text_tokens)
            for index, measurement in enumerate(full.successful)
            if index not in outcomes
        }
        assert not part_plans & remaining
        observed += outcomes
        low, high = (
            predictors[level].predict([make_query(full.successful[outcomes[0]])])[1][0]
            for level in (0.9, 0.99)
        )
        assert low < high
    assert sorted(observed) == list(range(len(full.successful)))
    # A plan that is ten times as slow as its kind is told wrong, since nothing was learnt from it.
    odd = full.successful[0].plan
    slow = tuple(
        replace(
            measurement,
            prefill_ms=10 * (measurement.prefill_ms or 0.0),
            steps_ms=tuple(10 * ms for ms in measurement.steps_ms),
        )
        if measurement.plan == odd
        else measurement
        for measurement in full.measurements
    )
    assert validate(replace(full, measurements=slow)).p50_error > validate(full).p50_error + 0.02


def test_validate_too_small_profile_raises() -> None:
    full = profiled()
    groups = list(
        dict.fromkeys((measurement.plan, measurement.text_tokens) for measurement in full.successful)
    )

    def select_groups(count: int) -> PlanProfile:
        retained = set(groups[:count])
        return replace(
            full,
            measurements=tuple(
                measurement
                for measurement in full.measurements
                if (measurement.plan, measurement.text_tokens) in retained
            ),
        )

    assert (
        can_validate(full)
        and not can_validate(select_groups(6))
        and not can_validate(select_groups(3))
        and can_validate(select_groups(7))
    )
    validate(select_groups(7))
    with pytest.raises(InputError, match="profile more"):
        validate(select_groups(6))
