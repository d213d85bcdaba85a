"""The way of a request into the house: read, prepared, and let in with a promise – or refused.

Everything runs on one event loop, but for decoding and tokenising, which threads do.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.prompts.chat import PromptBuilder, no_images
from sparseflow.adaptive.prompts.images import decode
from sparseflow.adaptive.prompts.messages import ApiError, ImagePart, Message, Prompt, RequestLimits, invalid
from sparseflow.adaptive.serve.admission import AdmissionQueue, Ticket
from sparseflow.adaptive.serve.answer import AnswerSpec, AnswerStream, StreamingText, outcome_of
from sparseflow.adaptive.serve.backend import ServingBackend
from sparseflow.adaptive.serve.lifecycle import DrainManager
from sparseflow.adaptive.serve.metrics import ServerMetrics
from sparseflow.adaptive.serve.protocol import ChatRequest, parse
from sparseflow.core.extras import require
from sparseflow.errors import InputError

_SLACK = 1.5
"""What reading and preparing took, times this, is in the least budget that a client is told: next time it may
take a little longer."""


_ALONE = threading.Lock()


def _compute_alone() -> None:
    """Have PyTorch compute in this thread alone, for good; other threads go on as they did.

    What a prompt asks for is small, and a team of threads would only wait for each other. With more threads
    in teams than there are cores all of them, the engine's too, sleep where they would have looked out.
    """
    with _ALONE:
        count = torch.get_num_threads()
        # It counts for this thread and for those that have not asked yet; they are told the old number again.
        torch.set_num_threads(1)
        other = threading.Thread(target=torch.set_num_threads, args=(count,))
        other.start()
        other.join()


@dataclass(frozen=True, kw_only=True, eq=False)
class _PreparedRequest:
    request: ChatRequest
    prompt: Prompt
    new_tokens: int
    own_ms: float
    """Of preparing itself: processor time, without waits for a thread or for others in this process."""


class Service:
    """A model that answers requests.

    Args:
        model: The name that clients ask for.
        backend: What runs requests.
        prompts: Makes prompts for it.
        limits: What is taken.
        temperature: Of requests that do not say. OpenAI's is 1; 0 takes the most probable token.

    Attributes:
        gate: Shut until the app has started, and from the beginning of its end.
        line: Who waits and runs.
        metrics: For Prometheus.

    Raises:
        InputError: The name is empty, or prompts may be longer than the backend takes.
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
            raise InputError("`model` must be the name that clients ask for, not an empty one")
        if prompts.context > backend.context:
            raise InputError(
                f"prompts of {prompts.context} tokens are more than the {backend.context} of the backend; "
                "use its context"
            )
        SamplingParams(temperature=temperature)
        self.model = model
        self.created_s = int(time.time())
        self.backend = backend
        self.prompts = prompts
        self.limits = limits or RequestLimits()
        self.gate = DrainManager()
        self.line = AdmissionQueue(slots=backend.slots, places=self.limits.places)
        self.metrics = ServerMetrics(self.line)
        self._temperature = temperature
        self._answers: dict[Ticket, AnswerStream] = {}
        self._threads = ThreadPoolExecutor(
            self.limits.preparing, thread_name_prefix="prepare", initializer=_compute_alone
        )

    @property
    def ready(self) -> bool:
        """Whether requests are let in."""
        return self.gate.state == "open" and self.backend.alive

    def check_model(self, model: str) -> None:
        """That a model is the one that is served.

        Raises:
            Refusal: 404; it is another.
        """
        if model != self.model:
            raise ApiError(
                404, f"there is no model {model[:100]!r} here; ask for {self.model!r}",
                code="model_not_found", param="model",
            )  # fmt: skip

    async def open(self) -> None:
        """Let requests in, once what the first one would wait for has been done."""
        loop, together = asyncio.get_running_loop(), threading.Barrier(self.limits.preparing)
        # All begin now: while one does, others that begin could take its number of threads for theirs.
        begun = [loop.run_in_executor(self._threads, together.wait) for _ in range(self.limits.preparing)]
        await asyncio.gather(*begun)
        await loop.run_in_executor(self._threads, self._warm)
        self.gate.open()

    async def close(self) -> None:
        """Give everything back, once nothing runs any more."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self.backend.close)

    async def answer(
        self, read: Callable[[], Awaitable[bytes]], headers: Mapping[str, str], received_s: float
    ) -> AnswerStream:
        """Let a request in.

        Args:
            read: Gives its body.
            headers: Of HTTP, by lower-case names.
            received_s: When it came, by `time.perf_counter`; its budget counts from then.

        Returns:
            Its answer, in line; `leave` it when nobody reads it any more.

        Raises:
            Refusal: It was not let in.
        """
        place: Ticket | None = None
        try:
            self.gate.check()
            if not self.backend.alive:
                raise ApiError(
                    503,
                    "the engine has stopped; try another server",
                    code="engine_stopped",
                    retry_after_s=5.0,
                )
            # Before the body is read, so that many large ones do not add up.
            place = self.line.enter()
            answer = self._let_in(await self._prepare(read, headers), place, received_s)
        except BaseException as error:
            if place is not None:
                self.line.leave(place)
            if isinstance(error, ApiError):
                self.metrics.ended(outcome_of(error), error.code)
            elif isinstance(error, Exception):
                self.metrics.ended("failed", "internal_error")
            raise
        self._pump()
        return answer

    def _warm(self) -> None:
        # A template may refuse such a conversation; it has been compiled then, too.
        with contextlib.suppress(ApiError):
            message = Message.model_validate({"role": "user", "content": "Hello"})
            self.backend.least_ms(self.prompts.prompt([message], []), 1, None)
        if self.prompts.takes_images:
            require("PIL.Image", "adaptive").init()

    async def _prepare(
        self, read: Callable[[], Awaitable[bytes]], headers: Mapping[str, str]
    ) -> _PreparedRequest:
        try:
            async with asyncio.timeout(self.limits.body_s):
                body = await read()
        except TimeoutError as error:
            raise ApiError(
                408, f"the request did not come in within {self.limits.body_s:g} s", code="request_timeout"
            ) from error
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._prepared, body, headers)

    def _prepared(self, body: bytes, headers: Mapping[str, str]) -> _PreparedRequest:
        """In a thread: from bytes to a prompt."""
        began_s = time.thread_time()
        request = parse(body, headers)
        self.check_model(request.model)
        new_tokens = request.new_tokens or self.limits.new_tokens
        if new_tokens > self.limits.most_new_tokens:
            raise invalid(
                f"max_completion_tokens (={new_tokens}) must be at most {self.limits.most_new_tokens}",
                "max_completion_tokens",
            )
        parts = [
            (f"messages.{at}.content.{place}", part.image_url.url)
            for at, message in enumerate(request.messages)
            for place, part in enumerate(message.content)
            if isinstance(part, ImagePart)
        ]
        if parts and not self.prompts.takes_images:
            # Before they are decoded.
            raise no_images(parts[0][0])
        if len(parts) > self.limits.images:
            raise invalid(
                f"the request has {len(parts)} images, and {self.limits.images} are the most", "messages"
            )
        pictures = [decode(url, self.limits, param) for param, url in parts]
        wanted = new_tokens if request.new_tokens else 1
        prompt = self.prompts.prompt(request.messages, pictures, wanted)
        return _PreparedRequest(
            request=request, prompt=prompt, new_tokens=min(new_tokens, self.prompts.room(prompt)),
            own_ms=(time.thread_time() - began_s) * 1000.0,
        )  # fmt: skip

    def _let_in(self, prepared: _PreparedRequest, place: Ticket, received_s: float) -> AnswerStream:
        request, prompt, new_tokens = prepared.request, prepared.prompt, prepared.new_tokens
        budget_ms, mode = request.latency_budget_ms, request.on_infeasible or "reject"
        promised, deadline_s = False, math.inf
        if budget_ms is not None:
            deadline_s = received_s + budget_ms / 1000.0
            if mode == "truncate":
                new_tokens = self._fitting(prompt, new_tokens, deadline_s)
            idle_ms = self._idle_ms(prepared, new_tokens)
            promised = idle_ms <= budget_ms
            if not promised and mode != "best_effort":
                least_ms = math.ceil(idle_ms)
                raise ApiError(
                    422,
                    f"no plan answers within {budget_ms:g} ms; {least_ms} ms is the least for this request "
                    f"with {new_tokens} new tokens. Give that, or on_infeasible best_effort"
                    + (" or truncate" if mode == "reject" else ""),
                    code="budget_infeasible", param="latency_budget_ms", more={"least_feasible_ms": least_ms},
                )  # fmt: skip
        least_ms = self.backend.least_ms(prompt, new_tokens, min(self.line.running, self.backend.slots - 1))
        try:
            self.line.join(place, least_ms=least_ms, deadline_s=deadline_s if promised else math.inf)
        except ApiError:
            if mode != "best_effort":
                raise
            promised = False
            self.line.join(place, least_ms=least_ms)
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**63
        wanted = AnswerSpec(
            prompt=prompt, new_tokens=new_tokens, shortened=new_tokens < prepared.new_tokens,
            sampling=SamplingParams(
                temperature=self._temperature if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p, seed=seed,
            ),
            received_s=received_s, budget_ms=budget_ms, on_infeasible=mode, promised=promised,
            stream=bool(request.stream), include_usage=request.include_usage,
        )  # fmt: skip
        answer = AnswerStream(
            wanted,
            text=StreamingText(self.prompts.tokenizer, request.stops),
            place=place,
            backend=self.backend,
            metrics=self.metrics,
            over=lambda ran: self._over(place, ran),
        )
        self.gate.enter(answer)
        self._answers[place] = answer
        return answer

    def _idle_ms(self, prepared: _PreparedRequest, new_tokens: int) -> float:
        """The least budget that could be kept if nobody else were here: others are no fault of a request, and
        may leave."""
        least_ms = self.backend.least_ms(prepared.prompt, new_tokens, None)
        return least_ms * self.line.stretch + _SLACK * prepared.own_ms

    def _fitting(self, prompt: Prompt, new_tokens: int, deadline_s: float) -> int:
        """How many new tokens fit into what is left after the line; 1 where none do."""
        left_ms = (deadline_s - time.perf_counter()) * 1000.0 - self.line.wait_ms(deadline_s)
        beside = min(self.line.running, self.backend.slots - 1)
        low, high = 1, new_tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.backend.least_ms(prompt, middle, beside) * self.line.stretch <= left_ms
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _over(self, place: Ticket, ran: bool) -> None:
        answer = self._answers.pop(place)
        self.line.leave(place, ended=ran)
        self.gate.leave(answer)
        self._pump()

    def _pump(self) -> None:
        """Run those whose turn it is."""
        while (place := self.line.next()) is not None:
            self._answers[place].turn(self.line.running - 1)
