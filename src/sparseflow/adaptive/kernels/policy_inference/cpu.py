"""Deciding about one request on one core, in Numba.

Between two decisions a core forgets what they need: code and figures come from memory again, which takes far
longer than a few hundred thousand multiply-adds. So each part is one function with little code of its own,
and a stage's weights lie behind each other in one array. What is used here stands in this file: Numba's cache
notices no other's changes.

Notation: d the width of the model, W that of the controllers, P plans, L loads, V words.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

_FAST = {"nsz", "reassoc", "contract"}
"""Sums in any order. Logits that are NaN must still be seen."""

UNKNOWN, NOT_FINITE, NOTHING = -1, -1, -2


@njit(cache=True, nogil=True, error_model="numpy")
def expected(
    prefill: Any,
    step: Any,
    rest: Any,
    prefill_factors: Any,
    step_factors: Any,
    margins: Any,
    spreads: Any,
    floor: float,
    low: int,
    way: float,
    queued_ms: float,
) -> Any:
    """Median and higher prediction of each plan, neither falling with the load.

    Args:
        prefill: By the tables, [L, P] float64, milliseconds.
        step: Of one, [L, P].
        rest: Of all steps together, [L, P].
        prefill_factors: What observations have made of it, [L].
        step_factors: The same of a step, [L].
        margins: Spreads to add, [L].
        spreads: Of `margins.scatter`, [L, 4].
        floor: The least spread of that, relative.
        low: The load of the tables below the asked one.
        way: From there to the next, 0 to 1.
        queued_ms: What was waited.

    Returns:
        [2, P] float64, milliseconds.
    """
    found = np.empty((2, prefill.shape[1]))
    last = low + 1 if way > 0.0 else low
    for plan in range(prefill.shape[1]):
        middle, high, below, high_below = -np.inf, -np.inf, 0.0, 0.0
        for at in range(last + 1):
            first, one = prefill[at, plan] * prefill_factors[at], step[at, plan] * step_factors[at]
            later = rest[at, plan] * step_factors[at]
            whole = first + later
            spread = math.sqrt(
                spreads[at, 0]
                + spreads[at, 1] * (first * first)
                + spreads[at, 2] * (later * one)
                + (spreads[at, 3] + floor * floor) * (whole * whole)
            )
            above = whole + margins[at] * spread
            # So that what is NaN stays NaN, and fits no budget.
            middle = middle if whole <= middle else whole
            high = high if above <= high else above
            if at == low:
                below, high_below = middle, high
        below, high_below = below + queued_ms, high_below + queued_ms
        if way > 0.0:
            below += way * (middle + queued_ms - below)
            high_below += way * (high + queued_ms - high_below)
        found[0, plan], found[1, plan] = below, high_below
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def with_room(vision: Any, images: float, allowed: Any, most: float) -> Any:
    """Which plans may be chosen and have room for a request; where none has, those that come nearest.

    Args:
        vision: Vision tokens of an image under each, [P] float64.
        images: How many there are; tokens are whole.
        allowed: Which may be chosen, [P] bool.
        most: Vision tokens that there is room for.

    Returns:
        [P] bool.
    """
    found, least = np.empty(len(vision), np.bool_), np.inf
    for plan in range(len(vision)):
        if allowed[plan]:
            least = min(least, np.rint(images * vision[plan]))
    most = max(most, least)
    for plan in range(len(vision)):
        found[plan] = allowed[plan] and np.rint(images * vision[plan]) <= most
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def mean_word(ids: Any, left_out: Any, rows: Any, vectors: Any, found: Any) -> int:
    """The mean of words' vectors.

    Args:
        ids: Of a prompt, [T] int64.
        left_out: Those that are no words, [n] int64.
        rows: Where each word's vector is, [V] int64; `UNKNOWN` where it is not there.
        vectors: [n, d] float32.
        found: What is written, [d] float32.

    Returns:
        How many words there are; `UNKNOWN` where a vector is not there.
    """
    found[:] = 0.0
    count = 0
    for token in ids:
        skipped = False
        for other in left_out:
            skipped = skipped or token == other
        if skipped:
            continue
        if token < 0 or token >= len(rows) or rows[token] < 0:
            return UNKNOWN
        vector = vectors[rows[token]]
        for at in range(len(found)):
            found[at] += vector[at]
        count += 1
    for at in range(len(found)):
        found[at] /= np.float32(max(count, 1))
    return count


@njit(cache=True, nogil=True, error_model="numpy")
def encoded(angle: float, frequency: Any, amplitude: Any) -> Any:
    """A budget as both stages are told it, [2 n] float32; `frequency` and `amplitude` are [n]."""
    half = len(frequency)
    found = np.empty(2 * half, np.float32)
    for at in range(half):
        phase = angle * frequency[at]
        found[at], found[half + at] = amplitude[at] * math.sin(phase), amplitude[at] * math.cos(phase)
    return found


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _product(weights: Any, begin: int, x: Any, scale: Any, found: Any) -> int:
    """A matrix [W, n] and then its bias [W], from `begin` on, applied to x, [n]; gives where they end."""
    wide = len(x)
    bias = begin + len(found) * wide
    for row in range(len(found)):
        total = np.float32(0.0)
        # A part of its own: an index that could be negative would keep the sum from being done in vectors.
        line = weights[begin + row * wide : begin + (row + 1) * wide]
        for at in range(wide):
            total += line[at] * x[at]
        found[row] = total * scale + weights[bias + row]
    return bias + len(found)


@njit(cache=True, nogil=True, error_model="numpy")
def _gelu(x: Any) -> None:
    for at in range(len(x)):
        value = x[at]
        x[at] = np.float32(0.5) * value * (np.float32(1.0) + math.erf(value * np.float32(math.sqrt(0.5))))


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _even(vector: Any, centre: Any, scale: Any, epsilon: float, found: Any) -> Any:
    """A vector on one scale and around 0; gives what makes its numbers 1 in the mean square."""
    total = np.float32(0.0)
    for at in range(len(vector)):
        found[at] = (vector[at] - centre[at]) * scale[at]
        total += found[at]
    mean, squares = total / np.float32(len(vector)), np.float32(0.0)
    for at in range(len(vector)):
        found[at] -= mean
        squares += found[at] * found[at]
    return np.float32(1.0 / math.sqrt(squares / len(vector) + epsilon))


@njit(cache=True, nogil=True, error_model="numpy")
def stage(
    vector: Any,
    centre: Any,
    scale: Any,
    epsilon: float,
    weights: Any,
    budget: Any,
    place: Any,
    choices: Any,
    first_choices: int,
    fits: Any,
    begins: Any,
    tier: int,
    position: int,
) -> int:
    """A stage's most probable choices: of plans that fit, that of the most probable first, then second one.

    Args:
        vector: Language feature or latency token, [d] float32.
        centre: What features are put on one scale by, [d] float32.
        scale: The same.
        epsilon: Of the normalisation.
        weights: Of the feature, the budget, both together and the logits; each a matrix by rows and a bias.
        budget: `encoded`, [W] float32.
        place: What else both together are told, [W] float32, or nothing, [0].
        choices: What each plan is of the stage's first and second choice, [2, P] int64.
        first_choices: How many logits are of the first one.
        fits: Which plans may come of it, [P] bool.
        begins: Tier and position of each plan, [2, P] int64.
        tier: That plans must have; -1 for any.
        position: The same.

    Returns:
        The first such plan; `NOT_FINITE` where a logit is not, `NOTHING` where none may come of it.
    """
    wide = len(budget)
    even = np.empty(len(vector), np.float32)
    told = np.empty(2 * wide + len(place), np.float32)
    norm = _even(vector, centre, scale, epsilon, even)
    at = _product(weights, 0, even, norm, told[:wide])
    at = _product(weights, at, budget, np.float32(1.0), told[wide : 2 * wide])
    _gelu(told[: 2 * wide])
    told[2 * wide :] = place
    fused = np.empty(wide, np.float32)
    at = _product(weights, at, told, np.float32(1.0), fused)
    _gelu(fused)
    logits = np.empty((len(weights) - at) // (wide + 1), np.float32)
    _product(weights, at, fused, np.float32(1.0), logits)
    for logit in logits:
        if not math.isfinite(logit):
            return NOT_FINITE
    best, best_first, best_second = NOTHING, -1, -1
    for plan in range(len(fits)):
        if not fits[plan] or (tier >= 0 and (begins[0, plan] != tier or begins[1, plan] != position)):
            continue
        first, second = choices[0, plan], first_choices + choices[1, plan]
        if best >= 0:
            # Of equal logits the first is the higher one.
            if first == best_first:
                if second == best_second:
                    continue
                one, other, earlier = logits[second], logits[best_second], second < best_second
            else:
                one, other, earlier = logits[first], logits[best_first], first < best_first
            if one < other or (one == other and not earlier):
                continue
        best, best_first, best_second = plan, first, second
    return best


def compile_all() -> None:
    """Compile every function here, or fetch it from Numba's cache."""
    one, some = np.ones(1), np.ones(1, np.float32)
    every, numbers = np.ones(1, np.bool_), np.zeros((2, 1), np.int64)
    # A stage as narrow as can be: four matrices of one row, of 1, 1, 2 and 1 columns, and their biases.
    weights = np.zeros(9, np.float32)
    expected(one[None], one[None], one[None], one, one, one, np.ones((1, 4)), 0.0, 0, 0.0, 0.0)
    with_room(one, 1.0, every, 1.0)
    mean_word(numbers[0], numbers[0], numbers[0], some[None], some.copy())
    budget = encoded(0.0, one, one)[:1]
    stage(some, some, some, 0.0, weights, budget, some[:0], numbers, 1, every, numbers, -1, -1)
