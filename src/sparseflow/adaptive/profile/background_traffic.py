"""Background traffic for profiling: a Poisson load generator and a fixed number of concurrent requests."""

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
from sparseflow.core.checks import check_at_least
from sparseflow.errors import InputError, RunError

MAX_LOAD = 0.9
"""Largest load: above it the queue grows without bound during a measurement."""
_IDLE_REQUESTS = 24
"""Requests on an idle engine that estimate the service time."""
_MAX_RATES = 4
"""Maximum number of arrival rates to try for a load."""
_TARGET_ERROR = 0.03
"""Relative error of the load at which the search for a rate stops."""
_MAX_ERROR = 0.2
"""Largest accepted relative error of the load, plus the sampling error of few requests."""
_CERTAIN_ARRIVALS = 20
"""Expected arrivals after which at least one has certainly arrived."""
_CONCURRENCY_TIMEOUT_S = 300.0
"""Far longer than it takes to drain a queue that grew by chance."""
_POLL_S = 0.0005


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedPlanPolicy:
    """Request policy that always selects one plan.

    Unlike requests of `FixedPlan`, those of a policy run their prompts one by one, as in production.
    """

    plan: Plan

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision:
        return InitialDecision(tier=self.plan.tier, insertion_position=self.plan.insertion_position)

    def choose_plan(self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float) -> Plan:
        return self.plan


@dataclass(frozen=True, kw_only=True)
class RequestMix:
    """Distribution of background requests.

    Attributes:
        lengths: Text tokens of prompts, all equally likely.
        new_tokens: Maximum number of new tokens; uniform from 2.

    Raises:
        InputError: There is no length, or a number is out of range.
    """

    lengths: Sequence[int] = (16, 64)
    new_tokens: int = 17

    def __post_init__(self) -> None:
        check_at_least(1, lengths=min(self.lengths, default=0))
        check_at_least(2, new_tokens=self.new_tokens)


