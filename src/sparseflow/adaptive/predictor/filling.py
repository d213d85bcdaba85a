"""What an engine makes of a number of tokens: prompts are filled up to a size, and attention is rounded up.

A profile that an engine made knows its sizes (`About.how`); of others nothing is rounded. So a table is
looked up by what runs, and its knots lie where there are steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparseflow.adaptive.predictor.stretches import before, counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Filling:
    """The sizes of an engine.

    Attributes:
        prompts: That prompts are filled up to, ascending: [P]; longer ones run as long as they are.
        contexts: That attention of steps is rounded up to, ascending: [C].
    """

    prompts: np.ndarray = field(default_factory=lambda: np.empty(0))
    contexts: np.ndarray = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, how: Mapping[str, Any]) -> Filling:
        """Those of a profile, by its circumstances."""
        return cls(**{name: np.array(how.get(name, ()), dtype=float) for name in ("prompts", "contexts")})

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        """What prompts of so many tokens run as: [n] -> [n]."""
        if not len(self.prompts):
            return tokens
        at = np.searchsorted(self.prompts, tokens)
        return np.maximum(self.prompts[np.minimum(at, len(self.prompts) - 1)], tokens)

    def stretches(self, tokens: np.ndarray, steps: np.ndarray, count: int) -> np.ndarray:
        """The mean of what steps of each stretch look at: [n] and [n] -> [count, n]; without any, what one
        would.

        Args:
            tokens: Of the prompts.
            steps: Tokens after the first.
            count: Of stretches.
        """
        many = counts(steps, count)
        return np.stack([self.context(tokens + before(at), each) for at, each in enumerate(many)])

    def context(self, tokens: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The mean of what `steps` steps look at that begin after so many tokens: [n] and [n] -> [n]; without
        steps, what one would."""
        if not len(self.contexts):
            return tokens + (np.maximum(steps, 0.0) + 1.0) / 2.0
        count = np.maximum(steps, 1.0)
        return (self._until(tokens + count) - self._until(tokens)) / count

    def _until(self, last: np.ndarray) -> np.ndarray:
        """Sum of what steps with 1, 2, ... `last` tokens look at."""
        below = np.concatenate([[0.0], self.contexts[:-1]])
        width = self.contexts - below
        # Nothing is longer than the largest.
        width[-1] = np.inf
        return np.minimum(np.maximum(last[:, None] - below, 0.0), width) @ self.contexts
