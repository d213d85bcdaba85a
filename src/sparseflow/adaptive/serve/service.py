"""Service of one model: parses, prepares, admits and starts requests.

Everything runs on one event loop except image decoding and tokenization, which run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import secrets
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.policy.selector import OnInfeasible
from sparseflow.adaptive.prompts.chat import PromptBuilder, no_images
from sparseflow.adaptive.prompts.images import decode
from sparseflow.adaptive.prompts.messages import ApiError, ImagePart, Message, Prompt, RequestLimits, invalid
from sparseflow.adaptive.serve.admission import AdmissionQueue, Ticket
from sparseflow.adaptive.serve.answer import AnswerStream, StreamingText, classify_outcome
from sparseflow.adaptive.serve.backend import BackendJob, ServingBackend, make_stopped_error
from sparseflow.adaptive.serve.lifecycle import DrainManager
from sparseflow.adaptive.serve.metrics import ServerMetrics
from sparseflow.adaptive.serve.protocol import (
    ChatRequest,
    check_size,
    get_max_text_bytes,
    make_length_error,
    parse_request,
)
from sparseflow.core.extras import require
from sparseflow.errors import InputError

_PREPARATION_SAFETY = 1.5
"""Factor on the measured preparation time in the minimum budget reported to clients."""
_PROBE_INTERVAL_S = 2.0
"""Minimum time between two requests that an idle server runs although they are not expected in time."""
_MIN_PROBE_RATIO = 0.25
"""Minimum ratio of budget to expected time of these requests."""
_LARGE_BODY_BYTES = 2**20
"""Size of bodies after which free memory is returned to the system."""
_THREADS_LOCK = threading.Lock()


def release_free_memory() -> None:
    """Return free memory of the C allocator to the system, where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _use_one_torch_thread() -> None:
    """Make PyTorch use one thread for operators that this thread runs; other threads are unaffected.

    Preparation operators are small, and thread teams larger than the number of cores slow down the engine.
    """
    with _THREADS_LOCK:
        num_threads = torch.get_num_threads()
        # The setting applies to this thread and to new threads; another thread restores it for the new ones.
        torch.set_num_threads(1)
        restoring_thread = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
        restoring_thread.start()
        restoring_thread.join()


@dataclass(frozen=True, kw_only=True, eq=False)
class _PreparedRequest:
    request: ChatRequest
    prompt: Prompt
    max_new_tokens: int
    preparation_ms: float
    """Processor time of the preparation, without waiting."""


