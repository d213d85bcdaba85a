"""Plan selection for one request on one core, in Numba.

Between two decisions, code and data leave the CPU cache; reading them back from memory takes far longer than
a few hundred thousand multiply-adds. Each step is therefore one small function, and a stage's weights are
contiguous in one array. This file uses no function of another file, because Numba's cache does not detect
changes there.

Notation: d hidden size of the model, W that of the controllers, P plans, L loads, V vocabulary size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

_FAST = {"nsz", "reassoc", "contract"}
"""Allow reassociation, but keep NaN detectable in logits."""

UNKNOWN, NOT_FINITE, NO_PLAN = -1, -1, -2


@njit(cache=True, nogil=True, error_model="numpy")
def predict_quantiles(
    prefill: Any,
    step: Any,
    all_steps: Any,
    prefill_factors: Any,
    step_factors: Any,
    margins: Any,
    spreads: Any,
    floor: float,
    low: int,
    fraction: float,
    queued_ms: float,
) -> Any:
    """Median and upper quantile of each plan, both nondecreasing in the load.

    Args:
        prefill: Prefill times of the tables in milliseconds, [L, P] float64.
        step: Times of one decode step, [L, P].
        all_steps: Times of all decode steps together, [L, P].
        prefill_factors: Drift correction of the prefill, [L].
        step_factors: Drift correction of the steps, [L].
        margins: Margins in units of the residual scale, [L].
        spreads: Residual scale coefficients, [L, 4].
        floor: Minimum relative residual scale.
        low: Index of the largest table load at or below the requested load.
        fraction: Position of the requested load between `low` and the next load, 0 to 1.
        queued_ms: Time already waited.

    Returns:
        [2, P] float64, milliseconds.
    """
    predictions = np.empty((2, prefill.shape[1]))
    last = low + 1 if fraction > 0.0 else low
    for plan in range(prefill.shape[1]):
        median, high, below, high_below = -np.inf, -np.inf, 0.0, 0.0
        for load in range(last + 1):
            prefill_ms, step_ms = (
                prefill[load, plan] * prefill_factors[load],
                step[load, plan] * step_factors[load],
            )
            steps_ms = all_steps[load, plan] * step_factors[load]
            total = prefill_ms + steps_ms
            spread = math.sqrt(
                spreads[load, 0]
                + spreads[load, 1] * (prefill_ms * prefill_ms)
                + spreads[load, 2] * (steps_ms * step_ms)
                + (spreads[load, 3] + floor * floor) * (total * total)
            )
            upper = total + margins[load] * spread
            # Keeps NaN, which fits no budget.
            median = median if total <= median else total
            high = high if upper <= high else upper
            if load == low:
                below, high_below = median, high
        below, high_below = below + queued_ms, high_below + queued_ms
        if fraction > 0.0:
            below += fraction * (median + queued_ms - below)
            high_below += fraction * (high + queued_ms - high_below)
        predictions[0, plan], predictions[1, plan] = below, high_below
    return predictions


@njit(cache=True, nogil=True, error_model="numpy")
def select_with_capacity(vision: Any, images: float, allowed: Any, capacity: float) -> Any:
    """Allowed plans whose vision tokens fit; if none fit, those with the fewest.

    Args:
        vision: Vision tokens per image of each plan, [P] float64.
        images: Number of images; token counts are rounded.
        allowed: Allowed plans, [P] bool.
        capacity: Maximum number of vision tokens.

    Returns:
        [P] bool.
    """
    selected_plans, min_tokens = np.empty(len(vision), np.bool_), np.inf
    for plan in range(len(vision)):
        if allowed[plan]:
            min_tokens = min(min_tokens, np.rint(images * vision[plan]))
    capacity = max(capacity, min_tokens)
    for plan in range(len(vision)):
        selected_plans[plan] = allowed[plan] and np.rint(images * vision[plan]) <= capacity
    return selected_plans


@njit(cache=True, nogil=True, error_model="numpy")
def mean_embedding(ids: Any, excluded: Any, rows: Any, vectors: Any, out: Any) -> int:
    """Mean of word vectors.

    Args:
        ids: Prompt tokens, [T] int64.
        excluded: Tokens to exclude, [n] int64.
        rows: Row of each word's vector, [V] int64; `UNKNOWN` if not cached.
        vectors: [n, d] float32.
        out: Result, [d] float32.

    Returns:
        Number of words; `UNKNOWN` if a vector is not cached.
    """
    out[:] = 0.0
    count = 0
    for token in ids:
        skipped = False
        for other in excluded:
            skipped = skipped or token == other
        if skipped:
            continue
        if token < 0 or token >= len(rows) or rows[token] < 0:
            return UNKNOWN
        vector = vectors[rows[token]]
        for index in range(len(out)):
            out[index] += vector[index]
        count += 1
    for index in range(len(out)):
        out[index] /= np.float32(max(count, 1))
    return count


@njit(cache=True, nogil=True, error_model="numpy")
def encode_budget(angle: float, frequency: Any, amplitude: Any) -> Any:
    """Encode a budget, [2 n] float32; `frequency` and `amplitude` are [n]."""
    half = len(frequency)
    encoding = np.empty(2 * half, np.float32)
    for index in range(half):
        phase = angle * frequency[index]
        encoding[index], encoding[half + index] = (
            amplitude[index] * math.sin(phase),
            amplitude[index] * math.cos(phase),
        )
    return encoding


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _matvec(weights: Any, start: int, x: Any, scale: Any, out: Any) -> int:
    """Multiply the matrix [W, n] at `start` with x [n] and add the bias after it; returns the end offset."""
    wide = len(x)
    bias = start + len(out) * wide
    for row in range(len(out)):
        total = np.float32(0.0)
        # A slice, because possibly negative indices would prevent vectorization.
        line = weights[start + row * wide : start + (row + 1) * wide]
        for column in range(wide):
            total += line[column] * x[column]
        out[row] = total * scale + weights[bias + row]
    return bias + len(out)


@njit(cache=True, nogil=True, error_model="numpy")
def _gelu(x: Any) -> None:
    for index in range(len(x)):
        value = x[index]
        x[index] = np.float32(0.5) * value * (np.float32(1.0) + math.erf(value * np.float32(math.sqrt(0.5))))


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _standardize(vector: Any, center: Any, scale: Any, epsilon: float, out: Any) -> Any:
    """Standardize and center a vector; returns the factor that gives it unit mean square."""
    total = np.float32(0.0)
    for index in range(len(vector)):
        out[index] = (vector[index] - center[index]) * scale[index]
        total += out[index]
    mean, squares = total / np.float32(len(vector)), np.float32(0.0)
    for index in range(len(vector)):
        out[index] -= mean
        squares += out[index] * out[index]
    return np.float32(1.0 / math.sqrt(squares / len(vector) + epsilon))


@njit(cache=True, nogil=True, error_model="numpy")
def run_stage(
    vector: Any,
    center: Any,
    scale: Any,
    epsilon: float,
    weights: Any,
    budget: Any,
    extra: Any,
    choices: Any,
    first_choices: int,
    fits: Any,
    stage1_choices: Any,
    tier: int,
    position: int,
) -> int:
    """Most probable choices of a stage among feasible plans: first choice, then second.

    Args:
        vector: Language feature or latency token, [d] float32.
        center: Feature mean, [d] float32.
        scale: Inverse feature deviation, [d] float32.
        epsilon: Epsilon of the layer norm.
        weights: Matrices (row-major) and biases of the feature, budget, fusion and logits layers.
        budget: Encoded budget, [W] float32.
        extra: Further input of the fusion layer, [W] float32, or empty.
        choices: First and second choice of each plan, [2, P] int64.
        first_choices: Number of logits of the first choice.
        fits: Feasible plans, [P] bool.
        stage1_choices: Tier and position of each plan, [2, P] int64.
        tier: Required tier; -1 for any.
        position: Required position; -1 for any.

    Returns:
        The first such plan; `NOT_FINITE` if a logit is not finite, `NO_PLAN` if no plan is feasible.
    """
    wide = len(budget)
    standardized = np.empty(len(vector), np.float32)
    concatenated = np.empty(2 * wide + len(extra), np.float32)
    norm = _standardize(vector, center, scale, epsilon, standardized)
    offset = _matvec(weights, 0, standardized, norm, concatenated[:wide])
    offset = _matvec(weights, offset, budget, np.float32(1.0), concatenated[wide : 2 * wide])
    _gelu(concatenated[: 2 * wide])
    concatenated[2 * wide :] = extra
    fused = np.empty(wide, np.float32)
    offset = _matvec(weights, offset, concatenated, np.float32(1.0), fused)
    _gelu(fused)
    logits = np.empty((len(weights) - offset) // (wide + 1), np.float32)
    _matvec(weights, offset, fused, np.float32(1.0), logits)
    for logit in logits:
        if not math.isfinite(logit):
            return NOT_FINITE
    best, best_first, best_second = NO_PLAN, -1, -1
    for plan in range(len(fits)):
        if not fits[plan] or (
            tier >= 0 and (stage1_choices[0, plan] != tier or stage1_choices[1, plan] != position)
        ):
            continue
        first, second = choices[0, plan], first_choices + choices[1, plan]
        if best >= 0:
            # Ties select the first.
            if first == best_first:
                if second == best_second:
                    continue
                logit_a, logit_b, earlier = logits[second], logits[best_second], second < best_second
            else:
                logit_a, logit_b, earlier = logits[first], logits[best_first], first < best_first
            if logit_a < logit_b or (logit_a == logit_b and not earlier):
                continue
        best, best_first, best_second = plan, first, second
    return best


def compile_all() -> None:
    """Compile every function, or load it from Numba's cache."""
    ones64, ones32 = np.ones(1), np.ones(1, np.float32)
    mask, numbers = np.ones(1, np.bool_), np.zeros((2, 1), np.int64)
    # The narrowest stage: four matrices of one row with 1, 1, 2 and 1 columns, and their biases.
    weights = np.zeros(9, np.float32)
    predict_quantiles(
        ones64[None], ones64[None], ones64[None], ones64, ones64, ones64, np.ones((1, 4)), 0.0, 0, 0.0, 0.0
    )
    select_with_capacity(ones64, 1.0, mask, 1.0)
    mean_embedding(numbers[0], numbers[0], numbers[0], ones32[None], ones32.copy())
    budget = encode_budget(0.0, ones64, ones64)[:1]
    run_stage(ones32, ones32, ones32, 0.0, weights, budget, ones32[:0], numbers, 1, mask, numbers, -1, -1)
