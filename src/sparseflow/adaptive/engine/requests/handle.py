"""What a request's owner holds while it runs: tokens as they come, the answer, and a way to call it off."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from sparseflow.adaptive.engine.requests.request import GenerationRequest, RequestOutput

_LOG = logging.getLogger(__name__)


class RequestHandle:
    """A request that was handed in. Any thread may use it; several may read it.

    Args:
        request: The request.
        wake: Called after `cancel`, so that the engine looks.
    """

    def __init__(self, request: GenerationRequest, wake: Callable[[], None] = lambda: None) -> None:
        self.request = request
        self._wake = wake
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._ended: RequestOutput | Exception | None = None
        self._cancelled = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those that there are so far."""
        with self._changed:
            return tuple(self._tokens)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._ended is not None

    @property
    def cancelled(self) -> bool:
        """Whether it was called off."""
        return self._cancelled

    def cancel(self) -> None:
        """Call the request off; its slot is free after the step that runs. Does nothing once it is done."""
        self._cancelled = True
        self._wake()

    def result(self, timeout_s: float | None = None) -> RequestOutput:
        """Wait for the answer.

        Raises:
            TimeoutError: It took longer than `timeout_s`; the request goes on.
            RunError: It was refused, cancelled, or failed.
            InputError: It cannot be run as it is.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended is not None, timeout_s):
                raise TimeoutError(f"request {self.request.id} is not done after {timeout_s} s")
        return self._answer()

    def listen(self, callback: Callable[[], None]) -> None:
        """Call something whenever there is something new, on the engine's thread; at once if there is now."""
        with self._changed:
            self._listeners.append(callback)
            new = bool(self._tokens) or self._ended is not None
        if new:
            self._tell([callback])

    def __iter__(self) -> Iterator[int]:
        """Tokens as they come; raises as `result` does when it went wrong."""
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: len(self._tokens) > at or self._ended is not None)
                new = self._tokens[at:]
            yield from new
            at += len(new)
            if not new:
                self._answer()
                return

    async def __aiter__(self) -> AsyncIterator[int]:
        """As `__iter__`, for a coroutine."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            # The loop may be closed by the time that a late token comes.
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.set)

        self.listen(tell)
        at = 0
        while True:
            ended = self.done
            new = self.tokens[at:]
            for token in new:
                yield token
            at += len(new)
            if ended:
                self._answer()
                return
            await news.wait()
            news.clear()

    def put(self, token: int) -> None:
        """Add a token. For the engine."""
        with self._changed:
            self._tokens.append(token)
            self._changed.notify_all()
        self._tell(self._listeners)

    def end(self, ended: RequestOutput | Exception) -> None:
        """Nothing more will come; the first time counts. For the engine."""
        with self._changed:
            if self._ended is not None:
                return
            self._ended = ended
            self._changed.notify_all()
        self._tell(self._listeners)

    def _answer(self) -> RequestOutput:
        assert self._ended is not None
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    def _tell(self, listeners: list[Callable[[], None]]) -> None:
        for listener in list(listeners):
            try:
                listener()
            except Exception:
                _LOG.exception("a listener of request %s failed", self.request.id)
