"""Requests as columns of numbers, which is what tables are looked up with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from sparseflow.adaptive.plan import Geometry, Plan, Tier
from sparseflow.adaptive.predictor.ask import Ask
from sparseflow.adaptive.predictor.filling import Filling
from sparseflow.adaptive.predictor.terms import terms, width
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """n requests; every array is float64 [n] unless it says otherwise.

    Attributes:
        prefill_terms: [n, K], of the blocks that the prefill has before it.
        step_terms: [n, K], of all blocks.
        prompt: Tokens that the prompt runs as, those of images among them.
        contexts: Mean number of tokens that a step of each stretch looks at: [S, n].
        steps: Tokens after the first.
        images: To be seen; see `seen`.
        tier: [n] int, index into the model's tiers; 0 without image.
        batch: As in `Ask`.
        load: As in `Ask`.
        queued_ms: As in `Ask`.
    """

    prefill_terms: np.ndarray
    step_terms: np.ndarray
    prompt: np.ndarray
    contexts: np.ndarray
    steps: np.ndarray
    images: np.ndarray
    tier: np.ndarray
    batch: np.ndarray
    load: np.ndarray
    queued_ms: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)


class Describer:
    """Turns asks into columns, for one model.

    Args:
        geometry: The model's.
        vision_tokens: Of one image, at each tier.
        plans: Those that are asked about most.
        filling: What prompts and contexts are rounded up to.
        stretches: Of steps, that times are told of.
    """

    def __init__(
        self,
        geometry: Geometry,
        vision_tokens: Mapping[Tier, int],
        plans: Sequence[Plan],
        filling: Filling,
        stretches: int,
    ) -> None:
        self._geometry, self._vision, self._filling = geometry, dict(vision_tokens), filling
        self._stretches = stretches
        self._known: dict[Plan, int] = {}
        self._whole = self._rest = np.empty((0, width(geometry)))
        self._tokens = self._tier = np.empty(0, dtype=int)
        self._learn(plans)
        self._learn({replace(plan, tier=None): None for plan in plans})

    def of(self, asks: Sequence[Ask]) -> Requests:
        """One row an ask.

        Raises:
            PlanError: The model cannot run a plan.
            InputError: Nothing is asked, or images of a model whose profile saw none.
        """
        if not asks:
            raise InputError("`asks` is empty; ask about at least one request")
        if not self._vision and any(ask.images for ask in asks):
            raise InputError("the profile measured no images, so nothing is known of images")
        known = self._known
        try:
            at = [known[ask.plan] for ask in asks]
        except KeyError:
            return self._with(asks).of(asks)
        columns = zip(
            *(
                (ask.text_tokens, ask.images, ask.new_tokens, ask.batch, ask.load, ask.queued_ms)
                for ask in asks
            ),
            strict=True,
        )
        text, images, new, batch, load, queued = (np.array(column, dtype=float) for column in columns)
        # A prompt has whole tokens, and sizes that prompts are filled up to are of whole ones.
        prompt = text + np.rint(images * self._tokens[at])
        first, to_see = self._whole[at], seen(images)
        if any(ask.after != "receipt" for ask in asks):
            inserted = np.array([ask.after == "insertion" for ask in asks])
            first = np.where(inserted[:, None], self._rest[at], first)
            to_see = to_see * [ask.after == "receipt" for ask in asks]
        return Requests(
            prefill_terms=first, step_terms=self._whole[at], prompt=self._filling.prompt(prompt),
            contexts=self._filling.stretches(prompt, new - 1.0, self._stretches),
            steps=new - 1.0, images=to_see, tier=self._tier[at], batch=batch, load=load, queued_ms=queued,
        )  # fmt: skip

    def _with(self, asks: Sequence[Ask]) -> Describer:
        """One that knows the plans of asks, too; this one may be in use by another thread."""
        made = copy(self)
        made._known = dict(self._known)
        made._learn({ask.plan: None for ask in asks if ask.plan not in self._known})
        return made

    def _learn(self, plans: Collection[Plan]) -> None:
        geometry, fresh = self._geometry, [plan for plan in plans if plan not in self._known]
        self._known |= {plan: len(self._known) + at for at, plan in enumerate(fresh)}
        self._whole = np.concatenate([self._whole, terms(fresh, geometry)])
        self._rest = np.concatenate([self._rest, terms(fresh, geometry, inserted=True)])
        place = {tier: at for at, tier in enumerate(geometry.tiers)}
        tokens = [self._vision.get(plan.tier, 0) if plan.tier else 0 for plan in fresh]
        tiers = [place[plan.tier] if plan.tier else 0 for plan in fresh]
        self._tokens = np.concatenate([self._tokens, np.array(tokens, dtype=int)])
        self._tier = np.concatenate([self._tier, np.array(tiers, dtype=int)])


def seen(images: np.ndarray | float) -> np.ndarray:
    """How many images' time it takes to see some, of `Ask.images`: less than one counts as one."""
    return np.where(np.greater(images, 0.0), np.maximum(images, 1.0), 0.0)
