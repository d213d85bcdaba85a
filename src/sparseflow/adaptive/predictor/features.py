"""Features of a request under a plan: plan features, padding buckets and decode step buckets.

Decode steps are grouped into buckets of 1, 2, 4, 8, ... steps, because a step's latency depends on how far
the answer has grown. Bucket b starts after 2^b - 1 steps; the last bucket is unbounded.
"""

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

CompletedStage = Literal["receipt", "vision", "insertion"]
"""Last completed stage of a request: received, image encoded, or blocks before the insertion position run."""
COMPLETED_STAGES: tuple[CompletedStage, ...] = get_args(CompletedStage)


@dataclass(frozen=True, kw_only=True)
class LatencyQuery:
    """A request and the conditions under which it runs.

    Attributes:
        plan: Plan; its tier is None for a request without images.
        text_tokens: Prompt tokens that do not belong to images.
        images: Number of images, in images of the profile's size (`ProfileMetadata.count_images`): an image
            with a quarter of the tokens counts as 0.25. Tokens are proportional to it. Encoding time is not:
            smaller images were not measured, so they cost as much as one of the profile's size.
        new_tokens: Tokens to generate, at least 1; the first one comes from the prefill.
        batch: Concurrent requests when this one starts to run, including itself.
        load: Share of the device that other requests use, 0 to 1; for an engine, `Engine.load`.
        queued_ms: Queueing time, past or expected.
        after: Last completed stage. The prediction is the remaining time after it, plus `queued_ms`.

    Raises:
        InputError: A value is NaN, negative or out of range.
    """

    plan: Plan
    text_tokens: int
    images: float
    new_tokens: int
    batch: int = 1
    load: float = 0.0
    queued_ms: float = 0.0
    after: CompletedStage = "receipt"

    def __post_init__(self) -> None:
        check_request_size(
            self.text_tokens, self.images, self.new_tokens, self.batch, self.load, self.queued_ms
        )
        if (self.plan.tier is None) != (self.images == 0):
            raise InputError(
                f"`images` (={self.images}) contradicts the plan's tier (={self.plan.tier!r}): the tier is "
                "None exactly if there are no images"
            )
        check_completed_stage(self.after)


def check_request_size(
    text_tokens: int, images: float, new_tokens: int, batch: int, load: float, queued_ms: float
) -> None:
    """Raise InputError if a value is NaN, negative or out of range."""
    for name, value, minimum in (
        ("text_tokens", text_tokens, 0), ("new_tokens", new_tokens, 1), ("batch", batch, 1),
    ):  # fmt: skip
        if type(value) is not int or value < minimum:
            raise InputError(f"`{name}` (={value!r}) must be an integer of at least {minimum}")
    is_number = isinstance(images, int | float) and not isinstance(images, bool)
    if not (is_number and math.isfinite(images) and images >= 0.0):
        raise InputError(f"`images` (={images!r}) must be a finite, non-negative number of images")
    if not 0.0 <= load <= 1.0:
        raise InputError(f"`load` (={load}) must be a share of the device between 0 and 1")
    if not (math.isfinite(queued_ms) and queued_ms >= 0.0):
        raise InputError(f"`queued_ms` (={queued_ms}) must be a finite, non-negative time in milliseconds")


def check_completed_stage(after: CompletedStage) -> None:
    """Raise InputError if `after` is not a stage."""
    if after not in COMPLETED_STAGES:
        raise InputError(f"`after` (={after!r}) must be one of {', '.join(COMPLETED_STAGES)}")


def count_step_buckets(max_steps: int) -> int:
    """Number of decode step buckets for requests of up to `max_steps` steps.

    The last bucket has at least half as many steps as all buckets before it, because predictions for longer
    requests extrapolate from it.
    """
    count = 1
    while 3 * get_bucket_start(count) <= 2 * max_steps:
        count += 1
    return count


def get_bucket_start(bucket: int) -> int:
    """Number of decode steps before a bucket."""
    return (1 << bucket) - 1


def count_steps_per_bucket(steps: np.ndarray, num_buckets: int) -> np.ndarray:
    """Distribute decode steps of requests over buckets.

    Args:
        steps: Number of steps of each request, any shape.
        num_buckets: Number of buckets.

    Returns:
        Steps in each bucket, shape [num_buckets, *steps.shape], float64.
    """
    shape = (num_buckets, *[1] * np.ndim(steps))
    starts, lengths = (bounds.reshape(shape) for bounds in _get_bucket_bounds(num_buckets))
    return np.minimum(np.maximum(steps - starts, 0.0), lengths)


