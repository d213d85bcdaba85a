"""How far above its prediction a request may end: what whole requests missed theirs by, in units of their
spread.

The 99th percentile of a sum is not the sum of the parts' 99th percentiles: slow steps average out, what is
slow for the whole request does not. So margins are taken of whole requests. With P the predicted prefill, D a
predicted step and R all that is predicted after the prefill, a request's spread is ::

    spread² = a + b P² + c R D + (d + 0.002²) (P + R)²

a: disturbances as long for every request; b: of the prefill; c: of each step by itself, since R is about as
many times D as there are steps; d: of the whole request. The coefficients are not negative, so that the
spread, and a margin of so many spreads, grows with P, D and R.

Scores are (measured - predicted) / spread; a margin is their conformal quantile (Vovk et al. 2005; spreads as
in Lei et al. 2018, section 5.2), at each load by itself. Of fewer scores than the asked share needs, or
beyond the largest, the tail is continued as an exponential one through the highest twentieth.
"""

from __future__ import annotations

import math

import numpy as np

from sparseflow.core.extras import require

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
