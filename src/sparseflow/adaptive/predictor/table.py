"""The time of one phase as a table of coefficients, which is looked up and not computed.

Axes: L loads, M batches, J tokens (of the prompt, or of the context of a step), K terms of a plan
(`terms.py`). A time is the sum over terms of term times coefficient; coefficients are interpolated linearly
in batch and tokens, and given at every load. They do not fall along any of the three axes, which is why times
do not either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparseflow.adaptive.predictor.ramps import place
from sparseflow.errors import FileFormatError


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Coefficients of one phase, float64.

    Attributes:
        loads: [L], ascending.
        batches: [M], ascending.
        tokens: [J], ascending.
        coefficients: [L, M, J, K], milliseconds, not negative, not falling along L, M and J.
        vision: [L, tiers], milliseconds for one image at each tier, not falling along either; no columns
            where the phase sees no image.
    """

    loads: np.ndarray
    batches: np.ndarray
    tokens: np.ndarray
    coefficients: np.ndarray
    vision: np.ndarray

    def at(
        self, tokens: np.ndarray, batch: np.ndarray, terms: np.ndarray, images: np.ndarray, tier: np.ndarray
    ) -> np.ndarray:
        """Milliseconds at each load: [n, L].

        Args:
            tokens: [n].
            batch: [n].
            terms: [n, K].
            images: [n], to be seen.
            tier: [n] int, of these; not looked at where there are none.
        """
        found = np.einsum("nlk,nk->nl", self.between(tokens, batch), terms)
        if self.vision.shape[1]:
            found += images[:, None] * self.vision.T[tier]
        return found

    def between(self, tokens: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Coefficients at each load: [n, L, K].

        Args:
            tokens: [n].
            batch: [n].
        """
        _, many, count, _ = self.coefficients.shape
        low, way = place(tokens, self.tokens)
        # Indices next to each other in numpy's sense, so that rows come first.
        by_place = self.coefficients.transpose(1, 2, 0, 3)
        high, way = np.minimum(low + 1, count - 1), way[:, None, None]

        def along(at: np.ndarray | int) -> np.ndarray:
            first = by_place[at, low]
            return first + way * (by_place[at, high] - first)

        if many == 1:
            return along(0)
        below, step = place(batch, self.batches)
        first = along(below)
        return first + step[:, None, None] * (along(below + 1) - first)

    def filled(self, loads: np.ndarray) -> Table:
        """The same times, given at more loads: [L'], those that there are and some between them."""
        low, way = place(loads, self.loads)
        high = np.minimum(low + 1, len(self.loads) - 1)

        def along(values: np.ndarray) -> np.ndarray:
            rise = way.reshape(-1, *[1] * (values.ndim - 1))
            found = (1.0 - rise) * values[low] + rise * values[high]
            # What does not rise shall not fall by a rounding either.
            return np.maximum.accumulate(found, axis=0)

        return replace(
            self, loads=loads, coefficients=along(self.coefficients), vision=along(self.vision)
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {name: value.tolist() for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], width: int, tiers: int) -> Table:
        """What `to_dict` gave.

        Args:
            record: The dictionary.
            width: Terms of a plan.
            tiers: Of the model.

        Raises:
            FileFormatError: It is no table, or its times would fall somewhere.
        """
        try:
            own = {name: np.asarray(record[name], dtype=np.float64) for name in cls.__dataclass_fields__}
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"not a table of times: {error!r}") from error
        axes = [own[name] for name in ("loads", "batches", "tokens")]
        shape = (*(len(axis) if axis.ndim == 1 else -1 for axis in axes), width)
        own["vision"] = own["vision"].reshape(len(own["loads"]), -1)
        if own["coefficients"].shape != shape or own["vision"].shape[1] not in (0, tiers) or 0 in shape:
            raise FileFormatError(
                f"a table of times has coefficients of {own['coefficients'].shape}, expected {shape}, and "
                f"{own['vision'].shape[1]} tiers of {tiers}"
            )
        rising = [np.diff(axis) > 0.0 for axis in axes]
        rising += [np.diff(own["coefficients"], axis=axis) >= 0.0 for axis in range(3)]
        rising += [np.diff(own["vision"], axis=axis) >= 0.0 for axis in range(2)]
        positive = all(np.isfinite(value).all() and (value >= 0.0).all() for value in own.values())
        if not positive or not all(each.all() for each in rising):
            raise FileFormatError(
                "a table of times must be finite, not negative, and must not fall along an axis"
            )
        return cls(**own)
