"""The steps of a request in stretches: the first, the next two, the next four, and so on.

Beside others a short request mostly meets nobody and a long one surely does, so the median of a whole request
does not grow by the same with every step. Each stretch has times of its own; the last one goes on for ever.
"""

from __future__ import annotations

from functools import cache

import numpy as np


def stretches(steps: int) -> int:
    """How many can be told apart where the longest request has so many steps.

    The last of them has at least half as many as come before it: it is what longer requests are told by.
    """
    count = 1
    while 3 * before(count) <= 2 * steps:
        count += 1
    return count


def before(stretch: int) -> int:
    """How many steps come before a stretch."""
    return (1 << stretch) - 1


def counts(steps: np.ndarray, count: int) -> np.ndarray:
    """How many steps of requests are in each of `count` stretches: [...] -> [count, ...] float64."""
    shape = (count, *[1] * np.ndim(steps))
    begins, lengths = (each.reshape(shape) for each in _bounds(count))
    return np.minimum(np.maximum(steps - begins, 0.0), lengths)


@cache
def _bounds(count: int) -> tuple[np.ndarray, np.ndarray]:
    begins = np.array([float(before(stretch)) for stretch in range(count)])
    return begins, np.diff(begins, append=np.inf)
