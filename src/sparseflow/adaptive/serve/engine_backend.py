"""The engine as the server's backend: its thread on one side, the event loop on the other.

Nothing of the engine is waited for on the loop. What happens on its thread – the plan is decided, a token
comes, the request ends – is handed over by `call_soon_threadsafe`, in order.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sparseflow.adaptive.engine.requests.request import (
    EngineStopped,
    GenerationRequest,
    InitialDecision,
    PlanDecider,
    PlanDecision,
    RequestOutOfMemory,
    RequestOutput,
    RequestRejected,
    SupportsPreparation,
    SupportsReplanning,
)
from sparseflow.adaptive.engine.requests.request import Rejection as Declined
from sparseflow.adaptive.predictor.features import LatencyQuery
from sparseflow.adaptive.profile.memory import fitting
from sparseflow.adaptive.prompts.messages import ApiError, Prompt, invalid
from sparseflow.adaptive.serve.backend import (
    BackendJob,
    EndedEvent,
    Event,
    FailedEvent,
    StartedEvent,
    TokensEvent,
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

_STARVED_S, _STARVED = 2.0, 8
"""For how long, and how often, an idle engine is asked about while nothing ends, until predictions count as
too high to be ever seen wrong."""
_FORGOTTEN = 0.5
"""Share of what was learnt that is given up then."""


def _alone() -> float:
    return 0.0


def _busy() -> bool:
    return False


class LatencyForecast(Protocol):
    """How long requests take, from their turn to their last token."""

    def least_ms(self, prompt: Prompt, new_tokens: int, beside: int | None) -> float:
        """p99 of the cheapest plan, now, while `beside` others run; None for nobody, and nobody to come."""
        ...

    def of(self, plan: Plan, job: BackendJob) -> tuple[float, float]:
        """Median and p99 of a plan, as it looked when the job's turn came."""
        ...

    def observe(self, job: BackendJob, finished: RequestOutput) -> None:
        """Learn from a job that ended."""
        ...


