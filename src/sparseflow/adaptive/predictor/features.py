"""Features of a request under a plan: plan features, padding buckets and decode step buckets.

Decode steps are grouped into buckets of 1, 2, 4, 8, ... steps, because a step's latency depends on how far
the answer has grown. Bucket b starts after 2^b - 1 steps; the last bucket is unbounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

import numpy as np

from sparseflow.adaptive.plan.space import ModelGeometry, Plan
from sparseflow.core.checks import check_at_least, check_between, check_non_negative, check_one_of
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
        check_one_of(COMPLETED_STAGES, after=self.after)


def check_request_size(
    text_tokens: int, images: float, new_tokens: int, batch: int, load: float, queued_ms: float
) -> None:
    """Raise InputError if a value is NaN, negative or out of range."""
    check_at_least(0, text_tokens=text_tokens)
    check_at_least(1, new_tokens=new_tokens, batch=batch)
    check_non_negative(images=images, queued_ms=queued_ms)
    check_between(0.0, 1.0, load=load)


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


def count_encoded_images(images: float) -> float:
    """Images to charge for encoding; less than one image costs as much as one."""
    return max(images, 1.0) if images > 0.0 else 0.0
