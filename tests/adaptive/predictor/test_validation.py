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


def test_promises_are_kept() -> None:
    found = validate(profiled())
    assert [each.quantile for each in found.quantiles] == [0.5, *QUANTILES]
    for each in found.quantiles:
        assert each.low <= each.coverage <= each.high
        assert each.coverage == pytest.approx(each.quantile, abs=0.08)
    assert found.quantiles[-1].coverage > 0.97
    assert found.p50_error < 0.04
    assert found.requests == 27 * 2 * 6 and len(found.cells) == 27 * 2
    assert found.to_dict()["quantiles"][0]["quantile"] == 0.5


def test_what_is_judged_was_not_seen() -> None:
    whole = profiled()
    seen = []
    for judged, predictors in fit_folds(whole, levels=(0.9, 0.99)):
        mine = {(whole.successful[at].plan.id, whole.successful[at].text_tokens) for at in judged}
        rest = {
            (each.plan.id, each.text_tokens) for at, each in enumerate(whole.successful) if at not in judged
        }
        assert not mine & rest
        seen += judged
        low, high = (
            predictors[level].predict([make_query(whole.successful[judged[0]])])[1][0]
            for level in (0.9, 0.99)
        )
        assert low < high
    assert sorted(seen) == list(range(len(whole.successful)))
    # A plan that is ten times as slow as its kind is told wrong, since nothing was learnt from it.
    odd = whole.successful[0].plan
    slow = tuple(
        replace(
            each, prefill_ms=10 * (each.prefill_ms or 0.0), steps_ms=tuple(10 * ms for ms in each.steps_ms)
        )
        if each.plan == odd
        else each
        for each in whole.measurements
    )
    assert validate(replace(whole, measurements=slow)).p50_error > validate(whole).p50_error + 0.02


def test_too_little() -> None:
    whole = profiled()
    groups = list(dict.fromkeys((each.plan, each.text_tokens) for each in whole.successful))

    def some(count: int) -> PlanProfile:
        kept = set(groups[:count])
        return replace(
            whole,
            measurements=tuple(each for each in whole.measurements if (each.plan, each.text_tokens) in kept),
        )

    assert (
        can_validate(whole)
        and not can_validate(some(6))
        and not can_validate(some(3))
        and can_validate(some(7))
    )
    validate(some(7))
    with pytest.raises(InputError, match="profile more"):
        validate(some(6))
