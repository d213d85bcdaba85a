"""Several replicas of a server behind one address, on Ray Serve.

Each replica creates its own app and engine in its own process. Ray sends a request to the less loaded of two
random replicas. Each replica queues and refuses requests by itself; a budget counts from the receipt at the
replica, so Ray's proxy adds a few ms. One replica answers `/metrics`, `/health` and `/ready`; metrics have a
`replica` label.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparseflow.adaptive.serve.lifecycle import announce_listening, format_url
from sparseflow.core.checks import check_at_least, check_non_negative
from sparseflow.core.extras import require
from sparseflow.errors import DeviceError, MissingExtraError, RunError

if TYPE_CHECKING:
    from fastapi import FastAPI

_APP_NAME = "sparseflow"
_MAX_ONGOING_REQUESTS = 4096
"""Requests that Ray passes to a replica at a time: more than its queue holds, so that the queue refuses."""
_CLOSE_TIMEOUT_S = 5.0
"""Time for a replica to end after its remaining requests were cancelled, seconds."""


class Replicas:
    """Running replicas; a context manager that closes them.

    Args:
        create_app: Creates the app of one replica, in the replica's process. It is pickled, so its imports
            must be available there.
        replicas: Number of replicas.
        host: Address to bind.
        port: Port; 0 selects a free one.
        cpus_per_replica: CPUs per replica.
        gpus_per_replica: GPUs per replica.
        cluster: Address of a Ray cluster; `"auto"` for this machine's cluster; None starts a local one.
        drain_s: Time for running requests at shutdown, seconds.

    Attributes:
        url: URL of the replicas.

    Raises:
        InputError: A count is out of range.
        DeviceError: The cluster does not exist.
        RunError: The replicas failed to start.
        MissingExtraError: Ray Serve is missing.
    """

    def __init__(
        self,
        create_app: Callable[[], FastAPI],
        *,
        replicas: int,
        host: str = "127.0.0.1",
        port: int = 8000,
        cpus_per_replica: float = 1.0,
        gpus_per_replica: float = 0.0,
        cluster: str | None = None,
        drain_s: float = 30.0,
    ) -> None:
        check_at_least(1, replicas=replicas)
        check_non_negative(
            cpus_per_replica=cpus_per_replica, gpus_per_replica=gpus_per_replica, drain_s=drain_s
        )
        ray, self._serve = _import_ray_serve()
        self._ray = ray
        self._drain_s = drain_s
        self._owns_ray, self._closed = not ray.is_initialized(), False
        try:
            # A local cluster needs no dashboard and no log forwarding.
            init_options: dict[str, Any] = (
                {"address": cluster} if cluster is not None else {"include_dashboard": False}
            )
            ray.init(ignore_reinit_error=True, log_to_driver=False, **init_options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise DeviceError(f"no Ray cluster at {cluster!r}: {error}") from error
        self.host, self.port = host, port or _find_free_port(host)
        self.url = format_url(host, self.port)
        try:
            self._serve.start(http_options={"host": host, "port": self.port})
            options = {
                "num_replicas": replicas,
                "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
                "graceful_shutdown_timeout_s": drain_s + _CLOSE_TIMEOUT_S,
                "ray_actor_options": {"num_cpus": cpus_per_replica, "num_gpus": gpus_per_replica},
            }
            deployment = self._serve.deployment(_make_replica_class(self._serve, create_app), name="replica")
            self._deployment = deployment.options(**options)
            self._deploy(self._deployment)
        except BaseException as error:
            self._shut_down()
            if isinstance(error, RuntimeError | ValueError):
                raise RunError(f"the replicas failed to start: {error}") from error
            raise

    def __enter__(self) -> Replicas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Refuse new requests, wait for running ones, and stop everything. A second call has no effect."""
        if self._closed:
            return
        self._closed = True
        try:
            # Ray would remove the route and answer 404; a draining replica answers 503.
            self._deploy(self._deployment.options(user_config={"drain_s": self._drain_s}))
            self._serve.delete(_APP_NAME)
        finally:
            self._shut_down()

    def _deploy(self, deployment: Any) -> None:
        self._serve.run(deployment.bind(), name=_APP_NAME, route_prefix="/")

    def _shut_down(self) -> None:
        self._serve.shutdown()
        if self._owns_ray:
            self._ray.shutdown()


def serve_replicas(
    create_app: Callable[[], FastAPI],
    *,
    replicas: int,
    host: str = "127.0.0.1",
    port: int = 8000,
    cpus_per_replica: float = 1.0,
    gpus_per_replica: float = 0.0,
    cluster: str | None = None,
    drain_s: float = 30.0,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Must run in the main thread. See `Replicas` for the other arguments.

    Args:
        create_app: Creates the app of one replica.
        replicas: Number of replicas.
        announce: Called with a line of JSON that contains the URL when the replicas listen.
    """
    stopped = threading.Event()
    running = Replicas(
        create_app, replicas=replicas, host=host, port=port, cpus_per_replica=cpus_per_replica,
        gpus_per_replica=gpus_per_replica, cluster=cluster, drain_s=drain_s,
    )  # fmt: skip
    with running:
        # Set after Ray has started: Ray's own handler ends everything immediately.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        announce_listening(announce, running.host, running.port, replicas=replicas)
        stopped.wait()


def _make_replica_class(serve: Any, create_app: Callable[[], FastAPI]) -> Any:
    """Build the Ray Serve class of a replica."""
    apps: list[FastAPI] = []

    def build() -> FastAPI:
        app = create_app()
        app.state.service.metrics.replica = serve.get_replica_context().replica_id.unique_id
        apps.append(app)
        return app

    @serve.ingress(build)
    class Replica:
        async def reconfigure(self, config: dict[str, float]) -> None:
            """Start to drain; Ray calls this when the configuration changes."""
            self.drain_task = asyncio.ensure_future(apps[0].state.service.drain.drain(config["drain_s"]))

        def check_health(self) -> None:
            """Raise if the engine has stopped; Ray then replaces the replica."""
            if apps and not apps[0].state.service.backend.alive:
                raise RunError("the engine has stopped")

    return Replica


def _import_ray_serve() -> tuple[Any, Any]:
    ray = require("ray", "distributed")
    try:
        from ray import serve
    except ImportError as error:
        # Ray is installed without Serve.
        raise MissingExtraError("ray[serve]", "distributed") from error
    return ray, serve


def _find_free_port(host: str) -> int:
    """Return a free port; Ray does not accept 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]