class PredictorForecast:
    """A forecast by the predictor.

    Args:
        predictor: Of this model on this device.
        plans: Those that the engine runs, with tiers.
        load: Share of the device that others want now, 0 to 1, as `Engine.load`; by default none. For those
            whose turn has not come: jobs carry their own.
        idle: Whether nothing runs. Where everybody is refused by what was learnt, nothing can be learnt any
            more; while it is so and requests keep coming, what was learnt is given up bit by bit. By default
            that is not known.
        clock: Seconds.
        max_batch: As of the engine; by default whatever the profile was measured with, as the next.
        max_tokens: As of the engine.

    Raises:
        InputError: There are no plans, the predictor knows one of them not, or it was made for another way to
            run on a GPU or an engine of other sizes.
    """

    def __init__(
        self,
        predictor: PlanLatencyPredictor,
        plans: Sequence[Plan],
        *,
        load: Callable[[], float] = _alone,
        idle: Callable[[], bool] = _busy,
        clock: Callable[[], float] = time.perf_counter,
        max_batch: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if not plans:
            raise InputError("there are no plans to forecast; give those that the engine runs")
        about = predictor.about
        if about.how.get("runner") == "eager" and about.device["kind"] == "cuda":
            raise InputError(
                "the predictor's profile was measured by the eager runner, and on a GPU an engine takes "
                "other times; profile with `sparseflow adaptive profile --runner engine`"
            )
        for name, here in (("max_batch", max_batch), ("max_tokens", max_tokens)):
            measured = about.how.get(name, here)
            if here is not None and measured != here:
                raise InputError(
                    f"the predictor's profile was measured by an engine with `{name}` {measured}, and this "
                    f"one has {here}, so its requests take other times; serve with {measured} (--batch of "
                    "`serve` is `max_batch`), or profile anew"
                )
        self._predictor = predictor
        self._load, self._idle, self._clock = load, idle, clock
        # Times that an idle engine was asked about since anything ended there, and when that began.
        self._asked, self._since_s = 0, 0.0
        at: dict[Plan, int] = {}
        for number, plan in enumerate(predictor.space.plans):
            at[plan] = number
            # Without images a plan's tier does not matter.
            at.setdefault(replace(plan, tier=None), number)
        self._at = at
        unknown = [plan.id for plan in plans if plan not in at]
        if unknown:
            raise InputError(f"{', '.join(unknown)} is not among the plans that the predictor is of")
        self._rows = np.array([at[plan] for plan in plans])
        self._tiers: list[Tier | None] = [plan.tier for plan in plans]
        self._max_tokens = max_tokens
        if len(predictor.loads) == 1:
            _LOG.warning(
                "the predictor's profile was measured at one load only (%g), so nothing is known of how "
                "others on the device slow requests down, and budgets may be missed while it is busy: "
                "profile with `sparseflow adaptive profile --load 0 --load 0.7`",
                predictor.loads[0],
            )

    def least_ms(self, prompt: Prompt, new_tokens: int, beside: int | None) -> float:
        """As in `LatencyForecast`."""
        self._look_for_starving()
        load = 0.0 if beside is None else self._load()
        p99 = self._every(prompt, new_tokens, beside or 0, load)[1][self._rows]
        return float(p99[self._room(prompt, new_tokens)].min())

    def of(self, plan: Plan, job: BackendJob) -> tuple[float, float]:
        """As in `LatencyForecast`."""
        p50, p99 = self._every(job.prompt, job.max_new_tokens, job.beside, job.load)
        return float(p50[self._at[plan]]), float(p99[self._at[plan]])

    def observe(self, job: BackendJob, finished: RequestOutput) -> None:
        """As in `LatencyForecast`."""
        self._asked = 0
        asked = LatencyQuery(
            plan=finished.plan, text_tokens=job.prompt.text_tokens,
            images=self._predictor.about.images(job.prompt.vision_tokens),
            new_tokens=max(len(finished.tokens), 1), batch=job.beside + 1, load=job.load,
            queued_ms=finished.queued_ms,
        )  # fmt: skip
        self._predictor.observe(
            asked, finished.total_ms, prefill_ms=finished.total_ms - finished.queued_ms - finished.decode_ms
        )

    def _look_for_starving(self) -> None:
        """Give up some of what was learnt where requests come, none is let in, and so none ends."""
        if not self._idle():
            self._asked = 0
            return
        now = self._clock()
        if not self._asked:
            self._since_s = now
        self._asked += 1
        if self._asked >= _STARVED and now - self._since_s >= _STARVED_S:
            self._asked = 0
            self._predictor.forget(_FORGOTTEN)

    def _room(self, prompt: Prompt, new_tokens: int) -> np.ndarray:
        """Which plans leave a request room for its tokens, [plans] bool; all where none does."""
        tiers = (
            ()
            if self._max_tokens is None
            else fitting(
                prompt.vision,
                text_tokens=prompt.text_tokens,
                new_tokens=new_tokens,
                max_tokens=self._max_tokens,
            )
        )
        found = np.array([tier in tiers for tier in self._tiers])
        return found if found.any() else ~found

    def _every(
        self, prompt: Prompt, new_tokens: int, beside: int, load: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Median and p99 of every plan of the predictor's space."""
        return self._predictor.predict_all(
            text_tokens=prompt.text_tokens, images=self._predictor.about.images(prompt.vision_tokens),
            new_tokens=new_tokens, batch=beside + 1, load=load,
        )  # fmt: skip


def deciding(chooser: PlanSelector) -> Callable[[BackendJob], PlanDecider]:
    """Makes who decides about a job, of what chooses plans.

    A job was let in, so it is not refused any more for a millisecond that was lost since.

    Args:
        chooser: Of the model, with the plans that the engine runs.
    """

    def of(job: BackendJob) -> PlanDecider:
        return chooser.decider(
            text_tokens=job.prompt.text_tokens,
            images=chooser.predictor.about.images(job.prompt.vision_tokens),
            on_infeasible="truncate" if job.on_infeasible == "truncate" else "best_effort",
            batch=job.beside + 1,
            load=job.load,
            vision=job.prompt.vision,
            input_ids=job.prompt.inputs["input_ids"],
        )

    return of


class EngineBackend:
    """Runs jobs on an engine.

    Args:
        engine: It is shut down by `close`; warm it up before.
        decider: Makes who decides about a job, as `deciding` does. What it is told remains of the budget is
            what remains until `job.until_s`.
        forecast: For admission, and for what answers say was predicted.
        stop: Tokens that end an answer.
        slots: How many requests run at once; by default as many as the engine can. Fewer make each quicker.

    Raises:
        InputError: `slots` are more than the engine has.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        decider: Callable[[BackendJob], PlanDecider],
        forecast: LatencyForecast,
        stop: Iterable[int],
        slots: int | None = None,
    ) -> None:
        self.slots = engine.max_batch if slots is None else slots
        if not 1 <= self.slots <= engine.max_batch:
            raise InputError(
                f"`slots` (={slots}) must be 1 to {engine.max_batch}, the engine's largest batch"
            )
        self.context = engine.max_tokens
        self._engine = engine
        self._decider = decider
        self._forecast = forecast
        self._stop = frozenset(stop)

    @property
    def alive(self) -> bool:
        """Whether the engine can run requests."""
        return self._engine.snapshot().healthy

    def least_ms(self, prompt: Prompt, new_tokens: int, beside: int | None) -> float:
        """As in `ServingBackend`."""
        return self._forecast.least_ms(prompt, new_tokens, beside)

    def submit(self, job: BackendJob, emit: Callable[[Event], None]) -> Callable[[], None]:
        """As in `ServingBackend`."""
        # What is learnt from it in the end is for the load that its plan was chosen at.
        job = replace(job, load=self._engine.load)
        passage = _RunningJob(job=job, emit=emit, forecast=self._forecast, stop=self._stop)
        try:
            request = GenerationRequest(
                inputs=job.prompt.inputs,
                decide=_watched(self._decider(job), passage),
                max_new_tokens=job.max_new_tokens,
                budget_ms=job.budget_ms,
                received_s=job.received_s,
                sampling=job.sampling,
                stop=self._stop,
                id=job.id,
            )
            handle = self._engine.submit(request)
        except Exception as error:
            refusal = _full(error) if isinstance(error, RequestRejected) else _refusal(error, job)
            # Events come after `submit` has returned, errors too.
            passage.loop.call_soon(emit, FailedEvent(refusal))
            return lambda: None
        passage.follow(handle)

        def call_off() -> None:
            if not passage.over:
                passage.over = True
                handle.cancel()

        return call_off

    def close(self) -> None:
        """As in `ServingBackend`."""
        self._engine.shutdown(drain=False)


@dataclass(kw_only=True, eq=False)
class _RunningJob:
    """What of one job goes over from the engine's thread to the loop."""

    job: BackendJob
    emit: Callable[[Event], None]
    forecast: LatencyForecast
    stop: frozenset[int]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    turn_s: float = field(default_factory=time.perf_counter)
    sent: int = 0
    over: bool = False

    def follow(self, handle: RequestHandle) -> None:
        handle.listen(lambda: self.call(self._look, handle))

    def call(self, function: Callable[..., None], *args: object) -> None:
        """On the engine's thread: call something on the loop."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed: the server has gone, and nobody waits for this any more.
            _LOG.debug("request %s went on after the server had gone", self.job.id)

    def decided(self, plan: Plan) -> None:
        """On the loop: say what runs."""
        if self.over:
            return
        before_ms = (self.turn_s - self.job.received_s) * 1000.0
        p50, p99 = self.forecast.of(plan, self.job)
        self.emit(StartedEvent(plan=plan, p50_ms=before_ms + p50, p99_ms=before_ms + p99))

    def _look(self, handle: RequestHandle) -> None:
        """On the loop: see what is new."""
        if self.over:
            return
        ended = handle.done
        new = handle.tokens[self.sent :]
        self.sent += len(new)
        shown = tuple(token for token in new if token not in self.stop)
        if shown:
            self.emit(TokensEvent(shown))
        if ended:
            self.over = True
            self.emit(self._last(handle))

    def _last(self, handle: RequestHandle) -> Event:
        try:
            finished = handle.result(0.0)
        except Exception as error:
            return FailedEvent(_refusal(error, self.job))
        # The answer goes out first.
        self.loop.call_soon(self._learn, finished)
        return EndedEvent(finished.reason)

    def _learn(self, finished: RequestOutput) -> None:
        # Before its turn it waited in the server's line; others' turns in the engine are part of its time.
        queued_ms = (self.turn_s - self.job.received_s) * 1000.0
        try:
            self.forecast.observe(self.job, replace(finished, queued_ms=max(queued_ms, 0.0)))
        except InputError:
            _LOG.warning("what request %s took could not be learnt from", self.job.id, exc_info=True)


def _full(error: RequestRejected) -> ApiError:
    return ApiError(429, f"the engine is full: {error}; try again", code="overloaded", retry_after_s=1.0)


def _refusal(error: Exception, job: BackendJob) -> ApiError:
    if isinstance(error, RequestRejected):
        least = {} if error.least_ms is None else {"least_feasible_ms": math.ceil(error.least_ms)}
        return ApiError(
            422,
            f"no plan keeps the budget: {error}",
            code="budget_infeasible",
            param="latency_budget_ms",
            more=least,
        )
    if isinstance(error, RequestOutOfMemory):
        return ApiError(
            503, "the request did not fit into the device's memory; try again, or shorten it",
            code="out_of_memory", retry_after_s=1.0,
        )  # fmt: skip
    if isinstance(error, EngineStopped):
        return ApiError(
            503, "the engine has stopped; try another server", code="engine_stopped", retry_after_s=5.0
        )
    if isinstance(error, InputError):
        return invalid(f"the model cannot take this request: {error}")
    _LOG.error("request %s failed", job.id, exc_info=error)
    return ApiError(500, f"the model failed on this request (id {job.id})", code="engine_failed")


def _watched(inner: PlanDecider, passage: _RunningJob) -> PlanDecider:
    """A decider whose plans are told to the loop, and which is told what remains until the job should end."""
    return (
        _ReplanningJobPolicy(inner, passage)
        if isinstance(inner, SupportsReplanning)
        else _JobPolicy(inner, passage)
    )


class _JobPolicy:
    def __init__(self, inner: PlanDecider, passage: _RunningJob) -> None:
        self._inner = inner
        self._passage = passage

    def first(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Declined:
        return self._inner.first(request, self._until(remaining_ms))

    def prepare(self, request: GenerationRequest) -> None:
        if isinstance(self._inner, SupportsPreparation):
            self._inner.prepare(request)

    def second(
        self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float
    ) -> Plan | PlanDecision:
        found = self._inner.second(latency_token, request, self._until(remaining_ms))
        self._passage.call(self._passage.decided, found.plan if isinstance(found, PlanDecision) else found)
        return found

    def _until(self, remaining_ms: float) -> float:
        return min(remaining_ms, (self._passage.job.until_s - time.perf_counter()) * 1000.0)


class _ReplanningJobPolicy(_JobPolicy):
    _inner: Any

    def again(self, request: GenerationRequest, choice: InitialDecision, remaining_ms: float) -> int:
        return self._inner.again(request, choice, self._until(remaining_ms))
