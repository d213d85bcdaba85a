"""How good a ranking is: of one pool of candidates whose true latencies are known, and over many pools.

Scores are higher where a candidate is thought to be faster; only their order means anything. Candidates with
equal scores are taken in random order, and what is returned is the expectation over that: exact, not drawn.
So a model that cannot tell candidates apart gets what a random pick gets, and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

COVERAGE = 0.95
_DRAWS = 10_000
_BLOCK = 2**22
"""Pairs that are held at once."""


def top_k_score(scores: ArrayLike, latency_ms: ArrayLike, k: int) -> float:
    """The pool's lowest latency over the lowest among the `k` ranked highest: in (0, 1], 1 where it is found.

    It is the share of the best speed that remains when `k` candidates are measured and the fastest is taken.
    A pool of `k` or fewer gives 1.

    Args:
        scores: (n,).
        latency_ms: (n,), above 0.
        k: How many are measured, at least 1.

    Raises:
        InputError: The lengths differ, there are none, a score is NaN, or a number is out of range.
    """
    import numpy as np

    predicted, latency = _pool(scores, latency_ms)
    if k < 1:
        raise InputError(f"`k` (={k}) must be at least 1")
    best = latency.min()
    if k >= len(latency):
        return 1.0
    border = np.partition(predicted, -k)[-k]
    sure = latency[predicted > border]
    tied = np.sort(latency[predicted == border])
    fastest = np.minimum(tied, sure.min(initial=np.inf))
    return float(best * (_first_of(len(tied), k - len(sure)) / fastest).sum())


def random_top_k_score(latency_ms: ArrayLike, k: int) -> float:
    """What `top_k_score` is expected to be where `k` candidates are picked at random, none twice."""
    import numpy as np

    return top_k_score(np.zeros(np.shape(latency_ms)), latency_ms, k)


def pair_accuracy(scores: ArrayLike, latency_ms: ArrayLike) -> float:
    """Share of pairs of different latency in which the faster one scores higher; equal scores count half.

    A random ranking gets 0.5, and so does a pool in which all latencies are equal.

    Args:
        scores: (n,).
        latency_ms: (n,), above 0.

    Raises:
        InputError: As for `top_k_score`.
    """
    import numpy as np

    predicted, latency = _pool(scores, latency_ms)
    order = np.argsort(latency, kind="stable")
    predicted, latency = predicted[order], latency[order]
    slower = np.searchsorted(latency, latency, side="right")  # where those that are slower than it begin
    pairs, right, count = 0, 0.0, len(latency)
    step = max(_BLOCK // count, 1)
    for begin in range(0, count, step):
        some = slice(begin, begin + step)
        mine, theirs = predicted[some, None], predicted[None, begin:]
        differ = np.arange(begin, count)[None, :] >= slower[some, None]
        pairs += int(differ.sum())
        right += ((mine > theirs) & differ).sum() + 0.5 * ((mine == theirs) & differ).sum()
    return right / pairs if pairs else 0.5


def _first_of(count: int, picked: int) -> np.ndarray:
    """How likely each of `count` in a row is the first of `picked` drawn without replacement: (count,)."""
    import numpy as np

    before = np.arange(count - picked + 1)  # those passed over; more than this cannot be
    passed = 1.0 - picked / (count - before[:-1])
    chance = np.zeros(count)
    chance[: len(before)] = np.concatenate(([1.0], np.cumprod(passed))) * picked / (count - before)
    return chance


def _pool(scores: ArrayLike, latency_ms: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    predicted, latency = np.asarray(scores, dtype=float), np.asarray(latency_ms, dtype=float)
    if predicted.ndim != 1 or predicted.shape != latency.shape or not latency.size:
        raise InputError(
            f"scores of shape {predicted.shape} and latencies of shape {latency.shape}: two lists, equally "
            "long and not empty, are needed"
        )
    if np.isnan(predicted).any():
        raise InputError(f"{int(np.isnan(predicted).sum())} of {predicted.size} scores are not a number")
    if not (np.isfinite(latency) & (latency > 0.0)).all():
        raise InputError("latencies must be finite and above 0; leave out what did not run")
    return predicted, latency
