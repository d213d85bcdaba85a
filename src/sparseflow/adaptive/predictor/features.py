"""Requests as columns of numbers, which is what tables are looked up with."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args

import numpy as np

from sparseflow.adaptive.plan.space import ModelGeometry, Plan, Tier
from sparseflow.errors import InputError

After = Literal["receipt", "vision", "insertion"]
"""How far a request has come: nothing has run, its image was seen, or the blocks before the insertion ran."""
AFTERS: tuple[After, ...] = get_args(After)


@dataclass(frozen=True, kw_only=True)
class LatencyQuery:
    """A request, and how it would be run.

    Attributes:
        plan: Without a tier for a request without image.
        text_tokens: Of the prompt, those that are not of images.
        images: How many, counted in images of the profile's size (`ProfileMetadata.images`): one with a
            quarter of the tokens is 0.25. They become tokens in proportion. Smaller ones than the profile's
            take as long to
            be seen as that one: how far below it a vision tower's time falls was not measured.
        new_tokens: To be generated, at least 1; the first comes from the prefill.
        batch: Requests that run when its turn comes, itself included.
        load: Share of the device that others want, 0 to 1; of an engine, `Engine.load`.
        queued_ms: What it waited, or will.
        after: How far it has come; what is predicted is what remains from there, and what it waited.

    Raises:
        InputError: A figure is NaN, negative or otherwise out of range.
    """

    plan: Plan
    text_tokens: int
    images: float
    new_tokens: int
    batch: int = 1
    load: float = 0.0
    queued_ms: float = 0.0
    after: After = "receipt"

    def __post_init__(self) -> None:
        check_sizes(self.text_tokens, self.images, self.new_tokens, self.batch, self.load, self.queued_ms)
        if (self.plan.tier is None) != (self.images == 0):
            raise InputError(
                f"`images` (={self.images}) and the plan's tier (={self.plan.tier!r}) do not fit: a request "
                "without image has no tier, one with images has"
            )
        if self.after not in AFTERS:
            raise InputError(f"`after` (={self.after!r}) must be one of {', '.join(AFTERS)}")


def check_sizes(
    text_tokens: int, images: float, new_tokens: int, batch: int, load: float, queued_ms: float
) -> None:
    """That a request can be of this size.

    Raises:
        InputError: It cannot.
    """
    for name, value, least in (
        ("text_tokens", text_tokens, 0), ("new_tokens", new_tokens, 1), ("batch", batch, 1),
    ):  # fmt: skip
        if type(value) is not int or value < least:
            raise InputError(f"`{name}` (={value!r}) must be a whole number of at least {least}")
    number = isinstance(images, int | float) and not isinstance(images, bool)
    if not (number and math.isfinite(images) and images >= 0.0):
        raise InputError(
            f"`images` (={images!r}) must be a finite number, not negative: how many of the profile's images"
        )
    if not 0.0 <= load <= 1.0:
        raise InputError(f"`load` (={load}) must be a share of the device, in [0, 1]")
    if not (math.isfinite(queued_ms) and queued_ms >= 0.0):
        raise InputError(f"`queued_ms` (={queued_ms}) must be a finite number of milliseconds, not negative")


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


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddingBuckets:
    """The sizes of an engine.

    Attributes:
        prompts: That prompts are filled up to, ascending: [P]; longer ones run as long as they are.
        contexts: That attention of steps is rounded up to, ascending: [C].
    """

    prompts: np.ndarray = field(default_factory=lambda: np.empty(0))
    contexts: np.ndarray = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, how: Mapping[str, Any]) -> PaddingBuckets:
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


def width(geometry: ModelGeometry) -> int:
    """How many terms a plan has."""
    return 1 + len(geometry.top_ks)


def terms(plans: Sequence[Plan], geometry: ModelGeometry, *, inserted: bool = False) -> np.ndarray:
    """The terms of plans: float64, [plans, `width`].

    Args:
        plans: What to describe.
        geometry: The model's.
        inserted: Leave out the blocks before the insertion: they have run.

    Raises:
        PlanError: The model cannot run a plan.
    """
    found = np.empty((len(plans), width(geometry)))
    for row, plan in zip(found, plans, strict=True):
        geometry.check(plan)
        first = 0 if inserted else plan.insertion_position
        after = len(plan.blocks) - plan.insertion_position
        row[0], row[1] = 1.0, first + after
        row[2:] = [first + after * (plan.top_k >= top_k) for top_k in geometry.top_ks[1:]]
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestFeatures:
    """n requests; every array is float64 [n] unless it says otherwise.

    Attributes:
        prefill_terms: [n, K], of the blocks that the prefill has before it.
        step_terms: [n, K], of all blocks.
        prompt: Tokens that the prompt runs as, those of images among them.
        contexts: Mean number of tokens that a step of each stretch looks at: [S, n].
        steps: Tokens after the first.
        images: To be seen; see `seen`.
        tier: [n] int, index into the model's tiers; 0 without image.
        batch: As in `LatencyQuery`.
        load: As in `LatencyQuery`.
        queued_ms: As in `LatencyQuery`.
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


class FeatureBuilder:
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
        geometry: ModelGeometry,
        vision_tokens: Mapping[Tier, int],
        plans: Sequence[Plan],
        filling: PaddingBuckets,
        stretches: int,
    ) -> None:
        self._geometry, self._vision, self._filling = geometry, dict(vision_tokens), filling
        self._stretches = stretches
        self._known: dict[Plan, int] = {}
        self._whole = self._rest = np.empty((0, width(geometry)))
        self._tokens = self._tier = np.empty(0, dtype=int)
        self._learn(plans)
        self._learn({replace(plan, tier=None): None for plan in plans})

    def of(self, asks: Sequence[LatencyQuery]) -> RequestFeatures:
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
        return RequestFeatures(
            prefill_terms=first, step_terms=self._whole[at], prompt=self._filling.prompt(prompt),
            contexts=self._filling.stretches(prompt, new - 1.0, self._stretches),
            steps=new - 1.0, images=to_see, tier=self._tier[at], batch=batch, load=load, queued_ms=queued,
        )  # fmt: skip

    def _with(self, asks: Sequence[LatencyQuery]) -> FeatureBuilder:
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
    """How many images' time it takes to see some, of `LatencyQuery.images`: less than one counts as one."""
    return np.where(np.greater(images, 0.0), np.maximum(images, 1.0), 0.0)
