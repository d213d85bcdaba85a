"""Handle of a running request: tokens, result and cancellation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sparseflow.adaptive.engine.requests.request import GenerationRequest, RequestOutput

_LOG = logging.getLogger(__name__)


class RequestHandle:
    """A submitted request. Thread-safe; several readers are allowed.

    Args:
        request: The request.
        wake: Called after `cancel`, to notify the engine.
    """

    def __init__(self, request: GenerationRequest, wake: Callable[[], None] = lambda: None) -> None:
        self.request = request
        self._wake = wake
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._outcome: RequestOutput | Exception | None = None
        self._cancelled = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        with self._changed:
            return tuple(self._tokens)

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self._outcome is not None

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the request; its slot is free after the current step. Does nothing after its end."""
        self._cancelled = True
        self._wake()

    def result(self, timeout_s: float | None = None) -> RequestOutput:
        """Wait for the result.

        Raises:
            TimeoutError: The request did not end within `timeout_s`; it continues.
            RunError: It was rejected or cancelled, or failed.
            InputError: It cannot be run.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._outcome is not None, timeout_s):
                raise TimeoutError(f"request {self.request.id} has not ended after {timeout_s} s")
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call a function on every change, on the engine's thread; immediately if there already is one."""
        with self._changed:
            self._listeners.append(callback)
            new = bool(self._tokens) or self._outcome is not None
        if new:
            self._notify([callback])

    def append_token(self, token: int) -> None:
        """Add a token; called by the engine."""
        with self._changed:
            self._tokens.append(token)
            self._changed.notify_all()
        self._notify(self._listeners)

    def finish(self, ended: RequestOutput | Exception) -> None:
        """End the request; only the first call counts. Called by the engine."""
        with self._changed:
            if self._outcome is not None:
                return
            self._outcome = ended
            self._changed.notify_all()
        self._notify(self._listeners)

    def _notify(self, listeners: list[Callable[[], None]]) -> None:
        for listener in list(listeners):
            try:
                listener()
            except Exception:
                _LOG.exception("a listener of request %s failed", self.request.id)
