"""A device that is a formula: what plans take on it is known, noise and all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from sparseflow.adaptive.plan.space import ModelGeometry, Plan, PlanSpace, Tier
from sparseflow.adaptive.profile import RequestTimes

VISION: dict[Tier, int] = {"low": 36, "medium": 180, "high": 504}
SEEN_MS: dict[Tier, float] = {"low": 0.4, "medium": 1.5, "high": 4.0}


def space(depth: int = 16, top_k: int = 8, *, images: bool = True) -> PlanSpace:
    """All plans of a model whose later blocks matter less."""
    geometry = (
        ModelGeometry(depth=depth, top_k=top_k)
        if images
        else ModelGeometry(depth=depth, top_k=top_k, tiers=())
    )
    return PlanSpace.from_importance(geometry, [1.0 / (1 + block) for block in range(depth)])


def prefill_ms(plan: Plan, text_tokens: int, images: float = 1, *, top_k: int = 8) -> float:
    """Median of an idle device: overhead, vision tower, attention that is quadratic, experts that
    saturate."""
    tokens = text_tokens + (images * VISION[plan.tier] if plan.tier else 0)
    seen = images * SEEN_MS[plan.tier] if plan.tier else 0.0

    def block(k: int) -> float:
        loaded = 64 * (1.0 - (1.0 - k / 64) ** min(tokens, 2000))
        return 0.1 + 6e-4 * tokens + 3e-7 * tokens**2 + max(0.003 * loaded, 2e-4 * tokens * k)

    first = plan.insertion_position
    return 0.8 + 1e-4 * tokens + seen + first * block(top_k) + (len(plan.blocks) - first) * block(plan.top_k)


def step_ms(plan: Plan, context: float, batch: int = 1, *, top_k: int = 8) -> float:
    """Median of an idle device: a step reads the experts that its batch goes to."""

    def block(k: int) -> float:
        return 0.08 + 2e-6 * context * batch + 0.004 * 64 * (1.0 - (1.0 - k / 64) ** batch)

    first = plan.insertion_position
    return 0.3 + first * block(top_k) + (len(plan.blocks) - first) * block(plan.top_k)


class FakeRunner:
    """A `ProfileRunner` whose times are drawn.

    Args:
        seed: What noise is drawn from.
        noise: Relative scatter of each time, and half as much of whole requests.
        spike: Share of times that are up to three times as long.
        fails: (plan, text tokens) -> whether it cannot be run.
    """

    def __init__(self, seed: int = 0, *, noise: float = 0.03, spike: float = 0.0, fails: Any = None) -> None:
        self.generator = np.random.default_rng(seed)
        self.noise, self.spike, self.fails = noise, spike, fails
        self.load = 0.0
        self.factor = 1.0
        self.calls: list[tuple[str, int, int, int]] = []
        self.model_id, self.device = "fake", "cpu"
        self.vision_tokens: Mapping[Tier, int] = VISION
        self.config: Mapping[str, Any] = {"runner": "fake"}

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        self.calls.append((plan.id, text_tokens, steps, batch))
        if self.fails is not None and self.fails(plan, text_tokens):
            raise RuntimeError("out of memory\nsecond line")
        return self.request(plan, text_tokens, 1, steps, batch)

    def request(
        self, plan: Plan, text_tokens: int, images: float, steps: int, batch: int = 1
    ) -> RequestTimes:
        """What a request takes, now."""
        whole = (
            self.factor * (1.0 + 1.5 * self.load**2) * np.exp(0.5 * self._noise() * self.generator.normal())
        )
        prompt = text_tokens + (images * VISION[plan.tier] if plan.tier else 0)
        return RequestTimes(
            prefill_ms=whole * self._drawn(prefill_ms(plan, text_tokens, images)),
            steps_ms=tuple(whole * self._drawn(step_ms(plan, prompt + 1 + at, batch)) for at in range(steps)),
        )

    @contextmanager
    def apply_load(self, load: float) -> Iterator[None]:
        """Apply a background load."""
        previous, self.load = self.load, load
        yield
        self.load = previous

    def _noise(self) -> float:
        return self.noise * (1.0 + 2.0 * self.load)

    def _drawn(self, median: float) -> float:
        found = median * np.exp(self._noise() * self.generator.normal())
        if self.generator.random() < self.spike:
            found *= 1.0 + 2.0 * self.generator.random()
        return float(found)
