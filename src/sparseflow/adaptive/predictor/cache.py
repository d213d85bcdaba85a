"""Cache of the latencies of all plans for recent request sizes.

A server predicts the same sizes several times per request. The cached tables depend on the size only;
corrections, margins and the load are applied on each lookup (`kernels/policy_inference`). Plans of one tier
have equally many tokens and share interpolated coefficients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.adaptive.plan.space import ModelGeometry, Plan, Tier
from sparseflow.adaptive.predictor.calibration import PhaseTables, sum_decode_steps
from sparseflow.adaptive.predictor.features import (
    CompletedStage,
    PaddingBuckets,
    compute_plan_features,
    count_encoded_images,
)
from sparseflow.errors import InputError

_MAX_ENTRIES = 256
"""Maximum number of entries; one of 225 plans and six loads takes about 54 kB."""

RequestKey = tuple[int, float, int, int, CompletedStage]
"""Text tokens, images, new tokens, batch size and last completed stage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CorrectionState:
    """Snapshot of the online corrections at L loads; replaced as a whole, never modified.

    Attributes:
        prefill: Factors on the prefill, shape [L].
        step: Factors on decode steps, shape [L].
        margins: Margins in units of the residual scale, shape [L].
    """

    prefill: np.ndarray
    step: np.ndarray
    margins: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanLatencies:
    """Uncorrected latencies of all plans for one request size, milliseconds.

    Attributes:
        prefill_ms: Prefill, shape [L, plans].
        step_ms: One decode step of the last bucket, shape [L, plans].
        decode_ms: All decode steps, shape [L, plans].
    """

    prefill_ms: np.ndarray
    step_ms: np.ndarray
    decode_ms: np.ndarray


class PlanLatencyCache:
    """Cached latencies of one predictor. Thread-safe.

    Args:
        tables: Latency tables.
        geometry: Geometry of the model.
        plans: Plans of the space.
        vision_tokens: Tokens of one image at each tier.
        padding: Padding of prompts and contexts.
    """

    def __init__(
        self,
        tables: PhaseTables,
        geometry: ModelGeometry,
        plans: Sequence[Plan],
        vision_tokens: Mapping[Tier, int],
        padding: PaddingBuckets,
    ) -> None:
        self._tables, self._padding, self._vision_tokens = tables, padding, dict(vision_tokens)
        self._loads: list[float] = tables.prefill.loads.tolist()
        self._features = {
            inserted: compute_plan_features(plans, geometry, inserted=inserted).T
            for inserted in (False, True)
        }
        tier_of_plan = [-1 if plan.tier is None else geometry.tiers.index(plan.tier) for plan in plans]
        self._image_groups = [
            (index, self._vision_tokens.get(tier, 0), np.flatnonzero(np.array(tier_of_plan) == index))
            for index, tier in enumerate(geometry.tiers)
        ]
        self._text_groups = [(0, 0, np.arange(len(plans)))]
        self._entries: dict[RequestKey, PlanLatencies] = {}

    def lookup(self, key: RequestKey) -> PlanLatencies:
        """Latencies of a request size.

        Raises:
            InputError: The request has images, and the profile has none.
        """
        latencies = self._entries.get(key)
        if latencies is None:
            latencies = self._compute(key)
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            self._entries[key] = latencies
        return latencies

    def locate_load(self, load: float) -> tuple[int, float]:
        """Index of the next lower load of the tables, and the fraction (0 to 1) of the way to the next."""
        loads = self._loads
        if load >= loads[-1] or len(loads) == 1:
            return len(loads) - 1, 0.0
        low = max(bisect_right(loads, load) - 1, 0)
        return low, max(load - loads[low], 0.0) / (loads[low + 1] - loads[low])

    def _compute(self, key: RequestKey) -> PlanLatencies:
        text_tokens, images, new_tokens, batch, after = key
        if images and not self._vision_tokens:
            raise InputError(
                f"the profile contains no images, so requests with images (={images}) cannot be predicted"
            )
        groups = self._image_groups if images else self._text_groups
        tokens = np.array([float(text_tokens) + np.rint(images * count) for _, count, _ in groups])
        steps = np.full(len(groups), new_tokens - 1.0)
        batches = np.full(len(groups), float(batch))
        prefill_coefficients = self._tables.prefill.interpolate_coefficients(
            self._padding.pad_prompts(tokens), batches
        )
        contexts = self._padding.mean_contexts(tokens, steps, len(self._tables.steps))
        step_coefficients = [
            table.interpolate_coefficients(context, batches)
            for table, context in zip(self._tables.steps, contexts, strict=True)
        ]
        num_encoded = count_encoded_images(images) if after == "receipt" else 0.0
        prefill_features, step_features = self._features[after == "insertion"], self._features[False]
        prefill_ms, *bucket_ms = np.empty(
            (1 + len(step_coefficients), len(self._loads), step_features.shape[1])
        )
        for index, (tier, _, columns) in enumerate(groups):
            prefill_ms[:, columns] = prefill_coefficients[index] @ prefill_features[:, columns]
            if num_encoded and self._tables.prefill.vision.shape[1]:
                prefill_ms[:, columns] += num_encoded * self._tables.prefill.vision[:, tier, None]
            for step_ms, coefficients in zip(bucket_ms, step_coefficients, strict=True):
                step_ms[:, columns] = coefficients[index] @ step_features[:, columns]
        decode_ms = sum_decode_steps(bucket_ms, np.array(new_tokens - 1.0))
        return PlanLatencies(prefill_ms=prefill_ms, step_ms=bucket_ms[-1], decode_ms=decode_ms)
