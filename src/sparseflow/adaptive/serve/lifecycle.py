"""Startup, graceful drain on SIGTERM, and shutdown.

After SIGTERM new requests get a 503 with `Retry-After`, and `/ready` reports 503, so that a load balancer
uses other servers. Running requests complete; after `drain_s` seconds the remaining ones are cancelled with
an error. The process then exits with code 0. A second signal cancels immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sparseflow.adaptive.prompts.messages import ApiError
from sparseflow.adaptive.serve.connections import ConnectionLimits, make_protocol, raise_file_limit
from sparseflow.core.checks import check_between, check_non_negative
from sparseflow.core.extras import require
from sparseflow.errors import InputError, RunError

if TYPE_CHECKING:
    from fastapi import FastAPI

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSE_TIMEOUT_S = 5.0
"""Seconds that slow readers have to receive the rest of their response."""
_RETRY_AFTER_S = 2.0
_BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""


class Cancellable(Protocol):
    """A request that can be cancelled."""

    def cancel(self, error: ApiError) -> None: ...


class DrainManager:
    """Accepts requests while the server is open, and tracks the active ones. Belongs to one event loop.

    Attributes:
        state: `"closed"` before startup completes, then `"open"`, then `"draining"` permanently.
    """

    def __init__(self) -> None:
        self.state: Literal["closed", "open", "draining"] = "closed"
        self._active: set[Cancellable] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._forced = asyncio.Event()

    def open(self) -> None:
        """Accept requests; no effect while draining."""
        if self.state == "closed":
            self.state = "open"

    def check(self) -> None:
        """Check that requests are accepted.

        Raises:
            ApiError: 503 if the server is starting or draining.
        """
        if self.state != "open":
            raise _make_unavailable_error(self.state)

    def acquire(self, request: Cancellable) -> None:
        """Register an active request.

        Raises:
            ApiError: 503 if the server is starting or draining.
        """
        self.check()
        self._active.add(request)
        self._empty.clear()

    def release(self, request: Cancellable) -> None:
        """Unregister a request; a second call has no effect."""
        self._active.discard(request)
        if not self._active:
            self._empty.set()

    def force(self) -> None:
        """End the wait of `drain` immediately."""
        self._forced.set()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for active ones.

        Args:
            timeout_s: Time after which the remaining requests are cancelled.

        Returns:
            Number of cancelled requests.
        """
        self.state = "draining"
        waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, self._forced)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        remaining = list(self._active)
        for request in remaining:
            request.cancel(_make_unavailable_error("draining"))
        return len(remaining)


def _make_unavailable_error(state: str) -> ApiError:
    if state == "closed":
        return ApiError(503, "the server is starting; retry", code="starting", retry_after_s=_RETRY_AFTER_S)
    return ApiError(
        503, "the server is shutting down; use another server",
        code="shutting_down", retry_after_s=_RETRY_AFTER_S,
    )  # fmt: skip


