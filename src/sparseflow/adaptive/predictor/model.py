"""Prediction of request latency: the median and an upper quantile, usually p99.

The latency of a request is its queueing time, the prefill, and one decode step per token after the first. The
prefill and a step of each step bucket are tables that are fitted to a profile (`table`). The margin between
median and upper quantile is conformal, over full requests (`calibration`). `observe` corrects both with
finished requests (`online`).

Boosted trees with the same monotone constraints have larger errors on lengths and plans that were not
profiled, because trees extrapolate poorly (`benchmarks/adaptive/predictor.py`).

Predictions do not decrease with text tokens, images, new tokens, blocks, top-k, batch or load. Loads above
the highest load of the profile are treated as that load.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from sparseflow.adaptive.kernels import policy_inference
from sparseflow.adaptive.plan.space import Plan, PlanSpace, Tier
from sparseflow.adaptive.predictor.cache import CorrectionState, PlanLatencyCache
from sparseflow.adaptive.predictor.calibration import (
    MIN_RELATIVE_SCALE,
    Calibration,
    PhaseTables,
    calibrate,
    residual_scale,
    summarize_scores,
)
from sparseflow.adaptive.predictor.features import (
    COMPLETED_STAGES,
    CompletedStage,
    LatencyQuery,
    PaddingBuckets,
    check_request_size,
    count_plan_features,
)
from sparseflow.adaptive.predictor.online import WINDOW_SIZE, ConformalMargin, DriftCorrection, MarginState
from sparseflow.adaptive.predictor.table import interpolation_weights
from sparseflow.adaptive.profile.measurement import ProfileMetadata
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.artifact import ArrayField, Artifact, DictField
from sparseflow.core.checks import check_between, check_one_of
from sparseflow.errors import InputError

if TYPE_CHECKING:
    import torch

DEFAULT_LEVEL = 0.99
"""Default quantile of the upper prediction."""
PhaseTimes = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Prefill, one step of the last bucket, and all steps, at each load: each [..., L], milliseconds."""


