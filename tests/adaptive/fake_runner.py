"""A profile runner whose latencies follow a known formula with noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from sparseflow.adaptive.plan.space import ModelGeometry, Plan, PlanSpace, Tier
from sparseflow.adaptive.profile import RequestTimes

VISION_TOKENS: dict[Tier, int] = {"low": 36, "medium": 180, "high": 504}
VISION_MS: dict[Tier, float] = {"low": 0.4, "medium": 1.5, "high": 4.0}


def make_space(depth: int = 16, top_k: int = 8, *, images: bool = True) -> PlanSpace:
    """Return the plan space of a model whose later blocks are less important."""
    geometry = (
        ModelGeometry(depth=depth, top_k=top_k)
        if images
        else ModelGeometry(depth=depth, top_k=top_k, tiers=())
    )
    return PlanSpace.from_importance(geometry, [1.0 / (1 + block) for block in range(depth)])


def compute_prefill_ms(plan: Plan, text_tokens: int, images: float = 1, *, top_k: int = 8) -> float:
    """Return the median prefill time of an idle device.

    The formula has an overhead, a vision tower, quadratic attention and experts that saturate.
    """
    tokens = text_tokens + (images * VISION_TOKENS[plan.tier] if plan.tier else 0)
    vision_ms = images * VISION_MS[plan.tier] if plan.tier else 0.0

    def block(num_experts: int) -> float:
        loaded = 64 * (1.0 - (1.0 - num_experts / 64) ** min(tokens, 2000))
        return 0.1 + 6e-4 * tokens + 3e-7 * tokens**2 + max(0.003 * loaded, 2e-4 * tokens * num_experts)

    first = plan.insertion_position
    return (
        0.8
        + 1e-4 * tokens
        + vision_ms
        + first * block(top_k)
        + (len(plan.blocks) - first) * block(plan.top_k)
    )


def compute_step_ms(plan: Plan, context: float, batch: int = 1, *, top_k: int = 8) -> float:
    """Return the median step time of an idle device; a step reads the experts of its batch."""

    def block(num_experts: int) -> float:
        return 0.08 + 2e-6 * context * batch + 0.004 * 64 * (1.0 - (1.0 - num_experts / 64) ** batch)

    first = plan.insertion_position
    return 0.3 + first * block(top_k) + (len(plan.blocks) - first) * block(plan.top_k)


class FakeRunner:
    """A `ProfileRunner` with random times.

    Args:
        seed: Seed of the noise.
        noise: Relative deviation of each time; that of whole requests is half as large.
        spike: Fraction of times that are up to three times as long.
        fails: Function of plan and text tokens that returns whether the request fails.
    """

    def __init__(self, seed: int = 0, *, noise: float = 0.03, spike: float = 0.0, fails: Any = None) -> None:
        self.generator = np.random.default_rng(seed)
        self.noise, self.spike, self.fails = noise, spike, fails
        self.load = 0.0
        self.factor = 1.0
        self.calls: list[tuple[str, int, int, int]] = []
        self.model_id, self.device = "fake", "cpu"
        self.vision_tokens: Mapping[Tier, int] = VISION_TOKENS
        self.config: Mapping[str, Any] = {"runner": "fake"}

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        self.calls.append((plan.id, text_tokens, steps, batch))
        if self.fails is not None and self.fails(plan, text_tokens):
            raise RuntimeError("out of memory\nsecond line")
        return self.request(plan, text_tokens, 1, steps, batch)

    def request(
        self, plan: Plan, text_tokens: int, images: float, steps: int, batch: int = 1
    ) -> RequestTimes:
        """Return the times of a request under the current load."""
        factor = (
            self.factor
            * (1.0 + 1.5 * self.load**2)
            * np.exp(0.5 * self._noise_level() * self.generator.normal())
        )
        prompt = text_tokens + (images * VISION_TOKENS[plan.tier] if plan.tier else 0)
        return RequestTimes(
            prefill_ms=factor * self._add_noise(compute_prefill_ms(plan, text_tokens, images)),
            steps_ms=tuple(
                factor * self._add_noise(compute_step_ms(plan, prompt + 1 + index, batch))
                for index in range(steps)
            ),
        )

    @contextmanager
    def apply_load(self, load: float) -> Iterator[None]:
        """Apply a background load."""
        previous, self.load = self.load, load
        yield
        self.load = previous

    def _noise_level(self) -> float:
        return self.noise * (1.0 + 2.0 * self.load)

    def _add_noise(self, median: float) -> float:
        value = median * np.exp(self._noise_level() * self.generator.normal())
        if self.generator.random() < self.spike:
            value *= 1.0 + 2.0 * self.generator.random()
        return float(value)
