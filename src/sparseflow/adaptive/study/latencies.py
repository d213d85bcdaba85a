"""What requests of given sizes take under every plan, from requests that a profile measured.

A plan that was measured takes what it took: each of its requests at the nearest measured length, times the
predicted median of the size that is asked for over that of the size that was measured. So the scatter is that
of real requests, each in its place, and the predictor only says how lengths differ.

A plan that was not measured takes its predicted median, times what the requests of another plan (of its
tier, where the profile has any) took over *their* predicted median, by a predictor that had not seen that
plan at that length. So it scatters as measured plans do, and is as far off as predictions of unseen plans
are. Which other plan is drawn once for each.

Requests are alone on the device: the batch is 1, the load the least that was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.predictor.validation import ask_of, unseen
from sparseflow.adaptive.profile import Measurement, PlanProfile
from sparseflow.errors import InputError


class RequestSize(NamedTuple):
    """Of a request.

    Attributes:
        text_tokens: Of its prompt, those that are not of images.
        new_tokens: Of its answer.
        images: How many of the profile's images its own amount to; by default one where plans have tiers.
    """

    text_tokens: int
    new_tokens: int
    images: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencySamples:
    """Milliseconds of requests.

    Attributes:
        ms: [sizes, plans, repeats] float32. A plan that was measured less often than another has its
            requests several times.
        measured: Whether a plan was, [plans] bool.
        load: Share of the device that others wanted.
    """

    ms: np.ndarray
    measured: np.ndarray
    load: float


def latencies(profile: PlanProfile, sizes: Sequence[RequestSize], *, seed: int = 0) -> LatencySamples:
    """What requests of some sizes take.

    Args:
        profile: Of the plans of its space.
        sizes: At least one.
        seed: What stand-ins for plans that were not measured are drawn from.

    Raises:
        InputError: There is no size, one is below 1, or the profile has too little for a predictor, or no
            request without a batch.
        MissingExtraError: SciPy is missing.
    """
    if not sizes or min(min(size.text_tokens, size.new_tokens) for size in sizes) < 1:
        raise InputError(
            f"`sizes` (={[*map(tuple, sizes[:4])]}) must be numbers of at least 1, for one request or more"
        )
    plans = profile.space.plans
    known = set(plans)
    visits = [visit for visit in profile.timed if visit.batch == 1 and visit.plan in known]
    if not visits:
        raise InputError(
            f"the profile measured none of its {len(plans)} plans alone, with batch 1; profile some of each "
            "tier"
        )
    load = min(visit.load for visit in visits)
    own: dict[Plan, list[Measurement]] = {}
    for visit in visits:
        if visit.load == load:
            own.setdefault(visit.plan, []).append(visit)
    predictor = PlanLatencyPredictor.fit(profile, seed=seed)
    stand_ins = _stand_ins(plans, own, np.random.default_rng(seed))
    medians = _PredictedMedians(predictor)
    foreign = _unseen_medians(profile, sizes, seed) if stand_ins else {}
    repeats = max(_most(mine) for mine in own.values())
    found = np.empty((len(sizes), len(plans), repeats), dtype=np.float32)
    for row, (text_tokens, new_tokens, images) in zip(found, sizes, strict=True):
        if images is None:
            images = float(bool(profile.space.geometry.tiers))
        wanted, _ = predictor.predict_all(
            text_tokens=text_tokens, images=images, new_tokens=new_tokens, load=load
        )
        for at, plan in enumerate(plans):
            near = nearest(own[stand_ins.get(plan, plan)], text_tokens)
            ratios = []
            for visit in near:
                count = within(visit, new_tokens)
                median = foreign[visit.key, count] if plan in stand_ins else medians(visit, count)
                ratios.append(visit.total_ms(count) / median)
            row[at] = wanted[at] * np.resize(ratios, repeats)
    return LatencySamples(ms=found, measured=np.array([plan in own for plan in plans]), load=load)


class _PredictedMedians:
    """Predicted medians of visits, each looked up once."""

    def __init__(self, predictor: PlanLatencyPredictor) -> None:
        self._predictor = predictor
        self._known: dict[tuple[str, int, int], float] = {}

    def __call__(self, visit: Measurement, new_tokens: int) -> float:
        key = (visit.plan.id, visit.text_tokens, new_tokens)
        if key not in self._known:
            self._known[key] = float(self._predictor.predict([ask_of(visit, new_tokens)])[0][0])
        return self._known[key]


def _unseen_medians(
    profile: PlanProfile, sizes: Iterable[RequestSize], seed: int
) -> dict[tuple[tuple[object, ...], int], float]:
    """Predicted median of each visit, by what had not seen it, for every number of new tokens asked for."""
    visits, asked = profile.timed, {size.new_tokens for size in sizes}
    found = {}
    for places, predictors in unseen(profile, seed=seed):
        (predictor,) = predictors.values()
        asks = [
            (visits[at], count) for at in places for count in {within(visits[at], most) for most in asked}
        ]
        medians, _ = predictor.predict([ask_of(visit, count) for visit, count in asks])
        found |= {
            (visit.key, count): float(median) for (visit, count), median in zip(asks, medians, strict=True)
        }
    return found


def _stand_ins(
    plans: Sequence[Plan], own: Mapping[Plan, Sequence[Measurement]], random: np.random.Generator
) -> dict[Plan, Plan]:
    """For each plan that was not measured, one that was: of its tier, unless the profile left that out."""
    found = {}
    for plan in plans:
        if plan in own:
            continue
        among = [each for each in plans if each in own and each.tier == plan.tier] or list(own)
        found[plan] = among[random.integers(len(among))]
    return found


def nearest(visits: Sequence[Measurement], text_tokens: int) -> list[Measurement]:
    """Those of the measured length that is nearest; of two, the longer."""
    length = min({visit.text_tokens for visit in visits}, key=lambda each: (abs(each - text_tokens), -each))
    return [visit for visit in visits if visit.text_tokens == length]


def _most(visits: Sequence[Measurement]) -> int:
    """Requests at the length that was measured most often."""
    lengths = [visit.text_tokens for visit in visits]
    return max(map(lengths.count, set(lengths)))


def within(visit: Measurement, new_tokens: int) -> int:
    """As many new tokens as asked for, or as the visit has."""
    return min(new_tokens, 1 + len(visit.steps_ms))