class Server:
    """HTTP server. The constructor binds the address; `run` accepts connections.

    Args:
        app: App, or a function that creates it; `run` calls the function, so that a used address is reported
            before an engine is built.
        host: Address to bind.
        port: Port; 0 selects a free one.
        drain_s: Time for running requests after a signal, seconds.
        announce: Called with a line of JSON that contains the URL when the server listens.
        connection_limits: Limits on connections.

    Attributes:
        port: Bound port.

    Raises:
        InputError: The address cannot be bound.
        MissingExtraError: uvicorn or FastAPI is missing.
    """

    def __init__(
        self,
        app: FastAPI | Callable[[], FastAPI],
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        drain_s: float = 30.0,
        announce: Callable[[str], None] | None = None,
        connection_limits: ConnectionLimits | None = None,
    ) -> None:
        self._uvicorn = require("uvicorn", "adaptive")
        require("fastapi", "adaptive")
        from fastapi import FastAPI

        check_non_negative(drain_s=drain_s)
        self._create_app = (lambda: app) if isinstance(app, FastAPI) else app
        self._drain_s = drain_s
        self._announce = announce
        self._connection_limits = connection_limits or ConnectionLimits()
        self._socket = _bind_socket(host, port)
        self.host, self.port = host, self._socket.getsockname()[1]
        self._stop: Callable[[], object] | None = None

    def run(self) -> None:
        """Serve until `stop` or a signal. Callable once.

        Signals are handled in the main thread only; while the app is created they end the process.

        Raises:
            InputError: Another process listens at the address.
            RunError: The app failed to start.
        """
        raise_file_limit(self._connection_limits.max_connections)
        with self._socket:
            app = self._create_app()
            with _describe_bind_errors(self.host, self.port):
                self._socket.listen(_BACKLOG)
            asyncio.run(self._run(app))

    def stop(self) -> None:
        """Drain and stop; a second call cancels the remaining requests. Callable from any thread."""
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._stop()

    async def _run(self, app: FastAPI) -> None:
        loop = asyncio.get_running_loop()
        drain: DrainManager = app.state.service.drain
        server = self._create_uvicorn_server(app)
        drain_task: asyncio.Task[None] | None = None

        async def drain_and_exit() -> None:
            await drain.drain(self._drain_s)
            server.should_exit = True

        def stop() -> None:
            nonlocal drain_task
            if drain_task is None:
                drain_task = asyncio.ensure_future(drain_and_exit())
            else:
                drain.force()

        self._stop = functools.partial(loop.call_soon_threadsafe, stop)
        handles_signals = threading.current_thread() is threading.main_thread()
        if handles_signals:
            for number in _STOP_SIGNALS:
                loop.add_signal_handler(number, stop)
        announce_task = asyncio.create_task(self._announce_when_started(server, app.state.service.model))
        try:
            await server.serve(sockets=[self._socket])
        except SystemExit as error:
            raise RunError("the app failed to start; see the log above") from error
        finally:
            announce_task.cancel()
            if handles_signals:
                for number in _STOP_SIGNALS:
                    loop.remove_signal_handler(number)

    def _create_uvicorn_server(self, app: FastAPI) -> Any:
        uvicorn: Any = self._uvicorn
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="on", ws="none", server_header=False,
            timeout_graceful_shutdown=int(_CLOSE_TIMEOUT_S), http=make_protocol(self._connection_limits),
            timeout_keep_alive=self._connection_limits.keep_alive_s,
        )  # fmt: skip

        # uvicorn's own signal handler drops connections and exits with the signal's code.
        class SignalFreeServer(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        return SignalFreeServer(config)

    async def _announce_when_started(self, server: Any, model: str) -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        announce_listening(self._announce, self.host, self.port, model=model)


def run_server(
    app: FastAPI | Callable[[], FastAPI], *, host: str = "127.0.0.1", port: int = 8000, drain_s: float = 30.0,
    announce: Callable[[str], None] | None = None, connection_limits: ConnectionLimits | None = None,
) -> None:  # fmt: skip
    """Serve an app until SIGTERM or SIGINT. See `Server` for the arguments."""
    Server(
        app, host=host, port=port, drain_s=drain_s, announce=announce, connection_limits=connection_limits
    ).run()


def _bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet, so that early clients are refused."""
    check_between(0, 65535, port=port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot listen at {host!r}: {error}") from error
    try:
        with _describe_bind_errors(host, port):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except InputError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def _describe_bind_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {error.strerror}; use another port, or 0 for a free one"
        ) from error


def format_url(host: str, port: int) -> str:
    """Format the URL of a server; IPv6 addresses get brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def announce_listening(
    announce: Callable[[str], None] | None, host: str, port: int, **fields: object
) -> None:
    """Pass the address of a server as a line of JSON to `announce`; by default print it."""
    line = {"event": "listening", "url": format_url(host, port), "host": host, "port": port, **fields}
    (announce or functools.partial(print, flush=True))(json.dumps({**line, "pid": os.getpid()}))
