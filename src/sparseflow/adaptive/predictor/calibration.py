"""From a profile to tables, spreads and scores.

Spreads and scores are of requests that the tables they are held against have not seen: plans and lengths are
divided into folds, and each fold's requests are predicted by tables that were fitted to the others
(cross-conformal prediction, Vovk 2015). So a margin holds what a new plan or a new length is missed by, and
not only how times scatter. The tables in the end are fitted to all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.adaptive.predictor.features import PaddingBuckets, before, counts, stretches, terms
from sparseflow.adaptive.predictor.table import LatencyTable, PhaseSamples, filled, fit_table, shares, thinned
from sparseflow.adaptive.profile.measurement import Measurement
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.costmodel.splits import split_group_k_fold
from sparseflow.core.extras import require
from sparseflow.errors import InputError

FLOOR = 0.002
"""Least spread, relative: no request repeats to less."""
_TAIL = 0.05
_FEWEST = 10
"""Scores that a tail is told by, at least."""
_OUTLIERS = 0.98
"""Quantile of squared errors that larger ones are cut to: a spread is what is usual, scores tell the rest."""


def scatter(coefficients: np.ndarray, prefill: np.ndarray, step: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Spreads: milliseconds, as `prefill` broadcasts.

    Args:
        coefficients: [..., 4], a to d.
        prefill: Predicted, milliseconds.
        step: Predicted, milliseconds.
        rest: Predicted of all steps together, milliseconds.
    """
    a, b, c, d = (coefficients[..., at] for at in range(4))
    whole = prefill + rest
    return np.sqrt(a + b * (prefill * prefill) + c * (rest * step) + (d + FLOOR**2) * (whole * whole))


