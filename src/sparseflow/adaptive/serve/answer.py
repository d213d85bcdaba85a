"""One request that was let in: it waits, runs and ends, however that may be.

It is fed by the events of its backend, on the event loop, and read by whoever writes the response. Its slot
is free when its last event has come, so a slow reader keeps none, and the reader's slowness is not in the
measured time.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.policy.selector import OnInfeasible
from sparseflow.adaptive.prompts.messages import ApiError, Prompt
from sparseflow.adaptive.serve.admission import Ticket
from sparseflow.adaptive.serve.backend import (
    BackendJob,
    EndedEvent,
    Event,
    FailedEvent,
    ServingBackend,
    StartedEvent,
    TokensEvent,
)
from sparseflow.adaptive.serve.metrics import Outcome, ServerMetrics

_BROKEN = "\ufffd"


class TokenDecoder(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class StreamingText:
    """The text of one answer.

    Args:
        tokenizer: Decodes its tokens.
        stops: Strings before which it ends; none is empty.

    Attributes:
        tokens: How many tokens came in.
        stopped: A stop string was met; more tokens change nothing.
    """

    def __init__(self, tokenizer: TokenDecoder, stops: Sequence[str] = ()) -> None:
        self.tokens = 0
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._seen = 0
        """Of `_ids`, those whose text is out or held back for a stop string only."""
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """Take tokens; gives the text that is certain now and was not before."""
        if self.stopped:
            return ""
        for token in ids:
            self.tokens += 1
            self._ids.append(token)
        return self._through(self._decoded(final=False), final=False)

    def close(self) -> str:
        """No more tokens come; gives the text that was held back."""
        if self.stopped:
            return ""
        return self._through(self._decoded(final=True), final=True)

    def _decoded(self, *, final: bool) -> str:
        """Text of the tokens that are not seen yet, or "" while it may change."""
        if len(self._ids) == self._seen:
            return ""
        before = self._decode(self._ids[: self._seen])
        text = self._decode(self._ids)
        if text.endswith(_BROKEN) and not final:
            return ""
        fresh = text[len(before) :]
        if not fresh:
            return ""
        # The last tokens seen are the light in which the next ones are decoded; older ones are not needed.
        del self._ids[: self._seen]
        self._seen = len(self._ids)
        return fresh

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _through(self, fresh: str, *, final: bool) -> str:
        """What may go out of the text held back and fresh text."""
        text = self._held + fresh
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            # The one that ends first, as if the text had come character by character.
            return text[: min(found)[1]]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string may begin."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


_LOG = logging.getLogger(__name__)
_CLOSING_S = 0.002
"""What is left of a budget when an answer is cut short, for telling the client."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerSpec:
    """What an answer is to be.

    Attributes:
        prompt: What it is to.
        new_tokens: Most tokens of it.
        shortened: It would have been longer, but for the budget.
        sampling: How tokens are drawn.
        received_s: When the request came in.
        budget_ms: From then to the last token; None without.
        on_infeasible: What to do where no plan keeps it.
        promised: Whether it was let in with the promise to keep it.
        stream: Whether it is sent while it comes.
        include_usage: Whether a stream ends with numbers of tokens.
    """

    prompt: Prompt
    new_tokens: int
    shortened: bool
    sampling: SamplingParams
    received_s: float
    budget_ms: float | None
    on_infeasible: OnInfeasible
    promised: bool
    stream: bool = False
    include_usage: bool = False

    @property
    def deadline_s(self) -> float | None:
        """When the last token is due; None without a budget."""
        return None if self.budget_ms is None else self.received_s + self.budget_ms / 1000.0