class PlanLatencyPredictor:
    """Predicts the latency of requests under plans. Create it with `fit` or `load`. Thread-safe.

    Attributes:
        metadata: Model and device of the profile.
        space: Plans of `predict_all`.
        level: Quantile of the upper prediction, such as 0.99.
        held_out_error: Mean relative error of medians on held-out plans and prompt lengths.
        tiers: Measured tiers; predictions for other tiers are extrapolated.
    """

    def __init__(self, state: _PredictorState) -> None:
        self._state = state
        self.metadata, self.space, self.level = state.metadata, state.space, state.level
        self.held_out_error = state.held_out_error
        self.tiers = tuple(tier for tier in self.space.geometry.tiers if tier in state.tiers)
        self._loads = state.tables.prefill.loads
        self._margins = [ConformalMargin(margin, 1.0 - self.level) for margin in state.margins]
        self._cache = self._make_cache(self.space.plans)
        # Plans of all tiers are equal for requests without images.
        self._plan_index = {
            key: index
            for index, plan in enumerate(self.space.plans)
            for key in (plan, replace(plan, tier=None))
        }
        self._predict_quantiles = policy_inference.load_kernels().predict_quantiles
        self._lock = threading.Lock()
        self._correction_state = self._snapshot_corrections()

    @property
    def loads(self) -> tuple[float, ...]:
        """Loads of the tables, ascending: those of the profile, and some between them."""
        return tuple(self._loads.tolist())

    @classmethod
    def fit(
        cls,
        profile: PlanProfile,
        space: PlanSpace | None = None,
        *,
        level: float = DEFAULT_LEVEL,
        seed: int = 0,
    ) -> PlanLatencyPredictor:
        """Fit a predictor to a profile.

        Args:
            profile: Profile with at least five combinations of plan and prompt length.
            space: Plans to predict, of the profile's geometry; by default those of the profile.
            level: Quantile of the upper prediction.
            seed: Seed of the split into folds.

        Raises:
            InputError: The profile is too small or of another geometry, or `level` is out of range.
            MissingExtraError: SciPy or Numba is missing.
        """
        space = space or profile.space
        if space.geometry != profile.space.geometry:
            raise InputError(
                f"`space` has the geometry {space.geometry}, and the profile {profile.space.geometry}"
            )
        return cls.from_calibration(calibrate(profile, seed=seed), profile.metadata, space, level=level)

    @classmethod
    def from_calibration(
        cls,
        calibration: Calibration,
        metadata: ProfileMetadata,
        space: PlanSpace,
        *,
        level: float = DEFAULT_LEVEL,
    ) -> PlanLatencyPredictor:
        """Build a predictor from the calibration of a profile; see `fit`.

        Raises:
            InputError: `level` is out of range.
        """
        if not 0.5 < level < 1.0:
            raise InputError(f"`level` (={level}) must lie between 0.5 and 1")
        predicted, measured = calibration.held_out.T
        num_loads = len(calibration.scores)
        # Shuffled, because the first ones of ascending scores would be replaced first.
        margins = [
            np.random.default_rng(0).permutation(summarize_scores(scores, WINDOW_SIZE))
            for scores in calibration.scores
        ]
        return cls(
            _PredictorState(
                metadata=metadata, space=space, level=level, tiers=calibration.tiers,
                held_out_error=float(np.mean(np.abs(predicted / measured - 1.0))),
                tables=calibration.tables, scale_coefficients=calibration.scale_coefficients,
                margins=tuple(MarginState(miss_rate=1.0 - level, scores=scores) for scores in margins),
                prefill_correction=DriftCorrection.create(num_loads),
                step_correction=DriftCorrection.create(num_loads),
            )
        )  # fmt: skip

    def check(self, model_id: str, device: torch.device | str) -> None:
        """Check that the profile is of this model on this device.

        Raises:
            InputError: It is of another model or device.
        """
        self.metadata.check(model_id, device)

    def predict(self, queries: Sequence[LatencyQuery]) -> tuple[np.ndarray, np.ndarray]:
        """Predict the median and the upper quantile of each query.

        Returns:
            Two arrays of shape [n], float64, milliseconds.

        Raises:
            PlanError: The model cannot run a plan.
            InputError: There are no queries, or a query has images and the profile has none.
        """
        if not queries:
            raise InputError("`queries` is empty; pass at least one request")
        prefill_ms, step_ms, decode_ms = map(np.stack, zip(*map(self._predict_phases, queries), strict=True))
        weights = interpolation_weights(np.array([query.load for query in queries]), self._loads)
        median, upper = self._combine((prefill_ms, step_ms, decode_ms), weights, self._correction_state)
        queued_ms = np.array([query.queued_ms for query in queries])
        return median + queued_ms, upper + queued_ms

    def predict_all(
        self,
        *,
        text_tokens: int,
        images: float,
        new_tokens: int,
        batch: int = 1,
        load: float = 0.0,
        queued_ms: float = 0.0,
        after: CompletedStage = "receipt",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict one request under every plan of the space, in the order of `space.plans`.

        The arguments are those of `LatencyQuery`. Without images the tiers of plans are ignored.

        Returns:
            Median and upper quantile, each of shape [plans], milliseconds.

        Raises:
            InputError: A value is out of range.
        """
        check_request_size(text_tokens, images, new_tokens, batch, load, queued_ms)
        check_one_of(COMPLETED_STAGES, after=after)
        latencies = self._cache.lookup((text_tokens, images, new_tokens, batch, after))
        low, fraction = self._cache.locate_load(load)
        state = self._correction_state
        median, upper = self._predict_quantiles(
            latencies.prefill_ms, latencies.step_ms, latencies.decode_ms, state.prefill, state.step,
            state.margins, self._state.scale_coefficients, MIN_RELATIVE_SCALE, low, float(fraction),
            float(queued_ms),
        )  # fmt: skip
        return median, upper

    def observe(self, query: LatencyQuery, measured_ms: float, *, prefill_ms: float | None = None) -> None:
        """Learn from a finished request.

        Args:
            query: The request with its actual queueing time and number of new tokens; `after` is `"receipt"`.
            measured_ms: Time from receipt to the last token.
            prefill_ms: Time from the end of queueing to the first token, if known; each phase is then
                corrected by its own error.

        Raises:
            InputError: A time is NaN, negative or contradicts another.
        """
        service_ms = measured_ms - query.queued_ms
        if not (math.isfinite(measured_ms) and service_ms > 0.0):
            raise InputError(
                f"`measured_ms` (={measured_ms}) must be finite and above `queued_ms` (={query.queued_ms})"
            )
        if prefill_ms is not None and not 0.0 < prefill_ms <= service_ms:
            raise InputError(
                f"`prefill_ms` (={prefill_ms}) must be above 0 and at most the service time, {service_ms} ms"
            )
        if query.after != "receipt":
            raise InputError(f"`after` (={query.after!r}) must be 'receipt' for a finished request")
        times = self._predict_phases(query)
        weights = interpolation_weights(np.array([query.load]), self._loads)
        with self._lock:
            state = self._correction_state
            (median,), (upper,) = self._combine(times, weights, state)
            (load_weights,) = weights
            prefill, step, decode = (load_weights @ phase_ms for phase_ms in times)
            factor = load_weights @ state.step
            scale = residual_scale(
                load_weights @ self._state.scale_coefficients, prefill * (load_weights @ state.prefill),
                step * factor, decode * factor,
            )  # fmt: skip
            nearest = int(load_weights.argmax())
            self._margins[nearest].add(float((service_ms - median) / scale), missed=service_ms > upper)
            for margin in (*self._margins[:nearest], *self._margins[nearest + 1 :]):
                margin.skip()
            self._correct(load_weights, float(prefill), float(decode), service_ms, prefill_ms)
            self._correction_state = self._snapshot_corrections()

    def forget(self, fraction: float, *, keep_medians: bool = False) -> None:
        """Move back towards the calibrated state.

        A server that refuses requests because of high predictions observes no corrections to them.

        Args:
            fraction: Fraction of the learned corrections to remove, 0 to 1.
            keep_medians: Whether to keep the corrections of medians, which outliers do not change.

        Raises:
            InputError: `fraction` is out of range.
        """
        check_between(0.0, 1.0, fraction=fraction)
        with self._lock:
            drift = () if keep_medians else (self._state.prefill_correction, self._state.step_correction)
            for component in (*self._margins, *drift):
                component.forget(fraction)
            self._correction_state = self._snapshot_corrections()

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types, including everything learned from observations."""
        with self._lock:
            return self._update_state().to_dict()

    @classmethod
    def from_dict(cls, record: object, source: Path | str = "predictor") -> PlanLatencyPredictor:
        """Build a predictor from the result of `to_dict`; `source` is its name in error messages.

        Raises:
            FileFormatError: The record is of another format or version, or its content is invalid.
        """
        return cls(_PredictorState.from_dict(record, source))

    def save(self, path: Path | str) -> None:
        """Write the predictor as JSON, including everything learned from observations.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock:
            self._update_state().save(path)

    @classmethod
    def load(cls, path: Path | str) -> PlanLatencyPredictor:
        """Read what `save` wrote.

        Raises:
            InputError: The file does not exist.
            FileFormatError: The file is foreign, damaged, or of another version.
        """
        return cls(_PredictorState.load(path))

    def _update_state(self) -> _PredictorState:
        return self._state.model_copy(update={"margins": tuple(margin.state for margin in self._margins)})

    def _make_cache(self, plans: Sequence[Plan]) -> PlanLatencyCache:
        return PlanLatencyCache(
            self._state.tables, self.space.geometry, plans, self.metadata.vision_tokens,
            PaddingBuckets.from_config(self.metadata.config),
        )  # fmt: skip

    def _predict_phases(self, query: LatencyQuery) -> PhaseTimes:
        """Uncorrected times of a query, each of shape [L]."""
        index, latency_cache = self._plan_index.get(query.plan), self._cache
        if index is None:
            index, latency_cache = 0, self._make_cache([query.plan])
        latencies = latency_cache.lookup(
            (query.text_tokens, query.images, query.new_tokens, query.batch, query.after)
        )
        return latencies.prefill_ms[:, index], latencies.step_ms[:, index], latencies.decode_ms[:, index]

    def _combine(
        self, times: PhaseTimes, weights: np.ndarray, state: CorrectionState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrected median and upper quantile, each [n], not decreasing with the load.

        Args:
            times: Uncorrected times, each of shape [n, L] or [L].
            weights: Interpolation between the loads of the tables, shape [n, L].
            state: Corrections.
        """
        prefill, step, decode = times[0] * state.prefill, times[1] * state.step, times[2] * state.step
        median = prefill + decode
        upper = median + state.margins * residual_scale(self._state.scale_coefficients, prefill, step, decode)
        median, upper = np.maximum.accumulate(median, axis=-1), np.maximum.accumulate(upper, axis=-1)
        return (median * weights).sum(axis=1), (upper * weights).sum(axis=1)

    def _correct(
        self,
        weights: np.ndarray,
        prefill: float,
        decode: float,
        service_ms: float,
        prefill_ms: float | None,
    ) -> None:
        """Update the drift corrections; `weights` is the weight of the observation at each load, [L]."""
        prefill_correction, step_correction = self._state.prefill_correction, self._state.step_correction
        if prefill_ms is None:
            # The error is attributed to each phase in proportion to its time.
            total = prefill + decode
            prefill_correction.add(service_ms / total, weights * (prefill / total))
            if decode:
                step_correction.add(service_ms / total, weights * (decode / total))
            return
        prefill_correction.add(prefill_ms / prefill, weights)
        if decode and service_ms > prefill_ms:
            step_correction.add((service_ms - prefill_ms) / decode, weights)

    def _snapshot_corrections(self) -> CorrectionState:
        return CorrectionState(
            prefill=self._state.prefill_correction.compute_factors(),
            step=self._state.step_correction.compute_factors(),
            margins=np.array([margin.value for margin in self._margins]),
        )


class _PredictorState(Artifact):
    """Fitted and learned values of a predictor at L loads; the content of its file."""

    FORMAT: ClassVar[str] = "sparseflow.adaptive.latency-predictor"
    VERSION: ClassVar[int] = 5
    HINT: ClassVar[str] = "fit it again with `sparseflow adaptive profile` into the same profile"

    metadata: ProfileMetadata
    space: Annotated[PlanSpace, DictField()]
    level: Annotated[float, Field(gt=0.5, lt=1.0)]
    tiers: tuple[Tier, ...]
    held_out_error: Annotated[float, Field(ge=0.0)]
    tables: PhaseTables
    scale_coefficients: Annotated[np.ndarray, ArrayField(np.float64, ndim=2, ge=0.0)]
    margins: tuple[MarginState, ...]
    prefill_correction: DriftCorrection
    step_correction: DriftCorrection

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        geometry, tables = self.space.geometry, (self.tables.prefill, *self.tables.steps)
        loads = tables[0].loads.tolist()
        if not self.tables.steps or any(table.loads.tolist() != loads for table in tables):
            raise ValueError("`tables` must have at least one step table, all with the loads of the prefill")
        sizes = {
            len(self.scale_coefficients), len(self.margins),
            len(self.prefill_correction.per_load), len(self.step_correction.per_load),
        }  # fmt: skip
        if sizes != {len(loads)} or self.scale_coefficients.shape[1] != 4:
            raise ValueError(f"expected margins, scales and corrections at {len(loads)} loads")
        num_features = count_plan_features(geometry)
        for table in tables:
            if table.coefficients.shape[3] != num_features or table.vision.shape[1] not in (
                0, len(geometry.tiers),
            ):  # fmt: skip
                raise ValueError(
                    f"expected {num_features} plan features and {len(geometry.tiers)} tiers, got "
                    f"{table.coefficients.shape[3]} and {table.vision.shape[1]}"
                )
        if geometry != self.metadata.space.geometry:
            raise ValueError("`space` has another geometry than `metadata`")
        return self
