"""What every plan of a space takes, for requests of one size: looked up once, and kept.

A server asks about the same sizes again and again, several times a request, so what depends on the size alone
is kept; what observations have made of it, and the load, are put on top each time (`kernels/deciding`). Plans
of one tier share the number of tokens, and so the coefficients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.adaptive.plan.space import ModelGeometry, Plan, Tier
from sparseflow.adaptive.predictor.calibration import PhaseTables, rest_of
from sparseflow.adaptive.predictor.features import After, PaddingBuckets, seen, terms
from sparseflow.errors import InputError

_MOST = 256
"""Sheets that are kept; one of 225 plans and six loads is about 54 kB."""

Size = tuple[int, float, int, int, After]
"""Text tokens, images, new tokens, batch, and how far the request has come."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CorrectionState:
    """What observations have made of factors and margins; one is put in place of another, never changed.

    Attributes:
        prefill: Factor of the prefill at each load: [L].
        step: Factor of a step: [L].
        margins: Spreads to add: [L].
    """

    prefill: np.ndarray
    step: np.ndarray
    margins: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanLatencies:
    """Plans at one size, by the tables.

    Attributes:
        prefill: [L, plans] float64, milliseconds.
        step: Of one of the last stretch: [L, plans].
        rest: Of all steps together: [L, plans].
    """

    prefill: np.ndarray
    step: np.ndarray
    rest: np.ndarray


class PlanLatencyCache:
    """Sheets of one predictor. Several threads may ask.

    Args:
        tables: Of both phases.
        geometry: Of the model.
        plans: Those of the space.
        vision_tokens: Of one image, at each tier.
        filling: What prompts and contexts are rounded up to.
    """

    def __init__(
        self,
        tables: PhaseTables,
        geometry: ModelGeometry,
        plans: Sequence[Plan],
        vision_tokens: Mapping[Tier, int],
        filling: PaddingBuckets,
    ) -> None:
        self._tables, self._filling, self._vision = tables, filling, dict(vision_tokens)
        self._loads: list[float] = tables.prefill.loads.tolist()
        self._terms = {after: terms(plans, geometry, inserted=after).T for after in (False, True)}
        places = [-1 if plan.tier is None else geometry.tiers.index(plan.tier) for plan in plans]
        self._tiers = [
            (at, self._vision.get(tier, 0), np.flatnonzero(np.array(places) == at))
            for at, tier in enumerate(geometry.tiers)
        ]
        self._every = [(0, 0, np.arange(len(plans)))]
        self._sheets: dict[Size, PlanLatencies] = {}

    def of(self, size: Size) -> PlanLatencies:
        """The sheet of a size.

        Raises:
            InputError: Images, for a model whose profile saw none.
        """
        found = self._sheets.get(size)
        if found is None:
            found = self._made(size)
            if len(self._sheets) >= _MOST:
                self._sheets.clear()
            self._sheets[size] = found
        return found

    def between(self, load: float) -> tuple[int, float]:
        """Which load of the tables is the next lower one, and the way from there to the next, 0 to 1."""
        loads = self._loads
        if load >= loads[-1] or len(loads) == 1:
            return len(loads) - 1, 0.0
        low = max(bisect_right(loads, load) - 1, 0)
        return low, max(load - loads[low], 0.0) / (loads[low + 1] - loads[low])

    def _made(self, size: Size) -> PlanLatencies:
        text, images, new_tokens, batch, after = size
        if images and not self._vision:
            raise InputError(f"the profile measured no images, so nothing is known of images (={images})")
        groups = self._tiers if images else self._every
        tokens = np.array([float(text) + np.rint(images * each) for _, each, _ in groups])
        steps = np.full(len(groups), new_tokens - 1.0)
        beside = np.full(len(groups), float(batch))
        prompt = self._tables.prefill.between(self._filling.prompt(tokens), beside)
        contexts = self._filling.stretches(tokens, steps, len(self._tables.steps))
        each = [
            table.between(context, beside)
            for table, context in zip(self._tables.steps, contexts, strict=True)
        ]
        to_see = seen(images) if after == "receipt" else 0.0
        left, whole = self._terms[after == "insertion"], self._terms[False]
        prefill, *step = np.empty((1 + len(each), len(self._loads), whole.shape[1]))
        for at, (tier, _, rows) in enumerate(groups):
            prefill[:, rows] = prompt[at] @ left[:, rows]
            if to_see and self._tables.prefill.vision.shape[1]:
                prefill[:, rows] += to_see * self._tables.prefill.vision[:, tier, None]
            for found, coefficients in zip(step, each, strict=True):
                found[:, rows] = coefficients[at] @ whole[:, rows]
        return PlanLatencies(prefill=prefill, step=step[-1], rest=rest_of(step, np.array(new_tokens - 1.0)))
