"""Scheduling of an engine, and the end of requests.

One step: cancelled requests are removed; one waiting request is prefilled (or several with the same fixed
plan and length), by earliest deadline; then one batch decodes one token, again by earliest deadline unless
another has waited for `fairness` steps. A prefilled request joins its plan's batch at the next step, and its
slot is free as soon as it ends.

An error of a request ends that request with a typed error; the others continue.
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
    free_memory,
    is_fatal,
    is_out_of_memory,
    make_request_error,
)
from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import DecodeRunner, get_decode_plan
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
    """Waiting requests and decoding batches. One thread calls `step`; any thread may add requests.

    Args:
        adapter: Adapter of the model.
        prefill: Runs prompts.
        steps: Runs decode steps.
        plans: Plans that may be chosen.
        max_batch: Maximum number of decoding requests.
        max_tokens: Maximum number of tokens of a request.
        fairness: A batch runs after at most this many steps of other batches, and a waiting request is
            admitted after at most this many requests that overtook it.
        metrics: Counters.
        lock: Held while shared state changes.
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
        self._num_prefilling = 0

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether requests wait, decode or are being prefilled."""
        return bool(self._queue or self._num_prefilling or self.running)

    @property
    def running(self) -> int:
        """Number of decoding requests."""
        return sum(len(batch.rows) for batch in self.batches)

    @property
    def batches(self) -> tuple[DecodeBatch, ...]:
        """All batches, including empty ones."""
        with self._lock:
            return tuple(self._batches.values())

    def add(self, handle: RequestHandle) -> None:
        """Queue a request."""
        with self._lock:
            self._queue.append(handle)

    def step(self) -> bool:
        """Run one step.

        Returns:
            Whether there was work.

        Raises:
            RuntimeError: The device is unusable.
        """
        self._remove_cancelled()
        admitted = self._admit()
        decoded = self._decode()
        return admitted or decoded

    def abort_all(self, error: EngineStopped) -> None:
        """End every request with an error."""
        with self._lock:
            handles = list(self._queue)
            self._queue.clear()
        for batch in self.batches:
            # The slots are not released: the device may be unusable, and no request will run.
            handles += [row.handle for row in batch.rows]
            batch.rows.clear()
        for handle in handles:
            self._end(handle, error, "stopped")

    def batch(self, plan: Plan) -> DecodeBatch:
        """Batch of a plan, created on first use."""
        key = get_decode_plan(plan, self._adapter.geometry)
        if key not in self._batches:
            cache = SlotCache(
                key, self._adapter.geometry.depth, slots=self._max_batch, tokens=self._max_tokens,
                state=len(self._adapter.state),
            )  # fmt: skip
            with self._lock:
                self._batches[key] = DecodeBatch(cache)
        return self._batches[key]

    def warm_up(self, example: Inputs | None) -> list[Callable[[], None]]:
        """Tasks that run every prompt and step size once; no request may run or wait."""
        tasks: list[Callable[[], None]] = []
        for plan in self._plans:
            inputs = None
            if example is not None and plan.tier is not None:
                inputs = self._adapter.reduce_to_tier(example, plan.tier)
            tasks += self._prefill.warm_up(plan, self.batch(plan).cache, inputs)
        for batch in self.batches:
            tasks += self._steps.warm_up(batch.cache)
        return tasks

    def _remove_cancelled(self) -> None:
        with self._lock:
            cancelled = [handle for handle in self._queue if handle.cancelled]
            for handle in cancelled:
                self._queue.remove(handle)
        for batch in self.batches:
            for row in [row for row in batch.rows if row.handle.cancelled]:
                batch.drop(row)
                cancelled.append(row.handle)
        for handle in cancelled:
            self._end(handle, RequestCancelled(f"request {handle.request.id} was cancelled"), "cancelled")

    def _admit(self) -> bool:
        """Prefill the next waiting request."""
        free = self._max_batch - self.running
        with self._lock:
            if not free or not self._queue:
                return False
            group = self._admission.select_group(self._next_waiting(), self._queue)[:free]
            for handle in group:
                self._queue.remove(handle)
            self._num_prefilling = len(group)
        try:
            self._prefill_group(group)
        finally:
            self._num_prefilling = 0
        return True

    def _next_waiting(self) -> RequestHandle:
        """The request with the earliest deadline, or the oldest after `fairness` overtakings."""
        oldest = self._queue[0]
        first = min(self._queue, key=lambda handle: handle.request.deadline_s)
        self._overtaken = 0 if first is oldest else self._overtaken + 1
        if self._overtaken > self._fairness:
            self._overtaken = 0
            return oldest
        return first

    def _prefill_group(self, handles: Sequence[RequestHandle], *, retry: bool = True) -> None:
        try:
            rows, tokens = self._admission.prefill(handles)
        except Exception as error:
            if is_fatal(error):
                for handle in handles:
                    self._end(handle, make_request_error(error, handle.request.id), "failed")
                raise
            self._recover(handles, error, retry=retry)
            return
        for row, token in zip(rows, tokens, strict=True):
            self._deliver(self.batch(row.plan), row, token)

    def _recover(self, handles: Sequence[RequestHandle], error: Exception, *, retry: bool) -> None:
        """Retry requests whose prefill failed, one by one; then end them."""
        out_of_memory = is_out_of_memory(error)
        if out_of_memory:
            free_memory()
        if len(handles) > 1 or (out_of_memory and retry):
            for handle in handles:
                self._prefill_group([handle], retry=len(handles) > 1)
            return
        (handle,) = handles
        outcomes = {RequestRejected: "refused", RequestCancelled: "cancelled"}
        if not isinstance(error, SparseFlowError):
            _LOG.warning("request %s failed before its first token", handle.request.id, exc_info=error)
            error = make_request_error(error, handle.request.id)
        self._end(handle, error, outcomes.get(type(error), "failed"))

    def _decode(self) -> bool:
        """Run a step of the next batch."""
        active = [batch for batch in self.batches if batch.rows]
        if not active:
            return False
        batch_to_run = max(active, key=lambda batch: batch.steps_waited)
        if batch_to_run.steps_waited < self._fairness:
            batch_to_run = min(active, key=lambda batch: (batch.deadline_s, -batch.steps_waited))
        for batch in active:
            batch.steps_waited = 0 if batch is batch_to_run else batch.steps_waited + 1
        for row, outcome in batch_to_run.step(self._steps):
            if isinstance(outcome, Exception):
                batch_to_run.drop(row)
                self._end(row.handle, outcome, "failed")
            else:
                self._deliver(batch_to_run, row, outcome)
        return True

    def _deliver(self, batch: DecodeBatch, row: BatchRow, token: int) -> None:
        """Add a token to a request, and end the request if it was the last."""
        request = row.handle.request
        if token < 0:
            batch.drop(row)
            self._end(row.handle, make_request_error(ValueError("its logits are NaN"), request.id), "failed")
            return
        row.tokens.append(token)
        reason: Reason | None = None
        if token in request.stop:
            reason = "stop"
        elif len(row.tokens) >= row.max_new_tokens:
            reason = "length" if row.max_new_tokens == request.max_new_tokens else "truncated"
        if reason is None:
            row.handle.append_token(token)
            return
        batch.drop(row)
        output = self._make_output(row, reason)
        row.handle.append_token(token)
        self._end(row.handle, output, "finished")

    def _make_output(self, row: BatchRow, reason: Reason) -> RequestOutput:
        request, times, end_s = row.handle.request, row.times, self._clock()
        # The remaining policy time fell between the first block and the first token.
        policy_in_prefill_s = times.policy_s - times.policy_before_s
        return RequestOutput(
            tokens=tuple(row.tokens),
            plan=row.plan,
            reason=reason,
            prompt_tokens=row.prompt_tokens,
            feasible=row.feasible,
            predicted_ms=row.predicted_ms,
            budget_ms=request.budget_ms,
            queued_ms=(times.start_s - request.received_s) * 1e3,
            decide_ms=times.policy_s * 1e3,
            vision_ms=(times.first_block_s - times.start_s - times.policy_before_s) * 1e3,
            prefill_ms=(times.first_token_s - times.first_block_s - policy_in_prefill_s) * 1e3,
            decode_ms=(end_s - times.first_token_s) * 1e3,
            total_ms=(end_s - request.received_s) * 1e3,
        )

    def _end(self, handle: RequestHandle, ended: RequestOutput | Exception, outcome: str) -> None:
        self._metrics.ended[outcome] += 1
        handle.finish(ended)