class BackgroundTraffic:
    """Background requests of one engine. Not thread-safe.

    Args:
        engine: Running engine.
        plans: Plans of the requests, all equally likely.
        prompts: Generator of prompts.
        mix: Distribution of requests.
        settle_s: How long the load of an arrival rate is measured.
        seed: Random seed.
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
        self._settle_s, self._generator = settle_s, np.random.default_rng(seed)
        self._handles: list[RequestHandle] = []
        self._lock = threading.Lock()
        self._rates: dict[float, float] = {}
        self._stream_error: Exception | None = None

    @property
    def num_running(self) -> int:
        """Number of unfinished background requests."""
        with self._lock:
            self._handles = [handle for handle in self._handles if not handle.finished]
            return len(self._handles)

    def hold_concurrency(self, count: int) -> None:
        """Wait until exactly `count` background requests are running and all of them decode.

        Missing requests are submitted, also for those that finish while the others start.

        Raises:
            RunError: The count was not reached within minutes, or the stream failed.
        """
        deadline_s = time.perf_counter() + _CONCURRENCY_TIMEOUT_S
        submitted: list[RequestHandle] = []
        while True:
            self._check_stream()
            prefilling = not all(handle.finished or handle.tokens for handle in submitted)
            running = self.num_running
            if running == count and not prefilling:
                return
            if time.perf_counter() > deadline_s:
                raise RunError(
                    f"timed out after {_CONCURRENCY_TIMEOUT_S:g} s: expected {count} background requests, "
                    f"{running} are running; lower the load or the batch size, or raise `max_tokens`"
                )
            if running < count and not prefilling:
                # Prefills run one per engine turn, and the first requests decode during the others' prefill.
                submitted = [self._submit(extra_tokens=count) for _ in range(count - running)]
            else:
                time.sleep(_POLL_S)

    def cancel_all(self) -> None:
        """Cancel all background requests and wait until they are gone."""
        with self._lock:
            for handle in self._handles:
                handle.cancel()
        while self.num_running:
            time.sleep(_POLL_S)

    @contextmanager
    def run_stream(self, load: float) -> Iterator[None]:
        """Submit requests as a Poisson process that keeps the engine busy for a fraction `load` of the time.

        The load is that of the background requests alone, as measured by the engine.

        Raises:
            InputError: The load is out of range.
            RunError: No arrival rate reached the load, or the stream failed.
        """
        if load == 0.0:
            yield
            return
        if not 0.0 < load <= MAX_LOAD:
            raise InputError(
                f"`load` (={load:g}) must be between 0 and {MAX_LOAD}, so that requests finish faster "
                "than they arrive"
            )
        if load not in self._rates:
            self._rates[load] = self._find_rate(load)
        try:
            with self._submit_at_rate(self._rates[load]):
                yield
        finally:
            self._stream_error = None
            self.cancel_all()

    def _find_rate(self, load: float) -> float:
        """Find the arrival rate, in requests per second, that produces a load."""
        idle_ms = [self._submit().result().total_ms for _ in range(_IDLE_REQUESTS)]
        rate = load / (float(np.mean(idle_ms)) / 1e3)
        trials: list[tuple[float, float, float]] = []
        for _ in range(_MAX_RATES):
            measured_load = self._measure_load(rate)
            error = abs(measured_load / load - 1.0)
            trials.append((error, rate, measured_load))
            if error < _TARGET_ERROR:
                break
            # Requests that share decode steps need less time each; a growing queue says little.
            rate *= min(max(load / measured_load, 0.5), 2.0)
        error, rate, measured_load = min(trials)
        # Relative sampling error of this many requests, whose lengths vary as much as their arrivals.
        sampling_error = math.sqrt(2.0 / max(rate * self._settle_s, 1.0))
        if error > _MAX_ERROR + sampling_error:
            raise RunError(
                f"expected a load of {load:g}; the nearest of {len(trials)} arrival rates, {rate:.1f} "
                f"requests per second, gave {measured_load:.2f}; raise `settle_s` or choose another load"
            )
        return rate

    def _measure_load(self, rate: float) -> float:
        """Fraction of time that the engine is busy at an arrival rate."""
        try:
            with self._submit_at_rate(rate):
                time.sleep(self._settle_s / 4.0)
                busy_s, start_s = self._engine.busy_s, time.perf_counter()
                time.sleep(self._settle_s)
                # No request may have arrived by chance, or this process was suspended.
                while (
                    self._engine.busy_s == busy_s and time.perf_counter() - start_s < _CERTAIN_ARRIVALS / rate
                ):
                    time.sleep(_POLL_S)
                load = (self._engine.busy_s - busy_s) / (time.perf_counter() - start_s)
        finally:
            self.cancel_all()
        if not load > 0.0:
            raise RunError(f"{rate:.1f} requests per second did not keep the engine busy at all")
        return load

    @contextmanager
    def _submit_at_rate(self, rate: float) -> Iterator[None]:
        stop = threading.Event()
        self._stream_error = None

        def submit_requests() -> None:
            arrival_s = time.perf_counter()
            try:
                while True:
                    arrival_s += float(self._generator.exponential(1.0 / rate))
                    if stop.wait(max(arrival_s - time.perf_counter(), 0.0)):
                        return
                    self._submit()
            except Exception as error:  # raised again by the measuring thread
                self._stream_error = error

        thread = threading.Thread(target=submit_requests, name="sparseflow-background", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        self._check_stream()

    def _check_stream(self) -> None:
        """Raise RunError if the stream failed: measurements would have less load than requested."""
        if self._stream_error is not None:
            raise RunError(f"the background stream failed: {self._stream_error}") from self._stream_error

    def _submit(self, extra_tokens: int = 0) -> RequestHandle:
        """Submit a random request with `extra_tokens` more new tokens, if they fit."""
        with self._lock:
            plan = self._plans[self._generator.integers(len(self._plans))]
            length = int(self._generator.choice(list(self._mix.lengths)))
            new_tokens = int(self._generator.integers(2, self._mix.new_tokens + 1)) + extra_tokens
            inputs = make_full_prompt(self._prompts, plan, length)
        vision_tokens = self._prompts.vision_tokens[plan.tier] if plan.tier else 0
        max_new_tokens = self._engine.max_tokens - length - vision_tokens + 1
        handle = self._engine.submit(
            GenerationRequest(
                inputs=inputs,
                decide=FixedPlanPolicy(plan=plan),
                max_new_tokens=max(min(new_tokens, max_new_tokens), 1),
            )
        )
        with self._lock:
            self._handles.append(handle)
        return handle


def make_full_prompt(prompts: RandomPrompts, plan: Plan, text_tokens: int) -> dict[str, Any]:
    """Make a prompt as a server receives it: an image, if the plan has one, is at the highest tier."""
    if plan.tier is None:
        return prompts.make_prompt(None, text_tokens)
    tier = list(prompts.vision_tokens)[-1] if prompts.vision_tokens else plan.tier
    return prompts.make_prompt(tier, text_tokens)
