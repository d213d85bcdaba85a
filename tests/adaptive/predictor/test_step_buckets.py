"""Steps in stretches: what each has, and what that is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.predictor.features import (
    count_step_buckets,
    count_steps_per_bucket,
    get_bucket_start,
)
from sparseflow.adaptive.profile import (
    PlanProfile,
    RequestTimes,
    collect_profile,
    select_representative_plans,
)
from tests.adaptive.fake_runner import FakeRunner, make_space

SPACE = make_space()


def test_every_step_is_in_one_stretch() -> None:
    steps = np.arange(40.0)
    actual = count_steps_per_bucket(steps, 4)
    assert (actual.sum(axis=0) == steps).all()
    assert actual[:, 6].tolist() == [1.0, 2.0, 3.0, 0.0] and actual[:, 39].tolist() == [1.0, 2.0, 4.0, 32.0]
    assert count_steps_per_bucket(np.array(5.0), 2).tolist() == [1.0, 4.0]
    assert count_steps_per_bucket(steps[:, None], 3).shape == (3, 40, 1)


def test_the_last_stretch_was_measured_well() -> None:
    assert [count_step_buckets(steps) for steps in (1, 2, 4, 5, 10, 11, 16, 23)] == [1, 2, 2, 3, 3, 4, 4, 5]
    for steps in range(1, 200):
        last = count_step_buckets(steps) - 1
        assert 2 * (steps - get_bucket_start(last)) >= get_bucket_start(last)


class Meeting(FakeRunner):
    """Beside a load, after each token another request may come, whose prompt is waited for."""

    def request(
        self, plan: Plan, text_tokens: int, images: float, steps: int, batch: int = 1
    ) -> RequestTimes:
        single = super().request(plan, text_tokens, images, steps, batch)
        met = self.generator.random(len(single.steps_ms)) < 0.2 * self.load
        waits = met * self.generator.exponential(8.0, len(met))
        return RequestTimes(
            prefill_ms=single.prefill_ms,
            steps_ms=tuple(ms + wait for ms, wait in zip(single.steps_ms, waits.tolist(), strict=True)),
        )


def test_medians_of_short_requests_that_meet_nobody_and_of_long_ones_that_do(tmp_path: Path) -> None:
    runner = Meeting(noise=0.01)
    predictor = PlanLatencyPredictor.fit(
        collect_profile(
            runner,
            SPACE,
            tmp_path / "p.parquet",
            text_tokens=(16, 64),
            plans=select_representative_plans(SPACE, 20),
            loads=(0.0, 0.7),
            rounds=8,
            decode_steps=10,
            background=runner.apply_load,
            warmup_runs=0,
        )
    )
    plan = SPACE.plans[100]
    runner.load = 0.7
    # Of three tokens three quarters meet nobody, of eleven a quarter.
    for new_tokens in (3, 7, 11):
        query = LatencyQuery(plan=plan, text_tokens=40, images=1, new_tokens=new_tokens, load=0.7)
        elapsed_ms = [runner.request(plan, 40, 1, new_tokens - 1) for _ in range(800)]
        middle = np.median([timed.prefill_ms + sum(timed.steps_ms) for timed in elapsed_ms])
        assert predictor.predict([query])[0][0] == pytest.approx(middle, rel=0.06)


def test_a_few_long_visits_do_not_tell_of_all_others(tmp_path: Path) -> None:
    def profiled(steps: int, plans: int) -> PlanProfile:
        return collect_profile(
            FakeRunner(),
            SPACE,
            tmp_path / "p.parquet",
            text_tokens=(16, 64),
            plans=select_representative_plans(SPACE, 20)[:plans],
            rounds=2,
            decode_steps=steps,
            warmup_runs=0,
        )

    profiled(4, 20)
    predictor = PlanLatencyPredictor.fit(profiled(12, 1))
    query = LatencyQuery(plan=SPACE.plans[100], text_tokens=40, images=1, new_tokens=65)
    timed = FakeRunner(noise=0.0).request(SPACE.plans[100], 40, 1, 64)
    assert predictor.predict([query])[0][0] == pytest.approx(timed.prefill_ms + sum(timed.steps_ms), rel=0.08)


def test_a_profile_of_one_load_tells_of_an_idle_machine_what_it_can(tmp_path: Path) -> None:
    runner = FakeRunner()
    predictor = PlanLatencyPredictor.fit(
        collect_profile(
            runner,
            SPACE,
            tmp_path / "p.parquet",
            text_tokens=(16, 64),
            plans=select_representative_plans(SPACE, 10),
            loads=(0.7,),
            rounds=2,
            decode_steps=3,
            background=runner.apply_load,
            warmup_runs=0,
        )
    )
    size: dict[str, Any] = {"text_tokens": 40, "images": 1, "new_tokens": 3}
    query = LatencyQuery(plan=SPACE.plans[100], **size)
    assert predictor.predict_all(**size)[0][100] == pytest.approx(predictor.predict([query])[0][0])
