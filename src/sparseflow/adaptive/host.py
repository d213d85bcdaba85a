"""Controllers for one request at a time, on the host: the same choices as `Controllers.begin` and `finish`.

A request takes milliseconds, so that what decides about it may take some ten microseconds, while a single
small call on a GPU, or of torch, takes several. So the weights are copied once, normalisations are folded
into the products that follow, and choices are made among the numbers of the plans that fit. What is learnt by
the controllers afterwards is not seen.
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

from sparseflow.adaptive.adapters.base import Adapter
from sparseflow.adaptive.budget import DIM, LEAST_MS, MOST_MS, spectrum
from sparseflow.adaptive.controllers import Controllers
from sparseflow.adaptive.features import placeholders
from sparseflow.adaptive.plan import OPTIONS, POSITIONS, TIERS, TOP_KS
from sparseflow.adaptive.stages import Feature
from sparseflow.core.extras import require
from sparseflow.errors import InputError, RunError

_ROOT = np.float32(math.sqrt(0.5))
_WORDS = 16384
"""Words after which the vectors that were kept are forgotten; those of a width of 2048 take 134 MB, and up to
twice as much with the room that is kept for more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Begun:
    """What Stage 1 chose.

    Attributes:
        tier: Its index.
        position: Its index.
        budget: What both stages were told of the budget, [256] float32.
    """

    tier: int
    position: int
    budget: np.ndarray


class HostControllers:
    """Both stages, for one row.

    Args:
        controllers: What to copy.

    Raises:
        MissingExtraError: SciPy is missing.
    """

    def __init__(self, controllers: Controllers) -> None:
        space, first, second = controllers.space, controllers.stage1, controllers.stage2
        actions = [space.action(plan) for plan in space.plans]
        self._begins = [(each.tier, each.position) for each in actions]
        self._tier, self._at, top_k, option = (
            np.array(each)
            for each in zip(*((a.tier, a.position, a.top_k, a.option) for a in actions), strict=True)
        )
        self._pairs = (self._tier * len(POSITIONS) + self._at, top_k * OPTIONS + option)
        self._erf: Any = require("scipy.special", "adaptive").erf
        self._language, self._token = _Feature(first.language), _Feature(second.latency_token)
        self._budgets = [_linear(stage.budget) for stage in (first, second)]
        self._fuse = [_linear(stage.fuse) for stage in (first, second)]
        self._heads = [_stacked(first.tier, first.insertion), _stacked(second.top_k, second.option)]
        self._position = _copy(second.position.weight)
        frequency, amplitude = (each.numpy() for each in spectrum(DIM, torch.device("cpu")))
        self._frequency, self._amplitude = frequency, amplitude

    def begin(self, language: np.ndarray, budget_ms: float, fits: np.ndarray) -> Begun:
        """Stage 1's most probable choices.

        Args:
            language: [d] float32.
            budget_ms: What is left.
            fits: Plans that may come of it, [plans] bool.

        Raises:
            InputError: The budget is NaN, 0 or less, or nothing fits.
            RunError: Logits are not finite.
        """
        if not fits.any():
            raise InputError("`fits` allows no plan; allow at least the cheapest")
        budget = self._encoded(budget_ms)
        told = np.concatenate([self._language(language), _of(self._budgets[0], budget)])
        at = self._led(0, self._gelu(told), len(TIERS), fits)
        tier, position = self._begins[at]
        return Begun(tier=tier, position=position, budget=budget)

    def finish(self, latency_token: np.ndarray, begun: Begun, fits: np.ndarray) -> int:
        """Stage 2's most probable choices, which complete the plan: its number.

        Args:
            latency_token: [d] float32.
            begun: What `begin` gave.
            fits: Plans that may come of it, [plans] bool.

        Raises:
            InputError: No plan that fits begins so.
            RunError: Logits are not finite.
        """
        fits = fits & (self._tier == begun.tier) & (self._at == begun.position)
        if not fits.any():
            raise InputError("no plan that fits begins with this tier and position")
        token = self._token(latency_token, begun.position)
        told = self._gelu(np.concatenate([token, _of(self._budgets[1], begun.budget)]))
        return self._led(1, np.concatenate([told, self._position[begun.position]]), TOP_KS, fits)

    def _led(self, stage: int, told: np.ndarray, many: int, fits: np.ndarray) -> int:
        """Of the plans that fit, that of a stage's most probable first choice, of `many`, and then second."""
        logits: list[float] = _of(self._heads[stage], self._gelu(_of(self._fuse[stage], told))).tolist()
        if not all(map(math.isfinite, logits)):
            raise RunError(
                "logits are not finite: the controllers' weights, or the features that they see, are not"
            )
        first, second = _ranks(logits[:many]), _ranks(logits[many:])
        keys = np.array([len(second) * one + other for one in first for other in second])
        return int(np.where(fits, keys[self._pairs[stage]], -1).argmax())

    def _encoded(self, budget_ms: float) -> np.ndarray:
        """As `budget.encode`."""
        if not budget_ms > 0.0:
            raise InputError(
                f"a latency budget must be above 0 ms, not {budget_ms}; leave it out for no budget"
            )
        angle = math.log(min(max(budget_ms, LEAST_MS), MOST_MS)) * (math.pi / math.log(MOST_MS))
        phase = angle * self._frequency
        found = np.empty(DIM, np.float32)
        half = DIM // 2
        np.multiply(self._amplitude, np.sin(phase), out=found[:half], casting="same_kind")
        np.multiply(self._amplitude, np.cos(phase), out=found[half:], casting="same_kind")
        return found

    def _gelu(self, x: np.ndarray) -> np.ndarray:
        found = self._erf(x * _ROOT)
        found += 1.0
        found *= 0.5
        found *= x
        return found


