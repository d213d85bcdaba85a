"""Online learning: coverage and medians on simulated devices that change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.predictor.online import (
    WINDOW_SIZE,
    ConformalMargin,
    DriftCorrection,
    MarginState,
    RunningMedian,
)
from sparseflow.adaptive.profile import collect_profile, select_representative_plans
from sparseflow.errors import InputError
from tests.adaptive.fake_runner import FakeRunner, make_space

SPACE = make_space(8, 4)
LEVEL, TOLERANCE = 0.99, 0.005
"""Requested coverage, and the tolerance of a coverage over thousands of requests."""
REQUESTS = 2000


@cache
def content() -> dict[str, object]:
    runner = FakeRunner()
    with TemporaryDirectory() as scratch:
        data = collect_profile(
            runner,
            SPACE,
            Path(scratch) / "p.parquet",
            text_tokens=(16, 128),
            plans=select_representative_plans(SPACE, 18),
            loads=(0.0, 0.7),
            rounds=3,
            decode_steps=6,
            background=runner.apply_load,
            warmup_runs=0,
        )
    return PlanLatencyPredictor.fit(data).to_dict()


def predict_one(predictor: PlanLatencyPredictor, query: LatencyQuery) -> list[float]:
    return [values[0] for values in predictor.predict([query])]


def make_margin(miss_rate: float, scores: np.ndarray) -> ConformalMargin:
    return ConformalMargin(MarginState(miss_rate=miss_rate, scores=scores), miss_rate)


def step(index: int) -> float:
    return 2.0 if 700 <= index < 1400 else 1.0


def drift(index: int) -> float:
    return 1.0 + index / REQUESTS


def wave(index: int) -> float:
    return 1.0 + 0.3 * math.sin(index / 200)


def steady(index: int) -> float:
    return 1.0


@pytest.mark.parametrize(("change", "spike"), [(steady, 0.03), (drift, 0.0), (wave, 0.03), (step, 0.0)])
def test_observe_keeps_coverage_and_medians_on_changing_device(
    change: Callable[[int], float], spike: float
) -> None:
    predictor, runner = PlanLatencyPredictor.from_dict(content()), FakeRunner(5, spike=spike)
    generator = np.random.default_rng(4)
    below, ratios = [], []
    for index in range(REQUESTS):
        runner.factor, runner.load = change(index), (0.0, 0.7)[index % 3 == 0]
        plan = SPACE.plans[generator.integers(len(SPACE))]
        text, new = int(generator.choice([16, 25, 40, 64, 90, 127])), int(generator.integers(1, 12))
        query = LatencyQuery(plan=plan, text_tokens=text, images=1, new_tokens=new, load=runner.load)
        timed = runner.request(plan, text, 1, new - 1)
        elapsed_ms = timed.prefill_ms + sum(timed.steps_ms)
        (p50,), (p99,) = predictor.predict([query])
        below.append(elapsed_ms <= p99)
        ratios.append(elapsed_ms / p50)
        predictor.observe(query, elapsed_ms, prefill_ms=timed.prefill_ms if spike else None)
    assert abs(np.mean(below) - LEVEL) <= TOLERANCE
    loaded = np.arange(REQUESTS) % 3 == 0
    for mask in (loaded, ~loaded):
        assert abs(np.mean(np.array(below)[mask]) - LEVEL) <= 2 * TOLERANCE
        assert abs(np.median(np.array(ratios)[mask]) - 1.0) < 0.03


def scores(kind: str, generator: np.random.Generator, count: int) -> np.ndarray:
    """Relative errors of predictions."""
    noise = generator.normal(size=count)
    if kind == "heavy":
        return noise + (generator.random(count) < 0.05) * generator.pareto(1.5, size=count)
    if kind == "wider":
        return noise * np.where(np.arange(count) < count // 2, 1.0, 5.0)
    if kind == "trend":
        return noise + np.arange(count) / 500
    if kind == "bursts":
        return noise * np.where(np.arange(count) // 250 % 2, 4.0, 1.0)
    return noise


@pytest.mark.parametrize("kind", ["calm", "heavy", "wider", "trend", "bursts"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("miss", [0.01, 0.05])
def test_margin_miss_rate_converges_to_target(kind: str, seed: int, miss: float) -> None:
    generator = np.random.default_rng(seed)
    margin, missed = make_margin(miss, generator.normal(size=WINDOW_SIZE)), []
    for score in scores(kind, generator, 4000):
        missed.append(bool(score > margin.value))
        margin.add(float(score), missed=missed[-1])
        assert 0.0 <= margin.value < math.inf
    assert np.mean(missed) == pytest.approx(miss, abs=max(TOLERANCE, 0.15 * miss))


def test_fixed_margin_on_noisier_device_is_missed_often() -> None:
    generator = np.random.default_rng(0)
    fixed = make_margin(0.01, generator.normal(size=WINDOW_SIZE)).value
    assert np.mean(scores("wider", generator, 4000)[2000:] > fixed) > 0.2


def test_observe_adapts_to_slower_device_within_few_requests() -> None:
    predictor, runner = PlanLatencyPredictor.from_dict(content()), FakeRunner(3)
    runner.factor = 2.0
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    below = []
    for _ in range(60):
        timed = runner.request(query.plan, 64, 1, 5)
        elapsed_ms = timed.prefill_ms + sum(timed.steps_ms)
        below.append(elapsed_ms <= predictor.predict([query])[1][0])
        predictor.observe(query, elapsed_ms)
    assert sum(below[:4]) < 4 and below.count(False) <= 6 and all(below[20:])
    initial_ms = PlanLatencyPredictor.from_dict(content()).predict([query])[0][0]
    assert predictor.predict([query])[0][0] == pytest.approx(2.0 * initial_ms, rel=0.1)


def test_observe_outliers_raises_margin_and_not_median() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    (p50,), (p99,) = predictor.predict([query])
    for index in range(200):
        predictor.observe(query, 20.0 * p50 if index % 20 == 7 else p50)
    (new_p50,), (new_p99,) = predictor.predict([query])
    assert new_p50 == pytest.approx(p50, rel=0.01) and new_p99 > 10.0 * p50 > p99


def test_observe_with_prefill_time_corrects_each_phase() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=11)
    first = replace(query, new_tokens=1)

    def predict_phases() -> tuple[float, float]:
        prefill_ms, total_ms = predictor.predict([first, query])[0]
        return prefill_ms, total_ms - prefill_ms

    prefill_ms, decode_ms = predict_phases()
    for _ in range(100):
        predictor.observe(query, 2.0 * prefill_ms + decode_ms, prefill_ms=2.0 * prefill_ms)
    corrected = predict_phases()
    assert corrected == pytest.approx((2.0 * prefill_ms, decode_ms), rel=0.02)
    # A request of one token has no decode steps.
    for _ in range(100):
        predictor.observe(first, prefill_ms)
    new_prefill_ms, new_decode_ms = predict_phases()
    assert new_prefill_ms == pytest.approx(prefill_ms, rel=0.02)
    assert new_decode_ms == pytest.approx(corrected[1])


def test_observe_corrects_unobserved_loads() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    idle = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    busy = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, load=0.7)
    (p50, other), _ = predictor.predict([idle, busy])
    for _ in range(60):
        predictor.observe(idle, 0.7 * p50)
    (current, then), _ = predictor.predict([idle, busy])
    assert current == pytest.approx(0.7 * p50, rel=0.02) and then == pytest.approx(0.7 * other, rel=0.1)
    # Observations at the load itself do not change the idle device.
    for _ in range(60):
        predictor.observe(busy, 1.5 * other)
    (still, existing), _ = predictor.predict([idle, busy])
    assert still == pytest.approx(current, rel=0.05) and existing == pytest.approx(1.5 * other, rel=0.05)


def test_observe_under_load_keeps_idle_predictions() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    idle = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    busy = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, load=0.3)
    (p50, other), (p99, above) = predictor.predict([idle, busy])
    for index in range(400):
        predictor.observe(busy, other * (3.0 if index % 20 == 19 else 1.0))
    (still, _), (current, then) = predictor.predict([idle, busy])
    assert then > 1.5 * above
    assert still == pytest.approx(p50, rel=0.02) and current == pytest.approx(p99, rel=0.02)


def test_forget_returns_to_calibration() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    initial = predict_one(predictor, query)
    for index in range(40):
        predictor.observe(query, initial[0] * (9.0 if index % 4 == 3 else 1.5))
    learned = predict_one(predictor, query)
    assert learned[0] > 1.4 * initial[0] and learned[1] > 3.0 * initial[1]
    predictor.forget(0.0)
    assert predict_one(predictor, query) == pytest.approx(learned)
    last = learned
    for _ in range(8):
        predictor.forget(0.5)
        current = predict_one(predictor, query)
        assert initial[0] <= current[0] <= last[0] and initial[1] <= current[1] <= last[1]
        last = current
    assert last[0] == pytest.approx(initial[0], rel=0.05)
    predictor.forget(1.0)
    assert predict_one(predictor, query) == pytest.approx(initial)
    with pytest.raises(InputError, match="fraction"):
        predictor.forget(1.5)


def test_margin_forget_removes_oldest_scores_first() -> None:
    margin = make_margin(0.05, np.zeros(100))
    for score in (50.0, *[1.0] * 99):
        margin.add(score, missed=False)
    assert margin.value == 1.0
    margin.forget(0.5)
    assert margin.value == 1.0 and 50.0 not in margin.state.scores
    margin.forget(1.0)
    assert (
        margin.value == 0.0 and margin.state.scores.tolist() == [0.0] * 100 and margin.state.miss_rate == 0.05
    )


def test_margin_of_unused_load_returns_to_calibration() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    idle = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    busy = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, load=0.7)
    (p50, other), (p99, _) = predictor.predict([idle, busy])
    for _ in range(10):
        predictor.observe(idle, 5.0 * p50)
    assert predictor.predict([idle])[1][0] > 4.0 * p50
    for _ in range(150):
        predictor.observe(busy, other)
    assert predictor.predict([idle])[1][0] > 4.0 * p50
    for _ in range(1500):
        predictor.observe(busy, other)
    (current,), (high,) = predictor.predict([idle])
    assert current == pytest.approx(p50, rel=0.1) and high == pytest.approx(p99, rel=0.1)


def test_observe_ignores_queueing_time() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, queued_ms=500.0)
    (p50,), _ = predictor.predict([query])
    for _ in range(100):
        predictor.observe(query, p50)
    assert predictor.predict([query])[0][0] == pytest.approx(p50)


def test_running_median_follows_latest_observations() -> None:
    median = RunningMedian()
    assert median.compute(0.3) == 0.3
    generator = np.random.default_rng(0)
    sampled = generator.normal(1.0, 0.1, 500)
    for log in sampled:
        median.add(log, 1.0)
    assert median.compute(0.0) == pytest.approx(np.median(sampled[-40:]), abs=0.05)
    # Observations are clipped to a factor of 20.
    for _ in range(100):
        median.add(50.0, 1.0)
    assert median.compute(0.0) <= math.log(20.0)


def test_factors_without_observations_are_one() -> None:
    correction = DriftCorrection.create(3)
    assert correction.compute_factors().tolist() == [1.0, 1.0, 1.0]
    correction.add(2.0, np.array([0.0, 1.0, 0.0]))
    other, observed, _ = correction.compute_factors()
    assert 1.0 < other < observed < 2.0