class Service:
    """Service of one model.

    Args:
        model: Model name that clients request.
        backend: Backend that runs requests.
        prompts: Builds prompts for the backend.
        limits: Request limits.
        temperature: Default temperature. OpenAI's default is 1; 0 is greedy.

    Attributes:
        drain: Accepts requests between startup and shutdown.
        queue: Admission queue.
        metrics: Prometheus metrics.

    Raises:
        InputError: The name is empty, or prompts may be longer than the backend's context.
    """

    def __init__(
        self,
        model: str,
        backend: ServingBackend,
        prompts: PromptBuilder,
        *,
        limits: RequestLimits | None = None,
        temperature: float = 1.0,
    ) -> None:
        if not model:
            raise InputError("`model` must not be empty")
        if prompts.context > backend.context:
            raise InputError(
                f"the context of `prompts` (={prompts.context}) exceeds that of the backend "
                f"(={backend.context})"
            )
        SamplingParams(temperature=temperature)
        self.model = model
        self.created_s = int(time.time())
        self.backend = backend
        self.prompts = prompts
        self.limits = limits or RequestLimits()
        self.drain = DrainManager()
        self.queue = AdmissionQueue(slots=backend.slots, max_queued=self.limits.max_queued)
        self.metrics = ServerMetrics(self.queue)
        self._temperature = temperature
        self._probed_s = -math.inf
        self._held_bytes = 0
        self._max_text_chars = self.limits.text_chars or prompts.max_text_chars
        self._answers: dict[Ticket, AnswerStream] = {}
        self._threads = ThreadPoolExecutor(
            self.limits.prepare_threads, thread_name_prefix="prepare", initializer=_use_one_torch_thread
        )

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.drain.state == "open" and self.backend.alive

    def check_model(self, model: str) -> None:
        """Check that a model is the served one.

        Raises:
            ApiError: 404 for another model.
        """
        if model != self.model:
            raise ApiError(
                404, f"unknown model {model[:100]!r}; available: {self.model!r}",
                code="model_not_found", param="model",
            )  # fmt: skip

    async def open(self) -> None:
        """Warm up and accept requests."""
        loop, barrier = asyncio.get_running_loop(), threading.Barrier(self.limits.prepare_threads)
        # All threads start together: a thread started during `_use_one_torch_thread` of another inherits 1.
        tasks = [
            loop.run_in_executor(self._threads, barrier.wait) for _ in range(self.limits.prepare_threads)
        ]
        await asyncio.gather(*tasks)
        await loop.run_in_executor(self._threads, self._warm)
        self.drain.open()

    async def close(self) -> None:
        """Release all resources when nothing runs."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self.backend.close)

    async def submit(
        self,
        read_body: Callable[[], Awaitable[bytes | bytearray]],
        headers: Mapping[str, str],
        received_s: float,
    ) -> AnswerStream:
        """Prepare and admit a request.

        Args:
            read_body: Reads the request body.
            headers: HTTP headers by lower-case name.
            received_s: Receipt time by `time.perf_counter`; the budget counts from it.

        Returns:
            The queued answer. The caller must call `disconnect` after reading it.

        Raises:
            ApiError: The request is refused.
        """
        ticket: Ticket | None = None
        try:
            self.drain.check()
            if not self.backend.alive:
                raise make_stopped_error()
            body = await self._receive(read_body)
            # Reserved after the body has arrived, so that slow clients take no places.
            ticket = self.queue.reserve()
            answer = self._admit(await self._prepare(body, headers), ticket, received_s)
        except BaseException as error:
            if ticket is not None:
                self.queue.release(ticket)
            if isinstance(error, ApiError):
                self.metrics.count_end(classify_outcome(error), error.code)
            elif isinstance(error, asyncio.CancelledError):
                self.metrics.count_end("cancelled", "client_gone")
            elif isinstance(error, Exception):
                self.metrics.count_end("failed", "internal_error")
            raise
        self._start_queued()
        return answer

    def _warm(self) -> None:
        # A template that refuses this conversation is compiled as well.
        with contextlib.suppress(ApiError):
            message = Message.model_validate({"role": "user", "content": "Hello"})
            self.backend.min_service_ms(self.prompts.prompt([message], []), 1, None)
        if self.prompts.takes_images:
            require("PIL.Image", "adaptive").init()

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a body. Without images it is what text can need, with escapes and other fields."""
        if self.prompts.takes_images:
            return self.limits.body_bytes
        return min(self.limits.body_bytes, get_max_text_bytes(self._max_text_chars))

    def hold_body(self, num_bytes: int) -> None:
        """Count received bytes until `release_body`.

        Raises:
            ApiError: 429 if the requests in memory are too large together.
        """
        self._held_bytes += num_bytes
        if self._held_bytes > self.limits.total_body_bytes:
            raise ApiError(
                429, "the server is receiving too much data; retry later",
                code="overloaded", retry_after_s=1.0,
            )  # fmt: skip

    def release_body(self, num_bytes: int) -> None:
        """Count bytes as released."""
        self._held_bytes -= num_bytes

    async def _receive(self, read: Callable[[], Awaitable[bytes | bytearray]]) -> bytes | bytearray:
        try:
            async with asyncio.timeout(self.limits.body_s):
                return await read()
        except TimeoutError as error:
            raise ApiError(
                408,
                f"the request body did not arrive within {self.limits.body_s:g} s",
                code="request_timeout",
            ) from error

    async def _prepare(self, body: bytes | bytearray, headers: Mapping[str, str]) -> _PreparedRequest:
        abandoned = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._prepare_sync, body, headers, abandoned)
        finally:
            # A cancelled request that waits for a thread never starts, and a started one ends soon.
            abandoned.set()
            if len(body) > _LARGE_BODY_BYTES:
                loop.run_in_executor(None, release_free_memory)

    def _prepare_sync(
        self,
        body: bytes | bytearray,
        headers: Mapping[str, str],
        abandoned: threading.Event | None = None,
    ) -> _PreparedRequest:
        """Build a prompt from the request body, in a thread; `abandoned` is set if nobody waits for it."""
        start_s = time.thread_time()

        def check_awaited() -> None:
            if abandoned is not None and abandoned.is_set():
                raise ApiError(499, "the client disconnected", code="client_gone")

        check_awaited()
        check_size(body, self.limits, max_text_chars=self._max_text_chars)
        request = parse_request(body, headers, self.limits)
        self.check_model(request.model)
        num_chars = sum(
            len(part.text) for message in request.messages for part in message.content if part.type == "text"
        )
        if num_chars > self._max_text_chars:
            raise make_length_error(f"the messages have {num_chars} characters of text", self._max_text_chars)
        if (request.new_tokens or 0) > self.limits.max_new_tokens:
            raise invalid(
                f"max_completion_tokens (={request.new_tokens}) must be at most {self.limits.max_new_tokens}",
                "max_completion_tokens",
            )
        image_urls = [
            (f"messages.{message_index}.content.{part_index}", part.image_url.url)
            for message_index, message in enumerate(request.messages)
            for part_index, part in enumerate(message.content)
            if isinstance(part, ImagePart)
        ]
        if image_urls and not self.prompts.takes_images:
            # Refused before the images are decoded.
            raise no_images(image_urls[0][0])
        if len(image_urls) > self.limits.images:
            raise invalid(
                f"the request has {len(image_urls)} images; the maximum is {self.limits.images}", "messages"
            )
        images = []
        for param, url in image_urls:
            check_awaited()
            images.append(decode(url, self.limits, param))
        check_awaited()
        prompt = self.prompts.prompt(request.messages, images, request.new_tokens or 1)
        return _PreparedRequest(
            request=request,
            prompt=prompt,
            max_new_tokens=request.new_tokens or self._default_new_tokens(request, prompt),
            preparation_ms=(time.thread_time() - start_s) * 1000.0,
        )

    def _default_new_tokens(self, request: ChatRequest, prompt: Prompt) -> int:
        """Return the answer length of a request without one; it leaves the highest tier possible.

        A budget covers all tokens of the answer, so a request with a budget gets at most `limits.new_tokens`.
        """
        has_budget = request.latency_budget_ms is not None and request.on_infeasible != "truncate"
        limit = self.limits.new_tokens if has_budget else self.limits.max_new_tokens
        return min(limit, self.prompts.default_answer_length(prompt))

    def _admit(self, prepared: _PreparedRequest, ticket: Ticket, received_s: float) -> AnswerStream:
        request, prompt, new_tokens = prepared.request, prepared.prompt, prepared.max_new_tokens
        budget_ms, mode = request.latency_budget_ms, request.on_infeasible or "reject"
        deadline_s = math.inf
        if budget_ms is not None:
            if mode == "truncate":
                new_tokens = self._count_fitting_tokens(prompt, new_tokens, received_s + budget_ms / 1000.0)
            if self._is_feasible(prepared, new_tokens, budget_ms, mode):
                deadline_s = received_s + budget_ms / 1000.0
        # An answer without a requested length is rarely as long as the context allows.
        expected_tokens = new_tokens if request.new_tokens else min(new_tokens, self.limits.new_tokens)
        median_ms, service_ms = self.backend.min_service_ms(prompt, expected_tokens, self._num_concurrent)
        try:
            self.queue.enqueue(ticket, min_service_ms=service_ms, median_ms=median_ms, deadline_s=deadline_s)
        except ApiError:
            if mode != "best_effort":
                raise
            self.queue.enqueue(ticket, min_service_ms=service_ms, median_ms=median_ms)
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**63
        job = BackendJob(
            id=f"chatcmpl-{uuid.uuid4().hex}", prompt=prompt, max_new_tokens=new_tokens,
            expected_tokens=expected_tokens,
            sampling=SamplingParams(
                temperature=self._temperature if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p, seed=seed,
            ),
            received_s=received_s, budget_ms=budget_ms, on_infeasible=mode,
        )  # fmt: skip
        answer = AnswerStream(
            job=job,
            shortened=new_tokens < prepared.max_new_tokens,
            has_guarantee=ticket.guaranteed,
            stream=bool(request.stream),
            include_usage=request.include_usage,
            text=StreamingText(self.prompts.tokenizer, request.stops),
            ticket=ticket,
            backend=self.backend,
            metrics=self.metrics,
            on_end=lambda completed: self._handle_end(ticket, completed),
        )
        self.drain.acquire(answer)
        self._answers[ticket] = answer
        return answer

    @property
    def _num_concurrent(self) -> int | None:
        """Number of other running requests, for a forecast; None if the engine is idle."""
        return None if self.queue.idle else min(self.queue.running, self.backend.slots - 1)

    def _is_feasible(
        self, prepared: _PreparedRequest, new_tokens: int, budget_ms: float, mode: OnInfeasible
    ) -> bool:
        """Return whether the median of an idle server meets a budget; with "best_effort" it need not.

        Predictions that are too high would refuse every request and never be corrected, so an idle server
        runs a request from time to time although it is not expected in time.

        Raises:
            ApiError: 422 with the smallest budget that is guaranteed on an idle server.
        """
        service = self.backend.min_service_ms(prepared.prompt, new_tokens, None)
        median_ms = service.p50 + prepared.preparation_ms
        if median_ms <= budget_ms:
            return True
        if mode == "best_effort" or self._take_probe(budget_ms / median_ms):
            return False
        min_budget_ms = math.ceil(self._min_idle_ms(prepared, new_tokens))
        raise ApiError(
            422,
            f"no plan meets a budget of {budget_ms:g} ms; the minimum for this request with "
            f"{new_tokens} new tokens is {min_budget_ms} ms. Use that, or on_infeasible=best_effort"
            + (" or truncate" if mode == "reject" else ""),
            code="budget_infeasible", param="latency_budget_ms",
            more={"least_feasible_ms": min_budget_ms},
        )  # fmt: skip

    def _min_idle_ms(self, prepared: _PreparedRequest, new_tokens: int) -> float:
        """Return the smallest budget that an idle server guarantees."""
        service = self.backend.min_service_ms(prepared.prompt, new_tokens, None)
        return service.p99 * self.queue.p99_correction + _PREPARATION_SAFETY * prepared.preparation_ms

    def _take_probe(self, ratio: float) -> bool:
        """Return whether an idle server shall run a request with this ratio of budget to expected time."""
        now_s = time.perf_counter()
        if ratio < _MIN_PROBE_RATIO or not self.queue.idle or now_s - self._probed_s < _PROBE_INTERVAL_S:
            return False
        self._probed_s = now_s
        return True

    def _count_fitting_tokens(self, prompt: Prompt, max_new_tokens: int, deadline_s: float) -> int:
        """Return the number of new tokens that fit into the budget after the queueing time; at least 1."""
        remaining_ms = (deadline_s - time.perf_counter()) * 1000.0 - self.queue.estimate_wait_ms(deadline_s)
        num_concurrent = self._num_concurrent
        low, high = 1, max_new_tokens
        while low < high:
            middle = (low + high + 1) // 2
            service_ms = self.backend.min_service_ms(prompt, middle, num_concurrent).p99
            fits = service_ms * self.queue.p99_correction <= remaining_ms
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _handle_end(self, ticket: Ticket, completed: bool) -> None:
        answer = self._answers.pop(ticket)
        self.queue.release(ticket, completed=completed)
        self.drain.release(answer)
        self._start_queued()

    def _start_queued(self) -> None:
        """Start queued requests while slots are free."""
        while (ticket := self.queue.start_next()) is not None:
            self._answers[ticket].start(self.queue.running - 1, contended=self.queue.waiting > 0)
