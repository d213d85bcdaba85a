"""Plan features, padding buckets and decode step buckets, and predictions that depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.predictor.features import (
    PaddingBuckets,
    compute_plan_features,
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
from tests.adaptive.fake_runner import VISION_TOKENS, FakeRunner, make_space

SPACE = make_space()
SIZES = {"prompts": [16, 32, 64], "contexts": [8, 32, 64]}


def round_up(sizes: list[int], tokens: int) -> int:
    return next((size for size in sizes if size >= tokens), tokens)


def test_pad_prompts_rounds_up() -> None:
    padding = PaddingBuckets.from_config(SIZES)
    tokens = np.arange(1.0, 90.0)
    assert padding.pad_prompts(tokens).tolist() == [
        round_up(SIZES["prompts"], int(count)) for count in tokens
    ]


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 30])
def test_mean_context_averages_padded_steps(steps: int) -> None:
    padding = PaddingBuckets.from_config(SIZES)
    tokens = np.arange(1.0, 64.0 - steps)
    expected = [
        np.mean([round_up(SIZES["contexts"], int(count) + index) for index in range(1, max(steps, 1) + 1)])
        for count in tokens
    ]
    np.testing.assert_allclose(padding.mean_context(tokens, np.full(len(tokens), float(steps))), expected)


def test_padding_without_buckets_is_exact() -> None:
    padding, tokens = PaddingBuckets.from_config({"runner": "eager"}), np.array([3.0, 7.0])
    assert padding.pad_prompts(tokens).tolist() == [3.0, 7.0]
    assert padding.mean_context(tokens, np.array([4.0, 0.0])).tolist() == [5.5, 7.5]


class PaddedRunner(FakeRunner):
    """Prompts take the time of their padded length."""

    sizes = (256, 512, 768, 1024)

    def run(self, plan, text_tokens, *, steps, batch=1) -> RequestTimes:  # type: ignore[no-untyped-def]
        tokens = text_tokens + (VISION_TOKENS[plan.tier] if plan.tier else 0)
        padded = next(size for size in self.sizes if size >= tokens)
        return RequestTimes(
            prefill_ms=0.01 * padded * (1.0 + 0.1 * len(plan.blocks)), steps_ms=(1.0,) * steps
        )


@pytest.mark.parametrize("knows_padding", [True, False])
def test_prediction_of_padded_prompts_needs_known_padding(knows_padding: bool, tmp_path: Path) -> None:
    runner = PaddedRunner()
    if knows_padding:
        runner.config = {"runner": "engine", "prompts": list(PaddedRunner.sizes), "contexts": []}
    plans = make_space()
    predictor = PlanLatencyPredictor.fit(
        collect_profile(
            runner,
            plans,
            tmp_path / "p.parquet",
            text_tokens=(10, 100, 250, 400),
            plans=select_representative_plans(plans, 9),
            rounds=1,
            decode_steps=1,
            warmup_runs=0,
        )
    )
    worst = 0.0
    for plan in plans.plans[::23]:
        for text in (20, 60, 180, 240, 300):
            query = LatencyQuery(plan=plan, text_tokens=text, images=1, new_tokens=2)
            measured = runner.run(plan, text, steps=1)
            p50 = predictor.predict([query])[0].item()
            all_p50 = predictor.predict_all(text_tokens=text, images=1, new_tokens=2)[0]
            assert all_p50[plans.plans.index(plan)] == pytest.approx(p50)
            worst = max(worst, abs(p50 / (measured.prefill_ms + 1.0) - 1.0))
    assert worst < 0.02 if knows_padding else worst > 0.1


def test_plan_features_are_sums_over_blocks() -> None:
    geometry = SPACE.geometry
    increments = np.array([0.7, 0.5, 0.25, 0.125, 0.0, 2.0])
    u = {k: increments[1] + increments[2 : 2 + index].sum() for index, k in enumerate(geometry.top_ks)}
    plans = [*SPACE.plans[::7], Plan(tier=None, insertion_position=2, top_k=2, blocks=(0, 1, 9))]
    for plan, full, remaining in zip(
        plans,
        compute_plan_features(plans, geometry),
        compute_plan_features(plans, geometry, inserted=True),
        strict=True,
    ):
        cost = [u[8] if block < plan.insertion_position else u[max(plan.top_k, 4)] for block in plan.blocks]
        assert full @ increments == pytest.approx(0.7 + sum(cost))
        assert remaining @ increments == pytest.approx(0.7 + sum(cost[plan.insertion_position :]))


def test_count_steps_per_bucket_assigns_each_step_once() -> None:
    steps = np.arange(40.0)
    counts = count_steps_per_bucket(steps, 4)
    assert (counts.sum(axis=0) == steps).all()
    assert counts[:, 6].tolist() == [1.0, 2.0, 3.0, 0.0] and counts[:, 39].tolist() == [1.0, 2.0, 4.0, 32.0]
    assert count_steps_per_bucket(np.array(5.0), 2).tolist() == [1.0, 4.0]
    assert count_steps_per_bucket(steps[:, None], 3).shape == (3, 40, 1)


def test_last_step_bucket_has_enough_steps() -> None:
    assert [count_step_buckets(steps) for steps in (1, 2, 4, 5, 10, 11, 16, 23)] == [1, 2, 2, 3, 3, 4, 4, 5]
    for steps in range(1, 200):
        last = count_step_buckets(steps) - 1
        assert 2 * (steps - get_bucket_start(last)) >= get_bucket_start(last)


class InterruptedRunner(FakeRunner):
    """Under load, steps wait for the prompts of arriving requests at random."""

    def request(
        self, plan: Plan, text_tokens: int, images: float, steps: int, batch: int = 1
    ) -> RequestTimes:
        single = super().request(plan, text_tokens, images, steps, batch)
        interrupted = self.generator.random(len(single.steps_ms)) < 0.2 * self.load
        waits = interrupted * self.generator.exponential(8.0, len(interrupted))
        return RequestTimes(
            prefill_ms=single.prefill_ms,
            steps_ms=tuple(ms + wait for ms, wait in zip(single.steps_ms, waits.tolist(), strict=True)),
        )


def test_medians_of_interrupted_requests_depend_on_length(tmp_path: Path) -> None:
    runner = InterruptedRunner(noise=0.01)
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
    # Three quarters of the requests of three tokens are not interrupted, and a quarter of those of eleven.
    for new_tokens in (3, 7, 11):
        query = LatencyQuery(plan=plan, text_tokens=40, images=1, new_tokens=new_tokens, load=0.7)
        timings = [runner.request(plan, 40, 1, new_tokens - 1) for _ in range(800)]
        median_ms = np.median([timed.prefill_ms + sum(timed.steps_ms) for timed in timings])
        assert predictor.predict([query])[0][0] == pytest.approx(median_ms, rel=0.06)


def test_few_long_measurements_do_not_add_step_buckets(tmp_path: Path) -> None:
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


def test_profile_of_one_load_predicts_idle_device(tmp_path: Path) -> None:
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
