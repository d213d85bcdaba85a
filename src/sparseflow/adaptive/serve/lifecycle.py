"""From start to a clean end: a gate that closes before the house is emptied, and the server that listens.

SIGTERM closes the gate: whoever comes gets a 503 with `Retry-After`, and `/ready` says no, so that a balancer
turns to others. Those inside go on to their end; after `drain_s` seconds those that are left are cut, each
with an error that says so. Then the process ends with exit code 0. A second signal cuts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sparseflow.adaptive.prompts.messages import ApiError
from sparseflow.core.extras import require
from sparseflow.errors import InputError, RunError

if TYPE_CHECKING:
    from fastapi import FastAPI

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSING_S = 5.0
"""Seconds that slow readers have to take what is written for them after all else has ended."""
_RETRY_S = 2.0
_WAITING = 2048
"""Connections that may wait to be accepted."""


class Cancellable(Protocol):
    """Something inside that can be ended early."""

    def cut(self, refusal: ApiError) -> None: ...


class DrainManager:
    """Whether requests may come in, and who is inside. Of one event loop.

    Attributes:
        state: `"closed"` until everything is there, then `"open"`, then `"draining"` for good.
    """

    def __init__(self) -> None:
        self.state: Literal["closed", "open", "draining"] = "closed"
        self._inside: set[Cancellable] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._hurry = asyncio.Event()

    def open(self) -> None:
        """Let requests in; a gate that drains stays shut."""
        if self.state == "closed":
            self.state = "open"

    def check(self) -> None:
        """That requests may come in.

        Raises:
            Refusal: 503; not yet, or not any more.
        """
        if self.state != "open":
            raise _closed(self.state)

    def enter(self, one: Cancellable) -> None:
        """Count someone as inside.

        Raises:
            Refusal: As of `check`.
        """
        self.check()
        self._inside.add(one)
        self._empty.clear()

    def leave(self, one: Cancellable) -> None:
        """It has ended; a second time does nothing."""
        self._inside.discard(one)
        if not self._inside:
            self._empty.set()

    def hurry(self) -> None:
        """Let `drain` wait no longer."""
        self._hurry.set()

    async def drain(self, timeout_s: float) -> int:
        """Let nobody in, and wait until all are out.

        Args:
            timeout_s: After this long, those that are left are cut.

        Returns:
            How many were cut.
        """
        self.state = "draining"
        waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, self._hurry)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        left = list(self._inside)
        for one in left:
            one.cut(_closed("draining"))
        return len(left)


def _closed(state: str) -> ApiError:
    if state == "closed":
        return ApiError(503, "the server is starting; try again", code="starting", retry_after_s=_RETRY_S)
    return ApiError(
        503, "the server is shutting down and takes no requests; try again, another will answer",
        code="shutting_down", retry_after_s=_RETRY_S,
    )  # fmt: skip


class Server:
    """An app that listens. The address is taken at once, and heard from when `run` is called.

    Args:
        app: Of `create_app`, or what makes one: `run` calls it, so that minutes of making an engine are not
            spent before an address turns out to be taken.
        host: Address to listen at.
        port: 0 takes a free one.
        drain_s: Seconds that running requests have after a signal.
        announce: Gets the line of JSON that says where the server listens, once it does.

    Attributes:
        port: The real one.

    Raises:
        InputError: The address cannot be listened at.
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
    ) -> None:
        self._uvicorn = require("uvicorn", "adaptive")
        require("fastapi", "adaptive")
        from fastapi import FastAPI

        if not drain_s >= 0.0:
            raise InputError(f"`drain_s` (={drain_s}) must not be negative")
        self._make = (lambda: app) if isinstance(app, FastAPI) else app
        self._drain_s = drain_s
        self._announce = announce or _print
        self._socket = _bound(host, port)
        self.host, self.port = host, self._socket.getsockname()[1]
        self._stop: Callable[[], object] | None = None

    def run(self) -> None:
        """Serve until `stop` or a signal, and return when all is closed; once. Signals are heard in the main
        thread only, and while an app is made they end the process at once.

        Raises:
            InputError: Another process has begun to listen at the address meanwhile.
            RunError: The app could not be started.
        """
        with self._socket:
            app = self._make()
            with _said(self.host, self.port):
                self._socket.listen(_WAITING)
            asyncio.run(self._run(app))

    def stop(self) -> None:
        """Drain and end; a second time hurries. From any thread; nothing happens to one that does not run."""
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._stop()

    async def _run(self, app: FastAPI) -> None:
        loop, gate, running = asyncio.get_running_loop(), app.state.service.gate, self._quiet(app)
        stopping: asyncio.Task[None] | None = None

        async def drained() -> None:
            await gate.drain(self._drain_s)
            running.should_exit = True

        def stop() -> None:
            nonlocal stopping
            if stopping is None:
                stopping = asyncio.ensure_future(drained())
            else:
                gate.hurry()

        self._stop = functools.partial(loop.call_soon_threadsafe, stop)
        hears = threading.current_thread() is threading.main_thread()
        if hears:
            for number in _SIGNALS:
                loop.add_signal_handler(number, stop)
        announcing = asyncio.create_task(self._announced(running, app.state.service.model))
        try:
            await running.serve(sockets=[self._socket])
        except SystemExit as error:
            raise RunError("the app could not be started; the log above says why") from error
        finally:
            announcing.cancel()
            if hears:
                for number in _SIGNALS:
                    loop.remove_signal_handler(number)

    def _quiet(self, app: FastAPI) -> Any:
        uvicorn: Any = self._uvicorn
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="on", ws="none", server_header=False,
            timeout_graceful_shutdown=int(_CLOSING_S),
        )  # fmt: skip

        class Quiet(uvicorn.Server):
            """Leaves signals to us: its own way drops connections at once, and ends with the signal's exit
            code."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        return Quiet(config)

    async def _announced(self, running: Any, model: str) -> None:
        while not running.started:
            await asyncio.sleep(0.01)
        line = {
            "event": "listening",
            "url": f"http://{_in_url(self.host)}:{self.port}",
            "host": self.host,
            "port": self.port,
            "model": model,
            "pid": os.getpid(),
        }
        self._announce(json.dumps(line))


def run_server(
    app: FastAPI | Callable[[], FastAPI], *, host: str = "127.0.0.1", port: int = 8000, drain_s: float = 30.0,
    announce: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Serve an app until SIGTERM or SIGINT; returns when all is closed. Arguments are those of `Server`."""
    Server(app, host=host, port=port, drain_s=drain_s, announce=announce).run()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has an address and does not listen yet: who comes early is turned away."""
    if not 0 <= port <= 65535:
        raise InputError(f"`port` (={port}) must lie between 0 and 65535; 0 takes a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot listen at {host!r}: {error}") from error
    try:
        with _said(host, port):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
    except InputError:
        found.close()
        raise
    found.setblocking(False)
    return found


@contextlib.contextmanager
def _said(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {error.strerror}; name another port, or 0"
        ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _print(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
