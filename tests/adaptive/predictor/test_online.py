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


def step(at: int) -> float:
    return 2.0 if 700 <= at < 1400 else 1.0


def drift(at: int) -> float:
    return 1.0 + at / REQUESTS


def wave(at: int) -> float:
    return 1.0 + 0.3 * math.sin(at / 200)


def steady(at: int) -> float:
    return 1.0


@pytest.mark.parametrize(("change", "spike"), [(steady, 0.03), (drift, 0.0), (wave, 0.03), (step, 0.0)])
def test_coverage_and_medians_follow_the_machine(change: Callable[[int], float], spike: float) -> None:
    found, runner = PlanLatencyPredictor.from_dict(content()), FakeRunner(5, spike=spike)
    generator = np.random.default_rng(4)
    below, ratios = [], []
    for at in range(REQUESTS):
        runner.factor, runner.load = change(at), (0.0, 0.7)[at % 3 == 0]
        plan = SPACE.plans[generator.integers(len(SPACE))]
        text, new = int(generator.integers(16, 128)), int(generator.integers(1, 12))
        ask = LatencyQuery(plan=plan, text_tokens=text, images=1, new_tokens=new, load=runner.load)
        timed = runner.request(plan, text, 1, new - 1)
        took = timed.prefill_ms + sum(timed.steps_ms)
        (p50,), (p99,) = found.predict([ask])
        below.append(took <= p99)
        ratios.append(took / p50)
        found.observe(ask, took, prefill_ms=timed.prefill_ms if spike else None)
    assert abs(np.mean(below) - LEVEL) <= OFF
    loaded = np.arange(REQUESTS) % 3 == 0
    for here in (loaded, ~loaded):
        assert abs(np.mean(np.array(below)[here]) - LEVEL) <= 2 * OFF
        assert abs(np.median(np.array(ratios)[here]) - 1.0) < 0.03


def scores(kind: str, generator: np.random.Generator, count: int) -> np.ndarray:
    """Relative errors of predictions."""
    calm = generator.normal(size=count)
    if kind == "heavy":
        return calm + (generator.random(count) < 0.05) * generator.pareto(1.5, size=count)
    if kind == "wider":
        return calm * np.where(np.arange(count) < count // 2, 1.0, 5.0)
    if kind == "trend":
        return calm + np.arange(count) / 500
    if kind == "bursts":
        return calm * np.where(np.arange(count) // 250 % 2, 4.0, 1.0)
    return calm


@pytest.mark.parametrize("kind", ["calm", "heavy", "wider", "trend", "bursts"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("miss", [0.01, 0.05])
def test_margins_are_missed_as_often_as_they_may(kind: str, seed: int, miss: float) -> None:
    generator = np.random.default_rng(seed)
    kept, missed = ConformalMargin(miss, generator.normal(size=WINDOW_SIZE)), []
    for score in scores(kind, generator, 4000):
        missed.append(bool(score > kept.value))
        kept.add(float(score), missed=missed[-1])
        assert 0.0 <= kept.value < math.inf
    assert np.mean(missed) == pytest.approx(miss, abs=max(OFF, 0.15 * miss))


def test_without_adapting_a_wider_machine_is_missed_often() -> None:
    # What the adaptation is worth: the margin of a profile, on a machine that scatters five times as much.
    generator = np.random.default_rng(0)
    fixed = ConformalMargin(0.01, generator.normal(size=WINDOW_SIZE)).value
    assert np.mean(scores("wider", generator, 4000)[2000:] > fixed) > 0.2


def test_a_step_is_met_after_a_few_requests() -> None:
    # Idle on a machine that becomes twice as slow: the margin after some misses, the median after some more.
    found, runner = PlanLatencyPredictor.from_dict(content()), FakeRunner(3)
    runner.factor = 2.0
    ask = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    below = []
    for _ in range(60):
        timed = runner.request(ask.plan, 64, 1, 5)
        took = timed.prefill_ms + sum(timed.steps_ms)
        below.append(took <= found.predict([ask])[1][0])
        found.observe(ask, took)
    assert sum(below[:4]) < 4 and sum(not each for each in below) <= 6 and all(below[20:])
    once = PlanLatencyPredictor.from_dict(content()).predict([ask])[0][0]
    assert found.predict([ask])[0][0] == pytest.approx(2.0 * once, rel=0.1)


def test_outliers_move_margins_and_not_medians() -> None:
    found = PlanLatencyPredictor.from_dict(content())
    ask = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    (p50,), (p99,) = found.predict([ask])
    for at in range(200):
        found.observe(ask, 20.0 * p50 if at % 20 == 7 else p50)
    (now50,), (now99,) = found.predict([ask])
    assert now50 == pytest.approx(p50, rel=0.01) and now99 > 10.0 * p50 > p99


def test_phases_are_corrected_each_by_its_own_error() -> None:
    found = PlanLatencyPredictor.from_dict(content())
    ask = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=11)
    before = {name: low[0] for name, (low, _) in found.predict_phases([ask]).items()}
    for _ in range(100):
        found.observe(
            ask, 2.0 * before["prefill"] + 10 * before["decode"], prefill_ms=2.0 * before["prefill"]
        )
    after = {name: low[0] for name, (low, _) in found.predict_phases([ask]).items()}
    assert after["prefill"] == pytest.approx(2.0 * before["prefill"], rel=0.02)
    assert after["decode"] == pytest.approx(before["decode"], rel=0.02)
    # A request of one token tells nothing of steps.
    single = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=1)
    for _ in range(100):
        found.observe(single, before["prefill"])
    again = {name: low[0] for name, (low, _) in found.predict_phases([ask]).items()}
    assert again["prefill"] == pytest.approx(before["prefill"], rel=0.02)
    assert again["decode"] == after["decode"]


def test_a_load_of_which_nothing_was_seen_follows_the_others() -> None:
    found = PlanLatencyPredictor.from_dict(content())
    idle = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    busy = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, load=0.7)
    (p50, other), _ = found.predict([idle, busy])
    for _ in range(60):
        found.observe(idle, 0.7 * p50)
    (now, then), _ = found.predict([idle, busy])
    assert now == pytest.approx(0.7 * p50, rel=0.02) and then == pytest.approx(0.7 * other, rel=0.1)
    # And then by what is seen of it, which does not change the idle machine.
    for _ in range(60):
        found.observe(busy, 1.5 * other)
    (still, there), _ = found.predict([idle, busy])
    assert still == pytest.approx(now, rel=0.05) and there == pytest.approx(1.5 * other, rel=0.05)


def test_what_is_met_beside_others_is_not_put_down_to_an_idle_machine() -> None:
    found = PlanLatencyPredictor.from_dict(content())
    idle = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    busy = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, load=0.3)
    (p50, other), (p99, above) = found.predict([idle, busy])
    for at in range(400):
        found.observe(busy, other * (3.0 if at % 20 == 19 else 1.0))
    (still, _), (now, then) = found.predict([idle, busy])
    assert then > 1.5 * above
    assert still == pytest.approx(p50, rel=0.02) and now == pytest.approx(p99, rel=0.02)