@cache
def _get_bucket_bounds(num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.array([float(get_bucket_start(bucket)) for bucket in range(num_buckets)])
    return starts, np.diff(starts, append=np.inf)


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddingBuckets:
    """Lengths to which an engine pads prompts and attention contexts; none if it does not pad.

    Attributes:
        prompts: Padded prompt lengths, ascending, shape [P]; longer prompts are not padded.
        contexts: Padded context lengths of decode steps, ascending, shape [C].
    """

    prompts: np.ndarray = field(default_factory=lambda: np.empty(0))
    contexts: np.ndarray = field(default_factory=lambda: np.empty(0))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PaddingBuckets:
        """Build from `ProfileMetadata.config`."""
        return cls(**{name: np.array(config.get(name, ()), dtype=float) for name in ("prompts", "contexts")})

    def pad_prompts(self, tokens: np.ndarray) -> np.ndarray:
        """Padded lengths of prompts: [n] -> [n]."""
        if not len(self.prompts):
            return tokens
        index = np.searchsorted(self.prompts, tokens)
        return np.maximum(self.prompts[np.minimum(index, len(self.prompts) - 1)], tokens)

    def mean_contexts(self, tokens: np.ndarray, steps: np.ndarray, num_buckets: int) -> np.ndarray:
        """Mean padded context length of the decode steps of each bucket.

        Args:
            tokens: Prompt lengths, shape [n].
            steps: Decode steps, shape [n].
            num_buckets: Number of step buckets.

        Returns:
            Shape [num_buckets, n]; a bucket without steps has the context of its first step.
        """
        counts = count_steps_per_bucket(steps, num_buckets)
        return np.stack(
            [
                self.mean_context(tokens + get_bucket_start(bucket), count)
                for bucket, count in enumerate(counts)
            ]
        )

    def mean_context(self, tokens: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Mean padded context length of `steps` decode steps after `tokens` tokens: [n] and [n] -> [n].

        Without steps it is the context of one step.
        """
        if not len(self.contexts):
            return tokens + (np.maximum(steps, 0.0) + 1.0) / 2.0
        count = np.maximum(steps, 1.0)
        return (self._sum_contexts(tokens + count) - self._sum_contexts(tokens)) / count

    def _sum_contexts(self, last: np.ndarray) -> np.ndarray:
        """Sum of the padded lengths of contexts of 1, 2, ..., `last` tokens."""
        lower = np.concatenate([[0.0], self.contexts[:-1]])
        width = self.contexts - lower
        # The largest bucket also serves longer contexts.
        width[-1] = np.inf
        return np.minimum(np.maximum(last[:, None] - lower, 0.0), width) @ self.contexts


def count_plan_features(geometry: ModelGeometry) -> int:
    """Number of features of a plan."""
    return 1 + len(geometry.top_ks)


def compute_plan_features(
    plans: Sequence[Plan], geometry: ModelGeometry, *, inserted: bool = False
) -> np.ndarray:
    """Features of plans: latency is linear in them.

    The features are a constant 1, the number of blocks, and for each top-k above the smallest one the number
    of blocks that run with at least that top-k.

    Args:
        plans: Plans.
        geometry: Geometry of the model.
        inserted: Whether to leave out the blocks before the insertion position.

    Returns:
        Shape [plans, K] with K = `count_plan_features(geometry)`, float64.

    Raises:
        PlanError: The model cannot run a plan.
    """
    features = np.empty((len(plans), count_plan_features(geometry)))
    for row, plan in zip(features, plans, strict=True):
        geometry.check(plan)
        num_first = 0 if inserted else plan.insertion_position
        num_later = len(plan.blocks) - plan.insertion_position
        row[0], row[1] = 1.0, num_first + num_later
        row[2:] = [num_first + num_later * (plan.top_k >= top_k) for top_k in geometry.top_ks[1:]]
    return features


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestFeatures:
    """Features of n requests, float64 [n] unless stated otherwise.

    Attributes:
        prefill_features: Plan features of the blocks that the prefill still has to run, shape [n, K].
        step_features: Plan features of all blocks, shape [n, K].
        prompt: Padded prompt length, including tokens of images.
        contexts: Mean padded context length of each step bucket, shape [S, n].
        steps: Decode steps: tokens after the first one.
        images: Images to encode; see `count_encoded_images`.
        tier: Index into the model's tiers, int; 0 without images.
        batch: Concurrent requests.
        load: Share of the device that other requests use.
        queued_ms: Queueing time.
    """

    prefill_features: np.ndarray
    step_features: np.ndarray
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
    """Converts queries about one model to `RequestFeatures`.

    Args:
        geometry: Geometry of the model.
        vision_tokens: Tokens of one image at each tier.
        plans: Plans whose features are computed in advance.
        padding: Padding of prompts and contexts.
        num_buckets: Number of decode step buckets.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        vision_tokens: Mapping[Tier, int],
        plans: Sequence[Plan],
        padding: PaddingBuckets,
        num_buckets: int,
    ) -> None:
        self._geometry, self._vision_tokens, self._padding = geometry, dict(vision_tokens), padding
        self._num_buckets = num_buckets
        self._plan_index: dict[Plan, int] = {}
        self._all_blocks = self._later_blocks = np.empty((0, count_plan_features(geometry)))
        self._image_tokens = self._tier = np.empty(0, dtype=int)
        self._add_plans(plans)
        self._add_plans({replace(plan, tier=None): None for plan in plans})

    def build(self, queries: Sequence[LatencyQuery]) -> RequestFeatures:
        """Compute the features of each query.

        Raises:
            PlanError: The model cannot run a plan.
            InputError: There are no queries, or a query has images and the profile has none.
        """
        if not queries:
            raise InputError("`queries` is empty; pass at least one request")
        if not self._vision_tokens and any(query.images for query in queries):
            raise InputError("the profile contains no images, so requests with images cannot be predicted")
        plan_index = self._plan_index
        try:
            rows = [plan_index[query.plan] for query in queries]
        except KeyError:
            return self._extend(queries).build(queries)
        columns = zip(
            *(
                (query.text_tokens, query.images, query.new_tokens, query.batch, query.load, query.queued_ms)
                for query in queries
            ),
            strict=True,
        )
        text, images, new, batch, load, queued = (np.array(column, dtype=float) for column in columns)
        # Prompt lengths are integers, and so are padded lengths.
        prompt = text + np.rint(images * self._image_tokens[rows])
        prefill_features, to_encode = self._all_blocks[rows], count_encoded_images(images)
        if any(query.after != "receipt" for query in queries):
            inserted = np.array([query.after == "insertion" for query in queries])
            prefill_features = np.where(inserted[:, None], self._later_blocks[rows], prefill_features)
            to_encode = to_encode * [query.after == "receipt" for query in queries]
        return RequestFeatures(
            prefill_features=prefill_features, step_features=self._all_blocks[rows],
            prompt=self._padding.pad_prompts(prompt),
            contexts=self._padding.mean_contexts(prompt, new - 1.0, self._num_buckets),
            steps=new - 1.0, images=to_encode, tier=self._tier[rows], batch=batch, load=load,
            queued_ms=queued,
        )  # fmt: skip

    def _extend(self, queries: Sequence[LatencyQuery]) -> FeatureBuilder:
        """Copy with the plans of queries added; other threads may be using this builder."""
        extended = copy(self)
        extended._plan_index = dict(self._plan_index)
        extended._add_plans({query.plan: None for query in queries if query.plan not in self._plan_index})
        return extended

    def _add_plans(self, plans: Collection[Plan]) -> None:
        geometry, new_plans = self._geometry, [plan for plan in plans if plan not in self._plan_index]
        self._plan_index |= {plan: len(self._plan_index) + index for index, plan in enumerate(new_plans)}
        self._all_blocks = np.concatenate([self._all_blocks, compute_plan_features(new_plans, geometry)])
        self._later_blocks = np.concatenate(
            [self._later_blocks, compute_plan_features(new_plans, geometry, inserted=True)]
        )
        tier_index = {tier: index for index, tier in enumerate(geometry.tiers)}
        tokens = [self._vision_tokens.get(plan.tier, 0) if plan.tier else 0 for plan in new_plans]
        tiers = [tier_index[plan.tier] if plan.tier else 0 for plan in new_plans]
        self._image_tokens = np.concatenate([self._image_tokens, np.array(tokens, dtype=int)])
        self._tier = np.concatenate([self._tier, np.array(tiers, dtype=int)])


def count_encoded_images(images: np.ndarray | float) -> np.ndarray:
    """Images to charge for encoding; less than one image costs as much as one."""
    return np.where(np.greater(images, 0.0), np.maximum(images, 1.0), 0.0)
