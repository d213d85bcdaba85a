"""Fitting a table to measured times: least absolute relative errors, coefficients not below zero.

A time is modelled as a sum over products of ramps of load, batch and tokens with the terms of a plan. Every
such product grows with all of them, so no coefficient below zero is all that monotony asks for. Iteratively
weighted least squares come near to least absolute errors, which a median minimises, and which a few requests
that were disturbed do not move. Among tables that fit alike, one that is straight along tokens is taken.

Medians do not add up: of two phases that others delay now and then, the median of both together is above the
sum of their medians. So a later phase is fitted to what whole requests took, beside what is predicted of the
phases before it (`Measured.before_ms`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparseflow.adaptive.predictor.ramps import ramps, thinned
from sparseflow.adaptive.predictor.table import Table
from sparseflow.core.extras import require

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
class Measured:
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

    def __getitem__(self, rows: np.ndarray) -> Measured:
        return Measured(**{name: value[rows] for name, value in vars(self).items()})


def fit_table(measured: Measured, loads: np.ndarray, tiers: int) -> Table:
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
    return Table(loads=loads, batches=batches, tokens=tokens, coefficients=rises, vision=by_tier)


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