def test_what_was_learnt_can_be_given_up() -> None:
    found = PlanLatencyPredictor.from_dict(content())
    ask = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    given = [each[0] for each in found.predict([ask])]
    for at in range(40):
        found.observe(ask, given[0] * (9.0 if at % 4 == 3 else 1.5))
    learnt = [each[0] for each in found.predict([ask])]
    assert learnt[0] > 1.4 * given[0] and learnt[1] > 3.0 * given[1]
    found.forget(0.0)
    assert [each[0] for each in found.predict([ask])] == pytest.approx(learnt)
    last = learnt
    for _ in range(8):
        found.forget(0.5)
        now = [each[0] for each in found.predict([ask])]
        assert given[0] <= now[0] <= last[0] and given[1] <= now[1] <= last[1]
        last = now
    assert last[0] == pytest.approx(given[0], rel=0.05)
    found.forget(1.0)
    assert [each[0] for each in found.predict([ask])] == pytest.approx(given)
    with pytest.raises(InputError, match="fraction"):
        found.forget(1.5)


def test_a_margin_gives_up_the_latest_scores_last() -> None:
    kept = ConformalMargin(0.05, np.zeros(100))
    for score in (50.0, *[1.0] * 99):
        kept.add(score, missed=False)
    assert kept.value == 1.0
    kept.forget(0.5)
    assert kept.value == 1.0 and 50.0 not in kept.state.scores
    kept.forget(1.0)
    assert kept.value == 0.0 and kept.state.scores.tolist() == [0.0] * 100 and kept.state.miss_rate == 0.05


def test_a_crowd_that_met_an_idle_machine_is_not_remembered_for_ever() -> None:
    found = PlanLatencyPredictor.from_dict(content())
    idle = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6)
    busy = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, load=0.7)
    (p50, other), (p99, _) = found.predict([idle, busy])
    for _ in range(10):
        found.observe(idle, 5.0 * p50)
    assert found.predict([idle])[1][0] > 4.0 * p50
    for _ in range(150):
        found.observe(busy, other)
    assert found.predict([idle])[1][0] > 4.0 * p50
    for _ in range(1500):
        found.observe(busy, other)
    (now,), (high,) = found.predict([idle])
    assert now == pytest.approx(p50, rel=0.1) and high == pytest.approx(p99, rel=0.1)


def test_waiting_is_not_taken_for_work() -> None:
    found = PlanLatencyPredictor.from_dict(content())
    ask = LatencyQuery(plan=SPACE.plans[50], text_tokens=64, images=1, new_tokens=6, queued_ms=500.0)
    (p50,), _ = found.predict([ask])
    for _ in range(100):
        found.observe(ask, p50)
    assert found.predict([ask])[0][0] == pytest.approx(p50)


def test_a_middle_is_a_weighted_median() -> None:
    found = RunningMedian()
    assert found.compute(0.3) == 0.3
    generator = np.random.default_rng(0)
    drawn = generator.normal(1.0, 0.1, 500)
    for each in drawn:
        found.add(each, 1.0)
    assert found.compute(0.0) == pytest.approx(np.median(drawn[-40:]), abs=0.05)
    assert RunningMedian(found.state).compute(0.0) == found.compute(0.0)
    # Nothing is so far off that it would be believed.
    for _ in range(100):
        found.add(50.0, 1.0)
    assert found.compute(0.0) <= math.log(20.0)


def test_factors_are_one_before_anything_is_seen() -> None:
    found = DriftCorrection(3)
    assert found.factors.tolist() == [1.0, 1.0, 1.0]
    found.add(2.0, np.array([0.0, 1.0, 0.0]))
    assert 1.0 < found.factors[1] < 2.0 and 1.0 < found.factors[0] < found.factors[1]
    assert DriftCorrection.from_state(found.state).factors.tolist() == found.factors.tolist()
