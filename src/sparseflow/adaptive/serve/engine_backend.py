"""Engine as a server backend.

The engine runs in its own thread and the server on an event loop. The loop never waits for the engine. Engine
events (plan selected, token generated, request ended) reach the loop in order, by `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sparseflow.adaptive.engine.requests.request import (
    EngineStopped,
    GenerationRequest,
    InitialDecision,
    PlanDecider,
    PlanDecision,
    Rejection,
    RequestOutOfMemory,
    RequestOutput,
    RequestRejected,
    SupportsPreparation,
)
from sparseflow.adaptive.predictor.features import LatencyQuery
from sparseflow.adaptive.profile.memory import select_fitting_tiers
from sparseflow.adaptive.prompts.messages import ApiError, Prompt, invalid
from sparseflow.adaptive.serve.backend import (
    BackendJob,
    EndedEvent,
    Event,
    FailedEvent,
    ServiceTime,
    StartedEvent,
    TokensEvent,
    make_stopped_error,
)
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from sparseflow.adaptive.engine.engine import Engine
    from sparseflow.adaptive.engine.requests.handle import RequestHandle
    from sparseflow.adaptive.plan.space import Plan, Tier
    from sparseflow.adaptive.policy.selector import PlanSelector
    from sparseflow.adaptive.predictor.model import PlanLatencyPredictor

_LOG = logging.getLogger(__name__)

_HALF_LIFE_S = 10.0
"""Half-life of what the forecast learns from requests, so that a burst does not outlast itself."""
_AGING_INTERVAL_S = 1.0


class LatencyForecast(Protocol):
    """Forecast of service times, from start to last token."""

    def min_service_ms(self, prompt: Prompt, max_new_tokens: int, num_concurrent: int | None) -> ServiceTime:
        """Return the time of the cheapest plan; `num_concurrent` other requests run, None means idle."""
        ...

    def predict(self, plan: Plan, job: BackendJob) -> tuple[float, float]:
        """Return median and p99 of a plan under the conditions at the start of the job."""
        ...

    def observe(self, job: BackendJob, output: RequestOutput, *, isolated: bool) -> None:
        """Update the forecast with a completed job; `isolated` if no other one ran meanwhile."""
        ...


class PredictorForecast:
    """Forecast from a plan latency predictor.

    What it learns from requests decays with time. Otherwise predictions that a burst raised would refuse
    requests, and refused requests do not correct predictions. An idle engine has its own predictor, which
    learns only from requests that ran without others.

    Args:
        predictor: Predictor of this model on this device.
        plans: Plans of the engine, with tiers.
        load: Returns the current utilization of the device by others, 0 to 1; 0 by default. Used for queued
            requests; jobs carry their own value.
        idle_predictor: Predictor of an idle engine, with the plans of `predictor`; default: `predictor`.
        clock: Monotonic clock, seconds.
        max_batch: Maximum batch size of the engine; by default that of the profile.
        max_tokens: Maximum context length of the engine; by default that of the profile.

    Raises:
        InputError: `plans` is empty or contains a plan that the predictor does not cover, or the profile was
            measured with another runner or other engine sizes.
    """

    def __init__(
        self,
        predictor: PlanLatencyPredictor,
        plans: Sequence[Plan],
        *,
        load: Callable[[], float] = lambda: 0.0,
        idle_predictor: PlanLatencyPredictor | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_batch: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if not plans:
            raise InputError("`plans` is empty; pass the plans of the engine")
        metadata = predictor.metadata
        if metadata.config.get("runner") == "eager" and metadata.device["kind"] == "cuda":
            raise InputError(
                "the profile of the predictor was measured with the eager runner, whose times differ from "
                "those of the engine on a GPU; profile with `sparseflow adaptive profile --runner engine`"
            )
        for name, requested in (("max_batch", max_batch), ("max_tokens", max_tokens)):
            measured = metadata.config.get(name, requested)
            if requested is not None and measured != requested:
                raise InputError(
                    f"the profile of the predictor was measured with `{name}` (={measured}), but this engine "
                    f"has {requested}; serve with {measured}, or profile with {requested}"
                )
        self._predictor = predictor
        self._idle_predictor = predictor if idle_predictor is None else idle_predictor
        self._load, self._clock, self._aged_s = load, clock, clock()
        plan_index: dict[Plan, int] = {}
        for index, plan in enumerate(predictor.space.plans):
            plan_index[plan] = index
            # Without images the tier of a plan has no effect.
            plan_index.setdefault(replace(plan, tier=None), index)
        self._plan_index = plan_index
        unknown = [plan.id for plan in plans if plan not in plan_index]
        if unknown:
            raise InputError(f"the predictor does not cover these plans: {', '.join(unknown)}")
        self._rows = np.array([plan_index[plan] for plan in plans])
        self._tiers: list[Tier | None] = [plan.tier for plan in plans]
        self._max_tokens = max_tokens
        if len(predictor.loads) == 1:
            _LOG.warning(
                "the profile of the predictor was measured at a single load (%g), so predictions ignore "
                "other load on the device, and budgets may be missed while it is busy; profile with "
                "`sparseflow adaptive profile --load 0 --load 0.7`",
                predictor.loads[0],
            )

    def min_service_ms(self, prompt: Prompt, max_new_tokens: int, num_concurrent: int | None) -> ServiceTime:
        """See `LatencyForecast`."""
        load = 0.0 if num_concurrent is None else self._load()
        times = self._predict_all(prompt, max_new_tokens, num_concurrent, load)
        fitting = self._rows[self._mask_fitting_plans(prompt, max_new_tokens)]
        return ServiceTime(*(float(time_ms[fitting].min()) for time_ms in times))

    def predict(self, plan: Plan, job: BackendJob) -> tuple[float, float]:
        """See `LatencyForecast`."""
        p50, p99 = self._predict_all(job.prompt, job.expected_tokens, job.num_concurrent or None, job.load)
        return float(p50[self._plan_index[plan]]), float(p99[self._plan_index[plan]])

    def observe(self, job: BackendJob, output: RequestOutput, *, isolated: bool) -> None:
        """See `LatencyForecast`."""
        query = LatencyQuery(
            plan=output.plan, text_tokens=job.prompt.text_tokens,
            images=self._predictor.metadata.count_images(job.prompt.vision_tokens),
            new_tokens=max(len(output.tokens), 1), batch=job.num_concurrent + 1, load=job.load,
            queued_ms=output.queued_ms,
        )  # fmt: skip
        for predictor in {self._predictor, self._idle_predictor} if isolated else {self._predictor}:
            predictor.observe(
                query, output.total_ms, prefill_ms=output.total_ms - output.queued_ms - output.decode_ms
            )

    def _age(self) -> None:
        """Let what was learned decay. The median of an idle engine stays: a burst does not change it."""
        elapsed_s = self._clock() - self._aged_s
        if elapsed_s < _AGING_INTERVAL_S:
            return
        self._aged_s += elapsed_s
        fraction = 1.0 - 0.5 ** (elapsed_s / _HALF_LIFE_S)
        self._predictor.forget(fraction)
        if self._idle_predictor is not self._predictor:
            self._idle_predictor.forget(fraction, keep_medians=True)

    def _mask_fitting_plans(self, prompt: Prompt, max_new_tokens: int) -> np.ndarray:
        """Return a mask of plans whose context fits the request, bool [num_plans]; all True if none fits."""
        tiers: Collection[Tier | None] = ()
        if self._max_tokens is not None:
            tiers = select_fitting_tiers(
                prompt.vision, text_tokens=prompt.text_tokens, new_tokens=max_new_tokens,
                max_tokens=self._max_tokens,
            )  # fmt: skip
        mask = np.array([tier in tiers for tier in self._tiers])
        return mask if mask.any() else ~mask

    def _predict_all(
        self, prompt: Prompt, max_new_tokens: int, num_concurrent: int | None, load: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return median and p99 of every plan of the predictor's space; without others, of an idle engine."""
        self._age()
        predictor = self._predictor if num_concurrent else self._idle_predictor
        return predictor.predict_all(
            text_tokens=prompt.text_tokens,
            images=self._predictor.metadata.count_images(prompt.vision_tokens),
            new_tokens=max_new_tokens,
            batch=(num_concurrent or 0) + 1,
            load=load,
        )


