"""CPU inference of the controllers for one request.

A request takes milliseconds, so choosing its plan may take tens of microseconds, while one small operation of
torch or on a GPU takes several. The weights are copied once, normalization is folded into the following
product, and each stage is one compiled function (`kernels/policy_inference`). Later changes of the
controllers have no effect.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparseflow.adaptive.controllers.budget_encoding import DIM, MAX_BUDGET_MS, MIN_BUDGET_MS, budget_spectrum
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.controllers.language_features import get_placeholder_tokens
from sparseflow.adaptive.controllers.networks import FeatureProjection
from sparseflow.adaptive.kernels import policy_inference
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.space import TIERS, TOP_KS
from sparseflow.errors import InputError, RunError

_MAX_CACHED_WORDS = 16384
"""Cached word vectors after which the cache is cleared, if the table is not copied completely. At width 2048
they take 134 MB, and up to twice that with spare capacity.
"""
_TABLE_BYTES = 1 << 29
"""Maximum size of a word embedding table that is copied completely."""
_CHUNK = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuStage1Output:
    """Choices of stage 1.

    Attributes:
        tier: Index of the tier.
        position: Index of the insertion position.
        budget: Encoded budget, [256] float32.
        plan: First feasible plan with this tier and position.
    """

    tier: int
    position: int
    budget: np.ndarray
    plan: int


class CpuControllers:
    """Both stages for one row; the choices equal those of `Controllers`.

    Args:
        controllers: Controllers to copy.

    Attributes:
        width: Hidden size d of the model.

    Raises:
        MissingExtraError: Numba is missing.
    """

    def __init__(self, controllers: Controllers) -> None:
        self.width = controllers.width
        self._shapes = (controllers.width,), (len(controllers.space),)
        space, first, second = controllers.space, controllers.stage1, controllers.stage2
        actions = np.array([astuple(space.action(plan)) for plan in space.plans])
        self._stage1_choices, self._stage2_choices = actions[:, :2].T.copy(), actions[:, 2:].T.copy()
        self._kernels = policy_inference.load_kernels()
        self._first = _StageWeights(first.language, first.budget, first.fuse, (first.tier, first.insertion))
        self._second = _StageWeights(
            second.latency_token, second.budget, second.fuse, (second.top_k, second.option)
        )
        self._no_position, self._position = np.empty(0, np.float32), _to_numpy(second.position.weight)
        self._frequency, self._amplitude = (
            values.numpy() for values in budget_spectrum(DIM, torch.device("cpu"))
        )

    def choose_stage1(self, language: np.ndarray, budget_ms: float, fits: np.ndarray) -> CpuStage1Output:
        """Choose the most probable tier and insertion position.

        Args:
            language: Language feature, [d] float32.
            budget_ms: Remaining budget.
            fits: Plans that may follow, [plans] bool.

        Raises:
            InputError: The budget is NaN or not above 0, no plan is allowed, or an array has the wrong size.
            RunError: Logits are not finite.
        """
        if not budget_ms > 0.0:
            raise InputError(f"a latency budget must be above 0 ms, not {budget_ms}; omit it for no budget")
        self._check_shapes(language, fits)
        angle = math.log(min(max(budget_ms, MIN_BUDGET_MS), MAX_BUDGET_MS)) * (
            math.pi / math.log(MAX_BUDGET_MS)
        )
        budget = self._kernels.encode_budget(angle, self._frequency, self._amplitude)
        stage1, weights = self._stage1_choices, self._first
        plan = self._kernels.run_stage(
            language, weights.center[0], weights.scale[0], weights.epsilon, weights.weights, budget,
            self._no_position, stage1, len(TIERS), fits, stage1, -1, -1,
        )  # fmt: skip
        self._check_result(plan, "`fits` allows no plan; allow at least the cheapest")
        tier, position = self._stage1_choices[:, plan].tolist()
        return CpuStage1Output(tier=tier, position=position, budget=budget, plan=plan)

    def choose_stage2(
        self, latency_token: np.ndarray, stage1_output: CpuStage1Output, fits: np.ndarray
    ) -> int:
        """Choose the most probable top-k and block count; returns the plan number.

        Args:
            latency_token: Latency token, [d] float32.
            stage1_output: Result of `choose_stage1`.
            fits: Plans that may follow, [plans] bool.

        Raises:
            InputError: No allowed plan has that tier and position, or an array has the wrong size.
            RunError: Logits are not finite.
        """
        self._check_shapes(latency_token, fits)
        weights, position = self._second, stage1_output.position
        plan = self._kernels.run_stage(
            latency_token, weights.center[position], weights.scale[position], weights.epsilon,
            weights.weights, stage1_output.budget, self._position[position], self._stage2_choices, TOP_KS,
            fits, self._stage1_choices, stage1_output.tier, position,
        )  # fmt: skip
        self._check_result(plan, "no plan that fits begins with this tier and position")
        return plan

    def _check_shapes(self, vector: np.ndarray, fits: np.ndarray) -> None:
        # The kernels do not check bounds.
        if (vector.shape, fits.shape) != self._shapes:
            raise InputError(
                f"the controllers need width {self.width} and {self._shapes[1][0]} plans, but the "
                f"vector has shape {list(vector.shape)} and `fits` {list(fits.shape)}"
            )

    def _check_result(self, plan: int, no_plan_message: str) -> None:
        if plan == self._kernels.NOT_FINITE:
            raise RunError("logits are not finite; check the controllers' weights and the features")
        if plan == self._kernels.NO_PLAN:
            raise InputError(no_plan_message)


class _StageWeights:
    """Weights of a stage in the layout of the kernels, with layer norm folded in."""

    def __init__(
        self, feature: FeatureProjection, budget: nn.Linear, fuse: nn.Linear, heads: Sequence[nn.Linear]
    ) -> None:
        weight, bias = _get_weights(feature.project)
        scale, shift = _get_weights(feature.norm)
        first, second = zip(*map(_get_weights, heads), strict=True)
        parts = (
            weight * scale, weight @ shift + bias, *_get_weights(budget), *_get_weights(fuse),
            np.concatenate(first), np.concatenate(second),
        )  # fmt: skip
        self.weights = np.concatenate([part.ravel() for part in parts])
        self.center, self.scale = _to_numpy(feature.center), 1.0 / _to_numpy(feature.scale)
        self.epsilon = feature.norm.eps


class CpuWordEmbeddings:
    """Language features of prompts, equal to `mean_text_embedding`.

    The complete word embedding table is copied to the CPU (412 MB for OLMoE-1B-7B). Of larger tables, each
    vector is copied when its word first occurs, for which that prompt waits. Thread-safe.

    Args:
        adapter: Adapter of the model; its word embeddings must not change.

    Attributes:
        adapter: Adapter of the model.
        width: Size of the vectors; None until the first is known.

    Raises:
        MissingExtraError: Numba is missing.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._placeholders = np.array(get_placeholder_tokens(adapter.model.config), dtype=np.int64)
        self._kernels = policy_inference.load_kernels()
        self._count, self._rows = 0, np.empty(0, np.int64)
        self._vectors = np.empty((0, 0), np.float32)
        self._lock = threading.Lock()
        self._has_all = self._fetch_all()
        self.width = self._vectors.shape[1] if self._has_all else None

    def compute_feature(self, input_ids: Tensor) -> np.ndarray:
        """Mean word embedding of a prompt's text tokens, [d] float32.

        Args:
            input_ids: [1, tokens] int64; on a GPU this waits for them.

        Raises:
            InputError: There is no text, or an unknown token.
        """
        ids = np.ascontiguousarray(input_ids.numpy(force=True)[0], dtype=np.int64)
        with self._lock:
            mean, count = self._compute_mean(ids)
            if count == self._kernels.UNKNOWN:
                self._fetch(ids[~np.isin(ids, self._placeholders)])
                mean, count = self._compute_mean(ids)
        if not count:
            raise InputError("`input_ids` has no text tokens")
        return mean

    def _compute_mean(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        mean = np.empty(self._vectors.shape[1], np.float32)
        return mean, self._kernels.mean_embedding(ids, self._placeholders, self._rows, self._vectors, mean)

    def _fetch_all(self) -> bool:
        """Copy the table if it is small enough; returns whether it was."""
        table: Any = getattr(self.adapter.model, "get_input_embeddings", lambda: None)()
        weight: Any = getattr(table, "weight", None)
        if weight is None or 4 * weight.numel() > _TABLE_BYTES:
            return False
        self._vectors = np.empty((len(weight), weight.shape[1]), np.float32)
        for first in range(0, len(weight), _CHUNK):
            words = range(first, min(first + _CHUNK, len(weight)))
            self._vectors[words.start : words.stop] = self._embed(words)
        self._rows = np.arange(len(weight))
        self._count = len(weight)
        return True

    def _embed(self, words: Sequence[int]) -> np.ndarray:
        # Prompts are on the CPU, the table is on the model's device.
        device = next(self.adapter.decoder.parameters()).device
        with torch.no_grad():
            ids = torch.tensor([list(words)], device=device)
            return self.adapter.embed(ids)[0].float().numpy(force=True)

    def _fetch(self, words: np.ndarray) -> None:
        min_id, max_id = int(words.min()), int(words.max())
        if min_id < 0 or self._has_all:
            last = f"to {self._count - 1}" if self._has_all else "or more"
            raise InputError(
                f"`input_ids` range from {min_id} to {max_id}; the model's vocabulary is 0 {last}"
            )
        if self._count > _MAX_CACHED_WORDS:
            self._count, self._vectors = 0, np.empty((0, self._vectors.shape[1]), np.float32)
            self._rows[:] = self._kernels.UNKNOWN
        if max_id >= len(self._rows):
            padding = np.full(2 * (max_id + 1) - len(self._rows), self._kernels.UNKNOWN, np.int64)
            self._rows = np.concatenate([self._rows, padding])
        new_words = list(dict.fromkeys(words[self._rows[words] == self._kernels.UNKNOWN].tolist()))
        vectors = self._embed(new_words)
        first, last = self._count, self._count + len(new_words)
        if last > len(self._vectors):
            enlarged = np.empty((2 * last, vectors.shape[1]), np.float32)
            if first:
                enlarged[:first] = self._vectors[:first]
            self._vectors = enlarged
        self._vectors[first:last] = vectors
        self._rows[new_words] = np.arange(first, last)
        self._count = last


def _to_numpy(weight: Tensor) -> np.ndarray:
    return weight.detach().float().cpu().numpy().copy()


def _get_weights(layer: nn.Linear | nn.LayerNorm) -> tuple[np.ndarray, np.ndarray]:
    assert layer.bias is not None
    return _to_numpy(layer.weight), _to_numpy(layer.bias)