def fit_scatter(prefill: np.ndarray, step: np.ndarray, rest: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Coefficients [4] from requests: each argument [n], of predictions that were made without the request.

    Raises:
        MissingExtraError: SciPy is missing.
    """
    nnls = require("scipy.optimize", "adaptive").nnls
    whole = prefill + rest
    parts = np.stack([np.ones_like(whole), prefill**2, rest * step, whole**2], axis=1) / whole[:, None] ** 2
    error = ((measured - whole) / whole) ** 2
    error = np.minimum(error, np.quantile(error, _OUTLIERS))
    scale = np.maximum(parts.mean(axis=0), 1e-300)
    return nnls(parts / scale, error)[0] / scale


def margin(scores: np.ndarray, miss: float) -> float:
    """What a share `miss` of scores is expected to be above; not negative.

    Args:
        scores: [n], at least one, in any order.
        miss: Between 0 and 1.
    """
    ordered = np.sort(scores)
    count = len(ordered)
    rank = math.ceil((count + 1) * (1.0 - miss))
    if rank <= count:
        return max(float(ordered[rank - 1]), 0.0)
    top = min(max(math.ceil(_TAIL * count), _FEWEST), count)
    slope = float(np.mean(ordered[-top:] - ordered[-top]))
    beyond = slope * math.log(1.0 / (miss * (count + 1)))
    return max(float(ordered[-1]) + beyond, 0.0)


def condensed(scores: np.ndarray, most: int) -> np.ndarray:
    """At most so many scores of the same distribution, ascending."""
    ordered = np.sort(scores)
    if len(ordered) <= most:
        return ordered
    return np.quantile(ordered, (np.arange(most) + 0.5) / most)


FOLDS = 5
"""Parts that plans and lengths are divided into."""
LEVELS = 4
"""Most loads of a profile that are told apart."""
NEAR = 0.2
"""How far loads of a predictor lie apart at most: what is learnt beside some load says nothing of none."""
_ENOUGH = 0.25
"""Share of visits that reach a stretch of steps that is told apart."""
ALONE = 0.02
"""The least load of a predictor but none: beside more of it, more than one request in a hundred meets others,
which is what the higher prediction is about."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseTables:
    """What a request goes through.

    Attributes:
        prefill: Of the prompt.
        steps: Of one step of each stretch.
    """

    prefill: LatencyTable
    steps: tuple[LatencyTable, ...]

    def filled(self, loads: np.ndarray) -> PhaseTables:
        """The same times, given at more loads: [L'], those that there are and some between them."""
        steps = tuple(table.filled(loads) for table in self.steps)
        return PhaseTables(prefill=self.prefill.filled(loads), steps=steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """What a profile tells.

    Attributes:
        tables: Times.
        spreads: [L, 4], of `margins.scatter`, at each load.
        scores: Of whole requests, at each load.
        step_scores: Of single steps, at each load.
        held_out: Predicted and measured median of each plan, length, batch and load that the tables had not
            seen, of requests as long as the profile's: [cells, 2].
        tiers: Those that were measured, ascending.
    """

    tables: PhaseTables
    spreads: np.ndarray
    scores: list[np.ndarray]
    step_scores: list[np.ndarray]
    held_out: np.ndarray
    tiers: tuple[Tier, ...]

    def filled(self) -> Calibration:
        """The same at more loads: `ALONE`, and others, so that none is farther than `NEAR` from the next.

        Between two that were measured nobody knows yet what predictions are missed by: scores are those of
        both, so the longer tail counts.
        """
        known = self.tables.prefill.loads
        loads = filled(known, NEAR)
        if known[0] == 0.0 and len(known) > 1 and loads[1] > ALONE:
            loads = np.insert(loads, 1, ALONE)
        share = shares(loads, known)

        def of_both(scores: list[np.ndarray]) -> list[np.ndarray]:
            return [np.concatenate([scores[at] for at in np.flatnonzero(row)]) for row in share]

        return replace(
            self, tables=self.tables.filled(loads), spreads=share @ self.spreads,
            scores=of_both(self.scores), step_scores=of_both(self.step_scores),
        )  # fmt: skip


def calibrate(profile: PlanProfile, *, folds: int, seed: int) -> Calibration:
    """Fit tables, spreads and scores.

    Raises:
        InputError: The profile has too few plans or lengths.
        MissingExtraError: SciPy is missing.
    """
    visits = profile.timed
    groups = [(visit.plan.id, visit.text_tokens) for visit in visits]
    if len(set(groups)) < folds or not any(visit.steps_ms for visit in visits):
        raise InputError(
            f"the profile has {len(set(groups))} plans and lengths that could be run, and a predictor needs "
            f"at least {folds}, with steps: profile more"
        )
    loads = thinned(np.array([visit.load for visit in visits]), LEVELS)
    phases = _columns(profile, visits)
    whole = _fit(phases, np.arange(len(visits)), loads, profile)
    found = np.empty((len(phases), len(visits)))
    for learnt, judged in split_group_k_fold(groups, folds, seed):
        rows = np.array(judged)
        tables = _fit(phases, np.array(learnt), loads, profile)
        for times, table, phase in zip(found, (tables.prefill, *tables.steps), phases, strict=True):
            times[rows] = _times(table, phase[rows])
    return _scored(whole, visits, loads, found[0], found[1:]).filled()


def rest_of(stretches: Sequence[np.ndarray] | np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What all steps take, milliseconds.

    Args:
        stretches: One step of each: [S, ...].
        steps: How many; broadcasts with them.
    """
    many = counts(steps, len(stretches))
    return np.sum([each * time for each, time in zip(many, stretches, strict=True)], axis=0)


def _columns(profile: PlanProfile, visits: Sequence[Measurement]) -> tuple[PhaseSamples, ...]:
    """What each visit took until its prefill and each stretch of its steps were over; NaN without such steps.

    What is predicted of the phases before is still to be put in.
    """
    geometry, vision = profile.space.geometry, profile.about.vision_tokens
    at = {tier: place for place, tier in enumerate(geometry.tiers)}
    prompt = np.array(
        [v.text_tokens + (vision[v.plan.tier] if v.plan.tier else 0) for v in visits], dtype=float
    )
    steps = np.array([len(visit.steps_ms) for visit in visits], dtype=float)
    filling = PaddingBuckets.of(profile.about.how)
    shared = {
        "batch": np.array([visit.batch for visit in visits], dtype=float),
        "load": np.array([visit.load for visit in visits]),
        "terms": terms([visit.plan for visit in visits], geometry),
        "tier": np.array([at[v.plan.tier] if v.plan.tier else 0 for v in visits]),
        "before_ms": np.zeros(len(visits)),
    }
    prefill = PhaseSamples(
        ms=np.array([visit.prefill_ms for visit in visits], dtype=float),
        tokens=filling.prompt(prompt),
        images=np.array([float(visit.plan.tier is not None) for visit in visits]),
        count=np.ones(len(visits)), **shared,
    )  # fmt: skip
    shared["images"] = np.zeros(len(visits))
    # A few long visits do not tell how all others would go on.
    many = stretches(int(np.quantile(steps, 1.0 - _ENOUGH, method="lower")))
    each, contexts = counts(steps, many), filling.stretches(prompt, steps, many)

    def until(visit: Measurement, stretch: int) -> float:
        begun, ended = before(stretch), before(stretch + 1) if stretch + 1 < many else len(visit.steps_ms)
        return visit.total_ms(1 + min(len(visit.steps_ms), ended)) if len(visit.steps_ms) > begun else np.nan

    return prefill, *(
        PhaseSamples(
            ms=np.array([until(visit, at) for visit in visits]), tokens=contexts[at], count=each[at], **shared
        )
        for at in range(many)
    )  # fmt: skip


def _fit(
    phases: tuple[PhaseSamples, ...], rows: np.ndarray, loads: np.ndarray, profile: PlanProfile
) -> PhaseTables:
    tiers = len(profile.space.geometry.tiers) if profile.about.vision_tokens else 0
    prompts = fit_table(phases[0][rows], loads, tiers)
    before_ms = _times(prompts, phases[0])
    steps: list[LatencyTable] = []
    for phase in phases[1:]:
        went_on = rows[np.isfinite(phase.ms[rows])]
        if not len(went_on) and not steps:
            raise InputError("too few of the profile's plans and lengths have steps: profile more")
        if not len(went_on):
            # Of these nothing is known but that they are steps.
            steps.append(steps[-1])
            continue
        steps.append(fit_table(replace(phase, before_ms=before_ms)[went_on], loads, 0))
        before_ms = before_ms + phase.count * _times(steps[-1], phase)
    return PhaseTables(prefill=prompts, steps=tuple(steps))


def _times(table: LatencyTable, phase: PhaseSamples) -> np.ndarray:
    """What the phase takes by a table, at each row's own load."""
    at = table.at(phase.tokens, phase.batch, phase.terms, phase.images, phase.tier)
    return np.array([np.interp(load, table.loads, row) for load, row in zip(phase.load, at, strict=True)])


def _scored(
    whole: PhaseTables, visits: Sequence[Measurement], loads: np.ndarray, P: np.ndarray, S: np.ndarray
) -> Calibration:
    """Hold requests against predictions that had not seen them: of prefills and of a step of each stretch."""
    D = S[-1]
    nearest = np.abs(np.array([visit.load for visit in visits])[:, None] - loads).argmin(axis=1)
    there = {visit.plan.tier for visit in visits}
    spreads, scores, step_scores = [], [], []
    for level in range(len(loads)):
        here = np.flatnonzero(nearest == level)
        # A visit is also each shorter request that it begins with; powers of two weigh short and long alike.
        cuts = [(at, n) for at in here for n in _lengths(visits[at])]
        at, n = np.array([cut[0] for cut in cuts]), np.array([cut[1] for cut in cuts], dtype=float)
        measured = np.array([visits[a].total_ms(count + 1) for a, count in cuts])
        rest = rest_of(S[:, at], n)
        spreads.append(fit_scatter(P[at], D[at], rest, measured))
        scores.append((measured - P[at] - rest) / scatter(spreads[-1], P[at], D[at], rest))
        times = [(D[a], ms) for a in here for ms in visits[a].steps_ms[1:]] or [(1.0, 1.0)]
        d, ms = np.array(times).T
        step_scores.append((ms - d) / scatter(spreads[-1], np.zeros_like(d), d, d))
    return Calibration(
        tables=whole, spreads=np.array(spreads), scores=scores, step_scores=step_scores,
        held_out=_held_out(visits, P, S), tiers=tuple(tier for tier in TIERS if tier in there),
    )  # fmt: skip


def _lengths(visit: Measurement) -> list[int]:
    """Steps of the requests that a visit begins with: 0, 1, 2, 4, ... and all."""
    steps = len(visit.steps_ms)
    return sorted({0, steps, *(1 << power for power in range(steps.bit_length()) if 1 << power <= steps)})


def _held_out(visits: Sequence[Measurement], P: np.ndarray, S: np.ndarray) -> np.ndarray:
    predicted = P + rest_of(S, np.array([len(visit.steps_ms) for visit in visits], dtype=float))
    cells: dict[tuple[object, ...], list[int]] = {}
    for at, visit in enumerate(visits):
        cells.setdefault((*visit.key[:4], len(visit.steps_ms)), []).append(at)
    return np.array(
        [
            (
                np.median(predicted[cell]),
                np.median([visits[at].total_ms(1 + len(visits[at].steps_ms)) for at in cell]),
            )
            for cell in cells.values()
        ]
    )
