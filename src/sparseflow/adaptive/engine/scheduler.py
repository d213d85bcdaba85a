"""What an engine does next, and how requests end.

A turn: requests that were called off are freed; one waiting request begins (or several, where one plan and
one length let them run as one prompt), the earliest deadline first; then one batch decodes one token, again
the earliest deadline first, unless another has waited for `fairness` steps. A request that began joins its
plan's batch at the next step, and its slot is free the moment that it ends.

What goes wrong with a request ends that request: it gets a typed error, and the others go on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sparseflow.adaptive.engine.admission import RequestAdmission
from sparseflow.adaptive.engine.batch import (
    BatchRow,
    DecodeBatch,
    as_failure,
    free_memory,
    is_fatal,
    is_out_of_memory,
)
from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import DecodeRunner, decode_plan
from sparseflow.adaptive.engine.metrics import EngineMetrics
from sparseflow.adaptive.engine.prefill.prefill import PrefillRunner
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import (
    EngineStopped,
    Reason,
    RequestCancelled,
    RequestOutput,
    RequestRejected,
)
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import SparseFlowError

_LOG = logging.getLogger(__name__)


class Scheduler:
    """Requests that wait, and batches that decode. One thread takes the turns; any may add requests.

    Args:
        adapter: The model.
        prefill: Runs prompts.
        steps: Runs steps.
        plans: Those that deciders may choose.
        max_batch: Most requests that decode at a time.
        max_tokens: Most tokens of a request.
        fairness: After so many steps of other batches it is a batch's turn, and after so many requests that
            overtook it, that of one that waits.
        metrics: What is counted.
        lock: Held where other threads look.
    """

    def __init__(
        self,
        adapter: Adapter,
        prefill: PrefillRunner,
        steps: DecodeRunner,
        *,
        plans: Sequence[Plan],
        max_batch: int,
        max_tokens: int,
        fairness: int,
        metrics: EngineMetrics,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._adapter, self._prefill, self._steps = adapter, prefill, steps
        self._plans, self._max_batch, self._max_tokens = plans, max_batch, max_tokens
        self._metrics, self._lock, self._clock = metrics, lock, metrics.clock
        self._fairness, self._overtaken = fairness, 0
        self._admission = RequestAdmission(
            adapter, prefill, self.batch, plans=plans, max_tokens=max_tokens, clock=metrics.clock
        )
        self._queue: deque[RequestHandle] = deque()
        self._batches: dict[Plan, DecodeBatch] = {}
        self._beginning = 0

    @property
    def prompts(self) -> tuple[int, ...]:
        """As of the engine."""
        return self._prefill.sizes

    @property
    def contexts(self) -> tuple[int, ...]:
        """As of the engine."""
        return self._steps.contexts

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether requests wait, decode, or have their prompt run just now."""
        return bool(self._queue or self._beginning or self.running)

    @property
    def running(self) -> int:
        """Requests that decode."""
        return sum(len(batch.rows) for batch in self.batches)

    @property
    def batches(self) -> tuple[DecodeBatch, ...]:
        """Those that there are, also without requests."""
        with self._lock:
            return tuple(self._batches.values())

    def add(self, handle: RequestHandle) -> None:
        """Have a request wait for its turn."""
        with self._lock:
            self._queue.append(handle)

    def oldest_s(self) -> float | None:
        """When the request that waits longest was received."""
        with self._lock:
            return min((handle.request.received_s for handle in self._queue), default=None)

    def turn(self) -> bool:
        """Do what is next.

        Returns:
            Whether there was anything to do.

        Raises:
            RuntimeError: The device is broken.
        """
        self._sweep()
        began = self._admit()
        decoded = self._decode()
        return began or decoded

    def abandon(self, error: EngineStopped) -> None:
        """End every request."""
        with self._lock:
            left = list(self._queue)
            self._queue.clear()
        for batch in self.batches:
            # The slots are not freed: the device may be broken, and nothing runs any more.
            left += [row.handle for row in batch.rows]
            batch.rows.clear()
        for handle in left:
            self._end(handle, error, "stopped")

    def batch(self, plan: Plan) -> DecodeBatch:
        """Where requests of a plan decode."""
        key = decode_plan(plan, self._adapter.geometry)
        if key not in self._batches:
            cache = SlotCache(
                key, self._adapter.geometry.depth, slots=self._max_batch, tokens=self._max_tokens,
                state=len(self._adapter.state),
            )  # fmt: skip
            with self._lock:
                self._batches[key] = DecodeBatch(cache)
        return self._batches[key]

    def warm(self, example: Inputs | None) -> list[Callable[[], None]]:
        """Work that runs every prompt and every step once; nothing may run or wait."""
        work: list[Callable[[], None]] = []
        for plan in self._plans:
            given = None
            if example is not None and plan.tier is not None:
                given = self._adapter.at_tier(example, plan.tier)
            work += self._prefill.warm(plan, self.batch(plan).cache, given)
        for batch in self.batches:
            work += self._steps.warm(batch.cache)
        return work

    def _sweep(self) -> None:
        """Free what was called off."""
        with self._lock:
            gone = [handle for handle in self._queue if handle.cancelled]
            for handle in gone:
                self._queue.remove(handle)
        for batch in self.batches:
            for row in [row for row in batch.rows if row.handle.cancelled]:
                batch.drop(row)
                gone.append(row.handle)
        for handle in gone:
            self._end(handle, RequestCancelled(f"request {handle.request.id} was called off"), "cancelled")

    def _admit(self) -> bool:
        """Begin a waiting request."""
        free = self._max_batch - self.running
        with self._lock:
            if not free or not self._queue:
                return False
            together = self._admission.together(self._next_waiting(), self._queue)[:free]
            for handle in together:
                self._queue.remove(handle)
            self._beginning = len(together)
        try:
            self._begin(together)
        finally:
            self._beginning = 0
        return True

    def _next_waiting(self) -> RequestHandle:
        """The earliest deadline; the oldest after it was overtaken so often."""
        oldest = self._queue[0]
        first = min(self._queue, key=lambda handle: handle.request.deadline_s)
        self._overtaken = 0 if first is oldest else self._overtaken + 1
        if self._overtaken > self._fairness:
            self._overtaken = 0
            return oldest
        return first

    def _begin(self, handles: Sequence[RequestHandle], *, again: bool = True) -> None:
        try:
            rows, tokens = self._admission.begin(handles)
        except Exception as error:
            if is_fatal(error):
                for handle in handles:
                    self._end(handle, as_failure(error, handle.request.id), "failed")
                raise
            self._recover(handles, error, again=again)
            return
        for row, token in zip(rows, tokens, strict=True):
            self._metrics.plans[row.plan.id] += 1
            self._deliver(self.batch(row.plan), row, token)

    def _recover(self, handles: Sequence[RequestHandle], error: Exception, *, again: bool) -> None:
        """Some requests could not begin: each alone; one without memory once more; then it fails."""
        short = is_out_of_memory(error)
        if short:
            free_memory()
        if len(handles) > 1 or (short and again):
            for handle in handles:
                self._begin([handle], again=len(handles) > 1)
            return
        (handle,) = handles
        if isinstance(error, RequestRejected):
            self._end(handle, error, "refused")
        elif isinstance(error, RequestCancelled):
            self._end(handle, error, "cancelled")
        elif isinstance(error, SparseFlowError):
            self._end(handle, error, "failed")
        else:
            _LOG.warning("request %s failed before its first token", handle.request.id, exc_info=error)
            self._end(handle, as_failure(error, handle.request.id), "failed")

    def _decode(self) -> bool:
        """A step of the batch whose turn it is."""
        active = [batch for batch in self.batches if batch.rows]
        if not active:
            return False
        chosen = max(active, key=lambda batch: batch.waited)
        if chosen.waited < self._fairness:
            chosen = min(active, key=lambda batch: (batch.deadline_s, -batch.waited))
        for batch in active:
            batch.waited = 0 if batch is chosen else batch.waited + 1
        for row, outcome in chosen.step(self._steps):
            if isinstance(outcome, Exception):
                chosen.drop(row)
                self._end(row.handle, outcome, "failed")
            else:
                self._deliver(chosen, row, outcome)
        return True

    def _deliver(self, batch: DecodeBatch, row: BatchRow, token: int) -> None:
        """A request has a token; it may be its last."""
        request = row.handle.request
        if token < 0:
            batch.drop(row)
            self._end(row.handle, as_failure(ValueError("its logits are NaN"), request.id), "failed")
            return
        row.tokens.append(token)
        self._metrics.generated(1)
        reason: Reason | None = None
        if token in request.stop:
            reason = "stop"
        elif len(row.tokens) >= row.limit:
            reason = "length" if row.limit == request.max_new_tokens else "truncated"
        if reason is None:
            row.handle.put(token)
            return
        batch.drop(row)
        finished = self._finished(row, reason)
        row.handle.put(token)
        self._end(row.handle, finished, "finished")

    def _finished(self, row: BatchRow, reason: Reason) -> RequestOutput:
        request, times, now = row.handle.request, row.times, self._clock()
        # Of the time in the decider, the rest fell between the first block and the first token.
        later = times.decided - times.decided_before
        return RequestOutput(
            tokens=tuple(row.tokens), plan=row.plan, reason=reason, prompt_tokens=row.prompt_tokens,
            feasible=row.feasible, predicted_ms=row.predicted_ms, budget_ms=request.budget_ms,
            queued_ms=(times.began - request.received_s) * 1e3, decide_ms=times.decided * 1e3,
            vision_ms=(times.entered - times.began - times.decided_before) * 1e3,
            prefill_ms=(times.first - times.entered - later) * 1e3, decode_ms=(now - times.first) * 1e3,
            total_ms=(now - request.received_s) * 1e3,
        )  # fmt: skip

    def _end(self, handle: RequestHandle, ended: RequestOutput | Exception, outcome: str) -> None:
        self._metrics.ended[outcome] += 1
        handle.end(ended)
