"""Limits on HTTP connections: their number, and the time without a request.

uvicorn closes an idle connection only after a response. A connection that never completes the head of a
request would stay open forever, and many of them exhaust the file descriptors of the process.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any

from sparseflow.core.checks import check_at_least, check_positive

_OTHER_FILES = 128
"""File descriptors that a server needs besides its connections."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on the connections of a server.

    Attributes:
        max_connections: Maximum number of connections. A further one closes that which has been without a
            request for the longest time, or is closed itself if all have one.
        head_s: Maximum time from the start of a connection, or from its last response, until a request head
            has arrived.
        keep_alive_s: Maximum time between a response and the first byte of the next request.

    Raises:
        InputError: A limit is not positive.
    """

    max_connections: int = 1024
    head_s: float = 10.0
    keep_alive_s: float = 5.0

    def __post_init__(self) -> None:
        check_at_least(1, max_connections=self.max_connections)
        check_positive(head_s=self.head_s, keep_alive_s=self.keep_alive_s)


def raise_file_limit(max_connections: int) -> None:
    """Allow the process as many open files as its connections need, if the system permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < required:
        limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def make_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Create an HTTP protocol for uvicorn that enforces limits."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol
    # Connections without a request; the first has been so for the longest time.
    idle: dict[Any, asyncio.TimerHandle] = {}

    class LimitedProtocol(base):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._update_idle(limits.head_s)
            if len(self.connections) > limits.max_connections:
                next(iter(idle)).transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self in idle and self._has_request:
                idle.pop(self).cancel()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._update_idle(limits.keep_alive_s + limits.head_s)

        def connection_lost(self, exc: Exception | None) -> None:
            if (timer := idle.pop(self, None)) is not None:
                timer.cancel()
            super().connection_lost(exc)

        @property
        def _has_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _update_idle(self, timeout_s: float) -> None:
            """Start the time limit of a connection without a request."""
            if (timer := idle.pop(self, None)) is not None:
                timer.cancel()
            # The next request may have arrived already.
            if not self._has_request and not self.transport.is_closing():
                idle[self] = self.loop.call_later(timeout_s, self.transport.abort)

    return LimitedProtocol
