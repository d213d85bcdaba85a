"""Other requests in the engine while one is measured: some run when it comes, and some come later."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import GenerationRequest, InitialDecision
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.profile.random_prompts import RandomPrompts
from sparseflow.errors import InputError, RunError

MOST_LOAD = 0.9
"""Above it the line would grow without end while something is measured."""
_ALONE = 24
"""Requests that tell what one takes alone."""
_RATES = 4
"""Rates that are measured for a load at most."""
_NEAR = 0.03
"""Relative error of a load at which no other rate is tried."""
_FAR = 0.2
"""Relative error that no measured rate may exceed, beside the chance of few requests."""
_MANY = 20
"""Requests of which at least one comes for sure while so many do on average."""
_STAND_S = 300.0
"""Far longer than a line takes that grew by chance."""
_LOOK_S = 0.0005


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedPlanPolicy:
    """A decider that gives one plan. Unlike those of `FixedPlan`, its requests run their prompts one by one,
    as those do that are decided about."""

    plan: Plan

    def first(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision:
        return InitialDecision(tier=self.plan.tier, insertion_position=self.plan.insertion_position)

    def second(self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float) -> Plan:
        return self.plan


@dataclass(frozen=True, kw_only=True)
class RequestMix:
    """What other requests ask for; each is drawn anew.

    Attributes:
        lengths: Text tokens of their prompts.
        new_tokens: Most new tokens; from 2 on each number is as frequent.

    Raises:
        InputError: There is no length, or a number is out of range.
    """

    lengths: Sequence[int] = (16, 64)
    new_tokens: int = 17

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or self.new_tokens < 2:
            raise InputError(
                f"`lengths` (={list(self.lengths)}) must be 1 or more, some, and `new_tokens` "
                f"(={self.new_tokens}) at least 2"
            )


class BackgroundTraffic:
    """Other requests of one engine. One thread uses it.

    Args:
        engine: With its thread.
        plans: What they run.
        prompts: Makes their prompts.
        mix: What they ask for.
        settle_s: How long a stream runs before its load is believed.
        seed: What they are drawn from.
    """

    def __init__(
        self,
        engine: Engine,
        plans: Sequence[Plan],
        prompts: RandomPrompts,
        mix: RequestMix,
        *,
        settle_s: float = 8.0,
        seed: int = 0,
    ) -> None:
        self._engine, self._plans, self._prompts, self._mix = engine, tuple(plans), prompts, mix
        self._settle_s, self._random = settle_s, np.random.default_rng(seed)
        self._inside: list[RequestHandle] = []
        self._lock = threading.Lock()
        self._rates: dict[float, float] = {}
        self._failed: Exception | None = None

    @property
    def inside(self) -> int:
        """How many there are now."""
        with self._lock:
            self._inside = [handle for handle in self._inside if not handle.done]
            return len(self._inside)

    def stand(self, count: int) -> None:
        """Have so many that have begun to decode, and nobody else: some may have to leave, or to be started.

        Others that leave while the last of them begin are replaced.

        Raises:
            RunError: They were not so many for minutes, or a stream of them ended.
        """
        until_s = time.perf_counter() + _STAND_S
        started: list[RequestHandle] = []
        while True:
            self._check_stream()
            beginning = not all(handle.done or handle.tokens for handle in started)
            inside = self.inside
            if inside == count and not beginning:
                return
            if time.perf_counter() > until_s:
                raise RunError(
                    f"{count} other requests were to be in the engine, and after {_STAND_S:g} s there are "
                    f"{inside}; ask for a lower load or batch, or for more tokens of a slot"
                )
            if inside < count and not beginning:
                # While they begin, one a turn, the first of them decode already.
                started = [self._submit(more=count) for _ in range(count - inside)]
            else:
                time.sleep(_LOOK_S)

    def clear(self) -> None:
        """Call all of them off."""
        with self._lock:
            for handle in self._inside:
                handle.cancel()
        while self.inside:
            time.sleep(_LOOK_S)

    @contextmanager
    def stream(self, load: float) -> Iterator[None]:
        """Within, they come at random times (Poisson), so many that they alone keep the engine busy for a
        share `load` of the time, by the engine's own count.

        Raises:
            InputError: The load is too high.
            RunError: It could not be made, or they stopped coming.
        """
        if load == 0.0:
            yield
            return
        if not 0.0 < load <= MOST_LOAD:
            raise InputError(
                f"a load of {load:g} is not 0 to {MOST_LOAD}: requests would come faster than they end"
            )
        if load not in self._rates:
            self._rates[load] = self._rate(load)
        try:
            with self._coming(self._rates[load]):
                yield
        finally:
            self._failed = None
            self.clear()

    def _rate(self, load: float) -> float:
        """Requests a second that make a load."""
        alone = [self._submit().result().total_ms for _ in range(_ALONE)]
        rate = load / (float(np.mean(alone)) / 1e3)
        tried: list[tuple[float, float, float]] = []
        for _ in range(_RATES):
            share = self._share(rate)
            error = abs(share / load - 1.0)
            tried.append((error, rate, share))
            if error < _NEAR:
                break
            # Requests that share steps ask for less; a line that grew says little.
            rate *= min(max(load / share, 0.5), 2.0)
        error, rate, share = min(tried)
        # So far off is a share of this many requests, whose lengths scatter as much as their arrivals, by
        # chance alone.
        chance = math.sqrt(2.0 / max(rate * self._settle_s, 1.0))
        if error > _FAR + chance:
            raise RunError(
                f"a load of {load:g} was wanted, and the nearest of {len(tried)} rates, {rate:.1f} requests "
                f"a second, made {share:.2f}; let it settle longer, or ask for another load"
            )
        return rate

    def _share(self, rate: float) -> float:
        """Share of time that the engine works while so many come a second."""
        try:
            with self._coming(rate):
                time.sleep(self._settle_s / 4.0)
                worked, began = self._engine.worked_s, time.perf_counter()
                time.sleep(self._settle_s)
                # None came by chance, or this process was held up: so long, some must have.
                while self._engine.worked_s == worked and time.perf_counter() - began < _MANY / rate:
                    time.sleep(_LOOK_S)
                share = (self._engine.worked_s - worked) / (time.perf_counter() - began)
        finally:
            self.clear()
        if not share > 0.0:
            raise RunError(f"{rate:.1f} requests a second did not keep the engine busy at all")
        return share

    @contextmanager
    def _coming(self, rate: float) -> Iterator[None]:
        over = threading.Event()
        self._failed = None

        def come() -> None:
            due = time.perf_counter()
            try:
                while True:
                    due += float(self._random.exponential(1.0 / rate))
                    if over.wait(max(due - time.perf_counter(), 0.0)):
                        return
                    self._submit()
            except Exception as error:  # told by the thread that measures
                self._failed = error

        thread = threading.Thread(target=come, name="sparseflow-others", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        self._check_stream()

    def _check_stream(self) -> None:
        """What is measured when others no longer come is not what was asked for."""
        if self._failed is not None:
            raise RunError(f"other requests stopped coming: {self._failed}") from self._failed

    def _submit(self, more: int = 0) -> RequestHandle:
        """Start one, with `more` tokens than are drawn if they fit."""
        with self._lock:
            plan = self._plans[self._random.integers(len(self._plans))]
            length = int(self._random.choice(list(self._mix.lengths)))
            new_tokens = int(self._random.integers(2, self._mix.new_tokens + 1)) + more
            inputs = whole(self._prompts, plan, length)
        vision = self._prompts.vision[plan.tier] if plan.tier else 0
        room = self._engine.max_tokens - length - vision + 1
        handle = self._engine.submit(
            GenerationRequest(
                inputs=inputs, decide=FixedPlanPolicy(plan=plan), max_new_tokens=max(min(new_tokens, room), 1)
            )
        )
        with self._lock:
            self._inside.append(handle)
        return handle


def whole(prompts: RandomPrompts, plan: Plan, text_tokens: int) -> dict[str, Any]:
    """A prompt for a plan, of the highest tier where it has an image, as a server gets it."""
    if plan.tier is None:
        return prompts.prompt(None, text_tokens)
    return prompts.prompt(list(prompts.vision)[-1] if prompts.vision else plan.tier, text_tokens)
