"""Latency of one phase as a table of coefficients, fitted by non-negative least squares.

Notation: L loads, M batch sizes, J token counts (of the prompt, or of the context of a decode step), K plan
features (`features.compute_plan_features`). The latency at load l, batch m and tokens j is the dot product of
the plan features and the coefficients C[l, m, j, :], plus the encoding time of images. Coefficients are
interpolated linearly in batch and tokens. They do not decrease along L, M and J, so latency is monotone in
load, batch and tokens.

`fit_table` writes C in a monotone hinge basis: products of ramps along L, M and J with non-negative weights.
The weights minimize the relative error by iteratively reweighted least squares (IRLS) towards least absolute
error, each iteration one non-negative least squares problem (NNLS). A smoothness penalty on the change of
slope along J separates the cost of tokens from that of encoding images where tiers share no token count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

import numpy as np

from sparseflow.core.artifact import ArrayField
from sparseflow.core.extras import require
from sparseflow.errors import InputError

MAX_KNOTS = 10
"""Maximum number of knots along the tokens and batch sizes."""
_NUM_ITERATIONS = 8
_MIN_ERROR = 0.005
"""Relative error below which errors are squared, not absolute: about the repeatability of a timer."""
_SMOOTHNESS = 3e-3
"""Weight of changes of slope along the tokens."""
_RIDGE = 1e-5
"""Weight of the squared coefficients; keeps those without measurements small."""


def monotone_hinge_basis(x: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Evaluate the monotone piecewise-linear basis at `x`.

    Args:
        x: Points, shape [n].
        knots: Ascending knots, shape [m].

    Returns:
        Basis values, shape [n, m]. Column 0 is constant 1. Column j rises from 0 at knot j - 1 to 1 at knot
        j; the last column is unbounded above.
    """
    basis = np.ones((len(x), len(knots)))
    for j in range(1, len(knots)):
        ramp = (x - knots[j - 1]) / (knots[j] - knots[j - 1])
        basis[:, j] = np.clip(ramp, 0.0, np.inf if j == len(knots) - 1 else 1.0)
    return basis


