"""The time of one phase as a table of coefficients, which is looked up and not computed.

Axes: L loads, M batches, J tokens (of the prompt, or of the context of a step), K terms of a plan
(`terms.py`). A time is the sum over terms of term times coefficient; coefficients are interpolated linearly
in batch and tokens, and given at every load. They do not fall along any of the three axes, which is why times
do not either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError


def ramps(x: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Every ramp at every point: [n] -> [n, knots]."""
    found = np.ones((len(x), len(knots)))
    for j in range(1, len(knots)):
        rise = (x - knots[j - 1]) / (knots[j] - knots[j - 1])
        found[:, j] = np.clip(rise, 0.0, np.inf if j == len(knots) - 1 else 1.0)
    return found


def place(x: np.ndarray, knots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Between which knots points lie: index of the lower [n], and the way to the next, 0 to 1 (more at the
    end)."""
    if len(knots) == 1:
        return np.zeros(len(x), dtype=np.intp), np.zeros(len(x))
    # Not by np.clip, which takes ten times as long for few points.
    low = np.minimum(np.maximum(knots.searchsorted(x, side="right") - 1, 0), len(knots) - 2)
    return low, np.maximum((x - knots[low]) / (knots[low + 1] - knots[low]), 0.0)


def shares(x: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """How much of the value at each knot is in that at a point between two: [n] -> [n, knots], rows sum to 1.

    Points before the first count as that, and points beyond the last as the last.
    """
    found, rows = np.zeros((len(x), len(knots))), np.arange(len(x))
    low, way = place(np.minimum(x, knots[-1]), knots)
    found[rows, low] = 1.0 - way
    if len(knots) > 1:
        found[rows, low + 1] = way
    return found


def filled(knots: np.ndarray, gap: float) -> np.ndarray:
    """These knots and others evenly between them, so that none is farther than `gap` from the next."""
    parts = [
        np.linspace(low, high, math.ceil((high - low) / gap), endpoint=False) for low, high in pairwise(knots)
    ]
    return np.concatenate([*parts, knots[-1:]])


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """At most so many knots from the values that there are, both ends among them: the larger, the sparser.

    Args:
        values: [n], not negative.
        most: At least 2.
    """
    distinct = np.unique(np.asarray(values, dtype=np.float64))
    if len(distinct) <= most:
        return distinct
    logs = np.log1p(distinct)
    wanted = np.linspace(logs[0], logs[-1], most)
    return np.unique(distinct[np.abs(logs - wanted[:, None]).argmin(axis=1)])


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencyTable:
    """Coefficients of one phase, float64.

    Attributes:
        loads: [L], ascending.
        batches: [M], ascending.
        tokens: [J], ascending.
        coefficients: [L, M, J, K], milliseconds, not negative, not falling along L, M and J.
        vision: [L, tiers], milliseconds for one image at each tier, not falling along either; no columns
            where the phase sees no image.
    """

    loads: np.ndarray
    batches: np.ndarray
    tokens: np.ndarray
    coefficients: np.ndarray
    vision: np.ndarray

    def at(
        self, tokens: np.ndarray, batch: np.ndarray, terms: np.ndarray, images: np.ndarray, tier: np.ndarray
    ) -> np.ndarray:
        """Milliseconds at each load: [n, L].

        Args:
            tokens: [n].
            batch: [n].
            terms: [n, K].
            images: [n], to be seen.
            tier: [n] int, of these; not looked at where there are none.
        """
        found = np.einsum("nlk,nk->nl", self.between(tokens, batch), terms)
        if self.vision.shape[1]:
            found += images[:, None] * self.vision.T[tier]
        return found

    def between(self, tokens: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Coefficients at each load: [n, L, K].

        Args:
            tokens: [n].
            batch: [n].
        """
        _, many, count, _ = self.coefficients.shape
        low, way = place(tokens, self.tokens)
        # Indices next to each other in numpy's sense, so that rows come first.
        by_place = self.coefficients.transpose(1, 2, 0, 3)
        high, way = np.minimum(low + 1, count - 1), way[:, None, None]

        def along(at: np.ndarray | int) -> np.ndarray:
            first = by_place[at, low]
            return first + way * (by_place[at, high] - first)

        if many == 1:
            return along(0)
        below, step = place(batch, self.batches)
        first = along(below)
        return first + step[:, None, None] * (along(below + 1) - first)

    def filled(self, loads: np.ndarray) -> LatencyTable:
        """The same times, given at more loads: [L'], those that there are and some between them."""
        low, way = place(loads, self.loads)
        high = np.minimum(low + 1, len(self.loads) - 1)

        def along(values: np.ndarray) -> np.ndarray:
            rise = way.reshape(-1, *[1] * (values.ndim - 1))
            found = (1.0 - rise) * values[low] + rise * values[high]
            # What does not rise shall not fall by a rounding either.
            return np.maximum.accumulate(found, axis=0)

        return replace(
            self, loads=loads, coefficients=along(self.coefficients), vision=along(self.vision)
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {name: value.tolist() for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], width: int, tiers: int) -> LatencyTable:
        """What `to_dict` gave.

        Args:
            record: The dictionary.
            width: Terms of a plan.
            tiers: Of the model.

        Raises:
            FileFormatError: It is no table, or its times would fall somewhere.
        """
        try:
            own = {name: np.asarray(record[name], dtype=np.float64) for name in cls.__dataclass_fields__}
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"not a table of times: {error!r}") from error
        axes = [own[name] for name in ("loads", "batches", "tokens")]
        shape = (*(len(axis) if axis.ndim == 1 else -1 for axis in axes), width)
        own["vision"] = own["vision"].reshape(len(own["loads"]), -1)
        if own["coefficients"].shape != shape or own["vision"].shape[1] not in (0, tiers) or 0 in shape:
            raise FileFormatError(
                f"a table of times has coefficients of {own['coefficients'].shape}, expected {shape}, and "
                f"{own['vision'].shape[1]} tiers of {tiers}"
            )
        rising = [np.diff(axis) > 0.0 for axis in axes]
        rising += [np.diff(own["coefficients"], axis=axis) >= 0.0 for axis in range(3)]
        rising += [np.diff(own["vision"], axis=axis) >= 0.0 for axis in range(2)]
        positive = all(np.isfinite(value).all() and (value >= 0.0).all() for value in own.values())
        if not positive or not all(each.all() for each in rising):
            raise FileFormatError(
                "a table of times must be finite, not negative, and must not fall along an axis"
            )
        return cls(**own)


