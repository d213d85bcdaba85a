"""What the searches of this package agree on: for how long what is tabu, and how a search begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How long sites stay tabu.

    Attributes:
        low: Least number of moves for which one may not go back to a site that it left.
        span: There are so many tenures, `low` and those above it, each as likely.
        patience: Moves after which a swap that was not made for so long goes before all others.
    """

    low: int
    span: int
    patience: int

    @classmethod
    def of(cls, n: int) -> Rule:
        """For n places: tenures from n/2 to 3n/2, and a patience of 5n².

        Taillard draws from 0.9n to 1.1n; the wider range came closer to the best known costs of tai20a and
        sko49 and lost nothing on nug30 and kra30a.
        """
        low = max(1, n // 2)
        return cls(low=low, span=max(1, 3 * n // 2 - low + 1), patience=5 * n * n)


MOST_IN_REGISTERS = 128
"""Sites of which the Triton kernel keeps all swaps in a program's registers."""

ALWAYS = 2**30
"""A move that no search gets to."""


def untouched(n: int, movers: int) -> np.ndarray:
    """Up to which move each is tabu at each site when nothing has moved yet, int64, [n, n].

    For movers long past, and no two alike, so that what waits for `Rule.patience` moves does not come all at
    once. What is no mover is always tabu, everywhere: where a mover goes to an empty site, it is the mover
    alone who says whether that is tabu.
    """
    found = -1 - np.arange(n * n, dtype=np.int64).reshape(n, n)
    found[movers:] = ALWAYS
    return found
