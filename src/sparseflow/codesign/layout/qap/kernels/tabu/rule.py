"""Tenures and initial tabu times, shared by all tabu searches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TabuRule:
    """Tabu tenures.

    Attributes:
        low: Minimum number of moves before an item may return to a site.
        span: Number of different tenures, starting at `low`, equally likely.
        patience: Moves after which a swap that was not made takes precedence.
    """

    low: int
    span: int
    patience: int

    @classmethod
    def for_size(cls, n: int) -> TabuRule:
        """Tenures from n/2 to 3n/2 and a patience of 5n² for n places.

        Taillard draws from 0.9n to 1.1n; the wider range came closer to the best known costs of tai20a and
        sko49 without losses on nug30 and kra30a.
        """
        low = max(1, n // 2)
        return cls(low=low, span=max(1, 3 * n // 2 - low + 1), patience=5 * n * n)


MAX_REGISTER_SITES = 128
"""Maximum number of sites whose swaps the Triton kernel keeps in registers."""

ALWAYS = 2**30
"""A move number that no search reaches."""


def init_tabu(n: int, movers: int) -> np.ndarray:
    """Initial tabu times, int64, [n, n].

    Times of movers are long past and all different, so that not all swaps become overdue at once. Other items
    are always tabu everywhere: when a mover goes to an empty site, only the mover decides whether the swap is
    tabu.
    """
    until = -1 - np.arange(n * n, dtype=np.int64).reshape(n, n)
    until[movers:] = ALWAYS
    return until