KNOTS = 10
"""Most knots along tokens."""
_ROUNDS = 8
_SMALL = 0.005
"""Relative error below which errors count as squares: about what a timer repeats to."""
_STRAIGHT = 3e-3
"""Weight of bends along tokens. Tiers differ in tokens and in what it takes to see an image; where they
share no number of tokens, a straight line is what tells the two apart."""
_RIDGE = 1e-5
"""Weight of small coefficients, so that those that no measurement tells about stay small."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseSamples:
    """Times of one phase: n of them.

    Attributes:
        ms: With what came before, [n].
        before_ms: What is predicted of that, [n].
        count: How many times the phase is in them, [n].
        load: [n].
        batch: [n].
        tokens: [n].
        terms: [n, K].
        images: [n].
        tier: [n] int.
    """

    ms: np.ndarray
    before_ms: np.ndarray
    count: np.ndarray
    load: np.ndarray
    batch: np.ndarray
    tokens: np.ndarray
    terms: np.ndarray
    images: np.ndarray
    tier: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> PhaseSamples:
        return PhaseSamples(**{name: value[rows] for name, value in vars(self).items()})


def fit_table(measured: PhaseSamples, loads: np.ndarray, tiers: int) -> LatencyTable:
    """The table that is nearest to what was measured.

    Args:
        measured: At least one time.
        loads: Levels to give times at, ascending.
        tiers: Of images that the phase sees; 0 where it sees none.

    Raises:
        MissingExtraError: SciPy is missing.
    """
    batches, tokens = thinned(measured.batch, KNOTS), thinned(measured.tokens, KNOTS)
    by_load = ramps(measured.load, loads)
    work = np.einsum(
        "nl,nm,nj,nk->nlmjk", by_load, ramps(measured.batch, batches), ramps(measured.tokens, tokens),
        measured.terms,
    )  # fmt: skip
    seen = measured.images[:, None] * (measured.tier[:, None] >= np.arange(tiers))
    vision = np.einsum("nl,nt->nlt", by_load, seen)
    rows, split = len(measured.ms), work[0].size
    times = (measured.count / measured.ms)[:, None]
    x = np.hstack([work.reshape(rows, -1), vision.reshape(rows, -1)]) * times
    bends = np.zeros((0, x.shape[1]))
    if len(tokens) > 2:
        size = x[:, :split].mean(axis=0).reshape(work.shape[1:])[:, :, :1]
        bends = np.pad(_bends(tokens, size), ((0, 0), (0, x.shape[1] - split)))
    found = _non_negative(x, measured.before_ms / measured.ms, bends)
    rises = found[:split].reshape(work.shape[1:])
    for axis in range(3):
        rises = rises.cumsum(axis)
    by_tier = found[split:].reshape(len(loads), tiers).cumsum(0).cumsum(1)
    return LatencyTable(loads=loads, batches=batches, tokens=tokens, coefficients=rises, vision=by_tier)


def _bends(tokens: np.ndarray, size: np.ndarray) -> np.ndarray:
    """How far coefficients change their slope at inner knots, as rows to be small: [rows, L * M * J * K].

    Args:
        tokens: Knots, [J], at least 3.
        size: What a coefficient contributes, relative to a time: [L, M, 1, K].
    """
    many, batches, _, width = size.shape
    count = len(tokens)
    gaps = np.diff(tokens)
    rows = []
    for j in range(1, count - 1):
        row = np.zeros(count)
        reach = min(gaps[j - 1], gaps[j])
        row[j], row[j + 1] = reach / gaps[j - 1], -reach / gaps[j]
        rows.append(row)
    by_chain = np.einsum("rj,lmk->lmkrj", np.array(rows), size[:, :, 0])
    found = np.zeros((many, batches, width, count - 2, many, batches, count, width))
    for at in np.ndindex(many, batches, width):
        level, batch, term = at
        found[level, batch, term, :, level, batch, :, term] = by_chain[at]
    return found.reshape(-1, many * batches * count * width)


def _non_negative(x: np.ndarray, before: np.ndarray, bends: np.ndarray) -> np.ndarray:
    """Coefficients [columns] of least absolute errors: x [rows, columns] shall make ones of `before` [rows],
    and `bends` little."""
    nnls = require("scipy.optimize", "adaptive").nnls
    scale = np.sqrt(np.mean(x**2, axis=0))
    used = scale > 0.0
    x, bends = x[:, used] / scale[used], bends[:, used] / scale[used]
    straight = _STRAIGHT * bends.T @ bends
    weight, best = np.ones(len(x)), np.zeros(x.shape[1])
    for _ in range(_ROUNDS):
        gram = x.T @ (weight[:, None] * x) + weight.sum() * straight
        gram[np.diag_indices_from(gram)] += _RIDGE * weight.sum()
        # The same minimum by as many rows as columns.
        factor = np.linalg.cholesky(gram)
        best = nnls(factor.T, np.linalg.solve(factor, x.T @ (weight * (1.0 - before))))[0]
        # Squares of relative errors come out too small, and rounds alone would be slow to undo that.
        best = best * _scaled(x @ best, 1.0 - before)
        predicted = before + x @ best
        # Relative to what is predicted: relative to what was measured, fast samples would count for more.
        weight = 1.0 / (np.maximum(np.abs(predicted - 1.0), _SMALL) * np.maximum(predicted, _SMALL))
    found = np.zeros(len(used))
    found[used] = best / scale[used]
    return found


def _scaled(found: np.ndarray, wanted: np.ndarray) -> float:
    """What to multiply `found` with, that half of it is above what is wanted: both [n]."""
    there = found > 0.0
    return max(float(np.median(wanted[there] / found[there])), 0.0) if there.any() else 1.0