def locate_interval(x: np.ndarray, knots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Locate points between knots.

    Returns:
        Index of the knot below each point, shape [n], and the fraction of the way to the next knot, shape
        [n]: 0 to 1, and above 1 beyond the last knot.
    """
    if len(knots) == 1:
        return np.zeros(len(x), dtype=np.intp), np.zeros(len(x))
    # np.clip takes ten times as long for a few points.
    low = np.minimum(np.maximum(knots.searchsorted(x, side="right") - 1, 0), len(knots) - 2)
    return low, np.maximum((x - knots[low]) / (knots[low + 1] - knots[low]), 0.0)


def interpolation_weights(x: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Weights of the values at `knots` in the linear interpolation at `x`: [n] -> [n, knots].

    Rows sum to 1. Points outside the knots get the value of the nearest knot.
    """
    weights, rows = np.zeros((len(x), len(knots))), np.arange(len(x))
    low, fraction = locate_interval(np.minimum(x, knots[-1]), knots)
    weights[rows, low] = 1.0 - fraction
    if len(knots) > 1:
        weights[rows, low + 1] = fraction
    return weights


def subdivide_knots(knots: np.ndarray, max_gap: float) -> np.ndarray:
    """Add evenly spaced knots so that neighbors are at most `max_gap` apart."""
    intervals = [
        np.linspace(low, high, math.ceil((high - low) / max_gap), endpoint=False)
        for low, high in pairwise(knots)
    ]
    return np.concatenate([*intervals, knots[-1:]])


def select_log_spaced_knots(values: np.ndarray, max_knots: int) -> np.ndarray:
    """Choose at most `max_knots` (>= 2) of non-negative `values`, evenly spaced in log1p; keeps both ends."""
    distinct = np.unique(np.asarray(values, dtype=np.float64))
    if len(distinct) <= max_knots:
        return distinct
    logs = np.log1p(distinct)
    targets = np.linspace(logs[0], logs[-1], max_knots)
    return np.unique(distinct[np.abs(logs - targets[:, None]).argmin(axis=1)])


_Axis = Annotated[np.ndarray, ArrayField(np.float64, ndim=1, ge=0.0)]


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencyTable:
    """Coefficients of one phase, float64.

    Attributes:
        loads: Shares of the device that other requests use, ascending, shape [L].
        batches: Batch sizes, ascending, shape [M].
        tokens: Token counts, ascending, shape [J].
        coefficients: Milliseconds per plan feature, shape [L, M, J, K], non-negative and not decreasing along
            L, M and J.
        vision: Milliseconds of encoding one image at each tier, shape [L, tiers], not decreasing along either
            axis; no columns for a phase without images.

    Raises:
        InputError: The shapes contradict each other, or a value decreases along an axis.
    """

    loads: _Axis
    batches: _Axis
    tokens: _Axis
    coefficients: Annotated[np.ndarray, ArrayField(np.float64, ndim=4, ge=0.0)]
    vision: Annotated[np.ndarray, ArrayField(np.float64, ndim=2, ge=0.0)]

    def __post_init__(self) -> None:
        axes = (self.loads, self.batches, self.tokens)
        shape = tuple(map(len, axes))
        if self.coefficients.shape[:3] != shape or len(self.vision) != len(self.loads) or 0 in shape:
            raise InputError(
                f"expected coefficients of shape [{', '.join(map(str, shape))}, K] and one row of `vision` "
                f"per load, got {list(self.coefficients.shape)} and {list(self.vision.shape)}"
            )
        if not all((np.diff(axis) > 0.0).all() for axis in axes):
            raise InputError("`loads`, `batches` and `tokens` must ascend")
        differences = [np.diff(self.coefficients, axis=axis) for axis in range(3)]
        differences += [np.diff(self.vision, axis=axis) for axis in range(2)]
        if not all((difference >= 0.0).all() for difference in differences):
            raise InputError("latency must not decrease along an axis")

    def predict(
        self,
        tokens: np.ndarray,
        batch: np.ndarray,
        features: np.ndarray,
        images: np.ndarray,
        tier: np.ndarray,
    ) -> np.ndarray:
        """Predict the latency of requests at each load.

        Args:
            tokens: Token counts, shape [n].
            batch: Batch sizes, shape [n].
            features: Plan features, shape [n, K].
            images: Images to encode, shape [n]; ignored in a phase without images.
            tier: Index of the tier of the images, shape [n], int.

        Returns:
            Milliseconds, shape [n, L].
        """
        latency_ms = np.einsum("nlk,nk->nl", self.interpolate_coefficients(tokens, batch), features)
        if self.vision.shape[1]:
            latency_ms += images[:, None] * self.vision.T[tier]
        return latency_ms

    def interpolate_coefficients(self, tokens: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Coefficients of requests at each load: [n] and [n] -> [n, L, K]."""
        _, num_batches, num_tokens, _ = self.coefficients.shape
        low, fraction = locate_interval(tokens, self.tokens)
        # Adjacent advanced indices put the rows first.
        grid = self.coefficients.transpose(1, 2, 0, 3)
        high, fraction = np.minimum(low + 1, num_tokens - 1), fraction[:, None, None]

        def interpolate_tokens(batch_index: np.ndarray | int) -> np.ndarray:
            lower = grid[batch_index, low]
            return lower + fraction * (grid[batch_index, high] - lower)

        if num_batches == 1:
            return interpolate_tokens(0)
        low_batch, batch_fraction = locate_interval(batch, self.batches)
        lower = interpolate_tokens(low_batch)
        return lower + batch_fraction[:, None, None] * (interpolate_tokens(low_batch + 1) - lower)

    def resample_loads(self, loads: np.ndarray) -> LatencyTable:
        """The same table at other loads, [L'], interpolated linearly."""
        low, fraction = locate_interval(loads, self.loads)
        high = np.minimum(low + 1, len(self.loads) - 1)

        def interpolate(values: np.ndarray) -> np.ndarray:
            weight = fraction.reshape(-1, *[1] * (values.ndim - 1))
            result = (1.0 - weight) * values[low] + weight * values[high]
            # Rounding must not break monotonicity.
            return np.maximum.accumulate(result, axis=0)

        return replace(
            self, loads=loads, coefficients=interpolate(self.coefficients), vision=interpolate(self.vision)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseSamples:
    """Measured times of one phase of n requests.

    Attributes:
        end_ms: Time from the start of the request to the end of the phase, shape [n].
        start_ms: Predicted time from the start of the request to the start of the phase, shape [n].
        repeats: How often the phase runs between the two, shape [n]: 1, or the number of decode steps.
        load: Share of the device that other requests use, shape [n].
        batch: Batch sizes, shape [n].
        tokens: Token counts, shape [n].
        features: Plan features, shape [n, K].
        images: Images to encode, shape [n].
        tier: Index of the tier, shape [n], int.
    """

    end_ms: np.ndarray
    start_ms: np.ndarray
    repeats: np.ndarray
    load: np.ndarray
    batch: np.ndarray
    tokens: np.ndarray
    features: np.ndarray
    images: np.ndarray
    tier: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> PhaseSamples:
        return PhaseSamples(**{name: values[rows] for name, values in vars(self).items()})


def fit_table(samples: PhaseSamples, loads: np.ndarray, num_tiers: int) -> LatencyTable:
    """Fit the latency table of one phase; see the module docstring for the method.

    Args:
        samples: Measured times, at least one.
        loads: Loads of the table, ascending, shape [L].
        num_tiers: Tiers of the images that the phase encodes; 0 for a phase without images.

    Raises:
        MissingExtraError: SciPy is missing.
    """
    batches = select_log_spaced_knots(samples.batch, MAX_KNOTS)
    tokens = select_log_spaced_knots(samples.tokens, MAX_KNOTS)
    load_basis = monotone_hinge_basis(samples.load, loads)
    design = np.einsum(
        "nl,nm,nj,nk->nlmjk", load_basis, monotone_hinge_basis(samples.batch, batches),
        monotone_hinge_basis(samples.tokens, tokens), samples.features,
    )  # fmt: skip
    # Encoding at a tier costs at least as much as at every lower tier.
    encoded = samples.images[:, None] * (samples.tier[:, None] >= np.arange(num_tiers))
    vision_design = np.einsum("nl,nt->nlt", load_basis, encoded)
    num_rows, split = len(samples.end_ms), design[0].size
    # Rows are relative to the measured time, so the target is 1.
    scale = (samples.repeats / samples.end_ms)[:, None]
    x = np.hstack([design.reshape(num_rows, -1), vision_design.reshape(num_rows, -1)]) * scale
    penalty = np.zeros((0, x.shape[1]))
    if len(tokens) > 2:
        size = x[:, :split].mean(axis=0).reshape(design.shape[1:])[:, :, :1]
        penalty = np.pad(_make_slope_penalty(tokens, size), ((0, 0), (0, x.shape[1] - split)))
    weights = _fit_nonnegative(x, samples.start_ms / samples.end_ms, penalty)
    coefficients = weights[:split].reshape(design.shape[1:])
    for axis in range(3):
        coefficients = coefficients.cumsum(axis)
    vision = weights[split:].reshape(len(loads), num_tiers).cumsum(0).cumsum(1)
    return LatencyTable(loads=loads, batches=batches, tokens=tokens, coefficients=coefficients, vision=vision)


def _make_slope_penalty(tokens: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Rows that measure the change of slope of the coefficients at each inner knot of the tokens.

    Args:
        tokens: Knots, shape [J], at least 3.
        size: Mean contribution of each coefficient to the relative latency, shape [L, M, 1, K].

    Returns:
        Shape [L * M * K * (J - 2), L * M * J * K].
    """
    num_loads, num_batches, _, num_features = size.shape
    num_tokens = len(tokens)
    gaps = np.diff(tokens)
    rows = []
    for j in range(1, num_tokens - 1):
        row = np.zeros(num_tokens)
        min_gap = min(gaps[j - 1], gaps[j])
        row[j], row[j + 1] = min_gap / gaps[j - 1], -min_gap / gaps[j]
        rows.append(row)
    blocks = np.einsum("rj,lmk->lmkrj", np.array(rows), size[:, :, 0])
    penalty = np.zeros(
        (
            num_loads,
            num_batches,
            num_features,
            num_tokens - 2,
            num_loads,
            num_batches,
            num_tokens,
            num_features,
        )
    )
    for index in np.ndindex(num_loads, num_batches, num_features):
        load, batch, feature = index
        penalty[load, batch, feature, :, load, batch, :, feature] = blocks[index]
    return penalty.reshape(-1, num_loads * num_batches * num_tokens * num_features)


def _fit_nonnegative(x: np.ndarray, offset: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """Minimize sum |x @ w + offset - 1| plus penalties over w >= 0, by IRLS with one NNLS per iteration.

    Args:
        x: Design matrix, relative to the measured times, shape [rows, columns].
        offset: Predicted time before the phase, relative to the measured time, shape [rows].
        penalty: Rows whose product with w is kept small, shape [any, columns].

    Returns:
        w, shape [columns].
    """
    nnls = require("scipy.optimize", "adaptive").nnls
    scale = np.sqrt(np.mean(x**2, axis=0))
    used = scale > 0.0
    x, penalty = x[:, used] / scale[used], penalty[:, used] / scale[used]
    smoothness = _SMOOTHNESS * penalty.T @ penalty
    row_weights, w = np.ones(len(x)), np.zeros(x.shape[1])
    for _ in range(_NUM_ITERATIONS):
        gram = x.T @ (row_weights[:, None] * x) + row_weights.sum() * smoothness
        gram[np.diag_indices_from(gram)] += _RIDGE * row_weights.sum()
        # The Cholesky factor has the same minimum with as many rows as columns.
        factor = np.linalg.cholesky(gram)
        w = nnls(factor.T, np.linalg.solve(factor, x.T @ (row_weights * (1.0 - offset))))[0]
        # Squared relative errors favor small predictions, which IRLS alone corrects slowly.
        w = w * _median_scale(x @ w, 1.0 - offset)
        predicted = offset + x @ w
        # Relative to the prediction: relative to the measurement, fast samples would have more weight.
        row_weights = 1.0 / (
            np.maximum(np.abs(predicted - 1.0), _MIN_ERROR) * np.maximum(predicted, _MIN_ERROR)
        )
    weights = np.zeros(len(used))
    weights[used] = w / scale[used]
    return weights


def _median_scale(predicted: np.ndarray, target: np.ndarray) -> float:
    """Factor that makes half of the predictions exceed their target."""
    positive = predicted > 0.0
    if not positive.any():
        return 1.0
    return max(float(np.median(target[positive] / predicted[positive])), 0.0)
