"""Checking a predictor: its promises are held against requests that it had not seen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sparseflow.adaptive.predictor.validation import QUANTILES, ask_of, check, enough, unseen
from sparseflow.adaptive.profile import PlanProfile, collect_profile, spread
from sparseflow.errors import InputError
from tests.adaptive.fake_runner import FakeRunner, space


@cache
def profiled(noise: float = 0.03) -> PlanProfile:
    runner, plans = FakeRunner(noise=noise), space()
    with TemporaryDirectory() as scratch:
        return collect_profile(
            runner, plans, Path(scratch) / "p.parquet", buckets=(16, 64), plans=spread(plans, 27), repeats=6,
            steps=4, warmup=0,
        )  # fmt: skip


def test_promises_are_kept() -> None:
    found = check(profiled())
    assert [each.promised for each in found.observed] == [0.5, *QUANTILES]
    for each in found.observed:
        assert each.low <= each.share <= each.high
        assert each.share == pytest.approx(each.promised, abs=0.08)
    assert found.observed[-1].share > 0.97
    assert found.p50_error < 0.04
    assert found.requests == 27 * 2 * 6 and len(found.cells) == 27 * 2
    assert found.to_dict()["observed"][0]["promised"] == 0.5


def test_what_is_judged_was_not_seen() -> None:
    whole = profiled()
    seen = []
    for judged, predictors in unseen(whole, levels=(0.9, 0.99)):
        mine = {(whole.timed[at].plan.id, whole.timed[at].text_tokens) for at in judged}
        rest = {(each.plan.id, each.text_tokens) for at, each in enumerate(whole.timed) if at not in judged}
        assert not mine & rest
        seen += judged
        low, high = (
            predictors[level].predict([ask_of(whole.timed[judged[0]])])[1][0] for level in (0.9, 0.99)
        )
        assert low < high
    assert sorted(seen) == list(range(len(whole.timed)))
    # A plan that is ten times as slow as its kind is told wrong, since nothing was learnt from it.
    odd = whole.timed[0].plan
    slow = tuple(
        replace(
            each, prefill_ms=10 * (each.prefill_ms or 0.0), steps_ms=tuple(10 * ms for ms in each.steps_ms)
        )
        if each.plan == odd
        else each
        for each in whole.visits
    )
    assert check(replace(whole, visits=slow)).p50_error > check(whole).p50_error + 0.02


def test_too_little() -> None:
    whole = profiled()
    groups = list(dict.fromkeys((each.plan, each.text_tokens) for each in whole.timed))

    def some(count: int) -> PlanProfile:
        kept = set(groups[:count])
        return replace(
            whole, visits=tuple(each for each in whole.visits if (each.plan, each.text_tokens) in kept)
        )

    assert enough(whole) and not enough(some(6)) and not enough(some(3)) and enough(some(7))
    check(some(7))
    with pytest.raises(InputError, match="profile more"):
        check(some(6))
