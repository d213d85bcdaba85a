"""From a profile to tables, spreads and scores.

Spreads and scores are of requests that the tables they are held against have not seen: plans and lengths are
divided into folds, and each fold's requests are predicted by tables that were fitted to the others
(cross-conformal prediction, Vovk 2015). So a margin holds what a new plan or a new length is missed by, and
not only how times scatter. The tables in the end are fitted to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparseflow.adaptive.plan import TIERS, Tier
from sparseflow.adaptive.predictor.filling import Filling
from sparseflow.adaptive.predictor.fitting import Measured, fit_table
from sparseflow.adaptive.predictor.margins import fit_scatter, scatter
from sparseflow.adaptive.predictor.ramps import thinned
from sparseflow.adaptive.predictor.table import Table
from sparseflow.adaptive.predictor.terms import terms
from sparseflow.adaptive.profile.saved import Profile
from sparseflow.adaptive.profile.visits import Visit
from sparseflow.core.costmodel.splits import grouped_folds
from sparseflow.errors import InputError

FOLDS = 5
"""Parts that plans and lengths are divided into."""
LEVELS = 4
"""Most loads that a table tells apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """What a request goes through.

    Attributes:
        prefill: Of the prompt.
        first: Of the first step: a request that just came is often served before others have their turn.
        step: Of one of the later steps.
    """

    prefill: Table
    first: Table
    step: Table


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibrated:
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

    tables: Tables
    spreads: np.ndarray
    scores: list[np.ndarray]
    step_scores: list[np.ndarray]
    held_out: np.ndarray
    tiers: tuple[Tier, ...]


def calibrate(profile: Profile, *, folds: int, seed: int) -> Calibrated:
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
    P, F, D = np.empty((3, len(visits)))
    for learnt, judged in grouped_folds(groups, folds, seed):
        tables = _fit(phases, np.array(learnt), loads, profile)
        fitted = (tables.prefill, tables.first, tables.step)
        for found, table, phase in zip((P, F, D), fitted, phases, strict=True):
            found[judged] = _times(table, phase[np.array(judged)])
    return _scored(whole, visits, loads, P, F, D)


def rest_of(first: np.ndarray, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What all steps take: `first` for the first and `step` for each later one, milliseconds."""
    return np.minimum(steps, 1.0) * first + np.maximum(steps - 1.0, 0.0) * step


def _columns(profile: Profile, visits: Sequence[Visit]) -> tuple[Measured, Measured, Measured]:
    """What each visit took until its prefill, its first step and its last were over; NaN without such steps.

    What is predicted of the phases before is still to be put in.
    """
    geometry, vision = profile.space.geometry, profile.about.vision_tokens
    at = {tier: place for place, tier in enumerate(geometry.tiers)}
    prompt = np.array(
        [v.text_tokens + (vision[v.plan.tier] if v.plan.tier else 0) for v in visits], dtype=float
    )
    steps = np.array([len(visit.steps_ms) for visit in visits], dtype=float)
    filling = Filling.of(profile.about.how)
    shared = {
        "batch": np.array([visit.batch for visit in visits], dtype=float),
        "load": np.array([visit.load for visit in visits]),
        "terms": terms([visit.plan for visit in visits], geometry),
        "tier": np.array([at[v.plan.tier] if v.plan.tier else 0 for v in visits]),
        "before_ms": np.zeros(len(visits)),
    }
    prefill = Measured(
        ms=np.array([visit.prefill_ms for visit in visits], dtype=float),
        tokens=filling.prompt(prompt),
        images=np.array([float(visit.plan.tier is not None) for visit in visits]),
        count=np.ones(len(visits)), **shared,
    )  # fmt: skip
    shared["images"] = np.zeros(len(visits))
    first = Measured(
        ms=np.array([v.total_ms(2) if v.steps_ms else np.nan for v in visits]),
        tokens=filling.first(prompt), count=np.ones(len(visits)), **shared,
    )  # fmt: skip
    step = Measured(
        ms=np.array([v.total_ms(1 + len(v.steps_ms)) if v.steps_ms[1:] else np.nan for v in visits]),
        tokens=filling.later(prompt, steps), count=steps - 1.0, **shared,
    )  # fmt: skip
    return prefill, first, step


def _fit(
    phases: tuple[Measured, Measured, Measured], rows: np.ndarray, loads: np.ndarray, profile: Profile
) -> Tables:
    tiers = len(profile.space.geometry.tiers) if profile.about.vision_tokens else 0
    prefill, first, step = phases
    begun, went_on = (rows[np.isfinite(phase.ms[rows])] for phase in (first, step))
    prompts = fit_table(prefill[rows], loads, tiers)
    first_steps = fit_table(replace(first[begun], before_ms=_times(prompts, prefill[begun])), loads, 0)
    if not len(went_on):
        # Of later steps nothing is known but that they are steps.
        return Tables(prefill=prompts, first=first_steps, step=first_steps)
    before_ms = _times(prompts, prefill[went_on]) + _times(first_steps, first[went_on])
    return Tables(
        prefill=prompts, first=first_steps,
        step=fit_table(replace(step[went_on], before_ms=before_ms), loads, 0),
    )  # fmt: skip


def _times(table: Table, phase: Measured) -> np.ndarray:
    """What the phase takes by a table, at each row's own load."""
    at = table.at(phase.tokens, phase.batch, phase.terms, phase.images, phase.tier)
    return np.array([np.interp(load, table.loads, row) for load, row in zip(phase.load, at, strict=True)])


def _scored(
    whole: Tables, visits: Sequence[Visit], loads: np.ndarray, P: np.ndarray, F: np.ndarray, D: np.ndarray
) -> Calibrated:
    """Hold requests against predictions that had not seen them."""
    nearest = np.abs(np.array([visit.load for visit in visits])[:, None] - loads).argmin(axis=1)
    there = {visit.plan.tier for visit in visits}
    spreads, scores, step_scores = [], [], []
    for level in range(len(loads)):
        here = np.flatnonzero(nearest == level)
        # A visit is also each shorter request that it begins with; powers of two weigh short and long alike.
        cuts = [(at, n) for at in here for n in _lengths(visits[at])]
        at, n = np.array([cut[0] for cut in cuts]), np.array([cut[1] for cut in cuts], dtype=float)
        measured = np.array([visits[a].total_ms(count + 1) for a, count in cuts])
        rest = rest_of(F[at], D[at], n)
        spreads.append(fit_scatter(P[at], D[at], rest, measured))
        scores.append((measured - P[at] - rest) / scatter(spreads[-1], P[at], D[at], rest))
        times = [(D[a], ms) for a in here for ms in visits[a].steps_ms[1:]] or [(1.0, 1.0)]
        d, ms = np.array(times).T
        step_scores.append((ms - d) / scatter(spreads[-1], np.zeros_like(d), d, d))
    return Calibrated(
        tables=whole, spreads=np.array(spreads), scores=scores, step_scores=step_scores,
        held_out=_held_out(visits, P, F, D), tiers=tuple(tier for tier in TIERS if tier in there),
    )  # fmt: skip


def _lengths(visit: Visit) -> list[int]:
    """Steps of the requests that a visit begins with: 0, 1, 2, 4, ... and all."""
    steps = len(visit.steps_ms)
    return sorted({0, steps, *(1 << power for power in range(steps.bit_length()) if 1 << power <= steps)})


def _held_out(visits: Sequence[Visit], P: np.ndarray, F: np.ndarray, D: np.ndarray) -> np.ndarray:
    predicted = P + rest_of(F, D, np.array([len(visit.steps_ms) for visit in visits], dtype=float))
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
