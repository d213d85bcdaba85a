"""Predictor: accuracy, coverage, monotonicity and files."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.predictor import COMPLETED_STAGES, LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.profile import PlanProfile, collect_profile, select_representative_plans
from sparseflow.errors import FileFormatError, InputError, PlanError
from tests.adaptive.fake_runner import (
    VISION_TOKENS,
    FakeRunner,
    compute_prefill_ms,
    compute_step_ms,
    make_space,
)
from tests.conformance import check_artifact_file

SPACE = make_space()
LOADS = (0.0, 0.35, 0.7)


@cache
def profiled(
    noise: float = 0.03, spike: float = 0.0, loads: tuple[float, ...] = LOADS, batches: tuple[int, ...] = (1,)
) -> PlanProfile:
    """27 of 225 plans at three lengths."""
    runner = FakeRunner(noise=noise, spike=spike)
    with TemporaryDirectory() as scratch:
        return collect_profile(
            runner,
            SPACE,
            Path(scratch) / "p.parquet",
            text_tokens=(16, 64, 256),
            plans=select_representative_plans(SPACE, 27),
            loads=loads,
            batch_sizes=batches,
            rounds=4,
            decode_steps=12,
            background=runner.apply_load,
            warmup_runs=0,
        )


@cache
def content(**options: Any) -> str:
    return json.dumps(PlanLatencyPredictor.fit(profiled(**options)).to_dict())


def fitted(**options: Any) -> PlanLatencyPredictor:
    """A new predictor, which the test may change."""
    return PlanLatencyPredictor.from_dict(json.loads(content(**options)))


def sample_query(generator: np.random.Generator, *, load: float = 0.0, batch: int = 1) -> LatencyQuery:
    return LatencyQuery(
        plan=SPACE.plans[generator.integers(len(SPACE))],
        text_tokens=int(generator.choice([16, 23, 40, 64, 97, 130, 175, 210, 255])),
        images=1,
        new_tokens=int(generator.choice([1, 2, 3, 5, 8, 12, 17, 24])),
        load=load,
        batch=batch,
    )


def compute_median_ms(query: LatencyQuery) -> float:
    """Median latency by the formula of `FakeRunner`."""
    assert query.plan.tier is not None
    prompt = query.text_tokens + query.images * VISION_TOKENS[query.plan.tier]
    steps = sum(
        compute_step_ms(query.plan, prompt + 1 + index, query.batch) for index in range(query.new_tokens - 1)
    )
    return (1.0 + 1.5 * query.load**2) * (
        compute_prefill_ms(query.plan, query.text_tokens, query.images) + steps
    )


def measure_total_ms(runner: FakeRunner, query: LatencyQuery) -> float:
    runner.load = query.load
    timed = runner.request(query.plan, query.text_tokens, query.images, query.new_tokens - 1, query.batch)
    return timed.prefill_ms + sum(timed.steps_ms)


@pytest.mark.parametrize("load", LOADS)
def test_predict_unmeasured_plans_and_lengths_is_accurate(load: float) -> None:
    generator = np.random.default_rng(1)
    queries = [sample_query(generator, load=load) for _ in range(300)]
    p50, p99 = fitted().predict(queries)
    errors = np.abs(p50 / [compute_median_ms(query) for query in queries] - 1.0)
    assert errors.mean() < 0.02 and errors.max() < 0.08
    assert (p99 > p50).all()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("spike", [0.0, 0.02])
def test_upper_prediction_covers_requests(load: float, spike: float) -> None:
    generator, runner = np.random.default_rng(2), FakeRunner(7, spike=spike)
    queries = [sample_query(generator, load=load) for _ in range(1200)]
    _, p99 = fitted(spike=spike).predict(queries)
    below = np.mean(
        [measure_total_ms(runner, query) <= limit for query, limit in zip(queries, p99, strict=True)]
    )
    assert 0.98 <= below <= 1.0


def test_predict_batches_is_accurate() -> None:
    generator, predictor = np.random.default_rng(3), fitted(loads=(0.0,), batches=(1, 4, 8))
    for batch, limit in ((1, 0.03), (2, 0.12), (4, 0.03), (8, 0.03)):
        queries = [sample_query(generator, batch=batch) for _ in range(100)]
        p50, _ = predictor.predict(queries)
        assert np.mean(np.abs(p50 / [compute_median_ms(query) for query in queries] - 1.0)) < limit


def test_predict_fast_first_step_is_accurate() -> None:
    profile = profiled(batches=(1, 8), loads=(0.0,), noise=0.01)
    measurements = [
        replace(
            measurement,
            steps_ms=(
                measurement.steps_ms[0] / (1.0 if measurement.batch == 1 else 3.0),
                *measurement.steps_ms[1:],
            ),
        )
        for measurement in profile.successful
    ]
    predictor = PlanLatencyPredictor.fit(
        PlanProfile(metadata=profile.metadata, measurements=tuple(measurements))
    )
    generator = np.random.default_rng(4)
    for batch, share in ((1, 1.0), (8, 1.0 / 3.0)):
        for tokens in (1, 2, 3, 25):
            queries = [replace(sample_query(generator, batch=batch), new_tokens=tokens) for _ in range(50)]
            saved_ms = []
            for query in queries:
                assert query.plan.tier is not None
                prompt = query.text_tokens + VISION_TOKENS[query.plan.tier]
                saved_ms.append((tokens > 1) * (1.0 - share) * compute_step_ms(query.plan, prompt + 1, batch))
            expected = np.array([compute_median_ms(query) for query in queries]) - saved_ms
            assert np.abs(predictor.predict(queries)[0] / expected - 1.0).mean() < 0.03


def test_fit_to_single_steps_extrapolates() -> None:
    profile = profiled()
    short = tuple(
        replace(measurement, steps_ms=measurement.steps_ms[:1]) for measurement in profile.successful
    )
    predictor = PlanLatencyPredictor.fit(PlanProfile(metadata=profile.metadata, measurements=short))
    generator = np.random.default_rng(5)
    queries = [replace(sample_query(generator), new_tokens=9) for _ in range(50)]
    errors = np.abs(predictor.predict(queries)[0] / [compute_median_ms(query) for query in queries] - 1.0)
    assert errors.mean() < 0.03


def test_held_out_error_matches_noise() -> None:
    predictor = fitted()
    # The medians of four noisy runs have an error of 2 to 3 %.
    assert 0.005 < predictor.held_out_error < 0.05


def test_upper_prediction_of_many_steps_is_below_sum_of_upper_predictions() -> None:
    predictor = fitted(spike=0.02)
    first = LatencyQuery(plan=SPACE.plans[100], text_tokens=64, images=1, new_tokens=1)
    long = replace(first, new_tokens=65)
    second = replace(first, new_tokens=2)
    median_ms, upper_ms = predictor.predict([first, second, long])
    margins_ms = upper_ms - median_ms
    single_step_margin_ms = math.sqrt(margins_ms[1] ** 2 - margins_ms[0] ** 2)
    assert margins_ms[2] < 0.5 * (margins_ms[0] + 64 * single_step_margin_ms)


QUERIES = st.builds(
    lambda plan_index, text, images, new, batch, load, queued, after: LatencyQuery(
        plan=SPACE.plans[plan_index],
        text_tokens=text,
        images=images,
        new_tokens=new,
        batch=batch,
        load=load,
        queued_ms=queued,
        after=after,
    ),
    st.integers(0, 224),
    st.integers(0, 3000),
    st.integers(1, 4) | st.floats(1e-3, 4.0),
    st.integers(1, 2000),
    st.integers(1, 20),
    st.floats(0, 1),
    st.floats(0, 1e4),
    st.sampled_from(COMPLETED_STAGES),
)


def increase(query: LatencyQuery, field_name: str, by: int) -> LatencyQuery | None:
    """The same request with a larger value of a field; None if there is none."""
    plan = query.plan
    if field_name == "load":
        return replace(query, load=min(query.load + by / 1000, 1.0))
    if field_name == "queued_ms":
        return replace(query, queued_ms=query.queued_ms + by)
    if field_name == "top_k":
        return replace(query, plan=replace(plan, top_k=min(plan.top_k + by % 5, 8)))
    if field_name == "blocks":
        remaining = [block for block in range(16) if block not in plan.blocks]
        return replace(query, plan=replace(plan, blocks=tuple(sorted([*plan.blocks, *remaining[: by % 5]]))))
    if field_name == "tier":
        return replace(query, plan=replace(plan, tier="medium" if plan.tier == "low" else "high"))
    if field_name == "insertion_position":
        later = min(plan.insertion_position + by % 5, 5)
        retained = sorted({*plan.blocks, *range(later)})
        return (
            replace(query, plan=replace(plan, insertion_position=later, blocks=tuple(retained)))
            if query.after != "insertion"
            else None
        )
    if field_name == "after":
        return replace(
            query, after=COMPLETED_STAGES[max(COMPLETED_STAGES.index(query.after) - 1 - by % 2, 0)]
        )
    return replace(query, **{field_name: getattr(query, field_name) + by})


@cache
def drifted() -> PlanLatencyPredictor:
    """A predictor that has observed requests whose latency drifts by load."""
    predictor, generator = fitted(batches=(1, 4), spike=0.02), np.random.default_rng(0)
    for number in range(300):
        query = sample_query(generator, load=(0.0, 0.2, 0.9)[number % 3])
        predictor.observe(
            query, compute_median_ms(query) * (2.0, 0.4, 1.0)[number % 3] * math.exp(generator.normal() / 5)
        )
    return predictor


@settings(max_examples=80, deadline=None)
@given(
    query=QUERIES, by=st.integers(0, 700),
    field_name=st.sampled_from(
        ["text_tokens", "images", "new_tokens", "batch", "load", "queued_ms", "top_k", "blocks", "tier",
         "insertion_position", "after"]
    ),
)  # fmt: skip
def test_predict_is_monotone(query: LatencyQuery, by: int, field_name: str) -> None:
    more = increase(query, field_name, by)
    if more is None:
        return
    for predictor in (_plain(), drifted()):
        p50, p99 = predictor.predict([query, more])
        assert p50[1] >= p50[0] * (1 - 1e-12) and p99[1] >= p99[0] * (1 - 1e-12)
        assert (p99 >= p50).all() and np.isfinite(p99).all() and (p50 > 0.0).all()


@cache
def _plain() -> PlanLatencyPredictor:
    return fitted(batches=(1, 4), spike=0.02)


@settings(max_examples=30, deadline=None)
@given(
    text=st.integers(0, 500), images=st.integers(0, 3) | st.floats(0.0, 3.0), new=st.integers(1, 300),
    batch=st.integers(1, 9), load=st.floats(0, 1), queued=st.floats(0, 100),
    after=st.sampled_from(COMPLETED_STAGES),
)  # fmt: skip
def test_predict_all_equals_predict(
    text: int, images: float, new: int, batch: int, load: float, queued: float, after: Any
) -> None:
    predictor = drifted()
    size: dict[str, Any] = {"text_tokens": text, "images": images, "new_tokens": new, "batch": batch}
    size |= {"load": load, "queued_ms": queued, "after": after}
    plans = SPACE.plans if images else [replace(plan, tier=None) for plan in SPACE.plans]
    combined = predictor.predict_all(**size)
    single = predictor.predict([LatencyQuery(plan=plan, **size) for plan in plans])
    np.testing.assert_allclose(combined, single, rtol=1e-12)
    assert combined[0].shape == (225,)


@cache
def with_text() -> PlanLatencyPredictor:
    """A predictor of a profile with and without images, which separates encoding from prompt tokens."""
    runner = FakeRunner()
    with TemporaryDirectory() as scratch:
        plans = select_representative_plans(SPACE, 18, num_text_plans=9)
        file = Path(scratch) / "p.parquet"
        return PlanLatencyPredictor.fit(
            collect_profile(
                runner,
                SPACE,
                file,
                text_tokens=(16, 64, 256, 600),
                rounds=3,
                warmup_runs=0,
                plans=plans,
                background=runner.apply_load,
            )
        )


def test_predict_after_completed_stage_excludes_it() -> None:
    query = LatencyQuery(plan=SPACE.plans[-1], text_tokens=64, images=1, new_tokens=5)
    full_ms, encoded_ms, inserted_ms = (
        with_text().predict([replace(query, after=after)])[0][0] for after in COMPLETED_STAGES
    )
    # Encoding an image takes 4 ms; five of 16 blocks have run.
    assert full_ms - encoded_ms == pytest.approx(4.0, rel=0.2)
    assert encoded_ms - inserted_ms == pytest.approx(
        5 / 16 * (compute_prefill_ms(query.plan, 64) - 4.8), rel=0.1
    )


@pytest.mark.parametrize("plan", SPACE.plans[::37])
def test_predict_without_or_with_two_images_is_accurate(plan: Plan) -> None:
    bare = LatencyQuery(plan=replace(plan, tier=None), text_tokens=100, images=0, new_tokens=1)
    assert with_text().predict([bare])[0][0] == pytest.approx(compute_prefill_ms(plan, 100, 0), rel=0.1)
    two = LatencyQuery(plan=plan, text_tokens=20, images=2, new_tokens=1)
    assert with_text().predict([two])[0][0] == pytest.approx(compute_prefill_ms(plan, 20, 2), rel=0.1)


@pytest.mark.parametrize("plan", SPACE.plans[::37])
def test_predict_fractional_images_is_monotone(plan: Plan) -> None:
    assert plan.tier is not None
    predictor = with_text()
    sizes = [predictor.metadata.count_images(tokens) for tokens in (0, 12, 126, 504, 1008)]
    assert sizes == [0.0, 12 / 504, 0.25, 1.0, 2.0]
    bare, tiny, quarter, first, two = (
        predictor.predict(
            [
                LatencyQuery(
                    plan=plan if size else replace(plan, tier=None), text_tokens=64, images=size, new_tokens=4
                )
            ]
        )[0][0]
        for size in sizes
    )
    assert bare < tiny <= quarter < first < two
    # A quarter of the tokens, with the encoding time of a whole image.
    encoding_ms = compute_prefill_ms(plan, 64, 1) - compute_prefill_ms(plan, 64 + VISION_TOKENS[plan.tier], 0)
    expected = compute_prefill_ms(plan, 64 + VISION_TOKENS[plan.tier] // 4, 0) + encoding_ms
    query = LatencyQuery(plan=plan, text_tokens=64, images=0.25, new_tokens=1)
    assert predictor.predict([query])[0][0] == pytest.approx(expected, rel=0.1)


def test_count_images_is_relative_to_highest_tier() -> None:
    metadata = fitted(loads=(0.0,)).metadata
    assert metadata.count_images(0) == 0.0 and metadata.count_images(2 * VISION_TOKENS["high"]) == 2.0
    text_metadata = replace(metadata, vision_tokens={})
    assert text_metadata.count_images(0) == 0.0
    with pytest.raises(InputError, match="no images"):
        text_metadata.count_images(1)


def test_fit_model_without_images_or_experts() -> None:
    for top_k in (1, 2):
        plain, runner = make_space(5, top_k, images=False), FakeRunner()
        runner.vision_tokens = {}
        with TemporaryDirectory() as scratch:
            data = collect_profile(
                runner, plain, Path(scratch) / "p.parquet", text_tokens=(16, 64), rounds=2, warmup_runs=0
            )
        predictor = PlanLatencyPredictor.fit(data)
        copy = PlanLatencyPredictor.from_dict(json.loads(json.dumps(predictor.to_dict())))
        for variant in (predictor, copy):
            p50, p99 = variant.predict_all(text_tokens=30, images=0, new_tokens=4)
            assert len(p50) == len(plain) and (p99 >= p50).all()
        with pytest.raises(InputError, match="no images"):
            predictor.predict_all(text_tokens=30, images=1, new_tokens=4)


def test_save_and_load_keep_predictions_and_observations(tmp_path: Path) -> None:
    predictor, file = drifted(), tmp_path / "predictor.json"
    predictor.save(file)
    second = PlanLatencyPredictor.load(file)
    assert second.to_dict() == predictor.to_dict()
    size = {"text_tokens": 99, "images": 1, "new_tokens": 30, "load": 0.5}
    np.testing.assert_array_equal(second.predict_all(**size), predictor.predict_all(**size))
    for loaded in (second, other := PlanLatencyPredictor.load(file)):
        loaded.observe(LatencyQuery(plan=SPACE.plans[3], text_tokens=9, images=1, new_tokens=3), 100.0)
    assert second.to_dict() == other.to_dict() != predictor.to_dict()
    second.check("fake", "cpu")
    with pytest.raises(InputError, match="another model"):
        second.check("another", "cpu")


def test_tiers_are_measured_tiers() -> None:
    assert fitted().tiers == SPACE.geometry.tiers
    profile = profiled()
    low = replace(
        profile,
        measurements=tuple(
            measurement for measurement in profile.measurements if measurement.plan.tier in ("low", None)
        ),
    )
    predictor = PlanLatencyPredictor.fit(low)
    assert predictor.tiers == PlanLatencyPredictor.from_dict(predictor.to_dict()).tiers == ("low",)


def edit(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    record = json.loads(content())
    position = record
    for step in path[:-1]:
        position = position[step]
    position[path[-1]] = value
    return record


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"), (("level",), 1.5), (("level",), None), (("held_out_error",), math.nan),
        (("scale_coefficients", 0, 0), -1.0), (("scale_coefficients", 0, 0), math.nan),
        (("scale_coefficients",), [[1.0] * 4]),
        (("scale_coefficients", 0), [1.0]), 
        (("margins", 0, "scores", 0), math.inf),
        (("margins", 0, "scores"), []), (("margins", 0, "miss_rate"), 0.0), (("margins",), []),
        (("step_correction",), []), (("step_correction", "per_load"), []),
        (("prefill_correction", "overall", "logs"), [1.0]),
        (("prefill_correction", "per_load", 0), {"logs": [math.nan], "weights": [1.0]}),
        (("prefill_correction", "per_load", 0), {"logs": [0.0], "weights": [-1.0]}),
        (("tables", "prefill", "coefficients", 0, 0, 0, 0), -1.0),
        (("tables", "prefill", "coefficients", 0, 0, 0, 0), math.nan),
        (("tables", "prefill", "coefficients", 0, 0, 0, 0), 1e9), (("tables", "prefill", "tokens", 0), 1e9),
        (("tables", "prefill", "vision", 0, 0), 1e9), (("tables", "prefill", "vision"), [[0.0]] * 3),
        (("tables", "steps", 0, "loads", 0), 0.1),
        (("tables", "steps", -1, "coefficients"), "none"), (("tables", "steps"), []),
        (("tables", "prefill"), {}),
        (("metadata",), {}), (("space", "sets"), []),
        (("metadata", "config", "contexts"), [{}]), (("metadata", "config", "prompts"), 5),
        (("metadata", "config", "max_tokens"), "many"), (("metadata", "config", "max_batch"), 0),
        (("space", "geometry", "depth"), 1), (("tiers",), 3),
    ],
)  # fmt: skip
def test_from_dict_with_damaged_content_raises(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(FileFormatError):
        PlanLatencyPredictor.from_dict(edit(path, value))


def test_load_of_other_files_raises(tmp_path: Path) -> None:
    fitted(loads=(0.0,)).save(tmp_path / "p.json")
    check_artifact_file(PlanLatencyPredictor.load, tmp_path / "p.json", "sparseflow adaptive profile")


@pytest.mark.parametrize(
    "changed",
    [
        {"text_tokens": -1}, {"text_tokens": 1.5}, {"images": -1}, {"images": 0}, {"images": 0.0},
        {"images": -0.1}, {"images": math.nan}, {"images": math.inf}, {"images": True}, {"images": "1"},
        {"new_tokens": 0}, {"batch": 0},
        {"load": -0.1}, {"load": 1.1}, {"load": math.nan}, {"queued_ms": -1.0}, {"queued_ms": math.nan},
        {"queued_ms": math.inf}, {"after": "decode"}, {"text_tokens": True}, {"text_tokens": math.nan},
        {"plan": Plan(tier=None, insertion_position=1, top_k=4, blocks=(0, 1))},
    ],
)  # fmt: skip
def test_query_with_invalid_value_raises(changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"plan": SPACE.plans[0], "text_tokens": 4, "images": 1, "new_tokens": 2}
    with pytest.raises(InputError):
        LatencyQuery(**arguments | changed)
    if "plan" not in changed and changed.get("images") != 0:
        del arguments["plan"]
        with pytest.raises(InputError):
            fitted().predict_all(**arguments | changed)


def test_observe_with_invalid_time_raises_and_changes_nothing() -> None:
    predictor = fitted()
    before, query = (
        predictor.to_dict(),
        LatencyQuery(plan=SPACE.plans[0], text_tokens=4, images=1, new_tokens=2, queued_ms=5.0),
    )
    for measured in (math.nan, math.inf, -1.0, 0.0, 5.0):
        with pytest.raises(InputError, match="`measured_ms`"):
            predictor.observe(query, measured)
    for prefill in (0.0, math.nan, 3.1, -1.0):
        with pytest.raises(InputError, match="`prefill_ms`"):
            predictor.observe(query, 8.0, prefill_ms=prefill)
    with pytest.raises(InputError, match="`after`"):
        predictor.observe(replace(query, after="vision"), 8.0)
    assert predictor.to_dict() == before


def test_predict_and_fit_with_invalid_arguments_raise() -> None:
    predictor = fitted()
    with pytest.raises(InputError, match="`queries`"):
        predictor.predict([])
    invalid_plan = Plan(tier="low", insertion_position=1, top_k=9, blocks=(0, 1))
    with pytest.raises(PlanError):
        predictor.predict([LatencyQuery(plan=invalid_plan, text_tokens=4, images=1, new_tokens=2)])
    with pytest.raises(InputError, match="`level`"):
        PlanLatencyPredictor.fit(profiled(), level=0.2)
    with pytest.raises(InputError, match="`space`"):
        PlanLatencyPredictor.fit(profiled(), make_space(8))
    small_profile = replace(profiled(), measurements=profiled().measurements[:3])
    with pytest.raises(InputError, match="profile more"):
        PlanLatencyPredictor.fit(small_profile)
    without_steps = replace(
        profiled(),
        measurements=tuple(replace(measurement, steps_ms=()) for measurement in profiled().measurements),
    )
    with pytest.raises(InputError, match="profile more"):
        PlanLatencyPredictor.fit(without_steps)


def test_fit_with_other_space_predicts_its_plans() -> None:
    other = PlanSpace.from_importance(SPACE.geometry, list(range(16)))
    predictor = PlanLatencyPredictor.fit(profiled(loads=(0.0,)), other)
    p50, _ = predictor.predict_all(text_tokens=50, images=1, new_tokens=1)
    np.testing.assert_allclose(p50, [compute_prefill_ms(plan, 50) for plan in other.plans], rtol=0.05)


def test_observe_in_threads_loses_nothing() -> None:
    predictor, errors = fitted(loads=(0.0,)), []
    queries = [sample_query(np.random.default_rng(seed)) for seed in range(4)]

    def work(query: LatencyQuery) -> None:
        try:
            for _ in range(50):
                predictor.observe(query, compute_median_ms(query))
                p50, p99 = predictor.predict_all(text_tokens=50, images=1, new_tokens=4)
                assert (p99 >= p50).all()
                predictor.to_dict()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(query,)) for query in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    # The oldest 200 of 600 scores are replaced.
    scores = predictor.to_dict()["margins"][0]["scores"]
    assert scores[:400] == json.loads(content(loads=(0.0,)))["margins"][0]["scores"][200:]