class _Feature:
    """`stages.Feature` without its last step; the normalisation's weights are in the projection."""

    def __init__(self, feature: Feature) -> None:
        weight, bias = _linear(feature.project)
        scale, shift = _linear(feature.norm)
        self._weight, self._bias = weight * scale, weight @ shift + bias
        self._centre, self._scale = _copy(feature.centre), 1.0 / _copy(feature.spread)
        self._eps = feature.norm.eps

    def __call__(self, vector: np.ndarray, kind: int = 0) -> np.ndarray:
        even = (vector - self._centre[kind]) * self._scale[kind]
        even -= even.sum() / even.size
        return (self._weight @ even) * (1.0 / math.sqrt(even @ even / len(even) + self._eps)) + self._bias


class HostWords:
    """Language features of prompts, as `features.language_features` gives them.

    Each word's vector is fetched to the host once. Several threads may ask.

    Args:
        adapter: Whose tokens these are; its word embeddings must not change.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._placeholders = placeholders(adapter.model.config)
        self._known: dict[int, int] = {}
        self._vectors = np.empty((0, 0), np.float32)
        self._lock = threading.Lock()

    def feature(self, input_ids: Tensor) -> np.ndarray:
        """The mean of the word embeddings of a prompt's text tokens, [d] float32.

        Args:
            input_ids: [1, tokens] int64; on a GPU they are waited for.

        Raises:
            InputError: There is no text.
        """
        ids = input_ids[0].numpy(force=True)
        for token in self._placeholders:
            ids = ids[ids != token]
        words: list[int] = ids.tolist()
        if not words:
            raise InputError("`input_ids` has no text tokens; ask something")
        with self._lock:
            try:
                at = [self._known[word] for word in words]
            except KeyError:
                self._fetch(words)
                at = [self._known[word] for word in words]
            some = self._vectors[at]
        return some.sum(0) / np.float32(len(at))

    def _fetch(self, words: Sequence[int]) -> None:
        if len(self._known) > _WORDS:
            self._known, self._vectors = {}, self._vectors[:0]
        fresh = list(dict.fromkeys(word for word in words if word not in self._known))
        # Prompts are on the host, the table where the model is.
        device = next(self._adapter.decoder.parameters()).device
        with torch.no_grad():
            found = self._adapter.embed(torch.tensor([fresh], device=device))[0].float().numpy(force=True)
        first = len(self._known)
        if first + len(fresh) > len(self._vectors):
            grown = np.empty((2 * (first + len(fresh)), found.shape[1]), np.float32)
            if first:
                grown[:first] = self._vectors[:first]
            self._vectors = grown
        self._vectors[first : first + len(fresh)] = found
        self._known |= {word: first + at for at, word in enumerate(fresh)}


def _copy(weight: Tensor) -> np.ndarray:
    return weight.detach().float().cpu().numpy().copy()


def _linear(layer: nn.Linear | nn.LayerNorm) -> tuple[np.ndarray, np.ndarray]:
    assert layer.bias is not None
    return _copy(layer.weight), _copy(layer.bias)


def _stacked(*layers: nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    weights, biases = zip(*map(_linear, layers), strict=True)
    return np.concatenate(weights), np.concatenate(biases)


def _of(linear: tuple[np.ndarray, np.ndarray], x: np.ndarray) -> np.ndarray:
    return linear[0] @ x + linear[1]


def _ranks(values: list[float]) -> list[int]:
    """Of each, how many are below it; of equal ones the first is the highest."""
    found = [0] * len(values)
    for rank, at in enumerate(sorted(range(len(values)), key=lambda at: (values[at], -at))):
        found[at] = rank
    return found
