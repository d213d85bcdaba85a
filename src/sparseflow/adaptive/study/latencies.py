"""Latency of requests of given sizes under every plan, from the measurements of a profile.

A measured plan takes the time of each of its requests at the nearest measured prompt length, scaled by the
ratio of the predicted medians of the requested and the measured size. The scatter is that of measured
requests; the predictor only transfers between lengths.

A plan that was not measured takes its predicted median, scaled by the ratio of measured to predicted time of
the requests of a random stand-in plan, of the same tier if possible. These predictions are held out: the
predictor has not seen the stand-in plan at that length. The result scatters like measured plans and is as
inaccurate as predictions of unseen plans.

Requests run alone: the batch size is 1, and the load is the smallest measured load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.predictor.validation import fit_folds, make_query
from sparseflow.adaptive.profile import Measurement, PlanProfile
from sparseflow.errors import InputError


class RequestSize(NamedTuple):
    """Size of a request.

    Attributes:
        text_tokens: Prompt tokens that do not belong to images.
        new_tokens: Tokens of its answer.
        images: Number of images, in images of the profile's size; by default one if plans have tiers.
    """

    text_tokens: int
    new_tokens: int
    images: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencySamples:
    """Latency samples of requests.

    Attributes:
        ms: Milliseconds, shape [sizes, plans, repeats], float32. Requests of plans with fewer measurements
            are repeated.
        measured: Whether each plan was measured, shape [plans], bool.
        load: Share of the device that other requests used.
    """

    ms: np.ndarray
    measured: np.ndarray
    load: float


def sample_latencies(profile: PlanProfile, sizes: Sequence[RequestSize], *, seed: int = 0) -> LatencySamples:
    """Compute latency samples of requests of some sizes under every plan.

    Args:
        profile: Profile of the plans of its space.
        sizes: Request sizes, at least one.
        seed: Seed of the choice of stand-ins.

    Raises:
        InputError: There is no size, a size is below 1, or the profile is too small for a predictor or has no
            request with batch size 1.
        MissingExtraError: SciPy is missing.
    """
    if not sizes or min(min(size.text_tokens, size.new_tokens) for size in sizes) < 1:
        raise InputError(f"`sizes` (={[*map(tuple, sizes[:4])]}) must not be empty, all numbers at least 1")
    plans = profile.space.plans
    space_plans = set(plans)
    unbatched = [m for m in profile.successful if m.batch == 1 and m.plan in space_plans]
    if not unbatched:
        raise InputError(
            f"the profile measured none of its {len(plans)} plans with batch size 1; profile some "
            "of each tier"
        )
    load = min(measurement.load for measurement in unbatched)
    by_plan: dict[Plan, list[Measurement]] = {}
    for measurement in unbatched:
        if measurement.load == load:
            by_plan.setdefault(measurement.plan, []).append(measurement)
    predictor = PlanLatencyPredictor.fit(profile, seed=seed)
    stand_ins = _choose_stand_ins(plans, by_plan, np.random.default_rng(seed))

    @cache
    def predict_median(measurement: Measurement, new_tokens: int) -> float:
        return float(predictor.predict([make_query(measurement, new_tokens)])[0][0])

    held_out_medians = _predict_held_out_medians(profile, sizes, seed) if stand_ins else {}
    repeats = max(_count_repeats(measurements) for measurements in by_plan.values())
    samples_ms = np.empty((len(sizes), len(plans), repeats), dtype=np.float32)
    for row, (text_tokens, new_tokens, images) in zip(samples_ms, sizes, strict=True):
        if images is None:
            images = float(bool(profile.space.geometry.tiers))
        target_ms, _ = predictor.predict_all(
            text_tokens=text_tokens, images=images, new_tokens=new_tokens, load=load
        )
        for index, plan in enumerate(plans):
            ratios = []
            for measurement in select_nearest_length(by_plan[stand_ins.get(plan, plan)], text_tokens):
                count = limit_new_tokens(measurement, new_tokens)
                if plan in stand_ins:
                    median = held_out_medians[measurement.key, count]
                else:
                    median = predict_median(measurement, count)
                ratios.append(measurement.total_ms(count) / median)
            row[index] = target_ms[index] * np.resize(ratios, repeats)
    measured = np.array([plan in by_plan for plan in plans])
    return LatencySamples(ms=samples_ms, measured=measured, load=load)


def _predict_held_out_medians(
    profile: PlanProfile, sizes: Iterable[RequestSize], seed: int
) -> dict[tuple[tuple[object, ...], int], float]:
    """Held-out median of each measurement, for each requested number of new tokens."""
    measurements, new_tokens = profile.successful, {size.new_tokens for size in sizes}
    medians = {}
    for rows, predictors in fit_folds(profile, seed=seed):
        (predictor,) = predictors.values()
        cases = [
            (measurements[row], count)
            for row in rows
            for count in {limit_new_tokens(measurements[row], requested) for requested in new_tokens}
        ]
        predicted, _ = predictor.predict([make_query(measurement, count) for measurement, count in cases])
        medians |= {
            (measurement.key, count): float(median)
            for (measurement, count), median in zip(cases, predicted, strict=True)
        }
    return medians


def _choose_stand_ins(
    plans: Sequence[Plan], by_plan: Mapping[Plan, Sequence[Measurement]], generator: np.random.Generator
) -> dict[Plan, Plan]:
    """A measured plan for each plan that was not: of its tier, unless the profile has none."""
    stand_ins = {}
    for plan in plans:
        if plan in by_plan:
            continue
        same_tier = [measured for measured in plans if measured in by_plan and measured.tier == plan.tier]
        candidates = same_tier or list(by_plan)
        stand_ins[plan] = candidates[generator.integers(len(candidates))]
    return stand_ins


def select_nearest_length(measurements: Sequence[Measurement], text_tokens: int) -> list[Measurement]:
    """Measurements of the nearest prompt length; of two, the longer."""
    length = min(
        {measurement.text_tokens for measurement in measurements},
        key=lambda tokens: (abs(tokens - text_tokens), -tokens),
    )
    return [measurement for measurement in measurements if measurement.text_tokens == length]


def _count_repeats(measurements: Sequence[Measurement]) -> int:
    """Requests at the prompt length with most measurements."""
    lengths = [measurement.text_tokens for measurement in measurements]
    return max(map(lengths.count, set(lengths)))


def limit_new_tokens(measurement: Measurement, new_tokens: int) -> int:
    """Requested number of new tokens, at most those of the measurement."""
    return min(new_tokens, 1 + len(measurement.steps_ms))
