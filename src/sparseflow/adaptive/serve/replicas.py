"""Several replicas of a server behind one address, on Ray Serve: each has an engine of its own.

A replica makes its app, and so its model, where it runs. Of two replicas picked at random a request goes to
the one that has fewer. Each keeps its own line and refuses on its own, and a budget counts from when a
replica gets the request: the way through Ray's proxy, a few ms, comes on top. `/metrics`, `/health` and
`/ready` are answered by one replica, too; numbers for Prometheus are labelled with which.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import DeviceError, InputError, MissingExtraError, RunError

if TYPE_CHECKING:
    from fastapi import FastAPI

_NAME = "sparseflow"
_ONGOING = 4096
"""Requests that Ray hands to a replica at a time: more than its line has places, so that it is the line that
refuses."""


_CLOSING_S = 5.0
"""Seconds that a replica has after those that were left have been cut."""


class Replicas:
    """Replicas that serve, until `close`; or use it in a `with` block.

    Args:
        make: Makes the app of one replica, in the replica's process. It travels by pickle; what it imports
            must be there.
        replicas: How many.
        host: Address to listen at.
        port: 0 takes a free one.
        cpus_each: CPUs that a replica takes of its machine.
        gpus_each: GPUs that a replica takes of its machine.
        cluster: Address of a Ray cluster, `"auto"` for the one that this machine belongs to; None starts one
            here.
        drain_s: Seconds that running requests have in the end.

    Attributes:
        url: Where they are.

    Raises:
        InputError: A count is not positive.
        DeviceError: There is no such cluster.
        RunError: The replicas did not start.
        MissingExtraError: Ray Serve is missing.
    """

    def __init__(
        self,
        make: Callable[[], FastAPI],
        *,
        replicas: int,
        host: str = "127.0.0.1",
        port: int = 8000,
        cpus_each: float = 1.0,
        gpus_each: float = 0.0,
        cluster: str | None = None,
        drain_s: float = 30.0,
    ) -> None:
        if replicas < 1 or cpus_each < 0.0 or gpus_each < 0.0 or not drain_s >= 0.0:
            raise InputError(
                f"`replicas` (={replicas}) must be at least 1; `cpus_each` (={cpus_each}), `gpus_each` "
                f"(={gpus_each}) and `drain_s` (={drain_s}) must not be negative"
            )
        ray, self._serve = _ray_serve()
        self._ray = ray
        self._drain_s = drain_s
        self._begun, self._closed = not ray.is_initialized(), False
        try:
            # A cluster of its own needs neither a dashboard nor this process's log.
            how: dict[str, Any] = (
                {"address": cluster} if cluster is not None else {"include_dashboard": False}
            )
            ray.init(ignore_reinit_error=True, log_to_driver=False, **how)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise DeviceError(f"there is no Ray cluster at {cluster!r}: {error}") from error
        self.host, self.port = host, port or _free_port(host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        try:
            self._serve.start(http_options={"host": host, "port": self.port})
            options = {
                "num_replicas": replicas,
                "max_ongoing_requests": _ONGOING,
                "graceful_shutdown_timeout_s": drain_s + _CLOSING_S,
                "ray_actor_options": {"num_cpus": cpus_each, "num_gpus": gpus_each},
            }
            made = self._serve.deployment(_ingress(self._serve, make), name="replica")
            self._deployment = made.options(**options)
            self._run(self._deployment)
        except BaseException as error:
            self._stop()
            if isinstance(error, RuntimeError | ValueError):
                raise RunError(f"the replicas did not start: {error}") from error
            raise

    def __enter__(self) -> Replicas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let nobody in, let running requests end, then stop everything. A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            # Ray's own way is to forget the address at once, and to say 404; a replica that is told says 503.
            self._run(self._deployment.options(user_config={"drain_s": self._drain_s}))
            self._serve.delete(_NAME)
        finally:
            self._stop()

    def _run(self, deployment: Any) -> None:
        self._serve.run(deployment.bind(), name=_NAME, route_prefix="/")

    def _stop(self) -> None:
        self._serve.shutdown()
        if self._begun:
            self._ray.shutdown()


def serve_replicas(
    make: Callable[[], FastAPI],
    *,
    replicas: int,
    announce: Callable[[str], None] | None = None,
    **how: Any,
) -> None:
    """Serve by replicas until SIGTERM or SIGINT; to be called in the main thread.

    Args:
        make: As of `Replicas`.
        replicas: As of `Replicas`.
        announce: Gets the line of JSON that says where they listen.
        how: What else `Replicas` takes.
    """
    over = threading.Event()
    with Replicas(make, replicas=replicas, **how) as running:
        # Only now: Ray sets a handler of its own when it starts, which would end all of it at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: over.set())
        line = {"event": "listening", "url": running.url, "host": running.host, "port": running.port}
        (announce or _print)(json.dumps({**line, "replicas": replicas, "pid": os.getpid()}))
        over.wait()


def _ingress(serve: Any, make: Callable[[], FastAPI]) -> Any:
    """The class of a replica."""
    made: list[FastAPI] = []

    def build() -> FastAPI:
        app = make()
        app.state.service.metrics.replica = serve.get_replica_context().replica_id.unique_id
        made.append(app)
        return app

    @serve.ingress(build)
    class Replica:
        async def reconfigure(self, told: dict[str, float]) -> None:
            """Ray calls this on every replica when its configuration changes, while it runs."""
            self.draining = asyncio.ensure_future(made[0].state.service.gate.drain(told["drain_s"]))

        def check_health(self) -> None:
            """Ray asks this, and replaces a replica for which it raises."""
            if made and not made[0].state.service.backend.alive:
                raise RunError("the engine has stopped")

    return Replica


def _ray_serve() -> tuple[Any, Any]:
    ray = require("ray", "distributed")
    try:
        from ray import serve
    except ImportError as error:
        # Ray without Serve lacks some of what that imports.
        raise MissingExtraError("ray[serve]", "distributed") from error
    return ray, serve


def _free_port(host: str) -> int:
    """One that is free now; Ray takes no 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind((host, 0))
        return tried.getsockname()[1]


def _print(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
