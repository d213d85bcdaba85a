"""Metrics of a ranking of candidates whose true latencies are known.

A higher score predicts a faster candidate; only the order of scores matters. Ties are broken at random, and
the metrics are the exact expectation over that order. A model that cannot distinguish candidates therefore
scores like a random ranking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

_MAX_PAIRS_IN_MEMORY = 2**22


def top_k_score(scores: ArrayLike, latency_ms: ArrayLike, k: int) -> float:
    """Lowest latency of the pool divided by the lowest latency among the top `k`: 1 is perfect.

    It is the fraction of the best speed that remains if the top `k` candidates are measured and the fastest
    is used. A pool of at most `k` candidates gives 1.

    Args:
        scores: Predicted scores, shape [n].
        latency_ms: True latencies, above 0, shape [n].
        k: Number of candidates that are measured, at least 1.

    Raises:
        InputError: The shapes differ, the pool is empty, a score is NaN, or a value is out of range.
    """
    import numpy as np

    predicted, latency = _check_pool(scores, latency_ms)
    if k < 1:
        raise InputError(f"`k` (={k}) must be at least 1")
    min_latency = latency.min()
    if k >= len(latency):
        return 1.0
    threshold = np.partition(predicted, -k)[-k]
    selected = latency[predicted > threshold]
    tied = np.sort(latency[predicted == threshold])
    fastest = np.minimum(tied, selected.min(initial=np.inf))
    return float(min_latency * (_first_draw_probability(len(tied), k - len(selected)) / fastest).sum())


def random_top_k_score(latency_ms: ArrayLike, k: int) -> float:
    """Expected `top_k_score` of a random ranking."""
    import numpy as np

    return top_k_score(np.zeros(np.shape(latency_ms)), latency_ms, k)


def pair_accuracy(scores: ArrayLike, latency_ms: ArrayLike) -> float:
    """Fraction of pairs with different latencies that are ranked correctly; tied scores count half.

    A random ranking gives 0.5, and so does a pool with equal latencies.

    Args:
        scores: Predicted scores, shape [n].
        latency_ms: True latencies, above 0, shape [n].

    Raises:
        InputError: The shapes differ, the pool is empty, a score is NaN, or a value is out of range.
    """
    import numpy as np

    predicted, latency = _check_pool(scores, latency_ms)
    order = np.argsort(latency, kind="stable")
    predicted, latency = predicted[order], latency[order]
    first_slower = np.searchsorted(latency, latency, side="right")
    num_pairs, num_correct, count = 0, 0.0, len(latency)
    step = max(_MAX_PAIRS_IN_MEMORY // count, 1)
    for start in range(0, count, step):
        rows = slice(start, start + step)
        faster, slower = predicted[rows, None], predicted[None, start:]
        differs = np.arange(start, count)[None, :] >= first_slower[rows, None]
        num_pairs += int(differs.sum())
        num_correct += ((faster > slower) & differs).sum() + 0.5 * ((faster == slower) & differs).sum()
    return num_correct / num_pairs if num_pairs else 0.5


def _first_draw_probability(count: int, num_drawn: int) -> np.ndarray:
    """Probability of each of `count` sorted items to be the first of `num_drawn` drawn, shape [count]."""
    import numpy as np

    num_skipped = np.arange(count - num_drawn + 1)
    skip_probability = 1.0 - num_drawn / (count - num_skipped[:-1])
    probability = np.zeros(count)
    probability[: len(num_skipped)] = (
        np.concatenate(([1.0], np.cumprod(skip_probability))) * num_drawn / (count - num_skipped)
    )
    return probability


def _check_pool(scores: ArrayLike, latency_ms: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    predicted, latency = np.asarray(scores, dtype=float), np.asarray(latency_ms, dtype=float)
    if predicted.ndim != 1 or predicted.shape != latency.shape or not latency.size:
        raise InputError(
            "expected scores and latencies of the same shape [n], n at least 1; got "
            f"{list(predicted.shape)} and {list(latency.shape)}"
        )
    if np.isnan(predicted).any():
        raise InputError(f"{int(np.isnan(predicted).sum())} of {predicted.size} scores are NaN")
    if not (np.isfinite(latency) & (latency > 0.0)).all():
        raise InputError("latencies must be finite and above 0; leave out candidates that failed")
    return predicted, latency
