"""Controllers for one request at a time, on the host: the same choices as `Controllers.begin` and `finish`.

A request takes milliseconds, so that what decides about it may take some ten microseconds, while a single
small call on a GPU, or of torch, takes several. So the weights are copied once, normalisations are folded
into the products that follow, and each stage is one function (`kernels/deciding`). What is learnt by the
controllers afterwards is not seen.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparseflow.adaptive.controllers.budget_encoding import DIM, LEAST_MS, MOST_MS, spectrum
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.controllers.language_features import placeholders
from sparseflow.adaptive.controllers.networks import FeatureProjection
from sparseflow.adaptive.kernels import policy_inference
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.space import TIERS, TOP_KS
from sparseflow.errors import InputError, RunError

_WORDS = 16384
"""Words after which the vectors that were kept are forgotten, where not all are kept; of a width of 2048 they
take 134 MB, and up to twice as much with the room for more."""
_TABLE_BYTES = 1 << 29
"""Largest table of all words that is copied."""
_CHUNK = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuStage1Output:
    """What Stage 1 chose.

    Attributes:
        tier: Its index.
        position: Its index.
        budget: What both stages were told of the budget, [256] float32.
        plan: The first plan that fits and begins so.
    """

    tier: int
    position: int
    budget: np.ndarray
    plan: int


class CpuControllers:
    """Both stages, for one row.

    Args:
        controllers: What to copy.

    Attributes:
        width: Of the model, d.

    Raises:
        MissingExtraError: Numba is missing.
    """

    def __init__(self, controllers: Controllers) -> None:
        self.width = controllers.width
        self._shapes = (controllers.width,), (len(controllers.space),)
        space, first, second = controllers.space, controllers.stage1, controllers.stage2
        actions = [space.action(plan) for plan in space.plans]
        self._begins, self._ends = (
            np.array(each).T.copy()
            for each in (
                [(action.tier, action.position) for action in actions],
                [(action.top_k, action.option) for action in actions],
            )
        )
        self._kernels = policy_inference.kernels()
        self._first = _StageWeights(first.language, first.budget, first.fuse, (first.tier, first.insertion))
        self._second = _StageWeights(
            second.latency_token, second.budget, second.fuse, (second.top_k, second.option)
        )
        self._nowhere, self._position = np.empty(0, np.float32), _copy(second.position.weight)
        self._frequency, self._amplitude = (each.numpy() for each in spectrum(DIM, torch.device("cpu")))

    def begin(self, language: np.ndarray, budget_ms: float, fits: np.ndarray) -> CpuStage1Output:
        """Stage 1's most probable choices.

        Args:
            language: [d] float32.
            budget_ms: What is left.
            fits: Plans that may come of it, [plans] bool.

        Raises:
            InputError: The budget is NaN, 0 or less, nothing fits, or an array is of another size.
            RunError: Logits are not finite.
        """
        if not budget_ms > 0.0:
            raise InputError(
                f"a latency budget must be above 0 ms, not {budget_ms}; leave it out for no budget"
            )
        self._check_shapes(language, fits)
        angle = math.log(min(max(budget_ms, LEAST_MS), MOST_MS)) * (math.pi / math.log(MOST_MS))
        budget = self._kernels.encoded(angle, self._frequency, self._amplitude)
        one = self._first
        at = self._kernels.stage(
            language, one.centre[0], one.scale[0], one.epsilon, one.weights, budget, self._nowhere,
            self._begins, len(TIERS), fits, self._begins, -1, -1,
        )  # fmt: skip
        self._check(at, "`fits` allows no plan; allow at least the cheapest")
        tier, position = self._begins[:, at].tolist()
        return CpuStage1Output(tier=tier, position=position, budget=budget, plan=at)

    def finish(self, latency_token: np.ndarray, begun: CpuStage1Output, fits: np.ndarray) -> int:
        """Stage 2's most probable choices, which complete the plan: its number.

        Args:
            latency_token: [d] float32.
            begun: What `begin` gave.
            fits: Plans that may come of it, [plans] bool.

        Raises:
            InputError: No plan that fits begins so, or an array is of another size.
            RunError: Logits are not finite.
        """
        self._check_shapes(latency_token, fits)
        one, position = self._second, begun.position
        at = self._kernels.stage(
            latency_token, one.centre[position], one.scale[position], one.epsilon, one.weights, begun.budget,
            self._position[position], self._ends, TOP_KS, fits, self._begins, begun.tier, position,
        )  # fmt: skip
        self._check(at, "no plan that fits begins with this tier and position")
        return at

    def _check_shapes(self, vector: np.ndarray, fits: np.ndarray) -> None:
        # The kernels look at no bounds.
        if (vector.shape, fits.shape) != self._shapes:
            raise InputError(
                f"the controllers are of a model of width {self.width} and of {self._shapes[1][0]} plans; "
                f"given are a vector of the shape {list(vector.shape)} and fits of {list(fits.shape)}"
            )

    def _check(self, at: int, nothing: str) -> None:
        if at == self._kernels.NOT_FINITE:
            raise RunError(
                "logits are not finite: the controllers' weights, or the features that they see, are not"
            )
        if at == self._kernels.NOTHING:
            raise InputError(nothing)


class _StageWeights:
    """A stage's weights, as `kernels/deciding` takes them; the normalisation's are in the projection."""

    def __init__(
        self, feature: FeatureProjection, budget: nn.Linear, fuse: nn.Linear, heads: Sequence[nn.Linear]
    ) -> None:
        weight, bias = _linear(feature.project)
        scale, shift = _linear(feature.norm)
        first, second = zip(*map(_linear, heads), strict=True)
        parts = (
            weight * scale, weight @ shift + bias, *_linear(budget), *_linear(fuse),
            np.concatenate(first), np.concatenate(second),
        )  # fmt: skip
        self.weights = np.concatenate([part.ravel() for part in parts])
        self.centre, self.scale = _copy(feature.centre), 1.0 / _copy(feature.spread)
        self.epsilon = feature.norm.eps


class CpuWordEmbeddings:
    """Language features of prompts, as `features.language_features` gives them.

    All words' vectors are copied to the host (OLMoE-1B-7B's take 412 MB); of larger tables each word's when
    it is met first, for which its prompt waits. Several threads may ask.

    Args:
        adapter: Whose tokens these are; its word embeddings must not change.

    Attributes:
        adapter: Of the model.
        width: Of vectors; None where it is not known before the first.

    Raises:
        MissingExtraError: Numba is missing.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._placeholders = np.array(placeholders(adapter.model.config), dtype=np.int64)
        self._kernels = policy_inference.kernels()
        self._count, self._rows = 0, np.empty(0, np.int64)
        self._vectors = np.empty((0, 0), np.float32)
        self._lock = threading.Lock()
        self._whole = self._fetch_all()
        self.width = self._vectors.shape[1] if self._whole else None

    def feature(self, input_ids: Tensor) -> np.ndarray:
        """The mean of the word embeddings of a prompt's text tokens, [d] float32.

        Args:
            input_ids: [1, tokens] int64; on a GPU they are waited for.

        Raises:
            InputError: There is no text, or a token that the model does not know.
        """
        ids = np.ascontiguousarray(input_ids.numpy(force=True)[0], dtype=np.int64)
        with self._lock:
            found, count = self._mean(ids)
            if count == self._kernels.UNKNOWN:
                self._fetch(ids[~np.isin(ids, self._placeholders)])
                found, count = self._mean(ids)
        if not count:
            raise InputError("`input_ids` has no text tokens; ask something")
        return found

    def _mean(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        found = np.empty(self._vectors.shape[1], np.float32)
        return found, self._kernels.mean_word(ids, self._placeholders, self._rows, self._vectors, found)

    def _fetch_all(self) -> bool:
        """Copy the table, if it is small enough; whether it was."""
        table: Any = getattr(self.adapter.model, "get_input_embeddings", lambda: None)()
        weight: Any = getattr(table, "weight", None)
        if weight is None or 4 * weight.numel() > _TABLE_BYTES:
            return False
        self._vectors = np.empty((len(weight), weight.shape[1]), np.float32)
        for first in range(0, len(weight), _CHUNK):
            words = range(first, min(first + _CHUNK, len(weight)))
            self._vectors[words.start : words.stop] = self._embedded(words)
        self._rows = np.arange(len(weight))
        self._count = len(weight)
        return True

    def _embedded(self, words: Sequence[int]) -> np.ndarray:
        # Prompts are on the host, the table where the model is.
        device = next(self.adapter.decoder.parameters()).device
        with torch.no_grad():
            ids = torch.tensor([list(words)], device=device)
            return self.adapter.embed(ids)[0].float().numpy(force=True)

    def _fetch(self, words: np.ndarray) -> None:
        least, most = int(words.min()), int(words.max())
        if least < 0 or self._whole:
            last = f"to {self._count - 1}" if self._whole else "or more"
            raise InputError(f"`input_ids` are {least} to {most}; the model knows 0 {last}")
        if self._count > _WORDS:
            self._count, self._vectors = 0, np.empty((0, self._vectors.shape[1]), np.float32)
            self._rows[:] = self._kernels.UNKNOWN
        if most >= len(self._rows):
            more = np.full(2 * (most + 1) - len(self._rows), self._kernels.UNKNOWN, np.int64)
            self._rows = np.concatenate([self._rows, more])
        fresh = list(dict.fromkeys(words[self._rows[words] == self._kernels.UNKNOWN].tolist()))
        found = self._embedded(fresh)
        first, last = self._count, self._count + len(fresh)
        if last > len(self._vectors):
            grown = np.empty((2 * last, found.shape[1]), np.float32)
            if first:
                grown[:first] = self._vectors[:first]
            self._vectors = grown
        self._vectors[first:last] = found
        self._rows[fresh] = np.arange(first, last)
        self._count = last


def _copy(weight: Tensor) -> np.ndarray:
    return weight.detach().float().cpu().numpy().copy()


def _linear(layer: nn.Linear | nn.LayerNorm) -> tuple[np.ndarray, np.ndarray]:
    assert layer.bias is not None
    return _copy(layer.weight), _copy(layer.bias)