def make_job_decider(
    selector: PlanSelector, idle_selector: PlanSelector | None = None
) -> Callable[[BackendJob], PlanDecider]:
    """Create a factory of plan deciders for jobs.

    A job is already admitted, so it is never rejected for time that passed since.

    Args:
        selector: Plan selector with the plans of the engine.
        idle_selector: Selector for jobs that start on an idle engine; default: `selector`.
    """

    def make_decider(job: BackendJob) -> PlanDecider:
        used_selector = selector if job.num_concurrent or idle_selector is None else idle_selector
        return used_selector.make_policy(
            text_tokens=job.prompt.text_tokens,
            images=selector.predictor.metadata.count_images(job.prompt.vision_tokens),
            on_infeasible="truncate" if job.on_infeasible == "truncate" else "best_effort",
            batch=job.num_concurrent + 1,
            load=job.load,
            vision=job.prompt.vision,
            input_ids=job.prompt.inputs["input_ids"],
        )

    return make_decider


class EngineBackend:
    """Runs jobs on an engine.

    Args:
        engine: Warm engine; `close` shuts it down.
        decider: Creates the plan decider of a job, see `make_job_decider`. The decider's remaining time ends
            at `job.target_end_s`.
        forecast: Forecast for admission and for the predicted times in responses.
        stop: IDs of stop tokens.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        decider: Callable[[BackendJob], PlanDecider],
        forecast: LatencyForecast,
        stop: Iterable[int],
    ) -> None:
        self.slots, self.context = engine.max_batch, engine.max_tokens
        self._engine = engine
        self._decider = decider
        self._forecast = forecast
        self._stop = frozenset(stop)
        self._running_jobs: set[_RunningJob] = set()

    @property
    def alive(self) -> bool:
        """Whether the engine can run requests."""
        return self._engine.snapshot().healthy

    def min_service_ms(self, prompt: Prompt, max_new_tokens: int, num_concurrent: int | None) -> ServiceTime:
        """See `ServingBackend`."""
        return self._forecast.min_service_ms(prompt, max_new_tokens, num_concurrent)

    def submit(self, job: BackendJob, emit: Callable[[Event], None]) -> Callable[[], None]:
        """See `ServingBackend`."""
        # The observation at the end is for the load at which the plan was selected.
        job = replace(job, load=self._engine.load)
        try:
            running_job = _RunningJob(
                job=job, emit=emit, decider=self._decider(job), forecast=self._forecast, stop=self._stop,
                running_jobs=self._running_jobs,
            )  # fmt: skip
            request = GenerationRequest(
                inputs=job.prompt.inputs, decide=running_job, max_new_tokens=job.max_new_tokens,
                budget_ms=job.budget_ms, received_s=job.received_s, sampling=job.sampling, stop=self._stop,
                id=job.id,
            )  # fmt: skip
            handle = self._engine.submit(request)
        except Exception as error:
            if isinstance(error, RequestRejected):
                message = f"the engine is full: {error}; retry"
                refusal = ApiError(429, message, code="overloaded", retry_after_s=1.0)
            else:
                refusal = _make_api_error(error, job)
            # Events, including errors, follow the return of `submit`.
            asyncio.get_running_loop().call_soon(emit, FailedEvent(refusal))
            return lambda: None
        running_job.enter()
        handle.add_listener(lambda: running_job.call_on_loop(running_job.poll, handle))

        def cancel() -> None:
            if not running_job.ended:
                running_job.leave()
                handle.cancel()

        return cancel

    def close(self) -> None:
        """See `ServingBackend`."""
        self._engine.shutdown(drain=False)


@dataclass(kw_only=True, eq=False)
class _RunningJob:
    """One job on the engine.

    As the plan decider of its request, it limits the remaining time to the target end. It passes the selected
    plan, new tokens and the end from the engine's thread to the event loop.
    """

    job: BackendJob
    emit: Callable[[Event], None]
    decider: PlanDecider
    forecast: LatencyForecast
    stop: frozenset[int]
    running_jobs: set[_RunningJob]
    isolated: bool = True
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    start_s: float = field(default_factory=time.perf_counter)
    num_sent: int = 0
    ended: bool = False

    def enter(self) -> None:
        """Count this job as running, together with the others."""
        self.running_jobs.add(self)
        if len(self.running_jobs) > 1:
            for job in self.running_jobs:
                job.isolated = False

    def leave(self) -> None:
        """End this job on the loop."""
        self.ended = True
        self.running_jobs.discard(self)

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        return self.decider.choose_initial(request, self._limit_to_target(remaining_ms))

    def prepare(self, request: GenerationRequest) -> None:
        if isinstance(self.decider, SupportsPreparation):
            self.decider.prepare(request)

    def choose_plan(
        self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float
    ) -> Plan | PlanDecision:
        decision = self.decider.choose_plan(latency_token, request, self._limit_to_target(remaining_ms))
        self.call_on_loop(
            self._report_plan, decision.plan if isinstance(decision, PlanDecision) else decision
        )
        return decision

    def call_on_loop(self, function: Callable[..., None], *args: object) -> None:
        """Schedule a call on the loop, from the engine's thread."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed: the server has shut down.
            _LOG.debug("request %s outlived the server", self.job.id)

    def _limit_to_target(self, remaining_ms: float) -> float:
        return min(remaining_ms, (self.job.target_end_s - time.perf_counter()) * 1000.0)

    def _report_plan(self, plan: Plan) -> None:
        """Emit the selected plan, on the loop."""
        if self.ended:
            return
        waited_ms = (self.start_s - self.job.received_s) * 1000.0
        p50, p99 = self.forecast.predict(plan, self.job)
        self.emit(StartedEvent(plan=plan, p50_ms=waited_ms + p50, p99_ms=waited_ms + p99))

    def poll(self, handle: RequestHandle) -> None:
        """Emit new tokens and the end, on the loop."""
        if self.ended:
            return
        ended = handle.finished
        new_tokens = handle.tokens[self.num_sent :]
        self.num_sent += len(new_tokens)
        visible = tuple(token for token in new_tokens if token not in self.stop)
        if visible:
            self.emit(TokensEvent(visible))
        if ended:
            self.leave()
            self.emit(self._make_final_event(handle))

    def _make_final_event(self, handle: RequestHandle) -> Event:
        try:
            output = handle.result(0.0)
        except Exception as error:
            return FailedEvent(_make_api_error(error, self.job))
        # Sending the response has priority over the update.
        self.loop.call_soon(self._observe, output)
        return EndedEvent(output.reason)

    def _observe(self, output: RequestOutput) -> None:
        # Queueing ends at the start; waiting inside the engine is part of the service time.
        queued_ms = (self.start_s - self.job.received_s) * 1000.0
        try:
            output = replace(output, queued_ms=max(queued_ms, 0.0))
            self.forecast.observe(self.job, output, isolated=self.isolated)
        except InputError:
            _LOG.warning(
                "the latency of request %s could not update the predictor", self.job.id, exc_info=True
            )


def _make_api_error(error: Exception, job: BackendJob) -> ApiError:
    if isinstance(error, RequestRejected):
        extra = {} if error.least_ms is None else {"least_feasible_ms": math.ceil(error.least_ms)}
        return ApiError(
            422,
            f"no plan meets the latency budget: {error}",
            code="budget_infeasible",
            param="latency_budget_ms",
            more=extra,
        )
    if isinstance(error, RequestOutOfMemory):
        return ApiError(
            503, "out of device memory; retry, or shorten the request",
            code="out_of_memory", retry_after_s=1.0,
        )  # fmt: skip
    if isinstance(error, EngineStopped):
        return make_stopped_error()
    if isinstance(error, InputError):
        return invalid(f"the model cannot process this request: {error}")
    _LOG.error("request %s failed", job.id, exc_info=error)
    return ApiError(500, f"the model failed on this request (id {job.id})", code="engine_failed")
