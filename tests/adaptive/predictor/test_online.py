"""Learning on: margins keep their promise and medians follow, whatever a simulated machine does."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.predictor.online import WINDOW_SIZE, ConformalMargin, DriftCorrection, RunningMedian
from sparseflow.adaptive.profile import collect_profile, select_representative_plans
from sparseflow.errors import InputError
from tests.adaptive.fake_runner import FakeRunner, make_space

SPACE = make_space(8, 4)
LEVEL, OFF = 0.99, 0.005
"""Share of requests that shall be below, and how far from it a share over thousands may be."""
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


def step(index: int) -> float:
    return 2.0 if 700 <= index < 1400 else 1.0


def drift(index: int) -> float:
    return 1.0 + index / REQUESTS


def wave(index: int) -> float:
    return 1.0 + 0.3 * math.sin(index / 200)


def steady(index: int) -> float:
    return 1.0


@pytest.mark.parametrize(("change", "spike"), [(steady, 0.03), (drift, 0.0), (wave, 0.03), (step, 0.0)])
def test_coverage_and_medians_follow_the_machine(change: Callable[[int], float], spike: float) -> None:
    predictor, runner = PlanLatencyPredictor.from_dict(content()), FakeRunner(5, spike=spike)
    generator = np.random.default_rng(4)
    below, ratios = [], []
    for index in range(REQUESTS):
        runner.factor, runner.load = change(index), (0.0, 0.7)[index % 3 == 0]
        plan = SPACE.plans[generator.integers(len(SPACE))]
        text, new = int(generator.integers(16, 128)), int(generator.integers(1, 12))
        query = LatencyQuery(plan=plan, text_tokens=text, images=1, new_tokens=new, load=runner.load)
        timed = runner.request(plan, text, 1, new - 1)
        elapsed_ms = timed.prefill_ms + sum(timed.steps_ms)
        (p50,), (p99,) = predictor.predict([query])
        below.append(elapsed_ms <= p99)
        ratios.append(elapsed_ms / p50)
        predictor.observe(query, elapsed_ms, prefill_ms=timed.prefill_ms if spike else None)
    assert abs(np.mean(below) - LEVEL) <= OFF
    loaded = np.arange(REQUESTS) % 3 == 0
    for mask in (loaded, ~loaded):
        assert abs(np.mean(np.array(below)[mask]) - LEVEL) <= 2 * OFF
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
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("miss", [0.01, 0.05])
def test_margins_are_missed_as_often_as_they_may(kind: str, seed: int, miss: float) -> None:
    generator = np.random.default_rng(seed)
    retained, missed = ConformalMargin(miss, generator.normal(size=WINDOW_SIZE)), []
    for score in scores(kind, generator, 4000):
        missed.append(bool(score > retained.value))
        retained.add(float(score), missed=missed[-1])
        assert 0.0 <= retained.value < math.inf
    assert np.mean(missed) == pytest.approx(miss, abs=max(OFF, 0.15 * miss))


def test_without_adapting_a_wider_machine_is_missed_often() -> None:
    # What the adaptation is worth: the margin of a profile, on a machine that scatters five times as much.
    generator = np.random.default_rng(0)
    fixed = ConformalMargin(0.01, generator.normal(size=WINDOW_SIZE)).value
    assert np.mean(scores("wider", generator, 4000)[2000:] > fixed) > 0.2


def test_a_step_is_met_after_a_few_requests() -> None:
    # Idle on a machine that becomes twice as slow: the margin after some misses, the median after some more.
    predictor, runner = PlanLatencyPredictor.from_dict(content()), FakeRunner(3)
    runner.factor = 2.0
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    below = []
    for _ in range(60):
        timed = runner.request(query.plan, 64, 1, 5)
        elapsed_ms = timed.prefill_ms + sum(timed.steps_ms)
        below.append(elapsed_ms <= predictor.predict([query])[1][0])
        predictor.observe(query, elapsed_ms)
    assert sum(below[:4]) < 4 and sum(not item for item in below) <= 6 and all(below[20:])
    once = PlanLatencyPredictor.from_dict(content()).predict([query])[0][0]
    assert predictor.predict([query])[0][0] == pytest.approx(2.0 * once, rel=0.1)


def test_outliers_move_margins_and_not_medians() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    (p50,), (p99,) = predictor.predict([query])
    for index in range(200):
        predictor.observe(query, 20.0 * p50 if index % 20 == 7 else p50)
    (now50,), (now99,) = predictor.predict([query])
    assert now50 == pytest.approx(p50, rel=0.01) and now99 > 10.0 * p50 > p99


def test_phases_are_corrected_each_by_its_own_error() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=11)
    before = {name: low[0] for name, (low, _) in predictor.predict_phases([query]).items()}
    for _ in range(100):
        predictor.observe(
            query, 2.0 * before["prefill"] + 10 * before["decode"], prefill_ms=2.0 * before["prefill"]
        )
    after = {name: low[0] for name, (low, _) in predictor.predict_phases([query]).items()}
    assert after["prefill"] == pytest.approx(2.0 * before["prefill"], rel=0.02)
    assert after["decode"] == pytest.approx(before["decode"], rel=0.02)
    # A request of one token tells nothing of steps.
    single = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=1)
    for _ in range(100):
        predictor.observe(single, before["prefill"])
    second = {name: low[0] for name, (low, _) in predictor.predict_phases([query]).items()}
    assert second["prefill"] == pytest.approx(before["prefill"], rel=0.02)
    assert second["decode"] == after["decode"]


def test_a_load_of_which_nothing_was_seen_follows_the_others() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    idle = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    busy = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, load=0.7)
    (p50, other), _ = predictor.predict([idle, busy])
    for _ in range(60):
        predictor.observe(idle, 0.7 * p50)
    (current, then), _ = predictor.predict([idle, busy])
    assert current == pytest.approx(0.7 * p50, rel=0.02) and then == pytest.approx(0.7 * other, rel=0.1)
    # And then by what is seen of it, which does not change the idle machine.
    for _ in range(60):
        predictor.observe(busy, 1.5 * other)
    (still, existing), _ = predictor.predict([idle, busy])
    assert still == pytest.approx(current, rel=0.05) and existing == pytest.approx(1.5 * other, rel=0.05)


def test_what_is_met_beside_others_is_not_put_down_to_an_idle_machine() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    idle = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    busy = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, load=0.3)
    (p50, other), (p99, above) = predictor.predict([idle, busy])
    for index in range(400):
        predictor.observe(busy, other * (3.0 if index % 20 == 19 else 1.0))
    (still, _), (current, then) = predictor.predict([idle, busy])
    assert then > 1.5 * above
    assert still == pytest.approx(p50, rel=0.02) and current == pytest.approx(p99, rel=0.02)


def test_what_was_learnt_can_be_given_up() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    args = [item[0] for item in predictor.predict([query])]
    for index in range(40):
        predictor.observe(query, args[0] * (9.0 if index % 4 == 3 else 1.5))
    learned = [item[0] for item in predictor.predict([query])]
    assert learned[0] > 1.4 * args[0] and learned[1] > 3.0 * args[1]
    predictor.forget(0.0)
    assert [item[0] for item in predictor.predict([query])] == pytest.approx(learned)
    last = learned
    for _ in range(8):
        predictor.forget(0.5)
        current = [item[0] for item in predictor.predict([query])]
        assert args[0] <= current[0] <= last[0] and args[1] <= current[1] <= last[1]
        last = current
    assert last[0] == pytest.approx(args[0], rel=0.05)
    predictor.forget(1.0)
    assert [item[0] for item in predictor.predict([query])] == pytest.approx(args)
    with pytest.raises(InputError, match="fraction"):
        predictor.forget(1.5)


def test_a_margin_gives_up_the_latest_scores_last() -> None:
    retained = ConformalMargin(0.05, np.zeros(100))
    for score in (50.0, *[1.0] * 99):
        retained.add(score, missed=False)
    assert retained.value == 1.0
    retained.forget(0.5)
    assert retained.value == 1.0 and 50.0 not in retained.state.scores
    retained.forget(1.0)
    assert (
        retained.value == 0.0
        and retained.state.scores.tolist() == [0.0] * 100
        and retained.state.miss_rate == 0.05
    )


def test_a_crowd_that_met_an_idle_machine_is_not_remembered_for_ever() -> None:
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


def test_waiting_is_not_taken_for_work() -> None:
    predictor = PlanLatencyPredictor.from_dict(content())
    query = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, queued_ms=500.0)
    (p50,), _ = predictor.predict([query])
    for _ in range(100):
        predictor.observe(query, p50)
    assert predictor.predict([query])[0][0] == pytest.approx(p50)


def test_a_middle_is_a_weighted_median() -> None:
    median = RunningMedian()
    assert median.compute(0.3) == 0.3
    generator = np.random.default_rng(0)
    sampled = generator.normal(1.0, 0.1, 500)
    for item in sampled:
        median.add(item, 1.0)
    assert median.compute(0.0) == pytest.approx(np.median(sampled[-40:]), abs=0.05)
    assert RunningMedian(median.state).compute(0.0) == median.compute(0.0)
    # Nothing is so far off that it would be believed.
    for _ in range(100):
        median.add(50.0, 1.0)
    assert median.compute(0.0) <= math.log(20.0)


def test_factors_are_one_before_anything_is_seen() -> None:
    correction = DriftCorrection(3)
    assert correction.factors.tolist() == [1.0, 1.0, 1.0]
    correction.add(2.0, np.array([0.0, 1.0, 0.0]))
    assert 1.0 < correction.factors[1] < 2.0 and 1.0 < correction.factors[0] < correction.factors[1]
    assert DriftCorrection.from_state(correction.state).factors.tolist() == correction.factors.tolist()