class AnswerStream:
    """An answer that comes into being.

    Args:
        wanted: What it is to be.
        text: Makes text of tokens.
        place: In the line; its turn is told by `turn`.
        backend: What runs it.
        metrics: Where its end is counted.
        over: Called once, when it needs its place no longer; the argument says whether it ran to its end.

    Attributes:
        id: Its name.
        created_s: Seconds since 1970.
        finish_reason: Why it ended, in OpenAI's words; None before.
    """

    def __init__(
        self,
        wanted: AnswerSpec,
        *,
        text: StreamingText,
        place: Ticket,
        backend: ServingBackend,
        metrics: ServerMetrics,
        over: Callable[[bool], None],
    ) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created_s = int(time.time())
        self.finish_reason: Literal["stop", "length"] | None = None
        self.wanted = wanted
        self._text = text
        self._place = place
        self._backend = backend
        self._metrics = metrics
        self._over = over
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._refusal: ApiError | None = None
        self._ended = False
        self._truncated = False
        self._plan: Plan | None = None
        self._predicted_ms: tuple[float, float] | None = None
        self._queued_ms = 0.0
        self._first_ms: float | None = None
        self._measured_ms = 0.0
        self._call_off: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Wait for the first token, or for an end without one.

        Raises:
            Refusal: It went wrong.
        """
        await self._begun.wait()
        if self._refusal is not None:
            raise self._refusal

    async def pieces(self) -> AsyncIterator[str]:
        """Its text as it comes, whole characters only.

        Raises:
            Refusal: It went wrong, perhaps after some of the text.
        """
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if self._refusal is not None:
            raise self._refusal

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens; those of the prompt as it ran, or at the highest tier where it did not run."""
        of, made = self.wanted.prompt, self._text.tokens
        prompt = of.tokens if self._plan is None else of.at(self._plan.tier)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def report(self) -> dict[str, Any]:
        """What there is to say about plan, time and budget, once it has ended."""
        wanted, plan = self.wanted, self._plan
        predicted = None
        if self._predicted_ms is not None:
            predicted = {
                name: round(value, 3) for name, value in zip(("p50", "p99"), self._predicted_ms, strict=True)
            }
        return {
            "plan": None if plan is None else {"id": plan.id, **plan.to_dict()},
            "predicted_ms": predicted,
            "measured_ms": round(self._measured_ms, 3),
            "first_token_ms": None if self._first_ms is None else round(self._first_ms, 3),
            "queued_ms": round(self._queued_ms, 3),
            "budget_ms": wanted.budget_ms,
            "budget_met": None if wanted.budget_ms is None else self._measured_ms <= wanted.budget_ms,
            "truncated": self._truncated,
        }

    def turn(self, beside: int) -> None:
        """Its turn has come: run.

        Args:
            beside: How many others run.
        """
        wanted, now = self.wanted, time.perf_counter()
        self._queued_ms = (now - wanted.received_s) * 1000.0
        deadline_s, until_s = wanted.deadline_s, self._place.until_s
        if deadline_s is not None:
            if now >= deadline_s and wanted.on_infeasible != "best_effort":
                self._fail(
                    ApiError(
                        429, "the budget was used up in line; try again", code="overloaded", retry_after_s=1.0
                    )
                )
                return
            until_s = min(until_s, deadline_s)
            if wanted.on_infeasible == "truncate":
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max(deadline_s - _CLOSING_S - now, 0.0), self._out_of_time)
        job = BackendJob(
            id=self.id, prompt=wanted.prompt, max_new_tokens=wanted.new_tokens, sampling=wanted.sampling,
            received_s=wanted.received_s, budget_ms=wanted.budget_ms, until_s=until_s,
            on_infeasible=wanted.on_infeasible, beside=beside,
        )  # fmt: skip
        try:
            self._call_off = self._backend.submit(job, self._take)
        except Exception:
            _LOG.exception("request %s could not be run", self.id)
            self._fail(
                ApiError(500, f"the model failed on this request (id {self.id})", code="engine_failed")
            )

    def cut(self, refusal: ApiError) -> None:
        """End it early, with an error."""
        self._fail(refusal)

    def leave(self) -> None:
        """Nobody reads it any more; nothing is done to one that has ended."""
        self._fail(ApiError(499, "the client went away", code="client_gone"))

    def _take(self, event: Event) -> None:
        if self._ended:
            return
        if isinstance(event, StartedEvent):
            self._plan, self._predicted_ms = event.plan, (event.p50_ms, event.p99_ms)
            self._place.ends_s = self.wanted.received_s + event.p99_ms / 1000.0
        elif isinstance(event, TokensEvent):
            if self._first_ms is None:
                self._first_ms = self._since_ms()
                self._begun.set()
            self._put(self._text.push(event.ids))
            if self._text.stopped:
                self._finish("stop")
        elif isinstance(event, EndedEvent):
            self._finish(event.reason)
        else:
            assert isinstance(event, FailedEvent)
            self._fail(event.refusal)

    def _since_ms(self) -> float:
        return (time.perf_counter() - self.wanted.received_s) * 1000.0

    def _put(self, piece: str) -> None:
        if piece:
            self._pieces.put_nowait(piece)

    def _out_of_time(self) -> None:
        self._finish("truncated")

    def _finish(self, reason: Literal["stop", "length", "truncated"]) -> None:
        if self._ended:
            return
        wanted = self.wanted
        self._measured_ms = self._since_ms()
        self._put(self._text.close())
        self.finish_reason = "stop" if reason == "stop" else "length"
        self._truncated = reason == "truncated" or (reason == "length" and wanted.shortened)
        self._metrics.answered(
            plan=self._plan, prompt_tokens=self.usage["prompt_tokens"], new_tokens=self._text.tokens,
            measured_ms=self._measured_ms, first_ms=self._first_ms, queued_ms=self._queued_ms,
            predicted_ms=self._predicted_ms,
        )  # fmt: skip
        if wanted.promised and wanted.budget_ms is not None:
            self._metrics.promised(kept=self._measured_ms <= wanted.budget_ms)
        self._end(ran=True)

    def _fail(self, refusal: ApiError) -> None:
        if self._ended:
            return
        self._refusal = refusal
        outcome = outcome_of(refusal)
        self._metrics.ended(outcome, refusal.code)
        if self.wanted.promised and outcome not in ("cancelled", "cut"):
            self._metrics.promised(kept=False)
        self._end(ran=False)

    def _end(self, *, ran: bool) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._call_off is not None:
            # One that has ended by itself does not mind.
            self._call_off()
        self._pieces.put_nowait(None)
        self._begun.set()
        self._over(ran)


def outcome_of(refusal: ApiError) -> Outcome:
    """How a request that was refused counts."""
    if refusal.code == "budget_infeasible":
        return "infeasible"
    if refusal.code in ("shutting_down", "starting"):
        return "cut"
    if refusal.code == "client_gone":
        return "cancelled"
    if refusal.status == 429:
        return "shed"
    return "failed" if refusal.status >= 500 else "refused"
