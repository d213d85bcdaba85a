"""State of one admitted request: queued, running, ended.

The backend feeds events on the event loop, and the HTTP response reads text. The slot is freed at the last
event, so a slow reader neither occupies a slot nor adds to the measured time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.prompts.messages import ApiError
from sparseflow.adaptive.serve.admission import Ticket
from sparseflow.adaptive.serve.backend import (
    BackendJob,
    EndedEvent,
    Event,
    ServingBackend,
    StartedEvent,
    TokensEvent,
)
from sparseflow.adaptive.serve.metrics import Outcome, ServerMetrics

_LOG = logging.getLogger(__name__)
_REPLACEMENT_CHARACTER = "\ufffd"
_RESPONSE_TIME_S = 0.002
"""Part of the budget reserved for sending a truncated answer."""


class TokenDecoder(Protocol):
    """Interface of a tokenizer; tokenizers of transformers implement it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class StreamingText:
    """Incremental detokenizer with stop strings.

    Args:
        tokenizer: Decodes token IDs.
        stops: Non-empty strings; the text ends before the first one.

    Attributes:
        num_tokens: Number of tokens received.
        stopped: Whether a stop string occurred; later tokens are ignored.
    """

    def __init__(self, tokenizer: TokenDecoder, stops: Sequence[str] = ()) -> None:
        self.num_tokens = 0
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        # Number of leading `_ids` whose text is returned or pending.
        self._num_decoded = 0
        self._pending = ""

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that is final now."""
        if self.stopped:
            return ""
        for token in ids:
            self.num_tokens += 1
            self._ids.append(token)
        return self._release(self._decode_new(final=False), final=False)

    def close(self) -> str:
        """End the text and return the text that was held back."""
        if self.stopped:
            return ""
        return self._release(self._decode_new(final=True), final=True)

    def _decode_new(self, *, final: bool) -> str:
        """Decode the new tokens; "" while their text may still change."""
        if len(self._ids) == self._num_decoded:
            return ""
        before = self._decode(self._ids[: self._num_decoded])
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT_CHARACTER) and not final:
            return ""
        new_text = text[len(before) :]
        if not new_text:
            return ""
        # Decoding depends on the tokens just before; older ones are not needed.
        del self._ids[: self._num_decoded]
        self._num_decoded = len(self._ids)
        return new_text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _release(self, new_text: str, *, final: bool) -> str:
        """Return the part of the pending and new text that cannot belong to a stop string."""
        text = self._pending + new_text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._pending = True, ""
            # The match that ends first, as if characters arrived one by one.
            return text[: min(matches)[1]]
        num_pending = 0 if final else max((_count_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - num_pending :]
        return text[: len(text) - num_pending]


def _count_overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next(
        (length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0
    )


@dataclass(kw_only=True, eq=False)
class AnswerStream:
    """An answer while it is queued, generated and read.

    Attributes:
        job: Request to the backend; `start` adds its conditions.
        shortened: Whether the budget reduced `job.max_new_tokens`.
        has_guarantee: Whether the request was admitted with a guaranteed deadline.
        stream: Whether the text is sent as it is generated.
        include_usage: Whether a stream ends with token counts.
        text: Detokenizer.
        ticket: Ticket of the admission queue.
        backend: Backend that runs the request.
        metrics: Metrics of the server.
        on_end: Called once at the end, with whether the request ran to completion.
        created_s: Creation time, seconds since 1970.
        finish_reason: OpenAI finish reason; None before the end.
    """

    job: BackendJob
    shortened: bool
    has_guarantee: bool
    stream: bool
    include_usage: bool
    text: StreamingText
    ticket: Ticket
    backend: ServingBackend
    metrics: ServerMetrics
    on_end: Callable[[bool], None]
    created_s: int = field(default_factory=lambda: int(time.time()))
    finish_reason: Literal["stop", "length"] | None = None
    _pieces: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    _first_event: asyncio.Event = field(default_factory=asyncio.Event)
    _error: ApiError | None = None
    _ended: bool = False
    _truncated: bool = False
    _plan: Plan | None = None
    _predicted_ms: tuple[float, float] | None = None
    _queued_ms: float = 0.0
    _first_token_ms: float | None = None
    _measured_ms: float = 0.0
    _cancel_job: Callable[[], None] | None = None
    _timer: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        """Completion ID."""
        return self.job.id

    @property
    def plan_id(self) -> str | None:
        """ID of the plan that runs; None before it is selected."""
        return None if self._plan is None else self._plan.id

    async def wait_first_token(self) -> None:
        """Wait for the first token or the end.

        Raises:
            ApiError: The request failed.
        """
        await self._first_event.wait()
        if self._error is not None:
            raise self._error

    async def iter_text(self) -> AsyncIterator[str]:
        """Yield the text in pieces as it is generated.

        Raises:
            ApiError: The request failed.
        """
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if self._error is not None:
            raise self._error

    @property
    def usage(self) -> dict[str, int]:
        """Token counts in OpenAI's format."""
        prompt, completion_tokens = self.job.prompt, self.text.num_tokens
        prompt_tokens = prompt.tokens if self._plan is None else prompt.count_tokens(self._plan.tier)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def report(self) -> dict[str, Any]:
        """Report plan, times and budget of an ended request."""
        plan, budget_ms = self._plan, self.job.budget_ms
        predicted = None
        if self._predicted_ms is not None:
            predicted = {
                name: round(value, 3) for name, value in zip(("p50", "p99"), self._predicted_ms, strict=True)
            }
        return {
            "plan": None if plan is None else {"id": plan.id, **plan.to_dict()},
            "predicted_ms": predicted,
            "measured_ms": round(self._measured_ms, 3),
            "first_token_ms": None if self._first_token_ms is None else round(self._first_token_ms, 3),
            "queued_ms": round(self._queued_ms, 3),
            "budget_ms": budget_ms,
            "budget_met": None if budget_ms is None else self._measured_ms <= budget_ms,
            "guaranteed": None if budget_ms is None else self.has_guarantee,
            "truncated": self._truncated,
        }

    def start(self, num_concurrent: int, *, contended: bool = False) -> None:
        """Submit the request to the backend.

        Args:
            num_concurrent: Number of other running requests.
            contended: Whether requests wait. A request that is probably late then leaves its slot to them.
        """
        job, now_s = self.job, time.perf_counter()
        self._queued_ms = (now_s - job.received_s) * 1000.0
        required_s = self.ticket.median_ms / 1000.0 if contended else 0.0
        if now_s + required_s >= job.deadline_s and job.on_infeasible != "best_effort":
            message = "the latency budget expired in the queue; retry"
            self._fail(ApiError(429, message, code="overloaded", retry_after_s=1.0))
            return
        if job.on_infeasible == "truncate" and job.budget_ms is not None:
            delay_s = max(job.deadline_s - _RESPONSE_TIME_S - now_s, 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._finish, "truncated")
        job = replace(
            job, target_end_s=min(self.ticket.target_end_s, job.deadline_s), num_concurrent=num_concurrent
        )
        try:
            self._cancel_job = self.backend.submit(job, self._handle)
        except Exception:
            _LOG.exception("request %s could not be submitted", self.id)
            self._fail(
                ApiError(500, f"the model failed on this request (id {self.id})", code="engine_failed")
            )

    def cancel(self, error: ApiError) -> None:
        """End the request with an error."""
        self._fail(error)

    def disconnect(self) -> None:
        """Cancel the request because its client disconnected; no effect after the end."""
        self._fail(ApiError(499, "the client disconnected", code="client_gone"))

    def _handle(self, event: Event) -> None:
        if self._ended:
            return
        if isinstance(event, StartedEvent):
            self._plan, self._predicted_ms = event.plan, (event.p50_ms, event.p99_ms)
            self.ticket.predicted_end_s = self.job.received_s + event.p99_ms / 1000.0
            self.ticket.median_end_s = self.job.received_s + event.p50_ms / 1000.0
        elif isinstance(event, TokensEvent):
            if self._first_token_ms is None:
                self._first_token_ms = self._elapsed_ms()
                self._first_event.set()
            self._put_text(self.text.push(event.ids))
            if self.text.stopped:
                self._finish("stop")
        elif isinstance(event, EndedEvent):
            self._finish(event.reason)
        else:
            self._fail(event.error)

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self.job.received_s) * 1000.0

    def _put_text(self, piece: str) -> None:
        if piece:
            self._pieces.put_nowait(piece)

    def _finish(self, reason: Literal["stop", "length", "truncated"]) -> None:
        if self._ended:
            return
        budget_ms = self.job.budget_ms
        self._measured_ms = self._elapsed_ms()
        self._put_text(self.text.close())
        self.finish_reason = "stop" if reason == "stop" else "length"
        self._truncated = reason == "truncated" or (reason == "length" and self.shortened)
        self.metrics.observe_answer(
            plan=self._plan, prompt_tokens=self.usage["prompt_tokens"], new_tokens=self.text.num_tokens,
            measured_ms=self._measured_ms, first_token_ms=self._first_token_ms, queued_ms=self._queued_ms,
            predicted_ms=self._predicted_ms,
        )  # fmt: skip
        if self.has_guarantee and budget_ms is not None:
            self.metrics.count_budget(met=self._measured_ms <= budget_ms)
        self._end(completed=True)

    def _fail(self, error: ApiError) -> None:
        if self._ended:
            return
        self._error = error
        outcome = classify_outcome(error)
        self.metrics.count_end(outcome, error.code)
        if self.has_guarantee and outcome not in ("cancelled", "cut"):
            self.metrics.count_budget(met=False)
        self._end(completed=False)

    def _end(self, *, completed: bool) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._cancel_job is not None:
            # Cancelling a completed job has no effect.
            self._cancel_job()
        self._pieces.put_nowait(None)
        self._first_event.set()
        self.on_end(completed)


def classify_outcome(error: ApiError) -> Outcome:
    """Return the outcome label of an error."""
    if error.code == "budget_infeasible":
        return "infeasible"
    if error.code in ("shutting_down", "starting"):
        return "cut"
    if error.code == "client_gone":
        return "cancelled"
    if error.status == 429:
        return "shed"
    return "failed" if error.status >= 500 else "refused"
